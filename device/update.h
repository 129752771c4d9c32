/* Update: turns one set of top-k decisions into the handle's routing record. Positions come from ordered scans, never from
 * atomics, so the same routing always gives the same record.
 *
 *   pass 1   every warp counts its contiguous tokens by expert and by rank (shared memory), blocks publish their sums
 *   grid     barrier; every block adds the sums of the blocks before it; the last one knows the totals and sends them
 *   pass 2   every warp walks its tokens again: position of each (t, k) and row of each (t, rank), kept and sent as meta
 *   gather   totals of all sources -> bases and zones (block 0), replies to the sources, meta rows -> record (all)
 *
 * Bytes: T*K indices in twice, T*(1+K)*4 out per rank hit; time is a handful of latencies, one link round trip among them.
 * The window halves alternate by generation: a source that starts update g + 1 has finished g, for which it needed this
 * rank's counts of g, which were sent after this rank had finished reading g - 1. */
#ifndef EP_DEVICE_UPDATE_H_
#define EP_DEVICE_UPDATE_H_

#include "mask.h"

/* What one lane knows of its (token, k) in an iteration of 32 / K tokens. */
struct epRouteLane {
  uint32_t token, k, expert, owner;
  bool inside, valid, first;     /* inside: a real (t, k); first: first k of its token at this owner */
  uint32_t expertMask, rankMask; /* lanes with the same expert; first lanes with the same owner */
};

DEV uint32_t ep_update_block(const epUpdateArgs &a) { return p::bid() - a.firstBlock; }

template <class C> DEV uint32_t ep_update_tokens_at_once(const C c) { return 32 / c.topk; }

/* A lane's decision of the iteration at token t, asked for; nothing waits for it yet. */
template <class C> DEV int64_t ep_route_ask(const C c, const epUpdateArgs &a, uint32_t t, uint32_t end) {
  uint32_t sub = p::lane() / c.topk, token = t + sub;
  if (sub >= ep_update_tokens_at_once(c) || token >= end) return -1;
  uint64_t at = (uint64_t)token * c.topk + p::lane() % c.topk;
  return c.indexBytes == 8 ? p::ldg<int64_t>((const int64_t *)a.topkIdx + at)
                           : (int64_t)p::ldg<int32_t>((const int32_t *)a.topkIdx + at);
}

/* A warp's way through tokens [t, end): decisions are asked for two iterations ahead, since each is a trip to memory. */
struct epRouteWalk {
  uint32_t t, end;
  bool again; /* the record has the decisions: with masks some are no more than -1 */
  int64_t next, ahead;
};

template <class C>
DEV epRouteWalk ep_route_walk(const C c, const epUpdateArgs &a, uint32_t t, uint32_t end, bool again) {
  epRouteWalk w;
  w.again = again;
  w.t = t;
  w.end = end;
  w.next = ep_route_ask(c, a, t, end);
  w.ahead = ep_route_ask(c, a, t + ep_update_tokens_at_once(c), end);
  return w;
}

/* Only where w.t < w.end. */
template <class C> DEV epRouteLane ep_route_lane(const C c, const epUpdateArgs &a, epRouteWalk &w) {
  epRouteLane r;
  uint32_t sub = p::lane() / c.topk, locals = c.experts / c.ranks;
  int64_t e = w.next;
  r.token = w.t + sub;
  r.k = p::lane() % c.topk;
  r.inside = sub < ep_update_tokens_at_once(c) && r.token < w.end;
  r.valid = false;
  r.expert = 0;
  w.next = w.ahead;
  w.ahead = ep_route_ask(c, a, w.t + 2 * ep_update_tokens_at_once(c), w.end);
  w.t += ep_update_tokens_at_once(c);
  if (r.inside) {
    r.valid = e >= 0 && e < (int64_t)c.experts;
    if (r.valid)
      r.expert = (uint32_t)e;
    else if (e != -1)
      ep_report_index(a.group, r.token, r.k, e);
  }
  r.owner = r.expert / locals;
  if (c.mask && c.scaleUp &&
      r.valid) /* with several domains masks are looked at here alone, so that all that follows knows of one routing */
    r.valid =
        w.again
            ? p::ldg<int32_t>((const int32_t *)(a.record + a.recordLayout.topk) + (uint64_t)r.token * c.topk + r.k) >= 0
            : ep_can_reach(c, a.group, r.owner);
  r.expertMask = p::match_any(p::FULL, r.valid ? r.expert : ep_lone_key());
  uint32_t mates = p::match_any(p::FULL, r.valid ? sub * c.ranks + r.owner : ep_lone_key());
  r.first = r.valid && (mates & ep_lanes_below()) == 0;
  r.rankMask = p::match_any(p::FULL, r.first ? r.owner : ep_lone_key());
  return r;
}

/* Column `i` of a warp's histogram: experts first, then ranks. */
template <class C> DEV uint32_t ep_hist(const C c, uint32_t w, uint32_t i) {
  return p::smem_base() + EP_VERDICT_BYTES + 4 * (w * (c.experts + c.ranks) + i);
}

template <class C> DEV void ep_update_count(const C c, const epUpdateArgs &a, uint32_t t0, uint32_t t1) {
  uint32_t w = p::warp(), below = ep_lanes_below();
  int32_t *topk = (int32_t *)(a.record + a.recordLayout.topk);
  epRouteWalk walk = ep_route_walk(c, a, t0, t1, false);
  for (uint32_t i = p::lane(); i < c.experts + c.ranks; i += 32) p::sts<uint32_t>(ep_hist(c, w, i), 0);
  p::sync_warp();
  while (walk.t < t1) {
    epRouteLane r = ep_route_lane(c, a, walk);
    if (r.inside) p::stg<int32_t>(topk + (uint64_t)r.token * c.topk + r.k, r.valid ? (int32_t)r.expert : -1);
    if (r.valid && (r.expertMask & below) == 0) {
      uint32_t h = ep_hist(c, w, r.expert);
      p::sts<uint32_t>(h, p::lds<uint32_t>(h) + p::popc(r.expertMask));
    }
    if (r.first && (r.rankMask & below) == 0) {
      uint32_t h = ep_hist(c, w, c.experts + r.owner);
      p::sts<uint32_t>(h, p::lds<uint32_t>(h) + p::popc(r.rankMask));
    }
    p::sync_warp();
  }
}

/* Warps' counts become exclusive prefixes inside the block; the block's sums go to the scratch. */
template <class C> DEV void ep_update_publish(const C c, const epUpdateArgs &a, uint32_t *histogram) {
  uint32_t warps = c.threads / 32, columns = c.experts + c.ranks;
  for (uint32_t i = p::tid(); i < columns; i += c.threads) {
    uint32_t run = 0;
    for (uint32_t w = 0; w < warps; w++) {
      uint32_t v = p::lds<uint32_t>(ep_hist(c, w, i));
      p::sts<uint32_t>(ep_hist(c, w, i), run);
      run += v;
    }
    p::stg<uint32_t>(histogram + (uint64_t)ep_update_block(a) * columns + i, run);
  }
}

#define EP_BASES_AT_ONCE 16

DEV uint64_t ep_word(uint32_t gen, uint32_t value) { return (uint64_t)gen << 32 | value; }

/* Adds the sums of earlier blocks; the last block sends the totals, each word carrying its generation. */
template <class C> DEV void ep_update_bases(const C c, const epUpdateArgs &a, const uint32_t *histogram, uint32_t gen) {
  uint32_t warps = c.threads / 32, columns = c.experts + c.ranks, locals = c.experts / c.ranks;
  bool last = ep_update_block(a) == a.blocks - 1;
  for (uint32_t i = p::tid(); i < columns; i += c.threads) {
    uint32_t before = 0;
    for (uint32_t b = 0; b < ep_update_block(a);
         b += EP_BASES_AT_ONCE) /* loads in flight together: each is a trip to the L2 */
#pragma unroll
      for (uint32_t u = 0; u < EP_BASES_AT_ONCE; u++)
        before += b + u < ep_update_block(a) ? p::ldg<uint32_t>(histogram + (uint64_t)(b + u) * columns + i) : 0;
    for (uint32_t w = 0; w < warps; w++)
      p::sts<uint32_t>(ep_hist(c, w, i), p::lds<uint32_t>(ep_hist(c, w, i)) + before);
    if (last) {
      uint32_t total = before + p::ldg<uint32_t>(histogram + (uint64_t)ep_update_block(a) * columns + i);
      bool expert = i < c.experts;
      uint32_t dst = expert ? i / locals : i - c.experts, word = expert ? i % locals : locals;
      if (ep_masked(c, a.group, dst)) continue;
      uint64_t *counts = (uint64_t *)(ep_window(a.group, dst) + a.group.window.counts);
      p::st_relaxed_sys(counts + (uint64_t)((gen & 1) * c.ranks + a.group.rank) * (locals + 1) + word,
                        ep_word(gen, expert ? total : EP_ROWS_WORD(total, EP_ROWS_TAG(c.topk, c.layout))));
    }
  }
}

DEV uint32_t *ep_meta(const epGroupArgs &g, uint32_t ranks, uint32_t owner, uint32_t source, uint32_t gen) {
  return (uint32_t *)(ep_window(g, owner) + g.window.meta) +
         (uint64_t)((gen & 1) * ranks + source) * g.maxTokens * g.window.metaWords;
}

/* Row `row` of this rank's at `owner`: on its way there, or, here, in the record at once. */
template <class C>
DEV uint32_t *ep_meta_row(const C c, const epUpdateArgs &a, uint32_t owner, uint32_t row, uint32_t gen) {
  uint32_t me = a.group.rank;
  if (owner != me) return ep_meta(a.group, c.ranks, owner, me, gen) + (uint64_t)row * a.group.window.metaWords;
  return (uint32_t *)(a.record + a.recordLayout.recvMeta) + ((uint64_t)me * a.group.maxTokens + row) * (1 + c.topk);
}

template <class C> DEV void ep_update_place(const C c, const epUpdateArgs &a, uint32_t t0, uint32_t t1, uint32_t gen) {
  uint32_t w = p::warp(), below = ep_lanes_below(), locals = c.experts / c.ranks;
  int32_t *sendRow = (int32_t *)(a.record + a.recordLayout.sendRow);
  int32_t *sendPos = (int32_t *)(a.record + a.recordLayout.sendPos);
  epRouteWalk walk = ep_route_walk(c, a, t0, t1, true);
  while (walk.t < t1) {
    epRouteLane r = ep_route_lane(c, a, walk);
    uint32_t pos = 0, row = 0;
    if (r.valid) pos = p::lds<uint32_t>(ep_hist(c, w, r.expert)) + p::popc(r.expertMask & below);
    if (r.first) row = p::lds<uint32_t>(ep_hist(c, w, c.experts + r.owner)) + p::popc(r.rankMask & below);
    p::sync_warp();
    if (r.valid && (r.expertMask & below) == 0) p::sts<uint32_t>(ep_hist(c, w, r.expert), pos + p::popc(r.expertMask));
    if (r.first && (r.rankMask & below) == 0)
      p::sts<uint32_t>(ep_hist(c, w, c.experts + r.owner), row + p::popc(r.rankMask));
    uint64_t at = r.first && !ep_masked(c, a.group, r.owner) ? (uint64_t)ep_meta_row(c, a, r.owner, row, gen) : 0;
    uint32_t base = p::lane() / c.topk * c.topk, myRow = EP_NONE;
    for (uint32_t k = 0; k < c.topk; k++) { /* each k in turn offers its row to the lanes of its token */
      uint32_t src = base + k < 32 ? base + k : 31;
      bool first = p::shfl(p::FULL, r.first, src);
      uint32_t owner = p::shfl(p::FULL, r.owner, src), itsRow = p::shfl(p::FULL, row, src);
      uint32_t *meta = (uint32_t *)ep_shfl64(at, src);
      bool mine = r.valid && r.owner == owner;
      if (!r.inside || !first) continue;
      if (mine) myRow = itsRow;
      if (!meta) continue;
      p::stg<uint32_t>(meta + 1 + r.k, mine ? EP_ENTRY(r.expert % locals, pos) : EP_NONE);
      if (r.k == 0) p::stg<uint32_t>(meta, r.token);
    }
    if (r.inside) {
      p::stg<int32_t>(sendRow + (uint64_t)r.token * c.topk + r.k, r.valid ? (int32_t)myRow : -1);
      p::stg<int32_t>(sendPos + (uint64_t)r.token * c.topk + r.k, r.valid ? (int32_t)pos : -1);
    }
    p::sync_warp();
  }
}

/* The last block whose meta rows are stored raises the flags of all: its counter makes their stores its own to release. */
template <class C> DEV void ep_update_send_flags(const C c, const epUpdateArgs &a, uint32_t gen) {
  p::sync_threads();
  if (p::tid() == 0)
    p::sts<uint32_t>(p::smem_base(), a.blocks > 1 ? p::atomic_add_acq_rel_gpu(&ep_state(a.group)->updateSent, 1) : 0);
  p::sync_threads();
  bool last = p::lds<uint32_t>(p::smem_base()) == a.blocks - 1;
  for (uint32_t d = p::tid(); last && d < c.ranks; d += c.threads)
    if (!ep_masked(c, a.group, d))
      p::st_release_sys((uint32_t *)(ep_window(a.group, d) + a.group.window.metaFlags) + a.group.rank, gen);
  p::sync_threads();
}

/* One warp: shared out[0..n] = exclusive prefix of in(i), out[n] = sum. */
template <class F> DEV void ep_warp_prefix(uint32_t out, uint32_t n, F in) {
  uint32_t run = 0;
#pragma unroll 1
  for (uint32_t b = 0; b < n; b += 32) {
    uint32_t i = b + p::lane(), v = i < n ? in(i) : 0, sum = v;
    for (uint32_t d = 1; d < 32; d <<= 1) {
      uint32_t u = p::shfl_up(p::FULL, sum, d);
      if (p::lane() >= d) sum += u;
    }
    if (i < n) p::sts<uint32_t>(out + 4 * i, run + sum - v);
    run += p::shfl(p::FULL, sum, 31);
  }
  if (p::lane() == 0) p::sts<uint32_t>(out + 4 * n, run);
}

DEV void ep_put_counter(void *counter, uint32_t wide, uint32_t i, uint32_t value) {
  if (!counter) return;
  bool adds = (wide & EP_COUNTER_ADDS) != 0;
  if (wide & 1)
    p::stg<int64_t>((int64_t *)counter + i, (int64_t)value + (adds ? p::ldg<int64_t>((int64_t *)counter + i) : 0));
  else
    p::stg<int32_t>((int32_t *)counter + i, (int32_t)value + (adds ? p::ldg<int32_t>((int32_t *)counter + i) : 0));
}

/* Shared memory of the gathering block: counts [R][L], rows [R], zone counts [L], zone bases [L + 1], row bases [R + 1]. */
struct epGather {
  uint32_t counts, rows, zoneCount, zoneBase, recvBase;
};

template <class C> DEV epGather ep_gather(const C c) {
  uint32_t locals = c.experts / c.ranks;
  epGather g;
  g.counts = p::smem_base() + EP_VERDICT_BYTES;
  g.rows = g.counts + 4 * c.experts;
  g.zoneCount = g.rows + 4 * c.ranks;
  g.zoneBase = g.zoneCount + 4 * locals;
  g.recvBase = g.zoneBase + 4 * (locals + 1);
  return g;
}

DEV uint32_t ep_lds(uint32_t array, uint32_t i) { return p::lds<uint32_t>(array + 4 * i); }

/* Whole block, with masks: which sources take part, once for all that follows. A source's flag, which comes after its counts and meta
 * rows, says that it does. Those that do not have no rows. */
template <class C> DEV bool ep_gather_living(const C c, const epUpdateArgs &a, const epGather &g, uint32_t gen) {
  uint32_t locals = c.experts / c.ranks, words = locals + 1;
  const uint8_t *window = ep_window(a.group, a.group.rank);
  const uint64_t *counts = (const uint64_t *)(window + a.group.window.counts) + (uint64_t)(gen & 1) * c.ranks * words;
  const uint32_t *flags = (const uint32_t *)(window + a.group.window.metaFlags);
  bool ok = true;
  for (uint32_t s = p::tid(); s < c.ranks; s += c.threads) {
    uint32_t seen = 0;
    bool came = ep_await_flag(c, a.group, flags + s, gen, EP_PHASE_UPDATE_COUNTS, ep_bringer(c, a.group, s), &seen);
    came = ep_brought(c, a.group, came, (seen & EP_LOST) != 0, EP_PHASE_UPDATE_COUNTS, s, gen);
    p::sts<uint32_t>(g.recvBase + 4 * s, came); /* free until the prefix */
    ok = ok && (came || !ep_stopped(c, a.group));
  }
  if (!ep_block_agrees(ok)) return false;
  for (uint32_t i = p::tid(); i < c.ranks * words; i += c.threads) {
    uint32_t s = i / words, e = i % words, v = 0;
    if (p::lds<uint32_t>(g.recvBase + 4 * s)) v = (uint32_t)p::ld_relaxed_sys(counts + i);
    if (v && e == locals && EP_ROWS_TAG_OF(v) != EP_ROWS_TAG(c.topk, c.layout)) {
      ep_stop(c, a.group, EP_ERR_MISMATCH, EP_PHASE_UPDATE_COUNTS, s, EP_ROWS_TAG(c.topk, c.layout), EP_ROWS_TAG_OF(v));
      ok = false;
    }
    p::sts<uint32_t>(e < locals ? g.counts + 4 * (s * locals + e) : g.rows + 4 * s, e < locals ? v : EP_ROWS_OF(v));
  }
  return ep_block_agrees(ok);
}

/* Whole block: the words of all sources into shared memory. */
template <class C> DEV bool ep_gather_counts(const C c, const epUpdateArgs &a, const epGather &g, uint32_t gen) {
  if (c.mask) return ep_gather_living(c, a, g, gen);
  uint32_t locals = c.experts / c.ranks, words = locals + 1;
  const uint64_t *counts = (const uint64_t *)(ep_window(a.group, a.group.rank) + a.group.window.counts) +
                           (uint64_t)(gen & 1) * c.ranks * words;
  bool ok = true;
  for (uint32_t i = p::tid(); i < c.ranks * words && ok; i += c.threads) {
    uint32_t s = i / words, e = i % words, v;
    ok = ep_wait_word(a.group, counts + i, gen, EP_PHASE_UPDATE_COUNTS, s, &v);
    if (ok && e == locals && EP_ROWS_TAG_OF(v) != EP_ROWS_TAG(c.topk, c.layout)) {
      ep_report(a.group, EP_ERR_MISMATCH, EP_PHASE_UPDATE_COUNTS, s, EP_ROWS_TAG(c.topk, c.layout), EP_ROWS_TAG_OF(v));
      ok = false;
    }
    if (ok)
      p::sts<uint32_t>(e < locals ? g.counts + 4 * (s * locals + e) : g.rows + 4 * s, e < locals ? v : EP_ROWS_OF(v));
  }
  return ep_block_agrees(ok);
}

/* One thread: the record's header, by which it is known wherever its memory was moved. */
template <class C> DEV void ep_update_header(const C c, const epUpdateArgs &a) {
  epRecordHeader *h = (epRecordHeader *)(a.record + a.recordLayout.header);
  p::stg<uint32_t>(&h->magic, EP_RECORD_MAGIC);
  p::stg<uint32_t>(&h->version, EP_RECORD_VERSION);
  p::stg<uint32_t>(&h->ranks, c.ranks);
  p::stg<uint32_t>(&h->experts, c.experts);
  p::stg<uint32_t>(&h->topk, c.topk);
  p::stg<uint32_t>(&h->maxTokens, a.group.maxTokens);
  p::stg<uint32_t>(&h->rank, a.group.rank);
  p::stg<uint32_t>(&h->layout, c.layout);
  p::stg<uint32_t>(&h->tokens, a.tokens);
  p::stg<uint32_t>(&h->align, a.align);
  if (c.mask) p::stg<uint32_t>(&h->epoch, p::ld_relaxed_sys(&ep_mask_state(c, a.group)->epoch));
}

/* Whole warp: entries of all local experts. */
template <class C> DEV uint32_t ep_gather_total(const C c, const epGather &g) {
  uint32_t total = 0;
  for (uint32_t e = p::lane(); e < c.experts / c.ranks; e += 32) total += ep_lds(g.zoneCount, e);
  for (uint32_t d = 16; d; d >>= 1) total += p::shfl_xor(p::FULL, total, d);
  return total;
}

/* Whole block: exact counts for the host; their generation goes last. */
template <class C>
DEV void ep_update_host_counts(const C c, const epUpdateArgs &a, const epGather &g, uint32_t rows, uint32_t gen) {
  uint32_t locals = c.experts / c.ranks;
  uint32_t *out = (uint32_t *)(a.hostCounts + 1);
  for (uint32_t s = p::tid(); s < c.ranks; s += c.threads) p::st_relaxed_sys(out + s, ep_lds(g.rows, s));
  for (uint32_t e = p::tid(); e < locals; e += c.threads) {
    p::st_relaxed_sys(out + c.ranks + e, ep_lds(g.zoneCount, e));
    p::st_relaxed_sys(out + c.ranks + locals + e, ep_lds(g.zoneBase, e + 1) - ep_lds(g.zoneBase, e));
  }
  p::sync_threads();
  if (p::warp() != 0) return;
  uint32_t total = c.layout == EP_LAYOUT_KIND_FLAT ? rows : ep_gather_total(c, g);
  if (p::lane() == 0) {
    p::st_relaxed_sys(&a.hostCounts->total, total);
    p::st_relaxed_sys(&a.hostCounts->totalPadded, rows);
    p::st_release_sys(&a.hostCounts->generation, gen);
  }
}

/* Counter and offset of expert e, whose `padded` slots begin at `slot`: what computes along them must stay within the output. */
template <class C>
DEV void ep_put_zone(const C c, const epUpdateArgs &a, uint32_t e, uint32_t slot, uint32_t n, uint32_t padded) {
  uint32_t most = a.budget ? a.budget : EP_NONE, from = slot < most ? slot : most;
  uint32_t end = slot + padded < most ? slot + padded : most;
  bool counts = c.layout == EP_LAYOUT_KIND_FLAT || (a.expertCountersWide & EP_COUNTER_ADDS);
  ep_put_counter(a.expertOffsets, a.expertOffsetsWide, e, from);
  ep_put_counter(a.expertCounters, a.expertCountersWide, e, counts ? n : end - from);
}

/* Block 0: totals of all sources -> bases, zones, counters, replies. */
template <class C> DEV void ep_update_gather(const C c, const epUpdateArgs &a, uint32_t gen) {
  const epRecordLayout &rl = a.recordLayout;
  uint32_t locals = c.experts / c.ranks, words = locals + 1, me = a.group.rank, warps = c.threads / 32;
  uint32_t align = a.align ? a.align : 1;
  bool flat = c.layout == EP_LAYOUT_KIND_FLAT;
  uint32_t *slotBase = (uint32_t *)(a.record + rl.slotBase), *zoneBase = (uint32_t *)(a.record + rl.zoneBase);
  uint32_t *recvCount = (uint32_t *)(a.record + rl.recvCount), *recvBase = (uint32_t *)(a.record + rl.recvBase);
  uint32_t *zoneCount = (uint32_t *)(a.record + rl.zoneCount);
  epGather g = ep_gather(c);
  if (!ep_gather_counts(c, a, g, gen)) return;
  for (uint32_t e = p::tid(); e < locals; e += c.threads) {
    uint32_t total = 0;
    for (uint32_t s = 0; s < c.ranks; s++) total += ep_lds(g.counts, s * locals + e);
    p::sts<uint32_t>(g.zoneCount + 4 * e, total);
  }
  p::sync_threads();
  if (p::warp() == 0)
    ep_warp_prefix(g.zoneBase, locals,
                   [&](uint32_t e) { return (ep_lds(g.zoneCount, e) + align - 1) / align * align; });
  if (p::warp() == 1 % warps) ep_warp_prefix(g.recvBase, c.ranks, [&](uint32_t s) { return ep_lds(g.rows, s); });
  p::sync_threads();
  for (uint32_t e = p::tid(); e < locals; e += c.threads) {
    uint32_t slot = ep_lds(g.zoneBase, e), n = ep_lds(g.zoneCount, e), padded = ep_lds(g.zoneBase, e + 1) - slot;
    p::stg<uint32_t>(zoneBase + e, slot);
    p::stg<uint32_t>(zoneCount + e, n);
    ep_put_zone(c, a, e, slot, n, padded);
    for (uint32_t s = 0; s < c.ranks; s++) {
      uint64_t *reply = (uint64_t *)(ep_window(a.group, s) + a.group.window.replies);
      if (!ep_masked(c, a.group, s))
        p::st_relaxed_sys(reply + (uint64_t)((gen & 1) * c.ranks + me) * words + e, ep_word(gen, slot));
      p::stg<uint32_t>(slotBase + s * locals + e, slot);
      slot += ep_lds(g.counts, s * locals + e);
    }
  }
  for (uint32_t s = p::tid(); s < c.ranks; s += c.threads) {
    uint64_t *reply = (uint64_t *)(ep_window(a.group, s) + a.group.window.replies);
    if (!ep_masked(c, a.group, s))
      p::st_relaxed_sys(reply + (uint64_t)((gen & 1) * c.ranks + me) * words + locals,
                        ep_word(gen, ep_lds(g.recvBase, s)));
    p::stg<uint32_t>(recvCount + s, ep_lds(g.rows, s));
    p::stg<uint32_t>(recvBase + s, ep_lds(g.recvBase, s));
  }
  uint32_t rows = flat ? ep_lds(g.recvBase, c.ranks) : ep_lds(g.zoneBase, locals);
  if (p::tid() == 0) {
    p::stg<uint32_t>(zoneBase + locals, ep_lds(g.zoneBase, locals));
    p::stg<uint32_t>(recvBase + c.ranks, ep_lds(g.recvBase, c.ranks));
    ep_put_counter(a.recvTotal, a.recvTotalWide, 0, rows);
    ep_update_header(c, a);
    if (a.budget && rows > a.budget) p::st_relaxed_sys(&a.group.error->overflowNeeded, rows);
  }
  if (a.hostCounts) ep_update_host_counts(c, a, g, rows, gen);
}

/* One block: where my rows land at every destination. */
template <class C> DEV void ep_update_replies(const C c, const epUpdateArgs &a, uint32_t gen) {
  uint32_t locals = c.experts / c.ranks, words = locals + 1;
  uint32_t *sendSlot = (uint32_t *)(a.record + a.recordLayout.sendSlot);
  uint32_t *sendBase = (uint32_t *)(a.record + a.recordLayout.sendBase);
  const uint64_t *replies = (const uint64_t *)(ep_window(a.group, a.group.rank) + a.group.window.replies) +
                            (uint64_t)(gen & 1) * c.ranks * words;
  for (uint32_t i = p::tid(); i < c.ranks * words; i += c.threads) {
    uint32_t d = i / words, e = i % words, v;
    if (!ep_await_word(c, a.group, replies + i, gen, EP_PHASE_UPDATE_REPLY, ep_bringer(c, a.group, d), &v) ||
        (c.mask && c.scaleUp && !ep_can_reach(c, a.group, d))) {
      if (ep_stopped(c, a.group)) return;
      v = EP_NONE; /* nothing goes there */
    }
    p::stg<uint32_t>(e < locals ? sendSlot + d * locals + e : sendBase + d, v);
  }
}

/* All blocks, with masks: the first one has settled which sources take part; true when it has found any. */
template <class C> DEV bool ep_update_settled(const C c, const epUpdateArgs &a, uint32_t gen) {
  uint32_t *verdict = &ep_mask_slot(c, a.group)->verdict;
  bool ok = true;
  if (ep_update_block(a) == 0) {
    p::sync_threads();
    if (p::tid() == 0 && !p::ld_relaxed_sys(&ep_state(a.group)->aborted)) p::st_release_gpu(verdict, gen);
  }
  if (p::tid() == 0) ok = ep_await_flag(c, a.group, verdict, gen, EP_PHASE_GRID, a.group.rank);
  return ep_block_agrees(ok);
}

/* All blocks: meta rows of every other source -> record. Loads in flight together: each is a trip to the L2. */
#define EP_META_AT_ONCE 8u
template <class C> DEV void ep_update_copy_meta(const C c, const epUpdateArgs &a, uint32_t gen) {
  uint32_t locals = c.experts / c.ranks, me = a.group.rank, width = 1 + c.topk;
  const uint32_t *flags = (const uint32_t *)(ep_window(a.group, me) + a.group.window.metaFlags);
  const uint64_t *counts =
      (const uint64_t *)(ep_window(a.group, me) + a.group.window.counts) + (uint64_t)(gen & 1) * c.ranks * (locals + 1);
  uint32_t *out = (uint32_t *)(a.record + a.recordLayout.recvMeta);
  bool ok = true;
  if (c.mask && !ep_update_settled(c, a, gen)) return;
  for (uint32_t s = p::tid(); s < c.ranks && ok && !c.mask; s += c.threads)
    ok = ep_wait_flag(a.group, flags + s, gen, EP_PHASE_UPDATE_META, s);
  if (!c.mask && !ep_block_agrees(ok)) return;
  for (uint32_t s = 0; s < c.ranks; s++) {
    if (s == me) continue;
    uint32_t rows = c.mask ? p::ldg<uint32_t>((const uint32_t *)(a.record + a.recordLayout.recvCount) + s)
                           : EP_ROWS_OF(p::ld_relaxed_sys(counts + (uint64_t)s * (locals + 1) + locals));
    const uint32_t *in = ep_meta(a.group, c.ranks, me, s, gen);
    uint32_t *to = out + (uint64_t)s * a.group.maxTokens * width;
    uint32_t step = a.blocks * c.threads, v[EP_META_AT_ONCE];
    for (uint32_t i0 = ep_update_block(a) * c.threads + p::tid(); i0 < rows * width; i0 += EP_META_AT_ONCE * step) {
#pragma unroll
      for (uint32_t u = 0, i = i0; u < EP_META_AT_ONCE; u++, i += step)
        if (i < rows * width)
          v[u] = p::ldg<uint32_t>(in + (uint64_t)(i / width) * a.group.window.metaWords + i % width);
#pragma unroll
      for (uint32_t u = 0, i = i0; u < EP_META_AT_ONCE; u++, i += step)
        if (i < rows * width) p::stg<uint32_t>(to + i, v[u]);
    }
  }
}

/* The frame of an update: its blocks count, meet, do the `exchange` that makes the record, and end. True in thread 0 of the block
 * that was last. */
template <class C, class F> DEV bool ep_update_frame(const C c, const epUpdateArgs &a, F exchange) {
  epGroupState *state = ep_state(a.group);
  uint32_t *histogram = (uint32_t *)(a.group.scratch + a.group.scratchLayout.histogram);
  uint32_t gen = p::ldg<uint32_t>(&state->updateGen) + 1;
  uint32_t warps = a.blocks * (c.threads / 32), index = ep_update_block(a) * (c.threads / 32) + p::warp();
  uint32_t each = (a.tokens + warps - 1) / warps;
  uint32_t t0 = index * each < a.tokens ? index * each : a.tokens;
  uint32_t t1 = t0 + each < a.tokens ? t0 + each : a.tokens;

  ep_update_count(c, a, t0, t1);
  p::sync_threads();
  ep_update_publish(c, a, histogram);
  p::sync_threads();
  bool ok = true;
  if (p::tid() == 0 && a.blocks > 1) {
    p::atomic_add_acq_rel_gpu(&state->updateArrived, 1);
    if (c.bug != EP_BUG_NO_GRID_BARRIER)
      ok = ep_await_flag(c, a.group, &state->updateArrived, a.blocks, EP_PHASE_GRID, a.group.rank);
  }
  if (ep_block_agrees(ok)) exchange(histogram, gen, t0, t1);
  p::sync_threads();
  if (p::tid() != 0 || (a.blocks > 1 && p::atomic_add_acq_rel_gpu(&state->updateDone, 1) != a.blocks - 1)) return false;
  bool whole = p::ld_relaxed_sys(&state->aborted) == 0; /* else what follows must not trust the record */
  p::stg<uint32_t>(&((epRecordHeader *)(a.record + a.recordLayout.header))->generation, whole ? gen : 0);
  p::stg<uint32_t>(&state->updateArrived, 0);
  p::stg<uint32_t>(&state->updateSent, 0);
  p::stg<uint32_t>(&state->updateDone, 0);
  p::stg<uint32_t>(&state->indexClaimed, 0);
  p::stg<uint32_t>(&state->updateGen, gen);
  return true;
}

/* The same thread, where the update is a launch of its own: nothing of a failed wait is left for the next. */
DEV void ep_update_end(const epGroupArgs &g) {
  p::stg<uint32_t>(&ep_state(g)->aborted, 0);
  p::stg<uint32_t>(&ep_state(g)->errorClaimed, 0);
}

template <class C> DEV bool ep_update_run(const C c, const epUpdateArgs &a) {
  return ep_update_frame(c, a, [&](uint32_t *histogram, uint32_t gen, uint32_t t0, uint32_t t1) {
    ep_update_bases(c, a, histogram, gen);
    p::sync_threads();
    ep_update_place(c, a, t0, t1, gen);
    ep_update_send_flags(c, a, gen);
    if (ep_update_block(a) == 0) ep_update_gather(c, a, gen);
    if (ep_update_block(a) == a.blocks - 1) ep_update_replies(c, a, gen);
    ep_update_copy_meta(c, a, gen);
  });
}

template <class C> DEV void ep_update(const C c, const epUpdateArgs &a) {
  p::grid_wait();
  p::grid_launch();
  epProfile profile = ep_profile_begin(a.group, EP_KERNEL_UPDATE);
  if (ep_update_run(c, a)) ep_update_end(a.group);
  ep_profile_end(profile, EP_SPAN_RECORD, a.blocks);
}

/* Inside operation `gen` that needs the record, by whole blocks that do not send: those of the update make it, and all wait
 * until it is made. Shared memory is free for other uses before and after. False: a wait gave up. */
template <class C> DEV bool ep_update_inside(const C c, const epUpdateArgs &a, uint32_t gen) {
  epGroupState *state = ep_state(a.group);
  bool ok = true;
  if (ep_update_block(a) < a.blocks && ep_update_run(c, a)) p::st_release_gpu(&state->routed, gen);
  if (p::tid() == 0) ok = ep_await_flag(c, a.group, &state->routed, gen, EP_PHASE_GRID, a.group.rank);
  return ep_block_agrees(ok);
}

#endif
