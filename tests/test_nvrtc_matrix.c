/* Compiles a listed matrix of kernel configurations for all targets with NVRTC, prints what each costs, and fails when
 * one does not compile or spills a register. Needs NVRTC, but no GPU and no header from outside. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "cuda_targets.h"
#include "fail.h"
#include "jit_ext.h"
#include "low_latency.h"
#include "policy.h"

#define THREADS 2

static const int archs[] = {80, 90, 100, 120};
enum { ARCHS = sizeof(archs) / sizeof(archs[0]) };

/* What a kernel is specialised by, without what the target decides. */
typedef struct {
  int kernel;
  uint32_t ranks, experts, topk, rowBytes, dtype, layout, weights;
  uint32_t indexBytes; /* of an update; dispatch: it makes the routing record itself, 0: it does not */
  uint32_t extra;      /* dispatch: bytes of scales; combine: biases */
} matrixCase;

#define FLAT EP_LAYOUT_KIND_FLAT
#define DIRECT (1u << 8) /* beside FLAT: into window-backed outputs */
#define SEND (1u << 12)  /* beside any: a part of it */
#define RECEIVE (1u << 13)
#define MAJOR EP_LAYOUT_KIND_EXPERT_MAJOR
#define SINGLE (1u << 9)    /* beside a layout: combine without partial sums */
#define PROFILED (1u << 10) /* beside a layout: the group is profiled */
#define MASKS (1u << 11)    /* beside a layout */
#define QUANTISE (1u << 14) /* beside a layout: low-latency dispatch makes the scales, combine returns NVFP4 */
#define RANKS EP_LAYOUT_KIND_RANK_MAJOR
#define PLACES EP_LAYOUT_KIND_EXPERT_MAJOR_3D
static const matrixCase cases[] = {
    {EP_KERNEL_UPDATE, 2, 256, 8, 0, 0, FLAT, 0, 8, 0},
    {EP_KERNEL_UPDATE, 8, 64, 1, 0, 0, MAJOR, 0, 4, 0},
    {EP_KERNEL_UPDATE, 1024, 2048, 32, 0, 0, MAJOR, 0, 8, 0},
    {EP_KERNEL_DISPATCH, 2, 256, 8, 14336, EP_DTYPE_BYTES, FLAT, 1, 0, 0},
    {EP_KERNEL_DISPATCH, 2, 256, 8, 14336, EP_DTYPE_BYTES, MAJOR, 1, 0, 0},
    {EP_KERNEL_DISPATCH, 8, 64, 9, 16, EP_DTYPE_BYTES, FLAT | PROFILED, 0, 0, 0},
    {EP_KERNEL_DISPATCH, 5, 40, 6, 5760, EP_DTYPE_BYTES, MAJOR, 1, 0, 0},
    {EP_KERNEL_DISPATCH, 1, 32, 32, 49152, EP_DTYPE_BYTES, FLAT, 1, 0, 0},
    {EP_KERNEL_DISPATCH, 2, 256, 8, 7168, EP_DTYPE_BYTES, FLAT, 1, 0, 224},
    {EP_KERNEL_DISPATCH, 2, 256, 8, 7168, EP_DTYPE_BYTES, MAJOR, 1, 0, 56},
    {EP_KERNEL_DISPATCH, 8, 256, 8, 128, EP_DTYPE_BYTES, MAJOR, 0, 0, 4},
    {EP_KERNEL_DISPATCH, 2, 256, 8, 14336, EP_DTYPE_BYTES, FLAT, 1, 8, 0},
    {EP_KERNEL_DISPATCH, 2, 256, 8, 14336, EP_DTYPE_BYTES, FLAT | DIRECT, 1, 8, 0},
    {EP_KERNEL_DISPATCH, 2, 256, 8, 14336, EP_DTYPE_BYTES, MAJOR, 1, 4, 0},
    {EP_KERNEL_DISPATCH, 72, 576, 32, 49152, EP_DTYPE_BYTES, FLAT, 1, 4, 384},
    {EP_KERNEL_DISPATCH, 2, 256, 8, 7168, EP_DTYPE_BYTES, MAJOR, 0, 8, 224},
    {EP_KERNEL_COMBINE, 2, 256, 8, 14336, EP_DTYPE_BF16, FLAT, 0, 0, 0},
    {EP_KERNEL_COMBINE, 2, 256, 8, 14336, EP_DTYPE_BF16, MAJOR, 0, 0, 0},
    {EP_KERNEL_COMBINE, 5, 40, 6, 5760, EP_DTYPE_BF16, MAJOR, 1, 0, 0},
    {EP_KERNEL_COMBINE, 8, 64, 9, 16, EP_DTYPE_F16, FLAT, 1, 0, 0},
    {EP_KERNEL_COMBINE, 72, 576, 32, 32768, EP_DTYPE_F16, MAJOR, 0, 0, 0},
    {EP_KERNEL_COMBINE, 8, 64, 1, 28672, EP_DTYPE_F32, FLAT, 0, 0, 0},
    {EP_KERNEL_COMBINE, 2, 256, 8, 14336, EP_DTYPE_BF16, MAJOR | SINGLE, 0, 0, 2},
    {EP_KERNEL_LL_UPDATE, 2, 256, 8, 0, 0, RANKS, 0, 8, 0},
    {EP_KERNEL_LL_DISPATCH, 2, 256, 8, 14336, EP_DTYPE_BYTES, RANKS, 1, 0, 0},
    {EP_KERNEL_LL_DISPATCH, 2, 256, 8, 14336, EP_DTYPE_BYTES, PLACES, 0, 0, 0},
    {EP_KERNEL_LL_DISPATCH, 1024, 2048, 32, 128, EP_DTYPE_BYTES, PLACES | QUANTISE, 0, 0, 4},
    {EP_KERNEL_LL_COMBINE, 2, 256, 8, 14336, EP_DTYPE_BF16, RANKS, 0, 0, 0},
    {EP_KERNEL_LL_COMBINE, 2, 256, 8, 14336, EP_DTYPE_BF16, PLACES, 0, 0, 0},
    {EP_KERNEL_LL_COMBINE, 72, 576, 32, 28672, EP_DTYPE_F32, PLACES | PROFILED, 0, 0, 0},
    {EP_KERNEL_DISPATCH, 2, 256, 8, 14336, EP_DTYPE_BYTES, MAJOR | MASKS, 1, 8, 0},
    {EP_KERNEL_LL_COMBINE, 2, 256, 8, 14336, EP_DTYPE_BF16, PLACES | MASKS, 0, 0, 0},
    {EP_KERNEL_MASK, 1024, 2048, 0, 0, 0, MASKS, 0, 0, 0},
    {EP_KERNEL_DISPATCH, 2, 256, 8, 14336, EP_DTYPE_BYTES, FLAT | DIRECT | SEND, 1, 0, 0},
    {EP_KERNEL_COMBINE, 5, 40, 6, 5760, EP_DTYPE_BF16, FLAT | RECEIVE, 1, 0, 1},
    {EP_KERNEL_LL_DISPATCH, 2, 256, 8, 14336, EP_DTYPE_BYTES, RANKS | RECEIVE, 1, 0, 0},
    {EP_KERNEL_LL_DISPATCH, 2, 256, 8, 14336, EP_DTYPE_BYTES, PLACES | MASKS | RECEIVE, 0, 0, 0},
    {EP_KERNEL_LL_COMBINE, 2, 256, 8, 14336, EP_DTYPE_BF16, PLACES | SEND, 0, 0, 0},
    {EP_KERNEL_LL_COMBINE, 2, 256, 8, 14336, EP_DTYPE_BF16, RANKS | QUANTISE, 0, 0, 0},
    {EP_KERNEL_LL_COMBINE, 8, 256, 8, 8192, EP_DTYPE_BF16, PLACES | QUANTISE, 0, 0, 0},
};
enum { CASES = sizeof(cases) / sizeof(cases[0]) };
_Static_assert(ARCHS *CASES <= 180, "the matrix is meant to stay small");

typedef struct {
  ncclResult_t result;
  char error[512];
  epConfig config;
  epJitCode code;
} matrixResult;

static epJit *jit;
static matrixResult results[ARCHS][CASES];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int next;

static ncclResult_t compileOne(int arch, const matrixCase *c, matrixResult *out) {
  epTopology target;
  epGrid grid;
  epConfig *config = &out->config;
  ncclResult_t r = epCudaTarget(arch, &target);
  if (r != ncclSuccess) return r;
  memset(config, 0, sizeof(*config));
  config->ranks = c->ranks;
  config->experts = c->experts;
  config->topk = c->topk;
  config->rowBytes = c->rowBytes;
  config->dtype = c->dtype;
  config->layout = c->layout & ~(DIRECT | SINGLE | PROFILED | MASKS | SEND | RECEIVE | QUANTISE);
  config->profile = (c->layout & PROFILED) != 0;
  config->mask = (c->layout & MASKS) != 0;
  config->threads = 1024; /* of the mask kernel; the policy sets the others' */
  config->part = c->layout & SEND ? EP_PART_SEND : c->layout & RECEIVE ? EP_PART_RECEIVE : EP_PART_WHOLE;
  config->quantise = !(c->layout & QUANTISE)              ? EP_QUANTISE_NONE
                     : c->kernel == EP_KERNEL_LL_DISPATCH ? EP_QUANTISE_POWERS
                                                          : EP_QUANTISE_NVFP4;
  config->direct = (c->layout & DIRECT) != 0;
  config->single = (c->layout & SINGLE) != 0;
  config->weights = c->weights;
  config->indexBytes = c->indexBytes;
  config->fused = c->kernel == EP_KERNEL_DISPATCH && c->indexBytes;
  if (c->kernel == EP_KERNEL_COMBINE)
    config->bias = c->extra;
  else
    config->scaleBytes = c->extra;
  r = c->kernel == EP_KERNEL_MASK ? ncclSuccess
      : c->kernel >= EP_KERNEL_LL_UPDATE
          ? epPolicyLl("matrix", &target, epPolicySms(&target, 0), c->kernel, 128, config, &grid)
      : c->kernel == EP_KERNEL_UPDATE
          ? epPolicyUpdate(&target, epPolicySms(&target, 0), 4096, config, &grid)
          : epPolicyMove("matrix", &target, epPolicySms(&target, 0), c->kernel, config, &grid);
  return r == ncclSuccess ? epJitCompile(jit, c->kernel, config, arch, &out->code) : r;
}

/* The shapes that everybody uses for all targets; the others for SM90, whose registers are as many as any other's, and for one more in turn. */
static int isWanted(int arch, int at) {
  const matrixCase *c = &cases[at];
  int usual = c->ranks == 2 && c->experts == 256 && c->layout <= UINT8_MAX && !c->extra;
  return usual || archs[arch] == 90 || arch == (int[]){0, 2, 3}[at % 3];
}

static void *work(void *unused) {
  (void)unused;
  for (;;) {
    pthread_mutex_lock(&mutex);
    int at = next++;
    pthread_mutex_unlock(&mutex);
    if (at >= ARCHS * CASES) return NULL;
    if (!isWanted(at / CASES, at % CASES)) continue;
    matrixResult *r = &results[at / CASES][at % CASES];
    r->result = compileOne(archs[at / CASES], &cases[at % CASES], r);
    if (r->result != ncclSuccess) snprintf(r->error, sizeof(r->error), "%s", epLastError());
  }
}

static int hasName(const epJitCode *code, const char *name) {
  size_t n = strlen(name) + 1; /* with its 0, as symbol names end */
  for (size_t i = 0; i + n <= code->bytes; i++)
    if (memcmp((const char *)code->cubin + i, name, n) == 0) return 1;
  return 0;
}

/* Bytes that may be spilled: in 3-D low latency, which fills the registers as it is, masks, profiling and NVFP4 take a
 * few more. */
static int mostSpills(const matrixCase *c) {
  if (c->kernel == EP_KERNEL_LL_COMBINE && (c->layout & 255) == PLACES && c->layout & PROFILED) return 32;
  if (c->kernel == EP_KERNEL_LL_COMBINE && (c->layout & 255) == PLACES && c->layout & QUANTISE) return 128;
  return (c->layout & MASKS) && (c->layout & 255) == PLACES && c->kernel >= EP_KERNEL_LL_UPDATE &&
                 c->kernel != EP_KERNEL_MASK
             ? 256
             : 0;
}

static void matrix(void **state) {
  pthread_t threads[THREADS];
  int bad = 0, compiles = 0;
  double total = 0;
  (void)state;
  for (int i = 0; i < THREADS; i++) assert_int_equal(pthread_create(&threads[i], NULL, work, NULL), 0);
  for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);

  printf("# %-20s %5s %5s %5s %3s %6s %5s %6s %3s %3s %6s %7s %5s %6s %6s %8s %7s\n", "kernel", "arch", "ranks", "exps",
         "k", "row", "dtype", "layout", "w", "idx", "extra", "threads", "regs", "spill", "stack", "bytes", "s");
  for (int a = 0; a < ARCHS; a++) {
    for (int i = 0; i < CASES; i++) {
      matrixResult *r = &results[a][i];
      const matrixCase *c = &cases[i];
      if (!isWanted(a, i)) continue;
      if (r->result != ncclSuccess) {
        printf("  %-20s sm_%d: %s\n", epJitEntryName(c->kernel), archs[a], r->error);
        bad++;
        continue;
      }
      int fits = r->code.registers > 0 && (uint32_t)r->code.registers * r->config.threads <= 65536;
      int elf =
          r->code.bytes > 4 && memcmp(r->code.cubin, "\177ELF", 4) == 0 && hasName(&r->code, epJitEntryName(c->kernel));
      int fused = c->kernel != EP_KERNEL_DISPATCH || r->config.fused == (c->indexBytes != 0);
      int ok = elf && fits && fused && r->code.spillBytes <= mostSpills(c);
      printf("  %-20s sm_%-3d %4u %5u %3u %6u %5u %6u %3u %3u %6u %7u %5d %6d %6d %8zu %7.3f%s\n",
             epJitEntryName(c->kernel), archs[a], c->ranks, c->experts, c->topk, c->rowBytes, c->dtype, c->layout,
             c->weights, c->indexBytes, c->extra, r->config.threads, r->code.registers, r->code.spillBytes,
             r->code.localBytes, r->code.bytes, r->code.seconds, ok ? "" : "  <- not good");
      compiles++;
      total += r->code.seconds;
      bad += !ok;
      epJitFree(&r->code);
    }
  }
  printf("# %d compiles, %.1f s of one thread's time\n", compiles, total);
  assert_int_equal(bad, 0);
}

/* Sources that cannot compile give an error with the compiler's words, and are not remembered. */
static void refused(void **state) {
  epConfig config;
  epJitCode code;
  (void)state;
  memset(&config, 0, sizeof(config));
  config.ranks = 2;
  config.experts = 8;
  config.topk = 2;
  config.indexBytes = 8;
  config.threads = 96;
  config.bulk = 1;
  assert_int_not_equal(epJitCompile(jit, EP_KERNEL_UPDATE, &config, 80, &code), ncclSuccess);
  config.bulk = 0;
  config.bug = 1;
  assert_int_not_equal(epJitCompile(jit, EP_KERNEL_UPDATE, &config, 80, &code), ncclSuccess);
  config.bug = 0;
  assert_int_not_equal(epJitCompile(jit, EP_KERNEL_UPDATE, &config, 70, &code), ncclSuccess);
  assert_int_equal(epJitCompile(jit, EP_KERNEL_UPDATE, &config, 80, &code), ncclSuccess);
  assert_int_equal(code.fromCache, 0);
  epJitFree(&code);
  assert_int_equal(epJitCompile(jit, EP_KERNEL_UPDATE, &config, 80, &code), ncclSuccess);
  assert_int_equal(code.fromCache, 1); /* the process's memory */
  assert_int_equal(code.spillBytes, 0);
  epJitFree(&code);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(matrix), cmocka_unit_test(refused)};
  /* No disk cache: every line of the report is a compile. */
  if (epJitOpenAt(&jit, "") != ncclSuccess) return 1;
  if (!epJitCompilerVersion(jit)) {
    printf("skipped: %s\n", epLastError());
    return 77;
  }
  printf("# NVRTC %d.%d, %s\n", epJitCompilerVersion(jit) / 1000, epJitCompilerVersion(jit) % 1000 / 10,
         epJitCompilerPath(jit));
  int failed = cmocka_run_group_tests(tests, NULL, NULL);
  epJitClose(jit);
  return failed;
}
