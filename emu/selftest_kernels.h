// Small kernels, each one idea of the memory or execution model, with the misuse that the emulator must report.
// `bug` 0 is the correct text.
#pragma once
#include "hybrid_layout.h"

#include "gin_host.h"

namespace litmus {

using namespace p;

struct Args {
  uint32_t rank, ranks, bug;
  uint32_t *mine, *peer, *out; // memory of this rank, of the next one, and a result area of this rank
  uint32_t *ctr[8];            // a counter on each rank
  uint64_t timeoutNs;
  epGin gin; // every rank is a domain of its own; `mine` are the windows
};

static const uint32_t FLAG = 1024, ROW = 0; // words of `mine` and `peer`

inline void wait32(const uint32_t *flag, uint32_t want) {
  while (ld_acquire_sys(flag) != want) nanosleep(20);
}

// Data by ordinary stores, then a flag; the neighbour reads after it. 1: flag without release; 2: polled without
// acquire; 3: no wait at all; 4 (legal): relaxed flag and poll with fences; 5: flag before the data; 6: scope too
// small.
inline void message(const Args &a) {
  if (tid() >= 32) return;
  if (a.bug == 5 && tid() == 0) st_release_sys(a.peer + FLAG, 1u);
  for (uint32_t i = tid(); i < 64; i += 32) stg<uint32_t>(a.peer + ROW + i, 100 * a.rank + i);
  sync_warp();
  if (tid() == 0 && a.bug != 5) {
    if (a.bug == 4) fence_sys();
    if (a.bug == 1 || a.bug == 4)
      st_relaxed_sys(a.peer + FLAG, 1u);
    else
      st_release_sys(a.peer + FLAG, 1u);
  }
  if (tid() == 0 && a.bug != 3) {
    if (a.bug == 2 || a.bug == 4)
      while (ld_relaxed_sys(a.mine + FLAG) != 1) nanosleep(20);
    else if (a.bug == 6)
      while (ld_acquire_gpu(a.mine + FLAG) != 1) nanosleep(20);
    else
      wait32(a.mine + FLAG, 1);
    if (a.bug == 4) fence_sys();
  }
  sync_warp();
  for (uint32_t i = tid(); i < 64; i += 32) stg<uint32_t>(a.out + i, ldg<uint32_t>(a.mine + ROW + i));
}

// A row through shared memory by bulk store, flag, bulk load at the receiver, and out again.
// 1: no fence before the bulk store; 2: only one lane fences, before the sync; 3 (legal): lane 0 fences after the sync;
// 4: wait_group.read before the flag; 5: no wait before the flag; 6: no proxy fence between acquire and bulk load;
// 7: no sync between stores and bulk store; 8: mbarrier wait left out; 9: only the shared-memory fence before the load;
// 10: stores to the row while the bulk store reads it; 11: refill of the row while the bulk store reads it;
// 12: refill while lanes read it; 13: the source of a bulk load is never written; 14: exits with the store under way
inline void bulk(const Args &a) {
  const uint32_t bar = smem_base(), row = smem_base() + 128, bytes = 512;
  uint32_t l = lane();
  if (tid() >= 32) return;
  if (l == 0) {
    mbar_init(bar, 1);
    fence_mbar_init();
  }
  sync_warp();
  for (uint32_t i = l; i < bytes / 16; i += 32) {
    uint4 v = {100 * a.rank + i, i, i, i};
    sts<uint4>(row + 16 * i, v);
  }
  if (a.bug == 2 ? l == 0 : a.bug != 1 && a.bug != 3) fence_proxy_async();
  if (a.bug != 7) sync_warp();
  if (a.bug == 3 && l == 0) fence_proxy_async();
  if (l == 0) {
    bulk_s2g(a.peer + ROW, row, bytes);
    bulk_commit();
    if (a.bug == 10) sts<uint32_t>(row + 64, 7u);
    if (a.bug == 4 || a.bug == 14)
      bulk_wait_read<0>();
    else if (a.bug != 5 && a.bug != 11)
      bulk_wait<0>();
    st_release_sys(a.peer + FLAG, 1u);
    wait32(a.mine + FLAG, 1);
    if (a.bug == 9)
      fence_proxy_async();
    else if (a.bug != 6)
      fence_proxy_async_global();
    mbar_expect_tx(bar, bytes);
    bulk_g2s(row, a.mine + (a.bug == 13 ? 4096 : ROW), bytes, bar);
    if (a.bug == 5 || a.bug == 11) bulk_wait<0>();
  }
  if (a.bug != 8) mbar_wait(bar, 0);
  for (uint32_t i = l; i < bytes / 16; i += 32) stg<uint32_t>(a.out + i, lds<uint4>(row + 16 * i).x);
  if (a.bug != 12) sync_warp();
  if (l == 0) {
    mbar_expect_tx(bar, bytes);
    bulk_g2s(row, a.mine + ROW, bytes, bar);
    if (a.bug == 14) {
      bulk_s2g(a.out + 512, row + 1024, 16);
      return;
    }
  }
  mbar_wait(bar, 1);
  stg<uint32_t>(a.out + 64 + l, lds<uint32_t>(row + 4 * l));
}

// Staging reused with a credit. 1: second write without waiting for the reader; 2: both ranks write one slot;
// 3: reads a word nobody wrote; 4: writes past the end of the region
inline void credit(const Args &a) {
  if (tid() != 0) return;
  uint32_t *credits = a.mine + FLAG + 1, *toCredit = a.peer + FLAG + 2;
  for (uint32_t round = 1; round <= 3; round++) {
    if (round > 1 && a.bug != 1) wait32(credits, round - 1);
    for (uint32_t i = 0; i < 8; i++)
      stg<uint32_t>((a.bug == 2 ? a.ctr[0] + 8 : a.peer) + i, 10 * round + i + (a.bug == 2 ? a.rank : 0));
    st_release_sys(a.peer + FLAG, round);
    // data of the other neighbour
    while (ld_acquire_sys(a.mine + FLAG) < round) nanosleep(20);
    for (uint32_t i = 0; i < 8; i++) stg<uint32_t>(a.out + i, ldg<uint32_t>((a.bug == 2 ? a.ctr[0] + 8 : a.mine) + i));
    if (a.ranks == 2) st_release_sys(toCredit - 1, round);
  }
  if (a.bug == 3) stg<uint32_t>(a.out + 9, ldg<uint32_t>(a.mine + 4000));
  if (a.bug == 4) stg<uint32_t>(a.out + 8192, 1u);
}

// A row that the neighbour stores over without waiting, once it has said so: who has loaded it looks whether that was said, and takes it only if
// not. 1: said behind the stores; 2: no fence between the word and the stores; 3: the look comes before the loads; 4: no look
inline void look(const Args &a) {
  uint32_t l = lane();
  uint32_t *said = a.mine + FLAG + 1, *say = a.peer + FLAG + 1;
  if (warp() == 1) {
    if (l == 0) {
      wait32(a.mine + FLAG, 1);
      if (a.bug != 1) st_relaxed_sys(say, 1u);
      if (a.bug != 2) fence_sys();
    }
    sync_warp();
    stg<uint32_t>(a.peer + ROW + l, 8);
    if (a.bug == 1) {
      fence_sys();
      sync_warp();
      if (l == 0) st_relaxed_sys(say, 1u);
    }
    return;
  }
  stg<uint32_t>(a.mine + ROW + l, 7);
  sync_warp();
  if (l == 0) st_release_sys(a.peer + FLAG, 1u);
  sync_warp();
  bool late = a.bug == 3 && look_sys(said);
  uint32_t v = ldg_any<uint32_t>(a.mine + ROW + l);
  if (a.bug < 3) late = look_sys(said);
  if (!late) confirm(a.mine + ROW + l, 4);
  stg<uint32_t>(a.out + l, late ? 7 : v);
}

// All blocks publish, meet at a counter, and read each other. 1: no wait at the counter; 2: relaxed counter.
// 3: the first block waits for a block that is never resident; needs more blocks than fit.
inline void grid(const Args &a) {
  uint32_t blocks = a.bug == 3 ? 6 : 3;
  stg<uint32_t>(a.mine + bid() * 64 + tid(), bid() * 1000 + tid());
  sync_threads();
  bool ok = true;
  if (tid() == 0) {
    if (a.bug == 2)
      atomic_add(a.ctr[a.rank], 1);
    else
      atomic_add_acq_rel_gpu(a.ctr[a.rank], 1);
    uint64_t start = globaltimer();
    while (a.bug != 1 && ok && ld_acquire_gpu(a.ctr[a.rank]) < blocks) {
      nanosleep(50);
      if (a.timeoutNs && globaltimer() - start > a.timeoutNs) ok = false;
    }
  }
  ok = shfl(FULL, ok, 0);
  sync_threads();
  uint32_t sum = 0;
  for (uint32_t b = 0; b < blocks && ok && a.bug != 3; b++) sum += ldg<uint32_t>(a.mine + b * 64 + tid());
  stg<uint32_t>(a.out + bid() * 64 + tid(), sum);
}

// Execution: scans, divergent halves, named barriers, mbarrier arrivals, votes. 1: barrier missing in a block scan;
// 2: named barrier count differs; 3: an mbarrier arrival missing; 4 (legal): timeout taken; 5: vote-polling a flag that
// nobody sets; 6: lanes call different collectives; 7: a flag nobody sets, without timeout; 8: memory used before
// grid_wait
inline void execution(const Args &a) {
  const uint32_t l = lane(), w = warp(), s = smem_base();
  if (a.bug == 8) ldg<uint32_t>(a.ctr[a.rank]);
  grid_wait();
  if (tid() == 0) {
    mbar_init(s, 32);
    fence_mbar_init();
  }
  sync_threads();
  uint32_t v = l + 1;
  for (uint32_t d = 1; d < 32; d <<= 1) {
    uint32_t u = shfl_up(FULL, v, d);
    if (l >= d) v += u;
  }
  if (l == 31) sts<uint32_t>(s + 64 + 4 * w, v);
  if (a.bug != 1) sync_threads();
  uint32_t base = 0;
  for (uint32_t i = 0; i < w; i++) base += lds<uint32_t>(s + 64 + 4 * i);
  stg<uint32_t>(a.out + tid(), base + v);
  if (w < 2) {
    uint32_t m = l < 16 ? 0xffffu : 0xffff0000u;
    v = l < 16 ? ballot(m, l & 1) : shfl(m, l, 16 + (l + 1) % 16);
  }
  if (a.bug == 6) v = l < 16 ? ballot(FULL, l & 1) : shfl(FULL, l, 0);
  for (uint32_t i = 0; i < 3; i++) { // warp 0 produces, warp 1 consumes
    if (w == 0) {
      if (i) bar_sync(3, 64);
      sts<uint32_t>(s + 1024 + 4 * l, i * 100 + l);
      bar_arrive(2, a.bug == 2 ? 96 : 64);
    }
    if (w == 1) {
      bar_sync(2, 64);
      stg<uint32_t>(a.out + 256 + i * 32 + l, lds<uint32_t>(s + 1024 + 4 * (31 - l)));
      if (i < 2) bar_arrive(3, 64);
    }
  }
  if (w == 2) {
    sts<uint32_t>(s + 2048 + 4 * l, l * 3);
    if (a.bug != 3 || l) mbar_arrive(s);
  }
  if (w == 3) {
    mbar_wait(s, 0);
    stg<uint32_t>(a.out + 512 + l, lds<uint32_t>(s + 2048 + 4 * l));
  }
  sync_threads();
  if (tid() == 0) { // barrier of all ranks
    for (uint32_t r = 0; r < a.ranks; r++) {
      fence_sys();
      atomic_cas(a.ctr[r] + 1 + a.rank, 0, 1);
    }
    uint64_t start = globaltimer();
    uint32_t late = 0;
    for (uint32_t r = 0; r < a.ranks + (a.bug == 4) && !late; r++)
      while (ld_acquire_sys(a.ctr[a.rank] + 1 + r) == 0 && !late) {
        late = a.bug == 4 && globaltimer() - start > 50000000;
        nanosleep(50);
      }
    stg<uint32_t>(a.out + 600, late);
    while (a.bug == 7 && ld_acquire_sys(a.ctr[a.rank] + 20) == 0) nanosleep(20);
  }
  if (w == 1) {
    bool done;
    do {
      uint32_t f = l < a.ranks ? ld_acquire_sys(a.ctr[a.rank] + 1 + l) : 1;
      if (a.bug == 5 && l == 30) f = ld_acquire_sys(a.ctr[a.rank] + 20);
      done = ballot(FULL, f == 1) == FULL;
    } while (!done);
  }
}

// Rows to the next domain by puts, a strong signal after them, and a credit back; three rounds through one place.
// 1: a weak signal; 2: the signal before the puts; 3: the signal on another context; 4: the source rewritten without flush;
// 5: no wait for the credit; 6: no wait for the signal; 7: a put past the end; 8: a put to the own domain; 9: the source
// written by other lanes without sync; 10 (legal): more puts than a queue holds; 11: a signal that is not there; 12 (legal):
// the last put brings the signal along; 13: a weak one
inline void network(const Args &a) {
  const uint32_t SEND = 0, LAND = 512, WORDS = 64, last = 4 * 8192;
  uint32_t l = lane(), next = (a.rank + 1) % a.ranks, previous = (a.rank + a.ranks - 1) % a.ranks;
  uint32_t pieces = a.bug == 10 ? 32 : 2, each = 4 * WORDS / pieces;
  if (tid() >= 32) return;
  for (uint32_t round = 1; round <= 3; round++) {
    for (uint32_t i = l; i < WORDS; i += 32) stg<uint32_t>(a.mine + SEND + i, 1000 * round + 100 * a.rank + i);
    if (a.bug != 9) sync_warp();
    if (l == 0) {
      while (a.bug != 5 && gin_read(a.gin, 1, 1) < round - 1) nanosleep(20);
      if (a.bug == 2) gin_signal(a.gin, 0, next, 0, 1);
      for (uint32_t i = 0; i + (a.bug > 11) < pieces; i++)
        gin_put(a.gin, 0, a.bug == 8 ? a.rank : next, 4 * LAND + i * each, a.bug == 7 ? last - 64 : i * each, each);
      if (a.bug == 1)
        gin_signal_weak(a.gin, 0, next, 0, 1);
      else if (a.bug == 12)
        gin_put_signal(a.gin, 0, next, 4 * LAND + each, each, each, 0, 1);
      else if (a.bug == 13)
        gin_put_signal_weak(a.gin, 0, next, 4 * LAND + each, each, each, 0, 1);
      else if (a.bug != 2)
        gin_signal(a.gin, a.bug == 3, next, a.bug == 11 ? 99 : 0, 1);
      while (a.bug != 6 && gin_read(a.gin, a.bug == 3, 0) < round) nanosleep(20);
    }
    sync_warp();
    for (uint32_t i = l; i < WORDS; i += 32) stg<uint32_t>(a.out + i, ldg<uint32_t>(a.mine + LAND + i));
    sync_warp();
    if (l == 0) gin_signal_weak(a.gin, 1, previous, 1, 1);
    if (a.bug != 4) gin_flush(a.gin, 0, [](uint32_t) { return false; });
    sync_warp();
  }
}

} // namespace litmus
