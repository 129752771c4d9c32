/* Runs the operations on a profiled group, gathers what all ranks wrote, and says it in a table: spans, waits by source, and a line
 * of advice where waiting for one rank dominates. */
#include "bench_profile.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "failure.h"
#include "meet.h"

#define ITERATIONS 16
#define WARM_UP 2
#define WAITS 4096
/* A wait is worth a line when it is this long and this part of its operation. */
#define ADVICE_US 20.0
#define ADVICE_PART 0.25

const char *const epProfileKindNames[3] = {"update", "dispatch", "combine"};
const char *const epProfileSpanNames[NCCL_EP_SPANS] = {"record", "send", "receive"};

/* ---- Running ------------------------------------------------------------------------------------------------------ */

/* One operation behind a meeting of the ranks, from which a late rank comes late. */
static int runOnce(epBench *bench, epLayer *layer, unsigned parts, unsigned i, int first) {
  const epBenchOptions *o = bench->options;
  epPort *port = layer->port;
  unsigned routing = i % bench->routings;
  int hold = !first && port->cuda;
  if (epPortSync(port) || epPortBarrier(port) || (hold && (epPortHold(port) || epMeetQueue(port))) ||
      (o->delayUs && o->delayRank == (unsigned)port->rank && epMeetDelay(port, o->delayUs)) ||
      epLayerCalls(layer, parts, routing) || (hold && epPortRelease(port)))
    return -1;
  return epPortSync(port);
}

static int byLength(const void *a, const void *b) {
  unsigned x = ((const ncclEpProfileWait_t *)a)->longest_ns, y = ((const ncclEpProfileWait_t *)b)->longest_ns;
  return x < y ? 1 : x > y ? -1 : 0;
}

/* What has ended since the last call; the operations beyond the room are dropped. */
static int collect(epLayer *layer, epProfiledRank *mine) {
  static const unsigned opRoom = 256;
  ncclEpProfile_t p = NCCL_EP_PROFILE_INIT;
  ncclEpProfileOperation_t *ops = calloc(opRoom, sizeof(*ops));
  ncclEpProfileWait_t *waits = calloc(WAITS, sizeof(*waits));
  int rc = -1;
  p.operations = ops, p.operation_capacity = opRoom;
  p.waits = waits, p.wait_capacity = WAITS;
  mine->count = 0;
  if (!ops || !waits) {
    epToolFail("out of host memory");
    goto done;
  }
  do {
    unsigned w = 0;
    if (ncclEpGetProfile(layer->group, &p) != ncclSuccess) {
      epToolFail("rank %d: ncclEpGetProfile: %s", layer->port->rank, ncclEpGetLastErrorString());
      goto done;
    }
    for (unsigned i = 0; i < p.operation_count; i++) {
      unsigned from = w;
      epProfiledOp *to = mine->count < EP_PROFILE_OPS ? &mine->ops[mine->count++] : NULL;
      while (w < p.wait_count && waits[w].number == ops[i].number) w++;
      if (!to) continue;
      qsort(waits + from, w - from, sizeof(*waits), byLength);
      to->op = ops[i];
      to->waitCount = w - from < EP_PROFILE_WORST ? w - from : EP_PROFILE_WORST;
      memcpy(to->waits, waits + from, to->waitCount * sizeof(*waits));
    }
  } while (p.operation_count);
  rc = 0;
done:
  free(ops);
  free(waits);
  return rc;
}

static int runAll(epBench *bench, epLayer *layer, epProfiledRank *mine) {
  unsigned ops = bench->options->ops;
  unsigned long long stamp = 0;
  epPort *port = layer->port;
  if (ncclEpSetProfiling(layer->group, 1) != ncclSuccess)
    return epToolFail("rank %d: ncclEpSetProfiling: %s", port->rank, ncclEpGetLastErrorString());
  if (epMeetReady(port)) return -1;
  for (unsigned i = 0; i < WARM_UP + ITERATIONS; i++) {
    if (i == WARM_UP && collect(layer, mine)) return -1;
    if (runOnce(bench, layer, EP_PART_UPDATE | EP_PART_DISPATCH, i, i == 0) ||
        ((ops & EP_OP_COMBINE) && runOnce(bench, layer, EP_PART_COMBINE, i, i == 0)))
      return -1;
  }
  if (collect(layer, mine) || epMeetStamp(port, &stamp)) return -1;
  mine->clockNs = (long long)stamp;
  if (ncclEpSetProfiling(layer->group, 0) != ncclSuccess)
    return epToolFail("rank %d: ncclEpSetProfiling: %s", port->rank, ncclEpGetLastErrorString());
  return 0;
}

/* ---- Telling ------------------------------------------------------------------------------------------------------ */

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return x < y ? -1 : x > y;
}

static double median(double *values, unsigned n) {
  qsort(values, n, sizeof(*values), ascending);
  return n ? n % 2 ? values[n / 2] : 0.5 * (values[n / 2 - 1] + values[n / 2]) : 0;
}

static double took(const epProfiledOp *o) { return 1e-3 * (double)(o->op.end_ns - o->op.start_ns); }

/* Median over a rank's operations of a kind of the time, or of the begin or the end of a span; how many there are. */
static unsigned over(const epProfiledRank *r, int kind, int span, int end, double *value) {
  double values[EP_PROFILE_OPS];
  unsigned n = 0;
  for (unsigned i = 0; i < r->count; i++) {
    const epProfiledOp *o = &r->ops[i];
    if ((int)o->op.kind != kind || (span >= 0 && !o->op.span_end_ns[span])) continue;
    values[n++] = span < 0 ? took(o) : 1e-3 * (end ? o->op.span_end_ns[span] : o->op.span_start_ns[span]);
  }
  *value = median(values, n);
  return n;
}

static void tellSpans(const epProfiledRank *ranks, unsigned count) {
  printf(
      "#\n# profile: medians of each rank; spans are from the first block's begin to the last one's end, us since the "
      "operation's begin\n");
  printf("# %4s %-9s %6s %9s %15s %15s %15s\n", "rank", "operation", "count", "us", "record", "send", "receive");
  for (unsigned r = 0; r < count; r++)
    for (int kind = 0; kind < 3; kind++) {
      double all, from, to;
      unsigned n = over(&ranks[r], kind, -1, 0, &all);
      if (!n) continue;
      printf("  %4u %-9s %6u %9.1f", r, epProfileKindNames[kind], n, all);
      for (int span = 0; span < NCCL_EP_SPANS; span++)
        if (over(&ranks[r], kind, span, 0, &from) && over(&ranks[r], kind, span, 1, &to))
          printf(" %6.1f - %6.1f", from, to);
        else
          printf(" %15s", "-");
      printf("\n");
    }
}

/* Of a rank's operations of one kind, what it missed of `source`: median of the longest wait; median of when the first of it
 * came, which is about how late the source began (what it gave back of the operation before says nothing, and its places
 * wait for all others), and what that was. */
typedef struct missed {
  unsigned count;
  double longest, came;
  const char *phase;
} missed;

static missed missedOf(const epProfiledRank *r, int kind, int source) {
  double longest[EP_PROFILE_OPS], came[EP_PROFILE_OPS];
  missed m = {0, 0, 0, ""};
  unsigned n = 0;
  for (unsigned i = 0; i < r->count; i++) {
    const epProfiledOp *o = &r->ops[i];
    const ncclEpProfileWait_t *first = NULL;
    double most = 0;
    if ((int)o->op.kind != kind) continue;
    for (unsigned w = 0; w < o->waitCount; w++) {
      const ncclEpProfileWait_t *of = &o->waits[w];
      if (of->rank != source) continue;
      most = 1e-3 * of->longest_ns > most ? 1e-3 * of->longest_ns : most;
      if (!strstr(of->phase, "staging") && !strstr(of->phase, "places") && (!first || of->first_ns < first->first_ns))
        first = of;
    }
    if (most <= 0) continue;
    longest[m.count++] = most;
    if (!first) continue;
    came[n++] = 1e-3 * first->first_ns;
    m.phase = first->phase;
  }
  m.longest = median(longest, m.count);
  m.came = median(came, n);
  return m;
}

static void tellWaits(const epProfiledRank *ranks, unsigned count) {
  printf("# waits: the longest for a rank, and when the first of what was missing came\n");
  printf("# %4s %-9s %6s %6s %12s %12s  %s\n", "rank", "operation", "count", "for", "longest (us)", "first (us)",
         "which was");
  for (unsigned r = 0; r < count; r++)
    for (int kind = 0; kind < 3; kind++)
      for (unsigned s = 0; s < count; s++) {
        missed m = missedOf(&ranks[r], kind, (int)s);
        if (m.count)
          printf("  %4u %-9s %6u %6u %12.1f %12.1f  %s\n", r, epProfileKindNames[kind], m.count, s, m.longest, m.came,
                 m.phase);
      }
}

/* A rank that waited about as long itself only hands on another's delay. */
static int waitedToo(const epProfiledRank *ranks, unsigned count, int kind, unsigned rank, double came) {
  for (unsigned s = 0; s < count; s++)
    if (missedOf(&ranks[rank], kind, (int)s).came > 0.5 * came) return 1;
  return 0;
}

/* For each kind of operation: the rank that came last, if waiting for it dominates. */
static void advise(const epProfiledRank *ranks, unsigned count) {
  unsigned lines = 0;
  for (int kind = 0; kind < 3; kind++) {
    missed worst = {0, 0, 0, ""};
    unsigned late = 0, who = 0;
    double all = 0;
    for (unsigned r = 0; r < count; r++)
      for (unsigned s = 0; s < count; s++) {
        missed m = missedOf(&ranks[r], kind, (int)s);
        if (m.came <= worst.came || waitedToo(ranks, count, kind, s, m.came)) continue;
        worst = m, late = s, who = r;
        over(&ranks[r], kind, -1, 0, &all);
      }
    if (worst.came < ADVICE_US || worst.came < ADVICE_PART * all) continue;
    lines++;
    printf("# advice: rank %u was late by %.0f us in %s: rank %u waited for it in %u operations, of %.0f us each\n",
           late, worst.came, worst.phase, who, worst.count, all);
  }
  if (!lines) printf("# advice: no wait for a single rank dominates an operation\n");
}

int epBenchProfile(epBench *bench, epLayer *layer) {
  epPort *port = layer->port;
  epProfiledRank *mine = calloc(1, sizeof(*mine)), *all = calloc((size_t)port->ranks, sizeof(*all));
  int rc = -1;
  if (!mine || !all) {
    epToolFail("out of host memory");
    goto done;
  }
  if (runAll(bench, layer, mine) || epPortGather(port, mine, all, sizeof(*mine))) goto done;
  for (int r = port->ranks - 1; r >= 0; r--) all[r].clockNs -= all[0].clockNs;
  rc = 0;
  if (port->rank) goto done;
  tellSpans(all, (unsigned)port->ranks);
  tellWaits(all, (unsigned)port->ranks);
  advise(all, (unsigned)port->ranks);
  if (bench->options->profilePath) rc = epTimelineWrite(all, (unsigned)port->ranks, bench->options->profilePath);
done:
  free(mine);
  free(all);
  return rc;
}
