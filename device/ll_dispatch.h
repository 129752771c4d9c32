/* Low-latency dispatch: one launch that exchanges the routing and moves the rows. Nothing is known beforehand but the
 * handle's top-k decisions; a sender finds its rows' places among its own by a scan, a receiver adds what the sources
 * before have.
 *
 *   push      a block a few tokens: loads their rows, scans the decisions of all tokens before (expert and rank sums), places
 *             its own, and stores head and row as units to every rank the token goes to (ll_layout.h); this rank's own rows
 *             are not staged, only their heads. The block with the last token has the totals and sends the counts.
 *   receive   every block reads all counts (first slots are sums over the sources before) and takes rows as their units
 *             come: a warp 3072 bytes of a row, to its place or places
 *
 * Latency, T = 1, in dependent trips: generation, decisions and row together (0.7 us), store to the peer and its first
 * sight there (1.5), unit's head and data together (0.7), store. Counts arrive before the rows; they are one trip earlier.
 * Bytes at T rows of H: 4/3 H a row and remote rank over the link (T = 128, H = 14336: 2.4 MB, 7.1 us at 343 GB/s, against
 * 5.3 us for the bare row and then 3 us for completion, fence and flag), 2 H read from the window, H or slots * H written. */
#ifndef EP_DEVICE_LL_DISPATCH_H_
#define EP_DEVICE_LL_DISPATCH_H_

#include "ll.h"

/* ---- Scan ---------------------------------------------------------------------------------------------------------- */

/* What one lane knows of its (token, k), 32 / K tokens at a time. */
struct epLlRoute {
  uint32_t token, k, expert, owner;
  bool inside, valid, first;                /* inside: a real (t, k); first: first k of its token at this owner */
  uint32_t expertMask, mates, rankMask;     /* lanes with the same expert; of the same token and owner; first lanes of the owner */
};

/* The lane's decision, asked for: nothing waits for the answer yet. */
template <class C> DEV int32_t ep_ll_decision(const C c, const epLlDispatchArgs &a, uint32_t t, uint32_t end) {
  uint32_t sub = p::lane() / c.topk;
  if (sub >= 32 / c.topk || t + sub >= end)
    return -1;
  return p::ldg<int32_t>((const int32_t *)(a.record + a.recordLayout.topk) + (uint64_t)t * c.topk + p::lane());
}

template <class C> DEV epLlRoute ep_ll_route(const C c, uint32_t t, uint32_t end, int32_t e) {
  epLlRoute r;
  uint32_t sub = p::lane() / c.topk;
  r.token = t + sub;
  r.k = p::lane() % c.topk;
  r.inside = sub < 32 / c.topk && r.token < end;
  r.valid = e >= 0 && e < (int32_t)c.experts;
  r.expert = (uint32_t)e;
  r.owner = r.valid ? r.expert / (c.experts / c.ranks) : 0;
  r.expertMask = p::match_any(p::FULL, r.valid ? r.expert : ep_lone_key());
  r.mates = p::match_any(p::FULL, r.valid ? sub * c.ranks + r.owner : ep_lone_key());
  r.first = r.valid && (r.mates & ep_lanes_below()) == 0;
  r.rankMask = p::match_any(p::FULL, r.first ? r.owner : ep_lone_key());
  return r;
}

/* Shared memory: column i (experts, then ranks) of the block's sums, and of warp w's histogram; then own places. */
template <class C> DEV uint32_t ep_ll_sum(const C c, uint32_t i) {
  epConfig plain = ep_plain_config(c);
  return p::smem_base() + epLlBeginSmem(&plain) + 4 * i;
}
template <class C> DEV uint32_t ep_ll_hist(const C c, uint32_t w, uint32_t i) {
  return ep_ll_sum(c, (1 + w) * (c.experts + c.ranks) + i);
}
/* Of own token i and its k: the entry, and row and owner. */
template <class C> DEV uint32_t ep_ll_own(const C c, uint32_t i, uint32_t k) {
  return ep_ll_sum(c, (1 + c.threads / 32) * (c.experts + c.ranks)) + 8 * (i * c.topk + k);
}
#define EP_OWN(row, owner) ((uint32_t)(owner) << EP_ENTRY_POS_BITS | (uint32_t)(row))

DEV void ep_ll_add(uint32_t at, uint32_t n) { p::sts<uint32_t>(at, p::lds<uint32_t>(at) + n); }

/* Whole block: adds the decisions of tokens [from, to) to the sums. Sums do not depend on who counts what. */
template <class C> DEV void ep_ll_count(const C c, const epLlDispatchArgs &a, uint32_t from, uint32_t to) {
  uint32_t warps = c.threads / 32, w = p::warp(), each = 32 / c.topk, columns = c.experts + c.ranks;
  if (from >= to)
    return;
  for (uint32_t i = p::lane(); i < columns; i += 32)
    p::sts<uint32_t>(ep_ll_hist(c, w, i), 0);
  p::sync_warp();
  int32_t e = ep_ll_decision(c, a, from + w * each, to);
  for (uint32_t t = from + w * each; t < to; t += warps * each) {
    int32_t now = e;
    e = ep_ll_decision(c, a, t + warps * each, to);
    epLlRoute r = ep_ll_route(c, t, to, now);
    if (r.valid && (r.expertMask & ep_lanes_below()) == 0)
      ep_ll_add(ep_ll_hist(c, w, r.expert), p::popc(r.expertMask));
    if (r.first && (r.rankMask & ep_lanes_below()) == 0)
      ep_ll_add(ep_ll_hist(c, w, c.experts + r.owner), p::popc(r.rankMask));
    p::sync_warp();
  }
  p::sync_threads();
  for (uint32_t i = p::tid(); i < columns; i += c.threads) {
    uint32_t sum = p::lds<uint32_t>(ep_ll_sum(c, i));
    for (uint32_t v = 0; v < warps; v++)
      sum += p::lds<uint32_t>(ep_ll_hist(c, v, i));
    p::sts<uint32_t>(ep_ll_sum(c, i), sum);
  }
  p::sync_threads();
}

/* One warp: places the block's own tokens in order, moves the sums past them, and keeps what combine needs. `e`: the decision
 * for the first of them. */
template <class C> DEV void ep_ll_place(const C c, const epLlDispatchArgs &a, uint32_t t0, uint32_t t1, int32_t e) {
  uint32_t below = ep_lanes_below(), locals = c.experts / c.ranks;
  for (uint32_t t = t0; t < t1; t += 32 / c.topk) {
    epLlRoute r = ep_ll_route(c, t, t1, t == t0 ? e : ep_ll_decision(c, a, t, t1));
    uint32_t pos = 0, row = 0;
    if (r.valid)
      pos = p::lds<uint32_t>(ep_ll_sum(c, r.expert)) + p::popc(r.expertMask & below);
    if (r.first)
      row = p::lds<uint32_t>(ep_ll_sum(c, c.experts + r.owner)) + p::popc(r.rankMask & below);
    p::sync_warp();
    if (r.valid && (r.expertMask & below) == 0)
      p::sts<uint32_t>(ep_ll_sum(c, r.expert), pos + p::popc(r.expertMask));
    if (r.first && (r.rankMask & below) == 0)
      p::sts<uint32_t>(ep_ll_sum(c, c.experts + r.owner), row + p::popc(r.rankMask));
    row = p::shfl(p::FULL, row, r.valid ? p::ffs(r.mates) - 1 : 0);
    if (r.inside) {
      uint32_t own = ep_ll_own(c, r.token - t0, r.k);
      p::sts<uint32_t>(own, r.valid ? EP_ENTRY(r.expert % locals, pos) : EP_NONE);
      p::sts<uint32_t>(own + 4, r.valid ? EP_OWN(row, r.owner) : EP_NONE);
      if (r.first && r.owner == a.group.rank)
        p::stg<uint32_t>((uint32_t *)(a.record + a.recordLayout.sendRow) + r.token, row);
    }
    p::sync_warp();
  }
}

/* Whole block, whose sums are the totals. */
template <class C> DEV void ep_ll_send_counts(const C c, const epLlDispatchArgs &a, const epLlOp &op) {
  uint32_t locals = c.experts / c.ranks;
  for (uint32_t i = p::tid(); i < c.experts + c.ranks; i += c.threads) {
    uint32_t dst = i < c.experts ? i / locals : i - c.experts, word = i < c.experts ? i % locals : locals;
    uint64_t *counts = (uint64_t *)(ep_ll_window(dst) + a.window.counts);
    p::st_relaxed_sys(counts + (uint64_t)((op.gen & 1) * c.ranks + a.group.rank) * (locals + 1) + word,
                      (uint64_t)op.gen << 32 | p::lds<uint32_t>(ep_ll_sum(c, i)));
  }
}

/* ---- Push ---------------------------------------------------------------------------------------------------------- */

/* Two strips of a token's row; with the first piece, the weight of the lane's k. */
struct epLlPiece {
  uint4 v[EP_LL_PIECE_STRIPS][EP_STRIP_VECTORS];
  uint32_t weight;
};

template <class C> DEV void ep_ll_load_piece(const C c, const uint8_t *row, uint32_t piece, epLlPiece &x) {
#pragma unroll
  for (uint32_t s = 0; s < EP_LL_PIECE_STRIPS; s++) {
    uint32_t strip = piece * EP_LL_PIECE_STRIPS + s;
    ep_ll_load(row + strip * EP_STRIP_DATA, ep_ll_bytes(c, strip), x.v[s]);
  }
}

template <class C> DEV void ep_ll_load_own(const C c, const epLlDispatchArgs &a, uint32_t t, uint32_t piece, epLlPiece &x) {
  ep_ll_load_piece(c, a.tokens + (uint64_t)t * c.rowBytes, piece, x);
  x.weight = 0;
  if (c.weights && piece == 0 && p::lane() < c.topk)
    x.weight = p::as_u32(p::ldg<float>(a.weights + (uint64_t)t * c.topk + p::lane()));
}

/* Head of own token t for rank `dst`: its units, one a lane. `entry`: of the lane's k, EP_NONE where it goes elsewhere. */
template <class C>
DEV void ep_ll_send_head(const C c, const epLlDispatchArgs &a, const epLlOp &op, uint32_t t, uint32_t dst, uint32_t row,
                         uint32_t entry, uint32_t weight) {
  uint32_t l = p::lane(), word[3];
#pragma unroll
  for (uint32_t i = 0; i < 3; i++) {
    uint32_t w = 3 * l + i;
    uint32_t e = p::shfl(p::FULL, entry, (w - 1) & 31), x = p::shfl(p::FULL, weight, (w - 1 - c.topk) & 31);
    word[i] = w == 0 ? t : w <= c.topk ? e : x;
  }
  if (l < epLlHeadUnits(c.topk))
    p::st_relaxed_sys128(ep_ll_window(dst) + epLlHead(&a.window, c.ranks, a.group.maxTokens, op.gen, a.group.rank, row) + 16 * l,
                         ep_ll_unit(op.gen, word[0], word[1], word[2]));
}

/* A warp: piece `piece` of own token i, to all ranks the token goes to. */
template <class C>
DEV void ep_ll_send_piece(const C c, const epLlDispatchArgs &a, const epLlOp &op, uint32_t t0, uint32_t i, uint32_t piece,
                          const epLlPiece &x) {
  uint32_t l = p::lane(), me = a.group.rank, buffer = ep_ll_buffer(c, EP_KERNEL_LL_DISPATCH);
  uint32_t entry = EP_NONE, own = EP_NONE;
  if (l < c.topk) {
    entry = p::lds<uint32_t>(ep_ll_own(c, i, l));
    own = p::lds<uint32_t>(ep_ll_own(c, i, l) + 4);
  }
  uint32_t mates = p::match_any(p::FULL, own != EP_NONE ? own : ep_lone_key());
  uint32_t sends = p::ballot(p::FULL, own != EP_NONE && (mates & ep_lanes_below()) == 0);
  for (uint32_t m = piece == 0 ? sends : 0; m; m &= m - 1) {
    uint32_t to = p::shfl(p::FULL, own, p::ffs(m) - 1);
    ep_ll_send_head(c, a, op, t0 + i, to >> EP_ENTRY_POS_BITS, EP_ENTRY_POS(to), own == to ? entry : EP_NONE, x.weight);
  }
  uint32_t remote = p::ballot(p::FULL, (sends >> l & 1) && own >> EP_ENTRY_POS_BITS != me);
  if (!remote)
    return;
#pragma unroll
  for (uint32_t s = 0; s < EP_LL_PIECE_STRIPS; s++) {
    uint32_t strip = piece * EP_LL_PIECE_STRIPS + s;
    if (ep_ll_bytes(c, strip) == 0)
      continue;
    uint4 u[EP_STRIP_UNITS];
    ep_ll_to_units(buffer, op.gen, x.v[s], u);
    for (uint32_t m = remote; m; m &= m - 1) {
      uint32_t to = p::shfl(p::FULL, own, p::ffs(m) - 1), dst = to >> EP_ENTRY_POS_BITS;
      ep_ll_send(ep_ll_window(dst) + strip * EP_STRIP_BYTES +
                     epLlStageRow(&a.window, c.ranks, a.group.maxTokens, op.gen, dst, me, EP_ENTRY_POS(to)),
                 ep_ll_bytes(c, strip), u);
    }
  }
}

template <class C> DEV void ep_ll_push(const C c, const epLlDispatchArgs &a, const epLlOp &op) {
  uint32_t warps = c.threads / 32, pieces = epLlPieces(c.rowBytes), T = op.tokens;
  uint32_t each = (T + a.pushBlocks - 1) / a.pushBlocks, counted = 0;
  each = each < 1 ? 1 : each < EP_LL_OWN_TOKENS ? each : EP_LL_OWN_TOKENS;
  for (uint32_t i = p::tid(); i < c.experts + c.ranks; i += c.threads)
    p::sts<uint32_t>(ep_ll_sum(c, i), 0);
  p::sync_threads();
  for (uint32_t t0 = p::bid() * each; t0 < T || t0 == 0; t0 += a.pushBlocks * each) {
    uint32_t t1 = t0 + each < T ? t0 + each : T, items = (t1 - t0) * pieces, item = p::warp();
    epLlPiece x;
    int32_t e = ep_ll_decision(c, a, t0, t1);
    if (item < items) /* on its way while the block counts */
      ep_ll_load_own(c, a, t0 + item / pieces, item % pieces, x);
    ep_ll_count(c, a, counted, t0);
    if (p::warp() == 0)
      ep_ll_place(c, a, t0, t1, e);
    p::sync_threads();
    if (t1 == T)
      ep_ll_send_counts(c, a, op);
    for (; item < items; item += warps) {
      if (item >= warps)
        ep_ll_load_own(c, a, t0 + item / pieces, item % pieces, x);
      ep_ll_send_piece(c, a, op, t0, item / pieces, item % pieces, x);
    }
    counted = t1;
    p::sync_threads();
  }
}

/* ---- Receive ------------------------------------------------------------------------------------------------------- */

/* Shared memory: entry counts, later first slots, by source and local expert; then rows by source. */
template <class C> DEV uint32_t ep_ll_first(const C c, uint32_t s, uint32_t e) {
  return ep_ll_sum(c, s * (c.experts / c.ranks) + e);
}
template <class C> DEV uint32_t ep_ll_rows(const C c, uint32_t s) { return p::lds<uint32_t>(ep_ll_sum(c, c.experts + s)); }

/* The first receiving block tells the caller, and combine. */
template <class C> DEV void ep_ll_tell_counts(const C c, const epLlDispatchArgs &a) {
  uint32_t locals = c.experts / c.ranks;
  bool major = c.layout == EP_LAYOUT_KIND_EXPERT_MAJOR_3D;
  for (uint32_t e = p::tid(); e < locals && (major || a.expertCounters); e += c.threads) {
    uint32_t total = 0;
    for (uint32_t s = 0; s < c.ranks; s++)
      total += p::lds<uint32_t>(ep_ll_first(c, s, e));
    ep_ll_counter(a.expertCounters, a.expertCountersWide, e, total);
    if (major && total > c.ranks * a.group.maxTokens)
      p::st_relaxed_sys(&a.group.error->overflowNeeded, total);
  }
  for (uint32_t s = p::tid(); s < c.ranks; s += c.threads) {
    p::stg<uint32_t>((uint32_t *)(a.record + a.recordLayout.recvCount) + s, ep_ll_rows(c, s));
    ep_ll_counter(a.sourceCounters, a.sourceCountersWide, s, ep_ll_rows(c, s));
  }
  if (p::tid() == 0 && a.recvTotal) {
    uint32_t total = 0;
    for (uint32_t i = major ? 0 : c.experts; i < (major ? c.experts : c.experts + c.ranks); i++)
      total += p::lds<uint32_t>(ep_ll_sum(c, i));
    ep_ll_counter(a.recvTotal, a.recvTotalWide, 0, total);
  }
}

/* Whole block: the counts of all sources, and first slots from them. */
template <class C> DEV bool ep_ll_gather(const C c, const epLlDispatchArgs &a, const epLlOp &op) {
  uint32_t locals = c.experts / c.ranks, words = locals + 1;
  bool first = p::bid() == a.pushBlocks, major = c.layout == EP_LAYOUT_KIND_EXPERT_MAJOR_3D, ok = true;
  bool all = major || (first && a.expertCounters);
  const uint64_t *counts = (const uint64_t *)(ep_ll_window(a.group.rank) + a.window.counts) +
                           (uint64_t)(op.gen & 1) * c.ranks * words;
  for (uint32_t i = p::tid(); i < (all ? c.experts + c.ranks : c.ranks) && ok; i += c.threads) {
    uint32_t s = all ? i / words : i, e = all ? i % words : locals, v = 0;
    ok = ep_wait_word(a.group, counts + s * words + e, op.gen, EP_PHASE_UPDATE_COUNTS, s, &v);
    p::sts<uint32_t>(e < locals ? ep_ll_first(c, s, e) : ep_ll_sum(c, c.experts + s), v);
  }
  if (!ep_block_agrees(ok))
    return false;
  if (first) {
    ep_ll_tell_counts(c, a);
    p::sync_threads();
  }
  if (major) {
    for (uint32_t e = p::tid(); e < locals; e += c.threads) {
      uint32_t run = 0;
      for (uint32_t s = 0; s < c.ranks; s++) {
        uint32_t n = p::lds<uint32_t>(ep_ll_first(c, s, e));
        p::sts<uint32_t>(ep_ll_first(c, s, e), run);
        run += n;
      }
    }
    p::sync_threads();
  }
  return true;
}

/* Rank-major: rows of the index that nobody sent. */
template <class C> DEV void ep_ll_fill(const C c, const epLlDispatchArgs &a, uint32_t index, uint32_t warps) {
  for (uint32_t r = index; r < c.ranks * a.group.maxTokens; r += warps)
    if (r % a.group.maxTokens >= ep_ll_rows(c, r / a.group.maxTokens) && p::lane() < c.topk)
      p::stg<int32_t>(a.outIdx + (uint64_t)r * c.topk + p::lane(), -1);
}

/* Word w of a head whose units lie in the lanes; w may differ between lanes. */
DEV uint32_t ep_ll_head_word(const uint4 &u, uint32_t w) {
  uint32_t a = p::shfl(p::FULL, u.y, w / 3 & 31), b = p::shfl(p::FULL, u.z, w / 3 & 31),
           d = p::shfl(p::FULL, u.w, w / 3 & 31);
  return w % 3 == 0 ? a : w % 3 == 1 ? b : d;
}

/* What a warp knows of the row it takes, from its head. */
struct epLlArrival {
  uint32_t s, j, token, entry, weight;
  uint32_t slot; /* 3-D: output row of the lane's k, or EP_NONE */
};

template <class C> DEV void ep_ll_read_head(const C c, const epLlDispatchArgs &a, const uint4 &u, epLlArrival &r) {
  uint32_t l = p::lane(), capacity = c.ranks * a.group.maxTokens;
  r.token = ep_ll_head_word(u, 0);
  r.entry = ep_ll_head_word(u, 1 + l);
  r.weight = ep_ll_head_word(u, 1 + c.topk + l);
  if (l >= c.topk)
    r.entry = EP_NONE;
  r.slot = EP_NONE;
  if (c.layout == EP_LAYOUT_KIND_EXPERT_MAJOR_3D && r.entry != EP_NONE) {
    uint32_t e = EP_ENTRY_EXPERT(r.entry), at = p::lds<uint32_t>(ep_ll_first(c, r.s, e)) + EP_ENTRY_POS(r.entry);
    at += c.bug == EP_BUG_SLOT_OFF_BY_ONE && at + 1 < capacity;
    r.slot = at < capacity ? e * capacity + at : EP_NONE;
  }
}

/* The row's index, weights and record, once a row. */
template <class C> DEV void ep_ll_write_head(const C c, const epLlDispatchArgs &a, const epLlArrival &r) {
  uint32_t l = p::lane();
  uint64_t row = (uint64_t)r.s * a.group.maxTokens + r.j;
  if (l == 0)
    p::stg<uint32_t>((uint32_t *)(a.record + a.recordLayout.recvToken) + row, r.token);
  if (l >= c.topk)
    return;
  if (c.layout == EP_LAYOUT_KIND_EXPERT_MAJOR_3D) {
    p::stg<uint32_t>((uint32_t *)(a.record + a.recordLayout.recvSlot) + row * c.topk + l, r.slot);
    return;
  }
  int32_t first = a.globalIdx ? (int32_t)(a.group.rank * (c.experts / c.ranks)) : 0;
  p::stg<int32_t>(a.outIdx + row * c.topk + l, r.entry == EP_NONE ? -1 : first + (int32_t)EP_ENTRY_EXPERT(r.entry));
  p::stg<float>(a.outWeights + row * c.topk + l, p::as_float(r.weight));
}

/* A warp: a piece of row j of source s, to its place or places. False: gave up. */
template <class C>
DEV bool ep_ll_take(const C c, const epLlDispatchArgs &a, const epLlOp &op, epLlArrival &r, uint32_t piece) {
  uint32_t l = p::lane(), me = a.group.rank, B = a.group.maxTokens, buffer = ep_ll_buffer(c, EP_KERNEL_LL_DISPATCH);
  constexpr uint32_t headAt = EP_LL_PIECE_STRIPS * EP_STRIP_UNITS;
  const uint8_t *window = ep_ll_window(me), *head = window + epLlHead(&a.window, c.ranks, B, op.gen, r.s, r.j) + 16 * l;
  const uint8_t *data = window + (r.s == me ? 0 : epLlStageRow(&a.window, c.ranks, B, op.gen, me, r.s, r.j)) +
                        piece * EP_LL_PIECE_STRIPS * EP_STRIP_BYTES + 16 * l;
  uint32_t wanted = (uint32_t)(l < epLlHeadUnits(c.topk)) << headAt;
  if (r.s != me) {
#pragma unroll
    for (uint32_t s = 0; s < EP_LL_PIECE_STRIPS; s++)
      wanted |= ep_ll_wanted(ep_ll_bytes(c, piece * EP_LL_PIECE_STRIPS + s)) << EP_STRIP_UNITS * s;
  }
  uint4 u[headAt + 1];
  auto at = [&](uint32_t i) { return i == headAt ? head : data + 512 * i; };
  ep_ll_look<headAt + 1>(op, wanted, at, u);
  if (!ep_ll_settle<headAt + 1>(c, a.group, op, EP_PHASE_DISPATCH_ROWS, r.s, at, u))
    return false;
  ep_ll_read_head(c, a, u[headAt], r);
  if (piece == 0)
    ep_ll_write_head(c, a, r);
  epLlPiece x;
  if (r.s == me)
    ep_ll_load_piece(c, a.tokens + (uint64_t)r.token * c.rowBytes, piece, x);
#pragma unroll
  for (uint32_t s = 0; s < EP_LL_PIECE_STRIPS; s++) {
    uint32_t strip = piece * EP_LL_PIECE_STRIPS + s, bytes = ep_ll_bytes(c, strip);
    if (bytes == 0)
      continue;
    if (r.s != me)
      ep_ll_to_vectors(buffer, u + EP_STRIP_UNITS * s, x.v[s]);
    uint8_t *out = a.outTokens + strip * EP_STRIP_DATA;
    if (c.layout == EP_LAYOUT_KIND_RANK_MAJOR) {
      uint32_t j = r.j + (c.bug == EP_BUG_SLOT_OFF_BY_ONE && r.j + 1 < B);
      ep_ll_store(out + ((uint64_t)r.s * B + j) * c.rowBytes, bytes, x.v[s]);
      continue;
    }
    for (uint32_t m = p::ballot(p::FULL, r.slot != EP_NONE); m; m &= m - 1)
      ep_ll_store(out + (uint64_t)p::shfl(p::FULL, r.slot, p::ffs(m) - 1) * c.rowBytes, bytes, x.v[s]);
  }
  return true;
}

/* Row j of every source in turn, pieces of a row side by side. */
template <class C> DEV void ep_ll_take_all(const C c, const epLlDispatchArgs &a, const epLlOp &op) {
  uint32_t warps = (a.blocks - a.pushBlocks) * (c.threads / 32), pieces = epLlPieces(c.rowBytes), most = 0;
  uint32_t index = (p::bid() - a.pushBlocks) * (c.threads / 32) + p::warp();
  for (uint32_t s = 0; s < c.ranks; s++) {
    uint32_t n = ep_ll_rows(c, s);
    most = n > most ? n : most;
  }
  if (c.layout == EP_LAYOUT_KIND_RANK_MAJOR)
    ep_ll_fill(c, a, index, warps);
  for (uint64_t i = index; i < (uint64_t)most * c.ranks * pieces; i += warps) {
    epLlArrival r;
    uint32_t q = (uint32_t)(i / pieces);
    r.j = q / c.ranks;
    r.s = (a.group.rank + q % c.ranks) % c.ranks;
    if (r.j < ep_ll_rows(c, r.s) && !ep_ll_take(c, a, op, r, (uint32_t)(i % pieces)))
      return;
  }
}

template <class C> DEV void ep_ll_dispatch(const C c, const epLlDispatchArgs &a) {
  p::grid_wait();
  epRecordHeader *header = (epRecordHeader *)(a.record + a.recordLayout.header);
  epLlOp op = ep_ll_begin(c, a.group, header, a.numTokens, nullptr);
  bool last = p::bid() == a.blocks - 1;
  p::grid_launch();
  if (p::bid() < a.pushBlocks) {
    ep_ll_push(c, a, op);
  } else {
    if (last) {
      ep_ll_greet(c, a.group, a.window, op);
      if (p::tid() == 0) {
        p::stg<uint32_t>(&header->generation, EP_LL_DISPATCHED);
        p::st_relaxed_sys(&ep_state(a.group)->indexClaimed, 0);
      }
    }
    if (ep_ll_gather(c, a, op))
      ep_ll_take_all(c, a, op);
    if (last)
      ep_ll_greeted(c, a.group, a.window, op, EP_PHASE_DISPATCH_CREDIT);
  }
  ep_ll_end(a.group, op, a.blocks);
}

#endif
