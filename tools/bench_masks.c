/* ep_bench --mask-test: one rank stays away from some layers, of which the first lasts the timeout for the others; then it is
 * admitted again. Printed is what each rank saw; what was promised and did not hold is a failure. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bench_run.h"
#include "failure.h"

#define ROUTINGS 2
#define AWAY_LAYERS 4 /* the first ends by the timeout, the others must not wait */
#define NEVER (~0ull)

/* A routing, and what it comes to without the rank that is away. */
typedef struct hole {
  epRouting routing;
  epRef *ref;
} hole;

/* What a rank saw. */
typedef struct seen {
  double firstMs, laterMs, readmitMs; /* later: the slowest */
  unsigned wrong[3];                  /* failures with all, without the rank, with all again */
  ncclEpErrorInfo_t said;             /* of the first */
} seen;

typedef struct side {
  epBench *bench;
  epLayer *layer;
  int away; /* this rank is the one */
  double timeoutMs;
  hole holes[ROUTINGS];
  seen saw;
} side;

static int told(const side *s, ncclResult_t rc, const char *call) {
  if (rc == ncclSuccess) return 0;
  return epToolFail("rank %d: %s: error %d: %s", s->layer->port->rank, call, (int)rc, ncclEpGetLastErrorString());
}

/* Where waits in kernels pass: on the emulated fabric in simulated time. */
static double nowMs(const epPort *port) {
  ncclEpEmuReport_t report = NCCL_EP_EMU_REPORT_INIT;
  struct timespec t = {0, 0};
  if (!port->cuda && ncclEpEmuGetReport(port->comm, &report) == ncclSuccess) return 1e-6 * (double)report.clock_ns;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

/* ---- What is right without the rank ------------------------------------------------------------------------------- */

/* Rows of `source` for `owner` are its own, are for it, or (several scale-up domains) go by it. */
static int isLost(const epBenchOptions *o, uint32_t source, uint32_t owner) {
  uint32_t away = (uint32_t)o->maskRank, up = o->fabric.scaleUp ? o->fabric.scaleUp : o->ranks;
  if (source == away || owner == away) return 1;
  return source % up == away % up && owner / up == away / up && source / up != away / up;
}

static int makeHole(const epBench *bench, unsigned routing, hole *out) {
  const epBenchOptions *o = bench->options;
  const epRouting *whole = &bench->routing[routing];
  out->routing = (epRouting){.ranks = o->ranks,
                             .tokens = calloc(o->ranks, sizeof(*whole->tokens)),
                             .idx = calloc(o->ranks, sizeof(*whole->idx))};
  if (!out->routing.tokens || !out->routing.idx) return epToolFail("out of host memory");
  for (uint32_t r = 0; r < o->ranks; r++) {
    size_t entries = (size_t)whole->tokens[r] * o->topk;
    int64_t *idx = out->routing.idx[r] = malloc((entries + 1) * sizeof(*idx));
    if (!idx) return epToolFail("out of host memory");
    out->routing.tokens[r] = r == (uint32_t)o->maskRank ? 0 : whole->tokens[r];
    for (size_t i = 0; i < entries; i++) {
      int owner = epRefOwner(bench->ref[routing], r, (uint32_t)(i / o->topk), (uint32_t)(i % o->topk));
      idx[i] = owner < 0 || isLost(o, r, (uint32_t)owner) ? -1 : whole->idx[r][i];
    }
  }
  return epBenchReference(bench, &out->routing, &out->ref);
}

/* ---- Layers ------------------------------------------------------------------------------------------------------- */

enum { WITH_ALL, FALLS_OUT, WITHOUT };

/* Update, dispatch and combine of a routing, compared with the reference; *ms: from the first call to the end of the last. The rank that
 * is away only meets the others. */
static int runLayer(side *s, unsigned routing, int without, double *ms) {
  epLayer *layer = s->layer;
  epPort *port = layer->port;
  epCheckCase what = epBenchWhat(s->bench, routing);
  double start;
  /* Of the update in which the rank falls out, sources' records keep its places; low latency's dispatch keeps none. */
  if (without == FALLS_OUT && !epLayerIsLl(&layer->config)) what.places = what.ref;
  if (without) what.ref = s->holes[routing].ref;
  if (without && s->away) { /* before, and after */
    if (epPortBarrier(port)) return -1;
    return epPortBarrier(port);
  }
  if (epLayerSetIndices(layer, routing, what.routing->idx[port->rank], what.routing->tokens[port->rank]) ||
      epCheckUploadTokens(layer, &what, EP_DATA_TOKEN) || epCheckUploadOutputs(layer, &what) || epLayerPrefill(layer) ||
      epPortSync(port) || epPortBarrier(port))
    return -1;
  start = nowMs(port);
  if (epLayerCalls(layer, EP_PART_UPDATE | EP_PART_DISPATCH, routing) ||
      epLayerCalls(layer, EP_PART_COMBINE, routing) || epPortSync(port))
    return -1;
  *ms = nowMs(port) - start;
  return epLayerCheckGuards(layer) || epCheckCounts(layer, &what) ||
                 epCheckDispatch(layer, &what, EP_DATA_TOKEN, 0, NULL) || epCheckCombine(layer, &what, 0, NULL) ||
                 epPortBarrier(port)
             ? -1
             : 0;
}

static int expectMask(const side *s, int away, const char *when) {
  epPort *port = s->layer->port;
  size_t bytes = (size_t)port->ranks * sizeof(int);
  void *device = NULL;
  int *mask = calloc(1, bytes), rc = -1;
  if (!mask || epPortAlloc(port, &device, bytes, "mask")) {
    epToolFail("out of memory for the mask");
  } else if (!told(s, ncclEpMaskQuery(s->layer->group, device, port->stream), "ncclEpMaskQuery") &&
             !epPortCopy(port, mask, device, bytes)) {
    rc = 0;
    for (int r = 0; r < port->ranks; r++)
      if (mask[r] != (r != away))
        epToolFail("rank %d: %s rank %d has mask %d: expected %d", port->rank, when, r, mask[r], r != away);
  }
  epPortFree(port, device);
  free(mask);
  return rc;
}

/* It was named, and nobody waited longer than one and a half timeouts. */
static int checkFirst(side *s) {
  ncclEpErrorInfo_t *info = &s->saw.said;
  int rank = s->layer->port->rank, gone = s->bench->options->maskRank;
  *info = NCCL_EP_ERROR_INFO_INIT;
  if (told(s, ncclEpGetErrorInfo(s->layer->group, info), "ncclEpGetErrorInfo")) return -1;
  if (info->code != 1 || info->peer != gone)
    epToolFail("rank %d: the layer without rank %d: expected code 1 and that rank named, got code %d: %s", rank, gone,
               info->code, info->code ? info->text : "nothing");
  if (s->saw.firstMs > 1.5 * s->timeoutMs || s->saw.firstMs < 0.5 * s->timeoutMs)
    epToolFail("rank %d: the layer without rank %d took %.1f ms: expected about the timeout, %.0f ms, and at most one "
               "and a half of it",
               rank, gone, s->saw.firstMs, s->timeoutMs);
  if (expectMask(s, gone, "after the timeout")) return -1;
  return told(s, ncclEpErrorClear(s->layer->group), "ncclEpErrorClear");
}

static int layersWithout(side *s) {
  int rank = s->layer->port->rank, gone = s->bench->options->maskRank;
  if (runLayer(s, 0, FALLS_OUT, &s->saw.firstMs) || (!s->away && checkFirst(s))) return -1;
  for (unsigned i = 1; i < AWAY_LAYERS; i++) {
    double ms = 0;
    if (runLayer(s, i % ROUTINGS, WITHOUT, &ms)) return -1;
    if (ms > s->saw.laterMs) s->saw.laterMs = ms;
  }
  if (s->away) return 0;
  if (s->saw.laterMs > 0.25 * s->timeoutMs)
    epToolFail(
        "rank %d: a later layer without rank %d took %.1f ms: expected no wait for it, with a timeout of %.0f ms", rank,
        gone, s->saw.laterMs, s->timeoutMs);
  return epBenchSettled(s->bench, s->layer);
}

static int layersWithAll(side *s) {
  double ms;
  for (unsigned i = 0; i < ROUTINGS; i++)
    if (runLayer(s, i, WITH_ALL, &ms)) return -1;
  return epBenchSettled(s->bench, s->layer);
}

/* Stopped, an emulated rank's host is not waited for when nobody else can go on. */
static int stop(const side *s, int stopped) {
  epPort *port = s->layer->port;
  int rc = 0;
  if (s->away && !port->cuda)
    rc = told(s, ncclEpEmuRankStop(port->comm, stopped, stopped ? NEVER : 0), "ncclEpEmuRankStop");
  return epPortBarrier(port) || rc ? -1 : 0;
}

static int readmit(side *s) {
  epLayer *layer = s->layer;
  double start = nowMs(layer->port);
  if (told(s, ncclEpMaskClean(layer->group, layer->port->stream), "ncclEpMaskClean")) return -1;
  s->saw.readmitMs = nowMs(layer->port) - start;
  return expectMask(s, -1, "after the re-admission") || told(s, ncclEpErrorClear(layer->group), "ncclEpErrorClear") ? -1
                                                                                                                    : 0;
}

static int runAll(side *s) {
  unsigned before = epToolFailuresHere();
  int rc;
  if (layersWithAll(s)) return -1;
  s->saw.wrong[0] = epToolFailuresHere() - before;
  before = epToolFailuresHere();
  rc = stop(s, 1) || layersWithout(s);
  if (stop(s, 0) || rc) return -1; /* it goes on, also when something failed: it cannot be closed otherwise */
  s->saw.wrong[1] = epToolFailuresHere() - before;
  before = epToolFailuresHere();
  if (readmit(s) || layersWithAll(s)) return -1;
  s->saw.wrong[2] = epToolFailuresHere() - before;
  return 0;
}

/* ---- The table ---------------------------------------------------------------------------------------------------- */

static void printTable(const side *s, const seen *all) {
  const char *const phases[] = {"with all", "without it", "with all again"};
  int ranks = s->layer->port->ranks, gone = s->bench->options->maskRank;
  printf("# mask test: rank %d stays away from %d layers; timeout %.0f ms%s\n", gone, AWAY_LAYERS, s->timeoutMs,
         s->layer->port->cuda ? "" : ", all times simulated");
  printf("# %-4s %12s %12s %12s  %s\n", "rank", "first ms", "later ms", "re-admit ms", "said of the first");
  for (int r = 0; r < ranks; r++)
    if (r == gone)
      printf("  %-4d %12s %12s %12.3f  away\n", r, "-", "-", all[r].readmitMs);
    else
      printf("  %-4d %12.3f %12.3f %12.3f  %s\n", r, all[r].firstMs, all[r].laterMs, all[r].readmitMs,
             all[r].said.text);
  for (int phase = 0; phase < 3; phase++) {
    unsigned wrong = 0;
    for (int r = 0; r < ranks; r++) wrong += all[r].wrong[phase];
    printf("# %s: ", phases[phase]);
    printf(wrong ? "%u failures\n" : "exact, as promised\n", wrong);
  }
  fflush(stdout);
}

static int tell(const side *s) {
  epPort *port = s->layer->port;
  seen *all = calloc((size_t)port->ranks, sizeof(*all));
  int rc;
  if (!all) return epToolFail("out of host memory");
  rc = epPortGather(port, &s->saw, all, sizeof(s->saw));
  if (!rc && !port->rank) printTable(s, all);
  free(all);
  return rc;
}

int epBenchMasks(epPort *port, void *context) {
  side s = {.bench = context};
  ncclEpGroupProperties_t properties = NCCL_EP_GROUP_PROPERTIES_INIT;
  int rc = epLayerOpen(port, &s.bench->layer, &s.layer);
  if (rc) {
    epPortFaults(port);
    return -1;
  }
  s.away = port->rank == s.bench->options->maskRank;
  for (unsigned i = 0; i < ROUTINGS && !rc; i++) rc = makeHole(s.bench, i, &s.holes[i]);
  if (!rc) rc = told(&s, ncclEpGetGroupProperties(s.layer->group, &properties), "ncclEpGetGroupProperties");
  s.timeoutMs = 1e-6 * (double)properties.timeout_ns;
  if (!rc) rc = epBenchBegin(s.bench, s.layer) || runAll(&s) || tell(&s);
  for (unsigned i = 0; i < ROUTINGS; i++) {
    epRefDestroy(s.holes[i].ref);
    epRoutingFree(&s.holes[i].routing);
  }
  return epBenchEnd(s.layer, rc);
}
