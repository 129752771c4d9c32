/* Low-latency combine across scale-up domains: the kernel of ll_combine.h, where a domain's rows for a token of another domain go to the rank that stands for the
 * token's, and
 *
 *   weights   3-D expert-major: block 0 puts this rank's to its rails, and stores what comes from them inside this domain
 *   forward   the last of the blocks that send: a warp a strip of a token of a rail's rank: this domain's ranks in the order of the highest k that each holds, FP32,
 *             rounded once; one row a domain crosses the network, a tail a chunk
 *   reduce    the own domain's ranks as one domain's kernel does, then the domains in the same order
 */
#ifndef EP_DEVICE_HYBRID_LL_COMBINE_H_
#define EP_DEVICE_HYBRID_LL_COMBINE_H_

#include "hybrid_ll.h"
#include "ll_combine.h"

/* ---- Weights, 3-D -------------------------------------------------------------------------------------------------- */

/* `n`: of this rank. */
template <class C>
DEV void ep_ll_weights_far(const epLlRail &net, const C c, const epLlCombineArgs &a, const epLlOp &op, uint32_t n) {
  epPlace w = ep_place(c, a.group);
  epHybridRecord rec = ep_ll_rail_record(c, a.group, a.recordLayout);
  uint64_t out = net.h.layout.outMeta, section = (uint64_t)a.group.maxTokens * c.topk;
#pragma unroll 1
  for (uint32_t i = p::tid(); i < n; i += c.threads)
    p::stg<float>((float *)(ep_ll_window(w.rank) + out) + i, p::ldg<float>(a.weights + i));
  p::sync_threads();
#pragma unroll 1
  for (uint32_t o = p::tid(); o < w.domains; o += c.threads) {
    if (o == w.domain || ep_ll_rail_left_out(c, w, o)) continue;
    ep_ll_put_message(c, a.group, net.h, w, o, op.gen,
                      {ep_ll_rail_weights(a.group, net.h, w, op.gen, w.domain), out, 4 * n});
  }
  auto store = [&](uint32_t o, uint32_t k, uint32_t step) {
    const uint32_t *told = (const uint32_t *)(ep_ll_window(w.rank) + ep_ll_rail_weights(a.group, net.h, w, op.gen, o));
    const int32_t *forward = (const int32_t *)(a.record + rec.forward) + o * section;
    uint32_t theirs = c.topk * p::ldg<uint32_t>((const uint32_t *)(a.record + rec.fwdTokens) + o);
    if (!ep_ll_wait_message(c, a.group, net.h, w, o, op.gen, EP_PHASE_COMBINE_ROWS))
      return ep_ll_rail_missing(c, a.group, w, o, op.gen);
#pragma unroll 1
    for (uint32_t i = 32 * k + p::lane(); i < theirs; i += 32 * step) {
      int32_t e = p::ldg<int32_t>(forward + i);
      if (e >= 0 && !ep_ll_left_out(c, (uint32_t)e / (c.experts / c.ranks)))
        p::st_relaxed_sys(ep_ll_weights(c, a, op, (uint32_t)e / (c.experts / c.ranks), o * w.ups + w.up) + i,
                          (uint64_t)op.gen << 32 | p::ldg<uint32_t>(told + i));
    }
    return true;
  };
  (void)ep_ll_each_domain(w, p::warp(), c.threads / 32, store);
  ep_ll_sent_far(net, c, a.group, 0, 1, 1);
}

/* ---- Forward ------------------------------------------------------------------------------------------------------- */

/* Where the rows for tokens of the rail's rank in domain o lie, and where their sums go. */
struct epLlForward {
  enum { shares = 0 }; /* this rank's rows are staged like the others' */
  const epHybridGroup &h;
  const epPlace &w;
  uint32_t o;
};
DEV uint32_t ep_ll_writer(const epLlForward &net, uint32_t owner) { return net.o * net.w.ups + owner % net.w.ups; }
template <class C> DEV bool ep_ll_unwanted(const epLlForward &net, const C c, const epGroupArgs &g) {
  return ep_rail_masked(c, g, net.o);
}
template <class C>
DEV bool ep_ll_reduced(const epLlForward &net, const C, const epLlCombineArgs &a, const epLlOp &, uint32_t t,
                       uint32_t strip, uint32_t bytes, const epLlToken &, const uint4 *out) {
  ep_ll_store(ep_ll_window(net.w.rank) + ep_ll_send_row(a.group, net.h, epRegionOf(net.w.domain, net.o), t) +
                  ep_ll_rail_head(a.group) + strip * EP_STRIP_DATA,
              bytes, out);
  return true;
}

/* Whole block: chunk i of the rail's rank in domain o. False: gave up. */
template <class C>
DEV bool ep_ll_forward_chunk(const C c, const epHybridLlCombineArgs &b, const epPlace &w, const epLlOp &op, uint32_t o,
                             uint32_t i, uint32_t tokens) {
  const epLlCombineArgs &a = b.plain;
  epLlForward net = {b.hybrid, w, o};
  uint32_t t0 = i * epLlChunkTokens(c.topk), n = epLlChunkTokens(c.topk), strips = epLlStrips(c.rowBytes),
           l = p::lane(), some = 0;
  const int32_t *forward = (const int32_t *)(a.record + ep_ll_rail_record(c, a.group, a.recordLayout).forward);
  n = t0 + n < tokens ? n : tokens - t0;
  auto decided = [&](uint32_t x) { /* the lane's */
                                   return l < c.topk
                                              ? p::ldg<int32_t>(forward +
                                                                ((uint64_t)o * a.group.maxTokens + t0 + x) * c.topk + l)
                                              : -1;
  };
#pragma unroll 1
  for (uint32_t x = 0; x < n; x++) some |= (uint32_t)(p::ballot(p::FULL, decided(x) >= 0) != 0) << x;
  auto sums = [&]() {
    bool ok = true;
#pragma unroll 1
    for (uint32_t item = p::warp(); item < n * strips && ok; item += c.threads / 32) {
      uint32_t x = item / strips;
      epLlToken token = {decided(x), 0};
      if (some >> x & 1) ok = ep_ll_reduce<1>(net, c, a, op, t0 + x, item % strips, token);
    }
    return ep_block_agrees(ok);
  };
  while (!sums()) { /* with masks again, without who was lost, so that all strips are alike */
    if (!c.mask || !ep_block_agrees(!ep_stopped(c, a.group))) return false;
    if (!ep_block_agrees(!ep_rail_masked(c, a.group, o))) return true;
    (void)ep_ll_leaves_lost(c, a.group, op.gen);
    p::sync_threads();
  }
  if (p::tid() == 0)
    ep_ll_put_chunk(c, a.group, b.hybrid, w, o, i, op.gen, some,
                    ep_ll_send_row(a.group, b.hybrid, epRegionOf(w.domain, o), t0), ep_ll_rail_head(a.group),
                    c.rowBytes);
  return true;
}

template <class C> DEV void ep_ll_forward(const C c, const epHybridLlCombineArgs &b, const epLlRail &net) {
  const epLlCombineArgs &a = b.plain;
  epPlace w = ep_place(c, a.group);
  const uint32_t *fwdTokens = (const uint32_t *)(a.record + ep_ll_rail_record(c, a.group, a.recordLayout).fwdTokens);
  uint32_t first = p::bid() - (a.pushBlocks - a.forwardBlocks), most = 0;
  bool ok = true;
  epLlOp op = ep_ll_begin(
      c, a.group, []() {}, []() {});
  if (op.lost || !ep_record_current(c, a.group, ep_ll_header(a))) return ep_ll_end(c, a.group, op, a.blocks);
  auto tokensOf = [&](uint32_t o) { return ep_ll_rail_left_out(c, w, o) ? 0 : p::ldg<uint32_t>(fwdTokens + o); };
#pragma unroll 1
  for (uint32_t o = 0; o < w.domains; o++) {
    uint32_t n = ep_ll_chunks(c, tokensOf(o));
    most = n > most ? n : most;
  }
#pragma unroll 1
  for (uint32_t i = first; i < most && ok; i += a.forwardBlocks) {
#pragma unroll 1
    for (uint32_t q = 1; q < w.domains && ok; q++) {
      uint32_t o = (w.domain + q) % w.domains, tokens = tokensOf(o);
      if (i < ep_ll_chunks(c, tokens)) ok = ep_ll_forward_chunk(c, b, w, op, o, i, tokens);
    }
  }
  if (ok) ep_ll_sent_far(net, c, a.group, first, most, a.forwardBlocks);
  ep_ll_end(c, a.group, op, a.blocks);
}

/* ---- Reduce -------------------------------------------------------------------------------------------------------- */

DEV uint32_t ep_ll_writer(const epLlRail &, uint32_t owner) { return owner; }

/* `out`: of the own domain, if the token has any of it. */
template <class C>
DEV bool ep_ll_reduced(const epLlRail &net, const C c, const epLlCombineArgs &a, const epLlOp &op, uint32_t t,
                       uint32_t strip, uint32_t bytes, const epLlToken &x, const uint4 *out) {
  epPlace w = ep_place(c, a.group);
  uint32_t l = p::lane(), owner = x.expert >= 0 ? (uint32_t)x.expert / (c.experts / c.ranks) : 0, o = owner / w.ups;
  bool counts = x.expert >= 0 && !ep_ll_unchosen(c, owner); /* others give a domain no place */
  uint32_t mates = ep_ll_same(counts, o, w.domains),
           buffer = ep_ll_buffer(c, EP_KERNEL_LL_COMBINE) + EP_STRIP_DATA + 16 * l;
  uint4 y[EP_STRIP_VECTORS];
  epLlSum sum;
#pragma unroll
  for (uint32_t i = 0; i < EP_STRIP_VECTORS; i++) /* where this rank's share was */
    p::sts<uint4>(buffer + 512 * i, out[i]);
  ep_ll_sum_zero(sum);
#pragma unroll 1
  for (uint32_t m = p::ballot(p::FULL, counts && (mates >> l) == 1); m; m &= m - 1) { /* the highest k of each domain */
    uint32_t from = p::shfl(p::FULL, o, p::ffs(m) - 1);
    if (from == w.domain) {
#pragma unroll
      for (uint32_t i = 0; i < EP_STRIP_VECTORS; i++) y[i] = p::lds<uint4>(buffer + 512 * i);
    } else if (ep_ll_rail_left_out(c, w, from)) {
      continue;
    } else {
      if (!ep_ll_wait_chunk(c, a.group, net.h, w, from, t / epLlChunkTokens(c.topk), op.gen, EP_PHASE_COMBINE_ROWS)) {
        if (!c.mask || p::ballot(p::FULL, ep_stopped(c, a.group))) return false;
        ep_ll_lose(c, a.group, op, from * w.ups + w.up);
        continue;
      }
      ep_ll_load(ep_ll_window(w.rank) + ep_ll_rail_row(a.group, net.h, w, op.gen, w.domain, from, t) +
                     ep_ll_rail_head(a.group) + strip * EP_STRIP_DATA,
                 bytes, y);
    }
    ep_ll_sum_add(c, sum, y);
  }
  ep_ll_sum_round(c, sum, y);
  ep_ll_store(a.outTokens + (uint64_t)t * c.rowBytes + strip * EP_STRIP_DATA, bytes, y);
  return true;
}

/* What nobody waited for is on its way as well: rows' tails of chunks without a row. */
template <class C>
DEV void ep_ll_rows_came(const epLlRail &net, const C c, const epLlCombineArgs &a, const epLlOp &op) {
  epPlace w = ep_place(c, a.group);
  uint32_t chunks = ep_ll_chunks(c, ep_ll_tokens(a.record, a.recordLayout, a.numTokens, a.tokensHeld));
  uint32_t used = chunks < net.h.layout.channels ? chunks : net.h.layout.channels;
#pragma unroll 1
  for (uint32_t i = p::lane(); i < w.domains * used; i += 32)
    if (i / used != w.domain &&
        !ep_ll_wait_tail(c, a.group, net.h, w, i / used, i % used, op.gen,
                         ep_ll_channel_chunks(net.h, chunks, i % used), EP_PHASE_COMBINE_ROWS) &&
        ep_stopped(c, a.group))
      return;
}

template <class C> DEV void ep_hybrid_ll_combine(const C c, const epHybridLlCombineArgs &b) {
  const epLlCombineArgs &a = b.plain;
  if (!a.group.windows) /* a rehearsal */
    return;
  epLlRail net = {b.hybrid};
  p::grid_wait();
  ep_block_begins(c);
  epProfile profile = ep_profile_begin(a.group, EP_KERNEL_HYBRID_LL_COMBINE);
  uint32_t returning = a.pushBlocks - a.forwardBlocks;
  if (c.part == EP_PART_RECEIVE || (c.part == EP_PART_WHOLE && p::bid() >= a.pushBlocks))
    ep_ll_reduce_all(c, a, net);
  else if (p::bid() >= a.pushBlocks)
    ep_ll_greeter(c, a, net);
  else if (p::bid() >= returning)
    ep_ll_forward(c, b, net);
  else if (p::bid() == 0 && c.layout == EP_LAYOUT_KIND_EXPERT_MAJOR_3D)
    ep_ll_send_weights(c, a, net);
  else
    ep_ll_return(c, a, returning);
  if (c.mask && ep_ll_repairs(c, a.group, a.blocks) &&
      c.part != EP_PART_SEND) /* what is lost in the sending part is so in the other */
    ep_ll_reduce_again(c, a, net);
  ep_profile_end(profile, p::bid() >= a.pushBlocks ? EP_SPAN_RECEIVE : EP_SPAN_SEND, a.blocks);
}

#endif
