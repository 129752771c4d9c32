/* ncclEpMaskQuery, ncclEpMaskUpdate, ncclEpMaskClean: checks, and launches of the mask kernel. */
#include "masks.h"

#include <string.h>

#include "fail.h"
#include "hybrid.h"
#include "low_latency.h"
#include "mask_layout.h"
#include "operation.h"

uint64_t epMaskWindowBytes(const struct ncclEpGroup *g) {
  return g->config.enable_mask ? epMaskWindowOf(g->windowLayout.bytes, g->shape.ranks).bytes : g->windowLayout.bytes;
}

uint64_t epMaskScratchBytes(const struct ncclEpGroup *g) {
  uint64_t bytes = g->scratchLayout.bytes;
  if (g->config.enable_mask) bytes = epMaskScratchOf(bytes, g->shape.ranks, g->shape.experts).bytes;
  if (g->config.enable_mask && epIsHybrid(g))
    bytes = epRailMasksOf(bytes, (uint32_t)g->topology.scaleOutRanks, g->hybrid.layout.channels).bytes;
  return bytes;
}

/* How kernels on any slot get at the first network; its signals of masks lie behind those that all slots have. */
static ncclResult_t epMaskNetwork(struct ncclEpGroup *g, uint64_t scratchEnd) {
  uint32_t domains = (uint32_t)g->topology.scaleOutRanks;
  epRailState state = {g->hybrid.gin.comm, g->hybrid.gin.window, epHybridSignals(g, 1), 0};
  if (!epIsHybrid(g)) return ncclSuccess;
  return g->be->ops->copyToDevice(g->be, (uint8_t *)g->scratch + epRailMasksOf(scratchEnd, domains, 0).state, &state,
                                  sizeof state);
}

ncclResult_t epMaskWindows(const char *call, struct ncclEpGroup *g) {
  epMaskScratch s = epMaskScratchOf(g->scratchLayout.bytes, g->shape.ranks, g->shape.experts);
  ncclResult_t r = g->be->ops->copyToDevice(g->be, (uint8_t *)g->scratch + s.windows, g->windows,
                                            g->shape.ranks * sizeof *g->windows);
  if (r == ncclSuccess) r = epMaskNetwork(g, s.bytes);
  return r == ncclSuccess ? epSlotsOpen(call, g, g->maxInFlight, NULL) : r;
}

/* A thread for each rank. */
static epConfig epMaskConfig(const struct ncclEpGroup *g) {
  epConfig c;
  memset(&c, 0, sizeof c);
  c.ranks = g->shape.ranks;
  c.experts = g->shape.experts;
  c.threads = (g->shape.ranks + 31) / 32 * 32;
  c.mask = 1;
  if (epIsHybrid(g)) c.scaleUp = (uint32_t)g->topology.scaleUpRanks;
  return c;
}

static ncclResult_t epMaskLaunch(const char *call, struct ncclEpGroup *g, epMaskArgs *a, cudaStream_t stream) {
  epConfig config = epMaskConfig(g);
  epLaunch launch = {1, config.threads, epMaskSmem(config.ranks), a, sizeof *a};
  epKernel *kernel;
  ncclResult_t r = epKernelGet(call, g, EP_KERNEL_MASK, &config, stream, &kernel);
  a->group = epGroupArgsOf(g);
  return r == ncclSuccess ? g->be->ops->launch(g->be, kernel, &launch, stream) : r;
}

static ncclResult_t epMaskFind(const char *call, ncclEpGroup_t g) {
  ncclResult_t r = epGroupFind(call, g);
  if (r == ncclSuccess && !g->config.enable_mask)
    r = epFail(ncclInvalidUsage, "%s: the group has no masks: expected one made with enable_mask", call);
  return r == ncclSuccess ? epGroupUsable(call, g) : r;
}

ncclResult_t epMaskOpen(const char *call, struct ncclEpGroup *g) {
  epConfig config = epMaskConfig(g);
  epKernel *kernel;
  if (!g->config.enable_mask) return ncclSuccess;
  return epKernelGet(call, g, EP_KERNEL_MASK, &config, NULL, &kernel);
}

ncclResult_t epMaskQuery(ncclEpGroup_t g, int *out, cudaStream_t stream) {
  static const char call[] = "ncclEpMaskQuery";
  epMaskArgs a = {.op = EP_MASK_QUERY};
  int yes = 0;
  ncclResult_t r = epMaskFind(call, g);
  if (r == ncclSuccess && (!out || (uintptr_t)out % sizeof *out))
    r = epFail(ncclInvalidArgument, "%s: mask_status is %p: expected device memory for an int of each of %u ranks",
               call, (void *)out, g->shape.ranks);
  if (r == ncclSuccess) r = g->be->ops->isDeviceAddress(g->be, out, &yes);
  if (r == ncclSuccess && !yes)
    r = epFail(ncclInvalidArgument, "%s: mask_status is %p: expected memory of the group's device", call, (void *)out);
  a.out = out;
  return r == ncclSuccess ? epMaskLaunch(call, g, &a, stream) : r;
}

ncclResult_t epMaskUpdate(ncclEpGroup_t g, const int *mask, cudaStream_t stream) {
  static const char call[] = "ncclEpMaskUpdate";
  epMaskArgs a = {.op = EP_MASK_SET};
  ncclResult_t r = epMaskFind(call, g);
  if (r == ncclSuccess && !mask)
    r = epFail(ncclInvalidArgument, "%s: mask is NULL: expected an int of each of %u ranks", call, g->shape.ranks);
  for (uint32_t i = 0; r == ncclSuccess && i < g->shape.ranks; i++) {
    if (mask[i] != 0 && mask[i] != 1)
      r = epFail(ncclInvalidArgument, "%s: mask[%u] is %d: expected 0 or 1", call, i, mask[i]);
    else if (!mask[i] && (int)i == g->topology.rank)
      r = epFail(ncclInvalidArgument, "%s: mask[%u] is 0, and that is this rank: expected 1", call, i);
    else if (mask[i])
      a.keep[i / 32] |= 1u << i % 32;
  }
  return r == ncclSuccess ? epMaskLaunch(call, g, &a, stream) : r;
}

ncclResult_t epMaskClean(ncclEpGroup_t g, cudaStream_t stream) {
  static const char call[] = "ncclEpMaskClean";
  epMaskArgs a = {.op = EP_MASK_CLEAN};
  ncclResult_t r = epMaskFind(call, g);
  if (r == ncclSuccess) r = epStagedNowhere(call, g);
  if (r == ncclSuccess) r = epRefuseCapture(call, g, stream, "it waits for the other ranks, on the host too");
  if (r != ncclSuccess) return r;
  a.result = (epMaskResult *)(void *)(g->sharedDev + offsetof(epGroupShared, meeting));
  if (epIsLl(g)) {
    epLlWindowLayout w = epLlWindowLayoutOf(g->shape);
    a.lowLatency = 1;
    a.units = w.stage;
    a.halfBytes = w.rowStride * (g->shape.ranks - 1ull) * g->shape.maxTokens;
  }
  a.slots = 1 + g->maxInFlight;
  for (unsigned i = 0; i < a.slots; i++) {
    a.windows[i] = epSlotArgs(g, i).windows;
    a.networks[i][0] = epSlotNetwork(g, i)->gin.comm, a.networks[i][1] = epSlotNetwork(g, i)->gin.window;
  }
  a.channels = g->hybrid.layout.channels, a.contexts = g->hybrid.layout.groupContexts;
  r = epMaskLaunch(call, g, &a, stream);
  if (r == ncclSuccess) r = g->be->ops->synchronize(g->be, stream);
  if (r != ncclSuccess) return r;
  epSlotsGiveAll(g);
  pthread_mutex_lock(&g->lock); /* the kernels' generations have moved */
  g->updatesIssued = __atomic_load_n(&g->shared->meeting.updateGen, __ATOMIC_ACQUIRE);
  pthread_mutex_unlock(&g->lock);
  return epGroupUsable(call, g);
}

ncclResult_t epMaskLeave(struct ncclEpGroup *g) {
  epMaskArgs a = {.op = EP_MASK_LEAVE, .slots = 1};
  ncclResult_t r = epMaskLaunch("ncclEpGroupDestroy", g, &a, NULL);
  return r == ncclSuccess ? g->be->ops->synchronize(g->be, NULL) : r;
}
