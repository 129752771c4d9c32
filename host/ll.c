/* Low latency: checks and launches. The exchange of the routing is dispatch's, so an update is local and a dispatch can be
 * repeated on it. */
#include "low_latency.h"

#include <string.h>

#include "fail.h"
#include "hybrid.h"
#include "operation.h"
#include "scales.h"
#include "sizes.h"
#include "tensor.h"

int epIsLl(const struct ncclEpGroup *g) { return g->config.algorithm == NCCL_EP_ALGO_LOW_LATENCY; }

void epLlWindow(const epShape *s, epWindowLayout *w) {
  epLlWindowLayout l = epLlWindowLayoutOf(*s);
  w->hello = l.hello;
  w->bytes = l.bytes;
}

ncclResult_t epLlWindowCheck(const char *call, const epShape *s, uint64_t bytes) {
  if (bytes <= EP_LL_MAX_WINDOW) return ncclSuccess;
  return epFail(
      ncclInvalidUsage,
      "%s: low latency with %u ranks and %u tokens of %u bytes needs a window of %llu bytes: expected at most "
      "%llu (fewer max_dispatch_tokens_per_rank, or high throughput)",
      call, s->ranks, s->maxTokens, s->maxRowBytes, (unsigned long long)bytes, (unsigned long long)EP_LL_MAX_WINDOW);
}

ncclResult_t epLlBufferSize(const epShape *s, ncclEpBufferSize_t *sizes) {
  epLlWindowLayout w = epLlWindowLayoutOf(*s);
  sizes->window_bytes = w.bytes;
  sizes->flag_bytes = w.counts - w.hello;
  sizes->count_bytes = w.weights - w.counts;
  sizes->metadata_bytes = w.stage - w.weights;
  sizes->staging_bytes = w.bytes - w.stage;
  sizes->handle_bytes = epLlRecordLayoutOf(s->ranks, s->topk, s->maxTokens).bytes;
  sizes->scratch_bytes = epScratchLayoutOf(s->ranks, s->experts).bytes;
  sizes->gin_contexts = sizes->gin_signals = sizes->queue_pairs = 0;
  return epLlWindowCheck("ncclEpCalculateBufferSize", s, w.bytes);
}

ncclResult_t epLlHandleCheck(const char *call, ncclEpLayout_t layout, const ncclEpHandleConfig_t *config) {
  if (layout == NCCL_EP_LAYOUT_FLAT)
    return epFail(ncclInvalidUsage,
                  "%s: layout is NCCL_EP_LAYOUT_FLAT: low latency has NCCL_EP_LAYOUT_RANK_MAJOR and "
                  "NCCL_EP_LAYOUT_EXPERT_MAJOR",
                  call);
  if (layout != NCCL_EP_LAYOUT_RANK_MAJOR && layout != NCCL_EP_LAYOUT_EXPERT_MAJOR)
    return epFail(ncclInvalidArgument,
                  "%s: layout is %d: expected NCCL_EP_LAYOUT_RANK_MAJOR or NCCL_EP_LAYOUT_EXPERT_MAJOR", call,
                  (int)layout);
  if (config->dispatch_output_per_expert_alignment > 1)
    return epFail(
        ncclInvalidArgument,
        "%s: dispatch_output_per_expert_alignment is %zu: expected 0 in low latency, whose experts have fixed "
        "places",
        call, config->dispatch_output_per_expert_alignment);
  return ncclSuccess;
}

epLlRecordLayout epLlHandleLayout(const struct ncclEpHandle *h) {
  return epLlRecordLayoutOf(h->group->shape.ranks, h->topk, h->group->shape.maxTokens);
}

size_t epLlRecordBytes(const struct ncclEpGroup *g, uint32_t topk) {
  const epShape *s = &g->shape;
  uint64_t bytes = epLlRecordLayoutOf(s->ranks, topk, s->maxTokens).bytes;
  if (epIsHybrid(g)) bytes = epHybridRecordOf(bytes, (uint32_t)g->topology.scaleOutRanks, topk, s->maxTokens).bytes;
  return (size_t)bytes;
}

/* ---- Configurations ------------------------------------------------------------------------------------------------- */

static uint32_t kindOf(const struct ncclEpHandle *h) {
  return h->layout == NCCL_EP_LAYOUT_RANK_MAJOR ? EP_LAYOUT_KIND_RANK_MAJOR : EP_LAYOUT_KIND_EXPERT_MAJOR_3D;
}

static epConfig configOf(const struct ncclEpGroup *g, uint32_t kind, uint32_t topk, uint32_t rowBytes, uint32_t dtype,
                         int weights) {
  epConfig c = epConfigOf(g, kind, topk);
  c.rowBytes = rowBytes;
  c.dtype = dtype;
  c.weights = weights;
  return c;
}

/* ---- Update -------------------------------------------------------------------------------------------------------- */

ncclResult_t epLlUpdateLaunch(const char *call, struct ncclEpHandle *h, const epIndices *indices, cudaStream_t stream) {
  struct ncclEpGroup *g = h->group;
  epLlUpdateArgs a;
  epConfig c = configOf(g, kindOf(h), indices->topk, 0, EP_DTYPE_BYTES, 0);
  epGrid grid;
  epKernel *kernel;
  epLaunch launch;
  epIssue how = {0};
  ncclResult_t r;
  memset(&a, 0, sizeof a);
  c.indexBytes = indices->bytes;
  r = epPolicyLl(call, &g->topology, g->sms, EP_KERNEL_LL_UPDATE, indices->tokens, &c, &grid);
  if (r == ncclSuccess) r = epKernelGet(call, g, EP_KERNEL_LL_UPDATE, &c, stream, &kernel);
  if (r != ncclSuccess) return r;
  a.group = epGroupArgsOf(g);
  a.recordLayout = epLlRecordLayoutOf(g->shape.ranks, indices->topk, g->shape.maxTokens);
  a.record = h->record;
  a.topkIdx = indices->data;
  a.tokens = indices->tokens;
  a.blocks = grid.blocks;
  launch = (epLaunch){grid.blocks, grid.threads, grid.smemBytes, &a, sizeof a};
  r = epStreamsBegin(g, &how, stream);
  if (r == ncclSuccess) r = g->be->ops->launch(g->be, kernel, &launch, stream);
  return r == ncclSuccess ? epStreamsEnd(g, &how) : r;
}

ncclResult_t epLlUpdate(const char *call, struct ncclEpHandle *h, const epIndices *indices,
                        const ncclEpLayoutInfo_t *info, int borrow, cudaStream_t stream) {
  ncclResult_t r;
  if (info && (info->expert_counters || info->src_rank_counters || info->expert_offsets || info->recv_total_counter))
    return epFail(ncclInvalidArgument,
                  "%s: layout_info has a counter: expected none in low latency, where ncclEpDispatch fills them", call);
  r = borrow ? epStreamsMark(h->group, stream) : epLlUpdateLaunch(call, h, indices, stream);
  if (r != ncclSuccess) return r;
  h->pending.on = borrow;
  h->pending.indices = *indices;
  h->topk = indices->topk;
  h->tokens = indices->tokens;
  h->stream = stream;
  h->updated = 1;
  h->dispatched = 0;
  return ncclSuccess;
}

/* ---- What dispatch and combine share -------------------------------------------------------------------------------- */

/* A tensor over the fixed places: rank-major [R, B, extent], 3-D expert-major [L, R * B, extent]. */
static ncclResult_t placesCheck(epArgName name, const struct ncclEpHandle *h, const ncclEpTensor_t *t, uint64_t extent,
                                const char *what) {
  const epShape *s = &h->group->shape;
  int rankMajor = h->layout == NCCL_EP_LAYOUT_RANK_MAJOR;
  ncclResult_t r = epTensorCheck(name, t, 3);
  if (r == ncclSuccess)
    r = rankMajor ? epTensorExtent(name, t, 0, s->ranks, "ranks")
                  : epTensorExtent(name, t, 0, s->experts / s->ranks, "local experts");
  if (r == ncclSuccess)
    r = rankMajor
            ? epTensorExtent(name, t, 1, s->maxTokens, "max_dispatch_tokens_per_rank")
            : epTensorExtent(name, t, 1, (uint64_t)s->ranks * s->maxTokens, "ranks times max_dispatch_tokens_per_rank");
  return r == ncclSuccess ? epTensorExtent(name, t, 2, extent, what) : r;
}

/* [T, K] FP32 of this rank's tokens. */
static ncclResult_t weightsCheck(epArgName name, const struct ncclEpHandle *h, const ncclEpTensor_t *t, uint32_t tokens,
                                 const float **dev) {
  void *address = NULL;
  ncclResult_t r = epTensorChoices(name, h->group->be, t, ncclFloat32, tokens, "tokens", h->topk, &address);
  if (r == ncclSuccess) *dev = address;
  return r;
}

/* Otherwise the record alone has T. */
static int tokensKnown(const struct ncclEpHandle *h) { return h->updated || h->foreign; }

static ncclResult_t tokensCheck(epArgName name, const struct ncclEpHandle *h, const ncclEpTensor_t *t) {
  ncclResult_t r = epTensorCheck(name, t, 2);
  if (r == ncclSuccess && tokensKnown(h)) r = epTensorExtent(name, t, 0, h->tokens, "tokens of the handle's routing");
  if (r == ncclSuccess && t->sizes[0] > h->group->shape.maxTokens)
    r = epFail(ncclInvalidArgument, "%s: %s.sizes[0] is %zu: expected at most %u", name.call, name.tensor, t->sizes[0],
               h->group->shape.maxTokens);
  return r;
}

static ncclResult_t passCheck(const char *call, ncclEpPassDir_t pass) {
  if (pass == NCCL_EP_BWD_PASS)
    return epFail(ncclInvalidUsage, "%s: pass_direction is backward: low latency has the forward pass only", call);
  if (pass != NCCL_EP_FWD_PASS)
    return epFail(ncclInvalidArgument, "%s: pass_direction is %d: expected an ncclEpPassDir_t", call, (int)pass);
  return ncclSuccess;
}

/* NCCL_EP_DISP_QUANT_DS_FP8E3M4: what it makes, and the elements of one of its scales (device/ll_quantise.h). */
#define EP_E4M3 ((ncclDataType_t)10) /* ncclFloat8e4m3, which older headers lack */
#define EP_QUANT_ELEMENTS 128u

/* ---- Dispatch ------------------------------------------------------------------------------------------------------ */

/* Scales lie in rows only, and no row is there to pad. */
static ncclResult_t dispatchOptionsCheck(const char *call, const ncclEpDispatchExtConfig_t *ext) {
  if (ext->scale_layout != NCCL_EP_SCALE_ROW_MAJOR)
    return epFail(
        ncclInvalidUsage,
        "%s: ext_config.scale_layout is %d: expected NCCL_EP_SCALE_ROW_MAJOR in low latency, whose places have "
        "their scales in rows",
        call, (int)ext->scale_layout);
  if (ext->scale_column_stride)
    return epFail(
        ncclInvalidUsage,
        "%s: ext_config.scale_column_stride is %zu: expected 0 in low latency, whose places have their scales "
        "in rows",
        call, ext->scale_column_stride);
  if (ext->no_zero_pad)
    return epFail(ncclInvalidUsage,
                  "%s: ext_config.no_zero_pad is %d: expected 0, as low latency never fills the places it does not use",
                  call, ext->no_zero_pad);
  if (ext->num_sms)
    return epFail(ncclInvalidUsage,
                  "%s: ext_config.num_sms is %u: expected 0 in low latency, which is set by its group", call,
                  ext->num_sms);
  if (ext->num_qps)
    return epFail(ncclInvalidUsage,
                  "%s: ext_config.num_qps is %u: expected 0 in low latency, which is set by its group", call,
                  ext->num_qps);
  return ncclSuccess;
}

static ncclResult_t counterCheck(const char *call, const char *field, struct ncclEpGroup *g, const ncclEpTensor_t *t,
                                 uint32_t extent, const char *what, void **dev, uint32_t *wide) {
  const epArgName name = {call, field};
  ncclResult_t r;
  if (!t) return ncclSuccess;
  r = epTensorCheck(name, t, 1);
  if (r == ncclSuccess) r = epTensorExtent(name, t, 0, extent, what);
  if (r == ncclSuccess && t->datatype != ncclInt32 && t->datatype != ncclInt64)
    r = epFail(ncclInvalidArgument, "%s: %s is %s: expected int32 or int64", call, field, epTypeName(t->datatype));
  if (r == ncclSuccess) r = epTensorAddress(name, g->be, t, epTypeBytes(t->datatype), dev);
  *wide = t->datatype == ncclInt64;
  return r;
}

static ncclResult_t dispatchCounters(const char *call, const struct ncclEpHandle *h, const ncclEpLayoutInfo_t *info,
                                     epLlDispatchArgs *a) {
  struct ncclEpGroup *g = h->group;
  ncclResult_t r;
  if (!info) return ncclSuccess;
  if (info->expert_offsets)
    return epFail(
        ncclInvalidArgument,
        "%s: layout_info.expert_offsets is given: expected NULL in low latency, whose experts have fixed places", call);
  if ((unsigned)info->recv_topk_idx_kind > NCCL_EP_EXPERT_ID_GLOBAL)
    return epFail(ncclInvalidArgument, "%s: layout_info.recv_topk_idx_kind is %d: expected an ncclEpExpertIdKind_t",
                  call, (int)info->recv_topk_idx_kind);
  a->globalIdx = info->recv_topk_idx_kind == NCCL_EP_EXPERT_ID_GLOBAL;
  r = counterCheck(call, "layout_info.expert_counters", g, info->expert_counters, epLocals(g), "local experts",
                   &a->expertCounters, &a->expertCountersWide);
  if (h->adds) a->expertCountersWide |= EP_COUNTER_ADDS;
  if (r == ncclSuccess)
    r = counterCheck(call, "layout_info.src_rank_counters", g, info->src_rank_counters, g->shape.ranks, "ranks",
                     &a->sourceCounters, &a->sourceCountersWide);
  if (r == ncclSuccess)
    r = counterCheck(call, "layout_info.recv_total_counter", g, info->recv_total_counter, 1, "a total", &a->recvTotal,
                     &a->recvTotalWide);
  return r;
}

static ncclResult_t dispatchTokens(const char *call, const struct ncclEpHandle *h, const ncclEpDispatchInputs_t *in,
                                   const ncclEpDispatchOutputs_t *out, int quantise, uint32_t *rowBytes,
                                   epLlDispatchArgs *a) {
  const epArgName from = {call, "inputs.tokens"}, to = {call, "outputs.tokens"};
  const struct ncclEpGroup *g = h->group;
  void *dev = NULL;
  ncclResult_t r = tokensCheck(from, h, in->tokens);
  const ncclDataType_t type = quantise ? EP_E4M3 : r == ncclSuccess ? in->tokens->datatype : ncclUint8;
  if (r == ncclSuccess && quantise) r = epTensorType(from, in->tokens, ncclBfloat16);
  if (r == ncclSuccess && quantise && in->tokens->sizes[1] % EP_QUANT_ELEMENTS)
    r = epFail(ncclInvalidArgument,
               "%s: inputs.tokens.sizes[1] is %zu: expected a multiple of %u, the elements of a scale of "
               "NCCL_EP_DISP_QUANT_DS_FP8E3M4",
               call, in->tokens->sizes[1], EP_QUANT_ELEMENTS);
  if (r == ncclSuccess) r = epRowBytes(call, g, "inputs.tokens", in->tokens->sizes[1], type, rowBytes);
  if (r == ncclSuccess) r = epTensorAddress(from, g->be, in->tokens, EP_ROW_ALIGN, &dev);
  if (r != ncclSuccess) return r;
  a->tokens = dev;
  a->numTokens = (uint32_t)in->tokens->sizes[0];
  r = placesCheck(to, h, out->tokens, in->tokens->sizes[1], "hidden of inputs.tokens");
  if (r == ncclSuccess) r = epTensorType(to, out->tokens, type);
  if (r == ncclSuccess) r = epTensorAddress(to, g->be, out->tokens, EP_ROW_ALIGN, &dev);
  if (r == ncclSuccess) a->outTokens = dev;
  return r;
}

/* Rows of scales have the places of their tokens. */
static ncclResult_t dispatchScales(const char *call, const struct ncclEpHandle *h, const ncclEpDispatchInputs_t *in,
                                   const ncclEpDispatchOutputs_t *out, int forwarded, int quantise, uint32_t rowBytes,
                                   uint32_t *scaleBytes, epLlDispatchArgs *a) {
  const epArgName to = {call, "outputs.scales"};
  const struct ncclEpGroup *g = h->group;
  void *dev = NULL;
  ncclResult_t r = epScalesIn(call, g, in->scales, forwarded, a->numTokens, rowBytes, scaleBytes, &a->scales);
  if (r != ncclSuccess || !(forwarded || quantise)) return r == ncclSuccess ? epScalesNotOut(call, out->scales) : r;
  r = quantise ? placesCheck(to, h, out->scales, rowBytes / EP_QUANT_ELEMENTS, "one for each 128 elements")
               : placesCheck(to, h, out->scales, in->scales->sizes[1], "extent of inputs.scales");
  if (r == ncclSuccess) r = epTensorType(to, out->scales, quantise ? ncclFloat32 : in->scales->datatype);
  if (r == ncclSuccess && quantise)
    r = epScaleBytes(call, g, to.tensor, 4ull * (rowBytes / EP_QUANT_ELEMENTS), rowBytes, scaleBytes);
  if (r == ncclSuccess) r = epTensorAddress(to, g->be, out->scales, EP_SCALE_WORD, &dev);
  if (r == ncclSuccess) a->outScales = dev;
  return r;
}

/* Weights and indices travel in rank-major; in 3-D expert-major a slot's place says its expert and combine has the weights. */
static ncclResult_t dispatchExtras(const char *call, const struct ncclEpHandle *h, const ncclEpDispatchInputs_t *in,
                                   const ncclEpDispatchOutputs_t *out, epLlDispatchArgs *a) {
  const epArgName from = {call, "inputs.topk_weights"}, to = {call, "outputs.topk_weights"},
                  index = {call, "outputs.topk_idx"};
  const struct ncclEpGroup *g = h->group;
  void *dev = NULL;
  ncclResult_t r;
  if (h->layout != NCCL_EP_LAYOUT_RANK_MAJOR) {
    r = epTensorAbsent(to, out->topk_weights, "combine applies the weights");
    return r == ncclSuccess ? epTensorAbsent(index, out->topk_idx, "an expert-major slot's place says its expert") : r;
  }
  r = weightsCheck(from, h, in->topk_weights, a->numTokens, &a->weights);
  if (r == ncclSuccess) r = placesCheck(to, h, out->topk_weights, h->topk, "top-k of the routing");
  if (r == ncclSuccess) r = epTensorType(to, out->topk_weights, ncclFloat32);
  if (r == ncclSuccess) r = epTensorAddress(to, g->be, out->topk_weights, sizeof(float), &dev);
  if (r != ncclSuccess) return r;
  a->outWeights = dev;
  r = placesCheck(index, h, out->topk_idx, h->topk, "top-k of the routing");
  if (r == ncclSuccess) r = epTensorType(index, out->topk_idx, ncclInt32);
  if (r == ncclSuccess) r = epTensorAddress(index, g->be, out->topk_idx, sizeof(int32_t), &dev);
  if (r == ncclSuccess) a->outIdx = dev;
  return r;
}

ncclResult_t epLlDispatch(const char *call, struct ncclEpHandle *h, const ncclEpDispatchInputs_t *in,
                          const ncclEpDispatchOutputs_t *out, const ncclEpLayoutInfo_t *info,
                          const ncclEpDispatchConfig_t *config, const ncclEpDispatchExtConfig_t *ext, epIssue *how,
                          cudaStream_t stream) {
  struct ncclEpGroup *g = h->group;
  uint32_t rowBytes = 0, scaleBytes = 0;
  int forwarded = 0, quantise = config->quant_recipe == NCCL_EP_DISP_QUANT_DS_FP8E3M4;
  epLlDispatchArgs a;
  epConfig c;
  epGrid grid;
  epOperation op;
  ncclResult_t r;
  memset(&a, 0, sizeof a);
  r = passCheck(call, config->pass_direction);
  if (r == ncclSuccess) r = epScalesRecipe(call, config, 1, &forwarded);
  if (r == ncclSuccess) r = dispatchOptionsCheck(call, ext);
  if (r == ncclSuccess && !h->pending.on) r = epHandleRouted(call, h, stream);
  if (r == ncclSuccess) r = dispatchTokens(call, h, in, out, quantise, &rowBytes, &a);
  if (r == ncclSuccess) r = dispatchExtras(call, h, in, out, &a);
  if (r == ncclSuccess) r = dispatchScales(call, h, in, out, forwarded, quantise, rowBytes, &scaleBytes, &a);
  if (r == ncclSuccess) r = dispatchCounters(call, h, info, &a);
  if (r != ncclSuccess) return r;
  c = configOf(g, kindOf(h), h->topk, rowBytes, EP_DTYPE_BYTES, h->layout == NCCL_EP_LAYOUT_RANK_MAJOR);
  c.scaleBytes = scaleBytes;
  if (quantise) c.quantise = config->round_scales ? EP_QUANTISE_POWERS : EP_QUANTISE_E4M3;
  r = epPolicyLl(call, &g->topology, g->sms, EP_KERNEL_LL_DISPATCH, a.numTokens, &c, &grid);
  if (r != ncclSuccess) return r;
  a.window = epLlWindowLayoutOf(g->shape);
  a.recordLayout = epLlHandleLayout(h);
  a.record = h->record;
  a.decisions = h->pending.on ? (epLlDecisions){h->pending.indices.data, h->pending.indices.bytes == 8, 1}
                              : (epLlDecisions){h->record + a.recordLayout.topk, 0, 0};
  a.tokensHeld = !tokensKnown(h);
  a.tokensABlock = epLlTokensABlock(a.numTokens, &grid, h->topk);
  a.forwardBlocks = grid.forwardBlocks;
  op = (epOperation){EP_KERNEL_LL_DISPATCH, c, grid, &a, 0, 0};
  r = epOperationRun(call, h, &op, how, stream);
  if (r != ncclSuccess) return r;
  h->pending.on = 0;
  h->dispatched = !how->sendOnly; /* its completion says so */
  return ncclSuccess;
}

/* ---- Combine ------------------------------------------------------------------------------------------------------- */

/* NCCL_EP_COMB_QUANT_NVFP4: elements of a block (device/ll_nvfp4.h). */
#define EP_NVFP4_ELEMENTS 16u

static ncclResult_t combineConfigCheck(const char *call, const struct ncclEpHandle *h, const ncclEpCombineConfig_t *c,
                                       const ncclEpCombineInputs_t *in) {
  const epArgName weights = {call, "inputs.topk_weights"};
  ncclResult_t r = passCheck(call, c->pass_direction);
  if (r == ncclSuccess) r = epCombineRecipe(call, "quant_recipe", h->group, c->quant_recipe);
  if (r == ncclSuccess && c->quant_recipe == NCCL_EP_COMB_QUANT_NONE) r = epCombineNoScales(call, in);
  if (r == ncclSuccess) r = epTensorAbsent(weights, in->topk_weights, "the forward pass takes tokens only");
  if (r == ncclSuccess && tokensKnown(h) && !h->dispatched)
    r = epFail(ncclInvalidUsage, "%s: nothing was dispatched on this routing: call ncclEpDispatch first", call);
  return r;
}

static ncclResult_t blocksCheck(const char *call, const char *name, size_t hidden) {
  if (hidden % EP_NVFP4_ELEMENTS == 0) return ncclSuccess;
  return epFail(ncclInvalidArgument,
                "%s: %s is %zu: expected a multiple of %u, the elements of a block of NCCL_EP_COMB_QUANT_NVFP4", call,
                name, hidden, EP_NVFP4_ELEMENTS);
}

/* BF16 in whole blocks, and a scale for each row, which has the place of its row. */
static ncclResult_t combineScales(const char *call, const struct ncclEpHandle *h, const ncclEpCombineInputs_t *in,
                                  epLlCombineArgs *a) {
  const epArgName tokens = {call, "inputs.tokens"}, name = {call, "inputs.scales"};
  void *dev = NULL;
  ncclResult_t r = epTensorType(tokens, in->tokens, ncclBfloat16);
  if (r == ncclSuccess) r = blocksCheck(call, "inputs.tokens.sizes[2]", in->tokens->sizes[2]);
  if (r == ncclSuccess) r = placesCheck(name, h, in->scales, 1, "one for each row");
  if (r == ncclSuccess) r = epTensorType(name, in->scales, ncclFloat32);
  if (r == ncclSuccess) r = epTensorAddress(name, h->group->be, in->scales, sizeof(float), &dev);
  if (r == ncclSuccess) a->scales = dev;
  return r;
}

static ncclResult_t combineTensors(const char *call, const struct ncclEpHandle *h, const ncclEpCombineInputs_t *in,
                                   const ncclEpCombineOutputs_t *out, uint32_t *rowBytes, uint32_t *dtype,
                                   epLlCombineArgs *a) {
  const epArgName from = {call, "inputs.tokens"}, to = {call, "outputs.tokens"},
                  weights = {call, "outputs.topk_weights"};
  const struct ncclEpGroup *g = h->group;
  void *dev = NULL;
  ncclResult_t r = tokensCheck(to, h, out->tokens);
  if (r == ncclSuccess) r = placesCheck(from, h, in->tokens, out->tokens->sizes[1], "hidden of outputs.tokens");
  if (r == ncclSuccess) r = epCombineType(call, "inputs.tokens", in->tokens->datatype, dtype);
  if (r == ncclSuccess) r = epTensorType(to, out->tokens, in->tokens->datatype);
  if (r == ncclSuccess) r = epRowBytes(call, g, "inputs.tokens", in->tokens->sizes[2], in->tokens->datatype, rowBytes);
  if (r == ncclSuccess) r = epTensorAddress(from, g->be, in->tokens, EP_ROW_ALIGN, &dev);
  if (r != ncclSuccess) return r;
  a->tokens = dev;
  r = epTensorAddress(to, g->be, out->tokens, EP_ROW_ALIGN, &dev);
  if (r != ncclSuccess) return r;
  a->outTokens = dev;
  a->numTokens = (uint32_t)out->tokens->sizes[0];
  if (h->layout == NCCL_EP_LAYOUT_RANK_MAJOR) return ncclSuccess; /* the expert side has applied dispatch's weights */
  return weightsCheck(weights, h, out->topk_weights, a->numTokens, &a->weights);
}

ncclResult_t epLlCombine(const char *call, struct ncclEpHandle *h, const ncclEpCombineInputs_t *in,
                         const ncclEpCombineOutputs_t *out, const ncclEpCombineConfig_t *config, epIssue *how,
                         cudaStream_t stream) {
  struct ncclEpGroup *g = h->group;
  uint32_t rowBytes = 0, dtype = 0;
  int nvfp4 = config->quant_recipe == NCCL_EP_COMB_QUANT_NVFP4;
  epLlCombineArgs a;
  epConfig c;
  epGrid grid;
  epOperation op;
  ncclResult_t r;
  memset(&a, 0, sizeof a);
  r = h->pending.on ? ncclSuccess /* refused below */ : epHandleRouted(call, h, stream);
  if (r == ncclSuccess) r = combineConfigCheck(call, h, config, in);
  if (r == ncclSuccess) r = combineTensors(call, h, in, out, &rowBytes, &dtype, &a);
  if (r == ncclSuccess && nvfp4) r = combineScales(call, h, in, &a);
  if (r != ncclSuccess) return r;
  c = configOf(g, kindOf(h), h->topk, rowBytes, dtype, 0);
  c.quantise = nvfp4 ? EP_QUANTISE_NVFP4 : EP_QUANTISE_NONE;
  r = epPolicyLl(call, &g->topology, g->sms, EP_KERNEL_LL_COMBINE, a.numTokens, &c, &grid);
  if (r != ncclSuccess) return r;
  a.window = epLlWindowLayoutOf(g->shape);
  a.recordLayout = epLlHandleLayout(h);
  a.record = h->record;
  a.tokensHeld = !tokensKnown(h);
  if (!nvfp4) a.forwardBlocks = grid.forwardBlocks;
  op = (epOperation){EP_KERNEL_LL_COMBINE, c, grid, &a, 0, 0};
  return epOperationRun(call, h, &op, how, stream);
}

/* ---- Prepare ------------------------------------------------------------------------------------------------------- */

ncclResult_t epLlPrepareWishes(const struct ncclEpGroup *g, const ncclEpPrepareConfig_t *p, epWishes *out) {
  static const char call[] = "ncclEpPrepare";
  uint32_t kind = p->layout == NCCL_EP_LAYOUT_RANK_MAJOR ? EP_LAYOUT_KIND_RANK_MAJOR : EP_LAYOUT_KIND_EXPERT_MAJOR_3D;
  uint32_t rowBytes = 0, scaleBytes = 0, dtype = 0;
  epConfig c;
  epGrid grid;
  ncclResult_t r = p->layout == NCCL_EP_LAYOUT_RANK_MAJOR || p->layout == NCCL_EP_LAYOUT_EXPERT_MAJOR
                       ? epRowBytes(call, g, "tokens", p->hidden, p->dispatch_type, &rowBytes)
                       : epFail(ncclInvalidArgument,
                                "%s: layout is %d: expected NCCL_EP_LAYOUT_RANK_MAJOR or NCCL_EP_LAYOUT_EXPERT_MAJOR",
                                call, (int)p->layout);
  if (r == ncclSuccess && p->backward)
    r = epFail(ncclInvalidUsage, "%s: backward is %d: expected 0, as low latency has the forward pass only", call,
               p->backward);
  if (r == ncclSuccess && p->scale_bytes) r = epScaleBytes(call, g, "scales", p->scale_bytes, rowBytes, &scaleBytes);
  if (r != ncclSuccess) return r;
  c = configOf(g, kind, p->top_k, 0, EP_DTYPE_BYTES, 0);
  c.indexBytes = epTypeBytes(p->index_type);
  r = epPolicyLl(call, &g->topology, g->sms, EP_KERNEL_LL_UPDATE, 1, &c, &grid);
  if (r == ncclSuccess) epWishAdd(out, EP_KERNEL_LL_UPDATE, &c);
  if (r != ncclSuccess) return r;
  c = configOf(g, kind, p->top_k, rowBytes, EP_DTYPE_BYTES, kind == EP_LAYOUT_KIND_RANK_MAJOR);
  c.scaleBytes = scaleBytes;
  r = epPolicyLl(call, &g->topology, g->sms, EP_KERNEL_LL_DISPATCH, 1, &c, &grid);
  if (r == ncclSuccess) epWishAdd(out, EP_KERNEL_LL_DISPATCH, &c);
  if (r == ncclSuccess) r = epCombineType(call, "combine_type", p->combine_type, &dtype);
  if (r == ncclSuccess) r = epRowBytes(call, g, "tokens", p->hidden, p->combine_type, &rowBytes);
  if (r == ncclSuccess && p->combine_quant && dtype != EP_DTYPE_BF16)
    r = epFail(ncclInvalidArgument, "%s: combine_type is %s: expected bfloat16 with NCCL_EP_COMB_QUANT_NVFP4", call,
               epTypeName(p->combine_type));
  if (r == ncclSuccess && p->combine_quant) r = blocksCheck(call, "hidden", p->hidden);
  if (r != ncclSuccess) return r;
  c = configOf(g, kind, p->top_k, rowBytes, dtype, 0);
  c.quantise = p->combine_quant ? EP_QUANTISE_NVFP4 : EP_QUANTISE_NONE;
  r = epPolicyLl(call, &g->topology, g->sms, EP_KERNEL_LL_COMBINE, 1, &c, &grid);
  if (r == ncclSuccess) epWishAdd(out, EP_KERNEL_LL_COMBINE, &c);
  return r;
}
