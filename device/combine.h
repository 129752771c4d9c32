/* Combine: expert outputs back to the token's rank, reduced. The mirror of dispatch, in one kernel: the first blocks sum
 * each received row's local slots and push one row back; the others reduce at the source as rows arrive.
 *
 *   push      a warp a span of a received row: its slots summed in ascending k in FP32, rounded once, stored into the
 *             source's staging at the row's own index; a flag a span, or for each epChunkRows short rows
 *   reduce    a warp a span of a token: its ranks' partial sums in the order of the highest k each holds, FP32, rounded once; this
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

/* N 16-byte vectors of the result; load(i, x): the same vectors of the i-th part; start(sum): what they are added to. `plain`: all
 * parts are local, and nothing is. */
template <int N, class C, class F, class G>
DEV void ep_sum_vectors(const C c, const epSum &s, bool plain, F load, G start, uint4 *out) {
  epVec sum[N], part[N];
  uint4 x[N];
#pragma unroll
  for (int u = 0; u < N; u++)
    ep_vec_zero(sum[u]);
  if (c.bias && !plain)
    start(sum);
  if (plain) {
    for (uint32_t i = 0, count = p::popc(s.parts); i < count; i++) {
      load(i, x);
#pragma unroll
      for (int u = 0; u < N; u++)
        ep_vec_add(c, sum[u], x[u]);
    }
  } else {
    for (uint32_t m = s.last; m; m &= m - 1) {
      uint32_t bit = m & (0u - m);
      if (bit == s.localAt) {
#pragma unroll
        for (int u = 0; u < N; u++)
          ep_vec_zero(part[u]);
        for (uint32_t q = s.local; q; q &= q - 1) {
          load(p::popc(s.parts & ((q & (0u - q)) - 1)), x);
#pragma unroll
          for (int u = 0; u < N; u++)
            ep_vec_add(c, part[u], x[u]);
        }
#pragma unroll
        for (int u = 0; u < N; u++)
          x[u] = ep_vec_round(c, part[u]);
      } else {
        load(p::popc(s.parts & (bit - 1)), x);
      }
#pragma unroll
      for (int u = 0; u < N; u++)
        ep_vec_add(c, sum[u], x[u]);
    }
  }
#pragma unroll
  for (int u = 0; u < N; u++)
    out[u] = ep_vec_round(c, sum[u]);
}

DEV uint64_t ep_shfl64(uint64_t v, uint32_t from) {
  uint32_t lo = p::shfl(p::FULL, (uint32_t)v, from), hi = p::shfl(p::FULL, (uint32_t)(v >> 32), from);
  return (uint64_t)hi << 32 | lo;
}

/* A row being summed: what goes in, where the result goes. With `move`, all parts are this rank's, and a single one is moved
 * as it is. */
struct epJob {
  epSum sum;
  uint8_t *to;
  bool move;
  uint32_t begin, end; /* the span of the row */
  uint32_t piece;      /* bytes of it that a stage holds of each part */
  const uint8_t *bias[2]; /* the token's rows of cfg.bias tensors; not with `move` */
};

template <class C> DEV uint32_t ep_spans(const C c) {
  return epSpans(c.rowBytes, c.layout == EP_LAYOUT_KIND_EXPERT_MAJOR);
}

/* Span i of a row. */
template <class C> DEV void ep_job_span(const C c, epJob &job, uint32_t i) {
  uint32_t span = epSpanBytes(c.rowBytes, ep_spans(c));
  job.begin = i * span;
  job.end = job.begin + span < c.rowBytes ? job.begin + span : c.rowBytes;
}

/* Equal pieces, on line boundaries where they are not tiny. */
template <class C> DEV void ep_job_pieces(const C c, const epPipe &q, epJob &job) {
  uint32_t count = p::popc(job.sum.parts), most = count ? q.stageBytes / count : q.stageBytes;
  uint32_t length = job.end - job.begin;
  job.piece = length;
  if (!c.bulk || length <= most)
    return;
  uint32_t unit = most >= 4 * EP_LINE ? EP_LINE : EP_ROW_ALIGN;
  uint32_t pieces = (length + most / unit * unit - 1) / (most / unit * unit);
  job.piece = ((length + pieces - 1) / pieces + unit - 1) / unit * unit;
}

/* Issues the loads of the piece at byte `at` of every part, as unit n. */
template <class C> DEV void ep_job_load(const C c, const epPipe &q, uint32_t n, const epJob &job, uint32_t at) {
  uint32_t l = p::lane(), parts = job.sum.parts;
  uint32_t bytes = at + job.piece < job.end ? job.piece : job.end - at;
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
  uint32_t bytes = at + job.piece < job.end ? job.piece : job.end - at;
  if (!job.move || p::popc(job.sum.parts) != 1) {
    for (uint32_t v = 16 * l; v < bytes; v += 1024) { /* two vectors at once: the second may lie past the end */
      uint32_t w = v + 512 < bytes ? v + 512 : v;
      uint4 sum[2];
      ep_sum_vectors<2>(c, job.sum, job.move,
                        [&](uint32_t i, uint4 *x) {
                          x[0] = p::lds<uint4>(stage + i * job.piece + v);
                          x[1] = p::lds<uint4>(stage + i * job.piece + w);
                        },
                        [&](epVec *from) {
                          ep_vec_start(c, job.bias, at + v, from[0]);
                          ep_vec_start(c, job.bias, at + w, from[1]);
                        },
                        sum);
      p::sts<uint4>(stage + v, sum[0]);
      if (w != v)
        p::sts<uint4>(stage + w, sum[1]);
    }
    ep_stage_written(c);
  }
  if (l == 0) {
    p::bulk_s2g(job.to + at, stage, bytes);
    p::bulk_commit();
  }
}

/* The whole span without bulk copies. */
template <class C> DEV void ep_job_run(const C c, const epJob &job) {
  for (uint32_t at = job.begin + 16 * p::lane(); at - 16 * p::lane() < job.end; at += 512) {
    uint4 v;
    ep_sum_vectors<1>(c, job.sum, job.move,
                      [&](uint32_t i, uint4 *x) {
                        uint32_t m = job.sum.parts;
                        for (; i; i--)
                          m &= m - 1;
                        const uint8_t *src = (const uint8_t *)ep_shfl64(job.sum.address, p::ffs(m) - 1);
                        x[0] = at < job.end ? p::ldg<uint4>(src + at) : ep_zero4();
                      },
                      [&](epVec *from) {
                        if (at < job.end)
                          ep_vec_start(c, job.bias, at, *from);
                      },
                      &v);
    if (at < job.end)
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

/* Span `item` of the rows of source s goes home. */
template <class C>
DEV void ep_combine_push_job(const C c, const epCombineArgs &a, const epPipe &q, uint32_t s, uint32_t item, epJob &job) {
  uint32_t l = p::lane(), j = item / ep_spans(c), span = item % ep_spans(c);
  const uint32_t *meta = ep_record_meta(c, a.group, a.recordLayout, a.record, s, j);
  uint32_t entry = l < c.topk ? p::ldg<uint32_t>(meta + 1 + l) : EP_NONE;
  uint32_t row = ep_combine_input(c, a, s, j, entry);
  job.sum.parts = job.sum.local = ep_combine_parts(c, row);
  job.sum.last = job.sum.localAt = 0;
  job.sum.address = ep_combine_address(c, a, row);
  job.to = ep_stage_row(a.group, q, s, a.group.rank, j);
  job.move = true;
  ep_job_span(c, job, span);
  ep_job_pieces(c, q, job);
  if (c.weights && l < c.topk && span == 0) /* ordinary stores: the release of the row's flag covers them */
    p::stg<uint32_t>(job.to + c.rowBytes + 4 * l, ep_combine_weight(c, a, row));
}

/* A chunk of rows of one source, or a span of one; item i of the work list, in which sources take turns. Counted in spans;
 * empty where the source has none. */
struct epRun {
  uint32_t s, j, end;
};

template <class C> DEV epRun ep_combine_run(const C c, const epCombineArgs &a, uint64_t i, uint64_t items) {
  const uint32_t *recvCount = (const uint32_t *)(a.record + a.recordLayout.recvCount);
  uint32_t size = epChunkRows(c.rowBytes), others = c.ranks - 1;
  epRun run;
  run.s = (uint32_t)((a.group.rank + 1 + i % others) % c.ranks);
  run.j = (uint32_t)(i / others) * size;
  uint32_t rows = i < items ? p::ldg<uint32_t>(recvCount + run.s) * ep_spans(c) : 0;
  run.end = run.j + size < rows ? run.j + size : run.j > rows ? run.j : rows;
  return run;
}

/* Sender warp: round r is run first + warp + r * step; a unit is a piece of one of its rows. */
template <class C>
DEV void ep_combine_push(const C c, const epCombineArgs &a, epPipe &q, uint64_t i, uint64_t items, uint32_t rounds,
                         uint32_t gen) {
  uint32_t step = a.pushBlocks * epSenders(c.threads), size = epChunkRows(c.rowBytes), me = a.group.rank;
  uint32_t round = 0, posted = 0, offset = 0;
  epJob job, next;
  epRun run = ep_combine_run(c, a, i, items);
  /* to the next row, through rounds that have none; false: no more */
  auto advance = [&](epJob &to) {
    for (; run.j >= run.end; run = ep_combine_run(c, a, i, items)) {
      if (round == rounds)
        return false;
      round++;
      i += step;
    }
    ep_combine_push_job(c, a, q, run.s, run.j, to);
    return true;
  };
  bool more = rounds && advance(job);
  if (!c.bulk) {
    for (; more; more = advance(job)) {
      ep_job_run(c, job);
      p::sync_warp();
      if (++run.j == run.end && p::lane() == 0)
        p::st_release_sys(ep_flag(a.group, q, run.s, me, (run.j - 1) / size), gen);
    }
    return;
  }
  if (more)
    ep_job_load(c, q, 0, job, offset = job.begin);
  for (uint32_t n = 0; more; n++, job = next) {
    uint32_t at = offset, its = round;
    next = job;
    offset += job.piece;
    if (offset >= job.end) {
      run.j++;
      more = advance(next);
      offset = next.begin;
    }
    if (more)
      ep_job_load(c, q, n + 1, next, offset);
    ep_stage_arrived(q, n);
    ep_job_store(c, q, n, job, at);
    if (at + job.piece < job.end || posted == its)
      continue;
    /* The span's last piece is on its way: its own pieces, three at most, need not have landed for earlier rounds to. */
    if (at == job.begin)
      ep_stores_landed<1>(c);
    else if (at == job.begin + job.piece)
      ep_stores_landed<2>(c);
    else
      ep_stores_landed<3>(c);
    for (; posted < its; posted++)
      ep_post(posted);
  }
  ep_stores_landed<0>(c);
  for (; posted < rounds; posted++)
    ep_post(posted);
}

/* Signaller: lane w raises the flag of sender w's run. */
template <class C>
DEV void ep_combine_signal(const C c, const epCombineArgs &a, const epPipe &q, uint64_t first, uint64_t items,
                           uint32_t rounds, uint32_t gen) {
  uint32_t senders = epSenders(c.threads);
  for (uint32_t r = 0; r < rounds; r++) {
    epRun run = ep_combine_run(c, a, first + (uint64_t)r * a.pushBlocks * senders + p::lane(), items);
    ep_signal_begin(c, r);
    if (p::lane() < senders && run.j < run.end)
      p::st_relaxed_sys(ep_flag(a.group, q, run.s, a.group.rank, run.j / epChunkRows(c.rowBytes)), gen);
    ep_signal_end(c, r);
  }
}

template <class C> DEV void ep_combine_senders(const C c, const epCombineArgs &a, epPipe &q, uint32_t gen) {
  uint32_t senders = epSenders(c.threads), size = epChunkRows(c.rowBytes);
  uint64_t first = p::bid() * senders;
  uint32_t most = ep_most_rows(c, (const uint32_t *)(a.record + a.recordLayout.recvCount));
  uint64_t items = (uint64_t)((most * ep_spans(c) + size - 1) / size) * (c.ranks - 1);
  uint32_t rounds = ep_rounds(items, first, a.pushBlocks * senders);
  if (!ep_wait_credits(c, a.group, q, gen, EP_PHASE_COMBINE_CREDIT))
    return;
  if (!ep_is_signaller(c))
    ep_combine_push(c, a, q, first + p::warp(), items, rounds, gen);
  else if (c.bulk)
    ep_combine_signal(c, a, q, first, items, rounds, gen);
}

/* Span `item` of the tokens: waits for it from all the token's ranks. False: gave up. */
template <class C>
DEV bool ep_combine_reduce_job(const C c, const epCombineArgs &a, const epPipe &q, uint32_t item, uint32_t gen,
                               epJob &job) {
  uint32_t l = p::lane(), me = a.group.rank, locals = c.experts / c.ranks, spans = ep_spans(c);
  uint32_t t = item / spans, span = item % spans;
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
    ok = ep_wait_flag(a.group, ep_flag(a.group, q, me, owner, (row * spans + span) / epChunkRows(c.rowBytes)), gen,
                      EP_PHASE_COMBINE_ROWS, owner);
  if (p::ballot(p::FULL, !ok))
    return false;
  p::sync_warp();

  uint32_t localAt = p::ballot(p::FULL, last && owner == me), remote = p::ballot(p::FULL, last && owner != me);
  job.sum.local = ep_combine_parts(c, mine);
  job.sum.localAt = job.sum.local ? localAt : 0;
  job.sum.parts = job.sum.local | remote;
  job.sum.last = job.sum.localAt | remote;
  job.sum.address = owner == me ? ep_combine_address(c, a, mine)
                                : (uint64_t)(last ? ep_stage_row(a.group, q, me, owner, row) : nullptr);
  job.to = a.outTokens + (uint64_t)t * c.rowBytes;
  job.bias[0] = c.bias > 0 ? a.bias[0] + (uint64_t)t * c.rowBytes : nullptr;
  job.bias[1] = c.bias > 1 ? a.bias[1] + (uint64_t)t * c.rowBytes : nullptr;
  job.move = false;
  ep_job_span(c, job, span);
  ep_job_pieces(c, q, job);
  if (c.weights && l < c.topk && span == 0) {
    uint32_t w = 0;
    if (owner == me)
      w = ep_combine_weight(c, a, mine);
    else if (e >= 0)
      w = p::ldg<uint32_t>(ep_stage_row(a.group, q, me, owner, row) + c.rowBytes + 4 * l);
    p::stg<float>(a.outWeights + at, p::as_float(w));
  }
  return true;
}

template <class C> DEV void ep_combine_reduce(const C c, const epCombineArgs &a, epPipe &q, uint32_t gen) {
  uint32_t warps = epSenders(c.threads), step = (a.blocks - a.pushBlocks) * warps;
  uint32_t i = (p::bid() - a.pushBlocks) * warps + p::warp(), offset = 0;
  uint32_t items = ep_tokens(a.recordLayout, a.record, a.numTokens) * ep_spans(c);
  epJob job, next;
  if (!c.bulk) {
    for (; i < items; i += step) {
      if (!ep_combine_reduce_job(c, a, q, i, gen, job))
        return;
      ep_job_run(c, job);
    }
    return;
  }
  bool more = i < items;
  if (more && !ep_combine_reduce_job(c, a, q, i, gen, job))
    return;
  if (more)
    ep_job_load(c, q, 0, job, offset = job.begin);
  for (uint32_t n = 0; more; n++, job = next) {
    uint32_t at = offset;
    next = job;
    offset += job.piece;
    if (offset >= job.end) {
      i += step;
      more = i < items;
      if (more && !ep_combine_reduce_job(c, a, q, i, gen, next)) {
        ep_stage_arrived(q, n);
        return;
      }
      offset = next.begin;
    }
    if (more)
      ep_job_load(c, q, n + 1, next, offset);
    ep_stage_arrived(q, n);
    ep_job_store(c, q, n, job, at);
  }
}

template <class C> DEV void ep_combine(const C c, const epCombineArgs &a) {
  ep_operation(
      c, a, [&](epPipe &q, uint32_t gen) { ep_combine_senders(c, a, q, gen); },
      [&](epPipe &q, uint32_t gen) { ep_combine_reduce(c, a, q, gen); });
}

#endif
