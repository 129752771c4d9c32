/* Masks across scale-up domains (mask.h has those of one). A rank waits for ranks that it reaches alone: those of its domain, and those of its
 * rail. What comes from all others comes by the rank of their index in this domain, so it is that one who gives up on its rail, once for the
 * whole domain, and says so in the place where the domain looks: a lost flag, a lost tail. Who reads that a rank is lost masks it.
 *
 * Signs of life, masks told and the last goodbye go along the rail as signals of the group's first network, whichever slot an operation
 * is on. */
#ifndef EP_DEVICE_RAIL_MASK_H_
#define EP_DEVICE_RAIL_MASK_H_

#include "gin.h"
#include "rows.h"

template <class C> DEV epRailMasks ep_rail_masks(const C c, const epGroupArgs &g) {
  return epRailMasksOf(ep_mask_scratch(c, g).bytes, c.ranks / c.scaleUp, 0);
}
template <class C> DEV epRailState *ep_rail_state(const C c, const epGroupArgs &g) {
  return (epRailState *)(g.scratch + ep_rail_masks(c, g).state);
}
template <class C> DEV epGin ep_first_gin(const C c, const epGroupArgs &g) {
  const epRailState *s = ep_rail_state(c, g);
  epGin gin = {p::ldg<uint64_t>(&s->comm), p::ldg<uint64_t>(&s->window)};
  return gin;
}

template <class C> DEV_APART uint64_t ep_rail_hears(const C c, const epGroupArgs &g, uint32_t kind, uint32_t peer) {
  uint32_t first = p::ldg<uint32_t>(&ep_rail_state(c, g)->signals), o = peer / c.scaleUp;
  return p::gin_read(ep_first_gin(c, g), 0, epRailSignal(first, c.ranks / c.scaleUp, kind, o));
}

/* One thread at a time for each peer and kind: the signal is brought to `value`; of BEAT, one more. */
template <class C>
DEV_APART void ep_rail_says(const C c, const epGroupArgs &g, uint32_t kind, uint32_t peer, uint64_t value) {
  uint32_t domains = c.ranks / c.scaleUp, o = peer / c.scaleUp, first = p::ldg<uint32_t>(&ep_rail_state(c, g)->signals);
  uint64_t *said = (uint64_t *)(g.scratch + ep_rail_masks(c, g).said) + kind * domains + o,
           before = p::ld_relaxed_sys(said);
  if (kind == EP_RAIL_BEAT) value = before + 1;
  if (value == before) return;
  p::st_relaxed_sys(said, value);
  p::gin_signal_weak(ep_first_gin(c, g), 0, o, epRailSignal(first, domains, kind, g.rank / c.scaleUp), value - before);
}
/* What a signal there has been brought to. */
template <class C> DEV_APART uint64_t ep_rail_said(const C c, const epGroupArgs &g, uint32_t kind, uint32_t peer) {
  return p::ld_relaxed_sys((const uint64_t *)(g.scratch + ep_rail_masks(c, g).said) + kind * (c.ranks / c.scaleUp) +
                           peer / c.scaleUp);
}

/* With masks: all that was added to signal i (META, REPLY, CREDIT, then a channel's ROWS) of domain o in the slot of the operation, by one thread at a
 * time. */
DEV uint64_t ep_sent_index(uint32_t slot, uint32_t domains, uint32_t channels, uint32_t o, uint32_t i) {
  return ((uint64_t)slot * domains + o) * (3 + channels) + i;
}
template <class C>
DEV uint64_t *ep_sent(const C c, const epGroupArgs &g, const epHybridGroup &h, uint32_t o, uint32_t i) {
  return (uint64_t *)(g.scratch + ep_rail_masks(c, g).sent) +
         ep_sent_index((uint32_t)(g.scratchLayout.state / EP_SECTION_ALIGN), c.ranks / c.scaleUp, h.layout.channels, o,
                       i);
}
template <class C>
DEV void ep_rail_sends(const C c, const epGroupArgs &g, const epHybridGroup &h, uint32_t o, uint32_t i, uint64_t add) {
  if (!c.mask) return;
  uint64_t *sent = ep_sent(c, g, h, o, i);
  p::st_relaxed_sys(sent, p::ld_relaxed_sys(sent) + add);
}
/* What is to be added now, so that all of it is `want`. */
template <class C>
DEV uint64_t ep_rail_owes(const C c, const epGroupArgs &g, const epHybridGroup &h, uint32_t o, uint32_t i,
                          uint64_t want) {
  uint64_t *sent = ep_sent(c, g, h, o, i), before = p::ld_relaxed_sys(sent);
  p::st_relaxed_sys(sent, want);
  return want - before;
}

/* ---- Waits ------------------------------------------------------------------------------------------------------------- */

DEV bool ep_reached(uint64_t value, uint64_t want, uint32_t bits) {
  uint64_t mask = ~0ull >> (64 - bits);
  return ((value - want) & mask) <= mask >> 1;
}

/* What a report says of a tail, as of a generation: operations that are complete, or must be. */
DEV uint32_t ep_told(uint64_t value, uint32_t bits) {
  return (uint32_t)(bits == EP_TAIL_ROLL ? value >> EP_TAIL_BITS : value);
}

/* ep_wait_value of rail.h, with masks, of what `peer` brings: a rank of the domain or of the rail. `done(seen)`: it is there. False: there is none
 * from it; ep_stopped says why. */
template <class C, class F, class G>
DEV bool ep_await_value(const C c, const epGroupArgs &g, F read, G done, uint64_t want, uint32_t bits, uint32_t phase,
                        uint32_t peer) {
  epPatience w = {};
  if (peer != g.rank && ep_masked(c, g, peer)) return false;
  for (uint32_t round = 0;; round++) {
    uint64_t seen = read();
    if (done(seen)) {
      if (round) ep_profile_waited(g, w.start, phase, peer);
      return true;
    }
    if (round == 0) ep_wait_begins(c, g, w);
    if (ep_peer_give_up(c, g, w, round, phase, peer, ep_told(want - 1, bits) + 1, ep_told(seen, bits))) return false;
  }
}

/* Whole block, with masks: for every other domain, whether this rank's signal from there has come to `want`: settle(o, came). False: a wait gave up
 * for good. */
template <class C, class F, class G>
DEV bool ep_await_rails(const C c, const epGroupArgs &g, const epGin &gin, uint64_t want, uint32_t phase, F signalOf,
                        G settle) {
  uint32_t domains = c.ranks / c.scaleUp, mine = g.rank / c.scaleUp;
  bool ok = true;
  for (uint32_t o = p::tid(); o < domains; o += c.threads) {
    if (o == mine) continue;
    uint32_t signal = signalOf(o);
    bool came = ep_await_value(
        c, g, [&] { return p::gin_read(gin, 0, signal); },
        [&](uint64_t seen) { return ep_reached(seen, want, EP_GENERATION_ROLL); }, want, EP_GENERATION_ROLL, phase,
        o * c.scaleUp + g.rank % c.scaleUp);
    settle(o, came);
    ok = ok && (came || !ep_stopped(c, g));
  }
  return ep_block_agrees(ok);
}

/* ---- Who is left out by a block --------------------------------------------------------------------------------------- */

/* Words of shared memory that credits write, before the barrier that ends the wait for them: for a block this says, for the whole operation,
 * where nothing goes. The masks themselves may change meanwhile, between a row and its tail. */
template <class C> DEV uint32_t ep_left_rail(const C c, uint32_t domain) {
  epConfig plain = ep_plain_config(c);
  return p::smem_base() + epLeftOffset(&plain) + 4 * domain;
}
template <class C> DEV uint32_t ep_left_near(const C c, uint32_t up) {
  return ep_left_rail(c, c.ranks / c.scaleUp + up);
}
template <class C> DEV bool ep_left(const C c, uint32_t word) { return c.mask && p::lds<uint32_t>(word) != 0; }
/* A credit came, or did not. False: a wait gave up for good. */
template <class C> DEV bool ep_take(const C c, const epGroupArgs &g, bool came, uint32_t word) {
  if (!c.mask) return came;
  p::sts<uint32_t>(word, !came);
  return came || !ep_stopped(c, g);
}

/* ep_give_up of group.h for the network itself, which no mask gets around. */
template <class C> DEV bool ep_network_gives_up(const C c, const epGroupArgs &g, uint64_t start, uint32_t round) {
  if (round >= 16) p::nanosleep(32);
  if ((round & 15) != 15) return false;
  if (p::ld_relaxed_sys(&ep_state(g)->aborted)) return true;
  bool aborted = (round & 1023) == 1023 && p::ld_relaxed_sys(g.abortWord);
  if (!aborted && p::globaltimer() - start <= g.timeoutNs) return false;
  ep_stop(c, g, aborted ? EP_ERR_ABORT : EP_ERR_TIMEOUT, EP_PHASE_NETWORK, g.rank, 1, 0);
  return true;
}

/* ---- Parts of a sum ---------------------------------------------------------------------------------------------------- */

/* Whole warp: `ok`: what the lane waited for came. With masks, what did not come of one rank, whose lanes are `mates`, leaves the token: *in. False:
 * a wait gave up for good. */
template <class C> DEV bool ep_parts_stay(const C c, const epGroupArgs &g, bool ok, uint32_t mates, bool *in) {
  uint32_t missing = p::ballot(p::FULL, !ok);
  if (!missing) return true;
  if (!c.mask || p::ballot(p::FULL, ep_stopped(c, g))) return false;
  *in = *in && !(missing & mates);
  return true;
}

/* ---- Update ------------------------------------------------------------------------------------------------------------ */

/* Generation of the last update in which domain o's rank of this index took part: its decisions (0), its replies (1). */
template <class C> DEV uint32_t *ep_rail_came(const C c, const epGroupArgs &g, uint32_t what, uint32_t o) {
  return (uint32_t *)(g.scratch + ep_rail_masks(c, g).came) + what * (c.ranks / c.scaleUp) + o;
}
template <class C> DEV bool ep_rail_there(const C c, const epGroupArgs &g, uint32_t what, uint32_t o, uint32_t gen) {
  return !c.mask || p::ld_relaxed_sys(ep_rail_came(c, g, what, o)) == gen;
}
/* Whole block: signals of the update `gen`, and who has sent them. */
template <class C, class F>
DEV bool ep_rails_settle(const C c, const epGroupArgs &g, const epGin &gin, uint32_t what, uint32_t gen, uint32_t phase,
                         F signalOf) {
  return ep_await_rails(c, g, gin, gen, phase, signalOf, [&](uint32_t o, bool came) {
    p::st_relaxed_sys(ep_rail_came(c, g, what, o), came ? gen : gen - 1);
  });
}

/* All blocks of an update: whose decisions have come along the rail, found out by the first block and the same for all. `agrees`, a whole
 * block: those that came can be taken apart. */
template <class C, class F, class G>
DEV bool ep_rails_verdict(const C c, const epGroupArgs &g, const epGin &gin, uint32_t gen, uint32_t phase, F signalOf,
                          G agrees) {
  uint32_t *verdict = &ep_rail_state(c, g)->verdict;
  bool ok = true;
  if (p::bid() == 0 && ep_rails_settle(c, g, gin, 0, gen, phase, signalOf) && agrees() && p::tid() == 0)
    p::st_release_gpu(verdict, gen);
  if (p::tid() == 0) ok = ep_await_flag(c, g, verdict, gen, EP_PHASE_GRID, g.rank);
  return ep_block_agrees(ok);
}

/* ---- Tails --------------------------------------------------------------------------------------------------------------- */

/* A tail that a domain is told, of an operation whose rows come to an end before their time. */
#define EP_TAIL_LOST (1ull << 63)

/* The tail has come to `want` of operation `gen`, or never will. */
DEV bool ep_tail_settled(uint64_t seen, uint64_t want, uint32_t gen) {
  return ep_reached(seen, want, EP_TAIL_ROLL) ||
         ((seen & EP_TAIL_LOST) && ep_reached(seen, epTailOf(gen, 0), EP_TAIL_ROLL));
}

#endif
