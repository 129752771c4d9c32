/* Sizes, offsets and launch arguments of the low-latency kernels: what layout.h and abi.h are for the others. A group is
 * low-latency or high-throughput, so its window holds either these sections or those.
 *
 * Rows travel in units of 16 bytes: the generation of the operation and 12 bytes of the row, stored at once. The reader of
 * a unit therefore needs no flag and no fence, and the link carries 4/3 of the bytes. A strip is 128 units, 1536 bytes of
 * a row: what a warp handles at a time, 4 units or 3 vectors a lane.
 *
 * Window of a rank (peers store into it); [2] is the operation's generation & 1
 *
 *   hello     u32 [R]               generation of the last operation that peer r has begun
 *   counts    u64 [2][R][L + 1]     (generation << 32 | value): entries of source r for each of my experts; word L: rows
 *   weights   u64 [2][R][B][K]      (generation << 32 | FP32): combine weight of (token, k) of source r
 *   heads     units [2][R][B]       of row j of source r: its token there, K entries (EP_ENTRY or EP_NONE), K weights
 *   stage     units [2][R-1][B]     the rows. Dispatch: row j of source r; combine: the row for token t from rank r
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

#define EP_UNIT_DATA 12u    /* bytes of a row in a unit of 16 */
#define EP_STRIP_DATA 1536u /* bytes of a row in a strip */
#define EP_STRIP_BYTES 2048u
#define EP_LL_PIECE_STRIPS 2u /* strips that a warp of dispatch moves at a time */
#define EP_LL_OWN_TOKENS 8u   /* tokens that a sending block places at a time */
#define EP_LL_MAX_WINDOW (8ull << 30) /* bytes: staging grows with ranks and tokens, and low latency is for few */

typedef struct epLlWindowLayout {
  uint64_t hello, counts, weights, heads, stage, bytes;
  uint64_t headStride, rowStride; /* bytes of a row's head and of its data */
} epLlWindowLayout;

typedef struct epLlRecordLayout {
  uint64_t header, topk, sendRow, recvCount, recvToken, recvSlot, bytes;
} epLlRecordLayout;

EP_HD uint32_t epLlHeadUnits(uint32_t topk) { return (1 + 2 * topk + 2) / 3; }
EP_HD uint32_t epLlStrips(uint32_t rowBytes) { return (rowBytes + EP_STRIP_DATA - 1) / EP_STRIP_DATA; }
EP_HD uint32_t epLlPieces(uint32_t rowBytes) {
  return (epLlStrips(rowBytes) + EP_LL_PIECE_STRIPS - 1) / EP_LL_PIECE_STRIPS;
}

EP_HD epLlWindowLayout epLlWindowLayoutOf(epShape s) {
  epLlWindowLayout w;
  uint64_t at = 0, words = (uint64_t)s.experts / s.ranks + 1;
  w.headStride = epAlignUp(16ull * epLlHeadUnits(s.topk), EP_LINE);
  w.rowStride = epAlignUp(16ull * ((s.maxRowBytes + EP_UNIT_DATA - 1) / EP_UNIT_DATA), EP_LINE);
  w.hello = epTake(&at, 4ull * s.ranks);
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

typedef struct epLlDispatchArgs {
  epGroupArgs group;
  epLlWindowLayout window;
  epLlRecordLayout recordLayout;
  uint8_t *record;
  const uint8_t *tokens; /* [T][rowBytes] */
  const float *weights;  /* [T][K] when cfg.weights */
  uint8_t *outTokens;    /* rank-major [R][B][rowBytes], 3-D expert-major [L][R * B][rowBytes] */
  float *outWeights;     /* rank-major [R][B][K] */
  int32_t *outIdx;       /* rank-major [R][B][K] */
  /* caller's counters, NULL where not asked for; *Wide: int64 instead of int32 */
  void *expertCounters, *sourceCounters, *recvTotal;
  uint32_t expertCountersWide, sourceCountersWide, recvTotalWide;
  uint32_t numTokens;          /* T */
  uint32_t globalIdx;          /* outIdx holds global ids instead of local ones */
  uint32_t pushBlocks, blocks; /* blocks [0, pushBlocks) send, the rest receive */
} epLlDispatchArgs;

typedef struct epLlCombineArgs {
  epGroupArgs group;
  epLlWindowLayout window;
  epLlRecordLayout recordLayout;
  const uint8_t *record;
  const uint8_t *tokens; /* expert outputs, shaped as dispatch's output */
  const float *weights;  /* [T][K], 3-D expert-major */
  uint8_t *outTokens;    /* [T][rowBytes] */
  uint32_t numTokens;
  uint32_t pushBlocks, blocks;
  uint32_t pad;
} epLlCombineArgs;

/* Shared memory of a block: the verdict word and what ep_ll_begin reads of memory for all; then what the scan and the counts
 * of dispatch need; a strip a warp. */
#define EP_LL_BEGIN_WORDS 2u /* generation, tokens */
EP_HD uint32_t epLlBeginSmem(const epConfig *c) { /* window addresses; rows by source */
  return EP_VERDICT_BYTES + 8 * c->ranks + (uint32_t)epAlignUp(4ull * (EP_LL_BEGIN_WORDS + c->ranks), 8);
}
EP_HD uint32_t epLlScanSmem(const epConfig *c) { /* sums and a histogram a warp; places of the block's own tokens */
  return 4 * (c->experts + c->ranks) * (1 + c->threads / 32) + 8 * EP_LL_OWN_TOKENS * c->topk;
}
EP_HD uint32_t epLlPlaceSmem(const epConfig *c) { return 4 * (c->experts + c->ranks); } /* first slots, rows by source */
EP_HD uint32_t epLlSmem(int kernelId, const epConfig *c) {
  uint32_t scan = epLlScanSmem(c), place = epLlPlaceSmem(c), table = scan > place ? scan : place;
  if (kernelId == EP_KERNEL_LL_UPDATE)
    return 0;
  return (uint32_t)epAlignUp(epLlBeginSmem(c) + (kernelId == EP_KERNEL_LL_DISPATCH ? table : 0), 16) +
         c->threads / 32 * EP_STRIP_DATA;
}

#endif
