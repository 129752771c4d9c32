/* Low latency on the emulated fabric: what the layouts promise, what handles may do to each other, and what is refused.
 * Data is +-1 and weights are powers of two, experts are the identity, so that sums have closed forms. */
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "bugs.h"
#include "mask_plan.h"
#include "masks.h"

#define SCHEDULES 6
#define ROUNDS 4
#define LENGTH(a) (sizeof(a) / sizeof((a)[0]))

static const ncclEpLayout_t layouts[] = {NCCL_EP_LAYOUT_RANK_MAJOR, NCCL_EP_LAYOUT_EXPERT_MAJOR};

enum { SPREAD = 0, ALL_TO_RANK_0, MIXED };

/* What all ranks do: the same decisions, known to all. */
typedef struct plan {
  uint32_t ranks, experts, topk, hidden, maxTokens, rounds;
  ncclEpLayout_t layout;
  int borrow;               /* updates borrow topk_idx */
  int choice;               /* of experts: SPREAD with a few -1, ... */
  int masks;                /* the group has them */
  uint32_t scaleBytes;      /* of a row's scales, forwarded */
  ncclDataType_t byteType;  /* dispatch's rows are called bytes of this type, 0: BF16 */
  ncclDataType_t scaleType; /* 0: uint8 */
  int nvfp4;                /* combine's rows travel so; what these tests sum is the same then */
  uint32_t tokens[ROUNDS][EP_TEST_MAX_RANKS];
  int64_t *idx[ROUNDS][EP_TEST_MAX_RANKS];
  epRef *ref[ROUNDS];
} plan;

static int64_t pick(const plan *p, uint32_t n, uint32_t rank, uint32_t t, uint32_t k) {
  static const int64_t mixed[4][4] = {{-1, -1, -1, -1}, {0, -1, 3, -1}, {-1, 1, -1, -1}, {0, 1, 2, 3}};
  if (p->choice == ALL_TO_RANK_0) return (t + k) % (p->experts / p->ranks);
  if (p->choice == MIXED) return mixed[(t + rank) % 4][k];
  uint32_t h = (n * 31 + rank) * 131 + t * 17 + k * 7;
  h = (h ^ h >> 5) * 2654435761u;
  return h >> 28 == 0 ? -1 : (int64_t)((h >> 8) % p->experts);
}

/* What round n must give. */
static void makeReference(plan *p, uint32_t n) {
  epRefRouting in = {p->ranks,
                     p->experts,
                     p->topk,
                     p->layout == NCCL_EP_LAYOUT_RANK_MAJOR ? EP_REF_RANK_MAJOR : EP_REF_EXPERT_MAJOR_3D,
                     0,
                     0,
                     p->tokens[n],
                     (const int64_t *const *)p->idx[n],
                     p->maxTokens};
  assert_int_equal(epRefCreate(&in, &p->ref[n]), 0);
}

static void planMake(plan *p) {
  for (uint32_t n = 0; n < p->rounds; n++) {
    for (uint32_t r = 0; r < p->ranks; r++) {
      uint32_t T = p->tokens[n][r];
      p->idx[n][r] = calloc((size_t)T * p->topk + 1, sizeof(int64_t));
      assert_non_null(p->idx[n][r]);
      for (uint32_t i = 0; i < T * p->topk; i++) p->idx[n][r][i] = pick(p, n, r, i / p->topk, i % p->topk);
    }
    makeReference(p, n);
  }
}

static void planFree(plan *p) {
  for (uint32_t n = 0; n < p->rounds; n++) {
    for (uint32_t r = 0; r < p->ranks; r++) free(p->idx[n][r]);
    epRefDestroy(p->ref[n]);
  }
}

/* In place: the references point into the plan. */
static void smallOf(plan *p, uint32_t ranks, uint32_t hidden, ncclEpLayout_t layout, uint32_t rounds) {
  *p = (plan){.ranks = ranks,
              .experts = 4 * ranks,
              .topk = 3,
              .hidden = hidden,
              .maxTokens = 6,
              .rounds = rounds,
              .layout = layout};
  for (uint32_t n = 0; n < rounds; n++)
    for (uint32_t r = 0; r < p->ranks; r++) p->tokens[n][r] = (n * 5 + r * 3) % 7;
  planMake(p);
}
static void small(plan *p, ncclEpLayout_t layout, uint32_t rounds) { smallOf(p, 3, 72, layout, rounds); }

/* ---- Data ---------------------------------------------------------------------------------------------------------- */

static uint16_t elementOf(uint32_t n, uint32_t rank, uint32_t t, uint32_t h) {
  return (uint16_t)(0x3f80 | ((n * 7 + rank * 1031 + t * 29) >> h % 16 & 1) << 15);
}
static float weightOf(uint32_t n, uint32_t rank, uint32_t t, uint32_t k) {
  static const float powers[] = {1.0f, 0.5f, 0.25f, 2.0f};
  return powers[(n + rank + t + k) % 4];
}

/* One batch on one rank. */
typedef struct batch {
  epTestTensor idx, x, w, scales, out, outW, outIdx, outScales, backScales, y, experts, sources, total;
} batch;

static ncclDataType_t scaleTypeOf(const plan *p) { return p->scaleType ? p->scaleType : ncclUint8; }
static uint32_t scaleElements(const plan *p) { return p->scaleBytes / (uint32_t)epTestTypeBytes(scaleTypeOf(p)); }
static uint8_t scaleOf(uint32_t n, uint32_t rank, uint32_t t, uint32_t i) {
  return (uint8_t)(n * 67 + rank * 31 + t * 13 + i * 7 + 1);
}

static void places(epTestRank *me, const plan *p, epTestTensor *t, ncclDataType_t type, uint32_t columns,
                   const char *name) {
  size_t a = p->layout == NCCL_EP_LAYOUT_RANK_MAJOR ? p->ranks : p->experts / p->ranks;
  size_t b = p->layout == NCCL_EP_LAYOUT_RANK_MAJOR ? p->maxTokens : p->ranks * p->maxTokens;
  epTensorMake(me, t, type, 2, a * b, columns, name);
  t->sizes[0] = a, t->sizes[1] = b, t->sizes[2] = columns;
  t->t.ndim = 3;
}

static void batchMake(epTestRank *me, const plan *p, uint32_t n, batch *b) {
  uint32_t T = p->tokens[n][me->rank];
  uint16_t *x = calloc((size_t)T * p->hidden + 1, 2);
  float *w = calloc((size_t)T * p->topk + 1, 4);
  memset(b, 0, sizeof(*b));
  epTensorMake(me, &b->idx, ncclInt64, 2, T, p->topk, "topk_idx");
  epTensorMake(me, &b->x, ncclBfloat16, 2, T, p->hidden, "x");
  epTensorMake(me, &b->w, ncclFloat32, 2, T, p->topk, "weights");
  epTensorMake(me, &b->y, ncclBfloat16, 2, T, p->hidden, "y");
  places(me, p, &b->out, ncclBfloat16, p->hidden, "out");
  places(me, p, &b->outW, ncclFloat32, p->topk, "out weights");
  places(me, p, &b->outIdx, ncclInt32, p->topk, "out idx");
  if (p->scaleBytes) {
    uint8_t *scales = calloc((size_t)T * p->scaleBytes + 1, 1);
    for (uint32_t i = 0; scales && i < T * p->scaleBytes; i++)
      scales[i] = scaleOf(n, (uint32_t)me->rank, i / p->scaleBytes, i % p->scaleBytes);
    epTensorMake(me, &b->scales, scaleTypeOf(p), 2, T, scaleElements(p), "scales");
    places(me, p, &b->outScales, scaleTypeOf(p), scaleElements(p), "out scales");
    epTensorFill(me, &b->scales, scales);
    free(scales);
  }
  if (p->nvfp4) {
    size_t places_ = b->out.sizes[0] * b->out.sizes[1];
    float *scales = calloc(places_, sizeof *scales);
    for (size_t i = 0; scales && i < places_; i++) scales[i] = 2688; /* of 1 */
    places(me, p, &b->backScales, ncclFloat32, 1, "scales of outputs");
    epTensorFill(me, &b->backScales, scales);
    free(scales);
  }
  epTensorMake(me, &b->experts, ncclInt32, 1, p->experts / p->ranks, 1, "expert_counters");
  epTensorMake(me, &b->sources, ncclInt64, 1, p->ranks, 1, "src_rank_counters");
  epTensorMake(me, &b->total, ncclInt32, 1, 1, 1, "recv_total_counter");
  for (uint32_t t = 0; x && w && t < T; t++) {
    for (uint32_t h = 0; h < p->hidden; h++) x[t * p->hidden + h] = elementOf(n, (uint32_t)me->rank, t, h);
    for (uint32_t k = 0; k < p->topk; k++) w[t * p->topk + k] = weightOf(n, (uint32_t)me->rank, t, k);
  }
  epTensorFill(me, &b->idx, p->idx[n][me->rank]);
  epTensorFill(me, &b->x, x);
  epTensorFill(me, &b->w, w);
  free(x);
  free(w);
}

static void batchFree(epTestRank *me, batch *b) {
  epTestTensor *all[] = {&b->idx,       &b->x, &b->w,       &b->scales,  &b->out,   &b->outW,      &b->outIdx,
                         &b->outScales, &b->y, &b->experts, &b->sources, &b->total, &b->backScales};
  for (size_t i = 0; i < LENGTH(all); i++) {
    epTensorCheckGuards(me, all[i], "a tensor of the batch");
    epTensorFree(me, all[i]);
  }
}

static ncclResult_t update(const plan *p, ncclEpHandle_t h, const batch *b) {
  ncclEpUpdateExtConfig_t config = NCCL_EP_UPDATE_EXT_CONFIG_INIT;
  config.borrow_topk_idx = p->borrow;
  return ncclEpUpdateHandleExt(h, &b->idx.t, NULL, &config, NULL);
}

static ncclResult_t dispatch(const plan *p, ncclEpHandle_t h, batch *b) {
  ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
  ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
  ncclEpTensor_t x, o; /* the same rows, by another name */
  size_t xSizes[2], oSizes[3];
  in.tokens = &b->x.t;
  out.tokens = &b->out.t;
  if (p->layout == NCCL_EP_LAYOUT_RANK_MAJOR)
    in.topk_weights = &b->w.t, out.topk_weights = &b->outW.t, out.topk_idx = &b->outIdx.t;
  info.expert_counters = &b->experts.t;
  info.src_rank_counters = &b->sources.t;
  info.recv_total_counter = &b->total.t;
  if (p->scaleBytes)
    config.quant_recipe = NCCL_EP_DISP_QUANT_FWD, in.scales = &b->scales.t, out.scales = &b->outScales.t;
  if (p->byteType) {
    x = b->x.t, o = b->out.t;
    x.sizes = xSizes, o.sizes = oSizes, x.datatype = o.datatype = p->byteType;
    xSizes[0] = b->x.sizes[0], xSizes[1] = oSizes[2] = 2 * p->hidden;
    oSizes[0] = b->out.sizes[0], oSizes[1] = b->out.sizes[1];
    in.tokens = &x, out.tokens = &o;
  }
  return ncclEpDispatch(h, &in, &out, &info, &config, NULL);
}

static ncclResult_t combine(const plan *p, ncclEpHandle_t h, batch *b) {
  ncclEpCombineInputs_t in = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t out = NCCL_EP_COMBINE_OUTPUTS_INIT;
  ncclEpCombineConfig_t config = NCCL_EP_COMBINE_CONFIG_INIT;
  if (p->nvfp4) config.quant_recipe = NCCL_EP_COMB_QUANT_NVFP4, in.scales = &b->backScales.t;
  in.tokens = &b->out.t;
  out.tokens = &b->y.t;
  if (p->layout == NCCL_EP_LAYOUT_EXPERT_MAJOR || p->borrow) out.topk_weights = &b->w.t; /* rank-major: left alone */
  return ncclEpCombine(h, &in, &out, &config, NULL);
}

static void checkRows(epTestRank *me, const plan *p, uint32_t n, const batch *b) {
  const epRefRank *want = &p->ref[n]->rank[me->rank];
  const uint16_t *out = b->out.t.data;
  uint32_t me32 = (uint32_t)me->rank;
  int bad = 0, rankMajor = p->layout == NCCL_EP_LAYOUT_RANK_MAJOR;
  for (uint64_t i = 0; i < want->rows; i++) {
    epRefRow from = want->row[i];
    for (uint32_t h = 0; h < p->hidden; h++) {
      uint16_t w = from.source < 0 ? 0xABAB : elementOf(n, (uint32_t)from.source, (uint32_t)from.token, h);
      bad += out[i * p->hidden + h] != w;
    }
    for (uint32_t k = 0; k < p->scaleBytes; k++) {
      uint8_t w = from.source < 0 ? 0xAB : scaleOf(n, (uint32_t)from.source, (uint32_t)from.token, k);
      bad += ((const uint8_t *)b->outScales.t.data)[i * p->scaleBytes + k] != w;
    }
    for (uint32_t k = 0; rankMajor && k < p->topk; k++) {
      int64_t ids[32];
      if (from.source >= 0) epRefIndexRow(p->ref[n], me32, i, 0, ids);
      bad += ((const int32_t *)b->outIdx.t.data)[i * p->topk + k] != (from.source < 0 ? -1 : (int32_t)ids[k]);
      if (from.source >= 0)
        bad += ((const float *)b->outW.t.data)[i * p->topk + k] !=
               weightOf(n, (uint32_t)from.source, (uint32_t)from.token, k);
    }
  }
  EXPECT(me, !bad, "round %u: %d wrong values of dispatch", n, bad);
  for (uint32_t e = 0; e < p->experts / p->ranks; e++)
    EXPECT(me, ((const int32_t *)b->experts.t.data)[e] == (int32_t)want->perExpert[e], "round %u: expert_counters[%u]",
           n, e);
  for (uint32_t s = 0; s < p->ranks; s++)
    EXPECT(me, ((const int64_t *)b->sources.t.data)[s] == (int64_t)want->perSource[s],
           "round %u: src_rank_counters[%u]", n, s);
  EXPECT(me, *(const int32_t *)b->total.t.data == (int32_t)want->total, "round %u: recv_total_counter", n);
}

static void checkSums(epTestRank *me, const plan *p, uint32_t n, const batch *b) {
  const uint16_t *y = b->y.t.data;
  uint32_t me32 = (uint32_t)me->rank;
  int bad = 0, rankMajor = p->layout == NCCL_EP_LAYOUT_RANK_MAJOR;
  for (uint32_t t = 0; t < p->tokens[n][me->rank]; t++) {
    float sum = 0;
    for (uint32_t k = 0; k < p->topk; k++) {
      int owner = epRefOwner(p->ref[n], me32, t, k), again = 0;
      if (owner < 0 || p->ref[n]->slot[me->rank][t * p->topk + k] < 0) continue;
      for (uint32_t j = 0; j < k; j++) again |= epRefOwner(p->ref[n], me32, t, j) == owner;
      sum += !rankMajor ? weightOf(n, me32, t, k) : again ? 0.0f : 1.0f;
    }
    for (uint32_t h = 0; h < p->hidden; h++) {
      uint16_t w, x = elementOf(n, me32, t, h);
      epRefStore(EP_REF_BF16, &w, 0, sum * epRefLoad(EP_REF_BF16, &x, 0));
      bad += y[t * p->hidden + h] != w && !(sum == 0 && !(y[t * p->hidden + h] & 0x7fff));
    }
  }
  EXPECT(me, !bad, "round %u: %d wrong values of combine", n, bad);
}

static void check(epTestRank *me, const plan *p, uint32_t n, const batch *b, int combined) {
  checkRows(me, p, n, b);
  if (combined) checkSums(me, p, n, b);
}

static void groupMake(epTestRank *me, const plan *p, uint64_t timeoutNs) {
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.algorithm = NCCL_EP_ALGO_LOW_LATENCY;
  config.num_experts = p->experts;
  config.max_dispatch_tokens_per_rank = p->maxTokens;
  config.max_token_bytes = 2 * p->hidden + (p->scaleBytes + 15) / 16 * 16;
  config.num_topk = p->topk;
  config.timeout_ns = timeoutNs;
  config.enable_mask = p->masks != 0;
  EXPECT_OK(me, ncclEpCreateGroup(&me->group, me->comm, &config));
}

static void handleMake(epTestRank *me, const plan *p, ncclEpHandle_t *h) {
  EXPECT_OK(me, ncclEpInitHandle(h, me->group, p->layout, NULL, (int)p->topk, NULL));
}

static void sync(epTestRank *me) { EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL)); }

static void runWorlds(uint32_t ranks, void *arg, void (*body)(epTestRank *me)) {
  for (unsigned s = 0; s < SCHEDULES; s++) {
    epTestWorld world = {.ranks = (int)ranks, .seed = 900 + s, .arg = arg};
    epWorldRun(&world, body);
  }
}

/* ---- Tests --------------------------------------------------------------------------------------------------------- */

/* Nothing waits on the host between operations, T changes, some ranks have none. */
static void streamedBody(epTestRank *me) {
  plan *p = me->arg;
  batch b[ROUNDS];
  ncclEpHandle_t h = NULL;
  groupMake(me, p, 0);
  if (!me->group) return;
  handleMake(me, p, &h);
  for (uint32_t n = 0; n < p->rounds; n++) batchMake(me, p, n, &b[n]);
  for (uint32_t n = 0; n < p->rounds; n++) {
    EXPECT_OK(me, update(p, h, &b[n]));
    for (uint32_t i = 0; i <= n % 3; i++) EXPECT_OK(me, dispatch(p, h, &b[n]));
    for (uint32_t i = 0; i < n % 2 + 1; i++) EXPECT_OK(me, combine(p, h, &b[n]));
  }
  sync(me);
  for (uint32_t n = 0; n < p->rounds; n++) check(me, p, n, &b[n], 1), batchFree(me, &b[n]);
  epExpectNoAsyncError(me);
  EXPECT_OK(me, ncclEpHandleDestroy(h));
  epGroupFree(me);
}

static void streamed(void **state) {
  (void)state;
  for (size_t l = 0; l < 2 * LENGTH(layouts); l++) {
    plan p;
    small(&p, layouts[l / 2], ROUNDS);
    p.borrow = l % 2;
    runWorlds(p.ranks, &p, streamedBody);
    planFree(&p);
  }
}

/* Scales end in the row's strip, cross into the next one, or have strips of their own; types that are but bytes. */
static void scales(void **state) {
  (void)state;
  static const struct {
    uint32_t hidden, scaleBytes;
    ncclDataType_t byteType, scaleType;
  } cases[] = {{8, 4, 0, ncclFloat32},
               {64, 56, ncclFloat8e4m3, ncclUint8},
               {896, 56, ncclFloat8e5m2, ncclFloat32},
               {888, 28, ncclFloat8e4m3, ncclInt32},
               {120, 240, ncclFloat4x2, ncclFloat8e4m3},
               {1792, 112, ncclUint8, ncclBfloat16},
               {24, 3600, 0, ncclUint8}};
  for (size_t l = 0; l < LENGTH(layouts); l++)
    for (size_t i = 0; i < LENGTH(cases); i++) {
      plan p;
      small(&p, layouts[l], cases[i].hidden > 100 ? 2 : 3);
      p.borrow = (int)(i + l) % 2;
      p.hidden = cases[i].hidden, p.scaleBytes = cases[i].scaleBytes;
      p.byteType = cases[i].byteType, p.scaleType = cases[i].scaleType;
      epTestWorld world = {.ranks = (int)p.ranks, .seed = 300 + i, .arg = &p};
      epWorldRun(&world, streamedBody);
      planFree(&p);
    }
}

/* ---- Quantised by dispatch ------------------------------------------------------------------------------------------ */

/* Blocks of different magnitudes, one of zeros, one below what counts. */
static uint16_t wideElement(uint32_t rank, uint32_t t, uint32_t h) {
  uint32_t block = h / 128, x = (rank * 977 + t * 131 + h) * 2654435761u;
  uint32_t exponent = block % 5 == 4 ? 90 : 112 + (block * 7 + t) % 20 - (x >> 20) % 14;
  return block % 5 == 3 ? 0 : (uint16_t)((x >> 16 & 0x8000) | exponent << 7 | (x >> 9 & 0x7f));
}
static float wideValue(uint32_t rank, uint32_t t, uint32_t h) {
  uint16_t x = wideElement(rank, t, h);
  return epRefLoad(EP_REF_BF16, &x, 0);
}

static float e4m3Value(unsigned code) {
  int exponent = (int)(code >> 3 & 15);
  float m = exponent ? 1.0f + (float)(code & 7) / 8 : (float)(code & 7) / 8,
        v = ldexpf(m, (exponent ? exponent : 1) - 7);
  return code & 0x80 ? -v : v;
}
/* The nearest code by trying all; of two as near the even one. */
static unsigned e4m3Of(float x) {
  unsigned best = 0;
  for (unsigned c = 0; c < 0x7f; c++) {
    float d = fabsf(fabsf(x) - e4m3Value(c)), least = fabsf(fabsf(x) - e4m3Value(best));
    if (d < least || (d == least && !(c & 1))) best = c;
  }
  return best | (signbit(x) ? 0x80 : 0);
}

static void quantisedRow(epTestRank *me, const plan *p, epRefRow from, const uint8_t *row, const float *scales,
                         int powers) {
  int bad = 0;
  for (uint32_t block = 0; block < p->hidden / 128; block++) {
    float amax = 1e-4f, scale, times;
    for (uint32_t i = 0; i < 128; i++) {
      float v = fabsf(wideValue((uint32_t)from.source, (uint32_t)from.token, block * 128 + i));
      amax = v > amax ? v : amax;
    }
    scale = amax * (1 / 448.0f), times = 448.0f / amax;
    if (powers) scale = exp2f(ceilf(log2f(scale))), times = 1 / scale;
    bad += scales[block] != scale;
    for (uint32_t i = 0; i < 128; i++)
      bad += row[block * 128 + i] !=
             e4m3Of(wideValue((uint32_t)from.source, (uint32_t)from.token, block * 128 + i) * times);
  }
  EXPECT(me, !bad, "%d wrong bytes or scales of token %d of rank %d", bad, from.token, from.source);
}

static void quantisedBody(epTestRank *me) {
  plan *p = me->arg;
  ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
  const epRefRank *want = &p->ref[0]->rank[me->rank];
  uint32_t T = p->tokens[0][me->rank], blocks = p->hidden / 128;
  uint16_t *x = calloc((size_t)T * p->hidden + 1, 2);
  epTestTensor bytes, scales;
  ncclEpHandle_t h = NULL;
  batch b;
  groupMake(me, p, 0);
  if (!me->group || !x) {
    free(x);
    return;
  }
  handleMake(me, p, &h);
  batchMake(me, p, 0, &b);
  for (uint32_t i = 0; i < T * p->hidden; i++) x[i] = wideElement((uint32_t)me->rank, i / p->hidden, i % p->hidden);
  epTensorFill(me, &b.x, x);
  places(me, p, &bytes, ncclFloat8e4m3, p->hidden, "bytes");
  places(me, p, &scales, ncclFloat32, blocks, "made scales");
  in.tokens = &b.x.t, out.tokens = &bytes.t, out.scales = &scales.t;
  if (p->layout == NCCL_EP_LAYOUT_RANK_MAJOR)
    in.topk_weights = &b.w.t, out.topk_weights = &b.outW.t, out.topk_idx = &b.outIdx.t;
  config.quant_recipe = NCCL_EP_DISP_QUANT_DS_FP8E3M4;
  EXPECT_OK(me, update(p, h, &b));
  for (unsigned powers = 0; powers < 2; powers++) {
    config.round_scales = powers;
    EXPECT_OK(me, ncclEpDispatch(h, &in, &out, NULL, &config, NULL));
    sync(me);
    for (uint64_t i = 0; i < want->rows; i++)
      if (want->row[i].source >= 0)
        quantisedRow(me, p, want->row[i], (const uint8_t *)bytes.t.data + i * p->hidden,
                     (const float *)scales.t.data + i * blocks, (int)powers);
  }
  out.scales = NULL;
  EXPECT_ERROR(me, ncclEpDispatch(h, &in, &out, NULL, &config, NULL), ncclInvalidArgument, "outputs.scales is NULL");
  out.scales = &scales.t, in.scales = &scales.t;
  EXPECT_ERROR(me, ncclEpDispatch(h, &in, &out, NULL, &config, NULL), ncclInvalidArgument, "inputs.scales is given");
  in.scales = NULL, b.x.t.datatype = ncclFloat16;
  EXPECT_ERROR(me, ncclEpDispatch(h, &in, &out, NULL, &config, NULL), ncclInvalidArgument,
               "inputs.tokens is float16: expected bfloat16");
  b.x.t.datatype = ncclBfloat16, bytes.t.datatype = ncclFloat8e5m2;
  EXPECT_ERROR(me, ncclEpDispatch(h, &in, &out, NULL, &config, NULL), ncclInvalidArgument,
               "outputs.tokens is float8e5m2");
  epExpectNoAsyncError(me);
  EXPECT_OK(me, ncclEpHandleDestroy(h));
  epTensorCheckGuards(me, &bytes, "bytes"), epTensorCheckGuards(me, &scales, "made scales");
  epTensorFree(me, &bytes), epTensorFree(me, &scales);
  batchFree(me, &b);
  free(x);
  epGroupFree(me);
}

static void quantised(void **state) {
  (void)state;
  static const uint32_t hidden[] = {512, 1792, 3584};
  for (size_t l = 0; l < LENGTH(layouts); l++)
    for (size_t i = 0; i < LENGTH(hidden); i++) {
      plan p;
      small(&p, layouts[l], 1);
      p.hidden = hidden[i];
      epTestWorld world = {.ranks = (int)p.ranks, .seed = 50 + i, .arg = &p};
      epWorldRun(&world, quantisedBody);
      planFree(&p);
    }
}

/* ---- Quantised by combine ------------------------------------------------------------------------------------------- */

/* Experts' outputs: blocks of different magnitudes and of zeros; rows of zeros, of subnormal numbers, of the largest, with a NaN or an
 * infinity. */
static uint16_t outputElement(uint32_t rank, uint64_t row, uint32_t h) {
  uint32_t x = (rank * 977 + (uint32_t)row * 131 + h) * 2654435761u, kind = (uint32_t)row % 8, block = h / 16;
  uint32_t exponent = 112 + (block * 7 + (uint32_t)row) % 20 - (x >> 20) % 14;
  if (kind == 5 || block % 7 == 6) return (uint16_t)(x >> 16 & 0x8000);
  if (kind == 6) exponent = (x >> 20) % 3 == 0;
  if (kind == 7) exponent = 254 - (x >> 20) % 40;
  if (kind == 3 && h % 50 == 17) return (uint16_t)((h & 1 ? 0x7f80 : 0x7fc1) | (x >> 16 & 0x8000));
  return (uint16_t)((x >> 16 & 0x8000) | exponent << 7 | (x >> 9 & 0x7f));
}

static void outputRow(const plan *p, uint32_t rank, uint64_t row, uint16_t *out) {
  for (uint32_t h = 0; h < p->hidden; h++) out[h] = outputElement(rank, row, h);
}

/* What the caller says of such a row: the truth, mostly. */
static float outputScale(const plan *p, uint64_t row, const uint16_t *values) {
  static const float wrong[] = {0, NAN, -3, INFINITY, 1e38f, 1e-40f, 4000, 1e-3f};
  return row % 11 == 9 ? wrong[row / 11 % LENGTH(wrong)] : epRefNvfp4Scale(EP_REF_BF16, values, p->hidden);
}
static float outputWeight(uint32_t rank, uint32_t t, uint32_t k) {
  static const float weights[] = {0.37f, 1, -0.5f, 0, 3.25f, 1e-20f, 0.125f};
  return weights[(rank * 5 + t * 3 + k) % LENGTH(weights)];
}

static int isNan16(uint16_t x) { return (x & 0x7fff) > 0x7f80; }

static void checkNvfp4(epTestRank *me, const plan *p, const batch *b) {
  uint32_t rank = (uint32_t)me->rank, H = p->hidden;
  const uint16_t *y = b->y.t.data;
  uint16_t *rows = calloc((size_t)(p->topk + 1) * H, sizeof *rows), *want = rows + (size_t)p->topk * H;
  float *scratch = calloc(4ull * H, sizeof *scratch);
  int bad = 0;
  for (uint32_t t = 0; rows && scratch && t < p->tokens[0][me->rank]; t++) {
    const void *there[32] = {NULL};
    float weights[32], scales[32] = {0};
    epRefCombine sum = {
        .type = EP_REF_BF16, .hidden = H, .scaleUp = p->ranks, .multipleReductions = 1, .nvfp4 = scales};
    if (p->layout == NCCL_EP_LAYOUT_EXPERT_MAJOR) sum.weights = weights;
    for (uint32_t k = 0; k < p->topk; k++) {
      int64_t slot = p->ref[0]->slot[rank][(size_t)t * p->topk + k];
      weights[k] = outputWeight(rank, t, k);
      if (slot < 0) continue;
      outputRow(p, (uint32_t)epRefOwner(p->ref[0], rank, t, k), (uint64_t)slot, rows + (size_t)k * H);
      scales[k] = outputScale(p, (uint64_t)slot, rows + (size_t)k * H);
      there[k] = rows + (size_t)k * H;
    }
    epRefCombineToken(p->ref[0], &sum, rank, t, there, scratch, want);
    for (uint32_t h = 0; h < H; h++)
      bad += y[(size_t)t * H + h] != want[h] && !(isNan16(want[h]) && isNan16(y[(size_t)t * H + h]));
  }
  EXPECT(me, rows && scratch && !bad, "%d wrong values of combine", bad);
  free(rows), free(scratch);
}

static ncclResult_t combineNvfp4(const plan *p, ncclEpHandle_t h, batch *b, epTestTensor *scales, int staged) {
  ncclEpCombineInputs_t in = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t out = NCCL_EP_COMBINE_OUTPUTS_INIT;
  ncclEpCombineConfig_t config = NCCL_EP_COMBINE_CONFIG_INIT;
  ncclResult_t r;
  in.tokens = &b->out.t, out.tokens = &b->y.t, in.scales = scales ? &scales->t : NULL;
  if (p->layout == NCCL_EP_LAYOUT_EXPERT_MAJOR) out.topk_weights = &b->w.t;
  config.quant_recipe = NCCL_EP_COMB_QUANT_NVFP4, config.send_only = staged;
  r = ncclEpCombine(h, &in, &out, &config, NULL);
  return r == ncclSuccess && staged ? ncclEpComplete(h, NULL, NULL) : r;
}

static void nvfp4Refused(epTestRank *me, plan *p, ncclEpHandle_t h, batch *b, epTestTensor *scales) {
  ncclEpCombineInputs_t in = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t out = NCCL_EP_COMBINE_OUTPUTS_INIT;
  ncclEpPrepareConfig_t ahead = NCCL_EP_PREPARE_CONFIG_INIT;
  EXPECT_ERROR(me, combineNvfp4(p, h, b, NULL, 0), ncclInvalidArgument, "inputs.scales is NULL");
  scales->t.datatype = ncclBfloat16;
  EXPECT_ERROR(me, combineNvfp4(p, h, b, scales, 0), ncclInvalidArgument,
               "inputs.scales is bfloat16: expected float32");
  scales->t.datatype = ncclFloat32, scales->t.ndim = 2;
  EXPECT_ERROR(me, combineNvfp4(p, h, b, scales, 0), ncclInvalidArgument, "inputs.scales has 2 dimensions");
  scales->t.ndim = 3, scales->sizes[2] = 2;
  EXPECT_ERROR(me, combineNvfp4(p, h, b, scales, 0), ncclInvalidArgument, "inputs.scales.sizes[2] is 2");
  scales->sizes[2] = 1, b->out.t.datatype = b->y.t.datatype = ncclFloat16;
  EXPECT_ERROR(me, combineNvfp4(p, h, b, scales, 0), ncclInvalidArgument,
               "inputs.tokens is float16: expected bfloat16");
  b->out.t.datatype = b->y.t.datatype = ncclBfloat16, b->out.sizes[2] -= 8, b->y.sizes[1] -= 8;
  EXPECT_ERROR(me, combineNvfp4(p, h, b, scales, 0), ncclInvalidArgument, "inputs.tokens.sizes[2]|a multiple of 16");
  b->out.sizes[2] += 8, b->y.sizes[1] += 8;
  ahead.layout = p->layout, ahead.hidden = p->hidden, ahead.top_k = p->topk, ahead.index_type = ncclInt64;
  ahead.dispatch_type = ahead.combine_type = ncclBfloat16, ahead.combine_quant = NCCL_EP_COMB_QUANT_NVFP4;
  EXPECT_OK(me, ncclEpPrepare(me->group, &ahead));
  ahead.hidden -= 8;
  EXPECT_ERROR(me, ncclEpPrepare(me->group, &ahead), ncclInvalidArgument, "hidden is |a multiple of 16");
  ahead.combine_type = ncclFloat16;
  EXPECT_ERROR(me, ncclEpPrepare(me->group, &ahead), ncclInvalidArgument, "combine_type is float16: expected bfloat16");
  in.tokens = &b->out.t, out.tokens = &b->y.t, in.scales = &scales->t;
  EXPECT_ERROR(me, ncclEpCombine(h, &in, &out, NULL, NULL), ncclInvalidArgument,
               "inputs.scales is given: expected NULL (only NCCL_EP_COMB_QUANT_NVFP4 has scales)");
}

static void nvfp4Body(epTestRank *me) {
  plan *p = me->arg;
  epTestTensor scales;
  ncclEpHandle_t h = NULL;
  batch b;
  uint64_t places_ = p->ref[0]->rank[me->rank].rows;
  uint16_t *rows = calloc(places_ * p->hidden, sizeof *rows);
  float *given = calloc(places_, sizeof *given), *w = calloc((size_t)p->maxTokens * p->topk, sizeof *w);
  groupMake(me, p, 0);
  if (!me->group || !rows || !given || !w) goto done;
  handleMake(me, p, &h);
  batchMake(me, p, 0, &b);
  places(me, p, &scales, ncclFloat32, 1, "scales");
  for (uint64_t i = 0; i < places_; i++) {
    outputRow(p, (uint32_t)me->rank, i, rows + i * p->hidden);
    given[i] = outputScale(p, i, rows + i * p->hidden);
  }
  for (uint32_t i = 0; i < p->tokens[0][me->rank] * p->topk; i++)
    w[i] = outputWeight((uint32_t)me->rank, i / p->topk, i % p->topk);
  EXPECT_OK(me, update(p, h, &b));
  EXPECT_OK(me, dispatch(p, h, &b));
  sync(me);
  checkRows(me, p, 0, &b);
  epTensorFill(me, &b.out, rows), epTensorFill(me, &scales, given), epTensorFill(me, &b.w, w);
  for (int staged = 0; staged < 2; staged++) {
    EXPECT_OK(me, combine(p, h, &b)); /* rows of the same places, wider */
    EXPECT_OK(me, combineNvfp4(p, h, &b, &scales, staged));
    sync(me);
    checkNvfp4(me, p, &b);
  }
  nvfp4Refused(me, p, h, &b, &scales);
  epExpectNoAsyncError(me);
  EXPECT_OK(me, ncclEpHandleDestroy(h));
  epTensorCheckGuards(me, &scales, "scales");
  epTensorFree(me, &scales);
  batchFree(me, &b);
done:
  free(rows), free(given), free(w);
  epGroupFree(me);
}

static void nvfp4(void **state) {
  (void)state;
  if (getenv("EP_TEST_DOMAINS")) skip(); /* one domain's, here and below */
  static const struct {
    uint32_t ranks, hidden, tokens[3];
    int choice;
  } cases[] = {{3, 16, {6, 0, 3}, SPREAD},  {3, 48, {1, 6, 5}, SPREAD},        {3, 896, {6, 6, 6}, SPREAD},
               {3, 912, {0, 5, 6}, SPREAD}, {3, 80, {6, 6, 6}, ALL_TO_RANK_0}, {2, 1808, {3, 4}, SPREAD},
               {1, 64, {6}, SPREAD}};
  for (size_t l = 0; l < LENGTH(layouts); l++)
    for (size_t i = 0; i < LENGTH(cases); i++) {
      plan p = {.ranks = cases[i].ranks,
                .experts = 12,
                .topk = 3,
                .hidden = cases[i].hidden,
                .maxTokens = 6,
                .rounds = 1,
                .layout = layouts[l],
                .choice = cases[i].choice,
                .masks = i == 2,
                .borrow = (int)(i + l) % 2};
      memcpy(p.tokens[0], cases[i].tokens, sizeof cases[i].tokens);
      planMake(&p);
      for (unsigned seed = 0; seed < 3; seed++) {
        epTestWorld world = {.ranks = (int)p.ranks, .seed = 70 + i + 100 * seed, .arg = &p};
        epWorldRun(&world, nvfp4Body);
      }
      planFree(&p);
    }
}

/* What NVFP4 holds arrives as it was, in whatever order operations with and without it come. */
static void nvfp4Streamed(void **state) {
  (void)state;
  if (getenv("EP_TEST_DOMAINS")) skip();
  for (size_t l = 0; l < LENGTH(layouts); l++) {
    plan p;
    small(&p, layouts[l], ROUNDS);
    p.nvfp4 = 1, p.hidden = 80, p.borrow = (int)l;
    runWorlds(p.ranks, &p, streamedBody);
    planFree(&p);
  }
}

/* Every rank has tokens, which come back as NVFP4. */
static void nvfp4Plan(plan *p, uint32_t ranks, ncclEpLayout_t layout) {
  *p = (plan){.ranks = ranks,
              .experts = 4 * ranks,
              .topk = 3,
              .hidden = 80,
              .maxTokens = 6,
              .rounds = 1,
              .nvfp4 = 1,
              .layout = layout};
  for (uint32_t r = 0; r < ranks; r++) p->tokens[0][r] = 6;
  planMake(p);
}

/* A group whose first batch is dispatched. False: there is no group. */
static int dispatchFirst(epTestRank *me, plan *p, uint64_t timeoutNs, ncclEpHandle_t *h, batch *b) {
  groupMake(me, p, timeoutNs);
  if (!me->group) return 0;
  handleMake(me, p, h);
  batchMake(me, p, 0, b);
  EXPECT_OK(me, update(p, *h, b));
  EXPECT_OK(me, dispatch(p, *h, b));
  return 1;
}
static void leaveFirst(epTestRank *me, ncclEpHandle_t h, batch *b) {
  EXPECT_OK(me, ncclEpHandleDestroy(h));
  batchFree(me, b);
  epGroupFree(me);
}

/* One rank's rows travel otherwise: all are told. */
static void recipesApartBody(epTestRank *me) {
  plan *p = me->arg, other = *p;
  batch b;
  ncclEpHandle_t h = NULL;
  ncclEpErrorInfo_t info = NCCL_EP_ERROR_INFO_INIT;
  other.nvfp4 = me->rank != 1;
  if (!dispatchFirst(me, p, 50000000, &h, &b)) return;
  EXPECT_OK(me, combine(&other, h, &b));
  sync(me);
  EXPECT_OK(me, ncclEpGetErrorInfo(me->group, &info));
  EXPECT(me, info.code == 8 && strstr(info.text, "of rows of another width, type, recipe or top-k"), "code %d: %s",
         info.code, info.text);
  leaveFirst(me, h, &b);
}

static void recipesApart(void **state) {
  (void)state;
  if (getenv("EP_TEST_DOMAINS")) skip();
  for (size_t l = 0; l < LENGTH(layouts); l++) {
    plan p;
    nvfp4Plan(&p, 3, layouts[l]);
    runWorlds(p.ranks, &p, recipesApartBody);
    planFree(&p);
  }
}

static void nvfp4FarBody(epTestRank *me) {
  plan *p = me->arg, plain = *p;
  ncclEpHandle_t h = NULL;
  batch b;
  if (!dispatchFirst(me, p, 0, &h, &b)) return;
  EXPECT_ERROR(me, combine(p, h, &b), ncclInvalidUsage,
               "quant_recipe is NCCL_EP_COMB_QUANT_NVFP4: not supported yet across scale-up domains");
  plain.nvfp4 = 0;
  EXPECT_OK(me, combine(&plain, h, &b));
  sync(me);
  check(me, p, 0, &b, 1);
  leaveFirst(me, h, &b);
}

static void nvfp4AcrossDomains(void **state) {
  (void)state;
  if (getenv("EP_TEST_DOMAINS")) skip(); /* it sets them */
  setenv("EP_TEST_DOMAINS", "2", 1);
  plan p;
  nvfp4Plan(&p, 4, layouts[0]);
  epTestWorld world = {.ranks = (int)p.ranks, .seed = 8, .arg = &p};
  epWorldRun(&world, nvfp4FarBody);
  planFree(&p);
  unsetenv("EP_TEST_DOMAINS");
}

/* Sizes and routings that users of comparable libraries ran into: what test_cases.c has for high throughput. */
static void casesFromTheField(void **state) {
  (void)state;
  static const struct {
    uint32_t experts, topk, hidden, tokens[2][2], maxTokens;
    int choice;
    ncclDataType_t byteType;
  } cases[] = {{8, 2, 64, {{5, 0}, {0, 5}}, 8, SPREAD, 0}, /* zero tokens */
               {8, 2, 64, {{0, 0}, {3, 4}}, 8, SPREAD, 0},
               {8, 2, 64, {{4, 4}, {4, 4}}, 4, ALL_TO_RANK_0, 0}, /* nothing received */
               {8, 2, 8, {{1024, 7}, {63, 65}}, 1024, SPREAD, 0}, /* ragged */
               {8, 2, 8, {{4095, 1}, {1, 127}}, 4095, SPREAD, 0},
               {8, 2, 1024, {{3, 3}, {63, 63}}, 63, SPREAD, 0}, /* odd counts */
               {4, 4, 64, {{4, 4}, {3, 4}}, 4, MIXED, 0},       /* -1 entries */
               {64, 1, 8, {{4, 4}, {4, 3}}, 4, SPREAD, 0},      /* wide top-k, and such as do not divide a warp */
               {64, 9, 8, {{4, 4}, {4, 3}}, 4, SPREAD, 0},
               {64, 10, 8, {{4, 4}, {4, 3}}, 4, SPREAD, 0},
               {64, 16, 8, {{4, 4}, {4, 3}}, 4, SPREAD, 0},
               {64, 22, 8, {{4, 4}, {4, 3}}, 4, SPREAD, 0},
               {64, 32, 8, {{4, 4}, {4, 3}}, 4, SPREAD, 0},
               {32, 3, 8, {{128, 128}, {0, 128}}, 128, SPREAD, 0},
               {32, 5, 8, {{128, 128}, {1, 128}}, 128, SPREAD, 0},
               {32, 6, 8, {{32, 128}, {1, 0}}, 128, SPREAD, 0},
               {32, 7, 8, {{32, 128}, {1, 0}}, 128, SPREAD, 0},
               {32, 12, 8, {{32, 64}, {1, 0}}, 64, SPREAD, 0},
               {8, 2, 136, {{3, 2}, {1, 0}}, 4, SPREAD, 0}, /* hidden sizes */
               {8, 2, 2880, {{3, 2}, {1, 0}}, 4, SPREAD, 0},
               {8, 2, 3072, {{3, 2}, {1, 0}}, 4, SPREAD, 0},
               {8, 2, 3584, {{3, 2}, {1, 0}}, 4, SPREAD, 0},
               {8, 2, 7168, {{3, 2}, {1, 0}}, 4, SPREAD, 0},
               {8, 2, 16384, {{3, 2}, {1, 0}}, 4, SPREAD, 0},
               {8, 2, 1440, {{3, 2}, {1, 0}}, 4, SPREAD, ncclFloat8e4m3}};
  for (size_t l = 0; l < LENGTH(layouts); l++)
    for (size_t i = 0; i < LENGTH(cases); i++) {
      plan p = {.ranks = 2,
                .experts = cases[i].experts,
                .topk = cases[i].topk,
                .hidden = cases[i].hidden,
                .maxTokens = cases[i].maxTokens,
                .rounds = 2,
                .layout = layouts[l],
                .borrow = (int)(i + l) % 2,
                .choice = cases[i].choice,
                .byteType = cases[i].byteType};
      memcpy(p.tokens[0], cases[i].tokens[0], sizeof cases[i].tokens[0]);
      memcpy(p.tokens[1], cases[i].tokens[1], sizeof cases[i].tokens[1]);
      planMake(&p);
      epTestWorld world = {.ranks = 2, .seed = 600 + i, .arg = &p};
      epWorldRun(&world, streamedBody);
      planFree(&p);
    }
}

/* Two handles, also of different layouts and top-k, take turns between dispatch and combine. */
static void interleavedBody(epTestRank *me) {
  plan *const *p = me->arg;
  batch b[2];
  ncclEpHandle_t h[2] = {NULL, NULL};
  groupMake(me, p[p[1]->topk > p[0]->topk], 0);
  if (!me->group) return;
  for (uint32_t i = 0; i < 2; i++) {
    handleMake(me, p[i], &h[i]);
    batchMake(me, p[i], i, &b[i]);
    EXPECT_OK(me, update(p[i], h[i], &b[i]));
  }
  for (int again = 0; again < 2; again++) {
    for (uint32_t i = 0; i < 2; i++) EXPECT_OK(me, dispatch(p[i], h[i], &b[i]));
    for (uint32_t i = 0; i < 2; i++) EXPECT_OK(me, combine(p[i], h[i], &b[i]));
  }
  sync(me);
  for (uint32_t i = 0; i < 2; i++) {
    check(me, p[i], i, &b[i], 1);
    batchFree(me, &b[i]);
    EXPECT_OK(me, ncclEpHandleDestroy(h[i]));
  }
  epExpectNoAsyncError(me);
  epGroupFree(me);
}

static void interleaved(void **state) {
  (void)state;
  plan a, b, c;
  small(&a, layouts[0], 2);
  small(&b, layouts[1], 2);
  small(&c, layouts[1], 2);
  a.borrow = c.borrow = 1;
  runWorlds(a.ranks, (plan *[]){&a, &b}, interleavedBody);
  runWorlds(a.ranks, (plan *[]){&b, &c}, interleavedBody);
  planFree(&a);
  planFree(&b);
  planFree(&c);
}

/* Handles of different top-k: a rank without a token of the one runs ahead, and its weights of the other must not lie where weights of the
 * first are still to be read. */
static void topksTakeTurns(void **state) {
  (void)state;
  plan few, many;
  few = many =
      (plan){.ranks = 3, .experts = 12, .topk = 3, .hidden = 72, .maxTokens = 6, .rounds = 2, .layout = layouts[1]};
  few.topk = 1;
  for (uint32_t i = 0; i < 2 * few.ranks; i++) {
    many.tokens[i / few.ranks][i % few.ranks] = 6;
    few.tokens[i / few.ranks][i % few.ranks] = i % few.ranks == 1 ? 0 : 6;
  }
  planMake(&few);
  planMake(&many);
  runWorlds(few.ranks, (plan *[]){&few, &many}, interleavedBody);
  epTestWorld rare = {
      .ranks = 3, .seed = 1221, .arg = (plan *[]){&few, &many}}; /* in one domain one of 320 showed it */
  epWorldRun(&rare, interleavedBody);
  planFree(&few);
  planFree(&many);
}

/* A record in the caller's memory, copied elsewhere, serves a handle that was never updated. */
static void movedBody(epTestRank *me) {
  plan *p = me->arg;
  batch b, again;
  ncclEpHandle_t h = NULL, moved = NULL;
  epTestTensor memory[2];
  size_t bytes = 0;
  groupMake(me, p, 0);
  if (!me->group) return;
  EXPECT_OK(me, ncclEpHandleMemSize(me->group, p->layout, NULL, &bytes, (int)p->topk));
  for (int i = 0; i < 2; i++) epTensorMake(me, &memory[i], ncclUint8, 1, bytes, 1, "handle_mem");
  batchMake(me, p, 0, &b);
  batchMake(me, p, 0, &again);
  EXPECT_OK(me, ncclEpInitHandle(&h, me->group, p->layout, NULL, (int)p->topk, &memory[0].t));
  EXPECT_OK(me, update(p, h, &b));
  EXPECT_ERROR(me, combine(p, h, &b), ncclInvalidUsage, "dispatched");
  EXPECT_OK(me, dispatch(p, h, &b));
  EXPECT_OK(me, ncclEpEmuMemcpy(me->comm, memory[1].t.data, memory[0].t.data, bytes, NULL));
  sync(me);
  EXPECT_OK(me, ncclEpInitHandle(&moved, me->group, p->layout, NULL, (int)p->topk, &memory[1].t));
  EXPECT_OK(me, combine(p, moved, &b));
  EXPECT_OK(me, dispatch(p, moved, &again));
  EXPECT_OK(me, combine(p, moved, &again));
  sync(me);
  check(me, p, 0, &b, 1);
  check(me, p, 0, &again, 1);
  EXPECT_OK(me, ncclEpHandleDestroy(moved));
  EXPECT_OK(me, ncclEpHandleDestroy(h));
  batchFree(me, &b);
  batchFree(me, &again);
  for (int i = 0; i < 2; i++) epTensorFree(me, &memory[i]);
  epGroupFree(me);
}

static void moved(void **state) {
  (void)state;
  for (size_t l = 0; l < LENGTH(layouts); l++) {
    plan p;
    small(&p, layouts[l], 1);
    p.borrow = 1;
    runWorlds(p.ranks, &p, movedBody);
    planFree(&p);
  }
}

static void reportBody(epTestRank *me) {
  plan *p = me->arg;
  batch b;
  ncclEpHandle_t h = NULL;
  ncclEpErrorInfo_t info = NCCL_EP_ERROR_INFO_INIT;
  const epRefRank *mine = &p->ref[0]->rank[me->rank];
  int bad = 0, over = 0;
  groupMake(me, p, 0);
  if (!me->group) return;
  handleMake(me, p, &h);
  batchMake(me, p, 0, &b);
  EXPECT_OK(me, update(p, h, &b));
  EXPECT_OK(me, dispatch(p, h, &b));
  EXPECT_OK(me, combine(p, h, &b));
  sync(me);
  check(me, p, 0, &b, 1);
  for (uint32_t i = 0; i < p->tokens[0][me->rank] * p->topk; i++) bad |= p->idx[0][me->rank][i] < -1;
  for (uint32_t e = 0; e < p->experts / p->ranks; e++) over |= mine->perExpert[e] > p->ranks * p->maxTokens;
  EXPECT_OK(me, ncclEpGetErrorInfo(me->group, &info));
  EXPECT(me, info.code == (bad ? 3 : over ? 4 : 0), "code %d: %s", info.code, info.text);
  EXPECT_OK(me, ncclEpHandleDestroy(h));
  batchFree(me, &b);
  epGroupFree(me);
}

/* Ids that do not exist count as none and are reported; so are slots beyond an expert's region, which are dropped. */
static void reports(void **state) {
  (void)state;
  for (size_t l = 0; l < LENGTH(layouts); l++) {
    plan p;
    small(&p, layouts[l], 1);
    planFree(&p);
    for (uint32_t r = 0; r < p.ranks; r++) p.tokens[0][r] = 4;
    planMake(&p);
    p.borrow = (int)l; /* dispatch reports what it reads in place */
    p.idx[0][1][2] = 12;
    p.idx[0][2][0] = -7, p.idx[0][2][7] = -7;
    p.idx[0][1][5] = -2;
    epRefDestroy(p.ref[0]);
    epRefRouting in = {p.ranks,    p.experts, p.topk,      l ? EP_REF_EXPERT_MAJOR_3D : EP_REF_RANK_MAJOR,
                       0,          0,         p.tokens[0], (const int64_t *const *)p.idx[0],
                       p.maxTokens};
    assert_int_equal(epRefCreate(&in, &p.ref[0]), 0);
    runWorlds(p.ranks, &p, reportBody);
    planFree(&p);
  }
  plan p;
  small(&p, NCCL_EP_LAYOUT_EXPERT_MAJOR, 1);
  for (uint32_t r = 0; r < p.ranks; r++) {
    free(p.idx[0][r]);
    p.tokens[0][r] = p.maxTokens;
    p.idx[0][r] = calloc((size_t)p.maxTokens * p.topk, sizeof(int64_t));
    for (uint32_t i = 0; i < p.maxTokens * p.topk; i++) p.idx[0][r][i] = 5; /* three slots a token at one expert */
  }
  epRefDestroy(p.ref[0]);
  epRefRouting in = {p.ranks,    p.experts, p.topk,      EP_REF_EXPERT_MAJOR_3D,
                     0,          0,         p.tokens[0], (const int64_t *const *)p.idx[0],
                     p.maxTokens};
  assert_int_equal(epRefCreate(&in, &p.ref[0]), 0);
  runWorlds(p.ranks, &p, reportBody);
  planFree(&p);
}

/* What low latency has no use for is refused, never ignored. */
static void optionsRefused(epTestRank *me, const plan *p, ncclEpHandle_t h, batch *b) {
  ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpDispatchExtConfig_t ext = NCCL_EP_DISPATCH_EXT_CONFIG_INIT;
  ncclEpPrepareConfig_t ahead = NCCL_EP_PREPARE_CONFIG_INIT;
  size_t bytes = 7;
  in.tokens = &b->x.t, out.tokens = &b->out.t;
  ext.scale_layout = NCCL_EP_SCALE_COLUMN_MAJOR;
  EXPECT_ERROR(me, ncclEpDispatchExt(h, &in, &out, NULL, NULL, &ext, NULL), ncclInvalidUsage,
               "ncclEpDispatchExt: |scale_layout");
  ext.scale_layout = NCCL_EP_SCALE_ROW_MAJOR, ext.scale_column_stride = 64;
  EXPECT_ERROR(me, ncclEpDispatchExt(h, &in, &out, NULL, NULL, &ext, NULL), ncclInvalidUsage,
               "scale_column_stride is 64");
  ext.scale_column_stride = 0, ext.no_zero_pad = 1;
  EXPECT_ERROR(me, ncclEpDispatchExt(h, &in, &out, NULL, NULL, &ext, NULL), ncclInvalidUsage, "no_zero_pad is 1");
  ext.no_zero_pad = 0, ext.num_sms = 4;
  EXPECT_ERROR(me, ncclEpDispatchExt(h, &in, &out, NULL, NULL, &ext, NULL), ncclInvalidUsage, "num_sms is 4");
  ncclEpCombineExtConfig_t options = NCCL_EP_COMBINE_EXT_CONFIG_INIT;
  ncclEpCombineInputs_t from = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t sums = NCCL_EP_COMBINE_OUTPUTS_INIT;
  options.bias[1] = in.tokens;
  EXPECT_ERROR(me, ncclEpCombineExt(h, &from, &sums, NULL, &options, NULL), ncclInvalidUsage, "bias[1] is given");
  options.bias[1] = NULL, options.num_sms = 4;
  EXPECT_ERROR(me, ncclEpCombineExt(h, &from, &sums, NULL, &options, NULL), ncclInvalidUsage, "num_sms is 4");
  ahead.layout = p->layout, ahead.hidden = p->hidden, ahead.top_k = p->topk, ahead.index_type = ncclInt64;
  ahead.dispatch_type = ahead.combine_type = ncclBfloat16;
  ahead.backward = 1;
  EXPECT_ERROR(me, ncclEpPrepare(me->group, &ahead), ncclInvalidUsage, "backward is 1");
  ahead.backward = 0, ahead.num_bias = 2;
  EXPECT_ERROR(me, ncclEpPrepare(me->group, &ahead), ncclInvalidUsage, "num_bias is 2: expected 0|low latency");
  ahead.num_bias = 0;
  ahead.backward = 0, ahead.scale_bytes = 8;
  EXPECT_ERROR(me, ncclEpPrepare(me->group, &ahead), ncclInvalidArgument, "its 8 bytes of scales|max_token_bytes, 144");
  ahead.scale_bytes = 0, ahead.combine_quant = (ncclEpCombQuant_t)7;
  EXPECT_ERROR(me, ncclEpPrepare(me->group, &ahead), ncclInvalidArgument, "combine_quant is 7");
  ahead.combine_quant = NCCL_EP_COMB_QUANT_NONE;
  EXPECT_OK(me, ncclEpPrepare(me->group, &ahead));
  EXPECT_ERROR(me, ncclEpHandleMemSize(me->group, p->layout, NULL, &bytes, 0), ncclInvalidArgument, "num_topk is 0");
  EXPECT(me, bytes == 7, "the output was set on failure");
}

/* The experts' counters of a batch that was checked, once more. */
static void addedTo(epTestRank *me, const plan *p, ncclEpHandle_t h, batch *b) {
  ncclEpUpdateExtConfig_t config = NCCL_EP_UPDATE_EXT_CONFIG_INIT;
  config.borrow_topk_idx = p->borrow;
  config.cumulative_counters = 1;
  EXPECT_OK(me, ncclEpUpdateHandleExt(h, &b->idx.t, NULL, &config, NULL));
  EXPECT_OK(me, dispatch(p, h, b));
  sync(me);
  for (uint32_t e = 0; e < p->experts / p->ranks; e++)
    EXPECT(me, ((const int32_t *)b->experts.t.data)[e] == 2 * (int32_t)p->ref[0]->rank[me->rank].perExpert[e],
           "expert_counters[%u] after two batches", e);
}

static void refusedBody(epTestRank *me) {
  plan *p = me->arg;
  batch b;
  ncclEpHandle_t h = NULL, none = NULL;
  ncclEpHandleConfig_t aligned = NCCL_EP_HANDLE_CONFIG_INIT;
  ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
  ncclEpHostCounts_t counts = NCCL_EP_HOST_COUNTS_INIT;
  ncclEpHandleMetadata_t metadata = NCCL_EP_HANDLE_METADATA_INIT;
  ncclEpGroupConfig_t large = NCCL_EP_GROUP_CONFIG_INIT;
  ncclEpGroup_t group = NULL;
  int rankMajor = p->layout == NCCL_EP_LAYOUT_RANK_MAJOR;
  aligned.dispatch_output_per_expert_alignment = 16;
  large.num_experts = p->experts, large.num_topk = 8, large.max_token_bytes = 65536;
  large.max_dispatch_tokens_per_rank = 65536;
  EXPECT_ERROR(me, ncclEpCreateGroup(&group, me->comm, &large), ncclInvalidUsage,
               "window|max_dispatch_tokens_per_rank");
  groupMake(me, p, 0);
  if (!me->group) return;
  batchMake(me, p, 0, &b);
  EXPECT_ERROR(me, ncclEpInitHandle(&none, me->group, NCCL_EP_LAYOUT_FLAT, NULL, 2, NULL), ncclInvalidUsage,
               "RANK_MAJOR");
  EXPECT_ERROR(me, ncclEpInitHandle(&none, me->group, p->layout, &aligned, 2, NULL), ncclInvalidArgument,
               "alignment|16");
  handleMake(me, p, &h);
  EXPECT_ERROR(me, dispatch(p, h, &b), ncclInvalidUsage, "ncclEpUpdateHandle");
  info.expert_counters = &b.experts.t;
  EXPECT_ERROR(me, ncclEpUpdateHandle(h, &b.idx.t, &info, NULL), ncclInvalidArgument, "layout_info|ncclEpDispatch");
  EXPECT_OK(me, update(p, h, &b));
  b.out.sizes[1]++;
  EXPECT_ERROR(me, dispatch(p, h, &b), ncclInvalidArgument, "outputs.tokens.sizes[1]|max_dispatch_tokens_per_rank");
  b.out.sizes[1]--;
  b.out.t.ndim = 2;
  EXPECT_ERROR(me, dispatch(p, h, &b), ncclInvalidArgument, "outputs.tokens|dimensions");
  b.out.t.ndim = 3;
  b.x.sizes[0]++;
  EXPECT_ERROR(me, dispatch(p, h, &b), ncclInvalidArgument, "inputs.tokens.sizes[0]");
  b.x.sizes[0]--;
  if (rankMajor) {
    b.outIdx.t.datatype = ncclInt64;
    EXPECT_ERROR(me, dispatch(p, h, &b), ncclInvalidArgument, "outputs.topk_idx|int32");
    b.outIdx.t.datatype = ncclInt32;
  }
  optionsRefused(me, p, h, &b);
  EXPECT_OK(me, dispatch(p, h, &b));
  if (!rankMajor) {
    b.w.t.datatype = ncclBfloat16;
    EXPECT_ERROR(me, combine(p, h, &b), ncclInvalidArgument, "outputs.topk_weights|float32");
    b.w.t.datatype = ncclFloat32;
  }
  EXPECT_OK(me, combine(p, h, &b));
  EXPECT_ERROR(me, ncclEpGetHostCounts(h, &counts), ncclInvalidUsage, "ncclEpDispatch");
  EXPECT_ERROR(me, ncclEpGetHandleMetadata(h, &metadata), ncclInvalidUsage, "low latency");
  sync(me);
  check(me, p, 0, &b, 1);
  addedTo(me, p, h, &b);
  EXPECT_OK(me, ncclEpHandleDestroy(h));
  batchFree(me, &b);
  epGroupFree(me);
}

static void refused(void **state) {
  (void)state;
  for (size_t l = 0; l < LENGTH(layouts); l++) {
    plan p;
    small(&p, layouts[l], 1);
    epTestWorld world = {.ranks = (int)p.ranks, .seed = 77, .arg = &p};
    epWorldRun(&world, refusedBody);
    planFree(&p);
  }
}

/* A rank that does not come: the others give up after the timeout and say whom they waited for; a combine that was queued before
 * that finds half a record, and moves nothing along it. */
static void awayBody(epTestRank *me) {
  plan *p = me->arg;
  int gone = (int)p->ranks - 1;
  batch b;
  ncclEpHandle_t h = NULL;
  ncclEpErrorInfo_t info = NCCL_EP_ERROR_INFO_INIT;
  groupMake(me, p, 50000000);
  if (!me->group) return;
  handleMake(me, p, &h);
  batchMake(me, p, 0, &b);
  EXPECT_OK(me, update(p, h, &b));
  if (me->rank != gone) {
    EXPECT_OK(me, dispatch(p, h, &b));
    EXPECT_OK(me, combine(p, h, &b));
    sync(me);
    EXPECT_OK(me, ncclEpGetErrorInfo(me->group, &info));
    /* of two domains of two: rank 2 may wait for rank 1, whose rows the missing rank would have brought, as well */
    EXPECT(me, info.code == 1 && (info.peer == gone || (p->ranks == 4 && me->rank == 2 && info.peer == 1)),
           "code %d, peer %d: %s", info.code, info.peer, info.text);
    EXPECT_ERROR(me, dispatch(p, h, &b), ncclRemoteError, "rank");
  }
  sync(me);
  EXPECT_OK(me, ncclEpHandleDestroy(h));
  batchFree(me, &b);
  epGroupFree(me);
}

static void away(void **state) {
  (void)state;
  for (size_t l = 0; l < LENGTH(layouts); l++) {
    for (int borrow = 0; borrow < 2; borrow++) {
      plan p;
      small(&p, layouts[l], 1);
      p.borrow = borrow;
      epTestWorld world = {.ranks = (int)p.ranks, .seed = 3, .arg = &p};
      epWorldRun(&world, awayBody);
      planFree(&p);
    }
  }
}

static void awayAcrossDomains(void **state) {
  (void)state;
  if (getenv("EP_TEST_DOMAINS")) skip(); /* it sets them */
  setenv("EP_TEST_DOMAINS", "2", 1);
  for (size_t l = 0; l < LENGTH(layouts); l++) {
    plan p = {.ranks = 4, .experts = 16, .topk = 4, .hidden = 72, .maxTokens = 6, .rounds = 1, .layout = layouts[l]};
    for (uint32_t r = 0; r < p.ranks; r++) p.tokens[0][r] = 6;
    planMake(&p);
    for (unsigned seed = 0; seed < 3; seed++) {
      epTestWorld world = {.ranks = (int)p.ranks, .seed = 3 + seed, .arg = &p};
      epWorldRun(&world, awayBody);
    }
    planFree(&p);
  }
  unsetenv("EP_TEST_DOMAINS");
}

/* ---- Masks: round 0 is of all, in round 1 a rank stops, round 2 is without it, round 3 of all again ---------------------- */

enum { BEFORE_DISPATCH = 0, BEFORE_COMBINE, KILLED, TWO };

typedef struct stop {
  plan whole, without; /* the same decisions; `without` knows what they come to without the rank */
  int ups;             /* ranks of a scale-up domain, 0: there is one */
  int phase;           /* when it stops; KILLED: in the middle of both, TWO: with another one */
  int leaves;          /* it never comes back */
  pthread_barrier_t meet;
} stop;

static void withoutMake(plan *p, int ups) {
  const epRound lost = {.gone = GONE + 1, .ups = ups};
  for (uint32_t n = 0; n < p->rounds; n++) {
    for (uint32_t r = 0; r < p->ranks; r++)
      for (uint32_t i = 0; i < p->tokens[n][r] * p->topk; i++) {
        int64_t e = p->idx[n][r][i];
        if (e >= 0 && epRoundLost(&lost, (int)r, (int)(e / (p->experts / p->ranks)))) p->idx[n][r][i] = -1;
      }
    p->tokens[n][GONE] = 0;
    epRefDestroy(p->ref[n]);
    makeReference(p, n);
  }
}

/* Of two, they are in different domains and on different rails: each stands for a rail of the other's domain. */
static int stops(const epTestRank *me, const stop *s) {
  return me->rank == GONE || (s->phase == TWO && me->rank == me->ranks - 2);
}

/* A round of all, compared with `p`. */
static void layerLl(epTestRank *me, const stop *s, const plan *p, uint32_t n, ncclEpHandle_t h) {
  batch b;
  batchMake(me, &s->whole, n, &b);
  EXPECT_OK(me, update(p, h, &b));
  EXPECT_OK(me, dispatch(p, h, &b));
  EXPECT_OK(me, combine(p, h, &b));
  sync(me);
  check(me, p, n, &b, 1);
  batchFree(me, &b);
}

/* Of every token each rank's part is there in whole or not at all: its elements are one number times those that were sent. */
static void checkParts(epTestRank *me, const plan *p, uint32_t n, const batch *b) {
  const uint16_t *y = b->y.t.data;
  int bad = 0;
  for (uint32_t t = 0; t < p->tokens[n][me->rank]; t++)
    for (uint32_t h = 1; h < p->hidden; h++) {
      uint16_t x = elementOf(n, (uint32_t)me->rank, t, h) ^ elementOf(n, (uint32_t)me->rank, t, 0);
      bad += (y[t * p->hidden + h] ^ y[t * p->hidden]) != x && (y[t * p->hidden + h] | y[t * p->hidden]) & 0x7fff;
    }
  EXPECT(me, !bad, "round %u: %d elements have parts that others have not", n, bad);
}

/* What had come when somebody died, or who knows of it, is the schedule's affair. */
static void surviveSomehow(epTestRank *me, stop *s, batch *b) {
  int mask[EP_TEST_MAX_RANKS];
  for (int r = 0; r < me->ranks; r++) mask[r] = r != GONE;
  checkParts(me, &s->whole, 1, b);
  if (s->phase == KILLED) EXPECT_OK(me, ncclEpMaskUpdate(me->group, mask, NULL));
  EXPECT_OK(me, ncclEpErrorClear(me->group));
}

static void surviveLl(epTestRank *me, stop *s, ncclEpHandle_t h, batch *b) {
  unsigned long long from = clockOf(me);
  int later = s->ups && s->phase == BEFORE_COMBINE; /* who does not reach the rank hears of it in the next dispatch */
  if (s->phase != BEFORE_COMBINE) {
    EXPECT_OK(me, update(&s->whole, h, b));
    EXPECT_OK(me, dispatch(&s->whole, h, b));
  }
  EXPECT_OK(me, combine(&s->whole, h, b));
  sync(me);
  EXPECT(me, clockOf(me) - from < TIMEOUT_NS / 2 * 3, "it took %llu us", (clockOf(me) - from) / 1000);
  if (s->phase >= KILLED) {
    surviveSomehow(me, s, b);
  } else {
    checkRows(me, s->phase ? &s->whole : &s->without, 1, b);
    checkSums(me, &s->without, 1, b);
  }
  if (s->phase == TWO) return;
  if (later) layerLl(me, s, &s->without, 2, h);
  if (s->phase < KILLED) {
    expectOneTimeout(me, from);
    expectNamed(me);
  }
  expectMask(me, "after the wait", GONE);
  from = clockOf(me);
  layerLl(me, s, &s->without, 2, h);
  expectQuick(me, from);
  epExpectNoAsyncError(me);
}

/* Along a record of before the re-admission nothing moves, and nobody waits. */
static void alongOld(epTestRank *me, stop *s, ncclEpHandle_t old) {
  ncclEpErrorInfo_t info = NCCL_EP_ERROR_INFO_INIT;
  unsigned long long from = clockOf(me);
  batch b;
  batchMake(me, &s->whole, 0, &b);
  EXPECT_OK(me, combine(&s->whole, old, &b));
  sync(me);
  expectQuick(me, from);
  EXPECT_OK(me, ncclEpGetErrorInfo(me->group, &info));
  EXPECT(me, info.code == 7, "code %d: %s", info.code, info.text);
  EXPECT(me, info.peer == -1 && strncmp(info.phase, "none:", 5) == 0, "peer %d, phase '%s'", info.peer, info.phase);
  EXPECT_OK(me, ncclEpErrorClear(me->group));
  batchFree(me, &b);
}

static void restoredLl(epTestRank *me, stop *s, ncclEpHandle_t h, ncclEpHandle_t old) {
  EXPECT_OK(me, ncclEpMaskClean(me->group, NULL));
  expectMask(me, "after the re-admission", -1);
  EXPECT_OK(me, ncclEpErrorClear(me->group));
  alongOld(me, s, old);
  EXPECT_OK(me, ncclEpMaskClean(me->group, NULL)); /* where there is nothing to be made good */
  EXPECT_OK(me, ncclEpMaskClean(me->group, NULL));
  expectMask(me, "after another", -1);
  layerLl(me, s, &s->whole, 3, h);
  layerLl(me, s, &s->whole, 0, h);
  epExpectNoAsyncError(me);
}

static void stopBody(epTestRank *me) {
  stop *s = me->arg;
  ncclEpHandle_t h = NULL, old = NULL;
  batch b;
  groupMake(me, &s->whole, TIMEOUT_NS);
  if (!me->group) return;
  handleMake(me, &s->whole, &h);
  handleMake(me, &s->whole, &old);
  layerLl(me, s, &s->whole, 0, old);
  batchMake(me, &s->whole, 1, &b);
  if (s->phase == BEFORE_COMBINE) {
    EXPECT_OK(me, update(&s->whole, h, &b));
    EXPECT_OK(me, dispatch(&s->whole, h, &b));
    sync(me);
  }
  if (stops(me, s) && s->phase == KILLED) {
    EXPECT_OK(me, ncclEpEmuRankStop(me->comm, 1, me->world->seed * 7919 % (s->ups ? 20000 : 12000)));
    EXPECT_OK(me, update(&s->whole, h, &b));
    EXPECT_OK(me, dispatch(&s->whole, h, &b));
    EXPECT_OK(me, combine(&s->whole, h, &b));
  } else if (stops(me, s)) {
    EXPECT_OK(me, ncclEpEmuRankStop(me->comm, 1, NEVER));
  }
  pthread_barrier_wait(&s->meet);
  if (!stops(me, s)) surviveLl(me, s, h, &b);
  pthread_barrier_wait(&s->meet);
  if (stops(me, s)) EXPECT_OK(me, ncclEpEmuRankStop(me->comm, 0, 0));
  pthread_barrier_wait(&s->meet);
  if (!s->leaves) restoredLl(me, s, h, old);
  sync(me);
  batchFree(me, &b);
  EXPECT_OK(me, ncclEpHandleDestroy(h));
  EXPECT_OK(me, ncclEpHandleDestroy(old));
  if (s->leaves)
    epPlanLeave(me, &s->meet);
  else
    epGroupFree(me);
}

static void stopRun(stop *s, unsigned seeds) {
  s->whole.masks = s->without.masks = 1;
  withoutMake(&s->without, s->ups);
  for (unsigned seed = 0; seed < seeds; seed++) {
    s->whole.borrow = s->without.borrow = (int)seed % 2;
    s->leaves = s->ups && s->phase < KILLED && seed % 2;
    s->whole.nvfp4 = s->without.nvfp4 = !s->ups && seed / 2 % 2;
    epTestWorld world = {
        .ranks = (int)s->whole.ranks, .sms = s->ups && seed % 3 == 1 ? 5 : 0, .seed = 500 + seed, .arg = s};
    assert_int_equal(pthread_barrier_init(&s->meet, NULL, s->whole.ranks), 0);
    epWorldRun(&world, stopBody);
    pthread_barrier_destroy(&s->meet);
  }
  planFree(&s->whole);
  planFree(&s->without);
}

static void ranksThatStop(void **state) {
  (void)state;
  if (getenv("EP_TEST_DOMAINS")) skip(); /* this one is of one */
  for (size_t l = 0; l < LENGTH(layouts); l++)
    for (int phase = 0; phase <= KILLED; phase++) {
      stop s = {.phase = phase};
      small(&s.whole, layouts[l], ROUNDS);
      small(&s.without, layouts[l], ROUNDS);
      s.whole.hidden = s.without.hidden = 80;
      stopRun(&s, phase == KILLED ? 12 : 4);
    }
}

/* EP_TEST_SCHEDULES: how many, for longer runs. */
static unsigned schedulesOr(unsigned usual) {
  const char *wanted = getenv("EP_TEST_SCHEDULES");
  return wanted ? (unsigned)strtoul(wanted, NULL, 10) : usual;
}

static void ranksThatStopAcrossDomains(void **state) {
  static const struct {
    const char *domains;
    uint32_t ranks;
    int ups;
  } shapes[] = {{"2", 4, 2}, {"3", 6, 2}, {"2", 8, 4}};
  (void)state;
  if (getenv("EP_TEST_DOMAINS")) skip(); /* it sets them */
  for (size_t i = 0; i < LENGTH(shapes); i++)
    for (size_t l = 0; l < LENGTH(layouts); l++)
      for (int phase = 0; phase <= TWO; phase++) {
        stop s = {.phase = phase, .ups = shapes[i].ups};
        uint32_t hidden = phase >= KILLED ? 1000 : 72; /* two strips where they may differ */
        if (phase == TWO && s.ups < 4) continue;
        setenv("EP_TEST_DOMAINS", shapes[i].domains, 1);
        smallOf(&s.whole, shapes[i].ranks, hidden, layouts[l], ROUNDS);
        smallOf(&s.without, shapes[i].ranks, hidden, layouts[l], ROUNDS);
        stopRun(&s, schedulesOr(phase == KILLED ? 4 : 2));
      }
  unsetenv("EP_TEST_DOMAINS");
}

/* ---- Both algorithms by turns: two groups, three handles ------------------------------------------------------------- */

typedef struct both {
  plan ll;
  epRound flat, major;
} both;

static void bothBody(epTestRank *me) {
  both *s = me->arg;
  ncclEpGroup_t ll, ht;
  ncclEpHandle_t h = NULL;
  epRun flat = {.salt = (unsigned)me->world->seed}, major = {.salt = (unsigned)me->world->seed + 1};
  batch b[ROUNDS];
  flat.borrow = (int)me->world->seed & 1;
  groupMake(me, &s->ll, 0);
  ll = me->group;
  epGroupMake(me, s->flat.c);
  ht = me->group;
  if (!ll || !ht) return;
  me->group = ll;
  handleMake(me, &s->ll, &h);
  me->group = ht;
  for (uint32_t n = 0; n < s->ll.rounds; n++) {
    batchMake(me, &s->ll, n, &b[n]);
    EXPECT_OK(me, update(&s->ll, h, &b[n]));
    epRunUpdate(me, n & 1 ? &major : &flat, n & 1 ? &s->major : &s->flat);
    EXPECT_OK(me, dispatch(&s->ll, h, &b[n]));
    if (n) epRunDispatch(me, n & 1 ? &flat : &major);
    EXPECT_OK(me, combine(&s->ll, h, &b[n]));
    epRunDispatch(me, n & 1 ? &major : &flat);
    if (n) epRunCombine(me, n & 1 ? &flat : &major);
    epRunCombine(me, n & 1 ? &major : &flat);
  }
  sync(me);
  for (uint32_t n = 0; n < s->ll.rounds; n++) check(me, &s->ll, n, &b[n], 1), batchFree(me, &b[n]);
  epExpectNoAsyncError(me);
  epRunFree(me, &flat);
  epRunFree(me, &major);
  EXPECT_OK(me, ncclEpHandleDestroy(h));
  EXPECT_OK(me, ncclEpGroupDestroy(ll));
  epGroupFree(me);
}

static void algorithmsTakeTurns(void **state) {
  (void)state;
  unsigned schedules = schedulesOr(4);
  for (int masks = 0; masks < (getenv("EP_TEST_DOMAINS") ? 1 : 2); masks++) {
    both s;
    uint64_t seed = 9;
    uint32_t tokens[] = {3, 0, 4, 1, 4, 2, 4, 3};
    epCase c = {.ranks = 8,
                .experts = 16,
                .topk = 3,
                .hidden = 64,
                .maxTokens = 4,
                .layout = NCCL_EP_LAYOUT_FLAT,
                .type = ncclBfloat16,
                .masks = masks};
    epCase m = c;
    m.layout = NCCL_EP_LAYOUT_EXPERT_MAJOR, m.align = 4;
    s.ll = (plan){.ranks = 8,
                  .experts = 16,
                  .topk = 3,
                  .hidden = 72,
                  .maxTokens = 4,
                  .rounds = 2,
                  .masks = masks,
                  .layout = layouts[masks]};
    for (uint32_t n = 0; n < s.ll.rounds; n++)
      for (uint32_t r = 0; r < 8; r++) s.ll.tokens[n][r] = tokens[(r + n) % 8];
    planMake(&s.ll);
    epRoundMake(&s.flat, &c, tokens, epPickRandom, &seed);
    epRoundMake(&s.major, &m, tokens, epPickRandom, &seed);
    for (unsigned i = 0; i < schedules; i++) {
      epTestWorld world = {.ranks = 8, .sms = i % 3 == 1 ? 3 : 0, .seed = 60 + i, .arg = &s};
      epWorldRun(&world, bothBody);
    }
    epRoundFree(&s.flat);
    epRoundFree(&s.major);
    planFree(&s.ll);
  }
}

/* Rounds of one group in a row, nothing looked at in between. */
static void plantedBody(epTestRank *me) {
  plan *p = me->arg;
  batch b[ROUNDS];
  ncclEpHandle_t h = NULL;
  groupMake(me, p, 50000000);
  if (!me->group) return;
  handleMake(me, p, &h);
  for (uint32_t n = 0; n < p->rounds; n++) batchMake(me, p, n, &b[n]);
  for (uint32_t n = 0; n < p->rounds; n++) {
    EXPECT_OK(me, update(p, h, &b[n]));
    EXPECT_OK(me, dispatch(p, h, &b[n]));
    EXPECT_OK(me, combine(p, h, &b[n]));
  }
  sync(me);
  epExpectNoAsyncError(me);
  for (uint32_t n = 0; n < p->rounds; n++) check(me, p, n, &b[n], 1), batchFree(me, &b[n]);
  EXPECT_OK(me, ncclEpHandleDestroy(h));
  epGroupFree(me);
}

/* Faults in the kernels are seen: units taken before they come, rows in the wrong place, halves reused while a peer is two
 * operations behind. */
static void planted(void **state) {
  (void)state;
  static const struct {
    unsigned bug;
    const char *says; /* one of these, separated by | */
  } faults[] = {{EP_BUG_NONE, NULL},
                {EP_BUG_SKIP_WAIT, "wrong values|outside|nothing|timed out"},
                {EP_BUG_SLOT_OFF_BY_ONE, "wrong values|written past|nothing"},
                {EP_BUG_NO_CREDIT, "timed out|wrong values|async"}};
  for (size_t l = 0; l < LENGTH(layouts); l++)
    for (size_t f = 0; f < LENGTH(faults); f++) {
      plan p;
      /* Across domains what each operation waits for anyhow is as good as a greeting, but of ranks without tokens. */
      if (faults[f].bug == EP_BUG_NO_CREDIT && getenv("EP_TEST_DOMAINS")) continue;
      unsigned found = 0;
      char text[4096] = "";
      small(&p, layouts[l], ROUNDS);
      if (faults[f].bug == EP_BUG_NO_CREDIT) /* ranks that expect nothing from each other run ahead */
        for (uint32_t n = 0; n < p.rounds; n++) {
          for (uint32_t r = 0; r < p.ranks; r++)
            for (uint32_t i = 0; i < p.tokens[n][r] * p.topk; i++) p.idx[n][r][i] = -1;
          epRefDestroy(p.ref[n]);
          epRefRouting in = {p.ranks,    p.experts, p.topk,      l ? EP_REF_EXPERT_MAJOR_3D : EP_REF_RANK_MAJOR,
                             0,          0,         p.tokens[n], (const int64_t *const *)p.idx[n],
                             p.maxTokens};
          assert_int_equal(epRefCreate(&in, &p.ref[n]), 0);
        }
      for (unsigned s = 0; s < (faults[f].says ? 300 : 20) && !found; s++) {
        epTestWorld world = {.ranks = (int)p.ranks, .seed = 40 + s, .arg = &p, .bug = faults[f].bug};
        found = epWorldTry(&world, plantedBody, text, sizeof(text));
      }
      if (!faults[f].says) {
        if (found) fail_msg("without a fault: %s", text);
      } else {
        char words[128], *save = NULL;
        int named = 0;
        snprintf(words, sizeof(words), "%s", faults[f].says);
        for (char *w = strtok_r(words, "|", &save); w; w = strtok_r(NULL, "|", &save)) named |= strstr(text, w) != NULL;
        if (!found || !named) fail_msg("fault %u, layout %zu: found %u: %s", faults[f].bug, l, found, text);
      }
      planFree(&p);
    }
}

/* Those whose names match the argument, or all. */
int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(streamed),
      cmocka_unit_test(scales),
      cmocka_unit_test(casesFromTheField),
      cmocka_unit_test(quantised),
      cmocka_unit_test(nvfp4),
      cmocka_unit_test(nvfp4Streamed),
      cmocka_unit_test(recipesApart),
      cmocka_unit_test(nvfp4AcrossDomains),
      cmocka_unit_test(interleaved),
      cmocka_unit_test(topksTakeTurns),
      cmocka_unit_test(moved),
      cmocka_unit_test(reports),
      cmocka_unit_test(refused),
      cmocka_unit_test(away),
      cmocka_unit_test(planted),
      cmocka_unit_test(awayAcrossDomains),
      cmocka_unit_test(ranksThatStop),
      cmocka_unit_test(ranksThatStopAcrossDomains),
      cmocka_unit_test(algorithmsTakeTurns),
  };
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  return cmocka_run_group_tests_name("low latency", tests, NULL, NULL);
}
