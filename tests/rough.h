/* A layer whose results are looked at only as far as they are promised when ranks stop in the middle: queued at once, every row and every
 * rank's part of a sum in whole or not at all. */
#ifndef EP_TESTS_ROUGH_H_
#define EP_TESTS_ROUGH_H_

#include "harness.h"

typedef struct epRough {
  epTestTensor topk, x, w, out, outW, outIdx, y;
  ncclEpHandle_t handle;
} epRough;

void epRoughMake(epTestRank *me, epRough *r, const epRound *round);
/* Update, dispatch and combine, queued. */
void epRoughQueue(epTestRank *me, epRough *r, int flat);
/* The last two alone. */
void epRoughMove(epTestRank *me, epRough *r, int flat);
/* Rows and sums have every rank's part in whole or not at all: elements of a row are the same number. */
void epRoughCheck(epTestRank *me, const epRough *r, const epCase *c, uint32_t tokens);
void epRoughFree(epTestRank *me, epRough *r);

#endif
