/* Compiles a kernel that uses NCCL's device functions, and the kernels of several scale-up domains, with each embedded header
 * set, our prelude and shims. Needs NVRTC and CUDA's own headers, which are not embedded. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "bundle.h"
#include "compile.h"
#include "cuda_targets.h"
#include "fail.h"
#include "hybrid.h"
#include "headers.h"
#include "jit_ext.h"

static const char source[] =
    "#include \"nccl_prelude.h\"\n"
    "#include <nccl_device.h>\n"
    "extern \"C\" __global__ void peers(ncclWindow_t window, void **out, int ranks) {\n"
    "  if (int(threadIdx.x) < ranks) out[threadIdx.x] = ncclGetLsaPointer(window, 0, int(threadIdx.x));\n"
    "}\n"
    "extern \"C\" __global__ void barrier(ncclDevComm comm) {\n"
    "  ncclLsaBarrierSession<ncclCoopCta> session{ncclCoopCta(), comm, ncclTeamTagLsa(), blockIdx.x};\n"
    "  session.sync(ncclCoopCta(), cuda::memory_order_acq_rel);\n"
    "}\n";

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

/* 1 after telling what did not compile, or spilled. */
static int compileOne(const char *name, const char *text, const epBundle *nccl, int sm) {
  char include[600], cccl[600], arch[40];
  epCompiled compiled;
  epCompileJob job;
  int bad;
  memset(&job, 0, sizeof(job));
  snprintf(include, sizeof(include), "--include-path=%s", cudaInclude);
  snprintf(cccl, sizeof(cccl), "--include-path=%s/cccl", cudaInclude);
  snprintf(arch, sizeof(arch), "--gpu-architecture=sm_%d", sm);
  job.name = name;
  job.source = text;
  job.bundles[0] = &epKernelBundle;
  job.bundles[1] = nccl;
  job.bundles[2] = &epNcclPreludeBundle;
  job.bundles[3] = &epNcclShimBundle;
  const char *options[] = {
      arch,    "--std=c++17", "--device-as-default-execution-space", "-diag-suppress=1866", "--ptxas-options=-v",
      include, cccl};
  memcpy(job.options, options, sizeof(options));
  job.optionCount = sizeof(options) / sizeof(options[0]);
  if (epCompile(nvrtc, &job, &compiled) != ncclSuccess) {
    printf("  NCCL %s sm_%d: %s\n", nccl->version, sm, epLastError());
    return 1;
  }
  printf("  NCCL %s sm_%d: %s: %zu bytes, %d registers, %d bytes spilled\n", nccl->version, sm, name, compiled.bytes,
         compiled.usage.registers, compiled.usage.spillBytes);
  bad = compiled.usage.spillBytes != 0;
  epCompiledFree(&compiled);
  return bad;
}

static void headerSets(void **state) {
  static const int archs[] = {80, 90, 100, 120};
  int bad = 0;
  (void)state;
  for (int s = 0; s < epNcclBundleCount; s++)
    for (size_t a = 0; a < sizeof(archs) / sizeof(archs[0]); a++)
      bad += compileOne("nccl", source, &epNcclBundles[s], archs[a]);
  assert_int_equal(bad, 0);
}

/* The library's own kernels, over GIN, for a runtime of each set's version: the JIT finds the set. */
static void hybridKernels(void **state) {
  epTopology topology;
  epJit *jit;
  int bad = 0;
  (void)state;
  assert_int_equal(epCudaTarget(90, &topology), ncclSuccess);
  topology.ranks = 16, topology.scaleUpRanks = 8, topology.scaleOutRanks = 2;
  assert_int_equal(epJitOpenAt(&jit, ""), ncclSuccess);
  for (int s = 0; s < epNcclBundleCount; s++)
    for (int n = EP_KERNEL_UPDATE; n <= EP_KERNEL_COMBINE + (s == 0); n++) {
      int i = n <= EP_KERNEL_COMBINE ? n : EP_KERNEL_COMBINE; /* the last: without partial sums */
      epConfig c;
      epGrid grid;
      epJitCode code;
      memset(&c, 0, sizeof(c));
      c.ranks = 16, c.experts = 256, c.topk = 8, c.layout = EP_LAYOUT_KIND_EXPERT_MAJOR, c.single = n != i;
      if (i == EP_KERNEL_UPDATE) {
        c.indexBytes = 8;
        assert_int_equal(epPolicyUpdate(&topology, 132, 4096, &c, &grid), ncclSuccess);
      } else {
        c.rowBytes = 14336, c.weights = i == EP_KERNEL_DISPATCH, c.dtype = EP_DTYPE_BF16;
        assert_int_equal(epPolicyMove("test", &topology, 132, i, &c, &grid), ncclSuccess);
      }
      epJitUseNccl(jit, epNcclBundles[s].code);
      if (epJitCompile(jit, epHybridKernel(i, &c), &c, 90, &code) != ncclSuccess) {
        printf("  NCCL %s: %s\n", epNcclBundles[s].version, epLastError());
        bad++;
        continue;
      }
      printf("  NCCL %s: %s: %zu bytes, %d registers, %d bytes spilled, %.1f s\n", epNcclBundles[s].version,
             epJitEntryName(epHybridKernel(i, &c)), code.bytes, code.registers, code.spillBytes, code.seconds);
      bad += code.spillBytes != 0 || code.fromCache;
      epJitFree(&code);
    }
  epJitClose(jit);
  assert_int_equal(bad, 0);
}

/* Which headers a runtime takes, and what is said when it takes none. */
static void versions(void **state) {
  static const struct {
    int runtime, set, accepts;
  } cases[] = {{22809, 22809, 1}, {22811, 22809, 1}, {22809, 22811, 0}, {23007, 22809, 0}, {23007, 22902, 1},
               {23203, 23007, 1}, {23007, 23203, 0}, {22901, 22900, 1}, {22902, 22901, 0}};
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

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(headerSets), cmocka_unit_test(hybridKernels),
                                     cmocka_unit_test(versions)};
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
