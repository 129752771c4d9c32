/* One fuzzed call: what its arguments should be follows from what the rank has made so far; in wild calls some are not that. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"

#define SCALAR(in, right) ((int)fuzzValue(in, (unsigned)(right)))

void fuzzSync(fuzzRank *me) {
  (void)ncclEpEmuStreamSynchronize(me->comm, NULL); /* refused when stuck, which the fabric reports at the end */
}

static cudaStream_t stream(fuzzRank *me) { return fuzzWrong(&me->in) ? (cudaStream_t)(uintptr_t)64 : NULL; }

static ncclEpTensor_t *tensor(fuzzRank *me, ncclDataType_t type, int fill, unsigned ndim, size_t a, size_t b,
                              size_t c) {
  const fuzzShape shape = {.type = type, .ndim = ndim, .sizes = {a, b, c}, .fill = fill};
  return fuzzTensor(me, &shape);
}

/* ---- Groups ---------------------------------------------------------------------------------------------------------- */

static cudaError_t noMemory(void **ptr, size_t bytes, void *context) {
  (void)ptr, (void)bytes, (void)context;
  return cudaErrorMemoryAllocation;
}
static cudaError_t noFree(void *ptr, void *context) {
  (void)ptr, (void)context;
  return cudaErrorInvalidValue;
}

static void createGroup(fuzzRank *me, unsigned slot) {
  fuzzBytes *in = &me->in;
  fuzzGroup *g = &me->groups[slot];
  static const unsigned rows[] = {16, 32, 48, 64, 128, 256, 512, 4096};
  ncclEpGroupConfig_t c = NCCL_EP_GROUP_CONFIG_INIT;
  ncclEpGroupExtConfig_t ext = NCCL_EP_GROUP_EXT_CONFIG_INIT;
  ncclEpGroup_t group = NULL;
  const unsigned shape = fuzzByte(in), how = fuzzByte(in);
  fuzzGroupEnd(me, slot);
  c.algorithm = how % 3 == 0 ? NCCL_EP_ALGO_LOW_LATENCY : NCCL_EP_ALGO_HIGH_THROUGHPUT;
  c.num_experts = (unsigned)me->ranks * (1 + shape % 4);
  c.max_dispatch_tokens_per_rank = 1 + shape / 4 % 8;
  c.num_topk = 1 + shape / 32 % 4;
  c.max_token_bytes = rows[fuzzPick(in, 8)];
  if (how / 3 % 3) /* tight or generous */
    c.max_recv_tokens_per_rank =
        c.max_dispatch_tokens_per_rank * (how / 3 % 3 == 1 ? 1 : (unsigned)me->ranks * c.num_topk);
  c.max_num_sms = how / 9 % 4;
  if (c.algorithm == NCCL_EP_ALGO_HIGH_THROUGHPUT && me->plain) c.zero_copy = (ncclEpZeroCopyMode_t)(how / 36 % 3);
  c.enable_mask = c.zero_copy != NCCL_EP_ZERO_COPY_ON && how % 5 == 0;
  if (in->wild) {
    c.version = fuzzValue(in, c.version);
    c.algorithm = (ncclEpAlgorithm_t)fuzzValue(in, c.algorithm);
    c.num_experts = fuzzValue(in, c.num_experts);
    const unsigned most = fuzzValue(in, c.max_dispatch_tokens_per_rank);
    c.max_dispatch_tokens_per_rank = most > 64 ? 0x80000000u + most : most; /* refused, or small enough to run */
    c.max_recv_tokens_per_rank = fuzzValue(in, c.max_recv_tokens_per_rank);
    c.max_token_bytes = fuzzValue(in, c.max_token_bytes);
    c.num_qp_per_rank = fuzzValue(in, 0);
    c.max_num_sms = fuzzValue(in, c.max_num_sms);
    c.enable_mask = fuzzValue(in, 0);
    c.zero_copy = (ncclEpZeroCopyMode_t)fuzzValue(in, c.zero_copy);
    c.overflow_policy = (ncclEpOverflowPolicy_t)fuzzValue(in, 0);
    c.num_topk = fuzzValue(in, c.num_topk);
    if (fuzzWrong(in))
      c.alloc.alloc_fn = noMemory; /* alone: refused; with the other: the fabric has memory of its own */
    if (fuzzWrong(in)) c.alloc.free_fn = noFree;
  }
  const ncclEpGroupConfig_t *given = fuzzStruct(me, &c, sizeof c);
  const int single = how >= 128;
  ext.single_reduction = single;
  if (in->wild) ext.single_reduction = (int)fuzzValue(in, (unsigned)single);
  ncclEpGroup_t *out = fuzzWrong(in) ? NULL : &group;
  ncclComm_t comm = fuzzWrong(in) ? NULL : me->comm;
  const ncclResult_t r = single ? fuzzResult(me, "ncclEpCreateGroupExt", ncclEpCreateGroupExt(out, comm, given, &ext))
                                : fuzzResult(me, "ncclEpCreateGroup", ncclEpCreateGroup(out, comm, given));
  if (!group != (r != ncclSuccess)) fuzzFail(me, "result %d, and the group is %p", (int)r, (void *)group);
  if (r != ncclSuccess) return;
  me->traps |= c.overflow_policy == NCCL_EP_OVERFLOW_TRAP;
  ncclEpGroupProperties_t p = NCCL_EP_GROUP_PROPERTIES_INIT;
  if (ncclEpGetGroupProperties(group, &p) != ncclSuccess || p.ranks != me->ranks || p.rank != me->rank)
    fuzzFail(me, "ncclEpGetGroupProperties: rank %d of %d", p.rank, p.ranks);
  *g = (fuzzGroup){group,
                   g->old,
                   c.algorithm == NCCL_EP_ALGO_LOW_LATENCY,
                   c.num_experts,
                   c.max_dispatch_tokens_per_rank,
                   c.max_recv_tokens_per_rank,
                   c.max_token_bytes,
                   c.num_topk ? c.num_topk : 4};
}

static ncclEpGroup_t groupOf(fuzzRank *me, unsigned slot) {
  static char none[64];
  if (!fuzzWrong(&me->in)) return me->groups[slot].group;
  switch (fuzzPick(&me->in, 4)) {
  case 0:
    return NULL;
  case 1:
    return (ncclEpGroup_t)(void *)none;
  case 2:
    return (ncclEpGroup_t)(void *)me->handles[0].handle;
  default:
    return me->groups[slot].old;
  }
}

void fuzzGroupEnd(fuzzRank *me, unsigned slot) {
  fuzzGroup *g = &me->groups[slot];
  if (!g->group) return;
  fuzzSync(me);
  fuzzResult(me, "ncclEpGroupDestroy", ncclEpGroupDestroy(g->group));
  g->old = g->group, g->group = NULL;
}

/* ---- Handles --------------------------------------------------------------------------------------------------------- */

static ncclEpHandle_t handleOf(fuzzRank *me, unsigned slot) {
  static char none[64];
  if (!fuzzWrong(&me->in)) return me->handles[slot].handle;
  switch (fuzzPick(&me->in, 4)) {
  case 0:
    return NULL;
  case 1:
    return (ncclEpHandle_t)(void *)none;
  case 2:
    return (ncclEpHandle_t)(void *)me->groups[0].group;
  default:
    return me->handles[slot].old;
  }
}

static void endHandle(fuzzRank *me, unsigned slot) {
  fuzzHandle *h = &me->handles[slot];
  if (!h->handle) return;
  fuzzSync(me);
  fuzzResult(me, "ncclEpHandleDestroy", ncclEpHandleDestroy(h->handle));
  h->old = h->handle, h->handle = NULL, h->topk = 0, h->memory = NULL;
}

/* This rank's tokens of a batch, and their experts: distinct ones, some none, repeated, or such as do not exist. */
static ncclEpTensor_t *routing(fuzzRank *me, const fuzzGroup *g, unsigned topk, unsigned *tokens) {
  fuzzBytes *in = &me->in;
  const unsigned how = fuzzByte(in), spread = fuzzByte(in), kind = how / 16 % 8, wide = how % 2;
  *tokens = g->tokens > 64 ? 4 : (spread + spread / 16 * (unsigned)me->rank) % (g->tokens + 1);
  if (fuzzWrong(in)) *tokens = g->tokens + 1;
  uint64_t seed = (uint64_t)(how * 256 + spread + 1) * 4 + (uint64_t)me->rank;
  ncclEpTensor_t *t = tensor(me, wide ? ncclInt64 : ncclInt32, 0, 2, *tokens, topk, 0);
  const size_t count = (size_t)*tokens * topk, bytes = count * (wide ? 8 : 4);
  int64_t *ids = fuzzKeep(&me->host, count * 8);
  for (size_t i = 0; i < count; i++) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    const unsigned draw = (unsigned)(seed >> 33), k = (unsigned)(i % topk);
    int64_t id = k && kind < 6 && topk <= g->experts ? (ids[i - 1] + 1) % (int64_t)(g->experts ? g->experts : 1)
                                                     : (int64_t)(draw % (g->experts ? g->experts : 1));
    if (kind == 5 && draw / 7 % 4 == 0) id = -1;
    if (kind == 7 && draw / 7 % 4 == 0)
      id = (int64_t)(draw % 2 ? INT32_MIN + (int)draw % 9 : (int)g->experts + (int)draw % 9);
    ids[i] = id;
  }
  if (!me->filled || !bytes) return t; /* zeros will do */
  int32_t *narrow = fuzzKeep(&me->host, count * 4);
  for (size_t i = 0; i < count; i++) narrow[i] = (int32_t)ids[i];
  (void)ncclEpEmuMemcpy(me->comm, me->filled, wide ? (void *)ids : (void *)narrow, bytes, NULL); /* as in fuzzDevice */
  return t;
}

/* Counters: of an update in high throughput, of a dispatch in low latency. */
static ncclEpLayoutInfo_t *counters(fuzzRank *me, const fuzzGroup *g, const fuzzHandle *h, int dispatch) {
  fuzzBytes *in = &me->in;
  const unsigned how = fuzzByte(in), locals = g->experts / (unsigned)me->ranks;
  ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
  if (how % 3 == 0) return NULL;
  if (g->lowLatency == dispatch || fuzzWrong(in)) {
    if (how & 4) info.expert_counters = tensor(me, how & 8 ? ncclInt64 : ncclInt32, -1, 1, locals, 0, 0);
    if (how & 16) info.recv_total_counter = tensor(me, ncclInt32, -1, 1, 1, 0, 0);
    if ((how & 32) && (g->lowLatency || fuzzWrong(in)))
      info.src_rank_counters = tensor(me, ncclInt32, -1, 1, (size_t)me->ranks, 0, 0);
    if ((how & 64) && ((!g->lowLatency && h->layout == NCCL_EP_LAYOUT_EXPERT_MAJOR) || fuzzWrong(in)))
      info.expert_offsets = tensor(me, ncclInt64, -1, 1, locals, 0, 0);
  }
  if (dispatch) info.recv_topk_idx_kind = (ncclEpExpertIdKind_t)SCALAR(in, how / 128 * 2);
  return fuzzStruct(me, &info, sizeof info);
}

static void makeHandle(fuzzRank *me, unsigned slot, unsigned group, int create) {
  fuzzBytes *in = &me->in;
  fuzzHandle *h = &me->handles[slot];
  const unsigned how = fuzzByte(in);
  const fuzzGroup *g = &me->groups[group];
  static const unsigned aligns[] = {0, 1, 2, 3, 16, 128};
  ncclEpHandleConfig_t c = NCCL_EP_HANDLE_CONFIG_INIT;
  ncclEpHandle_t handle = NULL;
  ncclResult_t r;
  unsigned tokens = 0, topk;
  endHandle(me, slot);
  if (!g->group) return;
  h->group = group;
  h->layout = how % 2 ? NCCL_EP_LAYOUT_EXPERT_MAJOR : g->lowLatency ? NCCL_EP_LAYOUT_RANK_MAJOR : NCCL_EP_LAYOUT_FLAT;
  h->align = g->lowLatency || how % 2 == 0 ? 0 : aligns[how / 2 % 6];
  topk = 1 + how / 16 % g->topk;
  c.dispatch_output_per_expert_alignment = fuzzWrong(in) ? (size_t)SCALAR(in, 1) << (how % 40) : h->align;
  const ncclEpLayout_t layout = (ncclEpLayout_t)(fuzzWrong(in) ? (int)(how % 7) - 1 : (int)h->layout);
  const ncclEpHandleConfig_t *config = how & 128 || h->align ? fuzzStruct(me, &c, sizeof c) : NULL;
  if (create) {
    ncclEpTensor_t *idx = routing(me, g, topk, &tokens);
    const ncclEpLayoutInfo_t *info = counters(me, g, h, 0);
    ncclEpGroup_t given = groupOf(me, group);
    cudaStream_t s = stream(me);
    r = fuzzResult(me, "ncclEpCreateHandle",
                   ncclEpCreateHandle(fuzzWrong(in) ? NULL : &handle, given, layout, idx, info, config, s));
  } else {
    const int open = how & 64, mine = how & 8, k = SCALAR(in, open ? -1 : (int)topk);
    const unsigned other = fuzzPick(in, FUZZ_HANDLES);
    size_t bytes = 0;
    ncclEpTensor_t *memory = NULL;
    r = ncclEpHandleMemSize(g->group, layout, config, &bytes, k);
    h->memory = NULL;
    if (mine && r == ncclSuccess) {
      if (fuzzPick(in, 4) == 0 && me->handles[other].memory && me->handles[other].memoryBytes >= bytes) {
        h->memory = me->handles[other].memory, bytes = me->handles[other].memoryBytes;
        me->blind = 1; /* two handles may now write one record */
      } else {
        if (fuzzPick(in, 8) == 0) bytes -= 256; /* too small, and says so */
        h->memory = fuzzDevice(me, bytes, 0);
      }
      h->memoryBytes = bytes;
      memory = tensor(me, ncclUint8, 0, 1, bytes, 0, 0);
      if (memory && (memory->data || memory->win_hdl)) memory->data = h->memory, memory->win_hdl = NULL;
    }
    ncclEpGroup_t given = groupOf(me, group);
    r = fuzzResult(me, "ncclEpInitHandle",
                   ncclEpInitHandle(fuzzWrong(in) ? NULL : &handle, given, layout, config, k, memory));
    if (open) topk = 0;
  }
  if (!handle != (r != ncclSuccess)) fuzzFail(me, "result %d, and the handle is %p", (int)r, (void *)handle);
  if (r != ncclSuccess) return;
  h->layout = layout;
  h->handle = handle, h->fixedTopk = create ? 0 : topk, h->topk = create ? topk : 0, h->tokens = tokens;
}

/* A handle with routing where the program can have one. */
static fuzzHandle *routed(fuzzRank *me, unsigned slot, unsigned group) {
  const fuzzHandle *h = &me->handles[slot];
  if (!h->handle || (!me->in.wild && !me->groups[h->group].group)) makeHandle(me, slot, group, 1);
  return &me->handles[slot];
}

static void update(fuzzRank *me, unsigned slot, unsigned group) {
  fuzzBytes *in = &me->in;
  fuzzHandle *h = &me->handles[slot];
  const fuzzGroup *g = &me->groups[h->group];
  ncclEpUpdateExtConfig_t ext = NCCL_EP_UPDATE_EXT_CONFIG_INIT;
  const unsigned how = fuzzByte(in);
  unsigned tokens = 0, topk;
  ncclResult_t r;
  if (!h->handle || (!in->wild && !g->group)) {
    makeHandle(me, slot, group, 0);
    return;
  }
  topk = h->fixedTopk;
  if (!topk) topk = h->topk ? h->topk : 1 + how / 4 % g->topk;
  if (fuzzWrong(in)) topk = how % 40;
  ncclEpTensor_t *idx = routing(me, g, topk ? topk : 1, &tokens);
  const ncclEpLayoutInfo_t *info = counters(me, g, h, 0);
  ncclEpHandle_t handle = handleOf(me, slot);
  if (how % 4 == 0) {
    r = fuzzResult(me, "ncclEpUpdateHandle", ncclEpUpdateHandle(handle, idx, info, stream(me)));
  } else {
    ext.borrow_topk_idx = SCALAR(in, how % 2);
    const ncclEpUpdateExtConfig_t *config = fuzzStruct(me, &ext, sizeof ext);
    r = fuzzResult(me, "ncclEpUpdateHandleExt", ncclEpUpdateHandleExt(handle, idx, info, config, stream(me)));
  }
  if (r == ncclSuccess) h->topk = topk, h->tokens = tokens;
}

/* ---- Dispatch and combine -------------------------------------------------------------------------------------------- */

/* Extents of a dispatch output of this handle: a row holds `width`; 0: one number a row. */
static ncclEpTensor_t *rows(fuzzRank *me, const fuzzGroup *g, const fuzzHandle *h, ncclDataType_t type, int fill,
                            size_t width) {
  const size_t r = (size_t)me->ranks, locals = g->experts / r, b = g->tokens;
  size_t n = g->budget;
  if (g->lowLatency && h->layout == NCCL_EP_LAYOUT_RANK_MAJOR) return tensor(me, type, fill, 3, r, b, width);
  if (g->lowLatency) return tensor(me, type, fill, 3, locals, r * b, width);
  if (!n) n = h->layout == NCCL_EP_LAYOUT_FLAT ? r * b : r * b * h->topk + locals * h->align;
  if (n > 4096) n = 4096; /* of a budget that nobody fills */
  return width ? tensor(me, type, fill, 2, n, width, 0) : tensor(me, type, fill, 1, n, 0, 0);
}

static void dispatch(fuzzRank *me, unsigned slot, unsigned group) {
  fuzzBytes *in = &me->in;
  static const ncclDataType_t types[] = {ncclBfloat16, ncclFloat32, ncclFloat8e4m3, ncclFloat16, ncclUint8, ncclInt64};
  const fuzzHandle *h = routed(me, slot, group);
  const fuzzGroup *g = &me->groups[h->group];
  const unsigned how = fuzzByte(in), flags = fuzzByte(in);
  const int em = h->layout == NCCL_EP_LAYOUT_EXPERT_MAJOR, forward = g->lowLatency || flags % 4 != 0;
  ncclEpDispatchInputs_t i = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t o = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpDispatchConfig_t c = NCCL_EP_DISPATCH_CONFIG_INIT;
  ncclEpDispatchExtConfig_t ext = NCCL_EP_DISPATCH_EXT_CONFIG_INIT;
  const ncclDataType_t type = types[how % 6];
  size_t row = g->rowBytes > 4096 ? 16 : g->rowBytes;
  const int scales = !g->lowLatency && row >= 32 && how / 8 % 4 == 0;
  if (!h->handle || !g->group) return;
  if (scales) row -= 16;
  if (how & 128) row = 16;
  const size_t hidden = row / fuzzTypeBytes(type);
  i.tokens = tensor(me, type, 0x3c, 2, h->tokens, hidden, 0);
  o.tokens = rows(me, g, h, type, -1, hidden);
  if (forward ^ fuzzWrong(in)) {
    i.topk_weights = tensor(me, ncclFloat32, 0x3c, 2, h->tokens, h->topk, 0);
    if (!em || !g->lowLatency) o.topk_weights = rows(me, g, h, ncclFloat32, -1, em ? 0 : h->topk);
    if (!em) o.topk_idx = rows(me, g, h, g->lowLatency ? ncclInt32 : ncclInt64, -1, h->topk);
  }
  if (scales ^ fuzzWrong(in)) {
    const unsigned words = 1 + flags / 4 % 4;
    ext.scale_layout = (ncclEpScaleLayout_t)SCALAR(in, flags / 16 % 2);
    i.scales = tensor(me, ncclFloat32, 0x3c, 2, h->tokens, words, 0);
    fuzzShape s = {.type = ncclFloat32,
                   .ndim = 2,
                   .sizes = {o.tokens && o.tokens->sizes ? o.tokens->sizes[0] : 1, words},
                   .fill = -1};
    if (s.sizes[0] > 65536) s.sizes[0] = 1;
    if (ext.scale_layout) {
      size_t column = (s.sizes[0] * 4 + 15) / 16 * 16;
      if (flags & 32) ext.scale_column_stride = column += 16;
      s.bytes = column * words;
    }
    if (fuzzWrong(in)) ext.scale_column_stride = (size_t)flags * 8, me->blind = 1;
    o.scales = fuzzTensor(me, &s);
  }
  c.quant_recipe = (ncclEpDispQuant_t)SCALAR(in, scales);
  c.pass_direction = (ncclEpPassDir_t)SCALAR(in, !forward);
  c.send_only = fuzzValue(in, 0);
  c.round_scales = fuzzValue(in, 0);
  ext.no_zero_pad = !g->lowLatency && flags & 64 ? 1 : 0;
  ext.num_sms = fuzzValue(in, g->lowLatency ? 0 : flags / 128 * 2);
  const ncclEpDispatchInputs_t *inputs = fuzzStruct(me, &i, sizeof i);
  const ncclEpDispatchOutputs_t *outputs = fuzzStruct(me, &o, sizeof o);
  const ncclEpLayoutInfo_t *info = counters(me, g, h, 1);
  const ncclEpDispatchConfig_t *config = fuzzStruct(me, &c, sizeof c);
  const ncclEpDispatchExtConfig_t *extra = fuzzStruct(me, &ext, sizeof ext);
  ncclEpHandle_t handle = handleOf(me, slot);
  if (how & 64 || ext.scale_layout || ext.no_zero_pad)
    fuzzResult(me, "ncclEpDispatchExt", ncclEpDispatchExt(handle, inputs, outputs, info, config, extra, stream(me)));
  else
    fuzzResult(me, "ncclEpDispatch", ncclEpDispatch(handle, inputs, outputs, info, config, stream(me)));
}

static void combine(fuzzRank *me, unsigned slot, unsigned group) {
  fuzzBytes *in = &me->in;
  static const ncclDataType_t types[] = {ncclBfloat16, ncclFloat32, ncclFloat16};
  const fuzzHandle *h = routed(me, slot, group);
  const fuzzGroup *g = &me->groups[h->group];
  const unsigned how = fuzzByte(in);
  const int em = h->layout == NCCL_EP_LAYOUT_EXPERT_MAJOR, backward = !g->lowLatency && how / 4 % 4 == 0;
  const int nvfp4 = g->lowLatency && how % 3 == 0 && how & 32;
  ncclEpCombineInputs_t i = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t o = NCCL_EP_COMBINE_OUTPUTS_INIT;
  ncclEpCombineConfig_t c = NCCL_EP_COMBINE_CONFIG_INIT;
  ncclEpCombineExtConfig_t ext = NCCL_EP_COMBINE_EXT_CONFIG_INIT;
  const ncclDataType_t type = types[how % 3];
  const size_t row = how & 128 ? 16 : g->rowBytes > 4096 ? 16 : g->rowBytes, hidden = row / fuzzTypeBytes(type);
  if (!h->handle || !g->group) return;
  i.tokens = rows(me, g, h, type, 0x3c, hidden);
  o.tokens = tensor(me, type, -1, 2, h->tokens, hidden, 0);
  if (backward ^ fuzzWrong(in)) i.topk_weights = rows(me, g, h, ncclFloat32, 0x3c, em ? 0 : h->topk);
  if ((backward || (g->lowLatency && em)) ^ fuzzWrong(in))
    o.topk_weights = tensor(me, ncclFloat32, g->lowLatency ? 0x3c : -1, 2, h->tokens, h->topk, 0);
  if (nvfp4 ^ fuzzWrong(in)) i.scales = rows(me, g, h, ncclFloat32, 0x3c, 1);
  for (unsigned b = 0; !g->lowLatency && b < how / 16 % 4 && b < 2; b++)
    ext.bias[b] = tensor(me, type, 0x3c, 2, h->tokens, hidden, 0);
  c.send_only = fuzzValue(in, 0);
  c.pass_direction = (ncclEpPassDir_t)SCALAR(in, backward);
  c.quant_recipe = (ncclEpCombQuant_t)SCALAR(in, nvfp4);
  ext.num_sms = fuzzValue(in, 0);
  const ncclEpCombineInputs_t *inputs = fuzzStruct(me, &i, sizeof i);
  const ncclEpCombineOutputs_t *outputs = fuzzStruct(me, &o, sizeof o);
  const ncclEpCombineConfig_t *config = fuzzStruct(me, &c, sizeof c);
  const ncclEpCombineExtConfig_t *extra = fuzzStruct(me, &ext, sizeof ext);
  ncclEpHandle_t handle = handleOf(me, slot);
  if (how & 64 || ext.bias[0])
    fuzzResult(me, "ncclEpCombineExt", ncclEpCombineExt(handle, inputs, outputs, config, extra, stream(me)));
  else
    fuzzResult(me, "ncclEpCombine", ncclEpCombine(handle, inputs, outputs, config, stream(me)));
}

/* ---- Questions ------------------------------------------------------------------------------------------------------- */

static void counts(fuzzRank *me, unsigned slot, unsigned group) {
  fuzzBytes *in = &me->in;
  const fuzzHandle *h = routed(me, slot, group);
  const size_t locals = me->groups[h->group].experts / (unsigned)me->ranks;
  ncclEpHostCounts_t c = NCCL_EP_HOST_COUNTS_INIT;
  const unsigned how = fuzzByte(in);
  if (how & 1) c.per_source = fuzzKeep(&me->call, (size_t)me->ranks * 4);
  if (how & 2) c.per_expert = fuzzKeep(&me->call, locals * 4);
  if (how & 4) c.per_expert_padded = fuzzKeep(&me->call, locals * 4);
  ncclEpHostCounts_t *given = fuzzStruct(me, &c, sizeof c);
  fuzzResult(me, "ncclEpGetHostCounts", ncclEpGetHostCounts(handleOf(me, slot), given));
  ncclEpDeviceCounts_t there = NCCL_EP_DEVICE_COUNTS_INIT;
  const ncclResult_t r = fuzzResult(me, "ncclEpGetDeviceCounts", ncclEpGetDeviceCounts(handleOf(me, slot), &there));
  if ((r == ncclSuccess) != (there.per_expert != NULL))
    fuzzFail(me, "result %d, and counts at %p", (int)r, (const void *)there.per_expert);
}

static void metadata(fuzzRank *me, unsigned slot, unsigned group) {
  fuzzBytes *in = &me->in;
  const fuzzHandle *h = routed(me, slot, group);
  const unsigned how = fuzzByte(in);
  const size_t less = fuzzPick(in, 4) == 0, topk = h->topk ? h->topk : 1;
  ncclEpHandleMetadata_t m = NCCL_EP_HANDLE_METADATA_INIT;
  ncclEpHandle_t handle = handleOf(me, slot);
  if (fuzzResult(me, "ncclEpGetHandleMetadata", ncclEpGetHandleMetadata(handle, &m)) != ncclSuccess) m.received = 3;
  m.received_capacity = m.received > less ? m.received - less : 0;
  m.sent_capacity = h->tokens * topk > less ? h->tokens * topk - less : 0;
  if (how & 1) m.source_rank = fuzzKeep(&me->call, m.received_capacity * sizeof(int));
  if (how & 2) m.source_token = fuzzKeep(&me->call, m.received_capacity * sizeof(int));
  if (how & 4) m.received_slot = fuzzKeep(&me->call, m.received_capacity * topk * sizeof(long long));
  if (how & 8) m.sent_slot = fuzzKeep(&me->call, m.sent_capacity * sizeof(long long));
  ncclEpHandleMetadata_t *given = fuzzStruct(me, &m, sizeof m);
  fuzzResult(me, "ncclEpGetHandleMetadata", ncclEpGetHandleMetadata(handle, given));
}

static void prepare(fuzzRank *me, unsigned slot) {
  fuzzBytes *in = &me->in;
  const fuzzGroup *g = &me->groups[slot];
  const unsigned how = fuzzByte(in);
  ncclEpPrepareConfig_t c = NCCL_EP_PREPARE_CONFIG_INIT;
  c.layout = (ncclEpLayout_t)SCALAR(in, how % 2         ? NCCL_EP_LAYOUT_EXPERT_MAJOR
                                        : g->lowLatency ? NCCL_EP_LAYOUT_RANK_MAJOR
                                                        : NCCL_EP_LAYOUT_FLAT);
  c.hidden = fuzzValue(in, 8), c.top_k = fuzzValue(in, 1);
  c.dispatch_type = (ncclDataType_t)SCALAR(in, ncclBfloat16), c.combine_type = (ncclDataType_t)SCALAR(in, ncclBfloat16);
  c.index_type = (ncclDataType_t)SCALAR(in, how & 2 ? ncclInt32 : ncclInt64);
  c.backward = SCALAR(in, !g->lowLatency && how & 4 ? 1 : 0), c.scale_bytes = fuzzValue(in, 0),
  c.num_bias = fuzzValue(in, 0);
  c.borrow_topk_idx = SCALAR(in, how / 8 % 2), c.window_output = SCALAR(in, how / 16 % 2);
  c.combine_quant = (ncclEpCombQuant_t)SCALAR(in, g->lowLatency && how & 32 ? 1 : 0);
  const ncclEpPrepareConfig_t *given = fuzzStruct(me, &c, sizeof c);
  fuzzResult(me, "ncclEpPrepare", ncclEpPrepare(groupOf(me, slot), given));
}

static void bufferSize(fuzzRank *me) {
  fuzzBytes *in = &me->in;
  ncclEpBufferSizeConfig_t c = NCCL_EP_BUFFER_SIZE_CONFIG_INIT;
  ncclEpBufferSize_t s = NCCL_EP_BUFFER_SIZE_INIT;
  c.num_experts = fuzzValue(in, (unsigned)me->ranks), c.max_tokens = fuzzValue(in, 4), c.hidden = fuzzValue(in, 16);
  c.top_k = fuzzValue(in, 1), c.datatype = (ncclDataType_t)SCALAR(in, ncclBfloat16), c.scale_bytes = fuzzValue(in, 0);
  c.multiple_reductions = SCALAR(in, 1), c.combine_datatype = (ncclDataType_t)SCALAR(in, 0);
  const ncclEpBufferSizeConfig_t *config = fuzzStruct(me, &c, sizeof c);
  ncclEpBufferSize_t *sizes = fuzzStruct(me, &s, sizeof s);
  fuzzResult(me, "ncclEpCalculateBufferSize",
             ncclEpCalculateBufferSize(fuzzWrong(in) ? NULL : me->comm, config, sizes));
}

static void question(fuzzRank *me, unsigned group, unsigned handle) {
  fuzzBytes *in = &me->in;
  ncclEpErrorInfo_t info = NCCL_EP_ERROR_INFO_INIT;
  ncclEpGroupProperties_t properties = NCCL_EP_GROUP_PROPERTIES_INIT;
  ncclEpCompleteConfig_t complete = NCCL_EP_COMPLETE_CONFIG_INIT;
  const unsigned which = fuzzPick(in, 10);
  const int how = SCALAR(in, 1);
  ncclEpGroup_t g = groupOf(me, group);
  ncclEpHandle_t h;
  size_t bytes = 0;
  int number = 0;
  switch (which) {
  case 0:
    fuzzResult(me, "ncclEpGetAsyncError", ncclEpGetAsyncError(g, fuzzWrong(in) ? NULL : &number));
    break;
  case 1:
    fuzzResult(me, "ncclEpErrorClear", ncclEpErrorClear(g));
    break;
  case 2:
    fuzzResult(me, "ncclEpGetErrorInfo", ncclEpGetErrorInfo(g, fuzzStruct(me, &info, sizeof info)));
    break;
  case 3:
    fuzzResult(me, "ncclEpGetGroupProperties",
               ncclEpGetGroupProperties(g, fuzzStruct(me, &properties, sizeof properties)));
    break;
  case 4:
    fuzzResult(me, "ncclEpHandleMemSize", ncclEpHandleMemSize(g, (ncclEpLayout_t)SCALAR(in, 3), NULL, &bytes, how));
    break;
  case 5:
    fuzzResult(me, "ncclEpMaskQuery", ncclEpMaskQuery(g, fuzzDevice(me, (size_t)me->ranks * 4, 0), NULL));
    break;
  case 6:
    fuzzResult(me, "ncclEpMaskUpdate", ncclEpMaskUpdate(g, fuzzKeep(&me->call, (size_t)me->ranks * 4), NULL));
    break;
  case 7:
    fuzzResult(me, "ncclEpMaskClean", ncclEpMaskClean(g, NULL));
    break;
  case 8:
    h = handleOf(me, handle);
    fuzzResult(me, "ncclEpComplete", ncclEpComplete(h, fuzzStruct(me, &complete, sizeof complete), NULL));
    break;
  default:
    fuzzResult(me, "ncclEpGetVersion", ncclEpGetVersion(fuzzWrong(in) ? NULL : &number));
  }
}

static void descriptor(fuzzRank *me) {
  fuzzBytes *in = &me->in;
  ncclEpTensorAllocConfig_t c = NCCL_EP_TENSOR_ALLOC_CONFIG_INIT;
  const unsigned ndim = fuzzValue(in, 1 + fuzzPick(in, 8));
  size_t *sizes = fuzzWrong(in) ? NULL : fuzzKeep(&me->call, (ndim < 8 ? ndim : 8) * sizeof *sizes);
  ncclEpTensor_t *t = me->heap, copy;
  if (t) {
    copy = *t;
    if (fuzzWrong(in)) fuzzResult(me, "ncclEpTensorDestroy", ncclEpTensorDestroy(&copy));
    fuzzResult(me, "ncclEpTensorDestroy", ncclEpTensorDestroy(t));
    me->heap = NULL;
    if (fuzzWrong(in) && fuzzResult(me, "ncclEpTensorDestroy", ncclEpTensorDestroy(t)) == ncclSuccess)
      fuzzFail(me, "a descriptor was destroyed twice");
    return;
  }
  const ncclDataType_t type = (ncclDataType_t)SCALAR(in, fuzzPick(in, 13));
  const ncclEpTensorAllocConfig_t *config = fuzzStruct(me, &c, sizeof c);
  fuzzResult(me, "ncclEpTensorAlloc", ncclEpTensorAlloc(fuzzWrong(in) ? NULL : &me->heap, ndim, type, sizes, config));
}

void fuzzCall(fuzzRank *me) {
  fuzzBytes *in = &me->in;
  const unsigned op = fuzzPick(in, 20), slot = fuzzByte(in), handle = slot % FUZZ_HANDLES,
                 group = slot / 8 % FUZZ_GROUPS;
  in->wild = slot / 32 % 3 == 0 && !me->tame;
  if (op > 1 && op < 17 && !in->wild && !me->groups[group].group) createGroup(me, group);
  switch (op) {
  case 0:
    createGroup(me, group);
    break;
  case 1:
    if (fuzzWrong(in)) fuzzResult(me, "ncclEpGroupDestroy", ncclEpGroupDestroy(me->groups[group].old));
    fuzzGroupEnd(me, group);
    break;
  case 2:
    makeHandle(me, handle, group, 1);
    break;
  case 3:
    makeHandle(me, handle, group, 0);
    break;
  case 4:
    if (fuzzWrong(in)) fuzzResult(me, "ncclEpHandleDestroy", ncclEpHandleDestroy(me->handles[handle].old));
    endHandle(me, handle);
    break;
  case 5:
  case 6:
  case 7:
    update(me, handle, group);
    break;
  case 8:
  case 9:
  case 10:
    dispatch(me, handle, group);
    break;
  case 11:
  case 12:
  case 13:
    combine(me, handle, group);
    break;
  case 14:
    counts(me, handle, group);
    break;
  case 15:
    metadata(me, handle, group);
    break;
  case 16:
    prepare(me, group);
    break;
  case 17:
    bufferSize(me);
    break;
  case 18:
    question(me, group, handle);
    break;
  default:
    descriptor(me);
  }
}
