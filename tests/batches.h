/* Micro-batches on one group: routings drawn from a seed, dispatch and combine of each whole or in parts, with experts that give back what
 * they get, so that the sums prove both. */
#ifndef EP_TESTS_BATCHES_H_
#define EP_TESTS_BATCHES_H_

#include "harness.h"

#define BATCHES 3
#define TOPK 3u
#define HIDDEN 136u
#define MOST 7u /* tokens of a rank */

typedef struct setting {
  int lowLatency;
  ncclEpLayout_t layout;
  int windows; /* dispatch's output tokens are window-backed */
  int zeroTokens;
  unsigned inFlight; /* max_in_flight */
  int masks;         /* enable_mask */
  int gone;          /* a rank whose part of the sums is missing, plus 1 */
  int ups;           /* as in epRound */
  uint64_t timeoutNs;
  int copies;    /* no update borrows topk_idx */
  uint64_t seed; /* of routings and drawn scripts */
  const char *script;
  unsigned steps; /* of a drawn script */
} setting;

/* One micro-batch: a routing after the other on one handle. */
typedef struct batch {
  ncclEpHandle_t handle;
  epTestTensor idx, x, w, out, outW, outIdx, y;
  ncclWindow_t window;
  int64_t choice[MOST][TOPK];
  uint32_t tokens;
  unsigned round;
  cudaStream_t stream; /* of its calls */
} batch;

uint64_t epDrawn(const setting *s, unsigned b, unsigned round, uint64_t what);
void epSettingGroup(epTestRank *me, const setting *s);
void epBatchMake(epTestRank *me, const setting *s, batch *b);
void epBatchFree(epTestRank *me, batch *b);
/* New routing and new tokens in the same memory: epBatchFill, then the update. */
void epBatchFill(epTestRank *me, const setting *s, batch *b, unsigned number);
void epBatchRoute(epTestRank *me, const setting *s, batch *b, unsigned number);
void epBatchUpdate(epTestRank *me, const setting *s, batch *b, unsigned number);
ncclResult_t epBatchDispatch(epTestRank *me, const setting *s, batch *b, int sendOnly,
                             const ncclEpDispatchExtConfig_t *ext);
ncclResult_t epBatchCombine(epTestRank *me, const setting *s, batch *b, int sendOnly,
                            const ncclEpCombineExtConfig_t *ext);
/* Waits for the batch's stream. */
void epBatchCheck(epTestRank *me, const setting *s, const batch *b, unsigned number);

/* Two batches in flight: both are sent, both completed, number `first` before the other; a round of all, checked. */
void epBatchesSend(epTestRank *me, const setting *s, batch *b, int combine);
void epBatchesComplete(epTestRank *me, batch *b, int first);
void epBatchesStaged(epTestRank *me, const setting *s, batch *b);

#endif
