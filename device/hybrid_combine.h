/* Combine across scale-up domains, the mirror of dispatch: a domain's ranks sum their slots and store one row to the rank of
 * their domain that stands for the token's rank (itself, or the one of its index); that one sums the domain's rows and puts
 * one row home by GIN; the token's rank sums its domains.
 *
 *   push      the first blocks: a warp a chunk of received rows; slots in ascending k, FP32, one rounding
 *   forward   then as many blocks as the channels fill: a warp is a channel and takes each C-th batch of tokens of its rail's
 *             ranks; ranks' rows in the order of the highest k each holds, FP32, one rounding
 *   reduce    the others: a warp a token; its own domain as forward does, then domains in the same order
 *
 * Each waits for those before it alone, here or elsewhere, so any number of resident blocks is enough. */
#ifndef EP_DEVICE_HYBRID_COMBINE_H_
#define EP_DEVICE_HYBRID_COMBINE_H_

#include "rail.h"
#include "numbers.h"

/* A token as one domain holds it: one row a rank, entering at lanes `ranks` in ascending k; this rank's own is made from its
 * slots, lanes `own`, and enters at `ownAt`. `address`: of the lane's row. */
struct epDomainSum {
  uint32_t ranks, ownAt, own;
  uint64_t address;
};

DEV uint64_t ep_lane_address(uint64_t v, uint32_t from) {
  uint32_t lo = p::shfl(p::FULL, (uint32_t)v, from), hi = p::shfl(p::FULL, (uint32_t)(v >> 32), from);
  return (uint64_t)hi << 32 | lo;
}

/* Sums of the lane's vectors of a part of a row (rail.h). */
struct epSums {
  epVec v[EP_WIDE];
};

DEV void ep_sums_zero(epSums &s) {
#pragma unroll
  for (int u = 0; u < EP_WIDE; u++) ep_vec_zero(s.v[u]);
}
template <class C> DEV void ep_sums_add(const C c, epSums &s, const epPart &x) {
#pragma unroll
  for (int u = 0; u < EP_WIDE; u++) ep_vec_add(c, s.v[u], x.v[u]);
}
template <class C> DEV epPart ep_sums_round(const C c, const epSums &s) {
  epPart x;
#pragma unroll
  for (int u = 0; u < EP_WIDE; u++) x.v[u] = ep_vec_round(c, s.v[u]);
  return x;
}

/* Whole warp: the part at `at` of the row of lane `from`. */
template <class C> DEV epPart ep_lane_part(const C c, uint64_t address, uint32_t from, uint32_t at) {
  return ep_part_load((const uint8_t *)ep_lane_address(address, from), at, c.rowBytes);
}

template <class C> DEV epPart ep_sum_own(const C c, const epDomainSum &s, uint32_t at) {
  epSums sum;
  ep_sums_zero(sum);
  for (uint32_t m = s.own; m; m &= m - 1) ep_sums_add(c, sum, ep_lane_part(c, s.address, p::ffs(m) - 1, at));
  return ep_sums_round(c, sum);
}

template <class C> DEV epPart ep_sum_domain(const C c, const epDomainSum &s, uint32_t at) {
  epSums sum;
  ep_sums_zero(sum);
  for (uint32_t m = s.ranks; m; m &= m - 1) {
    uint32_t from = p::ffs(m) - 1;
    ep_sums_add(c, sum, s.ownAt >> from & 1 ? ep_sum_own(c, s, at) : ep_lane_part(c, s.address, from, at));
  }
  return ep_sums_round(c, sum);
}

/* Whole warp: a row made part by part. */
template <class C, class F> DEV void ep_make_row(const C c, uint8_t *to, F make) {
  for (uint32_t at = 16 * p::lane(); at - 16 * p::lane() < c.rowBytes; at += EP_PART)
    ep_part_store(to, at, c.rowBytes, make(at));
}

/* This rank's slots of row j of source s: where lane k's lies, or EP_NONE when it has none or it was dropped. */
template <class C> DEV uint32_t ep_own_slot(const C c, const epCombineArgs &a, uint32_t s, uint32_t j, uint32_t entry) {
  uint32_t row = EP_NONE;
  if (entry != EP_NONE)
    row = c.layout == EP_LAYOUT_KIND_FLAT
              ? p::ldg<uint32_t>((const uint32_t *)(a.record + a.recordLayout.recvBase) + s) + j
              : ep_slot(c, a.recordLayout, a.record, s, entry);
  return row < a.capacity ? row : EP_NONE;
}

/* Lanes whose slots are summed: flat has one for all k. */
template <class C> DEV uint32_t ep_own_lanes(const C c, uint32_t row) {
  uint32_t lanes = p::ballot(p::FULL, row != EP_NONE);
  return c.layout == EP_LAYOUT_KIND_FLAT ? lanes & (0u - lanes) : lanes;
}

template <class C> DEV uint64_t ep_own_address(const C c, const epCombineArgs &a, uint32_t row) {
  return (uint64_t)(a.tokens + (uint64_t)(row == EP_NONE ? 0 : row) * c.rowBytes);
}

/* The weight that belongs to the lane's k in a backward pass. */
template <class C> DEV uint32_t ep_own_weight(const C c, const epCombineArgs &a, uint32_t row) {
  if (row == EP_NONE) return 0;
  uint64_t at = c.layout == EP_LAYOUT_KIND_FLAT ? (uint64_t)row * c.topk + p::lane() : row;
  return p::as_u32(p::ldg<float>(a.weights + at));
}

/* Where the lane's vectors of a token's sum start. */
template <class C> DEV epSums ep_sums_start(const C c, const epCombineArgs &b, uint32_t t, uint32_t v) {
  epSums total;
#pragma unroll
  for (uint32_t u = 0; u < EP_WIDE; u++) {
    if (c.bias && v + 512 * u < c.rowBytes)
      ep_vec_start(c, b.bias, (uint64_t)t * c.rowBytes + v + 512 * u, total.v[u]);
    else
      ep_vec_zero(total.v[u]);
  }
  return total;
}

#include "hybrid_slots.h"

/* ---- Push --------------------------------------------------------------------------------------------------------- */

/* Whole warp: chunk `chunk` of the rows of source s to the rank that stands for it. */
template <class C>
DEV void ep_combine_chunk(const C c, const epHybridCombineArgs &a, const epPlace &w, uint32_t s, uint32_t chunk,
                          uint32_t gen) {
  const epCombineArgs &b = a.plain;
  uint32_t l = p::lane(), size = epChunkRows(c.rowBytes), o = s / w.ups, u = s % w.ups;
  uint32_t rows = p::ldg<uint32_t>((const uint32_t *)(b.record + b.recordLayout.recvCount) + s);
  if (chunk * size >= rows) return;
  for (uint32_t j = chunk * size; j < rows && j < (chunk + 1) * size; j++) {
    if (c.single) {
      ep_slots_push(c, a, w, s, j, gen);
      continue;
    }
    const uint32_t *meta = ep_record_meta(c, b.group, b.recordLayout, b.record, s, j);
    uint32_t row = ep_own_slot(c, b, s, j, l < c.topk ? p::ldg<uint32_t>(meta + 1 + l) : EP_NONE);
    epDomainSum sum = {0, 0, ep_own_lanes(c, row), ep_own_address(c, b, row)};
    uint32_t head = p::ldg<uint32_t>(meta);
    uint8_t *to = ep_sum_row(c, b.group, w, u, w.up, o, EP_META_PLACE_OF(head), EP_META_TOKEN(head));
    ep_make_row(c, to, [&](uint32_t at) { return ep_sum_own(c, sum, at); });
    if (c.weights && l < c.topk) p::stg<uint32_t>(to + c.rowBytes + 4 * l, ep_own_weight(c, b, row));
  }
  p::sync_warp();
  if (!c.single && l < size && chunk * size + l < rows) {
    uint32_t head = p::ldg<uint32_t>(ep_record_meta(c, b.group, b.recordLayout, b.record, s, chunk * size + l));
    p::st_release_sys(ep_sum_flag(c, b.group, a.hybrid, w, u, w.up, o, EP_META_PLACE_OF(head), EP_META_TOKEN(head)),
                      gen);
  }
}

/* Chunks of all sources but those this rank stands for, which take turns. */
template <class C>
DEV void ep_combine_pushers(const C c, const epHybridCombineArgs &a, uint32_t gen, uint32_t kind, bool move) {
  const epCombineArgs &b = a.plain;
  epPlace w = ep_place(c, b.group);
  uint32_t warps = c.threads / 32, size = epChunkRows(c.rowBytes), others = w.ups - 1, sources = others * w.domains;
  uint32_t most = ep_most_received(c, (const uint32_t *)(b.record + b.recordLayout.recvCount));
  uint64_t items = move ? (uint64_t)((most + size - 1) / size) * sources : 0;
  if (!ep_domain_credits(c, b.group, a.hybrid, gen, kind, EP_PHASE_COMBINE_CREDIT)) return;
  for (uint64_t i = p::bid() * warps + p::warp(); i < items; i += b.pushBlocks * warps) {
    uint32_t turn = (uint32_t)(i % sources), o = turn / others, u = (w.up + 1 + turn % others) % w.ups;
    if (!ep_left(c, ep_left_near(c, u))) ep_combine_chunk(c, a, w, o * w.ups + u, (uint32_t)(i / sources), gen);
  }
  if (!c.mask && p::bid() == 0 && ep_rail_credits(c, b.group, a.hybrid, gen, kind, EP_PHASE_COMBINE_CREDIT))
    ep_domain_greeted(c, b.group, gen, kind, EP_PHASE_COMBINE_ROWS);
}

/* ---- A domain's sum ----------------------------------------------------------------------------------------------- */

/* Whole warp: the rows that this domain holds of token t of my rail's rank in domain o. `here`: the lane's k is with `owner` of this
 * domain; if that is this rank, as entry `entry` of row `row`. False: gave up. */
template <class C>
DEV bool ep_combine_domain(const C c, const epHybridCombineArgs &a, const epPlace &w, uint32_t o, uint32_t t, bool here,
                           uint32_t owner, uint32_t row, uint32_t entry, uint32_t gen, epDomainSum *sum,
                           uint32_t *weight) {
  const epCombineArgs &b = a.plain;
  uint32_t l = p::lane(), mates = p::match_any(p::FULL, here ? owner : ep_lone_key()), s = o * w.ups + w.up;
  bool last = here && (mates >> l) == 1, mine = here && owner == w.rank, ok = true; /* last: highest k of its rank */
  uint32_t placed = p::ballot(p::FULL, here && !mine && (mates & ep_lanes_below()) == 0);
  uint32_t place = p::popc(placed & ((1u << (p::ffs(mates) - 1)) - 1));
  if (last && !mine && c.bug != EP_BUG_SKIP_WAIT)
    ok = ep_await_flag(c, b.group, ep_sum_flag(c, b.group, a.hybrid, w, w.up, owner % w.ups, o, place, t), gen,
                       EP_PHASE_COMBINE_ROWS, owner);
  if (!ep_parts_stay(c, b.group, ok, mates, &here)) return false;
  last = last && here;
  p::sync_warp();
  uint32_t slot = mine ? ep_own_slot(c, b, s, row, entry) : EP_NONE;
  const uint8_t *staged = here && !mine ? ep_sum_row(c, b.group, w, w.up, owner % w.ups, o, place, t) : nullptr;
  sum->own = ep_own_lanes(c, slot);
  sum->ranks = p::ballot(p::FULL, last && (!mine || sum->own));
  sum->ownAt = p::ballot(p::FULL, last && mine && sum->own);
  sum->address = mine ? ep_own_address(c, b, slot) : (uint64_t)staged;
  if (c.weights) *weight = mine ? ep_own_weight(c, b, slot) : here ? p::ldg<uint32_t>(staged + c.rowBytes + 4 * l) : 0;
  return true;
}

/* ---- Forward ------------------------------------------------------------------------------------------------------ */

/* Whole warp: token t of my rail's rank in domain o, if this domain holds any of it. False: gave up. */
template <class C>
DEV bool ep_combine_forward(const C c, const epHybridCombineArgs &a, const epPlace &w, const epChannel &ch, uint32_t o,
                            uint32_t t, uint32_t gen) {
  const epCombineArgs &b = a.plain;
  const epGroupArgs &g = b.group;
  epHybridRecord rec = epHybridRecordOf(b.recordLayout.bytes, w.domains, c.topk, g.maxTokens);
  const uint32_t *forward = (const uint32_t *)(b.record + rec.forward) + ((uint64_t)o * g.maxTokens + t) * c.topk;
  uint32_t l = p::lane(), decision = l < c.topk ? p::ldg<uint32_t>(forward + l) : EP_NONE, entry = EP_NONE, weight = 0;
  bool here = decision != EP_NONE;
  uint32_t owner = here ? EP_ENTRY_EXPERT(decision) / (c.experts / c.ranks) : 0,
           row = here ? EP_ENTRY_POS(decision) : 0;
  if (!p::ballot(p::FULL, here)) return true;
  if (here && owner == w.rank)
    entry = p::ldg<uint32_t>(ep_record_meta(c, g, b.recordLayout, b.record, o * w.ups + w.up, row) + 1 + l);
  if (c.single) {
    epSlots slots;
    if (!ep_slots_domain(c, a, w, o, t, here, owner, row, entry, gen, &slots)) return false;
    ep_slots_forward(c, a, w, ch, o, t, here, slots);
    return true;
  }
  epDomainSum sum;
  if (!ep_combine_domain(c, a, w, o, t, here, owner, row, entry, gen, &sum, &weight)) return false;
  uint64_t from = ep_rail_row(c, g, a.hybrid.layout.send, w.domain, o, t);
  uint8_t *to = ep_window(g, w.rank) + from;
  if (c.mask && !sum.ranks)
    ep_slot_move(c, to, 0); /* nothing is left of the token here */
  else
    ep_make_row(c, to, [&](uint32_t at) { return ep_sum_domain(c, sum, at); });
  if (c.weights && l < c.topk) p::stg<uint32_t>(to + c.rowBytes + 4 * l, weight);
  p::sync_warp();
  ep_channel_put(c, a.hybrid, ch, o, ep_rail_row(c, g, a.hybrid.layout.rail, o, w.domain, t), from,
                 c.rowBytes + (c.weights ? epWeightBytes(c.topk) : 0));
  return true;
}

template <class C>
DEV void ep_combine_forwarders(const C c, const epHybridCombineArgs &a, uint32_t gen, uint32_t kind, bool move) {
  const epCombineArgs &b = a.plain;
  epPlace w = ep_place(c, b.group);
  epHybridRecord rec = epHybridRecordOf(b.recordLayout.bytes, w.domains, c.topk, b.group.maxTokens);
  const uint32_t *fwdTokens = (const uint32_t *)(b.record + rec.fwdTokens);
  uint32_t channel = (p::bid() - b.pushBlocks) * (c.threads / 32) + p::warp(), channels = a.hybrid.layout.channels;
  uint32_t rows = ep_batch_rows(c, a.hybrid), most = 0;
  if (!ep_rail_credits(c, b.group, a.hybrid, gen, kind, EP_PHASE_COMBINE_CREDIT) || channel >= channels) return;
  epChannel ch = ep_channel(a.hybrid, w, channel);
  for (uint32_t o = 0; o < w.domains; o++) {
    uint32_t n = o == w.domain || ep_left(c, ep_left_rail(c, o)) ? 0 : p::ldg<uint32_t>(fwdTokens + o);
    most = n > most && move ? n : most;
  }
  for (uint32_t batch = channel; batch * rows < most; batch += channels) {
    if (c.bug == EP_BUG_GIN_SIGNAL_FIRST) ep_channel_tell(c, a.hybrid, w, ch, batch / channels + 1, true);
    for (uint32_t o = 0; o < w.domains; o++) {
      uint32_t n = o == w.domain || ep_left(c, ep_left_rail(c, o)) ? 0 : p::ldg<uint32_t>(fwdTokens + o);
      if (batch * rows >= n) continue;
      for (uint32_t t = batch * rows; t < n && t < (batch + 1) * rows; t++)
        if (!ep_combine_forward(c, a, w, ch, o, t, gen)) return;
      bool last = ep_last_batch(a.hybrid, batch, rows, n);
      if (p::lane() == 0) /* which made the puts before it, and met the warp behind each row */
        ep_channel_tell_one(c, a.hybrid, w, ch, o, ep_told_with(a.hybrid, batch, last), last);
    }
  }
  ep_channel_end(c, b.group, a.hybrid, w, ch);
}

/* ---- Reduce ------------------------------------------------------------------------------------------------------- */

/* Whole warp: token t of this rank. False: gave up. */
template <class C>
DEV bool ep_combine_token(const C c, const epHybridCombineArgs &a, const epPlace &w, uint32_t t, uint32_t gen) {
  const epCombineArgs &b = a.plain;
  const epGroupArgs &g = b.group;
  const epHybridGroup &h = a.hybrid;
  uint32_t l = p::lane(), locals = c.experts / c.ranks, batch = t / ep_batch_rows(c, h), row = 0, weight = 0;
  uint64_t at = (uint64_t)t * c.topk + l;
  int32_t e = l < c.topk ? p::ldg<int32_t>((const int32_t *)(b.record + b.recordLayout.topk) + at) : -1;
  uint32_t owner = e >= 0 ? (uint32_t)e / locals : 0, o = owner / w.ups, entry = EP_NONE;
  bool here = e >= 0 && o == w.domain, far = e >= 0 && o != w.domain, ok = true;
  uint32_t mates = p::match_any(p::FULL, e >= 0 ? o : ep_lone_key());
  bool last = e >= 0 && (mates >> l) == 1; /* highest k of its domain */
  if (here) {
    row = (uint32_t)p::ldg<int32_t>((const int32_t *)(b.record + b.recordLayout.sendRow) + at);
    if (owner == w.rank)
      entry = EP_ENTRY((uint32_t)e % locals,
                       (uint32_t)p::ldg<int32_t>((const int32_t *)(b.record + b.recordLayout.sendPos) + at));
  }
  if (far && last && c.bug != EP_BUG_SKIP_WAIT)
    ok = ep_wait_tail(c, g, h, w, o, batch % h.layout.channels, epTailOf(gen, batch / h.layout.channels + 1),
                      EP_PHASE_COMBINE_ROWS);
  if (!ep_parts_stay(c, g, ok, mates, &far)) return false;
  last = last && (here || far);
  if (c.single) {
    epSlots slots;
    if (!ep_slots_domain(c, a, w, w.domain, t, here, owner, row, entry, gen, &slots)) return false;
    ep_slots_sum(c, a, w, t, slots, far, owner, o);
    return true;
  }
  epDomainSum sum;
  if (!ep_combine_domain(c, a, w, w.domain, t, here, owner, row, entry, gen, &sum, &weight)) return false;
  const uint8_t *railed = far ? ep_window(g, w.rank) + ep_rail_row(c, g, h.layout.rail, w.domain, o, t) : nullptr;
  uint32_t all = p::ballot(p::FULL, last && (far || sum.ranks)), near = p::ballot(p::FULL, last && here);
  ep_make_row(c, b.outTokens + (uint64_t)t * c.rowBytes, [&](uint32_t v) {
    epSums total = ep_sums_start(c, b, t, v);
    for (uint32_t m = all; m; m &= m - 1) {
      uint32_t from = p::ffs(m) - 1;
      ep_sums_add(c, total, near >> from & 1 ? ep_sum_domain(c, sum, v) : ep_lane_part(c, (uint64_t)railed, from, v));
    }
    return ep_sums_round(c, total);
  });
  if (c.weights && far) weight = p::ldg<uint32_t>(railed + c.rowBytes + 4 * l);
  if (c.weights && l < c.topk) p::stg<float>(b.outWeights + at, p::as_float(weight));
  return true;
}

template <class C>
DEV void ep_combine_reducers(const C c, const epHybridCombineArgs &a, uint32_t gen, uint32_t firstBlock, bool move) {
  const epCombineArgs &b = a.plain;
  epPlace w = ep_place(c, b.group, a.hybrid, gen);
  uint32_t warps = c.threads / 32, tokens = move ? ep_tokens(b.recordLayout, b.record, b.numTokens) : 0;
  uint32_t channels = a.hybrid.layout.channels;
  for (uint32_t t = (p::bid() - firstBlock) * warps + p::warp(); t < tokens; t += (b.blocks - firstBlock) * warps)
    if (!ep_combine_token(c, a, w, t, gen)) return;
  /* What is on its way must have come before the group may end, and before the next operation's tails are read. */
  bool ok = p::bid() == b.blocks - 1;
  for (uint32_t i = p::tid(); i < w.domains * channels && ok; i += c.threads)
    if (i / channels != w.domain)
      ok = ep_wait_tail(c, b.group, a.hybrid, w, i / channels, i % channels, epTailOf(gen + 1, 0),
                        EP_PHASE_COMBINE_ROWS) ||
           !ep_stopped(c, b.group);
}

template <class C> DEV void ep_hybrid_combine(const C c, const epHybridCombineArgs &a) {
  if (!a.plain.group.windows) /* a rehearsal */
    return;
  p::grid_wait();
  ep_block_begins(c);
  const epCombineArgs &b = a.plain;
  epProfile profile = ep_profile_begin(b.group, EP_KERNEL_HYBRID_COMBINE);
  uint32_t gen = p::ldg<uint32_t>(&ep_state(b.group)->stageGen) + 1;
  uint32_t reduce = c.part == EP_PART_RECEIVE ? 0 : b.pushBlocks + epChannelBlocks(a.hybrid.layout.channels, c.threads);
  uint32_t made = ep_record_made(b.recordLayout, b.record), kind = ep_kind(c, EP_KERNEL_HYBRID_COMBINE, made);
  if (made) {
    bool move = ep_record_current(c, b.group, (const epRecordHeader *)(b.record + b.recordLayout.header));
    if (c.part == EP_PART_RECEIVE) ep_domain_greeted(c, b.group, gen, kind, EP_PHASE_COMBINE_ROWS);
    if (c.part != EP_PART_RECEIVE && p::bid() < b.pushBlocks)
      ep_combine_pushers(c, a, gen, kind, move);
    else if (p::bid() < reduce)
      ep_combine_forwarders(c, a, gen, kind, move);
    else
      ep_combine_reducers(c, a, gen, reduce, move);
  }
  p::grid_launch();
  ep_hybrid_end(c, b.group, a.hybrid, gen, b.blocks);
  ep_profile_end(profile, p::bid() < reduce ? EP_SPAN_SEND : EP_SPAN_RECEIVE, b.blocks);
}

#endif
