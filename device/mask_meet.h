/* The masks themselves: a launch of one block that tells them, sets them, or re-admits ranks.
 *
 * Re-admission (clean) is a meeting of all ranks that call it, without the host and bounded in time:
 *
 *   call    a rank tells every other the number of its meeting and its counters; who meets as well answers with that number. A
 *           call that is old gets an answer too, but nobody waits for it. Of its slots' generations it tells the largest
 *   view    everyone now knows who came. Each makes the same of it: an epoch above all theirs, and the largest counters, so that no flag,
 *           word or tag of before is taken for one of after, the same generation for all slots; and tells those who came a hash of that. Before
 *           it does, it has cleared its units, and returned all credits, of every slot
 *   result  who told the same view is admitted; whoever did not, or came too late, stays out and is told so
 *
 * Two ranks can differ about each other only where one came at the very end of the other's wait. Then one of them stores nothing for the
 * other and has told it: the next wait ends there, and both are masked for each other. Nothing of an old epoch reads as new. */
#ifndef EP_DEVICE_MASK_MEET_H_
#define EP_DEVICE_MASK_MEET_H_

#include "mask.h"

/* Shared memory: 1 a rank that came; its epoch, updateGen and stageGen. */
DEV uint32_t ep_meet_at(uint32_t rank, uint32_t word) {
  return p::smem_base() + EP_VERDICT_BYTES + 16 * rank + 4 * word;
}

/* A wait of a meeting is over. */
DEV bool ep_meet_late(const epGroupArgs &g, uint64_t start, uint32_t round, uint64_t most) {
  if (round >= 16) p::nanosleep(32);
  if ((round & 15) != 15) return false;
  if ((round & 1023) == 1023 && p::ld_relaxed_sys(g.abortWord)) return true;
  return p::globaltimer() - start > most;
}

template <class C> DEV uint64_t *ep_meet_call(const C c, const epGroupArgs &g, uint32_t at, uint32_t from) {
  return (uint64_t *)(ep_mask_home(c, g, at) + ep_mask_window(c, g).calls) + from * EP_MEET_WORDS;
}

DEV epGroupState *ep_meet_state(const epGroupArgs &g, uint32_t slot) {
  return (epGroupState *)(g.scratch + epSlotState(slot));
}

/* Of all slots. */
DEV uint32_t ep_meet_stage_gen(const epMaskArgs &a) {
  uint32_t most = p::ldg<uint32_t>(&ep_meet_state(a.group, 0)->stageGen);
  for (uint32_t s = 1; s < a.slots; s++) {
    uint32_t gen = p::ldg<uint32_t>(&ep_meet_state(a.group, s)->stageGen);
    most = (int32_t)(gen - most) > 0 ? gen : most;
  }
  return most;
}

/* A peer's call `n` belongs to the round of mine; to the first one all do, to the second, whose numbers are odd, those of the second. */
template <class C> DEV bool ep_meet_round(const C c, const epMaskArgs &a, uint32_t number, uint32_t n) {
  return !c.scaleUp || a.op != EP_MASK_CLEAN || !(number & 1) || (n & 1);
}

/* One thread for `peer`: calls it and waits until it has answered. */
template <class C> DEV bool ep_meet(const C c, const epMaskArgs &a, uint32_t peer, uint32_t number, uint64_t most) {
  const epGroupArgs &g = a.group;
  epMaskWindow w = ep_mask_window(c, g);
  uint64_t *mine = ep_meet_call(c, g, peer, g.rank), tag = (uint64_t)number << 32;
  const uint64_t *its = ep_meet_call(c, g, g.rank, peer);
  const uint32_t *ack = (const uint32_t *)(ep_mask_home(c, g, g.rank) + w.acks) + peer;
  p::st_relaxed_sys(mine + 1, tag | p::ld_relaxed_sys(&ep_mask_state(c, g)->epoch));
  p::st_relaxed_sys(mine + 2, tag | p::ldg<uint32_t>(&ep_state(g)->updateGen));
  p::st_relaxed_sys(mine + 3, tag | ep_meet_stage_gen(a));
  p::st_release_sys(mine, tag | a.op);
  uint64_t start = p::globaltimer();
  for (uint32_t round = 0, answered = 0;; round++) {
    bool heard = p::ld_acquire_sys(ack) == number; /* looked at first: with its answer its call is there */
    uint64_t call = p::ld_acquire_sys(its);
    uint32_t n = (uint32_t)(call >> 32);
    if (n != answered && (uint32_t)call == a.op) {
      p::st_release_sys((uint32_t *)(ep_mask_home(c, g, peer) + w.acks) + g.rank, n);
      answered = n;
    }
    if (heard && answered == n && ep_meet_round(c, a, number, n)) {
      bool whole = n != 0;
      for (uint32_t i = 1; i < EP_MEET_WORDS; i++) {
        uint64_t v = p::ld_relaxed_sys(its + i);
        whole = whole && (uint32_t)(v >> 32) == n;
        p::sts<uint32_t>(ep_meet_at(peer, i), (uint32_t)v);
      }
      if (whole) return true;
    }
    if (ep_meet_late(g, start, round, most)) return false;
  }
}

/* What all who came agree on; with several domains, who came is each rank's own. */
struct epMeetView {
  uint32_t epoch, updateGen, stageGen, hash;
};

template <class C> DEV epMeetView ep_meet_view(const C c, const epMaskArgs &a) {
  const epGroupArgs &g = a.group;
  epMeetView v = {p::ld_relaxed_sys(&ep_mask_state(c, g)->epoch), p::ldg<uint32_t>(&ep_state(g)->updateGen),
                  ep_meet_stage_gen(a), 2166136261u};
  auto mix = [&](uint32_t x) { v.hash = (v.hash ^ x) * 16777619u; };
  for (uint32_t r = 0; r < c.ranks; r++) {
    if (r != g.rank && !p::lds<uint32_t>(ep_meet_at(r, 0))) continue;
    if (!c.scaleUp) mix(r + 1);
    if (r == g.rank) continue;
    uint32_t epoch = p::lds<uint32_t>(ep_meet_at(r, 1)), update = p::lds<uint32_t>(ep_meet_at(r, 2));
    uint32_t stage = p::lds<uint32_t>(ep_meet_at(r, 3));
    v.epoch = (int32_t)(epoch - v.epoch) > 0 ? epoch : v.epoch;
    v.updateGen = (int32_t)(update - v.updateGen) > 0 ? update : v.updateGen;
    v.stageGen = (int32_t)(stage - v.stageGen) > 0 ? stage : v.stageGen;
  }
  v.epoch++;
  mix(v.epoch);
  mix(v.updateGen);
  mix(v.stageGen);
  return v;
}

DEV uint8_t *ep_meet_window(const epMaskArgs &a, uint32_t slot, uint32_t rank) {
  return (uint8_t *)p::ldg<uint64_t>(a.windows[slot] + rank);
}

/* Whole block: units of before, whose tags may come again. The tag is one that operations of the other half have. */
template <class C> DEV void ep_meet_clear(const C c, const epMaskArgs &a) {
  uint4 unit;
  unit.y = unit.z = unit.w = 0;
  for (uint32_t i = 0; i < 2 * a.slots; i++) {
    uint32_t half = i & 1;
    uint8_t *from = ep_meet_window(a, i / 2, a.group.rank) + a.units + half * a.halfBytes;
    unit.x = half ^ 1;
    for (uint64_t at = 16ull * p::tid(); at < a.halfBytes; at += 16ull * c.threads)
      p::st_relaxed_sys128(from + at, unit);
  }
}

/* One thread: tells `peer` the view and waits for its own; credits come first. */
template <class C>
DEV bool ep_meet_agrees(const C c, const epMaskArgs &a, uint32_t peer, uint32_t number, const epMeetView &v) {
  const epGroupArgs &g = a.group;
  uint64_t views = ep_mask_window(c, g).views;
  uint32_t its = (uint32_t)(p::ld_relaxed_sys(ep_meet_call(c, g, g.rank, peer)) >> 32);
  const uint64_t *word = (const uint64_t *)(ep_mask_home(c, g, g.rank) + views) + peer;
  for (uint32_t s = 0; s < a.slots && !a.lowLatency; s++)
    p::st_relaxed_sys((uint32_t *)(ep_meet_window(a, s, peer) + g.window.credits) + g.rank, v.stageGen);
  p::st_release_sys((uint64_t *)(ep_mask_home(c, g, peer) + views) + g.rank, (uint64_t)its << 32 | v.hash);
  uint64_t start = p::globaltimer();
  for (uint32_t round = 0;; round++) {
    uint64_t seen = p::ld_acquire_sys(word);
    if ((uint32_t)(seen >> 32) == number) return (uint32_t)seen == v.hash;
    if (ep_meet_late(g, start, round, g.timeoutNs / 8 * 3)) return false;
  }
}

template <class C> DEV void ep_admit(const C c, const epGroupArgs &g, uint32_t rank, bool came) {
  p::st_relaxed_sys(ep_masked_word(c, g, rank), came ? 0 : 1);
  p::st_relaxed_sys(ep_mask_words(c, g).left + rank, came ? 0 : 1);
}

/* One thread: the view is in force. */
template <class C> DEV void ep_meet_result(const C c, const epMaskArgs &a, const epMeetView &v) {
  const epGroupArgs &g = a.group;
  p::st_relaxed_sys(&ep_mask_state(c, g)->epoch, v.epoch);
  p::stg<uint32_t>(&ep_state(g)->updateGen, v.updateGen);
  for (uint32_t s = 0; s < a.slots; s++) p::stg<uint32_t>(&ep_meet_state(g, s)->stageGen, v.stageGen);
  p::st_relaxed_sys(&a.result->updateGen, v.updateGen);
  p::st_relaxed_sys(&a.result->epoch, v.epoch);
}

/* The re-admission of several domains (rail_meet.h). */
template <class C> DEV_APART void ep_domains_clean(const C c, const epMaskArgs &a);

template <class C> DEV void ep_mask_clean(const C c, const epMaskArgs &a, uint32_t number) {
  const epGroupArgs &g = a.group;
  epMeetView v = ep_meet_view(c, a);
  if (a.lowLatency) ep_meet_clear(c, a);
  p::sync_threads();
  for (uint32_t r = p::tid(); r < c.ranks; r += c.threads) {
    if (r == g.rank) continue;
    bool came = p::lds<uint32_t>(ep_meet_at(r, 0)) && ep_meet_agrees(c, a, r, number, v);
    if (!came && !ep_masked(c, g, r)) ep_note(c, g, EP_ERR_MASKED, EP_PHASE_MASK_CLEAN, r, number, 0);
    if (!came && ep_mask_home(c, g, r))
      p::st_relaxed_sys((uint32_t *)(ep_mask_home(c, g, r) + ep_mask_window(c, g).told) + g.rank, v.epoch + 1);
    ep_admit(c, g, r, came);
  }
  p::sync_threads();
  if (p::tid() == 0) ep_meet_result(c, a, v);
}

/* One thread: tells `peer`, of the rail, that this rank is about to go, and waits until it has told so as well and all it sent has come. */
template <class C> DEV void ep_rail_leave(const C c, const epGroupArgs &g, uint32_t peer) {
  uint64_t start = p::globaltimer();
  ep_rail_says(c, g, EP_RAIL_LEAVE, peer, 1ull << 32 | (uint32_t)ep_rail_said(c, g, EP_RAIL_BEAT, peer));
  for (uint32_t round = 0; !ep_meet_late(g, start, round, g.timeoutNs); round++) {
    uint64_t word = ep_rail_hears(c, g, EP_RAIL_LEAVE, peer);
    if (word >> 32 && (uint32_t)word == (uint32_t)ep_rail_hears(c, g, EP_RAIL_BEAT, peer)) return;
  }
}

template <class C> DEV void ep_mask(const C c, const epMaskArgs &a) {
  if (c.scaleUp && !a.group.windows) /* a rehearsal */
    return;
  p::grid_wait();
  if (c.scaleUp && a.op == EP_MASK_CLEAN) return ep_domains_clean(c, a);
  const epGroupArgs &g = a.group;
  epMaskState *state = ep_mask_state(c, g);
  uint32_t number = p::ld_relaxed_sys(&state->meetings) + 1;
  for (uint32_t r = p::tid(); r < c.ranks; r += c.threads) {
    bool other = r != g.rank && (c.scaleUp || ep_mask_home(c, g, r));
    if (a.op == EP_MASK_QUERY) p::stg<int32_t>(a.out + r, ep_masked(c, g, r) ? 0 : 1);
    if (a.op == EP_MASK_SET && other && !(a.keep[r / 32] >> r % 32 & 1))
      ep_mask_out(c, g, EP_ERR_NONE, EP_PHASE_NONE, r, 0, 0);
    if (a.op == EP_MASK_SET) p::st_relaxed_sys(ep_mask_words(c, g).left + r, ep_masked(c, g, r) ? 1 : 0);
    if (a.op < EP_MASK_CLEAN) continue;
    other = other && (a.op == EP_MASK_CLEAN || !ep_masked(c, g, r));
    if (ep_is_far(c, g, r)) {
      if (other && r % c.scaleUp == g.rank % c.scaleUp) ep_rail_leave(c, g, r);
      continue;
    }
    p::sts<uint32_t>(ep_meet_at(r, 0), other && ep_meet(c, a, r, number, g.timeoutNs));
  }
  if (a.op < EP_MASK_CLEAN) return;
  p::sync_threads();
  if (p::tid() == 0) p::st_relaxed_sys(&state->meetings, number);
  if (a.op == EP_MASK_CLEAN) ep_mask_clean(c, a, number);
}

#endif
