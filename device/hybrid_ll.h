/* What low-latency dispatch and combine share across scale-up domains: messages and tails to the rail, greetings, and what ll.h and its kernels
 * leave to overloads for `epLlRail`.
 *
 * A rank puts and signals to its rail alone. Over the network go bare rows, once for each domain, and nothing of them is looked at before the strong signal
 * behind them has come, as the network may deliver a unit in pieces; the rank that gets a row stores it on as units. So inside a domain all is as ever, and
 * what waits there for a unit or a word of another domain's rank gets it from the rank that stands for that.
 *
 * Two halves are enough here, too: operation g puts into the half of g - 2, and a rank ends g - 1 only after its rails' greetings of g - 1, which a rail
 * sends when it has finished g - 2. Whatever was signalled in an operation is waited for in it, so that nothing is on its way when the group goes.
 *
 * Order: block 0 sends its message before it waits for its rails'; blocks that send wait for nothing but words of blocks 0; those that forward for these, here
 * and elsewhere; those that receive for all. So here as well any number of resident blocks is enough. */
#ifndef EP_DEVICE_HYBRID_LL_H_
#define EP_DEVICE_HYBRID_LL_H_

#include "hybrid_ll_layout.h"
#include "ll_mask.h"
#include "rail.h"

struct epLlRail {
  enum { shares = 1 };
  const epHybridGroup &h;
};

/* Of a rail's rank: where what it sent lies, the half of the operation included (so nothing that handles differ in may enter); words of
 * counts, weights, rows. */
template <class C> DEV uint32_t ep_ll_domain_words(const C c) { return epLlDomainWords(c.scaleUp, c.experts, c.ranks); }
template <class C>
DEV uint64_t ep_ll_rail_counts(const C c, const epHybridGroup &h, const epPlace &w, uint32_t gen, uint32_t o) {
  return h.layout.railCounts + 4ull * ((gen & 1) * w.domains + o) * ep_ll_domain_words(c);
}
DEV uint64_t ep_ll_rail_weights(const epGroupArgs &g, const epHybridGroup &h, const epPlace &w, uint32_t gen,
                                uint32_t o) {
  return h.layout.railMeta + 4ull * ((gen & 1) * w.domains + o) * g.maxTokens * g.windowTopk;
}
DEV uint64_t ep_ll_rail_region(const epGroupArgs &g, uint64_t section, uint32_t region, uint32_t t) {
  return section + ((uint64_t)region * g.maxTokens + t) * g.window.stageStride;
}
/* Head of row t from domain o, in the window of the rail's rank in domain `owner`. */
DEV uint64_t ep_ll_rail_row(const epGroupArgs &g, const epHybridGroup &h, const epPlace &w, uint32_t gen,
                            uint32_t owner, uint32_t o, uint32_t t) {
  return ep_ll_rail_region(g, h.layout.rail, (gen & 1) * (w.domains - 1) + epRegionOf(owner, o), t);
}
/* The same where it is sent from, to domain o; dispatch's first region serves all. */
DEV uint64_t ep_ll_send_row(const epGroupArgs &g, const epHybridGroup &h, uint32_t region, uint32_t t) {
  return ep_ll_rail_region(g, h.layout.send, region, t);
}
DEV uint32_t ep_ll_rail_head(const epGroupArgs &g) { return epLlRailHead(g.windowTopk); }

template <class C> DEV epHybridRecord ep_ll_rail_record(const C c, const epGroupArgs &g, const epLlRecordLayout &l) {
  return epHybridRecordOf(l.bytes, c.ranks / c.scaleUp, c.topk, g.maxTokens);
}

/* Chunks of n tokens, and those of them that go by a channel. */
template <class C> DEV uint32_t ep_ll_chunks(const C c, uint32_t n) {
  return (n + epLlChunkTokens(c.topk) - 1) / epLlChunkTokens(c.topk);
}
DEV uint32_t ep_ll_channel_chunks(const epHybridGroup &h, uint32_t chunks, uint32_t channel) {
  return (chunks + h.layout.channels - 1 - channel) / h.layout.channels;
}

/* ---- Signals ------------------------------------------------------------------------------------------------------- */

/* What is to be put. */
struct epLlPut {
  uint64_t to, from;
  uint32_t bytes; /* 0: nothing */
};

/* What domain o's rank was told by its signal ROWS of channel i, or if that is their number by MESSAGE; with masks where re-admission looks. */
template <class C>
DEV uint64_t *ep_ll_told(const C c, const epGroupArgs &g, const epHybridGroup &h, const epPlace &w, uint32_t o,
                         uint32_t i) {
  uint64_t slot = g.scratchLayout.state / EP_SECTION_ALIGN;
  if (c.mask) return ep_sent(c, g, h, o, i == h.layout.channels ? 0 : 3 + i);
  return (uint64_t *)(g.scratch + h.layout.state) + (slot * w.domains + o) * (h.layout.channels + 1) + i;
}

/* A thread: the put, and then the strong signal `signal` of domain o's rank of the rail is to be `want`; `index`: of what was told before. */
template <class C>
DEV void ep_ll_tell(const C c, const epGroupArgs &g, const epHybridGroup &h, const epPlace &w, uint32_t o,
                    uint32_t context, uint32_t signal, uint32_t index, uint64_t want, const epLlPut &put) {
  uint64_t *told = ep_ll_told(c, g, h, w, o, index);
  uint64_t add = want - p::ldg<uint64_t>(told);
  if (c.bug == EP_BUG_GIN_SIGNAL_FIRST) {
    p::gin_signal(h.gin, context, o, signal, add);
    if (put.bytes) p::gin_put(h.gin, context, o, put.to, put.from, put.bytes);
  } else if (put.bytes && c.bug == EP_BUG_GIN_WEAK) {
    p::gin_put_signal_weak(h.gin, context, o, put.to, put.from, put.bytes, signal, add);
  } else if (put.bytes) {
    p::gin_put_signal(h.gin, context, o, put.to, put.from, put.bytes, signal, add);
  } else {
    p::gin_signal(h.gin, context, o, signal, add);
  }
  p::stg<uint64_t>(told, want);
}

template <class C>
DEV void ep_ll_put_message(const C c, const epGroupArgs &g, const epHybridGroup &h, const epPlace &w, uint32_t o,
                           uint32_t gen, const epLlPut &put) {
  ep_ll_tell(c, g, h, w, o, 0, epLlSignalMessage(w.domain), h.layout.channels, gen, put);
}

#define EP_LL_PUT_GAP 256u /* bytes between two rows that may travel for nothing: a put costs more */

/* A thread: the rows of chunk i whose bits are in `rows`, `bytes` of each from byte `at` on, to domain o; and its tail. The first is at `from` here. */
template <class C>
DEV void ep_ll_put_chunk(const C c, const epGroupArgs &g, const epHybridGroup &h, const epPlace &w, uint32_t o,
                         uint32_t i, uint32_t gen, uint32_t rows, uint64_t from, uint32_t at, uint32_t bytes) {
  uint32_t channel = i % h.layout.channels, context = ep_context(h, channel), stride = g.window.stageStride;
  uint32_t done = i / h.layout.channels + 1 + (c.bug == EP_BUG_GIN_WRONG_TAIL);
  uint64_t to = ep_ll_rail_row(g, h, w, gen, o, w.domain, i * epLlChunkTokens(c.topk)) + at;
  epLlPut put = {0, 0, 0};
#pragma unroll 1
  for (uint32_t x = 0; rows >> x; x++) {
    if (!(rows >> x & 1)) continue;
    if (put.bytes && stride - bytes > EP_LL_PUT_GAP) {
      p::gin_put(h.gin, context, o, put.to, put.from, put.bytes);
      put.bytes = 0;
    }
    if (put.bytes)
      put.bytes = x * stride + bytes; /* of a chunk's two rows both */
    else
      put = {to + x * stride, from + at + x * stride, bytes};
  }
  ep_ll_tell(c, g, h, w, o, context, epLlSignalRows(w.domains, h.layout.channels, w.domain, channel), channel,
             epTailOf(gen, done), put);
}

/* A thread: this rank's signal from domain o has come to `want`. False: gave up; with masks, perhaps on that rail alone (ep_stopped). What has come
 * counts, whoever is masked meanwhile. */
template <class C>
DEV bool ep_ll_wait_rail(const C c, const epGroupArgs &g, const epHybridGroup &h, const epPlace &w, uint32_t o,
                         uint32_t context, uint32_t signal, uint64_t want, uint32_t bits, uint32_t phase) {
  uint32_t peer = o * w.ups + w.up;
  if (!c.mask) return ep_wait_signal(g, h, context, signal, want, bits, phase, peer);
  auto read = [&]() { return p::gin_read(h.gin, context, signal); };
  auto done = [&](uint64_t seen) { return ep_reached(seen, want, bits); };
  if (ep_ll_left_out(c, peer)) return false;
  return done(read()) || ep_await_value(c, g, read, done, want, bits, phase, peer);
}

template <class C>
DEV bool ep_ll_wait_tail(const C c, const epGroupArgs &g, const epHybridGroup &h, const epPlace &w, uint32_t o,
                         uint32_t channel, uint32_t gen, uint32_t chunks, uint32_t phase) {
  return ep_ll_wait_rail(c, g, h, w, o, ep_context(h, channel),
                         epLlSignalRows(w.domains, h.layout.channels, o, channel), epTailOf(gen, chunks), EP_TAIL_ROLL,
                         phase);
}
/* Whole warp: chunk i of what domain o sends has come, whole. */
template <class C>
DEV bool ep_ll_wait_chunk(const C c, const epGroupArgs &g, const epHybridGroup &h, const epPlace &w, uint32_t o,
                          uint32_t i, uint32_t gen, uint32_t phase) {
  bool ok = true;
  if (p::lane() == 0 && c.bug != EP_BUG_SKIP_WAIT)
    ok = ep_ll_wait_tail(c, g, h, w, o, i % h.layout.channels, gen, i / h.layout.channels + 1, phase);
  ok = p::shfl(p::FULL, ok, 0);
  p::sync_warp();
  return ok;
}

/* Whole warp: the message of domain o's rank has come. */
template <class C>
DEV bool ep_ll_wait_message(const C c, const epGroupArgs &g, const epHybridGroup &h, const epPlace &w, uint32_t o,
                            uint32_t gen, uint32_t phase) {
  bool ok = true;
  if (p::lane() == 0) ok = ep_ll_wait_rail(c, g, h, w, o, 0, epLlSignalMessage(o), gen, EP_GENERATION_ROLL, phase);
  ok = p::shfl(p::FULL, ok, 0);
  p::sync_warp();
  return ok;
}

/* Nothing goes to domain o, or comes from there. */
template <class C> DEV bool ep_ll_rail_left_out(const C c, const epPlace &w, uint32_t o) {
  return ep_ll_left_out(c, o * w.ups + w.up);
}
/* Whole warp, a wait for domain o gave up: with masks this rank's domain is told that no more comes from its rail's rank there. False: it was for
 * good. */
template <class C>
DEV bool ep_ll_rail_missing(const C c, const epGroupArgs &g, const epPlace &w, uint32_t o, uint32_t gen) {
  if (!c.mask || p::ballot(p::FULL, ep_stopped(c, g))) return false;
#pragma unroll 1
  for (uint32_t r = w.domain * w.ups + p::lane(); r < (w.domain + 1) * w.ups; r += 32)
    if (!ep_ll_left_out(c, r))
      p::st_relaxed_sys(ep_hello(g, ep_ll_window(r), o * w.ups + w.up, gen), (uint64_t)gen << 32 | EP_LOST);
  return true;
}

/* Warp `index` of `warps`: use(o, k, step) for domains of its own, so that none is held up by another that is late; with more warps than domains it is
 * the domain's k-th of `step`. False: gave up. */
template <class F> DEV bool ep_ll_each_domain(const epPlace &w, uint32_t index, uint32_t warps, F use) {
  uint32_t others = w.domains - 1, step = warps < others ? 1 : warps / others;
  bool ok = true;
#pragma unroll 1
  for (uint32_t q = index % others; index / others < step && q < others && ok; q += warps)
    ok = use((w.domain + 1 + q) % w.domains, index / others, step);
  return ok;
}

/* ---- Greetings ----------------------------------------------------------------------------------------------------- */

/* Rails are not told which operation it is: a greeting may overtake the one before, so that only their number means something. */
template <class C> DEV void ep_ll_greet_far(const epLlRail &net, const C c, const epGroupArgs &g) {
  epPlace w = ep_place(c, g);
#pragma unroll 1
  for (uint32_t o = p::lane(); o < w.domains; o += 32)
    if (o != w.domain && !ep_ll_rail_left_out(c, w, o))
      p::gin_signal_weak(net.h.gin, 0, o, epLlSignalGreet(w.domains, w.domain),
                         c.mask ? ep_rail_owes(c, g, net.h, o, 2, p::lds<uint32_t>(ep_ll_gen_at())) : 1);
}
template <class C>
DEV void ep_ll_greeted_far(const epLlRail &net, const C c, const epGroupArgs &g, const epLlOp &op, uint32_t phase) {
  epPlace w = ep_place(c, g);
#pragma unroll 1
  for (uint32_t o = p::lane(); o < w.domains && c.bug != EP_BUG_NO_CREDIT; o += 32)
    if (o != w.domain &&
        !ep_ll_wait_rail(c, g, net.h, w, o, 0, epLlSignalGreet(w.domains, o),
                         c.bug == EP_BUG_GIN_SLOT_EARLY ? op.gen - 1 : op.gen, EP_GENERATION_ROLL, phase) &&
        ep_stopped(c, g))
      return;
}

/* ---- The end ------------------------------------------------------------------------------------------------------- */

/* Whole block, of those whose chunks are first, first + step, ... of `chunks`: the network has read what it put from. */
template <class C>
DEV void ep_ll_sent_far(const epLlRail &net, const C c, const epGroupArgs &g, uint32_t first, uint32_t chunks,
                        uint32_t step) {
  uint32_t warps = c.threads / 32, most = chunks < net.h.layout.channels ? chunks : net.h.layout.channels;
  p::sync_threads(); /* all has been put */
  if (c.bug == EP_BUG_GIN_NO_FLUSH) return;
#pragma unroll 1
  for (uint32_t i = first + p::warp() * step; i < most; i += warps * step)
    if (!ep_flush(c, g, net.h, ep_context(net.h, i))) return;
}

#endif
