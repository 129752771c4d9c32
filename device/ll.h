/* What the low-latency dispatch and combine share: the generation of an operation, units and strips (ll_layout.h), and the
 * greeting that makes two halves of every section enough.
 *
 * Why no credit is needed: operation g writes the half that operation g - 2 used. A rank ends operation g - 1 only after
 * every peer's greeting of g - 1, which the peer sends when it begins g - 1, so after it has finished g - 2. The greeting
 * travels while rows do; nothing on the way to them waits for it.
 *
 * Blocks that send have the lowest indices and wait for nothing but what peers' first blocks send at once, so any number of
 * resident blocks is enough. The generation moves at the start of the operation, as soon as all its blocks have read it. */
#ifndef EP_DEVICE_LL_H_
#define EP_DEVICE_LL_H_

#include "ll_layout.h"
#include "rows.h"

/* What a block knows of its operation. `ticket`: blocks that had read the generation before this one (thread 0). */
struct epLlOp {
  uint32_t gen, ticket;
  uint32_t tokens; /* of this rank */
};

/* Shared memory: words, window addresses, rows by source. */
DEV uint32_t ep_ll_word(uint32_t i) { return p::smem_base() + EP_VERDICT_BYTES + 4 * i; }
DEV uint32_t ep_ll_window_at(uint32_t rank) { return ep_ll_word(EP_LL_BEGIN_WORDS) + 8 * rank; }
DEV uint8_t *ep_ll_window(uint32_t rank) { return (uint8_t *)p::lds<uint64_t>(ep_ll_window_at(rank)); }
template <class C> DEV uint32_t ep_ll_source_rows(const C c, uint32_t s) {
  return p::lds<uint32_t>(ep_ll_window_at(c.ranks) + 4 * s);
}

/* Whole block: what every block needs of memory, in one trip. `recvCount`: rows by source, NULL where they are not known. */
template <class C>
DEV epLlOp ep_ll_begin(const C c, const epGroupArgs &g, const epRecordHeader *h, uint32_t given, const uint32_t *recvCount) {
  epLlOp op;
  epGroupState *state = ep_state(g);
  for (uint32_t r = p::tid(); r < c.ranks; r += c.threads) {
    p::sts<uint64_t>(ep_ll_window_at(r), p::ldg<uint64_t>(g.windows + r));
    if (recvCount)
      p::sts<uint32_t>(ep_ll_window_at(c.ranks) + 4 * r, p::ldg<uint32_t>(recvCount + r));
  }
  if (p::tid() == c.threads - 1) {
    uint32_t held = p::ldg<uint32_t>(&h->tokens);
    p::sts<uint32_t>(ep_ll_word(1), held < given ? held : given);
  }
  if (p::tid() == 0)
    p::sts<uint32_t>(ep_ll_word(0), p::ld_relaxed_sys(&state->stageGen) + 1);
  p::sync_threads();
  op.gen = p::lds<uint32_t>(ep_ll_word(0));
  op.tokens = p::lds<uint32_t>(ep_ll_word(1));
  op.ticket = p::tid() == 0 ? p::atomic_add(&state->stageDone, 1) : 0;
  return op;
}

/* The block that was last to read the generation moves it for the next operation of the stream. */
DEV void ep_ll_end(const epGroupArgs &g, const epLlOp &op, uint32_t blocks) {
  epGroupState *state = ep_state(g);
  if (p::tid() != 0 || op.ticket != blocks - 1)
    return;
  p::st_relaxed_sys(&state->stageDone, 0);
  p::st_relaxed_sys(&state->stageGen, op.gen);
}

/* The last block, at its start (a release stalls where rows are being stored): every peer may know that what this rank did
 * before is finished. */
template <class C> DEV void ep_ll_greet(const C c, const epGroupArgs &g, const epLlWindowLayout &w, const epLlOp &op) {
  for (uint32_t r = p::tid(); r < c.ranks; r += c.threads)
    if (r != g.rank)
      p::st_release_sys((uint32_t *)(ep_ll_window(r) + w.hello) + g.rank, op.gen);
}

/* The same block, at its end. */
template <class C>
DEV void ep_ll_greeted(const C c, const epGroupArgs &g, const epLlWindowLayout &w, const epLlOp &op, uint32_t phase) {
  const uint32_t *hello = (const uint32_t *)(ep_ll_window(g.rank) + w.hello);
  for (uint32_t r = p::tid(); r < c.ranks && c.bug != EP_BUG_NO_CREDIT; r += c.threads)
    if (r != g.rank && !ep_wait_flag(g, hello + r, op.gen, phase, r))
      return;
}

/* ---- Units --------------------------------------------------------------------------------------------------------- */

DEV uint4 ep_ll_unit(uint32_t gen, uint32_t a, uint32_t b, uint32_t c) {
  uint4 u;
  u.x = gen;
  u.y = a;
  u.z = b;
  u.w = c;
  return u;
}

/* A first look at N units a lane at at(i), those whose bit is in the lane's `wanted`; nothing waits yet. */
template <int N, class F> DEV void ep_ll_look(const epLlOp &op, uint32_t wanted, F at, uint4 *x) {
#pragma unroll
  for (int i = 0; i < N; i++)
    x[i] = wanted >> i & 1 ? p::ld_relaxed_sys128(at(i)) : ep_ll_unit(op.gen, 0, 0, 0);
}

/* Whole warp: looks until every unit has come. False in all lanes when a wait gave up. */
template <int N, class C, class F>
DEV bool ep_ll_settle(const C c, const epGroupArgs &g, const epLlOp &op, uint32_t phase, uint32_t peer, F at, uint4 *x) {
  bool ok = true;
  uint64_t start = 0;
  for (uint32_t round = 0; c.bug != EP_BUG_SKIP_WAIT; round++) {
    uint32_t seen = op.gen;
#pragma unroll
    for (int i = 0; i < N; i++)
      if (x[i].x != op.gen)
        seen = x[i].x;
    if (seen == op.gen)
      break;
    if (round == 0)
      start = p::globaltimer();
    if (ep_give_up(g, start, round, phase, peer, op.gen, seen)) {
      ok = false;
      break;
    }
#pragma unroll
    for (int i = 0; i < N; i++)
      if (x[i].x != op.gen)
        x[i] = p::ld_relaxed_sys128(at(i));
  }
  return p::ballot(p::FULL, !ok) == 0;
}

/* ---- Strips: of a row's bytes from `at` on, vector i of a lane is at 16 * (32 i + lane), unit i's data at
 * 12 * (32 i + lane). `bytes`: of the row from there on, so that the last strip is shorter. -------------------------- */

#define EP_STRIP_VECTORS 3
#define EP_STRIP_UNITS 4

/* Where unit i of a lane lies in strip `strip` of a staged row. */
DEV auto ep_ll_unit_at(const uint8_t *row, uint32_t strip) {
  const uint8_t *first = row + strip * EP_STRIP_BYTES + 16 * p::lane();
  return [first](uint32_t i) { return first + 512 * i; };
}

DEV uint4 ep_ll_zero() { return ep_ll_unit(0, 0, 0, 0); }

DEV void ep_ll_load(const uint8_t *from, uint32_t bytes, uint4 *v) {
#pragma unroll
  for (uint32_t i = 0; i < EP_STRIP_VECTORS; i++) {
    uint32_t at = 16 * (32 * i + p::lane());
    v[i] = at < bytes ? p::ldg<uint4>(from + at) : ep_ll_zero();
  }
}

DEV void ep_ll_store(uint8_t *to, uint32_t bytes, const uint4 *v) {
#pragma unroll
  for (uint32_t i = 0; i < EP_STRIP_VECTORS; i++) {
    uint32_t at = 16 * (32 * i + p::lane());
    if (at < bytes)
      p::stg<uint4>(to + at, v[i]);
  }
}

/* The lane's units of a strip that hold bytes of the row: a bit each. */
DEV uint32_t ep_ll_wanted(uint32_t bytes) {
  uint32_t wanted = 0;
#pragma unroll
  for (uint32_t i = 0; i < EP_STRIP_UNITS; i++)
    wanted |= (uint32_t)(EP_UNIT_DATA * (32 * i + p::lane()) < bytes) << i;
  return wanted;
}

/* Through the warp's strip of shared memory at `buffer`, without bank conflicts: 3 is odd. */
DEV void ep_ll_to_units(uint32_t buffer, uint32_t gen, const uint4 *v, uint4 *u) {
#pragma unroll
  for (uint32_t i = 0; i < EP_STRIP_VECTORS; i++)
    p::sts<uint4>(buffer + 16 * (32 * i + p::lane()), v[i]);
  p::sync_warp();
#pragma unroll
  for (uint32_t i = 0; i < EP_STRIP_UNITS; i++) {
    uint32_t at = buffer + EP_UNIT_DATA * (32 * i + p::lane());
    u[i] = ep_ll_unit(gen, p::lds<uint32_t>(at), p::lds<uint32_t>(at + 4), p::lds<uint32_t>(at + 8));
  }
  p::sync_warp();
}

/* `v` may be `u`. */
DEV void ep_ll_to_vectors(uint32_t buffer, const uint4 *u, uint4 *v) {
#pragma unroll
  for (uint32_t i = 0; i < EP_STRIP_UNITS; i++) {
    uint32_t at = buffer + EP_UNIT_DATA * (32 * i + p::lane());
    p::sts<uint32_t>(at, u[i].y);
    p::sts<uint32_t>(at + 4, u[i].z);
    p::sts<uint32_t>(at + 8, u[i].w);
  }
  p::sync_warp();
#pragma unroll
  for (uint32_t i = 0; i < EP_STRIP_VECTORS; i++)
    v[i] = p::lds<uint4>(buffer + 16 * (32 * i + p::lane()));
  p::sync_warp();
}

/* `to`: the strip's first unit at its reader. */
DEV void ep_ll_send(uint8_t *to, uint32_t bytes, const uint4 *u) {
  uint32_t wanted = ep_ll_wanted(bytes);
#pragma unroll
  for (uint32_t i = 0; i < EP_STRIP_UNITS; i++)
    if (wanted >> i & 1)
      p::st_relaxed_sys128(to + 16 * (32 * i + p::lane()), u[i]);
}

template <class C> DEV uint32_t ep_ll_buffer(const C c, int kernelId) {
  epConfig plain = ep_plain_config(c);
  return p::smem_base() + epLlSmem(kernelId, &plain) - (c.threads / 32 - p::warp()) * EP_STRIP_DATA;
}

/* Bytes of a row from strip `s` on. */
template <class C> DEV uint32_t ep_ll_bytes(const C c, uint32_t s) {
  return s * EP_STRIP_DATA < c.rowBytes ? c.rowBytes - s * EP_STRIP_DATA : 0;
}

DEV void ep_ll_counter(void *counter, uint32_t wide, uint32_t i, uint32_t value) {
  if (!counter)
    return;
  if (wide)
    p::stg<int64_t>((int64_t *)counter + i, (int64_t)value);
  else
    p::stg<int32_t>((int32_t *)counter + i, (int32_t)value);
}

#endif
