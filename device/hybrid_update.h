/* Update of a group with several scale-up domains: the same record as the plain one, and what a rank needs to forward. Scans
 * are the plain kernel's; what crosses domains goes in two hops, so that a rank talks to its rail and its domain alone:
 *
 *   send      counts and decisions (expert, position, row) to the rank of this index in each domain, by GIN: two puts, the last
 *             with a signal
 *   forward   what came so is stored to the ranks of this domain that it concerns, as if the source had done it: words that
 *             carry the generation, meta rows, a flag. The decisions for this domain are kept in the record
 *   replies   go back the same way: to the rail, which hands them to the sources
 *
 * No wait depends on a later step of another rank: every rank sends, then forwards, then gathers, then forwards replies. */
#ifndef EP_DEVICE_HYBRID_UPDATE_H_
#define EP_DEVICE_HYBRID_UPDATE_H_

#include "rail.h"
#include "update.h"

DEV epHybridState *ep_hybrid_state(const epGroupArgs &g, const epHybridGroup &h) {
  return (epHybridState *)(g.scratch + h.layout.state);
}
template <class C> DEV uint32_t ep_domain_words(const C c) { return epDomainWords(c.scaleUp, c.experts, c.ranks); }

/* Word `i` of what goes to domain o, in my window. */
template <class C> DEV uint64_t *ep_out_count(const C c, const epHybridUpdateArgs &a, uint32_t o, uint32_t i) {
  const epGroupArgs &g = a.plain.group;
  return (uint64_t *)(ep_window(g, g.rank) + a.hybrid.layout.outCounts) + (uint64_t)o * (ep_domain_words(c) + 1) + i;
}
template <class C> DEV uint64_t *ep_out_reply(const C c, const epHybridUpdateArgs &a, uint32_t o, uint32_t i) {
  const epGroupArgs &g = a.plain.group;
  return (uint64_t *)(ep_window(g, g.rank) + a.hybrid.layout.outReplies) + (uint64_t)o * ep_domain_words(c) + i;
}
/* Window offset of what came from domain o. */
template <class C> DEV uint64_t ep_rail_counts(const C c, const epHybridUpdateArgs &a, uint32_t o, uint32_t gen) {
  return a.hybrid.layout.railCounts + 8ull * ((gen & 1) * (c.ranks / c.scaleUp) + o) * (ep_domain_words(c) + 1);
}
template <class C> DEV uint64_t ep_rail_replies(const C c, const epHybridUpdateArgs &a, uint32_t o, uint32_t gen) {
  return a.hybrid.layout.railReplies + 8ull * ((gen & 1) * (c.ranks / c.scaleUp) + o) * ep_domain_words(c);
}
template <class C> DEV uint64_t ep_rail_meta(const C c, const epHybridUpdateArgs &a, uint32_t o, uint32_t gen) {
  const epGroupArgs &g = a.plain.group;
  return a.hybrid.layout.railMeta + 8ull * ((gen & 1) * (c.ranks / c.scaleUp) + o) * g.maxTokens * g.windowTopk;
}

/* As the plain ep_update_bases; the last block's totals go to the domain, and for others into what will be sent. */
template <class C>
DEV void ep_hybrid_bases(const C c, const epHybridUpdateArgs &a, const uint32_t *histogram, uint32_t gen) {
  const epGroupArgs &g = a.plain.group;
  epPlace w = ep_place(c, g);
  uint32_t warps = c.threads / 32, columns = c.experts + c.ranks, locals = c.experts / c.ranks;
  bool last = p::bid() == a.plain.blocks - 1;
  for (uint32_t i = p::tid(); i < columns; i += c.threads) {
    uint32_t before = 0;
    for (uint32_t b = 0; b < p::bid(); b++) before += p::ldg<uint32_t>(histogram + (uint64_t)b * columns + i);
    for (uint32_t v = 0; v < warps; v++)
      p::sts<uint32_t>(ep_hist(c, v, i), p::lds<uint32_t>(ep_hist(c, v, i)) + before);
    if (!last) continue;
    uint32_t value = before + p::ldg<uint32_t>(histogram + (uint64_t)p::bid() * columns + i);
    bool expert = i < c.experts;
    uint32_t dst = expert ? i / locals : i - c.experts, word = expert ? i % locals : locals;
    if (!expert) value = EP_ROWS_WORD(value, EP_ROWS_TAG(c.topk, c.layout));
    if (dst / w.ups != w.domain)
      p::stg<uint64_t>(ep_out_count(c, a, dst / w.ups, dst % w.ups * (locals + 1) + word), value);
    else if (!ep_masked(c, g, dst))
      p::st_relaxed_sys((uint64_t *)(ep_window(g, dst) + g.window.counts) +
                            (uint64_t)((gen & 1) * c.ranks + g.rank) * (locals + 1) + word,
                        ep_word(gen, value));
  }
  for (uint32_t o = p::tid(); last && o < w.domains; o += c.threads)
    p::stg<uint64_t>(ep_out_count(c, a, o, ep_domain_words(c)), a.plain.tokens);
}

/* As the plain ep_update_place; meta rows go to the domain, decisions into what will be sent. */
template <class C>
DEV void ep_hybrid_place(const C c, const epHybridUpdateArgs &a, uint32_t t0, uint32_t t1, uint32_t gen) {
  const epGroupArgs &g = a.plain.group;
  const epRecordLayout &rl = a.plain.recordLayout;
  epPlace at = ep_place(c, g);
  uint32_t w = p::warp(), below = ep_lanes_below(), locals = c.experts / c.ranks;
  int32_t *sendRow = (int32_t *)(a.plain.record + rl.sendRow), *sendPos = (int32_t *)(a.plain.record + rl.sendPos);
  uint32_t *out = (uint32_t *)(ep_window(g, g.rank) + a.hybrid.layout.outMeta);
  epRouteWalk walk = ep_route_walk(c, a.plain, t0, t1, true);
  while (walk.t < t1) {
    epRouteLane r = ep_route_lane(c, a.plain, walk);
    uint32_t pos = 0, row = 0;
    if (r.valid) pos = p::lds<uint32_t>(ep_hist(c, w, r.expert)) + p::popc(r.expertMask & below);
    if (r.first) row = p::lds<uint32_t>(ep_hist(c, w, c.experts + r.owner)) + p::popc(r.rankMask & below);
    p::sync_warp();
    if (r.valid && (r.expertMask & below) == 0) p::sts<uint32_t>(ep_hist(c, w, r.expert), pos + p::popc(r.expertMask));
    if (r.first && (r.rankMask & below) == 0)
      p::sts<uint32_t>(ep_hist(c, w, c.experts + r.owner), row + p::popc(r.rankMask));
    uint32_t base = p::lane() / c.topk * c.topk, myRow = EP_NONE;
    uint32_t placed = p::ballot(p::FULL, r.first && r.owner != g.rank && r.owner / at.ups == at.domain);
    for (uint32_t k = 0; k < c.topk; k++) { /* each k in turn offers its row to the lanes of its token */
      uint32_t src = base + k < 32 ? base + k : 31;
      bool first = p::shfl(p::FULL, r.first, src);
      uint32_t owner = p::shfl(p::FULL, r.owner, src), itsRow = p::shfl(p::FULL, row, src);
      if (!r.inside || !first) continue;
      bool mine = r.valid && r.owner == owner;
      if (mine) myRow = itsRow;
      if (owner / at.ups != at.domain || ep_masked(c, g, owner)) continue;
      uint32_t *meta = ep_meta_row(c, a.plain, owner, itsRow, gen);
      p::stg<uint32_t>(meta + 1 + r.k, mine ? EP_ENTRY(r.expert % locals, pos) : EP_NONE);
      if (r.k == 0) p::stg<uint32_t>(meta, EP_META_PLACE(r.token, p::popc(placed & ((1u << src) - (1u << base)))));
    }
    if (r.inside) {
      uint64_t i = (uint64_t)r.token * c.topk + r.k, o = 2ull * r.token * c.topk + r.k;
      p::stg<int32_t>(sendRow + i, r.valid ? (int32_t)myRow : -1);
      p::stg<int32_t>(sendPos + i, r.valid ? (int32_t)pos : -1);
      p::stg<uint32_t>(out + o, r.valid ? EP_ENTRY(r.expert, pos) : EP_NONE);
      p::stg<uint32_t>(out + o + c.topk, myRow);
    }
    p::sync_warp();
  }
}

/* True in the block that is the last to come here: what all blocks stored before is its own to release. */
DEV bool ep_last_block(uint32_t *counter, uint32_t blocks) {
  p::sync_threads();
  if (p::tid() == 0) p::sts<uint32_t>(p::smem_base(), blocks > 1 ? p::atomic_add_acq_rel_gpu(counter, 1) : 0);
  p::sync_threads();
  bool last = p::lds<uint32_t>(p::smem_base()) == blocks - 1;
  p::sync_threads();
  return last;
}

/* What source s has for rank `dst` of my domain is there; with masks, `lost`: there is nothing. */
template <class C>
DEV void ep_meta_flag(const C c, const epGroupArgs &g, uint32_t dst, uint32_t s, uint32_t gen, bool lost) {
  uint32_t *flag = (uint32_t *)(ep_window(g, dst) + g.window.metaFlags) + s;
  if (!ep_masked(c, g, dst)) p::st_release_sys(flag, c.mask ? EP_FLAG(gen, lost) : gen);
}

/* Whole block, the last one with its meta rows stored: flags in the domain, puts to the rail. */
template <class C> DEV void ep_hybrid_send(const C c, const epHybridUpdateArgs &a, uint32_t gen) {
  const epGroupArgs &g = a.plain.group;
  const epHybridGroup &h = a.hybrid;
  epPlace w = ep_place(c, g);
  for (uint32_t u = p::tid(); u < w.ups; u += c.threads) ep_meta_flag(c, g, w.domain * w.ups + u, g.rank, gen, false);
  for (uint32_t o = p::tid(); o < w.domains; o += c.threads) {
    if (o == w.domain || ep_rail_masked(c, g, o)) continue;
    if (a.plain.tokens)
      p::gin_put(h.gin, 0, o, ep_rail_meta(c, a, w.domain, gen), h.layout.outMeta, 8 * a.plain.tokens * c.topk);
    ep_rail_sends(c, g, h, o, 0, 1);
    p::gin_put_signal(h.gin, 0, o, ep_rail_counts(c, a, w.domain, gen),
                      h.layout.outCounts + 8ull * o * (ep_domain_words(c) + 1), 8 * (ep_domain_words(c) + 1),
                      epSignalMeta(w.domain), 1);
  }
}

/* Whole block: words that came from the rail become those of their sources in the windows of the domain; with masks, EP_NONE where none
 * came. */
template <class C, class F>
DEV void ep_forward_words(const C c, const epGroupArgs &g, uint64_t section, uint32_t gen, uint32_t what, F from) {
  epPlace w = ep_place(c, g);
  uint32_t locals = c.experts / c.ranks, words = locals + 1, each = w.ups * words;
  for (uint32_t i = p::tid(); i < w.domains * each; i += c.threads) {
    uint32_t o = i / each, u = i % each / words, word = i % words, source = o * w.ups + w.up;
    if (o == w.domain || ep_masked(c, g, w.domain * w.ups + u)) continue;
    const uint64_t *value = (const uint64_t *)(ep_window(g, g.rank) + from(o)) + i % each;
    bool there = ep_rail_there(c, g, what, o, gen);
    p::st_relaxed_sys((uint64_t *)(ep_window(g, w.domain * w.ups + u) + section) +
                          (uint64_t)((gen & 1) * c.ranks + source) * words + word,
                      ep_word(gen, there ? (uint32_t)p::ldg<uint64_t>(value) : EP_NONE));
  }
}

/* Whole warp: the decisions of token t of domain o that concern this domain, to the record and to their owners' meta rows. */
template <class C>
DEV void ep_forward_token(const C c, const epHybridUpdateArgs &a, uint32_t o, uint32_t t, uint32_t gen) {
  const epGroupArgs &g = a.plain.group;
  epPlace w = ep_place(c, g);
  epHybridRecord rec = epHybridRecordOf(a.plain.recordLayout.bytes, w.domains, c.topk, g.maxTokens);
  uint32_t l = p::lane(), locals = c.experts / c.ranks, entry = EP_NONE, row = 0;
  const uint32_t *in = (const uint32_t *)(ep_window(g, g.rank) + ep_rail_meta(c, a, o, gen)) + 2ull * t * c.topk;
  if (l < c.topk) {
    entry = p::ldg<uint32_t>(in + l);
    row = p::ldg<uint32_t>(in + c.topk + l);
  }
  uint32_t expert = entry == EP_NONE ? 0 : EP_ENTRY_EXPERT(entry), owner = expert / locals;
  bool here = entry != EP_NONE && owner / w.ups == w.domain;
  if (l < c.topk)
    p::stg<uint32_t>((uint32_t *)(a.plain.record + rec.forward) + ((uint64_t)o * g.maxTokens + t) * c.topk + l,
                     here ? EP_ENTRY(expert, row) : EP_NONE);
  uint32_t mates = p::match_any(p::FULL, here ? owner : ep_lone_key());
  bool first = here && (mates & ep_lanes_below()) == 0;
  uint32_t placed = p::ballot(p::FULL, first && owner != w.rank);
  for (uint32_t m = p::ballot(p::FULL, first); m; m &= m - 1) {
    uint32_t from = p::ffs(m) - 1, dst = p::shfl(p::FULL, owner, from), itsRow = p::shfl(p::FULL, row, from);
    uint32_t *meta = ep_meta(g, c.ranks, dst, o * w.ups + w.up, gen) + (uint64_t)itsRow * g.window.metaWords;
    if (ep_masked(c, g, dst)) continue;
    if (l < c.topk)
      p::stg<uint32_t>(meta + 1 + l, here && owner == dst ? EP_ENTRY(expert % locals, EP_ENTRY_POS(entry)) : EP_NONE);
    if (l == 0) p::stg<uint32_t>(meta, EP_META_PLACE(t, p::popc(placed & ((1u << from) - 1))));
  }
}

/* Whole block: what came has this rank's top-k and layout; else it must not be taken apart. */
template <class C> DEV bool ep_same_routing(const C c, const epHybridUpdateArgs &a, uint32_t gen) {
  const epGroupArgs &g = a.plain.group;
  epPlace w = ep_place(c, g);
  uint32_t tag = EP_ROWS_TAG(c.topk, c.layout);
  bool ok = true;
  for (uint32_t o = p::tid(); o < w.domains; o += c.threads) {
    const uint64_t *words = (const uint64_t *)(ep_window(g, g.rank) + ep_rail_counts(c, a, o, gen));
    bool there = o != w.domain && ep_rail_there(c, g, 0, o, gen);
    uint32_t its = there ? EP_ROWS_TAG_OF(p::ldg<uint64_t>(words + c.experts / c.ranks)) : tag;
    if (its == tag) continue;
    if (c.mask)
      ep_stop(c, g, EP_ERR_MISMATCH, EP_PHASE_UPDATE_COUNTS, o * w.ups + w.up, tag, its);
    else
      ep_report(g, EP_ERR_MISMATCH, EP_PHASE_UPDATE_COUNTS, o * w.ups + w.up, tag, its);
    ok = false;
  }
  return ep_block_agrees(ok);
}

/* All blocks: decisions have come from the rail, and can be taken apart. */
template <class C> DEV bool ep_hybrid_arrived(const C c, const epHybridUpdateArgs &a, uint32_t gen) {
  const epGroupArgs &g = a.plain.group;
  epPlace w = ep_place(c, g);
  auto signal = [](uint32_t o) { return epSignalMeta(o); };
  if (c.mask)
    return ep_rails_verdict(c, g, a.hybrid.gin, gen, EP_PHASE_UPDATE_META, signal,
                            [&] { return ep_same_routing(c, a, gen); });
  return ep_wait_rails(c.threads, g, a.hybrid, w, gen, EP_PHASE_UPDATE_META, signal) && ep_same_routing(c, a, gen);
}

/* All blocks: what came from the rail goes to the domain. */
template <class C> DEV bool ep_hybrid_forward(const C c, const epHybridUpdateArgs &a, uint32_t gen) {
  const epGroupArgs &g = a.plain.group;
  epPlace w = ep_place(c, g);
  epHybridRecord rec = epHybridRecordOf(a.plain.recordLayout.bytes, w.domains, c.topk, g.maxTokens);
  uint32_t warps = a.plain.blocks * (c.threads / 32), index = p::bid() * (c.threads / 32) + p::warp();
  if (!ep_hybrid_arrived(c, a, gen)) return false;
  if (p::bid() == a.plain.blocks - 1)
    ep_forward_words(c, g, g.window.counts, gen, 0, [&](uint32_t o) { return ep_rail_counts(c, a, o, gen); });
  for (uint32_t o = 0; o < w.domains; o++) {
    if (o == w.domain) continue;
    const uint64_t *words = (const uint64_t *)(ep_window(g, g.rank) + ep_rail_counts(c, a, o, gen));
    uint32_t tokens = ep_rail_there(c, g, 0, o, gen) ? (uint32_t)p::ldg<uint64_t>(words + ep_domain_words(c)) : 0;
    for (uint32_t t = index; t < tokens && t < g.maxTokens; t += warps) ep_forward_token(c, a, o, t, gen);
    if (index == 0 && p::lane() == 0) p::stg<uint32_t>((uint32_t *)(a.plain.record + rec.fwdTokens) + o, tokens);
  }
  if (!ep_last_block(&ep_hybrid_state(g, a.hybrid)->forwarded, a.plain.blocks)) return true;
  for (uint32_t i = p::tid(); i < c.ranks; i += c.threads) {
    uint32_t o = i / w.ups, u = i % w.ups;
    if (o != w.domain) ep_meta_flag(c, g, w.domain * w.ups + u, o * w.ups + w.up, gen, !ep_rail_there(c, g, 0, o, gen));
  }
  return true;
}

/* Where rows of source s begin here: word `word` of the reply. */
template <class C>
DEV void ep_hybrid_reply(const C c, const epHybridUpdateArgs &a, uint32_t s, uint32_t word, uint32_t value,
                         uint32_t gen) {
  const epGroupArgs &g = a.plain.group;
  uint32_t words = c.experts / c.ranks + 1;
  if (s / c.scaleUp == g.rank / c.scaleUp) {
    if (!ep_masked(c, g, s))
      p::st_relaxed_sys((uint64_t *)(ep_window(g, s) + g.window.replies) +
                            (uint64_t)((gen & 1) * c.ranks + g.rank) * words + word,
                        ep_word(gen, value));
  } else
    p::stg<uint64_t>(ep_out_reply(c, a, s / c.scaleUp, s % c.scaleUp * words + word), value);
}

/* Block 0, as the plain ep_update_gather: totals of all sources -> bases, zones, counters, replies. */
template <class C> DEV void ep_hybrid_gather(const C c, const epHybridUpdateArgs &a, uint32_t gen) {
  const epUpdateArgs &u = a.plain;
  const epRecordLayout &rl = u.recordLayout;
  epPlace w = ep_place(c, u.group);
  uint32_t locals = c.experts / c.ranks, warps = c.threads / 32, align = u.align ? u.align : 1;
  bool flat = c.layout == EP_LAYOUT_KIND_FLAT;
  uint32_t *slotBase = (uint32_t *)(u.record + rl.slotBase), *zoneBase = (uint32_t *)(u.record + rl.zoneBase);
  uint32_t *recvCount = (uint32_t *)(u.record + rl.recvCount), *recvBase = (uint32_t *)(u.record + rl.recvBase);
  uint32_t *zoneCount = (uint32_t *)(u.record + rl.zoneCount);
  epGather g = ep_gather(c);
  if (!ep_gather_counts(c, u, g, gen)) return;
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
    ep_put_zone(c, u, e, slot, n, padded);
    for (uint32_t s = 0; s < c.ranks; s++) {
      ep_hybrid_reply(c, a, s, e, slot, gen);
      p::stg<uint32_t>(slotBase + s * locals + e, slot);
      slot += ep_lds(g.counts, s * locals + e);
    }
  }
  for (uint32_t s = p::tid(); s < c.ranks; s += c.threads) {
    ep_hybrid_reply(c, a, s, locals, ep_lds(g.recvBase, s), gen);
    p::stg<uint32_t>(recvCount + s, ep_lds(g.rows, s));
    p::stg<uint32_t>(recvBase + s, ep_lds(g.recvBase, s));
  }
  uint32_t rows = flat ? ep_lds(g.recvBase, c.ranks) : ep_lds(g.zoneBase, locals);
  if (p::tid() == 0) {
    p::stg<uint32_t>(zoneBase + locals, ep_lds(g.zoneBase, locals));
    p::stg<uint32_t>(recvBase + c.ranks, ep_lds(g.recvBase, c.ranks));
    ep_put_counter(u.recvTotal, u.recvTotalWide, 0, rows);
    ep_update_header(c, u);
    p::stg<uint32_t>(&((epRecordHeader *)(u.record + rl.header))->version, EP_HYBRID_VERSION(c.scaleUp));
    if (u.budget && rows > u.budget) p::st_relaxed_sys(&u.group.error->overflowNeeded, rows);
  }
  p::sync_threads();
  for (uint32_t o = p::tid(); o < w.domains; o += c.threads) {
    if (o == w.domain || ep_rail_masked(c, u.group, o)) continue;
    ep_rail_sends(c, u.group, a.hybrid, o, 1, 1);
    p::gin_put_signal(a.hybrid.gin, 0, o, ep_rail_replies(c, a, w.domain, gen),
                      a.hybrid.layout.outReplies + 8ull * o * ep_domain_words(c), 8 * ep_domain_words(c),
                      epSignalReply(w.domains, w.domain), 1);
  }
  if (u.hostCounts) ep_update_host_counts(c, u, g, rows, gen);
}

/* Last block: replies from the rail go to their sources; then this rank's own. */
template <class C> DEV void ep_hybrid_replies(const C c, const epHybridUpdateArgs &a, uint32_t gen) {
  const epGroupArgs &g = a.plain.group;
  epPlace w = ep_place(c, g);
  auto signal = [&](uint32_t o) { return epSignalReply(w.domains, o); };
  if (c.mask ? !ep_rails_settle(c, g, a.hybrid.gin, 1, gen, EP_PHASE_UPDATE_REPLY, signal)
             : !ep_wait_rails(c.threads, g, a.hybrid, w, gen, EP_PHASE_UPDATE_REPLY, signal))
    return;
  ep_forward_words(c, g, g.window.replies, gen, 1, [&](uint32_t o) { return ep_rail_replies(c, a, o, gen); });
  ep_update_replies(c, a.plain, gen);
}

template <class C> DEV void ep_hybrid_update(const C c, const epHybridUpdateArgs &a) {
  if (!a.plain.group.windows) /* a rehearsal */
    return;
  p::grid_wait();
  ep_block_begins(c);
  const epUpdateArgs &u = a.plain;
  epProfile profile = ep_profile_begin(u.group, EP_KERNEL_HYBRID_UPDATE);
  bool last = ep_update_frame(c, u, [&](uint32_t *histogram, uint32_t gen, uint32_t t0, uint32_t t1) {
    ep_hybrid_bases(c, a, histogram, gen);
    p::sync_threads();
    ep_hybrid_place(c, a, t0, t1, gen);
    if (ep_last_block(&ep_state(u.group)->updateSent, u.blocks)) ep_hybrid_send(c, a, gen);
    bool ok = ep_hybrid_forward(c, a, gen);
    if (ok && p::bid() == 0) ep_hybrid_gather(c, a, gen);
    if (ok && p::bid() == u.blocks - 1) ep_hybrid_replies(c, a, gen);
    if (ok) ep_update_copy_meta(c, u, gen);
    p::sync_threads();
    if (p::warp() == 0) /* the next update writes what was put from */
      ep_flush(c, u.group, a.hybrid, 0);
  });
  if (last) p::stg<uint32_t>(&ep_hybrid_state(u.group, a.hybrid)->forwarded, 0);
  ep_profile_end(profile, EP_SPAN_RECORD, u.blocks);
}

#endif
