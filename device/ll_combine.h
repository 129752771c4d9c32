/* Low-latency combine: expert outputs back to the token's rank, reduced, in one launch. The mirror of low-latency dispatch,
 * along the record that it left: rows travel as units that need no flag (ll_layout.h), staged at the row of their token.
 *
 *   push      rank-major: a warp a strip of an arrived row, sent as it is. 3-D expert-major: the strip's slots, each
 *             weighted by fused multiply-add, summed in ascending k in FP32 and rounded once: one row a rank crosses the link,
 *             not one a slot. The weights are known to the token's rank alone: its block 0 sends them, as words that carry
 *             their generation, and does nothing else; they arrive while the slots are being read
 *             NVFP4: quantised instead of rounded, and this rank's own share, too (ll_nvfp4.h)
 *   reduce    a warp a strip of a token: the ranks' rows in the order of the highest k each holds, FP32, rounded once; this
 *             rank's own share is made on the spot
 *
 * Latency in dependent trips: counts and the record of a row, in rank-major with the row itself, before it is known whether
 * there is one (0.7 us); 3-D: slots (0.8); store to the peer and its sight there (1.6); store. Bytes: N * slots read, 8/7 of the
 * remote N over the link and read again, T written; 3-D: T * K words of 8 bytes over the link besides. */
#ifndef EP_DEVICE_LL_COMBINE_H_
#define EP_DEVICE_LL_COMBINE_H_

#include "ll_mask.h"
#include "ll_nvfp4.h"

/* Slots whose loads are on their way together: of a row that is sent; NVFP4 takes registers, too */
#define EP_LL_SLOT_BATCH(c) (EP_NVFP4_KNOWN(c) ? 2 : 3)
#define EP_LL_SHARE_BATCH 1 /* and of one that stays, which has more time */
#define EP_LL_ROW_BATCH 2   /* the same of staged rows */
#define EP_LL_ROW_UNITS(c) \
  (EP_NVFP4_KNOWN(c) ? EP_NVFP4_UNITS : EP_STRIP_UNITS) /* of such a row's strip, a lane, at most */

DEV void ep_ll_sum_zero(epLlSum &s) {
#pragma unroll
  for (int i = 0; i < EP_STRIP_VECTORS; i++) ep_vec_zero(s.v[i]);
}

template <class C> DEV void ep_ll_sum_add(const C c, epLlSum &s, const uint4 *x) {
#pragma unroll
  for (int i = 0; i < EP_STRIP_VECTORS; i++) ep_vec_add(c, s.v[i], x[i]);
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
  for (int i = 0; i < EP_STRIP_VECTORS; i++) ep_vec_fma(c, s.v[i], x[i], weight);
}

template <class C> DEV void ep_ll_sum_round(const C c, const epLlSum &s, uint4 *out) {
#pragma unroll
  for (int i = 0; i < EP_STRIP_VECTORS; i++) out[i] = ep_vec_round(c, s.v[i]);
}

template <class C> DEV const uint8_t *ep_ll_input(const C c, const epLlCombineArgs &a, uint32_t row, uint32_t strip) {
  return a.tokens + (uint64_t)row * c.rowBytes + strip * EP_STRIP_DATA;
}

/* Weights from `source`, in the window of rank `at`: apart by the group's top-k, as the operations before and behind may be of other handles. */
template <class C>
DEV uint64_t *ep_ll_weights(const C c, const epLlCombineArgs &a, const epLlOp &op, uint32_t at, uint32_t source) {
  return (uint64_t *)(ep_ll_window(at) + a.window.weights) +
         (uint64_t)((op.gen & 1) * c.ranks + source) * a.group.maxTokens * a.group.windowTopk;
}

DEV const epRecordHeader *ep_ll_header(const epLlCombineArgs &a) {
  return (const epRecordHeader *)(a.record + a.recordLayout.header);
}

/* Rows by source. */
template <class C> DEV uint32_t ep_ll_source_rows(const C c, uint32_t s) { return p::lds<uint32_t>(ep_ll_table(c, s)); }

/* ---- Weights, 3-D -------------------------------------------------------------------------------------------------- */

#define EP_LL_WEIGHTS_AHEAD 2 /* of a thread, asked for at the start */

/* Whole block: the weights for other domains' ranks, and from there. */
template <class C>
DEV void ep_ll_weights_far(const epLlOneDomain &, const C, const epLlCombineArgs &, const epLlOp &, uint32_t) {}

/* Block 0: this rank's weights to the owners of their experts. It waits for nothing but what blocks 0 of its peers send at once. */
template <class C, class N> DEV void ep_ll_send_weights(const C c, const epLlCombineArgs &a, const N &net) {
  uint32_t n = c.topk * ep_ll_tokens(a.record, a.recordLayout, a.numTokens, a.tokensHeld);
  const int32_t *topk = (const int32_t *)(a.record + a.recordLayout.topk);
  uint32_t kind = ep_ll_kind(c, a, EP_KERNEL_LL_COMBINE);
  int32_t e[EP_LL_WEIGHTS_AHEAD];
  float w[EP_LL_WEIGHTS_AHEAD];
  auto ask = [&](uint32_t from) {
#pragma unroll
    for (uint32_t i = 0; i < EP_LL_WEIGHTS_AHEAD; i++) {
      uint32_t at = from + i * c.threads;
      e[i] = at < n ? p::ldg_any<int32_t>(topk + at) : -1;
      w[i] = at < n ? p::ldg<float>(a.weights + at) : 0;
    }
  };
  epLlOp op = ep_ll_begin(
      c, a.group, [&]() { ask(p::tid()); }, []() {});
  ep_ll_launch(c);
  if (op.lost || !ep_record_current(c, a.group, ep_ll_header(a))) return ep_ll_end(c, a.group, op, a.blocks);
  ep_ll_tell_kind(c, a, op, kind);
#pragma unroll 1
  for (uint32_t from = p::tid(); from < n; from += EP_LL_WEIGHTS_AHEAD * c.threads) {
    if (from != p::tid()) ask(from);
#pragma unroll
    for (uint32_t i = 0; i < EP_LL_WEIGHTS_AHEAD; i++) {
      uint32_t owner = (uint32_t)e[i] / (c.experts / c.ranks);
      if (e[i] >= 0 && owner != a.group.rank && !ep_ll_left_out(c, owner) && !ep_ll_far(c, owner))
        p::st_relaxed_sys(ep_ll_weights(c, a, op, owner, a.group.rank) + from + i * c.threads,
                          (uint64_t)op.gen << 32 | p::as_u32(w[i]));
    }
  }
  ep_ll_weights_far(net, c, a, op, n);
  ep_ll_compare_kinds(c, a, op, EP_KERNEL_LL_COMBINE, kind);
  ep_ll_end(c, a.group, op, a.blocks);
}

/* ---- Push ---------------------------------------------------------------------------------------------------------- */

/* A warp: strip of the weighted sum of slots, lane k's at row `slot` of the input, rounded or, NVFP4, as `part`. `known()` gives the lane's
 * weight once the first slots are on their way; false: it gave up. */
template <int BATCH, class C, class F>
DEV bool ep_ll_weigh(const C c, const epLlCombineArgs &a, uint32_t slot, uint32_t strip, F known, uint4 *out,
                     epNvfp4Part &part) {
  uint32_t bytes = ep_ll_bytes(c, strip), weight = 0;
  float given = c.quantise && slot != EP_NONE ? p::ldg<float>(a.scales + slot) : 0;
  epLlSum sum;
  ep_ll_sum_zero(sum);
  uint32_t m = p::ballot(p::FULL, slot != EP_NONE);
#pragma unroll 1
  for (bool first = true; m; first = false) {
    uint4 x[BATCH][EP_STRIP_VECTORS];
    uint32_t n = m;
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
      if (n) {
        ep_ll_load(ep_ll_input(c, a, p::shfl(p::FULL, slot, p::ffs(n) - 1), strip), bytes, x[b]);
        n &= n - 1;
      }
    }
    if (first && p::ballot(p::FULL, !known(weight))) return false;
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
      if (m) {
        ep_ll_sum_fma(c, sum, x[b], p::as_float(p::shfl(p::FULL, weight, p::ffs(m) - 1)));
        m &= m - 1;
      }
    }
  }
  EP_IF_NVFP4 (c) {
    part.sum = sum;
    part.row = ep_nvfp4_sum_row(p::ballot(p::FULL, slot != EP_NONE), p::as_float(weight), given);
  } else {
    ep_ll_sum_round(c, sum, out);
  }
  return true;
}

/* The same of one row, as it is, whose scale is the caller's. */
template <class C> DEV void ep_ll_single(const C c, const uint4 *v, float scale, epNvfp4Part &part) {
  ep_ll_sum_zero(part.sum);
  ep_ll_sum_add(c, part.sum, v);
  part.row = ep_nvfp4_row(scale);
}

/* Bytes that a strip of a row that returns takes. */
template <class C> DEV uint32_t ep_ll_part_bytes(const C c, uint32_t strip) {
  return c.quantise ? ep_nvfp4_bytes(ep_ll_bytes(c, strip)) : ep_ll_bytes(c, strip);
}

/* A strip of an arrived row, and what the record says of it. `scale`: NVFP4, rank-major, the caller's. */
struct epLlBack {
  uint32_t s, j, strip, token, slot;
  float scale;
  uint4 v[EP_STRIP_VECTORS];
};

/* Item i: row j of every other rank in turn. `rows`: bound of a source's rows. False: past the end. */
template <class C> DEV bool ep_ll_back(const C c, const epLlCombineArgs &a, uint64_t i, uint32_t rows, epLlBack &x) {
  uint32_t strips = epLlStrips(c.rowBytes), q = (uint32_t)(i / strips);
  if (i >= (uint64_t)rows * (c.ranks - 1) * strips) return false;
  x.strip = (uint32_t)(i % strips);
  x.j = q / (c.ranks - 1);
  x.s = (a.group.rank + 1 + q % (c.ranks - 1)) % c.ranks;
  return true;
}

/* Asks for all of an item, whether it is there or not; then, when it is. */
template <class C> DEV void ep_ll_back_ask(const C c, const epLlCombineArgs &a, epLlBack &x) {
  uint64_t row = (uint64_t)x.s * a.group.maxTokens + x.j;
  x.token = p::ldg_any<uint32_t>((const uint32_t *)(a.record + a.recordLayout.recvToken) + row);
  x.slot = EP_NONE;
  if (c.layout == EP_LAYOUT_KIND_RANK_MAJOR) {
    ep_ll_load_any(ep_ll_input(c, a, (uint32_t)row, x.strip), ep_ll_bytes(c, x.strip), x.v);
    EP_IF_NVFP4 (c) x.scale = p::ldg_any<float>(a.scales + row);
  } else if (p::lane() < c.topk)
    x.slot = p::ldg_any<uint32_t>((const uint32_t *)(a.record + a.recordLayout.recvSlot) + row * c.topk + p::lane());
}
template <class C> DEV void ep_ll_back_confirm(const C c, const epLlCombineArgs &a, const epLlBack &x) {
  uint64_t row = (uint64_t)x.s * a.group.maxTokens + x.j;
  p::confirm((const uint32_t *)(a.record + a.recordLayout.recvToken) + row, 4);
  if (c.layout == EP_LAYOUT_KIND_RANK_MAJOR) {
    ep_ll_confirm(ep_ll_input(c, a, (uint32_t)row, x.strip), ep_ll_bytes(c, x.strip));
    EP_IF_NVFP4 (c) p::confirm(a.scales + row, 4);
  } else if (p::lane() < c.topk)
    p::confirm((const uint32_t *)(a.record + a.recordLayout.recvSlot) + row * c.topk + p::lane(), 4);
}

/* False: gave up. In several domains the rank of this one that stands for the token's gets the row, in the region of the rank of the token's
 * domain that has this one's index: those of that domain have no other use for their regions there. */
template <class C> DEV bool ep_ll_back_send(const C c, const epLlCombineArgs &a, const epLlOp &op, epLlBack &x) {
  uint32_t me = a.group.rank, to = c.scaleUp ? me - me % c.scaleUp + x.s % c.scaleUp : x.s;
  uint32_t writer = c.scaleUp ? x.s - x.s % c.scaleUp + me % c.scaleUp : me,
           buffer = ep_ll_buffer(c, EP_KERNEL_LL_COMBINE);
  uint4 u[EP_STRIP_UNITS];
  epNvfp4Part part;
  if (c.layout != EP_LAYOUT_KIND_RANK_MAJOR) {
    const uint64_t *words = ep_ll_weights(c, a, op, me, x.s) + (uint64_t)x.token * c.topk;
    auto known = [&](uint32_t &weight) {
      return x.slot == EP_NONE ||
             ep_ll_await_word(c, a.group, op, words + p::lane(), EP_PHASE_COMBINE_ROWS, x.s, &weight);
    };
    if (!ep_ll_weigh<EP_LL_SLOT_BATCH(c)>(c, a, x.slot, x.strip, known, x.v, part)) return false;
  } else {
    EP_IF_NVFP4 (c) ep_ll_single(c, x.v, x.scale, part);
  }
  EP_IF_NVFP4 (c)
    ep_nvfp4_to_units(buffer, op.gen, part, ep_ll_wanted(ep_ll_part_bytes(c, x.strip)), u);
  else
    ep_ll_to_units(buffer, op.gen, x.v, u);
  ep_ll_send(ep_ll_window(to) + epLlStageRow(&a.window, c.ranks, a.group.maxTokens, op.gen, to, writer, x.token) +
                 x.strip * EP_STRIP_BYTES,
             ep_ll_part_bytes(c, x.strip), u);
  return true;
}

/* `blocks`: those that return rows, with block 0. */
template <class C> DEV void ep_ll_return(const C c, const epLlCombineArgs &a, uint32_t blocks) {
  uint32_t before = c.layout == EP_LAYOUT_KIND_RANK_MAJOR ? 0 : 1, warps = (blocks - before) * (c.threads / 32);
  uint32_t index = p::warp() * (blocks - before) + p::bid() - before, most = 0, t = p::tid(), count = 0, kind = 0;
  bool tells = !before && p::bid() == blocks - 1; /* it has the fewest rows */
  const uint32_t *recvCount = (const uint32_t *)(a.record + a.recordLayout.recvCount);
  epLlBack x;
  bool inside = ep_ll_back(c, a, index, a.group.maxTokens, x);
  epLlOp op = ep_ll_begin(
      c, a.group,
      [&]() {
        if (t < c.ranks) count = p::ldg_any<uint32_t>(recvCount + t);
        if (inside) ep_ll_back_ask(c, a, x);
        if (tells) kind = ep_ll_kind(c, a, EP_KERNEL_LL_COMBINE);
      },
      [&]() {
        if (t < c.ranks) p::sts<uint32_t>(ep_ll_table(c, t), count);
#pragma unroll 1
        for (uint32_t r = t + c.threads; r < c.ranks; r += c.threads)
          p::sts<uint32_t>(ep_ll_table(c, r), p::ldg_any<uint32_t>(recvCount + r));
      });
  ep_ll_launch(c);
  if (op.lost || !ep_record_current(c, a.group, ep_ll_header(a))) return ep_ll_end(c, a.group, op, a.blocks);
  if (tells) ep_ll_tell_kind(c, a, op, kind);
  if (t < c.ranks) p::confirm(recvCount + t, 4);
#pragma unroll 1
  for (uint32_t s = 0; s < c.ranks; s++) {
    uint32_t n = s == a.group.rank ? 0 : ep_ll_source_rows(c, s);
    most = n > most ? n : most;
  }
#pragma unroll 1
  for (uint64_t i = index; ep_ll_back(c, a, i, most, x); i += warps) {
    if (x.j >= ep_ll_source_rows(c, x.s) || ep_ll_left_out(c, x.s)) continue;
    if (i != index) ep_ll_back_ask(c, a, x);
    ep_ll_back_confirm(c, a, x);
    if (!ep_ll_back_send(c, a, op, x) && ep_stopped(c, a.group)) break;
  }
  if (tells && c.part == EP_PART_WHOLE) ep_ll_compare_kinds(c, a, op, EP_KERNEL_LL_COMBINE, kind);
  ep_ll_end(c, a.group, op, a.blocks);
}

/* ---- Reduce -------------------------------------------------------------------------------------------------------- */

/* A warp: this rank's own share of token t, as its row would come from another rank. `row`: of the input, of the lane's k,
 * or EP_NONE. */
template <class C>
DEV void ep_ll_share(const C c, const epLlCombineArgs &a, uint32_t t, uint32_t row, uint32_t strip, uint4 *out,
                     epNvfp4Part &part) {
  if (c.layout == EP_LAYOUT_KIND_RANK_MAJOR) {
    uint32_t from = p::ffs(p::ballot(p::FULL, row != EP_NONE)) - 1;
    ep_ll_load(ep_ll_input(c, a, p::shfl(p::FULL, row, from), strip), ep_ll_bytes(c, strip), out);
    EP_IF_NVFP4 (c) ep_ll_single(c, out, p::ldg<float>(a.scales + p::shfl(p::FULL, row, from)), part);
    return;
  }
  uint32_t mine = row == EP_NONE ? 0 : p::as_u32(p::ldg<float>(a.weights + (uint64_t)t * c.topk + p::lane()));
  auto known = [&](uint32_t &weight) {
    weight = mine;
    return true;
  };
  ep_ll_weigh<EP_LL_SHARE_BATCH>(c, a, row, strip, known, out, part);
}

/* The same, quantised, into shared memory at `to`; its registers are not the caller's. */
template <class C>
DEV_APART void ep_ll_share_nvfp4(const C c, const epLlCombineArgs &a, uint32_t t, uint32_t row, uint32_t strip,
                                 uint32_t to) {
  uint4 v[EP_STRIP_VECTORS];
  epNvfp4Part part;
  ep_ll_share(c, a, t, row, strip, v, part);
  ep_nvfp4_encode(to, part);
}

DEV const uint8_t *ep_ll_from(uint64_t address, uint32_t lane) {
  uint32_t lo = p::shfl(p::FULL, (uint32_t)address, lane), hi = p::shfl(p::FULL, (uint32_t)(address >> 32), lane);
  return (const uint8_t *)((uint64_t)hi << 32 | lo);
}

/* A lane's part of the record of a token. */
struct epLlToken {
  int32_t expert;
  uint32_t row; /* among those that stay here, if it does */
};
template <class C> DEV epLlToken ep_ll_token_ask(const C c, const epLlCombineArgs &a, uint32_t t) {
  epLlToken x;
  uint32_t l = p::lane();
  x.expert = l < c.topk
                 ? p::ldg_any<int32_t>((const int32_t *)(a.record + a.recordLayout.topk) + (uint64_t)t * c.topk + l)
                 : -1;
  x.row = p::ldg_any<uint32_t>((const uint32_t *)(a.record + a.recordLayout.sendRow) + t);
  return x;
}

/* Whose region has the row of `owner`. The strip's sum `out`, to where it belongs; false: gave up. */
DEV uint32_t ep_ll_writer(const epLlOneDomain &, uint32_t owner) { return owner; }
/* Nobody will have the sum, so rows for it need not come. */
template <class N, class C> DEV bool ep_ll_unwanted(const N &, const C, const epGroupArgs &) { return false; }
template <class C>
DEV bool ep_ll_reduced(const epLlOneDomain &, const C c, const epLlCombineArgs &a, const epLlOp &, uint32_t t,
                       uint32_t strip, uint32_t bytes, const epLlToken &, const uint4 *out) {
  ep_ll_store(a.outTokens + (uint64_t)t * c.rowBytes + strip * EP_STRIP_DATA, bytes, out);
  return true;
}

/* A warp: one strip of token t, in several domains of this one's rows. False: gave up. */
template <int ROWS, class C, class N>
DEV bool ep_ll_reduce(const N &net, const C c, const epLlCombineArgs &a, const epLlOp &op, uint32_t t, uint32_t strip,
                      epLlToken x) {
  uint32_t l = p::lane(), me = a.group.rank, B = a.group.maxTokens, row = EP_NONE;
  uint32_t bytes = ep_ll_bytes(c, strip), buffer = ep_ll_buffer(c, EP_KERNEL_LL_COMBINE),
           wanted = ep_ll_wanted(ep_ll_part_bytes(c, strip));
  if (l < c.topk && N::shares)
    p::confirm((const int32_t *)(a.record + a.recordLayout.topk) + (uint64_t)t * c.topk + l, 4);
  uint32_t owner = x.expert >= 0 ? (uint32_t)x.expert / (c.experts / c.ranks) : EP_NONE;
  uint32_t mates = ep_ll_same(x.expert >= 0, owner, c.ranks);
  bool last = x.expert >= 0 && (mates >> l) == 1 && !ep_ll_left_out(c, owner) &&
              !ep_ll_far(c, owner); /* highest k of its rank: there the rank's sum enters */
  uint32_t ends = p::ballot(p::FULL, last), own = p::ballot(p::FULL, last && owner == me && N::shares);
  uint64_t address = 0;
  if (owner == me && N::shares) {
    p::confirm((const uint32_t *)(a.record + a.recordLayout.sendRow) + t, 4);
    if (c.layout == EP_LAYOUT_KIND_RANK_MAJOR)
      row = last ? me * B + x.row : EP_NONE;
    else
      row = p::ldg<uint32_t>((const uint32_t *)(a.record + a.recordLayout.recvSlot) +
                             ((uint64_t)me * B + x.row) * c.topk + l);
  } else if (last) {
    address =
        (uint64_t)(ep_ll_window(me) + epLlStageRow(&a.window, c.ranks, B, op.gen, me, ep_ll_writer(net, owner), t));
  }
  if (own) { /* kept beside the strip: registers are short */
    uint4 share[EP_STRIP_VECTORS];
    epNvfp4Part part;
    EP_IF_NVFP4 (c) {
      ep_ll_share_nvfp4(c, a, t, row, strip, buffer + EP_STRIP_DATA);
    } else {
      ep_ll_share(c, a, t, row, strip, share, part);
#pragma unroll
      for (uint32_t i = 0; i < EP_STRIP_VECTORS; i++)
        p::sts<uint4>(buffer + EP_STRIP_DATA + 512 * i + 16 * l, share[i]);
    }
  }
  epLlSum sum;
  ep_ll_sum_zero(sum);
#pragma unroll 1
  for (uint32_t m = ends; m;) {
    uint4 y[ROWS][EP_STRIP_UNITS];
    uint32_t n = m;
#pragma unroll
    for (int b = 0; b < ROWS; b++) {
      if (n && (n & (0u - n)) != own)
        ep_ll_look<EP_LL_ROW_UNITS(c)>(op, wanted, ep_ll_unit_at(ep_ll_from(address, p::ffs(n) - 1), strip), y[b]);
      n &= n - 1;
    }
#pragma unroll
    for (int b = 0; b < ROWS; b++) {
      if (m && (m & (0u - m)) == own) {
        EP_IF_NVFP4 (c) {
          ep_nvfp4_add(buffer + EP_STRIP_DATA, sum);
        } else {
          uint4 share[EP_STRIP_VECTORS];
#pragma unroll
          for (uint32_t i = 0; i < EP_STRIP_VECTORS; i++)
            share[i] = p::lds<uint4>(buffer + EP_STRIP_DATA + 512 * i + 16 * l);
          ep_ll_sum_add(c, sum, share);
        }
      } else if (m) {
        uint32_t from = p::ffs(m) - 1;
        int came = ep_ll_settle<EP_LL_ROW_UNITS(c), false>(
            c, a.group, op, a.blocks >= EP_LL_NARROW_BLOCKS, EP_PHASE_COMBINE_ROWS, p::shfl(p::FULL, owner, from),
            ep_ll_unit_at(ep_ll_from(address, from), strip), y[b], [&]() { return ep_ll_unwanted(net, c, a.group); });
        if (came != EP_LL_CAME) {
          if (c.mask && came == EP_LL_GAVE_UP) ep_ll_lose(c, a.group, op, p::shfl(p::FULL, owner, from));
          return false;
        }
        EP_IF_NVFP4 (c) {
          ep_nvfp4_from_units(buffer, y[b], sum);
        } else {
          ep_ll_to_vectors(buffer, y[b], y[b]);
          ep_ll_sum_add(c, sum, y[b]);
        }
      }
      m &= m - 1;
    }
  }
  uint4 out[EP_STRIP_VECTORS];
  ep_ll_sum_round(c, sum, out);
  return ep_ll_reduced(net, c, a, op, t, strip, bytes, x, out);
}

/* A warp: all that is on its way from other domains has come. */
template <class C> DEV void ep_ll_rows_came(const epLlOneDomain &, const C, const epLlCombineArgs &, const epLlOp &) {}

template <class C, class N> DEV void ep_ll_reduce_all(const C c, const epLlCombineArgs &a, const N &net) {
  uint32_t warps = (a.blocks - a.pushBlocks) * (c.threads / 32), strips = epLlStrips(c.rowBytes);
  uint32_t index = p::warp() * (a.blocks - a.pushBlocks) + p::bid() - a.pushBlocks;
  uint32_t items = strips * ep_ll_tokens(a.record, a.recordLayout, a.numTokens, a.tokensHeld);
  epLlToken x;
  epLlOp op = ep_ll_begin(
      c, a.group,
      [&]() {
        if (index < items) x = ep_ll_token_ask(c, a, index / strips);
      },
      []() {});
  ep_ll_launch(c);
  if (op.lost || !ep_record_current(c, a.group, ep_ll_header(a))) return ep_ll_end(c, a.group, op, a.blocks);
  if (c.part == EP_PART_WHOLE && index == warps - 1) {
    ep_ll_greet(c, a.group, a.window, op);
    ep_ll_greet_far(net, c, a.group);
  }
  if (c.part == EP_PART_RECEIVE && p::bid() == 0)
    ep_ll_compare_kinds(c, a, op, EP_KERNEL_LL_COMBINE, ep_ll_kind(c, a, EP_KERNEL_LL_COMBINE));
#pragma unroll 1
  for (uint32_t i = index; i < items; i += warps) {
    if (i != index) x = ep_ll_token_ask(c, a, i / strips);
    bool ok = c.ranks > 2 && !c.scaleUp ? ep_ll_reduce<EP_LL_ROW_BATCH>(net, c, a, op, i / strips, i % strips, x)
                                        : ep_ll_reduce<1>(net, c, a, op, i / strips, i % strips, x);
    if (!ok && ep_stopped(c, a.group)) break;
  }
  if (index == warps - 1) {
    ep_ll_greeted(c, a.group, a.window, op, EP_PHASE_COMBINE_CREDIT);
    ep_ll_greeted_far(net, c, a.group, op, EP_PHASE_COMBINE_CREDIT);
    ep_ll_rows_came(net, c, a, op);
  }
  ep_ll_end(c, a.group, op, a.blocks);
}

/* Whole block, the last one to end: sums that would have had rows of ranks that fell out meanwhile, without them. */
template <class C, class N> DEV_APART void ep_ll_reduce_again(const C c, const epLlCombineArgs &a, const N &net) {
  uint32_t warps = c.threads / 32, strips = epLlStrips(c.rowBytes);
  uint32_t items = strips * ep_ll_tokens(a.record, a.recordLayout, a.numTokens, a.tokensHeld);
  const uint32_t *lost = ep_mask_words(c, a.group).lost;
  epLlOp op = {p::ld_relaxed_sys(&ep_state(a.group)->stageGen), 0, false};
#pragma unroll 1
  for (uint32_t i = p::warp(); i < items; i += warps) {
    epLlToken x = ep_ll_token_ask(c, a, i / strips);
    bool had = x.expert >= 0 &&
               p::ld_relaxed_sys(lost + ep_returner(c, a.group, (uint32_t)x.expert / (c.experts / c.ranks))) == op.gen;
    if (p::ballot(p::FULL, had)) ep_ll_reduce<1>(net, c, a, op, i / strips, i % strips, x);
  }
}

template <class C> DEV void ep_ll_combine(const C c, const epLlCombineArgs &a) {
  epLlOneDomain net;
  p::grid_wait();
  epProfile profile = ep_profile_begin(a.group, EP_KERNEL_LL_COMBINE);
  if (c.part == EP_PART_RECEIVE || (c.part == EP_PART_WHOLE && p::bid() >= a.pushBlocks))
    ep_ll_reduce_all(c, a, net);
  else if (c.part == EP_PART_SEND && p::bid() >= a.pushBlocks)
    ep_ll_greeter(c, a, net);
  else if (p::bid() == 0 && c.layout == EP_LAYOUT_KIND_EXPERT_MAJOR_3D)
    ep_ll_send_weights(c, a, net);
  else
    ep_ll_return(c, a, a.pushBlocks);
  if (c.mask && ep_ll_repairs(c, a.group, a.blocks)) ep_ll_reduce_again(c, a, net);
  ep_profile_end(profile, p::bid() >= a.pushBlocks ? EP_SPAN_RECEIVE : EP_SPAN_SEND, a.blocks);
}

#endif
