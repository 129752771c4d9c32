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
#include <time.h>

#include "check.h"
#include "failure.h"
#include "spread.h"

enum { HIDDEN = 1024, EXPERTS_A_RANK = 8, TOPK = 4, ALIGN = 16 };

/* A layer on one fabric. */
typedef struct side {
  const char *name;
  epFabric *fabric;
  epLayer *layer[2]; /* by layout: flat, expert-major */
  uint32_t scaleUp, maxTokens, *low, *high;
  unsigned runs;
  double ms[2], most[2]; /* of the calls of forward and of backward: sum, largest; and of the whole */
  double whole;
} side;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

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

/* From when all ranks are ready until this one's stream is idle. */
static int timed(side *s, epLayer *layer, int pass) {
  if (epPortSync(layer->port) || epPortBarrier(layer->port)) return -1;
  double start = now();
  if ((pass ? epLayerDispatch(layer, 1) : epLayerCalls(layer, EP_PART_UPDATE | EP_PART_DISPATCH, 0)) ||
      epLayerCombine(layer, pass) || epPortSync(layer->port))
    return -1;
  double took = now() - start;
  s->ms[pass] += took;
  if (took > s->most[pass]) s->most[pass] = took;
  return 0;
}

static int forward(side *s, epLayer *layer, const epCheckCase *what) {
  uint32_t rank = (uint32_t)layer->port->rank;
  return epLayerSetIndices(layer, 0, what->routing->idx[rank], what->routing->tokens[rank]) ||
                 epCheckUploadTokens(layer, what, EP_DATA_TOKEN) || epCheckUploadOutputs(layer, what) ||
                 epLayerPrefill(layer) || timed(s, layer, 0) || settle(layer, what) || epCheckCounts(layer, what) ||
                 epCheckDispatch(layer, what, EP_DATA_TOKEN, 0, NULL) || epCheckCombine(layer, what, 0, NULL)
             ? -1
             : 0;
}

static int backward(side *s, epLayer *layer, const epCheckCase *what) {
  return epCheckUploadTokens(layer, what, EP_DATA_GRADIENT) || epLayerPrefill(layer) || timed(s, layer, 1) ||
                 settle(layer, what) || epCheckDispatch(layer, what, EP_DATA_GRADIENT, 1, NULL) ||
                 epCheckCombine(layer, what, 1, NULL)
             ? -1
             : 0;
}

/* T is drawn, but none, all, and none beside all certainly come, in either layout. */
static void drawTokens(side *s, uint32_t ranks) {
  for (uint32_t r = 0; r < ranks; r++) {
    unsigned round = s->runs / 2;
    s->low[r] = round == 1 || (round == 2 && (r + s->runs) % 2) ? s->maxTokens : 0;
    s->high[r] = round == 0 || (round == 2 && !s->low[r]) ? 0 : s->maxTokens;
  }
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
  double start = now();
  epRefRouting in = {.ranks = route.ranks,
                     .experts = route.experts,
                     .topk = TOPK,
                     .layout = layer->config.layout,
                     .align = ALIGN,
                     .budget = layer->config.budget,
                     .maxTokens = s->maxTokens};
  epRef *ref = NULL;
  int rc;
  drawTokens(s, route.ranks);
  if (epRoutingMake(&route, epDataHash(7, s->runs, s->scaleUp), &routing)) return -1;
  in.tokens = routing.tokens;
  in.topkIdx = (const int64_t *const *)routing.idx;
  rc = epRefCreate(&in, &ref);
  if (rc) {
    epToolFail("reference: %s", strerror(rc));
  } else {
    epCheckCase what = {.ref = ref, .routing = &routing, .seed = s->runs, .scaleUp = s->scaleUp};
    rc = forward(s, layer, &what) || backward(s, layer, &what);
  }
  epRefDestroy(ref);
  epRoutingFree(&routing);
  s->whole += now() - start;
  return rc ? -1 : 0;
}

static void tell(const side *s) {
  if (s->runs)
    printf(
        "%s: %u rounds, %.0f ms each; of these the calls, until the stream was idle: forward %.2f ms (at most %.2f), "
        "backward %.2f (%.2f)\n",
        s->name, s->runs, s->whole / s->runs, s->ms[0] / s->runs, s->most[0], s->ms[1] / s->runs, s->most[1]);
}

static int openSide(side *s, const epFabricOptions *options) {
  uint32_t ranks = options->scaleOut * options->scaleUp;
  if (epFabricOpen(options, &s->fabric)) return -1;
  s->scaleUp = options->scaleUp;
  s->low = calloc(ranks, sizeof(*s->low));
  s->high = calloc(ranks, sizeof(*s->high));
  if (!s->low || !s->high) return epToolFail("out of host memory");
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
  epSpreadShare((unsigned)ranks);
  all.scaleUp = up;
  all.scaleOut = (unsigned)ranks / up;
  alone.scaleUp = alone.scaleOut = 1;
  if (openSide(&hybrid, &all)) goto done;
  /* without them the second is no launched one */
  unsetenv("RANK");
  unsetenv("WORLD_SIZE");
  if (openSide(&plain, &alone)) goto done;
  for (int i = 0; i < iterations; i++, hybrid.runs++, plain.runs++) {
    if (epFabricRun(hybrid.fabric, turn, &hybrid) || epFabricRun(plain.fabric, turn, &plain)) goto done;
    if (i % 10 == 9) printf("# %d rounds, %.1f s\n", i + 1, (hybrid.whole + plain.whole) / 1e3);
    fflush(stdout);
  }
  rc = 0;
done:
  rc |= closeSide(&plain) | closeSide(&hybrid) ? 1 : 0;
  rc |= epToolFailures() != 0;
  tell(&hybrid);
  tell(&plain);
  printf("%s: %u hybrid and %u plain rounds of %d: %s\n", hybrid.name, hybrid.runs, plain.runs, iterations,
         rc ? "FAILED" : "every byte exact");
  return rc;
}
