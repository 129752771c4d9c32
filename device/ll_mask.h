/* Low latency with masks. Who is left out is settled when an operation begins, the same for all blocks. Who falls out meanwhile is lost: what is
 * not the same in all blocks then is put right by the one that ends last, so that of a rank all or nothing is there.
 *
 * Across scale-up domains a rank gives up on its rail for its domain, and says so where the domain looks: in a word for each source whose rows it
 * brings (`hello`, which such sources do not need for themselves). Whoever waits for anything of the source looks there, too. */
#ifndef EP_DEVICE_LL_MASK_H_
#define EP_DEVICE_LL_MASK_H_

#include "ll.h"

/* What `peer` has for this operation did not come, somewhere: it is left out of the whole operation. */
template <class C> DEV void ep_ll_lose(const C c, const epGroupArgs &g, const epLlOp &op, uint32_t peer) {
  p::st_relaxed_sys(ep_mask_words(c, g).lost + peer, op.gen);
}

/* Whole block: the windows of those who were lost are 0 in it from now on. True in the threads that found one. */
template <class C> DEV bool ep_ll_leaves_lost(const C c, const epGroupArgs &g, uint32_t gen) {
  const uint32_t *words = ep_mask_words(c, g).lost;
  bool any = false;
#pragma unroll 1
  for (uint32_t r = p::tid(); r < c.ranks; r += c.threads) {
    bool lost = p::ld_relaxed_sys(words + r) == gen;
    if (lost) p::sts<uint64_t>(ep_ll_window_at(r), 0);
    any = any || lost;
  }
  return any;
}

/* Whole block, at its end: true in the last one of the operation where somebody was lost, and is left out there. The masks of now are those of
 * the next operation. */
template <class C> DEV bool ep_ll_repairs(const C c, const epGroupArgs &g, uint32_t blocks) {
  epMaskSlot *state = ep_mask_slot(c, g);
  epMaskWords w = ep_mask_words(c, g);
  bool last = true;
  p::sync_threads();
  if (p::tid() == 0) last = p::atomic_add_acq_rel_gpu(&state->finished, 1) == blocks - 1;
  if (!ep_block_agrees(last)) return false;
  uint32_t gen = p::ld_relaxed_sys(&ep_state(g)->stageGen) + (c.part == EP_PART_SEND); /* which has left it as it was */
  bool any = ep_ll_leaves_lost(c, g, gen);
#pragma unroll 1
  for (uint32_t r = p::tid(); r < c.ranks; r += c.threads) p::st_relaxed_sys(w.left + r, ep_masked(c, g, r) ? 1 : 0);
  if (p::tid() == 0) p::st_relaxed_sys(&state->finished, 0);
  return !ep_block_agrees(!any);
}

/* The rank that brings `source` here has said that nothing more of it comes in this operation. */
template <class C> DEV bool ep_ll_gone(const C c, const epGroupArgs &g, const epLlOp &op, uint32_t source) {
  return c.mask && ep_is_far(c, g, source) &&
         p::ld_relaxed_sys(ep_hello(g, ep_ll_window(g.rank), source, op.gen)) == ((uint64_t)op.gen << 32 | EP_LOST);
}

/* ep_await_word of what comes of `source`. */
template <class C>
DEV bool ep_ll_await_word(const C c, const epGroupArgs &g, const epLlOp &op, const uint64_t *word, uint32_t phase,
                          uint32_t source, uint32_t *value) {
  if (!c.mask || !ep_is_far(c, g, source)) return ep_await_word(c, g, word, op.gen, phase, source, value);
  bool lost = ep_masked(c, g, source);
  bool came = !lost && ep_await_word(c, g, word, op.gen, phase, ep_bringer(c, g, source), value,
                                     [&]() { return lost = ep_ll_gone(c, g, op, source); });
  return ep_brought(c, g, came || lost, lost, phase, source, op.gen);
}

#endif
