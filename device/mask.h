/* Masks: a rank that does not answer is left out, and the others go on. Every wait for a peer's word comes here; without
 * cfg.mask it is the plain wait of group.h, and nothing of this file is left in the kernel.
 *
 * With masks a wait ends when the word comes, when the peer is masked, or when the peer is given up: after the group's timeout,
 * or up to 11/8 of it where the peer shows that it lives and waits for somebody itself (else the first rank that waits for a
 * dead one would be taken for dead by those who wait for it). Who waits for longer than a sixteenth of the timeout shows that to all,
 * once in such a slice. Who masks a peer tells it, so that one that was only late finds out at its first wait, and does not wait for
 * words that will never come. */
#ifndef EP_DEVICE_MASK_H_
#define EP_DEVICE_MASK_H_

#include "group.h"
#include "mask_layout.h"

template <class C> DEV epMaskScratch ep_mask_scratch(const C c, const epGroupArgs &g) {
  return epMaskScratchOf(g.scratchLayout.bytes, c.ranks, c.experts);
}
template <class C> DEV epMaskWindow ep_mask_window(const C c, const epGroupArgs &g) {
  return epMaskWindowOf(g.window.bytes, c.ranks);
}
template <class C> DEV epMaskState *ep_mask_state(const C c, const epGroupArgs &g) {
  return (epMaskState *)(g.scratch + ep_mask_scratch(c, g).state);
}
/* Of the slot that the operation is on. */
template <class C> DEV uint8_t *ep_mask_slot_at(const C c, const epGroupArgs &g) {
  epMaskScratch s = ep_mask_scratch(c, g);
  return g.scratch + s.slots + g.scratchLayout.state / EP_SECTION_ALIGN * s.slotStride;
}
template <class C> DEV epMaskSlot *ep_mask_slot(const C c, const epGroupArgs &g) {
  return (epMaskSlot *)ep_mask_slot_at(c, g);
}
/* The window of `rank` with the words of masks in it, null where it is out of reach. */
template <class C> DEV uint8_t *ep_mask_home(const C c, const epGroupArgs &g, uint32_t rank) {
  return (uint8_t *)p::ldg<uint64_t>((const uint64_t *)(g.scratch + ep_mask_scratch(c, g).windows) + rank);
}
template <class C> DEV uint32_t *ep_masked_word(const C c, const epGroupArgs &g, uint32_t peer) {
  return (uint32_t *)(g.scratch + ep_mask_scratch(c, g).masked) + peer;
}
template <class C> DEV bool ep_masked(const C c, const epGroupArgs &g, uint32_t peer) {
  return c.mask && p::ld_relaxed_sys(ep_masked_word(c, g, peer)) != 0;
}

/* Several scale-up domains: what a rank of this one's rail has told by signals (EP_RAIL_*), and telling it (rail_mask.h). */
template <class C> DEV_APART uint64_t ep_rail_hears(const C c, const epGroupArgs &g, uint32_t kind, uint32_t peer);
template <class C>
DEV_APART void ep_rail_says(const C c, const epGroupArgs &g, uint32_t kind, uint32_t peer, uint64_t value);
template <class C> DEV_APART uint64_t ep_rail_said(const C c, const epGroupArgs &g, uint32_t kind, uint32_t peer);
template <class C> DEV bool ep_is_far(const C c, const epGroupArgs &g, uint32_t peer) {
  return c.scaleUp && peer / c.scaleUp != g.rank / c.scaleUp;
}
/* Who stores here what comes from `source`: itself, or the rank of its index in this domain. */
template <class C> DEV uint32_t ep_bringer(const C c, const epGroupArgs &g, uint32_t source) {
  return ep_is_far(c, g, source) ? g.rank / c.scaleUp * c.scaleUp + source % c.scaleUp : source;
}

/* Who sends what `owner` has for this rank: itself, or the rank of this one's index in its domain. */
template <class C> DEV uint32_t ep_returner(const C c, const epGroupArgs &g, uint32_t owner) {
  return ep_is_far(c, g, owner) ? owner / c.scaleUp * c.scaleUp + g.rank % c.scaleUp : owner;
}

/* The rank of this one's index in domain o is masked. */
template <class C> DEV bool ep_rail_masked(const C c, const epGroupArgs &g, uint32_t o) {
  return ep_masked(c, g, o * c.scaleUp + g.rank % c.scaleUp);
}
/* What this rank sends gets to `owner`: neither it nor, in another domain, the rank of this one's index is masked. */
template <class C> DEV bool ep_can_reach(const C c, const epGroupArgs &g, uint32_t owner) {
  return !ep_masked(c, g, owner) && !(ep_is_far(c, g, owner) && ep_rail_masked(c, g, owner / c.scaleUp));
}
/* Low latency's words of each rank. */
struct epMaskWords {
  uint32_t *left, *lost, *counts;
};
template <class C> DEV epMaskWords ep_mask_words(const C c, const epGroupArgs &g) {
  epMaskScratch s = ep_mask_scratch(c, g);
  uint8_t *slot = ep_mask_slot_at(c, g);
  epMaskWords w = {(uint32_t *)(g.scratch + s.left), (uint32_t *)(slot + s.lost), (uint32_t *)(slot + s.counts)};
  return w;
}

/* A wait gave up for good, which with masks only an abort, a disagreement or a fault of this rank can bring about. */
template <class C> DEV bool ep_stopped(const C c, const epGroupArgs &g) {
  return !c.mask || p::ld_relaxed_sys(&ep_state(g)->aborted) != 0;
}

/* A report that ends nothing. The first stays until the host has cleared it. */
template <class C>
DEV void ep_note(const C c, const epGroupArgs &g, uint32_t code, uint32_t phase, uint32_t peer, uint32_t expected,
                 uint32_t seen) {
  uint32_t *claim = &ep_mask_state(c, g)->noting;
  if (p::atomic_cas(claim, 0, 1) != 0) return;
  if (p::ld_relaxed_sys(&g.error->code) == EP_ERR_NONE) ep_write_report(g, code, phase, peer, expected, seen);
  p::st_relaxed_sys(claim, 0);
}

/* What ends the operation for good; a note makes way for it. */
template <class C>
DEV void ep_stop(const C c, const epGroupArgs &g, uint32_t code, uint32_t phase, uint32_t peer, uint32_t expected,
                 uint32_t seen) {
  uint32_t *claim = &ep_mask_state(c, g)->noting, tries = 0;
  p::st_relaxed_sys(&ep_state(g)->aborted, 1);
  while (p::atomic_cas(claim, 0, 1) != 0 && tries++ < 1000) p::nanosleep(32);
  if (p::ld_relaxed_sys(&g.error->code) - 1 >= EP_ERR_MASKED - 1) ep_write_report(g, code, phase, peer, expected, seen);
  p::st_relaxed_sys(claim, 0);
}

/* Masks `peer`, and lets it know. */
template <class C>
DEV void ep_mask_out(const C c, const epGroupArgs &g, uint32_t code, uint32_t phase, uint32_t peer, uint32_t expected,
                     uint32_t seen) {
  uint8_t *window = ep_mask_home(c, g, peer);
  if (p::atomic_cas(ep_masked_word(c, g, peer), 0, 1) != 0) return;
  if (code != EP_ERR_NONE) ep_note(c, g, code, phase, peer, expected, seen);
  if (window)
    p::st_relaxed_sys((uint32_t *)(window + ep_mask_window(c, g).told) + g.rank,
                      p::ld_relaxed_sys(&ep_mask_state(c, g)->epoch) + 1);
  if (c.scaleUp && peer % c.scaleUp == g.rank % c.scaleUp && ep_is_far(c, g, peer))
    ep_rail_says(c, g, EP_RAIL_TOLD, peer, p::ld_relaxed_sys(&ep_mask_state(c, g)->epoch) + 1);
}

/* What came of `source` by the rank that brings it: it may bring that there is nothing. */
template <class C>
DEV bool ep_brought(const C c, const epGroupArgs &g, bool came, bool lost, uint32_t phase, uint32_t source,
                    uint32_t expected) {
  if (!ep_is_far(c, g, source)) return came;
  if (came && lost) ep_mask_out(c, g, EP_ERR_MASKED, phase, source, expected, expected - 1);
  return came && !lost && !ep_masked(c, g, source);
}

/* This rank lives, and waits. */
template <class C> DEV void ep_beat(const C c, const epGroupArgs &g, uint64_t now) {
  uint32_t *last = &ep_mask_state(c, g)->beatSlice;
  uint32_t slice = (uint32_t)(now / (g.timeoutNs / 16 + 1)), before = p::ld_relaxed_sys(last);
  if (slice == before || p::atomic_cas(last, before, slice) != before) return;
  for (uint32_t r = 0; r < c.ranks; r++) {
    uint8_t *window = ep_mask_home(c, g, r);
    if (r != g.rank && window && !ep_masked(c, g, r))
      p::st_relaxed_sys((uint32_t *)(window + ep_mask_window(c, g).beats) + g.rank, slice);
  }
  for (uint32_t r = c.scaleUp ? g.rank % c.scaleUp : c.ranks; r < c.ranks; r += c.scaleUp)
    if (r != g.rank && !ep_masked(c, g, r)) ep_rail_says(c, g, EP_RAIL_BEAT, r, 1);
}

/* The peer has masked this rank, which masks it in turn. */
template <class C>
DEV bool ep_masked_by(const C c, const epGroupArgs &g, uint32_t phase, uint32_t peer, uint32_t expected,
                      uint32_t seen) {
  const uint32_t *words = (const uint32_t *)(ep_mask_home(c, g, g.rank) + ep_mask_window(c, g).told);
  uint32_t told =
      ep_is_far(c, g, peer) ? (uint32_t)ep_rail_hears(c, g, EP_RAIL_TOLD, peer) : p::ld_relaxed_sys(words + peer);
  if (told <= p::ld_relaxed_sys(&ep_mask_state(c, g)->epoch)) return false;
  ep_mask_out(c, g, EP_ERR_MASKED_BY, phase, peer, expected, seen);
  return true;
}

struct epPatience {
  uint64_t start, lifeAt; /* lifeAt: when the peer was last seen to live, 0: not yet */
  uint64_t before;        /* how long the block has been in the operation, as far as it shortens the wait */
  uint32_t life;
};

/* Several domains: a block waits for its rail after it has waited for its domain, or the other way round. Where somebody is missing on both
 * sides, the second wait need not last as long as the first: 3/8 of the timeout at least. The word behind the verdict holds when the block began. */
DEV uint32_t ep_began() { return p::smem_base() + 8; }
template <class C> DEV void ep_block_begins(const C c) {
  if (!c.mask) return;
  if (p::tid() == 0) p::sts<uint64_t>(ep_began(), p::globaltimer());
  p::sync_threads();
}
template <class C> DEV void ep_wait_begins(const C c, const epGroupArgs &g, epPatience &w) {
  w.start = p::globaltimer();
  if (!c.scaleUp) return;
  uint64_t before = w.start - p::lds<uint64_t>(ep_began()), most = g.timeoutNs / 8 * 5;
  w.before = before < most ? before : most;
}

/* The sixteenth round of a wait with masks: true when the waiter must give up. Of its own blocks a rank waits four times as long: they may
 * be waiting for a peer. */
template <class C>
DEV_APART bool ep_peer_gives_up(const C c, const epGroupArgs &g, epPatience &w, uint32_t round, uint32_t phase,
                                uint32_t peer, uint32_t expected, uint32_t seen) {
  if (p::ld_relaxed_sys(&ep_state(g)->aborted)) return true;
  if ((round & 1023) == 1023 && p::ld_relaxed_sys(g.abortWord)) {
    ep_stop(c, g, EP_ERR_ABORT, phase, peer, expected, seen);
    return true;
  }
  uint64_t now = p::globaltimer(), waited = now - w.start + w.before, most = g.timeoutNs;
  if (peer == g.rank) {
    if (waited / 4 <= most) return false;
    ep_stop(c, g, EP_ERR_TIMEOUT, phase, peer, expected, seen);
    return true;
  }
  if (ep_masked(c, g, peer)) return true;
  const uint8_t *mine = ep_mask_home(c, g, g.rank);
  epMaskWindow words = ep_mask_window(c, g);
  if (ep_masked_by(c, g, phase, peer, expected, seen)) return true;
  uint32_t life = ep_is_far(c, g, peer) ? (uint32_t)ep_rail_hears(c, g, EP_RAIL_BEAT, peer)
                                        : p::ld_relaxed_sys((const uint32_t *)(mine + words.beats) + peer);
  if (round > 15 && life != w.life) w.lifeAt = now;
  w.life = life;
  if (waited <= most / 16) return false;
  ep_beat(c, g, now);
  bool lives = w.lifeAt != 0 && now - w.lifeAt <= most / 2;
  if (waited <= most || (lives && waited - most <= most / 8 * 3)) return false;
  ep_mask_out(c, g, EP_ERR_MASKED, phase, peer, expected, seen);
  return true;
}

template <class C>
DEV bool ep_peer_give_up(const C c, const epGroupArgs &g, epPatience &w, uint32_t round, uint32_t phase, uint32_t peer,
                         uint32_t expected, uint32_t seen) {
  if (round >= 16) p::nanosleep(32);
  return (round & 15) == 15 && ep_peer_gives_up(c, g, w, round, phase, peer, expected, seen);
}

/* ep_wait_flag of group.h, of a word that `peer` writes. False: there is none from it; ep_stopped says why. */
template <class C>
DEV bool ep_await_flag(const C c, const epGroupArgs &g, const uint32_t *flag, uint32_t want, uint32_t phase,
                       uint32_t peer, uint32_t *seen) {
  if (!c.mask) return ep_wait_flag(g, flag, want, phase, peer, seen);
  bool masked = peer != g.rank && ep_masked(c, g, peer);
  epPatience w = {};
  *seen = p::ld_acquire_sys(flag);
  if (masked) return false;
  if (ep_reached(*seen, want)) return true;
  ep_wait_begins(c, g, w);
  for (uint32_t round = 0;; round++) {
    *seen = p::ld_acquire_sys(flag);
    if (ep_reached(*seen, want)) {
      ep_profile_waited(g, w.start, phase, peer);
      return true;
    }
    if (ep_peer_give_up(c, g, w, round, phase, peer, want, *seen)) return false;
  }
}

template <class C>
DEV bool ep_await_flag(const C c, const epGroupArgs &g, const uint32_t *flag, uint32_t want, uint32_t phase,
                       uint32_t peer) {
  uint32_t seen;
  return ep_await_flag(c, g, flag, want, phase, peer, &seen);
}

/* ep_wait_word of group.h, the same way. gone(): the peer has said that there will be none. */
template <class C, class F>
DEV bool ep_await_word(const C c, const epGroupArgs &g, const uint64_t *word, uint32_t want, uint32_t phase,
                       uint32_t peer, uint32_t *value, F gone) {
  if (!c.mask) return ep_wait_word(g, word, want, phase, peer, value);
  epPatience w = {};
  if (peer != g.rank && ep_masked(c, g, peer)) return false;
  for (uint32_t round = 0;; round++) {
    uint64_t v = p::ld_relaxed_sys(word);
    *value = (uint32_t)v;
    if ((uint32_t)(v >> 32) == want) {
      if (round) ep_profile_waited(g, w.start, phase, peer);
      return true;
    }
    if (gone()) return false;
    if (round == 0) ep_wait_begins(c, g, w);
    if (ep_peer_give_up(c, g, w, round, phase, peer, want, (uint32_t)(v >> 32))) return false;
  }
}

template <class C>
DEV bool ep_await_word(const C c, const epGroupArgs &g, const uint64_t *word, uint32_t want, uint32_t phase,
                       uint32_t peer, uint32_t *value) {
  return ep_await_word(c, g, word, want, phase, peer, value, []() { return false; });
}

template <class C>
DEV bool ep_warp_await_flag(const C c, const epGroupArgs &g, const uint32_t *flag, uint32_t want, uint32_t phase,
                            uint32_t peer) {
  if (!c.mask) return ep_warp_wait_flag(g, flag, want, phase, peer);
  bool ok = true;
  if (p::lane() == 0) ok = ep_await_flag(c, g, flag, want, phase, peer);
  ok = p::shfl(p::FULL, ok, 0);
  p::sync_warp();
  return ok;
}

/* A record of an epoch that is over leads to ranks that may keep another of it: nothing moves along it, and the host is told. */
template <class C> DEV bool ep_record_current(const C c, const epGroupArgs &g, const epRecordHeader *h) {
  if (!c.mask) return true;
  uint32_t epoch = p::ld_relaxed_sys(&ep_mask_state(c, g)->epoch), made = p::ldg<uint32_t>(&h->epoch);
  if (made == epoch) return true;
  if (p::bid() == 0 && p::tid() == 0) ep_note(c, g, EP_ERR_STALE_RECORD, EP_PHASE_NONE, g.rank, epoch, made);
  return false;
}

#endif
