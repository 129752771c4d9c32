/* What dispatch and combine share: a warp's two stages in shared memory, the credit before a peer's staging is written, the
 * flag after it, and the end of an operation. A sender warp moves rows alone: its lane 0 issues all bulk stores, so the
 * completion that lane waits for covers them.
 *
 * Flags are raised by the block's last warp, the signaller: a release at system scope holds its thread up for the time of
 * everything the SM has on the link, several microseconds under load, and would stall a sender for each row. Senders work in
 * rounds, one chunk each; when all chunks of a round have landed, one fence by the signaller covers them.
 *
 * Which chunks: a block draws a ticket for each round, so that fast blocks send more and rows leave in order. Its signaller
 * draws, EP_DEAL_AHEAD rounds ahead; the first of them are dealt without drawing. Received rows are drawn by each warp alone.
 *
 * Units of work are numbered n = 0, 1, ... in each warp; unit n uses stage n & 1. The load of unit n + 1 is issued when the
 * stores of unit n - 1 have left its stage: before unit n is stored where nothing has to be waited for, after it where the
 * next unit may not have arrived yet. */
#ifndef EP_DEVICE_ROWS_H_
#define EP_DEVICE_ROWS_H_

#include "kind.h"

template <class C> DEV epConfig ep_plain_config(const C c) {
  epConfig plain;
#define X(name) plain.name = c.name;
  EP_CONFIG_FIELDS(X)
#undef X
  return plain;
}

struct epPipe {
  uint32_t stages, bars; /* shared memory addresses of the warp's stages and mbarriers */
  uint32_t table; /* and of what is known of each rank: polls flush the L1, so a table in memory costs a trip each */
  uint32_t stageBytes;
  uint32_t parity; /* a bit a stage */
};

template <class C> DEV bool ep_is_signaller(const C c) { return p::warp() == epSenders(c.threads); }
DEV uint32_t ep_landed_bar(uint32_t round) { return p::smem_base() + EP_VERDICT_BYTES + 8 * (round % EP_SIGNAL_DEPTH); }
DEV uint32_t ep_signalled_bar(uint32_t round) { return ep_landed_bar(round) + 8 * EP_SIGNAL_DEPTH; }
DEV uint32_t ep_deal_bar(uint32_t round) { return p::smem_base() + epDealOffset() + 8 * (round % EP_DEALT); }
DEV uint32_t ep_deal_word(uint32_t round) {
  return p::smem_base() + epDealOffset() + 8 * EP_DEALT + 4 * (round % EP_DEALT);
}
/* How sender w's chunk of a round went: read by the signaller when the round has landed. Kept for as many rounds as tickets are: a
 * sender writes it a round before it waits for the signaller. */
template <class C> DEV uint32_t ep_went(const C c, uint32_t round, uint32_t w) {
  uint32_t senders = epSenders(c.threads);
  return p::smem_base() + epWentOffset(senders) + 4 * (round % EP_DEALT * senders + w);
}
DEV uint32_t ep_round_parity(uint32_t round) { return round / EP_SIGNAL_DEPTH & 1; }

/* Whole block. */
template <class C> DEV epPipe ep_pipe(const C c, const epGroupArgs &g) {
  uint32_t senders = epSenders(c.threads);
  epPipe q;
  q.stageBytes = c.stageBytes;
  q.bars = p::smem_base() + epBarOffset() + 16 * p::warp();
  q.table = p::smem_base() + epTableOffset(senders);
  q.stages = p::smem_base() + epControlSmem(senders, c.ranks) + p::warp() * 2 * q.stageBytes;
  q.parity = 0;
  for (uint32_t r = p::tid(); r < c.ranks; r += c.threads)
    p::sts<uint64_t>(q.table + 8 * r, p::ldg<uint64_t>(g.windows + r));
  if (c.bulk && p::lane() == 0) {
    if (ep_is_signaller(c)) {
      for (uint32_t i = 0; i < EP_SIGNAL_DEPTH; i++) {
        p::mbar_init(ep_landed_bar(i), senders);
        p::mbar_init(ep_signalled_bar(i), 1);
      }
      for (uint32_t i = 0; i < EP_DEALT; i++) p::mbar_init(ep_deal_bar(i), 1);
    } else {
      p::mbar_init(q.bars, 1);
      p::mbar_init(q.bars + 8, 1);
    }
    p::fence_mbar_init();
  }
  p::sync_threads();
  return q;
}

/* Ticket of round r of this block, dealt by now or soon; rounds end with the first ticket beyond the last. */
#define EP_DEAL_AHEAD 6u
template <class C> DEV uint32_t ep_ticket(const C c, uint32_t pushBlocks, uint32_t r) {
  if (!c.bulk) return p::bid() + r * pushBlocks;
  p::mbar_wait(ep_deal_bar(r), r / EP_DEALT & 1);
  return p::lds<uint32_t>(ep_deal_word(r));
}

/* Signaller, lane 0: deals round r, which nobody looks at before round r - EP_DEAL_AHEAD has been sent. */
DEV void ep_deal(const epGroupArgs &g, uint32_t pushBlocks, uint32_t r, uint32_t total) {
  uint32_t ticket = p::bid() + r * pushBlocks;
  if (r >= EP_DEAL_AHEAD && EP_DEAL_AHEAD * pushBlocks < total)
    ticket = EP_DEAL_AHEAD * pushBlocks + p::atomic_add(&ep_state(g)->sendTickets, 1);
  p::sts<uint32_t>(ep_deal_word(r), ticket);
  p::mbar_arrive(ep_deal_bar(r));
}

/* Signaller, whole warp: the first rounds are dealt before anything is drawn. */
template <class C> DEV void ep_deal_first(const C c, const epGroupArgs &g, uint32_t pushBlocks, uint32_t total) {
  if (c.bulk && ep_is_signaller(c) && p::lane() == 0)
    for (uint32_t r = 0; r < EP_DEAL_AHEAD; r++) ep_deal(g, pushBlocks, r, total);
}

/* A warp's draws of received items: the first two of a warp that receives from the start are dealt, the rest are drawn one
 * ahead. `drawn` is lane 0's. */
struct epDraw {
  uint32_t dealt, step, first, drawn;
};

DEV void ep_draw_ahead(const epGroupArgs &g, epDraw &d) {
  if (p::lane() == 0) d.drawn = p::atomic_add(&ep_state(g)->takeTickets, 1);
}

/* `index` of the `warps` that receive from the start; one that joins them later only draws. */
DEV epDraw ep_draw_begin(const epGroupArgs &g, uint32_t index, uint32_t warps, bool joins) {
  epDraw d;
  d.dealt = joins ? 2 * warps : index;
  d.step = warps;
  d.first = 2 * warps;
  d.drawn = 0;
  ep_draw_ahead(g, d);
  return d;
}

DEV uint32_t ep_draw(const epGroupArgs &g, epDraw &d) {
  uint32_t item = d.dealt;
  if (item < d.first) {
    d.dealt += d.step;
    return item;
  }
  item = d.first + p::shfl(p::FULL, d.drawn, 0);
  ep_draw_ahead(g, d);
  return item;
}

/* Rounds that one fence covers. A block of few senders goes through many rounds, and with a fence for each there would be one on its
 * way at all times, at which the SM's stores queue. The flags of a fence wait for its last round, so the last rounds of all
 * have a fence each, and so has everything where there are fewer than some fifty rounds. */
DEV uint32_t ep_rounds_a_fence(uint32_t pushBlocks, uint32_t rounds) {
  uint32_t n = rounds / pushBlocks / (pushBlocks < 16 ? 9 : 12); /* few blocks do not fill the link */
  return n < 4 ? 1 : n > EP_ROUNDS_A_FENCE ? EP_ROUNDS_A_FENCE : n;
}
/* Rounds that senders may be ahead of their signaller: no more than help, so that blocks stay together. */
DEV uint32_t ep_rounds_ahead(uint32_t pushBlocks, uint32_t rounds) {
  return ep_rounds_a_fence(pushBlocks, rounds) > 1 ? EP_SIGNAL_DEPTH : EP_SIGNAL_DEPTH / 2;
}
DEV bool ep_round_is_late(uint32_t pushBlocks, uint32_t rounds, uint32_t ticket) {
  return ticket + 2 * pushBlocks >= rounds;
}

/* Sender, whole warp: what it stored in round `round` and before has landed. */
DEV void ep_post(uint32_t round, uint32_t ahead) {
  if (p::lane() == 0) {
    if (round >= ahead) p::mbar_wait(ep_signalled_bar(round - ahead), ep_round_parity(round - ahead));
    p::mbar_arrive(ep_landed_bar(round));
  }
}

/* Signaller: all rows of a round have landed. */
template <class C> DEV void ep_signal_landed(const C c, uint32_t round) {
  if (c.bug != EP_BUG_SIGNAL_FIRST) p::mbar_wait(ep_landed_bar(round), ep_round_parity(round));
}

/* Signaller, whole warp: relaxed stores of the flags of rounds that have landed may follow. */
template <class C> DEV void ep_signal_begin(const C c) {
  p::sync_warp();
  if (c.bug != EP_BUG_FLAG_RELAXED) p::fence_sys();
}

template <class C> DEV void ep_signal_end(const C c, uint32_t round) {
  p::sync_warp();
  if (c.bug == EP_BUG_SIGNAL_FIRST) p::mbar_wait(ep_landed_bar(round), ep_round_parity(round));
  if (p::lane() == 0) p::mbar_arrive(ep_signalled_bar(round));
}

/* Rounds of all blocks together: a round is an item for each sender of a block. */
template <class C> DEV uint32_t ep_rounds(const C c, uint64_t items) {
  return (uint32_t)((items + epSenders(c.threads) - 1) / epSenders(c.threads));
}

/* Rows from source s, and the first flat one. */
template <class C> DEV uint32_t ep_rows_at(const C c, const epPipe &q, uint32_t s) {
  return q.table + 8 * c.ranks + 4 * s;
}
template <class C> DEV uint32_t ep_rows(const C c, const epPipe &q, uint32_t s) {
  return p::lds<uint32_t>(ep_rows_at(c, q, s));
}
template <class C> DEV uint32_t ep_first_row(const C c, const epPipe &q, uint32_t s) {
  return p::lds<uint32_t>(ep_rows_at(c, q, c.ranks + s));
}

DEV uint8_t *ep_peer(const epPipe &q, uint32_t rank) { return (uint8_t *)p::lds<uint64_t>(q.table + 8 * rank); }
/* The flag of a chunk, and the staging row, that `writer` writes in the window of `owner`. */
DEV uint32_t *ep_flag(const epGroupArgs &g, const epPipe &q, uint32_t owner, uint32_t writer, uint32_t chunk) {
  return (uint32_t *)(ep_peer(q, owner) + g.window.stageFlags) + (uint64_t)writer * g.window.chunks + chunk;
}
DEV uint8_t *ep_stage_row(const epGroupArgs &g, const epPipe &q, uint32_t owner, uint32_t writer, uint32_t row) {
  return ep_peer(q, owner) + epStageRow(&g.window, g.stageRows, owner, writer, row);
}
DEV uint32_t ep_stage(const epPipe &q, uint32_t n) { return q.stages + (n & 1) * q.stageBytes; }
DEV uint32_t ep_bar(const epPipe &q, uint32_t n) { return q.bars + 8 * (n & 1); }

/* Whole warp, before a stage is loaded again: its stores have read it, and so have the warp's lanes. `Later` groups of
 * stores were issued since. */
template <int Later, class C> DEV void ep_stage_free(const C c) {
  if (p::lane() == 0 && c.bug != EP_BUG_STAGE_REUSE) p::bulk_wait_read<Later>();
  p::sync_warp();
}

/* Whole warp: lane 0 announces `bytes` of loads before any lane issues them. */
DEV void ep_stage_expect(const epPipe &q, uint32_t n, uint32_t bytes) {
  if (p::lane() == 0) p::mbar_expect_tx(ep_bar(q, n), bytes);
  p::sync_warp();
}

/* Each lane that issues a load: what its warp read from the stage, and what an acquire made visible, comes before it. */
template <class C> DEV void ep_fence_load(const C c) {
  if (c.bug != EP_BUG_NO_PROXY_FENCE_LOAD) p::fence_proxy_async_global();
}

DEV void ep_stage_arrived(epPipe &q, uint32_t n) {
  p::mbar_wait(ep_bar(q, n), q.parity >> (n & 1) & 1);
  q.parity ^= 1u << (n & 1);
}

/* Whole warp, after lanes wrote into a stage: lane 0's bulk stores will see it. */
template <class C> DEV void ep_stage_written(const C c) {
  if (c.bug != EP_BUG_NO_PROXY_FENCE_STORE) p::fence_proxy_async();
  p::sync_warp();
}

/* Whole warp: all bulk stores but those of the last `Keep` groups have landed; their flags may follow. */
template <int Keep, class C> DEV void ep_stores_landed(const C c) {
  if (c.bulk && p::lane() == 0) {
    if (c.bug == EP_BUG_WAIT_READ_ONLY)
      p::bulk_wait_read<Keep>();
    else
      p::bulk_wait<Keep>();
  }
  p::sync_warp();
}

/* Whole warp, without bulk copies: a row of 16-byte vectors from memory to memory. */
DEV void ep_row_copy(uint8_t *dst, const uint8_t *src, uint32_t bytes) {
  for (uint32_t i = p::lane() * 16; i < bytes; i += 512) p::stg<uint4>(dst + i, p::ldg<uint4>(src + i));
}

DEV uint4 ep_zero4() {
  uint4 z;
  z.x = z.y = z.z = z.w = 0;
  return z;
}

/* With masks: nothing is sent to this rank by this block. Known once credits were waited for. */
template <class C> DEV bool ep_left_out(const C c, const epPipe &q, uint32_t rank) {
  return c.mask && !ep_peer(q, rank);
}

/* Whole block, its last threads first: those of the signaller have nothing else to look at. Every peer has finished reading what operation gen - 1 and earlier left in its staging. */
template <class C>
DEV bool ep_wait_credits(const C c, const epGroupArgs &g, const epPipe &q, uint32_t gen, uint32_t phase) {
  const uint32_t *credits = (const uint32_t *)(ep_peer(q, g.rank) + g.window.credits);
  bool ok = true;
  for (uint32_t r = c.threads - 1 - p::tid(); r < c.ranks && ok && c.bug != EP_BUG_NO_CREDIT; r += c.threads)
    if (r != g.rank) {
      ok = ep_await_flag(c, g, credits + r, gen - 1, phase, r);
      if (!ok && !ep_stopped(c, g)) {
        p::sts<uint64_t>(q.table + 8 * r, 0); /* ep_left_out: what this block has for it stays here */
        ok = true;
      }
    }
  ok = ep_block_agrees(ok);
  if (c.bulk) /* the stores that follow are the async proxy's */
    p::fence_proxy_async_global();
  return ok;
}

/* Every block of an operation ends here; the last one returns the credits and moves the generation, unless the receiving part is still to
 * come. What was read from
 * staging has arrived in shared memory; output stores that are still on their way end with the kernel. */
template <class C>
DEV void ep_operation_end(const C c, const epGroupArgs &g, const epPipe &q, uint32_t gen, uint32_t blocks) {
  epGroupState *state = ep_state(g);
  if (c.bulk && p::lane() == 0) p::bulk_wait_read<0>();
  p::sync_threads();
  if (p::tid() != 0 || p::atomic_add_acq_rel_gpu(&state->stageDone, 1) != blocks - 1) return;
  for (uint32_t r = 0; r < c.ranks && c.part != EP_PART_SEND; r++)
    if (r != g.rank && !ep_masked(c, g, r) && !ep_left_out(c, q, r))
      p::st_release_sys((uint32_t *)(ep_peer(q, r) + g.window.credits) + g.rank, gen);
  p::stg<uint32_t>(&state->stageDone, 0);
  if (c.part != EP_PART_SEND) { /* where that gave up, the other part need not wait long */
    p::stg<uint32_t>(&state->aborted, 0);
    p::stg<uint32_t>(&state->errorClaimed, 0);
  }
  p::stg<uint32_t>(&state->epilogueStarted, 0);
  p::stg<uint32_t>(&state->sendTickets, 0);
  p::stg<uint32_t>(&state->takeTickets, 0);
  p::stg<uint32_t>(&state->sendersStarted, 0);
  if (c.part != EP_PART_SEND) p::stg<uint32_t>(&state->stageGen, gen);
}

/* Planted fault: a sender that waits for an epilogue block of its own kernel hangs where that block is not resident. */
template <class C> DEV void ep_bug_wait_unscheduled(const C c, const epGroupArgs &g, bool push) {
  if (c.bug != EP_BUG_WAIT_UNSCHEDULED || p::tid() != 0) return;
  if (push)
    ep_wait_flag(g, &ep_state(g)->epilogueStarted, 1, EP_PHASE_GRID, g.rank);
  else
    p::st_release_sys(&ep_state(g)->epilogueStarted, 1);
}

/* Of the update that made the record. 0: that gave up (and has said so), or there was none: there is nothing to move. */
DEV uint32_t ep_record_made(const epRecordLayout &rl, const uint8_t *record) {
  return p::ldg<uint32_t>(&((const epRecordHeader *)(record + rl.header))->generation);
}
DEV bool ep_record_usable(const epRecordLayout &rl, const uint8_t *record) { return ep_record_made(rl, record) != 0; }

/* Tokens of the routing, never more than the record holds: a caller may bring a record of fewer than its tensor. */
DEV uint32_t ep_tokens(const epRecordLayout &rl, const uint8_t *record, uint32_t given) {
  uint32_t held = p::ldg<uint32_t>(&((const epRecordHeader *)(record + rl.header))->tokens);
  return held < given ? held : given;
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
  uint32_t base =
      p::ldg<uint32_t>((const uint32_t *)(record + rl.slotBase) + s * (c.experts / c.ranks) + EP_ENTRY_EXPERT(entry));
  return base + EP_ENTRY_POS(entry);
}

/* Whole block, before a barrier: what the record says of each source. */
template <class C>
DEV void ep_keep_counts(const C c, const epRecordLayout &rl, const uint8_t *record, const epPipe &q) {
  for (uint32_t s = p::tid(); s < c.ranks; s += c.threads) {
    p::sts<uint32_t>(ep_rows_at(c, q, s), p::ldg<uint32_t>((const uint32_t *)(record + rl.recvCount) + s));
    p::sts<uint32_t>(ep_rows_at(c, q, c.ranks + s), p::ldg<uint32_t>((const uint32_t *)(record + rl.recvBase) + s));
  }
}

DEV uint32_t ep_warp_max(uint32_t most) {
  for (uint32_t d = 16; d; d >>= 1) {
    uint32_t n = p::shfl_xor(p::FULL, most, d);
    most = n > most ? n : most;
  }
  return most;
}

/* Rows of the busiest source: whole warp, same answer in all lanes. */
template <class C> DEV uint32_t ep_most_rows(const C c, const epPipe &q) {
  uint32_t most = 0;
  for (uint32_t s = p::lane(); s < c.ranks; s += 32) {
    uint32_t n = ep_rows(c, q, s);
    most = n > most ? n : most;
  }
  return ep_warp_max(most);
}

/* The signallers of the first block that sends and of the first that receives, which has nothing else to do: the one tells the peers which
 * operation this is, the other looks whether it is theirs. */
template <class C>
DEV void ep_meet_peers(const C c, const epGroupArgs &g, const epPipe &q, uint32_t gen, uint32_t kind, bool push,
                       bool usable) {
  if (!push && usable)
    ep_greeted(c, g, 0, c.ranks, gen, kind,
               EP_KIND_OF(kind) == EP_KIND_COMBINE ? EP_PHASE_COMBINE_ROWS : EP_PHASE_DISPATCH_ROWS);
  for (uint32_t r = p::lane(); push && r < c.ranks; r += 32) {
    if (r == g.rank || ep_masked(c, g, r)) continue;
    uint8_t *window = c.mask ? ep_window(g, r) : ep_peer(q, r); /* with masks the table is about to be written */
    p::st_relaxed_sys(ep_hello(g, window, g.rank, gen), (uint64_t)gen << 32 | kind);
  }
}

/* Dispatch and combine alike: the first blocks send, the warps of the others receive, and all end together. With `Joins`, warps whose
 * `send` says so receive after it. What receivers need first, whole blocks get in `before`; a fused dispatch's senders need no
 * record. */
template <bool Joins, class C, class Args, class Before, class Send, class Receive>
DEV void ep_operation(const C c, const Args &a, uint32_t kind, Before before, Send send, Receive receive) {
  p::grid_wait();
  epProfile profile = ep_profile_begin(a.group, kind);
  uint32_t gen = p::ldg<uint32_t>(&ep_state(a.group)->stageGen) + 1;
  bool push = c.part == EP_PART_WHOLE ? p::bid() < a.pushBlocks : c.part == EP_PART_SEND, usable = push || before(gen);
  if (!push && c.fused) ep_profile_span(profile, EP_SPAN_RECORD);
  bool record = usable && !(push && c.fused);
  uint32_t made = record ? ep_record_made(a.recordLayout, a.record) : 0;
  if (record)
    usable = made != 0 && ep_record_current(c, a.group, (const epRecordHeader *)(a.record + a.recordLayout.header));
  epPipe q = ep_pipe(c, a.group);
  ep_bug_wait_unscheduled(c, a.group, push);
  if (record && usable) ep_keep_counts(c, a.recordLayout, a.record, q);
  p::sync_threads();
  if (c.ranks > 1 && ep_is_signaller(c) && p::bid() == (push ? 0 : a.pushBlocks))
    ep_meet_peers(c, a.group, q, gen, ep_kind(c, kind, made), push, usable);
  if constexpr (Joins) { /* one call for both: what receives is much of a kernel's text */
    bool receives = usable && !push && !ep_is_signaller(c);
    if (usable && push) receives = send(q, gen);
    if (receives) receive(q, gen);
  } else if (usable && push) {
    send(q, gen);
  } else if (usable && !ep_is_signaller(c)) {
    receive(q, gen);
  }
  p::grid_launch();
  ep_operation_end(c, a.group, q, gen, a.blocks);
  ep_profile_end(profile, push ? EP_SPAN_SEND : EP_SPAN_RECEIVE, a.blocks);
}

#endif
