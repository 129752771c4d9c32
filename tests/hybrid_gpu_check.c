/* Hybrid groups on real GPUs, mixed with plain ones in the same process: one process a rank, started as for ep_bench; by turns the
 * layer of all ranks, which span several scale-up domains, and one of this rank alone, each with new routings, forward and
 * backward, in both layouts. Every byte is compared with the reference. Not run by the test suite.
 *
 *   NCCL_LSA_TEAM_SIZE=1 RANK=… WORLD_SIZE=… LOCAL_RANK=0 CUDA_VISIBLE_DEVICES=… hybrid_gpu_check [ITERATIONS [TOKENS]]
 *
 * docs/rma-plugin.md has the rest of the environment for GPUs without a NIC. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "failure.h"

enum { HIDDEN = 1024, EXPERTS_A_RANK = 8, TOPK = 4, ALIGN = 16 };

/* A layer on one fabric. */
typedef struct side {
  const char *name;
  epFabric *fabric;
  epLayer *layer[2]; /* by layout: flat, expert-major */
  uint32_t scaleUp, maxTokens, *low, *high;
  unsigned runs;
} side;

static int openLayers(epPort *port, void *context) {
  side *s = context;
  for (int i = 0; i < 2; i++) {
    epLayerConfig c = {.type = EP_REF_BF16,
                       .combineType = EP_REF_BF16,
                       .layout = i ? EP_REF_EXPERT_MAJOR : EP_REF_FLAT,
                       .hidden = HIDDEN,
                       .experts = EXPERTS_A_RANK * (uint32_t)port->ranks,
                       .topk = TOPK,
                       .maxTokens = s->maxTokens,
                       .align = ALIGN,
                       .fused = 1,
                       .backward = 1,
                       .routings = 1,
                       .timeoutMs = 10000};
    c.budget = c.capacity = epLayerWorstRows(&c, port->ranks, 0);
    if (epLayerOpen(port, &c, &s->layer[i])) return -1;
  }
  return 0;
}

static int closeLayers(epPort *port, void *context) {
  side *s = context;
  (void)port;
  return epLayerClose(s->layer[0]) | epLayerClose(s->layer[1]) ? -1 : 0;
}

static int settle(epLayer *layer, const epCheckCase *what) {
  return epPortSync(layer->port) || epCheckErrors(layer, what) || epLayerCheckGuards(layer) ? -1 : 0;
}

static int forward(epLayer *layer, const epCheckCase *what) {
  uint32_t rank = (uint32_t)layer->port->rank;
  return epLayerSetIndices(layer, 0, what->routing->idx[rank], what->routing->tokens[rank]) ||
                 epCheckUploadTokens(layer, what, EP_DATA_TOKEN) || epCheckUploadOutputs(layer, what) ||
                 epLayerPrefill(layer) || epPortBarrier(layer->port) ||
                 epLayerCalls(layer, EP_PART_UPDATE | EP_PART_DISPATCH, 0) || epLayerCombine(layer, 0) ||
                 settle(layer, what) || epCheckCounts(layer, what) ||
                 epCheckDispatch(layer, what, EP_DATA_TOKEN, 0, NULL) || epCheckCombine(layer, what, 0, NULL)
             ? -1
             : 0;
}

static int backward(epLayer *layer, const epCheckCase *what) {
  return epCheckUploadTokens(layer, what, EP_DATA_GRADIENT) || epLayerPrefill(layer) || epPortBarrier(layer->port) ||
                 epLayerDispatch(layer, 1) || epLayerCombine(layer, 1) || settle(layer, what) ||
                 epCheckDispatch(layer, what, EP_DATA_GRADIENT, 1, NULL) || epCheckCombine(layer, what, 1, NULL)
             ? -1
             : 0;
}

/* One routing of the layout that is due. */
static int turn(epPort *port, void *context) {
  side *s = context;
  epLayer *layer = s->layer[s->runs % 2];
  epRouteSpec route = {.kind = EP_ROUTE_UNIFORM,
                       .minusOne = 0.1,
                       .ranks = (uint32_t)port->ranks,
                       .experts = layer->config.experts,
                       .topk = TOPK,
                       .tokensLow = s->low,
                       .tokensHigh = s->high};
  epRouting routing;
  epRefRouting in = {.ranks = route.ranks,
                     .experts = route.experts,
                     .topk = TOPK,
                     .layout = layer->config.layout,
                     .align = ALIGN,
                     .budget = layer->config.budget,
                     .maxTokens = s->maxTokens};
  epRef *ref = NULL;
  int rc;
  if (epRoutingMake(&route, epDataHash(7, s->runs, s->scaleUp), &routing)) return -1;
  in.tokens = routing.tokens;
  in.topkIdx = (const int64_t *const *)routing.idx;
  rc = epRefCreate(&in, &ref);
  if (rc) {
    epToolFail("reference: %s", strerror(rc));
  } else {
    epCheckCase what = {ref, &routing, s->runs, s->scaleUp};
    rc = forward(layer, &what) || backward(layer, &what);
  }
  epRefDestroy(ref);
  epRoutingFree(&routing);
  return rc ? -1 : 0;
}

static int openSide(side *s, const epFabricOptions *options) {
  uint32_t ranks = options->scaleOut * options->scaleUp;
  if (epFabricOpen(options, &s->fabric)) return -1;
  s->scaleUp = options->scaleUp;
  s->low = calloc(ranks, sizeof(*s->low));
  s->high = calloc(ranks, sizeof(*s->high));
  if (!s->low || !s->high) return epToolFail("out of host memory");
  for (uint32_t i = 0; i < ranks; i++) s->high[i] = s->maxTokens;
  return epFabricRun(s->fabric, openLayers, s);
}

static int closeSide(side *s) {
  int rc = s->fabric ? epFabricRun(s->fabric, closeLayers, s) : 0;
  epFabricClose(s->fabric);
  free(s->low);
  free(s->high);
  return rc;
}

int main(int argc, char **argv) {
  int iterations = argc > 1 ? (int)strtol(argv[1], NULL, 10) : 200, ranks, rc = 1;
  uint32_t tokens = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 256;
  const char *team = getenv("NCCL_LSA_TEAM_SIZE");
  unsigned up = team ? (unsigned)strtoul(team, NULL, 10) : 0;
  side hybrid = {.name = "hybrid", .maxTokens = tokens}, plain = {.name = "plain", .maxTokens = tokens};
  epFabricOptions all = {.kind = EP_FABRIC_CUDA, .timeoutMs = 10000}, alone = all;
  epToolInit("hybrid_gpu_check", 30);
  ranks = epFabricLaunchedRanks();
  if (iterations < 1 || !tokens || !up || ranks < 2 || (unsigned)ranks % up || (unsigned)ranks == up) {
    fprintf(stderr, "usage: NCCL_LSA_TEAM_SIZE=U RANK=… WORLD_SIZE=… hybrid_gpu_check [ITERATIONS [TOKENS]]\n");
    return 2;
  }
  all.scaleUp = up;
  all.scaleOut = (unsigned)ranks / up;
  alone.scaleUp = alone.scaleOut = 1;
  if (openSide(&hybrid, &all)) goto done;
  /* without them the second is no launched one */
  unsetenv("RANK");
  unsetenv("WORLD_SIZE");
  if (openSide(&plain, &alone)) goto done;
  for (int i = 0; i < iterations; i++, hybrid.runs++, plain.runs++)
    if (epFabricRun(hybrid.fabric, turn, &hybrid) || epFabricRun(plain.fabric, turn, &plain)) goto done;
  rc = 0;
done:
  rc |= closeSide(&plain) | closeSide(&hybrid) ? 1 : 0;
  rc |= epToolFailures() != 0;
  printf("%s: %u hybrid and %u plain rounds of %d: %s\n", hybrid.name, hybrid.runs, plain.runs, iterations,
         rc ? "FAILED" : "every byte exact");
  return rc;
}
