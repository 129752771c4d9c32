/* What batches.h says. */
#include "batches.h"

#include <string.h>

static uint64_t mixed(uint64_t v) {
  v ^= v >> 33, v *= 0xff51afd7ed558ccdull, v ^= v >> 33, v *= 0xc4ceb9fe1a85ec53ull;
  return v ^ v >> 33;
}

uint64_t epDrawn(const setting *s, unsigned b, unsigned round, uint64_t what) {
  return mixed(mixed(s->seed * 1000003u + b * 101u + round) + what);
}

static uint16_t bf16(float v) {
  uint32_t bits;
  memcpy(&bits, &v, sizeof bits);
  return (uint16_t)(bits >> 16);
}

static float weightOf(uint32_t t, uint32_t k) { return (float)(1u << (t + k) % 3); }

/* Element h of token t: a sign of its own for each of 16 columns. */
static float elementOf(const setting *s, int rank, unsigned b, unsigned round, uint32_t t, uint32_t h) {
  return epDrawn(s, b, round, 7777u + (uint64_t)rank * 64u + t) >> h % 16 & 1 ? -1.0f : 1.0f;
}

static int flat(const setting *s) { return s->layout == NCCL_EP_LAYOUT_FLAT; }
static int rankMajor(const setting *s) { return s->layout == NCCL_EP_LAYOUT_RANK_MAJOR; }

/* By what combine multiplies a token: the ranks it went to, its slots, or the weights of those. */
static float timesOf(const epTestRank *me, const setting *s, const batch *b, uint32_t t) {
  int hit[EP_TEST_MAX_RANKS] = {0};
  float times = 0;
  epRound lost = {.gone = s->gone, .ups = s->ups};
  for (uint32_t k = 0; k < TOPK; k++) {
    int64_t e = b->choice[t][k];
    if (e < 0 || epRoundLost(&lost, me->rank, (int)(e / 4)) || ((flat(s) || rankMajor(s)) && hit[e / 4]++)) continue;
    times += s->lowLatency && !rankMajor(s) ? weightOf(t, k) : 1.0f;
  }
  return times;
}

void epBatchMake(epTestRank *me, const setting *s, batch *b) {
  size_t ranks = (size_t)me->ranks, rows = ranks * MOST * TOPK;
  epTensorMake(me, &b->idx, ncclInt64, 2, MOST, TOPK, "indices");
  epTensorMake(me, &b->x, ncclBfloat16, 2, MOST, HIDDEN, "tokens");
  epTensorMake(me, &b->w, ncclFloat32, 2, MOST, TOPK, "weights");
  epTensorMake(me, &b->y, ncclBfloat16, 2, MOST, HIDDEN, "sums");
  if (s->lowLatency) rows = rankMajor(s) ? ranks * MOST : 4 * ranks * MOST;
  epTensorMake(me, &b->out, ncclBfloat16, 2, rows, HIDDEN, "rows");
  epTensorMake(me, &b->outW, ncclFloat32, 2, rows, TOPK, "row weights");
  epTensorMake(me, &b->outIdx, s->lowLatency ? ncclInt32 : ncclInt64, 2, rows, TOPK, "row indices");
  if (s->windows) EXPECT_OK(me, ncclEpEmuWindowRegister(me->comm, b->out.t.data, b->out.bytes, &b->window));
  EXPECT_OK(me, ncclEpInitHandle(&b->handle, me->group, s->layout, NULL, (int)TOPK, NULL));
}

void epBatchFree(epTestRank *me, batch *b) {
  epTestTensor *all[] = {&b->idx, &b->x, &b->w, &b->out, &b->outW, &b->outIdx, &b->y};
  EXPECT_OK(me, ncclEpHandleDestroy(b->handle));
  if (b->window) EXPECT_OK(me, ncclEpEmuWindowDeregister(me->comm, b->window));
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
    epTensorCheckGuards(me, all[i], "a batch's");
    epTensorFree(me, all[i]);
  }
}

static ncclEpTensor_t cut(const epTestTensor *t, size_t *sizes, unsigned ndim, size_t a, size_t b, size_t c) {
  ncclEpTensor_t v = t->t;
  sizes[0] = a, sizes[1] = b, sizes[2] = c;
  v.ndim = ndim, v.sizes = sizes;
  if (!a) v.data = NULL;
  return v;
}

void epBatchFill(epTestRank *me, const setting *s, batch *b, unsigned number) {
  uint16_t x[MOST][HIDDEN];
  float w[MOST][TOPK];
  b->round++;
  b->tokens = s->zeroTokens && me->rank % 2
                  ? 0
                  : (uint32_t)(epDrawn(s, number, b->round, 5000u + (unsigned)me->rank) % (MOST + 1));
  for (uint32_t t = 0; t < MOST; t++) {
    for (uint32_t k = 0; k < TOPK; k++) {
      uint64_t v = epDrawn(s, number, b->round, (uint64_t)me->rank * 4096u + t * TOPK + k);
      b->choice[t][k] = v % 7 == 0 ? -1 : (int64_t)(v / 7 % (4u * (unsigned)me->ranks));
      for (uint32_t j = 0; j < k; j++)
        if (b->choice[t][j] == b->choice[t][k]) b->choice[t][k] = -1;
      w[t][k] = weightOf(t, k);
    }
    for (uint32_t h = 0; h < HIDDEN; h++) x[t][h] = bf16(elementOf(s, me->rank, number, b->round, t, h));
  }
  EXPECT_OK(me, ncclEpEmuMemcpy(me->comm, b->idx.t.data, b->choice, sizeof b->choice, b->stream));
  EXPECT_OK(me, ncclEpEmuMemcpy(me->comm, b->x.t.data, x, sizeof x, b->stream));
  EXPECT_OK(me, ncclEpEmuMemcpy(me->comm, b->w.t.data, w, sizeof w, b->stream));
  EXPECT_OK(me, ncclEpEmuMemset(me->comm, b->y.t.data, 0xff, b->y.bytes, b->stream));
}

void epBatchRoute(epTestRank *me, const setting *s, batch *b, unsigned number) {
  size_t sizes[3];
  ncclEpTensor_t idx = cut(&b->idx, sizes, 2, b->tokens, TOPK, 0);
  ncclEpUpdateExtConfig_t borrow = NCCL_EP_UPDATE_EXT_CONFIG_INIT;
  borrow.borrow_topk_idx = !s->copies && epDrawn(s, number, b->round, 1) % 2;
  EXPECT_OK(me, ncclEpUpdateHandleExt(b->handle, &idx, NULL, &borrow, b->stream));
}

void epBatchUpdate(epTestRank *me, const setting *s, batch *b, unsigned number) {
  epBatchFill(me, s, b, number);
  epBatchRoute(me, s, b, number);
}

/* Rows of dispatch, as its output or as combine's input. */
static ncclEpTensor_t rowsOf(const epTestRank *me, const setting *s, const batch *b, size_t *sizes) {
  size_t ranks = (size_t)me->ranks;
  if (rankMajor(s)) return cut(&b->out, sizes, 3, ranks, MOST, HIDDEN);
  if (s->lowLatency) return cut(&b->out, sizes, 3, 4, ranks * MOST, HIDDEN);
  return cut(&b->out, sizes, 2, b->out.sizes[0], HIDDEN, 0);
}

ncclResult_t epBatchDispatch(epTestRank *me, const setting *s, batch *b, int sendOnly,
                             const ncclEpDispatchExtConfig_t *ext) {
  size_t sizes[5][3], ranks = (size_t)me->ranks;
  ncclEpTensor_t x = cut(&b->x, sizes[0], 2, b->tokens, HIDDEN, 0), w = cut(&b->w, sizes[1], 2, b->tokens, TOPK, 0);
  ncclEpTensor_t out = rowsOf(me, s, b, sizes[2]), outW, outIdx;
  ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t to = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
  if (b->window) out.data = NULL, out.win_hdl = b->window;
  if (rankMajor(s))
    outW = cut(&b->outW, sizes[3], 3, ranks, MOST, TOPK), outIdx = cut(&b->outIdx, sizes[4], 3, ranks, MOST, TOPK);
  else
    outW = cut(&b->outW, sizes[3], flat(s) ? 2 : 1, b->out.sizes[0], TOPK, 0),
    outIdx = cut(&b->outIdx, sizes[4], 2, b->out.sizes[0], TOPK, 0);
  config.send_only = sendOnly != 0;
  in.tokens = &x, in.topk_weights = &w, to.tokens = &out;
  if (!s->lowLatency || rankMajor(s)) to.topk_weights = &outW;
  if (flat(s) || rankMajor(s)) to.topk_idx = &outIdx;
  return ncclEpDispatchExt(b->handle, &in, &to, NULL, &config, ext, b->stream);
}

ncclResult_t epBatchCombine(epTestRank *me, const setting *s, batch *b, int sendOnly,
                            const ncclEpCombineExtConfig_t *ext) {
  size_t sizes[3][3];
  ncclEpTensor_t from = rowsOf(me, s, b, sizes[0]), y = cut(&b->y, sizes[1], 2, b->tokens, HIDDEN, 0);
  ncclEpTensor_t w = cut(&b->w, sizes[2], 2, b->tokens, TOPK, 0);
  ncclEpCombineInputs_t in = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t to = NCCL_EP_COMBINE_OUTPUTS_INIT;
  ncclEpCombineConfig_t config = NCCL_EP_COMBINE_CONFIG_INIT;
  config.send_only = sendOnly != 0;
  in.tokens = &from, to.tokens = &y;
  if (s->lowLatency && !rankMajor(s)) to.topk_weights = &w;
  return ncclEpCombineExt(b->handle, &in, &to, &config, ext, b->stream);
}

void epBatchCheck(epTestRank *me, const setting *s, const batch *b, unsigned number) {
  const uint16_t *y = b->y.t.data;
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, b->stream));
  for (uint32_t t = 0; t < b->tokens; t++) {
    float times = timesOf(me, s, b, t);
    for (uint32_t h = 0; h < HIDDEN; h++) {
      float want = times * elementOf(s, me->rank, number, b->round, t, h);
      EXPECT(me, y[t * HIDDEN + h] == bf16(want) || (want == 0.0f && y[t * HIDDEN + h] == 0),
             "batch %u, round %u, token %u, element %u: %#x instead of %g", number, b->round, t, h, y[t * HIDDEN + h],
             (double)want);
    }
  }
}

void epSettingGroup(epTestRank *me, const setting *s) {
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  ncclEpGroupExtConfig_t ext = NCCL_EP_GROUP_EXT_CONFIG_INIT;
  config.algorithm = s->lowLatency ? NCCL_EP_ALGO_LOW_LATENCY : NCCL_EP_ALGO_HIGH_THROUGHPUT;
  config.num_experts = 4u * (unsigned)me->ranks;
  config.max_dispatch_tokens_per_rank = MOST;
  config.max_token_bytes = 2 * HIDDEN;
  config.num_topk = TOPK;
  config.timeout_ns = s->timeoutNs ? s->timeoutNs : 20000000000ull;
  ext.max_in_flight = s->inFlight;
  config.enable_mask = s->masks != 0;
  EXPECT_OK(me, ncclEpCreateGroupExt(&me->group, me->comm, &config, &ext));
}

void epBatchesSend(epTestRank *me, const setting *s, batch *b, int combine) {
  for (int i = 0; i < 2; i++)
    EXPECT_OK(me, combine ? epBatchCombine(me, s, &b[i], 1, NULL) : epBatchDispatch(me, s, &b[i], 1, NULL));
}

void epBatchesComplete(epTestRank *me, batch *b, int first) {
  EXPECT_OK(me, ncclEpComplete(b[first].handle, NULL, NULL));
  EXPECT_OK(me, ncclEpComplete(b[!first].handle, NULL, NULL));
}

void epBatchesStaged(epTestRank *me, const setting *s, batch *b) {
  for (unsigned i = 0; i < 2; i++) epBatchUpdate(me, s, &b[i], i);
  epBatchesSend(me, s, b, 0), epBatchesComplete(me, b, 1);
  epBatchesSend(me, s, b, 1), epBatchesComplete(me, b, 0);
  for (unsigned i = 0; i < 2; i++) epBatchCheck(me, s, &b[i], i);
}
