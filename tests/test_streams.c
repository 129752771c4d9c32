/* Streams and events of calls on the emulated fabric: the communication stream, events before a call, before its epilogue and behind
 * it, wait-and-complete. Buffers are overwritten as soon as the header allows: the fabric's checkers would report a store that nothing
 * orders, and the sums would be wrong. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "batches.h"

enum { EVENTS = 6 };

/* A group with two batches, streams and events of the caller. */
typedef struct bench {
  const setting *s;
  batch b[2];
  cudaStream_t compute, other;
  cudaEvent_t e[EVENTS];
} bench;

static void openBench(epTestRank *me, bench *t) {
  memset(t, 0, sizeof *t);
  t->s = me->arg;
  epSettingGroup(me, t->s);
  EXPECT_OK(me, ncclEpEmuStreamCreate(me->comm, &t->compute));
  EXPECT_OK(me, ncclEpEmuStreamCreate(me->comm, &t->other));
  for (int i = 0; i < EVENTS; i++) EXPECT_OK(me, ncclEpEmuEventCreate(me->comm, &t->e[i]));
  for (int i = 0; i < 2; i++) {
    epBatchMake(me, t->s, &t->b[i]);
    t->b[i].stream = t->compute;
  }
}

static void closeBench(epTestRank *me, bench *t) {
  epExpectNoAsyncError(me);
  for (int i = 0; i < 2; i++) epBatchFree(me, &t->b[i]);
  epGroupFree(me);
  for (int i = 0; i < EVENTS; i++) EXPECT_OK(me, ncclEpEmuEventDestroy(me->comm, t->e[i]));
  EXPECT_OK(me, ncclEpEmuStreamDestroy(me->comm, t->compute));
  EXPECT_OK(me, ncclEpEmuStreamDestroy(me->comm, t->other));
}

static void spoil(epTestRank *me, const epTestTensor *t, cudaStream_t stream) {
  EXPECT_OK(me, ncclEpEmuMemset(me->comm, t->t.data, 0x5a, t->bytes, stream));
}

/* Dispatch's inputs; the weights of 3-D expert-major are combine's. */
static void spoilInputs(epTestRank *me, const bench *t, const batch *b, cudaStream_t stream) {
  spoil(me, &b->x, stream);
  spoil(me, &b->idx, stream);
  if (!t->s->lowLatency || t->s->layout == NCCL_EP_LAYOUT_RANK_MAJOR) spoil(me, &b->w, stream);
}

/* Both batches' operations on the communication stream; the compute stream waits for events alone. */
static void communicationBody(epTestRank *me) {
  bench t;
  cudaStream_t own = NULL, again = NULL;
  openBench(me, &t);
  EXPECT_OK(me, ncclEpGetCommunicationStream(me->group, &own));
  EXPECT_OK(me, ncclEpGetCommunicationStream(me->group, &again));
  EXPECT(me, own && own == again, "another communication stream");
  for (unsigned round = 0; round < 2; round++) {
    ncclEpDispatchExtConfig_t d = NCCL_EP_DISPATCH_EXT_CONFIG_INIT;
    ncclEpCombineExtConfig_t c = NCCL_EP_COMBINE_EXT_CONFIG_INIT;
    d.communication_stream = c.communication_stream = 1;
    for (unsigned i = 0; i < 2; i++) {
      epBatchUpdate(me, t.s, &t.b[i], i);
      d.done_event = t.e[i];
      EXPECT_OK(me, epBatchDispatch(me, t.s, &t.b[i], 0, &d));
    }
    for (unsigned i = 0; i < 2; i++) {
      EXPECT_OK(me, ncclEpEmuStreamWaitEvent(me->comm, t.compute, t.e[i]));
      spoilInputs(me, &t, &t.b[i], t.compute);
      if (t.s->lowLatency && t.s->layout != NCCL_EP_LAYOUT_RANK_MAJOR) /* after all that `stream` holds */
        c.start_event = NULL;
      else /* of all that is there, the rows are what it needs */
        c.start_event = t.e[i];
      c.done_event = t.e[2 + i];
      EXPECT_OK(me, epBatchCombine(me, t.s, &t.b[i], 0, &c));
    }
    for (unsigned i = 0; i < 2; i++) {
      EXPECT_OK(me, ncclEpEmuStreamWaitEvent(me->comm, t.compute, t.e[2 + i]));
      spoil(me, &t.b[i].out, t.compute);
      epBatchCheck(me, t.s, &t.b[i], i);
    }
  }
  closeBench(me, &t);
}

/* Sent on the communication stream, completed on the compute stream, once; then the other way round. */
static void deferredBody(epTestRank *me) {
  bench t;
  openBench(me, &t);
  for (unsigned round = 0; round < 2; round++) {
    ncclEpDispatchExtConfig_t d = NCCL_EP_DISPATCH_EXT_CONFIG_INIT;
    ncclEpCompleteExtConfig_t e = NCCL_EP_COMPLETE_EXT_CONFIG_INIT;
    ncclEpDeferred_t later[2] = {NCCL_EP_DEFERRED_INIT, NCCL_EP_DEFERRED_INIT};
    d.communication_stream = 1;
    for (unsigned i = 0; i < 2; i++) {
      epBatchUpdate(me, t.s, &t.b[i], i);
      d.done_event = later[i].event = round ? t.e[i] : NULL;
      later[i].handle = t.b[i].handle;
      EXPECT_OK(me, epBatchDispatch(me, t.s, &t.b[i], 1, &d));
    }
    for (unsigned i = 0; i < 2; i++) {
      EXPECT_OK(me, ncclEpDeferredRun(&later[i], t.compute));
      EXPECT_OK(me, ncclEpDeferredRun(&later[i], t.compute));
      EXPECT(me, later[i].done == 1, "done is %d", later[i].done);
      spoilInputs(me, &t, &t.b[i], t.compute);
      EXPECT_OK(me, epBatchCombine(me, t.s, &t.b[i], 1, NULL));
    }
    for (unsigned i = 0; i < 2; i++) {
      e.communication_stream = 1, e.done_event = t.e[2 + i];
      EXPECT_OK(me, ncclEpCompleteExt(t.b[i].handle, &e, t.compute));
      EXPECT_OK(me, ncclEpCompleteExt(t.b[i].handle, &e, t.compute)); /* nothing there: the event again */
      EXPECT_OK(me, ncclEpEmuStreamWaitEvent(me->comm, t.compute, t.e[2 + i]));
      spoil(me, &t.b[i].out, t.compute);
      epBatchCheck(me, t.s, &t.b[i], i);
    }
  }
  closeBench(me, &t);
}

/* On the caller's own streams: what a call waits for is written, or read, on another stream until just before. */
static void eventsBody(epTestRank *me) {
  bench t;
  epTestTensor spare, sums;
  openBench(me, &t);
  batch *b = &t.b[0];
  epTensorMake(me, &spare, ncclUint8, 1, b->out.bytes, 0, "a copy of rows");
  epTensorMake(me, &sums, ncclUint8, 1, b->y.bytes, 0, "a copy of sums");
  for (unsigned round = 0; round < 3; round++) {
    ncclEpDispatchExtConfig_t d = NCCL_EP_DISPATCH_EXT_CONFIG_INIT;
    ncclEpCombineExtConfig_t c = NCCL_EP_COMBINE_EXT_CONFIG_INIT;
    b->stream = t.other; /* the inputs come from there */
    epBatchFill(me, t.s, b, 0);
    EXPECT_OK(me, ncclEpEmuEventRecord(me->comm, t.e[0], t.other));
    if (round) EXPECT_OK(me, ncclEpEmuMemcpy(me->comm, spare.t.data, b->out.t.data, b->out.bytes, t.other));
    EXPECT_OK(me, ncclEpEmuEventRecord(me->comm, t.e[1], t.other));
    b->stream = t.compute;
    EXPECT_OK(me, ncclEpEmuStreamWaitEvent(me->comm, t.compute, t.e[0]));
    epBatchRoute(me, t.s, b, 0);
    d.start_event = t.e[0], d.epilogue_event = t.s->windows ? NULL : t.e[1], d.done_event = t.e[2];
    if (t.s->windows)
      d.start_event = t.e[1]; /* peers store into the output from the start on: they wait for what this rank tells */
    EXPECT_OK(me, epBatchDispatch(me, t.s, b, 0, &d));
    EXPECT_OK(me, ncclEpEmuStreamWaitEvent(me->comm, t.other, t.e[2]));
    spoil(me, &b->x, t.other);
    EXPECT_OK(me, ncclEpEmuMemcpy(me->comm, sums.t.data, b->y.t.data, b->y.bytes, t.other));
    EXPECT_OK(me, ncclEpEmuEventRecord(me->comm, t.e[3], t.other));
    c.epilogue_event = t.e[3], c.done_event = t.e[4];
    EXPECT_OK(me, epBatchCombine(me, t.s, b, 0, &c));
    epBatchCheck(me, t.s, b, 0);
    EXPECT_OK(me, ncclEpEmuStreamWaitEvent(me->comm, t.other, t.e[4]));
    spoil(me, &b->w, t.other);
  }
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, t.other));
  epTensorFree(me, &spare);
  epTensorFree(me, &sums);
  closeBench(me, &t);
}

/* Once a group has a stream of its own, calls run in the order in which they were made, on whatever streams. */
static void orderBody(epTestRank *me) {
  bench t;
  cudaStream_t own;
  openBench(me, &t);
  EXPECT_OK(me, ncclEpGetCommunicationStream(me->group, &own));
  for (unsigned round = 0; round < 4; round++) { /* some of them borrow topk_idx */
    batch *b = &t.b[0];
    b->stream = round % 2 ? t.other : t.compute;
    epBatchUpdate(me, t.s, b, 0);
    b->stream = round % 2 ? t.compute : t.other;
    EXPECT_OK(me, epBatchDispatch(me, t.s, b, 1, NULL));
    EXPECT_OK(me, ncclEpComplete(b->handle, NULL, t.compute));
    EXPECT_OK(me, epBatchCombine(me, t.s, b, 0, NULL));
    epBatchCheck(me, t.s, b, 0);
  }
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, t.compute));
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, t.other));
  closeBench(me, &t);
}

static pthread_barrier_t meeting;

/* Rank 0's own stream comes to its end while rank 1 has not even called. */
static void freeBody(epTestRank *me) {
  bench t;
  ncclEpDispatchExtConfig_t d = NCCL_EP_DISPATCH_EXT_CONFIG_INIT;
  openBench(me, &t);
  epBatchUpdate(me, t.s, &t.b[0], 0);
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, t.compute));
  d.communication_stream = 1, d.done_event = t.e[0];
  if (me->rank) pthread_barrier_wait(&meeting);
  EXPECT_OK(me, epBatchDispatch(me, t.s, &t.b[0], 0, &d));
  if (!me->rank) {
    EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, t.compute));
    pthread_barrier_wait(&meeting);
  }
  EXPECT_OK(me, ncclEpEmuStreamWaitEvent(me->comm, t.compute, t.e[0]));
  EXPECT_OK(me, epBatchCombine(me, t.s, &t.b[0], 0, NULL));
  epBatchCheck(me, t.s, &t.b[0], 0);
  closeBench(me, &t);
}

static void refusedBody(epTestRank *me) {
  bench t;
  int nothing = 0;
  cudaEvent_t unknown = (cudaEvent_t)(void *)&nothing;
  ncclEpDispatchExtConfig_t d = NCCL_EP_DISPATCH_EXT_CONFIG_INIT;
  ncclEpCombineExtConfig_t c = NCCL_EP_COMBINE_EXT_CONFIG_INIT;
  ncclEpCompleteExtConfig_t e = NCCL_EP_COMPLETE_EXT_CONFIG_INIT;
  ncclEpDeferred_t later = NCCL_EP_DEFERRED_INIT;
  openBench(me, &t);
  batch *b = &t.b[0];
  epBatchUpdate(me, t.s, b, 0);
  d.communication_stream = 1;
  EXPECT_ERROR(me, epBatchDispatch(me, t.s, b, 0, &d), ncclInvalidArgument,
               "ext_config.done_event is NULL|communication_stream");
  d.communication_stream = 2, d.done_event = t.e[0];
  EXPECT_ERROR(me, epBatchDispatch(me, t.s, b, 0, &d), ncclInvalidArgument, "ext_config.communication_stream is 2");
  d.communication_stream = 0, d.epilogue_event = t.e[1];
  EXPECT_ERROR(me, epBatchDispatch(me, t.s, b, 1, &d), ncclInvalidArgument, "ext_config.epilogue_event|send_only");
  d.epilogue_event = NULL, d.start_event = unknown;
  EXPECT_ERROR(me, epBatchDispatch(me, t.s, b, 0, &d), ncclInvalidArgument, "event");
  c.start_event = unknown;
  EXPECT_ERROR(me, epBatchCombine(me, t.s, b, 0, &c), t.s->lowLatency ? ncclInvalidUsage : ncclInvalidArgument, "");
  e.communication_stream = 1;
  EXPECT_ERROR(me, ncclEpCompleteExt(b->handle, &e, t.compute), ncclInvalidArgument,
               "ncclEpCompleteExt|config.done_event is NULL");
  e.communication_stream = 0, e.start_event = unknown;
  EXPECT_ERROR(me, ncclEpCompleteExt(b->handle, &e, t.compute), ncclInvalidArgument, "event");
  EXPECT_ERROR(me, ncclEpDeferredRun(NULL, t.compute), ncclInvalidArgument, "ncclEpDeferredRun|deferred is NULL");
  EXPECT_ERROR(me, ncclEpDeferredRun(&later, t.compute), ncclInvalidArgument, "ncclEpDeferredRun|handle");
  EXPECT(me, later.done == 0, "done after a failure");
  EXPECT_ERROR(me, ncclEpGetCommunicationStream(NULL, NULL), ncclInvalidArgument, "ncclEpGetCommunicationStream");
  EXPECT_ERROR(me, ncclEpGetCommunicationStream(me->group, NULL), ncclInvalidArgument, "stream is NULL");
  /* Found out when the work is queued already: it goes on, so that the ranks stay in step. */
  d.start_event = NULL, d.epilogue_event = unknown;
  EXPECT_ERROR(me, epBatchDispatch(me, t.s, b, 0, &d), ncclInvalidArgument,
               "ncclEpDispatchExt|epilogue_event|under way");
  d.epilogue_event = NULL, d.done_event = unknown;
  EXPECT_ERROR(me, epBatchDispatch(me, t.s, b, 0, &d), ncclInvalidArgument, "ncclEpDispatchExt|done_event|under way");
  EXPECT_OK(me, epBatchDispatch(me, t.s, b, 0, NULL));
  EXPECT_OK(me, epBatchCombine(me, t.s, b, 0, NULL));
  epBatchCheck(me, t.s, b, 0);
  closeBench(me, &t);
}

/* ---- Worlds --------------------------------------------------------------------------------------------------------- */

static const setting modes[] = {{.layout = NCCL_EP_LAYOUT_FLAT},
                                {.layout = NCCL_EP_LAYOUT_FLAT, .windows = 1},
                                {.layout = NCCL_EP_LAYOUT_EXPERT_MAJOR},
                                {.lowLatency = 1, .layout = NCCL_EP_LAYOUT_RANK_MAJOR},
                                {.lowLatency = 1, .layout = NCCL_EP_LAYOUT_EXPERT_MAJOR}};

static void everyMode(void (*body)(epTestRank *me), int ranks, unsigned seeds) {
  const char *text = getenv("EP_TEST_SCHEDULES");
  if (text) seeds = (unsigned)atoi(text);
  for (size_t m = 0; m < sizeof modes / sizeof modes[0]; m++)
    for (unsigned seed = 1; seed <= seeds; seed++) {
      setting s = modes[m];
      epTestWorld world = {.ranks = ranks, .seed = seed, .arg = &s};
      s.seed = seed;
      epWorldRun(&world, body);
    }
}

static void communication(void **state) {
  (void)state;
  everyMode(communicationBody, 3, 2);
}
static void deferred(void **state) {
  (void)state;
  everyMode(deferredBody, 3, 2);
}
static void events(void **state) {
  (void)state;
  everyMode(eventsBody, 3, 2);
}
static void acrossDomains(void **state) {
  (void)state;
  setenv("EP_TEST_DOMAINS", "2", 1);
  everyMode(communicationBody, 4, 1);
  everyMode(deferredBody, 4, 1);
  everyMode(eventsBody, 4, 1);
  unsetenv("EP_TEST_DOMAINS");
}
static void order(void **state) {
  (void)state;
  everyMode(orderBody, 3, 2);
}
static void callerIsFree(void **state) {
  (void)state;
  assert_int_equal(pthread_barrier_init(&meeting, NULL, 2), 0);
  everyMode(freeBody, 2, 1);
  pthread_barrier_destroy(&meeting);
}
static void refused(void **state) {
  (void)state;
  everyMode(refusedBody, 2, 1);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(communication), cmocka_unit_test(deferred),
                                     cmocka_unit_test(events),        cmocka_unit_test(acrossDomains),
                                     cmocka_unit_test(order),         cmocka_unit_test(callerIsFree),
                                     cmocka_unit_test(refused)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
