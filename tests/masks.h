/* What tests of masks look at: the simulated time, the mask, and who is named. */
#ifndef EP_TESTS_MASKS_H_
#define EP_TESTS_MASKS_H_

#include <string.h>

#include "harness.h"

#define GONE 1 /* the rank that stops */
#define TIMEOUT_NS 50000000ull
#define NEVER (~0ull)

static inline unsigned long long clockOf(epTestRank *me) {
  ncclEpEmuReport_t report = NCCL_EP_EMU_REPORT_INIT;
  EXPECT_OK(me, ncclEpEmuGetReport(me->comm, &report));
  EXPECT(me, report.faults == 0, "the fabric reports: %s", report.text);
  return report.clock_ns;
}

static inline void expectMask(epTestRank *me, const char *when, int gone) {
  int *mask = NULL;
  EXPECT_OK(me, ncclEpEmuMalloc(me->comm, (void **)&mask, sizeof(int) * (size_t)me->ranks, "mask"));
  if (!mask) return;
  EXPECT_OK(me, ncclEpMaskQuery(me->group, mask, NULL));
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
  for (int r = 0; r < me->ranks; r++) EXPECT(me, mask[r] == (r != gone), "%s: mask[%d] is %d", when, r, mask[r]);
  EXPECT_OK(me, ncclEpEmuFree(me->comm, mask));
}

static inline void expectNamed(epTestRank *me) {
  ncclEpErrorInfo_t info = NCCL_EP_ERROR_INFO_INIT;
  int error = -1;
  EXPECT_OK(me, ncclEpGetAsyncError(me->group, &error));
  EXPECT_OK(me, ncclEpGetErrorInfo(me->group, &info));
  EXPECT(me, error == 1 && info.code == 1 && info.peer == GONE && info.rank == me->rank && info.phase[0],
         "async error %d, code %d, peer %d, rank %d, phase \"%s\"", error, info.code, info.peer, info.rank, info.phase);
  EXPECT(me, strstr(info.text, "is masked"), "%s", info.text);
  EXPECT_OK(me, ncclEpErrorClear(me->group));
  EXPECT_OK(me, ncclEpGetAsyncError(me->group, &error));
  EXPECT(me, error == 0, "async error %d after it was cleared", error);
}

/* Between `from` and now somebody was waited for, once. */
static inline void expectOneTimeout(epTestRank *me, unsigned long long from) {
  unsigned long long took = clockOf(me) - from;
  EXPECT(me, took > TIMEOUT_NS / 2 && took < TIMEOUT_NS / 2 * 3, "it took %llu us, with a timeout of %llu", took / 1000,
         TIMEOUT_NS / 1000);
}

/* Nobody was. */
static inline void expectQuick(epTestRank *me, unsigned long long from) {
  unsigned long long took = clockOf(me) - from;
  EXPECT(me, took < TIMEOUT_NS / 4, "%llu us without a wait for anybody", took / 1000);
}

#endif
