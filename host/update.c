/* ncclEpUpdateHandle: checks, and the launch of the update kernel. */
#include <string.h>

#include "fail.h"
#include "hybrid.h"
#include "low_latency.h"
#include "operation.h"
#include "runtime.h"
#include "tensor.h"

epConfig epConfigOf(const struct ncclEpGroup *g, uint32_t kind, uint32_t topk) {
  epConfig c;
  memset(&c, 0, sizeof c); /* compared as bytes */
  c.ranks = g->shape.ranks;
  c.experts = g->shape.experts;
  c.topk = topk;
  c.layout = kind;
  c.mask = g->config.enable_mask != 0;
  return c;
}

epConfig epUpdateConfig(const struct ncclEpGroup *g, uint32_t kind, uint32_t topk, uint32_t indexBytes) {
  epConfig c = epConfigOf(g, kind, topk);
  c.indexBytes = indexBytes;
  return c;
}

/* One optional counter of layout_info. */
static ncclResult_t epCounter(const char *call, const char *field, struct ncclEpGroup *g, const ncclEpTensor_t *t,
                              uint32_t extent, void **dev, uint32_t *wide) {
  const epArgName name = {call, field};
  ncclResult_t r;
  *dev = NULL;
  *wide = 0;
  if (!t) return ncclSuccess;
  r = epTensorCheck(name, t, 1);
  if (r == ncclSuccess) r = epTensorExtent(name, t, 0, extent, extent == 1 ? "a total" : "local experts");
  if (r == ncclSuccess && t->datatype != ncclInt32 && t->datatype != ncclInt64)
    r = epFail(ncclInvalidArgument, "%s: %s is %s: expected int32 or int64", call, field, epTypeName(t->datatype));
  if (r == ncclSuccess) {
    *wide = t->datatype == ncclInt64;
    r = epTensorAddress(name, g->be, t, epTypeBytes(t->datatype), dev);
  }
  return r;
}

static ncclResult_t epUpdateCounters(const char *call, const struct ncclEpHandle *h, const ncclEpLayoutInfo_t *info,
                                     epUpdateArgs *a) {
  struct ncclEpGroup *g = h->group;
  uint32_t locals = epLocals(g);
  ncclResult_t r;
  if (info->src_rank_counters)
    return epFail(ncclInvalidUsage,
                  "%s: layout_info.src_rank_counters is given: expected NULL in high throughput, where "
                  "ncclEpGetHostCounts has the rows of each source rank",
                  call);
  if (info->expert_offsets && h->layout == NCCL_EP_LAYOUT_FLAT)
    return epFail(ncclInvalidArgument, "%s: layout_info.expert_offsets is given: expected NULL in the flat layout",
                  call);
  r = epCounter(call, "layout_info.expert_counters", g, info->expert_counters, locals, &a->expertCounters,
                &a->expertCountersWide);
  if (r == ncclSuccess)
    r = epCounter(call, "layout_info.expert_offsets", g, info->expert_offsets, locals, &a->expertOffsets,
                  &a->expertOffsetsWide);
  if (r == ncclSuccess)
    r = epCounter(call, "layout_info.recv_total_counter", g, info->recv_total_counter, 1, &a->recvTotal,
                  &a->recvTotalWide);
  return r;
}

static ncclResult_t epUpdateIndices(const char *call, const struct ncclEpHandle *h, const ncclEpTensor_t *topk,
                                    epIndices *indices) {
  const epArgName name = {call, "topk_idx"};
  const struct ncclEpGroup *g = h->group;
  void *dev = NULL;
  ncclResult_t r = epTensorCheck(name, topk, 2);
  if (r == ncclSuccess && topk->datatype != ncclInt32 && topk->datatype != ncclInt64)
    r = epFail(ncclInvalidArgument, "%s: topk_idx is %s: expected int64 or int32", call, epTypeName(topk->datatype));
  if (r == ncclSuccess && topk->sizes[0] > g->shape.maxTokens)
    r = epFail(ncclInvalidArgument, "%s: topk_idx.sizes[0] is %zu: expected at most max_dispatch_tokens_per_rank, %u",
               call, topk->sizes[0], g->shape.maxTokens);
  if (r == ncclSuccess && h->topkFixed) r = epTensorExtent(name, topk, 1, h->topkFixed, "num_topk of ncclEpInitHandle");
  if (r == ncclSuccess && (topk->sizes[1] < 1 || topk->sizes[1] > h->topkRoom))
    r = epFail(ncclInvalidArgument, "%s: topk_idx.sizes[1] is %zu: expected a top-k of 1 to %u", call, topk->sizes[1],
               h->topkRoom);
  if (r == ncclSuccess) r = epTensorAddress(name, g->be, topk, epTypeBytes(topk->datatype), &dev);
  if (r == ncclSuccess)
    *indices = (epIndices){dev, (uint32_t)topk->sizes[0], (uint32_t)topk->sizes[1], epTypeBytes(topk->datatype)};
  return r;
}

void epUpdateIssued(struct ncclEpHandle *h, int capturing, cudaStream_t stream) {
  struct ncclEpGroup *g = h->group;
  pthread_mutex_lock(&g->lock);
  if (capturing)
    g->updatesCaptured = 1;
  else
    h->generation = ++g->updatesIssued;
  pthread_mutex_unlock(&g->lock);
  h->captured = capturing;
  h->stream = stream;
  h->pending.on = 0;
}

/* A launch of its own; `a` but for the blocks. */
static ncclResult_t epUpdateLaunch(const char *call, struct ncclEpHandle *h, const epIndices *indices, epUpdateArgs *a,
                                   cudaStream_t stream) {
  struct ncclEpGroup *g = h->group;
  epConfig config = epUpdateConfig(g, epLayoutKind(g, h->layout), indices->topk, indices->bytes);
  epGrid grid;
  epKernel *kernel;
  epLaunch launch;
  epIssue how = {0};
  int capturing = 0;
  ncclResult_t r = epPolicyUpdate(&g->topology, g->sms, indices->tokens, &config, &grid);
  if (r == ncclSuccess) r = epKernelGet(call, g, EP_KERNEL_UPDATE, &config, stream, &kernel);
  if (r == ncclSuccess) r = g->be->ops->isCapturing(g->be, stream, &capturing);
  if (r != ncclSuccess) return r;
  a->blocks = grid.blocks;
  launch = (epLaunch){grid.blocks, grid.threads, grid.smemBytes, a, sizeof *a};
  r = epStreamsBegin(g, &how, stream);
  if (r == ncclSuccess) r = epLaunchKernel(g, &g->hybrid, kernel, &launch, stream);
  if (r == ncclSuccess) r = epStreamsEnd(g, &how);
  if (r == ncclSuccess) epUpdateIssued(h, capturing, stream);
  return r;
}

ncclResult_t epUpdate(const char *call, ncclEpHandle_t h, const ncclEpTensor_t *topk, const ncclEpLayoutInfo_t *info,
                      int options, cudaStream_t stream) {
  int borrow = (options & EP_UPDATE_BORROW) != 0;
  struct ncclEpGroup *g;
  epUpdateArgs a;
  epIndices indices = {0};
  ncclResult_t r = epHandleFind(call, h);
  if (r != ncclSuccess) return r;
  g = h->group;
  memset(&a, 0, sizeof a);
  r = epGroupUsable(call, g);
  if (r == ncclSuccess) r = epStagedNone(call, h);
  if (r == ncclSuccess) r = epUpdateIndices(call, h, topk, &indices);
  if (r == ncclSuccess) h->adds = (options & EP_UPDATE_ADD) != 0;
  if (r == ncclSuccess && epIsLl(g)) return epLlUpdate(call, h, &indices, info, borrow, stream);
  if (r == ncclSuccess && info) r = epUpdateCounters(call, h, info, &a);
  if (h->adds) a.expertCountersWide |= EP_COUNTER_ADDS;
  if (r != ncclSuccess) return r;
  a.group = epGroupArgsOf(g);
  a.recordLayout = epRecordLayoutOf(g->shape.ranks, g->shape.experts, indices.topk, g->shape.maxTokens);
  a.record = h->record;
  a.topkIdx = indices.data;
  a.tokens = indices.tokens;
  a.align = h->align;
  a.budget = g->budget;
  a.hostCounts = (epHostCounts *)(void *)h->countsDev;
  if (!borrow || epIsHybrid(g)) {
    r = epUpdateLaunch(call, h, &indices, &a, stream);
    if (r != ncclSuccess) return r;
  } else {
    r = epStreamsMark(g, stream);
    if (r != ncclSuccess) return r;
    h->pending.on = 1;
    h->pending.indices = indices;
    h->pending.update = a;
    h->captured = 0;
    h->stream = stream;
  }
  h->updated = 1;
  h->topk = indices.topk;
  h->tokens = indices.tokens;
  return ncclSuccess;
}

ncclResult_t epUpdatePending(const char *call, struct ncclEpHandle *h, cudaStream_t stream) {
  ncclResult_t r;
  if (!h->pending.on) return ncclSuccess;
  r = epIsLl(h->group) ? epLlUpdateLaunch(call, h, &h->pending.indices, stream)
                       : epUpdateLaunch(call, h, &h->pending.indices, &h->pending.update, stream);
  if (r == ncclSuccess) h->pending.on = 0;
  return r;
}
