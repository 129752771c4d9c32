/* What tests of a rank that stops in a group with masks have in common, in one scale-up domain and among several: what it is compared with,
 * and how it begins and ends. */
#ifndef EP_TESTS_MASK_PLAN_H_
#define EP_TESTS_MASK_PLAN_H_

#include <pthread.h>

#include "harness.h"

typedef enum { STOPPED, BY_HAND } how;

typedef struct maskPlan {
  const epRound *whole;  /* all ranks */
  const epRound *holes;  /* routed by all, moved without the one that is gone */
  const epRound *masked; /* without it, and without what it stands for, from the update on */
  int phase;             /* it stops before: 0 update, 1 dispatch, 2 combine */
  how how;               /* with BY_HAND the caller masks the rank itself */
  int back;              /* it is re-admitted */
  pthread_barrier_t meet;
} maskPlan;

/* Every rank's own decisions stay what they are: what is compared with knows of the hole. */
typedef struct maskRounds {
  epRound whole, holes, masked, without;
} maskRounds;

/* `ups`: ranks of a scale-up domain, 0 where there is one. */
void epRoundsMake(maskRounds *r, const epCase *c, int ups);
void epRoundsFree(maskRounds *r);

/* Runs `body` on all ranks, world->arg being a plan whose barrier is made for them. */
void epPlanRun(epTestWorld *world, void (*body)(epTestRank *me));

/* Update, dispatch, combine. */
void epPlanLayer(epTestRank *me, epRun *run, const epRound *round);
/* Groups are freed while the rank that is gone is stopped for the others, and they for it. */
void epPlanLeave(epTestRank *me, pthread_barrier_t *meet);

#endif
