/* Sizes are sums over device/layout.h, which the kernels include too. */
#include "sizes.h"

#include "fail.h"
#include "low_latency.h"
#include "tensor.h"

uint32_t epLargestTopk(uint32_t maxTokens) {
  uint32_t most = maxTokens ? EP_MAX_ENTRIES / maxTokens : EP_MAX_TOPK;
  return most < EP_MAX_TOPK ? most : EP_MAX_TOPK;
}

ncclResult_t epShapeOf(const char *call, const epSizeRequest *request, epShape *shape) {
  uint32_t topk = request->topk ? request->topk : epLargestTopk(request->maxTokens);
  if (request->ranks < 1 || request->ranks > EP_MAX_RANKS)
    return epFail(ncclInvalidArgument, "%s: the communicator has %u ranks: expected 1 to %u", call, request->ranks,
                  EP_MAX_RANKS);
  if (request->experts < 1 || request->experts > EP_MAX_EXPERTS || request->experts % request->ranks)
    return epFail(ncclInvalidArgument, "%s: num_experts is %u: expected a multiple of the %u ranks, at most %u", call,
                  request->experts, request->ranks, EP_MAX_EXPERTS);
  if (request->maxTokens < 1 || request->maxTokens > EP_MAX_ENTRIES)
    return epFail(ncclInvalidArgument, "%s: max_dispatch_tokens_per_rank is %u: expected 1 to %u", call,
                  request->maxTokens, EP_MAX_ENTRIES);
  if (topk < 1 || topk > EP_MAX_TOPK)
    return epFail(ncclInvalidArgument, "%s: num_topk is %u: expected 1 to %u", call, topk, EP_MAX_TOPK);
  if (topk > epLargestTopk(request->maxTokens))
    return epFail(ncclInvalidArgument,
                  "%s: max_dispatch_tokens_per_rank %u times num_topk %u is %llu: expected at most %u", call,
                  request->maxTokens, topk, (unsigned long long)request->maxTokens * topk, EP_MAX_ENTRIES);
  if (request->rowBytes < 1 || request->rowBytes > EP_MAX_ROW_BYTES || request->rowBytes % EP_ROW_ALIGN)
    return epFail(ncclInvalidArgument, "%s: a row of tokens has %llu bytes: expected a multiple of %u, at most %u",
                  call, (unsigned long long)request->rowBytes, EP_ROW_ALIGN, EP_MAX_ROW_BYTES);
  shape->ranks = request->ranks;
  shape->experts = request->experts;
  shape->topk = topk;
  shape->maxTokens = request->maxTokens;
  shape->stageRows = request->maxTokens * (request->multipleReductions ? 1 : topk);
  shape->maxRowBytes = (uint32_t)request->rowBytes;
  return ncclSuccess;
}

ncclResult_t epBufferShape(const char *call, uint32_t ranks, const ncclEpBufferSizeConfig_t *config, epShape *shape) {
  uint32_t typeBytes = epTypeBytes(config->datatype), combineBytes = epTypeBytes(config->combine_datatype);
  epSizeRequest request = {ranks, config->num_experts,        config->top_k, config->max_tokens,
                           0,     config->multiple_reductions};
  if (!typeBytes)
    return epFail(ncclInvalidArgument, "%s: datatype is %d: expected an ncclDataType_t", call, (int)config->datatype);
  if (!combineBytes)
    return epFail(ncclInvalidArgument, "%s: combine_datatype is %d: expected an ncclDataType_t", call,
                  (int)config->combine_datatype);
  if (config->scale_bytes % EP_SCALE_WORD)
    return epFail(ncclInvalidArgument, "%s: scale_bytes is %u: expected a multiple of %u", call, config->scale_bytes,
                  EP_SCALE_WORD);
  request.rowBytes = (uint64_t)config->hidden * typeBytes + epAlignUp(config->scale_bytes, EP_ROW_ALIGN);
  if (request.rowBytes < (uint64_t)config->hidden * combineBytes)
    request.rowBytes = (uint64_t)config->hidden * combineBytes;
  return epShapeOf(call, &request, shape);
}

ncclResult_t calculate_ep_buffer_size(uint32_t ranks, const ncclEpBufferSizeConfig_t *config,
                                      ncclEpBufferSize_t *sizes) {
  epShape shape;
  epWindowLayout w;
  ncclResult_t r = epBufferShape("ncclEpCalculateBufferSize", ranks, config, &shape);
  if (r != ncclSuccess) return r;
  if (config->low_latency != 0 && config->low_latency != 1)
    return epFail(ncclInvalidArgument, "ncclEpCalculateBufferSize: low_latency is %d: expected 0 or 1",
                  config->low_latency);
  if (config->low_latency) return epLlBufferSize(&shape, sizes);
  w = epWindowLayoutOf(shape);
  sizes->window_bytes = w.bytes;
  sizes->count_bytes = w.metaFlags - w.counts;
  sizes->flag_bytes = w.meta - w.metaFlags;
  sizes->metadata_bytes = w.stage - w.meta;
  sizes->staging_bytes = w.bytes - w.stage;
  sizes->handle_bytes = epRecordLayoutOf(shape.ranks, shape.experts, shape.topk, shape.maxTokens).bytes;
  sizes->scratch_bytes = epScratchLayoutOf(shape.ranks, shape.experts).bytes;
  sizes->gin_contexts = sizes->gin_signals = sizes->queue_pairs = 0;
  return ncclSuccess;
}
