/* Sizes, offsets and arguments of a group that spans several scale-up domains (hybrid), beside those of layout.h and abi.h,
 * shared by host and kernels. docs/hybrid.md draws how a token travels.
 *
 * Terms: O domains of U ranks, R = O * U, rank = o * U + u. The ranks of one index u are a rail; ranks of a domain reach each
 * other by load and store, ranks of a rail by GIN. C channels: batch i of a rank's tokens goes by channel i % C. A batch is what a
 * tail counts and one put carries at most: some chunks, which are what flags inside a domain count.
 *
 * Window: the sections of layout.h up to `meta`, where only ranks of the domain store, and then
 *
 *   outCounts    u64 [O][U (L + 1) + 1]    for each domain what counts tell its ranks, and my tokens; sent from here
 *   outReplies   u64 [O][U (L + 1)]        the same of replies
 *   outMeta      u32 [B][2][K]             my decisions: EP_ENTRY(expert, position) or EP_NONE; row at the owner
 *   railCounts, railReplies, railMeta      [2][O] of them, from the rank of my index in each domain; half = generation & 1
 *   railTails    u64 [U][O][C]             how far rank u of my domain has got what its rail sends it: tails as below
 *   stageFlags   u32 [U][B]                by writer: generation of the dispatch whose chunk of staged rows is complete
 *   sumFlags     u32 [O][P][B]             generation of the combine whose staged row is complete
 *   stage        u8  [rows][stride]        rows from ranks of my domain. Dispatch: [U - 1][B], by writer and token. Combine:
 *                                          [O][P][B], partial sums of token t of my rail's rank in domain o, by place
 *   rail         u8  [O - 1][B][stride]    rows from my rail's ranks, at their token index
 *   send         u8  [O - 1][B][stride]    rows on their way to the rail: what GIN reads must lie in the window
 *   With masks `stage` is divided by writer, so that one who comes late reaches nobody else's rows: sumFlags, stage [U - 1][O][B], and dispatch
 *   uses the first B rows of each.
 *   Where combines sum nothing on the way, a token has a row for each k there: sumFlags, stage [O][K][B]; rail, send [O - 1][B][K].
 *
 * Signals of a rank, each by sending domain o (they only add, and are never cleared): META and REPLY count updates, CREDIT
 * counts operations whose predecessors' rows have been read, and ROWS, one for each channel, is a tail: EP_TAIL_BITS bits of
 * batches sent in this operation, and above them the operations before. An operation always adds a whole 1 << EP_TAIL_BITS.
 *
 * Routing record: that of layout.h, then
 *
 *   fwdTokens    u32 [O]        tokens of my rail's rank in domain o
 *   forward      u32 [O][B][K]  its decisions for my domain: EP_ENTRY(expert, row at the owner) or EP_NONE
 *
 * A domain's rank of the sender's index stands for it there. Of the other ranks of the domain that have the token, the one with
 * the lowest k has place 0, the next place 1: at most P = min(K, U - 1). Meta rows carry it above the token.
 */
#ifndef EP_DEVICE_HYBRID_LAYOUT_H_
#define EP_DEVICE_HYBRID_LAYOUT_H_

#include "abi.h"

#define EP_TAIL_BITS 21u /* batches of a channel fit: at most EP_MAX_ENTRIES tokens */
#define EP_TAIL_ROLL 53u /* bits in which tails are compared: those of a generation and EP_TAIL_BITS */
#define EP_GENERATION_ROLL 32u

/* `version` of a record's header: a record of another division into domains must not be taken for this group's. */
#define EP_HYBRID_VERSION(scaleUp) (EP_RECORD_VERSION | (uint32_t)(scaleUp) << 16)

#define EP_META_PLACE(token, place) ((uint32_t)(token) | (uint32_t)(place) << EP_ENTRY_POS_BITS)
#define EP_META_PLACE_OF(word) ((word) >> EP_ENTRY_POS_BITS)

/* How a kernel reaches the network: the backend's own. */
typedef struct epGin {
  uint64_t comm, window;
} epGin;

typedef struct epHybridLayout {
  uint64_t outCounts, outReplies, outMeta, railCounts, railReplies, railMeta, railTails, sumFlags, rail, send;
  uint64_t state; /* of epHybridState, in the group's scratch */
  uint64_t ways;  /* there too: each slot's counts of operations by fewer contexts (epWaysBytes) */
  uint32_t channels;
  uint32_t contexts, groupContexts; /* of a launch; of the group */
  uint32_t putRows;                 /* rows of a batch where a chunk has no more: a power of two */
} epHybridLayout;

typedef struct epHybridRecord {
  uint64_t fwdTokens, forward, bytes;
} epHybridRecord;

typedef struct epHybridState {
  uint32_t forwarded; /* blocks of an update that have forwarded their part */
  uint32_t pad[3];
} epHybridState;

/* A slot's ways: word 0 counts its operations by fewer contexts than the group's, word n those by n. */
EP_HD uint64_t epWaysBytes(uint32_t contexts) { return 4ull * contexts; }
/* Both, behind the plain scratch, which ends at *end. */
EP_HD void epHybridScratchOf(uint64_t *end, epHybridLayout *h) {
  h->state = epTake(end, sizeof(epHybridState));
  h->ways = epTake(end, EP_SLOTS * epWaysBytes(h->groupContexts));
}

/* What a hybrid kernel gets behind the arguments of the plain one. */
typedef struct epHybridGroup {
  epGin gin;
  epHybridLayout layout;
} epHybridGroup;
typedef struct epHybridUpdateArgs {
  epUpdateArgs plain;
  epHybridGroup hybrid;
} epHybridUpdateArgs;
typedef struct epHybridDispatchArgs {
  epDispatchArgs plain;
  epHybridGroup hybrid;
} epHybridDispatchArgs;
typedef struct epHybridCombineArgs {
  epCombineArgs plain;
  epHybridGroup hybrid;
} epHybridCombineArgs;

/* Words of counts or replies for the ranks of one domain. */
EP_HD uint32_t epDomainWords(uint32_t scaleUp, uint32_t experts, uint32_t ranks) {
  return scaleUp * (experts / ranks + 1);
}

/* Rows of a token that a domain's ranks store to the one that stands for its rank, at most. */
EP_HD uint32_t epPlaces(uint32_t scaleUp, uint32_t topk) { return scaleUp - 1 < topk ? scaleUp - 1 : topk; }

/* Fills both halves of the window's layout; `w` is the group's. */
EP_HD void epHybridLayoutOf(epShape s, uint32_t scaleUp, uint32_t channels, uint32_t contexts, uint32_t masks,
                            epWindowLayout *w, epHybridLayout *h) {
  uint64_t at = 0, domains = s.ranks / scaleUp, words = (uint64_t)s.experts / s.ranks + 1;
  uint64_t domainWords = epDomainWords(scaleUp, s.experts, s.ranks), sums, rows;
  /* Without partial sums a slot keeps the place of its k all the way. */
  sums = domains * (epShapeSingle(&s) ? s.topk : epPlaces(scaleUp, s.topk));
  if (masks) sums = domains * (scaleUp - 1) * (epShapeSingle(&s) ? s.topk : 1);
  w->stageStride = epAlignUp((uint64_t)s.maxRowBytes + epWeightBytes(s.topk), EP_LINE);
  w->chunks = s.maxTokens;
  w->metaWords = 1 + s.topk;
  w->counts = epTake(&at, 2 * 8 * words * s.ranks);
  w->replies = epTake(&at, 2 * 8 * words * s.ranks);
  h->outCounts = epTake(&at, 8 * domains * (domainWords + 1));
  h->outReplies = epTake(&at, 8 * domains * domainWords);
  h->railCounts = epTake(&at, 2 * 8 * domains * (domainWords + 1));
  h->railReplies = epTake(&at, 2 * 8 * domains * domainWords);
  h->railTails = epTake(&at, 8ull * s.ranks * channels);
  w->metaFlags = epTake(&at, 4ull * s.ranks);
  w->credits = epTake(&at, 4ull * s.ranks);
  w->hello = epTake(&at, 16ull * s.ranks);
  w->stageFlags = epTake(&at, 4ull * scaleUp * w->chunks);
  h->sumFlags = epTake(&at, 4 * sums * s.maxTokens);
  w->meta = epTake(&at, 2 * 4ull * s.ranks * s.maxTokens * w->metaWords);
  h->outMeta = epTake(&at, 2 * 4ull * s.maxTokens * s.topk);
  h->railMeta = epTake(&at, 2 * 2 * 4ull * domains * s.maxTokens * s.topk);
  rows = s.maxTokens * w->stageStride;
  w->stage = epTake(&at, (sums > scaleUp - 1 ? sums : scaleUp - 1) * rows);
  rows = s.stageRows * w->stageStride;
  h->rail = epTake(&at, (domains - 1) * rows);
  h->send = epTake(&at, (domains - 1) * rows);
  w->bytes = at;
  h->channels = channels;
  h->contexts = h->groupContexts = contexts;
}

/* Behind the plain sections, which end at `plainBytes`. */
EP_HD epHybridRecord epHybridRecordOf(uint64_t plainBytes, uint32_t domains, uint32_t topk, uint32_t maxTokens) {
  epHybridRecord r;
  uint64_t at = plainBytes;
  r.fwdTokens = epTake(&at, 4ull * domains);
  r.forward = epTake(&at, 4ull * domains * maxTokens * topk);
  r.bytes = at;
  return r;
}

/* Signals by sending domain. */
EP_HD uint32_t epSignalMeta(uint32_t domain) { return domain; }
EP_HD uint32_t epSignalReply(uint32_t domains, uint32_t domain) { return domains + domain; }
EP_HD uint32_t epSignalCredit(uint32_t domains, uint32_t domain) { return 2 * domains + domain; }
EP_HD uint32_t epSignalRows(uint32_t domains, uint32_t channels, uint32_t domain, uint32_t channel) {
  return 3 * domains + domain * channels + channel;
}
EP_HD uint32_t epSignalCount(uint32_t domains, uint32_t channels) { return domains * (3 + channels); }

/* Value of a tail when `batches` of a channel have been sent in the operation of generation `gen`. */
EP_HD uint64_t epTailOf(uint32_t gen, uint32_t batches) { return ((uint64_t)(gen - 1) << EP_TAIL_BITS) + batches; }

/* Shared memory of a block that moves rows: the verdict word, and what each warp has for each domain (rail.h); with masks, a word for each
 * domain and for each rank of this one: nothing goes there (rail_mask.h). */
#define EP_RUN_SMEM 24u
EP_HD uint32_t epLeftOffset(const epConfig *c) {
  return EP_VERDICT_BYTES + EP_RUN_SMEM * (c->threads / 32) * (c->ranks / c->scaleUp);
}
EP_HD uint32_t epHybridMoveSmem(const epConfig *c) {
  return epLeftOffset(c) + (c->mask ? 4 * (c->ranks / c->scaleUp + c->scaleUp) : 0);
}
/* Blocks whose warps each serve a channel. */
EP_HD uint32_t epChannelBlocks(uint32_t channels, uint32_t threads) {
  return (channels + threads / 32 - 1) / (threads / 32);
}

#endif
