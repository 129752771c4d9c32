/* mask_meet.h in a group of several scale-up domains. A rank meets those that it reaches, of its domain and of its rail, in two rounds:
 *
 *   round 1   as in one domain; along the rail by signals that are brought to values. Each then takes the largest counters it has seen
 *   round 2   the same with those: as whoever lives is at most two steps away, by one of two ways, all have the largest of all now
 *   view      in the domain as ever. Along the rail a rank brings all its signals of all networks to what they would be if it had been there
 *             in all operations; strong, so that no put of before is on its way behind them. Who sees a peer's signals come to exactly the
 *             same has its view, and nothing of its old operations can come any more
 *   heard     who was admitted on its rail a rank tells its domain
 *
 * No rank needs to know who came elsewhere, only that the counters are one: a rank masks those that it reaches, and about others it is told. */
#ifndef EP_DEVICE_RAIL_MEET_H_
#define EP_DEVICE_RAIL_MEET_H_

#include "hybrid_ll_layout.h"
#include "mask_meet.h"
#include "rail_mask.h"

/* ep_meet for a peer of the rail. Its words are there when their sum is that of its call, and are of its running meeting when its answer to mine
 * names that. */
template <class C>
DEV bool ep_rail_meet(const C c, const epMaskArgs &a, uint32_t peer, uint32_t number, uint64_t most) {
  const epGroupArgs &g = a.group;
  uint32_t mine[3] = {p::ld_relaxed_sys(&ep_mask_state(c, g)->epoch), p::ldg<uint32_t>(&ep_state(g)->updateGen),
                      ep_meet_stage_gen(a)};
  for (uint32_t i = 0; i < 3; i++) ep_rail_says(c, g, EP_RAIL_EPOCH + i, peer, mine[i]);
  ep_rail_says(c, g, EP_RAIL_CALL, peer, (uint64_t)number << 32 | (uint32_t)(mine[0] + mine[1] + mine[2]));
  uint64_t start = p::globaltimer();
  for (uint32_t round = 0, answered = 0;; round++) {
    uint64_t heard = ep_rail_hears(c, g, EP_RAIL_ACK, peer), call = ep_rail_hears(c, g, EP_RAIL_CALL, peer);
    uint32_t its[3], sum = 0, n = (uint32_t)(call >> 32);
    for (uint32_t i = 0; i < 3; i++) sum += its[i] = (uint32_t)ep_rail_hears(c, g, EP_RAIL_EPOCH + i, peer);
    bool whole = n != 0 && sum == (uint32_t)call;
    if (whole && n != answered) {
      ep_rail_says(c, g, EP_RAIL_ACK, peer, (uint64_t)number << 32 | n);
      answered = n;
    }
    heard &=
        ~(uint64_t)EP_MEET_LANDED; /* which the peer may have said already, where nothing had to be brought anywhere */
    if (whole && heard == ((uint64_t)n << 32 | number) && ep_meet_round(c, a, number, n)) {
      for (uint32_t i = 0; i < 3; i++) p::sts<uint32_t>(ep_meet_at(peer, 1 + i), its[i]);
      return true;
    }
    if (ep_meet_late(g, start, round, most)) return false;
  }
}

/* Signal i of a slot's network is in use: updates have those of the first slot, low latency has no second one. */
DEV bool ep_signal_used(const epMaskArgs &a, uint32_t slot, uint32_t i) {
  return a.lowLatency ? i != 1 : !slot || i >= 2;
}
/* What it is when all has been sent of what the view counts; `from`: the domain that adds to it. */
struct epTopUp {
  uint32_t context, signal;
  uint64_t value;
};
template <class C>
DEV epTopUp ep_top_up(const C c, const epMaskArgs &a, uint32_t from, uint32_t i, const epMeetView &v) {
  uint32_t domains = c.ranks / c.scaleUp;
  epTopUp t = {i < 3 ? 0 : (i - 3) % a.contexts,
               i < 3 ? i * domains + from : epSignalRows(domains, a.channels, from, i - 3),
               i < 2    ? v.updateGen
               : i == 2 ? v.stageGen
                        : epTailOf(v.stageGen + 1, 0)};
  if (a.lowLatency && i < 3) {
    t.signal = i ? epLlSignalGreet(domains, from) : epLlSignalMessage(from);
    t.value = v.stageGen;
  } else if (a.lowLatency) {
    t.signal = epLlSignalRows(domains, a.channels, from, i - 3);
  }
  return t;
}

/* One thread: as ep_meet_agrees, for a peer of the rail. */
template <class C>
DEV bool ep_rail_agrees(const C c, const epMaskArgs &a, uint32_t peer, uint32_t number, const epMeetView &v) {
  const epGroupArgs &g = a.group;
  uint32_t domains = c.ranks / c.scaleUp, o = peer / c.scaleUp, count = 3 + a.channels;
  uint64_t *sent = (uint64_t *)(g.scratch + ep_rail_masks(c, g).sent);
  for (uint32_t n = 0; n < a.slots * count; n++) {
    uint32_t s = n / count, i = n % count;
    epGin gin = {a.networks[s][0], a.networks[s][1]};
    epTopUp t = ep_top_up(c, a, g.rank / c.scaleUp, i, v);
    uint64_t *at = sent + ep_sent_index(s, domains, a.channels, o, i), before = p::ld_relaxed_sys(at);
    if (!ep_signal_used(a, s, i) || before == t.value) continue;
    p::st_relaxed_sys(at, t.value);
    p::gin_signal(gin, t.context, o, t.signal, t.value - before);
  }
  uint64_t start = p::globaltimer();
  for (uint32_t n = 0, round = 0; n < a.slots * count;) {
    uint32_t s = n / count, i = n % count;
    epGin gin = {a.networks[s][0], a.networks[s][1]};
    epTopUp t = ep_top_up(c, a, o, i, v);
    if (!ep_signal_used(a, s, i) || p::gin_read(gin, t.context, t.signal) == t.value)
      n++;
    else if (ep_meet_late(g, start, round++, g.timeoutNs / 8 * 3))
      return false;
  }
  uint32_t its = (uint32_t)(ep_rail_hears(c, g, EP_RAIL_CALL, peer) >> 32);
  ep_rail_says(c, g, EP_RAIL_ACK, peer, (uint64_t)number << 32 | EP_MEET_LANDED | its);
  for (uint32_t round = 0; ep_rail_hears(c, g, EP_RAIL_ACK, peer) != ((uint64_t)its << 32 | EP_MEET_LANDED | number);
       round++)
    if (ep_meet_late(g, start, round, g.timeoutNs / 8 * 3)) return false;
  return true;
}

/* Whole block: who has come again on which rail. */
template <class C> DEV void ep_domains_hear(const C c, const epMaskArgs &a, uint32_t number, const epMeetView &v) {
  const epGroupArgs &g = a.group;
  epMaskWindow w = ep_mask_window(c, g);
  uint32_t first = g.rank / c.scaleUp * c.scaleUp;
  const uint8_t *mine = ep_mask_home(c, g, g.rank);
  for (uint32_t r = first + p::tid(); r < first + c.scaleUp; r += c.threads) {
    bool told = r != g.rank && p::lds<uint32_t>(ep_meet_at(r, 0));
    if (told) {
      uint8_t *to = ep_mask_home(c, g, r);
      for (uint32_t q = g.rank % c.scaleUp; q < c.ranks; q += c.scaleUp)
        if (q != g.rank)
          p::st_relaxed_sys((uint32_t *)(to + w.heard) + q, p::lds<uint32_t>(ep_meet_at(q, 0)) ? v.epoch : v.epoch - 1);
      p::st_release_sys((uint32_t *)(to + w.met) + g.rank, v.epoch);
      uint64_t start = p::globaltimer();
      for (uint32_t round = 0; told && p::ld_acquire_sys((const uint32_t *)(mine + w.met) + r) != v.epoch; round++)
        told = !ep_meet_late(g, start, round, g.timeoutNs);
    }
    p::sts<uint32_t>(ep_meet_at(r, 1), told);
  }
  p::sync_threads();
  for (uint32_t r = p::tid(); r < c.ranks; r += c.threads) {
    if (!ep_is_far(c, g, r) || r % c.scaleUp == g.rank % c.scaleUp) continue;
    bool came = p::lds<uint32_t>(ep_meet_at(ep_bringer(c, g, r), 1)) &&
                p::ld_relaxed_sys((const uint32_t *)(mine + w.heard) + r) == v.epoch;
    if (!came && !ep_masked(c, g, r)) ep_note(c, g, EP_ERR_MASKED, EP_PHASE_MASK_CLEAN, r, number, 0);
    ep_admit(c, g, r, came);
  }
}

template <class C> DEV_APART void ep_domains_clean(const C c, const epMaskArgs &a) {
  const epGroupArgs &g = a.group;
  epMaskState *state = ep_mask_state(c, g);
  uint32_t number = ((p::ld_relaxed_sys(&state->meetings) + 2) & ~1u) - 1; /* rounds are even, then odd */
  epMeetView v = {};
  for (uint32_t r = p::tid(); r < c.ranks; r += c.threads)
    p::sts<uint32_t>(ep_meet_at(r, 0), r != g.rank && (!ep_is_far(c, g, r) || r % c.scaleUp == g.rank % c.scaleUp));
  for (uint32_t round = 0; round < 2; round++) {
    p::sync_threads();
    number++;
    for (uint32_t r = p::tid(); r < c.ranks; r += c.threads) {
      uint64_t most = g.timeoutNs + round * (g.timeoutNs / 8); /* who came once may have waited so long for others */
      if (p::lds<uint32_t>(ep_meet_at(r, 0)))
        p::sts<uint32_t>(ep_meet_at(r, 0),
                         ep_is_far(c, g, r) ? ep_rail_meet(c, a, r, number, most) : ep_meet(c, a, r, number, most));
    }
    p::sync_threads();
    v = ep_meet_view(c, a);
    p::sync_threads();
    if (p::tid() == 0) {
      p::st_relaxed_sys(&state->epoch, v.epoch - 1);
      p::stg<uint32_t>(&ep_state(g)->updateGen, v.updateGen);
      p::stg<uint32_t>(&ep_meet_state(g, 0)->stageGen, v.stageGen);
    }
  }
  if (a.lowLatency) ep_meet_clear(c, a);
  p::sync_threads();
  for (uint32_t r = p::tid(); r < c.ranks; r += c.threads) {
    bool far = ep_is_far(c, g, r);
    if (r == g.rank || (far && r % c.scaleUp != g.rank % c.scaleUp)) continue;
    bool came = p::lds<uint32_t>(ep_meet_at(r, 0)) &&
                (far ? ep_rail_agrees(c, a, r, number, v) : ep_meet_agrees(c, a, r, number, v));
    if (!came && !ep_masked(c, g, r)) ep_note(c, g, EP_ERR_MASKED, EP_PHASE_MASK_CLEAN, r, number, 0);
    if (!came && far) ep_rail_says(c, g, EP_RAIL_TOLD, r, v.epoch + 1);
    if (!came && !far)
      p::st_relaxed_sys((uint32_t *)(ep_mask_home(c, g, r) + ep_mask_window(c, g).told) + g.rank, v.epoch + 1);
    p::sts<uint32_t>(ep_meet_at(r, 0), came);
    ep_admit(c, g, r, came);
  }
  p::sync_threads();
  ep_domains_hear(c, a, number, v);
  p::sync_threads();
  if (p::tid() != 0) return;
  p::st_relaxed_sys(&state->meetings, number);
  ep_meet_result(c, a, v);
}

#endif
