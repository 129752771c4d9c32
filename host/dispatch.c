/* ncclEpDispatch: checks, and what the dispatch kernel is given. */
#include <string.h>

#include "fail.h"
#include "hybrid.h"
#include "low_latency.h"
#include "operation.h"
#include "runtime.h"
#include "scales.h"
#include "sizes.h"
#include "sm_policy.h"
#include "tensor.h"

epConfig epMoveConfig(const struct ncclEpGroup *g, uint32_t kind, uint32_t topk, uint32_t rowBytes, uint32_t dtype,
                      int weights) {
  epConfig c = epConfigOf(g, kind, topk);
  c.rowBytes = rowBytes;
  c.dtype = dtype;
  c.weights = weights != 0;
  /* A flat row is one a rank already: within a domain there is nothing else to sum. */
  c.single = epShapeSingle(&g->shape) && dtype != EP_DTYPE_BYTES &&
             (kind != EP_LAYOUT_KIND_FLAT || g->topology.scaleOutRanks > 1);
  return c;
}

void epMoveFused(epConfig *c, uint32_t indexBytes) {
  c->fused = 1;
  c->indexBytes = indexBytes;
}

unsigned epCallSms(const struct ncclEpGroup *g, unsigned asked, int kernelId, const epConfig *config) {
  unsigned wanted = asked ? asked : g->config.max_num_sms, sms = epSmPolicy(&g->topology, wanted, kernelId, config);
  return sms < g->sms ? sms : g->sms;
}

ncclResult_t epRowBytes(const char *name, const struct ncclEpGroup *group, const char *tensor, uint64_t hidden,
                        ncclDataType_t type, uint32_t *rowBytes) {
  uint64_t bytes = hidden * epTypeBytes(type);
  if (hidden > EP_MAX_ROW_BYTES) /* apart: the product may not fit */
    return epFail(
        ncclInvalidArgument,
        "%s: a row of %s has %llu elements of %s: expected a multiple of %u bytes, at most max_token_bytes, %u", name,
        tensor, (unsigned long long)hidden, epTypeName(type), EP_ROW_ALIGN, group->shape.maxRowBytes);
  if (hidden < 1 || bytes % EP_ROW_ALIGN || bytes > group->shape.maxRowBytes)
    return epFail(ncclInvalidArgument,
                  "%s: a row of %s has %llu bytes (%llu %s): expected a multiple of %u, at most max_token_bytes, %u",
                  name, tensor, (unsigned long long)bytes, (unsigned long long)hidden, epTypeName(type), EP_ROW_ALIGN,
                  group->shape.maxRowBytes);
  *rowBytes = (uint32_t)bytes;
  return ncclSuccess;
}

/* What travels behind a row is cut into words of 4 bytes; staging rows are multiples of 16. */
ncclResult_t epScaleBytes(const char *name, const struct ncclEpGroup *group, const char *tensor, uint64_t bytes,
                          uint32_t rowBytes, uint32_t *scaleBytes) {
  uint64_t rounded = epAlignUp(bytes, EP_ROW_ALIGN);
  if (bytes < EP_SCALE_WORD || bytes % EP_SCALE_WORD)
    return epFail(ncclInvalidArgument, "%s: a row of %s has %llu bytes: expected a multiple of %u", name, tensor,
                  (unsigned long long)bytes, EP_SCALE_WORD);
  if (bytes > EP_MAX_ROW_BYTES || rowBytes + rounded > group->shape.maxRowBytes)
    return epFail(ncclInvalidArgument,
                  "%s: a row of %u bytes and its %llu bytes of %s (%llu when rounded up to %u) are wider than "
                  "max_token_bytes, %u",
                  name, rowBytes, (unsigned long long)bytes, tensor, (unsigned long long)rounded, EP_ROW_ALIGN,
                  group->shape.maxRowBytes);
  *scaleBytes = (uint32_t)bytes;
  return ncclSuccess;
}

static ncclResult_t epDispatchConfigCheck(const char *call, const ncclEpDispatchConfig_t *c,
                                          const ncclEpLayoutInfo_t *info) {
  if (c->pass_direction != NCCL_EP_FWD_PASS && c->pass_direction != NCCL_EP_BWD_PASS)
    return epFail(ncclInvalidArgument, "%s: pass_direction is %d: expected an ncclEpPassDir_t", call,
                  (int)c->pass_direction);
  if (info && (unsigned)info->recv_topk_idx_kind > NCCL_EP_EXPERT_ID_GLOBAL)
    return epFail(ncclInvalidArgument, "%s: layout_info.recv_topk_idx_kind is %d: expected an ncclEpExpertIdKind_t",
                  call, (int)info->recv_topk_idx_kind);
  return ncclSuccess;
}

static ncclResult_t epDispatchInputs(const char *call, const struct ncclEpHandle *h, const ncclEpDispatchInputs_t *in,
                                     int forward, uint32_t *rowBytes, epDispatchArgs *a) {
  const epArgName tokens = {call, "inputs.tokens"}, weights = {call, "inputs.topk_weights"};
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
  if (r != ncclSuccess) return r;
  a->tokens = dev;
  a->numTokens = (uint32_t)in->tokens->sizes[0];
  if (!forward) return epTensorAbsent(weights, in->topk_weights, "the backward pass carries no weights");
  r = epTensorChoices(weights, g->be, in->topk_weights, ncclFloat32, a->numTokens, "tokens", h->topk, &dev);
  if (r == ncclSuccess) a->weights = dev;
  return r;
}

static ncclResult_t epDispatchTokensOut(const char *call, const struct ncclEpHandle *h,
                                        const ncclEpDispatchInputs_t *in, const ncclEpDispatchOutputs_t *out,
                                        epDispatchArgs *a, void **shared) {
  const epArgName tokens = {call, "outputs.tokens"};
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
  if (r == ncclSuccess) r = epTensorShared(tokens, g->be, out->tokens, EP_ROW_ALIGN, &dev, shared);
  if (r != ncclSuccess) return r;
  a->outTokens = dev;
  a->capacity = (uint32_t)out->tokens->sizes[0];
  return ncclSuccess;
}

/* Weights and indices of the forward pass. */
static ncclResult_t epDispatchExtrasOut(const char *call, const struct ncclEpHandle *h,
                                        const ncclEpDispatchOutputs_t *out, int forward, epDispatchArgs *a) {
  const epArgName weights = {call, "outputs.topk_weights"}, index = {call, "outputs.topk_idx"};
  const struct ncclEpGroup *g = h->group;
  int flat = h->layout == NCCL_EP_LAYOUT_FLAT;
  void *dev = NULL;
  ncclResult_t r;
  if (!forward) {
    r = epTensorAbsent(weights, out->topk_weights, "the backward pass carries no weights");
    return r == ncclSuccess ? epTensorAbsent(index, out->topk_idx, "the backward pass carries no indices") : r;
  }
  r = epTensorChoices(weights, g->be, out->topk_weights, ncclFloat32, a->capacity, "rows of outputs.tokens",
                      flat ? h->topk : 0, &dev);
  if (r != ncclSuccess) return r;
  a->outWeights = dev;
  if (!flat) return epTensorAbsent(index, out->topk_idx, "an expert-major slot's place says its expert");
  r = epTensorChoices(index, g->be, out->topk_idx, ncclInt64, a->capacity, "rows of outputs.tokens", h->topk, &dev);
  if (r == ncclSuccess) a->outIdx = dev;
  return r;
}

static ncclResult_t epDispatchScaleOptions(const char *call, const ncclEpDispatchExtConfig_t *ext, int scales,
                                           epDispatchArgs *a) {
  int columns = ext->scale_layout == NCCL_EP_SCALE_COLUMN_MAJOR;
  uint64_t rows = epAlignUp((uint64_t)EP_SCALE_WORD * a->capacity, EP_ROW_ALIGN), stride = ext->scale_column_stride;
  if (!columns && ext->scale_layout != NCCL_EP_SCALE_ROW_MAJOR)
    return epFail(ncclInvalidArgument, "%s: ext_config.scale_layout is %d: expected an ncclEpScaleLayout_t", call,
                  (int)ext->scale_layout);
  if (columns && !scales)
    return epFail(ncclInvalidArgument,
                  "%s: ext_config.scale_layout is NCCL_EP_SCALE_COLUMN_MAJOR: expected quant_recipe "
                  "NCCL_EP_DISP_QUANT_FWD, else there are no scales",
                  call);
  if (!columns && stride)
    return epFail(ncclInvalidArgument,
                  "%s: ext_config.scale_column_stride is %zu: expected 0 unless scale_layout is "
                  "NCCL_EP_SCALE_COLUMN_MAJOR",
                  call, ext->scale_column_stride);
  if (columns && stride && (stride < (uint64_t)EP_SCALE_WORD * a->capacity || stride % EP_ROW_ALIGN))
    return epFail(ncclInvalidArgument,
                  "%s: ext_config.scale_column_stride is %zu: expected a multiple of %u, at least %llu (%u bytes for "
                  "each of %u rows)",
                  call, ext->scale_column_stride, EP_ROW_ALIGN, (unsigned long long)EP_SCALE_WORD * a->capacity,
                  EP_SCALE_WORD, a->capacity);
  /* No rows, no columns: the kernel takes a stride of 0 as row-major, and writes neither. */
  if (columns) a->scaleColumn = stride ? stride : rows;
  a->zeroPad = !ext->no_zero_pad;
  return ncclSuccess;
}

static ncclResult_t epDispatchScales(const char *call, const struct ncclEpHandle *h, const ncclEpDispatchInputs_t *in,
                                     const ncclEpDispatchOutputs_t *out, int forwarded, uint32_t rowBytes,
                                     uint32_t *scaleBytes, epDispatchArgs *a) {
  const epArgName to = {call, "outputs.scales"};
  const struct ncclEpGroup *g = h->group;
  void *dev = NULL;
  ncclResult_t r = epScalesIn(call, g, in->scales, forwarded, a->numTokens, rowBytes, scaleBytes, &a->scales);
  if (r != ncclSuccess || !forwarded) return r == ncclSuccess ? epScalesNotOut(call, out->scales) : r;
  r = epTensorCheck(to, out->scales, 2);
  if (r == ncclSuccess) r = epTensorType(to, out->scales, in->scales->datatype);
  if (r == ncclSuccess) r = epTensorExtent(to, out->scales, 0, a->capacity, "rows of outputs.tokens");
  if (r == ncclSuccess) r = epTensorExtent(to, out->scales, 1, in->scales->sizes[1], "extent of inputs.scales");
  if (r == ncclSuccess)
    r = epTensorAddress(to, g->be, out->scales, a->scaleColumn ? EP_ROW_ALIGN : EP_SCALE_WORD, &dev);
  if (r == ncclSuccess) a->outScales = dev;
  return r;
}

ncclResult_t epDispatch(const char *call, ncclEpHandle_t h, const ncclEpDispatchInputs_t *in,
                        const ncclEpDispatchOutputs_t *out, const ncclEpLayoutInfo_t *info,
                        const ncclEpDispatchConfig_t *config, const ncclEpDispatchExtConfig_t *ext,
                        cudaStream_t stream) {
  int forward = config->pass_direction == NCCL_EP_FWD_PASS, forwarded = 0;
  struct ncclEpGroup *g;
  uint32_t rowBytes = 0, scaleBytes = 0, contexts = 0;
  epDispatchArgs a;
  epConfig kc;
  epGrid grid;
  epOperation op;
  epIssue how = {config->send_only != 0, ext->start_event,          ext->epilogue_event,
                 ext->done_event,        ext->communication_stream, NULL};
  int capturing = 0;
  void *shared = NULL;
  const char *obstacle;
  ncclResult_t r = epHandleFind(call, h);
  if (r != ncclSuccess) return r;
  g = h->group;
  memset(&a, 0, sizeof a);
  r = epGroupUsable(call, g);
  if (r == ncclSuccess) r = epStagedNone(call, h);
  if (r == ncclSuccess) r = epIssueCheck(call, "ext_config", &how);
  if (r == ncclSuccess && epIsLl(g)) return epLlDispatch(call, h, in, out, info, config, ext, &how, stream);
  if (r == ncclSuccess) r = epDispatchConfigCheck(call, config, info);
  if (r == ncclSuccess) r = epHybridQueuePairs(call, g, ext->num_qps, &contexts);
  if (r == ncclSuccess) r = epScalesRecipe(call, config, 0, &forwarded);
  if (r == ncclSuccess && !h->pending.on) r = epHandleRouted(call, h, stream);
  if (r == ncclSuccess) r = epDispatchInputs(call, h, in, forward, &rowBytes, &a);
  if (r == ncclSuccess) r = epDispatchTokensOut(call, h, in, out, &a, &shared);
  if (r == ncclSuccess) r = epDispatchExtrasOut(call, h, out, forward, &a);
  if (r == ncclSuccess) r = epDispatchScaleOptions(call, ext, forwarded, &a);
  if (r == ncclSuccess) r = epDispatchScales(call, h, in, out, forwarded, rowBytes, &scaleBytes, &a);
  if (r != ncclSuccess) return r;
  kc = epMoveConfig(g, epLayoutKind(g, h->layout), h->topk, rowBytes, EP_DTYPE_BYTES, forward);
  kc.scaleBytes = scaleBytes;
  obstacle = epDirectOutput(h, out->tokens, shared, &kc, &a);
  if (!epDirectPays(g, ext->num_sms, &kc)) kc.direct = 0;
  if (h->pending.on && !epInParts(&how)) {
    epMoveFused(&kc, h->pending.indices.bytes);
    r = g->be->ops->isCapturing(g->be, stream, &capturing);
  }
  if (r == ncclSuccess)
    r = epPolicyMove(call, &g->topology, epCallSms(g, ext->num_sms, EP_KERNEL_DISPATCH, &kc), EP_KERNEL_DISPATCH, &kc,
                     &grid);
  if (r == ncclSuccess) r = epDirectAsked(call, g, &kc, obstacle);
  if (r != ncclSuccess) return r;
  a.recordLayout = epHandleRecordLayout(h);
  a.record = h->record;
  a.fillTail = g->budget != 0; /* eager outputs have no tail */
  a.globalIdx = info && info->recv_topk_idx_kind == NCCL_EP_EXPERT_ID_GLOBAL;
  if (kc.fused) {
    a.update = h->pending.update;
    a.update.firstBlock = grid.pushBlocks;
    a.update.blocks = epPolicyFusedBlocks(&g->topology, &grid, a.numTokens);
  }
  op = (epOperation){EP_KERNEL_DISPATCH, kc, grid, &a, !kc.fused, contexts};
  r = epOperationRun(call, h, &op, &how, stream);
  if (r == ncclSuccess && kc.fused) epUpdateIssued(h, capturing, how.work);
  return r;
}
