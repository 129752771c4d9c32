/* Every size and offset of the window, of the routing record and of the group's scratch, computed here and nowhere else:
 * host C and kernels include this file, so they cannot disagree. All offsets are 64-bit byte offsets from the start of
 * their object; every section starts at a multiple of EP_SECTION_ALIGN.
 *
 * Terms: R ranks, E experts, L = E/R local experts, K top-k, B = max_dispatch_tokens_per_rank. "slot s of the other
 * ranks" is s < me ? s : s - 1, because local rows are never staged.
 *
 * Window of a rank (peers store into it)
 *
 *   counts      u64 [2][R][L + 1]   (generation << 32 | value): rows that source r sends to each of my experts; word L:
 *                                   rows in all (EP_ROWS_WORD). Half = generation of the update & 1.
 *   replies     u64 [2][R][L + 1]   same words from destination r: first slot of my rows at each of its experts; word
 *                                   L: first flat row. A source thereby learns where its rows land.
 *   meta        u32 [2][R][B][1+K]  one row for each token that source r sends me: its index there, then for each k
 *                                   EP_ENTRY(local expert, position among r's rows for that expert) or EP_NONE
 *   metaFlags   u32 [R]             generation of the update whose meta rows from r are complete
 *   outputs     u64 [R][2]          of rank r's running dispatch, when its output lies in a window: (generation << 32 | offset
 *                                   there in units of 16), (generation << 32 | rows of it)
 *   stageFlags  u32 [R][chunks]     EP_FLAG of the operation whose chunk of rows from r is complete; a chunk is
 *                                   epChunkRows(row bytes) rows, or in combine a span of one: chunks = rows * spans
 *   credits     u32 [R]             generation of the last operation that peer r has finished reading
 *   hello       u64 [R][2]          what peer r says of the operations that it begins: kind_layout.h
 *   stage       u8  [R-1][B][stride] rows on their way: token bytes, K FP32 weights and scales, each padded to 16; for combines
 *                                   without partial sums [R-1][B][K][stride], a row for each k
 *
 * Routing record (in the handle's memory, position independent)
 *
 *   header      epRecordHeader
 *   topk        i32 [B][K]          global expert of (t, k), or -1
 *   sendRow     i32 [B][K]          row of t among the rows that go to the owner of (t, k), or -1
 *   sendPos     i32 [B][K]          position of (t, k) among my rows for that expert, or -1
 *   sendSlot    u32 [E]             first slot of my rows at expert e (expert-major)
 *   sendBase    u32 [R]             first flat row of mine at rank r
 *   recvCount   u32 [R]             rows that arrive from rank r
 *   recvBase    u32 [R + 1]         exclusive prefix of recvCount; [R] = rows in all
 *   slotBase    u32 [R][L]          first slot of rank r's rows at local expert e
 *   zoneBase    u32 [L + 1]         first slot of local expert e; [L] = padded slots in all
 *   zoneCount   u32 [L]             unpadded slots of local expert e
 *   recvMeta    u32 [R][B][1 + K]   as `meta` above
 *
 * Group scratch (ordinary device memory)
 *
 *   state       epGroupState [EP_SLOTS], each at a multiple of EP_SECTION_ALIGN: see EP_SLOTS
 *   histogram   u32 [EP_MAX_UPDATE_BLOCKS][E + R]
 */
#ifndef EP_DEVICE_LAYOUT_H_
#define EP_DEVICE_LAYOUT_H_

#include "types.h"

#define EP_SECTION_ALIGN 256u
#define EP_ROW_ALIGN 16u
#define EP_LINE 128u /* staging rows start on a line: a row that straddles lines crosses the link far slower */
#define EP_MAX_UPDATE_BLOCKS 64u

/* Limits, each with its reason. */
#define EP_MAX_TOPK 32u         /* a warp lane for each k */
#define EP_MAX_RANKS 1024u      /* one thread of a block polls for each peer */
#define EP_MAX_EXPERTS 2048u    /* per-warp histograms of all experts and ranks fit shared memory */
#define EP_MAX_ROW_BYTES 65536u /* 16,384 FP32 elements; beyond, a warp would hold up its flag for too long */
#define EP_ENTRY_POS_BITS 20u
#define EP_MAX_DIRECT 32u /* ranks of a dispatch into window-backed outputs: a lane knows the output of one */
#define EP_MAX_ENTRIES (1u << EP_ENTRY_POS_BITS) /* B * K, so that a position fits EP_ENTRY */

/* The word of all rows carries, above the rows, what must be equal on both sides of an update. */
#define EP_ROWS_BITS 25u
#define EP_ROWS_TAG(topk, layout) ((uint32_t)(topk) << 1 | (uint32_t)(layout))
#define EP_ROWS_WORD(rows, tag) ((uint32_t)(rows) | (uint32_t)(tag) << EP_ROWS_BITS)
#define EP_ROWS_OF(word) ((uint32_t)(word) & ((1u << EP_ROWS_BITS) - 1u))
#define EP_ROWS_TAG_OF(word) ((uint32_t)(word) >> EP_ROWS_BITS)

/* Generation of an operation, and whether its rows lie in the output already, so that only what follows them was staged. */
#define EP_DIRECT 0x80000000u
#define EP_FLAG(gen, direct) (((uint32_t)(gen) & ~EP_DIRECT) | ((direct) ? EP_DIRECT : 0u))

#define EP_NONE 0xffffffffu
#define EP_ENTRY(expert, pos) ((uint32_t)(expert) << EP_ENTRY_POS_BITS | (uint32_t)(pos))
#define EP_ENTRY_EXPERT(entry) ((entry) >> EP_ENTRY_POS_BITS)
#define EP_ENTRY_POS(entry) ((entry) & (EP_MAX_ENTRIES - 1u))

/* First word of a meta row: the token, and above it what hybrid kernels keep there. */
#define EP_META_TOKEN(word) ((word) & (EP_MAX_ENTRIES - 1u))

/* What the sizes depend on; equal on all ranks. */
typedef struct epShape {
  uint32_t ranks, experts, topk; /* topk: of the handle for a record, the largest of the group for the window */
  uint32_t maxTokens;            /* B */
  uint32_t stageRows;            /* rows of a staging region: B, or B * K where every slot of a token travels */
  uint32_t maxRowBytes;          /* token bytes of the widest row */
} epShape;

/* Combines sum nothing before a token's own rank does. With one k there is nothing to sum. */
EP_HD uint32_t epShapeSingle(const epShape *s) { return s->stageRows > s->maxTokens; }

typedef struct epWindowLayout {
  uint64_t counts, replies, meta, metaFlags, stageFlags, credits, outputs, hello, stage, bytes;
  uint64_t stageStride; /* bytes of a staging row */
  uint32_t chunks;      /* flags per peer */
  uint32_t metaWords;   /* u32 words of a meta row in the window: 1 + group top-k */
} epWindowLayout;

typedef struct epRecordLayout {
  uint64_t header, topk, sendRow, sendPos, sendSlot, sendBase, recvCount, recvBase, slotBase, zoneBase, zoneCount,
      recvMeta, bytes;
} epRecordLayout;

typedef struct epScratchLayout {
  uint64_t state, histogram, bytes;
} epScratchLayout;

EP_HD uint64_t epAlignUp(uint64_t v, uint64_t a) { return (v + a - 1) / a * a; }

/* Takes `bytes` at the cursor and moves it to the next section. */
EP_HD uint64_t epTake(uint64_t *cursor, uint64_t bytes) {
  uint64_t at = *cursor;
  *cursor = epAlignUp(at + bytes, EP_SECTION_ALIGN);
  return at;
}

/* Rows behind one arrival flag: small enough that the receiver starts early, large enough to pay for the flag. */
#define EP_MAX_CHUNK_ROWS 8u
EP_HD uint32_t epChunkRows(uint32_t rowBytes) {
  return rowBytes >= 8192 ? 1 : rowBytes >= 4096 ? 2 : rowBytes >= 2048 ? 4 : EP_MAX_CHUNK_ROWS;
}

/* Combine from expert-major sends and reduces a long row as this many spans, each with its own flag: what is left to do when
 * the last one arrives is as much shorter (T = 4096: 236 us for 265). Spans start on lines. A flat row is only moved, and
 * moves best whole. */
#define EP_MAX_SPANS 4u
EP_HD uint32_t epSpans(uint32_t rowBytes, int summed) { return summed && rowBytes >= 8192 ? EP_MAX_SPANS : 1; }
EP_HD uint32_t epSpanBytes(uint32_t rowBytes, uint32_t spans) {
  return (uint32_t)epAlignUp((rowBytes + spans - 1) / spans, EP_LINE);
}

EP_HD uint32_t epWeightBytes(uint32_t topk) { return (uint32_t)epAlignUp(4ull * topk, EP_ROW_ALIGN); }

EP_HD epWindowLayout epWindowLayoutOf(epShape s) {
  epWindowLayout w;
  uint64_t at = 0, words = (uint64_t)s.experts / s.ranks + 1;
  w.stageStride = epAlignUp((uint64_t)s.maxRowBytes + epWeightBytes(s.topk), EP_LINE);
  w.chunks = s.maxTokens * epSpans(s.maxRowBytes, 1); /* a token's rows from one rank share theirs */
  w.metaWords = 1 + s.topk;
  w.counts = epTake(&at, 2 * 8 * words * s.ranks);
  w.replies = epTake(&at, 2 * 8 * words * s.ranks);
  w.metaFlags = epTake(&at, 4ull * s.ranks);
  w.credits = epTake(&at, 4ull * s.ranks);
  w.outputs = epTake(&at, 16ull * s.ranks);
  w.hello = epTake(&at, 16ull * s.ranks);
  w.stageFlags = epTake(&at, 4ull * s.ranks * w.chunks);
  w.meta = epTake(&at, 2 * 4ull * s.ranks * s.maxTokens * w.metaWords);
  w.stage = epTake(&at, (s.ranks - 1ull) * s.stageRows * w.stageStride);
  w.bytes = at;
  return w;
}

/* Record header: fixed size, first in the record, so that a record can be recognised wherever it was moved. */
#define EP_RECORD_MAGIC 0x45504852u
#define EP_RECORD_VERSION 1u
typedef struct epRecordHeader {
  uint32_t magic, version;
  uint32_t ranks, experts, topk, maxTokens, rank, layout, align;
  uint32_t tokens;     /* T of the routing in the record */
  uint32_t generation; /* of the update that wrote it; 0: none, or one that gave up: nothing else may be trusted */
  uint32_t epoch;      /* with masks: of the group when it was written */
  uint32_t dispatched; /* low latency: generation of the dispatch that filled it */
  uint32_t pad[3];
} epRecordHeader;

EP_HD epRecordLayout epRecordLayoutOf(uint32_t ranks, uint32_t experts, uint32_t topk, uint32_t maxTokens) {
  epRecordLayout r;
  uint64_t at = 0, locals = experts / ranks, entries = (uint64_t)maxTokens * topk;
  r.header = epTake(&at, sizeof(epRecordHeader));
  r.topk = epTake(&at, 4 * entries);
  r.sendRow = epTake(&at, 4 * entries);
  r.sendPos = epTake(&at, 4 * entries);
  r.sendSlot = epTake(&at, 4ull * experts);
  r.sendBase = epTake(&at, 4ull * ranks);
  r.recvCount = epTake(&at, 4ull * ranks);
  r.recvBase = epTake(&at, 4ull * (ranks + 1));
  r.slotBase = epTake(&at, 4ull * experts);
  r.zoneBase = epTake(&at, 4 * (locals + 1));
  r.zoneCount = epTake(&at, 4 * locals);
  r.recvMeta = epTake(&at, 4ull * ranks * maxTokens * (1 + topk));
  r.bytes = at;
  return r;
}

/* Generations and counters of a group: in device memory, so that a replayed graph finds fresh ones. */
typedef struct epGroupState {
  uint32_t updateGen, stageGen;                   /* last finished update; last finished dispatch or combine */
  uint32_t updateArrived, updateSent, updateDone; /* blocks at the grid barrier / done sending / finished */
  uint32_t stageDone;                             /* blocks of a dispatch or combine that finished */
  uint32_t aborted; /* a wait of the running kernel gave up: the others need not run to their timeout */
  uint32_t errorClaimed, indexClaimed; /* taken by the thread that writes the error record */
  uint32_t epilogueStarted;            /* planted fault only */
  uint32_t routed;                     /* last operation whose own update has finished */
  uint32_t sendTickets, takeTickets;   /* rounds and received rows of the running operation that were drawn (rows.h) */
  uint32_t sendersStarted;             /* blocks of senders of the running combine */
  uint64_t profile;                    /* address of the area of profile_layout.h; 0: the group is not profiled */
} epGroupState;

/* An operation of dispatch or combine works on a slot: a window of the group's layout, and a state with generations of its own. Whole ones
 * take turns on slot 0, the group's first window; each staged one that is in flight has another. */
#define EP_MAX_IN_FLIGHT 8u
#define EP_SLOTS (1u + EP_MAX_IN_FLIGHT)
EP_HD uint64_t epSlotState(uint32_t slot) { return (uint64_t)slot * EP_SECTION_ALIGN; }

EP_HD epScratchLayout epScratchLayoutOf(uint32_t ranks, uint32_t experts) {
  epScratchLayout s;
  uint64_t at = 0;
  s.state = epTake(&at, epSlotState(EP_SLOTS));
  s.histogram = epTake(&at, 4ull * EP_MAX_UPDATE_BLOCKS * (experts + ranks));
  s.bytes = at;
  return s;
}

/* Index of peer `p` among the staging regions of rank `me`. */
EP_HD uint32_t epRegionOf(uint32_t me, uint32_t p) { return p < me ? p : p - 1; }

/* Byte offset, in the window of rank `owner`, of staging row `row` written by rank `writer`. */
EP_HD uint64_t epStageRow(const epWindowLayout *w, uint32_t stageRows, uint32_t owner, uint32_t writer, uint32_t row) {
  return w->stage + ((uint64_t)epRegionOf(owner, writer) * stageRows + row) * w->stageStride;
}

/* Upper bounds without counts (rows a rank can receive). `align` 0 means 1. */
EP_HD uint64_t epMaxFlatRows(uint32_t ranks, uint32_t maxTokens) { return (uint64_t)ranks * maxTokens; }
EP_HD uint64_t epMaxSlots(uint32_t ranks, uint32_t maxTokens, uint32_t topk, uint32_t locals, uint32_t align) {
  uint64_t a = align ? align : 1;
  return epAlignUp((uint64_t)ranks * maxTokens * topk + locals * (a - 1), a);
}

#endif
