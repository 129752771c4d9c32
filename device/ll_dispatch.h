/* Low-latency dispatch: one launch that exchanges the routing and moves the rows, and that may do the update's work. Nothing is
 * known beforehand but the top-k decisions; a sender finds its rows' places among its own by counting the decisions before them.
 *
 *   clerk     block 0 counts all decisions and sends the counts; keeps and checks the decisions where the update was left to it;
 *             then takes the counts of all sources, for the caller's counters, the record, and the rows that nobody fills
 *   push      a block a few tokens: loads their rows while it counts the decisions before them, and stores head and row as units to
 *             every other rank the token goes to (ll_layout.h). This rank's own rows are not staged: rank-major stores them in
 *             their place at once, 3-D expert-major passes their heads, because their slots need the counts of other ranks
 *   receive   a warp a strip of a row, in 3-D expert-major two, to its place or places. Rank-major needs no counts for that; 3-D expert-major first
 *             slots are sums over the sources before, from counts that come before the rows
 *
 * Latency, in dependent trips: decisions, row and generation together (0.7 us), store to the peer and its sight there
 * (1.2 + 0.4), store. Bytes at T rows of H: 8/7 H a row and remote rank over the link (T = 128, H = 14336: 2.1 MB, 6.1 us at 343 GB/s,
 * against 5.3 us for the bare row and then 3 us for completion, fence and flag), H or slots * H written. */
#ifndef EP_DEVICE_LL_DISPATCH_H_
#define EP_DEVICE_LL_DISPATCH_H_

#include "ll_mask.h"
#include "ll_quantise.h"

/* ---- Decisions ----------------------------------------------------------------------------------------------------- */

/* A decision as it lies in memory: both words of an int64, or the one of an int32 twice. */
struct epLlRaw {
  uint32_t lo, hi;
};

/* Decision `i`, asked for where it is `there`, else a -1. */
DEV epLlRaw ep_ll_ask(const epLlDecisions &d, uint32_t i, bool there) {
  epLlRaw r;
  const uint8_t *at = d.at + ((uint64_t)i << (d.wide ? 3 : 2));
  r.lo = there ? p::ldg<uint32_t>(at) : EP_NONE;
  r.hi = there ? p::ldg<uint32_t>(at + (d.wide ? 4 : 0)) : EP_NONE;
  return r;
}
template <class C> DEV bool ep_ll_valid(const C c, const epLlDecisions &d, epLlRaw r) {
  return r.lo < c.experts && (r.hi == 0 || !d.wide);
}

/* A warp looks at whole tokens, 32 / K at a time. */
template <class C> DEV uint32_t ep_ll_tokens_a_warp(const C c) { return 32 / c.topk; }
/* The lanes of the first one. */
template <class C> DEV uint32_t ep_ll_token_lanes(const C c) { return ~0u >> (32 - c.topk); }
/* The lane's decision when its warp looks at the tokens from t on, those before `end`. */
template <class C> DEV epLlRaw ep_ll_ask_tokens(const C c, const epLlDecisions &d, uint32_t t, uint32_t end) {
  uint32_t sub = p::lane() / c.topk;
  return ep_ll_ask(d, t * c.topk + p::lane(), sub < ep_ll_tokens_a_warp(c) && t + sub < end);
}

/* What one lane knows of its decision. */
struct epLlRoute {
  uint32_t expert, owner;
  bool valid, first;        /* first: first k of its token at this owner */
  uint32_t mates, rankMask; /* lanes of the same token and owner; first lanes of the owner */
};

template <class C> DEV epLlRoute ep_ll_route(const C c, const epLlDecisions &d, epLlRaw raw) {
  epLlRoute r;
  uint32_t sub = p::lane() / c.topk, token = ep_ll_token_lanes(c) << sub * c.topk;
  r.valid = ep_ll_valid(c, d, raw);
  r.expert = raw.lo;
  r.owner = r.valid ? r.expert / (c.experts / c.ranks) : 0;
  uint32_t same = ep_ll_same(r.valid, r.owner, c.ranks);
  r.mates = same & token;
  r.first = r.valid && (r.mates & ep_lanes_below()) == 0;
  r.rankMask = same & p::ballot(p::FULL, r.first);
  return r;
}

/* ---- Count --------------------------------------------------------------------------------------------------------- */

/* Shared memory: sums of entries by expert, then of rows by rank; then word i of the counts as they come. */
template <class C> DEV uint32_t ep_ll_sum(const C c, uint32_t i) { return ep_ll_table(c, i); }
template <class C> DEV uint32_t ep_ll_rows_sum(const C c, uint32_t rank) { return ep_ll_sum(c, c.experts + rank); }
template <class C> DEV uint32_t ep_ll_count_at(const C c, uint32_t i) {
  return ep_ll_table(c, c.experts + c.ranks + i);
}

template <class C> DEV void ep_ll_zero_sums(const C c, bool entries) {
#pragma unroll 1
  for (uint32_t i = (entries ? 0 : c.experts) + p::tid(); i < c.experts + c.ranks; i += c.threads)
    p::sts<uint32_t>(ep_ll_sum(c, i), 0);
}

/* Passes of the block over decisions whose answers are on their way when it begins to count. */
#define EP_LL_AHEAD 2
struct epLlAhead {
  epLlRaw raw[EP_LL_AHEAD];
};

template <class C> DEV uint32_t ep_ll_pass(const C c, uint32_t from, uint32_t pass) {
  return from + (pass * (c.threads / 32) + p::warp()) * ep_ll_tokens_a_warp(c);
}
template <class C>
DEV void ep_ll_ask_ahead(const C c, const epLlDecisions &d, uint32_t from, uint32_t to, epLlAhead &x) {
#pragma unroll
  for (uint32_t i = 0; i < EP_LL_AHEAD; i++) x.raw[i] = ep_ll_ask_tokens(c, d, ep_ll_pass(c, from, i), to);
}

/* A warp: adds its tokens' decisions to the sums. Which warp adds what does not matter. */
template <class C> DEV void ep_ll_add(const C c, const epLlDecisions &d, bool entries, epLlRaw raw) {
  epLlRoute r = ep_ll_route(c, d, raw);
  if (entries && r.valid) p::sadd(ep_ll_sum(c, r.expert), 1);
  if (r.first && (r.rankMask & ep_lanes_below()) == 0) p::sadd(ep_ll_rows_sum(c, r.owner), p::popc(r.rankMask));
}

/* Whole block: the decisions of tokens [from, to); use(t, raw) sees them, too. */
template <class C, class F>
DEV void ep_ll_count(const C c, const epLlDecisions &d, bool entries, uint32_t from, uint32_t to,
                     const epLlAhead &ahead, F use) {
#pragma unroll
  for (uint32_t i = 0; i < EP_LL_AHEAD; i++) {
    uint32_t t = ep_ll_pass(c, from, i);
    if (t >= to) return;
    use(t, ahead.raw[i]);
    ep_ll_add(c, d, entries, ahead.raw[i]);
  }
#pragma unroll 1
  for (uint32_t i = EP_LL_AHEAD; ep_ll_pass(c, from, i) < to; i++) {
    uint32_t t = ep_ll_pass(c, from, i);
    epLlRaw raw = ep_ll_ask_tokens(c, d, t, to);
    use(t, raw);
    ep_ll_add(c, d, entries, raw);
  }
}

/* ---- Clerk --------------------------------------------------------------------------------------------------------- */

/* Words of all sources, L + 1 a source: entries for each of this rank's experts, then rows. */
template <class C>
DEV uint64_t *ep_ll_counts(const C c, const epLlDispatchArgs &a, const epLlOp &op, uint32_t at, uint32_t source) {
  return (uint64_t *)(ep_ll_window(at) + a.window.counts) +
         (uint64_t)((op.gen & 1) * c.ranks + source) * (c.experts / c.ranks + 1);
}

template <class C> DEV void ep_ll_send_counts(const C c, const epLlDispatchArgs &a, const epLlOp &op) {
  uint32_t locals = c.experts / c.ranks;
#pragma unroll 1
  for (uint32_t i = p::tid(); i < c.experts + c.ranks; i += c.threads) {
    uint32_t dst = i < c.experts ? i / locals : i - c.experts, word = i < c.experts ? i % locals : locals;
    if (ep_ll_left_out(c, dst) || ep_ll_far(c, dst)) continue;
    p::st_relaxed_sys(ep_ll_counts(c, a, op, dst, a.group.rank) + word,
                      (uint64_t)op.gen << 32 | p::lds<uint32_t>(ep_ll_sum(c, i)));
  }
}

/* The clerk, with masks: the same, and which sources take part is settled for all blocks: those whose counts have all come. The others'
 * are 0. Sums are not needed any more: rows' are the number of a source's words that lack. */
template <class C> DEV bool ep_ll_gather_living(const C c, const epLlDispatchArgs &a, const epLlOp &op) {
  uint32_t words = c.experts / c.ranks + 1;
  const uint64_t *counts = ep_ll_counts(c, a, op, a.group.rank, 0);
  uint32_t *told = ep_mask_words(c, a.group).counts;
  bool ok = true;
  p::sync_threads();
#pragma unroll 1
  for (uint32_t s = p::tid(); s < c.ranks; s += c.threads) p::sts<uint32_t>(ep_ll_rows_sum(c, s), 0);
  p::sync_threads();
#pragma unroll 1
  for (uint32_t i = p::tid(); i < c.ranks * words; i += c.threads) {
    uint32_t v = 0;
    if (!ep_ll_await_word(c, a.group, op, counts + i, EP_PHASE_UPDATE_COUNTS, i / words, &v)) {
      p::sadd(ep_ll_rows_sum(c, i / words), 1);
      ok = ok && !ep_stopped(c, a.group);
    }
    p::sts<uint32_t>(ep_ll_count_at(c, i), v);
  }
  if (!ep_block_agrees(ok)) return false;
#pragma unroll 1
  for (uint32_t i = p::tid(); i < c.ranks * words; i += c.threads) {
    if (p::lds<uint32_t>(ep_ll_rows_sum(c, i / words))) p::sts<uint32_t>(ep_ll_count_at(c, i), 0);
    p::stg<uint32_t>(told + i, p::lds<uint32_t>(ep_ll_count_at(c, i)));
  }
  p::sync_threads();
  if (p::tid() == 0) p::st_release_gpu(&ep_mask_slot(c, a.group)->verdict, op.gen);
  return true;
}

/* Whole block, with masks: the clerk's counts, to shared memory. */
template <class C> DEV void ep_ll_counts_told(const C c, const epLlDispatchArgs &a) {
  const uint32_t *told = ep_mask_words(c, a.group).counts;
#pragma unroll 1
  for (uint32_t i = p::tid(); i < c.experts + c.ranks; i += c.threads)
    p::sts<uint32_t>(ep_ll_count_at(c, i), p::ldg<uint32_t>(told + i));
  p::sync_threads();
}

/* Whole block: the counts of all sources, to shared memory as they lie in the window. A barrier. */
template <class C> DEV bool ep_ll_gather(const C c, const epLlDispatchArgs &a, const epLlOp &op) {
  uint32_t words = c.experts / c.ranks + 1;
  const uint64_t *counts = ep_ll_counts(c, a, op, a.group.rank, 0);
  bool ok = true;
#pragma unroll 1
  for (uint32_t i = p::tid(); i < c.ranks * words && ok; i += c.threads) {
    uint32_t v = 0;
    ok = ep_wait_word(a.group, counts + i, op.gen, EP_PHASE_UPDATE_COUNTS, i / words, &v);
    p::sts<uint32_t>(ep_ll_count_at(c, i), v);
  }
  return ep_ll_agrees(ok);
}
template <class C> DEV uint32_t ep_ll_entries(const C c, uint32_t s, uint32_t e) {
  return p::lds<uint32_t>(ep_ll_count_at(c, s * (c.experts / c.ranks + 1) + e));
}
template <class C> DEV uint32_t ep_ll_rows(const C c, uint32_t s) { return ep_ll_entries(c, s, c.experts / c.ranks); }

/* Counters and record; the unused rows of a rank-major index. */
template <class C> DEV void ep_ll_tell_counts(const C c, const epLlDispatchArgs &a) {
  uint32_t locals = c.experts / c.ranks, B = a.group.maxTokens;
  bool major = c.layout == EP_LAYOUT_KIND_EXPERT_MAJOR_3D;
#pragma unroll 1
  for (uint32_t e = p::tid(); e < locals; e += c.threads) {
    uint32_t total = 0;
#pragma unroll 1
    for (uint32_t s = 0; s < c.ranks; s++) total += ep_ll_entries(c, s, e);
    ep_ll_counter(a.expertCounters, a.expertCountersWide, e, total);
    if (major && total > c.ranks * B) p::st_relaxed_sys(&a.group.error->overflowNeeded, total);
  }
#pragma unroll 1
  for (uint32_t s = p::tid(); s < c.ranks; s += c.threads) {
    p::stg<uint32_t>((uint32_t *)(a.record + a.recordLayout.recvCount) + s, ep_ll_rows(c, s));
    ep_ll_counter(a.sourceCounters, a.sourceCountersWide, s, ep_ll_rows(c, s));
  }
  if (p::warp() == 0 && a.recvTotal) {
    uint32_t total = 0;
#pragma unroll 1
    for (uint32_t i = p::lane(); i < c.ranks * (locals + 1); i += 32)
      total += (i % (locals + 1) == locals) != major ? p::lds<uint32_t>(ep_ll_count_at(c, i)) : 0;
    total = ep_ll_over_warp(total, [](uint32_t x, uint32_t y) { return x + y; });
    if (p::lane() == 0) ep_ll_counter(a.recvTotal, a.recvTotalWide, 0, total);
  }
#pragma unroll 1
  for (uint32_t s = 0; s < c.ranks && !major; s++)
#pragma unroll 1
    for (uint32_t i = ep_ll_rows(c, s) * c.topk + p::tid(); i < B * c.topk; i += c.threads)
      p::stg<int32_t>(a.outIdx + (uint64_t)s * B * c.topk + i, -1);
}

/* The update's work, where it was left to dispatch. */
template <class C> DEV void ep_ll_keep(const C c, const epLlDispatchArgs &a, uint32_t t, uint32_t end, epLlRaw raw) {
  uint32_t l = p::lane(), i = t * c.topk + l;
  bool valid = ep_ll_valid(c, a.decisions, raw);
  if (l >= ep_ll_tokens_a_warp(c) * c.topk || t + l / c.topk >= end) return;
  p::stg<int32_t>((int32_t *)(a.record + a.recordLayout.topk) + i, valid ? (int32_t)raw.lo : -1);
  int64_t value = a.decisions.wide ? (int64_t)((uint64_t)raw.hi << 32 | raw.lo) : (int64_t)(int32_t)raw.lo;
  if (!valid && value != -1) ep_report_index(a.group, t + l / c.topk, l % c.topk, value);
}

/* Whole block: the counts for other domains' ranks, and from there. False: gave up. */
template <class C>
DEV void ep_ll_counts_to_far(const epLlOneDomain &, const C, const epLlDispatchArgs &, const epLlOp &, uint32_t) {}
template <class C>
DEV bool ep_ll_counts_from_far(const epLlOneDomain &, const C, const epLlDispatchArgs &, const epLlOp &) {
  return true;
}
/* Whole block: what went to other domains' ranks is on its way, and where it came from may be written again. */
template <class C>
DEV void ep_ll_sent_far(const epLlOneDomain &, const C, const epGroupArgs &, uint32_t, uint32_t, uint32_t) {}

/* The clerk's half of a receiving part. */
template <class C, class N>
DEV void ep_ll_clerk_receives(const C c, const epLlDispatchArgs &a, const N &net, epRecordHeader *header) {
  epLlOp op = ep_ll_begin(
      c, a.group, []() {}, []() {});
  ep_ll_launch(c);
  if (!op.lost) ep_ll_compare_kinds(c, a, op, EP_KERNEL_LL_DISPATCH, ep_ll_kind(c, a, EP_KERNEL_LL_DISPATCH));
  if (!op.lost && ep_ll_counts_from_far(net, c, a, op) &&
      (c.mask ? ep_ll_gather_living(c, a, op) : ep_ll_gather(c, a, op))) {
    ep_ll_tell_counts(c, a);
    if (p::tid() == 0) {
      p::stg<uint32_t>(&header->generation, EP_LL_DISPATCHED);
      p::stg<uint32_t>(&header->dispatched, op.gen);
    }
  }
  ep_ll_end(c, a.group, op, a.blocks);
}

template <class C, class N> DEV void ep_ll_clerk(const C c, const epLlDispatchArgs &a, const N &net) {
  epRecordHeader *header = (epRecordHeader *)(a.record + a.recordLayout.header);
  epLlAhead ahead;
  if (c.part == EP_PART_RECEIVE) return ep_ll_clerk_receives(c, a, net, header);
  uint32_t T = ep_ll_tokens(a.record, a.recordLayout, a.numTokens, a.tokensHeld),
           kind = ep_ll_kind(c, a, EP_KERNEL_LL_DISPATCH);
  epLlOp op = ep_ll_begin(
      c, a.group, [&]() { ep_ll_ask_ahead(c, a.decisions, 0, T, ahead); }, [&]() { ep_ll_zero_sums(c, true); });
  ep_ll_launch(c);
  if (op.lost) return ep_ll_end(c, a.group, op, a.blocks);
  auto use = [&](uint32_t t, epLlRaw raw) {
    if (a.decisions.borrowed) ep_ll_keep(c, a, t, T, raw);
  };
  ep_ll_tell_kind(c, a, op, kind);
  ep_ll_count(c, a.decisions, true, 0, T, ahead, use);
  p::sync_threads();
  ep_ll_send_counts(c, a, op);
  ep_ll_counts_to_far(net, c, a, op, T);
  if (p::tid() == 0) {
    if (a.decisions.borrowed) ep_ll_write_header(c, a.group, header, T);
    p::stg<uint32_t>(&header->generation, c.part == EP_PART_SEND ? EP_LL_UPDATED : EP_LL_DISPATCHED);
    p::stg<uint32_t>(&header->dispatched, op.gen);
    p::st_relaxed_sys(&ep_state(a.group)->indexClaimed, 0);
  }
  if (c.mask) p::stg<uint32_t>(&header->epoch, p::ld_relaxed_sys(&ep_mask_state(c, a.group)->epoch));
  if (c.part == EP_PART_WHOLE) ep_ll_compare_kinds(c, a, op, EP_KERNEL_LL_DISPATCH, kind);
  if (c.part == EP_PART_WHOLE && ep_ll_counts_from_far(net, c, a, op) &&
      (c.mask ? ep_ll_gather_living(c, a, op) : ep_ll_gather(c, a, op)))
    ep_ll_tell_counts(c, a);
  ep_ll_sent_far(net, c, a.group, 0, 1, 1);
  ep_ll_end(c, a.group, op, a.blocks);
}

/* ---- Rows and their scales: strip `strip` of row `row`, of which `bytes` are from there on ----------------------------- */

/* Of those, the token's own. */
template <class C> DEV uint32_t ep_ll_token_bytes(const C c, uint32_t strip, uint32_t bytes) {
  uint32_t at = strip * EP_STRIP_DATA, left = at < c.rowBytes ? c.rowBytes - at : 0;
  return c.scaleBytes == 0 || bytes < left ? bytes : left;
}
/* Where in the row of scales the lane's vector i begins; past its end where the vector is the token's. */
template <class C> DEV uint32_t ep_ll_scale_at(const C c, uint32_t strip, uint32_t i) {
  uint32_t at = strip * EP_STRIP_DATA + EP_STRIP_STEP * i + 16 * p::lane();
  return p::lane() < EP_STRIP_LANES && at >= c.rowBytes ? at - c.rowBytes : c.scaleBytes;
}

/* Scales are words, at addresses that are no better. */
template <class C>
DEV void ep_ll_load_row(const C c, const epLlDispatchArgs &a, uint64_t row, uint32_t strip, uint32_t bytes, uint4 *v) {
  const uint8_t *made = a.tokens + 2 * row * c.rowBytes; /* from here */
  if (c.quantise)
    ep_quant_load(c, made, ep_ll_buffer(c, EP_KERNEL_LL_DISPATCH), strip, bytes, ep_ll_token_bytes(c, strip, bytes), v);
  else
    ep_ll_load(a.tokens + row * c.rowBytes + strip * EP_STRIP_DATA, ep_ll_token_bytes(c, strip, bytes), v);
  if (c.scaleBytes == 0 || bytes == 0 || (strip + 1) * EP_STRIP_DATA <= c.rowBytes) return;
  const uint8_t *given = a.scales + row * c.scaleBytes;
  uint32_t buffer = ep_ll_buffer(c, EP_KERNEL_LL_DISPATCH), end = (strip + 1) * EP_STRIP_DATA - c.rowBytes;
  uint32_t begin =
      strip * EP_STRIP_DATA < c.rowBytes ? 0 : strip * EP_STRIP_DATA - c.rowBytes; /* of the strip's scales */
  if (c.quantise) ep_quant_scales(c, made, buffer, begin, end < c.scaleBytes ? end : c.scaleBytes);
  auto word = [&](uint32_t at) {
    return c.quantise ? p::lds<uint32_t>(buffer + at - begin) : p::ldg<uint32_t>(given + at);
  };
#pragma unroll
  for (uint32_t i = 0; i < EP_STRIP_VECTORS; i++) {
    uint32_t at = ep_ll_scale_at(c, strip, i);
    if (at < c.scaleBytes) v[i].x = word(at);
    if (at + 4 < c.scaleBytes) v[i].y = word(at + 4);
    if (at + 8 < c.scaleBytes) v[i].z = word(at + 8);
    if (at + 12 < c.scaleBytes) v[i].w = word(at + 12);
  }
  if (c.quantise) p::sync_warp();
}
template <class C>
DEV void ep_ll_store_row(const C c, const epLlDispatchArgs &a, uint64_t row, uint32_t strip, uint32_t bytes,
                         const uint4 *v) {
  ep_ll_store(a.outTokens + row * c.rowBytes + strip * EP_STRIP_DATA, ep_ll_token_bytes(c, strip, bytes), v);
  if (c.scaleBytes == 0 || bytes == 0 || (strip + 1) * EP_STRIP_DATA <= c.rowBytes) return;
  uint8_t *to = a.outScales + row * c.scaleBytes;
#pragma unroll
  for (uint32_t i = 0; i < EP_STRIP_VECTORS; i++) {
    uint32_t at = ep_ll_scale_at(c, strip, i);
    if (at < c.scaleBytes) p::stg<uint32_t>(to + at, v[i].x);
    if (at + 4 < c.scaleBytes) p::stg<uint32_t>(to + at + 4, v[i].y);
    if (at + 8 < c.scaleBytes) p::stg<uint32_t>(to + at + 8, v[i].z);
    if (at + 12 < c.scaleBytes) p::stg<uint32_t>(to + at + 12, v[i].w);
  }
}

/* ---- Push ---------------------------------------------------------------------------------------------------------- */

/* Row and owner of an entry's token. */
#define EP_OWN(row, owner) ((uint32_t)(owner) << EP_ENTRY_POS_BITS | (uint32_t)(row))

/* A strip of a token's row; with the first one, the weight of the lane's k. */
struct epLlOwn {
  uint4 v[EP_STRIP_VECTORS];
  uint32_t weight;
};

template <class C>
DEV void ep_ll_load_own(const C c, const epLlDispatchArgs &a, uint32_t t, uint32_t strip, epLlOwn &x) {
  ep_ll_load_row(c, a, t, strip, ep_ll_bytes(c, strip), x.v);
  x.weight = 0;
  if (c.weights && strip == 0 && p::lane() < c.topk)
    x.weight = p::as_u32(p::ldg<float>(a.weights + (uint64_t)t * c.topk + p::lane()));
}

/* What a warp knows of a row that came, or that stays here. */
struct epLlArrival {
  uint32_t s, j, token, entry, weight; /* entry, weight: of the lane's k */
  uint32_t slot;                       /* 3-D: output row of the lane's k, or EP_NONE */
};

/* The row's index, weights and record, once a row. */
template <class C> DEV void ep_ll_write_head(const C c, const epLlDispatchArgs &a, const epLlArrival &r) {
  uint32_t l = p::lane();
  uint64_t row = (uint64_t)r.s * a.group.maxTokens + r.j;
  if (l == 0) p::stg<uint32_t>((uint32_t *)(a.record + a.recordLayout.recvToken) + row, r.token);
  if (l >= c.topk) return;
  if (c.layout == EP_LAYOUT_KIND_EXPERT_MAJOR_3D) {
    p::stg<uint32_t>((uint32_t *)(a.record + a.recordLayout.recvSlot) + row * c.topk + l, r.slot);
    return;
  }
  int32_t first = a.globalIdx ? (int32_t)(a.group.rank * (c.experts / c.ranks)) : 0;
  p::stg<int32_t>(a.outIdx + row * c.topk + l, r.entry == EP_NONE ? -1 : first + (int32_t)EP_ENTRY_EXPERT(r.entry));
  p::stg<float>(a.outWeights + row * c.topk + l, p::as_float(r.weight));
}

/* Rank-major: the output's row that row j of source s is, once it is here. */
template <class C> DEV uint64_t ep_ll_place(const C c, const epLlDispatchArgs &a, uint32_t s, uint32_t j) {
  j += c.bug == EP_BUG_SLOT_OFF_BY_ONE && j + 1 < a.group.maxTokens;
  return (uint64_t)s * a.group.maxTokens + j;
}

/* Head of token t of rank `source` for rank `dst`: its units, one a lane. `entry`: of the lane's k, EP_NONE where it goes elsewhere. */
template <class C>
DEV void ep_ll_send_head(const C c, const epLlDispatchArgs &a, const epLlOp &op, uint32_t source, uint32_t t,
                         uint32_t dst, uint32_t row, uint32_t entry, uint32_t weight) {
  uint32_t l = p::lane(), word[3];
#pragma unroll
  for (uint32_t i = 0; i < 3; i++) {
    uint32_t w = 3 * l + i;
    uint32_t e = p::shfl(p::FULL, entry, (w - 1) & 31), x = p::shfl(p::FULL, weight, (w - 1 - c.topk) & 31);
    word[i] = w == 0 ? t : w <= c.topk ? e : x;
  }
  if (l < epLlHeadUnits(c.topk))
    p::st_relaxed_sys128(ep_ll_window(dst) + epLlHead(&a.window, c.ranks, a.group.maxTokens, op.gen, source, row) +
                             16 * l,
                         ep_ll_unit(op.gen, word[0], word[1], word[2]));
}

/* This rank's own rows are placed by receivers, who find them by their heads: in 3-D, and where senders must leave the outputs alone. */
template <class C> DEV bool ep_ll_heads_own(const C c) {
  return c.layout == EP_LAYOUT_KIND_EXPERT_MAJOR_3D || c.part != EP_PART_WHOLE;
}

/* A warp: strip `strip` of own token t, to all ranks the token goes to. `entry`, `own`: of the lane's k; `sends`: the first k of each
 * rank. */
template <class C>
DEV void ep_ll_send_strip(const C c, const epLlDispatchArgs &a, const epLlOp &op, uint32_t t, uint32_t strip,
                          uint32_t entry, uint32_t own, uint32_t sends, const epLlOwn &x) {
  uint32_t l = p::lane(), me = a.group.rank, bytes = ep_ll_bytes(c, strip);
  uint32_t mine = p::ballot(p::FULL, (sends >> l & 1) && own >> EP_ENTRY_POS_BITS == me);
#pragma unroll 1
  for (uint32_t m = strip == 0 ? (ep_ll_heads_own(c) ? sends : sends & ~mine) : 0; m; m &= m - 1) {
    uint32_t to = p::shfl(p::FULL, own, p::ffs(m) - 1);
    ep_ll_send_head(c, a, op, me, t, to >> EP_ENTRY_POS_BITS, EP_ENTRY_POS(to), own == to ? entry : EP_NONE, x.weight);
  }
  if (sends & ~mine) {
    uint4 u[EP_STRIP_UNITS];
    ep_ll_to_units(ep_ll_buffer(c, EP_KERNEL_LL_DISPATCH), op.gen, x.v, u);
#pragma unroll 1
    for (uint32_t m = sends & ~mine; m; m &= m - 1) {
      uint32_t to = p::shfl(p::FULL, own, p::ffs(m) - 1), dst = to >> EP_ENTRY_POS_BITS;
      ep_ll_send(ep_ll_window(dst) + strip * EP_STRIP_BYTES +
                     epLlStageRow(&a.window, c.ranks, a.group.maxTokens, op.gen, dst, me, EP_ENTRY_POS(to)),
                 bytes, u);
    }
  }
  if (!mine) return;
  uint32_t here = p::shfl(p::FULL, own, p::ffs(mine) - 1);
  if (strip == 0 && l == 0) p::stg<uint32_t>((uint32_t *)(a.record + a.recordLayout.sendRow) + t, EP_ENTRY_POS(here));
  if (ep_ll_heads_own(c)) return;
  ep_ll_store_row(c, a, ep_ll_place(c, a, me, EP_ENTRY_POS(here)), strip, bytes, x.v);
  epLlArrival r = {me, EP_ENTRY_POS(here), t, own == here ? entry : EP_NONE, x.weight, EP_NONE};
  if (strip == 0) ep_ll_write_head(c, a, r);
}

/* Whole block, tokens [t0, t1), at most a warp's: the entries and rows of the lane's decision, from the sums of those before. */
template <class C>
DEV void ep_ll_find(const C c, const epLlRoute &r, uint32_t expertMask, uint32_t &entry, uint32_t &own) {
  uint32_t pos = 0, row = 0;
  entry = own = EP_NONE;
  if (c.layout == EP_LAYOUT_KIND_EXPERT_MAJOR_3D && r.valid)
    pos = p::lds<uint32_t>(ep_ll_sum(c, r.expert)) + p::popc(expertMask & ep_lanes_below());
  if (r.first) row = p::lds<uint32_t>(ep_ll_rows_sum(c, r.owner)) + p::popc(r.rankMask & ep_lanes_below());
  row = p::shfl(p::FULL, row, r.valid ? p::ffs(r.mates) - 1 : 0);
  if (r.valid) {
    entry = EP_ENTRY(r.expert % (c.experts / c.ranks), pos);
    own = EP_OWN(row, r.owner);
  }
}

/* A warp: strip `strip` of token t for other domains' ranks, as ep_ll_send_strip; then the whole block, behind it: the tokens from t0 on,
 * `own` of each lane's decision. */
template <class C>
DEV void ep_ll_strip_to_far(const epLlOneDomain &, const C, const epLlDispatchArgs &, const epLlOp &, uint32_t,
                            uint32_t, uint32_t, uint32_t, const epLlOwn &) {}
template <class C>
DEV void ep_ll_tokens_to_far(const epLlOneDomain &, const C, const epLlDispatchArgs &, const epLlOp &, uint32_t,
                             uint32_t) {}

template <class C, class N> DEV void ep_ll_push(const C c, const epLlDispatchArgs &a, const N &net) {
  uint32_t T = ep_ll_tokens(a.record, a.recordLayout, a.numTokens, a.tokensHeld);
  uint32_t warps = c.threads / 32, strips = epLlStrips(ep_ll_travels(c)), counted = 0;
  uint32_t each = a.tokensABlock, first = (p::bid() - 1) * each;
  bool major = c.layout == EP_LAYOUT_KIND_EXPERT_MAJOR_3D;
  epLlAhead ahead;
  epLlRaw raw;
  epLlOwn x;
  auto ask = [&](uint32_t t0) {
    uint32_t t1 = t0 + each < T ? t0 + each : T;
    ep_ll_ask_ahead(c, a.decisions, counted, t0, ahead);
    raw = ep_ll_ask_tokens(c, a.decisions, t0, t1);
    if (t0 + p::warp() / strips < t1) ep_ll_load_own(c, a, t0 + p::warp() / strips, p::warp() % strips, x);
  };
  epLlOp op = ep_ll_begin(
      c, a.group, [&]() { ask(first); }, [&]() { ep_ll_zero_sums(c, major); });
  ep_ll_launch(c);
  if (op.lost) return ep_ll_end(c, a.group, op, a.blocks);
#pragma unroll 1
  for (uint32_t t0 = first; t0 < T; t0 += a.pushBlocks * each) {
    uint32_t t1 = t0 + each < T ? t0 + each : T, items = (t1 - t0) * strips, entry, own;
    if (t0 != first) ask(t0);
    ep_ll_count(c, a.decisions, major, counted, t0, ahead, [](uint32_t, epLlRaw) {});
    epLlRoute r = ep_ll_route(c, a.decisions, raw);
    uint32_t firsts = p::ballot(p::FULL, r.first && !ep_ll_left_out(c, r.owner) && !ep_ll_far(c, r.owner)),
             same = major ? ep_ll_same(r.valid, r.expert, c.experts) : 0;
    p::sync_threads();
    ep_ll_find(c, r, same, entry, own);
#pragma unroll 1
    for (uint32_t item = p::warp(); item < items; item += warps) {
      uint32_t i = item / strips, from = i * c.topk;
      if (item >= warps) ep_ll_load_own(c, a, t0 + i, item % strips, x);
      uint32_t e = p::shfl(p::FULL, entry, (from + p::lane()) & 31), o = p::shfl(p::FULL, own, (from + p::lane()) & 31);
      bool inside = p::lane() < c.topk;
      ep_ll_strip_to_far(net, c, a, op, t0 + i, item % strips, inside ? e : EP_NONE, inside ? o : EP_NONE, x);
      ep_ll_send_strip(c, a, op, t0 + i, item % strips, inside ? e : EP_NONE, inside ? o : EP_NONE,
                       firsts >> from & ep_ll_token_lanes(c), x);
    }
    counted = t0;
    p::sync_threads();
    ep_ll_tokens_to_far(net, c, a, op, t0, own);
  }
  ep_ll_sent_far(net, c, a.group, p::bid() - 1, (T + each - 1) / each, a.pushBlocks);
  ep_ll_end(c, a.group, op, a.blocks);
}

/* ---- Receive ------------------------------------------------------------------------------------------------------- */

/* Word w of a head whose units lie in the lanes; w may differ between lanes. */
DEV uint32_t ep_ll_head_word(const uint4 &u, uint32_t w) {
  uint32_t a = p::shfl(p::FULL, u.y, w / 3 & 31), b = p::shfl(p::FULL, u.z, w / 3 & 31),
           d = p::shfl(p::FULL, u.w, w / 3 & 31);
  return w % 3 == 0 ? a : w % 3 == 1 ? b : d;
}

template <class C> DEV void ep_ll_read_head(const C c, const epLlDispatchArgs &a, const uint4 &u, epLlArrival &r) {
  uint32_t l = p::lane(), capacity = c.ranks * a.group.maxTokens;
  r.token = ep_ll_head_word(u, 0);
  r.entry = ep_ll_head_word(u, 1 + l);
  r.weight = ep_ll_head_word(u, 1 + c.topk + l);
  if (l >= c.topk) r.entry = EP_NONE;
  r.slot = EP_NONE;
  if (c.layout == EP_LAYOUT_KIND_EXPERT_MAJOR_3D && r.entry != EP_NONE) {
    uint32_t e = EP_ENTRY_EXPERT(r.entry), at = EP_ENTRY_POS(r.entry);
#pragma unroll 1
    for (uint32_t s = 0; s < r.s; s++) at += ep_ll_entries(c, s, e);
    at += c.bug == EP_BUG_SLOT_OFF_BY_ONE && at + 1 < capacity;
    r.slot = at < capacity ? e * capacity + at : EP_NONE;
  }
}

/* A warp's item: a piece of row j of source s, and its units as they come; the last one is the head's. */
#define EP_LL_HEAD_AT (EP_LL_PIECE_STRIPS * EP_STRIP_UNITS)

/* Piece `piece`: its first strip and, below, how many of its bytes strip `s` of it begins with. */
template <class C> DEV uint32_t ep_ll_first_strip(const C c, uint32_t piece) {
  return piece * epLlPieceStrips(c.layout);
}
template <class C> DEV uint32_t ep_ll_piece_bytes(const C c, uint32_t piece, uint32_t s) {
  return s < epLlPieceStrips(c.layout) ? ep_ll_bytes(c, ep_ll_first_strip(c, piece) + s) : 0;
}

struct epLlPiece {
  uint4 v[EP_LL_PIECE_STRIPS][EP_STRIP_VECTORS];
};
template <class C>
DEV void ep_ll_load_piece(const C c, const epLlDispatchArgs &a, uint64_t row, uint32_t piece, epLlPiece &x) {
#pragma unroll
  for (uint32_t s = 0; s < EP_LL_PIECE_STRIPS; s++)
    ep_ll_load_row(c, a, row, ep_ll_first_strip(c, piece) + s, ep_ll_piece_bytes(c, piece, s), x.v[s]);
}
template <class C>
DEV void ep_ll_store_piece(const C c, const epLlDispatchArgs &a, uint64_t row, uint32_t piece, const epLlPiece &x) {
#pragma unroll
  for (uint32_t s = 0; s < EP_LL_PIECE_STRIPS; s++)
    ep_ll_store_row(c, a, row, ep_ll_first_strip(c, piece) + s, ep_ll_piece_bytes(c, piece, s), x.v[s]);
}

struct epLlItem {
  epLlArrival r;
  uint32_t piece;
  const uint8_t *head, *data;
  uint4 u[EP_LL_HEAD_AT + 1];
  uint64_t count; /* rank-major: the word of the source's rows */
};

/* Item i: row j of every source in turn, in a whole rank-major dispatch of every other rank, pieces of a row side by side. `rows`: bound of a source's
 * rows. False: past the end. */
template <class C>
DEV bool ep_ll_item(const C c, const epLlDispatchArgs &a, const epLlOp &op, uint64_t i, uint32_t rows, epLlItem &x) {
  uint32_t me = a.group.rank, B = a.group.maxTokens, pieces = epLlPieces(ep_ll_travels(c), c.layout);
  uint32_t first = !ep_ll_heads_own(c), sources = c.ranks - first, q = (uint32_t)(i / pieces);
  if (i >= (uint64_t)rows * sources * pieces) return false;
  x.piece = (uint32_t)(i % pieces);
  x.r.j = q / sources;
  x.r.s = (me + first + q % sources) % c.ranks;
  const uint8_t *window = ep_ll_window(me);
  x.head = window + epLlHead(&a.window, c.ranks, B, op.gen, x.r.s, x.r.j) + 16 * p::lane();
  x.data = window + (x.r.s == me ? 0 : epLlStageRow(&a.window, c.ranks, B, op.gen, me, x.r.s, x.r.j)) +
           ep_ll_first_strip(c, x.piece) * EP_STRIP_BYTES + 16 * p::lane();
  return true;
}
DEV const uint8_t *ep_ll_item_unit(const epLlItem &x, uint32_t i) {
  return i == EP_LL_HEAD_AT ? x.head : x.data + 512 * i;
}

/* A first look at an item. Rank-major rows need their head with the first piece only, but for own ones, whose token it tells. */
template <class C> DEV void ep_ll_item_look(const C c, const epLlDispatchArgs &a, const epLlOp &op, epLlItem &x) {
  bool head =
      c.layout == EP_LAYOUT_KIND_EXPERT_MAJOR_3D || x.piece == 0 || (ep_ll_heads_own(c) && x.r.s == a.group.rank);
  uint32_t wanted = (uint32_t)(head && p::lane() < epLlHeadUnits(c.topk)) << EP_LL_HEAD_AT;
  if (x.r.s != a.group.rank) {
#pragma unroll
    for (uint32_t s = 0; s < EP_LL_PIECE_STRIPS; s++)
      wanted |= ep_ll_wanted(ep_ll_piece_bytes(c, x.piece, s)) << EP_STRIP_UNITS * s;
  }
  ep_ll_look<EP_LL_HEAD_AT + 1>(
      op, wanted, [&](uint32_t i) { return ep_ll_item_unit(x, i); }, x.u);
}

/* A warp: the item's units, when they have come, to their place or places. EP_LL_*. */
template <class C> DEV int ep_ll_take(const C c, const epLlDispatchArgs &a, const epLlOp &op, epLlItem &x) {
  uint32_t buffer = ep_ll_buffer(c, EP_KERNEL_LL_DISPATCH), me = a.group.rank;
  bool rankMajor = c.layout == EP_LAYOUT_KIND_RANK_MAJOR;
  epLlArrival &r = x.r;
  const uint64_t *word = ep_ll_counts(c, a, op, me, r.s) + c.experts / c.ranks;
  auto absent = [&]() {
    if (c.mask) return ep_ll_gone(c, a.group, op, r.s);
    if (!rankMajor) return false;
    if ((uint32_t)(x.count >> 32) != op.gen) x.count = p::ld_relaxed_sys(word);
    return (uint32_t)(x.count >> 32) == op.gen && r.j >= (uint32_t)x.count;
  };
  int came = ep_ll_settle<EP_LL_HEAD_AT + 1, true>(
      c, a.group, op, a.blocks >= EP_LL_NARROW_BLOCKS, EP_PHASE_DISPATCH_ROWS,
      c.mask ? ep_bringer(c, a.group, r.s) : r.s, [&](uint32_t i) { return ep_ll_item_unit(x, i); }, x.u, absent);
  if (came != EP_LL_CAME) return came;
  if (!rankMajor || x.piece == 0 || (ep_ll_heads_own(c) && r.s == me)) ep_ll_read_head(c, a, x.u[EP_LL_HEAD_AT], r);
  epLlPiece v;
  if (r.s == me) {
    ep_ll_load_piece(c, a, r.token, x.piece, v);
  } else {
#pragma unroll
    for (uint32_t s = 0; s < EP_LL_PIECE_STRIPS; s++)
      if (ep_ll_piece_bytes(c, x.piece, s)) ep_ll_to_vectors(buffer, x.u + EP_STRIP_UNITS * s, v.v[s]);
  }
  if (rankMajor) ep_ll_store_piece(c, a, ep_ll_place(c, a, r.s, r.j), x.piece, v);
#pragma unroll 1
  for (uint32_t m = rankMajor ? 0 : p::ballot(p::FULL, r.slot != EP_NONE); m; m &= m - 1)
    ep_ll_store_piece(c, a, p::shfl(p::FULL, r.slot, p::ffs(m) - 1), x.piece, v);
  if (x.piece == 0) ep_ll_write_head(c, a, r);
  return EP_LL_CAME;
}

/* Whole warp: waits for the words of all sources' rows; the most there are. EP_NONE: gave up. */
template <class C> DEV uint32_t ep_ll_most_rows(const C c, const epLlDispatchArgs &a, const epLlOp &op) {
  uint32_t most = 0, locals = c.experts / c.ranks;
  bool ok = true;
#pragma unroll 1
  for (uint32_t s = p::lane(); s < c.ranks && ok; s += 32) {
    uint32_t n = 0;
    ok = (s == a.group.rank && !ep_ll_heads_own(c)) ||
         ep_wait_word(a.group, ep_ll_counts(c, a, op, a.group.rank, s) + locals, op.gen, EP_PHASE_UPDATE_COUNTS, s, &n);
    most = n > most ? n : most;
  }
  if (p::ballot(p::FULL, !ok)) return EP_NONE;
  return ep_ll_over_warp(most, [](uint32_t x, uint32_t y) { return x > y ? x : y; });
}

/* A warp. The first item's rank-major row is looked at before it is known whether there is one. */
template <class C>
DEV void ep_ll_take_rank_major(const C c, const epLlDispatchArgs &a, const epLlOp &op, uint32_t index, uint32_t warps) {
  epLlItem x;
  uint32_t most = a.group.maxTokens;
#pragma unroll 1
  for (uint64_t i = index; ep_ll_item(c, a, op, i, most, x); i += warps) {
    ep_ll_item_look(c, a, op, x);
    x.count = p::ld_relaxed_sys(ep_ll_counts(c, a, op, a.group.rank, x.r.s) + c.experts / c.ranks);
    if (ep_ll_take(c, a, op, x) == EP_LL_GAVE_UP) return;
    if (i == index && ep_ll_item(c, a, op, i + warps, most, x)) most = ep_ll_most_rows(c, a, op);
    if (most == EP_NONE) return;
  }
}

/* Rows of the busiest source. */
template <class C> DEV uint32_t ep_ll_most_rows(const C c) {
  uint32_t most = 0;
#pragma unroll 1
  for (uint32_t s = 0; s < c.ranks; s++) {
    uint32_t n = ep_ll_rows(c, s);
    most = n > most ? n : most;
  }
  return most;
}

/* Whole block: slots need the counts, which are on their way with the first rows. */
template <class C>
DEV void ep_ll_take_expert_major(const C c, const epLlDispatchArgs &a, const epLlOp &op, uint32_t index,
                                 uint32_t warps) {
  epLlItem x;
  if (ep_ll_item(c, a, op, index, a.group.maxTokens, x)) ep_ll_item_look(c, a, op, x);
  if (!ep_ll_gather(c, a, op)) return;
  uint32_t most = ep_ll_most_rows(c);
#pragma unroll 1
  for (uint64_t i = index; ep_ll_item(c, a, op, i, most, x); i += warps) {
    if (x.r.j >= ep_ll_rows(c, x.r.s)) continue;
    if (i != index) ep_ll_item_look(c, a, op, x);
    if (ep_ll_take(c, a, op, x) == EP_LL_GAVE_UP) return;
  }
}

/* Whole block, with masks, both layouts: rows of the sources that take part. */
template <class C>
DEV void ep_ll_take_living(const C c, const epLlDispatchArgs &a, const epLlOp &op, uint32_t index, uint32_t warps) {
  epLlItem x;
  bool ok = true;
  if (p::tid() == 0)
    ok = ep_await_flag(c, a.group, &ep_mask_slot(c, a.group)->verdict, op.gen, EP_PHASE_GRID, a.group.rank);
  if (!ep_block_agrees(ok)) return;
  ep_ll_counts_told(c, a);
  uint32_t most = ep_ll_most_rows(c);
#pragma unroll 1
  for (uint64_t i = index; ep_ll_item(c, a, op, i, most, x); i += warps) {
    if (x.r.j >= ep_ll_rows(c, x.r.s)) continue;
    ep_ll_item_look(c, a, op, x);
    int came = ep_ll_take(c, a, op, x);
    if (came == EP_LL_CAME) continue;
    if (ep_stopped(c, a.group)) return;
    if (came == EP_LL_ABSENT) ep_mask_out(c, a.group, EP_ERR_MASKED, EP_PHASE_DISPATCH_ROWS, x.r.s, op.gen, op.gen - 1);
    ep_ll_lose(c, a.group, op, x.r.s);
  }
}

/* Whole block, the last one to end: rows of the ranks that fell out meanwhile are left empty, those that had come too. In 3-D
 * expert-major the places of other rows stay what they are, so the counters do too. */
template <class C> DEV_APART void ep_ll_empty(const C c, const epLlDispatchArgs &a) {
  uint32_t locals = c.experts / c.ranks, capacity = c.ranks * a.group.maxTokens;
  ep_ll_counts_told(c, a);
#pragma unroll 1
  for (uint32_t s = 0; s < c.ranks; s++) {
    if (!ep_ll_left_out(c, s) || ep_ll_rows(c, s) == 0) continue;
#pragma unroll 1
    for (uint32_t e = 0; e < locals && c.layout == EP_LAYOUT_KIND_EXPERT_MAJOR_3D; e++) {
      uint64_t at = 0, n = ep_ll_entries(c, s, e);
#pragma unroll 1
      for (uint32_t before = 0; before < s; before++) at += ep_ll_entries(c, before, e);
      n = at >= capacity ? 0 : at + n > capacity ? capacity - at : n;
      uint8_t *to = a.outTokens + ((uint64_t)e * capacity + at) * c.rowBytes;
#pragma unroll 1
      for (uint64_t v = 16ull * p::tid(); v < n * c.rowBytes; v += 16ull * c.threads)
        p::stg<uint4>(to + v, ep_ll_zero());
      uint8_t *scales = a.outScales + ((uint64_t)e * capacity + at) * c.scaleBytes;
#pragma unroll 1
      for (uint64_t v = 4ull * p::tid(); v < n * c.scaleBytes; v += 4ull * c.threads) p::stg<uint32_t>(scales + v, 0);
    }
    if (c.layout == EP_LAYOUT_KIND_EXPERT_MAJOR_3D && p::tid() == 0)
      p::stg<uint32_t>((uint32_t *)(a.record + a.recordLayout.recvCount) + s, 0);
  }
  p::sync_threads();
  if (c.layout == EP_LAYOUT_KIND_EXPERT_MAJOR_3D) return;
#pragma unroll 1
  for (uint32_t i = p::tid(); i < c.experts + c.ranks; i += c.threads)
    if (ep_ll_left_out(c, i / (locals + 1))) p::sts<uint32_t>(ep_ll_count_at(c, i), 0);
  p::sync_threads();
  ep_ll_tell_counts(c, a);
}

/* `before`: blocks of other roles. */
template <class C, class N>
DEV void ep_ll_receive(const C c, const epLlDispatchArgs &a, const N &net, uint32_t before) {
  uint32_t warps = (a.blocks - before) * (c.threads / 32);
  uint32_t index = p::warp() * (a.blocks - before) + p::bid() - before; /* few items lie on as many SMs */
  epLlOp op = ep_ll_begin(
      c, a.group, []() {}, []() {});
  ep_ll_launch(c);
  if (op.lost) return ep_ll_end(c, a.group, op, a.blocks);
  if (c.part == EP_PART_WHOLE && index == warps - 1) {
    ep_ll_greet(c, a.group, a.window, op);
    ep_ll_greet_far(net, c, a.group);
  }
  if (c.mask)
    ep_ll_take_living(c, a, op, index, warps);
  else if (c.layout == EP_LAYOUT_KIND_RANK_MAJOR)
    ep_ll_take_rank_major(c, a, op, index, warps);
  else
    ep_ll_take_expert_major(c, a, op, index, warps);
  if (index == warps - 1) {
    ep_ll_greeted(c, a.group, a.window, op, EP_PHASE_DISPATCH_CREDIT);
    ep_ll_greeted_far(net, c, a.group, op, EP_PHASE_DISPATCH_CREDIT);
  }
  ep_ll_end(c, a.group, op, a.blocks);
}

template <class C> DEV void ep_ll_dispatch(const C c, const epLlDispatchArgs &a) {
  epLlOneDomain net;
  p::grid_wait();
  epProfile profile = ep_profile_begin(a.group, EP_KERNEL_LL_DISPATCH);
  if (p::bid() == 0)
    ep_ll_clerk(c, a, net);
  else if (c.part != EP_PART_RECEIVE && p::bid() <= a.pushBlocks)
    ep_ll_push(c, a, net);
  else if (c.part == EP_PART_SEND)
    ep_ll_greeter(c, a, net);
  else
    ep_ll_receive(c, a, net, a.pushBlocks + 1);
  if (c.mask && ep_ll_repairs(c, a.group, a.blocks)) ep_ll_empty(c, a);
  ep_profile_end(profile,
                 p::bid() == 0              ? EP_SPAN_RECORD
                 : p::bid() <= a.pushBlocks ? EP_SPAN_SEND
                                            : EP_SPAN_RECEIVE,
                 a.blocks);
}

#endif
