/* Dispatch across scale-up domains. A row crosses the scale-out link once for each domain that wants it, to the rank of the
 * sender's index there, and stays in that rank's window: the ranks of the domain that want it load it from there as soon as
 * they are told that it came. In the sender's own domain rows are stored into the receivers' staging, as in the plain kernel.
 *
 *   send      the first blocks; a warp is a channel and takes each C-th batch of tokens, which is some chunks: rows to the
 *             domain's ranks and a flag a chunk, rows to other domains by GIN and a tail a batch. Waits for nothing but credits
 *   forward   one block: watches the tails of this rank's rail and tells the domain how far each has come
 *   epilogue  the others: a warp a row, from the input, from staging or from a window of the domain, to its place or places
 *
 * A tail counts batches, not rows, so nobody need know which tokens a domain does not want. */
#ifndef EP_DEVICE_HYBRID_DISPATCH_H_
#define EP_DEVICE_HYBRID_DISPATCH_H_

#include "dispatch.h"
#include "hybrid_missing.h"
#include "rail.h"

/* One token on its way: lane k has its k-th choice. */
struct epToken {
  uint32_t token, owner, weight;
  uint32_t near, far; /* lanes that are the first of a rank of my domain, of another domain */
};

template <class C> DEV epToken ep_token(const C c, const epDispatchArgs &a, const epPlace &w, uint32_t t) {
  uint64_t at = (uint64_t)t * c.topk + p::lane();
  bool there = p::lane() < c.topk;
  int32_t e = there ? p::ldg<int32_t>((const int32_t *)(a.record + a.recordLayout.topk) + at) : -1;
  epToken k;
  k.token = t;
  k.owner = e >= 0 ? (uint32_t)e / (c.experts / c.ranks) : w.rank;
  k.weight = c.weights && there ? p::as_u32(p::ldg<float>(a.weights + at)) : 0;
  bool here = k.owner / w.ups == w.domain;
  uint32_t ranks = p::match_any(p::FULL, here && k.owner != w.rank ? k.owner : ep_lone_key());
  uint32_t domains = p::match_any(p::FULL, here ? ep_lone_key() : k.owner / w.ups);
  k.near = p::ballot(p::FULL, here && k.owner != w.rank && (ranks & ep_lanes_below()) == 0 &&
                                  !ep_left(c, ep_left_near(c, k.owner % w.ups)));
  k.far =
      p::ballot(p::FULL, !here && (domains & ep_lanes_below()) == 0 && !ep_left(c, ep_left_rail(c, k.owner / w.ups)));
  return k;
}

/* Whole warp: the token's row, its weights and scales to memory. */
template <class C> DEV void ep_token_store(const C c, const epDispatchArgs &a, const epToken &k, uint8_t *to) {
  uint32_t l = p::lane(), tail = c.rowBytes + (c.weights ? epWeightBytes(c.topk) : 0);
  for (uint32_t at = 16 * l; at < c.rowBytes; at += EP_PART)
    ep_part_store(to, at, c.rowBytes, ep_part_load(a.tokens + (uint64_t)k.token * c.rowBytes, at, c.rowBytes));
  if (c.weights && l < c.topk) p::stg<uint32_t>(to + c.rowBytes + 4 * l, k.weight);
  for (uint32_t v = 4 * l; v < c.scaleBytes; v += 128)
    p::stg<uint32_t>(to + tail + v, p::ldg<uint32_t>(a.scales + (uint64_t)k.token * c.scaleBytes + v));
}

/* Whole warp: chunk `chunk`, in a batch of the warp's channel. */
template <class C>
DEV void ep_hybrid_chunk(const C c, const epHybridDispatchArgs &a, const epPlace &w, const epChannel &ch,
                         uint32_t chunk, uint32_t tokens, uint32_t gen) {
  const epDispatchArgs &d = a.plain;
  const epGroupArgs &g = d.group;
  const epHybridGroup &h = a.hybrid;
  epConfig plain = ep_plain_config(c);
  uint32_t size = epChunkRows(c.rowBytes), bytes = c.rowBytes + epTailBytes(&plain);
  epToken token[EP_MAX_CHUNK_ROWS];
#pragma unroll
  for (uint32_t i = 0; i < size; i++) {
    uint32_t t = chunk * size + i;
    token[i].near = token[i].far = 0;
    if (t >= tokens) continue;
    epToken k = token[i] = ep_token(c, d, w, t);
    if (k.far) {
      uint64_t from = ep_rail_row(c, g, h.layout.send, 1, 0, t); /* the first region: one copy for all domains */
      ep_token_store(c, d, k, ep_window(g, g.rank) + from);
      p::sync_warp();
      for (uint32_t m = k.far; m; m &= m - 1) {
        uint32_t o = p::shfl(p::FULL, k.owner, p::ffs(m) - 1) / w.ups;
        ep_channel_put(c, h, ch, o, ep_rail_row(c, g, h.layout.rail, o, w.domain, t), from, bytes);
      }
    }
    for (uint32_t m = k.near; m; m &= m - 1) {
      uint32_t u = p::shfl(p::FULL, k.owner, p::ffs(m) - 1) % w.ups;
      ep_token_store(c, d, k, ep_near_row(c, g, w, u, w.up, t));
    }
  }
  p::sync_warp();
#pragma unroll
  for (uint32_t i = 0; i < size; i++)
    if (token[i].near >> p::lane() & 1) p::st_release_sys(ep_near_flag(g, w, token[i].owner % w.ups, w.up, chunk), gen);
}

/* Whole warp: batch `batch` of the warp's channel. */
template <class C>
DEV void ep_hybrid_batch(const C c, const epHybridDispatchArgs &a, const epPlace &w, const epChannel &ch,
                         uint32_t batch, uint32_t tokens, uint32_t gen) {
  uint32_t rows = ep_batch_rows(c, a.hybrid), chunks = rows / epChunkRows(c.rowBytes);
  if (c.bug == EP_BUG_GIN_SIGNAL_FIRST) ep_channel_tell(c, a.hybrid, w, ch, batch / a.hybrid.layout.channels + 1, true);
  for (uint32_t i = 0; i < chunks; i++) ep_hybrid_chunk(c, a, w, ch, batch * chunks + i, tokens, gen);
  bool last = ep_last_batch(a.hybrid, batch, rows, tokens);
  ep_channel_tell(c, a.hybrid, w, ch, ep_told_with(a.hybrid, batch, last), last);
}

/* `move`: there are rows; else the signals of the operation alone. */
template <class C>
DEV void ep_hybrid_senders(const C c, const epHybridDispatchArgs &a, uint32_t gen, uint32_t kind, bool move) {
  const epDispatchArgs &d = a.plain;
  epPlace w = ep_place(c, d.group);
  uint32_t tokens = move ? ep_tokens(d.recordLayout, d.record, d.numTokens) : 0, rows = ep_batch_rows(c, a.hybrid);
  uint32_t channel = p::bid() * (c.threads / 32) + p::warp();
  if (!ep_domain_credits(c, d.group, a.hybrid, gen, kind, EP_PHASE_DISPATCH_CREDIT) ||
      !ep_rail_credits(c, d.group, a.hybrid, gen, kind, EP_PHASE_DISPATCH_CREDIT))
    return;
  if (channel < a.hybrid.layout.channels) {
    epChannel ch = ep_channel(a.hybrid, w, channel);
    for (uint32_t batch = channel; batch * rows < tokens; batch += a.hybrid.layout.channels)
      ep_hybrid_batch(c, a, w, ch, batch, tokens, gen);
    ep_channel_end(c, d.group, a.hybrid, w, ch);
  }
  if (c.part == EP_PART_WHOLE) ep_domain_greeted(c, d.group, gen, kind, EP_PHASE_DISPATCH_ROWS);
}

/* One block: each thread watches its share of the tails, until all are complete. */
template <class C> DEV void ep_hybrid_forwarder(const C c, const epHybridDispatchArgs &a, uint32_t gen) {
  if (c.mask) return ep_tails_forward(c, a, gen);
  const epGroupArgs &g = a.plain.group;
  const epHybridGroup &h = a.hybrid;
  epPlace w = ep_place(c, g, h, gen);
  uint32_t tails = w.domains * h.layout.channels, peer = g.rank;
  uint64_t want = epTailOf(gen + 1, 0), start = p::globaltimer(), seen = 0;
  for (uint32_t round = 0;; round++) {
    bool done = true;
    for (uint32_t i = p::tid(); i < tails; i += c.threads) {
      uint32_t o = i / h.layout.channels, channel = i % h.layout.channels;
      if (o == w.domain) continue;
      uint64_t told = p::ld_relaxed_sys(ep_tail_word(g, h, w, w.up, w.up, o, channel));
      uint64_t tail = ep_tail(h, w, o, channel);
      if (!ep_reached(tail, want, EP_TAIL_ROLL)) {
        done = false;
        peer = o * w.ups + w.up;
        seen = tail;
      }
      if (tail == told) continue;
      if (c.bug != EP_BUG_NO_FORWARD_FENCE) p::fence_sys(); /* rows that came before the signal come before the words */
      for (uint32_t u = 0; u < w.ups; u++) p::st_relaxed_sys(ep_tail_word(g, h, w, u, w.up, o, channel), tail);
    }
    if (done || ep_give_up(g, start, round, EP_PHASE_DISPATCH_ROWS, peer, gen, ep_told(seen, EP_TAIL_ROLL))) return;
  }
}

/* ---- Epilogue ----------------------------------------------------------------------------------------------------- */

/* Whole warp: the row of token t of source s is there; where, and false: gave up, or with masks there is none. A rank of another domain is
 * waited for where its rows come to this one. */
template <class C>
DEV bool ep_hybrid_ready(const C c, const epHybridDispatchArgs &a, const epPlace &w, uint32_t s, uint32_t t,
                         uint32_t gen, const uint8_t **row) {
  const epGroupArgs &g = a.plain.group;
  const epHybridGroup &h = a.hybrid;
  uint32_t o = s / w.ups, u = s % w.ups;
  if (s == w.rank) {
    *row = a.plain.tokens + (uint64_t)t * c.rowBytes;
    return true;
  }
  if (o == w.domain) {
    *row = ep_near_row(c, g, w, w.up, u, t);
    return c.bug == EP_BUG_SKIP_WAIT ||
           ep_warp_await_flag(c, g, ep_near_flag(g, w, w.up, u, t / epChunkRows(c.rowBytes)), gen,
                              EP_PHASE_DISPATCH_ROWS, s);
  }
  *row = ep_window(g, w.domain * w.ups + u) + ep_rail_row(c, g, h.layout.rail, w.domain, o, t);
  uint32_t batch = t / ep_batch_rows(c, h);
  bool ok = true;
  if (p::lane() == 0 && c.bug != EP_BUG_SKIP_WAIT) {
    const uint64_t *tail = ep_tail_word(g, h, w, w.up, u, o, batch % h.layout.channels);
    uint64_t want = epTailOf(gen, batch / h.layout.channels + 1);
    if (c.mask)
      ok = ep_tail_brought(c, g, tail, want, gen, s);
    else
      ok = ep_wait_value(
          g, [&] { return p::ld_acquire_sys(tail); }, want, EP_TAIL_ROLL, EP_PHASE_DISPATCH_ROWS,
          u == w.up ? s : w.domain * w.ups + u);
  }
  ok = p::shfl(p::FULL, ok, 0);
  p::sync_warp();
  return ok;
}

/* Whole warp: a row to the output rows `pos` of the lanes in `places`. `any`: as in ep_load. */
template <class C>
DEV void ep_hybrid_store(const C c, const epHybridDispatchArgs &a, const uint8_t *row, const uint8_t *scales,
                         uint32_t places, uint32_t pos, bool any) {
  const epDispatchArgs &d = a.plain;
  for (uint32_t at = 16 * p::lane(); at - 16 * p::lane() < c.rowBytes; at += EP_PART) {
    epPart x = ep_part_load(row, at, c.rowBytes, any);
    for (uint32_t m = places; m; m &= m - 1) {
      uint32_t to = p::shfl(p::FULL, pos, p::ffs(m) - 1);
      ep_part_store(d.outTokens + (uint64_t)to * c.rowBytes, at, c.rowBytes, x);
    }
  }
  for (uint32_t base = 0; base < c.scaleBytes; base += 128) {
    uint32_t at = base + 4 * p::lane();
    uint32_t v = at < c.scaleBytes ? ep_load<uint32_t>(scales + at, any) : 0;
    for (uint32_t m = places; m; m &= m - 1) {
      uint32_t to = p::shfl(p::FULL, pos, p::ffs(m) - 1);
      if (at < c.scaleBytes) p::stg<uint32_t>(ep_scale_word(c, d, to, at), v);
    }
  }
}

/* Whole warp: row j of source s, which is at `row`. */
template <class C>
DEV void ep_hybrid_arrange(const C c, const epHybridDispatchArgs &a, uint32_t s, uint32_t j, const uint8_t *row,
                           bool any = false) {
  const epDispatchArgs &d = a.plain;
  uint32_t l = p::lane(), me = d.group.rank, locals = c.experts / c.ranks, weight = 0;
  const uint32_t *meta = ep_record_meta(c, d.group, d.recordLayout, d.record, s, j);
  uint32_t token = EP_META_TOKEN(p::ldg<uint32_t>(meta)), entry = l < c.topk ? p::ldg<uint32_t>(meta + 1 + l) : EP_NONE;
  const uint8_t *tail = row + c.rowBytes, *scales = tail + (c.weights ? epWeightBytes(c.topk) : 0);
  if (s == me) scales = d.scales + (uint64_t)token * c.scaleBytes;
  if (c.weights && l < c.topk)
    weight =
        ep_load<uint32_t>(s == me ? (const uint8_t *)(d.weights + (uint64_t)token * c.topk + l) : tail + 4 * l, any);
  if (c.layout == EP_LAYOUT_KIND_FLAT) {
    uint32_t pos = p::ldg<uint32_t>((const uint32_t *)(d.record + d.recordLayout.recvBase) + s) + j;
    pos += c.bug == EP_BUG_SLOT_OFF_BY_ONE && pos + 1 < d.capacity;
    if (pos >= d.capacity) return;
    ep_hybrid_store(c, a, row, scales, 1, pos, any);
    uint64_t at = (uint64_t)pos * c.topk + l;
    uint32_t first = d.globalIdx ? me * locals : 0;
    if (l < c.topk && d.outIdx)
      p::stg<int64_t>(d.outIdx + at, entry == EP_NONE ? -1 : (int64_t)(first + EP_ENTRY_EXPERT(entry)));
    if (l < c.topk && c.weights) p::stg<float>(d.outWeights + at, entry == EP_NONE ? 0.0f : p::as_float(weight));
    return;
  }
  uint32_t slot = entry == EP_NONE ? EP_NONE : ep_slot(c, d.recordLayout, d.record, s, entry);
  slot += c.bug == EP_BUG_SLOT_OFF_BY_ONE && slot != EP_NONE && slot + 1 < d.capacity;
  bool fits = slot < d.capacity;
  if (fits && c.weights) p::stg<float>(d.outWeights + slot, p::as_float(weight));
  ep_hybrid_store(c, a, row, scales, p::ballot(p::FULL, fits), slot, any);
}

/* Row j of every source in turn, so that a warp meets rows in the order in which they arrive. */
template <class C>
DEV void ep_hybrid_epilogue(const C c, const epHybridDispatchArgs &a, uint32_t gen, uint32_t firstBlock) {
  const epDispatchArgs &d = a.plain;
  epPlace w = ep_place(c, d.group);
  const uint32_t *recvCount = (const uint32_t *)(d.record + d.recordLayout.recvCount);
  uint32_t warps = c.threads / 32, step = (d.blocks - firstBlock) * warps;
  uint32_t index = (p::bid() - firstBlock) * warps + p::warp();
  uint64_t items = (uint64_t)ep_most_received(c, recvCount) * c.ranks;
  ep_dispatch_fill(c, d, epPipe{}, index, step);
  for (uint64_t i = index; i < items; i += step) {
    uint32_t j = (uint32_t)(i / c.ranks), s = (uint32_t)((w.rank + i) % c.ranks);
    if (j >= p::ldg<uint32_t>(recvCount + s)) continue;
    uint32_t t = EP_META_TOKEN(p::ldg<uint32_t>(ep_record_meta(c, d.group, d.recordLayout, d.record, s, j)));
    const uint8_t *row = nullptr;
    bool there = ep_hybrid_ready(c, a, w, s, t, gen, &row);
    if (there && c.mask && ep_bringer(c, d.group, s) != s)
      there = ep_hybrid_arrange_far(c, a, s, j, row);
    else if (there)
      ep_hybrid_arrange(c, a, s, j, row);
    if (!there && p::ballot(p::FULL, ep_stopped(c, d.group))) return;
    if (!there) ep_row_missing(c, d, s, j);
  }
}

template <class C> DEV void ep_hybrid_dispatch(const C c, const epHybridDispatchArgs &a) {
  if (!a.plain.group.windows) /* a rehearsal */
    return;
  p::grid_wait();
  ep_block_begins(c);
  const epDispatchArgs &d = a.plain;
  epProfile profile = ep_profile_begin(d.group, EP_KERNEL_HYBRID_DISPATCH);
  uint32_t gen = p::ldg<uint32_t>(&ep_state(d.group)->stageGen) + 1;
  uint32_t made = ep_record_made(d.recordLayout, d.record), kind = ep_kind(c, EP_KERNEL_HYBRID_DISPATCH, made);
  if (made) {
    bool move = ep_record_current(c, d.group, (const epRecordHeader *)(d.record + d.recordLayout.header));
    if (c.part == EP_PART_RECEIVE) ep_domain_greeted(c, d.group, gen, kind, EP_PHASE_DISPATCH_ROWS);
    if (c.part == EP_PART_WHOLE ? p::bid() < d.pushBlocks : c.part == EP_PART_SEND)
      ep_hybrid_senders(c, a, gen, kind, move);
    else if (p::bid() == d.pushBlocks)
      ep_hybrid_forwarder(c, a, gen);
    else if (move)
      ep_hybrid_epilogue(c, a, gen, d.pushBlocks + 1);
  }
  p::grid_launch();
  ep_hybrid_end(c, d.group, a.hybrid, gen, d.blocks);
  ep_profile_end(profile, p::bid() <= d.pushBlocks ? EP_SPAN_SEND : EP_SPAN_RECEIVE, d.blocks);
}

#endif
