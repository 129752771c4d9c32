/* Combine: expert outputs back to the token's rank, reduced. The mirror of dispatch, in one kernel: the first blocks sum
 * each received row's local slots and push one row back; the others reduce at the source as chunks arrive.
 *
 *   push      a warp a chunk of 8 received rows of one source; slots summed in ascending k in FP32, rounded once, stored
 *             into the source's staging at the row's own index; then the chunk's flag
 *   reduce    a warp a token: its ranks' partial sums in the order of the highest k each holds, FP32, rounded once; this
 *             rank's own partial sum is made on the spot from the slots
 *
 * Bytes: N rows * slots read, the remote share of N over the link, T * (ranks hit) rows read, T written. */
#ifndef EP_DEVICE_COMBINE_H_
#define EP_DEVICE_COMBINE_H_

#include "numbers.h"
#include "rows.h"

#define EP_COMBINE_UNROLL 4 /* 16-byte vectors a lane has in flight */

/* Input row of entry `entry` (lane's k) of row j from source s, or EP_NONE when it has none or was dropped. */
template <class C>
DEV uint32_t ep_combine_input(const C c, const epCombineArgs &a, uint32_t s, uint32_t j, uint32_t entry) {
  uint32_t row = EP_NONE;
  if (entry != EP_NONE)
    row = c.layout == EP_LAYOUT_KIND_FLAT
              ? p::ldg<uint32_t>((const uint32_t *)(a.record + a.recordLayout.recvBase) + s) + j
              : ep_slot(c, a.recordLayout, a.record, s, entry);
  return row < a.capacity ? row : EP_NONE;
}

/* The weight that belongs to the lane's k in a backward pass. */
template <class C>
DEV uint32_t ep_combine_weight(const C c, const epCombineArgs &a, uint32_t row) {
  if (row == EP_NONE)
    return 0;
  uint64_t at = c.layout == EP_LAYOUT_KIND_FLAT ? (uint64_t)row * c.topk + p::lane() : row;
  return p::as_u32(p::ldg<float>(a.weights + at));
}

/* Lanes whose input rows are summed: flat has one row for all k of a rank. */
template <class C> DEV uint32_t ep_combine_parts(const C c, uint32_t row) {
  uint32_t lanes = p::ballot(p::FULL, row != EP_NONE);
  return c.layout == EP_LAYOUT_KIND_FLAT ? lanes & (0u - lanes) : lanes;
}

/* Partial sum of `parts` (lanes in ascending k) over EP_COMBINE_UNROLL vectors from byte `at`, as the token type rounds
 * it. Vectors past the row's end are not touched. */
template <class C>
DEV void ep_combine_partial(const C c, const epCombineArgs &a, uint32_t parts, uint32_t row, uint32_t at, uint4 *out) {
  epVec sum[EP_COMBINE_UNROLL];
#pragma unroll
  for (int u = 0; u < EP_COMBINE_UNROLL; u++)
    ep_vec_zero(sum[u]);
  for (; parts; parts &= parts - 1) {
    const uint8_t *src = a.tokens + (uint64_t)p::shfl(p::FULL, row, p::ffs(parts) - 1) * c.rowBytes;
    uint4 x[EP_COMBINE_UNROLL];
#pragma unroll
    for (int u = 0; u < EP_COMBINE_UNROLL; u++)
      x[u] = at + u * 512 < c.rowBytes ? p::ldg<uint4>(src + at + u * 512) : ep_zero4();
#pragma unroll
    for (int u = 0; u < EP_COMBINE_UNROLL; u++)
      ep_vec_add(c, sum[u], x[u]);
  }
#pragma unroll
  for (int u = 0; u < EP_COMBINE_UNROLL; u++)
    out[u] = ep_vec_round(c, sum[u]);
}

template <class C>
DEV void ep_combine_push_row(const C c, const epCombineArgs &a, epRowBuffer &b, uint32_t s, uint32_t j) {
  uint32_t l = p::lane(), weightBytes = c.weights ? epWeightBytes(c.topk) : 0;
  const uint32_t *meta = ep_record_meta(c, a.group, a.recordLayout, a.record, s, j);
  uint32_t entry = l < c.topk ? p::ldg<uint32_t>(meta + 1 + l) : EP_NONE;
  uint32_t row = ep_combine_input(c, a, s, j, entry), parts = ep_combine_parts(c, row);
  uint32_t weight = c.weights ? ep_combine_weight(c, a, row) : 0;
  uint8_t *to = ep_stage_row(a.group, s, a.group.rank, j);
  bool whole = (parts & (parts - 1)) == 0 && parts; /* one row: moved as it is */
  if (c.bulk) {
    ep_row_free(c);
    if (4 * l < weightBytes)
      p::sts<uint32_t>(b.row + c.rowBytes + 4 * l, weight);
    if (!whole)
      for (uint32_t at = 0; at < c.rowBytes; at += EP_COMBINE_UNROLL * 512) {
        uint4 sum[EP_COMBINE_UNROLL];
        ep_combine_partial(c, a, parts, row, at + 16 * l, sum);
#pragma unroll
        for (int u = 0; u < EP_COMBINE_UNROLL; u++)
          if (at + 16 * l + u * 512 < c.rowBytes)
            p::sts<uint4>(b.row + at + 16 * l + u * 512, sum[u]);
      }
    if (!whole || c.weights)
      ep_row_written(c);
    if (whole)
      ep_row_load(c, b, a.tokens + (uint64_t)p::shfl(p::FULL, row, p::ffs(parts) - 1) * c.rowBytes, c.rowBytes);
    if (l == 0) {
      p::bulk_s2g(to, b.row, c.rowBytes + weightBytes);
      p::bulk_commit();
    }
  } else {
    for (uint32_t at = 0; at < c.rowBytes; at += EP_COMBINE_UNROLL * 512) {
      uint4 sum[EP_COMBINE_UNROLL];
      ep_combine_partial(c, a, parts, row, at + 16 * l, sum);
#pragma unroll
      for (int u = 0; u < EP_COMBINE_UNROLL; u++)
        if (at + 16 * l + u * 512 < c.rowBytes)
          p::stg<uint4>(to + at + 16 * l + u * 512, sum[u]);
    }
    if (4 * l < weightBytes)
      p::stg<uint32_t>(to + c.rowBytes + 4 * l, weight);
  }
}

template <class C> DEV void ep_combine_push(const C c, const epCombineArgs &a, epRowBuffer &b, uint32_t gen) {
  uint32_t warps = c.threads / 32, me = a.group.rank, others = c.ranks - 1;
  const uint32_t *recvCount = (const uint32_t *)(a.record + a.recordLayout.recvCount);
  uint64_t items = (uint64_t)((ep_most_rows(c, recvCount) + EP_CHUNK_ROWS - 1) / EP_CHUNK_ROWS) * others;
  for (uint64_t i = p::bid() * warps + p::warp(); i < items; i += a.pushBlocks * warps) {
    uint32_t s = (uint32_t)((me + 1 + i % others) % c.ranks), chunk = (uint32_t)(i / others);
    uint32_t rows = p::ldg<uint32_t>(recvCount + s), j0 = chunk * EP_CHUNK_ROWS;
    uint32_t j1 = j0 + EP_CHUNK_ROWS < rows ? j0 + EP_CHUNK_ROWS : rows;
    if (j0 >= rows)
      continue;
    if (c.bug == EP_BUG_SIGNAL_FIRST && p::lane() == 0)
      ep_raise(c, ep_flag(a.group, s, me, chunk), gen);
    for (uint32_t j = j0; j < j1; j++)
      ep_combine_push_row(c, a, b, s, j);
    ep_rows_landed(c);
    if (c.bug != EP_BUG_SIGNAL_FIRST && p::lane() == 0)
      ep_raise(c, ep_flag(a.group, s, me, chunk), gen);
  }
}

template <class C> DEV bool ep_combine_reduce_token(const C c, const epCombineArgs &a, uint32_t t, uint32_t gen) {
  uint32_t l = p::lane(), me = a.group.rank, locals = c.experts / c.ranks;
  uint64_t at = (uint64_t)t * c.topk + l;
  int32_t e = -1;
  uint32_t row = 0, pos = 0;
  if (l < c.topk) {
    e = p::ldg<int32_t>((const int32_t *)(a.record + a.recordLayout.topk) + at);
    row = (uint32_t)p::ldg<int32_t>((const int32_t *)(a.record + a.recordLayout.sendRow) + at);
    pos = (uint32_t)p::ldg<int32_t>((const int32_t *)(a.record + a.recordLayout.sendPos) + at);
  }
  uint32_t owner = e >= 0 ? (uint32_t)e / locals : EP_NONE;
  uint32_t mates = p::match_any(p::FULL, e >= 0 ? owner : ep_lone_key());
  bool last = e >= 0 && (mates >> l) == 1; /* highest k of its rank */
  uint32_t ranks = p::ballot(p::FULL, last);
  uint32_t mine = owner == me ? ep_combine_input(c, a, me, row, EP_ENTRY((uint32_t)e % locals, pos)) : EP_NONE;
  uint32_t parts = ep_combine_parts(c, mine);

  bool ok = true;
  if (last && owner != me && c.bug != EP_BUG_SKIP_WAIT)
    ok = ep_wait_flag(a.group, ep_flag(a.group, me, owner, row / EP_CHUNK_ROWS), gen, EP_PHASE_COMBINE_ROWS, owner);
  if (p::ballot(p::FULL, !ok))
    return false;
  p::sync_warp();

  uint8_t *out = a.outTokens + (uint64_t)t * c.rowBytes;
  for (uint32_t v = 0; v < c.rowBytes; v += EP_COMBINE_UNROLL * 512) {
    epVec sum[EP_COMBINE_UNROLL];
#pragma unroll
    for (int u = 0; u < EP_COMBINE_UNROLL; u++)
      ep_vec_zero(sum[u]);
    for (uint32_t m = ranks; m; m &= m - 1) {
      uint32_t from = p::ffs(m) - 1, r = p::shfl(p::FULL, owner, from), itsRow = p::shfl(p::FULL, row, from);
      uint4 x[EP_COMBINE_UNROLL];
      if (r == me) {
        ep_combine_partial(c, a, parts, mine, v + 16 * l, x);
      } else {
        const uint8_t *src = ep_stage_row(a.group, me, r, itsRow);
#pragma unroll
        for (int u = 0; u < EP_COMBINE_UNROLL; u++)
          x[u] = v + 16 * l + u * 512 < c.rowBytes ? p::ldg<uint4>(src + v + 16 * l + u * 512) : ep_zero4();
      }
#pragma unroll
      for (int u = 0; u < EP_COMBINE_UNROLL; u++)
        ep_vec_add(c, sum[u], x[u]);
    }
#pragma unroll
    for (int u = 0; u < EP_COMBINE_UNROLL; u++)
      if (v + 16 * l + u * 512 < c.rowBytes)
        p::stg<uint4>(out + v + 16 * l + u * 512, ep_vec_round(c, sum[u]));
  }
  if (c.weights && l < c.topk) {
    uint32_t w = 0;
    if (owner == me)
      w = ep_combine_weight(c, a, mine);
    else if (e >= 0)
      w = p::ldg<uint32_t>(ep_stage_row(a.group, me, owner, row) + c.rowBytes + 4 * l);
    p::stg<float>(a.outWeights + at, p::as_float(w));
  }
  return true;
}

template <class C> DEV void ep_combine_reduce(const C c, const epCombineArgs &a, uint32_t gen) {
  uint32_t warps = c.threads / 32;
  for (uint32_t t = (p::bid() - a.pushBlocks) * warps + p::warp(); t < a.numTokens; t += (a.blocks - a.pushBlocks) * warps)
    if (!ep_combine_reduce_token(c, a, t, gen))
      return;
}

template <class C> DEV void ep_combine(const C c, const epCombineArgs &a) {
  uint32_t gen = p::ldg<uint32_t>(&ep_state(a.group)->stageGen) + 1;
  bool push = p::bid() < a.pushBlocks;
  epRowBuffer b = ep_row_buffer(c);
  ep_bug_wait_unscheduled(c, a.group, push);
  if (!push)
    ep_combine_reduce(c, a, gen);
  else if (ep_wait_credits(c, a.group, gen, EP_PHASE_COMBINE_CREDIT))
    ep_combine_push(c, a, b, gen);
  ep_operation_end(c, a.group, gen, a.blocks);
}

#endif
