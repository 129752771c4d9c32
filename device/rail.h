/* What hybrid kernels share: who is where, waits for signals and tails, credits before staging is written, puts of rows with
 * their tails, and the end of an operation. Rows are moved by plain loads and stores of 16 bytes. */
#ifndef EP_DEVICE_RAIL_H_
#define EP_DEVICE_RAIL_H_

#include "rail_mask.h"

/* Where this rank is. */
struct epPlace {
  uint32_t rank, domains, ups, domain, up; /* U; o and u */
  uint32_t gen;                            /* with `ways`: of the operation */
  const uint32_t *ways; /* null: this operation and all before it on the slot use the group's contexts */
};

template <class C> DEV epPlace ep_place(const C c, const epGroupArgs &g) {
  epPlace w;
  w.rank = g.rank;
  w.ups = c.scaleUp;
  w.domains = c.ranks / c.scaleUp;
  w.domain = g.rank / c.scaleUp;
  w.up = g.rank % c.scaleUp;
  w.gen = 0;
  w.ways = nullptr;
  return w;
}

DEV uint32_t *ep_ways(const epGroupArgs &g, const epHybridGroup &h) {
  uint32_t slot = (uint32_t)(g.scratchLayout.state / EP_SECTION_ALIGN);
  return (uint32_t *)(g.scratch + h.layout.ways + slot * epWaysBytes(h.layout.groupContexts));
}

/* For who reads tails. */
template <class C> DEV epPlace ep_place(const C c, const epGroupArgs &g, const epHybridGroup &h, uint32_t gen) {
  epPlace w = ep_place(c, g);
  uint32_t *ways = ep_ways(g, h);
  w.gen = gen;
  if (h.layout.contexts != h.layout.groupContexts || p::ldg<uint32_t>(ways)) w.ways = ways;
  return w;
}

/* Waits until `read`, an acquire, has come to `want` in the given bits. */
template <class F>
DEV bool ep_wait_value(const epGroupArgs &g, F read, uint64_t want, uint32_t bits, uint32_t phase, uint32_t peer) {
  uint64_t start = 0;
  for (uint32_t round = 0;; round++) {
    uint64_t seen = read();
    if (ep_reached(seen, want, bits)) {
      if (round) ep_profile_waited(g, start, phase, peer);
      return true;
    }
    if (round == 0) start = p::globaltimer();
    if (ep_give_up(g, start, round, phase, peer, ep_told(want - 1, bits) + 1, ep_told(seen, bits))) return false;
  }
}

DEV bool ep_wait_signal(const epGroupArgs &g, const epHybridGroup &h, uint32_t context, uint32_t signal, uint64_t want,
                        uint32_t bits, uint32_t phase, uint32_t peer) {
  return ep_wait_value(
      g, [&] { return p::gin_read(h.gin, context, signal); }, want, bits, phase, peer);
}

/* The context of a channel's puts and signals; all others go by context 0. */
DEV uint32_t ep_context(const epHybridGroup &h, uint32_t channel) { return channel % h.layout.contexts; }

/* What a channel's tails were told in other contexts than this operation's: all of each operation that went another way. */
DEV uint64_t ep_told_elsewhere(const epHybridGroup &h, const epPlace &w, uint32_t channel) {
  uint32_t all = h.layout.groupContexts, usual = w.gen - 1, here = ep_context(h, channel), elsewhere = 0;
  for (uint32_t n = 1; n < all; n++) {
    uint32_t by = p::ldg<uint32_t>(w.ways + n);
    usual -= by;
    if (channel % n != here) elsewhere += by;
  }
  if (channel % all != here) elsewhere += usual;
  return (uint64_t)elsewhere << EP_TAIL_BITS;
}

/* The tail of what this rank gets from domain o by a channel. Signals belong to a context, so where operations differ in theirs a tail
 * has grown in several. */
DEV uint64_t ep_tail(const epHybridGroup &h, const epPlace &w, uint32_t o, uint32_t channel) {
  uint64_t told = p::gin_read(h.gin, ep_context(h, channel), epSignalRows(w.domains, h.layout.channels, o, channel));
  return w.ways ? told + ep_told_elsewhere(h, w, channel) : told;
}
/* False: gave up; with masks, perhaps on this rail alone (ep_stopped). */
template <class C>
DEV bool ep_wait_tail(const C c, const epGroupArgs &g, const epHybridGroup &h, const epPlace &w, uint32_t o,
                      uint32_t channel, uint64_t want, uint32_t phase) {
  auto read = [&] { return ep_tail(h, w, o, channel); };
  if (c.mask)
    return ep_await_value(
        c, g, read, [&](uint64_t seen) { return ep_reached(seen, want, EP_TAIL_ROLL); }, want, EP_TAIL_ROLL, phase,
        o * w.ups + w.up);
  return ep_wait_value(g, read, want, EP_TAIL_ROLL, phase, o * w.ups + w.up);
}

/* Whole warp: what was put by the context may be written again. */
template <class C> DEV bool ep_flush(const C c, const epGroupArgs &g, const epHybridGroup &h, uint32_t context) {
  uint64_t start = p::globaltimer();
  return p::gin_flush(h.gin, context, [&](uint32_t round) {
    return c.mask ? ep_network_gives_up(c, g, start, round)
                  : ep_give_up(g, start, round, EP_PHASE_NETWORK, g.rank, 1, 0);
  });
}

/* Whole block: for every other domain, this rank's signal from there has come to `want`. */
template <class F>
DEV bool ep_wait_rails(uint32_t threads, const epGroupArgs &g, const epHybridGroup &h, const epPlace &w, uint64_t want,
                       uint32_t phase, F signalOf) {
  bool ok = true;
  for (uint32_t o = p::tid(); o < w.domains && ok; o += threads)
    if (o != w.domain) ok = ep_wait_signal(g, h, 0, signalOf(o), want, EP_GENERATION_ROLL, phase, o * w.ups + w.up);
  return ep_block_agrees(ok);
}

/* A rail's greeting is the upper half of a signal whose lower half counts operations: to be added in operation gen, as the one before was its kind,
 * which this rank has kept. With masks only operations are counted. */
template <class C> DEV uint64_t ep_rail_greeting(const C c, const epGroupArgs &g, uint32_t gen, uint32_t kind) {
  if (c.mask) return 1;
  uint32_t before = (uint32_t)p::ld_relaxed_sys(ep_hello(g, ep_window(g, g.rank), g.rank, gen - 1));
  return (uint64_t)(kind - before) << 32 | 1;
}
/* One thread: waits for it. False: gave up, or the rail is in another operation: *its. */
template <class C>
DEV bool ep_rail_agrees(const C c, const epGroupArgs &g, const epHybridGroup &h, uint32_t signal, uint32_t gen,
                        uint32_t kind, uint32_t phase, uint32_t peer, uint32_t *its) {
  uint64_t seen = 0;
  if (!ep_wait_value(
          g, [&] { return seen = p::gin_read(h.gin, 0, signal); }, c.bug == EP_BUG_GIN_SLOT_EARLY ? gen - 1 : gen,
          EP_GENERATION_ROLL, phase, peer))
    return false;
  if ((uint32_t)seen != gen) /* it may be ahead already, when another block has seen this one */
    return true;
  *its = (uint32_t)(seen >> 32);
  return ep_kind_agrees(c, g, gen, kind, (uint32_t)(seen >> 32), phase, peer);
}

/* One thread: what operation gen is, to the other ranks of the domain. */
template <class C> DEV void ep_domain_greet(const C c, const epGroupArgs &g, uint32_t gen, uint32_t kind) {
  uint32_t first = g.rank / c.scaleUp * c.scaleUp;
  for (uint32_t u = 0; u < c.scaleUp; u++)
    if (first + u != g.rank)
      p::st_relaxed_sys(ep_hello(g, ep_window(g, first + u), g.rank, gen), (uint64_t)gen << 32 | kind);
}

/* The last warp of the first block: when it has sent, or before it receives, as the first blocks of all ranks greet before they wait for
 * anything but credits. Not in a dispatch's sending part, which waits for nothing else either. */
template <class C>
DEV void ep_domain_greeted(const C c, const epGroupArgs &g, uint32_t gen, uint32_t kind, uint32_t phase) {
  uint32_t first = g.rank / c.scaleUp * c.scaleUp;
  if (!c.mask && p::bid() == 0 && p::warp() == c.threads / 32 - 1)
    ep_greeted(c, g, first, first + c.scaleUp, gen, kind, phase);
}

/* Whole block: the ranks of the domain have read what operation gen - 1 and earlier left in my staging, and I in mine. The
 * first block passes it on, with this operation's greeting: then my rail may write to me again. */
template <class C>
DEV bool ep_domain_credits(const C c, const epGroupArgs &g, const epHybridGroup &h, uint32_t gen, uint32_t kind,
                           uint32_t phase) {
  epPlace w = ep_place(c, g);
  const uint32_t *credits = (const uint32_t *)(ep_window(g, g.rank) + g.window.credits) + w.domain * w.ups;
  bool ok = true;
  for (uint32_t u = p::tid(); u < w.ups && ok && c.bug != EP_BUG_NO_CREDIT; u += c.threads)
    if (u != w.up)
      ok = ep_take(c, g, ep_await_flag(c, g, credits + u, gen - 1, phase, w.domain * w.ups + u), ep_left_near(c, u));
  if (!ep_block_agrees(ok)) return false;
  if (p::bid() != 0) return true;
  if (p::tid() == 0) p::st_relaxed_sys(ep_hello(g, ep_window(g, g.rank), g.rank, gen), (uint64_t)gen << 32 | kind);
  uint64_t add = ep_rail_greeting(c, g, gen, kind);
  for (uint32_t o = p::tid(); o < w.domains; o += c.threads)
    if (o != w.domain && !ep_rail_masked(c, g, o)) {
      ep_rail_sends(c, g, h, o, 2, 1);
      p::gin_signal_weak(h.gin, 0, o, epSignalCredit(w.domains, w.domain), add);
    }
  return true;
}

/* Whole block: my rail may be written to, and does what I do. The first block tells the domain what that is, or who does something
 * else. */
template <class C>
DEV bool ep_rail_credits(const C c, const epGroupArgs &g, const epHybridGroup &h, uint32_t gen, uint32_t kind,
                         uint32_t phase) {
  epPlace w = ep_place(c, g);
  if (c.mask)
    return ep_await_rails(
        c, g, h.gin, gen, phase, [&](uint32_t o) { return epSignalCredit(w.domains, o); },
        [&](uint32_t o, bool came) { ep_take(c, g, came, ep_left_rail(c, o)); });
  bool ok = true;
  for (uint32_t o = p::tid(); o < w.domains && ok; o += c.threads) {
    uint32_t its = kind, peer = o * w.ups + w.up;
    ok = o == w.domain || ep_rail_agrees(c, g, h, epSignalCredit(w.domains, o), gen, kind, phase, peer, &its);
    if (its != kind && !ok && p::bid() == 0) ep_domain_greet(c, g, gen, epKindElsewhere(kind, its, peer));
  }
  ok = ep_block_agrees(ok);
  if (ok && p::bid() == 0 && p::tid() == 0) ep_domain_greet(c, g, gen, kind);
  return ok;
}

/* ---- Places of rows ----------------------------------------------------------------------------------------------- */

/* Rows of `rail` and `send` lie as close as those of the operation can, so that neighbours go in one put. */
template <class C> DEV uint32_t ep_rail_stride(const C c) {
  epConfig plain = ep_plain_config(c);
  return epRowBufferBytes(&plain);
}
/* Window offsets of row t from (to) domain o. */
template <class C>
DEV uint64_t ep_rail_row(const C c, const epGroupArgs &g, uint64_t section, uint32_t owner, uint32_t o, uint32_t t) {
  return section + ((uint64_t)epRegionOf(owner, o) * g.maxTokens + t) * ep_rail_stride(c);
}
/* First row of `stage` that rank `writer` of my domain stores into at rank `owner` of it; with masks all it stores. Ranks by index. */
template <class C>
DEV uint64_t ep_near_rows(const C c, const epGroupArgs &g, const epPlace &w, uint32_t owner, uint32_t writer) {
  return (uint64_t)epRegionOf(owner, writer) * (c.mask ? w.domains * g.stageRows : g.maxTokens);
}
/* Row `index` of the stage of rank `owner` of my domain, and of the flags of combine's rows. */
DEV uint8_t *ep_stage_at(const epGroupArgs &g, const epPlace &w, uint32_t owner, uint64_t index) {
  return ep_window(g, w.domain * w.ups + owner) + g.window.stage + index * g.window.stageStride;
}
DEV uint32_t *ep_sum_flag_at(const epGroupArgs &g, const epHybridGroup &h, const epPlace &w, uint32_t owner,
                             uint64_t index) {
  return (uint32_t *)(ep_window(g, w.domain * w.ups + owner) + h.layout.sumFlags) + index;
}
/* The row of token t that rank `writer` of my domain stages at rank `owner` of it, and the flag of its chunk i. Ranks by
 * index. */
template <class C>
DEV uint8_t *ep_near_row(const C c, const epGroupArgs &g, const epPlace &w, uint32_t owner, uint32_t writer,
                         uint32_t t) {
  return ep_stage_at(g, w, owner, ep_near_rows(c, g, w, owner, writer) + t);
}
DEV uint32_t *ep_near_flag(const epGroupArgs &g, const epPlace &w, uint32_t owner, uint32_t writer, uint32_t i) {
  return (uint32_t *)(ep_window(g, w.domain * w.ups + owner) + g.window.stageFlags) +
         (uint64_t)writer * g.window.chunks + i;
}
/* The partial sum in place `place` of token t of the rank of domain o that rank `owner` of my domain stands for, and its flag. */
template <class C>
DEV uint64_t ep_sum_index(const C c, const epGroupArgs &g, const epPlace &w, uint32_t owner, uint32_t writer,
                          uint32_t o, uint32_t place, uint32_t t) {
  if (c.mask) return ep_near_rows(c, g, w, owner, writer) + (uint64_t)o * g.maxTokens + t;
  return ((uint64_t)o * epPlaces(w.ups, g.windowTopk) + place) * g.maxTokens + t;
}
template <class C>
DEV uint8_t *ep_sum_row(const C c, const epGroupArgs &g, const epPlace &w, uint32_t owner, uint32_t writer, uint32_t o,
                        uint32_t place, uint32_t t) {
  return ep_stage_at(g, w, owner, ep_sum_index(c, g, w, owner, writer, o, place, t));
}
template <class C>
DEV uint32_t *ep_sum_flag(const C c, const epGroupArgs &g, const epHybridGroup &h, const epPlace &w, uint32_t owner,
                          uint32_t writer, uint32_t o, uint32_t place, uint32_t t) {
  return ep_sum_flag_at(g, h, w, owner, ep_sum_index(c, g, w, owner, writer, o, place, t));
}
/* How far rank `up` of my domain has got what its rail's rank in domain o sends by a channel; in the window of `owner`. */
DEV uint64_t *ep_tail_word(const epGroupArgs &g, const epHybridGroup &h, const epPlace &w, uint32_t owner, uint32_t up,
                           uint32_t o, uint32_t channel) {
  return (uint64_t *)(ep_window(g, w.domain * w.ups + owner) + h.layout.railTails) +
         ((uint64_t)up * w.domains + o) * h.layout.channels + channel;
}

/* ---- Rows ------------------------------------------------------------------------------------------------------------ */

/* A warp moves EP_PART bytes of a row at a time: EP_WIDE vectors a lane, loaded together, because each load alone is a trip to
 * memory. */
#define EP_WIDE 4
#define EP_PART (512u * EP_WIDE)
struct epPart {
  uint4 v[EP_WIDE];
};

/* A load of what may be written meanwhile, if `any` (hybrid_missing.h). */
template <class T> DEV T ep_load(const void *at, bool any) { return any ? p::ldg_any<T>(at) : p::ldg<T>(at); }

/* The lane's vectors from byte `at` on; zeros past the end. */
DEV epPart ep_part_load(const uint8_t *row, uint32_t at, uint32_t bytes, bool any = false) {
  epPart x;
#pragma unroll
  for (uint32_t u = 0; u < EP_WIDE; u++)
    x.v[u] = at + 512 * u < bytes ? ep_load<uint4>(row + at + 512 * u, any) : ep_zero4();
  return x;
}
DEV void ep_part_store(uint8_t *row, uint32_t at, uint32_t bytes, const epPart &x) {
#pragma unroll
  for (uint32_t u = 0; u < EP_WIDE; u++)
    if (at + 512 * u < bytes) p::stg<uint4>(row + at + 512 * u, x.v[u]);
}

/* ---- Puts and tails ------------------------------------------------------------------------------------------------ */

/* Rows of a batch: what a tail counts, and what at most goes in one put. Whole chunks. */
template <class C> DEV uint32_t ep_batch_rows(const C c, const epHybridGroup &h) {
  uint32_t chunk = epChunkRows(c.rowBytes);
  return h.layout.putRows < chunk ? chunk : h.layout.putRows;
}

/* A warp that serves a channel. For each domain shared memory holds the rows that wait to be put, which lie one
 * behind the other here and there, and how many of the channel's batches the tail has told. None waits only when all that
 * was put has been told. */
struct epChannel {
  uint32_t channel, context, runs;
};
#define EP_RUN_TO 8u
#define EP_RUN_BYTES 16u
#define EP_RUN_TOLD 20u

DEV epChannel ep_channel(const epHybridGroup &h, const epPlace &w, uint32_t channel) {
  epChannel ch;
  ch.channel = channel;
  ch.context = ep_context(h, channel);
  ch.runs = p::smem_base() + EP_VERDICT_BYTES + EP_RUN_SMEM * p::warp() * w.domains;
  for (uint32_t o = p::lane(); o < w.domains; o += 32) {
    p::sts<uint32_t>(ch.runs + EP_RUN_SMEM * o + EP_RUN_BYTES, 0);
    p::sts<uint32_t>(ch.runs + EP_RUN_SMEM * o + EP_RUN_TOLD, 0);
  }
  p::sync_warp();
  return ch;
}

/* Whole warp, after it wrote the row at window offset `from`: lane 0 puts what waited before it, unless they are neighbours. */
template <class C>
DEV void ep_channel_put(const C c, const epHybridGroup &h, const epChannel &ch, uint32_t o, uint64_t to, uint64_t from,
                        uint32_t bytes) {
  uint32_t run = ch.runs + EP_RUN_SMEM * o;
  if (p::lane() != 0) return;
  uint32_t waiting = p::lds<uint32_t>(run + EP_RUN_BYTES), next = waiting - bytes + ep_rail_stride(c);
  if (waiting) {
    uint64_t first = p::lds<uint64_t>(run), at = p::lds<uint64_t>(run + EP_RUN_TO);
    if (first + next == from && at + next == to) {
      p::sts<uint32_t>(run + EP_RUN_BYTES, next + bytes);
      return;
    }
    p::gin_put(h.gin, ch.context, o, at, first, waiting);
  }
  p::sts<uint64_t>(run, from);
  p::sts<uint64_t>(run + EP_RUN_TO, to);
  p::sts<uint32_t>(run + EP_RUN_BYTES, bytes);
}

/* One lane, with the warp's rows visible to it: the channel's first `batches` batches for domain o go on their way, and if any
 * row of the last ones did, the domain is told: by the last put's own signal. `all`: it is told in any case. */
template <class C>
DEV void ep_channel_tell_one(const C c, const epHybridGroup &h, const epPlace &w, const epChannel &ch, uint32_t o,
                             uint32_t batches, bool all) {
  uint32_t run = ch.runs + EP_RUN_SMEM * o, bytes = p::lds<uint32_t>(run + EP_RUN_BYTES);
  uint32_t told = p::lds<uint32_t>(run + EP_RUN_TOLD), now = batches + (c.bug == EP_BUG_GIN_WRONG_TAIL && !all);
  uint32_t signal = epSignalRows(w.domains, h.layout.channels, w.domain, ch.channel);
  uint64_t from = bytes ? p::lds<uint64_t>(run) : 0, to = bytes ? p::lds<uint64_t>(run + EP_RUN_TO) : 0;
  if (!bytes && (!all || now <= told)) return;
  if (now <= told)
    p::gin_put(h.gin, ch.context, o, to, from, bytes);
  else if (bytes && c.bug == EP_BUG_GIN_WEAK)
    p::gin_put_signal_weak(h.gin, ch.context, o, to, from, bytes, signal, now - told);
  else if (bytes)
    p::gin_put_signal(h.gin, ch.context, o, to, from, bytes, signal, now - told);
  else
    p::gin_signal(h.gin, ch.context, o, signal, now - told);
  p::sts<uint32_t>(run + EP_RUN_BYTES, 0);
  p::sts<uint32_t>(run + EP_RUN_TOLD, now > told ? now : told);
}

/* Whole warp: the same for every domain. */
template <class C>
DEV void ep_channel_tell(const C c, const epHybridGroup &h, const epPlace &w, const epChannel &ch, uint32_t batches,
                         bool all) {
  p::sync_warp();
  for (uint32_t o = p::lane(); o < w.domains; o += 32)
    if (o != w.domain && !ep_left(c, ep_left_rail(c, o))) ep_channel_tell_one(c, h, w, ch, o, batches, all);
  p::sync_warp();
}

/* What a tail is told with batch `batch`, of `rows`: with the channel's last one of `tokens`, all that it will ever count. */
DEV bool ep_last_batch(const epHybridGroup &h, uint32_t batch, uint32_t rows, uint32_t tokens) {
  return (uint64_t)(batch + h.layout.channels) * rows >= tokens;
}
DEV uint32_t ep_told_with(const epHybridGroup &h, uint32_t batch, bool last) {
  return last ? 1u << EP_TAIL_BITS : batch / h.layout.channels + 1;
}

/* Whole warp: the operation's tails are complete, and what was put from may be written again. */
template <class C>
DEV void ep_channel_end(const C c, const epGroupArgs &g, const epHybridGroup &h, const epPlace &w,
                        const epChannel &ch) {
  ep_channel_tell(c, h, w, ch, 1u << EP_TAIL_BITS, true);
  for (uint32_t o = p::lane(); c.mask && o < w.domains; o += 32)
    if (o != w.domain && !ep_left(c, ep_left_rail(c, o))) ep_rail_sends(c, g, h, o, 3 + ch.channel, 1u << EP_TAIL_BITS);
  if (c.bug != EP_BUG_GIN_NO_FLUSH) ep_flush(c, g, h, ch.context);
}

/* Rows of the busiest source, from a record: whole warp, same answer in all lanes. */
template <class C> DEV uint32_t ep_most_received(const C c, const uint32_t *recvCount) {
  uint32_t most = 0;
  for (uint32_t s = p::lane(); s < c.ranks; s += 32) {
    uint32_t n = p::ldg<uint32_t>(recvCount + s);
    most = n > most ? n : most;
  }
  return ep_warp_max(most);
}

/* ---- The end ------------------------------------------------------------------------------------------------------ */

/* `aborted` stays: the group is lost, and what was queued behind an operation that gave up need not wait for a timeout of its own.
 * Every block ends here; the last one returns the domain's credits and moves the generation, unless the receiving part is still to come. */
template <class C>
DEV void ep_hybrid_end(const C c, const epGroupArgs &g, const epHybridGroup &h, uint32_t gen, uint32_t blocks) {
  epGroupState *state = ep_state(g);
  epPlace w = ep_place(c, g);
  p::sync_threads();
  if (p::tid() != 0 || p::atomic_add_acq_rel_gpu(&state->stageDone, 1) != blocks - 1) return;
  p::stg<uint32_t>(&state->stageDone, 0);
  if (c.part == EP_PART_SEND) return;
  for (uint32_t u = 0; u < w.ups; u++)
    if (u != w.up && !ep_masked(c, g, w.domain * w.ups + u))
      p::st_release_sys((uint32_t *)(ep_window(g, w.domain * w.ups + u) + g.window.credits) + g.rank, gen);
  if (h.layout.contexts != h.layout.groupContexts) {
    uint32_t *ways = ep_ways(g, h), *mine = ways + h.layout.contexts;
    p::stg<uint32_t>(ways, p::ldg<uint32_t>(ways) + 1);
    p::stg<uint32_t>(mine, p::ldg<uint32_t>(mine) + 1);
  }
  p::stg<uint32_t>(&state->stageGen, gen);
}

#endif
