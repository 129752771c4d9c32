/* Dispatch: token rows to the ranks that own their experts, and the epilogue that arranges what arrives. One kernel; the
 * first blocks push, the others run the epilogue meanwhile, row by row as flags come in.
 *
 *   push      a warp a chunk of tokens (epChunkRows); each row is loaded once and stored once per distinct remote rank, into the
 *             staging row of its token index, so sending needs no scan; then one flag a (destination, chunk)
 *   outputs   window-backed and flat: from the moment a sender knows where rows lie in the peers' outputs it stores them there (local
 *             ones too, in its own), and only what follows the tokens into staging; the epilogue then writes indices and weights
 *   epilogue  a warp a row: local rows straight from the input, remote ones from staging after their flag; flat: one
 *             store, expert-major: one per slot; padding rows are zeroed and index tails filled before anything arrives
 *
 * Bytes at R ranks, N rows received: T rows read, the remote share of them over the link, N rows read and N (flat) or
 * N * slots (expert-major) written. A sender waits for nothing but its peers' credits for the operation before. */
#ifndef EP_DEVICE_DISPATCH_H_
#define EP_DEVICE_DISPATCH_H_

#include "rows.h"
#include "update.h"

/* A chunk of tokens on its way. In each token's element lane k holds k's owner and weight; sends: the lanes that are the
 * first of their remote owner. */
struct epChunk {
  uint32_t t0, rows;
  int32_t expert[EP_MAX_CHUNK_ROWS];
  uint32_t weight[EP_MAX_CHUNK_ROWS];
  uint32_t owner[EP_MAX_CHUNK_ROWS], sends[EP_MAX_CHUNK_ROWS];
  /* into outputs: row among those for the owner, and the owner's first for me; stays: the token has experts here */
  bool direct, stays[EP_MAX_CHUNK_ROWS];
  uint32_t row[EP_MAX_CHUNK_ROWS], first[EP_MAX_CHUNK_ROWS];
};

/* Expert of decision `at`, or -1: of the record, or as the caller gave it where the record is only being made. */
template <class C> DEV int32_t ep_decision(const C c, const epDispatchArgs &a, uint64_t at) {
  if (!c.fused) return p::ldg<int32_t>((const int32_t *)(a.record + a.recordLayout.topk) + at);
  int64_t e = c.indexBytes == 8 ? p::ldg<int64_t>((const int64_t *)a.update.topkIdx + at)
                                : (int64_t)p::ldg<int32_t>((const int32_t *)a.update.topkIdx + at);
  return e >= 0 && e < (int64_t)c.experts ? (int32_t)e : -1;
}

/* Asks for what is known of chunk `index`; nothing waits for the answers yet. */
template <class C>
DEV void ep_chunk_fetch(const C c, const epDispatchArgs &a, uint32_t tokens, uint32_t index, epChunk &k) {
  uint32_t l = p::lane(), size = epChunkRows(c.rowBytes);
  k.t0 = index * size;
  k.rows = k.t0 >= tokens ? 0 : tokens - k.t0 < size ? tokens - k.t0 : size;
#pragma unroll
  for (uint32_t i = 0; i < size; i++) {
    uint64_t at = (uint64_t)(k.t0 + i) * c.topk + l;
    bool there = i < k.rows && l < c.topk;
    k.expert[i] = there ? ep_decision(c, a, at) : -1;
    k.row[i] = k.direct && there ? p::ldg<uint32_t>((const uint32_t *)(a.record + a.recordLayout.sendRow) + at) : 0;
    k.weight[i] = c.weights && there ? p::as_u32(p::ldg<float>(a.weights + at)) : 0;
  }
}

template <class C> DEV void ep_chunk_targets(const C c, const epDispatchArgs &a, epChunk &k) {
#pragma unroll
  for (uint32_t i = 0; i < epChunkRows(c.rowBytes); i++) {
    k.owner[i] = k.expert[i] >= 0 ? (uint32_t)k.expert[i] / (c.experts / c.ranks) : a.group.rank;
    bool remote = k.owner[i] != a.group.rank;
    k.stays[i] = k.direct && p::ballot(p::FULL, k.expert[i] >= 0 && !remote) != 0;
    k.first[i] = k.direct && k.expert[i] >= 0
                     ? p::ldg<uint32_t>((const uint32_t *)(a.record + a.recordLayout.sendBase) + k.owner[i])
                     : 0;
    uint32_t mates = p::match_any(p::FULL, remote ? k.owner[i] : ep_lone_key());
    k.sends[i] = p::ballot(p::FULL, remote && (mates & ep_lanes_below()) == 0);
  }
}

/* Issues the loads of the chunk's rows and writes their weights behind each; rows that stay here are left out. */
template <class C>
DEV void ep_chunk_load(const C c, const epDispatchArgs &a, const epPipe &q, uint32_t n, const epChunk &k) {
  epConfig plain = ep_plain_config(c);
  uint32_t l = p::lane(), stride = epRowBufferBytes(&plain), stage = ep_stage(q, n), wanted = 0;
  uint32_t weightBytes = c.weights ? epWeightBytes(c.topk) : 0, scales = c.rowBytes + weightBytes;
#pragma unroll
  for (uint32_t i = 0; i < epChunkRows(c.rowBytes); i++) wanted |= (k.sends[i] != 0 || k.stays[i]) << i;
  ep_stage_free<0>(c);
  ep_stage_expect(q, n, p::popc(wanted) * c.rowBytes);
  if (wanted >> l & 1) {
    ep_fence_load(c);
    p::bulk_g2s(stage + l * stride, a.tokens + (uint64_t)(k.t0 + l) * c.rowBytes, c.rowBytes, ep_bar(q, n));
  }
  if (c.weights) {
#pragma unroll
    for (uint32_t i = 0; i < epChunkRows(c.rowBytes); i++)
      if (4 * l < weightBytes) p::sts<uint32_t>(stage + i * stride + c.rowBytes + 4 * l, k.weight[i]);
  }
  if (c.scaleBytes) {
#pragma unroll
    for (uint32_t i = 0; i < epChunkRows(c.rowBytes); i++)
      for (uint32_t w = 4 * l; w < c.scaleBytes && i < k.rows; w += 128)
        p::sts<uint32_t>(stage + i * stride + scales + w,
                         p::ldg<uint32_t>(a.scales + (uint64_t)(k.t0 + i) * c.scaleBytes + w));
    for (uint32_t w = c.scaleBytes + 4 * l; w < epAlignUp(c.scaleBytes, EP_ROW_ALIGN); w += 128)
      for (uint32_t i = 0; i < k.rows; i++)
        p::sts<uint32_t>(stage + i * stride + scales + w, 0); /* the last words of the tail travel too */
  }
  if (c.weights || c.scaleBytes) ep_stage_written(c);
}

/* What a sender knows of the ranks' outputs: lane d of rank d's. `ready`: of all that rows may go to. */
struct epOutputs {
  bool ready;
  uint32_t rows;
  uint64_t at;
};

/* Looks, without waiting, whether rows can go into outputs: every rank has begun this dispatch with a window-backed output, and
 * this rank's record says where its rows lie there. */
template <class C>
DEV void ep_outputs_look(const C c, const epDispatchArgs &a, const epPipe &q, uint32_t gen, epOutputs &o) {
  uint32_t l = p::lane(), me = a.group.rank;
  bool ok = true;
  o.rows = a.capacity;
  o.at = (uint64_t)a.outTokens;
  if (l < c.ranks && l != me) {
    const uint64_t *words = (const uint64_t *)(ep_peer(q, me) + a.group.window.outputs) + 2 * l;
    uint64_t offset = p::ld_acquire_sys(words), rows = p::ld_acquire_sys(words + 1);
    ok = (uint32_t)(offset >> 32) == gen && (uint32_t)(rows >> 32) == gen;
    o.rows = (uint32_t)rows;
    o.at = a.outPeers[l] + 16 * (uint64_t)(uint32_t)offset;
  } else if (l == me && c.fused) {
    ok = ep_reached(p::ld_acquire_sys(&ep_state(a.group)->routed), gen);
  }
  o.ready = p::ballot(p::FULL, !ok) == 0;
  p::sync_warp();
  if (!o.ready) return;
  o.ready = !c.fused || ep_record_usable(a.recordLayout, a.record);
  p::fence_proxy_async_global(); /* the stores that follow are the async proxy's */
}

/* One thread for each peer: where this rank's output is, and that its stream has come so far. */
template <class C> DEV void ep_outputs_tell(const C c, const epDispatchArgs &a, uint32_t gen) {
  for (uint32_t r = p::tid(); r < c.ranks; r += c.threads) {
    uint64_t *words = (uint64_t *)(ep_window(a.group, r) + a.group.window.outputs) + 2 * a.group.rank;
    if (r == a.group.rank) continue;
    p::st_release_sys(words, ep_word(gen, (uint32_t)(a.outOffset / 16)));
    p::st_release_sys(words + 1, ep_word(gen, a.capacity));
  }
}

/* Row i of the chunk straight to its place at the owner of lane `from`'s decision: tokens into the output, the rest of the row
 * into staging as ever. A row beyond the owner's capacity is dropped there too. */
template <class C>
DEV void ep_chunk_place(const C c, const epDispatchArgs &a, const epPipe &q, uint32_t n, const epChunk &k, uint32_t i,
                        uint32_t from, const epOutputs &o) {
  epConfig plain = ep_plain_config(c);
  uint32_t dst = p::shfl(p::FULL, k.owner[i], from), row = p::shfl(p::FULL, k.first[i] + k.row[i], from);
  uint32_t rows = p::shfl(p::FULL, o.rows, dst), stage = ep_stage(q, n) + i * epRowBufferBytes(&plain);
  uint64_t at = ep_shfl64(o.at, dst);
  if (p::lane() != 0) return;
  if (row < rows) p::bulk_s2g((uint8_t *)at + (uint64_t)row * c.rowBytes, stage, c.rowBytes);
  if (dst != a.group.rank && epTailBytes(&plain))
    p::bulk_s2g(ep_stage_row(a.group, q, dst, a.group.rank, k.t0 + i) + c.rowBytes, stage + c.rowBytes,
                epTailBytes(&plain));
}

/* Stores the chunk's rows, from their stage or straight from the input, to every remote owner. */
template <class C>
DEV void ep_chunk_send(const C c, const epDispatchArgs &a, const epPipe &q, uint32_t n, const epChunk &k,
                       const epOutputs &o) {
  epConfig plain = ep_plain_config(c);
  uint32_t l = p::lane(), stride = epRowBufferBytes(&plain), weightBytes = c.weights ? epWeightBytes(c.topk) : 0;
  uint32_t bytes = c.rowBytes + epTailBytes(&plain);
#pragma unroll
  for (uint32_t i = 0; i < epChunkRows(c.rowBytes); i++)
    for (uint32_t sends = k.sends[i]; sends; sends &= sends - 1) {
      if (k.direct) {
        ep_chunk_place(c, a, q, n, k, i, p::ffs(sends) - 1, o);
        continue;
      }
      uint32_t dst = p::shfl(p::FULL, k.owner[i], p::ffs(sends) - 1);
      if (ep_left_out(c, q, dst)) continue;
      uint8_t *to = ep_stage_row(a.group, q, dst, a.group.rank, k.t0 + i);
      if (c.bulk) {
        if (l == 0) p::bulk_s2g(to, ep_stage(q, n) + i * stride, bytes);
      } else {
        ep_row_copy(to, a.tokens + (uint64_t)(k.t0 + i) * c.rowBytes, c.rowBytes);
        if (4 * l < weightBytes) p::stg<uint32_t>(to + c.rowBytes + 4 * l, k.weight[i]);
        for (uint32_t w = 4 * l; w < c.scaleBytes; w += 128)
          p::stg<uint32_t>(to + c.rowBytes + weightBytes + w,
                           p::ldg<uint32_t>(a.scales + (uint64_t)(k.t0 + i) * c.scaleBytes + w));
      }
    }
#pragma unroll
  for (uint32_t i = 0; i < epChunkRows(c.rowBytes); i++) {
    uint32_t own = k.stays[i] ? p::ballot(p::FULL, k.expert[i] >= 0 && k.owner[i] == a.group.rank) : 0;
    if (own) ep_chunk_place(c, a, q, n, k, i, p::ffs(own) - 1, o);
  }
  if (c.bulk && l == 0) p::bulk_commit();
}

/* Without bulk copies a sender raises its chunk's flags itself. */
template <class C>
DEV void ep_chunk_raise(const C c, const epDispatchArgs &a, const epPipe &q, const epChunk &k, uint32_t gen) {
  p::sync_warp();
#pragma unroll
  for (uint32_t i = 0; i < epChunkRows(c.rowBytes); i++)
    if (k.sends[i] >> p::lane() & 1 && !ep_left_out(c, q, k.owner[i]))
      p::st_release_sys(ep_flag(a.group, q, k.owner[i], a.group.rank, k.t0 / epChunkRows(c.rowBytes)), EP_FLAG(gen, 0));
}

/* A sender warp's way through its rounds, one chunk each: `now` is loaded, `ahead` asked for. */
struct epPush {
  uint32_t gen;
  uint32_t tokens, rounds;     /* of this rank; of all blocks */
  uint32_t ticket, nextTicket; /* of now and ahead */
  epChunk now, ahead;
  epOutputs outputs;
};

template <class C>
DEV void ep_push_fetch(const C c, const epDispatchArgs &a, const epPipe &q, epPush &s, uint32_t ticket, epChunk &k) {
  if (c.direct && !s.outputs.ready) ep_outputs_look(c, a, q, s.gen, s.outputs);
  k.direct = c.direct && s.outputs.ready;
  ep_chunk_fetch(c, a, s.tokens, ticket * epSenders(c.threads) + p::warp(), k);
}

/* What needs no credit: the first chunk is under way while credits are looked at. */
template <class C> DEV void ep_push_begin(const C c, const epDispatchArgs &a, const epPipe &q, epPush &s) {
  s.outputs.ready = false;
  s.ticket = ep_ticket(c, a.pushBlocks, 0);
  s.nextTicket = ep_ticket(c, a.pushBlocks, 1);
  ep_push_fetch(c, a, q, s, s.ticket, s.now);
  ep_push_fetch(c, a, q, s, s.nextTicket, s.ahead);
  ep_chunk_targets(c, a, s.now);
  if (c.bulk && s.now.rows) ep_chunk_load(c, a, q, 0, s.now);
}

template <class C> DEV void ep_dispatch_push(const C c, const epDispatchArgs &a, epPipe &q, epPush &s) {
  epChunk next;
  uint32_t r = 0, ahead = ep_rounds_ahead(a.pushBlocks, s.rounds);
  for (; s.ticket < s.rounds; r++, s.now = next) {
    next = s.ahead;
    s.ticket = s.nextTicket;
    if (s.ticket < s.rounds) {
      s.nextTicket = ep_ticket(c, a.pushBlocks, r + 2);
      ep_push_fetch(c, a, q, s, s.nextTicket, s.ahead);
    }
    ep_chunk_targets(c, a, next);
    if (!c.bulk) {
      ep_chunk_send(c, a, q, r, s.now, s.outputs);
      ep_chunk_raise(c, a, q, s.now, s.gen);
      continue;
    }
    if (next.rows) ep_chunk_load(c, a, q, r + 1, next);
    if (s.now.rows) ep_stage_arrived(q, r);
    ep_chunk_send(c, a, q, r, s.now, s.outputs);
    if (r) {
      ep_stores_landed<1>(c);
      ep_post(r - 1, ahead);
    }
    if (c.direct && p::lane() == 0) p::sts<uint32_t>(ep_went(c, r, p::warp()), s.now.direct);
  }
  if (c.bulk && r) {
    ep_stores_landed<0>(c);
    ep_post(r - 1, ahead);
  }
}

/* Lane w of the signaller: the ranks that get rows of sender w's chunk, at each of the token's k; this rank where none. */
template <class C>
DEV void ep_signal_owners(const C c, const epDispatchArgs &a, uint32_t tokens, uint32_t t, bool there,
                          uint32_t *owner) {
#pragma unroll
  for (uint32_t k = 0; k < c.topk; k++) {
    int32_t e = there && t < tokens ? ep_decision(c, a, (uint64_t)t * c.topk + k) : -1;
    owner[k] = e >= 0 ? (uint32_t)e / (c.experts / c.ranks) : a.group.rank;
  }
}

/* Signaller: lane w raises the flags of sender w's chunk of round r, one for each rank that got any of its rows: those of its first
 * token are `owner`. */
template <class C>
DEV void ep_dispatch_raise(const C c, const epDispatchArgs &a, const epPipe &q, uint32_t tokens, uint32_t r,
                           uint32_t chunk, uint32_t gen, uint32_t *owner) {
  uint32_t senders = epSenders(c.threads), size = epChunkRows(c.rowBytes), l = p::lane();
  bool there = l < senders && chunk * size < tokens;
  bool direct = c.direct && there && p::lds<uint32_t>(ep_went(c, r, l)) != 0;
  if (c.direct && there) /* where local rows wait for a sender too */
    p::st_relaxed_sys(ep_flag(a.group, q, a.group.rank, a.group.rank, chunk), EP_FLAG(gen, direct));
  for (uint32_t i = 0; i < size; i++) {
    if (i) ep_signal_owners(c, a, tokens, chunk * size + i, l < senders, owner);
#pragma unroll
    for (uint32_t k = 0; k < c.topk; k++) {
      bool again = owner[k] == a.group.rank || ep_left_out(c, q, owner[k]);
#pragma unroll
      for (uint32_t j = 0; j < k; j++) again = again || owner[j] == owner[k];
      if (!again) p::st_relaxed_sys(ep_flag(a.group, q, owner[k], a.group.rank, chunk), EP_FLAG(gen, direct));
    }
  }
  ep_signal_end(c, r);
}

template <class C>
DEV void ep_dispatch_signal(const C c, const epDispatchArgs &a, const epPipe &q, uint32_t tokens, uint32_t rounds,
                            uint32_t gen) {
  uint32_t senders = epSenders(c.threads), size = epChunkRows(c.rowBytes), l = p::lane(), owner[EP_MAX_TOPK];
  uint32_t most = ep_rounds_a_fence(a.pushBlocks, rounds), n;
  for (uint32_t r = 0;; r += n) {
    for (n = 0; n < most; n++) {
      uint32_t ticket = ep_ticket(c, a.pushBlocks, r + n);
      if (ticket >= rounds) break;
      if (l == 0) ep_deal(a.group, a.pushBlocks, r + n + EP_DEAL_AHEAD, rounds);
      if (n == 0) ep_signal_owners(c, a, tokens, (ticket * senders + l) * size, l < senders, owner);
      ep_signal_landed(c, r + n);
      if (ep_round_is_late(a.pushBlocks, rounds, ticket)) most = 1;
    }
    if (n == 0) break;
    ep_signal_begin(c);
    for (uint32_t i = 0; i < n; i++) {
      uint32_t chunk = ep_ticket(c, a.pushBlocks, r + i) * senders + l;
      if (i) ep_signal_owners(c, a, tokens, chunk * size, l < senders, owner);
      ep_dispatch_raise(c, a, q, tokens, r + i, chunk, gen, owner);
    }
  }
}

template <class C> DEV void ep_dispatch_senders(const C c, const epDispatchArgs &a, epPipe &q, uint32_t gen) {
  uint32_t size = epChunkRows(c.rowBytes);
  epPush s;
  s.gen = gen;
  s.tokens = c.fused ? a.numTokens : ep_tokens(a.recordLayout, a.record, a.numTokens);
  s.rounds = ep_rounds(c, (s.tokens + size - 1) / size);
  ep_deal_first(c, a.group, a.pushBlocks, s.rounds);
  if (!ep_is_signaller(c)) ep_push_begin(c, a, q, s);
  if (!ep_wait_credits(c, a.group, q, gen, EP_PHASE_DISPATCH_CREDIT)) {
    if (!ep_is_signaller(c) && c.bulk && s.now.rows)
      ep_stage_arrived(q, 0); /* shared memory must not be left while it is written */
    return;
  }
  if (!ep_is_signaller(c))
    ep_dispatch_push(c, a, q, s);
  else if (c.bulk)
    ep_dispatch_signal(c, a, q, s.tokens, s.rounds, gen);
}

/* A received row. Lane k: its entry and, expert-major, the first slot of its source there; flat: the row's place in all
 * lanes. */
struct epArrival {
  bool there, direct; /* direct: its tokens are in the output already, and the rest in memory */
  bool missing;       /* with masks: it will not come */
  uint32_t s, j, token, entry, first;
};

template <class C>
DEV const uint8_t *ep_dispatch_source(const C c, const epDispatchArgs &a, const epPipe &q, const epArrival &r) {
  return r.s == a.group.rank ? a.tokens + (uint64_t)r.token * c.rowBytes
                             : (const uint8_t *)ep_stage_row(a.group, q, a.group.rank, r.s, r.token);
}

template <class C>
DEV void ep_dispatch_load_row(const C c, const epDispatchArgs &a, const epPipe &q, uint32_t n, const epArrival &r) {
  epConfig plain = ep_plain_config(c);
  uint32_t bytes = c.rowBytes + (r.s != a.group.rank ? epTailBytes(&plain) : 0);
  ep_stage_free<1>(c);
  if (p::lane() == 0) {
    ep_fence_load(c);
    p::mbar_expect_tx(ep_bar(q, n), bytes);
    p::bulk_g2s(ep_stage(q, n), ep_dispatch_source(c, a, q, r), bytes, ep_bar(q, n));
  }
}

/* Stores the row of unit n into output row `pos`. */
template <class C>
DEV void ep_dispatch_store(const C c, const epDispatchArgs &a, const epPipe &q, uint32_t n, const epArrival &r,
                           uint32_t pos) {
  uint8_t *to = a.outTokens + (uint64_t)pos * c.rowBytes;
  if (!c.bulk)
    ep_row_copy(to, ep_dispatch_source(c, a, q, r), c.rowBytes);
  else if (p::lane() == 0)
    p::bulk_s2g(to, ep_stage(q, n), c.rowBytes);
}

/* Word at byte w of output row `pos` of the scales. */
template <class C> DEV uint8_t *ep_scale_word(const C c, const epDispatchArgs &a, uint32_t pos, uint32_t w) {
  return a.outScales + (a.scaleColumn ? w / 4 * a.scaleColumn + 4ull * pos : (uint64_t)pos * c.scaleBytes + w);
}

/* The scales of unit n's row, from the input or from what travelled behind the row, to output row `pos`. */
template <class C>
DEV void ep_dispatch_scales(const C c, const epDispatchArgs &a, const epPipe &q, uint32_t n, const epArrival &r,
                            uint32_t pos) {
  uint32_t at = c.rowBytes + (c.weights ? epWeightBytes(c.topk) : 0);
  for (uint32_t w = 4 * p::lane(); w < c.scaleBytes; w += 128) {
    uint32_t v;
    if (r.s == a.group.rank)
      v = p::ldg<uint32_t>(a.scales + (uint64_t)r.token * c.scaleBytes + w);
    else
      v = c.bulk && !r.direct ? p::lds<uint32_t>(ep_stage(q, n) + at + w)
                              : p::ldg<uint32_t>(ep_dispatch_source(c, a, q, r) + at + w);
    p::stg<uint32_t>(ep_scale_word(c, a, pos, w), v);
  }
}

/* A row that is there goes to its place or places. */
template <class C>
DEV void ep_dispatch_arrange(const C c, const epDispatchArgs &a, const epPipe &q, uint32_t n, const epArrival &r) {
  uint32_t l = p::lane(), me = a.group.rank, weight = 0;
  if (c.weights && l < c.topk) {
    if (r.s == me)
      weight = p::as_u32(p::ldg<float>(a.weights + (uint64_t)r.token * c.topk + l));
    else
      weight = c.bulk ? p::lds<uint32_t>(ep_stage(q, n) + c.rowBytes + 4 * l)
                      : p::ldg<uint32_t>(ep_dispatch_source(c, a, q, r) + c.rowBytes + 4 * l);
  }
  if (c.layout == EP_LAYOUT_KIND_FLAT) {
    uint32_t pos = r.first + (c.bug == EP_BUG_SLOT_OFF_BY_ONE && r.first + 1 < a.capacity);
    if (pos < a.capacity) {
      ep_dispatch_store(c, a, q, n, r, pos);
      ep_dispatch_scales(c, a, q, n, r, pos);
      uint64_t at = (uint64_t)pos * c.topk + l;
      uint32_t first = a.globalIdx ? me * (c.experts / c.ranks) : 0;
      if (l < c.topk && a.outIdx)
        p::stg<int64_t>(a.outIdx + at, r.entry == EP_NONE ? -1 : (int64_t)(first + EP_ENTRY_EXPERT(r.entry)));
      if (l < c.topk && c.weights) p::stg<float>(a.outWeights + at, r.entry == EP_NONE ? 0.0f : p::as_float(weight));
    }
  } else {
    uint32_t slot = r.entry == EP_NONE ? EP_NONE : r.first + EP_ENTRY_POS(r.entry);
    slot += c.bug == EP_BUG_SLOT_OFF_BY_ONE && slot != EP_NONE && slot + 1 < a.capacity;
    bool fits = slot < a.capacity;
    if (fits && c.weights) p::stg<float>(a.outWeights + slot, p::as_float(weight));
    for (uint32_t m = p::ballot(p::FULL, fits); m; m &= m - 1) {
      uint32_t pos = p::shfl(p::FULL, slot, p::ffs(m) - 1);
      ep_dispatch_store(c, a, q, n, r, pos);
      ep_dispatch_scales(c, a, q, n, r, pos);
    }
  }
  if (c.bulk && l == 0) p::bulk_commit();
}

/* What depends on the counts alone: zero rows of padded zones, or the tail of the index and weight tensors. */
template <class C>
DEV void ep_dispatch_fill(const C c, const epDispatchArgs &a, const epPipe &q, uint32_t index, uint32_t warps) {
  const epRecordLayout &rl = a.recordLayout;
  const uint32_t *total = c.layout == EP_LAYOUT_KIND_FLAT
                              ? (const uint32_t *)(a.record + rl.recvBase) + c.ranks
                              : (const uint32_t *)(a.record + rl.zoneBase) + c.experts / c.ranks;
  if (index == 0 && p::lane() == 0 && p::ldg<uint32_t>(total) > a.capacity)
    p::st_relaxed_sys(&a.group.error->overflowNeeded, p::ldg<uint32_t>(total));
  if (c.layout == EP_LAYOUT_KIND_FLAT) {
    if (!a.fillTail) return;
    uint64_t rows = p::ldg<uint32_t>((const uint32_t *)(a.record + rl.recvBase) + c.ranks);
    for (uint64_t i = rows * c.topk + index * 32 + p::lane(); i < (uint64_t)a.capacity * c.topk; i += warps * 32) {
      if (a.outIdx) p::stg<int64_t>(a.outIdx + i, -1);
      if (c.weights) p::stg<float>(a.outWeights + i, 0.0f);
    }
    return;
  }
  uint32_t align = p::ldg<uint32_t>(&((const epRecordHeader *)(a.record + rl.header))->align);
  const uint32_t *zoneBase = (const uint32_t *)(a.record + rl.zoneBase);
  const uint32_t *zoneCount = (const uint32_t *)(a.record + rl.zoneCount);
  if (!a.zeroPad || align < 2) return;
  if (c.bulk) { /* zeros are stored from the stage that is loaded last */
    for (uint32_t v = p::lane() * 16; v < c.rowBytes; v += 512) p::sts<uint4>(ep_stage(q, 1) + v, ep_zero4());
    ep_stage_written(c);
  }
  for (uint64_t i = index; i < (uint64_t)(c.experts / c.ranks) * (align - 1); i += warps) {
    uint32_t e = (uint32_t)(i / (align - 1)), r = (uint32_t)(i % (align - 1));
    uint32_t slot = p::ldg<uint32_t>(zoneBase + e) + p::ldg<uint32_t>(zoneCount + e) + r;
    if (slot >= p::ldg<uint32_t>(zoneBase + e + 1) || slot >= a.capacity) continue;
    uint8_t *to = a.outTokens + (uint64_t)slot * c.rowBytes;
    for (uint32_t v = p::lane() * 16; v < c.rowBytes && !c.bulk; v += 512) p::stg<uint4>(to + v, ep_zero4());
    if (c.bulk && p::lane() == 0) p::bulk_s2g(to, ep_stage(q, 1), c.rowBytes);
    if (c.weights && p::lane() == 0) p::stg<float>(a.outWeights + slot, 0.0f);
    for (uint32_t w = 4 * p::lane(); w < c.scaleBytes; w += 128) p::stg<uint32_t>(ep_scale_word(c, a, slot, w), 0);
  }
  if (c.bulk && p::lane() == 0) p::bulk_commit();
}

/* The epilogue's work list: row j of every source in turn, so that rows are taken in the order in which they arrive, and the
 * local ones, which could be taken at once, over the time that the link needs. A row becomes known step by step, each a trip
 * to memory ahead of the next: where it is, what its entries are, where their slots begin. The same in all lanes. */
template <class C>
DEV bool ep_arrival_next(const C c, const epDispatchArgs &a, const epPipe &q, uint64_t items, epDraw &d, epArrival *r) {
  for (;;) {
    uint64_t i = ep_draw(a.group, d);
    r->direct = r->missing = false;
    r->there = i < items;
    if (!r->there) return false;
    r->j = (uint32_t)(i / c.ranks);
    r->s = (uint32_t)((a.group.rank + i) % c.ranks);
    if (r->j >= ep_rows(c, q, r->s)) continue;
    const uint32_t *meta = ep_record_meta(c, a.group, a.recordLayout, a.record, r->s, r->j);
    r->token = p::ldg<uint32_t>(meta);
    r->entry = p::lane() < c.topk ? p::ldg<uint32_t>(meta + 1 + p::lane()) : EP_NONE;
    return true;
  }
}

template <class C> DEV void ep_arrival_place(const C c, const epDispatchArgs &a, const epPipe &q, epArrival *r) {
  if (!r->there) return;
  r->first = c.layout == EP_LAYOUT_KIND_FLAT ? ep_first_row(c, q, r->s) + r->j
             : r->entry == EP_NONE           ? EP_NONE
                                             : p::ldg<uint32_t>((const uint32_t *)(a.record + a.recordLayout.slotBase) +
                                                      r->s * (c.experts / c.ranks) + EP_ENTRY_EXPERT(r->entry));
}

/* The row has come, or, with masks, will not: `missing`. False: a wait gave up. */
template <class C>
DEV bool ep_dispatch_ready(const C c, const epDispatchArgs &a, const epPipe &q, epArrival &r, uint32_t gen) {
  if (r.s == a.group.rank || c.bug == EP_BUG_SKIP_WAIT) return true;
  const uint32_t *flag = ep_flag(a.group, q, a.group.rank, r.s, r.token / epChunkRows(c.rowBytes));
  bool came = ep_warp_await_flag(c, a.group, flag, gen, EP_PHASE_DISPATCH_ROWS, r.s);
  if (!c.mask || came) return came;
  r.missing = true;
  return !ep_stopped(c, a.group);
}

/* With masks: a row that will not come leaves its places empty: zeros, and no index. Counts as the stores of a row. */
template <class C> DEV void ep_dispatch_leave(const C c, const epDispatchArgs &a, const epArrival &r) {
  uint32_t l = p::lane(), slot = EP_NONE;
  bool flat = c.layout == EP_LAYOUT_KIND_FLAT;
  if (flat && l == 0) slot = r.first;
  if (!flat && r.entry != EP_NONE) slot = r.first + EP_ENTRY_POS(r.entry);
  for (uint32_t m = p::ballot(p::FULL, slot < a.capacity); m; m &= m - 1) {
    uint32_t pos = p::shfl(p::FULL, slot, p::ffs(m) - 1);
    uint8_t *to = a.outTokens + (uint64_t)pos * c.rowBytes;
    for (uint32_t v = 16 * l; v < c.rowBytes; v += 512) p::stg<uint4>(to + v, ep_zero4());
    for (uint32_t w = 4 * l; w < c.scaleBytes; w += 128) p::stg<uint32_t>(ep_scale_word(c, a, pos, w), 0);
    if (flat && l < c.topk && a.outIdx) p::stg<int64_t>(a.outIdx + (uint64_t)pos * c.topk + l, -1);
    if (flat && l < c.topk && c.weights) p::stg<float>(a.outWeights + (uint64_t)pos * c.topk + l, 0.0f);
    if (!flat && l == 0 && c.weights) p::stg<float>(a.outWeights + pos, 0.0f);
  }
  if (c.bulk && l == 0) p::bulk_commit();
}

template <class C> DEV void ep_dispatch_epilogue(const C c, const epDispatchArgs &a, epPipe &q, uint32_t gen) {
  uint32_t warps = (a.blocks - a.pushBlocks) * epSenders(c.threads);
  uint32_t index = (p::bid() - a.pushBlocks) * epSenders(c.threads) + p::warp();
  uint64_t items = (uint64_t)ep_most_rows(c, q) * c.ranks;
  epDraw draw = ep_draw_begin(a.group, index, warps, false);
  epArrival row, next, ahead; /* in hand; placed; asked for */
  ep_arrival_next(c, a, q, items, draw, &row);
  ep_arrival_next(c, a, q, items, draw, &next);
  ep_arrival_place(c, a, q, &row);
  ep_dispatch_fill(c, a, q, index, warps);
  ep_arrival_place(c, a, q, &next);
  if (row.there && !ep_dispatch_ready(c, a, q, row, gen)) return;
  if (row.there && c.bulk && !(c.mask && row.missing)) ep_dispatch_load_row(c, a, q, 0, row);
  for (uint32_t n = 0; row.there; n++, row = next, next = ahead) {
    ep_arrival_next(c, a, q, items, draw, &ahead);
    if (c.mask && row.missing) {
      ep_dispatch_leave(c, a, row);
    } else {
      if (c.bulk) ep_stage_arrived(q, n);
      ep_dispatch_arrange(c, a, q, n, row);
    }
    if (next.there && !ep_dispatch_ready(c, a, q, next, gen)) return;
    if (next.there && c.bulk && !(c.mask && next.missing)) ep_dispatch_load_row(c, a, q, n + 1, next);
    ep_arrival_place(c, a, q, &ahead);
  }
}

/* A row that was staged after all, by itself. */
template <class C>
DEV void ep_direct_staged(const C c, const epDispatchArgs &a, epPipe &q, uint32_t n, uint32_t s, uint32_t j) {
  const uint32_t *meta = ep_record_meta(c, a.group, a.recordLayout, a.record, s, j);
  epArrival r;
  r.there = true;
  r.direct = false;
  r.s = s;
  r.j = j;
  r.token = p::ldg<uint32_t>(meta);
  r.entry = p::lane() < c.topk ? p::ldg<uint32_t>(meta + 1 + p::lane()) : EP_NONE;
  r.first = ep_first_row(c, q, s) + j;
  ep_dispatch_load_row(c, a, q, n, r);
  ep_stage_arrived(q, n);
  ep_dispatch_arrange(c, a, q, n, r);
}

/* The epilogue of window-backed outputs: what is left of a row that lies in its place is 100 bytes, so a lane takes a row, and few
 * warps keep up with many senders. Rows that were staged before their sender knew better are moved one by one. */
template <class C> DEV void ep_direct_epilogue(const C c, const epDispatchArgs &a, epPipe &q, uint32_t gen) {
  uint32_t warps = (a.blocks - a.pushBlocks) * epSenders(c.threads), l = p::lane(), me = a.group.rank, n = 0;
  uint32_t index = (p::bid() - a.pushBlocks) * epSenders(c.threads) + p::warp();
  uint32_t items = (ep_most_rows(c, q) + 31) / 32 * c.ranks, ids = a.globalIdx ? me * (c.experts / c.ranks) : 0;
  epDraw draw = ep_draw_begin(a.group, index, warps, false);
  ep_dispatch_fill(c, a, q, index, warps);
  for (uint32_t i = ep_draw(a.group, draw); i < items; i = ep_draw(a.group, draw)) {
    uint32_t s = (me + i) % c.ranks, j = i / c.ranks * 32 + l, token = 0, seen = 0;
    uint32_t pos = ep_first_row(c, q, s) + j;
    bool there = j < ep_rows(c, q, s), ok = true;
    /* all of a row's entries, then all of its weights: each alone would be a trip to memory */
    const uint32_t *meta = ep_record_meta(c, a.group, a.recordLayout, a.record, s, there ? j : 0);
    uint32_t entry[EP_MAX_TOPK];
    if (there) token = p::ldg<uint32_t>(meta);
#pragma unroll
    for (uint32_t k = 0; k < c.topk; k++) entry[k] = there ? p::ldg<uint32_t>(meta + 1 + k) : EP_NONE;
    const uint32_t *flag = ep_flag(a.group, q, me, s, token / epChunkRows(c.rowBytes));
    /* rows come about in order: while the last has not, one lane looks */
    uint32_t rows = p::ballot(p::FULL, there);
    bool last = rows >> l == 1, waits = c.bug != EP_BUG_SKIP_WAIT;
    if (last && waits) ok = ep_wait_flag(a.group, flag, gen, EP_PHASE_DISPATCH_ROWS, s, &seen);
    p::sync_warp();
    if (there && !last && waits) ok = ep_wait_flag(a.group, flag, gen, EP_PHASE_DISPATCH_ROWS, s, &seen);
    if (p::ballot(p::FULL, !ok)) return;
    p::sync_warp();
    bool direct = there && (seen & EP_DIRECT) != 0, fits = direct && pos < a.capacity;
    const uint8_t *tail = s == me ? nullptr : ep_stage_row(a.group, q, me, s, token) + c.rowBytes;
    const float *weights = s == me ? a.weights + (uint64_t)token * c.topk : (const float *)tail;
    float weight[EP_MAX_TOPK];
#pragma unroll
    for (uint32_t k = 0; k < c.topk; k++)
      weight[k] = c.weights && fits && entry[k] != EP_NONE ? p::ldg<float>(weights + k) : 0.0f;
#pragma unroll
    for (uint32_t k = 0; k < c.topk; k++) {
      uint64_t at = (uint64_t)pos * c.topk + k;
      if (fits && a.outIdx)
        p::stg<int64_t>(a.outIdx + at, entry[k] == EP_NONE ? -1 : (int64_t)(ids + EP_ENTRY_EXPERT(entry[k])));
      if (fits && c.weights) p::stg<float>(a.outWeights + at, weight[k]);
    }
    for (uint32_t m = c.scaleBytes ? p::ballot(p::FULL, fits) : 0; m; m &= m - 1) {
      epArrival r = {};
      uint32_t from = p::ffs(m) - 1;
      r.direct = true;
      r.s = s;
      r.token = p::shfl(p::FULL, token, from);
      ep_dispatch_scales(c, a, q, 0, r, p::shfl(p::FULL, pos, from));
    }
    for (uint32_t m = p::ballot(p::FULL, there && !direct); m; m &= m - 1, n++)
      ep_direct_staged(c, a, q, n, s, i / c.ranks * 32 + p::ffs(m) - 1);
  }
}

template <class C> DEV void ep_dispatch(const C c, const epDispatchArgs &a) {
  ep_operation<false>(
      c, a, EP_KERNEL_DISPATCH,
      [&](uint32_t gen) {
        if (c.direct && c.part == EP_PART_WHOLE && p::bid() == a.pushBlocks) ep_outputs_tell(c, a, gen);
        return !c.fused || ep_update_inside(c, a.update, gen);
      },
      [&](epPipe &q, uint32_t gen) {
        if (c.direct && c.part == EP_PART_SEND && p::bid() == 0) ep_outputs_tell(c, a, gen);
        ep_dispatch_senders(c, a, q, gen);
      },
      [&](epPipe &q, uint32_t gen) {
        if (c.direct)
          ep_direct_epilogue(c, a, q, gen);
        else
          ep_dispatch_epilogue(c, a, q, gen);
      });
}

#endif
