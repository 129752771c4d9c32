/* What groups with enable_mask have besides: words behind the sections of the window and behind the group's scratch. They lie
 * behind everything else so that groups without masks have neither them nor other arguments. Who is left out, signs of life and meetings are
 * the group's, so they lie in its first window whichever slot an operation is on; what belongs to a running operation is each slot's.
 *
 * First window of a rank, from epWindowLayout.bytes on (peers store into it)
 *
 *   beats   u32 [R]     changes while peer r waits in an operation: a sign that it lives
 *   told    u32 [R]     epoch in which peer r masked this rank, plus one
 *   acks    u32 [R]     number of this rank's meeting that peer r has answered
 *   views   u64 [R]     (number of this rank's meeting << 32 | what peer r made of it, see mask_meet.h)
 *   calls   u64 [R][4]  peer r's meeting: (its number << 32 | kind), (| epoch), (| updateGen), (| the
 *                       largest stageGen of its slots)
 *
 * Scratch, from epScratchLayout.bytes on
 *
 *   state   epMaskState
 *   masked  u32 [R]     1: rank r is masked
 *   left    u32 [R]     low latency: the same, as it was when the running operation began
 *   windows u64 [R]     the first windows of all ranks
 *   slots   [EP_SLOTS], slotStride bytes each
 *     state   epMaskSlot
 *     lost    u32 [R]   low latency: generation of the last operation in which rows of r did not come
 *     counts  u32 [R][L + 1] low latency: of the running dispatch, as in the window, of the sources that take part
 *
 * Scratch of several scale-up domains, behind that
 *
 *   state   epRailState
 *   came    u32 [2][O]  generation of the last update in which the rank of this index in domain o took part: its decisions, its
 *                       replies
 *   beats   u32 [O]     signs of life that this rank has given there
 *   told    u32 [O]     what it has brought its signal TOLD there to
 *
 * Signals of the group's first network, behind those of hybrid_layout.h, each by sending domain, context 0: BEAT counts signs of life; TOLD is
 * a word that is brought to a value: the epoch in which the sender masked this rank, plus one; LEAVE gets 1 << 32, and the beats ever
 * given, when the sender is about to destroy the group.
 */
#ifndef EP_DEVICE_MASK_LAYOUT_H_
#define EP_DEVICE_MASK_LAYOUT_H_

#include "abi.h"

#define EP_MEET_WORDS 4u

typedef struct epMaskState {
  uint32_t epoch;     /* re-admissions that this rank has been part of, or higher where a peer's was */
  uint32_t meetings;  /* of this rank */
  uint32_t beatSlice; /* slice of time of the last sign of life */
  uint32_t noting;    /* taken by the thread that writes the error record */
} epMaskState;

typedef struct epMaskSlot {
  uint32_t verdict;  /* last update or operation whose sources have been settled */
  uint32_t finished; /* low latency: blocks of the running operation, or of its part, that have ended */
} epMaskSlot;

typedef struct epMaskWindow {
  uint64_t beats, told, acks, views, calls, bytes; /* from the start of the window */
} epMaskWindow;

typedef struct epMaskScratch {
  uint64_t state, masked, left, windows, slots, bytes; /* from the start of the scratch */
  uint64_t lost, counts, slotStride;                   /* from the start of a slot */
} epMaskScratch;

EP_HD epMaskWindow epMaskWindowOf(uint64_t from, uint32_t ranks) {
  epMaskWindow w;
  uint64_t at = epAlignUp(from, EP_SECTION_ALIGN);
  w.beats = epTake(&at, 4ull * ranks);
  w.told = epTake(&at, 4ull * ranks);
  w.acks = epTake(&at, 4ull * ranks);
  w.views = epTake(&at, 8ull * ranks);
  w.calls = epTake(&at, 8ull * EP_MEET_WORDS * ranks);
  w.bytes = at;
  return w;
}

EP_HD epMaskScratch epMaskScratchOf(uint64_t from, uint32_t ranks, uint32_t experts) {
  epMaskScratch s;
  uint64_t at = epAlignUp(from, EP_SECTION_ALIGN), inSlot = 0;
  s.state = epTake(&at, sizeof(epMaskState));
  s.masked = epTake(&at, 4ull * ranks);
  s.left = epTake(&at, 4ull * ranks);
  s.windows = epTake(&at, 8ull * ranks);
  epTake(&inSlot, sizeof(epMaskSlot));
  s.lost = epTake(&inSlot, 4ull * ranks);
  s.counts = epTake(&inSlot, 4ull * (ranks + experts));
  s.slotStride = inSlot;
  s.slots = epTake(&at, EP_SLOTS * inSlot);
  s.bytes = at;
  return s;
}

/* In the flag of a source that another rank brings: it did not come. */
#define EP_LOST EP_DIRECT

typedef struct epRailState {
  uint64_t comm, window; /* an epGin: of the group's first network */
  uint32_t signals;      /* the first of those above */
  uint32_t verdict;      /* last update whose sources from other domains have been settled */
} epRailState;

typedef struct epRailMasks {
  uint64_t state, came, beats, told, bytes; /* from the start of the scratch */
} epRailMasks;

EP_HD epRailMasks epRailMasksOf(uint64_t from, uint32_t domains) {
  epRailMasks m;
  uint64_t at = epAlignUp(from, EP_SECTION_ALIGN);
  m.state = epTake(&at, sizeof(epRailState));
  m.came = epTake(&at, 8ull * domains);
  m.beats = epTake(&at, 4ull * domains);
  m.told = epTake(&at, 4ull * domains);
  m.bytes = at;
  return m;
}

enum { EP_RAIL_BEAT = 0, EP_RAIL_TOLD, EP_RAIL_LEAVE, EP_RAIL_KINDS };
EP_HD uint32_t epRailSignal(uint32_t first, uint32_t domains, uint32_t kind, uint32_t domain) {
  return first + kind * domains + domain;
}

enum { EP_MASK_QUERY = 0, EP_MASK_SET, EP_MASK_CLEAN, EP_MASK_LEAVE }; /* what a launch of the mask kernel does */

/* What a re-admission came to, in host-visible memory. */
typedef struct epMaskResult {
  uint32_t epoch, updateGen;
} epMaskResult;

typedef struct epMaskArgs {
  epGroupArgs group;
  uint32_t op;                       /* EP_MASK_* */
  uint32_t lowLatency;               /* clean: windows have no credits but units, to be cleared: */
  uint64_t units, halfBytes;         /* where the two halves of the stage begin, bytes of one */
  int32_t *out;                      /* query: [R] */
  epMaskResult *result;              /* clean */
  uint32_t keep[EP_MAX_RANKS / 32];  /* set: a bit for each rank that is not masked */
  uint32_t slots;                    /* clean: of the group that have a window, */
  uint8_t *const *windows[EP_SLOTS]; /* and those, [R] each */
} epMaskArgs;

/* Shared memory: the verdict word, what came of each rank, and what its call said. */
EP_HD uint32_t epMaskSmem(uint32_t ranks) { return EP_VERDICT_BYTES + 16 * ranks; }

#endif
