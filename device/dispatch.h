/* Dispatch: token rows to the ranks that own their experts, and the epilogue that arranges what arrives. One kernel; the
 * first blocks push, the others run the epilogue meanwhile, row by row as flags come in.
 *
 *   push      a warp a chunk of tokens (epChunkRows); each row is loaded once and stored once per distinct remote rank, into the
 *             staging row of its token index, so sending needs no scan; then one flag a (destination, chunk)
 *   epilogue  a warp a row: local rows straight from the input, remote ones from staging after their flag; flat: one
 *             store, expert-major: one per slot; padding rows are zeroed and index tails filled before anything arrives
 *
 * Bytes at R ranks, N rows received: T rows read, the remote share of them over the link, N rows read and N (flat) or
 * N * slots (expert-major) written. A sender waits for nothing but its peers' credits for the operation before. */
#ifndef EP_DEVICE_DISPATCH_H_
#define EP_DEVICE_DISPATCH_H_

#include "rows.h"

/* Remote owners of a token: lane k's owner, and the mask of lanes that are the first of their owner. */
template <class C> DEV uint32_t ep_dispatch_targets(const C c, const epDispatchArgs &a, uint32_t t, uint32_t *owner) {
  uint32_t l = p::lane();
  const int32_t *topk = (const int32_t *)(a.record + a.recordLayout.topk) + (uint64_t)t * c.topk;
  int32_t e = l < c.topk ? p::ldg<int32_t>(topk + l) : -1;
  *owner = e >= 0 ? (uint32_t)e / (c.experts / c.ranks) : a.group.rank;
  bool remote = *owner != a.group.rank;
  uint32_t mates = p::match_any(p::FULL, remote ? *owner : ep_lone_key());
  return p::ballot(p::FULL, remote && (mates & ep_lanes_below()) == 0);
}

/* One flag to every rank that got a row of this chunk of tokens. A rank hit by several tokens gets it again, with the
 * same value. */
template <class C>
DEV void ep_dispatch_raise(const C c, const epDispatchArgs &a, uint32_t chunk, uint32_t t0, uint32_t t1, uint32_t gen) {
  for (uint32_t t = t0; t < t1; t++) {
    uint32_t owner, sends = ep_dispatch_targets(c, a, t, &owner);
    if (sends >> p::lane() & 1)
      ep_raise(c, ep_flag(a.group, owner, a.group.rank, chunk), gen);
  }
}

/* Issues the loads of a chunk: its rows, and their weights behind each; tokens that stay here are left out. */
template <class C>
DEV void ep_dispatch_load_chunk(const C c, const epDispatchArgs &a, const epPipe &q, uint32_t n, uint32_t t0, uint32_t t1) {
  epConfig plain = ep_plain_config(c);
  uint32_t l = p::lane(), stride = epRowBufferBytes(&plain), stage = ep_stage(q, n), owner, wanted = 0;
  uint32_t weightBytes = c.weights ? epWeightBytes(c.topk) : 0;
  for (uint32_t t = t0; t < t1; t++)
    wanted |= (ep_dispatch_targets(c, a, t, &owner) != 0) << (t - t0);
  ep_stage_free<0>(c);
  ep_stage_expect(q, n, p::popc(wanted) * c.rowBytes);
  if (l < t1 - t0 && (wanted >> l & 1)) {
    ep_fence_load(c);
    p::bulk_g2s(stage + l * stride, a.tokens + (uint64_t)(t0 + l) * c.rowBytes, c.rowBytes, ep_bar(q, n));
  }
  if (c.weights) {
    for (uint32_t t = t0; t < t1; t++)
      if (4 * l < weightBytes)
        p::sts<uint32_t>(stage + (t - t0) * stride + c.rowBytes + 4 * l,
                         l < c.topk ? p::as_u32(p::ldg<float>(a.weights + (uint64_t)t * c.topk + l)) : 0);
    ep_stage_written(c);
  }
}

/* Stores a chunk, from its stage or straight from the input, to every remote owner of each token. */
template <class C>
DEV void ep_dispatch_send_chunk(const C c, const epDispatchArgs &a, const epPipe &q, uint32_t n, uint32_t t0, uint32_t t1) {
  epConfig plain = ep_plain_config(c);
  uint32_t l = p::lane(), stride = epRowBufferBytes(&plain), weightBytes = c.weights ? epWeightBytes(c.topk) : 0;
  for (uint32_t t = t0; t < t1; t++) {
    uint32_t owner, sends = ep_dispatch_targets(c, a, t, &owner);
    for (; sends; sends &= sends - 1) {
      uint8_t *to = ep_stage_row(a.group, p::shfl(p::FULL, owner, p::ffs(sends) - 1), a.group.rank, t);
      if (c.bulk) {
        if (l == 0)
          p::bulk_s2g(to, ep_stage(q, n) + (t - t0) * stride, c.rowBytes + weightBytes);
      } else {
        ep_row_copy(to, a.tokens + (uint64_t)t * c.rowBytes, c.rowBytes);
        if (c.weights && l < c.topk)
          p::stg<float>(to + c.rowBytes + 4 * l, p::ldg<float>(a.weights + (uint64_t)t * c.topk + l));
      }
    }
  }
  if (c.bulk && l == 0)
    p::bulk_commit();
}

template <class C> DEV void ep_dispatch_push(const C c, const epDispatchArgs &a, epPipe &q, uint32_t gen) {
  uint32_t warps = c.threads / 32, rows = epChunkRows(c.rowBytes), chunks = (a.numTokens + rows - 1) / rows;
  uint32_t chunk = p::bid() * warps + p::warp(), step = a.pushBlocks * warps;
  auto first = [&](uint32_t ch) { return ch * rows; };
  auto end = [&](uint32_t ch) { return ch * rows + rows < a.numTokens ? ch * rows + rows : a.numTokens; };
  bool any = chunk < chunks;
  if (c.bulk && any)
    ep_dispatch_load_chunk(c, a, q, 0, first(chunk), end(chunk));
  bool ok = ep_wait_credits(c, a.group, gen, EP_PHASE_DISPATCH_CREDIT); /* while the first load is on its way */
  if (!ok && c.bulk && any)
    ep_stage_arrived(q, 0);
  for (uint32_t n = 0; ok && chunk < chunks; chunk += step, n++) {
    if (c.bug == EP_BUG_SIGNAL_FIRST)
      ep_dispatch_raise(c, a, chunk, first(chunk), end(chunk), gen);
    if (!c.bulk) {
      ep_dispatch_send_chunk(c, a, q, n, first(chunk), end(chunk));
      p::sync_warp();
      ep_dispatch_raise(c, a, chunk, first(chunk), end(chunk), gen);
      continue;
    }
    if (chunk + step < chunks)
      ep_dispatch_load_chunk(c, a, q, n + 1, first(chunk + step), end(chunk + step));
    ep_stage_arrived(q, n);
    ep_dispatch_send_chunk(c, a, q, n, first(chunk), end(chunk));
    if (n) {
      ep_stores_landed<1>(c);
      ep_dispatch_raise(c, a, chunk - step, first(chunk - step), end(chunk - step), gen);
    }
  }
  if (ok && c.bulk && any) {
    ep_stores_landed<0>(c);
    ep_dispatch_raise(c, a, chunk - step, first(chunk - step), end(chunk - step), gen);
  }
}

/* A received row; `entry` is the lane's k. */
struct epArrival {
  uint32_t s, j, token, entry;
};

template <class C>
DEV const uint8_t *ep_dispatch_source(const C c, const epDispatchArgs &a, const epArrival &r) {
  return r.s == a.group.rank ? a.tokens + (uint64_t)r.token * c.rowBytes
                             : (const uint8_t *)ep_stage_row(a.group, a.group.rank, r.s, r.token);
}

template <class C>
DEV void ep_dispatch_load_row(const C c, const epDispatchArgs &a, const epPipe &q, uint32_t n, const epArrival &r) {
  uint32_t bytes = c.rowBytes + (c.weights && r.s != a.group.rank ? epWeightBytes(c.topk) : 0);
  ep_stage_free<1>(c);
  if (p::lane() == 0) {
    ep_fence_load(c);
    p::mbar_expect_tx(ep_bar(q, n), bytes);
    p::bulk_g2s(ep_stage(q, n), ep_dispatch_source(c, a, r), bytes, ep_bar(q, n));
  }
}

/* Stores the row of unit n into output row `pos`. */
template <class C>
DEV void ep_dispatch_store(const C c, const epDispatchArgs &a, const epPipe &q, uint32_t n, const epArrival &r,
                           uint32_t pos) {
  uint8_t *to = a.outTokens + (uint64_t)pos * c.rowBytes;
  if (!c.bulk)
    ep_row_copy(to, ep_dispatch_source(c, a, r), c.rowBytes);
  else if (p::lane() == 0)
    p::bulk_s2g(to, ep_stage(q, n), c.rowBytes);
}

/* A row that is there goes to its place or places. */
template <class C>
DEV void ep_dispatch_arrange(const C c, const epDispatchArgs &a, const epPipe &q, uint32_t n, const epArrival &r) {
  uint32_t l = p::lane(), me = a.group.rank, weight = 0;
  if (c.weights && l < c.topk) {
    if (r.s == me)
      weight = p::as_u32(p::ldg<float>(a.weights + (uint64_t)r.token * c.topk + l));
    else
      weight = c.bulk ? p::lds<uint32_t>(ep_stage(q, n) + c.rowBytes + 4 * l)
                      : p::ldg<uint32_t>(ep_dispatch_source(c, a, r) + c.rowBytes + 4 * l);
  }
  if (c.layout == EP_LAYOUT_KIND_FLAT) {
    uint32_t pos = p::ldg<uint32_t>((const uint32_t *)(a.record + a.recordLayout.recvBase) + r.s) + r.j;
    pos += c.bug == EP_BUG_SLOT_OFF_BY_ONE && pos + 1 < a.capacity;
    if (pos < a.capacity) {
      ep_dispatch_store(c, a, q, n, r, pos);
      uint64_t at = (uint64_t)pos * c.topk + l;
      uint32_t first = a.globalIdx ? me * (c.experts / c.ranks) : 0;
      if (l < c.topk && a.outIdx)
        p::stg<int64_t>(a.outIdx + at, r.entry == EP_NONE ? -1 : (int64_t)(first + EP_ENTRY_EXPERT(r.entry)));
      if (l < c.topk && c.weights)
        p::stg<float>(a.outWeights + at, r.entry == EP_NONE ? 0.0f : p::as_float(weight));
    }
  } else {
    uint32_t slot = r.entry == EP_NONE ? EP_NONE : ep_slot(c, a.recordLayout, a.record, r.s, r.entry);
    slot += c.bug == EP_BUG_SLOT_OFF_BY_ONE && slot + 1 < a.capacity;
    bool fits = slot < a.capacity;
    if (fits && c.weights)
      p::stg<float>(a.outWeights + slot, p::as_float(weight));
    for (uint32_t m = p::ballot(p::FULL, fits); m; m &= m - 1)
      ep_dispatch_store(c, a, q, n, r, p::shfl(p::FULL, slot, p::ffs(m) - 1));
  }
  if (c.bulk && l == 0)
    p::bulk_commit();
}

/* What depends on the counts alone: zero rows of padded zones, or the tail of the index and weight tensors. */
template <class C> DEV void ep_dispatch_fill(const C c, const epDispatchArgs &a, uint32_t index, uint32_t warps) {
  const epRecordLayout &rl = a.recordLayout;
  if (c.layout == EP_LAYOUT_KIND_FLAT) {
    if (!a.fillTail)
      return;
    uint64_t rows = p::ldg<uint32_t>((const uint32_t *)(a.record + rl.recvBase) + c.ranks);
    for (uint64_t i = rows * c.topk + index * 32 + p::lane(); i < (uint64_t)a.capacity * c.topk; i += warps * 32) {
      if (a.outIdx)
        p::stg<int64_t>(a.outIdx + i, -1);
      if (c.weights)
        p::stg<float>(a.outWeights + i, 0.0f);
    }
    return;
  }
  uint32_t align = p::ldg<uint32_t>(&((const epRecordHeader *)(a.record + rl.header))->align);
  const uint32_t *zoneBase = (const uint32_t *)(a.record + rl.zoneBase);
  const uint32_t *zoneCount = (const uint32_t *)(a.record + rl.zoneCount);
  if (!a.zeroPad || align < 2)
    return;
  for (uint64_t i = index; i < (uint64_t)(c.experts / c.ranks) * (align - 1); i += warps) {
    uint32_t e = (uint32_t)(i / (align - 1)), r = (uint32_t)(i % (align - 1));
    uint32_t slot = p::ldg<uint32_t>(zoneBase + e) + p::ldg<uint32_t>(zoneCount + e) + r;
    if (slot >= p::ldg<uint32_t>(zoneBase + e + 1) || slot >= a.capacity)
      continue;
    for (uint32_t v = p::lane() * 16; v < c.rowBytes; v += 512)
      p::stg<uint4>(a.outTokens + (uint64_t)slot * c.rowBytes + v, ep_zero4());
    if (c.weights && p::lane() == 0)
      p::stg<float>(a.outWeights + slot, 0.0f);
  }
}

/* The epilogue's work list: row j of every source in turn, own rank first, so that a warp meets rows in the order in which
 * they arrive. Skips what a source does not have; the same in all lanes. */
template <class C>
DEV bool ep_dispatch_item(const C c, const epDispatchArgs &a, uint64_t items, uint32_t step, uint64_t *i, epArrival *r) {
  const uint32_t *recvCount = (const uint32_t *)(a.record + a.recordLayout.recvCount);
  for (; *i < items; *i += step) {
    r->s = (uint32_t)((a.group.rank + *i) % c.ranks);
    r->j = (uint32_t)(*i / c.ranks);
    if (r->j >= p::ldg<uint32_t>(recvCount + r->s))
      continue;
    const uint32_t *meta = ep_record_meta(c, a.group, a.recordLayout, a.record, r->s, r->j);
    r->token = p::ldg<uint32_t>(meta);
    r->entry = p::lane() < c.topk ? p::ldg<uint32_t>(meta + 1 + p::lane()) : EP_NONE;
    return true;
  }
  return false;
}

template <class C>
DEV bool ep_dispatch_ready(const C c, const epDispatchArgs &a, const epArrival &r, uint32_t gen) {
  if (r.s == a.group.rank || c.bug == EP_BUG_SKIP_WAIT)
    return true;
  const uint32_t *flag = ep_flag(a.group, a.group.rank, r.s, r.token / epChunkRows(c.rowBytes));
  return ep_warp_wait_flag(a.group, flag, gen, EP_PHASE_DISPATCH_ROWS, r.s);
}

template <class C> DEV void ep_dispatch_epilogue(const C c, const epDispatchArgs &a, epPipe &q, uint32_t gen) {
  uint32_t warpsPerBlock = c.threads / 32, step = (a.blocks - a.pushBlocks) * warpsPerBlock;
  uint32_t index = (p::bid() - a.pushBlocks) * warpsPerBlock + p::warp();
  uint64_t items = (uint64_t)ep_most_rows(c, (const uint32_t *)(a.record + a.recordLayout.recvCount)) * c.ranks;
  uint64_t i = index;
  epArrival row, next;
  ep_dispatch_fill(c, a, index, step);
  bool more = ep_dispatch_item(c, a, items, step, &i, &row);
  if (more && !ep_dispatch_ready(c, a, row, gen))
    return;
  if (more && c.bulk)
    ep_dispatch_load_row(c, a, q, 0, row);
  for (uint32_t n = 0; more; n++, row = next) {
    i += step;
    more = ep_dispatch_item(c, a, items, step, &i, &next);
    if (c.bulk)
      ep_stage_arrived(q, n);
    ep_dispatch_arrange(c, a, q, n, row);
    if (more && !ep_dispatch_ready(c, a, next, gen))
      return;
    if (more && c.bulk)
      ep_dispatch_load_row(c, a, q, n + 1, next);
  }
}

template <class C> DEV void ep_dispatch(const C c, const epDispatchArgs &a) {
  uint32_t gen = p::ldg<uint32_t>(&ep_state(a.group)->stageGen) + 1;
  bool push = p::bid() < a.pushBlocks;
  epPipe q = ep_pipe(c);
  ep_bug_wait_unscheduled(c, a.group, push);
  if (push)
    ep_dispatch_push(c, a, q, gen);
  else
    ep_dispatch_epilogue(c, a, q, gen);
  ep_operation_end(c, a.group, gen, a.blocks);
}

#endif
