/* Ranks that stop, die and come back among several scale-up domains. Without masks: the others return within one and a half timeouts and
 * say who was missing, where. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "batches.h"
#include "mask_plan.h"
#include "masks.h"
#include "rough.h"

static const ncclEpLayout_t layouts[] = {NCCL_EP_LAYOUT_FLAT, NCCL_EP_LAYOUT_EXPERT_MAJOR};

static epCase caseOf(uint32_t ranks, ncclEpLayout_t layout, int masks) {
  return (epCase){.ranks = ranks,
                  .experts = 2 * ranks,
                  .topk = 3,
                  .hidden = 64,
                  .maxTokens = 5,
                  .layout = layout,
                  .align = layout == NCCL_EP_LAYOUT_EXPERT_MAJOR ? 4 : 0,
                  .type = ncclBfloat16,
                  .timeoutNs = TIMEOUT_NS,
                  .masks = masks};
}

/* ---- Without masks -------------------------------------------------------------------------------------------------------- */

typedef struct lost {
  const epRound *round;
  unsigned long long after; /* it stops so much later; NEVER: before it begins */
  pthread_barrier_t meet;
} lost;

/* Whoever has waited says for whom: somebody who is missing, or who waited himself. */
static void expectTold(epTestRank *me, int must) {
  ncclEpErrorInfo_t info = NCCL_EP_ERROR_INFO_INIT;
  int error = -1;
  EXPECT_OK(me, ncclEpGetAsyncError(me->group, &error));
  EXPECT_OK(me, ncclEpGetErrorInfo(me->group, &info));
  if (!error && !must) return;
  EXPECT(me,
         error == 1 && info.code == 1 && info.rank == me->rank && info.peer >= 0 && info.peer < me->ranks &&
             info.phase[0],
         "async error %d, code %d, rank %d, peer %d: %s", error, info.code, info.rank, info.peer, info.text);
}

static void lostBody(epTestRank *me) {
  lost *p = me->arg;
  const epCase *c = p->round->c;
  int flat = c->layout == NCCL_EP_LAYOUT_FLAT, gone = me->rank == GONE;
  epRough r = {0};
  epRun run = {0};
  unsigned long long from;
  epGroupMake(me, c);
  if (!me->group) return;
  epRunUpdate(me, &run, p->round);
  epRunDispatch(me, &run);
  epRoughMake(me, &r, p->round);
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
  pthread_barrier_wait(&p->meet);
  if (gone) {
    EXPECT_OK(me, ncclEpEmuRankStop(me->comm, 1, p->after));
    if (p->after != NEVER) epRoughQueue(me, &r, flat);
  }
  pthread_barrier_wait(&p->meet);
  from = clockOf(me);
  if (!gone) {
    epRoughQueue(me, &r, flat);
    EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
    EXPECT(me, clockOf(me) - from < TIMEOUT_NS / 2 * 3, "it took %llu us", (clockOf(me) - from) / 1000);
    expectTold(me, p->after == NEVER);
    EXPECT_OK(me, ncclEpEmuRankStop(me->comm, 1, NEVER)); /* nobody is waited for by the fabric */
  }
  pthread_barrier_wait(&p->meet);
  if (gone) {
    EXPECT_OK(me, ncclEpEmuRankStop(me->comm, 0, 0));
    from = clockOf(me);
    EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
    EXPECT(me, clockOf(me) - from < TIMEOUT_NS / 2 * 3, "it took %llu us", (clockOf(me) - from) / 1000);
    expectTold(me, 0);
  }
  pthread_barrier_wait(&p->meet);
  if (!gone) EXPECT_OK(me, ncclEpEmuRankStop(me->comm, 0, 0));
  epRoughFree(me, &r);
  epRunFree(me, &run);
  epGroupFree(me);
  epGroupMake(me, c); /* made anew, all of them work on */
  if (!me->group) return;
  epRunUpdate(me, &run, p->round);
  epRunDispatch(me, &run);
  epRunCombine(me, &run);
  epExpectNoAsyncError(me);
  epRunFree(me, &run);
  epGroupFree(me);
}

static void aRankThatIsLostIsReported(void **state) {
  uint32_t tokens[8] = {5, 4, 5, 3, 5, 5, 4, 5};
  (void)state;
  for (size_t l = 0; l < 2; l++) {
    epCase c = caseOf(8, layouts[l], 0);
    uint64_t seed = 41 + l;
    epRound round;
    epRoundMake(&round, &c, tokens, epPickRandom, &seed);
    for (unsigned s = 0; s < 5; s++) {
      lost p = {.round = &round, .after = s ? (unsigned long long)s * 7919 % 25000 : NEVER};
      epTestWorld world = {.ranks = 8, .seed = 400 + s, .arg = &p};
      assert_int_equal(pthread_barrier_init(&p.meet, NULL, 8), 0);
      epWorldRun(&world, lostBody);
      pthread_barrier_destroy(&p.meet);
    }
    epRoundFree(&round);
  }
}

/* ---- With masks ------------------------------------------------------------------------------------------------------------ */

/* It is masked, and the reason is told. */
static void told(epTestRank *me, const maskPlan *p) {
  expectMask(me, "after the wait", GONE);
  if (p->how != BY_HAND) expectNamed(me);
}

/* What the others see. Who neither reaches it nor waits for its rows hears of it in the next update. */
static void survive(epTestRank *me, epRun *run, maskPlan *p) {
  unsigned long long from = clockOf(me);
  int mask[EP_TEST_MAX_RANKS];
  for (int r = 0; r < me->ranks; r++) mask[r] = r != GONE;
  if (p->how == BY_HAND) EXPECT_OK(me, ncclEpMaskUpdate(me->group, mask, NULL));
  if (p->phase == 0) {
    epRunUpdate(me, run, p->masked);
  } else {
    run->round = p->holes; /* the record is of all */
  }
  if (p->phase < 2) epRunDispatch(me, run);
  epRunCombine(me, run);
  if (p->how == BY_HAND)
    expectQuick(me, from);
  else if (p->phase == 0)
    expectOneTimeout(me, from);
  if (p->phase == 0) told(me, p);
  if (p->phase == 0 || p->how == BY_HAND) from = clockOf(me);
  epPlanLayer(me, run, p->masked);
  if (p->phase) told(me, p);
  if (p->phase && p->how == STOPPED) { /* not all need anything of it before; those wait for the others now */
    expectOneTimeout(me, from);
    from = clockOf(me);
  }
  epRunBackward(me, run);
  epPlanLayer(me, run, p->masked);
  expectQuick(me, from);
  epExpectNoAsyncError(me);
}

/* All together again, exact. */
static void restored(epTestRank *me, epRun *run, const epRound *round, epRough *old) {
  EXPECT_OK(me, ncclEpMaskClean(me->group, NULL));
  EXPECT_OK(me, ncclEpMaskClean(me->group, NULL)); /* where there is nothing to be made good */
  expectMask(me, "after the re-admission", -1);
  EXPECT_OK(me, ncclEpErrorClear(me->group));
  if (old) { /* along an older record nothing moves, and nobody waits */
    ncclEpErrorInfo_t info = NCCL_EP_ERROR_INFO_INIT;
    unsigned long long from = clockOf(me);
    epRoughMove(me, old, round->c->layout == NCCL_EP_LAYOUT_FLAT);
    EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
    expectQuick(me, from);
    EXPECT_OK(me, ncclEpGetErrorInfo(me->group, &info));
    EXPECT(me, info.code == 7, "code %d: %s", info.code, info.text);
    EXPECT(me, info.peer == -1 && strncmp(info.phase, "none:", 5) == 0, "peer %d, phase '%s'", info.peer, info.phase);
    EXPECT_OK(me, ncclEpErrorClear(me->group));
  }
  for (int i = 0; i < 2; i++) {
    epPlanLayer(me, run, round);
    epRunBackward(me, run);
  }
  epExpectNoAsyncError(me);
}

static void stopBody(epTestRank *me) {
  maskPlan *p = me->arg;
  epRun run = {0};
  run.salt = (unsigned)me->world->seed;
  epGroupMake(me, p->whole->c);
  if (!me->group) return;
  epPlanLayer(me, &run, p->whole);
  expectMask(me, "at first", -1);
  if (p->phase) epRunUpdate(me, &run, p->whole);
  if (p->phase == 2) epRunDispatch(me, &run);
  if (me->rank == GONE) EXPECT_OK(me, ncclEpEmuRankStop(me->comm, 1, NEVER));
  pthread_barrier_wait(&p->meet);
  if (me->rank != GONE) survive(me, &run, p);
  pthread_barrier_wait(&p->meet);
  if (me->rank == GONE) EXPECT_OK(me, ncclEpEmuRankStop(me->comm, 0, 0));
  pthread_barrier_wait(&p->meet);
  if (p->back) {
    restored(me, &run, p->whole, NULL);
    epRunFree(me, &run);
    epGroupFree(me);
    return;
  }
  epRunFree(me, &run);
  epPlanLeave(me, &p->meet);
}

static void stopRanks(uint32_t domains, uint32_t ups, how way, int single, unsigned seed) {
  uint32_t ranks = domains * ups;
  char text[16];
  snprintf(text, sizeof text, "%u", domains);
  assert_int_equal(setenv("EP_TEST_DOMAINS", text, 1), 0);
  for (size_t l = 0; l < 2; l++) {
    epCase c = caseOf(ranks, layouts[l], 1);
    maskRounds r;
    c.single = single;
    epRoundsMake(&r, &c, (int)ups);
    for (int phase = 0; phase < 3; phase++) {
      maskPlan p = {&r.whole, &r.holes, &r.masked, phase, way, (int)(seed + (unsigned)phase) % 2, {{0}}};
      epTestWorld world = {.ranks = (int)ranks, .sms = phase == 1 ? 3 : 0, .seed = seed + (unsigned)phase, .arg = &p};
      epPlanRun(&world, stopBody);
    }
    epRoundsFree(&r);
  }
}

static void aRankThatStopsIsLeftOut(void **state) {
  (void)state;
  stopRanks(2, 2, STOPPED, 1, 300);
  stopRanks(3, 2, STOPPED, 0, 305);
  stopRanks(2, 4, STOPPED, 0, 310);
}

static void aRankMaskedByHandIsLeftOut(void **state) {
  (void)state;
  stopRanks(2, 2, BY_HAND, 0, 320);
  stopRanks(2, 4, BY_HAND, 1, 330);
}

/* It dies anywhere in a layer; who finds out, and where, depends on the schedule. */
static void killedBody(epTestRank *me) {
  maskPlan *p = me->arg;
  const epCase *c = p->whole->c;
  epRun run = {.salt = (unsigned)me->world->seed};
  epRough r = {0};
  int flat = c->layout == NCCL_EP_LAYOUT_FLAT, mask[EP_TEST_MAX_RANKS], gone = me->rank == GONE;
  for (int i = 0; i < me->ranks; i++) mask[i] = i != GONE;
  epGroupMake(me, c);
  if (!me->group) return;
  epPlanLayer(me, &run, p->whole);
  epRoughMake(me, &r, p->whole);
  if (gone) {
    EXPECT_OK(me, ncclEpEmuRankStop(me->comm, 1, me->world->seed * 7919 % 40000));
    epRoughQueue(me, &r, flat);
  }
  pthread_barrier_wait(&p->meet);
  if (!gone) {
    unsigned long long from = clockOf(me);
    epRoughQueue(me, &r, flat);
    EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
    EXPECT(me, clockOf(me) - from < TIMEOUT_NS / 2 * 3, "it took %llu us", (clockOf(me) - from) / 1000);
    epRoughCheck(me, &r, c, p->whole->tokens[me->rank]);
    EXPECT_OK(me, ncclEpMaskUpdate(me->group, mask, NULL)); /* it may have died with its work done */
    EXPECT_OK(me, ncclEpErrorClear(me->group));
    from = clockOf(me);
    epPlanLayer(me, &run, p->masked);
    epPlanLayer(me, &run, p->masked);
    expectQuick(me, from);
    epExpectNoAsyncError(me);
    EXPECT_OK(me, ncclEpEmuRankStop(me->comm, 1, NEVER));
  }
  pthread_barrier_wait(&p->meet);
  if (gone) {
    EXPECT_OK(me, ncclEpEmuRankStop(me->comm, 0, 0));
    EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
  }
  pthread_barrier_wait(&p->meet);
  if (!gone) EXPECT_OK(me, ncclEpEmuRankStop(me->comm, 0, 0));
  pthread_barrier_wait(&p->meet);
  restored(me, &run, p->whole, &r);
  epRoughFree(me, &r);
  epRunFree(me, &run);
  epGroupFree(me);
}

/* Two that stop together, in different domains and on different rails: each stands for a rail of the other's domain, and no wait follows another. */
static int stops(const epTestRank *me) { return me->rank == 1 || me->rank == 6; }

static void twoStopBody(epTestRank *me) {
  maskPlan *p = me->arg;
  const epCase *c = p->whole->c;
  epRun run = {.salt = (unsigned)me->world->seed};
  epRough r = {0};
  int flat = c->layout == NCCL_EP_LAYOUT_FLAT;
  epGroupMake(me, c);
  if (!me->group) return;
  epPlanLayer(me, &run, p->whole);
  epRoughMake(me, &r, p->whole);
  if (stops(me)) EXPECT_OK(me, ncclEpEmuRankStop(me->comm, 1, NEVER));
  pthread_barrier_wait(&p->meet);
  if (!stops(me)) {
    unsigned long long from = clockOf(me);
    epRoughQueue(me, &r, flat);
    EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
    expectOneTimeout(me, from);
    from = clockOf(me);
    epRoughQueue(me, &r, flat);
    EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
    expectQuick(me, from);
    epRoughCheck(me, &r, c, p->whole->tokens[me->rank]);
    EXPECT_OK(me,
              ncclEpMaskClean(me->group, NULL)); /* of those that are there: two rounds, one of them a whole timeout */
    EXPECT(me, clockOf(me) - from < TIMEOUT_NS / 2 * 5, "it took %llu us", (clockOf(me) - from) / 1000);
    EXPECT_OK(me, ncclEpErrorClear(me->group));
    from = clockOf(me);
    epRoughQueue(me, &r, flat);
    EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
    expectQuick(me, from);
    epRoughCheck(me, &r, c, p->whole->tokens[me->rank]);
    epExpectNoAsyncError(me);
  }
  pthread_barrier_wait(&p->meet);
  if (stops(me)) EXPECT_OK(me, ncclEpEmuRankStop(me->comm, 0, 0));
  pthread_barrier_wait(&p->meet);
  restored(me, &run, p->whole, NULL);
  epRoughFree(me, &r);
  epRunFree(me, &run);
  epGroupFree(me);
}

static void twoRanksThatStopTogether(void **state) {
  (void)state;
  assert_int_equal(setenv("EP_TEST_DOMAINS", "2", 1), 0);
  for (unsigned s = 0; s < 2; s++) {
    epCase c = caseOf(8, layouts[s], 1);
    maskRounds r;
    epRoundsMake(&r, &c, 4);
    maskPlan p = {.whole = &r.whole};
    epTestWorld world = {.ranks = 8, .seed = 820 + s, .arg = &p};
    epPlanRun(&world, twoStopBody);
    epRoundsFree(&r);
  }
}

static void aRankThatIsKilledIsLeftOut(void **state) {
  (void)state;
  assert_int_equal(setenv("EP_TEST_DOMAINS", "2", 1), 0);
  unsigned schedules = 3;
  for (size_t l = 0; l < 2; l++) {
    epCase c = caseOf(8, layouts[l], 1);
    maskRounds r;
    epRoundsMake(&r, &c, 4);
    for (unsigned s = 0; s < schedules; s++) {
      maskPlan p = {.whole = &r.whole, .holes = &r.holes, .masked = &r.masked};
      epTestWorld world = {.ranks = 8, .sms = s % 3 == 1 ? 3 : 0, .seed = 700 + s, .arg = &p};
      epPlanRun(&world, killedBody);
    }
    epRoundsFree(&r);
  }
}

/* ---- Staged operations: two in flight --------------------------------------------------------------------------------------- */

typedef struct staged {
  setting with, without; /* the rank that stops */
  int sent;              /* it stops behind its sends */
  pthread_barrier_t meet;
} staged;

static void stagedBody(epTestRank *me) {
  staged *p = me->arg;
  batch b[2] = {0};
  int gone = me->rank == GONE;
  epSettingGroup(me, &p->with);
  if (!me->group) return;
  for (unsigned i = 0; i < 2; i++) epBatchMake(me, &p->with, &b[i]);
  epBatchesStaged(me, &p->with, b);
  for (unsigned i = 0; i < 2; i++) epBatchUpdate(me, &p->with, &b[i], i);
  if (p->sent) epBatchesSend(me, &p->with, b, 0);
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
  pthread_barrier_wait(&p->meet);
  if (gone) EXPECT_OK(me, ncclEpEmuRankStop(me->comm, 1, NEVER));
  pthread_barrier_wait(&p->meet);
  if (!gone) {
    unsigned long long from = clockOf(me);
    if (!p->sent) epBatchesSend(me, &p->with, b, 0);
    epBatchesComplete(me, b, 0);
    epBatchesSend(me, &p->with, b, 1), epBatchesComplete(me, b, 1);
    for (unsigned i = 0; i < 2; i++) epBatchCheck(me, &p->without, &b[i], i);
    EXPECT(me, clockOf(me) - from < TIMEOUT_NS / 2 * 3, "it took %llu us", (clockOf(me) - from) / 1000);
    epBatchesStaged(me, &p->without, b);
    expectMask(me, "after the wait", GONE);
    expectNamed(me);
    from = clockOf(me);
    epBatchesStaged(me, &p->without, b);
    expectQuick(me, from);
    epExpectNoAsyncError(me);
  }
  pthread_barrier_wait(&p->meet);
  if (gone) EXPECT_OK(me, ncclEpEmuRankStop(me->comm, 0, 0));
  pthread_barrier_wait(&p->meet);
  if (gone && p->sent) epBatchesComplete(me, b, 0);
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
  EXPECT_OK(me, ncclEpMaskClean(me->group, NULL));
  expectMask(me, "after the re-admission", -1);
  EXPECT_OK(me, ncclEpErrorClear(me->group));
  for (unsigned i = 0; i < 2; i++) b[i].round = 9; /* ranks must agree about updates that borrow */
  for (int i = 0; i < 2; i++) epBatchesStaged(me, &p->with, b);
  epExpectNoAsyncError(me);
  for (unsigned i = 0; i < 2; i++) epBatchFree(me, &b[i]);
  epGroupFree(me);
}

static void stagedRanks(const char *domains, int ups, ncclEpLayout_t layout, int lowLatency, int sent, unsigned seed) {
  int ranks = ups * (int)strtol(domains, NULL, 10);
  staged p = {.sent = sent};
  epTestWorld world = {.ranks = ranks, .sms = seed == 1 ? 3 : 0, .seed = 900 + seed, .arg = &p};
  assert_int_equal(setenv("EP_TEST_DOMAINS", domains, 1), 0);
  p.with = (setting){
      .layout = layout, .lowLatency = lowLatency, .masks = 1, .timeoutNs = TIMEOUT_NS, .seed = 40 + (uint64_t)seed};
  p.without = p.with;
  p.without.gone = GONE + 1, p.without.ups = ups;
  assert_int_equal(pthread_barrier_init(&p.meet, NULL, (unsigned)ranks), 0);
  epWorldRun(&world, stagedBody);
  pthread_barrier_destroy(&p.meet);
}

/* EP_TEST_SCHEDULES: how many of low latency's, for longer runs. */
static void aRankThatStopsAmongStagedOperations(void **state) {
  static const ncclEpLayout_t lowLatency[] = {NCCL_EP_LAYOUT_RANK_MAJOR, NCCL_EP_LAYOUT_EXPERT_MAJOR};
  const char *wanted = getenv("EP_TEST_SCHEDULES");
  unsigned schedules = wanted ? (unsigned)strtoul(wanted, NULL, 10) : 1;
  (void)state;
  for (unsigned i = 0; i < 4; i++) stagedRanks("2", 2, layouts[i / 2], 0, (int)i % 2, i);
  for (unsigned i = 0; i < 4 * schedules; i++) {
    stagedRanks("2", 2, lowLatency[i / 2 % 2], 1, (int)i % 2, i);
    if (i % 4 == 1 || wanted) stagedRanks("3", 2, lowLatency[i / 2 % 2], 1, (int)i % 2, i);
    if (i % 4 == 2 || wanted) stagedRanks("2", 4, lowLatency[i / 2 % 2], 1, (int)i % 2, i);
  }
}

/* Those whose names match the argument, or all. */
int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(aRankThatIsLostIsReported),  cmocka_unit_test(aRankThatStopsIsLeftOut),
      cmocka_unit_test(aRankMaskedByHandIsLeftOut), cmocka_unit_test(aRankThatStopsAmongStagedOperations),
      cmocka_unit_test(twoRanksThatStopTogether),   cmocka_unit_test(aRankThatIsKilledIsLeftOut),
  };
  if (setenv("EP_TEST_DOMAINS", "2", 1)) return 1;
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  return cmocka_run_group_tests_name("masks of domains", tests, NULL, NULL);
}
