/* What dispatch and combine share: a warp's row buffer in shared memory, the credit before a peer's staging is written,
 * the flag after it, and the end of an operation. A warp moves rows alone; only its lane 0 issues bulk copies, so the
 * completion it waits for covers them all and no other thread takes part in the handshake. */
#ifndef EP_DEVICE_ROWS_H_
#define EP_DEVICE_ROWS_H_

#include "group.h"

/* One row (and its weights behind it) a warp. */
struct epRowBuffer {
  uint32_t row, bar, parity;
};

template <class C> DEV epConfig ep_plain_config(const C c) {
  epConfig plain;
#define X(name) plain.name = c.name;
  EP_CONFIG_FIELDS(X)
#undef X
  return plain;
}

template <class C> DEV epRowBuffer ep_row_buffer(const C c) {
  epConfig plain = ep_plain_config(c);
  epRowBuffer b;
  b.bar = p::smem_base() + EP_VERDICT_BYTES + 8 * p::warp();
  b.row = p::smem_base() + epControlSmem(&plain) + p::warp() * epRowBufferBytes(&plain);
  b.parity = 0;
  if (c.bulk) {
    if (p::lane() == 0) {
      p::mbar_init(b.bar, 1);
      p::fence_mbar_init();
    }
    p::sync_warp();
  }
  return b;
}

/* Lane 0: earlier bulk stores have read the buffer, so it may be refilled. Ends with the warp in step. */
template <class C> DEV void ep_row_free(const C c) {
  if (p::lane() == 0 && c.bug != EP_BUG_STAGE_REUSE)
    p::bulk_wait_read<0>();
  p::sync_warp();
}

/* Whole warp: `bytes` at `src` are in the buffer when it returns. The generic reads of the buffer by this warp's lanes
 * precede the sync in ep_row_free; the fence orders them, and what an acquire made visible, before the copy. */
template <class C> DEV void ep_row_load(const C c, epRowBuffer &b, const uint8_t *src, uint32_t bytes) {
  if (p::lane() == 0) {
    if (c.bug != EP_BUG_NO_PROXY_FENCE_LOAD)
      p::fence_proxy_async_global();
    p::mbar_expect_tx(b.bar, bytes);
    p::bulk_g2s(b.row, src, bytes, b.bar);
  }
  p::mbar_wait(b.bar, b.parity);
  b.parity ^= 1;
}

/* Whole warp, after lanes wrote into the buffer: the async proxy sees those writes once lane 0 is past this. */
template <class C> DEV void ep_row_written(const C c) {
  if (c.bug != EP_BUG_NO_PROXY_FENCE_STORE)
    p::fence_proxy_async();
  p::sync_warp();
}

/* Whole warp, no bulk copies: rows of 16-byte vectors from memory to memory. */
DEV void ep_row_copy(uint8_t *dst, const uint8_t *src, uint32_t bytes) {
  for (uint32_t i = p::lane() * 16; i < bytes; i += 512)
    p::stg<uint4>(dst + i, p::ldg<uint4>(src + i));
}

DEV uint4 ep_zero4() {
  uint4 z;
  z.x = z.y = z.z = z.w = 0;
  return z;
}

/* Whole block: every peer has finished reading what operation gen - 1 and earlier left in its staging. */
template <class C> DEV bool ep_wait_credits(const C c, const epGroupArgs &g, uint32_t gen, uint32_t phase) {
  const uint32_t *credits = (const uint32_t *)(ep_window(g, g.rank) + g.window.credits);
  bool ok = true;
  for (uint32_t r = p::tid(); r < c.ranks && ok && c.bug != EP_BUG_NO_CREDIT; r += c.threads)
    if (r != g.rank)
      ok = ep_wait_flag(g, credits + r, gen - 1, phase, r);
  return ep_block_agrees(ok);
}

/* Whole warp: all its bulk stores have landed; flags may follow. */
template <class C> DEV void ep_rows_landed(const C c) {
  if (c.bulk && p::lane() == 0) {
    if (c.bug == EP_BUG_WAIT_READ_ONLY)
      p::bulk_wait_read<0>();
    else
      p::bulk_wait<0>();
  }
  p::sync_warp();
}

template <class C> DEV void ep_raise(const C c, uint32_t *flag, uint32_t gen) {
  if (c.bug == EP_BUG_FLAG_RELAXED)
    p::st_relaxed_sys(flag, gen);
  else
    p::st_release_sys(flag, gen);
}

/* Every block of an operation ends here; the last one returns the credits and moves the generation. */
template <class C> DEV void ep_operation_end(const C c, const epGroupArgs &g, uint32_t gen, uint32_t blocks) {
  epGroupState *state = ep_state(g);
  if (c.bulk && p::lane() == 0)
    p::bulk_wait<0>();
  p::sync_threads();
  if (p::tid() != 0 || p::atomic_add_acq_rel_gpu(&state->stageDone, 1) != blocks - 1)
    return;
  p::fence_sys();
  for (uint32_t r = 0; r < c.ranks; r++)
    if (r != g.rank)
      p::st_release_sys((uint32_t *)(ep_window(g, r) + g.window.credits) + g.rank, gen);
  p::stg<uint32_t>(&state->stageDone, 0);
  p::stg<uint32_t>(&state->aborted, 0);
  p::stg<uint32_t>(&state->errorClaimed, 0);
  p::stg<uint32_t>(&state->epilogueStarted, 0);
  p::stg<uint32_t>(&state->stageGen, gen);
}

/* Planted fault: a sender that waits for an epilogue block of its own kernel hangs where that block is not resident. */
template <class C> DEV void ep_bug_wait_unscheduled(const C c, const epGroupArgs &g, bool push) {
  if (c.bug != EP_BUG_WAIT_UNSCHEDULED || p::tid() != 0)
    return;
  if (push)
    ep_wait_flag(g, &ep_state(g)->epilogueStarted, 1, EP_PHASE_GRID, g.rank);
  else
    p::st_release_sys(&ep_state(g)->epilogueStarted, 1);
}

/* Meta row j of source s in the record. */
template <class C>
DEV const uint32_t *ep_record_meta(const C c, const epGroupArgs &g, const epRecordLayout &rl, const uint8_t *record,
                                   uint32_t s, uint32_t j) {
  return (const uint32_t *)(record + rl.recvMeta) + ((uint64_t)s * g.maxTokens + j) * (1 + c.topk);
}

/* Expert-major slot of an entry from source s. */
template <class C>
DEV uint32_t ep_slot(const C c, const epRecordLayout &rl, const uint8_t *record, uint32_t s, uint32_t entry) {
  uint32_t base = p::ldg<uint32_t>((const uint32_t *)(record + rl.slotBase) + s * (c.experts / c.ranks) +
                                   EP_ENTRY_EXPERT(entry));
  return base + EP_ENTRY_POS(entry);
}

/* Rows of the busiest source: whole warp, same answer in all lanes. */
template <class C> DEV uint32_t ep_most_rows(const C c, const uint32_t *recvCount) {
  uint32_t most = 0;
  for (uint32_t s = p::lane(); s < c.ranks; s += 32) {
    uint32_t n = p::ldg<uint32_t>(recvCount + s);
    most = n > most ? n : most;
  }
  for (uint32_t d = 16; d; d >>= 1) {
    uint32_t n = p::shfl_xor(p::FULL, most, d);
    most = n > most ? n : most;
  }
  return most;
}

#endif
