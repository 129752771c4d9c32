/* What a group is, what it would take, and its kernels ahead of time. */
#include <stdio.h>

#include "fail.h"
#include "hybrid.h"
#include "low_latency.h"
#include "masks.h"
#include "operation.h"
#include "runtime.h"
#include "sizes.h"
#include "tensor.h"

static unsigned long long epLlBlocks(const struct ncclEpGroup *g, int id) {
  epConfig c = epMoveConfig(g, EP_LAYOUT_KIND_RANK_MAJOR, g->shape.topk, g->shape.maxRowBytes, EP_DTYPE_BF16, 1);
  epGrid grid;
  id = id == EP_KERNEL_UPDATE     ? EP_KERNEL_LL_UPDATE
       : id == EP_KERNEL_DISPATCH ? EP_KERNEL_LL_DISPATCH
                                  : EP_KERNEL_LL_COMBINE;
  return epPolicyLl("ncclEpGetGroupProperties", &g->topology, g->sms, id, g->shape.maxTokens, &c, &grid) == ncclSuccess
             ? grid.blocks
             : 0;
}

static unsigned long long epBlocks(const struct ncclEpGroup *g, int id, uint32_t kind) {
  if (epIsLl(g)) return epLlBlocks(g, id);
  epConfig c = id == EP_KERNEL_UPDATE ? epUpdateConfig(g, kind, g->shape.topk, 8)
                                      : epMoveConfig(g, kind, g->shape.topk, g->shape.maxRowBytes, EP_DTYPE_BF16, 1);
  epGrid grid;
  ncclResult_t r = id == EP_KERNEL_UPDATE
                       ? epPolicyUpdate(&g->topology, g->sms, g->shape.maxTokens, &c, &grid)
                       : epPolicyMove("ncclEpGetGroupProperties", &g->topology, epCallSms(g, 0, id, &c), id, &c, &grid);
  return r == ncclSuccess ? grid.blocks : 0;
}

ncclResult_t epGroupProperties(ncclEpGroup_t g, ncclEpGroupProperties_t *p) {
  ncclResult_t r = epGroupFind("ncclEpGetGroupProperties", g);
  if (r != ncclSuccess) return r;
  p->ranks = g->topology.ranks;
  p->rank = g->topology.rank;
  p->scale_up_ranks = g->topology.scaleUpRanks;
  p->scale_up_rank = g->topology.scaleUpRank;
  p->scale_out_ranks = g->topology.scaleOutRanks;
  p->scale_out_rank = g->topology.scaleOutRank;
  p->hybrid = epIsHybrid(g);
  p->num_experts = (int)g->shape.experts;
  p->num_local_experts = (int)epLocals(g);
  p->num_sms_update = (int)epBlocks(g, EP_KERNEL_UPDATE, EP_LAYOUT_KIND_FLAT);
  p->num_sms_dispatch = (int)epBlocks(g, EP_KERNEL_DISPATCH, EP_LAYOUT_KIND_FLAT);
  p->num_sms_combine = (int)epBlocks(g, EP_KERNEL_COMBINE, EP_LAYOUT_KIND_FLAT);
  p->num_sms_dispatch_expert_major = (int)epBlocks(g, EP_KERNEL_DISPATCH, EP_LAYOUT_KIND_EXPERT_MAJOR);
  p->num_sms_combine_expert_major = (int)epBlocks(g, EP_KERNEL_COMBINE, EP_LAYOUT_KIND_EXPERT_MAJOR);
  p->max_in_flight = (int)g->maxInFlight;
  p->window_bytes = g->windowLayout.bytes;
  p->all_window_bytes = epMaskWindowBytes(g);
  for (unsigned i = 0; i < EP_MAX_IN_FLIGHT; i++)
    if (g->slots[i].ready) p->all_window_bytes += g->windowLayout.bytes;
  p->scratch_bytes = g->scratchLayout.bytes;
  p->timeout_ns = g->config.timeout_ns;
  p->gin_contexts = g->hybrid.layout.contexts;
  p->gin_signals = epIsHybrid(g) ? epHybridSignals(g, 0) : 0;
  p->queue_pairs = epIsHybrid(g) ? g->hybrid.layout.contexts * (uint32_t)(g->topology.scaleOutRanks - 1) : 0;
  snprintf(p->backend, sizeof p->backend, "%s", g->be->ops->name);
  return ncclSuccess;
}

static ncclResult_t epPrepareMove(const struct ncclEpGroup *g, const ncclEpPrepareConfig_t *c, int id, int weights,
                                  int fused, epWishes *wishes) {
  static const char call[] = "ncclEpPrepare";
  int combine = id == EP_KERNEL_COMBINE;
  ncclDataType_t type = combine ? c->combine_type : c->dispatch_type;
  uint32_t rowBytes = 0, dtype = EP_DTYPE_BYTES;
  epConfig kc;
  epGrid grid;
  ncclResult_t r = ncclSuccess;
  if (!epTypeBytes(type))
    r = epFail(ncclInvalidArgument, "%s: %s is %d: expected an ncclDataType_t", call,
               combine ? "combine_type" : "dispatch_type", (int)type);
  if (r == ncclSuccess && combine) r = epCombineType(call, "combine_type", type, &dtype);
  if (r == ncclSuccess) r = epRowBytes(call, g, "tokens", c->hidden, type, &rowBytes);
  if (r != ncclSuccess) return r;
  kc = epMoveConfig(g, epLayoutKind(g, c->layout), c->top_k, rowBytes, dtype, weights);
  if (!combine && c->scale_bytes) r = epScaleBytes(call, g, "scales", c->scale_bytes, rowBytes, &kc.scaleBytes);
  if (r == ncclSuccess && c->num_bias > 2)
    r = epFail(ncclInvalidArgument, "%s: num_bias is %u: expected at most 2", call, c->num_bias);
  if (r != ncclSuccess) return r;
  if (combine) kc.bias = c->num_bias;
  if (!combine && c->window_output) kc.direct = epMayGoDirect(g, c->layout);
  if (kc.direct && !epDirectPays(g, 0, &kc)) kc.direct = 0;
  if (fused) epMoveFused(&kc, epTypeBytes(c->index_type));
  r = epPolicyMove(call, &g->topology, epCallSms(g, 0, id, &kc), id, &kc, &grid);
  if (r == ncclSuccess && (kc.fused || !fused)) epWishAdd(wishes, id, &kc);
  return r;
}

static ncclResult_t epPrepareWhole(const struct ncclEpGroup *g, const ncclEpPrepareConfig_t *c, epWishes *out) {
  static const char call[] = "ncclEpPrepare";
  epConfig kc;
  epGrid grid;
  ncclResult_t r;
  out->count = 0;
  if (!epIsLl(g) && c->layout != NCCL_EP_LAYOUT_FLAT && c->layout != NCCL_EP_LAYOUT_EXPERT_MAJOR)
    return epFail(ncclInvalidArgument, "%s: layout is %d: expected NCCL_EP_LAYOUT_FLAT or NCCL_EP_LAYOUT_EXPERT_MAJOR",
                  call, (int)c->layout);
  if (c->top_k < 1 || c->top_k > g->shape.topk)
    return epFail(ncclInvalidArgument, "%s: top_k is %u: expected 1 to the group's %u", call, c->top_k, g->shape.topk);
  if (c->index_type != ncclInt64 && c->index_type != ncclInt32)
    return epFail(ncclInvalidArgument, "%s: index_type is %s: expected int64 or int32", call,
                  epTypeName(c->index_type));
  if (c->borrow_topk_idx != 0 && c->borrow_topk_idx != 1)
    return epFail(ncclInvalidArgument, "%s: borrow_topk_idx is %d: expected 0 or 1", call, c->borrow_topk_idx);
  if (c->backward != 0 && c->backward != 1)
    return epFail(ncclInvalidArgument, "%s: backward is %d: expected 0 or 1", call, c->backward);
  if (c->window_output != 0 && c->window_output != 1)
    return epFail(ncclInvalidArgument, "%s: window_output is %d: expected 0 or 1", call, c->window_output);
  if (epIsLl(g) && c->num_bias)
    return epFail(ncclInvalidUsage, "%s: num_bias is %u: expected 0: not supported yet in low latency", call,
                  c->num_bias);
  r = epCombineRecipe(call, "combine_quant", g, c->combine_quant);
  if (r != ncclSuccess) return r;
  if (epIsLl(g)) return epLlPrepareWishes(g, c, out);
  kc = epUpdateConfig(g, epLayoutKind(g, c->layout), c->top_k, epTypeBytes(c->index_type));
  r = epPolicyUpdate(&g->topology, g->sms, g->shape.maxTokens, &kc, &grid);
  if (r == ncclSuccess) epWishAdd(out, EP_KERNEL_UPDATE, &kc);
  for (int weights = 0; r == ncclSuccess && weights < 2; weights++) { /* forward: dispatch with, combine without */
    if (weights || c->backward) r = epPrepareMove(g, c, EP_KERNEL_DISPATCH, weights, 0, out);
    if (r == ncclSuccess && (!weights || c->backward)) r = epPrepareMove(g, c, EP_KERNEL_COMBINE, weights, 0, out);
  }
  if (r == ncclSuccess && c->borrow_topk_idx && !epIsHybrid(g)) r = epPrepareMove(g, c, EP_KERNEL_DISPATCH, 1, 1, out);
  return r;
}

ncclResult_t epPrepareWishes(const struct ncclEpGroup *g, const ncclEpPrepareConfig_t *c, epWishes *out) {
  ncclResult_t r = epPrepareWhole(g, c, out);
  if (r == ncclSuccess && c->in_flight) epWishParts(out);
  return r;
}

ncclResult_t epPrepare(ncclEpGroup_t g, const ncclEpPrepareConfig_t *c) {
  static const char call[] = "ncclEpPrepare";
  epWishes wishes;
  ncclResult_t r = epGroupFind(call, g);
  if (r == ncclSuccess) r = epPrepareWishes(g, c, &wishes);
  if (r == ncclSuccess && c->in_flight > g->maxInFlight)
    r = epFail(ncclInvalidArgument, "%s: in_flight is %u: expected at most max_in_flight, %u", call, c->in_flight,
               g->maxInFlight);
  if (r == ncclSuccess) r = epRefuseCapture(call, g, NULL, "kernels cannot be compiled then");
  if (r == ncclSuccess) r = epKernelCompileAll(g, &wishes);
  return r == ncclSuccess ? epSlotsOpen(call, g, c->in_flight, NULL) : r;
}

static ncclResult_t epAllWindows(uint32_t ranks, const ncclEpBufferSizeConfig_t *c, ncclEpBufferSize_t *sizes) {
  static const char call[] = "ncclEpCalculateBufferSize";
  uint32_t slots = 0;
  ncclResult_t r = epInFlightOf(call, "in_flight", c->in_flight, &slots);
  if (r == ncclSuccess && c->enable_mask != 0 && c->enable_mask != 1)
    r = epFail(ncclInvalidArgument, "%s: enable_mask is %d: expected 0 or 1", call, c->enable_mask);
  if (!c->enable_mask) slots = c->in_flight;
  sizes->all_window_bytes = slots * sizes->window_bytes +
                            (c->enable_mask ? epMaskWindowOf(sizes->window_bytes, ranks).bytes : sizes->window_bytes);
  return r;
}

ncclResult_t epBufferSize(ncclComm_t comm, const ncclEpBufferSizeConfig_t *config, ncclEpBufferSize_t *sizes) {
  static const ncclEpAllocConfig_t none;
  epBackend *be = NULL;
  epTopology topology;
  ncclResult_t r = epBackendOpen(comm, &none, &be);
  if (r != ncclSuccess) return r;
  r = be->ops->topology(be, &topology);
  if (r == ncclSuccess) r = calculate_ep_buffer_size((uint32_t)topology.ranks, config, sizes);
  if (r == ncclSuccess && topology.scaleOutRanks > 1) {
    epShape shape;
    r = epBufferShape("ncclEpCalculateBufferSize", (uint32_t)topology.ranks, config, &shape);
    if (r == ncclSuccess && config->low_latency)
      r = epHybridLlBufferSize(&topology, &shape, config->enable_mask, sizes);
    else if (r == ncclSuccess)
      epHybridBufferSize(&topology, &shape, config->enable_mask, sizes);
  }
  be->ops->destroy(be);
  return r == ncclSuccess ? epAllWindows((uint32_t)topology.ranks, config, sizes) : r;
}
