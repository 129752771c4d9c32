/* What all kernels share: where things lie (through layout.h), the one way to wait, and the one way to say that a wait
 * failed. A wait always ends: satisfied, aborted, or after the group's timeout. */
#ifndef EP_DEVICE_GROUP_H_
#define EP_DEVICE_GROUP_H_

#include "abi.h"
#include "bugs.h"
#include "prim.h"
#include "profile.h"

DEV epGroupState *ep_state(const epGroupArgs &g) { return (epGroupState *)(g.scratch + g.scratchLayout.state); }
DEV uint8_t *ep_window(const epGroupArgs &g, uint32_t rank) { return (uint8_t *)p::ldg<uint64_t>(g.windows + rank); }
DEV uint64_t ep_shfl64(uint64_t v, uint32_t from) {
  uint32_t lo = p::shfl(p::FULL, (uint32_t)v, from), hi = p::shfl(p::FULL, (uint32_t)(v >> 32), from);
  return (uint64_t)hi << 32 | lo;
}
DEV uint32_t ep_lanes_below() { return (1u << p::lane()) - 1; }
/* A key that no other lane has, for lanes that must not match in match_any. */
DEV uint32_t ep_lone_key() { return 0x80000000u | p::lane(); }

/* The host reads `code` last. */
DEV void ep_write_report(const epGroupArgs &g, uint32_t code, uint32_t phase, uint32_t peer, uint32_t expected,
                         uint32_t seen) {
  p::st_relaxed_sys(&g.error->phase, phase);
  p::st_relaxed_sys(&g.error->peer, peer);
  p::st_relaxed_sys(&g.error->block, p::bid());
  p::st_relaxed_sys(&g.error->expected, expected);
  p::st_relaxed_sys(&g.error->seen, seen);
  p::st_release_sys(&g.error->code, code);
}

/* First error of a group wins. */
DEV void ep_report(const epGroupArgs &g, uint32_t code, uint32_t phase, uint32_t peer, uint32_t expected,
                   uint32_t seen) {
  epGroupState *s = ep_state(g);
  p::st_relaxed_sys(&s->aborted, 1);
  if (p::atomic_cas(&s->errorClaimed, 0, 1) != 0 || p::ld_relaxed_sys(&g.error->code) != EP_ERR_NONE) return;
  ep_write_report(g, code, phase, peer, expected, seen);
}

/* A topk_idx outside [0, E) that is not -1; the first of a routing is reported whole. */
DEV void ep_report_index(const epGroupArgs &g, uint32_t token, uint32_t k, int64_t value) {
  if (p::atomic_cas(&ep_state(g)->indexClaimed, 0, 1) != 0) return;
  p::st_relaxed_sys(&g.error->badIndexToken, token);
  p::st_relaxed_sys(&g.error->badIndexK, k);
  p::st_relaxed_sys(&g.error->badIndexValue, (uint32_t)value);
  p::st_relaxed_sys(&g.error->badIndexHigh, (uint32_t)((uint64_t)value >> 32));
  p::st_release_sys(&g.error->badIndexCode, 1);
}

/* One round of patience: true when the waiter must give up. The host's abort word lies across PCIe, so it is looked at
 * rarely. */
DEV bool ep_give_up(const epGroupArgs &g, uint64_t start, uint32_t round, uint32_t phase, uint32_t peer,
                    uint32_t expected, uint32_t seen) {
  if (round >= 16) /* most waits are for what is on its way */
    p::nanosleep(32);
  if ((round & 15) != 15) return false;
  if (p::ld_relaxed_sys(&ep_state(g)->aborted)) return true;
  if ((round & 1023) == 1023 && p::ld_relaxed_sys(g.abortWord)) {
    ep_report(g, EP_ERR_ABORT, phase, peer, expected, seen);
    return true;
  }
  if (p::globaltimer() - start > g.timeoutNs) {
    ep_report(g, EP_ERR_TIMEOUT, phase, peer, expected, seen);
    return true;
  }
  return false;
}

/* `want` has been reached: generations are counted in 31 bits, above them a flag may have EP_DIRECT. */
DEV bool ep_reached(uint32_t seen, uint32_t want) { return (int32_t)((seen - want) << 1) >= 0; }

/* Waits until the generation at `flag` has reached `want`; what the writer released before is visible after it. *seen: what
 * was there then. */
DEV bool ep_wait_flag(const epGroupArgs &g, const uint32_t *flag, uint32_t want, uint32_t phase, uint32_t peer,
                      uint32_t *seen) {
  *seen = p::ld_acquire_sys(flag);
  if (ep_reached(*seen, want)) return true;
  uint64_t start = p::globaltimer();
  for (uint32_t round = 0;; round++) {
    *seen = p::ld_acquire_sys(flag);
    if (ep_reached(*seen, want)) {
      ep_profile_waited(g, start, phase, peer);
      return true;
    }
    if (ep_give_up(g, start, round, phase, peer, want, *seen)) return false;
  }
}

DEV bool ep_wait_flag(const epGroupArgs &g, const uint32_t *flag, uint32_t want, uint32_t phase, uint32_t peer) {
  uint32_t seen;
  return ep_wait_flag(g, flag, want, phase, peer, &seen);
}

/* Waits for a word that carries its generation in the upper half; value in the lower half. */
DEV bool ep_wait_word(const epGroupArgs &g, const uint64_t *word, uint32_t want, uint32_t phase, uint32_t peer,
                      uint32_t *value) {
  uint64_t start = 0;
  for (uint32_t round = 0;; round++) {
    uint64_t v = p::ld_relaxed_sys(word);
    *value = (uint32_t)v;
    if ((uint32_t)(v >> 32) == want) {
      if (round) ep_profile_waited(g, start, phase, peer);
      return true;
    }
    if (round == 0) start = p::globaltimer();
    if (ep_give_up(g, start, round, phase, peer, want, (uint32_t)(v >> 32))) return false;
  }
}

/* Lane 0 waits for the warp; all lanes get what it saw. */
DEV bool ep_warp_wait_flag(const epGroupArgs &g, const uint32_t *flag, uint32_t want, uint32_t phase, uint32_t peer,
                           uint32_t *seen) {
  bool ok = true;
  *seen = 0;
  if (p::lane() == 0) ok = ep_wait_flag(g, flag, want, phase, peer, seen);
  ok = p::shfl(p::FULL, ok, 0);
  *seen = p::shfl(p::FULL, *seen, 0);
  p::sync_warp();
  return ok;
}

DEV bool ep_warp_wait_flag(const epGroupArgs &g, const uint32_t *flag, uint32_t want, uint32_t phase, uint32_t peer) {
  uint32_t seen;
  return ep_warp_wait_flag(g, flag, want, phase, peer, &seen);
}

/* All threads of the block agree on `ok`; the verdict word is the first of shared memory. A full barrier. */
DEV bool ep_block_agrees(bool ok) {
  if (p::tid() == 0) p::sts<uint32_t>(p::smem_base(), 0);
  p::sync_threads();
  if (!ok) p::sts<uint32_t>(p::smem_base(), 1);
  p::sync_threads();
  bool all = p::lds<uint32_t>(p::smem_base()) == 0;
  p::sync_threads();
  return all;
}

#endif
