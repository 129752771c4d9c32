/* Sizes, offsets and launch arguments of the low-latency kernels: what layout.h and abi.h are for the others. A group is
 * low-latency or high-throughput, so its window holds either these sections or those.
 *
 * Rows travel in units of 16 bytes: the lower half of the operation's generation, its tag, and 14 bytes of the row, stored at
 * once. The reader of a unit therefore needs no flag and no fence, and the link carries 8/7 of the bytes. A strip is 128 units,
 * 1792 bytes of a row: what a warp handles at a time, 4 units a lane or 4 vectors in each of 28 lanes.
 *
 * A tag comes again after 65,536 operations, so no unit may stay that long: now and then an operation clears a slice of the half that it
 * does not use (epLlSlice), with a tag of its own parity, which the other half's operations never have. Units of heads hold the whole
 * generation and 12 bytes.
 *
 * Window of a rank (peers store into it); [2] is the operation's generation & 1
 *
 *   hello     u64 [R][2]            what peer r says of the operations that it begins: kind_layout.h
 *   begun     u32 [R]               generation of the last operation that peer r has begun: what it did before is finished
 *   counts    u64 [2][R][L + 1]     (generation << 32 | value): entries of source r for each of my experts; word L: rows
 *   weights   u64 [2][R][B][K]      (generation << 32 | FP32): combine weight of (token, k) of source r
 *   heads     units [2][R][B]       of row j of source r: its token there, K entries (EP_ENTRY or EP_NONE), K weights
 *   stage     units [2][R-1][B]     the rows. Dispatch: row j of source r, its scales behind it; combine: the row for token t from
 *                                   rank r
 *
 * Routing record (in the handle's memory, position independent)
 *
 *   header    epRecordHeader        written by update; generation: EP_LL_UPDATED or, after a dispatch, EP_LL_DISPATCHED
 *   topk      i32 [B][K]            global expert of (t, k) or -1, written by update. From here on by dispatch, for combine
 *   sendRow   u32 [B]               row of token t among the rows that stay here
 *   recvCount u32 [R]               rows from rank r
 *   recvToken u32 [R][B]            token there of row j from rank r
 *   recvSlot  u32 [R][B][K]         3-D expert-major: row of the output, expert * R * B + slot, or EP_NONE
 */
#ifndef EP_DEVICE_LL_LAYOUT_H_
#define EP_DEVICE_LL_LAYOUT_H_

#include "abi.h"

enum { EP_LAYOUT_KIND_RANK_MAJOR = 2, EP_LAYOUT_KIND_EXPERT_MAJOR_3D = 3 };

enum { EP_LL_UPDATED = 1, EP_LL_DISPATCHED };

#define EP_UNIT_DATA 14u    /* bytes of a row in a unit of 16 */
#define EP_UNIT_TAG 0xffffu /* of a unit's first word: the tag */
#define EP_STRIP_VECTORS 4
#define EP_STRIP_UNITS 4
#define EP_STRIP_LANES 28u  /* that hold a vector: 28 * 16 = 32 * 14 */
#define EP_STRIP_DATA 1792u /* bytes of a row in a strip */
#define EP_STRIP_BYTES 2048u
#define EP_LL_PIECE_STRIPS 2u         /* strips that a warp of dispatch takes at a time, at most */
#define EP_LL_SLICES 16384u           /* in which a half of the stage is cleared */
#define EP_LL_MAX_WINDOW (8ull << 30) /* bytes: staging grows with ranks and tokens, and low latency is for few */

typedef struct epLlWindowLayout {
  uint64_t hello, begun, counts, weights, heads, stage, bytes;
  uint64_t headStride, rowStride; /* bytes of a row's head and of its data */
} epLlWindowLayout;

typedef struct epLlRecordLayout {
  uint64_t header, topk, sendRow, recvCount, recvToken, recvSlot, bytes;
} epLlRecordLayout;

EP_HD uint32_t epLlHeadUnits(uint32_t topk) { return (1 + 2 * topk + 2) / 3; }
/* Bytes of a row as it travels: its scales are rounded up to a vector, so that no vector holds both. */
EP_HD uint32_t epLlTravels(uint32_t rowBytes, uint32_t scaleBytes) {
  return rowBytes + (uint32_t)epAlignUp(scaleBytes, EP_ROW_ALIGN);
}
/* Below, rowBytes are those that travel. */
EP_HD uint32_t epLlStrips(uint32_t rowBytes) { return (rowBytes + EP_STRIP_DATA - 1) / EP_STRIP_DATA; }
/* Slots of one head are found once a piece, so 3-D expert-major has larger ones. */
EP_HD uint32_t epLlPieceStrips(uint32_t layout) { return layout == EP_LAYOUT_KIND_RANK_MAJOR ? 1 : EP_LL_PIECE_STRIPS; }
EP_HD uint32_t epLlPieces(uint32_t rowBytes, uint32_t layout) {
  return (epLlStrips(rowBytes) + epLlPieceStrips(layout) - 1) / epLlPieceStrips(layout);
}

EP_HD epLlWindowLayout epLlWindowLayoutOf(epShape s) {
  epLlWindowLayout w;
  uint64_t at = 0, words = (uint64_t)s.experts / s.ranks + 1;
  w.headStride = epAlignUp(16ull * epLlHeadUnits(s.topk), EP_LINE);
  w.rowStride = epAlignUp(16ull * ((s.maxRowBytes + EP_UNIT_DATA - 1) / EP_UNIT_DATA), EP_LINE);
  w.hello = epTake(&at, 16ull * s.ranks);
  w.begun = epTake(&at, 4ull * s.ranks);
  w.counts = epTake(&at, 2 * 8 * words * s.ranks);
  w.weights = epTake(&at, 2 * 8ull * s.ranks * s.maxTokens * s.topk);
  w.heads = epTake(&at, 2 * w.headStride * s.ranks * s.maxTokens);
  w.stage = epTake(&at, 2 * w.rowStride * (s.ranks - 1ull) * s.maxTokens);
  w.bytes = at;
  return w;
}

EP_HD epLlRecordLayout epLlRecordLayoutOf(uint32_t ranks, uint32_t topk, uint32_t maxTokens) {
  epLlRecordLayout r;
  uint64_t at = 0, entries = (uint64_t)maxTokens * topk;
  r.header = epTake(&at, sizeof(epRecordHeader));
  r.topk = epTake(&at, 4 * entries);
  r.sendRow = epTake(&at, 4ull * maxTokens);
  r.recvCount = epTake(&at, 4ull * ranks);
  r.recvToken = epTake(&at, 4ull * ranks * maxTokens);
  r.recvSlot = epTake(&at, 4ull * ranks * entries);
  r.bytes = at;
  return r;
}

/* Units [first, first + count) of half (gen + 1) & 1 of the stage, `units` in all, that operation gen clears: all of a half
 * within 2 * EP_LL_SLICES operations. */
typedef struct epLlSlice {
  uint64_t first, count;
} epLlSlice;
EP_HD epLlSlice epLlSliceOf(uint64_t units, uint32_t gen) {
  uint64_t each = (units + EP_LL_SLICES - 1) / EP_LL_SLICES, from = (gen >> 1) % EP_LL_SLICES * each;
  epLlSlice s;
  s.first = from < units ? from : units;
  s.count = units - s.first < each ? units - s.first : each;
  return s;
}

/* Offset, in the window of rank `owner`, of what `writer` stages there as row `row` of an operation. */
EP_HD uint64_t epLlStageRow(const epLlWindowLayout *w, uint32_t ranks, uint32_t maxTokens, uint32_t gen, uint32_t owner,
                            uint32_t writer, uint32_t row) {
  uint64_t region = (uint64_t)(gen & 1) * (ranks - 1) + epRegionOf(owner, writer);
  return w->stage + (region * maxTokens + row) * w->rowStride;
}
EP_HD uint64_t epLlHead(const epLlWindowLayout *w, uint32_t ranks, uint32_t maxTokens, uint32_t gen, uint32_t writer,
                        uint32_t row) {
  return w->heads + (((uint64_t)(gen & 1) * ranks + writer) * maxTokens + row) * w->headStride;
}

typedef struct epLlUpdateArgs {
  epGroupArgs group;
  epLlRecordLayout recordLayout;
  uint8_t *record;
  const void *topkIdx; /* [T][K] int32 or int64 */
  uint32_t tokens;
  uint32_t blocks;
} epLlUpdateArgs;

/* What dispatch reads decisions from: the record, or the caller's topk_idx where the update was left to it. */
typedef struct epLlDecisions {
  const uint8_t *at;
  uint32_t wide;     /* int64, else int32 */
  uint32_t borrowed; /* dispatch checks them and keeps them in the record */
} epLlDecisions;

/* What is needed first comes first: a new line of the arguments costs a trip. */
typedef struct epLlDispatchArgs {
  uint32_t pushBlocks, blocks; /* block 0 counts, blocks [1, pushBlocks] send, the rest receive */
  uint32_t tokensABlock;       /* of those that send, at a time: at most a warp's decisions */
  uint32_t numTokens;          /* T, or a bound of it: */
  uint32_t tokensHeld;         /* the record's header has T, which the host does not know */
  uint32_t globalIdx;          /* outIdx holds global ids instead of local ones */
  uint8_t *record;
  epLlDecisions decisions;
  const uint8_t *tokens; /* [T][rowBytes], or when cfg.quantise BF16 [T][rowBytes elements] */
  const uint8_t *scales; /* [T][scaleBytes] when cfg.scaleBytes */
  const float *weights;  /* [T][K] when cfg.weights */
  epGroupArgs group;
  epLlWindowLayout window;
  epLlRecordLayout recordLayout;
  uint8_t *outScales; /* as outTokens, scaleBytes a row */
  uint8_t *outTokens; /* rank-major [R][B][rowBytes], 3-D expert-major [L][R * B][rowBytes] */
  float *outWeights;  /* rank-major [R][B][K] */
  int32_t *outIdx;    /* rank-major [R][B][K] */
  /* caller's counters, NULL where not asked for; *Wide: int64 instead of int32 */
  void *expertCounters, *sourceCounters, *recvTotal;
  uint32_t expertCountersWide, sourceCountersWide, recvTotalWide;
  uint32_t forwardBlocks; /* several scale-up domains (hybrid_ll_layout.h): behind those that send */
} epLlDispatchArgs;

typedef struct epLlCombineArgs {
  uint32_t pushBlocks,
      blocks; /* blocks [0, pushBlocks) send (3-D expert-major: block 0 weights alone), the rest reduce */
  uint32_t numTokens, tokensHeld; /* as in dispatch */
  const uint8_t *record;
  const uint8_t *tokens; /* expert outputs, shaped as dispatch's output */
  const float *weights;  /* [T][K], 3-D expert-major */
  epGroupArgs group;
  epLlWindowLayout window;
  epLlRecordLayout recordLayout;
  uint8_t *outTokens; /* [T][rowBytes] */
  union {
    uint32_t forwardBlocks; /* several scale-up domains: the last of those that send */
    const float *scales;    /* cfg.quantise, which is one domain's: of the rows of tokens */
  };
} epLlCombineArgs;

/* Shared memory of a block: the verdict word and the generation; window addresses of all ranks. Dispatch: sums of entries by expert and of
 * rows by rank, then the counts of all sources as they came. Combine: rows by source. A strip a warp, and in
 * combine another for this rank's own share. */
EP_HD uint32_t epLlTableOffset(const epConfig *c) { return EP_VERDICT_BYTES + 8 + 8 * c->ranks; }
EP_HD uint32_t epLlTableWords(int kernelId, const epConfig *c) {
  return kernelId == EP_KERNEL_LL_DISPATCH ? 2 * (c->experts + c->ranks) : c->ranks;
}
EP_HD uint32_t epLlWarpSmem(int kernelId) {
  return kernelId == EP_KERNEL_LL_COMBINE ? EP_STRIP_DATA + EP_STRIP_BYTES : EP_STRIP_DATA;
}
EP_HD uint32_t epLlSmem(int kernelId, const epConfig *c) {
  if (kernelId == EP_KERNEL_LL_UPDATE) return 0;
  return (uint32_t)epAlignUp(epLlTableOffset(c) + 4ull * epLlTableWords(kernelId, c), 16) +
         c->threads / 32 * epLlWarpSmem(kernelId);
}

#endif
