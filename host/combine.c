/* ncclEpCombine: checks, and what the combine kernel is given. */
#include <string.h>

#include "fail.h"
#include "hybrid.h"
#include "low_latency.h"
#include "operation.h"
#include "runtime.h"
#include "tensor.h"

ncclResult_t epCombineType(const char *call, const char *argument, ncclDataType_t type, uint32_t *dtype) {
  switch (type) {
  case ncclBfloat16:
    *dtype = EP_DTYPE_BF16;
    return ncclSuccess;
  case ncclFloat16:
    *dtype = EP_DTYPE_F16;
    return ncclSuccess;
  case ncclFloat32:
    *dtype = EP_DTYPE_F32;
    return ncclSuccess;
  default:
    return epFail(ncclInvalidArgument, "%s: %s is %s: expected bfloat16, float16 or float32", call, argument,
                  epTypeName(type));
  }
}

ncclResult_t epCombineRecipe(const char *call, const char *name, const struct ncclEpGroup *g,
                             ncclEpCombQuant_t recipe) {
  if (recipe == NCCL_EP_COMB_QUANT_NONE) return ncclSuccess;
  if (recipe != NCCL_EP_COMB_QUANT_NVFP4)
    return epFail(ncclInvalidArgument, "%s: %s is %d: expected an ncclEpCombQuant_t", call, name, (int)recipe);
  if (!epIsLl(g))
    return epFail(ncclInvalidUsage,
                  "%s: %s is NCCL_EP_COMB_QUANT_NVFP4: expected NCCL_EP_COMB_QUANT_NONE in high throughput", call,
                  name);
  if (epIsHybrid(g))
    return epFail(ncclInvalidUsage,
                  "%s: %s is NCCL_EP_COMB_QUANT_NVFP4: not supported yet across scale-up domains: expected "
                  "NCCL_EP_COMB_QUANT_NONE",
                  call, name);
  return ncclSuccess;
}

ncclResult_t epCombineNoScales(const char *call, const ncclEpCombineInputs_t *in) {
  const epArgName scales = {call, "inputs.scales"};
  return epTensorAbsent(scales, in->scales, "only NCCL_EP_COMB_QUANT_NVFP4 has scales");
}

static ncclResult_t epCombineConfigCheck(const char *call, const struct ncclEpGroup *g, const ncclEpCombineConfig_t *c,
                                         const ncclEpCombineInputs_t *in) {
  ncclResult_t r;
  if (c->pass_direction != NCCL_EP_FWD_PASS && c->pass_direction != NCCL_EP_BWD_PASS)
    return epFail(ncclInvalidArgument, "%s: pass_direction is %d: expected an ncclEpPassDir_t", call,
                  (int)c->pass_direction);
  r = epCombineRecipe(call, "quant_recipe", g, c->quant_recipe);
  return r == ncclSuccess ? epCombineNoScales(call, in) : r;
}

static ncclResult_t epCombineInputs(const char *call, const struct ncclEpHandle *h, const ncclEpCombineInputs_t *in,
                                    int backward, uint32_t *rowBytes, uint32_t *dtype, epCombineArgs *a) {
  const epArgName tokens = {call, "inputs.tokens"}, weights = {call, "inputs.topk_weights"};
  const struct ncclEpGroup *g = h->group;
  void *dev = NULL;
  ncclResult_t r = epTensorCheck(tokens, in->tokens, 2);
  if (r == ncclSuccess) r = epCombineType(call, "inputs.tokens", in->tokens->datatype, dtype);
  if (r == ncclSuccess) r = epRowBytes(call, g, "inputs.tokens", in->tokens->sizes[1], in->tokens->datatype, rowBytes);
  if (r == ncclSuccess && (in->tokens->sizes[0] < g->budget || in->tokens->sizes[0] > UINT32_MAX))
    r = epFail(ncclInvalidArgument,
               "%s: inputs.tokens.sizes[0] is %zu: expected at least max_recv_tokens_per_rank, %u, and less than 2^32",
               call, in->tokens->sizes[0], g->budget);
  if (r == ncclSuccess) r = epTensorAddress(tokens, g->be, in->tokens, EP_ROW_ALIGN, &dev);
  if (r != ncclSuccess) return r;
  a->tokens = dev;
  a->capacity = (uint32_t)in->tokens->sizes[0];
  if (!backward) return epTensorAbsent(weights, in->topk_weights, "the forward pass returns tokens only");
  r = epTensorChoices(weights, g->be, in->topk_weights, ncclFloat32, a->capacity, "rows of inputs.tokens",
                      h->layout == NCCL_EP_LAYOUT_FLAT ? h->topk : 0, &dev);
  if (r == ncclSuccess) a->weights = dev;
  return r;
}

static ncclResult_t epCombineOutputs(const char *call, const struct ncclEpHandle *h, const ncclEpCombineInputs_t *in,
                                     const ncclEpCombineOutputs_t *out, int backward, epCombineArgs *a) {
  const epArgName tokens = {call, "outputs.tokens"}, weights = {call, "outputs.topk_weights"};
  const struct ncclEpGroup *g = h->group;
  void *dev = NULL;
  ncclResult_t r = epTensorCheck(tokens, out->tokens, 2);
  if (r == ncclSuccess) r = epTensorType(tokens, out->tokens, in->tokens->datatype);
  if (r == ncclSuccess) r = epTensorExtent(tokens, out->tokens, 1, in->tokens->sizes[1], "hidden of inputs.tokens");
  if (r == ncclSuccess && h->updated)
    r = epTensorExtent(tokens, out->tokens, 0, h->tokens, "tokens of the handle's last update");
  if (r == ncclSuccess && out->tokens->sizes[0] > g->shape.maxTokens)
    r = epFail(ncclInvalidArgument, "%s: outputs.tokens.sizes[0] is %zu: expected at most %u", call,
               out->tokens->sizes[0], g->shape.maxTokens);
  if (r == ncclSuccess) r = epTensorAddress(tokens, g->be, out->tokens, EP_ROW_ALIGN, &dev);
  if (r != ncclSuccess) return r;
  a->outTokens = dev;
  a->numTokens = (uint32_t)out->tokens->sizes[0];
  if (!backward) return ncclSuccess; /* outputs.topk_weights is left alone: NVIDIA's callers give it in every pass */
  r = epTensorChoices(weights, g->be, out->topk_weights, ncclFloat32, a->numTokens, "tokens", h->topk, &dev);
  if (r == ncclSuccess) a->outWeights = dev;
  return r;
}

/* Low latency has none yet. */
static ncclResult_t epCombineNoOptions(const char *call, const ncclEpCombineExtConfig_t *ext) {
  for (int i = 0; i < 2; i++)
    if (ext->bias[i])
      return epFail(ncclInvalidUsage, "%s: ext_config.bias[%d] is given: not supported yet in low latency", call, i);
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

/* Rows that the sums start from; those there are come first. */
static ncclResult_t epCombineBias(const char *call, const struct ncclEpHandle *h, const ncclEpCombineOutputs_t *out,
                                  const ncclEpCombineExtConfig_t *ext, epCombineArgs *a, uint32_t *count) {
  static const char *const names[] = {"ext_config.bias[0]", "ext_config.bias[1]"};
  ncclResult_t r = ncclSuccess;
  *count = 0;
  for (int i = 0; r == ncclSuccess && i < 2; i++) {
    const epArgName name = {call, names[i]};
    void *dev = NULL;
    if (!ext->bias[i]) continue;
    r = epTensorCheck(name, ext->bias[i], 2);
    if (r == ncclSuccess) r = epTensorType(name, ext->bias[i], out->tokens->datatype);
    if (r == ncclSuccess) r = epTensorExtent(name, ext->bias[i], 0, out->tokens->sizes[0], "rows of outputs.tokens");
    if (r == ncclSuccess) r = epTensorExtent(name, ext->bias[i], 1, out->tokens->sizes[1], "hidden of outputs.tokens");
    if (r == ncclSuccess) r = epTensorAddress(name, h->group->be, ext->bias[i], EP_ROW_ALIGN, &dev);
    a->bias[(*count)++] = dev;
  }
  return r;
}

ncclResult_t epCombine(const char *call, ncclEpHandle_t h, const ncclEpCombineInputs_t *in,
                       const ncclEpCombineOutputs_t *out, const ncclEpCombineConfig_t *config,
                       const ncclEpCombineExtConfig_t *ext, cudaStream_t stream) {
  int backward = config->pass_direction == NCCL_EP_BWD_PASS;
  struct ncclEpGroup *g;
  uint32_t rowBytes = 0, dtype = 0, bias = 0, contexts = 0;
  epCombineArgs a;
  epConfig kc;
  epGrid grid;
  epOperation op;
  epIssue how = {config->send_only != 0, ext->start_event,          ext->epilogue_event,
                 ext->done_event,        ext->communication_stream, NULL};
  ncclResult_t r = epHandleFind(call, h);
  if (r != ncclSuccess) return r;
  g = h->group;
  memset(&a, 0, sizeof a);
  r = epGroupUsable(call, g);
  if (r == ncclSuccess) r = epStagedNone(call, h);
  if (r == ncclSuccess) r = epIssueCheck(call, "ext_config", &how);
  if (r == ncclSuccess && epIsLl(g)) {
    r = epCombineNoOptions(call, ext);
    return r == ncclSuccess ? epLlCombine(call, h, in, out, config, &how, stream) : r;
  }
  if (r == ncclSuccess) r = epCombineConfigCheck(call, g, config, in);
  if (r == ncclSuccess) r = epHybridQueuePairs(call, g, ext->num_qps, &contexts);
  if (r == ncclSuccess && !h->pending.on) r = epHandleRouted(call, h, stream);
  if (r == ncclSuccess) r = epCombineInputs(call, h, in, backward, &rowBytes, &dtype, &a);
  if (r == ncclSuccess) r = epCombineOutputs(call, h, in, out, backward, &a);
  if (r == ncclSuccess) r = epCombineBias(call, h, out, ext, &a, &bias);
  if (r != ncclSuccess) return r;
  kc = epMoveConfig(g, epLayoutKind(g, h->layout), h->topk, rowBytes, dtype, backward);
  kc.bias = bias;
  r = epPolicyMove(call, &g->topology, epCallSms(g, ext->num_sms, EP_KERNEL_COMBINE, &kc), EP_KERNEL_COMBINE, &kc,
                   &grid);
  if (r != ncclSuccess) return r;
  a.recordLayout = epHandleRecordLayout(h);
  a.record = h->record;
  op = (epOperation){EP_KERNEL_COMBINE, kc, grid, &a, 1, contexts};
  return epOperationRun(call, h, &op, &how, stream);
}
