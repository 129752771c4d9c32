/* Offsets beyond 2^31 and 2^32 bytes and elements: low latency's places of the last experts of a group as large as a model's, in a
 * sparse address space. 256 experts, 8192 elements, 2048 tokens a rank: 4.3 * 10^9 elements of output, of which a few rows are
 * written. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "harness.h"

enum { RANKS = 2, EXPERTS = 256, LOCALS = EXPERTS / RANKS, HIDDEN = 8192, MOST = 2048, TOKENS = 3, TOPK = 2 };

static uint16_t elementOf(uint32_t rank, uint32_t t, uint32_t h) {
  return (uint16_t)(0x3f80 | ((rank * TOKENS + t) >> h % 16 & 1) << 15);
}

static void body(epTestRank *me) {
  static const int64_t last[2] = {LOCALS - 1, EXPERTS - 1};
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpCombineInputs_t from = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t sums = NCCL_EP_COMBINE_OUTPUTS_INIT;
  ncclEpTensor_t places = NCCL_EP_TENSOR_INIT;
  size_t extents[3] = {LOCALS, RANKS * MOST, HIDDEN}, bytes = 2 * extents[0] * extents[1] * extents[2];
  epTestTensor topk, x, w, y;
  int64_t idx[TOKENS * TOPK];
  float weights[TOKENS * TOPK];
  uint16_t *rows = malloc(2 * TOKENS * HIDDEN);
  void *memory = NULL;
  ncclEpHandle_t h = NULL;
  int bad = 0;
  config.algorithm = NCCL_EP_ALGO_LOW_LATENCY, config.num_experts = EXPERTS, config.num_topk = TOPK;
  config.max_dispatch_tokens_per_rank = MOST, config.max_token_bytes = 2 * HIDDEN;
  EXPECT_OK(me, ncclEpCreateGroup(&me->group, me->comm, &config));
  EXPECT_OK(me, ncclEpEmuMalloc(me->comm, &memory, bytes, "places"));
  EXPECT(me, rows && bytes >= 1ull << 33, "no memory, or too little of it: %zu bytes", bytes);
  if (!me->group || !memory || !rows) goto done;
  for (uint32_t i = 0; i < TOKENS * TOPK; i++) idx[i] = last[i % TOPK], weights[i] = i % 2 ? 0.5f : 2.0f;
  for (uint32_t i = 0; i < TOKENS * HIDDEN; i++) rows[i] = elementOf((uint32_t)me->rank, i / HIDDEN, i % HIDDEN);
  epTensorMake(me, &topk, ncclInt64, 2, TOKENS, TOPK, "topk_idx");
  epTensorMake(me, &x, ncclBfloat16, 2, TOKENS, HIDDEN, "x");
  epTensorMake(me, &w, ncclFloat32, 2, TOKENS, TOPK, "w");
  epTensorMake(me, &y, ncclBfloat16, 2, TOKENS, HIDDEN, "y");
  epTensorFill(me, &topk, idx), epTensorFill(me, &x, rows), epTensorFill(me, &w, weights);
  places.ndim = 3, places.datatype = ncclBfloat16, places.data = memory, places.sizes = extents;
  in.tokens = &x.t, out.tokens = &places, from.tokens = &places, sums.tokens = &y.t, sums.topk_weights = &w.t;
  EXPECT_OK(me, ncclEpCreateHandle(&h, me->group, NCCL_EP_LAYOUT_EXPERT_MAJOR, &topk.t, NULL, NULL, NULL));
  EXPECT_OK(me, ncclEpDispatch(h, &in, &out, NULL, NULL, NULL));
  EXPECT_OK(me, ncclEpCombine(h, &from, &sums, NULL, NULL));
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
  const uint16_t *got = (const uint16_t *)memory + (size_t)(LOCALS - 1) * RANKS * MOST * HIDDEN;
  for (uint32_t i = 0; i < RANKS * TOKENS * HIDDEN; i++)
    bad += got[i] != elementOf(i / HIDDEN / TOKENS, i / HIDDEN % TOKENS, i % HIDDEN);
  EXPECT(me, !bad, "%d wrong elements of dispatch", bad);
  for (uint32_t i = 0; i < TOKENS * HIDDEN; i++) { /* x * (2 + 0.5) */
    uint16_t w16 = elementOf((uint32_t)me->rank, i / HIDDEN, i % HIDDEN);
    bad += ((const uint16_t *)y.t.data)[i] != (uint16_t)((w16 & 0x8000) | 0x4020);
  }
  EXPECT(me, !bad, "%d wrong elements of combine", bad);
  EXPECT_OK(me, ncclEpHandleDestroy(h));
  epTensorFree(me, &topk), epTensorFree(me, &x), epTensorFree(me, &w), epTensorFree(me, &y);
done:
  free(rows);
  if (memory) EXPECT_OK(me, ncclEpEmuFree(me->comm, memory));
  epGroupFree(me);
}

static void farOffsets(void **state) {
  (void)state;
  epTestWorld world = {.ranks = RANKS};
  epWorldRun(&world, body);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(farOffsets)};
  return cmocka_run_group_tests_name("far", tests, NULL, NULL);
}
