/* Launches of dispatch and combine, whole and in parts. */
#include "operation.h"

#include <stdlib.h>
#include <string.h>

#include "fail.h"
#include "hybrid.h"
#include "low_latency.h"

/* A staged operation: what its completion launches. */
struct epStaged {
  int on;
  unsigned slot;
  cudaStream_t stream; /* of the sending part */
  int kernelId;
  uint32_t contexts;
  epKernel *kernel; /* of the receiving part */
  epGrid grid;
  union {
    epDispatchArgs dispatch;
    epCombineArgs combine;
    epLlDispatchArgs llDispatch;
    epLlCombineArgs llCombine;
  } args;
};

#define EP_ARGS(type) \
  { sizeof(type), offsetof(type, group), offsetof(type, pushBlocks), offsetof(type, blocks) }
static const struct {
  size_t bytes, group, pushBlocks, blocks;
} places[EP_KERNEL_COUNT] = {[EP_KERNEL_DISPATCH] = EP_ARGS(epDispatchArgs),
                             [EP_KERNEL_COMBINE] = EP_ARGS(epCombineArgs),
                             [EP_KERNEL_LL_DISPATCH] = EP_ARGS(epLlDispatchArgs),
                             [EP_KERNEL_LL_COMBINE] = EP_ARGS(epLlCombineArgs)};

static int isDispatch(int kernelId) { return kernelId == EP_KERNEL_DISPATCH || kernelId == EP_KERNEL_LL_DISPATCH; }

/* The launch of a part. No block of the sending part waits for one of the receiving part, so each may have all the SMs that the
 * whole would divide between them; senders take no more than they would have had, because the SMs they leave are what staging is for. */
static epGrid gridOf(const struct ncclEpGroup *g, const epOperation *op, uint32_t part) {
  epGrid grid = op->grid;
  unsigned clerk = op->kernelId == EP_KERNEL_LL_DISPATCH; /* both parts have one */
  if (part == EP_PART_RECEIVE) {
    if (epIsLl(g)) grid.blocks -= grid.pushBlocks;
    grid.pushBlocks = 0;
  } else {
    grid.blocks = grid.pushBlocks;
    if (epIsLl(g)) grid.blocks += g->shape.ranks > 1 || clerk ? 1 + clerk : 0; /* and who greets */
    if (epIsHybrid(g) && op->kernelId == EP_KERNEL_COMBINE)                    /* forwarders send, too */
      grid.blocks += epChannelBlocks(g->hybrid.layout.channels, op->config.threads);
  }
  return grid;
}

static ncclResult_t launchOn(struct ncclEpGroup *g, unsigned slot, int kernelId, uint32_t contexts, epKernel *kernel,
                             const epGrid *grid, void *args, cudaStream_t stream) {
  uint8_t *at = args;
  const epGroupArgs group = epSlotArgs(g, slot);
  const uint32_t pushBlocks = grid->pushBlocks, blocks = grid->blocks;
  epLaunch launch = {grid->blocks, grid->threads, grid->smemBytes, args, places[kernelId].bytes};
  memcpy(at + places[kernelId].group, &group, sizeof group);
  memcpy(at + places[kernelId].pushBlocks, &pushBlocks, sizeof pushBlocks);
  memcpy(at + places[kernelId].blocks, &blocks, sizeof blocks);
  const epHybridGroup *network = epSlotNetwork(g, slot);
  epHybridGroup fewer;
  if (contexts) {
    fewer = *network;
    fewer.layout.contexts = contexts;
    network = &fewer;
  }
  return epLaunchKernel(g, network, kernel, &launch, stream);
}

static ncclResult_t partGet(const char *call, struct ncclEpGroup *g, const epOperation *op, uint32_t part,
                            cudaStream_t stream, epKernel **kernel) {
  epConfig config = op->config;
  config.part = part;
  return epKernelGet(call, g, op->kernelId, &config, stream, kernel);
}

/* Only waiting for an event or recording it tells that it is none, and by then work is queued: it goes on to its end, so that this rank
 * stays in step with the others, and the caller is told. */
static ncclResult_t notAnEvent(const char *call, const char *name, cudaEvent_t event, ncclResult_t r,
                               const char *what) {
  return r == ncclSuccess
             ? r
             : epFail(r, "%s: %s is %p: expected an event of this device (%s)", call, name, (void *)event, what);
}

static ncclResult_t ends(const char *call, struct ncclEpGroup *g, const epIssue *how) {
  return notAnEvent(call, "done_event", how->done, epStreamsEnd(g, how),
                    "the operation is under way all the same: do not repeat it");
}

/* Everything is compiled before the first thing is queued. */
static ncclResult_t runWhole(const char *call, struct ncclEpHandle *h, const epOperation *op, epIssue *how,
                             cudaStream_t stream) {
  struct ncclEpGroup *g = h->group;
  epKernel *kernel;
  ncclResult_t r = epKernelGet(call, g, op->kernelId, &op->config, stream, &kernel);
  if (r == ncclSuccess) r = epStreamsBegin(g, how, stream);
  if (r == ncclSuccess && op->route) r = epUpdatePending(call, h, how->work);
  if (r == ncclSuccess) r = launchOn(g, 0, op->kernelId, op->contexts, kernel, &op->grid, op->args, how->work);
  return r == ncclSuccess ? ends(call, g, how) : r;
}

static ncclResult_t partsGet(const char *call, struct ncclEpGroup *g, const epOperation *op, cudaStream_t stream,
                             epKernel **send, epKernel **receive) {
  ncclResult_t r = partGet(call, g, op, EP_PART_SEND, stream, send);
  return r == ncclSuccess ? partGet(call, g, op, EP_PART_RECEIVE, stream, receive) : r;
}

/* One rank alone sends nothing: its sending part has no blocks. */
static ncclResult_t sendPart(const char *call, struct ncclEpHandle *h, unsigned slot, const epOperation *op,
                             epKernel *kernel, epIssue *how, cudaStream_t stream) {
  struct ncclEpGroup *g = h->group;
  epGrid grid = gridOf(g, op, EP_PART_SEND);
  ncclResult_t r = epStreamsBegin(g, how, stream);
  if (r == ncclSuccess && op->route) r = epUpdatePending(call, h, how->work);
  if (r == ncclSuccess && grid.blocks)
    r = launchOn(g, slot, op->kernelId, op->contexts, kernel, &grid, op->args, how->work);
  return r;
}

/* Both parts now, on the slot of whole operations, because of an event between them. */
static ncclResult_t runParts(const char *call, struct ncclEpHandle *h, const epOperation *op, epIssue *how,
                             cudaStream_t stream) {
  struct ncclEpGroup *g = h->group;
  epGrid grid = gridOf(g, op, EP_PART_RECEIVE);
  epKernel *send, *receive;
  ncclResult_t r = partsGet(call, g, op, stream, &send, &receive), wait, end;
  if (r == ncclSuccess) r = sendPart(call, h, 0, op, send, how, stream);
  if (r != ncclSuccess) return r;
  wait = g->be->ops->streamWait(g->be, how->work, how->epilogue);
  r = launchOn(g, 0, op->kernelId, op->contexts, receive, &grid, op->args, how->work);
  if (r != ncclSuccess) return r;
  end = ends(call, g, how);
  wait = notAnEvent(call, "ext_config.epilogue_event", how->epilogue, wait,
                    "the operation is under way and does not wait for it: do not repeat it");
  return wait == ncclSuccess ? end : wait;
}

static ncclResult_t runStaged(const char *call, struct ncclEpHandle *h, const epOperation *op, epIssue *how,
                              cudaStream_t stream) {
  struct ncclEpGroup *g = h->group;
  struct epStaged *s = h->staged;
  epKernel *send;
  ncclResult_t r;
  if (!s) s = h->staged = calloc(1, sizeof *s);
  if (!s) return epFail(ncclSystemError, "%s: out of host memory", call);
  r = partsGet(call, g, op, stream, &send, &s->kernel);
  if (r == ncclSuccess) r = epSlotTake(call, g, stream, &s->slot);
  if (r != ncclSuccess) return r;
  r = sendPart(call, h, s->slot, op, send, how, stream);
  if (r != ncclSuccess) {
    epSlotGive(g, s->slot);
    return r;
  }
  s->kernelId = op->kernelId;
  s->contexts = op->contexts;
  s->stream = how->work;
  s->grid = gridOf(g, op, EP_PART_RECEIVE);
  memcpy(&s->args, op->args, places[op->kernelId].bytes);
  s->on = 1;
  return ends(call, g, how);
}

ncclResult_t epStagedNone(const char *call, const struct ncclEpHandle *h) {
  if (!h->staged || !h->staged->on) return ncclSuccess;
  return epFail(ncclInvalidUsage, "%s: a staged %s of the handle is in flight: expected ncclEpComplete before", call,
                isDispatch(h->staged->kernelId) ? "dispatch" : "combine");
}

ncclResult_t epStagedNowhere(const char *call, struct ncclEpGroup *g) {
  unsigned count = 0;
  pthread_mutex_lock(&g->lock);
  for (const struct ncclEpHandle *h = g->handles; h; h = h->next) count += h->staged && h->staged->on;
  pthread_mutex_unlock(&g->lock);
  if (!count) return ncclSuccess;
  return epFail(ncclInvalidUsage, "%s: %u staged operation%s of the group %s in flight: expected ncclEpComplete before",
                call, count, count == 1 ? "" : "s", count == 1 ? "is" : "are");
}

int epInParts(const epIssue *how) { return how->sendOnly || how->epilogue; }

ncclResult_t epOperationRun(const char *call, struct ncclEpHandle *h, const epOperation *op, epIssue *how,
                            cudaStream_t stream) {
  if (how->sendOnly) return runStaged(call, h, op, how, stream);
  return (how->epilogue ? runParts : runWhole)(call, h, op, how, stream);
}

ncclResult_t epOperationComplete(const char *call, struct ncclEpHandle *h, epIssue *how, cudaStream_t stream) {
  struct ncclEpGroup *g;
  struct epStaged *s;
  int on;
  ncclResult_t r = epHandleFind(call, h);
  if (r == ncclSuccess) r = epIssueCheck(call, "config", how);
  if (r != ncclSuccess) return r;
  g = h->group;
  s = h->staged;
  on = s && s->on;
  if (on) r = epGroupUsable(call, g);
  if (r == ncclSuccess) r = epStreamsBegin(g, how, stream);
  if (r == ncclSuccess && on) r = epStreamsJoin(g, how, s->stream);
  if (r == ncclSuccess && on)
    r = launchOn(g, s->slot, s->kernelId, s->contexts, s->kernel, &s->grid, &s->args, how->work);
  if (r != ncclSuccess) return r;
  if (on) {
    s->on = 0;
    epSlotGive(g, s->slot);
    if (s->kernelId == EP_KERNEL_LL_DISPATCH) h->dispatched = 1;
  }
  return ends(call, g, how);
}

void epWishParts(epWishes *wishes) {
  int whole = wishes->count;
  for (int i = 0; i < whole; i++) {
    epConfig config = wishes->wish[i].config;
    int id = wishes->wish[i].id;
    if (!places[id].bytes || config.fused) continue;
    for (config.part = EP_PART_SEND; config.part <= EP_PART_RECEIVE; config.part++) epWishAdd(wishes, id, &config);
  }
}
