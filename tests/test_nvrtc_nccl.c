/* test_nvrtc_nccl [VERSION|all]: compiles the kernels of several scale-up domains, which use NCCL's device functions, with each
 * embedded header set and for each target: they assert that the host has NCCL's structures as the headers have them. Needs NVRTC and CUDA's own headers, which are
 * not embedded. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <pthread.h>

#include "bundle.h"
#include "compile.h"
#include "cuda_targets.h"
#include "fail.h"
#include "hybrid.h"
#include "headers.h"
#include "jit_ext.h"
#include "low_latency.h"

static const epNvrtc *nvrtc;
static char cudaInclude[512];

static int findCudaHeaders(void) {
  const char *home = getenv("CUDA_HOME");
  const char *roots[] = {home && *home ? home : "/usr/local/cuda", "/usr/local/cuda", "/usr"};
  for (size_t i = 0; i < sizeof(roots) / sizeof(roots[0]); i++) {
    char probe[600];
    snprintf(cudaInclude, sizeof(cudaInclude), "%s/include", roots[i]);
    snprintf(probe, sizeof(probe), "%s/cuda_runtime.h", cudaInclude);
    if (access(probe, R_OK) == 0) return 1;
  }
  return 0;
}

/* Each kernel, for each target, with each set. */
typedef struct {
  int set, kernel, arch, single, part, layout, mask;
} job;
enum {
  WHOLE = EP_KERNEL_COMBINE - EP_KERNEL_UPDATE + 2, /* the last: without partial sums */
  PARTS = WHOLE + 4,                                /* and the parts of dispatch and combine */
  MASKED = PARTS + 4,                               /* and low latency's dispatch and combine in its two layouts */
  LL_MASKED = MASKED + 5,  /* and with masks the whole ones, and that of the masks themselves */
  KERNELS = LL_MASKED + 4, /* and low latency's */
  TARGETS = 4,
  THREADS = 2
};
static const int archs[TARGETS] = {80, 90, 100, 120};
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int next, bad;
static const char *only; /* version of the one set to compile with; "all" */

/* Each takes seconds, most of them for the headers. So unless a run asks for more: the update, which calls every primitive, for
 * each target with the newest set, and the other kernels for one; with other sets the update for one. */
static int wanted(const job *j) {
  if (only) return strcmp(only, "all") == 0 || strcmp(only, epNcclBundles[j->set].version) == 0;
  int ll = j->kernel == EP_KERNEL_LL_DISPATCH || j->kernel == EP_KERNEL_LL_COMBINE;
  if (j->mask)
    return j->arch == 90 && j->set == epNcclBundleCount - 1 &&
           (ll || j->kernel == EP_KERNEL_DISPATCH || j->kernel == EP_KERNEL_MASK);
  if (j->layout == EP_LAYOUT_KIND_RANK_MAJOR) return 0;
  if (j->part && (j->kernel != EP_KERNEL_DISPATCH || j->part != EP_PART_RECEIVE))
    return 0; /* one part stands for the others */
  if (j->kernel != EP_KERNEL_UPDATE) return j->arch == 90 && j->set == epNcclBundleCount - 1;
  return j->arch == 90 || j->set == epNcclBundleCount - 1;
}

/* Low latency with masks calls the network and asks who is left out wherever it waits. */
static int mostSpills(const job *j) {
  int ll = j->kernel == EP_KERNEL_LL_DISPATCH || j->kernel == EP_KERNEL_LL_COMBINE;
  return !j->mask || !ll ? 0 : j->layout == EP_LAYOUT_KIND_EXPERT_MAJOR_3D ? 384 : 128;
}

static ncclResult_t configOf(const job *j, epConfig *c) {
  epTopology topology;
  epGrid grid;
  ncclResult_t r = epCudaTarget(j->arch, &topology);
  if (r != ncclSuccess) return r;
  topology.ranks = 16, topology.scaleUpRanks = 8, topology.scaleOutRanks = 2;
  memset(c, 0, sizeof(*c));
  c->ranks = 16, c->experts = 256, c->topk = 8, c->layout = (uint32_t)j->layout, c->single = (uint32_t)j->single,
  c->part = (uint32_t)j->part, c->mask = (uint32_t)j->mask;
  if (j->kernel == EP_KERNEL_MASK) {
    c->scaleUp = 8, c->threads = 32;
    return ncclSuccess;
  }
  if (j->kernel == EP_KERNEL_UPDATE) {
    c->indexBytes = 8;
    return epPolicyUpdate(&topology, 132, 4096, c, &grid);
  }
  c->rowBytes = 14336, c->weights = j->kernel == EP_KERNEL_DISPATCH, c->dtype = EP_DTYPE_BF16;
  if (j->kernel >= EP_KERNEL_LL_UPDATE) {
    c->weights = j->kernel == EP_KERNEL_LL_DISPATCH && j->layout == EP_LAYOUT_KIND_RANK_MAJOR;
    return epPolicyLl("test", &topology, 132, j->kernel, 128, c, &grid);
  }
  return epPolicyMove("test", &topology, 132, j->kernel, c, &grid);
}

/* A set's kernels are compiled as for a runtime of its version; a JIT object has one runtime, so each thread has its own. */
static void *work(void *unused) {
  epJit *jit;
  (void)unused;
  if (epJitOpenAt(&jit, "") != ncclSuccess) return (void *)1;
  for (;;) {
    epJitCode code;
    epConfig c;
    pthread_mutex_lock(&mutex);
    int at = next++;
    pthread_mutex_unlock(&mutex);
    if (at >= epNcclBundleCount * TARGETS * KERNELS) break;
    int n = at % KERNELS, part = n - WHOLE, ll = n >= LL_MASKED ? n - LL_MASKED : n - PARTS, masked = n - MASKED;
    job j = {at / (TARGETS * KERNELS),    EP_KERNEL_UPDATE + n, archs[at / KERNELS % TARGETS], 0, 0,
             EP_LAYOUT_KIND_EXPERT_MAJOR, n >= MASKED};
    if (j.mask && n < LL_MASKED) {
      j.kernel = masked <= EP_KERNEL_COMBINE ? masked : n == LL_MASKED - 1 ? EP_KERNEL_MASK : EP_KERNEL_COMBINE;
      j.single = n == LL_MASKED - 2;
    } else if (ll >= 0) {
      j.kernel = ll < 2 ? EP_KERNEL_LL_DISPATCH : EP_KERNEL_LL_COMBINE;
      j.layout = ll % 2 ? EP_LAYOUT_KIND_EXPERT_MAJOR_3D : EP_LAYOUT_KIND_RANK_MAJOR;
    } else if (part >= 0) {
      j.kernel = part < 2 ? EP_KERNEL_DISPATCH : EP_KERNEL_COMBINE;
      j.part = part % 2 ? EP_PART_RECEIVE : EP_PART_SEND;
    } else if (j.kernel > EP_KERNEL_COMBINE) {
      j.kernel = EP_KERNEL_COMBINE, j.single = 1;
    }
    const epBundle *set = &epNcclBundles[j.set];
    if (!wanted(&j)) continue;
    epJitUseNccl(jit, set->code);
    ncclResult_t r = configOf(&j, &c);
    if (r == ncclSuccess) r = epJitCompile(jit, epHybridKernel(j.kernel, &c), &c, j.arch, &code);
    pthread_mutex_lock(&mutex);
    if (r != ncclSuccess) {
      printf("  NCCL %s sm_%d: %s\n", set->version, j.arch, epLastError());
      bad++;
    } else {
      printf("  NCCL %s sm_%d: %s: %zu bytes, %d registers, %d bytes spilled, %d bytes of stack, %.1f s\n",
             set->version, j.arch, epJitEntryName(epHybridKernel(j.kernel, &c)), code.bytes, code.registers,
             code.spillBytes, code.localBytes, code.seconds);
      bad += code.spillBytes > mostSpills(&j) || code.fromCache;
      epJitFree(&code);
    }
    pthread_mutex_unlock(&mutex);
  }
  epJitClose(jit);
  return NULL;
}

static void hybridKernels(void **state) {
  pthread_t threads[THREADS];
  (void)state;
  for (int i = 0; i < THREADS; i++) assert_int_equal(pthread_create(&threads[i], NULL, work, NULL), 0);
  for (int i = 0; i < THREADS; i++) {
    void *failed;
    pthread_join(threads[i], &failed);
    assert_null(failed);
  }
  assert_int_equal(bad, 0);
}

/* Which headers a runtime takes, and what is said when it takes none. */
static void versions(void **state) {
  static const struct {
    int runtime, set, accepts;
  } cases[] = {{22809, 22809, 1}, {22811, 22809, 1}, {22809, 22811, 0}, {23007, 22809, 0},
               {23007, 22907, 0}, {22907, 22907, 0}, {23203, 23007, 1}, {23007, 23203, 0},
               {23007, 23004, 1}, {23401, 23203, 1}, {23401, 23400, 0}};
  epHeaders headers;
  (void)state;
  for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
    if (epNcclAccepts(cases[i].runtime, cases[i].set) != cases[i].accepts)
      fail_msg("NCCL %d and headers of %d", cases[i].runtime, cases[i].set);
  assert_int_equal(epHeadersFind(20000, nvrtc->path, &headers), ncclInvalidUsage); /* older than all sets */
  assert_non_null(strstr(epLastError(), "NCCL 2.0.0"));
  assert_non_null(strstr(epLastError(), epNcclBundleVersions()));
  assert_int_equal(epHeadersFind(0, nvrtc->path, &headers), ncclSuccess);
  assert_ptr_equal(headers.nccl, &epNcclBundles[epNcclBundleCount - 1]);
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(hybridKernels), cmocka_unit_test(versions)};
  only = argc > 1 ? argv[1] : NULL;
  if (epNcclBundleCount == 0) {
    printf("skipped: no NCCL device headers were found when this was built\n");
    return 77;
  }
  if (epNvrtcOpen(&nvrtc) != ncclSuccess) {
    printf("skipped: %s\n", epLastError());
    return 77;
  }
  if (!findCudaHeaders()) {
    printf("skipped: no cuda_runtime.h in $CUDA_HOME, /usr/local/cuda or /usr\n");
    return 77;
  }
  return cmocka_run_group_tests(tests, NULL, NULL);
}
