/* The greeting of an operation (kind_layout.h): every rank says to every other which operation it begins, and looks at what they say.
 * Rows and their flags are as they were: what is wrong is found beside them, by warps that have nothing else to do, and reported within the
 * operation. */
#ifndef EP_DEVICE_KIND_H_
#define EP_DEVICE_KIND_H_

#include "mask.h"

/* `kernel`: EP_KERNEL_*. */
template <class C> DEV uint32_t ep_kind(const C c, uint32_t kernel, uint32_t routing) {
  bool combine = kernel == EP_KERNEL_COMBINE || kernel == EP_KERNEL_LL_COMBINE || kernel == EP_KERNEL_HYBRID_COMBINE;
  bool backward =
      c.layout < EP_LAYOUT_KINDS_HT && combine == (c.weights != 0); /* low latency has forward passes only */
  return EP_KIND(combine ? EP_KIND_COMBINE : EP_KIND_DISPATCH, c.layout, backward,
                 epKindWidths(c.topk, c.rowBytes, c.dtype, c.quantise == EP_QUANTISE_NVFP4 ? 1 : c.scaleBytes),
                 routing);
}

/* Greetings in a window: rank r's of operation `gen`. */
DEV uint64_t *ep_hello(const epGroupArgs &g, uint8_t *window, uint32_t rank, uint32_t gen) {
  return (uint64_t *)(window + g.window.hello) + 2 * rank + (gen & 1);
}

/* What `peer` says of operation gen has come. False: it does something else, which is reported, and ends this rank's other waits. */
template <class C>
DEV bool ep_kind_agrees(const C c, const epGroupArgs &g, uint32_t gen, uint32_t mine, uint32_t its, uint32_t phase,
                        uint32_t peer) {
  if (EP_KIND_OF(its) == EP_KIND_ELSEWHERE) its = epKindThere(its, mine, &peer);
  if (epKindSame(mine, its) || (c.mask && ep_masked_by(c, g, phase, peer, gen, gen))) return true;
  p::st_relaxed_sys(&g.error->operation, gen);
  if (c.mask)
    ep_stop(c, g, EP_ERR_APART, phase, peer, mine, its);
  else
    ep_report(g, EP_ERR_APART, phase, peer, mine, its);
  return false;
}

/* Whole warp: looks at the greetings of ranks [from, to), which come when those ranks begin the operation. */
template <class C>
DEV void ep_greeted(const C c, const epGroupArgs &g, uint32_t from, uint32_t to, uint32_t gen, uint32_t mine,
                    uint32_t phase) {
  uint8_t *window = ep_window(g, g.rank);
#pragma unroll 1
  for (uint32_t r = from + p::lane(); r < to; r += 32) {
    uint32_t its = mine;
    if (r != g.rank && !ep_await_word(c, g, ep_hello(g, window, r, gen), gen, phase, r, &its)) {
      if (ep_stopped(c, g)) return;
      its = mine; /* masked */
    }
    if (!ep_kind_agrees(c, g, gen, mine, its, phase, r)) return;
  }
}

#endif
