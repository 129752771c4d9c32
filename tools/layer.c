/* One rank's half of a MoE layer over the public interface. Buffers are allocated with guard bands that are filled once
 * and inspected after runs: whatever writes outside its tensor is seen, also on GPUs. */
#include "layer.h"

#include <stdlib.h>
#include <string.h>

#include "failure.h"

#define GUARD_BYTES 4096u
#define GUARD_BYTE 0x5A
#define WINDOW_SHIFT 256u

static int told(const epLayer *layer, ncclResult_t rc, const char *what) {
  if (rc == ncclSuccess) return 0;
  return epToolFail("rank %d: %s: error %d: %s", layer->port->rank, what, (int)rc, ncclEpGetLastErrorString());
}

int epLayerIsLl(const epLayerConfig *config) {
  return config->layout == EP_REF_RANK_MAJOR || config->layout == EP_REF_EXPERT_MAJOR_3D;
}

uint32_t epLayerRowWeights(const epLayerConfig *config) {
  switch (config->layout) {
  case EP_REF_FLAT:
  case EP_REF_RANK_MAJOR:
    return config->topk;
  case EP_REF_EXPERT_MAJOR:
    return 1;
  default:
    return 0;
  }
}

size_t epLayerRowBytes(const epLayerConfig *config) { return config->hidden * epRefTypeBytes(config->type); }

size_t epLayerCombineRowBytes(const epLayerConfig *config) {
  return config->hidden * epRefTypeBytes(config->combineType);
}

size_t epLayerCombineTravels(const epLayerConfig *config) {
  return config->nvfp4 ? config->hidden / 2 + config->hidden / 16 + sizeof(float) : epLayerCombineRowBytes(config);
}

uint32_t epLayerScaleBytes(const epLayerConfig *config) {
  uint32_t groups = (config->hidden + 127) / 128;
  return config->scales == EP_SCALES_FP32 ? 4 * groups : config->scales == EP_SCALES_UE8M0 ? (groups + 3) / 4 * 4 : 0;
}

size_t epLayerScaleStride(const epLayerConfig *config) {
  if (!config->scaleColumns || config->scales == EP_SCALES_NONE) return 0;
  return (size_t)((4 * config->capacity + 15) / 16 * 16 + 16); /* farther apart than they must be */
}

uint64_t epLayerWorstRows(const epLayerConfig *config, int ranks, int repeats) {
  uint64_t locals = config->experts / (unsigned)ranks, align = config->align > 1 ? config->align : 1;
  uint64_t copies = !repeats && locals < config->topk ? locals : config->topk;
  uint64_t rows = (uint64_t)ranks * config->maxTokens;
  if (config->layout == EP_REF_FLAT || config->layout == EP_REF_RANK_MAJOR) return rows;
  if (config->layout == EP_REF_EXPERT_MAJOR_3D) return rows * locals;
  rows = rows * copies + locals * (align - 1);
  return (rows + align - 1) / align * align;
}

/* ---- Buffers ---------------------------------------------------------------------------------------------------- */

static int guard(epLayer *layer, epBuffer *buffer) {
  return epPortFill(layer->port, buffer->base, GUARD_BYTE, GUARD_BYTES) ||
         epPortFill(layer->port, buffer->data + buffer->bytes, GUARD_BYTE, GUARD_BYTES);
}

static int allocate(epLayer *layer, epBuffer *buffer, size_t bytes, const char *name) {
  void *base = NULL;
  if (epPortAlloc(layer->port, &base, bytes + 2 * GUARD_BYTES, name)) return -1;
  *buffer = (epBuffer){.base = base, .data = (unsigned char *)base + GUARD_BYTES, .bytes = bytes, .name = name};
  return guard(layer, buffer);
}

/* The same inside a window, at another place on every rank. */
static int allocateWindow(epLayer *layer, epBuffer *buffer, size_t bytes, const char *name) {
  size_t shift = WINDOW_SHIFT, ranks = (size_t)layer->port->ranks;
  if (epPortAllocWindow(layer->port, &layer->outMemory, bytes + 2 * GUARD_BYTES + ranks * shift, name,
                        &layer->outWindow))
    return -1;
  buffer->base = (unsigned char *)layer->outMemory + (size_t)layer->port->rank * shift;
  *buffer = (epBuffer){.base = buffer->base, .data = buffer->base + GUARD_BYTES, .bytes = bytes, .name = name};
  return guard(layer, buffer);
}

/* Outputs and what they are filled with before a run. */
static const struct {
  size_t offset;
  int fill;
} outputs[] = {{offsetof(epLayer, outTokens), EP_FILL_BYTE}, {offsetof(epLayer, outWeights), EP_FILL_NAN},
               {offsetof(epLayer, outIdx), EP_FILL_BYTE},    {offsetof(epLayer, counters), EP_FILL_BYTE},
               {offsetof(epLayer, offsets), EP_FILL_BYTE},   {offsetof(epLayer, total), EP_FILL_BYTE},
               {offsetof(epLayer, sources), EP_FILL_BYTE},   {offsetof(epLayer, y), EP_FILL_NAN},
               {offsetof(epLayer, yWeights), EP_FILL_NAN},   {offsetof(epLayer, outScales), EP_FILL_BYTE}};
#define OUTPUTS (sizeof(outputs) / sizeof(*outputs))

static epBuffer *output(epLayer *layer, size_t i) { return (epBuffer *)(void *)((char *)layer + outputs[i].offset); }

int epLayerPrefill(epLayer *layer) {
  for (size_t i = 0; i < OUTPUTS; i++) {
    epBuffer *buffer = output(layer, i);
    if (buffer->base && epPortFill(layer->port, buffer->data, outputs[i].fill, buffer->bytes)) return -1;
  }
  return 0;
}

static int checkGuard(epLayer *layer, const epBuffer *buffer, const unsigned char *device, const char *side) {
  unsigned char bytes[GUARD_BYTES];
  if (epPortCopy(layer->port, bytes, device, sizeof(bytes))) return -1;
  for (unsigned i = 0; i < sizeof(bytes); i++)
    if (bytes[i] != GUARD_BYTE)
      return epToolFail("rank %d: %s: byte %u of the guard band %s the buffer was overwritten: got 0x%02x",
                        layer->port->rank, buffer->name, i, side, bytes[i]);
  return 0;
}

int epLayerCheckGuards(epLayer *layer) {
  int rc = 0;
  for (size_t i = 0; i < OUTPUTS; i++) {
    const epBuffer *buffer = output(layer, i);
    if (buffer->base && (checkGuard(layer, buffer, buffer->base, "before") ||
                         checkGuard(layer, buffer, buffer->data + buffer->bytes, "after"))) {
      rc = -1;
      guard(layer, output(layer, i)); /* tell it once */
    }
  }
  return rc;
}

int epLayerRead(epLayer *layer, const epBuffer *buffer, size_t bytes, void **out) {
  *out = malloc(bytes + 1);
  if (!*out)
    return epToolFail("rank %d: out of host memory for %zu bytes of %s", layer->port->rank, bytes, buffer->name);
  if (epPortCopy(layer->port, *out, buffer->data, bytes)) {
    free(*out);
    *out = NULL;
    return -1;
  }
  return 0;
}

/* ---- Opening ---------------------------------------------------------------------------------------------------- */

static int createGroup(epLayer *layer) {
  const epLayerConfig *c = &layer->config;
  size_t row = epLayerRowBytes(c) + (epLayerScaleBytes(c) + 15) / 16 * 16, combineRow = epLayerCombineRowBytes(c);
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  ncclEpGroupExtConfig_t ext = NCCL_EP_GROUP_EXT_CONFIG_INIT;
  config.algorithm = epLayerIsLl(c) ? NCCL_EP_ALGO_LOW_LATENCY : NCCL_EP_ALGO_HIGH_THROUGHPUT;
  config.num_experts = c->experts;
  config.max_dispatch_tokens_per_rank = c->maxTokens;
  config.max_recv_tokens_per_rank = epLayerIsLl(c) ? NCCL_EP_AUTO : (unsigned)c->budget;
  config.max_token_bytes = (unsigned)(row > combineRow ? row : combineRow);
  config.max_num_sms = c->sms;
  config.timeout_ns = c->timeoutMs * 1000000ull;
  config.num_topk = c->topk;
  config.enable_mask = c->masks;
  ext.single_reduction = c->single;
  return told(layer, ncclEpCreateGroupExt(&layer->group, layer->port->comm, &config, &ext), "ncclEpCreateGroupExt");
}

ncclEpLayout_t epLayerLayout(const epLayerConfig *config) {
  return config->layout == EP_REF_FLAT         ? NCCL_EP_LAYOUT_FLAT
         : config->layout == EP_REF_RANK_MAJOR ? NCCL_EP_LAYOUT_RANK_MAJOR
                                               : NCCL_EP_LAYOUT_EXPERT_MAJOR;
}

static int createHandle(epLayer *layer) {
  const epLayerConfig *c = &layer->config;
  ncclEpHandleConfig_t config = NCCL_EP_HANDLE_CONFIG_INIT;
  config.dispatch_output_per_expert_alignment = c->layout == EP_REF_EXPERT_MAJOR ? c->align : 0;
  return told(layer, ncclEpInitHandle(&layer->handle, layer->group, epLayerLayout(c), &config, (int)c->topk, NULL),
              "ncclEpInitHandle");
}

static int createBuffers(epLayer *layer) {
  const epLayerConfig *c = &layer->config;
  size_t row = epLayerRowBytes(c), combineRow = epLayerCombineRowBytes(c), scales = epLayerScaleBytes(c);
  size_t tokens = c->maxTokens, locals = c->experts / (unsigned)layer->port->ranks, stride = epLayerScaleStride(c);
  size_t perRow = epLayerRowWeights(c), counter = c->index32 ? 4 : 8;
  size_t index = c->layout == EP_REF_FLAT ? 8 : c->layout == EP_REF_RANK_MAJOR ? 4 : 0;
  for (unsigned i = 0; i < c->routings; i++)
    if (allocate(layer, &layer->idx[i], tokens * c->topk * (c->index32 ? 4 : 8), "topk_idx")) return -1;
  if (allocate(layer, &layer->inTokens, tokens * row, "dispatch input tokens") ||
      allocate(layer, &layer->inWeights, tokens * c->topk * 4, "dispatch input topk_weights") ||
      (c->windowOut ? allocateWindow : allocate)(layer, &layer->outTokens, c->capacity * row,
                                                 "dispatch output tokens") ||
      (perRow && allocate(layer, &layer->outWeights, c->capacity * perRow * 4, "dispatch output topk_weights")) ||
      allocate(layer, &layer->sources, (unsigned)layer->port->ranks * counter, "src_rank_counters") ||
      allocate(layer, &layer->counters, locals * counter, "expert_counters") ||
      allocate(layer, &layer->total, counter, "recv_total_counter") ||
      allocate(layer, &layer->expertOut, c->capacity * combineRow, "combine input tokens") ||
      allocate(layer, &layer->y, tokens * combineRow, "combine output tokens"))
    return -1;
  if (scales && (allocate(layer, &layer->inScales, tokens * scales, "dispatch input scales") ||
                 allocate(layer, &layer->outScales, stride ? scales / 4 * stride : c->capacity * scales,
                          "dispatch output scales")))
    return -1;
  if (index ? allocate(layer, &layer->outIdx, c->capacity * c->topk * index, "dispatch output topk_idx")
            : allocate(layer, &layer->offsets, locals * counter, "expert_offsets"))
    return -1;
  if (c->nvfp4 && allocate(layer, &layer->expertScales, c->capacity * sizeof(float), "combine input scales")) return -1;
  for (unsigned b = 0; b < c->bias; b++)
    if (allocate(layer, &layer->bias[b], tokens * combineRow, "bias")) return -1;
  if (c->backward && (allocate(layer, &layer->expertWeights, c->capacity * perRow * 4, "combine input topk_weights") ||
                      allocate(layer, &layer->yWeights, tokens * c->topk * 4, "combine output topk_weights")))
    return -1;
  return 0;
}

int epLayerOpen(epPort *port, const epLayerConfig *config, epLayer **out) {
  epLayer *layer = calloc(1, sizeof(*layer));
  if (!layer) return epToolFail("out of host memory");
  layer->port = port;
  layer->config = *config;
  if (createGroup(layer) || createHandle(layer) || createBuffers(layer)) {
    epLayerClose(layer);
    return -1;
  }
  *out = layer;
  return 0;
}

int epLayerClose(epLayer *layer) {
  int rc = 0;
  epBuffer *single[] = {&layer->inTokens,  &layer->inWeights,     &layer->outTokens, &layer->outWeights,
                        &layer->outIdx,    &layer->counters,      &layer->offsets,   &layer->total,
                        &layer->expertOut, &layer->expertWeights, &layer->y,         &layer->yWeights,
                        &layer->inScales,  &layer->outScales,     &layer->sources,   &layer->bias[0],
                        &layer->bias[1],   &layer->expertScales};
  for (unsigned p = 0; p < EP_PARTS; p++)
    for (unsigned i = 0; i < EP_LAYER_ROUTINGS; i++) epPortGraphFree(layer->port, layer->graphs[p][i]);
  if (layer->handle) rc |= told(layer, ncclEpHandleDestroy(layer->handle), "ncclEpHandleDestroy");
  if (layer->group) rc |= told(layer, ncclEpGroupDestroy(layer->group), "ncclEpGroupDestroy");
  if (layer->config.windowOut) {
    rc |= epPortFreeWindow(layer->port, layer->outMemory, layer->outWindow);
    layer->outTokens.base = NULL;
  }
  for (size_t i = 0; i < sizeof(single) / sizeof(epBuffer *); i++) epPortFree(layer->port, single[i]->base);
  for (unsigned i = 0; i < EP_LAYER_ROUTINGS; i++) epPortFree(layer->port, layer->idx[i].base);
  free(layer);
  return rc;
}

/* ---- Calls ------------------------------------------------------------------------------------------------------ */

int epLayerSetIndices(epLayer *layer, unsigned routing, const int64_t *idx, uint32_t tokens) {
  size_t entries = (size_t)tokens * layer->config.topk;
  int32_t *narrow;
  int rc;
  layer->tokens[routing] = tokens;
  if (!layer->config.index32) return epPortCopy(layer->port, layer->idx[routing].data, idx, entries * sizeof(*idx));
  narrow = malloc(entries * sizeof(*narrow) + 1);
  if (!narrow) return epToolFail("out of host memory");
  for (size_t i = 0; i < entries; i++) narrow[i] = (int32_t)idx[i];
  rc = epPortCopy(layer->port, layer->idx[routing].data, narrow, entries * sizeof(*narrow));
  free(narrow);
  return rc;
}

ncclDataType_t epLayerType(epRefType type) {
  return type == EP_REF_BF16   ? ncclBfloat16
         : type == EP_REF_F16  ? ncclFloat16
         : type == EP_REF_E4M3 ? ncclFloat8e4m3
                               : ncclFloat32;
}

/* A tensor over a buffer; without rows it has no address. sizes: the caller's [2]. */
static ncclEpTensor_t tensorOf(const epBuffer *buffer, ncclDataType_t type, unsigned ndim, size_t *sizes, size_t rows,
                               size_t columns) {
  ncclEpTensor_t tensor = NCCL_EP_TENSOR_INIT;
  sizes[0] = rows;
  sizes[1] = columns;
  tensor.ndim = ndim;
  tensor.datatype = type;
  tensor.data = rows ? buffer->data : NULL;
  tensor.sizes = sizes;
  return tensor;
}

/* Tokens of dispatch's output: a window-backed tensor names its window instead of an address. */
static ncclEpTensor_t inWindow(const epLayer *layer, ncclEpTensor_t tensor) {
  if (!layer->outWindow) return tensor;
  tensor.data = NULL;
  tensor.win_hdl = layer->outWindow;
  tensor.win_offset = (uint64_t)(layer->outTokens.data - (unsigned char *)layer->outMemory);
  return tensor;
}

/* ---- Low latency: fixed places, counters at dispatch ------------------------------------------------------------- */

/* [R, B, columns] or [L, R * B, columns]. sizes: the caller's [3]. */
static ncclEpTensor_t placesOf(const epLayer *layer, const epBuffer *buffer, ncclDataType_t type, size_t *sizes,
                               size_t columns) {
  const epLayerConfig *c = &layer->config;
  size_t ranks = (size_t)layer->port->ranks;
  ncclEpTensor_t tensor = NCCL_EP_TENSOR_INIT;
  sizes[0] = c->layout == EP_REF_RANK_MAJOR ? ranks : c->experts / ranks;
  sizes[1] = c->layout == EP_REF_RANK_MAJOR ? c->maxTokens : ranks * c->maxTokens;
  sizes[2] = columns;
  tensor.ndim = 3;
  tensor.datatype = type;
  tensor.data = buffer->data;
  tensor.sizes = sizes;
  return tensor;
}

static int update(epLayer *layer, const ncclEpTensor_t *idx, const ncclEpLayoutInfo_t *info) {
  ncclEpUpdateExtConfig_t config = NCCL_EP_UPDATE_EXT_CONFIG_INIT;
  config.borrow_topk_idx = layer->config.fused && !layer->alone;
  return told(layer, ncclEpUpdateHandleExt(layer->handle, idx, info, &config, layer->port->stream),
              "ncclEpUpdateHandleExt");
}

/* What a staged call has sent is received now. */
static int complete(epLayer *layer, int rc) {
  ncclEpDeferred_t later = NCCL_EP_DEFERRED_INIT;
  if (rc || !layer->config.staged) return rc;
  later.handle = layer->handle;
  later.event = layer->config.staged == 2 ? layer->port->done : NULL;
  return told(layer, ncclEpDeferredRun(&later, layer->port->stream), "ncclEpDeferredRun");
}

static int llUpdate(epLayer *layer, unsigned routing) {
  const epLayerConfig *c = &layer->config;
  size_t sizes[2];
  ncclEpTensor_t idx =
      tensorOf(&layer->idx[routing], c->index32 ? ncclInt32 : ncclInt64, 2, sizes, layer->tokens[routing], c->topk);
  layer->current = routing;
  return update(layer, &idx, NULL);
}

static ncclDataType_t scaleTypeOf(const epLayerConfig *c) {
  return c->scales == EP_SCALES_FP32 ? ncclFloat32 : ncclUint8;
}

static int llDispatch(epLayer *layer) {
  const epLayerConfig *c = &layer->config;
  size_t sizes[10][3], tokens = layer->tokens[layer->current], ranks = (size_t)layer->port->ranks;
  ncclDataType_t integer = c->index32 ? ncclInt32 : ncclInt64, scaleType = scaleTypeOf(c);
  size_t scales = epLayerScaleBytes(c) / (scaleType == ncclFloat32 ? 4 : 1);
  ncclEpTensor_t in = tensorOf(&layer->inTokens, epLayerType(c->type), 2, sizes[0], tokens, c->hidden);
  ncclEpTensor_t inWeights = tensorOf(&layer->inWeights, ncclFloat32, 2, sizes[1], tokens, c->topk);
  ncclEpTensor_t out = inWindow(layer, placesOf(layer, &layer->outTokens, epLayerType(c->type), sizes[2], c->hidden));
  ncclEpTensor_t outWeights = placesOf(layer, &layer->outWeights, ncclFloat32, sizes[3], c->topk);
  ncclEpTensor_t outIdx = placesOf(layer, &layer->outIdx, ncclInt32, sizes[4], c->topk);
  ncclEpTensor_t counters = tensorOf(&layer->counters, integer, 1, sizes[5], c->experts / ranks, 1);
  ncclEpTensor_t sources = tensorOf(&layer->sources, integer, 1, sizes[6], ranks, 1);
  ncclEpTensor_t total = tensorOf(&layer->total, integer, 1, sizes[7], 1, 1);
  ncclEpTensor_t inScales = tensorOf(&layer->inScales, scaleType, 2, sizes[8], tokens, scales);
  ncclEpTensor_t outScales = placesOf(layer, &layer->outScales, scaleType, sizes[9], scales);
  ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t result = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
  ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
  ncclEpDispatchExtConfig_t ext = NCCL_EP_DISPATCH_EXT_CONFIG_INIT;
  config.send_only = c->staged != 0;
  if (c->staged == 2) ext.communication_stream = 1, ext.done_event = layer->port->done;
  info.expert_counters = &counters;
  info.src_rank_counters = &sources;
  info.recv_total_counter = &total;
  inputs.tokens = &in;
  result.tokens = &out;
  if (c->layout == EP_REF_RANK_MAJOR) {
    inputs.topk_weights = &inWeights;
    result.topk_weights = &outWeights;
    result.topk_idx = &outIdx;
  }
  if (c->scales != EP_SCALES_NONE) {
    config.quant_recipe = NCCL_EP_DISP_QUANT_FWD;
    inputs.scales = &inScales;
    result.scales = &outScales;
  }
  return complete(
      layer, told(layer, ncclEpDispatchExt(layer->handle, &inputs, &result, &info, &config, &ext, layer->port->stream),
                  "ncclEpDispatch"));
}

static int llCombine(epLayer *layer) {
  const epLayerConfig *c = &layer->config;
  size_t sizes[4][3], tokens = layer->tokens[layer->current];
  ncclEpTensor_t scales = placesOf(layer, &layer->expertScales, ncclFloat32, sizes[3], 1);
  ncclEpTensor_t in = placesOf(layer, &layer->expertOut, epLayerType(c->combineType), sizes[0], c->hidden);
  ncclEpTensor_t out = tensorOf(&layer->y, epLayerType(c->combineType), 2, sizes[1], tokens, c->hidden);
  ncclEpTensor_t weights = tensorOf(&layer->inWeights, ncclFloat32, 2, sizes[2], tokens, c->topk);
  ncclEpCombineInputs_t inputs = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t result = NCCL_EP_COMBINE_OUTPUTS_INIT;
  ncclEpCombineConfig_t config = NCCL_EP_COMBINE_CONFIG_INIT;
  ncclEpCombineExtConfig_t ext = NCCL_EP_COMBINE_EXT_CONFIG_INIT;
  inputs.tokens = &in;
  result.tokens = &out;
  result.topk_weights = c->layout == EP_REF_EXPERT_MAJOR_3D ? &weights : NULL;
  if (c->nvfp4) config.quant_recipe = NCCL_EP_COMB_QUANT_NVFP4, inputs.scales = &scales;
  config.send_only = c->staged != 0;
  if (c->staged == 2) ext.communication_stream = 1, ext.done_event = layer->port->done;
  return complete(layer,
                  told(layer, ncclEpCombineExt(layer->handle, &inputs, &result, &config, &ext, layer->port->stream),
                       "ncclEpCombine"));
}

/* ---- High throughput ------------------------------------------------------------------------------------------------ */

int epLayerUpdate(epLayer *layer, unsigned routing) {
  const epLayerConfig *c = &layer->config;
  size_t locals = c->experts / (unsigned)layer->port->ranks, sizes[4][2];
  ncclDataType_t integer = c->index32 ? ncclInt32 : ncclInt64;
  ncclEpTensor_t idx = tensorOf(&layer->idx[routing], integer, 2, sizes[0], layer->tokens[routing], c->topk);
  ncclEpTensor_t counters = tensorOf(&layer->counters, integer, 1, sizes[1], locals, 1);
  ncclEpTensor_t offsets = tensorOf(&layer->offsets, integer, 1, sizes[2], locals, 1);
  ncclEpTensor_t total = tensorOf(&layer->total, integer, 1, sizes[3], 1, 1);
  ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
  ncclEpHostCounts_t counts = NCCL_EP_HOST_COUNTS_INIT;
  if (epLayerIsLl(c)) return llUpdate(layer, routing);
  info.expert_counters = &counters;
  info.expert_offsets = c->layout == EP_REF_EXPERT_MAJOR ? &offsets : NULL;
  info.recv_total_counter = &total;
  layer->current = routing;
  if (update(layer, &idx, &info)) return -1;
  if (c->budget) return 0;
  if (told(layer, ncclEpGetHostCounts(layer->handle, &counts), "ncclEpGetHostCounts")) return -1;
  layer->eagerRows = counts.total_padded;
  if (layer->eagerRows > c->capacity)
    return epToolFail("rank %d: the update says %u rows, more than the %llu there can be", layer->port->rank,
                      counts.total_padded, (unsigned long long)c->capacity);
  return 0;
}

static size_t outputRows(const epLayer *layer) {
  return layer->config.budget ? (size_t)layer->config.budget : (size_t)layer->eagerRows;
}

/* [rows] in the expert-major layout, [rows, K] in the flat one. */
static ncclEpTensor_t weightsOf(const epLayer *layer, const epBuffer *buffer, size_t *sizes) {
  unsigned ndim = layer->config.layout == EP_REF_FLAT ? 2 : 1;
  return tensorOf(buffer, ncclFloat32, ndim, sizes, outputRows(layer), layer->config.topk);
}

int epLayerDispatch(epLayer *layer, int backward) {
  const epLayerConfig *c = &layer->config;
  size_t sizes[7][2], tokens = layer->tokens[layer->current], rows = outputRows(layer);
  size_t scaleBytes = c->scales == EP_SCALES_FP32 ? 4 : 1, scales = epLayerScaleBytes(c) / scaleBytes;
  ncclDataType_t scaleType = scaleTypeOf(c);
  ncclEpTensor_t in = tensorOf(&layer->inTokens, epLayerType(c->type), 2, sizes[0], tokens, c->hidden);
  ncclEpTensor_t inWeights = tensorOf(&layer->inWeights, ncclFloat32, 2, sizes[1], tokens, c->topk);
  ncclEpTensor_t out = inWindow(layer, tensorOf(&layer->outTokens, epLayerType(c->type), 2, sizes[2], rows, c->hidden));
  ncclEpTensor_t outWeights = weightsOf(layer, &layer->outWeights, sizes[3]);
  ncclEpTensor_t outIdx = tensorOf(&layer->outIdx, ncclInt64, 2, sizes[4], rows, c->topk);
  ncclEpTensor_t inScales = tensorOf(&layer->inScales, scaleType, 2, sizes[5], tokens, scales);
  ncclEpTensor_t outScales = tensorOf(&layer->outScales, scaleType, 2, sizes[6], rows, scales);
  ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t result = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
  ncclEpDispatchExtConfig_t ext = NCCL_EP_DISPATCH_EXT_CONFIG_INIT;
  if (epLayerIsLl(c)) return llDispatch(layer);
  inputs.tokens = &in;
  result.tokens = &out;
  if (!backward) {
    inputs.topk_weights = &inWeights;
    result.topk_weights = &outWeights;
    result.topk_idx = c->layout == EP_REF_FLAT ? &outIdx : NULL;
  }
  config.pass_direction = backward ? NCCL_EP_BWD_PASS : NCCL_EP_FWD_PASS;
  config.send_only = c->staged != 0;
  if (c->staged == 2) ext.communication_stream = 1, ext.done_event = layer->port->done;
  if (c->scales != EP_SCALES_NONE) {
    config.quant_recipe = NCCL_EP_DISP_QUANT_FWD;
    inputs.scales = &inScales;
    result.scales = &outScales;
  }
  ext.scale_layout = c->scaleColumns ? NCCL_EP_SCALE_COLUMN_MAJOR : NCCL_EP_SCALE_ROW_MAJOR;
  ext.scale_column_stride = epLayerScaleStride(c);
  ext.no_zero_pad = c->noZeroPad;
  ext.num_qps = c->queuePairs;
  return complete(
      layer, told(layer, ncclEpDispatchExt(layer->handle, &inputs, &result, NULL, &config, &ext, layer->port->stream),
                  backward ? "ncclEpDispatch (backward)" : "ncclEpDispatch"));
}

int epLayerCombine(epLayer *layer, int backward) {
  const epLayerConfig *c = &layer->config;
  size_t sizes[6][2], tokens = layer->tokens[layer->current], rows = outputRows(layer);
  ncclEpTensor_t bias[2];
  ncclEpTensor_t in = tensorOf(&layer->expertOut, epLayerType(c->combineType), 2, sizes[0], rows, c->hidden);
  ncclEpTensor_t inWeights = weightsOf(layer, &layer->expertWeights, sizes[1]);
  ncclEpTensor_t out = tensorOf(&layer->y, epLayerType(c->combineType), 2, sizes[2], tokens, c->hidden);
  ncclEpTensor_t outWeights = tensorOf(&layer->yWeights, ncclFloat32, 2, sizes[3], tokens, c->topk);
  ncclEpCombineInputs_t inputs = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t result = NCCL_EP_COMBINE_OUTPUTS_INIT;
  ncclEpCombineConfig_t config = NCCL_EP_COMBINE_CONFIG_INIT;
  ncclEpCombineExtConfig_t ext = NCCL_EP_COMBINE_EXT_CONFIG_INIT;
  if (epLayerIsLl(c)) return llCombine(layer);
  inputs.tokens = &in;
  result.tokens = &out;
  if (backward) {
    inputs.topk_weights = &inWeights;
    result.topk_weights = &outWeights;
  }
  ext.num_qps = c->queuePairs;
  for (unsigned b = 0; b < c->bias; b++) {
    bias[b] = tensorOf(&layer->bias[b], epLayerType(c->combineType), 2, sizes[4 + b], tokens, c->hidden);
    ext.bias[b] = &bias[b];
  }
  config.pass_direction = backward ? NCCL_EP_BWD_PASS : NCCL_EP_FWD_PASS;
  config.send_only = c->staged != 0;
  if (c->staged == 2) ext.communication_stream = 1, ext.done_event = layer->port->done;
  return complete(layer,
                  told(layer, ncclEpCombineExt(layer->handle, &inputs, &result, &config, &ext, layer->port->stream),
                       backward ? "ncclEpCombine (backward)" : "ncclEpCombine"));
}

/* ---- Calls together ------------------------------------------------------------------------------------------------- */

int epLayerCalls(epLayer *layer, unsigned parts, unsigned routing) {
  int backward = (parts & EP_PART_BACKWARD) != 0;
  layer->alone = !(parts & EP_PART_DISPATCH);
  if ((parts & EP_PART_UPDATE) && epLayerUpdate(layer, routing)) return -1;
  layer->alone = 0;
  if ((parts & EP_PART_DISPATCH) && epLayerDispatch(layer, backward)) return -1;
  return (parts & EP_PART_COMBINE) && epLayerCombine(layer, backward) ? -1 : 0;
}

int epLayerReady(epLayer *layer, unsigned parts, unsigned routing) {
  void *graph = NULL;
  int rc;
  if (!layer->config.graph || layer->graphs[parts][routing]) return 0;
  if (epPortCaptureBegin(layer->port)) return -1;
  rc = epLayerCalls(layer, parts, routing);
  rc |= epPortCaptureEnd(layer->port, &graph); /* also after a failure: the stream must come out of the capture */
  layer->graphs[parts][routing] = graph;
  return rc ? -1 : 0;
}

int epLayerRun(epLayer *layer, unsigned parts, unsigned routing) {
  if (!layer->config.graph) return epLayerCalls(layer, parts, routing);
  if (epLayerReady(layer, parts, routing)) return -1;
  if (parts & EP_PART_UPDATE) layer->current = routing;
  return epPortReplay(layer->port, layer->graphs[parts][routing]);
}
