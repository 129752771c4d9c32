/* Low-latency combine: expert outputs back to the token's rank, reduced, in one launch. The mirror of low-latency dispatch,
 * along the record that it left: rows travel as units that need no flag (ll_layout.h), staged at the row of their token.
 *
 *   push      rank-major: a warp a strip of an arrived row, sent as it is. 3-D expert-major: the strip's slots, each
 *             weighted by fused multiply-add, summed in ascending k in FP32 and rounded once: one row a rank crosses the link,
 *             not one a slot. The weights are known to the token's rank alone, which sends them first, as words that carry
 *             their generation; they arrive while the slots are being read
 *   reduce    a warp a strip of a token: the ranks' rows in the order of the highest k each holds, FP32, rounded once; this
 *             rank's own share is made on the spot
 *
 * Latency in dependent trips: rows and counts of the record (0.7 us), their place there (0.7), input rows (0.8), store to
 * the peer and its first sight there (1.5), store. Bytes: N * slots read, 4/3 of the remote N over the link and read
 * again, T written; 3-D: T * K words of 8 bytes over the link besides. */
#ifndef EP_DEVICE_LL_COMBINE_H_
#define EP_DEVICE_LL_COMBINE_H_

#include "ll.h"
#include "numbers.h"

#define EP_LL_SLOT_BATCH 2 /* slots whose loads are on their way together */
#define EP_LL_ROW_BATCH 2  /* the same of staged rows */

/* A strip's sum in a lane. */
struct epLlSum {
  epVec v[EP_STRIP_VECTORS];
};

DEV void ep_ll_sum_zero(epLlSum &s) {
#pragma unroll
  for (int i = 0; i < EP_STRIP_VECTORS; i++)
    ep_vec_zero(s.v[i]);
}

template <class C> DEV void ep_ll_sum_add(const C c, epLlSum &s, const uint4 *x) {
#pragma unroll
  for (int i = 0; i < EP_STRIP_VECTORS; i++)
    ep_vec_add(c, s.v[i], x[i]);
}

template <class C> DEV void ep_vec_fma(const C c, epVec &a, uint4 x, float weight) {
  uint32_t w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (c.dtype == EP_DTYPE_F32) {
      a.v[i] = p::fma(weight, p::as_float(w[i]), a.v[i]);
    } else {
      a.v[2 * i] = p::fma(weight, c.dtype == EP_DTYPE_BF16 ? p::bf16_lo(w[i]) : p::f16_lo(w[i]), a.v[2 * i]);
      a.v[2 * i + 1] = p::fma(weight, c.dtype == EP_DTYPE_BF16 ? p::bf16_hi(w[i]) : p::f16_hi(w[i]), a.v[2 * i + 1]);
    }
  }
}

template <class C> DEV void ep_ll_sum_fma(const C c, epLlSum &s, const uint4 *x, float weight) {
#pragma unroll
  for (int i = 0; i < EP_STRIP_VECTORS; i++)
    ep_vec_fma(c, s.v[i], x[i], weight);
}

template <class C> DEV void ep_ll_sum_round(const C c, const epLlSum &s, uint4 *out) {
#pragma unroll
  for (int i = 0; i < EP_STRIP_VECTORS; i++)
    out[i] = ep_vec_round(c, s.v[i]);
}

template <class C> DEV const uint8_t *ep_ll_input(const C c, const epLlCombineArgs &a, uint32_t row, uint32_t strip) {
  return a.tokens + (uint64_t)row * c.rowBytes + strip * EP_STRIP_DATA;
}

template <class C> DEV uint64_t ep_ll_weight_word(const C c, const epLlOp &op, uint32_t B, uint32_t source) {
  return (uint64_t)((op.gen & 1) * c.ranks + source) * B * c.topk;
}

/* ---- Push ---------------------------------------------------------------------------------------------------------- */

/* The first block, before it waits for anything, so that peers' senders need no other block of this rank: this rank's
 * weights to the owners of their experts. */
template <class C> DEV void ep_ll_send_weights(const C c, const epLlCombineArgs &a, const epLlOp &op, uint32_t tokens) {
  const int32_t *topk = (const int32_t *)(a.record + a.recordLayout.topk);
#pragma unroll 4
  for (uint32_t i = p::tid(); i < tokens * c.topk; i += c.threads) {
    int32_t e = p::ldg<int32_t>(topk + i);
    uint32_t w = p::as_u32(p::ldg<float>(a.weights + i)), owner = (uint32_t)e / (c.experts / c.ranks);
    if (e >= 0 && owner != a.group.rank)
      p::st_relaxed_sys((uint64_t *)(ep_ll_window(owner) + a.window.weights) +
                            ep_ll_weight_word(c, op, a.group.maxTokens, a.group.rank) + i,
                        (uint64_t)op.gen << 32 | w);
  }
}

/* A warp: strip of the weighted sum of slots, lane k's at row `slot` of the input, rounded. `known()` gives the lane's weight
 * once the first slots are on their way; false: it gave up. */
template <class C, class F>
DEV bool ep_ll_weigh(const C c, const epLlCombineArgs &a, uint32_t slot, uint32_t strip, F known, uint4 *out) {
  uint32_t bytes = ep_ll_bytes(c, strip), weight = 0;
  epLlSum sum;
  ep_ll_sum_zero(sum);
  uint32_t m = p::ballot(p::FULL, slot != EP_NONE);
#pragma unroll 1
  for (bool first = true; m; first = false) {
    uint4 x[EP_LL_SLOT_BATCH][EP_STRIP_VECTORS];
    uint32_t n = m;
#pragma unroll
    for (int b = 0; b < EP_LL_SLOT_BATCH; b++) {
      if (n) {
        ep_ll_load(ep_ll_input(c, a, p::shfl(p::FULL, slot, p::ffs(n) - 1), strip), bytes, x[b]);
        n &= n - 1;
      }
    }
    if (first && p::ballot(p::FULL, !known(weight)))
      return false;
#pragma unroll
    for (int b = 0; b < EP_LL_SLOT_BATCH; b++) {
      if (m) {
        ep_ll_sum_fma(c, sum, x[b], p::as_float(p::shfl(p::FULL, weight, p::ffs(m) - 1)));
        m &= m - 1;
      }
    }
  }
  ep_ll_sum_round(c, sum, out);
  return true;
}

template <class C> DEV void ep_ll_return(const C c, const epLlCombineArgs &a, const epLlOp &op) {
  uint32_t warps = a.pushBlocks * (c.threads / 32), index = p::bid() * (c.threads / 32) + p::warp(), me = a.group.rank;
  uint32_t strips = epLlStrips(c.rowBytes), B = a.group.maxTokens, buffer = ep_ll_buffer(c, EP_KERNEL_LL_COMBINE);
  const uint32_t *recvToken = (const uint32_t *)(a.record + a.recordLayout.recvToken);
  const uint32_t *recvSlot = (const uint32_t *)(a.record + a.recordLayout.recvSlot);
  uint32_t most = 0;
  for (uint32_t s = 0; s < c.ranks; s++) {
    uint32_t n = s == me ? 0 : ep_ll_source_rows(c, s);
    most = n > most ? n : most;
  }
  uint64_t items = (uint64_t)most * (c.ranks - 1) * strips;
  for (uint64_t i = index; i < items; i += warps) {
    uint32_t strip = (uint32_t)(i % strips), q = (uint32_t)(i / strips), j = q / (c.ranks - 1);
    uint32_t s = (me + 1 + q % (c.ranks - 1)) % c.ranks, bytes = ep_ll_bytes(c, strip);
    if (j >= ep_ll_source_rows(c, s))
      continue;
    uint32_t token = p::ldg<uint32_t>(recvToken + (uint64_t)s * B + j);
    uint4 v[EP_STRIP_VECTORS], u[EP_STRIP_UNITS];
    if (c.layout == EP_LAYOUT_KIND_RANK_MAJOR) {
      ep_ll_load(ep_ll_input(c, a, s * B + j, strip), bytes, v);
    } else {
      uint32_t slot = p::lane() < c.topk ? p::ldg<uint32_t>(recvSlot + ((uint64_t)s * B + j) * c.topk + p::lane()) : EP_NONE;
      const uint64_t *words = (const uint64_t *)(ep_ll_window(me) + a.window.weights) +
                              ep_ll_weight_word(c, op, B, s) + (uint64_t)token * c.topk;
      auto known = [&](uint32_t &weight) {
        return slot == EP_NONE ||
               ep_wait_word(a.group, words + p::lane(), op.gen, EP_PHASE_COMBINE_ROWS, s, &weight);
      };
      if (!ep_ll_weigh(c, a, slot, strip, known, v))
        return;
    }
    ep_ll_to_units(buffer, op.gen, v, u);
    ep_ll_send(ep_ll_window(s) + epLlStageRow(&a.window, c.ranks, B, op.gen, s, me, token) + strip * EP_STRIP_BYTES,
               bytes, u);
  }
}

/* ---- Reduce -------------------------------------------------------------------------------------------------------- */

/* A warp: this rank's own share of token t, as its row would come from another rank. `row`: of the input, of the lane's k,
 * or EP_NONE. */
template <class C>
DEV void ep_ll_share(const C c, const epLlCombineArgs &a, uint32_t t, uint32_t row, uint32_t strip, uint4 *out) {
  if (c.layout == EP_LAYOUT_KIND_RANK_MAJOR) {
    uint32_t from = p::ffs(p::ballot(p::FULL, row != EP_NONE)) - 1;
    ep_ll_load(ep_ll_input(c, a, p::shfl(p::FULL, row, from), strip), ep_ll_bytes(c, strip), out);
    return;
  }
  uint32_t mine = row == EP_NONE ? 0 : p::as_u32(p::ldg<float>(a.weights + (uint64_t)t * c.topk + p::lane()));
  auto known = [&](uint32_t &weight) {
    weight = mine;
    return true;
  };
  ep_ll_weigh(c, a, row, strip, known, out);
}

DEV const uint8_t *ep_ll_from(uint64_t address, uint32_t lane) {
  uint32_t lo = p::shfl(p::FULL, (uint32_t)address, lane), hi = p::shfl(p::FULL, (uint32_t)(address >> 32), lane);
  return (const uint8_t *)((uint64_t)hi << 32 | lo);
}

/* A warp: one strip of token t. False: gave up. */
template <class C>
DEV bool ep_ll_reduce(const C c, const epLlCombineArgs &a, const epLlOp &op, uint32_t t, uint32_t strip) {
  uint32_t l = p::lane(), me = a.group.rank, B = a.group.maxTokens, row = EP_NONE;
  uint32_t bytes = ep_ll_bytes(c, strip), buffer = ep_ll_buffer(c, EP_KERNEL_LL_COMBINE), wanted = ep_ll_wanted(bytes);
  int32_t e = l < c.topk ? p::ldg<int32_t>((const int32_t *)(a.record + a.recordLayout.topk) + (uint64_t)t * c.topk + l) : -1;
  uint32_t owner = e >= 0 ? (uint32_t)e / (c.experts / c.ranks) : EP_NONE;
  uint32_t mates = p::match_any(p::FULL, e >= 0 ? owner : ep_lone_key());
  bool last = e >= 0 && (mates >> l) == 1; /* highest k of its rank: there the rank's sum enters */
  uint32_t ends = p::ballot(p::FULL, last), own = p::ballot(p::FULL, last && owner == me);
  uint64_t address = 0;
  if (owner == me) {
    uint32_t j = p::ldg<uint32_t>((const uint32_t *)(a.record + a.recordLayout.sendRow) + t);
    if (c.layout == EP_LAYOUT_KIND_RANK_MAJOR)
      row = last ? me * B + j : EP_NONE;
    else
      row = p::ldg<uint32_t>((const uint32_t *)(a.record + a.recordLayout.recvSlot) + ((uint64_t)me * B + j) * c.topk + l);
  } else if (last) {
    address = (uint64_t)(ep_ll_window(me) + epLlStageRow(&a.window, c.ranks, B, op.gen, me, owner, t));
  }
  uint4 share[EP_STRIP_VECTORS];
  if (own)
    ep_ll_share(c, a, t, row, strip, share);
  epLlSum sum;
  ep_ll_sum_zero(sum);
#pragma unroll 1
  for (uint32_t m = ends; m;) {
    uint4 x[EP_LL_ROW_BATCH][EP_STRIP_UNITS];
    uint32_t n = m;
#pragma unroll
    for (int b = 0; b < EP_LL_ROW_BATCH; b++) {
      if (n && (n & (0u - n)) != own)
        ep_ll_look<EP_STRIP_UNITS>(op, wanted, ep_ll_unit_at(ep_ll_from(address, p::ffs(n) - 1), strip), x[b]);
      n &= n - 1;
    }
#pragma unroll
    for (int b = 0; b < EP_LL_ROW_BATCH; b++) {
      if (m && (m & (0u - m)) == own) {
        ep_ll_sum_add(c, sum, share);
      } else if (m) {
        uint32_t from = p::ffs(m) - 1;
        if (!ep_ll_settle<EP_STRIP_UNITS>(c, a.group, op, EP_PHASE_COMBINE_ROWS, p::shfl(p::FULL, owner, from),
                                          ep_ll_unit_at(ep_ll_from(address, from), strip), x[b]))
          return false;
        ep_ll_to_vectors(buffer, x[b], x[b]);
        ep_ll_sum_add(c, sum, x[b]);
      }
      m &= m - 1;
    }
  }
  uint4 out[EP_STRIP_VECTORS];
  ep_ll_sum_round(c, sum, out);
  ep_ll_store(a.outTokens + (uint64_t)t * c.rowBytes + strip * EP_STRIP_DATA, bytes, out);
  return true;
}

template <class C> DEV void ep_ll_reduce_all(const C c, const epLlCombineArgs &a, const epLlOp &op, uint32_t tokens) {
  uint32_t warps = (a.blocks - a.pushBlocks) * (c.threads / 32), strips = epLlStrips(c.rowBytes);
  for (uint32_t i = (p::bid() - a.pushBlocks) * (c.threads / 32) + p::warp(); i < tokens * strips; i += warps)
    if (!ep_ll_reduce(c, a, op, i / strips, i % strips))
      return;
}

template <class C> DEV void ep_ll_combine(const C c, const epLlCombineArgs &a) {
  p::grid_wait();
  epLlOp op = ep_ll_begin(c, a.group, (const epRecordHeader *)(a.record + a.recordLayout.header), a.numTokens,
                          (const uint32_t *)(a.record + a.recordLayout.recvCount));
  bool last = p::bid() == a.blocks - 1;
  p::grid_launch();
  if (p::bid() < a.pushBlocks) {
    if (p::bid() == 0 && c.layout == EP_LAYOUT_KIND_EXPERT_MAJOR_3D)
      ep_ll_send_weights(c, a, op, op.tokens);
    ep_ll_return(c, a, op);
  } else {
    if (last)
      ep_ll_greet(c, a.group, a.window, op);
    ep_ll_reduce_all(c, a, op, op.tokens);
    if (last)
      ep_ll_greeted(c, a.group, a.window, op, EP_PHASE_COMBINE_CREDIT);
  }
  ep_ll_end(a.group, op, a.blocks);
}

#endif
