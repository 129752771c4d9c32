/* What mask_plan.h says. */
#include "mask_plan.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "masks.h"

/* The same decisions, without those that go to the rank that is gone, or through it, and without its own. */
typedef struct source {
  uint64_t seed;
  epRound lost;
} source;

static int64_t pick(const epCase *c, uint32_t rank, uint32_t token, uint32_t k, void *arg) {
  source *s = arg;
  int64_t e = epPickRandom(c, rank, token, k, &s->seed);
  return e >= 0 && epRoundLost(&s->lost, (int)rank, (int)(e / (c->experts / c->ranks))) ? -1 : e;
}

void epRoundsMake(maskRounds *r, const epCase *c, int ups) {
  uint32_t tokens[EP_TEST_MAX_RANKS];
  source all = {.seed = 77}, some = {.seed = 77, .lost = {.gone = GONE + 1, .ups = ups}};
  for (uint32_t i = 0; i < c->ranks; i++) tokens[i] = c->maxTokens - i % 3;
  epRoundMake(&r->whole, c, tokens, pick, &all);
  tokens[GONE] = 0;
  epRoundMake(&r->without, c, tokens, pick, &some);
  r->holes = r->masked = r->whole;
  r->holes.gone = GONE + 1, r->holes.ups = ups;
  if (ups) r->masked.silent = GONE + 1, r->masked.ups = ups;
  r->masked.ref = r->without.ref, r->masked.flat = r->without.flat;
}

void epRoundsFree(maskRounds *r) {
  epRoundFree(&r->whole);
  epRoundFree(&r->without);
}

void epPlanRun(epTestWorld *world, void (*body)(epTestRank *me)) {
  maskPlan *p = world->arg;
  assert_int_equal(pthread_barrier_init(&p->meet, NULL, (unsigned)world->ranks), 0);
  epWorldRun(world, body);
  pthread_barrier_destroy(&p->meet);
}

void epPlanLayer(epTestRank *me, epRun *run, const epRound *round) {
  epRunUpdate(me, run, round);
  epRunDispatch(me, run);
  epRunCombine(me, run);
}

void epPlanLeave(epTestRank *me, pthread_barrier_t *meet) {
  if (me->rank != GONE) EXPECT_OK(me, ncclEpEmuRankStop(me->comm, 1, NEVER)); /* nobody comes for it any more */
  pthread_barrier_wait(meet);
  if (me->rank == GONE) epGroupFree(me);
  pthread_barrier_wait(meet);
  if (me->rank == GONE) return;
  EXPECT_OK(me, ncclEpEmuRankStop(me->comm, 0, 0));
  epGroupFree(me);
}
