/* Generates the few lines that specialise a kernel. Everything else is a fixed header, so a configuration's source can
 * be read at a glance, and its constants are the only thing that differs between two of them. */
#include "source.h"

#include <stdio.h>
#include <stdlib.h>

#include "fail.h"
#include "hybrid_ll_layout.h"
#include "jit.h"
#include "mask_layout.h"

static const struct {
  const char *header, *function, *entry, *args;
  size_t argBytes;
} kernels[EP_KERNEL_COUNT] = {
    [EP_KERNEL_UPDATE] = {"update.h", "ep_update", "ep_update_kernel", "epUpdateArgs", sizeof(epUpdateArgs)},
    [EP_KERNEL_DISPATCH] = {"dispatch.h", "ep_dispatch", "ep_dispatch_kernel", "epDispatchArgs",
                            sizeof(epDispatchArgs)},
    [EP_KERNEL_COMBINE] = {"combine.h", "ep_combine", "ep_combine_kernel", "epCombineArgs", sizeof(epCombineArgs)},
    [EP_KERNEL_LL_UPDATE] = {"ll_update.h", "ep_ll_update", "ep_ll_update_kernel", "epLlUpdateArgs",
                             sizeof(epLlUpdateArgs)},
    [EP_KERNEL_LL_DISPATCH] = {"ll_dispatch.h", "ep_ll_dispatch", "ep_ll_dispatch_kernel", "epLlDispatchArgs",
                               sizeof(epLlDispatchArgs)},
    [EP_KERNEL_LL_COMBINE] = {"ll_combine.h", "ep_ll_combine", "ep_ll_combine_kernel", "epLlCombineArgs",
                              sizeof(epLlCombineArgs)},
    [EP_KERNEL_HYBRID_UPDATE] = {"hybrid_update.h", "ep_hybrid_update", "ep_hybrid_update_kernel", "epHybridUpdateArgs",
                                 sizeof(epHybridUpdateArgs)},
    [EP_KERNEL_HYBRID_DISPATCH] = {"hybrid_dispatch.h", "ep_hybrid_dispatch", "ep_hybrid_dispatch_kernel",
                                   "epHybridDispatchArgs", sizeof(epHybridDispatchArgs)},
    [EP_KERNEL_HYBRID_COMBINE] = {"hybrid_combine.h", "ep_hybrid_combine", "ep_hybrid_combine_kernel",
                                  "epHybridCombineArgs", sizeof(epHybridCombineArgs)},
    [EP_KERNEL_HYBRID_LL_DISPATCH] = {"hybrid_ll_dispatch.h", "ep_hybrid_ll_dispatch", "ep_hybrid_ll_dispatch_kernel",
                                      "epHybridLlDispatchArgs", sizeof(epHybridLlDispatchArgs)},
    [EP_KERNEL_HYBRID_LL_COMBINE] = {"hybrid_ll_combine.h", "ep_hybrid_ll_combine", "ep_hybrid_ll_combine_kernel",
                                     "epHybridLlCombineArgs", sizeof(epHybridLlCombineArgs)},
    [EP_KERNEL_HYBRID_MASK] = {"rail_meet.h", "ep_mask", "ep_mask_kernel", "epMaskArgs", sizeof(epMaskArgs)},
    [EP_KERNEL_MASK] = {"mask_meet.h", "ep_mask", "ep_mask_kernel", "epMaskArgs", sizeof(epMaskArgs)},
};

const char *epJitEntryName(int kernelId) {
  return kernelId >= 0 && kernelId < EP_KERNEL_COUNT ? kernels[kernelId].entry : "";
}

ncclResult_t epJitSource(int kernelId, const epConfig *config, int arch, char **out) {
  if (kernelId < 0 || kernelId >= EP_KERNEL_COUNT)
    return epFail(ncclInternalError, "kernel %d is unknown: there are %d", kernelId, (int)EP_KERNEL_COUNT);
  if (config->bug)
    return epFail(ncclInvalidArgument, "planted fault %u: GPUs compile without faults only", config->bug);
  if (config->bulk && arch < 90)
    return epFail(ncclInternalError, "bulk copies asked for on sm_%d: they need sm_90 or newer", arch);
  if (config->threads == 0 || config->threads % 32 || config->threads > 1024)
    return epFail(ncclInternalError, "%u threads a block: must be a multiple of 32, at most 1024", config->threads);

  char fields[1536];
  size_t used = 0;
#define X(name)                                                                                                      \
  if (used < sizeof(fields))                                                                                         \
    used += (size_t)snprintf(fields + used, sizeof(fields) - used, "  static constexpr uint32_t " #name " = %uu;\n", \
                             config->name);
  EP_CONFIG_FIELDS(X)
#undef X
  if (used >= sizeof(fields))
    return epFail(ncclInternalError, "a configuration's fields do not fit %zu bytes", sizeof(fields));

  static const char *const format = "%s#include \"%s\"\n"
                                    "struct Cfg {\n"
                                    "%s"
                                    "};\n"
                                    "static_assert(sizeof(%s) == %zu, \"host and device disagree\");\n"
                                    "extern \"C\" __global__ void __launch_bounds__(Cfg::threads, 1)\n"
                                    "%s(const __grid_constant__ %s a) {\n"
                                    "  %s(Cfg{}, a);\n"
                                    "}\n";
  size_t room = 3072;
  char *text = malloc(room);
  if (!text) return epFail(ncclSystemError, "out of memory: %zu bytes for a kernel's source", room);
  int n = snprintf(text, room, format, config->profile ? "#define EP_PROFILE 1\n" : "", kernels[kernelId].header,
                   fields, kernels[kernelId].args, kernels[kernelId].argBytes, kernels[kernelId].entry,
                   kernels[kernelId].args, kernels[kernelId].function);
  if (n < 0 || (size_t)n >= room) {
    free(text);
    return epFail(ncclInternalError, "a kernel's source does not fit %zu bytes", room);
  }
  *out = text;
  return ncclSuccess;
}
