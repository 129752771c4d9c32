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
 *   heard   u32 [R]     several domains: epoch in which the rank of r's index in this domain last admitted r, of another
 *   met     u32 [R]     epoch of which peer r of this domain has told all that
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
 *   said    u64 [EP_RAIL_KINDS][O] what this rank has brought each of its signals there to
 *   sent    u64 [EP_SLOTS][O][3 + C]  all that it ever added to each of its signals META, REPLY, CREDIT, ROWS there; low latency:
 *                       MESSAGE, none, GREET, ROWS
 *
 * Signals of the group's first network, behind those that all its networks have, each by sending domain, context 0. BEAT counts signs of life. The others are
 * words, brought to a value by adding what is missing: TOLD to the epoch in which the sender masked this rank, plus one; LEAVE to
 * (1 << 32 | beats ever given) when the sender is about to destroy the group; in a meeting EPOCH, UPDATE and STAGE to the sender's
 * counters, CALL to (its number << 32 | the sum of those), ACK to (its number << 32 | that of the meeting that it answers), and then with EP_MEET_LANDED.
 */
#ifndef EP_DEVICE_MASK_LAYOUT_H_
#define EP_DEVICE_MASK_LAYOUT_H_

#include "abi.h"

#define EP_MEET_WORDS 4u
#define EP_MEET_LANDED 0x80000000u /* all that the answered rank ever put has come */

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
  uint64_t beats, told, acks, views, calls, heard, met, bytes; /* from the start of the window */
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
  w.heard = epTake(&at, 4ull * ranks);
  w.met = epTake(&at, 4ull * ranks);
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
  uint64_t state, came, said, sent, bytes; /* from the start of the scratch */
} epRailMasks;

enum {
  EP_RAIL_BEAT = 0,
  EP_RAIL_TOLD,
  EP_RAIL_LEAVE,
  EP_RAIL_EPOCH,
  EP_RAIL_UPDATE,
  EP_RAIL_STAGE,
  EP_RAIL_CALL,
  EP_RAIL_ACK,
  EP_RAIL_KINDS
};

/* `channels` matter to `bytes` alone. */
EP_HD epRailMasks epRailMasksOf(uint64_t from, uint32_t domains, uint32_t channels) {
  epRailMasks m;
  uint64_t at = epAlignUp(from, EP_SECTION_ALIGN);
  m.state = epTake(&at, sizeof(epRailState));
  m.came = epTake(&at, 8ull * domains);
  m.said = epTake(&at, 8ull * EP_RAIL_KINDS * domains);
  m.sent = epTake(&at, 8ull * EP_SLOTS * domains * (3 + channels));
  m.bytes = at;
  return m;
}

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
  uint64_t networks[EP_SLOTS][2];    /* several domains: an epGin each, */
  uint32_t channels, contexts;       /* and what they have */
} epMaskArgs;

/* Shared memory: the verdict word, what came of each rank, and what its call said. */
EP_HD uint32_t epMaskSmem(uint32_t ranks) { return EP_VERDICT_BYTES + 16 * ranks; }

#endif
