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
  uint32_t parts;   /* lanes with a row */
  uint32_t local;   /* of them: this rank's, summed and rounded first */
  uint32_t localAt; /* the lane (a bit) at which that sum enters, 0: none */
  uint32_t last;    /* all lanes at which something enters */
  uint64_t address; /* of the lane's row */
};

/* Adds parts [i, end) to N vectors a lane, two at a time, so that loads of one are on their way while another is added;
 * load(i, x): the vectors of part i. */
template <int N, class C, class F> DEV void ep_sum_parts(const C c, uint32_t i, uint32_t end, F load, epVec *sum) {
  uint4 x[N], y[N];
  for (; i + 1 < end; i += 2) {
    load(i, x);
    load(i + 1, y);
#pragma unroll
    for (int u = 0; u < N; u++) ep_vec_add(c, sum[u], x[u]);
#pragma unroll
    for (int u = 0; u < N; u++) ep_vec_add(c, sum[u], y[u]);
  }
  if (i < end) {
    load(i, x);
#pragma unroll
    for (int u = 0; u < N; u++) ep_vec_add(c, sum[u], x[u]);
  }
}

/* Where this rank's slots of a token are summed and rounded before they enter its sum. From flat there is one slot, which is its
 * own sum. */
template <class C> DEV bool ep_sums_locals(const C c) { return !c.single && c.layout == EP_LAYOUT_KIND_EXPERT_MAJOR; }

/* N 16-byte vectors of the result; load(i, x): the same vectors of the i-th part, local ones first, each kind in ascending k;
 * start(sum): what they are added to. `plain`: all parts are local, and nothing is. */
template <int N, class C, class F, class G>
DEV void ep_sum_vectors(const C c, const epSum &s, bool plain, F load, G start, uint4 *out) {
  epVec sum[N], part[N];
  uint32_t locals = p::popc(s.local), count = p::popc(s.parts), before = p::popc(s.last & (s.localAt - 1) & ~s.localAt);
#pragma unroll
  for (int u = 0; u < N; u++) ep_vec_zero(sum[u]);
  if (c.bias && !plain) start(sum);
  if (plain || !ep_sums_locals(c)) {
    ep_sum_parts<N>(c, 0, count, load, sum);
  } else {
    /* remote parts that enter before the local sum (all where there is none), that sum, the rest */
    ep_sum_parts<N>(c, locals, locals + before, load, sum);
    if (locals) {
#pragma unroll
      for (int u = 0; u < N; u++) ep_vec_zero(part[u]);
      ep_sum_parts<N>(c, 0, locals, load, part);
#pragma unroll
      for (int u = 0; u < N; u++) ep_vec_add(c, sum[u], ep_vec_round(c, part[u]));
      ep_sum_parts<N>(c, locals + before, count, load, sum);
    }
  }
#pragma unroll
  for (int u = 0; u < N; u++) out[u] = ep_vec_round(c, sum[u]);
}

/* Number of the lane's part. */
DEV uint32_t ep_sum_place(const epSum &s, uint32_t lane) {
  uint32_t below = (1u << lane) - 1, local = s.local >> lane & 1;
  return local ? p::popc(s.local & below) : p::popc(s.local) + p::popc(s.parts & ~s.local & below);
}
/* Lane of part i: whole warp. */
DEV uint32_t ep_sum_lane(const epSum &s, uint32_t i) {
  uint32_t locals = p::popc(s.local), m = i < locals ? s.local : s.parts & ~s.local;
  for (i = i < locals ? i : i - locals; i; i--) m &= m - 1;
  return p::ffs(m) - 1;
}

/* A row being summed: what goes in, where the result goes. With `move`, all parts are this rank's, and a single one is moved
 * as it is. */
struct epJob {
  epSum sum;
  uint8_t *to;
  bool move;
  bool hollow;            /* of a sender: a round without a row */
  uint32_t round;         /* of a sender: those before it hold no more of this warp's rows */
  uint32_t begin, end;    /* the span of the row */
  uint32_t piece;         /* bytes of it that a stage holds of each part */
  uint32_t apart;         /* of a sender without partial sums: part k goes to `to` + k * apart */
  const uint8_t *bias[2]; /* the token's rows of cfg.bias tensors; not with `move` */
};

/* With masks a row is one span on both sides, so that a token has a rank's contribution in whole or not at all. */
template <class C> DEV uint32_t ep_spans(const C c) {
  return c.mask ? 1 : epSpans(c.rowBytes, c.layout == EP_LAYOUT_KIND_EXPERT_MAJOR);
}

/* Span i of a row cut into `spans`. */
template <class C> DEV void ep_job_span(const C c, epJob &job, uint32_t i, uint32_t spans) {
  uint32_t span = epSpanBytes(c.rowBytes, spans);
  job.begin = i * span < c.rowBytes ? i * span : c.rowBytes;
  job.end = job.begin + span < c.rowBytes ? job.begin + span : c.rowBytes;
}

/* Equal pieces, on line boundaries where they are not tiny. */
template <class C> DEV void ep_job_pieces(const C c, const epPipe &q, epJob &job) {
  uint32_t count = p::popc(job.sum.parts), most = count ? q.stageBytes / count : q.stageBytes;
  uint32_t length = job.end - job.begin;
  job.piece = length;
  if (!c.bulk || length <= most) return;
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
    p::bulk_g2s(ep_stage(q, n) + ep_sum_place(job.sum, l) * job.piece, (const uint8_t *)job.sum.address + at, bytes,
                ep_bar(q, n));
  }
}

/* Without partial sums: the piece of unit n of each part to that part's own row. */
DEV void ep_job_scatter(const epPipe &q, uint32_t n, const epJob &job, uint32_t at) {
  uint32_t from = ep_stage(q, n), bytes = at + job.piece < job.end ? job.piece : job.end - at;
  if (p::lane() != 0) return;
  for (uint32_t m = job.sum.parts; m; m &= m - 1, from += job.piece)
    p::bulk_s2g(job.to + (uint64_t)(p::ffs(m) - 1) * job.apart + at, from, bytes);
  p::bulk_commit();
}

/* A lane's vectors at once: with two warps a scheduler, what hides the latencies of a sum is its own width. */
#define EP_SUM_VECTORS 4
/* Sums the piece of unit n in place of its first part (a lane writes only what it alone has read) and stores it. */
template <class C> DEV void ep_job_store(const C c, const epPipe &q, uint32_t n, const epJob &job, uint32_t at) {
  uint32_t l = p::lane(), stage = ep_stage(q, n);
  uint32_t bytes = at + job.piece < job.end ? job.piece : job.end - at;
  if (c.single && job.move) return ep_job_scatter(q, n, job, at);
  if (c.layout == EP_LAYOUT_KIND_FLAT && job.move) {
    if (!job.sum.parts) { /* the row was dropped */
      for (uint32_t v = 16 * l; v < bytes; v += 512) p::sts<uint4>(stage + v, ep_zero4());
      ep_stage_written(c);
    }
  } else if (!job.move || p::popc(job.sum.parts) != 1) {
    for (uint32_t v = 16 * l; v < bytes; v += 512 * EP_SUM_VECTORS) { /* the last of them may lie past the end */
      uint4 sum[EP_SUM_VECTORS];
      auto place = [&](uint32_t u) { return v + 512 * u < bytes ? v + 512 * u : v; };
      ep_sum_vectors<EP_SUM_VECTORS>(
          c, job.sum, job.move,
          [&](uint32_t i, uint4 *x) {
#pragma unroll
            for (uint32_t u = 0; u < EP_SUM_VECTORS; u++) x[u] = p::lds<uint4>(stage + i * job.piece + place(u));
          },
          [&](epVec *from) {
#pragma unroll
            for (uint32_t u = 0; u < EP_SUM_VECTORS; u++) ep_vec_start(c, job.bias, at + place(u), from[u]);
          },
          sum);
#pragma unroll
      for (uint32_t u = 0; u < EP_SUM_VECTORS; u++)
        if (u == 0 || v + 512 * u < bytes) p::sts<uint4>(stage + v + 512 * u, sum[u]);
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
  for (uint32_t m = c.single && job.move ? job.sum.parts : 0; m; m &= m - 1) {
    uint32_t k = p::ffs(m) - 1;
    const uint8_t *from = (const uint8_t *)ep_shfl64(job.sum.address, k);
    ep_row_copy(job.to + (uint64_t)k * job.apart + job.begin, from + job.begin, job.end - job.begin);
  }
  if (c.single && job.move) return;
  for (uint32_t at = job.begin + 16 * p::lane(); at - 16 * p::lane() < job.end; at += 512) {
    uint4 v;
    ep_sum_vectors<1>(
        c, job.sum, job.move,
        [&](uint32_t i, uint4 *x) {
          const uint8_t *src = (const uint8_t *)ep_shfl64(job.sum.address, ep_sum_lane(job.sum, i));
          x[0] = at < job.end ? p::ldg<uint4>(src + at) : ep_zero4();
        },
        [&](epVec *from) {
          if (at < job.end) ep_vec_start(c, job.bias, at, *from);
        },
        &v);
    if (at < job.end) p::stg<uint4>(job.to + at, v);
  }
}

/* First slot of source s's rows for the expert of `entry`; nothing waits for the answer yet. */
template <class C> DEV uint32_t ep_combine_base(const C c, const epCombineArgs &a, uint32_t s, uint32_t entry) {
  if (c.layout == EP_LAYOUT_KIND_FLAT || entry == EP_NONE) return 0;
  return p::ldg<uint32_t>((const uint32_t *)(a.record + a.recordLayout.slotBase) + s * (c.experts / c.ranks) +
                          EP_ENTRY_EXPERT(entry));
}

/* Input row of entry `entry` (lane's k, its base) of row j from source s, or EP_NONE when it has none or was dropped. */
template <class C>
DEV uint32_t ep_combine_input(const C c, const epCombineArgs &a, const epPipe &q, uint32_t s, uint32_t j,
                              uint32_t entry, uint32_t base) {
  if (entry == EP_NONE) return EP_NONE;
  uint32_t row = c.layout == EP_LAYOUT_KIND_FLAT ? ep_first_row(c, q, s) + j : base + EP_ENTRY_POS(entry);
  return row < a.capacity ? row : EP_NONE;
}

/* The weight that belongs to the lane's k in a backward pass. */
template <class C> DEV uint32_t ep_combine_weight(const C c, const epCombineArgs &a, uint32_t row) {
  if (row == EP_NONE) return 0;
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

/* Staging row of row j: without partial sums there is one for each k. */
template <class C> DEV uint32_t ep_combine_stage(const C c, uint32_t j) { return c.single ? j * c.topk : j; }

/* Whole warp, without partial sums: a source does not know what was dropped here, so in these slots' places it finds what a sum does
 * not notice: -0 (+0 would make a positive zero of a negative one). */
template <class C> DEV void ep_combine_dropped(const C c, const epJob &job, uint32_t lanes) {
  uint4 none;
  none.x = none.y = none.z = none.w = c.dtype == EP_DTYPE_F32 ? 0x80000000u : 0x80008000u;
  for (; lanes; lanes &= lanes - 1) /* ordinary stores: the release of the row's flag covers them */
    for (uint32_t at = job.begin + 16 * p::lane(); at < job.end; at += 512)
      p::stg<uint4>(job.to + (uint64_t)(p::ffs(lanes) - 1) * job.apart + at, none);
}

/* A chunk of rows of one source, or a span of one; item i of the work list, in which sources take turns. Counted in spans;
 * empty where the source has none. */
struct epRun {
  uint32_t s, j, end;
};

template <class C>
DEV epRun ep_combine_run(const C c, const epCombineArgs &a, const epPipe &q, uint64_t i, uint64_t items) {
  uint32_t size = epChunkRows(c.rowBytes), others = c.ranks - 1;
  epRun run;
  run.s = (uint32_t)((a.group.rank + 1 + i % others) % c.ranks);
  run.j = (uint32_t)(i / others) * size;
  uint32_t rows = i < items ? ep_rows(c, q, run.s) * ep_spans(c) : 0;
  run.end = run.j + size < rows ? run.j + size : run.j > rows ? run.j : rows;
  return run;
}

/* A span of a row that is to go home, known step by step, each a trip to memory ahead of the next: where it is, what the
 * lane's k has there, where that begins. */
struct epPushRow {
  bool more;        /* the list goes on; it may have nothing in a round */
  bool there, ends; /* there is one; it ends its run */
  uint32_t s, item, round, entry, base;
};

/* A sender warp's way through its runs, one a round. */
struct epPushList {
  uint64_t items;
  uint32_t round, rounds; /* this warp's; of all blocks */
  bool more;
  epRun run;
};

/* Opens round `list.round`. */
template <class C> DEV void ep_push_round(const C c, const epCombineArgs &a, const epPipe &q, epPushList &list) {
  uint32_t ticket = ep_ticket(c, a.pushBlocks, list.round);
  list.more = ticket < list.rounds;
  if (list.more) list.run = ep_combine_run(c, a, q, (uint64_t)ticket * epSenders(c.threads) + p::warp(), list.items);
}

/* Goes on by a round at most: what is asked for ahead must not wait for tickets that are dealt only after rounds at hand. */
template <class C> DEV epPushRow ep_push_next(const C c, const epCombineArgs &a, const epPipe &q, epPushList &list) {
  epPushRow r = {};
  if (list.more && list.run.j >= list.run.end) {
    list.round++;
    ep_push_round(c, a, q, list);
  }
  r.more = list.more;
  r.round = list.round;
  r.there = list.more && list.run.j < list.run.end;
  if (!r.there) return r;
  r.s = list.run.s;
  r.item = list.run.j++;
  r.ends = list.run.j == list.run.end;
  const uint32_t *meta = ep_record_meta(c, a.group, a.recordLayout, a.record, r.s, r.item / ep_spans(c));
  r.entry = p::lane() < c.topk ? p::ldg<uint32_t>(meta + 1 + p::lane()) : EP_NONE;
  return r;
}

template <class C> DEV void ep_push_place(const C c, const epCombineArgs &a, epPushRow &r) {
  r.base = r.there ? ep_combine_base(c, a, r.s, r.entry) : 0;
}

template <class C>
DEV void ep_push_job(const C c, const epCombineArgs &a, const epPipe &q, const epPushRow &r, epJob &job) {
  uint32_t l = p::lane(), j = r.item / ep_spans(c), span = r.item % ep_spans(c);
  job.round = r.round;
  job.hollow = !r.there || ep_left_out(c, q, r.s);
  if (job.hollow) return;
  uint32_t row = ep_combine_input(c, a, q, r.s, j, r.entry, r.base);
  job.sum.parts = job.sum.local = ep_combine_parts(c, row);
  job.sum.last = job.sum.localAt = 0;
  job.sum.address = ep_combine_address(c, a, row);
  job.to = ep_stage_row(a.group, q, r.s, a.group.rank, ep_combine_stage(c, j));
  job.apart = (uint32_t)a.group.window.stageStride;
  job.move = true;
  ep_job_span(c, job, span, ep_spans(c));
  ep_job_pieces(c, q, job);
  if (c.single) ep_combine_dropped(c, job, p::ballot(p::FULL, r.entry != EP_NONE) & ~job.sum.parts);
  if (c.weights && l < c.topk && span == 0) /* ordinary stores: the release of the row's flag covers them */
    p::stg<uint32_t>(job.to + c.rowBytes + 4 * l, ep_combine_weight(c, a, row));
}

/* Sender warp; a unit is a piece of one of its rows. `row`: the one after the job in hand, its base asked for; `ahead`: the
 * one after that, its entries asked for. */
template <class C>
DEV void ep_combine_push(const C c, const epCombineArgs &a, epPipe &q, epPushList &list, epPushRow &row,
                         epPushRow &ahead, uint32_t gen) {
  uint32_t posted = 0, offset = 0, depth = ep_rounds_ahead(a.pushBlocks, list.rounds);
  epJob job, next;
  auto look = [&] { /* after the loads of a job: their fence would wait for these */
                    row = ahead;
                    ahead = ep_push_next(c, a, q, list);
                    ep_push_place(c, a, row);
  };
  if (!c.bulk) {
    for (; row.more; look()) {
      if (!row.there || ep_left_out(c, q, row.s)) continue;
      ep_push_job(c, a, q, row, job);
      ep_job_run(c, job);
      p::sync_warp();
      if (row.ends && p::lane() == 0)
        p::st_release_sys(ep_flag(a.group, q, row.s, a.group.rank, row.item / epChunkRows(c.rowBytes)),
                          EP_FLAG(gen, 0));
    }
    return;
  }
  bool more = row.more;
  ep_push_job(c, a, q, row, job);
  if (more && !job.hollow) ep_job_load(c, q, 0, job, offset = job.begin);
  look();
  uint32_t n = 0;
  for (; more; job = next) {
    uint32_t at = offset;
    bool whole = job.hollow || at + job.piece >= job.end; /* with this piece */
    next = job;
    offset += job.piece;
    if (whole) {
      more = row.more;
      ep_push_job(c, a, q, row, next);
      offset = next.begin;
    }
    if (more && !next.hollow) ep_job_load(c, q, n + !job.hollow, next, offset);
    if (whole) look();
    if (!job.hollow) {
      ep_stage_arrived(q, n);
      ep_job_store(c, q, n, job, at);
      n++;
    }
    if (!whole || posted == job.round) continue;
    /* The span's last piece is on its way: its own pieces, three at most, need not have landed for earlier rounds to. */
    if (job.hollow)
      ep_stores_landed<0>(c);
    else if (at == job.begin)
      ep_stores_landed<1>(c);
    else if (at == job.begin + job.piece)
      ep_stores_landed<2>(c);
    else
      ep_stores_landed<3>(c);
    for (; posted < job.round; posted++) ep_post(posted, depth);
  }
  ep_stores_landed<0>(c);
  for (; posted < list.round; posted++) ep_post(posted, depth);
}

/* Signaller: lane w raises the flag of sender w's run. */
template <class C>
DEV void ep_combine_signal(const C c, const epCombineArgs &a, const epPipe &q, uint64_t items, uint32_t rounds,
                           uint32_t gen) {
  uint32_t senders = epSenders(c.threads), most = ep_rounds_a_fence(a.pushBlocks, rounds), n;
  for (uint32_t r = 0;; r += n) {
    for (n = 0; n < most; n++) {
      uint32_t ticket = ep_ticket(c, a.pushBlocks, r + n);
      if (ticket >= rounds) break;
      if (p::lane() == 0) ep_deal(a.group, a.pushBlocks, r + n + EP_DEAL_AHEAD, rounds);
      ep_signal_landed(c, r + n);
      if (ep_round_is_late(a.pushBlocks, rounds, ticket)) most = 1;
    }
    if (n == 0) break;
    ep_signal_begin(c);
    for (uint32_t i = r; i < r + n; i++) {
      epRun run = ep_combine_run(c, a, q, (uint64_t)ep_ticket(c, a.pushBlocks, i) * senders + p::lane(), items);
      if (p::lane() < senders && run.j < run.end && !ep_left_out(c, q, run.s))
        p::st_relaxed_sys(ep_flag(a.group, q, run.s, a.group.rank, run.j / epChunkRows(c.rowBytes)), EP_FLAG(gen, 0));
      ep_signal_end(c, i);
    }
  }
}

/* Whole warp: every block of senders has its place. Only then may one of them wait for rows: if it took the place of a block
 * that has still to send, two ranks could wait for each other. */
DEV bool ep_senders_started(const epGroupArgs &g, uint32_t pushBlocks) {
  uint32_t started = 0;
  if (p::lane() == 0) started = p::ld_relaxed_sys(&ep_state(g)->sendersStarted);
  return p::shfl(p::FULL, started, 0) == pushBlocks;
}

/* True: the warp goes on to reduce what is left. */
template <class C> DEV bool ep_combine_senders(const C c, const epCombineArgs &a, epPipe &q, uint32_t gen) {
  uint32_t size = epChunkRows(c.rowBytes);
  epPushList list = {};
  epPushRow row, ahead;
  if (p::tid() == 0) p::atomic_add(&ep_state(a.group)->sendersStarted, 1);
  list.items = (uint64_t)((ep_most_rows(c, q) * ep_spans(c) + size - 1) / size) * (c.ranks - 1);
  list.rounds = ep_rounds(c, list.items);
  ep_deal_first(c, a.group, a.pushBlocks, list.rounds);
  if (!ep_is_signaller(c)) {
    ep_push_round(c, a, q, list);
    row = ep_push_next(c, a, q, list);
    ahead = ep_push_next(c, a, q, list);
    ep_push_place(c, a, row);
  }
  if (!ep_wait_credits(c, a.group, q, gen, EP_PHASE_COMBINE_CREDIT)) return false;
  if (!ep_is_signaller(c)) {
    ep_combine_push(c, a, q, list, row, ahead, gen);
    return c.part == EP_PART_WHOLE && ep_senders_started(a.group, a.pushBlocks);
  }
  if (c.bulk) ep_combine_signal(c, a, q, list.items, list.rounds, gen);
  return false;
}

/* A moved row crosses the link best whole; what reduces it works on spans all the same, so that little is left to do when the last
 * row has come (halves: 2 us more at T = 4096). */
template <class C> DEV uint32_t ep_reduce_spans(const C c) {
  return c.mask || c.layout == EP_LAYOUT_KIND_EXPERT_MAJOR ? ep_spans(c) : c.bulk ? epSpans(c.rowBytes, 1) : 1;
}

/* A span of a token, known step by step like epPushRow: the lane's k, then where this rank's own rows for it begin. */
struct epReduceRow {
  bool there;
  bool missing; /* with masks: the row of the lane's owner will not come */
  uint32_t item, row, pos, base;
  int32_t e;
};

template <class C> DEV epReduceRow ep_reduce_ask(const C c, const epCombineArgs &a, uint32_t item, uint32_t items) {
  epReduceRow r = {};
  r.there = item < items;
  r.item = item;
  r.e = -1;
  if (r.there && p::lane() < c.topk) {
    uint64_t at = (uint64_t)(item / ep_reduce_spans(c)) * c.topk + p::lane();
    r.e = p::ldg<int32_t>((const int32_t *)(a.record + a.recordLayout.topk) + at);
    r.row = (uint32_t)p::ldg<int32_t>((const int32_t *)(a.record + a.recordLayout.sendRow) + at);
    r.pos = (uint32_t)p::ldg<int32_t>((const int32_t *)(a.record + a.recordLayout.sendPos) + at);
  }
  return r;
}

template <class C> DEV uint32_t ep_reduce_entry(const C c, const epCombineArgs &a, const epReduceRow &r) {
  uint32_t locals = c.experts / c.ranks;
  return r.e >= 0 && (uint32_t)r.e / locals == a.group.rank ? EP_ENTRY((uint32_t)r.e % locals, r.pos) : EP_NONE;
}

template <class C> DEV void ep_reduce_place(const C c, const epCombineArgs &a, epReduceRow &r) {
  r.base = ep_combine_base(c, a, a.group.rank, ep_reduce_entry(c, a, r));
}

/* The lane's k is the highest of its token at its owner, another rank: at it that rank's sum enters. */
template <class C> DEV bool ep_reduce_enters(const C c, const epReduceRow &r, uint32_t *owner) {
  *owner = r.e >= 0 ? (uint32_t)r.e / (c.experts / c.ranks) : EP_NONE;
  uint32_t mates = p::match_any(p::FULL, r.e >= 0 ? *owner : ep_lone_key());
  return r.e >= 0 && mates >> p::lane() == 1;
}

/* With masks: has the row come from the lane's owner, or will it not? False: not yet; the wait was stopped. */
template <class C>
DEV bool ep_reduce_settled(const C c, const epCombineArgs &a, const uint32_t *flag, uint32_t owner, uint32_t gen,
                           bool wait, bool *missing) {
  if (!wait) {
    *missing = ep_masked(c, a.group, owner);
    return *missing || ep_reached(p::ld_acquire_sys(flag), gen);
  }
  *missing = !ep_await_flag(c, a.group, flag, gen, EP_PHASE_COMBINE_ROWS, owner);
  return !*missing || !ep_stopped(c, a.group);
}

/* The span has come from all the token's ranks: looked at once, or waited for. False: not yet; a wait gave up. */
template <class C>
DEV bool ep_reduce_come(const C c, const epCombineArgs &a, const epPipe &q, epReduceRow &r, uint32_t gen, bool wait) {
  uint32_t owner, me = a.group.rank, sent = ep_spans(c), span = r.item % ep_reduce_spans(c);
  bool ok = true;
  if (ep_reduce_enters(c, r, &owner) && owner != me && c.bug != EP_BUG_SKIP_WAIT) {
    const uint32_t *flag =
        ep_flag(a.group, q, me, owner, (r.row * sent + span * sent / ep_reduce_spans(c)) / epChunkRows(c.rowBytes));
    if (c.mask)
      ok = ep_reduce_settled(c, a, flag, owner, gen, wait, &r.missing);
    else
      ok = wait ? ep_wait_flag(a.group, flag, gen, EP_PHASE_COMBINE_ROWS, owner)
                : ep_reached(p::ld_acquire_sys(flag), gen);
  }
  ok = p::ballot(p::FULL, !ok) == 0;
  p::sync_warp();
  return ok;
}

template <class C>
DEV void ep_reduce_job(const C c, const epCombineArgs &a, const epPipe &q, const epReduceRow &r, epJob &job) {
  uint32_t l = p::lane(), me = a.group.rank, spans = ep_reduce_spans(c), owner;
  uint32_t t = r.item / spans, span = r.item % spans, row = r.row;
  bool last = ep_reduce_enters(c, r, &owner), gone = false;
  if (c.mask) { /* lanes of an owner whose row is missing */
    uint32_t missing = p::ballot(p::FULL, last && r.missing);
    gone = (p::match_any(p::FULL, r.e >= 0 ? owner : ep_lone_key()) & missing) != 0;
    last = last && !gone;
  }
  uint32_t mine = ep_combine_input(c, a, q, me, row, ep_reduce_entry(c, a, r), r.base);
  bool sent = owner != me && (c.single ? r.e >= 0 && !gone : last); /* the lane has a staged row */
  uint32_t localAt = p::ballot(p::FULL, last && owner == me), remote = p::ballot(p::FULL, sent);
  uint32_t staged = ep_combine_stage(c, row);
  job.sum.local = ep_combine_parts(c, mine);
  if (c.layout == EP_LAYOUT_KIND_FLAT && !c.single && job.sum.local) job.sum.local = localAt;
  job.sum.parts = job.sum.local | remote;
  if (!ep_sums_locals(c)) job.sum.local = 0; /* its slots enter like all others */
  job.sum.localAt = job.sum.local ? localAt : 0;
  job.sum.last = job.sum.localAt | remote;
  job.sum.address = owner == me
                        ? ep_combine_address(c, a, mine)
                        : (uint64_t)(sent ? ep_stage_row(a.group, q, me, owner, staged + (c.single ? l : 0)) : nullptr);
  job.to = a.outTokens + (uint64_t)t * c.rowBytes;
  job.bias[0] = c.bias > 0 ? a.bias[0] + (uint64_t)t * c.rowBytes : nullptr;
  job.bias[1] = c.bias > 1 ? a.bias[1] + (uint64_t)t * c.rowBytes : nullptr;
  job.move = false;
  ep_job_span(c, job, span, spans);
  ep_job_pieces(c, q, job);
  if (c.weights && l < c.topk && span == 0) {
    uint32_t w = 0;
    if (owner == me)
      w = ep_combine_weight(c, a, mine);
    else if (r.e >= 0 && !gone)
      w = p::ldg<uint32_t>(ep_stage_row(a.group, q, me, owner, staged) + c.rowBytes + 4 * l);
    p::stg<float>(a.outWeights + (uint64_t)t * c.topk + l, p::as_float(w));
  }
}

template <class C> DEV void ep_combine_reduce(const C c, const epCombineArgs &a, epPipe &q, uint32_t gen) {
  uint32_t warps = (a.blocks - a.pushBlocks) * epSenders(c.threads), offset = 0;
  uint32_t index = (p::bid() - a.pushBlocks) * epSenders(c.threads) + p::warp();
  uint32_t items = ep_tokens(a.recordLayout, a.record, a.numTokens) * ep_reduce_spans(c);
  epDraw draw = ep_draw_begin(a.group, index, warps, p::bid() < a.pushBlocks);
  epReduceRow row = ep_reduce_ask(c, a, ep_draw(a.group, draw), items);
  epReduceRow ahead = ep_reduce_ask(c, a, ep_draw(a.group, draw), items);
  epJob job, next;
  ep_reduce_place(c, a, row);
  auto look = [&] { /* after the loads of a job: their fence would wait for these */
                    row = ahead;
                    ahead = ep_reduce_ask(c, a, ep_draw(a.group, draw), items);
                    ep_reduce_place(c, a, row);
  };
  if (!c.bulk) {
    for (; row.there && ep_reduce_come(c, a, q, row, gen, true); look()) {
      ep_reduce_job(c, a, q, row, job);
      ep_job_run(c, job);
    }
    return;
  }
  auto open = [&](epJob &to, uint32_t n) {
    ep_reduce_job(c, a, q, row, to);
    ep_job_load(c, q, n, to, offset = to.begin);
    look();
  };
  bool more = row.there && ep_reduce_come(c, a, q, row, gen, true);
  if (more) open(job, 0);
  for (uint32_t n = 0; more; n++, job = next) {
    uint32_t at = offset;
    bool whole = at + job.piece >= job.end; /* with this piece */
    next = job;
    if (!whole) ep_job_load(c, q, n + 1, job, offset += job.piece);
    more = !whole || row.there;
    /* a row that has not come must not hold up the one at hand */
    bool early = whole && more && ep_reduce_come(c, a, q, row, gen, false);
    if (early) open(next, n + 1);
    ep_stage_arrived(q, n);
    ep_job_store(c, q, n, job, at);
    if (whole && more && !early) {
      more = ep_reduce_come(c, a, q, row, gen, true);
      if (more) open(next, n + 1);
    }
  }
}

template <class C> DEV void ep_combine(const C c, const epCombineArgs &a) {
  ep_operation<true>(
      c, a, EP_KERNEL_COMBINE, [](uint32_t) { return true; },
      [&](epPipe &q, uint32_t gen) { return ep_combine_senders(c, a, q, gen); },
      [&](epPipe &q, uint32_t gen) { ep_combine_reduce(c, a, q, gen); });
}

#endif
