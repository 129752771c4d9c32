/* What rough.h says. */
#include "rough.h"

#include <stdlib.h>
#include <string.h>

void epRoughMake(epTestRank *me, epRough *r, const epRound *round) {
  const epCase *c = round->c;
  uint32_t tokens = round->tokens[me->rank], rows = c->ranks * c->maxTokens * c->topk + 64;
  int flat = c->layout == NCCL_EP_LAYOUT_FLAT;
  uint16_t *x = calloc((size_t)tokens * c->hidden + 1, 2);
  float *w = calloc((size_t)tokens * c->topk + 1, sizeof(float));
  ncclEpHandleConfig_t config = NCCL_EP_HANDLE_CONFIG_INIT;
  config.dispatch_output_per_expert_alignment = flat ? 0 : c->align;
  epTensorMake(me, &r->topk, ncclInt64, 2, tokens, c->topk, "topk_idx");
  epTensorMake(me, &r->x, ncclBfloat16, 2, tokens, c->hidden, "tokens");
  epTensorMake(me, &r->w, ncclFloat32, 2, tokens, c->topk, "weights");
  epTensorMake(me, &r->out, ncclBfloat16, 2, rows, c->hidden, "out");
  epTensorMake(me, &r->outW, ncclFloat32, flat ? 2 : 1, rows, c->topk, "out weights");
  epTensorMake(me, &r->outIdx, ncclInt64, 2, rows, c->topk, "out idx");
  epTensorMake(me, &r->y, ncclBfloat16, 2, tokens, c->hidden, "y");
  for (size_t i = 0; x && i < (size_t)tokens * c->hidden; i++) x[i] = 0x3f80;
  for (size_t i = 0; w && i < (size_t)tokens * c->topk; i++) w[i] = 1;
  epTensorFill(me, &r->topk, round->idx[me->rank]);
  epTensorFill(me, &r->x, x);
  epTensorFill(me, &r->w, w);
  free(x), free(w);
  EXPECT_OK(me, ncclEpInitHandle(&r->handle, me->group, c->layout, &config, (int)c->topk, NULL));
}

void epRoughQueue(epTestRank *me, epRough *r, int flat) {
  EXPECT_OK(me, ncclEpUpdateHandle(r->handle, &r->topk.t, NULL, NULL));
  epRoughMove(me, r, flat);
}

void epRoughMove(epTestRank *me, epRough *r, int flat) {
  ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpCombineInputs_t back = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t sums = NCCL_EP_COMBINE_OUTPUTS_INIT;
  in.tokens = &r->x.t, in.topk_weights = &r->w.t, out.tokens = &r->out.t, out.topk_weights = &r->outW.t;
  if (flat) out.topk_idx = &r->outIdx.t;
  back.tokens = &r->out.t, sums.tokens = &r->y.t;
  EXPECT_OK(me, ncclEpDispatch(r->handle, &in, &out, NULL, NULL, NULL));
  EXPECT_OK(me, ncclEpCombine(r->handle, &back, &sums, NULL, NULL));
}

void epRoughCheck(epTestRank *me, const epRough *r, const epCase *c, uint32_t tokens) {
  const uint16_t *y = r->y.t.data;
  for (uint32_t t = 0; t < tokens; t++)
    for (uint32_t h = 1; h < c->hidden; h++)
      if (y[t * c->hidden + h] != y[t * c->hidden]) {
        EXPECT(me, 0, "token %u: element %u is %x, the first one %x", t, h, y[t * c->hidden + h], y[t * c->hidden]);
        return;
      }
}

void epRoughFree(epTestRank *me, epRough *r) {
  epTestTensor *all[] = {&r->topk, &r->x, &r->w, &r->out, &r->outW, &r->outIdx, &r->y};
  EXPECT_OK(me, ncclEpHandleDestroy(r->handle));
  for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
    epTensorCheckGuards(me, all[i], "a tensor");
    epTensorFree(me, all[i]);
  }
}
