/* Profiling on the emulated fabric: every operation is told once and in order, with its spans; a rank that comes late is named, by
 * whoever waited for it; nothing is written where it is off. EP_TEST_DOMAINS: the same across scale-up domains. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "harness.h"

enum { RANKS = 4, LATE = 2, OPERATIONS = 16, WAITS = 256 };
#define LATE_NS 300000u
#define SEEN_NS 200000u /* of it, by who waits: ranks do not begin at the same time */

typedef struct plan {
  epRound round;
  int borrow;
} plan;

/* One layer; rank `late` comes late to the dispatch (-1: nobody). */
static void layer(epTestRank *me, epRun *run, const epRound *round, int late) {
  epRunUpdate(me, run, round);
  run->delayNs = me->rank == late ? LATE_NS : 0;
  epRunDispatch(me, run);
  epRunCombine(me, run);
}

static ncclEpProfile_t told(epTestRank *me, ncclEpProfileOperation_t *operations, ncclEpProfileWait_t *waits) {
  ncclEpProfile_t p = NCCL_EP_PROFILE_INIT;
  p.operations = operations, p.operation_capacity = OPERATIONS;
  p.waits = waits, p.wait_capacity = WAITS;
  EXPECT_OK(me, ncclEpGetProfile(me->group, &p));
  EXPECT(me, p.lost == 0, "%u operations were lost", p.lost);
  return p;
}

static void checkOperations(epTestRank *me, const ncclEpProfile_t *p, unsigned first, int borrow) {
  static const ncclEpProfileKind_t kinds[] = {NCCL_EP_PROFILE_UPDATE, NCCL_EP_PROFILE_DISPATCH,
                                              NCCL_EP_PROFILE_COMBINE};
  unsigned expected = borrow ? 2 : 3;
  EXPECT(me, p->operation_count == expected, "%u operations: expected %u", p->operation_count, expected);
  for (unsigned i = 0; i < p->operation_count; i++) {
    const ncclEpProfileOperation_t *op = &p->operations[i];
    unsigned long long took = op->end_ns - op->start_ns;
    int update = op->kind == NCCL_EP_PROFILE_UPDATE;
    EXPECT(me, op->number == first + i, "operation %u: expected number %u", op->number, first + i);
    EXPECT(me, op->kind == kinds[i + (borrow != 0)], "operation %u is of kind %d", op->number, (int)op->kind);
    EXPECT(me, op->end_ns > op->start_ns, "operation %u took no time", op->number);
    EXPECT(me, (op->span_end_ns[NCCL_EP_SPAN_RECEIVE] != 0) == !update, "operation %u: span of receivers", op->number);
    for (int s = 0; s < NCCL_EP_SPANS; s++)
      EXPECT(me, op->span_start_ns[s] <= op->span_end_ns[s] && op->span_end_ns[s] <= took + 1,
             "operation %u: span %d from %u to %u of %llu ns", op->number, s, op->span_start_ns[s], op->span_end_ns[s],
             took);
  }
}

/* The rank that rank `me` misses the late one at: another domain's rows come through the rank of its index in the own domain. */
static int missedAt(int me) {
  const char *text = getenv("EP_TEST_DOMAINS");
  int ups = RANKS / (text ? atoi(text) : 1);
  return LATE % ups == me % ups ? LATE : me / ups * ups + LATE % ups;
}

/* The longest wait, which is the late rank's. */
static void checkLate(epTestRank *me, const ncclEpProfile_t *p) {
  const ncclEpProfileWait_t *most = NULL;
  char words[64];
  for (unsigned i = 0; i < p->wait_count; i++) {
    const ncclEpProfileWait_t *w = &p->waits[i];
    EXPECT(me, w->waits > 0 && w->total_ns + w->waits * 16ull >= w->longest_ns && w->first_ns <= w->last_ns,
           "waits for rank %d in %s: %u, %u ns, %llu ns, from %u to %u", w->rank, w->phase, w->waits, w->longest_ns,
           w->total_ns, w->first_ns, w->last_ns);
    if (!most || w->longest_ns > most->longest_ns) most = w;
  }
  EXPECT(me, most && most->rank == missedAt(me->rank) && most->longest_ns >= SEEN_NS,
         "longest wait: %u ns for rank %d in %s", most ? most->longest_ns : 0, most ? most->rank : -1,
         most ? most->phase : "nothing");
  snprintf(words, sizeof(words), "rank %d was late by ", missedAt(me->rank));
  EXPECT(me, !strncmp(p->advice, words, strlen(words)), "advice: %s", p->advice);
}

static void body(epTestRank *me) {
  const plan *t = me->world->arg;
  ncclEpProfileOperation_t operations[OPERATIONS];
  ncclEpProfileWait_t waits[WAITS];
  ncclEpProfile_t p = NCCL_EP_PROFILE_INIT;
  epRun run = {.borrow = t->borrow, .salt = 3}; /* borrowed updates are followed by their dispatch, where profiled */
  epGroupMake(me, t->round.c);
  p.operations = operations, p.operation_capacity = OPERATIONS;
  EXPECT_ERROR(me, ncclEpGetProfile(me->group, &p), ncclInvalidUsage, "not profiled|ncclEpSetProfiling");
  EXPECT_ERROR(me, ncclEpSetProfiling(me->group, 2), ncclInvalidArgument, "on is 2|0 or 1");
  layer(me, &run, &t->round, -1);
  EXPECT_OK(me, ncclEpSetProfiling(me->group, 1));
  layer(me, &run, &t->round, -1);
  p = told(me, operations, waits);
  checkOperations(me, &p, 1, t->borrow);
  layer(me, &run, &t->round, LATE);
  p = told(me, operations, waits);
  checkOperations(me, &p, t->borrow ? 3 : 4, t->borrow);
  if (me->rank != LATE) checkLate(me, &p);
  EXPECT_OK(me, ncclEpSetProfiling(me->group, 0));
  layer(me, &run, &t->round, -1);
  p = told(me, operations, waits);
  EXPECT(me, p.operation_count == 0 && !*p.advice, "%u operations where profiling is off: %s", p.operation_count,
         p.advice);
  EXPECT_OK(me, ncclEpSetProfiling(me->group, 1));
  layer(me, &run, &t->round, -1);
  p.operations = NULL;
  EXPECT_ERROR(me, ncclEpGetProfile(me->group, &p), ncclInvalidArgument, "operations is NULL");
  p.operations = operations, p.operation_capacity = 1;
  p.waits = NULL;
  EXPECT_OK(me, ncclEpGetProfile(me->group, &p)); /* without waits; the others are told by the next call */
  EXPECT(me, p.operation_count == 1, "%u operations: expected 1", p.operation_count);
  p = told(me, operations, waits);
  EXPECT(me, p.operation_count == (t->borrow ? 1u : 2u), "%u operations are left", p.operation_count);
  epRunFree(me, &run);
  epGroupFree(me);
}

static void run(ncclEpLayout_t layout, int borrow) {
  static const uint32_t tokens[] = {7, 5, 8, 6};
  uint64_t seed = 3;
  epCase c = {.ranks = RANKS,
              .experts = 4 * RANKS,
              .topk = 3,
              .hidden = 136,
              .maxTokens = 8,
              .layout = layout,
              .type = ncclBfloat16,
              .budget = 8 * RANKS * 3};
  plan t = {.borrow = borrow};
  epTestWorld world = {.ranks = RANKS, .seed = 1, .arg = &t};
  epRoundMake(&t.round, &c, tokens, epPickRandom, &seed);
  epWorldRun(&world, body);
  epRoundFree(&t.round);
}

static void flat(void **state) {
  (void)state;
  run(NCCL_EP_LAYOUT_FLAT, 0);
}

static void expertMajor(void **state) {
  (void)state;
  run(NCCL_EP_LAYOUT_EXPERT_MAJOR, 0);
}

static void borrowed(void **state) {
  (void)state;
  if (!getenv("EP_TEST_DOMAINS")) run(NCCL_EP_LAYOUT_FLAT, 1); /* across domains updates are launches of their own */
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(flat), cmocka_unit_test(expertMajor), cmocka_unit_test(borrowed)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
