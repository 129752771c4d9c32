/* Low-latency dispatch across scale-up domains: the kernel of ll_dispatch.h, and for ranks of other domains
 *
 *   clerk     block 0 puts what counts its decisions come to there to the rails, and stores what comes from them inside this domain
 *   push      a token's row goes into this rank's window once, with the places that it gets everywhere, and from there to the rail of each domain that wants
 *             it; a tail a chunk
 *   forward   blocks of their own, behind those: a warp a strip of a row that came by a rail, as head and units to the ranks of this domain that it is for, and
 *             what combine must know of it into the record
 *
 * Beside the trips of one domain that is one over the network, and one more inside the domain. */
#ifndef EP_DEVICE_HYBRID_LL_DISPATCH_H_
#define EP_DEVICE_HYBRID_LL_DISPATCH_H_

#include "hybrid_ll.h"
#include "ll_dispatch.h"

/* ---- Counts -------------------------------------------------------------------------------------------------------- */

/* For each domain: entries of each expert and rows of each rank, and T. */
template <class C>
DEV void ep_ll_counts_to_far(const epLlRail &net, const C c, const epLlDispatchArgs &a, const epLlOp &op, uint32_t T) {
  epPlace w = ep_place(c, a.group);
  uint32_t locals = c.experts / c.ranks, words = ep_ll_domain_words(c), last = epDomainWords(w.ups, c.experts, c.ranks);
  uint64_t out = net.h.layout.outCounts;
#pragma unroll 1
  for (uint32_t i = p::tid(); i < w.domains * words; i += c.threads) {
    uint32_t o = i / words, j = i % words, rank = o * w.ups + j / (locals + 1), word = j % (locals + 1);
    if (o == w.domain) continue;
    uint32_t v =
        j >= last ? T : p::lds<uint32_t>(word < locals ? ep_ll_sum(c, rank * locals + word) : ep_ll_rows_sum(c, rank));
    p::stg<uint32_t>((uint32_t *)(ep_ll_window(w.rank) + out) + i, v);
  }
  p::sync_threads();
#pragma unroll 1
  for (uint32_t o = p::tid(); o < w.domains; o += c.threads) {
    if (o == w.domain || ep_ll_rail_left_out(c, w, o)) continue;
    ep_ll_put_message(c, a.group, net.h, w, o, op.gen,
                      {ep_ll_rail_counts(c, net.h, w, op.gen, w.domain), out + 4ull * o * words, 4 * words});
  }
}

/* What a message says: T of the rail's rank in domain o. */
template <class C>
DEV uint32_t ep_ll_rail_tokens(const C c, const epHybridGroup &h, const epPlace &w, uint32_t gen, uint32_t o) {
  return p::ldg<uint32_t>((const uint32_t *)(ep_ll_window(w.rank) + ep_ll_rail_counts(c, h, w, gen, o)) +
                          epDomainWords(w.ups, c.experts, c.ranks));
}

template <class C>
DEV bool ep_ll_counts_from_far(const epLlRail &net, const C c, const epLlDispatchArgs &a, const epLlOp &op) {
  epPlace w = ep_place(c, a.group);
  epHybridRecord rec = ep_ll_rail_record(c, a.group, a.recordLayout);
  uint32_t *fwdTokens = (uint32_t *)(a.record + rec.fwdTokens), locals = c.experts / c.ranks,
           words = w.ups * (locals + 1);
  auto store = [&](uint32_t o, uint32_t k, uint32_t step) {
    if (!ep_ll_wait_message(c, a.group, net.h, w, o, op.gen, EP_PHASE_UPDATE_COUNTS)) {
      if (c.mask && k == 0 && p::lane() == 0) p::stg<uint32_t>(fwdTokens + o, 0);
      return ep_ll_rail_missing(c, a.group, w, o, op.gen);
    }
    const uint32_t *told = (const uint32_t *)(ep_ll_window(w.rank) + ep_ll_rail_counts(c, net.h, w, op.gen, o));
#pragma unroll 1
    for (uint32_t i = 32 * k + p::lane(); i < words; i += 32 * step)
      if (!ep_ll_left_out(c, w.domain * w.ups + i / (locals + 1)))
        p::st_relaxed_sys(ep_ll_counts(c, a, op, w.domain * w.ups + i / (locals + 1), o * w.ups + w.up) +
                              i % (locals + 1),
                          (uint64_t)op.gen << 32 | p::ldg<uint32_t>(told + i));
    if (k == 0 && p::lane() == 0) p::stg<uint32_t>(fwdTokens + o, ep_ll_rail_tokens(c, net.h, w, op.gen, o));
    return true;
  };
  if (p::tid() == 0) p::stg<uint32_t>(fwdTokens + w.domain, 0);
  return ep_block_agrees(ep_ll_each_domain(w, p::warp(), c.threads / 32, store));
}

/* ---- Push ---------------------------------------------------------------------------------------------------------- */

/* The domain of the lane's decision, EP_NONE where it is none or this rank's. */
DEV uint32_t ep_ll_far_domain(const epPlace &w, uint32_t own) {
  uint32_t o = (own >> EP_ENTRY_POS_BITS) / w.ups;
  return own == EP_NONE || o == w.domain ? EP_NONE : o;
}

template <class C>
DEV void ep_ll_strip_to_far(const epLlRail &net, const C c, const epLlDispatchArgs &a, const epLlOp &op, uint32_t t,
                            uint32_t strip, uint32_t entry, uint32_t own, const epLlOwn &x) {
  epPlace w = ep_place(c, a.group);
  uint32_t l = p::lane();
  if (p::ballot(p::FULL, ep_ll_far_domain(w, own) != EP_NONE) == 0) return;
  uint8_t *row = ep_ll_window(w.rank) + ep_ll_send_row(a.group, net.h, 0, t);
  uint32_t *head = (uint32_t *)row;
  if (strip == 0) {
    if (l == 0) p::stg<uint32_t>(head, op.gen);
    if (l < c.topk) {
      p::stg<uint32_t>(head + 1 + l, entry);
      p::stg<uint32_t>(head + 1 + c.topk + l, own);
      p::stg<uint32_t>(head + 1 + 2 * c.topk + l, x.weight);
    }
  }
  ep_ll_store(row + ep_ll_rail_head(a.group) + strip * EP_STRIP_DATA, ep_ll_bytes(c, strip), x.v);
}

/* The chunk's rows to each domain that wants them, then its tail to all. */
template <class C>
DEV void ep_ll_tokens_to_far(const epLlRail &net, const C c, const epLlDispatchArgs &a, const epLlOp &op, uint32_t t0,
                             uint32_t own) {
  epPlace w = ep_place(c, a.group);
  uint32_t mine = ep_ll_far_domain(w, own);
  if (p::warp() != 0) return;
#pragma unroll 1
  for (uint32_t from = 0; from < w.domains; from += 32) {
    uint32_t o = from + p::lane(), wants = 0, rows = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < 32 && from + i < w.domains; i++) {
      uint32_t lanes = p::ballot(p::FULL, mine == from + i);
      wants = i == p::lane() ? lanes : wants;
    }
    if (o >= w.domains || o == w.domain || ep_ll_rail_left_out(c, w, o)) continue;
#pragma unroll
    for (uint32_t i = 0; i < epLlChunkTokens(c.topk); i++)
      rows |= (uint32_t)((wants >> i * c.topk & ep_ll_token_lanes(c)) != 0) << i;
    ep_ll_put_chunk(c, a.group, net.h, w, o, t0 / epLlChunkTokens(c.topk), op.gen, rows,
                    ep_ll_send_row(a.group, net.h, 0, t0), 0, ep_ll_rail_head(a.group) + ep_ll_travels(c));
  }
}

/* ---- Forward ------------------------------------------------------------------------------------------------------- */

/* A warp: strip of row t of the rail's rank in domain o, which has come or will not. */
template <class C>
DEV void ep_ll_forward_strip(const C c, const epHybridLlDispatchArgs &b, const epPlace &w, const epLlOp &op, uint32_t o,
                             uint32_t t, uint32_t strip) {
  const epLlDispatchArgs &a = b.plain;
  uint32_t l = p::lane(), entry = EP_NONE, own = EP_NONE, weight = 0, locals = c.experts / c.ranks,
           source = o * w.ups + w.up;
  const uint8_t *row = ep_ll_window(w.rank) + ep_ll_rail_row(a.group, b.hybrid, w, op.gen, w.domain, o, t);
  const uint32_t *head = (const uint32_t *)row;
  bool came = p::ldg_any<uint32_t>(head) == op.gen;
  if (came && l < c.topk) {
    p::confirm(head, 4);
    entry = p::ldg<uint32_t>(head + 1 + l);
    own = p::ldg<uint32_t>(head + 1 + c.topk + l);
    weight = p::ldg<uint32_t>(head + 1 + 2 * c.topk + l);
  }
  uint32_t owner = own >> EP_ENTRY_POS_BITS;
  bool here = own != EP_NONE && owner / w.ups == w.domain;
  if (strip == 0 && l < c.topk) {
    epHybridRecord rec = ep_ll_rail_record(c, a.group, a.recordLayout);
    p::stg<int32_t>((int32_t *)(a.record + rec.forward) + ((uint64_t)o * a.group.maxTokens + t) * c.topk + l,
                    here ? (int32_t)(owner * locals + EP_ENTRY_EXPERT(entry)) : -1);
  }
  here = here && !ep_ll_left_out(c, owner); /* the record keeps it: combine leaves it out itself */
  uint32_t same = ep_ll_same(here, here ? owner : 0, c.ranks),
           sends = p::ballot(p::FULL, here && (same & ep_lanes_below()) == 0);
  if (!sends) return;
  uint32_t bytes = ep_ll_bytes(c, strip);
  uint4 x[EP_STRIP_VECTORS], u[EP_STRIP_UNITS];
  ep_ll_load(row + ep_ll_rail_head(a.group) + strip * EP_STRIP_DATA, bytes, x);
  ep_ll_to_units(ep_ll_buffer(c, EP_KERNEL_LL_DISPATCH), op.gen, x, u);
#pragma unroll 1
  for (uint32_t m = sends; m; m &= m - 1) {
    uint32_t to = p::shfl(p::FULL, own, p::ffs(m) - 1), dst = to >> EP_ENTRY_POS_BITS;
    if (strip == 0) ep_ll_send_head(c, a, op, source, t, dst, EP_ENTRY_POS(to), own == to ? entry : EP_NONE, weight);
    ep_ll_send(ep_ll_window(dst) + strip * EP_STRIP_BYTES +
                   epLlStageRow(&a.window, c.ranks, a.group.maxTokens, op.gen, dst, source, EP_ENTRY_POS(to)),
               bytes, u);
  }
}

/* A domain's rows as they come, strips of a row side by side. */
template <class C> DEV void ep_ll_forward(const C c, const epHybridLlDispatchArgs &b) {
  const epLlDispatchArgs &a = b.plain;
  epPlace w = ep_place(c, a.group);
  uint32_t before = a.pushBlocks + 1, warps = a.forwardBlocks * (c.threads / 32),
           index = p::warp() * a.forwardBlocks + p::bid() - before;
  uint32_t strips = epLlStrips(ep_ll_travels(c));
  epLlOp op = ep_ll_begin(
      c, a.group, []() {}, []() {});
  auto forward = [&](uint32_t o, uint32_t k, uint32_t step) {
    if (!ep_ll_wait_message(c, a.group, b.hybrid, w, o, op.gen, EP_PHASE_UPDATE_COUNTS))
      return ep_ll_rail_missing(c, a.group, w, o, op.gen);
    uint32_t items = strips * ep_ll_rail_tokens(c, b.hybrid, w, op.gen, o);
#pragma unroll 1
    for (uint32_t i = k; i < items; i += step) {
      if (!ep_ll_wait_chunk(c, a.group, b.hybrid, w, o, i / strips / epLlChunkTokens(c.topk), op.gen,
                            EP_PHASE_DISPATCH_ROWS))
        return ep_ll_rail_missing(c, a.group, w, o, op.gen);
      ep_ll_forward_strip(c, b, w, op, o, i / strips, i % strips);
    }
    return true;
  };
  if (!op.lost) (void)ep_ll_each_domain(w, index, warps, forward);
  ep_ll_end(c, a.group, op, a.blocks);
}

template <class C> DEV void ep_hybrid_ll_dispatch(const C c, const epHybridLlDispatchArgs &b) {
  const epLlDispatchArgs &a = b.plain;
  if (!a.group.windows) /* a rehearsal */
    return;
  epLlRail net = {b.hybrid};
  p::grid_wait();
  ep_block_begins(c);
  epProfile profile = ep_profile_begin(a.group, EP_KERNEL_HYBRID_LL_DISPATCH);
  uint32_t received = a.pushBlocks + 1 + a.forwardBlocks;
  if (p::bid() == 0)
    ep_ll_clerk(c, a, net);
  else if (c.part != EP_PART_RECEIVE && p::bid() <= a.pushBlocks)
    ep_ll_push(c, a, net);
  else if (c.part == EP_PART_SEND)
    ep_ll_greeter(c, a, net);
  else if (p::bid() < received)
    ep_ll_forward(c, b);
  else
    ep_ll_receive(c, a, net, received);
  if (c.mask && ep_ll_repairs(c, a.group, a.blocks)) ep_ll_empty(c, a);
  ep_profile_end(profile,
                 p::bid() == 0         ? EP_SPAN_RECORD
                 : p::bid() < received ? EP_SPAN_SEND
                                       : EP_SPAN_RECEIVE,
                 a.blocks);
}

#endif
