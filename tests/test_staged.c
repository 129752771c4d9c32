/* Operations in two parts on the emulated fabric: scripts of calls over several batches of one group, the same on all ranks, drawn or
 * written down; experts give back what dispatch brought them, so what combine returns proves both. And what is refused, what
 * a handle or a rank leaves behind, and what a group that may have none or three in flight says. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "batches.h"

/* u update, d and c whole operations, D and C their sending parts, e complete, k check. */
static void step(epTestRank *me, const setting *s, batch *batches, char what, unsigned number) {
  batch *b = &batches[number];
  switch (what) {
  case 'u':
    epBatchUpdate(me, s, b, number);
    break;
  case 'd':
  case 'D':
    EXPECT_OK(me, epBatchDispatch(me, s, b, what == 'D', NULL));
    break;
  case 'c':
  case 'C':
    EXPECT_OK(me, epBatchCombine(me, s, b, what == 'C', NULL));
    break;
  case 'e':
    EXPECT_OK(me, ncclEpComplete(b->handle, NULL, NULL));
    break;
  default:
    epBatchCheck(me, s, b, number);
  }
}

/* Any order in which each batch goes through its own steps, with at most two in flight. of: each batch's own setting. */
static void drawnScript(epTestRank *me, const setting *s, const setting *const of[BATCHES], batch *batches) {
  char next[BATCHES] = {'u', 'u', 'u'};
  int flying = 0;
  for (unsigned i = 0, done = 0; done < s->steps || flying; i++) {
    uint64_t v = epDrawn(s, 99, i, 0);
    unsigned number = (unsigned)(v % BATCHES), whole = v / BATCHES % 3 == 0;
    char now = next[number];
    if (done >= s->steps && now != 'e' && now != 'E') continue; /* only what is in flight goes on */
    if (!whole && (now == 'd' || now == 'c') && flying == 2) continue;
    if (now == 'd' || now == 'c') {
      step(me, of[number], batches, whole ? now : now == 'd' ? 'D' : 'C', number);
      flying += !whole;
      next[number] = whole ? (now == 'd' ? 'c' : 'k') : now == 'd' ? 'e' : 'E'; /* e: of a dispatch, E: of a combine */
    } else {
      step(me, of[number], batches, now == 'E' ? 'e' : now, number);
      flying -= now == 'e' || now == 'E';
      next[number] = now == 'u'   ? 'd'
                     : now == 'e' ? 'c'
                     : now == 'E' ? 'k'
                     : v / 9 % 3  ? 'u'
                                  : 'd'; /* or again on the same routing */
    }
    done++;
  }
}

static void scriptBody(epTestRank *me) {
  const setting *s = me->arg;
  batch batches[BATCHES] = {0};
  epSettingGroup(me, s);
  for (unsigned i = 0; i < BATCHES; i++) epBatchMake(me, s, &batches[i]);
  for (const char *p = s->script; p && *p; p += p[1] == 0 ? 1 : 2)
    if (*p == ' ')
      p--;
    else
      step(me, s, batches, *p, (unsigned)(p[1] - '0'));
  if (!s->script) drawnScript(me, s, (const setting *const[]){s, s, s}, batches);
  epExpectNoAsyncError(me);
  for (unsigned i = 0; i < BATCHES; i++) epBatchFree(me, &batches[i]);
  epGroupFree(me);
}

static void run(setting s, int ranks, unsigned domains, unsigned seeds, unsigned sms) {
  char text[8];
  snprintf(text, sizeof text, "%u", domains);
  setenv("EP_TEST_DOMAINS", text, 1);
  for (unsigned seed = 1; seed <= seeds; seed++) {
    s.seed = seed;
    epTestWorld world = {.ranks = ranks, .seed = seed, .sms = sms, .arg = &s};
    epWorldRun(&world, scriptBody);
  }
  unsetenv("EP_TEST_DOMAINS");
}

/* Both in flight and completed in the other order; a combine beside a dispatch; whole operations between the parts. */
static const char *const scripts[] = {"u0D0e0e0C0e0k0e0", "u0u1D0D1e1e0C1C0e1e0k0k1",
                                      "u0u1d0D1C0e0e1k0C1u0D0e1k1e0C0e0k0", "u0u1u2D0d1c1e0C0d2c2e0k0k1k2",
                                      "u0u1D0e0C0D1u2d2e0c2e1k0k2c1k1"};
static const struct {
  int lowLatency;
  ncclEpLayout_t layout;
} modes[] = {{0, NCCL_EP_LAYOUT_FLAT},
             {0, NCCL_EP_LAYOUT_EXPERT_MAJOR},
             {1, NCCL_EP_LAYOUT_RANK_MAJOR},
             {1, NCCL_EP_LAYOUT_EXPERT_MAJOR}};

static void written(void **state) {
  (void)state;
  for (size_t m = 0; m < sizeof modes / sizeof modes[0]; m++)
    for (size_t i = 0; i < sizeof scripts / sizeof scripts[0]; i++)
      run((setting){.lowLatency = modes[m].lowLatency, .layout = modes[m].layout, .script = scripts[i]}, 3, 1, 1, 0);
}

static unsigned wanted(unsigned few) {
  const char *text = getenv("EP_TEST_SCHEDULES");
  return text ? (unsigned)atoi(text) : few;
}

static void anyOrder(void **state) {
  (void)state;
  for (size_t m = 0; m < sizeof modes / sizeof modes[0]; m++) {
    setting s = {.lowLatency = modes[m].lowLatency, .layout = modes[m].layout, .steps = 30};
    run(s, 4, 1, wanted(2), 0);
    s.windows = 1;
    if (m == 0) run(s, 4, 1, wanted(2), 0);
  }
}

/* Low latency and high throughput by turns: two groups, three handles. */
static void turnsBody(epTestRank *me) {
  const setting *s = me->arg;
  batch batches[BATCHES] = {0};
  setting flat = *s, major = *s;
  ncclEpGroup_t low;
  flat.lowLatency = major.lowLatency = 0;
  flat.layout = NCCL_EP_LAYOUT_FLAT, major.layout = NCCL_EP_LAYOUT_EXPERT_MAJOR;
  epSettingGroup(me, s);
  low = me->group;
  epBatchMake(me, s, &batches[0]);
  epSettingGroup(me, &flat);
  epBatchMake(me, &flat, &batches[1]), epBatchMake(me, &major, &batches[2]);
  drawnScript(me, s, (const setting *const[]){s, &flat, &major}, batches);
  epExpectNoAsyncError(me);
  for (unsigned i = 0; i < BATCHES; i++) epBatchFree(me, &batches[i]);
  epGroupFree(me);
  me->group = low;
  epExpectNoAsyncError(me);
  epGroupFree(me);
}

static void algorithmsTakeTurns(void **state) {
  (void)state;
  for (int masks = 0; masks < 2; masks++)
    for (unsigned seed = 1; seed <= wanted(2); seed++) {
      setting s = {.lowLatency = 1, .masks = masks, .steps = 25, .seed = seed};
      epTestWorld world = {.ranks = 8, .seed = seed, .sms = seed % 3 == 1 ? 3 : 0, .arg = &s};
      s.layout = seed % 2 ? NCCL_EP_LAYOUT_RANK_MAJOR : NCCL_EP_LAYOUT_EXPERT_MAJOR;
      epWorldRun(&world, turnsBody);
    }
}

/* The same with 8 ranks as 2 domains of 4. */
static void algorithmsTakeTurnsAcrossDomains(void **state) {
  (void)state;
  setenv("EP_TEST_DOMAINS", "2", 1);
  for (unsigned seed = 1; seed <= wanted(2); seed++) {
    setting s = {.lowLatency = 1, .steps = 25, .seed = seed};
    epTestWorld world = {.ranks = 8, .seed = seed, .sms = seed % 3 == 1 ? 3 : 0, .arg = &s};
    s.layout = seed % 2 ? NCCL_EP_LAYOUT_RANK_MAJOR : NCCL_EP_LAYOUT_EXPERT_MAJOR;
    epWorldRun(&world, turnsBody);
  }
  unsetenv("EP_TEST_DOMAINS");
}

static void anyOrderAcrossDomains(void **state) {
  (void)state;
  for (size_t m = 0; m < sizeof modes / sizeof modes[0]; m++) {
    setting s = {.lowLatency = modes[m].lowLatency, .layout = modes[m].layout, .steps = 20};
    run(s, 4, 2, wanted(1), 0);
    run(s, 8, 2, wanted(m == 1), 0);
  }
}

/* One block resident at a time: nobody may wait for who is not there yet. */
static void fewBlocks(void **state) {
  (void)state;
  for (size_t m = 0; m < sizeof modes / sizeof modes[0]; m++)
    run((setting){.lowLatency = modes[m].lowLatency, .layout = modes[m].layout, .script = scripts[1]}, 3, 1, 1, 1);
  for (size_t m = 2; m < sizeof modes / sizeof modes[0]; m++)
    run((setting){.lowLatency = 1, .layout = modes[m].layout, .script = scripts[1]}, 4, 2, 1, 1);
}

static void noTokens(void **state) {
  (void)state;
  for (size_t m = 0; m < sizeof modes / sizeof modes[0]; m++)
    for (int ranks = 1; ranks <= 2; ranks++)
      run(
          (setting){
              .lowLatency = modes[m].lowLatency, .layout = modes[m].layout, .zeroTokens = 1, .script = scripts[1]},
          ranks, 1, 1, 0);
  run((setting){.layout = NCCL_EP_LAYOUT_FLAT, .zeroTokens = 1, .script = scripts[2]}, 2, 2, 1, 0);
  run((setting){.lowLatency = 1, .layout = NCCL_EP_LAYOUT_EXPERT_MAJOR, .zeroTokens = 1, .script = scripts[2]}, 2, 2, 1,
      0);
}

/* ---- Refusals, and what is left behind ------------------------------------------------------------------------------- */

static void refusalsBody(epTestRank *me) {
  const setting *s = me->arg;
  batch b[BATCHES] = {0};
  ncclEpGroupProperties_t properties = NCCL_EP_GROUP_PROPERTIES_INIT;
  ncclEpPrepareConfig_t prepare = NCCL_EP_PREPARE_CONFIG_INIT;
  size_t sizes[2];
  epSettingGroup(me, s);
  EXPECT_OK(me, ncclEpGetGroupProperties(me->group, &properties));
  EXPECT(me, properties.max_in_flight == 2, "max_in_flight is %d", properties.max_in_flight);
  prepare.layout = s->layout, prepare.hidden = HIDDEN, prepare.top_k = TOPK, prepare.in_flight = 3;
  prepare.dispatch_type = prepare.combine_type = ncclBfloat16, prepare.index_type = ncclInt64;
  EXPECT_ERROR(me, ncclEpPrepare(me->group, &prepare), ncclInvalidArgument, "in_flight is 3|at most max_in_flight, 2");
  prepare.in_flight = 1;
  EXPECT_OK(me, ncclEpPrepare(me->group, &prepare));
  for (unsigned i = 0; i < BATCHES; i++) epBatchMake(me, s, &b[i]), epBatchUpdate(me, s, &b[i], i);
  ncclEpTensor_t idx = b[0].idx.t;
  sizes[0] = b[0].tokens, sizes[1] = TOPK, idx.sizes = sizes;
  EXPECT_OK(me, ncclEpComplete(b[0].handle, NULL, NULL)); /* nothing there */
  EXPECT_OK(me, epBatchDispatch(me, s, &b[0], 1, NULL));
  EXPECT_ERROR(me, epBatchDispatch(me, s, &b[0], 1, NULL), ncclInvalidUsage,
               "staged dispatch of the handle|ncclEpComplete before");
  EXPECT_ERROR(me, epBatchDispatch(me, s, &b[0], 0, NULL), ncclInvalidUsage, "staged dispatch of the handle");
  EXPECT_ERROR(me, epBatchCombine(me, s, &b[0], 0, NULL), ncclInvalidUsage, "staged dispatch of the handle");
  EXPECT_ERROR(me, ncclEpUpdateHandle(b[0].handle, &idx, NULL, NULL), ncclInvalidUsage,
               "ncclEpUpdateHandle|staged dispatch of the handle");
  EXPECT_OK(me, epBatchDispatch(me, s, &b[1], 1, NULL));
  EXPECT_ERROR(me, epBatchDispatch(me, s, &b[2], 1, NULL), ncclInvalidUsage, "2 staged operations|max_in_flight, 2");
  EXPECT_OK(me, epBatchDispatch(me, s, &b[2], 0, NULL)); /* a whole one needs no room */
  EXPECT_OK(me, ncclEpComplete(b[0].handle, NULL, NULL));
  EXPECT_OK(me, epBatchCombine(me, s, &b[0], 1, NULL));
  EXPECT_ERROR(me, ncclEpUpdateHandle(b[0].handle, &idx, NULL, NULL), ncclInvalidUsage, "staged combine of the handle");
  EXPECT_OK(me, ncclEpComplete(b[0].handle, NULL, NULL));
  epBatchCheck(me, s, &b[0], 0);
  /* batch 1 goes with its operation: the room that took is gone, the other one serves */
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
  epBatchFree(me, &b[1]);
  for (unsigned i = 0; i < 3; i++) {
    EXPECT_OK(me, epBatchCombine(me, s, &b[2], 1, NULL));
    EXPECT_ERROR(me, epBatchDispatch(me, s, &b[0], 1, NULL), ncclInvalidUsage, "2 staged operations");
    EXPECT_OK(me, ncclEpComplete(b[2].handle, NULL, NULL));
    epBatchCheck(me, s, &b[2], 2);
  }
  epExpectNoAsyncError(me);
  EXPECT_OK(me, epBatchDispatch(me, s, &b[2], 1, NULL)); /* and the group goes with one in flight */
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
  epGroupFree(me);
  EXPECT_ERROR(me, ncclEpComplete(b[2].handle, NULL, NULL), ncclInvalidArgument, "has been destroyed");
  epBatchFree(me, &b[0]);
  epBatchFree(me, &b[2]);
}

static void refusals(void **state) {
  (void)state;
  for (size_t m = 0; m < sizeof modes / sizeof modes[0]; m++) {
    setting s = {.lowLatency = modes[m].lowLatency, .layout = modes[m].layout, .seed = 5};
    epTestWorld world = {.ranks = 2, .seed = 3, .arg = &s};
    epWorldRun(&world, refusalsBody);
  }
}

/* Rank 1 never sends: rank 0's completion gives up, what is queued behind it ends, too, and the group can be destroyed. */
static void absentBody(epTestRank *me) {
  const setting *s = me->arg;
  batch b[2] = {0};
  int error = 0;
  ncclEpErrorInfo_t info = NCCL_EP_ERROR_INFO_INIT;
  ncclEpPrepareConfig_t prepare = NCCL_EP_PREPARE_CONFIG_INIT;
  epSettingGroup(me, s);
  prepare.layout = s->layout, prepare.hidden = HIDDEN, prepare.top_k = TOPK, prepare.in_flight = 2;
  prepare.dispatch_type = prepare.combine_type = ncclBfloat16, prepare.index_type = ncclInt64;
  EXPECT_OK(me, ncclEpPrepare(me->group, &prepare)); /* else the first send would wait for all on the host */
  for (unsigned i = 0; i < 2; i++) epBatchMake(me, s, &b[i]), epBatchUpdate(me, s, &b[i], i);
  if (me->rank == 0) {
    EXPECT_OK(me,
              ncclEpEmuMemset(me->comm, b[0].out.t.data, 0, b[0].out.bytes, NULL)); /* combine's rows, come what may */
    for (unsigned i = 0; i < 2; i++) EXPECT_OK(me, epBatchDispatch(me, s, &b[i], 1, NULL));
    EXPECT_OK(me, ncclEpComplete(b[0].handle, NULL, NULL));
    EXPECT_OK(me, epBatchCombine(me, s, &b[0], 0, NULL));
    EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
    EXPECT_OK(me, ncclEpGetAsyncError(me->group, &error));
    EXPECT_OK(me, ncclEpGetErrorInfo(me->group, &info));
    EXPECT(me, error == 1 && info.code == 1 && info.peer == 1, "error %d, code %d, peer %d", error, info.code,
           info.peer);
    EXPECT_ERROR(me, ncclEpComplete(b[1].handle, NULL, NULL), ncclRemoteError, "ncclEpComplete|lost|rank 1");
    EXPECT_ERROR(me, epBatchCombine(me, s, &b[0], 1, NULL), ncclRemoteError, "lost");
  }
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
  for (unsigned i = 0; i < 2; i++) epBatchFree(me, &b[i]);
  epGroupFree(me);
}

static void absentRank(void **state) {
  (void)state;
  for (size_t m = 0; m < sizeof modes / sizeof modes[0]; m++) {
    setting s = {.lowLatency = modes[m].lowLatency, .layout = modes[m].layout, .seed = 5, .copies = 1};
    epTestWorld world = {.ranks = 2, .seed = 4, .arg = &s};
    epWorldRun(&world, absentBody);
  }
}

static void noneBody(epTestRank *me) {
  const setting *s = me->arg;
  batch b = {0};
  epSettingGroup(me, s);
  epBatchMake(me, s, &b), epBatchUpdate(me, s, &b, 0);
  EXPECT_ERROR(me, epBatchDispatch(me, s, &b, 1, NULL), ncclInvalidUsage, "0 staged operations|max_in_flight, 0");
  EXPECT_OK(me, epBatchDispatch(me, s, &b, 0, NULL));
  EXPECT_OK(me, epBatchCombine(me, s, &b, 0, NULL));
  epBatchCheck(me, s, &b, 0);
  epBatchFree(me, &b);
  epGroupFree(me);
}

/* In a group with masks: cut by an event, and beside a re-admission, which must not find any in flight. */
static void maskedBody(epTestRank *me) {
  const setting *s = me->arg;
  batch b = {0};
  cudaEvent_t event = NULL;
  ncclEpDispatchExtConfig_t d = NCCL_EP_DISPATCH_EXT_CONFIG_INIT;
  ncclEpCombineExtConfig_t c = NCCL_EP_COMBINE_EXT_CONFIG_INIT;
  epSettingGroup(me, s);
  EXPECT_OK(me, ncclEpEmuEventCreate(me->comm, &event));
  epBatchMake(me, s, &b), epBatchUpdate(me, s, &b, 0);
  d.epilogue_event = c.epilogue_event = event;
  EXPECT_OK(me, epBatchDispatch(me, s, &b, 0, &d));
  EXPECT_OK(me, epBatchCombine(me, s, &b, 0, &c));
  epBatchCheck(me, s, &b, 0);
  EXPECT_OK(me, epBatchDispatch(me, s, &b, 1, NULL));
  EXPECT_ERROR(me, ncclEpMaskClean(me->group, NULL), ncclInvalidUsage,
               "ncclEpMaskClean|1 staged operation of the group is in flight|ncclEpComplete before");
  EXPECT_OK(me, ncclEpComplete(b.handle, NULL, NULL));
  EXPECT_OK(me, ncclEpMaskClean(me->group, NULL));
  epBatchUpdate(me, s, &b, 0);
  EXPECT_OK(me, epBatchDispatch(me, s, &b, 1, NULL));
  EXPECT_OK(me, ncclEpComplete(b.handle, NULL, NULL));
  EXPECT_OK(me, epBatchCombine(me, s, &b, 0, NULL));
  epBatchCheck(me, s, &b, 0);
  epExpectNoAsyncError(me);
  epBatchFree(me, &b);
  epGroupFree(me);
  EXPECT_OK(me, ncclEpEmuEventDestroy(me->comm, event));
}

static void masks(void **state) {
  (void)state;
  for (size_t m = 0; m < sizeof modes / sizeof modes[0]; m++) {
    setting s = {.lowLatency = modes[m].lowLatency, .layout = modes[m].layout, .seed = 5, .masks = 1};
    epTestWorld world = {.ranks = 2, .seed = 4, .arg = &s};
    epWorldRun(&world, maskedBody);
    s.script = scripts[4];
    run(s, 3, 1, 1, 0);
    s.script = NULL, s.steps = 30;
    run(s, 4, 1, wanted(1), 0);
    s.script = scripts[1];
    run(s, 3, 1, 1, 1);
  }
}

static void threeBody(epTestRank *me) {
  const setting *s = me->arg;
  batch b[BATCHES] = {0};
  epSettingGroup(me, s);
  for (unsigned i = 0; i < BATCHES; i++) epBatchMake(me, s, &b[i]), epBatchUpdate(me, s, &b[i], i);
  for (unsigned i = 0; i < BATCHES; i++) EXPECT_OK(me, epBatchDispatch(me, s, &b[i], 1, NULL));
  for (unsigned i = 0; i < BATCHES; i++) EXPECT_OK(me, ncclEpComplete(b[(i + 1) % BATCHES].handle, NULL, NULL));
  for (unsigned i = 0; i < BATCHES; i++) EXPECT_OK(me, epBatchCombine(me, s, &b[i], 1, NULL));
  for (unsigned i = BATCHES; i-- > 0;) EXPECT_OK(me, ncclEpComplete(b[i].handle, NULL, NULL));
  for (unsigned i = 0; i < BATCHES; i++) epBatchCheck(me, s, &b[i], i), epBatchFree(me, &b[i]);
  epGroupFree(me);
}

static void environment(void **state) {
  (void)state;
  setting s = {.layout = NCCL_EP_LAYOUT_FLAT, .seed = 2};
  epTestWorld world = {.ranks = 2, .seed = 3, .arg = &s};
  setenv("NCCL_EP_MAX_IN_FLIGHT", "0", 1);
  epWorldRun(&world, noneBody);
  setenv("NCCL_EP_MAX_IN_FLIGHT", "3", 1);
  s.inFlight = 1; /* overridden */
  epWorldRun(&world, threeBody);
  unsetenv("NCCL_EP_MAX_IN_FLIGHT");
  s.inFlight = 3;
  s.lowLatency = 1, s.layout = NCCL_EP_LAYOUT_EXPERT_MAJOR;
  epWorldRun(&world, threeBody);
}

/* Those whose names match the argument, or all. */
int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(written),
                                     cmocka_unit_test(anyOrder),
                                     cmocka_unit_test(anyOrderAcrossDomains),
                                     cmocka_unit_test(fewBlocks),
                                     cmocka_unit_test(noTokens),
                                     cmocka_unit_test(refusals),
                                     cmocka_unit_test(absentRank),
                                     cmocka_unit_test(environment),
                                     cmocka_unit_test(masks),
                                     cmocka_unit_test(algorithmsTakeTurns),
                                     cmocka_unit_test(algorithmsTakeTurnsAcrossDomains)};
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
