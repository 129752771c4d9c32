/* Low latency across several scale-up domains: what it has beside ll_layout.h, in which terms are those of hybrid_layout.h. A rank of another
 * domain is reached through the rank of this index there, its rail: what a rail gets, it stores on inside its domain as if the source had.
 *
 * Window: the sections of ll_layout.h, in which only ranks of the domain store, and then
 *
 *   outCounts   u32 [O][words]           for each domain: rows of counts for its ranks, U (L + 1), and my tokens; sent from here
 *   railCounts  u32 [2][O][words]        the same from my rail's ranks; [2], here and below: the operation's generation & 1
 *   outMeta     f32 [B][K]               weights of a 3-D combine, sent from here
 *   railMeta    f32 [2][O][B][K]         those of my rail's ranks
 *   rail        u8  [2][O - 1][B][stride] rows from my rail's ranks, at their token: a head, and then in dispatch the token and its scales, in combine
 *                                        the sum of a domain
 *   send        u8  [O - 1][B][stride]   rows on their way there; dispatch has one for all domains
 *
 * Head of a row, words: the operation's generation, K entries (EP_ENTRY), K owners (EP_OWN: rank and row there, or EP_NONE), K weights. A row
 * whose generation is another did not come, and will not, once the tail of its chunk has. So nothing else may lie in that word: heads have the
 * room of the group's top-k, stride is its widest row's, and combine's rows leave the head alone.
 *
 * With masks `hello` of a rank of another domain is its bringer's: (generation << 32 | EP_LOST), nothing more of it comes in that operation.
 *
 * Signals of a rank, by sending domain o: MESSAGE, the generation whose counts or weights have come; GREET, as `hello`; ROWS, one a channel, a
 * tail of chunks (hybrid_layout.h), epLlChunkTokens each: chunk i goes by channel i % C. A tail skips operations in which the channel had nothing to
 * do, so the sender keeps what it has told: u64 [EP_SLOTS][O][C + 1] in the group's scratch, the last one of a domain for MESSAGE. With masks that
 * is `sent` of mask_layout.h, with GREET.
 *
 * Routing record: that of ll_layout.h and then, as in hybrid_layout.h, fwdTokens u32 [O], and forward i32 [O][B][K]: global expert of the decisions of
 * my rail's rank for this domain, or -1. */
#ifndef EP_DEVICE_HYBRID_LL_LAYOUT_H_
#define EP_DEVICE_HYBRID_LL_LAYOUT_H_

#include "hybrid_layout.h"
#include "ll_layout.h"

/* Tokens of a chunk: a block of senders takes one at a time, and its warps look at all of it (ll_dispatch.h). */
EP_HD uint32_t epLlChunkTokens(uint32_t topk) { return topk > 16 ? 1 : 2; }

EP_HD uint32_t epLlDomainWords(uint32_t scaleUp, uint32_t experts, uint32_t ranks) {
  return (uint32_t)epAlignUp(epDomainWords(scaleUp, experts, ranks) + 1, 4);
}
EP_HD uint32_t epLlRailHead(uint32_t topk) { return (uint32_t)epAlignUp(4ull * (1 + 3 * topk), EP_ROW_ALIGN); }

/* As epHybridLayoutOf; sections that low latency has no use for are 0. `w` is the group's: its bytes and stride of rows are set. */
EP_HD void epLlHybridLayoutOf(epShape s, uint32_t scaleUp, uint32_t channels, uint32_t contexts, epWindowLayout *w,
                              epHybridLayout *h) {
  uint64_t at = epLlWindowLayoutOf(s).bytes, domains = s.ranks / scaleUp,
           words = epLlDomainWords(scaleUp, s.experts, s.ranks);
  uint64_t weights = 4ull * s.maxTokens * s.topk, rows;
  w->stageStride = epAlignUp((uint64_t)epLlRailHead(s.topk) + s.maxRowBytes, EP_LINE);
  rows = (domains - 1) * s.maxTokens * w->stageStride;
  h->outReplies = h->railReplies = h->railTails = h->sumFlags = 0;
  h->outCounts = epTake(&at, 4 * domains * words);
  h->railCounts = epTake(&at, 2 * 4 * domains * words);
  h->outMeta = epTake(&at, weights);
  h->railMeta = epTake(&at, 2 * domains * weights);
  h->rail = epTake(&at, 2 * rows);
  h->send = epTake(&at, rows);
  w->bytes = at;
  h->channels = channels;
  h->contexts = h->groupContexts = contexts;
}

EP_HD uint32_t epLlSignalMessage(uint32_t domain) { return domain; }
EP_HD uint32_t epLlSignalGreet(uint32_t domains, uint32_t domain) { return domains + domain; }
EP_HD uint32_t epLlSignalRows(uint32_t domains, uint32_t channels, uint32_t domain, uint32_t channel) {
  return 2 * domains + domain * channels + channel;
}
EP_HD uint32_t epLlSignalCount(uint32_t domains, uint32_t channels) { return domains * (2 + channels); }

EP_HD uint64_t epLlToldBytes(uint32_t domains, uint32_t channels) { return 8ull * EP_SLOTS * domains * (channels + 1); }

/* Of the plain kernels' `pushBlocks`, combine's last `forwardBlocks` forward; dispatch's come behind those that push. Both divide the channels, so that
 * a channel is one block's. */
typedef struct epHybridLlDispatchArgs {
  epLlDispatchArgs plain;
  epHybridGroup hybrid;
} epHybridLlDispatchArgs;
typedef struct epHybridLlCombineArgs {
  epLlCombineArgs plain;
  epHybridGroup hybrid;
} epHybridLlCombineArgs;

#endif
