/* What the low-latency dispatch and combine share: the start of an operation, units and strips (ll_layout.h), and the
 * greeting that makes two halves of every section enough.
 *
 * Why no credit is needed: operation g writes the half that operation g - 2 used. A rank ends operation g - 1 only after
 * every peer's greeting of g - 1, which the peer sends when it begins g - 1, so after it has finished g - 2. The greeting
 * travels while rows do; nothing on the way to them waits for it. For the same reason a rank may clear units of the other half
 * before it greets.
 *
 * Blocks that send have the lowest indices and wait for nothing but what peers' first blocks send at once, so any number of
 * resident blocks is enough. The generation moves when all blocks have read it.
 *
 * A trip to memory takes 0.6 to 0.8 us, as long as 250 KB on the link, so a block asks for all that it can name before it waits
 * for any of it: see ep_ll_begin. */
#ifndef EP_DEVICE_LL_H_
#define EP_DEVICE_LL_H_

#include "hybrid_layout.h"
#include "ll_layout.h"
#include "rows.h"

DEV uint4 ep_ll_unit(uint32_t gen, uint32_t a, uint32_t b, uint32_t c) {
  uint4 u;
  u.x = gen;
  u.y = a;
  u.z = b;
  u.w = c;
  return u;
}

/* Low latency never lets a group that lost an operation go on. Staged operations have states of their own; the first one is all slots'. */
DEV epGroupState *ep_ll_first_state(const epGroupArgs &g) { return (epGroupState *)g.scratch; }

/* What a block knows of its operation. `ticket`: blocks that had read the generation before this one (thread 0). */
struct epLlOp {
  uint32_t gen, ticket;
  bool
      lost; /* a wait of this operation or of one before gave up: the record may be half made, and nothing may be moved along it */
};

/* Shared memory: the generation and whether the group is lost, window addresses, the kernel's table. */
DEV uint32_t ep_ll_gen_at() { return p::smem_base() + EP_VERDICT_BYTES; }
DEV uint32_t ep_ll_window_at(uint32_t rank) { return p::smem_base() + EP_VERDICT_BYTES + 8 + 8 * rank; }
DEV uint8_t *ep_ll_window(uint32_t rank) { return (uint8_t *)p::lds<uint64_t>(ep_ll_window_at(rank)); }
template <class C> DEV uint32_t ep_ll_table(const C c, uint32_t i) { return ep_ll_window_at(c.ranks) + 4 * i; }

/* With masks the window of a rank that is left out of the operation is 0, the same in all blocks. Of a rank of another domain it is EP_LL_MUTE where it
 * comes by one that is left out (rows for it do not go that way), else EP_LL_FAR. */
#define EP_LL_MUTE 1u
#define EP_LL_FAR 2u
template <class C> DEV uint64_t ep_ll_window_of(const C c, const epGroupArgs &g, uint32_t rank) {
  if (c.mask && p::ld_relaxed_sys(ep_mask_words(c, g).left + rank)) return 0;
  if (c.mask && ep_is_far(c, g, rank))
    return p::ld_relaxed_sys(ep_mask_words(c, g).left + ep_bringer(c, g, rank)) ? EP_LL_MUTE : EP_LL_FAR;
  return p::ldg<uint64_t>(g.windows + rank);
}
/* Nothing comes from it. */
template <class C> DEV bool ep_ll_left_out(const C c, uint32_t rank) {
  return c.mask && p::lds<uint64_t>(ep_ll_window_at(rank)) <= (c.scaleUp ? EP_LL_MUTE : 0u);
}
/* It has no part in sums, whatever the way from it. */
template <class C> DEV bool ep_ll_unchosen(const C c, uint32_t rank) { return c.mask && !ep_ll_window(rank); }
/* In another scale-up domain, where no store reaches; what is done for ranks there is left to the overloads that hybrid_ll.h has beside
 * those for `epLlOneDomain`, which do nothing. */
template <class C> DEV bool ep_ll_far(const C c, uint32_t rank) {
  return c.scaleUp && (c.mask ? p::lds<uint64_t>(ep_ll_window_at(rank)) == EP_LL_FAR : !ep_ll_window(rank));
}
struct epLlOneDomain {
  enum { shares = 1 }; /* of combine's sums this rank's own part is made on the spot */
};

/* Whole block: the generation and the windows, and with them, in the same trip, whatever `ask` asks for. `keep` then puts that
 * where the block finds it; a barrier follows, so that the verdict word may be used as well. */
template <class C, class A, class K> DEV epLlOp ep_ll_begin(const C c, const epGroupArgs &g, A ask, K keep) {
  epLlOp op;
  epGroupState *state = ep_state(g);
  uint32_t gen = 0, lost = 0, t = p::tid();
  uint64_t window = 0;
  if (t == 0) {
    gen = p::ld_relaxed_sys(&state->stageGen);
    lost = p::ld_relaxed_sys(&state->aborted);
    if (c.part != EP_PART_WHOLE) lost |= p::ld_relaxed_sys(&ep_ll_first_state(g)->aborted);
  }
  if (t < c.ranks) window = ep_ll_window_of(c, g, t);
  ask();
  if (t == 0) {
    p::sts<uint32_t>(p::smem_base(), 0);
    p::sts<uint32_t>(ep_ll_gen_at(), gen + 1); /* nothing before here waits for it */
    p::sts<uint32_t>(ep_ll_gen_at() + 4, lost);
  }
  if (t < c.ranks) p::sts<uint64_t>(ep_ll_window_at(t), window);
#pragma unroll 1
  for (uint32_t r = t + c.threads; r < c.ranks; r += c.threads)
    p::sts<uint64_t>(ep_ll_window_at(r), ep_ll_window_of(c, g, r));
  keep();
  p::sync_threads();
  op.gen = p::lds<uint32_t>(ep_ll_gen_at());
  op.lost = p::lds<uint32_t>(ep_ll_gen_at() + 4) != 0;
  op.ticket = t == 0 ? p::atomic_add(&state->stageDone, 1) : 0;
  return op;
}

/* The next kernel's blocks may take their places; across scale-up domains not before this one's end, as the network may need places, too:
 * where a thread of the host serves it, small copies between GPUs can be kernels of the driver's. */
template <class C> DEV void ep_ll_launch(const C c) {
  if (!c.scaleUp) p::grid_launch();
}

/* Whole block, once: all threads are ok. */
DEV bool ep_ll_agrees(bool ok) {
  if (!ok) p::sts<uint32_t>(p::smem_base(), 1);
  p::sync_threads();
  return p::lds<uint32_t>(p::smem_base()) == 0;
}

template <class F> DEV uint32_t ep_ll_over_warp(uint32_t v, F join) {
#pragma unroll 1
  for (uint32_t x = 16; x; x >>= 1) v = join(v, p::shfl_xor(p::FULL, v, x));
  return v;
}

/* Lanes of the warp that have the same key below `bound` and are `there`; of interest in such a lane only. A vote a bit of the key:
 * MATCH.ANY takes a round for every value that differs, 0.3 us where all do. */
DEV uint32_t ep_ll_same(bool there, uint32_t key, uint32_t bound) {
  uint32_t same = p::ballot(p::FULL, there);
#pragma unroll
  for (uint32_t b = 0; b < 32; b++) {
    if ((bound - 1) >> b == 0) break;
    uint32_t set = p::ballot(p::FULL, key >> b & 1);
    same &= key >> b & 1 ? set : ~set;
  }
  return same;
}

/* What the record is of; `generation` follows. */
template <class C> DEV void ep_ll_write_header(const C c, const epGroupArgs &g, epRecordHeader *h, uint32_t tokens) {
  p::stg<uint32_t>(&h->magic, EP_RECORD_MAGIC);
  p::stg<uint32_t>(&h->version, EP_HYBRID_VERSION(c.scaleUp));
  p::stg<uint32_t>(&h->ranks, c.ranks);
  p::stg<uint32_t>(&h->experts, c.experts);
  p::stg<uint32_t>(&h->topk, c.topk);
  p::stg<uint32_t>(&h->maxTokens, g.maxTokens);
  p::stg<uint32_t>(&h->rank, g.rank);
  p::stg<uint32_t>(&h->layout, c.layout);
  p::stg<uint32_t>(&h->align, 0);
  p::stg<uint32_t>(&h->tokens, tokens);
}

/* T, where the host gave only a bound of it. */
DEV uint32_t ep_ll_tokens(const uint8_t *record, const epLlRecordLayout &l, uint32_t given, uint32_t look) {
  uint32_t held = look ? p::ldg<uint32_t>(&((const epRecordHeader *)(record + l.header))->tokens) : given;
  return held < given ? held : given;
}

/* The block that was last to read the generation moves it for the next operation of the stream, unless the receiving part is
 * still to come. */
template <class C> DEV void ep_ll_end(const C c, const epGroupArgs &g, const epLlOp &op, uint32_t blocks) {
  epGroupState *state = ep_state(g);
  if (c.part != EP_PART_WHOLE) {
    p::sync_threads(); /* all of the block's waits have ended */
    if (p::tid() == 0 && p::ld_relaxed_sys(&state->aborted)) p::st_relaxed_sys(&ep_ll_first_state(g)->aborted, 1);
  }
  if (p::tid() != 0 || op.ticket != blocks - 1) return;
  p::st_relaxed_sys(&state->stageDone, 0);
  if (c.part != EP_PART_SEND) p::st_relaxed_sys(&state->stageGen, op.gen);
}

/* What the operation is (kind_layout.h). A combine goes along what a dispatch left in the record. */
template <class C, class A> DEV uint32_t ep_ll_kind(const C c, const A &a, uint32_t kernel) {
  const epRecordHeader *h = (const epRecordHeader *)(a.record + a.recordLayout.header);
  return ep_kind(c, kernel, kernel == EP_KERNEL_LL_COMBINE ? p::ldg<uint32_t>(&h->dispatched) : 0);
}

/* The last warp of the last block, at its start (a release stalls where rows are being stored): every peer may know that what
 * this rank did before is finished. Its part of the stage is cleared first. Of a staged operation the sending part greets, and the
 * receiving part waits for greetings. */
template <class C> DEV void ep_ll_greet(const C c, const epGroupArgs &g, const epLlWindowLayout &w, const epLlOp &op) {
  uint64_t units = w.rowStride * (c.ranks - 1) * g.maxTokens / 16;
  uint8_t *half = ep_ll_window(g.rank) + w.stage + ((op.gen + 1) & 1) * units * 16;
  epLlSlice s = epLlSliceOf(units, op.gen);
#pragma unroll 1
  for (uint64_t i = p::lane(); i < s.count; i += 32)
    p::st_relaxed_sys128(half + 16 * (s.first + i), ep_ll_unit(op.gen & EP_UNIT_TAG, 0, 0, 0));
  p::sync_warp();
#pragma unroll 1
  for (uint32_t r = p::lane(); r < c.ranks; r += 32)
    if (r != g.rank && !ep_ll_left_out(c, r) && !ep_ll_far(c, r))
      p::st_release_sys((uint32_t *)(ep_ll_window(r) + w.begun) + g.rank, op.gen);
}
template <class C> DEV void ep_ll_greet_far(const epLlOneDomain &, const C, const epGroupArgs &) {}
template <class C>
DEV void ep_ll_greeted_far(const epLlOneDomain &, const C, const epGroupArgs &, const epLlOp &, uint32_t) {}

/* The last block of a sending part. */
template <class C, class A, class N> DEV void ep_ll_greeter(const C c, const A &a, const N &net) {
  epLlOp op = ep_ll_begin(
      c, a.group, []() {}, []() {});
  ep_ll_launch(c);
  if (!op.lost && p::warp() == 0) {
    ep_ll_greet(c, a.group, a.window, op);
    ep_ll_greet_far(net, c, a.group);
  }
  ep_ll_end(c, a.group, op, a.blocks);
}

/* The same warp, at its end. */
template <class C>
DEV void ep_ll_greeted(const C c, const epGroupArgs &g, const epLlWindowLayout &w, const epLlOp &op, uint32_t phase) {
  const uint32_t *begun = (const uint32_t *)(ep_ll_window(g.rank) + w.begun);
#pragma unroll 1
  for (uint32_t r = p::lane(); r < c.ranks && c.bug != EP_BUG_NO_CREDIT; r += 32)
    if (r != g.rank && !ep_ll_left_out(c, r) && !ep_ll_far(c, r) && !ep_await_flag(c, g, begun + r, op.gen, phase, r) &&
        ep_stopped(c, g))
      return;
}

/* The last warp of a block that waits for no later one of this rank, at its start: the domain's peers may know which operation this is
 * (kind_layout.h). */
template <class C, class A> DEV_APART void ep_ll_tell_kind(const C c, const A &a, const epLlOp &op, uint32_t kind) {
  if (p::warp() != c.threads / 32 - 1) return;
#pragma unroll 1
  for (uint32_t r = p::lane(); r < c.ranks; r += 32)
    if (r != a.group.rank && !ep_ll_left_out(c, r) && !ep_ll_far(c, r))
      p::st_relaxed_sys(ep_hello(a.group, ep_ll_window(r), a.group.rank, op.gen), (uint64_t)op.gen << 32 | kind);
}

/* The same warp, when it has nothing else to do: looks at what they say. To wait for it holds a rank back as greetings do. */
template <class C, class A>
DEV_APART void ep_ll_compare_kinds(const C c, const A &a, const epLlOp &op, uint32_t kernel, uint32_t kind) {
  uint32_t ups = c.scaleUp ? c.scaleUp : c.ranks, first = a.group.rank / ups * ups;
  if (p::warp() == c.threads / 32 - 1 && c.bug != EP_BUG_NO_CREDIT)
    ep_greeted(c, a.group, first, first + ups, op.gen, kind,
               kernel == EP_KERNEL_LL_COMBINE ? EP_PHASE_COMBINE_CREDIT : EP_PHASE_DISPATCH_CREDIT);
}

/* ---- Units --------------------------------------------------------------------------------------------------------- */

/* While many warps wait, they look at their first unit only, so that their looks do not get in the way of rows. */
#define EP_LL_NARROW_BLOCKS 48u

/* A first look at N units a lane at at(i), those whose bit is in the lane's `wanted`; nothing waits yet. The last one is a
 * head's if HEAD. */
template <int N, class F> DEV void ep_ll_look(const epLlOp &op, uint32_t wanted, F at, uint4 *x) {
#pragma unroll
  for (int i = 0; i < N; i++) x[i] = wanted >> i & 1 ? p::ld_relaxed_sys128(at(i)) : ep_ll_unit(op.gen, 0, 0, 0);
}
template <int N, bool HEAD> DEV uint32_t ep_ll_missing(const epLlOp &op, const uint4 *x) {
  uint32_t missing = 0;
#pragma unroll
  for (int i = 0; i < N; i++)
    missing |= (uint32_t)(((x[i].x ^ op.gen) & (HEAD && i == N - 1 ? ~0u : EP_UNIT_TAG)) != 0) << i;
  return missing;
}

enum { EP_LL_CAME = 0, EP_LL_ABSENT, EP_LL_GAVE_UP };

/* Whole warp: looks until every unit has come, or absent(), asked in each lane that lacks one, says that none will. */
template <int N, bool HEAD, class C, class F, class G>
DEV int ep_ll_settle(const C c, const epGroupArgs &g, const epLlOp &op, bool narrow, uint32_t phase, uint32_t peer,
                     F at, uint4 *x, G absent) {
  uint64_t start = 0;
  epPatience patience = {};
  int result = EP_LL_CAME;
#pragma unroll 1
  for (uint32_t round = 0; c.bug != EP_BUG_SKIP_WAIT; round++) {
    uint32_t missing = ep_ll_missing<N, HEAD>(op, x), seen = op.gen;
    if (!missing) {
      if (round && p::lane() == 0) /* for its warp: it looks at a part of each row */
        ep_profile_waited(g, start, phase, peer);
      break;
    }
    if (absent()) {
      result = EP_LL_ABSENT;
      break;
    }
#pragma unroll
    for (int i = 0; i < N; i++)
      if (missing >> i & 1) seen = x[i].x;
    if (round == 0) patience.start = start = p::globaltimer();
    if (round == 0 && c.mask) ep_wait_begins(c, g, patience);
    bool masked = c.mask && round == 0 && peer != g.rank && ep_masked(c, g, peer);
    if (masked || (c.mask ? ep_peer_give_up(c, g, patience, round, phase, peer, op.gen, seen)
                          : ep_give_up(g, start, round, phase, peer, op.gen, seen))) {
      result = EP_LL_GAVE_UP;
      break;
    }
#pragma unroll
    for (int i = 0; i < N; i++)
      if (missing >> i & 1 && (i == 0 || !(narrow && missing & 1))) x[i] = p::ld_relaxed_sys128(at(i));
  }
  return p::ballot(p::FULL, result == EP_LL_GAVE_UP)  ? EP_LL_GAVE_UP
         : p::ballot(p::FULL, result == EP_LL_ABSENT) ? EP_LL_ABSENT
                                                      : EP_LL_CAME;
}

/* ---- Strips: of a row's bytes from `at` on, vector i of lane < 28 is at 16 * (28 i + lane), unit i's data at 14 * (32 i +
 * lane). `bytes`: of the row from there on, so that the last strip is shorter. ----------------------------------------- */

/* Where unit i of a lane lies in strip `strip` of a staged row. */
DEV auto ep_ll_unit_at(const uint8_t *row, uint32_t strip) {
  const uint8_t *first = row + strip * EP_STRIP_BYTES + 16 * p::lane();
  return [first](uint32_t i) { return first + 512u * i; };
}

/* Whether vector i of the lane holds bytes of the row; the lane's vectors begin at lane * 16 and lie EP_STRIP_STEP apart. */
#define EP_STRIP_STEP (16 * EP_STRIP_LANES)
DEV bool ep_ll_has(uint32_t i, uint32_t bytes) {
  return p::lane() < EP_STRIP_LANES && (bytes >= EP_STRIP_DATA || EP_STRIP_STEP * i + 16 * p::lane() < bytes);
}

DEV uint4 ep_ll_zero() { return ep_ll_unit(0, 0, 0, 0); }

DEV void ep_ll_load(const uint8_t *from, uint32_t bytes, uint4 *v) {
  from += 16 * p::lane();
#pragma unroll
  for (uint32_t i = 0; i < EP_STRIP_VECTORS; i++)
    v[i] = ep_ll_has(i, bytes) ? p::ldg<uint4>(from + EP_STRIP_STEP * i) : ep_ll_zero();
}

/* The same of a row that may not be there, and the word that it is. */
DEV void ep_ll_load_any(const uint8_t *from, uint32_t bytes, uint4 *v) {
  from += 16 * p::lane();
#pragma unroll
  for (uint32_t i = 0; i < EP_STRIP_VECTORS; i++)
    v[i] = ep_ll_has(i, bytes) ? p::ldg_any<uint4>(from + EP_STRIP_STEP * i) : ep_ll_zero();
}
DEV void ep_ll_confirm(const uint8_t *from, uint32_t bytes) {
#pragma unroll
  for (uint32_t i = 0; i < EP_STRIP_VECTORS; i++)
    if (ep_ll_has(i, bytes)) p::confirm(from + 16 * p::lane() + EP_STRIP_STEP * i, 16);
}

DEV void ep_ll_store(uint8_t *to, uint32_t bytes, const uint4 *v) {
  to += 16 * p::lane();
#pragma unroll
  for (uint32_t i = 0; i < EP_STRIP_VECTORS; i++)
    if (ep_ll_has(i, bytes)) p::stg<uint4>(to + EP_STRIP_STEP * i, v[i]);
}

/* The lane's units of a strip that hold bytes of the row: a bit each. */
DEV uint32_t ep_ll_wanted(uint32_t bytes) {
  uint32_t wanted = 0;
#pragma unroll
  for (uint32_t i = 0; i < EP_STRIP_UNITS; i++)
    wanted |= (uint32_t)(bytes >= EP_STRIP_DATA || EP_UNIT_DATA * (32 * i + p::lane()) < bytes) << i;
  return wanted;
}

/* Words of data from `at` on that begin `shift` bits, 0 or 16, into a word. */
DEV uint32_t ep_ll_funnel(uint32_t lo, uint32_t hi, uint32_t shift) {
  return (uint32_t)(((uint64_t)hi << 32 | lo) >> shift);
}

/* Through the warp's strip of shared memory at `buffer`: vectors go in, units come out. A unit's 14 bytes begin in the middle of a
 * word in odd lanes: `shift`. */
DEV uint4 ep_ll_read_unit(uint32_t buffer, uint32_t gen, uint32_t shift, uint32_t i) {
  uint32_t at = buffer + (EP_UNIT_DATA * p::lane() & ~3u) + 32 * EP_UNIT_DATA * i;
  uint32_t w0 = p::lds<uint32_t>(at), w1 = p::lds<uint32_t>(at + 4), w2 = p::lds<uint32_t>(at + 8),
           w3 = p::lds<uint32_t>(at + 12);
  return ep_ll_unit((gen & EP_UNIT_TAG) | w3 >> shift << 16, ep_ll_funnel(w0, w1, shift), ep_ll_funnel(w1, w2, shift),
                    ep_ll_funnel(w2, w3, shift));
}
DEV void ep_ll_to_units(uint32_t buffer, uint32_t gen, const uint4 *v, uint4 *u) {
  uint32_t l = p::lane(), shift = (l & 1) * 16;
#pragma unroll
  for (uint32_t i = 0; i < EP_STRIP_VECTORS; i++)
    if (l < EP_STRIP_LANES) p::sts<uint4>(buffer + 16 * l + EP_STRIP_STEP * i, v[i]);
  p::sync_warp();
#pragma unroll
  for (uint32_t i = 0; i < EP_STRIP_UNITS; i++) u[i] = ep_ll_read_unit(buffer, gen, shift, i);
  p::sync_warp();
}

/* Two lanes have 7 words: 4 are the even one's, whose last half it gets from the odd one. */
DEV void ep_ll_write_unit(uint32_t buffer, uint4 u, uint32_t i) {
  uint32_t l = p::lane(), odd = l & 1, shift = odd * 16;
  uint32_t at = buffer + EP_UNIT_DATA * l + 2 * odd + 32 * EP_UNIT_DATA * i, last = u.x >> 16;
  uint32_t next = p::shfl_xor(p::FULL, u.y, 1);
  p::sts<uint32_t>(at, ep_ll_funnel(u.y, u.z, shift));
  p::sts<uint32_t>(at + 4, ep_ll_funnel(u.z, u.w, shift));
  p::sts<uint32_t>(at + 8, ep_ll_funnel(u.w, last, shift));
  if (!odd) p::sts<uint32_t>(at + 12, last | next << 16);
}
/* `v` may be `u`. */
DEV void ep_ll_to_vectors(uint32_t buffer, const uint4 *u, uint4 *v) {
  uint32_t l = p::lane();
#pragma unroll
  for (uint32_t i = 0; i < EP_STRIP_UNITS; i++) ep_ll_write_unit(buffer, u[i], i);
  p::sync_warp();
#pragma unroll
  for (uint32_t i = 0; i < EP_STRIP_VECTORS; i++)
    if (l < EP_STRIP_LANES) v[i] = p::lds<uint4>(buffer + 16 * l + EP_STRIP_STEP * i);
  p::sync_warp();
}

/* `to`: the strip's first unit at its reader. */
DEV void ep_ll_send(uint8_t *to, uint32_t bytes, const uint4 *u) {
  uint32_t wanted = ep_ll_wanted(bytes);
  to += 16 * p::lane();
#pragma unroll
  for (uint32_t i = 0; i < EP_STRIP_UNITS; i++)
    if (wanted >> i & 1) p::st_relaxed_sys128(to + 512 * i, u[i]);
}

template <class C> DEV uint32_t ep_ll_buffer(const C c, int kernelId) {
  epConfig plain = ep_plain_config(c);
  return p::smem_base() + epLlSmem(kernelId, &plain) - (c.threads / 32 - p::warp()) * epLlWarpSmem(kernelId);
}

/* Bytes of a row as it travels. */
template <class C> DEV uint32_t ep_ll_travels(const C c) { return epLlTravels(c.rowBytes, c.scaleBytes); }
/* Those from strip `s` on; no more than a strip's are of interest, so rows of whole pieces need no predicates. */
template <class C> DEV uint32_t ep_ll_bytes(const C c, uint32_t s) {
  uint32_t all = ep_ll_travels(c);
  if (all % (EP_LL_PIECE_STRIPS * EP_STRIP_DATA) == 0) return EP_STRIP_DATA;
  return s * EP_STRIP_DATA < all ? all - s * EP_STRIP_DATA : 0;
}

DEV void ep_ll_counter(void *counter, uint32_t wide, uint32_t i, uint32_t value) {
  if (!counter) return;
  bool adds = (wide & EP_COUNTER_ADDS) != 0;
  if (wide & 1)
    p::stg<int64_t>((int64_t *)counter + i, (int64_t)value + (adds ? p::ldg<int64_t>((int64_t *)counter + i) : 0));
  else
    p::stg<int32_t>((int32_t *)counter + i, (int32_t)value + (adds ? p::ldg<int32_t>((int32_t *)counter + i) : 0));
}

#endif
