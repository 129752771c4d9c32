/* What one rank does in a run of ep_bench. Times are taken on the stream while all ranks hold it, so that neither the
 * launch nor the skew of the host shows up in them; each iteration takes the next prepared routing. */
#include "bench_run.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench_host.h"
#include "bench_profile.h"
#include "check.h"
#include "failure.h"
#include "meet.h"

/* ---- Routings --------------------------------------------------------------------------------------------------- */

static int anyRange(const epBenchOptions *o) {
  for (uint32_t r = 0; r < o->ranks; r++)
    if (o->tokensLow[r] != o->tokensHigh[r]) return 1;
  return 0;
}

static void configureLayer(epBench *bench) {
  const epBenchOptions *o = bench->options;
  int repeats = o->route.kind == EP_ROUTE_REPEATED || o->route.kind == EP_ROUTE_FILE;
  epLayerConfig *c = &bench->layer;
  *c = (epLayerConfig){.type = o->type,
                       .combineType = o->type == EP_REF_E4M3 ? EP_REF_BF16 : o->type,
                       .scales = (epScales)o->scales,
                       .scaleColumns = o->scaleColumns,
                       .noZeroPad = o->noZeroPad,
                       .windowOut = o->windowOut,
                       .single = o->single,
                       .masks = o->masks,
                       .bias = (unsigned)o->bias,
                       .nvfp4 = o->nvfp4,
                       .queuePairs = (unsigned)o->queuePairs,
                       .staged = o->staged,
                       .layout = o->layout,
                       .hidden = o->hidden,
                       .experts = o->experts,
                       .topk = o->topk,
                       .maxTokens = o->maxTokens,
                       .align = o->align,
                       .index32 = o->index32,
                       .fused = !o->noFused,
                       .backward = o->backward,
                       .graph = o->graph,
                       .routings = bench->routings,
                       .sms = o->sms,
                       .timeoutMs = o->fabric.timeoutMs};
  c->capacity = o->maxRecv > 0 ? (uint64_t)o->maxRecv : epLayerWorstRows(c, (int)o->ranks, repeats);
  c->budget = o->maxRecv ? c->capacity : 0;
  bench->result->budget = c->budget;
  bench->result->scaleBytes = epLayerScaleBytes(c);
}

int epBenchReference(const epBench *bench, const epRouting *routing, epRef **out) {
  const epBenchOptions *o = bench->options;
  epRefRouting in = {.ranks = o->ranks,
                     .experts = o->experts,
                     .topk = o->topk,
                     .layout = o->layout,
                     .align = o->align,
                     .budget = bench->layer.budget,
                     .maxTokens = o->maxTokens,
                     .tokens = routing->tokens,
                     .topkIdx = (const int64_t *const *)routing->idx};
  int rc = epRefCreate(&in, out);
  return rc ? epToolFail("reference: %s", strerror(rc)) : 0;
}

int epBenchPrepare(epBench *bench, uint64_t seed) {
  const epBenchOptions *o = bench->options;
  bench->seed = seed;
  bench->routings = anyRange(o) ? EP_LAYER_ROUTINGS : 4;
  configureLayer(bench);
  for (unsigned i = 0; i < bench->routings; i++) {
    epRouting *routing = &bench->routing[i];
    if (epRoutingMake(&o->route, epDataHash(seed, 101, i), routing) || epBenchReference(bench, routing, &bench->ref[i]))
      return -1;
  }
  return 0;
}

void epBenchRelease(epBench *bench) {
  for (unsigned i = 0; i < EP_LAYER_ROUTINGS; i++) {
    epRefDestroy(bench->ref[i]);
    bench->ref[i] = NULL;
    epRoutingFree(&bench->routing[i]);
  }
}

epCheckCase epBenchWhat(const epBench *bench, unsigned routing) {
  unsigned scaleUp = bench->options->fabric.scaleUp;
  return (epCheckCase){.ref = bench->ref[routing],
                       .routing = &bench->routing[routing],
                       .seed = epDataHash(bench->seed, 202, routing),
                       .scaleUp = scaleUp ? scaleUp : bench->options->ranks};
}

/* ---- Bytes ------------------------------------------------------------------------------------------------------ */

typedef struct traffic {
  double alg, bus, rows;
} traffic;

/* Rows that `owner` holds of the tokens of `source`: one a token, or each slot where those travel as they are. */
static double rowsBetween(const epRef *ref, uint32_t source, uint32_t owner, int slots) {
  double rows = 0;
  if (!slots) return (double)ref->rank[owner].perSource[source];
  for (uint32_t t = 0; t < ref->in.tokens[source]; t++)
    for (uint32_t k = 0; k < ref->in.topk; k++) rows += epRefOwner(ref, source, t, k) == (int)owner;
  return rows;
}

/* Largest of the ranks, mean over the routings. */
static traffic trafficOf(const epBench *bench, int combine) {
  const epLayerConfig *c = &bench->layer;
  traffic sum = {0, 0, 0};
  int slots = combine && c->single && c->layout == EP_REF_EXPERT_MAJOR;
  double rowBytes = (double)(combine ? epLayerCombineTravels(c) : epLayerRowBytes(c) + epLayerScaleBytes(c));
  for (unsigned i = 0; i < bench->routings; i++) {
    const epRef *ref = bench->ref[i];
    traffic most = {0, 0, 0};
    for (uint32_t r = 0; r < ref->in.ranks; r++) {
      double in = 0, out = 0, own = rowsBetween(ref, r, r, slots);
      for (uint32_t s = 0; s < ref->in.ranks; s++) {
        in += rowsBetween(ref, s, r, slots);
        out += rowsBetween(ref, r, s, slots);
      }
      most.alg = in > most.alg ? in : most.alg;
      most.bus = in - own > most.bus ? in - own : most.bus;
      most.bus = out - own > most.bus ? out - own : most.bus;
      most.rows = (double)ref->rank[r].rows > most.rows ? (double)ref->rank[r].rows : most.rows;
    }
    sum.alg += most.alg * rowBytes / bench->routings;
    sum.bus += most.bus * rowBytes / bench->routings;
    sum.rows += most.rows / bench->routings;
  }
  return sum;
}

epBenchRow *epBenchRowFor(epBench *bench, epLayer *layer, const char *name) {
  traffic t = trafficOf(bench, !strncmp(name, "combine", strlen("combine")));
  unsigned sms = bench->options->curveCount ? layer->config.sms : 0;
  epBenchRow *row = layer->port->rank ? NULL : epBenchRowOf(bench->result, bench->label, name, sms);
  if (row) {
    row->algBytes = t.alg;
    row->busBytes = t.bus;
    bench->result->outputRows = t.rows;
  }
  return row;
}

/* ---- Header ----------------------------------------------------------------------------------------------------- */

static void tellCase(const epBench *bench, const ncclEpGroupProperties_t *p, const ncclEpBufferSize_t *sizes) {
  printf("# case %s: window %zu, handle %zu bytes; SMs: update %d, dispatch %d, combine %d\n", bench->label,
         p->window_bytes, sizes->handle_bytes, p->num_sms_update, epBenchSms(p, bench->options->layout, 0),
         epBenchSms(p, bench->options->layout, 1));
  fflush(stdout);
}

static int collectHeader(epBench *bench, epLayer *layer) {
  const epBenchOptions *o = bench->options;
  epPort *port = layer->port;
  epBenchRank mine = {.rank = port->rank, .device = port->device, .pid = (long)getpid()}, *all;
  ncclEpBufferSizeConfig_t sizing = NCCL_EP_BUFFER_SIZE_CONFIG_INIT;
  ncclEpGroupProperties_t properties = NCCL_EP_GROUP_PROPERTIES_INIT;
  ncclEpBufferSize_t sizes = NCCL_EP_BUFFER_SIZE_INIT;
  snprintf(mine.name, sizeof(mine.name), "%s", port->name);
  gethostname(mine.host, sizeof(mine.host) - 1);
  sizing.num_experts = o->experts;
  sizing.max_tokens = o->maxTokens;
  sizing.hidden = o->hidden;
  sizing.top_k = o->topk;
  sizing.datatype = epLayerType(layer->config.type);
  sizing.combine_datatype = epLayerType(layer->config.combineType);
  sizing.scale_bytes = epLayerScaleBytes(&layer->config);
  sizing.multiple_reductions = !layer->config.single;
  sizing.low_latency = epLayerIsLl(&layer->config);
  if (ncclEpGetGroupProperties(layer->group, &properties) != ncclSuccess)
    return epToolFail("rank %d: ncclEpGetGroupProperties: %s", port->rank, ncclEpGetLastErrorString());
  if (ncclEpCalculateBufferSize(port->comm, &sizing, &sizes) != ncclSuccess)
    return epToolFail("rank %d: ncclEpCalculateBufferSize: %s", port->rank, ncclEpGetLastErrorString());
  if (sizes.window_bytes != properties.window_bytes)
    epToolFail("rank %d: ncclEpCalculateBufferSize says %zu bytes of window, the group has %zu", port->rank,
               sizes.window_bytes, properties.window_bytes);
  all = calloc((size_t)port->ranks, sizeof(*all));
  if (!all) return epToolFail("out of host memory");
  if (epPortGather(port, &mine, all, sizeof(mine))) {
    free(all);
    return -1;
  }
  if (port->rank || bench->headerPrinted) {
    free(all);
    if (!port->rank && *bench->label) tellCase(bench, &properties, &sizes);
    return 0;
  }
  bench->result->ranks = all;
  bench->result->properties = properties;
  bench->result->sizes = sizes;
  bench->result->cuda = port->cuda;
  bench->result->routings = (int)bench->routings;
  snprintf(bench->result->versions, sizeof(bench->result->versions), "%s", epFabricVersions(bench->fabric));
  bench->headerPrinted = 1;
  epBenchPrintHeader(bench->result);
  if (*bench->label) tellCase(bench, &properties, &sizes);
  return 0;
}

/* ---- Checks ----------------------------------------------------------------------------------------------------- */

/* What a finished run left behind besides its outputs. -1: the group cannot be used further. */
static int settle(epLayer *layer, const epCheckCase *what) {
  int rc = epPortSync(layer->port);
  rc |= epPortFaults(layer->port);
  rc |= epCheckErrors(layer, what);
  rc |= epLayerCheckGuards(layer);
  return rc ? -1 : 0;
}

/* Adds the ranks' failures since `before` to an operation's row. */
static int attribute(epBench *bench, epLayer *layer, const char *name, unsigned before) {
  epPort *port = layer->port;
  unsigned mine = epToolFailuresHere() - before, *all = calloc((size_t)port->ranks, sizeof(*all));
  epBenchRow *row;
  int rc = -1;
  if (!all) return epToolFail("out of host memory");
  if (epPortGather(port, &mine, all, sizeof(mine))) goto done;
  row = epBenchRowFor(bench, layer, name);
  for (int r = 0; row && r < port->ranks; r++) row->errors = (row->errors == -1u ? 0 : row->errors) + all[r];
  rc = 0;
done:
  free(all);
  return rc;
}

typedef struct hashes {
  uint64_t dispatch, combine, dispatchBackward, combineBackward;
} hashes;

static int checkForward(epBench *bench, epLayer *layer, unsigned routing, hashes *h) {
  epCheckCase what = epBenchWhat(bench, routing);
  unsigned before = epToolFailuresHere();
  if (epLayerSetIndices(layer, routing, what.routing->idx[layer->port->rank],
                        what.routing->tokens[layer->port->rank]) ||
      epCheckUploadTokens(layer, &what, EP_DATA_TOKEN) || epCheckUploadOutputs(layer, &what) || epLayerPrefill(layer) ||
      epPortBarrier(layer->port))
    return -1;
  if (epLayerRun(layer, EP_PART_UPDATE | EP_PART_DISPATCH, routing) || epLayerRun(layer, EP_PART_COMBINE, routing) ||
      settle(layer, &what))
    return -1;
  if (epCheckCounts(layer, &what) || epCheckMetadata(layer, &what) ||
      epCheckDispatch(layer, &what, EP_DATA_TOKEN, 0, &h->dispatch) || attribute(bench, layer, "dispatch", before))
    return -1;
  before = epToolFailuresHere();
  return epCheckCombine(layer, &what, 0, &h->combine) || attribute(bench, layer, "combine", before) ? -1 : 0;
}

/* Along the record that the forward pass left. */
static int checkBackward(epBench *bench, epLayer *layer, unsigned routing, hashes *h) {
  epCheckCase what = epBenchWhat(bench, routing);
  unsigned before = epToolFailuresHere();
  if (epCheckUploadTokens(layer, &what, EP_DATA_GRADIENT) || epLayerPrefill(layer) || epPortBarrier(layer->port))
    return -1;
  if (epLayerRun(layer, EP_PART_DISPATCH | EP_PART_BACKWARD, routing) ||
      epLayerRun(layer, EP_PART_COMBINE | EP_PART_BACKWARD, routing) || settle(layer, &what))
    return -1;
  if (epCheckDispatch(layer, &what, EP_DATA_GRADIENT, 1, &h->dispatchBackward) ||
      attribute(bench, layer, "dispatch-bwd", before))
    return -1;
  before = epToolFailuresHere();
  return epCheckCombine(layer, &what, 1, &h->combineBackward) || attribute(bench, layer, "combine-bwd", before) ? -1
                                                                                                                : 0;
}

/* Makes every call once, outside of graphs: capturing compiles no kernel. */
static int warmCalls(epBench *bench, epLayer *layer) {
  epCheckCase what = epBenchWhat(bench, 0);
  int rank = layer->port->rank;
  if (epLayerSetIndices(layer, 0, what.routing->idx[rank], what.routing->tokens[rank]) ||
      epCheckUploadTokens(layer, &what, EP_DATA_TOKEN) || epCheckUploadOutputs(layer, &what) ||
      epPortBarrier(layer->port) || epLayerCalls(layer, EP_PART_UPDATE, 0) || epLayerDispatch(layer, 0) ||
      epLayerCalls(layer, EP_PART_UPDATE | EP_PART_DISPATCH | EP_PART_COMBINE, 0) ||
      (bench->options->backward && (epLayerDispatch(layer, 1) || epLayerCombine(layer, 1))))
    return -1;
  return epPortSync(layer->port) || epPortBarrier(layer->port) ? -1 : 0;
}

/* Routing 0, then another with other data, then routing 0 again, which must give the same bytes. */
static int checkAll(epBench *bench, epLayer *layer) {
  static const unsigned order[] = {0, 1, 0};
  hashes h[3];
  memset(h, 0, sizeof(h));
  for (int i = 0; i < 3; i++)
    if (checkForward(bench, layer, order[i], &h[i]) ||
        (bench->options->backward && checkBackward(bench, layer, order[i], &h[i])))
      return -1;
  if (h[0].dispatch != h[2].dispatch || h[0].dispatchBackward != h[2].dispatchBackward)
    epToolFail("rank %d: dispatch: two runs on the same inputs gave different bytes", layer->port->rank);
  if (h[0].combine != h[2].combine || h[0].combineBackward != h[2].combineBackward)
    epToolFail("rank %d: combine: two runs on the same inputs gave different bytes", layer->port->rank);
  return 0;
}

/* ---- Times ------------------------------------------------------------------------------------------------------ */

int epBenchKeep(epPort *port, epBenchRow *row, double mine) {
  double largest = 0, *all = calloc((size_t)port->ranks, sizeof(*all));
  int rc = -1;
  if (!all) return epToolFail("out of host memory");
  if (epPortGather(port, &mine, all, sizeof(mine))) goto done;
  for (int r = 0; r < port->ranks; r++) largest = all[r] > largest ? all[r] : largest;
  rc = row ? epBenchAddSample(row, largest) : 0;
done:
  free(all);
  return rc;
}

int epBenchKeepMarks(epPort *port, epBenchRow *row) {
  double mine = 0;
  return epPortElapsed(port, 0, 1, &mine) || epBenchKeep(port, row, mine) ? -1 : 0;
}

/* An asynchronous error is a failure unless a routing of this run exceeds --max-recv, which asks for it. */
int epBenchSettled(epBench *bench, epLayer *layer) {
  ncclEpErrorInfo_t info = NCCL_EP_ERROR_INFO_INIT;
  int rank = layer->port->rank, overflow = 0;
  ncclResult_t rc = ncclEpGetErrorInfo(layer->group, &info);
  if (rc != ncclSuccess)
    return epToolFail("rank %d: ncclEpGetErrorInfo: error %d: %s", rank, (int)rc, ncclEpGetLastErrorString());
  for (unsigned i = 0; i < bench->routings; i++)
    overflow |= bench->ref[i]->rank[rank].needed > bench->ref[i]->rank[rank].rows;
  if (!info.code || (info.code == 4 && overflow)) return 0;
  return epToolFail("rank %d: asynchronous error: %s", rank, info.text);
}

int epBenchTimeOnce(epBench *bench, epLayer *layer, epBenchRow *row, unsigned parts, unsigned i) {
  const epBenchOptions *o = bench->options;
  epPort *port = layer->port;
  unsigned routing = i % bench->routings;
  /* Eager updates wait on the host for their counts; the first call may load a kernel, and the first replay a graph,
   * which can wait for the stream. */
  int hold = i >= (o->graph ? bench->routings : 1) && bench->layer.budget;
  if (!(parts & EP_PART_UPDATE) && epLayerCalls(layer, EP_PART_UPDATE, routing)) return -1;
  /* Low latency's routing is complete after a dispatch. */
  if (!(parts & (EP_PART_UPDATE | EP_PART_DISPATCH)) && epLayerIsLl(&layer->config) && epLayerDispatch(layer, 0))
    return -1;
  if (epLayerReady(layer, parts, routing) || epMeetReady(port) || epPortSync(port) || epPortBarrier(port) ||
      (hold && (epPortHold(port) || epMeetQueue(port))))
    return -1;
  if (epPortMark(port, 0) || epLayerRun(layer, parts, routing) || epPortMark(port, 1)) return -1;
  if ((hold && epPortRelease(port)) || epPortSync(port)) return -1;
  return i >= o->warmup && epBenchKeepMarks(port, row) ? -1 : 0;
}

static int timeParts(epBench *bench, epLayer *layer, const char *name, unsigned parts) {
  const epBenchOptions *o = bench->options;
  epBenchRow *row = epBenchRowFor(bench, layer, name);
  for (unsigned i = 0; i < o->warmup + o->iters; i++)
    if (epBenchTimeOnce(bench, layer, row, parts, i)) return -1;
  return epBenchSettled(bench, layer);
}

/* Decisions of every routing, and tokens and experts' outputs for the one that has most of them here: they share their
 * memory, and no iteration reads memory that nothing wrote. */
static int uploadAll(epBench *bench, epLayer *layer) {
  int rank = layer->port->rank;
  unsigned tokens = 0, rows = 0; /* the routings with most of each */
  epCheckCase most;
  for (unsigned i = 0; i < bench->routings; i++) {
    if (epLayerSetIndices(layer, i, bench->routing[i].idx[rank], bench->routing[i].tokens[rank])) return -1;
    if (bench->routing[i].tokens[rank] > bench->routing[tokens].tokens[rank]) tokens = i;
    if (bench->ref[i]->rank[rank].rows > bench->ref[rows]->rank[rank].rows) rows = i;
  }
  most = epBenchWhat(bench, tokens);
  if (epCheckUploadTokens(layer, &most, EP_DATA_TOKEN)) return -1;
  most = epBenchWhat(bench, rows);
  return epCheckUploadOutputs(layer, &most);
}

static int timeAll(epBench *bench, epLayer *layer) {
  const epBenchOptions *o = bench->options;
  int dispatch = (o->ops & EP_OP_DISPATCH) != 0, combine = (o->ops & EP_OP_COMBINE) != 0;
  if (dispatch && timeParts(bench, layer, "dispatch", EP_PART_UPDATE | EP_PART_DISPATCH)) return -1;
  if (combine && timeParts(bench, layer, "combine", EP_PART_COMBINE)) return -1;
  if (o->backward && dispatch && timeParts(bench, layer, "dispatch-bwd", EP_PART_DISPATCH | EP_PART_BACKWARD))
    return -1;
  if (o->backward && combine && timeParts(bench, layer, "combine-bwd", EP_PART_COMBINE | EP_PART_BACKWARD)) return -1;
  if (!o->parts) return 0;
  return timeParts(bench, layer, "update", EP_PART_UPDATE) ||
                 timeParts(bench, layer, "dispatch-cached", EP_PART_DISPATCH) ||
                 timeParts(bench, layer, "all", EP_PART_UPDATE | EP_PART_DISPATCH | EP_PART_COMBINE)
             ? -1
             : 0;
}

/* ---- Limits ----------------------------------------------------------------------------------------------------- */

static int timeCopy(epBench *bench, epLayer *layer, const char *name, void *to, const void *from, double bytes,
                    int crosses) {
  const epBenchOptions *o = bench->options;
  epPort *port = layer->port;
  epBenchRow *row = port->rank ? NULL : epBenchRowOf(bench->result, "", name, 0);
  if (row) {
    row->algBytes = bytes;
    row->busBytes = crosses ? bytes : 0;
  }
  for (unsigned i = 0; i < o->warmup + o->iters; i++) {
    if (epPortBarrier(port) || epPortHold(port) || epPortMark(port, 0) ||
        epPortCopyAsync(port, to, from, (size_t)bytes) || epPortMark(port, 1) || epPortRelease(port) ||
        epPortSync(port))
      return -1;
    if (i >= o->warmup && epBenchKeepMarks(port, row)) return -1;
  }
  return 0;
}

/* The same bytes by the copy engine to the next rank, all ranks at once; and an output's bytes inside the memory. */
static int timeLimits(epBench *bench, epLayer *layer) {
  epPort *port = layer->port;
  traffic t = trafficOf(bench, 0);
  double room = (double)layer->outTokens.bytes, local = t.rows * (double)epLayerRowBytes(&bench->layer);
  void **peers = calloc((size_t)port->ranks, sizeof(*peers));
  int rc = -1;
  if (!peers) return epToolFail("out of host memory");
  if (epPortMapPeers(port, layer->expertOut.base, peers)) goto done;
  if (port->ranks > 1) {
    unsigned char *next = peers[(port->rank + 1) % port->ranks];
    double bytes = t.bus < room ? t.bus : room;
    if (timeCopy(bench, layer, "limit-copy-engine", next + (layer->expertOut.data - layer->expertOut.base),
                 layer->outTokens.data, bytes, 1))
      goto done;
  }
  rc = timeCopy(bench, layer, "limit-local-copy", layer->outTokens.data, layer->expertOut.data,
                local < room ? local : room, 0);
  rc |= epPortBarrier(port);
done:
  epPortUnmapPeers(port, peers);
  free(peers);
  return rc ? -1 : 0;
}

/* ---- The run ---------------------------------------------------------------------------------------------------- */

/* So that the process that prints knows of failures elsewhere. */
static int tellAll(epPort *port) {
  unsigned mine = epToolFailuresHere(), others = 0, *all = calloc((size_t)port->ranks, sizeof(*all));
  if (!all) return epToolFail("out of host memory");
  if (epPortGather(port, &mine, all, sizeof(mine))) {
    free(all);
    return -1;
  }
  for (int r = 0; r < port->ranks; r++) others += all[r];
  free(all);
  if (others && !epToolFailures()) return epToolFail("rank %d: other ranks report %u failures", port->rank, others);
  return 0;
}

int epBenchBegin(epBench *bench, epLayer *layer) {
  const epBenchOptions *o = bench->options;
  int rc = collectHeader(bench, layer);
  if (!rc && o->graph) rc = warmCalls(bench, layer);
  if (!rc && o->check) rc = checkAll(bench, layer);
  return !rc && (o->iters || o->hostTime || o->profile) ? uploadAll(bench, layer) : rc;
}

int epBenchEnd(epLayer *layer, int rc) {
  epPort *port = layer->port;
  if (!rc) rc = tellAll(port);
  rc |= epPortFaults(port);
  if (rc) epPortAbort(port); /* closing is collective: let the others come to it */
  rc |= epLayerClose(layer);
  return rc ? -1 : 0;
}

int epBenchRun(epPort *port, void *context) {
  epBench *bench = context;
  const epBenchOptions *o = bench->options;
  epLayer *layer = NULL;
  int rc = epLayerOpen(port, &bench->layer, &layer);
  if (rc) {
    epPortFaults(port);
    return -1;
  }
  if (o->hostTime) rc = epBenchPrepareTime(bench, layer);
  if (!rc) rc = epBenchBegin(bench, layer);
  if (!rc && o->iters) rc = timeAll(bench, layer);
  if (!rc && o->hostTime) rc = epBenchHostTimes(bench, layer);
  if (!rc && o->limits) rc = timeLimits(bench, layer);
  if (!rc && o->profile) rc = epBenchProfile(bench, layer);
  return epBenchEnd(layer, rc);
}
