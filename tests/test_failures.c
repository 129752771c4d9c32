/* What must end in an error, a report or a refusal on the emulated fabric, and never in a hang: too small budgets, bad
 * ids, ranks that disagree or stay away; and the freedoms users take: several handles, handles that move, any order of
 * destruction. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "harness.h"

#define SCHEDULES 4

static const ncclEpLayout_t layouts[] = {NCCL_EP_LAYOUT_FLAT, NCCL_EP_LAYOUT_EXPERT_MAJOR};

static epCase small(uint32_t ranks, ncclEpLayout_t layout) {
  return (epCase){.ranks = ranks,
                  .experts = 4 * ranks,
                  .topk = 2,
                  .hidden = 64,
                  .maxTokens = 8,
                  .layout = layout,
                  .type = ncclBfloat16};
}

static void runWorlds(int ranks, void *arg, void (*body)(epTestRank *me)) {
  for (unsigned s = 0; s < SCHEDULES; s++) {
    epTestWorld world = {.ranks = ranks, .seed = 500 + s, .arg = arg};
    epWorldRun(&world, body);
  }
}

/* ---- Budgets
 * ---------------------------------------------------------------------------------------------------------- */

static int64_t pickRankZero(const epCase *c, uint32_t rank, uint32_t token, uint32_t k, void *arg) {
  (void)arg, (void)rank;
  return (token + k) % (c->experts / c->ranks);
}

static void overflowBody(epTestRank *me) {
  const epRound *round = me->arg;
  epRun run = {0};
  int error = -1;
  ncclEpErrorInfo_t info = NCCL_EP_ERROR_INFO_INIT;
  epGroupMake(me, round->c);
  if (!me->group) return;
  epRunUpdate(me, &run, round);
  epRunDispatch(me, &run);
  epRunCombine(me, &run);
  epRunBackward(me, &run);
  uint64_t needed = round->ref->rank[me->rank].needed;
  int over = needed > round->c->budget;
  EXPECT_OK(me, ncclEpGetAsyncError(me->group, &error));
  EXPECT_OK(me, ncclEpGetErrorInfo(me->group, &info));
  EXPECT(me, error == over && info.code == (over ? 4 : 0), "async error %d, code %d: %s", error, info.code, info.text);
  if (over)
    EXPECT(me,
           info.expected == needed && info.seen == round->c->budget && strstr(info.text, "max_recv_tokens_per_rank"),
           "overflow says %u of %u: %s", info.seen, info.expected, info.text);
  EXPECT_OK(me, ncclEpErrorClear(me->group));
  epExpectNoAsyncError(me);
  epRunDispatch(me, &run); /* as good as before */
  epRunFree(me, &run);
  epGroupFree(me);
}

static void smallBudgetDropsTheRest(void **state) {
  (void)state;
  for (size_t l = 0; l < 2; l++) {
    epCase c = small(2, layouts[l]);
    epRound round;
    c.budget = l ? 21 : 11, c.align = l ? 4 : 0;
    epRoundMake(&round, &c, (uint32_t[]){8, 8}, pickRankZero, NULL);
    assert_true(round.ref->rank[0].needed > c.budget);
    runWorlds(2, &round, overflowBody);
    epRoundFree(&round);
  }
}

/* Asked to, a rank whose rows overflow loses its group; cleared reports do not bring it back. */
static void trapBody(epTestRank *me) {
  const epRound *round = me->arg;
  const epCase *c = round->c;
  ncclEpGroupConfig_t config;
  ncclEpHandle_t h = NULL;
  epTestTensor topk;
  int lost = round->ref->rank[me->rank].needed > c->budget;
  epGroupConfigOf(c, &config);
  config.overflow_policy = NCCL_EP_OVERFLOW_TRAP;
  EXPECT_OK(me, ncclEpCreateGroup(&me->group, me->comm, &config));
  if (!me->group) return;
  epTensorMake(me, &topk, ncclInt64, 2, round->tokens[me->rank], c->topk, "topk_idx");
  epTensorFill(me, &topk, round->idx[me->rank]);
  EXPECT_OK(me, ncclEpCreateHandle(&h, me->group, c->layout, &topk.t, NULL, NULL, NULL));
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
  for (int i = 0; lost && i < 2; i++) {
    EXPECT_ERROR(me, ncclEpUpdateHandle(h, &topk.t, NULL, NULL), ncclRemoteError,
                 "ncclEpUpdateHandle: the group is lost|needs|max_recv_tokens_per_rank|TRAP");
    EXPECT_OK(me, ncclEpErrorClear(me->group));
  }
  if (!lost) epExpectNoAsyncError(me);
  epTensorFree(me, &topk);
  EXPECT_OK(me, ncclEpHandleDestroy(h));
  epGroupFree(me);
}

static void overflowMayLoseTheGroup(void **state) {
  (void)state;
  epCase c = small(2, layouts[0]);
  epRound round;
  c.budget = 11;
  epRoundMake(&round, &c, (uint32_t[]){8, 8}, pickRankZero, NULL);
  assert_true(round.ref->rank[0].needed > c.budget && round.ref->rank[1].needed <= c.budget);
  runWorlds(2, &round, trapBody);
  epRoundFree(&round);
}

/* Eager: the output is a row short. */
static void shortOutputBody(epTestRank *me) {
  const epRound *round = me->arg;
  const epCase *c = round->c;
  epRun run = {0};
  epTestTensor out = {0}, weights = {0};
  char number[32];
  epGroupMake(me, c);
  if (!me->group) return;
  epRunUpdate(me, &run, round);
  epRunDispatch(me, &run);
  uint64_t needed = round->ref->rank[me->rank].needed;
  if (needed) {
    epTensorMake(me, &out, c->type, 2, needed - 1, c->hidden, "short tokens");
    epTensorMake(me, &weights, ncclFloat32, 1, needed - 1, 0, "short weights");
    ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
    in.tokens = &run.x.t, in.topk_weights = &run.w.t;
    ncclEpDispatchOutputs_t outs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    outs.tokens = &out.t, outs.topk_weights = &weights.t;
    snprintf(number, sizeof(number), "%llu", (unsigned long long)needed);
    EXPECT_ERROR(me, ncclEpDispatch(run.handle, &in, &outs, NULL, NULL, NULL), ncclInvalidArgument, number);
  }
  epTensorFree(me, &out);
  epTensorFree(me, &weights);
  epRunFree(me, &run);
  epGroupFree(me);
}

static void eagerNamesTheRowsNeeded(void **state) {
  (void)state;
  epCase c = small(2, NCCL_EP_LAYOUT_EXPERT_MAJOR);
  epRound round;
  epRoundMake(&round, &c, (uint32_t[]){8, 8}, pickRankZero, NULL);
  runWorlds(2, &round, shortOutputBody);
  epRoundFree(&round);
}

/* Eager, and the host cannot know yet: what does not fit is dropped, and the report does not speak of a budget of 0. */
static void earlyShortBody(epTestRank *me) {
  const epRound *round = me->arg;
  const epCase *c = round->c;
  epRun run = {0};
  epTestTensor x = {0}, w = {0}, out = {0}, weights = {0};
  ncclEpHandle_t h = NULL;
  ncclEpErrorInfo_t info = NCCL_EP_ERROR_INFO_INIT;
  epGroupMake(me, c);
  if (!me->group) return;
  epRunUpdate(me, &run, round);
  uint64_t needed = round->ref->rank[me->rank].needed;
  epTensorMake(me, &x, c->type, 2, round->tokens[me->rank], c->hidden, "x");
  epTensorMake(me, &w, ncclFloat32, 2, round->tokens[me->rank], c->topk, "w");
  epTensorMake(me, &out, c->type, 2, needed, c->hidden, "tokens");
  epTensorMake(me, &weights, ncclFloat32, 1, needed, 0, "weights");
  ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
  in.tokens = &x.t, in.topk_weights = &w.t;
  ncclEpDispatchOutputs_t outs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  outs.tokens = &out.t, outs.topk_weights = &weights.t;
  epTensorFill(me, &run.topk, round->idx[me->rank]); /* epRunUpdate has overwritten it */
  EXPECT_OK(me, ncclEpCreateHandle(&h, me->group, c->layout, &run.topk.t, NULL, NULL, NULL));
  if (needed) out.sizes[0]--, weights.sizes[0]--;
  ncclResult_t r = ncclEpDispatch(h, &in, &outs, NULL, NULL, NULL);
  if (r != ncclSuccess && needed) { /* it was quick */
    out.sizes[0]++, weights.sizes[0]++;
    EXPECT_OK(me, ncclEpDispatch(h, &in, &outs, NULL, NULL, NULL));
    EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
  } else {
    EXPECT(me, r == ncclSuccess, "dispatch: %s", ncclEpGetLastErrorString());
    EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
    EXPECT_OK(me, ncclEpGetErrorInfo(me->group, &info));
    EXPECT(me, info.code == (needed ? 4 : 0), "code %d: %s", info.code, info.text);
    if (needed)
      EXPECT(me, info.expected == needed && info.seen == 0 && strstr(info.text, "eager") && !strstr(info.text, " 0"),
             "%u of %u: %s", info.seen, info.expected, info.text);
    if (needed) out.sizes[0]++, weights.sizes[0]++;
  }
  EXPECT_OK(me, ncclEpErrorClear(me->group));
  EXPECT_OK(me, ncclEpHandleDestroy(h));
  epTensorFree(me, &x);
  epTensorFree(me, &w);
  epTensorFree(me, &out);
  epTensorFree(me, &weights);
  epRunFree(me, &run);
  epGroupFree(me);
}

static void eagerSaysWhatWasDropped(void **state) {
  (void)state;
  epCase c = small(2, NCCL_EP_LAYOUT_EXPERT_MAJOR);
  epRound round;
  epRoundMake(&round, &c, (uint32_t[]){8, 8}, pickRankZero, NULL);
  runWorlds(2, &round, earlyShortBody);
  epRoundFree(&round);
}

/* ---- Bad ids
 * ------------------------------------------------------------------------------------------------------------ */

static int64_t pickBad(const epCase *c, uint32_t rank, uint32_t token, uint32_t k, void *arg) {
  const int64_t narrow[] = {c->experts, -2, 2147483647, -2147483647 - 1};
  const int64_t wide[] = {INT64_MIN, (int64_t)1 << 32, INT64_MAX, -2};
  (void)arg;
  if (rank == 0 && k == 1 && token % 2) return (c->indexType == ncclInt32 ? narrow : wide)[token / 2 % 4];
  return (rank + token + k) % c->experts;
}

static void badIdsBody(epTestRank *me) {
  const epRound *round = me->arg;
  epRun run = {0};
  int error = -1;
  ncclEpErrorInfo_t info = NCCL_EP_ERROR_INFO_INIT;
  epGroupMake(me, round->c);
  if (!me->group) return;
  epRunUpdate(me, &run, round);
  epRunDispatch(me, &run);
  epRunCombine(me, &run);
  EXPECT_OK(me, ncclEpGetAsyncError(me->group, &error));
  EXPECT_OK(me, ncclEpGetErrorInfo(me->group, &info));
  EXPECT(me, error == !me->rank && info.code == (me->rank ? 0 : 3), "async error %d, code %d: %s", error, info.code,
         info.text);
  if (!me->rank) { /* whole: as it was given */
    unsigned t = 99, k = 99;
    long long value = 0;
    EXPECT(me,
           sscanf(info.text, "topk_idx[%u][%u] is %lld:", &t, &k, &value) == 3 && t < 8 && k == 1 &&
               value == pickBad(round->c, 0, t, k, NULL),
           "it says %s", info.text);
  }
  EXPECT_OK(me, ncclEpErrorClear(me->group));
  epExpectNoAsyncError(me);
  epRunFree(me, &run);
  epGroupFree(me);
}

static void badIdsSelectNothing(void **state) {
  (void)state;
  for (int wide = 0; wide < 2; wide++) {
    epCase c = small(2, layouts[wide]);
    c.indexType = wide ? ncclInt64 : ncclInt32;
    epRound round;
    epRoundMake(&round, &c, (uint32_t[]){8, 8}, pickBad, NULL);
    runWorlds(2, &round, badIdsBody);
    epRoundFree(&round);
  }
}

/* ---- Ranks that disagree
 * -------------------------------------------------------------------------------------------------- */

static void mismatchBody(epTestRank *me) {
  epCase c = small(3, NCCL_EP_LAYOUT_FLAT);
  static const char *const fields[] = {"num_experts",     "max_dispatch_tokens_per_rank",
                                       "max_token_bytes", "max_recv_tokens_per_rank",
                                       "num_topk",        "timeout_ns"};
  for (size_t f = 0; f < sizeof(fields) / sizeof(fields[0]); f++) {
    ncclEpGroupConfig_t config;
    epGroupConfigOf(&c, &config);
    if (me->rank == 1) {
      if (f == 0) config.num_experts = 24;
      if (f == 1) config.max_dispatch_tokens_per_rank = 9;
      if (f == 2) config.max_token_bytes += 16;
      if (f == 3) config.max_recv_tokens_per_rank = 77;
      if (f == 4) config.num_topk = 3;
      if (f == 5) config.timeout_ns = 123456789;
    }
    ncclEpGroup_t group = (ncclEpGroup_t)0x5a;
    ncclResult_t result = ncclEpCreateGroup(&group, me->comm, &config);
    if (f == 5 && result == ncclSuccess) { /* a rank may wait longer than another */
      EXPECT_OK(me, ncclEpGroupDestroy(group));
      continue;
    }
    EXPECT(me, result == ncclInvalidArgument, "%s differs: %d", fields[f], (int)result);
    EXPECT(me, strstr(ncclEpGetLastErrorString(), fields[f]), "no %s in: %s", fields[f], ncclEpGetLastErrorString());
    EXPECT(me, group == (ncclEpGroup_t)0x5a, "the output was set on failure");
  }
  epGroupMake(me, &c); /* the next call works */
  if (me->group) epGroupFree(me);
}

static void configMismatchIsNamedOnEveryRank(void **state) {
  (void)state;
  epTestWorld world = {.ranks = 3, .seed = 7};
  epWorldRun(&world, mismatchBody);
}

/* ---- Ranks that come late or never
 * ------------------------------------------------------------------------------------------ */

typedef struct lateCase {
  const epRound *round;
  int stays; /* 1: rank 1 makes no further call */
  int phase; /* 0: before update, 1: before dispatch, 2: before combine */
} lateCase;

static void expectTimeout(epTestRank *me) {
  int error = -1;
  ncclEpErrorInfo_t info = NCCL_EP_ERROR_INFO_INIT;
  EXPECT_OK(me, ncclEpGetAsyncError(me->group, &error));
  EXPECT_OK(me, ncclEpGetErrorInfo(me->group, &info));
  EXPECT(me, error == 1 && info.code == 1, "async error %d, code %d: %s", error, info.code, info.text);
  EXPECT(me, info.rank == me->rank && info.peer == 1 && info.phase[0], "rank %d, peer %d, phase \"%s\"", info.rank,
         info.peer, info.phase);
}

static void raw(epTestRank *me, epRun *run, int phase) {
  const epCase *c = run->round->c;
  uint32_t tokens = run->round->tokens[me->rank];
  epTestTensor w = {0}, out = {0}, outW = {0}, x = {0}, y = {0};
  epTensorMake(me, &x, c->type, 2, tokens, c->hidden, "tokens");
  epTensorMake(me, &w, ncclFloat32, 2, tokens, c->topk, "weights");
  epTensorMake(me, &out, c->type, 2, 64, c->hidden, "out");
  epTensorMake(me, &outW, ncclFloat32, 1, 64, 0, "out weights");
  epTensorMake(me, &y, c->type, 2, tokens, c->hidden, "y");
  if (phase == 1) {
    ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
    in.tokens = &x.t, in.topk_weights = &w.t;
    ncclEpDispatchOutputs_t outs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    outs.tokens = &out.t, outs.topk_weights = &outW.t;
    EXPECT_OK(me, ncclEpDispatch(run->handle, &in, &outs, NULL, NULL, NULL));
  } else {
    ncclEpCombineInputs_t in = NCCL_EP_COMBINE_INPUTS_INIT;
    in.tokens = &out.t;
    ncclEpCombineOutputs_t outs = NCCL_EP_COMBINE_OUTPUTS_INIT;
    outs.tokens = &y.t;
    EXPECT_OK(me, ncclEpCombine(run->handle, &in, &outs, NULL, NULL));
  }
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
  epTensorFree(me, &x), epTensorFree(me, &w), epTensorFree(me, &out), epTensorFree(me, &outW), epTensorFree(me, &y);
}

static void stayAwayBody(epTestRank *me) {
  const lateCase *late = me->arg;
  epRun run = {0};
  epGroupMake(me, late->round->c);
  if (!me->group) return;
  epRunUpdate(me, &run, late->round);
  if (late->phase == 2) epRunDispatch(me, &run);
  if (me->rank == 0) {
    raw(me, &run, late->phase);
    expectTimeout(me);
    ncclEpTensor_t topk = run.topk.t;
    EXPECT_OK(me, ncclEpErrorClear(me->group));
    ncclResult_t again = ncclEpUpdateHandle(run.handle, &topk, NULL, NULL);
    EXPECT(me, again == ncclInvalidUsage || again == ncclRemoteError, "a call after a timeout: %d", (int)again);
  }
  epRunFree(me, &run);
  if (me->rank == 0)
    epGroupFree(me);
  else
    EXPECT_OK(me, ncclEpGroupDestroy(me->group));
}

static void aRankThatStaysAwayIsReported(void **state) {
  (void)state;
  epCase c = small(2, NCCL_EP_LAYOUT_EXPERT_MAJOR);
  c.timeoutNs = 20000000; /* 20 ms */
  epRound round;
  uint64_t seed = 3;
  epRoundMake(&round, &c, (uint32_t[]){8, 8}, epPickRandom, &seed);
  for (int phase = 1; phase < 3; phase++) {
    lateCase late = {&round, 1, phase};
    epTestWorld world = {.ranks = 2, .seed = 11 + (unsigned)phase, .arg = &late, .seconds = 60};
    epWorldRun(&world, stayAwayBody);
  }
  epRoundFree(&round);
}

static void lateBody(epTestRank *me) {
  const epRound *round = me->arg;
  epRun run = {0};
  epGroupMake(me, round->c);
  if (!me->group) return;
  for (int i = 0; i < 3; i++) {
    if (me->rank == i % me->ranks) usleep(30000);
    epRunUpdate(me, &run, round);
    if (me->rank == (i + 1) % me->ranks) usleep(30000);
    epRunDispatch(me, &run);
    if (me->rank == (i + 2) % me->ranks) usleep(30000);
    epRunCombine(me, &run);
  }
  epExpectNoAsyncError(me);
  epRunFree(me, &run);
  epGroupFree(me);
}

static void lateRanksAreWaitedFor(void **state) {
  (void)state;
  epCase c = small(3, NCCL_EP_LAYOUT_FLAT);
  epRound round;
  uint64_t seed = 4;
  epRoundMake(&round, &c, (uint32_t[]){8, 1, 8}, epPickRandom, &seed);
  epTestWorld world = {.ranks = 3, .seed = 21, .arg = &round};
  epWorldRun(&world, lateBody);
  epRoundFree(&round);
}

/* ---- Handles
 * -------------------------------------------------------------------------------------------------------------- */

static void severalBody(epTestRank *me) {
  const epRound *rounds = me->arg;
  epRun a = {0}, b = {0};
  a.salt = 1;
  epGroupMake(me, rounds[0].c);
  if (!me->group) return;
  epRunUpdate(me, &a, &rounds[0]);
  epRunUpdate(me, &b, &rounds[1]);
  epRunDispatch(me, &b);
  epRunDispatch(me, &a);
  epRunDispatch(me, &b); /* along the record once more */
  epRunCombine(me, &a);
  epRunCombine(me, &b);
  epRunCombine(me, &a);
  epRunUpdate(me, &a, &rounds[1]);
  epRunBackward(me, &b);
  epRunDispatch(me, &a);
  epRunBackward(me, &a);
  epExpectNoAsyncError(me);
  epRunFree(me, &a);
  epRunFree(me, &b);
  epGroupFree(me);
}

static void severalHandlesInterleave(void **state) {
  (void)state;
  for (size_t l = 0; l < 2; l++) {
    epCase c = small(3, layouts[l]);
    epRound rounds[2];
    uint64_t seeds[] = {5, 6};
    epRoundMake(&rounds[0], &c, (uint32_t[]){8, 2, 5}, epPickRandom, &seeds[0]);
    epRoundMake(&rounds[1], &c, (uint32_t[]){1, 7, 8}, epPickRandom, &seeds[1]);
    runWorlds(3, rounds, severalBody);
    for (int i = 0; i < 2; i++) epRoundFree(&rounds[i]);
  }
}

/* A record in the caller's memory, copied elsewhere: a handle over the copy dispatches without an update. */
static void movedBody(epTestRank *me) {
  const epRound *round = me->arg;
  const epCase *c = round->c;
  epRun run = {0};
  epTestTensor first = {0}, second = {0};
  size_t bytes = 0;
  ncclEpHandleConfig_t config = NCCL_EP_HANDLE_CONFIG_INIT;
  config.dispatch_output_per_expert_alignment = c->layout == NCCL_EP_LAYOUT_FLAT ? 0 : c->align;
  epGroupMake(me, c);
  if (!me->group) return;
  EXPECT_OK(me, ncclEpHandleMemSize(me->group, c->layout, &config, &bytes, (int)c->topk));
  EXPECT(me, bytes > 0, "a handle of no bytes");
  epTensorMake(me, &first, ncclUint8, 1, bytes, 0, "record");
  epTensorMake(me, &second, ncclUint8, 1, bytes, 0, "moved record");
  EXPECT_OK(me, ncclEpInitHandle(&run.handle, me->group, c->layout, &config, (int)c->topk, &first.t));
  epRunUpdate(me, &run, round);
  epRunDispatch(me, &run);
  EXPECT_OK(me, ncclEpEmuMemcpy(me->comm, second.t.data, first.t.data, bytes, NULL));
  EXPECT_OK(me, ncclEpHandleDestroy(run.handle));
  EXPECT_OK(me, ncclEpEmuMemset(me->comm, first.t.data, 0x55, bytes, NULL));
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
  run.handle = NULL;
  EXPECT_OK(me, ncclEpInitHandle(&run.handle, me->group, c->layout, &config, (int)c->topk, &second.t));
  epRunDispatch(me, &run);
  epRunCombine(me, &run);
  epTensorCheckGuards(me, &first, "record");
  epTensorCheckGuards(me, &second, "moved record");
  epRunFree(me, &run);
  epTensorFree(me, &first);
  epTensorFree(me, &second);
  epGroupFree(me);
}

static void recordsMayMove(void **state) {
  (void)state;
  for (size_t l = 0; l < 2; l++) {
    epCase c = small(2, layouts[l]);
    c.align = 4;
    epRound round;
    uint64_t seed = 8;
    epRoundMake(&round, &c, (uint32_t[]){8, 3}, epPickRandom, &seed);
    runWorlds(2, &round, movedBody);
    epRoundFree(&round);
  }
}

/* Order of destruction by schedule: handles first, group first, or one of each. */
static void orderBody(epTestRank *me) {
  const epRound *round = me->arg;
  epRun a = {0}, b = {0};
  epGroupMake(me, round->c);
  if (!me->group) return;
  epRunUpdate(me, &a, round);
  epRunUpdate(me, &b, round);
  epRunDispatch(me, &a);
  unsigned order = (unsigned)(me->world->seed + (unsigned)me->rank) % 3;
  if (order == 0) {
    epRunFree(me, &b);
    epRunFree(me, &a);
    epGroupFree(me);
  } else if (order == 1) {
    epGroupFree(me);
    ncclEpTensor_t topk = a.topk.t;
    EXPECT_ERROR(me, ncclEpUpdateHandle(a.handle, &topk, NULL, NULL), ncclInvalidArgument, "group");
    epRunFree(me, &a);
    epRunFree(me, &b);
  } else {
    epRunFree(me, &a);
    epGroupFree(me);
    epRunFree(me, &b);
  }
}

static void destroyInAnyOrder(void **state) {
  (void)state;
  epCase c = small(3, NCCL_EP_LAYOUT_FLAT);
  epRound round;
  uint64_t seed = 9;
  epRoundMake(&round, &c, (uint32_t[]){4, 4, 4}, epPickRandom, &seed);
  runWorlds(3, &round, orderBody);
  epRoundFree(&round);
}

/* Groups one after the other, and two at a time, on one communicator. */
static void groupsBody(epTestRank *me) {
  const epRound *round = me->arg;
  for (int i = 0; i < 3; i++) {
    epRun run = {0};
    epGroupMake(me, round->c);
    if (!me->group) return;
    ncclEpGroup_t first = me->group;
    epGroupMake(me, round->c);
    epRunUpdate(me, &run, round);
    epRunDispatch(me, &run);
    epRunFree(me, &run);
    EXPECT_OK(me, ncclEpGroupDestroy(first));
    epGroupFree(me);
  }
}

static void severalGroups(void **state) {
  (void)state;
  epCase c = small(2, NCCL_EP_LAYOUT_EXPERT_MAJOR);
  epRound round;
  uint64_t seed = 10;
  epRoundMake(&round, &c, (uint32_t[]){4, 8}, epPickRandom, &seed);
  runWorlds(2, &round, groupsBody);
  epRoundFree(&round);
}

/* ---- Destroying what ranks have left at different places
 * ------------------------------------------------------------------------------------------ */

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Rank 1 makes memory for a staged operation, rank 0 destroys the group instead: both are told at once, and rank 1's own destroy, which
 * nobody joins any more, ends by itself. */
static void halfStagedBody(epTestRank *me) {
  epCase c = small(2, NCCL_EP_LAYOUT_FLAT);
  ncclEpPrepareConfig_t prepare = NCCL_EP_PREPARE_CONFIG_INIT;
  c.timeoutNs = 20000000; /* 20 ms */
  epGroupMake(me, &c);
  if (!me->group) return;
  prepare.layout = c.layout, prepare.hidden = c.hidden, prepare.top_k = c.topk, prepare.in_flight = 1;
  prepare.dispatch_type = prepare.combine_type = c.type, prepare.index_type = ncclInt64;
  if (me->rank == 1)
    EXPECT_ERROR(me, ncclEpPrepare(me->group, &prepare), ncclInvalidUsage, "windowCreate|another rank");
  const double start = seconds();
  EXPECT_ERROR(me, ncclEpGroupDestroy(me->group), ncclInvalidUsage, me->rank ? "waited 2000 ms for rank 0" : "calls");
  EXPECT(me, seconds() - start < 15, "the destroy took %.1f s",
         seconds() - start); /* 30 s before it had a bound of its own */
}

static void destroyIsBounded(void **state) {
  (void)state;
  epTestWorld world = {.ranks = 2, .seed = 21};
  epWorldRun(&world, halfStagedBody);
}

typedef struct leaver {
  ncclComm_t comm;
  ncclEpGroup_t group;
  ncclResult_t made, destroyed;
} leaver;

static void *leave(void *arg) {
  leaver *l = arg;
  const epCase c = small(2, NCCL_EP_LAYOUT_FLAT);
  ncclEpGroupConfig_t config;
  epGroupConfigOf(&c, &config);
  l->made = ncclEpCreateGroup(&l->group, l->comm, &config);
  l->destroyed = ncclEpEmuCommDestroy(l->comm);
  return NULL;
}

/* Rank 1's communicator goes first: rank 0 does not wait for it, nor does rank 1 for anybody. */
static void destroyAfterACommunicator(void **state) {
  (void)state;
  ncclComm_t comms[2];
  pthread_t thread;
  ncclEpGroup_t group = NULL;
  const epCase c = small(2, NCCL_EP_LAYOUT_FLAT);
  ncclEpGroupConfig_t config;
  epGroupConfigOf(&c, &config);
  assert_int_equal(ncclEpEmuCommInitAll(comms, 1, 2, NULL), ncclSuccess);
  leaver other = {.comm = comms[1]};
  assert_int_equal(pthread_create(&thread, NULL, leave, &other), 0);
  assert_int_equal(ncclEpCreateGroup(&group, comms[0], &config), ncclSuccess);
  const double start = seconds();
  assert_int_equal(ncclEpGroupDestroy(group), ncclInvalidUsage);
  assert_non_null(strstr(ncclEpGetLastErrorString(), "rank 1 has destroyed its communicator"));
  assert_int_equal(pthread_join(thread, NULL), 0);
  assert_true(other.made == ncclSuccess && other.destroyed == ncclSuccess);
  assert_int_equal(ncclEpGroupDestroy(other.group), ncclInvalidUsage);
  assert_true(seconds() - start < 15);
  assert_int_equal(ncclEpEmuCommDestroy(comms[0]), ncclSuccess);
}

/* ---- A failed update with work queued behind it
 * ------------------------------------------------------------------------------------------ */

/* Rank 1 differs by one in its top-k, or never calls; dispatch and combine are queued before anybody has noticed. */
typedef struct failedUpdate {
  const epRound *round;
  int absent;
} failedUpdate;

static void failedUpdateBody(epTestRank *me) {
  const failedUpdate *f = me->arg;
  const epCase *c = f->round->c;
  uint32_t topk = c->topk + (uint32_t)(me->rank == 1 && !f->absent);
  enum { TOKENS = 4, ROWS = 64 };
  int64_t ids[TOKENS * EP_TEST_MAX_RANKS] = {0};
  epTestTensor idx = {0}, x = {0}, w = {0}, out = {0}, outW = {0}, y = {0};
  ncclEpHandle_t handle = NULL;
  ncclEpErrorInfo_t info = NCCL_EP_ERROR_INFO_INIT;
  epGroupMake(me, c);
  if (!me->group) return;
  epTensorMake(me, &idx, ncclInt64, 2, TOKENS, topk, "topk_idx");
  for (uint32_t i = 0; i < TOKENS * topk; i++) ids[i] = i % c->experts;
  epTensorFill(me, &idx, ids);
  epTensorMake(me, &x, c->type, 2, TOKENS, c->hidden, "tokens");
  epTensorMake(me, &w, ncclFloat32, 2, TOKENS, topk, "weights");
  epTensorMake(me, &out, c->type, 2, ROWS, c->hidden, "out");
  epTensorMake(me, &outW, ncclFloat32, 1, ROWS, 0, "out weights");
  epTensorMake(me, &y, c->type, 2, TOKENS, c->hidden, "y");
  if (me->rank == 0 || !f->absent) {
    ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
    ncclEpDispatchOutputs_t outs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    ncclEpCombineInputs_t back = NCCL_EP_COMBINE_INPUTS_INIT;
    ncclEpCombineOutputs_t sums = NCCL_EP_COMBINE_OUTPUTS_INIT;
    in.tokens = &x.t, in.topk_weights = &w.t, outs.tokens = &out.t, outs.topk_weights = &outW.t;
    back.tokens = &out.t, sums.tokens = &y.t;
    EXPECT_OK(me, ncclEpCreateHandle(&handle, me->group, NCCL_EP_LAYOUT_EXPERT_MAJOR, &idx.t, NULL, NULL, NULL));
    EXPECT_OK(me, ncclEpDispatch(handle, &in, &outs, NULL, NULL, NULL));
    EXPECT_OK(me, ncclEpCombine(handle, &back, &sums, NULL, NULL));
    EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
    EXPECT_OK(me, ncclEpGetErrorInfo(me->group, &info));
    EXPECT(me, info.code == (f->absent ? 1 : 5) && info.peer == 1 - me->rank, "code %d, peer %d: %s", info.code,
           info.peer, info.text);
    for (size_t i = 0; i < out.bytes; i++) /* nothing moved */
      if (((unsigned char *)out.t.data)[i] != ((unsigned char *)outW.t.data)[0]) {
        EXPECT(me, 0, "byte %zu of the output was written", i);
        break;
      }
    EXPECT_OK(me, ncclEpHandleDestroy(handle));
  }
  epTensorFree(me, &idx), epTensorFree(me, &x), epTensorFree(me, &w);
  epTensorFree(me, &out), epTensorFree(me, &outW), epTensorFree(me, &y);
  EXPECT_OK(me, ncclEpGroupDestroy(me->group));
}

static void aFailedUpdateMovesNothing(void **state) {
  (void)state;
  for (int absent = 0; absent < 2; absent++) {
    epCase c = small(2, NCCL_EP_LAYOUT_EXPERT_MAJOR);
    epRound round;
    uint64_t seed = 3;
    c.groupTopk = c.topk + 1, c.timeoutNs = 200000000;
    epRoundMake(&round, &c, (uint32_t[]){4, 4}, epPickRandom, &seed);
    failedUpdate f = {&round, absent};
    runWorlds(2, &f, failedUpdateBody);
    epRoundFree(&round);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(smallBudgetDropsTheRest),
      cmocka_unit_test(overflowMayLoseTheGroup),
      cmocka_unit_test(eagerNamesTheRowsNeeded),
      cmocka_unit_test(eagerSaysWhatWasDropped),
      cmocka_unit_test(badIdsSelectNothing),
      cmocka_unit_test(configMismatchIsNamedOnEveryRank),
      cmocka_unit_test(aRankThatStaysAwayIsReported),
      cmocka_unit_test(lateRanksAreWaitedFor),
      cmocka_unit_test(aFailedUpdateMovesNothing),
      cmocka_unit_test(severalHandlesInterleave),
      cmocka_unit_test(recordsMayMove),
      cmocka_unit_test(destroyInAnyOrder),
      cmocka_unit_test(severalGroups),
      cmocka_unit_test(destroyIsBounded),
      cmocka_unit_test(destroyAfterACommunicator),
  };
  return cmocka_run_group_tests_name("failures", tests, NULL, NULL);
}
