/* Counters that are added to: the caller's own over several batches, in every algorithm and layout, whatever updates do beside. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "harness.h"

enum { RANKS = 4, LOCALS = 4, BEFORE = 5, BATCHES = 3 };

typedef struct plan {
  epRound round;
  int wide;
} plan;

static void checkCounters(epTestRank *me, const plan *t, const void *counters) {
  const uint64_t *once = t->round.ref->rank[me->rank].perExpert;
  for (uint32_t e = 0; e < LOCALS; e++) {
    long long got = t->wide ? (long long)((const int64_t *)counters)[e] : ((const int32_t *)counters)[e];
    EXPECT(me, got == (long long)(BEFORE + BATCHES * once[e]), "counter %u is %lld after %d batches of %llu", e, got,
           BATCHES, (unsigned long long)once[e]);
  }
}

static void body(epTestRank *me) {
  const plan *t = me->world->arg;
  ncclDataType_t type = t->wide ? ncclInt64 : ncclInt32;
  ncclEpUpdateExtConfig_t config = NCCL_EP_UPDATE_EXT_CONFIG_INIT;
  ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
  epTestTensor counters, topk;
  int64_t start[LOCALS];
  unsigned char copy[LOCALS * sizeof(int64_t)];
  epRun run = {.round = &t->round};
  for (int e = 0; e < LOCALS; e++) {
    if (t->wide)
      start[e] = BEFORE;
    else
      ((int32_t *)(void *)start)[e] = BEFORE;
  }
  epGroupMake(me, t->round.c);
  epRunUpdate(me, &run, &t->round);
  epTensorMake(me, &counters, type, 1, LOCALS, 0, "counters over batches");
  epTensorFill(me, &counters, start);
  epTensorMake(me, &topk, ncclInt64, 2, t->round.tokens[me->rank], t->round.c->topk, "topk_idx of the batches");
  epTensorFill(me, &topk, t->round.idx[me->rank]);
  info.expert_counters = &counters.t;
  config.cumulative_counters = 2;
  EXPECT_ERROR(me, ncclEpUpdateHandleExt(run.handle, &topk.t, &info, &config, NULL), ncclInvalidArgument,
               "cumulative_counters is 2|0 or 1");
  config.cumulative_counters = 1;
  for (int i = 0; i < BATCHES; i++) {
    config.borrow_topk_idx = i & 1; /* the dispatch that follows does the update's work */
    EXPECT_OK(me, ncclEpUpdateHandleExt(run.handle, &topk.t, &info, &config, NULL));
    if (i & 1) epRunDispatch(me, &run);
  }
  EXPECT_OK(me, ncclEpEmuMemcpy(me->comm, copy, counters.t.data, LOCALS * epTestTypeBytes(type), NULL));
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
  checkCounters(me, t, copy);
  epTensorCheckGuards(me, &counters, "counters over batches");
  epTensorFree(me, &counters);
  epTensorFree(me, &topk);
  epRunFree(me, &run);
  epGroupFree(me);
}

static void run(ncclEpLayout_t layout, int wide) {
  static const uint32_t tokens[] = {7, 0, 8, 6};
  uint64_t seed = 3;
  epCase c = {.ranks = RANKS,
              .experts = LOCALS * RANKS,
              .topk = 3,
              .hidden = 136,
              .maxTokens = 8,
              .layout = layout,
              .type = ncclBfloat16,
              .align = 4,
              .budget = 8 * RANKS * 3 + 4 * LOCALS};
  plan t = {.wide = wide};
  epTestWorld world = {.ranks = RANKS, .seed = 1, .arg = &t};
  if (layout == NCCL_EP_LAYOUT_FLAT) c.align = 0;
  epRoundMake(&t.round, &c, tokens, epPickRandom, &seed);
  epWorldRun(&world, body);
  epRoundFree(&t.round);
}

static void flat(void **state) {
  (void)state;
  run(NCCL_EP_LAYOUT_FLAT, 0);
}

static void expertMajor(void **state) { /* unpadded, although the zones are aligned */
  (void)state;
  run(NCCL_EP_LAYOUT_EXPERT_MAJOR, 1);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(flat), cmocka_unit_test(expertMajor)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
