/* Ranks an operation apart: one calls something else than the others, or along another handle. All are told so within the operation, each by
 * the name of a rank that is elsewhere and of what both are in; nobody hangs; the group is lost, and a new one works. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "batches.h"

static unsigned schedules(void) { /* EP_TEST_SCHEDULES: more than continuous integration takes */
  const char *text = getenv("EP_TEST_SCHEDULES");
  return text ? (unsigned)atoi(text) : 3;
}

typedef struct apart {
  setting s;
  const char *most, *odd; /* calls of most ranks and of the odd one: letters of step() with the number of a batch */
  int odds;               /* the odd rank */
  const char *words[2];   /* that the reports of most ranks and of the odd one have */
} apart;

/* u update, d and c whole operations, D and C their sending parts, e complete. */
static ncclResult_t step(epTestRank *me, const setting *s, batch *b, char what, unsigned number) {
  switch (what) {
  case 'u':
    epBatchUpdate(me, s, b, number);
    return ncclSuccess;
  case 'd':
  case 'D':
    return epBatchDispatch(me, s, b, what == 'D', NULL);
  case 'c':
  case 'C':
    return epBatchCombine(me, s, b, what == 'C', NULL);
  default:
    return ncclEpComplete(b->handle, NULL, NULL);
  }
}

static void steps(epTestRank *me, const setting *s, batch *batches, const char *script) {
  for (; *script; script += 2) {
    unsigned number = (unsigned)(script[1] - '0');
    ncclResult_t r = step(me, s, &batches[number], script[0], number);
    EXPECT(me, r == ncclSuccess, "%.2s: %s", script, ncclEpGetLastErrorString());
  }
}

static void make(epTestRank *me, const setting *s, batch *batches) {
  epSettingGroup(me, s);
  memset(batches, 0, BATCHES * sizeof *batches);
  for (unsigned b = 0; b < BATCHES && me->group; b++) epBatchMake(me, s, &batches[b]);
}

static void leave(epTestRank *me, batch *batches) {
  for (unsigned b = 0; b < BATCHES; b++) epBatchFree(me, &batches[b]);
  EXPECT_OK(me, ncclEpGroupDestroy(me->group));
  me->group = NULL;
}

static void apartBody(epTestRank *me) {
  const apart *a = me->arg;
  int odd = me->rank == a->odds, error = -1;
  char here[32];
  batch batches[BATCHES];
  ncclEpErrorInfo_t info = NCCL_EP_ERROR_INFO_INIT;
  make(me, &a->s, batches);
  if (!me->group) return;
  steps(me, &a->s, batches, a->s.script);
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
  epExpectNoAsyncError(me);
  steps(me, &a->s, batches, odd ? a->odd : a->most);
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
  EXPECT_OK(me, ncclEpGetAsyncError(me->group, &error));
  EXPECT_OK(me, ncclEpGetErrorInfo(me->group, &info));
  EXPECT(me, error == 1 && info.code == 8 && info.rank == me->rank, "async error %d, code %d: %s", error, info.code,
         info.text);
  EXPECT(me, odd ? info.peer != me->rank && info.peer >= 0 && info.peer < me->ranks : info.peer == a->odds,
         "peer %d: %s", info.peer, info.text);
  snprintf(here, sizeof here, "rank %d is in ", info.peer);
  EXPECT(me, strstr(info.text, here) && strstr(info.text, a->words[odd]) && info.phase[0] && info.expected == info.seen,
         "no \"%s\" with \"%s\" in: %s", here, a->words[odd], info.text);
  EXPECT_OK(me, ncclEpErrorClear(me->group));
  EXPECT(me, epBatchDispatch(me, &a->s, &batches[2], 0, NULL) != ncclSuccess, "the group goes on");
  leave(me, batches);
  make(me, &a->s, batches); /* on the same communicator */
  if (!me->group) return;
  steps(me, &a->s, batches, "u0d0c0");
  epBatchCheck(me, &a->s, &batches[0], 0);
  epExpectNoAsyncError(me);
  leave(me, batches);
}

static void run(const apart *a, int ranks) {
  for (unsigned s = 0; s < schedules(); s++) {
    apart one = *a;
    epTestWorld world = {.ranks = ranks, .seed = 40 + s, .arg = &one, .seconds = 60};
    one.s.seed = 11 + s;
    one.s.inFlight = 2;
    one.s.copies = 1;
    one.odds = (int)(s % (unsigned)ranks);
    epWorldRun(&world, apartBody);
  }
}

/* Every pair of calls that can be made instead of each other. */
static void pairs(int ranks, int lowLatency, ncclEpLayout_t layout, const char *handle) {
  setting s = {.lowLatency = lowLatency, .layout = layout, .script = "u0u1d0d1"};
  const apart all[] = {
      {s, "d0", "c0", 0, {"combine (operation 3), while", "dispatch (operation 3), while"}},
      {s, "c0", "d0", 0, {"dispatch (operation 3), while", "combine (operation 3), while"}},
      {s, "c0", "c1", 0, {handle, handle}},
      {s, "D0e0", "C0e0", 0, {"combine (operation 1), while", "dispatch (operation 1), while"}},
      {s, "C0e0", "C1e1", 0, {handle, handle}},
  };
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) run(&all[i], ranks);
}

static void highThroughput(void **state) {
  (void)state;
  pairs(3, 0, NCCL_EP_LAYOUT_FLAT, "along another update's handle");
  pairs(2, 0, NCCL_EP_LAYOUT_EXPERT_MAJOR, "along another update's handle");
}

static void lowLatency(void **state) {
  (void)state;
  pairs(3, 1, NCCL_EP_LAYOUT_RANK_MAJOR, "along another dispatch's handle");
  pairs(3, 1, NCCL_EP_LAYOUT_EXPERT_MAJOR, "along another dispatch's handle");
}

/* High throughput alone: a dispatch goes along an update. */
static void otherHandle(void **state) {
  (void)state;
  const apart a = {{.layout = NCCL_EP_LAYOUT_FLAT, .script = "u0u1"},
                   "d0",
                   "d1",
                   0,
                   {"along another update's handle", "along another update's handle"}};
  run(&a, 3);
}

static void masked(void **state) {
  (void)state;
  for (int l = 0; l < 2; l++) {
    const apart a = {{.lowLatency = l,
                      .layout = l ? NCCL_EP_LAYOUT_RANK_MAJOR : NCCL_EP_LAYOUT_FLAT,
                      .masks = 1,
                      .script = "u0u1d0d1"},
                     "d0",
                     "c0",
                     0,
                     {"combine (operation 3), while", "dispatch (operation 3), while"}};
    run(&a, 3);
  }
}

/* EP_TEST_DOMAINS of the environment has no say here. */
static void domains(void **state) {
  (void)state;
  setenv("EP_TEST_DOMAINS", "2", 1);
  pairs(4, 0, NCCL_EP_LAYOUT_FLAT, "along another update's handle");
  pairs(2, 0, NCCL_EP_LAYOUT_EXPERT_MAJOR, "along another update's handle");
  setenv("EP_TEST_DOMAINS", "1", 1);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(highThroughput), cmocka_unit_test(lowLatency),
                                     cmocka_unit_test(otherHandle), cmocka_unit_test(masked),
                                     cmocka_unit_test(domains)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
