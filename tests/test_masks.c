/* Ranks that stop, die and come back, in groups with masks: the others return in about a timeout, leave them out and name them;
 * their next calls are not slow; a re-admission restores exact results. */
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

/* What the others see. */
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
  else
    expectOneTimeout(me, from);
  expectMask(me, "after the wait", GONE);
  if (p->how != BY_HAND) expectNamed(me);
  from = clockOf(me);
  epPlanLayer(me, run, p->masked);
  epRunBackward(me, run);
  run->borrow = !run->borrow;
  epPlanLayer(me, run, p->masked);
  expectQuick(me, from);
  epExpectNoAsyncError(me);
}

/* All together again, exact. */
static void restored(epTestRank *me, epRun *run, const epRound *round) {
  EXPECT_OK(me, ncclEpMaskClean(me->group, NULL));
  expectMask(me, "after the re-admission", -1);
  EXPECT_OK(me, ncclEpErrorClear(me->group));
  for (int i = 0; i < 2; i++) {
    epPlanLayer(me, run, round);
    epRunBackward(me, run);
    run->borrow = !run->borrow;
  }
  epExpectNoAsyncError(me);
}

static void stopBody(epTestRank *me) {
  maskPlan *p = me->arg;
  epRun run = {0};
  run.salt = (unsigned)me->world->seed;
  run.borrow = (int)me->world->seed & 1;
  epGroupMake(me, p->whole->c);
  if (!me->group) return;
  epPlanLayer(me, &run, p->whole);
  expectMask(me, "at first", -1);
  if (p->phase) epRunUpdate(me, &run, p->whole);
  if (p->phase && run.borrow) epRunDispatch(me, &run); /* makes the record */
  if (p->phase == 2) epRunDispatch(me, &run);
  if (me->rank == GONE) EXPECT_OK(me, ncclEpEmuRankStop(me->comm, 1, NEVER));
  pthread_barrier_wait(&p->meet);
  if (me->rank != GONE) survive(me, &run, p);
  pthread_barrier_wait(&p->meet);
  if (me->rank == GONE) EXPECT_OK(me, ncclEpEmuRankStop(me->comm, 0, 0));
  pthread_barrier_wait(&p->meet);
  if (p->back) {
    restored(me, &run, p->whole);
    epRunFree(me, &run);
    epGroupFree(me);
    return;
  }
  epRunFree(me, &run);
  epPlanLeave(me, &p->meet);
}

static const ncclEpLayout_t layouts[] = {NCCL_EP_LAYOUT_FLAT, NCCL_EP_LAYOUT_EXPERT_MAJOR};

static epCase caseOf(uint32_t ranks, ncclEpLayout_t layout) {
  return (epCase){.ranks = ranks,
                  .experts = 4 * ranks,
                  .topk = 3,
                  .hidden = 64,
                  .maxTokens = 9,
                  .layout = layout,
                  .align = layout == NCCL_EP_LAYOUT_EXPERT_MAJOR ? 4 : 0,
                  .type = ncclBfloat16,
                  .timeoutNs = TIMEOUT_NS,
                  .masks = 1};
}

static void stopRanks(uint32_t ranks, how way, unsigned schedules) {
  for (size_t l = 0; l < 2; l++) {
    epCase c = caseOf(ranks, layouts[l]);
    maskRounds r;
    epRoundsMake(&r, &c, 0);
    for (unsigned s = 0; s < schedules; s++)
      for (int phase = 0; phase < 3; phase++) {
        maskPlan p = {&r.whole, &r.holes, &r.masked, phase, way, (int)(s + (unsigned)phase) % 2, {{0}}};
        epTestWorld world = {.ranks = (int)ranks, .sms = s % 3 == 1 ? 3 : 0, .seed = 300 + s, .arg = &p};
        epPlanRun(&world, stopBody);
      }
    epRoundsFree(&r);
  }
}

static void aRankThatStopsIsLeftOut(void **state) {
  (void)state;
  stopRanks(3, STOPPED, 4);
}

static void aRankMaskedByHandIsLeftOut(void **state) {
  (void)state;
  stopRanks(3, BY_HAND, 2);
}

/* ---- What comes of a rank that dies in the middle, or of masks that differ, depends on the schedule: layers whose results are looked at
 * only as far as they are promised. ------------------------------------------------------------------------------------ */

static void killedBody(epTestRank *me) {
  maskPlan *p = me->arg;
  const epCase *c = p->whole->c;
  epRun run = {.salt = (unsigned)me->world->seed};
  epRough r = {0};
  int flat = c->layout == NCCL_EP_LAYOUT_FLAT;
  epGroupMake(me, c);
  if (!me->group) return;
  epPlanLayer(me, &run, p->whole);
  epRoughMake(me, &r, p->whole);
  if (me->rank == GONE) {
    EXPECT_OK(me, ncclEpEmuRankStop(me->comm, 1, me->world->seed * 7919 % 25000));
    epRoughQueue(me, &r, flat);
  }
  pthread_barrier_wait(&p->meet);
  if (me->rank != GONE) {
    unsigned long long from = clockOf(me);
    epRoughQueue(me, &r, flat);
    EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
    EXPECT(me, clockOf(me) - from < TIMEOUT_NS / 2 * 3, "it took %llu us", (clockOf(me) - from) / 1000);
    epRoughCheck(me, &r, c, p->whole->tokens[me->rank]);
    EXPECT_OK(me, ncclEpMaskUpdate(me->group, (int[]){1, 0, 1}, NULL)); /* it may have died with its work done */
    EXPECT_OK(me, ncclEpErrorClear(me->group));
    from = clockOf(me);
    epPlanLayer(me, &run, p->masked);
    expectQuick(me, from);
    epExpectNoAsyncError(me);
  }
  pthread_barrier_wait(&p->meet);
  if (me->rank == GONE) EXPECT_OK(me, ncclEpEmuRankStop(me->comm, 0, 0));
  pthread_barrier_wait(&p->meet);
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
  restored(me, &run, p->whole);
  epRoughFree(me, &r);
  epRunFree(me, &run);
  epGroupFree(me);
}

static void aRankThatIsKilledIsLeftOut(void **state) {
  (void)state;
  for (size_t l = 0; l < 2; l++) {
    epCase c = caseOf(3, layouts[l]);
    maskRounds r;
    epRoundsMake(&r, &c, 0);
    for (unsigned s = 0; s < 12; s++) {
      maskPlan p = {.whole = &r.whole, .holes = &r.holes, .masked = &r.masked};
      epTestWorld world = {.ranks = 3, .sms = s % 3 == 1 ? 3 : 0, .seed = 700 + s, .arg = &p};
      epPlanRun(&world, killedBody);
    }
    epRoundsFree(&r);
  }
}

/* Ranks 1 and 3 stop together: no wait follows another. */
static void twoStopBody(epTestRank *me) {
  maskPlan *p = me->arg;
  const epCase *c = p->whole->c;
  epRun run = {.salt = (unsigned)me->world->seed};
  epRough r = {0};
  int flat = c->layout == NCCL_EP_LAYOUT_FLAT, gone = me->rank == 1 || me->rank == 3;
  epGroupMake(me, c);
  if (!me->group) return;
  epPlanLayer(me, &run, p->whole);
  epRoughMake(me, &r, p->whole);
  if (gone) EXPECT_OK(me, ncclEpEmuRankStop(me->comm, 1, NEVER));
  pthread_barrier_wait(&p->meet);
  if (!gone) {
    unsigned long long from = clockOf(me);
    epRoughQueue(me, &r, flat);
    EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
    expectOneTimeout(me, from);
    from = clockOf(me);
    epRoughQueue(me, &r, flat);
    EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
    expectQuick(me, from);
    epRoughCheck(me, &r, c, p->whole->tokens[me->rank]);
  }
  pthread_barrier_wait(&p->meet);
  if (gone) EXPECT_OK(me, ncclEpEmuRankStop(me->comm, 0, 0));
  pthread_barrier_wait(&p->meet);
  restored(me, &run, p->whole);
  epRoughFree(me, &r);
  epRunFree(me, &run);
  epGroupFree(me);
}

static void twoRanksThatStopTogether(void **state) {
  (void)state;
  for (size_t l = 0; l < 2; l++) {
    epCase c = caseOf(5, layouts[l]);
    maskRounds r;
    epRoundsMake(&r, &c, 0);
    for (unsigned s = 0; s < 3; s++) {
      maskPlan p = {.whole = &r.whole};
      epTestWorld world = {.ranks = 5, .seed = 820 + s, .arg = &p};
      epPlanRun(&world, twoStopBody);
    }
    epRoundsFree(&r);
  }
}

/* Ranks 0 and 2 each mask another one, rank 4 leaves operations out: at the end nobody knows who is where. */
static void apartBody(epTestRank *me) {
  maskPlan *p = me->arg;
  const epCase *c = p->whole->c;
  epRun run = {.salt = (unsigned)me->world->seed};
  epRough r = {0};
  int flat = c->layout == NCCL_EP_LAYOUT_FLAT, late = me->rank == 4;
  epGroupMake(me, c);
  if (!me->group) return;
  epPlanLayer(me, &run, p->whole);
  epRoughMake(me, &r, p->whole);
  if (me->rank == 0) EXPECT_OK(me, ncclEpMaskUpdate(me->group, (int[]){1, 0, 1, 1, 1}, NULL));
  if (late) EXPECT_OK(me, ncclEpEmuRankStop(me->comm, 1, NEVER));
  for (int i = 0; i < 3 && !late; i++) {
    if (me->rank == 2 && i == 1) EXPECT_OK(me, ncclEpMaskUpdate(me->group, (int[]){1, 1, 1, 0, 1}, NULL));
    epRoughQueue(me, &r, flat);
    if (i == 1) EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
  }
  if (!late) EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
  pthread_barrier_wait(&p->meet);
  if (late) EXPECT_OK(me, ncclEpEmuRankStop(me->comm, 0, 0));
  pthread_barrier_wait(&p->meet); /* from here on its host is waited for */
  if (late) {
    epRoughQueue(me, &r, flat);
    EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
  }
  restored(me, &run, p->whole);
  epRoughFree(me, &r);
  epRunFree(me, &run);
  epGroupFree(me);
}

static void ranksThatAreApartMeetAgain(void **state) {
  (void)state;
  for (size_t l = 0; l < 2; l++) {
    epCase c = caseOf(5, layouts[l]);
    maskRounds r;
    epRoundsMake(&r, &c, 0);
    for (unsigned s = 0; s < 4; s++) {
      maskPlan p = {.whole = &r.whole};
      epTestWorld world = {.ranks = 5, .seed = 800 + s, .arg = &p};
      epPlanRun(&world, apartBody);
    }
    epRoundsFree(&r);
  }
}

/* ---- Staged operations, in both algorithms: two in flight -------------------------------------------------------------- */

enum { BEFORE_SEND, BEFORE_COMPLETION, SOMEWHERE };

typedef struct staged {
  setting with, without; /* the rank that stops */
  int where;
  unsigned long long after;
  pthread_barrier_t meet;
} staged;

/* Each rank's part of a sum is there in whole: elements differ in sign alone. */
static void roughSums(epTestRank *me, const batch *b) {
  const uint16_t *y = b->y.t.data;
  for (uint32_t t = 0; t < b->tokens; t++)
    for (uint32_t h = 1; h < HIDDEN; h++)
      EXPECT(me, (y[t * HIDDEN + h] & 0x7fff) == (y[t * HIDDEN] & 0x7fff),
             "token %u: element %u is %x, the first one %x", t, h, y[t * HIDDEN + h], y[t * HIDDEN]);
}

static void surviveStaged(epTestRank *me, staged *p, batch *b) {
  unsigned long long from = clockOf(me);
  if (p->where != BEFORE_COMPLETION) epBatchesSend(me, &p->with, b, 0);
  epBatchesComplete(me, b, 0);
  epBatchesSend(me, &p->with, b, 1);
  EXPECT_ERROR(me, ncclEpMaskClean(me->group, NULL), ncclInvalidUsage,
               "2 staged operations of the group are in flight|ncclEpComplete before");
  epBatchesComplete(me, b, 1);
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
  if (p->where == SOMEWHERE) {
    EXPECT(me, clockOf(me) - from < TIMEOUT_NS / 2 * 3, "it took %llu us", (clockOf(me) - from) / 1000);
    for (unsigned i = 0; i < 2; i++) roughSums(me, &b[i]);
    EXPECT_OK(me, ncclEpMaskUpdate(me->group, (int[]){1, 0, 1}, NULL)); /* it may have stopped with its work done */
    EXPECT_OK(me, ncclEpErrorClear(me->group));
  } else {
    expectOneTimeout(me, from);
    for (unsigned i = 0; i < 2; i++) epBatchCheck(me, &p->without, &b[i], i);
    expectNamed(me);
  }
  expectMask(me, "after the wait", GONE);
  from = clockOf(me);
  epBatchesStaged(me, &p->without, b);
  expectQuick(me, from);
  epExpectNoAsyncError(me);
}

static void stagedBody(epTestRank *me) {
  staged *p = me->arg;
  batch b[2] = {0};
  int gone = me->rank == GONE;
  epSettingGroup(me, &p->with);
  if (!me->group) return;
  for (unsigned i = 0; i < 2; i++) epBatchMake(me, &p->with, &b[i]);
  epBatchesStaged(me, &p->with, b);
  for (unsigned i = 0; i < 2; i++) epBatchUpdate(me, &p->with, &b[i], i);
  if (p->where == BEFORE_COMPLETION) epBatchesSend(me, &p->with, b, 0);
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
  pthread_barrier_wait(&p->meet);
  if (gone) EXPECT_OK(me, ncclEpEmuRankStop(me->comm, 1, p->after));
  if (gone && p->where == SOMEWHERE) {
    epBatchesSend(me, &p->with, b, 0), epBatchesComplete(me, b, 0);
    epBatchesSend(me, &p->with, b, 1), epBatchesComplete(me, b, 1);
  }
  pthread_barrier_wait(&p->meet);
  if (!gone) surviveStaged(me, p, b);
  pthread_barrier_wait(&p->meet);
  if (gone) EXPECT_OK(me, ncclEpEmuRankStop(me->comm, 0, 0));
  pthread_barrier_wait(&p->meet);
  if (gone && p->where == BEFORE_COMPLETION) {
    EXPECT_ERROR(me, ncclEpMaskClean(me->group, NULL), ncclInvalidUsage, "2 staged operations");
    epBatchesComplete(me, b, 0);
  }
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
  EXPECT_OK(me, ncclEpMaskClean(me->group, NULL));
  expectMask(me, "after the re-admission", -1);
  EXPECT_OK(me, ncclEpErrorClear(me->group));
  for (unsigned i = 0; i < 2; i++) b[i].round = 9; /* ranks must agree about updates that borrow */
  for (int i = 0; i < 3; i++) epBatchesStaged(me, &p->with, b);
  for (unsigned i = 0; i < 2; i++) { /* whole ones too */
    epBatchUpdate(me, &p->with, &b[i], i);
    EXPECT_OK(me, epBatchDispatch(me, &p->with, &b[i], 0, NULL));
    EXPECT_OK(me, epBatchCombine(me, &p->with, &b[i], 0, NULL));
    epBatchCheck(me, &p->with, &b[i], i);
  }
  epExpectNoAsyncError(me);
  for (unsigned i = 0; i < 2; i++) epBatchFree(me, &b[i]);
  epGroupFree(me);
}

static void aRankThatStopsAmongStagedOperations(void **state) {
  (void)state;
  static const ncclEpLayout_t all[][2] = {{NCCL_EP_LAYOUT_FLAT, NCCL_EP_LAYOUT_EXPERT_MAJOR},
                                          {NCCL_EP_LAYOUT_RANK_MAJOR, NCCL_EP_LAYOUT_EXPERT_MAJOR}};
  for (int l = 0; l < 4; l++)
    for (int where = BEFORE_SEND; where <= SOMEWHERE; where++)
      for (unsigned s = 0; s < (where == SOMEWHERE ? 4u : 1u); s++) {
        staged p = {.where = where, .after = where == SOMEWHERE ? (s + 1) * 7919 % 25000 : NEVER};
        epTestWorld world = {.ranks = 3, .sms = s % 3 == 1 ? 3 : 0, .seed = 900 + s, .arg = &p};
        p.with = (setting){
            .lowLatency = l / 2, .layout = all[l / 2][l % 2], .masks = 1, .timeoutNs = TIMEOUT_NS, .seed = 40 + s};
        p.without = p.with;
        p.without.gone = GONE + 1;
        assert_int_equal(pthread_barrier_init(&p.meet, NULL, 3), 0);
        epWorldRun(&world, stagedBody);
        pthread_barrier_destroy(&p.meet);
      }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(aRankThatStopsIsLeftOut),    cmocka_unit_test(aRankMaskedByHandIsLeftOut),
      cmocka_unit_test(aRankThatIsKilledIsLeftOut), cmocka_unit_test(twoRanksThatStopTogether),
      cmocka_unit_test(ranksThatAreApartMeetAgain), cmocka_unit_test(aRankThatStopsAmongStagedOperations),
  };
  return cmocka_run_group_tests_name("masks", tests, NULL, NULL);
}
