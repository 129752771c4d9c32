/* Compiles a kernel that uses NCCL's device functions with each embedded header set, our prelude and shims, for all
 * targets. Needs NVRTC and CUDA's own headers, which are not
 * embedded. */
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
#include "fail.h"

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

static void headerSets(void **state) {
  static const int archs[] = {80, 90, 100, 120};
  char include[600], cccl[600], arch[40];
  int bad = 0;
  (void)state;
  snprintf(include, sizeof(include), "--include-path=%s", cudaInclude);
  snprintf(cccl, sizeof(cccl), "--include-path=%s/cccl", cudaInclude);
  for (int s = 0; s < epNcclBundleCount; s++) {
    for (size_t a = 0; a < sizeof(archs) / sizeof(archs[0]); a++) {
      epCompiled compiled;
      epCompileJob job;
      memset(&job, 0, sizeof(job));
      snprintf(arch, sizeof(arch), "--gpu-architecture=sm_%d", archs[a]);
      job.name = "nccl";
      job.source = source;
      job.bundles[0] = &epNcclBundles[s];
      job.bundles[1] = &epNcclPreludeBundle;
      job.bundles[2] = &epNcclShimBundle;
      const char *options[] = {
          arch,    "--std=c++17", "--device-as-default-execution-space", "-diag-suppress=1866", "--ptxas-options=-v",
          include, cccl};
      memcpy(job.options, options, sizeof(options));
      job.optionCount = sizeof(options) / sizeof(options[0]);
      ncclResult_t r = epCompile(nvrtc, &job, &compiled);
      if (r != ncclSuccess) {
        printf("  NCCL %s sm_%d: %s\n", epNcclBundles[s].version, archs[a], epLastError());
        bad++;
        continue;
      }
      printf("  NCCL %s sm_%d: %zu bytes, %d registers\n", epNcclBundles[s].version, archs[a], compiled.bytes,
             compiled.usage.registers);
      epCompiledFree(&compiled);
    }
  }
  assert_int_equal(bad, 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(headerSets)};
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
