/* The dead rank on real GPUs (or emulated, with --emu): rank 1 stops before a layer, stops in the middle of one, and with --kill its
 * process is killed with kernels under way. The others must return in about the timeout, name it, leave it out, be quick
 * afterwards, and be exact again after a re-admission. One process with a thread a GPU, or one a rank, started as for ep_bench (--kill:
 * only so). Not run by the test suite.
 *
 *   masks_gpu_check [--ll] [--major] [--kill] [--emu] [TIMEOUT_MS] */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "failure.h"
#include "fabric.h"

enum { TOKENS = 256, HIDDEN = 2048, LOCALS = 4, GONE = 1 };

typedef struct plan {
  int ll, major, kill;
  unsigned timeoutMs;
} plan;

/* Every token goes to one expert of every rank, so its sum is as many times its row as there are ranks. */
typedef struct side {
  const plan *p;
  epPort *port;
  ncclEpGroup_t group;
  ncclEpHandle_t handle;
  uint32_t rows;
  int64_t *idx;
  float *w, *outW;
  uint16_t *x, *out, *y, *host;
  void *outIdx;
  int *mask;
  int rc;
} side;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static void expect(side *s, int condition, const char *what, double value) {
  if (condition) return;
  s->rc = -1;
  fprintf(stderr, "rank %d: FAILED: %s (%g)\n", s->port->rank, what, value);
}

#define CALL(s, call)                                                                                   \
  do {                                                                                                  \
    if ((call) != ncclSuccess) {                                                                        \
      (s)->rc = -1;                                                                                     \
      fprintf(stderr, "rank %d: FAILED: %s: %s\n", (s)->port->rank, #call, ncclEpGetLastErrorString()); \
    }                                                                                                   \
  } while (0)

static ncclEpTensor_t tensor(void *data, ncclDataType_t type, unsigned ndim, size_t *sizes) {
  ncclEpTensor_t t = NCCL_EP_TENSOR_INIT;
  t.data = data, t.datatype = type, t.ndim = ndim, t.sizes = sizes;
  return t;
}

static uint16_t element(int rank, uint32_t t, uint32_t h) {
  return (uint16_t)(0x3f80 | (((uint32_t)rank * TOKENS + t) >> h % 16 & 1) << 15);
}

static int open(side *s) {
  epPort *port = s->port;
  ncclEpGroupConfig_t c = NCCL_EP_GROUP_CONFIG_INIT;
  size_t n = (size_t)TOKENS * (size_t)port->ranks;
  s->rows = (uint32_t)n * (s->p->ll && s->p->major ? LOCALS : 1);
  c.algorithm = s->p->ll ? NCCL_EP_ALGO_LOW_LATENCY : NCCL_EP_ALGO_HIGH_THROUGHPUT;
  c.num_experts = LOCALS * (unsigned)port->ranks;
  c.max_dispatch_tokens_per_rank = TOKENS;
  c.max_recv_tokens_per_rank = s->p->ll ? 0 : s->rows;
  c.max_token_bytes = 2 * HIDDEN;
  c.num_topk = (unsigned)port->ranks;
  c.timeout_ns = s->p->timeoutMs * 1000000ull;
  c.enable_mask = 1;
  if (epPortAlloc(port, (void **)&s->idx, n * sizeof(int64_t), "idx") ||
      epPortAlloc(port, (void **)&s->w, n * sizeof(float), "w") ||
      epPortAlloc(port, (void **)&s->outW, (size_t)s->rows * (size_t)port->ranks * sizeof(float), "out w") ||
      epPortAlloc(port, &s->outIdx, (size_t)s->rows * (size_t)port->ranks * sizeof(int64_t), "out idx") ||
      epPortAlloc(port, (void **)&s->x, 2ull * TOKENS * HIDDEN, "x") ||
      epPortAlloc(port, (void **)&s->y, 2ull * TOKENS * HIDDEN, "y") ||
      epPortAlloc(port, (void **)&s->out, 2ull * s->rows * HIDDEN, "out") ||
      epPortAlloc(port, (void **)&s->mask, sizeof(int) * (size_t)port->ranks, "mask"))
    return -1;
  int64_t *idx = malloc(n * sizeof *idx);
  float *w = malloc(n * sizeof *w);
  s->host = malloc(2ull * TOKENS * HIDDEN);
  if (!idx || !w || !s->host) return epToolFail("out of host memory");
  for (size_t i = 0; i < n; i++) {
    idx[i] = (int64_t)(i % (size_t)port->ranks * LOCALS + i / (size_t)port->ranks % LOCALS);
    w[i] = 1;
  }
  for (uint32_t t = 0; t < TOKENS; t++)
    for (uint32_t h = 0; h < HIDDEN; h++) s->host[(size_t)t * HIDDEN + h] = element(port->rank, t, h);
  if (epPortCopy(port, s->idx, idx, n * sizeof *idx) || epPortCopy(port, s->w, w, n * sizeof *w) ||
      epPortCopy(port, s->x, s->host, 2ull * TOKENS * HIDDEN))
    return -1;
  free(idx), free(w);
  CALL(s, ncclEpCreateGroup(&s->group, port->comm, &c));
  if (s->rc) return -1;
  CALL(s, ncclEpInitHandle(&s->handle, s->group,
                           s->p->major ? NCCL_EP_LAYOUT_EXPERT_MAJOR
                           : s->p->ll  ? NCCL_EP_LAYOUT_RANK_MAJOR
                                       : NCCL_EP_LAYOUT_FLAT,
                           NULL, port->ranks, NULL));
  return s->rc;
}

static void queue(side *s, int upTo, int from) {
  size_t k = (size_t)s->port->ranks, choices[] = {TOKENS, k}, in[] = {TOKENS, HIDDEN}, flat[] = {s->rows, HIDDEN};
  size_t region[] = {s->p->major ? LOCALS : k, s->rows / (s->p->major ? LOCALS : k), HIDDEN};
  size_t regionK[] = {region[0], region[1], k}, flatK[] = {s->rows, k};
  int ll = s->p->ll, major = s->p->major;
  ncclEpTensor_t idx = tensor(s->idx, ncclInt64, 2, choices), w = tensor(s->w, ncclFloat32, 2, choices);
  ncclEpTensor_t x = tensor(s->x, ncclBfloat16, 2, in), y = tensor(s->y, ncclBfloat16, 2, in);
  ncclEpTensor_t out = tensor(s->out, ncclBfloat16, ll ? 3 : 2, ll ? region : flat);
  ncclEpTensor_t outW = tensor(s->outW, ncclFloat32, ll ? 3 : major ? 1 : 2, ll ? regionK : flatK);
  ncclEpTensor_t outIdx = tensor(s->outIdx, ll ? ncclInt32 : ncclInt64, ll ? 3 : 2, ll ? regionK : flatK);
  ncclEpDispatchInputs_t i = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t o = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpCombineInputs_t ci = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t co = NCCL_EP_COMBINE_OUTPUTS_INIT;
  i.tokens = &x, o.tokens = &out, ci.tokens = &out, co.tokens = &y;
  if (!ll || !major) i.topk_weights = &w, o.topk_weights = &outW;
  if (!major) o.topk_idx = &outIdx;
  if (ll && major) co.topk_weights = &w;
  if (from <= 0) CALL(s, ncclEpUpdateHandle(s->handle, &idx, NULL, s->port->stream));
  if (from <= 1 && upTo >= 1) CALL(s, ncclEpDispatch(s->handle, &i, &o, NULL, NULL, s->port->stream));
  if (upTo >= 2) CALL(s, ncclEpCombine(s->handle, &ci, &co, NULL, s->port->stream));
}

/* The sums of this rank are `times` its rows. */
static void check(side *s, int times, const char *when) {
  uint16_t *y = malloc(2ull * TOKENS * HIDDEN);
  size_t bad = 0;
  static const uint16_t exponent[] = {0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100};
  if (!y || epPortCopy(s->port, y, s->y, 2ull * TOKENS * HIDDEN)) {
    s->rc = -1;
    free(y);
    return;
  }
  for (size_t i = 0; i < (size_t)TOKENS * HIDDEN; i++) bad += y[i] != ((s->host[i] & 0x8000) | exponent[times]);
  expect(s, !bad, when, (double)bad);
  free(y);
}

static double layer(side *s, int from, int times, const char *when) {
  double t = now();
  if (epPortFill(s->port, s->y, 0x55, 2ull * TOKENS * HIDDEN)) s->rc = -1;
  t = now();
  queue(s, 2, from);
  if (epPortSync(s->port)) s->rc = -1;
  t = now() - t;
  check(s, times, when);
  return t;
}

static void expectMask(side *s, int gone, const char *when) {
  int mask[64] = {0};
  CALL(s, ncclEpMaskQuery(s->group, s->mask, s->port->stream));
  if (epPortSync(s->port) || epPortCopy(s->port, mask, s->mask, sizeof(int) * (size_t)s->port->ranks)) s->rc = -1;
  printf("rank %d: mask %s:", s->port->rank, when);
  for (int r = 0; r < s->port->ranks; r++) {
    printf(" %d", mask[r]);
    expect(s, mask[r] == (r != gone), when, r);
  }
  printf("\n");
}

/* What a rank sees when another has stopped before `from`. */
static void survive(side *s, int from, const char *what) {
  int ranks = s->port->ranks, error = 0;
  double limit = s->p->timeoutMs, took = layer(s, from, ranks - 1, "sums without the rank that is gone"), later;
  ncclEpErrorInfo_t info = NCCL_EP_ERROR_INFO_INIT;
  if (s->port->cuda)
    expect(s, took > limit / 2 && took < limit * 1.5, "the wait, ms", took); /* emulated time is another */
  expectMask(s, GONE, "after the wait");
  CALL(s, ncclEpGetAsyncError(s->group, &error));
  CALL(s, ncclEpGetErrorInfo(s->group, &info));
  expect(s, error == 1 && info.code == 1 && info.peer == GONE && info.phase[0], "error", info.code);
  later = layer(s, 0, ranks - 1, "sums of the next call");
  if (s->port->cuda) expect(s, later < limit / 4, "the next layer, ms", later);
  printf("rank %d: %s: returned after %.1f ms (timeout %u ms), next layer %.3f ms, \"%s\"\n", s->port->rank, what, took,
         s->p->timeoutMs, later, info.text);
  CALL(s, ncclEpErrorClear(s->group));
}

static void readmit(side *s) {
  double t = now();
  CALL(s, ncclEpMaskClean(s->group, s->port->stream));
  t = now() - t;
  CALL(s, ncclEpErrorClear(s->group));
  expectMask(s, -1, "after the re-admission");
  for (int i = 0; i < 3; i++) layer(s, 0, s->port->ranks, "sums after the re-admission");
  printf("rank %d: re-admitted in %.3f ms, exact again: %s\n", s->port->rank, t, s->rc ? "NO" : "yes");
}

static int body(epPort *port, void *context) {
  side s = {.p = context, .port = port};
  double took;
  if (open(&s)) return -1;
  layer(&s, 0, port->ranks, "sums at first");
  took = layer(&s, 0, port->ranks, "sums at first");
  printf("rank %d: a layer of all takes %.3f ms\n", port->rank, took);
  if (s.p->kill) {
    if (epPortBarrier(port)) return -1;
    if (port->rank == GONE) {
      for (int i = 0; i < 20; i++) queue(&s, 2, 0); /* kernels are under way, and the others' never come */
      usleep(20000);
      raise(SIGKILL);
    }
    usleep(300000);
    survive(&s, 0, "killed");
    CALL(&s, ncclEpHandleDestroy(s.handle));
    CALL(&s, ncclEpGroupDestroy(s.group));
    printf("rank %d: killed: %s\n", port->rank, s.rc ? "FAILED" : "OK");
    fflush(stdout);
    _exit(s.rc ? 1 : 0); /* NCCL's own farewell would wait for the dead */
  }
  for (int from = 0; from < 3; from += 2) {
    if (from) queue(&s, 1, 0);
    if (from && epPortSync(port)) return -1;
    if (epPortBarrier(port)) return -1;
    if (port->rank != GONE) survive(&s, from, from ? "stopped before combine" : "stopped before the update");
    if (epPortBarrier(port)) return -1;
    if (port->rank == GONE && !from) { /* it did not know: the first call tells it, without a timeout */
      double t = now();
      ncclEpErrorInfo_t info = NCCL_EP_ERROR_INFO_INIT;
      queue(&s, 2, 0);
      if (epPortSync(port)) s.rc = -1;
      CALL(&s, ncclEpGetErrorInfo(s.group, &info));
      printf("rank %d: a call of the one that was late: %.1f ms, \"%s\"\n", port->rank, now() - t, info.text);
      expect(&s, info.code == 6, "code", info.code);
    }
    readmit(&s);
  }
  CALL(&s, ncclEpHandleDestroy(s.handle));
  CALL(&s, ncclEpGroupDestroy(s.group));
  epPortFree(port, s.idx), epPortFree(port, s.w), epPortFree(port, s.outW), epPortFree(port, s.outIdx);
  epPortFree(port, s.x), epPortFree(port, s.y), epPortFree(port, s.out), epPortFree(port, s.mask);
  free(s.host);
  if (epPortFaults(port)) s.rc = -1;
  printf("rank %d: %s\n", port->rank, s.rc ? "FAILED" : "OK");
  return s.rc;
}

int main(int argc, char **argv) {
  plan p = {.timeoutMs = 1000};
  epFabricOptions options = {.kind = EP_FABRIC_CUDA, .seed = 3};
  epFabric *fabric = NULL;
  int rc = 1;
  for (int i = 1; i < argc; i++) {
    if (!strcmp(argv[i], "--ll")) p.ll = 1;
    if (!strcmp(argv[i], "--major")) p.major = 1;
    if (!strcmp(argv[i], "--kill")) p.kill = 1;
    if (!strcmp(argv[i], "--emu")) options.kind = EP_FABRIC_EMU, options.scaleOut = 1, options.scaleUp = 2;
    if (argv[i][0] != '-') p.timeoutMs = (unsigned)strtoul(argv[i], NULL, 10);
  }
  epToolInit("masks_gpu_check", 120);
  options.timeoutMs = 4 * p.timeoutMs;
  if (p.kill && epFabricLaunchedRanks() < 2) {
    fprintf(stderr, "usage: RANK=… WORLD_SIZE=… masks_gpu_check --kill\n");
    return 2;
  }
  if (!epFabricOpen(&options, &fabric)) rc = epFabricRun(fabric, body, &p) ? 1 : 0;
  epFabricClose(fabric);
  return rc;
}
