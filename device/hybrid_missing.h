/* Dispatch across scale-up domains, with masks: rows that do not come, and what a domain is told of them.
 *
 * A rank's rows from another domain lie in the window of the rank of its index here, and the ranks of this domain load them from there. So where
 * they end too early it is that rank that says so, with the tail. And a rank that others have masked while it was late may load a row when the
 * next operation's is already on its way there: it looks, after it has loaded a row, whether the window's owner still waits for it. */
#ifndef EP_DEVICE_HYBRID_MISSING_H_
#define EP_DEVICE_HYBRID_MISSING_H_

#include "dispatch.h"
#include "rail.h"

/* Whole warp: row j of source s does not come. */
template <class C> DEV void ep_row_missing(const C c, const epDispatchArgs &d, uint32_t s, uint32_t j) {
  const uint32_t *meta = ep_record_meta(c, d.group, d.recordLayout, d.record, s, j);
  epArrival r = {};
  r.s = s, r.j = j;
  r.entry = p::lane() < c.topk ? p::ldg<uint32_t>(meta + 1 + p::lane()) : EP_NONE;
  if (c.layout == EP_LAYOUT_KIND_FLAT)
    r.first = p::ldg<uint32_t>((const uint32_t *)(d.record + d.recordLayout.recvBase) + s) + j;
  else if (r.entry != EP_NONE)
    r.first = p::ldg<uint32_t>((const uint32_t *)(d.record + d.recordLayout.slotBase) + s * (c.experts / c.ranks) +
                               EP_ENTRY_EXPERT(r.entry));
  ep_dispatch_leave(c, d, r);
}

/* One thread: what rank `s` of another domain sends by a channel has come to `want`; false: it never will. */
template <class C>
DEV bool ep_tail_brought(const C c, const epGroupArgs &g, const uint64_t *tail, uint64_t want, uint32_t gen,
                         uint32_t s) {
  uint64_t seen = 0;
  bool told = ep_await_value(
      c, g, [&] { return seen = p::ld_acquire_sys(tail); }, [&](uint64_t v) { return ep_tail_settled(v, want, gen); },
      want, EP_TAIL_ROLL, EP_PHASE_DISPATCH_ROWS, ep_bringer(c, g, s));
  return ep_brought(c, g, told, !ep_reached(seen, want, EP_TAIL_ROLL), EP_PHASE_DISPATCH_ROWS, s, gen);
}

/* Whole warp: a row that lies in another rank's window. False: that rank has masked this one meanwhile, so nobody knows which row it was. */
template <class C>
DEV bool ep_hybrid_arrange_far(const C c, const epHybridDispatchArgs &a, uint32_t s, uint32_t j, const uint8_t *row) {
  const epGroupArgs &g = a.plain.group;
  epConfig plain = ep_plain_config(c);
  uint32_t by = ep_bringer(c, g, s), bytes = c.rowBytes + epTailBytes(&plain);
  if (by == g.rank) {
    ep_hybrid_arrange(c, a, s, j, row);
    return true;
  }
  ep_hybrid_arrange(c, a, s, j, row, true);
  uint32_t epoch = p::ld_relaxed_sys(&ep_mask_state(c, g)->epoch);
  bool late = p::look_sys((const uint32_t *)(ep_mask_home(c, g, g.rank) + ep_mask_window(c, g).told) + by) > epoch;
  for (uint32_t at = 16 * p::lane(); at < c.rowBytes && !late; at += 512) p::confirm(row + at, 16);
  for (uint32_t at = c.rowBytes + 4 * p::lane(); at < bytes && !late; at += 128) p::confirm(row + at, 4);
  if (!p::ballot(p::FULL, late)) return true;
  if (p::lane() == 0) ep_mask_out(c, g, EP_ERR_MASKED_BY, EP_PHASE_DISPATCH_ROWS, by, 1, 0);
  p::sync_warp();
  return false;
}

/* One block, as ep_hybrid_forwarder: with masks a rail may be given up, and then each of its tails says how far it came. */
template <class C> DEV void ep_tails_forward(const C c, const epHybridDispatchArgs &a, uint32_t gen) {
  const epGroupArgs &g = a.plain.group;
  const epHybridGroup &h = a.hybrid;
  epPlace w = ep_place(c, g);
  uint32_t tails = w.domains * h.layout.channels;
  uint64_t want = epTailOf(gen + 1, 0), first = epTailOf(gen, 0);
  epPatience patience = {};
  ep_wait_begins(c, g, patience);
  for (uint32_t round = 0, open = 1; open; round++) {
    open = 0;
    uint32_t waits = w.domain;
    uint64_t missing = 0;
    for (uint32_t i = p::tid(); i < tails; i += c.threads) {
      uint32_t o = i / h.layout.channels, channel = i % h.layout.channels;
      if (o == w.domain) continue;
      uint64_t told = p::ld_relaxed_sys(ep_tail_word(g, h, w, w.up, w.up, o, channel));
      if (ep_tail_settled(told, want, gen)) /* all said */
        continue;
      bool lost = ep_rail_masked(c, g, o); /* looked at first: whoever comes after that is late */
      uint64_t tail = ep_tail(h, w, o, channel);
      bool whole = ep_reached(tail, want, EP_TAIL_ROLL);
      if (lost && !whole) tail = (ep_reached(tail, first, EP_TAIL_ROLL) ? tail : first) | EP_TAIL_LOST;
      if (!lost && !whole) {
        open = 1;
        waits = o;
        missing = tail;
      }
      if (tail == told) continue;
      p::fence_sys(); /* rows that came before the signal come before the words */
      for (uint32_t u = 0; u < w.ups; u++)
        if (!ep_masked(c, g, w.domain * w.ups + u)) p::st_relaxed_sys(ep_tail_word(g, h, w, u, w.up, o, channel), tail);
    }
    if (open &&
        ep_peer_give_up(c, g, patience, round, EP_PHASE_DISPATCH_ROWS, waits * w.ups + w.up, gen,
                        ep_told(missing, EP_TAIL_ROLL)) &&
        ep_stopped(c, g))
      return;
  }
}

#endif
