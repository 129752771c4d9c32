/* The steps of one MoE layer for the tests: makes inputs, calls the library, checks every byte of what comes back. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "harness.h"

#define GUARD 256u
#define FILL 0xAB
#define WINDOW_STEP 64u

size_t epTestTypeBytes(ncclDataType_t type) {
  switch (type) {
  case ncclFloat16:
  case ncclBfloat16:
    return 2;
  case ncclFloat32:
  case ncclInt32:
    return 4;
  case ncclInt64:
    return 8;
  default:
    return 1;
  }
}

void epTensorMake(epTestRank *me, epTestTensor *t, ncclDataType_t type, unsigned ndim, size_t a, size_t b,
                  const char *name) {
  memset(t, 0, sizeof(*t));
  t->t = NCCL_EP_TENSOR_INIT;
  t->sizes[0] = a, t->sizes[1] = b;
  t->t.ndim = ndim, t->t.datatype = type, t->t.sizes = t->sizes;
  t->bytes = epTestTypeBytes(type) * a * (ndim > 1 ? b : 1);
  if (!t->bytes) return;
  void *base = NULL;
  EXPECT_OK(me, ncclEpEmuMalloc(me->comm, &base, t->bytes + 2 * GUARD, name));
  if (!base) return;
  EXPECT_OK(me, ncclEpEmuMemset(me->comm, base, FILL, t->bytes + 2 * GUARD, NULL));
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
  t->base = base;
  t->t.data = t->base + GUARD;
}

void epTensorFill(epTestRank *me, epTestTensor *t, const void *host) {
  if (!t->t.data) return;
  EXPECT_OK(me, ncclEpEmuMemcpy(me->comm, t->t.data, host, t->bytes, NULL));
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
}

static int allFill(const unsigned char *p, size_t bytes) {
  for (size_t i = 0; i < bytes; i++)
    if (p[i] != FILL) return 0;
  return 1;
}

void epTensorCheckGuards(epTestRank *me, const epTestTensor *t, const char *name) {
  if (!t->base) return;
  EXPECT(me, allFill(t->base, GUARD), "%s: written before its start", name);
  EXPECT(me, allFill(t->base + GUARD + t->bytes, GUARD), "%s: written past its end", name);
}

void epTensorFree(epTestRank *me, epTestTensor *t) {
  if (t->base) EXPECT_OK(me, ncclEpEmuFree(me->comm, t->base));
  memset(t, 0, sizeof(*t));
}

/* ---- Data
 * ------------------------------------------------------------------------------------------------------------- */

/* One element: value times the sign that bit (h mod 16) of r * B + t gives. */
static void putElement(ncclDataType_t type, void *row, size_t h, int negative, float value) {
  if (epTestTypeBytes(type) == 1) {
    ((unsigned char *)row)[h] = (unsigned char)((negative ? 0x80 : 0) | (type == ncclFloat8e5m2 ? 0x3c : 0x38));
    return;
  }
  epRefType t = type == ncclBfloat16 ? EP_REF_BF16 : type == ncclFloat16 ? EP_REF_F16 : EP_REF_F32;
  epRefStore(t, row, h, negative ? -value : value);
}

static void tokenRow(const epCase *c, ncclDataType_t type, uint32_t rank, uint32_t token, float value, void *row) {
  uint32_t id = rank * c->maxTokens + token;
  for (size_t h = 0; h < c->hidden; h++) putElement(type, row, h, (int)(id >> (h % 16) & 1), value);
}

static float weightOf(uint32_t rank, uint32_t token, uint32_t k) {
  static const float powers[] = {1.0f, 0.5f, 0.25f, 2.0f};
  return powers[(rank + token + k) % 4];
}

static float gradientOf(uint32_t rank, uint64_t row, uint32_t k) { return (float)(rank * 65536u + row * 32u + k + 1); }

static int combinable(ncclDataType_t type) {
  return type == ncclBfloat16 || type == ncclFloat16 || type == ncclFloat32;
}

static ncclDataType_t combineType(const epCase *c) { return combinable(c->type) ? c->type : ncclBfloat16; }

static int isFlat(const epCase *c) { return c->layout == NCCL_EP_LAYOUT_FLAT; }

static size_t scaleBytesOf(const epCase *c) { return c->scales ? c->scales * epTestTypeBytes(c->scaleType) : 0; }

/* Bytes without a pattern that a shifted row or word would share. */
static void scaleRow(const epCase *c, uint32_t rank, uint32_t token, unsigned char *row) {
  uint32_t state = (rank * c->maxTokens + token + 1) * 2654435761u;
  for (size_t b = 0; b < scaleBytesOf(c); b++) {
    state = state * 1664525u + 1013904223u;
    row[b] = (unsigned char)(state >> 24);
  }
}

static void *must(void *p) {
  if (!p) {
    fprintf(stderr, "out of memory\n");
    abort();
  }
  return p;
}

int epRoundLost(const epRound *round, int source, int owner) {
  int gone = round->gone - 1, ups = round->ups;
  if (!round->gone) return 0;
  if (source == gone || owner == gone) return 1;
  return ups && source % ups == gone % ups && owner / ups == gone / ups && source / ups != gone / ups;
}

/* A received row that is neither padding nor lost with the rank that is gone. */
static int isThere(const epRound *round, int rank, const epRefRow *r) {
  return r->source >= 0 && !epRoundLost(round, r->source, rank);
}

/* ---- Rounds
 * ----------------------------------------------------------------------------------------------------------- */

static epRef *refOf(epRound *round, epRefLayout layout) {
  const epCase *c = round->c;
  epRefRouting in = {.ranks = c->ranks,
                     .experts = c->experts,
                     .topk = c->topk,
                     .layout = layout,
                     .align = layout == EP_REF_FLAT ? 0 : c->align,
                     .budget = c->budget,
                     .tokens = round->tokens,
                     .topkIdx = (const int64_t *const *)round->idx,
                     .maxTokens = c->maxTokens};
  epRef *ref = NULL;
  assert_int_equal(epRefCreate(&in, &ref), 0);
  return ref;
}

void epRoundMake(epRound *round, const epCase *c, const uint32_t *tokens, epPickFn pick, void *arg) {
  memset(round, 0, sizeof(*round));
  round->c = c;
  for (uint32_t r = 0; r < c->ranks; r++) {
    round->tokens[r] = tokens[r];
    round->idx[r] = must(calloc((size_t)tokens[r] * c->topk + 1, sizeof(int64_t)));
    for (uint32_t t = 0; t < tokens[r]; t++)
      for (uint32_t k = 0; k < c->topk; k++) round->idx[r][(size_t)t * c->topk + k] = pick(c, r, t, k, arg);
  }
  round->ref = refOf(round, isFlat(c) ? EP_REF_FLAT : EP_REF_EXPERT_MAJOR);
  round->flat = refOf(round, EP_REF_FLAT);
}

void epRoundFree(epRound *round) {
  for (uint32_t r = 0; r < round->c->ranks; r++) free(round->idx[r]);
  epRefDestroy(round->ref);
  epRefDestroy(round->flat);
}

static uint64_t mix(uint64_t v) {
  v ^= v >> 33, v *= 0xff51afd7ed558ccdull, v ^= v >> 33, v *= 0xc4ceb9fe1a85ec53ull;
  return v ^ v >> 33;
}

/* A stride coprime to E walks over distinct experts. */
int64_t epPickRandom(const epCase *c, uint32_t rank, uint32_t token, uint32_t k, void *arg) {
  uint64_t h = mix(*(uint64_t *)arg + ((uint64_t)rank << 40) + token);
  uint64_t entry = mix(h + k + 1);
  if (entry % 8 == 0) return -1;
  uint64_t stride = 1 + h % c->experts;
  for (;;) {
    uint64_t a = stride, b = c->experts;
    while (b) {
      uint64_t rest = a % b;
      a = b, b = rest;
    }
    if (a == 1) break;
    stride++;
  }
  return (int64_t)(((h >> 20) + k * stride) % c->experts);
}

/* ---- Group and handle
 * --------------------------------------------------------------------------------------------------- */

void epGroupConfigOf(const epCase *c, ncclEpGroupConfig_t *config) {
  *config = NCCL_EP_GROUP_CONFIG_INIT;
  config->algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
  config->num_experts = c->experts;
  config->max_dispatch_tokens_per_rank = c->maxTokens;
  config->max_recv_tokens_per_rank = c->budget;
  size_t a = epTestTypeBytes(c->type) * c->hidden + (scaleBytesOf(c) + 15) / 16 * 16;
  size_t b = epTestTypeBytes(combineType(c)) * c->hidden;
  config->max_token_bytes = (unsigned)(a > b ? a : b);
  config->num_topk = c->groupTopk ? c->groupTopk : c->topk;
  config->max_num_sms = c->maxSms;
  config->zero_copy = c->zeroCopy;
  config->timeout_ns = c->timeoutNs;
  config->enable_mask = c->masks != 0;
}

void epGroupMake(epTestRank *me, const epCase *c) {
  ncclEpGroupConfig_t config;
  ncclEpGroupExtConfig_t ext = NCCL_EP_GROUP_EXT_CONFIG_INIT;
  epGroupConfigOf(c, &config);
  ext.single_reduction = c->single || getenv("EP_TEST_SINGLE") != NULL;
  EXPECT_OK(me, ncclEpCreateGroupExt(&me->group, me->comm, &config, &ext));
}

void epGroupFree(epTestRank *me) {
  EXPECT_OK(me, ncclEpGroupDestroy(me->group));
  me->group = NULL;
}

void epExpectNoAsyncError(epTestRank *me) {
  int error = -1;
  ncclEpErrorInfo_t info = NCCL_EP_ERROR_INFO_INIT;
  EXPECT_OK(me, ncclEpGetAsyncError(me->group, &error));
  EXPECT_OK(me, ncclEpGetErrorInfo(me->group, &info));
  EXPECT(me, error == 0 && info.code == 0, "asynchronous error %d: %s", error, info.text);
}

static int64_t counterAt(const epTestTensor *t, size_t i) {
  return t->t.datatype == ncclInt64 ? ((int64_t *)t->t.data)[i] : ((int32_t *)t->t.data)[i];
}

static void expectCounter(epTestRank *me, const epTestTensor *t, size_t i, uint64_t want, const char *name) {
  EXPECT(me, counterAt(t, i) == (int64_t)want, "%s[%zu] is %lld instead of %llu", name, i, (long long)counterAt(t, i),
         (unsigned long long)want);
}

static void checkDeviceCounts(epTestRank *me, epRun *run) {
  const epRefRank *want = &run->round->ref->rank[me->rank];
  uint32_t locals = run->round->ref->locals;
  for (uint32_t e = 0; e < locals; e++) {
    expectCounter(me, &run->expertCounters, e, want->counter[e], "expert_counters");
    if (!isFlat(run->round->c)) expectCounter(me, &run->expertOffsets, e, want->first[e], "expert_offsets");
  }
  expectCounter(me, &run->total, 0, want->needed, "recv_total_counter");
  epTensorCheckGuards(me, &run->expertCounters, "expert_counters");
  epTensorCheckGuards(me, &run->expertOffsets, "expert_offsets");
  epTensorCheckGuards(me, &run->total, "recv_total_counter");
}

static void checkHostCounts(epTestRank *me, epRun *run) {
  const epRefRank *want = &run->round->ref->rank[me->rank];
  uint32_t locals = run->round->ref->locals, ranks = run->round->c->ranks;
  unsigned *source = must(calloc(ranks, sizeof(unsigned))), *expert = must(calloc(locals, sizeof(unsigned))),
           *padded = must(calloc(locals, sizeof(unsigned)));
  ncclEpHostCounts_t counts = NCCL_EP_HOST_COUNTS_INIT;
  counts.per_source = source, counts.per_expert = expert, counts.per_expert_padded = padded;
  EXPECT_OK(me, ncclEpGetHostCounts(run->handle, &counts));
  EXPECT(me, counts.total == want->total && counts.total_padded == want->needed,
         "host counts: total %u, padded %u instead of %llu, %llu", counts.total, counts.total_padded,
         (unsigned long long)want->total, (unsigned long long)want->needed);
  for (uint32_t r = 0; r < ranks; r++)
    EXPECT(me, source[r] == want->perSource[r], "host counts: %u rows from rank %u instead of %llu", source[r], r,
           (unsigned long long)want->perSource[r]);
  for (uint32_t e = 0; e < locals; e++)
    EXPECT(me, expert[e] == want->perExpert[e] && padded[e] == want->perExpertPadded[e],
           "host counts of expert %u: %u, padded %u instead of %llu, %llu", e, expert[e], padded[e],
           (unsigned long long)want->perExpert[e], (unsigned long long)want->perExpertPadded[e]);
  free(source), free(expert), free(padded);
}

static void checkCountsOnDevice(epTestRank *me, epRun *run) {
  const epRefRank *want = &run->round->ref->rank[me->rank];
  uint32_t locals = run->round->ref->locals, ranks = run->round->c->ranks;
  ncclEpDeviceCounts_t counts = NCCL_EP_DEVICE_COUNTS_INIT;
  EXPECT_OK(me, ncclEpGetDeviceCounts(run->handle, &counts));
  for (uint32_t r = 0; counts.per_source && r < ranks; r++)
    EXPECT(me, counts.per_source[r] == want->perSource[r], "device counts: %u rows from rank %u instead of %llu",
           counts.per_source[r], r, (unsigned long long)want->perSource[r]);
  for (uint32_t e = 0; counts.per_expert && e < locals; e++) {
    EXPECT(me, counts.per_expert[e] == want->perExpert[e], "device counts: %u of expert %u instead of %llu",
           counts.per_expert[e], e, (unsigned long long)want->perExpert[e]);
    EXPECT(me, isFlat(run->round->c) || counts.expert_start[e] == want->offset[e],
           "device counts: expert %u starts at %u instead of %llu", e, counts.expert_start[e],
           (unsigned long long)want->offset[e]);
  }
  EXPECT(me, counts.expert_start && (isFlat(run->round->c) || counts.expert_start[locals] == want->needed),
         "device counts: slots in all instead of %llu", (unsigned long long)want->needed);
}

/* Whether nobody is there who can tell the place of entry i of `rank`. */
static int isUntold(const epRound *round, int rank, size_t i) {
  int owner = epRefOwner(round->ref, (uint32_t)rank, (uint32_t)(i / round->c->topk), (uint32_t)(i % round->c->topk));
  int silent = round->silent - 1, ups = round->ups;
  return round->silent && owner >= 0 && owner % ups == silent % ups && rank / ups == silent / ups &&
         owner / ups != rank / ups;
}

static void checkMetadata(epTestRank *me, epRun *run) {
  const epCase *c = run->round->c;
  const epRefRank *flat = &run->round->flat->rank[me->rank];
  if (c->budget) return; /* what dropped rows read as is the counts' business */
  size_t sent = (size_t)run->round->tokens[me->rank] * c->topk, n = (size_t)flat->total;
  int *rank = must(calloc(n + 1, sizeof(int))), *token = must(calloc(n + 1, sizeof(int)));
  long long *slot = must(calloc(sent + 1, sizeof(long long)));
  long long *here = must(calloc(n * c->topk + 1, sizeof(long long)));
  ncclEpHandleMetadata_t meta = NCCL_EP_HANDLE_METADATA_INIT;
  meta.source_rank = rank, meta.source_token = token, meta.sent_slot = slot;
  meta.received_capacity = n, meta.sent_capacity = sent, meta.received_slot = here;
  EXPECT_OK(me, ncclEpGetHandleMetadata(run->handle, &meta));
  EXPECT(me, meta.received == n, "metadata: %u rows instead of %zu", meta.received, n);
  for (size_t i = 0; i < n && i < meta.received; i++)
    EXPECT(me, rank[i] == flat->row[i].source && token[i] == flat->row[i].token,
           "metadata: row %zu from (%d, %d) instead of (%d, %d)", i, rank[i], token[i], flat->row[i].source,
           flat->row[i].token);
  for (size_t i = 0; i < sent; i++)
    EXPECT(me, (slot[i] == -1 && isUntold(run->round, me->rank, i)) || slot[i] == run->round->ref->slot[me->rank][i],
           "metadata: sent_slot[%zu] is %lld instead of %lld", i, slot[i],
           (long long)run->round->ref->slot[me->rank][i]);
  for (size_t i = 0; i < n * c->topk; i++) {
    const epRefRow *from = &flat->row[i / c->topk];
    size_t at = (size_t)from->token * c->topk + i % c->topk;
    int mine = epRefOwner(run->round->ref, (uint32_t)from->source, (uint32_t)from->token, i % c->topk) == me->rank;
    long long want = mine ? (long long)run->round->ref->slot[from->source][at] : -1;
    EXPECT(me, here[i] == want, "metadata: received_slot[%zu] is %lld instead of %lld", i, here[i], want);
  }
  free(rank), free(token), free(slot), free(here);
}

static void fillIndices(epTestRank *me, epRun *run) {
  const epCase *c = run->round->c;
  size_t n = (size_t)run->round->tokens[me->rank] * c->topk;
  const int64_t *idx = run->round->idx[me->rank];
  if (run->topk.t.datatype == ncclInt64) {
    epTensorFill(me, &run->topk, idx);
    return;
  }
  int32_t *narrow = must(calloc(n + 1, sizeof(int32_t)));
  for (size_t i = 0; i < n; i++) narrow[i] = (int32_t)idx[i];
  epTensorFill(me, &run->topk, narrow);
  free(narrow);
}

/* All that tells the routing, once it is there. */
static void checkRouting(epTestRank *me, epRun *run) {
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
  /* The caller may overwrite the indices now. */
  if (run->topk.base) EXPECT_OK(me, ncclEpEmuMemset(me->comm, run->topk.t.data, 0x77, run->topk.bytes, NULL));
  checkDeviceCounts(me, run);
  checkHostCounts(me, run);
  checkCountsOnDevice(me, run);
  checkMetadata(me, run);
}

/* Mostly the dispatch is what follows; else one of the other calls that need the routing. */
static void borrowingUpdate(epTestRank *me, epRun *run, const ncclEpLayoutInfo_t *info) {
  const epCase *c = run->round->c;
  ncclEpUpdateExtConfig_t config = NCCL_EP_UPDATE_EXT_CONFIG_INIT;
  ncclEpHandleConfig_t handle = NCCL_EP_HANDLE_CONFIG_INIT;
  handle.dispatch_output_per_expert_alignment = isFlat(c) ? 0 : c->align;
  if (!run->handle) EXPECT_OK(me, ncclEpInitHandle(&run->handle, me->group, c->layout, &handle, (int)c->topk, NULL));
  if (!run->handle) return;
  config.borrow_topk_idx = 1;
  EXPECT_OK(me, ncclEpUpdateHandleExt(run->handle, &run->topk.t, info, &config, NULL));
  run->unchecked = run->salt % 4 != 3;
  if (run->unchecked) return;
  if (run->salt & 4 && !c->budget)
    checkMetadata(me, run);
  else
    checkHostCounts(me, run);
}

void epRunUpdate(epTestRank *me, epRun *run, const epRound *round) {
  const epCase *c = round->c;
  uint32_t tokens = round->tokens[me->rank], locals = round->ref->locals;
  run->round = round;
  run->salt++;
  epTensorFree(me, &run->topk);
  epTensorFree(me, &run->expertCounters);
  epTensorFree(me, &run->expertOffsets);
  epTensorFree(me, &run->total);
  epTensorMake(me, &run->topk, c->indexType ? c->indexType : ncclInt64, 2, tokens, c->topk, "topk_idx");
  fillIndices(me, run);
  epTensorMake(me, &run->expertCounters, run->salt & 1 ? ncclInt32 : ncclInt64, 1, locals, 0, "expert_counters");
  epTensorMake(me, &run->expertOffsets, run->salt & 2 ? ncclInt32 : ncclInt64, 1, locals, 0, "expert_offsets");
  epTensorMake(me, &run->total, run->salt & 4 ? ncclInt32 : ncclInt64, 1, 1, 0, "recv_total_counter");
  ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
  info.expert_counters = &run->expertCounters.t, info.recv_total_counter = &run->total.t;
  if (!isFlat(c)) info.expert_offsets = &run->expertOffsets.t;
  run->unchecked = 0;
  if (run->borrow) {
    borrowingUpdate(me, run, &info);
  } else if (run->handle) {
    EXPECT_OK(me, ncclEpUpdateHandle(run->handle, &run->topk.t, &info, NULL));
  } else {
    ncclEpHandleConfig_t config = NCCL_EP_HANDLE_CONFIG_INIT;
    config.dispatch_output_per_expert_alignment = isFlat(c) ? 0 : c->align;
    EXPECT_OK(me, ncclEpCreateHandle(&run->handle, me->group, c->layout, &run->topk.t, &info, &config, NULL));
  }
  if (run->handle && !run->unchecked) checkRouting(me, run);
}

/* ---- Dispatch
 * ----------------------------------------------------------------------------------------------------------- */

static uint64_t capacityOf(const epRun *run, int rank) {
  const epCase *c = run->round->c;
  if (c->budget) return c->budget;
  return run->round->ref->rank[rank].needed + (run->salt % 3 == 0 ? 2 : 0);
}

/* ---- Windows: two over each tensor's memory, the second from WINDOW_STEP bytes on; made by all ranks, also those
 * without rows. */

static void closeWindows(epTestRank *me, ncclWindow_t *windows) {
  for (int i = 0; i < 2; i++) {
    if (windows[i]) EXPECT_OK(me, ncclEpEmuWindowDeregister(me->comm, windows[i]));
    windows[i] = NULL;
  }
}

static void openWindows(epTestRank *me, epTestTensor *t, ncclWindow_t *windows) {
  void *base = t->base;
  if (!base) EXPECT_OK(me, ncclEpEmuMalloc(me->comm, &base, 2 * GUARD, "no rows"));
  if (!t->base && base) EXPECT_OK(me, ncclEpEmuMemset(me->comm, base, FILL, 2 * GUARD, NULL));
  t->base = base;
  for (unsigned i = 0; i < 2; i++)
    EXPECT_OK(me, ncclEpEmuWindowRegister(me->comm, t->base + i * WINDOW_STEP, t->bytes + 2 * GUARD - i * WINDOW_STEP,
                                          &windows[i]));
}

/* The tensor as the call is given it: neighbours name different windows and offsets. */
static ncclEpTensor_t inWindow(const epTestRank *me, const epRun *run, const epTestTensor *tensor,
                               const ncclWindow_t *windows) {
  ncclEpTensor_t t = tensor->t;
  unsigned which = ((unsigned)me->rank + run->salt) % 2;
  if (!(run->round->c->windows >> me->rank & 1)) return t;
  t.data = NULL, t.win_hdl = windows[which], t.win_offset = GUARD - which * WINDOW_STEP;
  return t;
}

static void makeInputs(epTestRank *me, epRun *run) {
  const epCase *c = run->round->c;
  uint32_t tokens = run->round->tokens[me->rank];
  closeWindows(me, run->xWindows);
  closeWindows(me, run->wWindows);
  epTensorFree(me, &run->x);
  epTensorFree(me, &run->w);
  epTensorMake(me, &run->x, c->type, 2, tokens, c->hidden, "tokens");
  epTensorMake(me, &run->w, ncclFloat32, 2, tokens, c->topk, "topk_weights");
  if (c->windows) {
    openWindows(me, &run->x, run->xWindows);
    openWindows(me, &run->w, run->wWindows);
  }
  size_t rowBytes = epTestTypeBytes(c->type) * c->hidden;
  unsigned char *rows = must(calloc(tokens + 1, rowBytes));
  float *weights = must(calloc((size_t)tokens * c->topk + 1, sizeof(float)));
  for (uint32_t t = 0; t < tokens; t++) {
    tokenRow(c, c->type, (uint32_t)me->rank, t, 1.0f, rows + t * rowBytes);
    for (uint32_t k = 0; k < c->topk; k++) weights[(size_t)t * c->topk + k] = weightOf((uint32_t)me->rank, t, k);
  }
  epTensorFill(me, &run->x, rows);
  epTensorFill(me, &run->w, weights);
  free(rows), free(weights);
  epTensorFree(me, &run->scales);
  if (!c->scales) return;
  epTensorMake(me, &run->scales, c->scaleType, 2, tokens, c->scales, "scales");
  rows = must(calloc(tokens + 1, scaleBytesOf(c)));
  for (uint32_t t = 0; t < tokens; t++) scaleRow(c, (uint32_t)me->rank, t, rows + t * scaleBytesOf(c));
  epTensorFill(me, &run->scales, rows);
  free(rows);
}

/* Room for the output's scales: dense rows, or columns that are as close as can be or farther apart. */
static void makeScalesOut(epTestRank *me, epRun *run, uint64_t capacity) {
  const epCase *c = run->round->c;
  epTensorFree(me, &run->outScales);
  run->scaleStride = 0;
  if (!c->scales) return;
  if (!c->scaleColumns) {
    epTensorMake(me, &run->outScales, c->scaleType, 2, capacity, c->scales, "dispatch scales");
    return;
  }
  run->scaleStride = (capacity * 4 + 15) / 16 * 16 + (run->salt & 1 ? 32 : 0);
  epTensorMake(me, &run->outScales, ncclUint8, 1, run->scaleStride * (scaleBytesOf(c) / 4), 0, "dispatch scales");
  run->outScales.t.ndim = 2, run->outScales.t.datatype = c->scaleType;
  run->outScales.sizes[0] = capacity, run->outScales.sizes[1] = c->scales;
}

/* Room for the output's tokens, anew for each dispatch. */
static void makeOut(epTestRank *me, epRun *run, uint64_t capacity) {
  const epCase *c = run->round->c;
  closeWindows(me, run->outWindows);
  epTensorFree(me, &run->out);
  epTensorMake(me, &run->out, c->type, 2, capacity, c->hidden, "dispatch tokens");
  if (c->windows) openWindows(me, &run->out, run->outWindows);
}

/* Dispatch with what the case asks for. */
static ncclResult_t dispatchCall(epTestRank *me, epRun *run, int backward, ncclEpDispatchInputs_t *in,
                                 ncclEpDispatchOutputs_t *out, const ncclEpLayoutInfo_t *info) {
  const epCase *c = run->round->c;
  ncclEpTensor_t tokens = inWindow(me, run, &run->out, run->outWindows);
  ncclEpTensor_t x = inWindow(me, run, &run->x, run->xWindows), w = inWindow(me, run, &run->w, run->wWindows);
  ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
  ncclEpDispatchExtConfig_t ext = NCCL_EP_DISPATCH_EXT_CONFIG_INIT;
  config.pass_direction = backward ? NCCL_EP_BWD_PASS : NCCL_EP_FWD_PASS;
  out->tokens = &tokens, in->tokens = &x;
  if (!backward) in->topk_weights = &w;
  if (c->scales) {
    config.quant_recipe = NCCL_EP_DISP_QUANT_FWD;
    in->scales = &run->scales.t, out->scales = &run->outScales.t;
  }
  if (run->delayNs) EXPECT_OK(me, ncclEpEmuStreamDelay(me->comm, NULL, run->delayNs));
  run->delayNs = 0;
  config.send_only = run->staged;
  if (!c->scaleColumns && !c->noZeroPad && !run->queuePairs && !run->staged)
    return ncclEpDispatch(run->handle, in, out, info, &config, NULL);
  ext.scale_layout = c->scaleColumns ? NCCL_EP_SCALE_COLUMN_MAJOR : NCCL_EP_SCALE_ROW_MAJOR;
  ext.scale_column_stride = run->salt & 1 ? run->scaleStride : 0;
  ext.no_zero_pad = c->noZeroPad;
  ext.num_qps = run->queuePairs;
  ncclResult_t r = ncclEpDispatchExt(run->handle, in, out, info, &config, &ext, NULL);
  return r == ncclSuccess && run->staged ? ncclEpComplete(run->handle, NULL, NULL) : r;
}

/* Every byte of the output's scales, those that nobody may touch included. */
static void checkScales(epTestRank *me, const epRun *run) {
  const epCase *c = run->round->c;
  const epRefRank *want = &run->round->ref->rank[me->rank];
  const unsigned char *got = run->outScales.t.data;
  size_t bytes = scaleBytesOf(c);
  if (!got) return;
  unsigned char *all = must(malloc(run->outScales.bytes)), *row = must(malloc(bytes));
  memset(all, FILL, run->outScales.bytes);
  for (uint64_t i = 0; i < want->rows; i++) {
    const epRefRow *r = &want->row[i];
    memset(row, c->noZeroPad && r->source < 0 ? FILL : 0, bytes);
    if (isThere(run->round, me->rank, r)) scaleRow(c, (uint32_t)r->source, (uint32_t)r->token, row);
    for (uint32_t b = 0; b < bytes; b++) all[epRefScaleOffset((uint32_t)bytes, run->scaleStride, i, b)] = row[b];
  }
  for (size_t b = 0; b < run->outScales.bytes; b++)
    if (got[b] != all[b]) {
      EXPECT(me, 0, "dispatch: byte %zu of the scales is 0x%02x instead of 0x%02x", b, got[b], all[b]);
      break;
    }
  free(all), free(row);
  epTensorCheckGuards(me, &run->outScales, "dispatch scales");
}

static void checkRows(epTestRank *me, const epRun *run) {
  const epCase *c = run->round->c;
  const epRefRank *want = &run->round->ref->rank[me->rank];
  size_t rowBytes = epTestTypeBytes(c->type) * c->hidden;
  const unsigned char *got = run->out.t.data;
  unsigned char *row = must(malloc(rowBytes));
  for (uint64_t i = 0; i < want->rows && got; i++) {
    const epRefRow *r = &want->row[i];
    memset(row, c->noZeroPad && r->source < 0 ? FILL : 0, rowBytes);
    if (isThere(run->round, me->rank, r)) tokenRow(c, c->type, (uint32_t)r->source, (uint32_t)r->token, 1.0f, row);
    if (memcmp(got + i * rowBytes, row, rowBytes))
      EXPECT(me, 0, "dispatch: row %llu is not (rank %d, token %d, k %d)", (unsigned long long)i, r->source, r->token,
             r->k);
  }
  if (isFlat(c) && got)
    EXPECT(me, allFill(got + want->rows * rowBytes, run->out.bytes - want->rows * rowBytes),
           "dispatch: token rows past row %llu were written", (unsigned long long)want->rows);
  free(row);
  epTensorCheckGuards(me, &run->out, "dispatch tokens");
}

static void checkFlatExtras(epTestRank *me, const epRun *run, int global) {
  const epCase *c = run->round->c;
  const epRefRank *want = &run->round->ref->rank[me->rank];
  const int64_t *idx = run->outIdx.t.data;
  const float *w = run->outW.t.data;
  int64_t row[32];
  for (uint64_t i = 0; i < want->rows && idx && w; i++) {
    epRefIndexRow(run->round->ref, (uint32_t)me->rank, i, global, row);
    for (uint32_t k = 0; k < c->topk; k++) {
      if (!isThere(run->round, me->rank, &want->row[i])) row[k] = -1;
      float weight = row[k] < 0 ? 0.0f : weightOf((uint32_t)want->row[i].source, (uint32_t)want->row[i].token, k);
      EXPECT(me, idx[i * c->topk + k] == row[k], "dispatch: topk_idx[%llu][%u] is %lld instead of %lld",
             (unsigned long long)i, k, (long long)idx[i * c->topk + k], (long long)row[k]);
      EXPECT(me, w[i * c->topk + k] == weight, "dispatch: topk_weights[%llu][%u] is %g instead of %g",
             (unsigned long long)i, k, (double)w[i * c->topk + k], (double)weight);
    }
  }
  for (uint64_t i = want->rows * c->topk; c->budget && idx && w && i < (uint64_t)c->budget * c->topk; i++)
    EXPECT(me, idx[i] == -1 && w[i] == 0.0f, "dispatch: unused topk_idx is %lld, weight %g", (long long)idx[i],
           (double)w[i]);
}

static void checkExpertMajorExtras(epTestRank *me, const epRun *run) {
  const epRefRank *want = &run->round->ref->rank[me->rank];
  const float *w = run->outW.t.data;
  for (uint64_t i = 0; i < want->rows && w; i++) {
    const epRefRow *r = &want->row[i];
    float weight = 0;
    if (isThere(run->round, me->rank, r))
      weight = weightOf((uint32_t)r->source, (uint32_t)r->token, (uint32_t)r->k);
    else if (r->source < 0 && run->round->c->noZeroPad)
      memset(&weight, FILL, sizeof(weight));
    EXPECT(me, w[i] == weight, "dispatch: topk_weights[%llu] is %g instead of %g", (unsigned long long)i, (double)w[i],
           (double)weight);
  }
}

void epRunDispatch(epTestRank *me, epRun *run) {
  const epCase *c = run->round->c;
  if (!run->handle) return;
  uint64_t capacity = capacityOf(run, me->rank);
  int global = run->salt & 1;
  makeInputs(me, run);
  makeOut(me, run, capacity);
  epTensorFree(me, &run->outW);
  epTensorFree(me, &run->outIdx);
  epTensorMake(me, &run->outW, ncclFloat32, isFlat(c) ? 2 : 1, capacity, c->topk, "dispatch weights");
  ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  out.topk_weights = &run->outW.t;
  ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
  if (isFlat(c)) {
    epTensorMake(me, &run->outIdx, ncclInt64, 2, capacity, c->topk, "dispatch indices");
    out.topk_idx = &run->outIdx.t;
    info.recv_topk_idx_kind = global ? NCCL_EP_EXPERT_ID_GLOBAL : NCCL_EP_EXPERT_ID_AUTO;
  }
  makeScalesOut(me, run, capacity);
  EXPECT_OK(me, dispatchCall(me, run, 0, &in, &out, isFlat(c) ? &info : NULL));
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
  if (run->unchecked) checkRouting(me, run);
  run->unchecked = 0;
  checkRows(me, run);
  checkScales(me, run);
  if (isFlat(c))
    checkFlatExtras(me, run, global);
  else
    checkExpertMajorExtras(me, run);
  epTensorCheckGuards(me, &run->outW, "dispatch weights");
  epTensorCheckGuards(me, &run->outIdx, "dispatch indices");
}

/* ---- Combine
 * ------------------------------------------------------------------------------------------------------------ */

/* The experts' rows: the identity in the type of combine; NaN bits in padding and past the rows, which nobody may add.
 */
static void makeExpertRows(epTestRank *me, const epRun *run, epTestTensor *t) {
  const epCase *c = run->round->c;
  const epRefRank *rank = &run->round->ref->rank[me->rank];
  ncclDataType_t type = combineType(c);
  uint64_t capacity = capacityOf(run, me->rank);
  size_t rowBytes = epTestTypeBytes(type) * c->hidden;
  epTensorMake(me, t, type, 2, capacity, c->hidden, "expert outputs");
  unsigned char *rows = must(malloc(capacity * rowBytes + 1));
  memset(rows, 0xff, capacity * rowBytes + 1);
  for (uint64_t i = 0; i < rank->rows; i++)
    if (rank->row[i].source >= 0)
      tokenRow(c, type, (uint32_t)rank->row[i].source, (uint32_t)rank->row[i].token, 1.0f, rows + i * rowBytes);
  epTensorFill(me, t, rows);
  free(rows);
}

/* How often a token's row comes back: once a rank (flat), once a slot (expert-major); dropped ones do not. */
static float timesOf(const epRound *round, uint32_t rank, uint32_t token) {
  const epCase *c = round->c;
  char hit[EP_TEST_MAX_RANKS] = {0};
  float n = 0;
  for (uint32_t k = 0; k < c->topk; k++) {
    int owner = epRefOwner(round->ref, rank, token, k);
    if (owner < 0 || epRoundLost(round, (int)rank, owner) || round->ref->slot[rank][(size_t)token * c->topk + k] < 0)
      continue;
    if (isFlat(c) && hit[owner]++) continue;
    n++;
  }
  return n;
}

static void checkSums(epTestRank *me, const epRun *run) {
  const epCase *c = run->round->c;
  uint32_t tokens = run->round->tokens[me->rank];
  ncclDataType_t type = combineType(c);
  size_t rowBytes = epTestTypeBytes(type) * c->hidden;
  unsigned char *row = must(calloc(1, rowBytes));
  const unsigned char *got = run->y.t.data;
  for (uint32_t t = 0; t < tokens && got; t++) {
    float times = timesOf(run->round, (uint32_t)me->rank, t);
    memset(row, 0, rowBytes);
    if (times > 0) tokenRow(c, type, (uint32_t)me->rank, t, times, row);
    EXPECT(me, !memcmp(got + t * rowBytes, row, rowBytes), "combine: token %u is not %g times its row", t,
           (double)times);
  }
  free(row);
  epTensorCheckGuards(me, &run->y, "combine tokens");
}

void epRunCombine(epTestRank *me, epRun *run) {
  const epCase *c = run->round->c;
  epTestTensor rows;
  if (!run->handle) return;
  makeExpertRows(me, run, &rows);
  epTensorFree(me, &run->y);
  epTensorMake(me, &run->y, combineType(c), 2, run->round->tokens[me->rank], c->hidden, "combine tokens");
  ncclEpCombineInputs_t in = NCCL_EP_COMBINE_INPUTS_INIT;
  in.tokens = &rows.t;
  ncclEpCombineOutputs_t out = NCCL_EP_COMBINE_OUTPUTS_INIT;
  out.tokens = &run->y.t;
  ncclEpCombineExtConfig_t ext = NCCL_EP_COMBINE_EXT_CONFIG_INIT;
  ext.num_qps = run->queuePairs;
  EXPECT_OK(me, ncclEpCombineExt(run->handle, &in, &out, NULL, &ext, NULL));
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
  checkSums(me, run);
  epTensorFree(me, &rows);
}

/* ---- Backward
 * ----------------------------------------------------------------------------------------------------------- */

/* Backward of combine: a dispatch without weights. */
static void backwardDispatch(epTestRank *me, epRun *run) {
  uint64_t capacity = capacityOf(run, me->rank);
  makeOut(me, run, capacity);
  ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  makeScalesOut(me, run, capacity);
  EXPECT_OK(me, dispatchCall(me, run, 1, &in, &out, NULL));
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
  checkRows(me, run);
  checkScales(me, run);
}

/* Weights of the backward combine: a number for each (row, k) that is in use, NaN bits elsewhere. */
static void makeGradients(epTestRank *me, const epRun *run, epTestTensor *t) {
  const epCase *c = run->round->c;
  const epRefRank *rank = &run->round->ref->rank[me->rank];
  uint64_t capacity = capacityOf(run, me->rank);
  uint32_t width = isFlat(c) ? c->topk : 1;
  int64_t ids[32];
  epTensorMake(me, t, ncclFloat32, isFlat(c) ? 2 : 1, capacity, c->topk, "weight gradients");
  float *w = must(malloc((capacity * width + 1) * sizeof(float)));
  memset(w, 0xff, (capacity * width + 1) * sizeof(float));
  for (uint64_t i = 0; i < rank->rows; i++) {
    if (rank->row[i].source < 0) continue;
    if (isFlat(c)) epRefIndexRow(run->round->ref, (uint32_t)me->rank, i, 0, ids);
    for (uint32_t k = 0; k < width; k++)
      if (!isFlat(c) || ids[k] >= 0) w[i * width + k] = gradientOf((uint32_t)me->rank, i, isFlat(c) ? k : 0);
  }
  epTensorFill(me, t, w);
  free(w);
}

static void checkGradients(epTestRank *me, const epRun *run, const epTestTensor *got) {
  const epCase *c = run->round->c;
  const float *w = got->t.data;
  for (uint32_t t = 0; t < run->round->tokens[me->rank] && w; t++)
    for (uint32_t k = 0; k < c->topk; k++) {
      size_t i = (size_t)t * c->topk + k;
      int64_t slot = run->round->ref->slot[me->rank][i];
      int owner = epRefOwner(run->round->ref, (uint32_t)me->rank, t, k);
      float want = owner < 0 || slot < 0 || epRoundLost(run->round, me->rank, owner)
                       ? 0.0f
                       : gradientOf((uint32_t)owner, (uint64_t)slot, isFlat(c) ? k : 0);
      EXPECT(me, w[i] == want, "backward combine: weight (%u, %u) is %g instead of %g", t, k, (double)w[i],
             (double)want);
    }
  epTensorCheckGuards(me, got, "backward combine weights");
}

/* Backward of dispatch: combine with weights. */
static void backwardCombine(epTestRank *me, epRun *run) {
  const epCase *c = run->round->c;
  uint32_t tokens = run->round->tokens[me->rank];
  epTestTensor rows, gradients, weights;
  makeExpertRows(me, run, &rows);
  makeGradients(me, run, &gradients);
  epTensorFree(me, &run->y);
  epTensorMake(me, &run->y, combineType(c), 2, tokens, c->hidden, "combine tokens");
  epTensorMake(me, &weights, ncclFloat32, 2, tokens, c->topk, "combine weights");
  ncclEpCombineInputs_t in = NCCL_EP_COMBINE_INPUTS_INIT;
  in.tokens = &rows.t, in.topk_weights = &gradients.t;
  ncclEpCombineOutputs_t out = NCCL_EP_COMBINE_OUTPUTS_INIT;
  out.tokens = &run->y.t, out.topk_weights = &weights.t;
  ncclEpCombineConfig_t config = NCCL_EP_COMBINE_CONFIG_INIT;
  config.pass_direction = NCCL_EP_BWD_PASS;
  EXPECT_OK(me, ncclEpCombine(run->handle, &in, &out, &config, NULL));
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
  checkSums(me, run);
  checkGradients(me, run, &weights);
  epTensorFree(me, &rows);
  epTensorFree(me, &gradients);
  epTensorFree(me, &weights);
}

void epRunBackward(epTestRank *me, epRun *run) {
  if (!run->handle) return;
  backwardDispatch(me, run);
  backwardCombine(me, run);
}

void epRunFree(epTestRank *me, epRun *run) {
  epTestTensor *all[] = {&run->topk,          &run->x,      &run->w,      &run->out,
                         &run->outW,          &run->outIdx, &run->y,      &run->expertCounters,
                         &run->expertOffsets, &run->total,  &run->scales, &run->outScales};
  EXPECT_OK(me, ncclEpHandleDestroy(run->handle));
  closeWindows(me, run->outWindows);
  closeWindows(me, run->xWindows);
  closeWindows(me, run->wWindows);
  for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) epTensorFree(me, all[i]);
  memset(run, 0, sizeof(*run));
}

/* ---- Whole cases
 * ---------------------------------------------------------------------------------------------------------- */

typedef struct plan {
  const epCase *c;
  const epRound *rounds;
  unsigned count;
} plan;

static void caseBody(epTestRank *me) {
  const plan *p = me->arg;
  epRun run = {0};
  run.salt = (unsigned)me->world->seed;
  epGroupMake(me, p->c);
  if (!me->group) return;
  for (unsigned i = 0; i < p->count; i++) {
    run.borrow = !((me->world->seed + i) & 1);
    epRunUpdate(me, &run, &p->rounds[i]);
    epRunDispatch(me, &run);
    epRunCombine(me, &run);
    epRunBackward(me, &run);
  }
  if (!p->c->budget) epExpectNoAsyncError(me);
  epRunFree(me, &run);
  epGroupFree(me);
}

void epCaseRun(const epCase *c, const epRound *rounds, unsigned count, unsigned schedules) {
  plan p = {c, rounds, count};
  for (unsigned s = 0; s < schedules; s++) {
    epTestWorld world = {.ranks = (int)c->ranks, .sms = s % 3 == 1 ? 3 : 0, .seed = 1000 + s, .arg = &p};
    epWorldRun(&world, caseBody);
  }
}

void epCaseRunRandom(const epCase *c, const uint32_t *tokens, unsigned schedules) {
  epRound round;
  uint64_t seed = mix(c->hidden + 131 * c->topk + 17 * c->ranks);
  epRoundMake(&round, c, tokens, epPickRandom, &seed);
  epCaseRun(c, &round, 1, schedules);
  epRoundFree(&round);
}
