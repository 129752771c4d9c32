/* CUDA graphs on real GPUs, in every layout: one graph of update, dispatch and combine, replayed with tokens, indices and
 * weights rewritten in place and eager calls between; then a routing record that the caller has moved, taken into use
 * and dispatched along while capturing. Every byte is compared with the reference. Not run by the test suite.
 *
 *   graph_gpu_check [REPLAYS [TOKENS [HIDDEN]]] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "failure.h"

enum { EXPERTS = 32, TOPK = 8, ALIGN = 16, PARTS = EP_PART_UPDATE | EP_PART_DISPATCH | EP_PART_COMBINE };

typedef struct trial {
  epRefLayout layout;
  uint32_t tokens, hidden, low[64], high[64];
  unsigned replays;
} trial;

/* A new routing with new data, in the buffers that the graph knows. */
typedef struct batch {
  epRouting routing;
  epRef *ref;
  epCheckCase what;
} batch;

static int batchMake(const trial *t, epLayer *layer, uint64_t seed, batch *b) {
  uint32_t ranks = (uint32_t)layer->port->ranks;
  epRouteSpec route = {.kind = EP_ROUTE_UNIFORM,
                       .minusOne = 0.1,
                       .ranks = ranks,
                       .experts = EXPERTS,
                       .topk = TOPK,
                       .tokensLow = t->low,
                       .tokensHigh = t->high};
  epRefRouting in = {.ranks = ranks,
                     .experts = EXPERTS,
                     .topk = TOPK,
                     .layout = t->layout,
                     .align = layer->config.align,
                     .budget = layer->config.budget,
                     .maxTokens = t->tokens};
  int rc;
  if (epRoutingMake(&route, epDataHash(3, seed, t->layout), &b->routing)) return -1;
  in.tokens = b->routing.tokens;
  in.topkIdx = (const int64_t *const *)b->routing.idx;
  rc = epRefCreate(&in, &b->ref);
  if (rc) return epToolFail("reference: %s", strerror(rc));
  b->what = (epCheckCase){.ref = b->ref, .routing = &b->routing, .seed = seed, .scaleUp = ranks};
  return epLayerSetIndices(layer, 0, b->routing.idx[layer->port->rank], t->tokens) ||
                 epCheckUploadTokens(layer, &b->what, EP_DATA_TOKEN) || epCheckUploadOutputs(layer, &b->what) ||
                 epLayerPrefill(layer) || epPortBarrier(layer->port)
             ? -1
             : 0;
}

static int batchCheck(epLayer *layer, const batch *b) {
  return epPortSync(layer->port) || epCheckErrors(layer, &b->what) || epLayerCheckGuards(layer) ||
                 epCheckDispatch(layer, &b->what, EP_DATA_TOKEN, 0, NULL) || epCheckCombine(layer, &b->what, 0, NULL)
             ? -1
             : 0;
}

static void batchFree(batch *b) {
  epRefDestroy(b->ref);
  epRoutingFree(&b->routing);
}

/* The first one eager, which compiles; then the graph, but for every eighth. */
static int replays(const trial *t, epLayer *layer) {
  for (unsigned i = 0; i <= t->replays; i++) {
    batch b = {.ref = NULL};
    int rc = batchMake(t, layer, i, &b);
    if (!rc) rc = i % 8 ? epLayerRun(layer, PARTS, 0) : epLayerCalls(layer, PARTS, 0);
    if (!rc) rc = batchCheck(layer, &b);
    batchFree(&b);
    if (rc) return -1;
  }
  return 0;
}

/* A handle over the record in `memory`. */
static int handleOver(epLayer *layer, void *memory, size_t bytes, ncclEpHandle_t *out) {
  ncclEpHandleConfig_t config = NCCL_EP_HANDLE_CONFIG_INIT;
  ncclEpTensor_t mem = NCCL_EP_TENSOR_INIT;
  config.dispatch_output_per_expert_alignment = layer->config.align;
  mem.ndim = 1, mem.datatype = ncclUint8, mem.data = memory, mem.sizes = &bytes;
  if (ncclEpInitHandle(out, layer->group, epLayerLayout(&layer->config), &config, TOPK, &mem) != ncclSuccess)
    return epToolFail("ncclEpInitHandle: %s", ncclEpGetLastErrorString());
  return 0;
}

static int captureAlongMoved(epLayer *layer, void *memory, size_t bytes, ncclEpHandle_t *moved, void **graph) {
  int rc;
  if (epPortCaptureBegin(layer->port)) return -1;
  rc = handleOver(layer, memory, bytes, moved);
  if (!rc) layer->handle = *moved;
  rc = rc || epLayerCalls(layer, EP_PART_DISPATCH | EP_PART_COMBINE, 0);
  return epPortCaptureEnd(layer->port, graph) || rc ? -1 : 0;
}

/* The record is written to one place, moved to another, and no update follows. */
static int moved(const trial *t, epLayer *layer) {
  ncclEpHandleConfig_t config = NCCL_EP_HANDLE_CONFIG_INIT;
  ncclEpHandle_t own = layer->handle, first = NULL, second = NULL;
  void *memory[2] = {NULL, NULL}, *graph = NULL;
  batch b = {.ref = NULL};
  size_t bytes = 0;
  int rc = -1;
  config.dispatch_output_per_expert_alignment = layer->config.align;
  if (ncclEpHandleMemSize(layer->group, epLayerLayout(&layer->config), &config, &bytes, TOPK) != ncclSuccess) {
    epToolFail("ncclEpHandleMemSize: %s", ncclEpGetLastErrorString());
    goto done;
  }
  for (int i = 0; i < 2; i++)
    if (epPortAlloc(layer->port, &memory[i], bytes, "handle_mem")) goto done;
  if (handleOver(layer, memory[0], bytes, &first) || batchMake(t, layer, 7777, &b)) goto done;
  layer->handle = first;
  if (epLayerCalls(layer, PARTS, 0) || batchCheck(layer, &b) || epPortCopy(layer->port, memory[1], memory[0], bytes) ||
      epPortFill(layer->port, memory[0], 0xAB, bytes) || epLayerPrefill(layer) || epPortBarrier(layer->port) ||
      captureAlongMoved(layer, memory[1], bytes, &second, &graph) || epPortReplay(layer->port, graph) ||
      batchCheck(layer, &b))
    goto done;
  rc = 0;
done:
  if (graph) epPortGraphFree(layer->port, graph);
  (void)ncclEpHandleDestroy(second);
  (void)ncclEpHandleDestroy(first);
  layer->handle = own;
  for (int i = 0; i < 2; i++)
    if (memory[i]) epPortFree(layer->port, memory[i]);
  batchFree(&b);
  return rc;
}

static int body(epPort *port, void *context) {
  const trial *t = context;
  epLayerConfig c = {.type = EP_REF_BF16,
                     .combineType = EP_REF_BF16,
                     .layout = t->layout,
                     .hidden = t->hidden,
                     .experts = EXPERTS,
                     .topk = TOPK,
                     .maxTokens = t->tokens,
                     .align = t->layout == EP_REF_EXPERT_MAJOR ? ALIGN : 0,
                     .graph = 1,
                     .routings = 1,
                     .timeoutMs = 10000};
  epLayer *layer = NULL;
  int rc;
  c.budget = c.capacity = epLayerWorstRows(&c, port->ranks, 0);
  if (epLayerOpen(port, &c, &layer)) return -1;
  rc = replays(t, layer) || moved(t, layer);
  return epLayerClose(layer) || rc ? -1 : 0;
}

int main(int argc, char **argv) {
  static const char *const names[] = {"flat", "expert-major", "rank-major", "expert-major-3d"};
  epFabricOptions options = {.kind = EP_FABRIC_CUDA, .timeoutMs = 10000};
  epFabric *fabric = NULL;
  trial t = {.replays = argc > 1 ? (unsigned)strtoul(argv[1], NULL, 10) : 200,
             .tokens = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 64,
             .hidden = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 10) : 512};
  int rc = 0;
  epToolInit("graph_gpu_check", 60);
  if (epFabricOpen(&options, &fabric)) return 1;
  for (int i = 0; i < 64; i++) t.low[i] = t.high[i] = t.tokens;
  for (int l = 0; l < 4 && !rc; l++) {
    unsigned before = epToolFailures();
    t.layout = (epRefLayout)l;
    rc = epFabricRun(fabric, body, &t) || epToolFailures() != before;
    printf("%s: %u replays and a moved record: %s\n", names[l], t.replays, rc ? "FAILED" : "every byte exact");
  }
  epFabricClose(fabric);
  return rc ? 1 : 0;
}
