/* The host's side of the calls: time from call to return, with the stream idle before each round of three, so that
 * nothing waits for room in it. The descriptors of the tensors are made anew for each call, as callers do. */
#include "bench_host.h"

#include <time.h>

#include "failure.h"

#define ROUNDS 200 /* calls are microseconds: many, whatever --iters says */
#define WARM_UP 20
#define BUSY_US \
  100 /* before each round: a caller's thread has not just been woken, with its core's clock low and its caches cold */

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return 1e6 * (double)t.tv_sec + 1e-3 * (double)t.tv_nsec;
}

int epBenchHostTimes(epBench *bench, epLayer *layer) {
  static const char *const names[] = {"host-update", "host-dispatch", "host-combine"};
  epPort *port = layer->port;
  epBenchRow *rows[3] = {NULL, NULL, NULL};
  unsigned rounds = port->cuda ? ROUNDS : bench->options->iters;
  unsigned before = port->cuda ? WARM_UP : 1;
  for (int i = 0; i < 3 && !port->rank; i++) {
    rows[i] = epBenchRowOf(bench->result, "", names[i], 0);
    if (rows[i]) rows[i]->host = 1;
  }
  for (unsigned i = 0; i < before + rounds; i++) {
    double t[4];
    if (epPortBarrier(port)) return -1;
    for (t[0] = now(); now() - t[0] < BUSY_US;) continue;
    t[0] = now();
    if (epLayerUpdate(layer, i % bench->routings)) return -1;
    t[1] = now();
    if (epLayerDispatch(layer, 0)) return -1;
    t[2] = now();
    if (epLayerCombine(layer, 0)) return -1;
    t[3] = now();
    if (epPortSync(port)) return -1;
    for (int j = 0; j < 3; j++)
      if (i >= before && epBenchKeep(port, rows[j], t[j + 1] - t[j])) return -1;
  }
  return 0;
}

int epBenchPrepareTime(epBench *bench, epLayer *layer) {
  const epLayerConfig *c = &layer->config;
  epPort *port = layer->port;
  epBenchRow *row = port->rank ? NULL : epBenchRowOf(bench->result, "", "host-prepare", 0);
  ncclEpPrepareConfig_t config = NCCL_EP_PREPARE_CONFIG_INIT;
  double start;
  if (row) row->host = 1;
  config.layout = epLayerLayout(c);
  config.hidden = c->hidden;
  config.top_k = c->topk;
  config.dispatch_type = epLayerType(c->type);
  config.combine_type = epLayerType(c->combineType);
  config.index_type = c->index32 ? ncclInt32 : ncclInt64;
  config.backward = c->backward;
  config.scale_bytes = epLayerScaleBytes(c);
  config.borrow_topk_idx = c->fused;
  config.window_output = c->windowOut;
  config.in_flight = c->staged != 0;
  config.combine_quant = c->nvfp4 ? NCCL_EP_COMB_QUANT_NVFP4 : NCCL_EP_COMB_QUANT_NONE;
  if (epPortBarrier(port)) return -1;
  start = now();
  if (ncclEpPrepare(layer->group, &config) != ncclSuccess)
    return epToolFail("rank %d: ncclEpPrepare: %s", port->rank, ncclEpGetLastErrorString());
  return epBenchKeep(port, row, now() - start);
}
