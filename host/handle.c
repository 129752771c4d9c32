/* Handles: the routing record's memory, whose it is, and what is known of what lies in it. */
#include <stdlib.h>
#include <string.h>

#include "fail.h"
#include "hybrid.h"
#include "low_latency.h"
#include "runtime.h"
#include "object.h"
#include "tensor.h"

uint32_t epLayoutKind(const struct ncclEpGroup *g, ncclEpLayout_t layout) {
  if (epIsLl(g))
    return layout == NCCL_EP_LAYOUT_RANK_MAJOR ? EP_LAYOUT_KIND_RANK_MAJOR : EP_LAYOUT_KIND_EXPERT_MAJOR_3D;
  return layout == NCCL_EP_LAYOUT_FLAT ? EP_LAYOUT_KIND_FLAT : EP_LAYOUT_KIND_EXPERT_MAJOR;
}

epRecordLayout epHandleRecordLayout(const struct ncclEpHandle *h) {
  const epShape *s = &h->group->shape;
  return epRecordLayoutOf(s->ranks, s->experts, h->topk, s->maxTokens);
}

ncclResult_t epHandleFind(const char *call, ncclEpHandle_t handle) {
  if (!handle || !epObjectExists(handle, EP_OBJECT_HANDLE))
    return epFail(ncclInvalidArgument, "%s: handle %p is not a handle: expected one that is not destroyed", call,
                  (void *)handle);
  if (!handle->group)
    return epFail(ncclInvalidArgument, "%s: the group of handle %p has been destroyed", call, (void *)handle);
  return ncclSuccess;
}

/* What HandleMemSize and InitHandle share: the layout, the alignment and K. */
static ncclResult_t epHandleCheck(const char *call, const struct ncclEpGroup *g, ncclEpLayout_t layout,
                                  const ncclEpHandleConfig_t *config, int topk) {
  if (epIsLl(g)) {
    ncclResult_t r = epLlHandleCheck(call, layout, config);
    if (r != ncclSuccess) return r;
  } else if (layout == NCCL_EP_LAYOUT_RANK_MAJOR)
    return epFail(ncclInvalidUsage,
                  "%s: layout is NCCL_EP_LAYOUT_RANK_MAJOR: high throughput has NCCL_EP_LAYOUT_FLAT and "
                  "NCCL_EP_LAYOUT_EXPERT_MAJOR",
                  call);
  if (!epIsLl(g) && layout != NCCL_EP_LAYOUT_FLAT && layout != NCCL_EP_LAYOUT_EXPERT_MAJOR)
    return epFail(ncclInvalidArgument, "%s: layout is %d: expected NCCL_EP_LAYOUT_FLAT or NCCL_EP_LAYOUT_EXPERT_MAJOR",
                  call, (int)layout);
  if (config->dispatch_output_per_expert_alignment > EP_MAX_ALIGN)
    return epFail(ncclInvalidArgument, "%s: dispatch_output_per_expert_alignment is %zu: expected at most %u", call,
                  config->dispatch_output_per_expert_alignment, EP_MAX_ALIGN);
  if (topk > (int)EP_MAX_TOPK)
    return epFail(ncclInvalidArgument, "%s: num_topk is %d: expected at most %u", call, topk, EP_MAX_TOPK);
  if (topk != -1 && (topk < 1 || topk > (int)g->shape.topk))
    return epFail(ncclInvalidArgument, "%s: num_topk is %d: expected 1 to the group's %u, or -1", call, topk,
                  g->shape.topk);
  return ncclSuccess;
}

static size_t epHandleBytes(const struct ncclEpGroup *g, int topk) {
  const epShape *s = &g->shape;
  uint32_t k = topk == -1 ? s->topk : (uint32_t)topk;
  if (epIsLl(g)) return epLlRecordBytes(g, k);
  if (epIsHybrid(g)) return epHybridRecordBytes(g, k);
  return (size_t)epRecordLayoutOf(s->ranks, s->experts, k, s->maxTokens).bytes;
}

ncclResult_t epHandleMemSize(ncclEpGroup_t group, ncclEpLayout_t layout, const ncclEpHandleConfig_t *config,
                             size_t *bytes, int topk) {
  static const char call[] = "ncclEpHandleMemSize";
  ncclResult_t r = epGroupFind(call, group);
  if (r == ncclSuccess && !bytes)
    r = epFail(ncclInvalidArgument, "%s: size_out is NULL: expected room for a size_t", call);
  if (r == ncclSuccess) r = epHandleCheck(call, group, layout, config, topk);
  if (r == ncclSuccess) *bytes = epHandleBytes(group, topk);
  return r;
}

static void epHandleLink(struct ncclEpGroup *g, struct ncclEpHandle *h) {
  pthread_mutex_lock(&g->lock);
  h->next = g->handles;
  if (h->next) h->next->previous = h;
  g->handles = h;
  pthread_mutex_unlock(&g->lock);
}

static void epHandleUnlink(struct ncclEpGroup *g, struct ncclEpHandle *h) {
  pthread_mutex_lock(&g->lock);
  if (h->next) h->next->previous = h->previous;
  if (h->previous)
    h->previous->next = h->next;
  else
    g->handles = h->next;
  pthread_mutex_unlock(&g->lock);
}

/* The caller's memory: a plain byte tensor that is large enough. */
static ncclResult_t epHandleMemory(const char *call, struct ncclEpHandle *h, const ncclEpTensor_t *memory) {
  const epArgName name = {call, "handle_mem"};
  void *dev = NULL;
  ncclResult_t r = epTensorCheck(name, memory, 1);
  if (r == ncclSuccess) r = epTensorType(name, memory, ncclUint8);
  if (r == ncclSuccess && memory->sizes[0] < h->recordBytes)
    r = epFail(ncclInvalidArgument, "%s: handle_mem has %zu bytes: expected at least %zu (ncclEpHandleMemSize)", call,
               memory->sizes[0], h->recordBytes);
  if (r == ncclSuccess) r = epTensorAddress(name, h->group->be, memory, EP_RECORD_ALIGN, &dev);
  if (r == ncclSuccess) h->record = dev;
  return r;
}

static ncclResult_t epHandleMake(const char *call, ncclEpHandle_t *out, struct ncclEpGroup *g, ncclEpLayout_t layout,
                                 const ncclEpHandleConfig_t *config, int topk, int fixed,
                                 const ncclEpTensor_t *memory) {
  struct ncclEpHandle *h = calloc(1, sizeof *h);
  void *dev = NULL;
  ncclResult_t r;
  if (!h) return epFail(ncclSystemError, "%s: out of host memory", call);
  h->group = g;
  h->layout = layout;
  h->align = (uint32_t)config->dispatch_output_per_expert_alignment;
  if (layout == NCCL_EP_LAYOUT_FLAT) h->align = 0; /* flat rows have no zones */
  h->topkRoom = topk == -1 ? g->shape.topk : (uint32_t)topk;
  h->topkFixed = fixed && topk != -1 ? (uint32_t)topk : 0;
  h->topk = topk == -1 ? 0 : (uint32_t)topk;
  h->recordBytes = epHandleBytes(g, topk);
  if (memory) {
    r = epHandleMemory(call, h, memory);
  } else {
    r = epRefuseCapture(call, g, NULL, "a handle with memory of its own cannot be made then");
    if (r == ncclSuccess) r = g->be->ops->alloc(g->be, &dev, h->recordBytes);
    h->record = dev;
    h->owned = r == ncclSuccess;
  }
  if (r == ncclSuccess) r = epCountsTake(g, h, h->owned);
  if (r == ncclSuccess && !epObjectAdd(h, EP_OBJECT_HANDLE))
    r = epFail(ncclSystemError, "%s: out of host memory", call);
  if (r != ncclSuccess) goto undo;
  epHandleLink(g, h);
  *out = h;
  return ncclSuccess;
undo:
  epCountsGive(g, h);
  if (h->owned) g->be->ops->free(g->be, h->record);
  free(h);
  return r;
}

ncclResult_t epHandleInit(ncclEpHandle_t *out, ncclEpGroup_t group, ncclEpLayout_t layout,
                          const ncclEpHandleConfig_t *config, int topk, const ncclEpTensor_t *memory) {
  static const char call[] = "ncclEpInitHandle";
  ncclResult_t r = epGroupFind(call, group);
  if (r == ncclSuccess && !out) r = epFail(ncclInvalidArgument, "%s: handle is NULL: expected room for a handle", call);
  if (r == ncclSuccess) r = epHandleCheck(call, group, layout, config, topk);
  if (r == ncclSuccess) r = epHandleMake(call, out, group, layout, config, topk, 1, memory);
  /* In the caller's memory it may be made while something is captured. */
  if (r == ncclSuccess && !memory && topk > 0) epAheadOfHandle(group, layout, (uint32_t)topk);
  return r;
}

ncclResult_t epHandleCreate(ncclEpHandle_t *out, ncclEpGroup_t group, ncclEpLayout_t layout, const ncclEpTensor_t *topk,
                            const ncclEpLayoutInfo_t *info, const ncclEpHandleConfig_t *config, cudaStream_t stream) {
  static const char call[] = "ncclEpCreateHandle";
  const epArgName name = {call, "topk_idx"};
  ncclEpHandle_t h = NULL;
  ncclResult_t r = epGroupFind(call, group);
  if (r == ncclSuccess && !out) r = epFail(ncclInvalidArgument, "%s: handle is NULL: expected room for a handle", call);
  if (r == ncclSuccess) r = epTensorCheck(name, topk, 2);
  if (r == ncclSuccess && (topk->sizes[1] < 1 || topk->sizes[1] > group->shape.topk))
    r = epFail(ncclInvalidArgument, "%s: topk_idx.sizes[1] is %zu: expected a top-k of 1 to the group's %u", call,
               topk->sizes[1], group->shape.topk);
  if (r == ncclSuccess) r = epHandleCheck(call, group, layout, config, (int)topk->sizes[1]);
  if (r == ncclSuccess) r = epRefuseCapture(call, group, stream, "a handle with memory of its own cannot be made then");
  if (r == ncclSuccess) r = epHandleMake(call, &h, group, layout, config, (int)topk->sizes[1], 0, NULL);
  if (r != ncclSuccess) return r;
  r = epUpdate(call, h, topk, info, 0, stream);
  if (r != ncclSuccess) {
    epHandleDestroy(h);
    return r;
  }
  *out = h;
  return ncclSuccess;
}

ncclResult_t epHandleOrphan(struct ncclEpHandle *h) {
  struct ncclEpGroup *g = h->group;
  ncclResult_t r = ncclSuccess;
  epHandleUnlink(g, h);
  epCountsGive(g, h);
  if (h->owned) r = g->be->ops->free(g->be, h->record);
  h->record = NULL;
  free(h->staged); /* its slot stays taken: peers may complete what this rank will not */
  h->staged = NULL;
  h->owned = 0;
  h->group = NULL;
  return r;
}

ncclResult_t epHandleDestroy(ncclEpHandle_t h) {
  ncclResult_t r = ncclSuccess;
  if (!h) return ncclSuccess;
  if (!epObjectRemove(h, EP_OBJECT_HANDLE))
    return epFail(ncclInvalidArgument,
                  "ncclEpHandleDestroy: handle %p is not a handle: expected one that is not "
                  "destroyed",
                  (void *)h);
  if (h->group) r = epHandleOrphan(h);
  free(h);
  return r;
}

/* Reads the header that another handle's update left in the caller's memory. */
static ncclResult_t epHandleRecognise(const char *call, struct ncclEpHandle *h) {
  const struct ncclEpGroup *g = h->group;
  uint32_t scaleUp = epIsHybrid(g) ? (uint32_t)g->topology.scaleUpRanks : 0;
  epRecordHeader head;
  ncclResult_t r = g->be->ops->copyToHost(g->be, &head, h->record, sizeof head);
  if (r != ncclSuccess) return r;
  if (head.magic != EP_RECORD_MAGIC || (head.version & 0xffff) != EP_RECORD_VERSION || !head.generation)
    return epFail(ncclInvalidUsage, "%s: handle_mem holds no routing record: call ncclEpUpdateHandle first", call);
  if (head.ranks != g->shape.ranks || head.experts != g->shape.experts || head.maxTokens != g->shape.maxTokens ||
      head.rank != (uint32_t)g->topology.rank || head.layout != epLayoutKind(g, h->layout))
    return epFail(ncclInvalidUsage,
                  "%s: handle_mem holds the record of another group or layout (rank %u of %u, %u experts, %u tokens, "
                  "layout kind %u): expected rank %d of %u, %u experts, %u tokens, layout kind %u",
                  call, head.rank, head.ranks, head.experts, head.maxTokens, head.layout, g->topology.rank,
                  g->shape.ranks, g->shape.experts, g->shape.maxTokens, epLayoutKind(g, h->layout));
  if (head.version != EP_HYBRID_VERSION(scaleUp))
    return epFail(
        ncclInvalidUsage,
        "%s: handle_mem holds the record of a group with scale-up domains of %u ranks: expected %u (0: one domain)",
        call, head.version >> 16, scaleUp);
  if (head.topk < 1 || head.topk > h->topkRoom || (h->topkFixed && head.topk != h->topkFixed))
    return epFail(ncclInvalidUsage, "%s: handle_mem holds a record with top-k %u: expected %s%u", call, head.topk,
                  h->topkFixed ? "" : "at most ", h->topkRoom);
  h->topk = head.topk;
  h->tokens = head.tokens;
  h->dispatched = head.generation >= EP_LL_DISPATCHED; /* of low latency */
  h->foreign = 1;
  return ncclSuccess;
}

ncclResult_t epHandleRouted(const char *call, struct ncclEpHandle *h, cudaStream_t stream) {
  const epBackendOps *ops = h->group->be->ops;
  int capturing = 0;
  ncclResult_t r = epUpdatePending(call, h, stream);
  if (r != ncclSuccess || h->updated || h->foreign) return r;
  if (h->owned)
    return epFail(ncclInvalidUsage, "%s: the handle has no routing yet: call ncclEpUpdateHandle first", call);
  r = ops->isCapturing(h->group->be, stream, &capturing);
  if (r == ncclSuccess && capturing && h->topk)
    return ncclSuccess; /* cannot look now: the caller's num_topk and word must do */
  if (r == ncclSuccess && capturing)
    r = epFail(ncclInvalidUsage,
               "%s: the stream is being captured: top-k of the record in handle_mem cannot be read then (give num_topk "
               "to ncclEpInitHandle)",
               call);
  if (r == ncclSuccess) r = ops->synchronize(h->group->be, stream); /* the update that writes it may be on its way */
  return r == ncclSuccess ? epHandleRecognise(call, h) : r;
}
