// Compiles device/*.h with EP_EMU: the same text that the GPU runs, with the configuration read at run time.
#define EP_EMU 1
#include "kernels.h"

#include <cstring>

#include "update.h"

#include "dispatch.h"

#include "combine.h"

#include "ll_update.h"

#include "ll_dispatch.h"

#include "ll_combine.h"

#include "hybrid_update.h"

#include "hybrid_dispatch.h"

#include "hybrid_combine.h"

#include "hybrid_ll_dispatch.h"

#include "hybrid_ll_combine.h"

#include "rail_meet.h"

namespace emu {

static const char *const names[EP_KERNEL_COUNT] = {
    "update",        "dispatch",        "combine",        "ll_update",          "ll_dispatch",       "ll_combine",
    "hybrid_update", "hybrid_dispatch", "hybrid_combine", "hybrid_ll_dispatch", "hybrid_ll_combine", "mask",
    "mask"};

const char *kernelName(int id) { return id >= 0 && id < EP_KERNEL_COUNT ? names[id] : "?"; }

template <class Args, class Kernel>
static std::function<void()> bind(Kernel kernel, const epConfig &config, const void *args, size_t bytes) {
  if (bytes != sizeof(Args)) return {};
  Args copy;
  memcpy(&copy, args, sizeof copy);
  return [kernel, config, copy] { kernel(config, copy); };
}

std::function<void()> kernelBody(int id, const epConfig &config, const void *args, size_t bytes) {
  switch (id) {
  case EP_KERNEL_UPDATE:
    return bind<epUpdateArgs>([](const epConfig &c, const epUpdateArgs &a) { ep_update(c, a); }, config, args, bytes);
  case EP_KERNEL_DISPATCH:
    return bind<epDispatchArgs>([](const epConfig &c, const epDispatchArgs &a) { ep_dispatch(c, a); }, config, args,
                                bytes);
  case EP_KERNEL_COMBINE:
    return bind<epCombineArgs>([](const epConfig &c, const epCombineArgs &a) { ep_combine(c, a); }, config, args,
                               bytes);
  case EP_KERNEL_LL_UPDATE:
    return bind<epLlUpdateArgs>([](const epConfig &c, const epLlUpdateArgs &a) { ep_ll_update(c, a); }, config, args,
                                bytes);
  case EP_KERNEL_LL_DISPATCH:
    return bind<epLlDispatchArgs>([](const epConfig &c, const epLlDispatchArgs &a) { ep_ll_dispatch(c, a); }, config,
                                  args, bytes);
  case EP_KERNEL_LL_COMBINE:
    return bind<epLlCombineArgs>([](const epConfig &c, const epLlCombineArgs &a) { ep_ll_combine(c, a); }, config, args,
                                 bytes);
  case EP_KERNEL_HYBRID_UPDATE:
    return bind<epHybridUpdateArgs>([](const epConfig &c, const epHybridUpdateArgs &a) { ep_hybrid_update(c, a); },
                                    config, args, bytes);
  case EP_KERNEL_HYBRID_DISPATCH:
    return bind<epHybridDispatchArgs>(
        [](const epConfig &c, const epHybridDispatchArgs &a) { ep_hybrid_dispatch(c, a); }, config, args, bytes);
  case EP_KERNEL_HYBRID_COMBINE:
    return bind<epHybridCombineArgs>([](const epConfig &c, const epHybridCombineArgs &a) { ep_hybrid_combine(c, a); },
                                     config, args, bytes);
  case EP_KERNEL_HYBRID_LL_DISPATCH:
    return bind<epHybridLlDispatchArgs>(
        [](const epConfig &c, const epHybridLlDispatchArgs &a) { ep_hybrid_ll_dispatch(c, a); }, config, args, bytes);
  case EP_KERNEL_HYBRID_LL_COMBINE:
    return bind<epHybridLlCombineArgs>(
        [](const epConfig &c, const epHybridLlCombineArgs &a) { ep_hybrid_ll_combine(c, a); }, config, args, bytes);
  case EP_KERNEL_HYBRID_MASK:
  case EP_KERNEL_MASK:
    return bind<epMaskArgs>([](const epConfig &c, const epMaskArgs &a) { ep_mask(c, a); }, config, args, bytes);
  default:
    return {};
  }
}

} // namespace emu
