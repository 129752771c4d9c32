/* Tensors that lie in registered windows, on the emulated fabric: outputs that peers store into directly, inputs, ranks
 * that differ in what they give, and what wrong windows and wrong modes are told. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "harness.h"

#define ALL UINT64_MAX

static const uint32_t ragged[] = {7, 0, 8, 1, 5};

static epCase small(uint32_t ranks, uint64_t windows) {
  return (epCase){.ranks = ranks,
                  .experts = 4 * ranks,
                  .topk = 3,
                  .hidden = 136,
                  .maxTokens = 8,
                  .layout = NCCL_EP_LAYOUT_FLAT,
                  .type = ncclBfloat16,
                  .windows = windows};
}

/* Eager and with a budget, one rank without tokens, two schedules each. */
static void everyRank(void **state) {
  (void)state;
  for (uint32_t ranks = 1; ranks <= 5; ranks++) {
    epCase c = small(ranks, ALL);
    epCaseRunRandom(&c, ragged, 2);
    c.budget = 8 * ranks, c.zeroCopy = NCCL_EP_ZERO_COPY_ON, c.topk = 1, c.type = ncclFloat32;
    epCaseRunRandom(&c, ragged, 2);
  }
}

/* A receiver that gives an ordinary tensor is sent to by staging, whatever the others give. */
static void someRanks(void **state) {
  (void)state;
  static const uint64_t masks[] = {1, 2, 5, 14};
  for (size_t i = 0; i < sizeof(masks) / sizeof(masks[0]); i++) {
    epCase c = small(4, masks[i]);
    epCaseRunRandom(&c, ragged, 3);
  }
}

/* Long rows, one a chunk, and short ones, several a chunk; rows of scales, which go by staging. */
static void widths(void **state) {
  (void)state;
  static const uint32_t hidden[] = {8, 512, 4096};
  for (size_t i = 0; i < sizeof(hidden) / sizeof(hidden[0]); i++) {
    epCase c = small(3, ALL);
    c.hidden = hidden[i], c.topk = 4, c.maxTokens = 20;
    epCaseRunRandom(&c, (uint32_t[]){20, 13, 17}, 4);
    c.scales = 7, c.scaleType = ncclFloat32, c.type = ncclFloat8e4m3;
    if (c.hidden % 16 == 0) epCaseRunRandom(&c, (uint32_t[]){20, 13, 17}, 2);
  }
}

static int64_t pickFirst(const epCase *c, uint32_t rank, uint32_t token, uint32_t k, void *arg) {
  (void)c, (void)rank, (void)token, (void)arg;
  return k; /* all of rank 0 */
}

/* Rows past the budget are dropped by their senders: they must not land behind the tensor. */
static void overflow(void **state) {
  (void)state;
  epCase c = small(4, ALL);
  epRound round;
  c.budget = 11;
  epRoundMake(&round, &c, (uint32_t[]){8, 3, 8, 6}, pickFirst, NULL);
  epCaseRun(&c, &round, 1, 4);
  epRoundFree(&round);
}

/* In these, rows are staged although tensors are window-backed. */
static void staged(void **state) {
  (void)state;
  epCase c = small(3, ALL);
  c.zeroCopy = NCCL_EP_ZERO_COPY_OFF;
  epCaseRunRandom(&c, ragged, 2);
  c = small(3, ALL);
  c.layout = NCCL_EP_LAYOUT_EXPERT_MAJOR, c.align = 4;
  epCaseRunRandom(&c, ragged, 2);
}

/* ---- Refusals --------------------------------------------------------------------------------------------------- */

static void refusalsBody(epTestRank *me) {
  const epCase *c = me->arg;
  epRun run = {0};
  epRound *round = calloc(1, sizeof(*round));
  uint64_t seed = 7;
  ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclWindow_t window = NULL;
  epTestTensor x, w, y, yw, yi;
  if (!round) return;
  epRoundMake(round, c, (uint32_t[]){8, 8}, epPickRandom, &seed);
  epGroupMake(me, c);
  epRunUpdate(me, &run, round);
  epTensorMake(me, &x, c->type, 2, 8, c->hidden, "tokens");
  epTensorMake(me, &w, ncclFloat32, 2, 8, c->topk, "weights");
  epTensorMake(me, &y, c->type, 2, 16, c->hidden, "rows");
  epTensorMake(me, &yw, ncclFloat32, 2, 16, c->topk, "row weights");
  epTensorMake(me, &yi, ncclInt64, 2, 16, c->topk, "row indices");
  in.tokens = &x.t, in.topk_weights = &w.t;
  out.tokens = &y.t, out.topk_weights = &yw.t, out.topk_idx = &yi.t;
#define REFUSED(words) \
  EXPECT_ERROR(me, ncclEpDispatch(run.handle, &in, &out, NULL, NULL, NULL), ncclInvalidArgument, words)
  if (c->layout != NCCL_EP_LAYOUT_FLAT) {
    out.topk_idx = NULL, yw.t.ndim = 1;
    REFUSED("zero_copy|outputs.tokens|NCCL_EP_LAYOUT_FLAT");
  } else {
    REFUSED("zero_copy|outputs.tokens|window-backed");
    EXPECT_OK(me, ncclEpEmuWindowRegister(me->comm, y.t.data, y.bytes - 16, &window)); /* a unit too short */
    y.t.win_hdl = window, y.t.data = NULL;
    REFUSED("outputs.tokens|win_offset 0");
    y.t.win_offset = y.bytes;
    REFUSED("outputs.tokens|win_offset");
    y.t.win_hdl = (ncclWindow_t)(void *)&y, y.t.win_offset = 0;
    REFUSED("outputs.tokens|win_hdl");
    EXPECT_OK(me, ncclEpEmuWindowDeregister(me->comm, window));
    y.t.win_hdl = window;
    REFUSED("outputs.tokens|win_hdl"); /* no longer one */
  }
#undef REFUSED
  epTensorFree(me, &x), epTensorFree(me, &w), epTensorFree(me, &y), epTensorFree(me, &yw), epTensorFree(me, &yi);
  epRunFree(me, &run);
  epGroupFree(me);
  epRoundFree(round);
  free(round);
}

static void refusals(void **state) {
  (void)state;
  for (int major = 0; major < 2; major++) {
    epCase c = small(2, 0);
    c.budget = 16, c.zeroCopy = NCCL_EP_ZERO_COPY_ON;
    if (major) c.layout = NCCL_EP_LAYOUT_EXPERT_MAJOR;
    epTestWorld world = {.ranks = 2, .arg = &c};
    epWorldRun(&world, refusalsBody);
  }
}

static void modesOfGroupsBody(epTestRank *me) {
  epCase c = small(2, 0);
  ncclEpGroupConfig_t config;
  epGroupConfigOf(&c, &config);
  config.algorithm = NCCL_EP_ALGO_LOW_LATENCY, config.zero_copy = NCCL_EP_ZERO_COPY_ON;
  EXPECT_OK(me, ncclEpCreateGroup(&me->group, me->comm, &config)); /* whose rows travel as units in every mode */
  epGroupFree(me);
}

static void modesOfGroups(void **state) {
  (void)state;
  epTestWorld world = {.ranks = 2};
  epWorldRun(&world, modesOfGroupsBody);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(everyRank),    cmocka_unit_test(someRanks),
                                     cmocka_unit_test(widths),       cmocka_unit_test(overflow),
                                     cmocka_unit_test(staged),       cmocka_unit_test(refusals),
                                     cmocka_unit_test(modesOfGroups)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
