/* Combine: expert outputs back to the token's rank, reduced. The mirror of dispatch, in one kernel: the first blocks sum
 * each received row's local slots and push one row back; the others reduce at the source as rows arrive.
 *
 *   push      a warp a received row: its slots summed in ascending k in FP32, rounded once, stored into the source's
 *             staging at the row's own index; a flag for each epChunkRows rows
 *   reduce    a warp a token: its ranks' partial sums in the order of the highest k each holds, FP32, rounded once; this
 *             rank's own partial sum is made on the spot from the slots
 *
 * Both are one operation, ep_sum_rows: up to K rows in, one row out, in pieces that fit the warp's buffer, so that as many
 * bytes as shared memory holds are in flight. Bytes: N rows * slots read, the remote share of N over the link, T * (ranks
 * hit) rows read, T written. */
#ifndef EP_DEVICE_COMBINE_H_
#define EP_DEVICE_COMBINE_H_

#include "numbers.h"
#include "rows.h"

/* Rows to sum: one a lane, in ascending k. A rank's sum enters at the highest k that the token has there, kept or not:
 * the source cannot know what another rank had to drop. */
struct epSum {
  uint32_t parts;    /* lanes with a row */
  uint32_t local;    /* of them: this rank's, summed and rounded first */
  uint32_t localAt;  /* the lane (a bit) at which that sum enters, 0: none */
  uint32_t last;     /* all lanes at which something enters */
  uint64_t address;  /* of the lane's row */
};

/* One 16-byte vector of the result; load(i): the same vector of the i-th part. */
template <class C, class F> DEV uint4 ep_sum_vector(const C c, const epSum &s, F load) {
  epVec sum;
  ep_vec_zero(sum);
  for (uint32_t m = s.last; m; m &= m - 1) {
    uint32_t bit = m & (0u - m);
    if (bit == s.localAt) {
      epVec part;
      ep_vec_zero(part);
      for (uint32_t q = s.local; q; q &= q - 1)
        ep_vec_add(c, part, load(p::popc(s.parts & ((q & (0u - q)) - 1))));
      ep_vec_add(c, sum, ep_vec_round(c, part));
    } else {
      ep_vec_add(c, sum, load(p::popc(s.parts & (bit - 1))));
    }
  }
  return ep_vec_round(c, sum);
}

DEV uint64_t ep_shfl64(uint64_t v, uint32_t from) {
  uint32_t lo = p::shfl(p::FULL, (uint32_t)v, from), hi = p::shfl(p::FULL, (uint32_t)(v >> 32), from);
  return (uint64_t)hi << 32 | lo;
}

/* A row being summed: what goes in, where the result goes. With `move`, a single row is moved as it is. */
struct epJob {
  epSum sum;
  uint8_t *to;
  bool move;
  uint32_t piece; /* bytes of a row that a stage holds of each part */
};

template <class C> DEV void ep_job_pieces(const C c, const epPipe &q, epJob &job) {
  uint32_t count = p::popc(job.sum.parts);
  job.piece = !c.bulk || count * c.rowBytes <= q.stageBytes ? c.rowBytes : q.stageBytes / count & ~(EP_ROW_ALIGN - 1);
}

/* Issues the loads of the piece at byte `at` of every part, as unit n. */
template <class C> DEV void ep_job_load(const C c, const epPipe &q, uint32_t n, const epJob &job, uint32_t at) {
  uint32_t l = p::lane(), parts = job.sum.parts;
  uint32_t bytes = at + job.piece < c.rowBytes ? job.piece : c.rowBytes - at;
  ep_stage_free<0>(c);
  ep_stage_expect(q, n, p::popc(parts) * bytes);
  if (parts >> l & 1) {
    ep_fence_load(c);
    p::bulk_g2s(ep_stage(q, n) + p::popc(parts & ep_lanes_below()) * job.piece,
                (const uint8_t *)job.sum.address + at, bytes, ep_bar(q, n));
  }
}

/* Sums the piece of unit n in place of its first part (a lane writes only what it alone has read) and stores it. */
template <class C> DEV void ep_job_store(const C c, const epPipe &q, uint32_t n, const epJob &job, uint32_t at) {
  uint32_t l = p::lane(), stage = ep_stage(q, n);
  uint32_t bytes = at + job.piece < c.rowBytes ? job.piece : c.rowBytes - at;
  if (!job.move || p::popc(job.sum.parts) != 1) {
    for (uint32_t v = 16 * l; v < bytes; v += 512)
      p::sts<uint4>(stage + v, ep_sum_vector(c, job.sum, [&](uint32_t i) {
                      return p::lds<uint4>(stage + i * job.piece + v);
                    }));
    ep_stage_written(c);
  }
  if (l == 0) {
    p::bulk_s2g(job.to + at, stage, bytes);
    p::bulk_commit();
  }
}

/* The whole row without bulk copies. */
template <class C> DEV void ep_job_run(const C c, const epJob &job) {
  for (uint32_t at = 16 * p::lane(); at - 16 * p::lane() < c.rowBytes; at += 512) {
    uint4 v = ep_sum_vector(c, job.sum, [&](uint32_t i) {
      uint32_t m = job.sum.parts;
      for (; i; i--)
        m &= m - 1;
      const uint8_t *src = (const uint8_t *)ep_shfl64(job.sum.address, p::ffs(m) - 1);
      return at < c.rowBytes ? p::ldg<uint4>(src + at) : ep_zero4();
    });
    if (at < c.rowBytes)
      p::stg<uint4>(job.to + at, v);
  }
}

/* Input row of entry `entry` (lane's k) of row j from source s, or EP_NONE when it has none or was dropped. */
template <class C>
DEV uint32_t ep_combine_input(const C c, const epCombineArgs &a, uint32_t s, uint32_t j, uint32_t entry) {
  uint32_t row = EP_NONE;
  if (entry != EP_NONE)
    row = c.layout == EP_LAYOUT_KIND_FLAT
              ? p::ldg<uint32_t>((const uint32_t *)(a.record + a.recordLayout.recvBase) + s) + j
              : ep_slot(c, a.recordLayout, a.record, s, entry);
  return row < a.capacity ? row : EP_NONE;
}

/* The weight that belongs to the lane's k in a backward pass. */
template <class C>
DEV uint32_t ep_combine_weight(const C c, const epCombineArgs &a, uint32_t row) {
  if (row == EP_NONE)
    return 0;
  uint64_t at = c.layout == EP_LAYOUT_KIND_FLAT ? (uint64_t)row * c.topk + p::lane() : row;
  return p::as_u32(p::ldg<float>(a.weights + at));
}

/* Lanes whose input rows are summed: flat has one row for all k of a rank. */
template <class C> DEV uint32_t ep_combine_parts(const C c, uint32_t row) {
  uint32_t lanes = p::ballot(p::FULL, row != EP_NONE);
  return c.layout == EP_LAYOUT_KIND_FLAT ? lanes & (0u - lanes) : lanes;
}

template <class C> DEV uint64_t ep_combine_address(const C c, const epCombineArgs &a, uint32_t row) {
  return (uint64_t)(a.tokens + (uint64_t)(row == EP_NONE ? 0 : row) * c.rowBytes);
}

/* Row j of source s goes home. */
template <class C>
DEV void ep_combine_push_job(const C c, const epCombineArgs &a, const epPipe &q, uint32_t s, uint32_t j, epJob &job) {
  uint32_t l = p::lane();
  const uint32_t *meta = ep_record_meta(c, a.group, a.recordLayout, a.record, s, j);
  uint32_t entry = l < c.topk ? p::ldg<uint32_t>(meta + 1 + l) : EP_NONE;
  uint32_t row = ep_combine_input(c, a, s, j, entry);
  job.sum.parts = job.sum.local = ep_combine_parts(c, row);
  job.sum.last = job.sum.localAt = job.sum.parts & (0u - job.sum.parts); /* nothing else enters: any lane will do */
  job.sum.address = ep_combine_address(c, a, row);
  job.to = ep_stage_row(a.group, s, a.group.rank, j);
  job.move = true;
  ep_job_pieces(c, q, job);
  if (c.weights && l < c.topk) /* ordinary stores: the release of the row's flag covers them */
    p::stg<uint32_t>(job.to + c.rowBytes + 4 * l, ep_combine_weight(c, a, row));
}

/* Where a warp of the push stands: row j of source s; chunk i of the work list, in which sources take turns. */
struct epPushAt {
  uint64_t i;
  uint32_t s, j, end;
};

/* Moves to the first row of the next chunk that has any; false when the list is done. */
template <class C>
DEV bool ep_combine_push_next(const C c, const epCombineArgs &a, uint64_t items, uint32_t step, epPushAt &at) {
  const uint32_t *recvCount = (const uint32_t *)(a.record + a.recordLayout.recvCount);
  uint32_t size = epChunkRows(c.rowBytes), others = c.ranks - 1;
  for (; at.i < items; at.i += step) {
    at.s = (uint32_t)((a.group.rank + 1 + at.i % others) % c.ranks);
    at.j = (uint32_t)(at.i / others) * size;
    uint32_t rows = p::ldg<uint32_t>(recvCount + at.s);
    at.end = at.j + size < rows ? at.j + size : rows;
    if (at.j < at.end)
      return true;
  }
  return false;
}

template <class C> DEV void ep_combine_push(const C c, const epCombineArgs &a, epPipe &q, uint32_t gen) {
  uint32_t warps = c.threads / 32, me = a.group.rank, size = epChunkRows(c.rowBytes), step = a.pushBlocks * warps;
  const uint32_t *recvCount = (const uint32_t *)(a.record + a.recordLayout.recvCount);
  uint64_t items = (uint64_t)((ep_most_rows(c, recvCount) + size - 1) / size) * (c.ranks - 1);
  if (!ep_wait_credits(c, a.group, gen, EP_PHASE_COMBINE_CREDIT))
    return;
  epPushAt at;
  at.i = p::bid() * warps + p::warp();
  bool more = ep_combine_push_next(c, a, items, step, at);
  if (!c.bulk) {
    for (; more; at.i += step, more = ep_combine_push_next(c, a, items, step, at)) {
      uint32_t *flag = ep_flag(a.group, at.s, me, at.j / size);
      for (; at.j < at.end; at.j++) {
        epJob job;
        ep_combine_push_job(c, a, q, at.s, at.j, job);
        ep_job_run(c, job);
      }
      p::sync_warp();
      if (p::lane() == 0)
        ep_raise(c, flag, gen);
    }
    return;
  }
  /* One piece a unit. `pending`: the flag of a chunk whose last piece is on its way. */
  uint32_t *pending = nullptr, offset = 0, nextOffset = 0;
  epJob job, next;
  if (more) {
    ep_combine_push_job(c, a, q, at.s, at.j, job);
    ep_job_load(c, q, 0, job, 0);
  }
  for (uint32_t n = 0; more; n++, job = next, offset = nextOffset) {
    uint32_t *flag = nullptr; /* raised once this piece has landed */
    next = job;
    nextOffset = offset + job.piece;
    if (nextOffset >= c.rowBytes) {
      uint32_t s = at.s, j = at.j++;
      nextOffset = 0;
      if (at.j == at.end) {
        flag = ep_flag(a.group, s, me, j / size);
        at.i += step;
        more = ep_combine_push_next(c, a, items, step, at);
      }
      if (more)
        ep_combine_push_job(c, a, q, at.s, at.j, next);
    }
    if (more)
      ep_job_load(c, q, n + 1, next, nextOffset);
    ep_stage_arrived(q, n);
    if (c.bug == EP_BUG_SIGNAL_FIRST && flag && p::lane() == 0)
      ep_raise(c, flag, gen);
    ep_job_store(c, q, n, job, offset);
    ep_stores_landed<1>(c);
    if (pending && c.bug != EP_BUG_SIGNAL_FIRST && p::lane() == 0)
      ep_raise(c, pending, gen);
    pending = flag;
  }
  ep_stores_landed<0>(c);
  if (pending && c.bug != EP_BUG_SIGNAL_FIRST && p::lane() == 0)
    ep_raise(c, pending, gen);
}

/* Token t: waits for the rows of all its ranks. False: gave up. */
template <class C>
DEV bool ep_combine_reduce_job(const C c, const epCombineArgs &a, const epPipe &q, uint32_t t, uint32_t gen, epJob &job) {
  uint32_t l = p::lane(), me = a.group.rank, locals = c.experts / c.ranks;
  uint64_t at = (uint64_t)t * c.topk + l;
  int32_t e = -1;
  uint32_t row = 0, pos = 0;
  if (l < c.topk) {
    e = p::ldg<int32_t>((const int32_t *)(a.record + a.recordLayout.topk) + at);
    row = (uint32_t)p::ldg<int32_t>((const int32_t *)(a.record + a.recordLayout.sendRow) + at);
    pos = (uint32_t)p::ldg<int32_t>((const int32_t *)(a.record + a.recordLayout.sendPos) + at);
  }
  uint32_t owner = e >= 0 ? (uint32_t)e / locals : EP_NONE;
  uint32_t mates = p::match_any(p::FULL, e >= 0 ? owner : ep_lone_key());
  bool last = e >= 0 && (mates >> l) == 1; /* highest k of its rank */
  uint32_t mine = owner == me ? ep_combine_input(c, a, me, row, EP_ENTRY((uint32_t)e % locals, pos)) : EP_NONE;
  bool ok = true;
  if (last && owner != me && c.bug != EP_BUG_SKIP_WAIT)
    ok = ep_wait_flag(a.group, ep_flag(a.group, me, owner, row / epChunkRows(c.rowBytes)), gen, EP_PHASE_COMBINE_ROWS,
                      owner);
  if (p::ballot(p::FULL, !ok))
    return false;
  p::sync_warp();

  uint32_t localAt = p::ballot(p::FULL, last && owner == me), remote = p::ballot(p::FULL, last && owner != me);
  job.sum.local = ep_combine_parts(c, mine);
  job.sum.localAt = job.sum.local ? localAt : 0;
  job.sum.parts = job.sum.local | remote;
  job.sum.last = job.sum.localAt | remote;
  job.sum.address = owner == me ? ep_combine_address(c, a, mine)
                                : (uint64_t)(last ? ep_stage_row(a.group, me, owner, row) : nullptr);
  job.to = a.outTokens + (uint64_t)t * c.rowBytes;
  job.move = false;
  ep_job_pieces(c, q, job);
  if (c.weights && l < c.topk) {
    uint32_t w = 0;
    if (owner == me)
      w = ep_combine_weight(c, a, mine);
    else if (e >= 0)
      w = p::ldg<uint32_t>(ep_stage_row(a.group, me, owner, row) + c.rowBytes + 4 * l);
    p::stg<float>(a.outWeights + at, p::as_float(w));
  }
  return true;
}

template <class C> DEV void ep_combine_reduce(const C c, const epCombineArgs &a, epPipe &q, uint32_t gen) {
  uint32_t warps = c.threads / 32, step = (a.blocks - a.pushBlocks) * warps;
  uint32_t t = (p::bid() - a.pushBlocks) * warps + p::warp(), offset = 0, nextOffset = 0;
  epJob job, next;
  if (!c.bulk) {
    for (; t < a.numTokens; t += step) {
      if (!ep_combine_reduce_job(c, a, q, t, gen, job))
        return;
      ep_job_run(c, job);
    }
    return;
  }
  bool more = t < a.numTokens;
  if (more && !ep_combine_reduce_job(c, a, q, t, gen, job))
    return;
  if (more)
    ep_job_load(c, q, 0, job, 0);
  for (uint32_t n = 0; more; n++, job = next, offset = nextOffset) {
    next = job;
    nextOffset = offset + job.piece;
    if (nextOffset >= c.rowBytes) {
      nextOffset = 0;
      t += step;
      more = t < a.numTokens;
      if (more && !ep_combine_reduce_job(c, a, q, t, gen, next)) {
        ep_stage_arrived(q, n);
        return;
      }
    }
    if (more)
      ep_job_load(c, q, n + 1, next, nextOffset);
    ep_stage_arrived(q, n);
    ep_job_store(c, q, n, job, offset);
  }
}

template <class C> DEV void ep_combine(const C c, const epCombineArgs &a) {
  uint32_t gen = p::ldg<uint32_t>(&ep_state(a.group)->stageGen) + 1;
  bool push = p::bid() < a.pushBlocks;
  epPipe q = ep_pipe(c);
  ep_bug_wait_unscheduled(c, a.group, push);
  if (push)
    ep_combine_push(c, a, q, gen);
  else
    ep_combine_reduce(c, a, q, gen);
  ep_operation_end(c, a.group, gen, a.blocks);
}

#endif
