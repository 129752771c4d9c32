/* ncclEpDispatch: checks, and the launch of the dispatch kernel. */
#include <string.h>

#include "fail.h"
#include "runtime.h"
#include "tensor.h"

static const char call[] = "ncclEpDispatch";

epConfig epMoveConfig(const struct ncclEpGroup *g, uint32_t kind, uint32_t topk, uint32_t rowBytes, uint32_t dtype,
                      int weights) {
  epConfig c;
  memset(&c, 0, sizeof c);
  c.ranks = g->shape.ranks;
  c.experts = g->shape.experts;
  c.topk = topk;
  c.rowBytes = rowBytes;
  c.dtype = dtype;
  c.layout = kind;
  c.weights = weights != 0;
  return c;
}

ncclResult_t epRowBytes(const char *name, const struct ncclEpGroup *group, const char *tensor, uint64_t hidden,
                        ncclDataType_t type, uint32_t *rowBytes) {
  uint64_t bytes = hidden * epTypeBytes(type);
  if (hidden < 1 || hidden > EP_MAX_ROW_BYTES || bytes % EP_ROW_ALIGN || bytes > group->shape.maxRowBytes)
    return epFail(ncclInvalidArgument,
                  "%s: a row of %s has %llu bytes (%llu %s): expected a multiple of %u, at most max_token_bytes, %u",
                  name, tensor, (unsigned long long)bytes, (unsigned long long)hidden, epTypeName(type), EP_ROW_ALIGN,
                  group->shape.maxRowBytes);
  *rowBytes = (uint32_t)bytes;
  return ncclSuccess;
}

static ncclResult_t epDispatchConfigCheck(const ncclEpDispatchConfig_t *c, const ncclEpLayoutInfo_t *info) {
  if (c->pass_direction != NCCL_EP_FWD_PASS && c->pass_direction != NCCL_EP_BWD_PASS)
    return epFail(ncclInvalidArgument, "%s: pass_direction is %d: expected an ncclEpPassDir_t", call,
                  (int)c->pass_direction);
  if (c->send_only) return epFail(ncclInvalidUsage, "%s: send_only is not supported yet: expected 0", call);
  if (c->quant_recipe != NCCL_EP_DISP_QUANT_NONE)
    return epFail((unsigned)c->quant_recipe <= NCCL_EP_DISP_QUANT_DS_FP8E3M4 ? ncclInvalidUsage : ncclInvalidArgument,
                  "%s: quant_recipe %d is not supported yet: expected NCCL_EP_DISP_QUANT_NONE", call,
                  (int)c->quant_recipe);
  if (c->round_scales)
    return epFail(ncclInvalidUsage, "%s: round_scales is not supported yet: expected 0 without scales", call);
  if (info && (unsigned)info->recv_topk_idx_kind > NCCL_EP_EXPERT_ID_GLOBAL)
    return epFail(ncclInvalidArgument, "%s: layout_info.recv_topk_idx_kind is %d: expected an ncclEpExpertIdKind_t",
                  call, (int)info->recv_topk_idx_kind);
  return ncclSuccess;
}

static ncclResult_t epDispatchInputs(const struct ncclEpHandle *h, const ncclEpDispatchInputs_t *in, int forward,
                                     uint32_t *rowBytes, epDispatchArgs *a) {
  static const epArgName tokens = {call, "inputs.tokens"}, weights = {call, "inputs.topk_weights"};
  const struct ncclEpGroup *g = h->group;
  void *dev = NULL;
  ncclResult_t r = epTensorCheck(tokens, in->tokens, 2);
  if (r == ncclSuccess && h->updated)
    r = epTensorExtent(tokens, in->tokens, 0, h->tokens, "tokens of the handle's last update");
  if (r == ncclSuccess && in->tokens->sizes[0] > g->shape.maxTokens)
    r = epFail(ncclInvalidArgument, "%s: inputs.tokens.sizes[0] is %zu: expected at most %u", call,
               in->tokens->sizes[0], g->shape.maxTokens);
  if (r == ncclSuccess) r = epRowBytes(call, g, "inputs.tokens", in->tokens->sizes[1], in->tokens->datatype, rowBytes);
  if (r == ncclSuccess) r = epTensorAddress(tokens, g->be, in->tokens, EP_ROW_ALIGN, &dev);
  if (r == ncclSuccess && in->scales)
    r = epFail(ncclInvalidUsage, "%s: inputs.scales is given: not supported yet", call);
  if (r != ncclSuccess) return r;
  a->tokens = dev;
  a->numTokens = (uint32_t)in->tokens->sizes[0];
  if (!forward) return epTensorAbsent(weights, in->topk_weights, "the backward pass carries no weights");
  r = epTensorCheck(weights, in->topk_weights, 2);
  if (r == ncclSuccess) r = epTensorType(weights, in->topk_weights, ncclFloat32);
  if (r == ncclSuccess) r = epTensorExtent(weights, in->topk_weights, 0, a->numTokens, "tokens");
  if (r == ncclSuccess) r = epTensorExtent(weights, in->topk_weights, 1, h->topk, "top-k of the routing");
  if (r == ncclSuccess) r = epTensorAddress(weights, g->be, in->topk_weights, sizeof(float), &dev);
  if (r == ncclSuccess) a->weights = dev;
  return r;
}

static ncclResult_t epDispatchTokensOut(const struct ncclEpHandle *h, const ncclEpDispatchInputs_t *in,
                                        const ncclEpDispatchOutputs_t *out, epDispatchArgs *a) {
  static const epArgName tokens = {call, "outputs.tokens"};
  const struct ncclEpGroup *g = h->group;
  void *dev = NULL;
  ncclResult_t r = epTensorCheck(tokens, out->tokens, 2);
  if (r == ncclSuccess) r = epTensorType(tokens, out->tokens, in->tokens->datatype);
  if (r == ncclSuccess) r = epTensorExtent(tokens, out->tokens, 1, in->tokens->sizes[1], "hidden of inputs.tokens");
  if (r == ncclSuccess && (out->tokens->sizes[0] < g->budget || out->tokens->sizes[0] > UINT32_MAX))
    r = epFail(ncclInvalidArgument,
               "%s: outputs.tokens.sizes[0] is %zu: expected at least max_recv_tokens_per_rank, %u, and less than 2^32",
               call, out->tokens->sizes[0], g->budget);
  if (r == ncclSuccess && epCountsKnown(h) && out->tokens->sizes[0] < h->counts->totalPadded && !g->budget)
    r = epFail(ncclInvalidArgument, "%s: outputs.tokens.sizes[0] is %zu: the routing needs %u rows", call,
               out->tokens->sizes[0], h->counts->totalPadded);
  if (r == ncclSuccess) r = epTensorAddress(tokens, g->be, out->tokens, EP_ROW_ALIGN, &dev);
  if (r == ncclSuccess && out->scales)
    r = epFail(ncclInvalidUsage, "%s: outputs.scales is given: not supported yet", call);
  if (r != ncclSuccess) return r;
  a->outTokens = dev;
  a->capacity = (uint32_t)out->tokens->sizes[0];
  return ncclSuccess;
}

/* Weights and indices of the forward pass. */
static ncclResult_t epDispatchExtrasOut(const struct ncclEpHandle *h, const ncclEpDispatchOutputs_t *out, int forward,
                                        epDispatchArgs *a) {
  static const epArgName weights = {call, "outputs.topk_weights"}, index = {call, "outputs.topk_idx"};
  const struct ncclEpGroup *g = h->group;
  int flat = h->layout == NCCL_EP_LAYOUT_FLAT;
  void *dev = NULL;
  ncclResult_t r;
  if (!forward) {
    r = epTensorAbsent(weights, out->topk_weights, "the backward pass carries no weights");
    return r == ncclSuccess ? epTensorAbsent(index, out->topk_idx, "the backward pass carries no indices") : r;
  }
  r = epTensorCheck(weights, out->topk_weights, flat ? 2 : 1);
  if (r == ncclSuccess) r = epTensorType(weights, out->topk_weights, ncclFloat32);
  if (r == ncclSuccess) r = epTensorExtent(weights, out->topk_weights, 0, a->capacity, "rows of outputs.tokens");
  if (r == ncclSuccess && flat) r = epTensorExtent(weights, out->topk_weights, 1, h->topk, "top-k of the routing");
  if (r == ncclSuccess) r = epTensorAddress(weights, g->be, out->topk_weights, sizeof(float), &dev);
  if (r != ncclSuccess) return r;
  a->outWeights = dev;
  if (!flat) return epTensorAbsent(index, out->topk_idx, "an expert-major slot's place says its expert");
  r = epTensorCheck(index, out->topk_idx, 2);
  if (r == ncclSuccess) r = epTensorType(index, out->topk_idx, ncclInt64);
  if (r == ncclSuccess) r = epTensorExtent(index, out->topk_idx, 0, a->capacity, "rows of outputs.tokens");
  if (r == ncclSuccess) r = epTensorExtent(index, out->topk_idx, 1, h->topk, "top-k of the routing");
  if (r == ncclSuccess) r = epTensorAddress(index, g->be, out->topk_idx, sizeof(int64_t), &dev);
  if (r == ncclSuccess) a->outIdx = dev;
  return r;
}

ncclResult_t epDispatch(ncclEpHandle_t h, const ncclEpDispatchInputs_t *in, const ncclEpDispatchOutputs_t *out,
                        const ncclEpLayoutInfo_t *info, const ncclEpDispatchConfig_t *config, cudaStream_t stream) {
  int forward = config->pass_direction == NCCL_EP_FWD_PASS;
  struct ncclEpGroup *g;
  uint32_t rowBytes = 0;
  epDispatchArgs a;
  epConfig kc;
  epGrid grid;
  epKernel *kernel;
  epLaunch launch;
  ncclResult_t r = epHandleFind(call, h);
  if (r != ncclSuccess) return r;
  g = h->group;
  memset(&a, 0, sizeof a);
  r = epGroupUsable(call, g);
  if (r == ncclSuccess) r = epDispatchConfigCheck(config, info);
  if (r == ncclSuccess) r = epHandleRouted(call, h, stream);
  if (r == ncclSuccess) r = epDispatchInputs(h, in, forward, &rowBytes, &a);
  if (r == ncclSuccess) r = epDispatchTokensOut(h, in, out, &a);
  if (r == ncclSuccess) r = epDispatchExtrasOut(h, out, forward, &a);
  if (r != ncclSuccess) return r;
  kc = epMoveConfig(g, epLayoutKind(h->layout), h->topk, rowBytes, EP_DTYPE_BYTES, forward);
  r = epPolicyMove(call, &g->topology, g->sms, EP_KERNEL_DISPATCH, &kc, &grid);
  if (r == ncclSuccess) r = epKernelGet(call, g, EP_KERNEL_DISPATCH, &kc, stream, &kernel);
  if (r != ncclSuccess) return r;
  a.group = epGroupArgsOf(g);
  a.recordLayout = epHandleRecordLayout(h);
  a.record = h->record;
  a.fillTail = g->budget != 0; /* eager outputs have no tail */
  a.globalIdx = info && info->recv_topk_idx_kind == NCCL_EP_EXPERT_ID_GLOBAL;
  a.zeroPad = 1;
  a.pushBlocks = grid.pushBlocks;
  a.blocks = grid.blocks;
  launch = (epLaunch){grid.blocks, grid.threads, grid.smemBytes, &a, sizeof a};
  return g->be->ops->launch(g->be, kernel, &launch, stream);
}
