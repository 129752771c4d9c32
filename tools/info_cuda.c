/* CUDA, NCCL and the JIT as ep_info shows them. */
#include <stdio.h>
#include <string.h>

#include "bundle.h"
#include "cuda_driver.h"
#include "cuda_nccl.h"
#include "fail.h"
#include "info.h"
#include "jit_ext.h"
#include "policy.h"

/* DeepSeek-V3's layer: what people run. */
enum { SHOWN_EXPERTS = 256, SHOWN_TOPK = 8, SHOWN_HIDDEN = 7168 };

static void chosen(const epTopology *t) {
  epConfig config;
  epGrid update, dispatch, combine;
  memset(&config, 0, sizeof(config));
  config.ranks = 8;
  config.experts = SHOWN_EXPERTS;
  config.topk = SHOWN_TOPK;
  config.weights = 1;
  unsigned sms = epPolicySms(t, 0);
  if (epPolicyUpdate(t, sms, 4096, &config, &update) != ncclSuccess) return;
  config.rowBytes = 2 * SHOWN_HIDDEN;
  if (epPolicyMove("ep_info", t, sms, EP_KERNEL_DISPATCH, &config, &dispatch) != ncclSuccess) return;
  config.weights = 0;
  if (epPolicyMove("ep_info", t, sms, EP_KERNEL_COMBINE, &config, &combine) != ncclSuccess) return;
  infoFound(
      "  would launch",
      "blocks x threads: update %ux%u, dispatch %ux%u (%u send), combine %ux%u (%u send), for H=%d K=%d E=%d BF16",
      update.blocks, update.threads, dispatch.blocks, dispatch.threads, dispatch.pushBlocks, combine.blocks,
      combine.threads, combine.pushBlocks, SHOWN_HIDDEN, SHOWN_TOPK, SHOWN_EXPERTS);
}

static void peers(const epCuDriver *cu, int count) {
  for (int i = 0; i < count; i++) {
    char line[256] = "";
    size_t used = 0;
    epCuDevice a, b;
    for (int j = 0; j < count && used < sizeof(line); j++) {
      int can = 0;
      if (i == j || cu->deviceGet(&a, i) != EP_CU_SUCCESS || cu->deviceGet(&b, j) != EP_CU_SUCCESS ||
          cu->deviceCanAccessPeer(&can, a, b) != EP_CU_SUCCESS || !can)
        continue;
      used += (size_t)snprintf(line + used, sizeof(line) - used, "%s%d", used ? ", " : "", j);
    }
    char name[32];
    snprintf(name, sizeof(name), "GPU %d reaches", i);
    if (used)
      infoFound(name, "GPU %s by load and store", line);
    else if (count > 1)
      infoMissing(name, "no peer access", "this GPU cannot be in one scale-up domain with the others");
  }
}

void infoGpus(void) {
  const epCuDriver *cu;
  int count = 0;
  infoSection("CUDA");
  if (epCuDriverOpen(&cu) != ncclSuccess) {
    infoMissing("driver", epLastError(), "no GPU can be used; the emulated fabric and ep_precompile work");
    return;
  }
  infoFound("driver", "runs CUDA %d.%d", cu->version / 1000, cu->version % 1000 / 10);
  if (cu->deviceGetCount(&count) != EP_CU_SUCCESS || !count) {
    infoMissing("GPUs", "the driver shows none", "only the emulated fabric works");
    return;
  }
  for (int i = 0; i < count; i++) {
    char name[128] = "?", label[32];
    epCuDevice device;
    epTopology t;
    size_t bytes = 0;
    int major = 0, minor = 0;
    memset(&t, 0, sizeof(t));
    snprintf(label, sizeof(label), "GPU %d", i);
    if (cu->deviceGet(&device, i) != EP_CU_SUCCESS || cu->deviceGetName(name, sizeof(name), device) != EP_CU_SUCCESS ||
        cu->deviceTotalMem(&bytes, device) != EP_CU_SUCCESS ||
        cu->deviceGetAttribute(&major, EP_CU_ATTR_COMPUTE_CAPABILITY_MAJOR, device) != EP_CU_SUCCESS ||
        cu->deviceGetAttribute(&minor, EP_CU_ATTR_COMPUTE_CAPABILITY_MINOR, device) != EP_CU_SUCCESS ||
        cu->deviceGetAttribute(&t.numSms, EP_CU_ATTR_MULTIPROCESSOR_COUNT, device) != EP_CU_SUCCESS ||
        cu->deviceGetAttribute(&t.smemPerBlock, EP_CU_ATTR_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device) !=
            EP_CU_SUCCESS) {
      infoMissing(label, "the driver does not describe it", "it cannot be used");
      continue;
    }
    t.arch = 10 * major + minor;
    t.bulkCopies = t.arch >= 90;
    infoFound(label, "%s, sm_%d, %d SMs, %zu GiB, %d KiB shared memory a block%s", name, t.arch, t.numSms, bytes >> 30,
              t.smemPerBlock >> 10, t.bulkCopies ? ", bulk copies" : "");
    if (t.arch < 80)
      infoMissing(label, "compute capability below 8.0", "this GPU is too old for the kernels");
    else
      chosen(&t);
  }
  peers(cu, count);
}

void infoNccl(void) {
  const epNccl *nccl;
  infoSection("NCCL");
  if (epNcclOpen(1, &nccl) != ncclSuccess) {
    infoMissing(
        "library", epLastError(),
        "groups need the NCCL that made their communicator, 2.28 or newer; a framework that carries its own is fine");
    return;
  }
  infoFound("library", "%d.%d.%d, %s", nccl->version / 10000, nccl->version / 100 % 100, nccl->version % 100,
            nccl->path);
  if (nccl->getLsaDevicePointer)
    infoFound("peer addresses", "from ncclGetLsaDevicePointer");
  else
    infoFound("peer addresses", "read from the window itself: this NCCL is older than 2.29");
}

void infoJit(void) {
  epJit *jit;
  const char *why = "", *folder;
  infoSection("Kernels");
  if (epJitOpen(&jit) != ncclSuccess) {
    infoMissing("JIT", epLastError(), "no kernel can be compiled");
    return;
  }
  int version = epJitCompilerVersion(jit);
  if (version)
    infoFound("NVRTC", "%d.%d, %s", version / 1000, version % 1000 / 10, epJitCompilerPath(jit));
  else
    infoMissing("NVRTC", epLastError(),
                "kernels cannot be compiled or found in the cache, whose keys hold its version");
  folder = epJitCacheFolder(jit, &why);
  if (folder)
    infoFound("cache", "%s", folder);
  else
    infoMissing("cache", why, "every process compiles its kernels, about a second");
  infoFound("kernel sources", "%d files embedded", epKernelBundle.count);
  if (epNcclBundleCount)
    infoFound("NCCL headers", "embedded: %s", epNcclBundleVersions());
  else
    infoMissing("NCCL headers", "none were found at build time", "one scale-up domain works; several will need them");
  epJitClose(jit);
}
