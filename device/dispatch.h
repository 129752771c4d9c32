/* Dispatch: token rows to the ranks that own their experts, and the epilogue that arranges what arrives. One kernel; the
 * first blocks push, the others run the epilogue meanwhile, chunk by chunk as flags come in.
 *
 *   push      a warp a chunk of 8 tokens; each row is loaded once and stored once per distinct remote rank, into the
 *             staging row that update's scan gave it; then one flag a (destination, chunk)
 *   epilogue  a warp a row: local rows straight from the input, remote ones from staging after their flag; flat: one
 *             store, expert-major: one per slot; padding rows are zeroed and index tails filled before anything arrives
 *
 * Bytes at R ranks, N rows received: T rows read, the remote share of them over the link, N rows read and N (flat) or
 * N * slots (expert-major) written. A sender waits for nothing but its peers' credits for the operation before. */
#ifndef EP_DEVICE_DISPATCH_H_
#define EP_DEVICE_DISPATCH_H_

#include "rows.h"

/* One flag to every rank that got a row of this chunk of tokens. Ranks are found again from the record, 32 (token, k) at
 * a time; a rank seen in two such rounds gets its flag twice, with the same value. */
template <class C>
DEV void ep_dispatch_raise(const C c, const epDispatchArgs &a, uint32_t chunk, uint32_t t0, uint32_t t1, uint32_t gen) {
  const int32_t *topk = (const int32_t *)(a.record + a.recordLayout.topk);
  uint32_t entries = (t1 - t0) * c.topk;
  for (uint32_t i = p::lane(); i - p::lane() < entries; i += 32) {
    int32_t e = i < entries ? p::ldg<int32_t>(topk + (uint64_t)t0 * c.topk + i) : -1;
    uint32_t owner = e >= 0 ? (uint32_t)e / (c.experts / c.ranks) : a.group.rank;
    bool remote = owner != a.group.rank;
    uint32_t mates = p::match_any(p::FULL, remote ? owner : ep_lone_key());
    if (remote && (mates & ep_lanes_below()) == 0)
      ep_raise(c, ep_flag(a.group, owner, a.group.rank, chunk), gen);
  }
}

template <class C>
DEV void ep_dispatch_push_token(const C c, const epDispatchArgs &a, epRowBuffer &b, uint32_t t) {
  uint32_t me = a.group.rank, l = p::lane();
  uint64_t at = (uint64_t)t * c.topk + l;
  int32_t e = -1;
  uint32_t row = 0;
  if (l < c.topk) {
    e = p::ldg<int32_t>((const int32_t *)(a.record + a.recordLayout.topk) + at);
    row = (uint32_t)p::ldg<int32_t>((const int32_t *)(a.record + a.recordLayout.sendRow) + at);
  }
  uint32_t owner = e >= 0 ? (uint32_t)e / (c.experts / c.ranks) : me;
  bool remote = owner != me;
  uint32_t mates = p::match_any(p::FULL, remote ? owner : ep_lone_key());
  uint32_t sends = p::ballot(p::FULL, remote && (mates & ep_lanes_below()) == 0);
  if (!sends)
    return;
  const uint8_t *src = a.tokens + (uint64_t)t * c.rowBytes;
  uint32_t weightBytes = c.weights ? epWeightBytes(c.topk) : 0;
  uint32_t weight = c.weights && l < c.topk ? p::as_u32(p::ldg<float>(a.weights + at)) : 0;
  if (c.bulk) {
    ep_row_free(c);
    if (4 * l < weightBytes)
      p::sts<uint32_t>(b.row + c.rowBytes + 4 * l, weight);
    if (c.weights)
      ep_row_written(c);
    ep_row_load(c, b, src, c.rowBytes);
  }
  for (; sends; sends &= sends - 1) {
    uint32_t from = p::ffs(sends) - 1;
    uint32_t dst = p::shfl(p::FULL, owner, from), itsRow = p::shfl(p::FULL, row, from);
    uint8_t *to = ep_stage_row(a.group, dst, me, itsRow);
    if (c.bulk) {
      if (l == 0)
        p::bulk_s2g(to, b.row, c.rowBytes + weightBytes);
    } else {
      ep_row_copy(to, src, c.rowBytes);
      if (4 * l < weightBytes)
        p::stg<uint32_t>(to + c.rowBytes + 4 * l, weight);
    }
  }
  if (c.bulk && l == 0)
    p::bulk_commit();
}

template <class C> DEV void ep_dispatch_push(const C c, const epDispatchArgs &a, epRowBuffer &b, uint32_t gen) {
  uint32_t warps = c.threads / 32, chunks = (a.numTokens + EP_CHUNK_ROWS - 1) / EP_CHUNK_ROWS;
  for (uint32_t chunk = p::bid() * warps + p::warp(); chunk < chunks; chunk += a.pushBlocks * warps) {
    uint32_t t0 = chunk * EP_CHUNK_ROWS, t1 = t0 + EP_CHUNK_ROWS < a.numTokens ? t0 + EP_CHUNK_ROWS : a.numTokens;
    if (c.bug == EP_BUG_SIGNAL_FIRST)
      ep_dispatch_raise(c, a, chunk, t0, t1, gen);
    for (uint32_t t = t0; t < t1; t++)
      ep_dispatch_push_token(c, a, b, t);
    ep_rows_landed(c);
    if (c.bug != EP_BUG_SIGNAL_FIRST)
      ep_dispatch_raise(c, a, chunk, t0, t1, gen);
  }
}

/* Stores the row (in the buffer, or at src without bulk copies) into output row `pos`. */
template <class C>
DEV void ep_dispatch_store(const C c, const epDispatchArgs &a, epRowBuffer &b, const uint8_t *src, uint32_t pos) {
  uint8_t *to = a.outTokens + (uint64_t)pos * c.rowBytes;
  if (!c.bulk)
    ep_row_copy(to, src, c.rowBytes);
  else if (p::lane() == 0)
    p::bulk_s2g(to, b.row, c.rowBytes);
}

/* Row j of source s, which has arrived: into its place or places. */
template <class C>
DEV void ep_dispatch_arrange(const C c, const epDispatchArgs &a, epRowBuffer &b, uint32_t s, uint32_t j, uint32_t token,
                             uint32_t entry) {
  uint32_t l = p::lane(), me = a.group.rank, weightBytes = c.weights ? epWeightBytes(c.topk) : 0;
  const uint8_t *src =
      s == me ? a.tokens + (uint64_t)token * c.rowBytes : (const uint8_t *)ep_stage_row(a.group, me, s, j);
  if (c.bulk) {
    ep_row_free(c);
    ep_row_load(c, b, src, c.rowBytes + (s == me ? 0 : weightBytes));
  }
  uint32_t weight = 0;
  if (c.weights && l < c.topk) {
    if (s == me)
      weight = p::as_u32(p::ldg<float>(a.weights + (uint64_t)token * c.topk + l));
    else
      weight = c.bulk ? p::lds<uint32_t>(b.row + c.rowBytes + 4 * l) : p::ldg<uint32_t>(src + c.rowBytes + 4 * l);
  }
  if (c.layout == EP_LAYOUT_KIND_FLAT) {
    uint32_t pos = p::ldg<uint32_t>((const uint32_t *)(a.record + a.recordLayout.recvBase) + s) + j;
    pos += c.bug == EP_BUG_SLOT_OFF_BY_ONE && pos + 1 < a.capacity;
    if (pos < a.capacity) {
      ep_dispatch_store(c, a, b, src, pos);
      uint64_t at = (uint64_t)pos * c.topk + l;
      uint32_t first = a.globalIdx ? me * (c.experts / c.ranks) : 0;
      if (l < c.topk && a.outIdx)
        p::stg<int64_t>(a.outIdx + at, entry == EP_NONE ? -1 : (int64_t)(first + EP_ENTRY_EXPERT(entry)));
      if (l < c.topk && c.weights)
        p::stg<float>(a.outWeights + at, entry == EP_NONE ? 0.0f : p::as_float(weight));
    }
  } else {
    uint32_t slot = entry == EP_NONE ? EP_NONE : ep_slot(c, a.recordLayout, a.record, s, entry);
    slot += c.bug == EP_BUG_SLOT_OFF_BY_ONE && slot + 1 < a.capacity;
    bool fits = slot < a.capacity;
    if (fits && c.weights)
      p::stg<float>(a.outWeights + slot, p::as_float(weight));
    for (uint32_t m = p::ballot(p::FULL, fits); m; m &= m - 1)
      ep_dispatch_store(c, a, b, src, p::shfl(p::FULL, slot, p::ffs(m) - 1));
  }
  if (c.bulk && l == 0)
    p::bulk_commit();
}

/* What depends on the counts alone: zero rows of padded zones, or the tail of the index and weight tensors. */
template <class C> DEV void ep_dispatch_fill(const C c, const epDispatchArgs &a, uint32_t index, uint32_t warps) {
  const epRecordLayout &rl = a.recordLayout;
  if (c.layout == EP_LAYOUT_KIND_FLAT) {
    if (!a.fillTail)
      return;
    uint64_t rows = p::ldg<uint32_t>((const uint32_t *)(a.record + rl.recvBase) + c.ranks);
    for (uint64_t i = rows * c.topk + index * 32 + p::lane(); i < (uint64_t)a.capacity * c.topk; i += warps * 32) {
      if (a.outIdx)
        p::stg<int64_t>(a.outIdx + i, -1);
      if (c.weights)
        p::stg<float>(a.outWeights + i, 0.0f);
    }
    return;
  }
  uint32_t align = p::ldg<uint32_t>(&((const epRecordHeader *)(a.record + rl.header))->align);
  const uint32_t *zoneBase = (const uint32_t *)(a.record + rl.zoneBase);
  const uint32_t *zoneCount = (const uint32_t *)(a.record + rl.zoneCount);
  if (!a.zeroPad || align < 2)
    return;
  for (uint64_t i = index; i < (uint64_t)(c.experts / c.ranks) * (align - 1); i += warps) {
    uint32_t e = (uint32_t)(i / (align - 1)), r = (uint32_t)(i % (align - 1));
    uint32_t slot = p::ldg<uint32_t>(zoneBase + e) + p::ldg<uint32_t>(zoneCount + e) + r;
    if (slot >= p::ldg<uint32_t>(zoneBase + e + 1) || slot >= a.capacity)
      continue;
    for (uint32_t v = p::lane() * 16; v < c.rowBytes; v += 512)
      p::stg<uint4>(a.outTokens + (uint64_t)slot * c.rowBytes + v, ep_zero4());
    if (c.weights && p::lane() == 0)
      p::stg<float>(a.outWeights + slot, 0.0f);
  }
}

template <class C> DEV void ep_dispatch_epilogue(const C c, const epDispatchArgs &a, epRowBuffer &b, uint32_t gen) {
  uint32_t me = a.group.rank, warpsPerBlock = c.threads / 32;
  uint32_t warps = (a.blocks - a.pushBlocks) * warpsPerBlock;
  uint32_t index = (p::bid() - a.pushBlocks) * warpsPerBlock + p::warp();
  const uint32_t *recvCount = (const uint32_t *)(a.record + a.recordLayout.recvCount);
  ep_dispatch_fill(c, a, index, warps);
  uint64_t items = (uint64_t)ep_most_rows(c, recvCount) * c.ranks;
  uint32_t flagRank = EP_NONE, flagChunk = 0; /* the last flag seen */
  for (uint64_t i = index; i < items; i += warps) {
    uint32_t s = (uint32_t)((me + i) % c.ranks), j = (uint32_t)(i / c.ranks);
    if (j >= p::ldg<uint32_t>(recvCount + s))
      continue;
    const uint32_t *meta = ep_record_meta(c, a.group, a.recordLayout, a.record, s, j);
    uint32_t token = p::ldg<uint32_t>(meta), chunk = token / EP_CHUNK_ROWS;
    uint32_t entry = p::lane() < c.topk ? p::ldg<uint32_t>(meta + 1 + p::lane()) : EP_NONE;
    if (s != me && (flagRank != s || flagChunk != chunk)) {
      if (c.bug != EP_BUG_SKIP_WAIT &&
          !ep_warp_wait_flag(a.group, ep_flag(a.group, me, s, chunk), gen, EP_PHASE_DISPATCH_ROWS, s))
        return;
      flagRank = s;
      flagChunk = chunk;
    }
    ep_dispatch_arrange(c, a, b, s, j, token, entry);
  }
}

template <class C> DEV void ep_dispatch(const C c, const epDispatchArgs &a) {
  uint32_t gen = p::ldg<uint32_t>(&ep_state(a.group)->stageGen) + 1;
  bool push = p::bid() < a.pushBlocks;
  epRowBuffer b = ep_row_buffer(c);
  ep_bug_wait_unscheduled(c, a.group, push);
  if (!push)
    ep_dispatch_epilogue(c, a, b, gen);
  else if (ep_wait_credits(c, a.group, gen, EP_PHASE_DISPATCH_CREDIT))
    ep_dispatch_push(c, a, b, gen);
  ep_operation_end(c, a.group, gen, a.blocks);
}

#endif
