/* Groups of several scale-up domains: what they are and ask for, and ranks of one domain that stay away: whoever waits for
 * them, across the network or behind a forwarder, is told. What other tests cover runs with EP_TEST_DOMAINS, too. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "harness.h"
#include "hybrid_layout.h"
#include "model.h"

static const epCase base = {.ranks = 4,
                            .experts = 20,
                            .topk = 3,
                            .hidden = 64,
                            .maxTokens = 8,
                            .layout = NCCL_EP_LAYOUT_EXPERT_MAJOR,
                            .type = ncclBfloat16};

/* ---- What a group is ---------------------------------------------------------------------------------------------------- */

static void propertiesBody(epTestRank *me) {
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  ncclEpGroupProperties_t p = NCCL_EP_GROUP_PROPERTIES_INIT;
  ncclEpBufferSizeConfig_t sizing = NCCL_EP_BUFFER_SIZE_CONFIG_INIT;
  ncclEpBufferSize_t sizes = NCCL_EP_BUFFER_SIZE_INIT;
  ncclEpGroup_t ll = NULL;
  epGroupConfigOf(&base, &config);
  config.algorithm = NCCL_EP_ALGO_LOW_LATENCY;
  EXPECT_OK(me, ncclEpCreateGroup(&ll, me->comm, &config));
  EXPECT_OK(me, ncclEpGetGroupProperties(ll, &p));
  sizing.num_experts = base.experts, sizing.max_tokens = base.maxTokens, sizing.hidden = base.hidden;
  sizing.top_k = base.topk, sizing.datatype = base.type, sizing.low_latency = 1;
  EXPECT_OK(me, ncclEpCalculateBufferSize(me->comm, &sizing, &sizes));
  EXPECT(me,
         sizes.window_bytes == p.window_bytes && sizes.scratch_bytes == p.scratch_bytes &&
             sizes.gin_contexts == p.gin_contexts && sizes.gin_signals == p.gin_signals &&
             sizes.queue_pairs == p.queue_pairs,
         "low latency: window %zu and %zu, scratch %zu and %zu", sizes.window_bytes, p.window_bytes,
         sizes.scratch_bytes, p.scratch_bytes);
  EXPECT(me, sizes.window_bytes == sizes.count_bytes + sizes.metadata_bytes + sizes.flag_bytes + sizes.staging_bytes,
         "low latency: %zu bytes are not the sum of their parts", sizes.window_bytes);
  sizing.low_latency = 2;
  EXPECT_ERROR(me, ncclEpCalculateBufferSize(me->comm, &sizing, &sizes), ncclInvalidArgument, "low_latency is 2");
  sizing.low_latency = 0;
  EXPECT(me, p.hybrid == 1 && p.queue_pairs == p.gin_contexts && p.gin_signals > 4,
         "low latency: %u contexts, %u queue pairs, %u signals", p.gin_contexts, p.queue_pairs, p.gin_signals);
  EXPECT_OK(me, ncclEpGroupDestroy(ll));
  epGroupMake(me, &base);
  if (!me->group) return;
  EXPECT_OK(me, ncclEpGetGroupProperties(me->group, &p));
  EXPECT_OK(me, ncclEpCalculateBufferSize(me->comm, &sizing, &sizes));
  EXPECT(me, p.hybrid == 1 && p.scale_out_ranks == 2 && p.scale_up_ranks == 2 && p.scale_out_rank == me->rank / 2,
         "hybrid %d, %d x %d, rank %d of %d", p.hybrid, p.scale_out_ranks, p.scale_up_ranks, p.scale_out_rank,
         p.scale_up_rank);
  EXPECT(me, sizes.window_bytes == p.window_bytes && sizes.scratch_bytes == p.scratch_bytes,
         "window %zu and %zu, scratch %zu and %zu", sizes.window_bytes, p.window_bytes, sizes.scratch_bytes,
         p.scratch_bytes);
  EXPECT(me, sizes.window_bytes == sizes.count_bytes + sizes.metadata_bytes + sizes.flag_bytes + sizes.staging_bytes,
         "%zu bytes are not the sum of their parts", sizes.window_bytes);
  EXPECT(me, p.gin_contexts && p.gin_contexts == sizes.gin_contexts && p.queue_pairs == p.gin_contexts,
         "%u and %u contexts, %u queue pairs to one peer", p.gin_contexts, sizes.gin_contexts, p.queue_pairs);
  EXPECT(me, p.gin_signals > 6 && p.gin_signals == sizes.gin_signals, "%u and %u signals", p.gin_signals,
         sizes.gin_signals);
  epGroupFree(me);
}

/* With masks the windows of staged operations are made with the group; else when they are needed. */
static void windowsBody(epTestRank *me) {
  ncclEpGroupProperties_t p = NCCL_EP_GROUP_PROPERTIES_INIT;
  ncclEpBufferSizeConfig_t sizing = NCCL_EP_BUFFER_SIZE_CONFIG_INIT;
  ncclEpBufferSize_t sizes = NCCL_EP_BUFFER_SIZE_INIT;
  epCase c = base;
  c.ranks = (uint32_t)me->ranks;
  sizing.num_experts = c.experts, sizing.max_tokens = c.maxTokens, sizing.hidden = c.hidden;
  sizing.top_k = c.topk, sizing.datatype = c.type;
  sizing.in_flight = 9;
  EXPECT_ERROR(me, ncclEpCalculateBufferSize(me->comm, &sizing, &sizes), ncclInvalidArgument,
               "in_flight is 9|at most 8");
  for (int n = 0; n < 4; n++) {
    ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
    c.masks = n % 2, sizing.low_latency = n / 2;
    epGroupConfigOf(&c, &config);
    if (sizing.low_latency) config.algorithm = NCCL_EP_ALGO_LOW_LATENCY, config.max_recv_tokens_per_rank = 0;
    EXPECT_OK(me, ncclEpCreateGroup(&me->group, me->comm, &config));
    if (!me->group) return;
    EXPECT_OK(me, ncclEpGetGroupProperties(me->group, &p));
    sizing.enable_mask = c.masks, sizing.in_flight = 0;
    EXPECT_OK(me, ncclEpCalculateBufferSize(me->comm, &sizing, &sizes));
    EXPECT(me, sizes.all_window_bytes == p.all_window_bytes, "masks %d: %zu and %zu bytes of windows", n,
           sizes.all_window_bytes, p.all_window_bytes);
    EXPECT(me, sizes.window_bytes == p.window_bytes && sizes.gin_signals == p.gin_signals,
           "masks %d: window %zu and %zu, signals %u and %u", n, sizes.window_bytes, p.window_bytes, sizes.gin_signals,
           p.gin_signals);
    EXPECT(me, c.masks ? p.all_window_bytes > 3 * p.window_bytes : p.all_window_bytes == p.window_bytes,
           "masks %d: %zu bytes of windows, one of them %zu", n, p.all_window_bytes, p.window_bytes);
    epGroupFree(me);
  }
  sizing.low_latency = 0, sizing.enable_mask = 0, sizing.in_flight = 2;
  EXPECT_OK(me, ncclEpCalculateBufferSize(me->comm, &sizing, &sizes));
  EXPECT(me, sizes.all_window_bytes == 3 * sizes.window_bytes, "%zu bytes of windows for 3 of %zu",
         sizes.all_window_bytes, sizes.window_bytes);
}

static void windowsAreCounted(void **state) {
  (void)state;
  for (int ranks = 4; ranks <= 10; ranks += 6) { /* with 5 ranks a domain fewer have a token than there are */
    epTestWorld world = {.ranks = ranks, .seed = 1};
    epWorldRun(&world, windowsBody);
  }
}

static void propertiesTellWhatIsAsked(void **state) {
  (void)state;
  epTestWorld world = {.ranks = 4, .seed = 1};
  epWorldRun(&world, propertiesBody);
}

static void queuesBody(epTestRank *me) {
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  ncclEpGroupProperties_t p = NCCL_EP_GROUP_PROPERTIES_INIT;
  ncclEpGroup_t group = NULL;
  epGroupConfigOf(&base, &config);
  config.num_qp_per_rank = me->rank == 2 ? 2 : 1;
  EXPECT_ERROR(me, ncclEpCreateGroup(&group, me->comm, &config), ncclInvalidArgument,
               "num_qp_per_rank differs|1 on rank 0|2 on rank 2");
  config.num_qp_per_rank = 1;
  EXPECT_OK(me, ncclEpCreateGroup(&group, me->comm, &config));
  EXPECT_OK(me, ncclEpGetGroupProperties(group, &p));
  EXPECT(me, p.gin_contexts == 1 && p.queue_pairs == 1, "%u contexts, %u queue pairs", p.gin_contexts, p.queue_pairs);
  EXPECT_OK(me, ncclEpGroupDestroy(group));
}

static void queuePairsAreTheCallers(void **state) {
  (void)state;
  epTestWorld world = {.ranks = 4, .seed = 1};
  epWorldRun(&world, queuesBody);
}

/* Calls by fewer queue pairs than the group's, by all, and by other numbers, in any order and also staged: results are those of any
 * other call, and rows go by no more contexts than were asked for. */
typedef struct queuesCase {
  const epRound *rounds;
  unsigned count;
  unsigned asked[8];
  unsigned long long used; /* OUT: mask of contexts */
} queuesCase;

static void askedBody(epTestRank *me) {
  queuesCase *q = me->arg;
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  ncclEpEmuReport_t report = NCCL_EP_EMU_REPORT_INIT;
  epRun run = {0};
  epGroupConfigOf(q->rounds[0].c, &config);
  config.num_qp_per_rank = 3;
  EXPECT_OK(me, ncclEpCreateGroup(&me->group, me->comm, &config));
  if (!me->group) return;
  for (unsigned i = 0; i < q->count; i++) {
    run.queuePairs = q->asked[i], run.staged = i == 3 || i == 5;
    epRunUpdate(me, &run, &q->rounds[i % 2]);
    epRunDispatch(me, &run);
    if (i % 3 != 1) epRunCombine(me, &run);
  }
  if (q->count > 1) {
    ncclEpDispatchExtConfig_t ext = NCCL_EP_DISPATCH_EXT_CONFIG_INIT;
    ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
    ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    ext.num_qps = 4;
    EXPECT_ERROR(me, ncclEpDispatchExt(run.handle, &in, &out, NULL, NULL, &ext, NULL), ncclInvalidArgument,
                 "num_qps is 4|at most the group's, 3");
  }
  epRunFree(me, &run);
  epGroupFree(me);
  if (me->rank) return;
  EXPECT_OK(me, ncclEpEmuGetReport(me->comm, &report));
  EXPECT(me, !report.faults, "%s", report.text);
  q->used = report.gin_contexts_used;
}

static unsigned long long contextsUsed(const epRound *rounds, unsigned count, const unsigned *asked, uint64_t seed) {
  queuesCase q = {rounds, count, {0}, 0};
  memcpy(q.asked, asked, count * sizeof(*asked));
  epTestWorld world = {.ranks = 4, .seed = seed, .arg = &q};
  epWorldRun(&world, askedBody);
  return q.used;
}

static void callsChooseQueuePairs(void **state) {
  epCase c = base;
  epRound rounds[2];
  uint64_t seed = 11;
  (void)state;
  c.maxTokens = 4 * EP_MAX_CHUNK_ROWS; /* a batch for each channel */
  for (int i = 0; i < 2; i++) epRoundMake(&rounds[i], &c, (uint32_t[]){32, 27, 32, 32}, epPickRandom, &seed);
  assert_int_equal(contextsUsed(rounds, 1, (unsigned[]){1}, 1), 1);
  assert_int_equal(contextsUsed(rounds, 1, (unsigned[]){2}, 2), 3);
  assert_int_equal(contextsUsed(rounds, 1, (unsigned[]){0}, 3), 7);
  for (uint64_t i = 4; i < 8; i++)
    assert_int_equal(contextsUsed(rounds, 8, (unsigned[]){0, 1, 2, 2, 0, 1, 3, 2}, i), 7);
  for (int i = 0; i < 2; i++) epRoundFree(&rounds[i]);
}

/* ---- Sums that start from rows ------------------------------------------------------------------------------------------ */

static float valueOf(const epTestTensor *t, size_t at) {
  uint32_t bits = (uint32_t)((const uint16_t *)t->t.data)[at] << 16;
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

/* Experts that give back what they got: y = x * (valid choices) + 2 + 3, all exact. */
static void biasBody(epTestRank *me) {
  const epRound *round = me->arg;
  const uint32_t tokens = round->tokens[me->rank];
  static const uint16_t two = 0x4000, three = 0x4040;
  uint16_t rows[2][8 * 64];
  epTestTensor bias[2], y = {0};
  epRun run = {0};
  memset(bias, 0, sizeof(bias));
  epGroupMake(me, round->c);
  if (!me->group) return;
  epRunUpdate(me, &run, round);
  epRunDispatch(me, &run);
  for (size_t i = 0; i < 8 * 64; i++) rows[0][i] = two, rows[1][i] = three;
  ncclEpCombineExtConfig_t ext = NCCL_EP_COMBINE_EXT_CONFIG_INIT;
  for (int b = 0; b < 2; b++) {
    epTensorMake(me, &bias[b], base.type, 2, tokens, base.hidden, "bias");
    if (tokens) epTensorFill(me, &bias[b], rows[b]);
    ext.bias[b] = &bias[b].t;
  }
  epTensorMake(me, &y, base.type, 2, tokens, base.hidden, "sums");
  ncclEpCombineInputs_t in = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t out = NCCL_EP_COMBINE_OUTPUTS_INIT;
  in.tokens = &run.out.t, out.tokens = &y.t;
  EXPECT_OK(me, ncclEpCombineExt(run.handle, &in, &out, NULL, &ext, NULL));
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
  for (size_t i = 0; i < (size_t)tokens * base.hidden; i++) {
    float valid = 0;
    for (uint32_t k = 0; k < base.topk; k++) valid += round->idx[me->rank][i / base.hidden * base.topk + k] >= 0;
    float want = valueOf(&run.x, i) * valid + 5;
    EXPECT(me, valueOf(&y, i) == want, "element %zu is %g instead of %g", i, (double)valueOf(&y, i), (double)want);
  }
  epTensorFree(me, &bias[0]), epTensorFree(me, &bias[1]), epTensorFree(me, &y);
  epRunFree(me, &run);
  epGroupFree(me);
}

static void sumsStartFromBiases(void **state) {
  epRound round;
  uint64_t seed = 7;
  (void)state;
  epRoundMake(&round, &base, (uint32_t[]){8, 0, 3, 8}, epPickRandom, &seed);
  epTestWorld world = {.ranks = 4, .seed = 3, .arg = &round};
  epWorldRun(&world, biasBody);
  epRoundFree(&round);
}

/* ---- What crosses the network ------------------------------------------------------------------------------------------- */

typedef struct crossing {
  const epRound *round;
  unsigned long long puts, bytes; /* OUT */
} crossing;

static void crossingBody(epTestRank *me) {
  crossing *x = me->arg;
  ncclEpEmuReport_t report = NCCL_EP_EMU_REPORT_INIT;
  epRun run = {0};
  epGroupMake(me, x->round->c);
  if (!me->group) return;
  epRunUpdate(me, &run, x->round);
  epRunDispatch(me, &run);
  epRunCombine(me, &run);
  epRunFree(me, &run);
  epGroupFree(me); /* waits for all ranks */
  if (me->rank) return;
  EXPECT_OK(me, ncclEpEmuGetReport(me->comm, &report));
  EXPECT(me, !report.faults, "%s", report.text);
  x->puts = report.gin_puts, x->bytes = report.gin_put_bytes;
}

static int64_t pickNone(const epCase *c, uint32_t rank, uint32_t token, uint32_t k, void *arg) {
  (void)c, (void)rank, (void)token, (void)k, (void)arg;
  return -1;
}

/* Rows so long that each is a chunk. */
static epCase longRows(void) {
  epCase c = base;
  c.hidden = 4096;
  return c;
}

static crossing cross(const uint32_t *tokens, epPickFn pick, uint64_t seed, epModelTraffic *model) {
  epRound round;
  crossing x = {.round = &round};
  uint32_t rows = 0;
  const epCase wide = longRows();
  epRoundMake(&round, &wide, tokens, pick, &seed);
  epTestWorld world = {.ranks = 4, .seed = 7, .arg = &x};
  epWorldRun(&world, crossingBody);
  if (model) { /* the same routing, counted by ep_bench --model */
    int64_t *all = calloc((size_t)4 * base.maxTokens * base.topk, sizeof *all);
    assert_non_null(all);
    for (uint32_t r = 0; r < 4; rows += tokens[r++])
      memcpy(all + (size_t)rows * base.topk, round.idx[r], (size_t)tokens[r] * base.topk * sizeof *all);
    epRouteSpec spec = {.kind = EP_ROUTE_FILE,
                        .ranks = 4,
                        .experts = base.experts,
                        .topk = base.topk,
                        .tokensLow = tokens,
                        .tokensHigh = tokens,
                        .fileEntries = all,
                        .fileRows = rows};
    epModelShape shape = {.scaleOut = 2, .scaleUp = 2, .experts = base.experts, .topk = base.topk};
    assert_int_equal(epModelCount(&shape, &spec, 1, model), 0);
    free(all);
  }
  epRoundFree(&round);
  return x;
}

/* The kernels put as many rows as the model counts: a routing against one of as many tokens that go nowhere. Neighbours go in one
 * put, where it may carry more rows than one; between them lies what aligns them. */
static void theModelCountsWhatKernelsPut(void **state) {
  static const uint32_t tokens[] = {8, 5, 0, 7};
  epModelTraffic model;
  double out = 0, in = 0;
  (void)state;
  crossing less = cross(tokens, epPickRandom, 9, NULL);
  setenv("NCCL_EP_PUT_ROWS", "1", 1);
  crossing nowhere = cross(tokens, pickNone, 0, NULL), some = cross(tokens, epPickRandom, 9, &model);
  unsetenv("NCCL_EP_PUT_ROWS");
  for (uint32_t r = 0; r < 4; r++) out += model.rank[r].toRail, in += model.rank[r].fromRail;
  epModelTrafficFree(&model);
  assert_true(out > 5 && out == in);
  assert_int_equal(some.puts - nowhere.puts, 2 * (unsigned)out); /* dispatch and combine */
  assert_int_equal(some.bytes - nowhere.bytes, (unsigned)out * (4 * longRows().hidden + epWeightBytes(base.topk)));
  assert_true(less.puts < some.puts && 2 * less.puts >= some.puts && less.bytes >= some.bytes);
}

/* ---- Records of other groups -------------------------------------------------------------------------------------------- */

/* A record like this group's in all but how its ranks are divided, here by a changed header. */
static void recordBody(epTestRank *me) {
  const epRound *round = me->arg;
  ncclEpHandleConfig_t config = NCCL_EP_HANDLE_CONFIG_INIT;
  ncclEpTensor_t memory;
  epTestTensor record = {0};
  epRun run = {0};
  epRecordHeader head;
  size_t bytes = 0;
  epGroupMake(me, round->c);
  if (!me->group) return;
  EXPECT_OK(me, ncclEpHandleMemSize(me->group, base.layout, &config, &bytes, (int)base.topk));
  epTensorMake(me, &record, ncclUint8, 1, bytes, 0, "record");
  memory = record.t;
  EXPECT_OK(me, ncclEpInitHandle(&run.handle, me->group, base.layout, &config, (int)base.topk, &memory));
  epRunUpdate(me, &run, round);
  EXPECT_OK(me, ncclEpEmuMemcpy(me->comm, &head, memory.data, sizeof(head), NULL));
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
  EXPECT(me, head.version == EP_HYBRID_VERSION(2), "version 0x%x", head.version);
  head.version = EP_RECORD_VERSION;
  EXPECT_OK(me, ncclEpEmuMemcpy(me->comm, memory.data, &head, sizeof(head), NULL));
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
  EXPECT_OK(me, ncclEpHandleDestroy(run.handle));
  run.handle = NULL;
  EXPECT_OK(me, ncclEpInitHandle(&run.handle, me->group, base.layout, &config, (int)base.topk, &memory));
  ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  in.tokens = &memory, out.tokens = &memory; /* never looked at */
  EXPECT_ERROR(me, ncclEpDispatch(run.handle, &in, &out, NULL, NULL, NULL), ncclInvalidUsage,
               "scale-up domains of 0|expected 2");
  epRunFree(me, &run);
  epTensorFree(me, &record);
  epGroupFree(me);
}

static void recordsOfOtherDomainsAreRefused(void **state) {
  epRound round;
  uint64_t seed = 6;
  (void)state;
  epRoundMake(&round, &base, (uint32_t[]){8, 0, 3, 8}, epPickRandom, &seed);
  epTestWorld world = {.ranks = 4, .seed = 2, .arg = &round};
  epWorldRun(&world, recordBody);
  epRoundFree(&round);
}

/* ---- Ranks that stay away ----------------------------------------------------------------------------------------------- */

typedef struct awayCase {
  const epRound *round;
  int absent, combine; /* combine: away from it, else from dispatch */
} awayCase;

static void moveUnchecked(epTestRank *me, epRun *run, int combine) {
  const epCase *c = run->round->c;
  uint32_t tokens = run->round->tokens[me->rank];
  epTestTensor x = {0}, w = {0}, out = {0}, outW = {0};
  epTensorMake(me, &x, c->type, 2, tokens, c->hidden, "tokens");
  epTensorMake(me, &w, ncclFloat32, 2, tokens, c->topk, "weights");
  epTensorMake(me, &out, c->type, 2, 128, c->hidden, "rows");
  epTensorMake(me, &outW, ncclFloat32, 1, 128, 0, "row weights");
  if (combine) {
    ncclEpCombineInputs_t in = NCCL_EP_COMBINE_INPUTS_INIT;
    ncclEpCombineOutputs_t sums = NCCL_EP_COMBINE_OUTPUTS_INIT;
    in.tokens = &out.t, sums.tokens = &x.t;
    EXPECT_OK(me, ncclEpCombine(run->handle, &in, &sums, NULL, NULL));
  } else {
    ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
    ncclEpDispatchOutputs_t rows = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    in.tokens = &x.t, in.topk_weights = &w.t, rows.tokens = &out.t, rows.topk_weights = &outW.t;
    EXPECT_OK(me, ncclEpDispatch(run->handle, &in, &rows, NULL, NULL, NULL));
  }
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
  epTensorFree(me, &x), epTensorFree(me, &w), epTensorFree(me, &out), epTensorFree(me, &outW);
}

static void awayBody(epTestRank *me) {
  const awayCase *away = me->arg;
  ncclEpErrorInfo_t info = NCCL_EP_ERROR_INFO_INIT;
  epRun run = {0};
  epGroupMake(me, away->round->c);
  if (!me->group) return;
  epRunUpdate(me, &run, away->round);
  if (away->combine) epRunDispatch(me, &run);
  if (me->rank != away->absent) {
    moveUnchecked(me, &run, away->combine);
    EXPECT_OK(me, ncclEpGetErrorInfo(me->group, &info));
    EXPECT(me, info.code == 1 && info.rank == me->rank && info.peer != me->rank && info.phase[0],
           "code %d, rank %d, peer %d: %s", info.code, info.rank, info.peer, info.text);
    EXPECT_OK(me, ncclEpErrorClear(me->group));
    ncclResult_t again = ncclEpUpdateHandle(run.handle, &run.topk.t, NULL, NULL);
    EXPECT(me, again == ncclInvalidUsage || again == ncclRemoteError, "a call after a timeout: %d", (int)again);
  }
  epRunFree(me, &run);
  EXPECT_OK(me, ncclEpGroupDestroy(me->group));
}

static void aRankThatStaysAwayIsReported(void **state) {
  epCase c = base;
  epRound round;
  uint64_t seed = 5;
  (void)state;
  c.timeoutNs = 20000000; /* 20 ms */
  epRoundMake(&round, &c, (uint32_t[]){8, 8, 8, 8}, epPickRandom, &seed);
  for (int i = 0; i < 4; i++) {
    awayCase away = {&round, i / 2 ? 3 : 0, i % 2};
    epTestWorld world = {.ranks = 4, .seed = 31 + (unsigned)i, .arg = &away, .seconds = 60};
    epWorldRun(&world, awayBody);
  }
  epRoundFree(&round);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(propertiesTellWhatIsAsked),       cmocka_unit_test(queuePairsAreTheCallers),
      cmocka_unit_test(theModelCountsWhatKernelsPut),    cmocka_unit_test(sumsStartFromBiases),
      cmocka_unit_test(recordsOfOtherDomainsAreRefused), cmocka_unit_test(aRankThatStaysAwayIsReported),
      cmocka_unit_test(callsChooseQueuePairs),           cmocka_unit_test(windowsAreCounted),
  };
  if (setenv("EP_TEST_DOMAINS", "2", 1)) return 1;
  return cmocka_run_group_tests(tests, NULL, NULL);
}
