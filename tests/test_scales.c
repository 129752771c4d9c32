/* Rows of scales beside token rows (NCCL_EP_DISP_QUANT_FWD) on the emulated fabric: widths, types, both orders of the
 * output, padding, budgets and both passes, byte for byte; and what wrong arguments are told. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "harness.h"

#define LENGTH(a) (sizeof(a) / sizeof((a)[0]))

static const ncclEpLayout_t layouts[] = {NCCL_EP_LAYOUT_FLAT, NCCL_EP_LAYOUT_EXPERT_MAJOR};
static const uint32_t ragged[] = {7, 0, 8, 1, 5};

/* 4-byte columns of scales: S FP32 values. */
static epCase small(uint32_t ranks, ncclEpLayout_t layout, uint32_t scales) {
  return (epCase){.ranks = ranks,
                  .experts = 4 * ranks,
                  .topk = 3,
                  .hidden = 144,
                  .maxTokens = 8,
                  .layout = layout,
                  .type = ncclFloat8e4m3,
                  .align = 4,
                  .scales = scales,
                  .scaleType = ncclFloat32};
}

/* 4, 56 and 224 bytes, and more than a warp's words: the rows of 128, 7168 (UE8M0 and FP32) and 16384 elements. */
static void widthsRanksAndOrders(void **state) {
  (void)state;
  static const uint32_t widths[] = {1, 14, 56, 128};
  for (size_t l = 0; l < LENGTH(layouts); l++)
    for (size_t w = 0; w < LENGTH(widths); w++)
      for (uint32_t ranks = 1; ranks <= 5; ranks++)
        for (int columns = 0; columns < 2; columns++) {
          epCase c = small(ranks, layouts[l], widths[w]);
          c.scaleColumns = columns;
          epCaseRunRandom(&c, ragged, 2);
        }
}

/* Many schedules of one shape, the real one's proportions: two rows a chunk, scales behind weights. */
static void manySchedules(void **state) {
  (void)state;
  for (size_t l = 0; l < LENGTH(layouts); l++) {
    epCase c = small(2, layouts[l], 14);
    c.hidden = 4096, c.topk = 8, c.experts = 16, c.scaleColumns = l != 0;
    epCaseRunRandom(&c, (uint32_t[]){8, 6}, 12);
    c = small(3, layouts[l], 56);
    c.scaleColumns = l == 0, c.maxTokens = 40;
    epCaseRunRandom(&c, (uint32_t[]){40, 33, 17}, 8);
  }
}

static void typesOfTokensAndScales(void **state) {
  (void)state;
  static const struct {
    ncclDataType_t tokens, scales;
    uint32_t hidden, count;
  } cases[] = {{ncclFloat8e4m3, ncclFloat32, 7168, 56}, {ncclFloat8e5m2, ncclFloat32, 128, 1},
               {ncclFloat8e4m3, ncclUint8, 7168, 56},   {ncclFloat8e4m3, ncclInt32, 7168, 14},
               {ncclFloat4x2, ncclFloat8e4m3, 64, 8},   {ncclBfloat16, ncclBfloat16, 136, 2},
               {ncclFloat16, ncclFloat16, 64, 6},       {ncclFloat32, ncclUint8, 20, 4},
               {ncclUint8, ncclFloat8e5m2, 48, 12}};
  for (size_t l = 0; l < LENGTH(layouts); l++)
    for (size_t i = 0; i < LENGTH(cases); i++) {
      epCase c = small(2, layouts[l], cases[i].count);
      c.type = cases[i].tokens, c.scaleType = cases[i].scales, c.hidden = cases[i].hidden;
      c.scaleColumns = (int)(i + l) % 2;
      epCaseRunRandom(&c, (uint32_t[]){5, 4}, 2);
    }
}

static int64_t pickMixed(const epCase *c, uint32_t rank, uint32_t token, uint32_t k, void *arg) {
  static const int64_t rows[4][3] = {{-1, -1, -1}, {0, -1, 5}, {-1, 1, -1}, {7, 1, 2}};
  (void)c, (void)arg;
  return rows[(token + rank) % 4][k];
}

static void minusOneEntries(void **state) {
  (void)state;
  for (size_t l = 0; l < LENGTH(layouts); l++)
    for (int columns = 0; columns < 2; columns++) {
      epCase c = small(2, layouts[l], 14);
      epRound round;
      c.scaleColumns = columns;
      epRoundMake(&round, &c, (uint32_t[]){8, 5}, pickMixed, NULL);
      epCaseRun(&c, &round, 1, 4);
      epRoundFree(&round);
    }
}

/* New routings and batch sizes on one handle; a budget that is larger than needed, or so small that rows are dropped.
 */
static void changingBatchesAndBudgets(void **state) {
  (void)state;
  static const uint32_t tokens[][2] = {{5, 0}, {0, 8}, {0, 0}, {8, 7}};
  static const uint32_t budgets[] = {0, 100, 9};
  for (size_t l = 0; l < LENGTH(layouts); l++)
    for (size_t b = 0; b < LENGTH(budgets); b++) {
      epCase c = small(2, layouts[l], 14);
      epRound rounds[LENGTH(tokens)];
      c.budget = budgets[b], c.scaleColumns = (int)(b + l) % 2;
      for (size_t i = 0; i < LENGTH(tokens); i++) {
        uint64_t seed = 77 + i;
        epRoundMake(&rounds[i], &c, tokens[i], epPickRandom, &seed);
      }
      epCaseRun(&c, rounds, LENGTH(tokens), 3);
      for (size_t i = 0; i < LENGTH(tokens); i++) epRoundFree(&rounds[i]);
    }
}

static void paddingIsLeftAlone(void **state) {
  (void)state;
  for (size_t l = 0; l < LENGTH(layouts); l++)
    for (int columns = 0; columns < 2; columns++) {
      epCase c = small(3, layouts[l], 14);
      c.align = 16, c.noZeroPad = 1, c.scaleColumns = columns;
      epCaseRunRandom(&c, ragged, 2);
    }
  epCase c = small(2, NCCL_EP_LAYOUT_EXPERT_MAJOR, 0); /* also without scales */
  c.align = 16, c.noZeroPad = 1, c.type = ncclBfloat16;
  epCaseRunRandom(&c, ragged, 2);
}

/* ---- Wrong arguments
 * ---------------------------------------------------------------------------------------------------------- */

/* A call that is right until one thing is changed. */
typedef struct trial {
  epRun run;
  uint64_t rows;
  ncclEpDispatchInputs_t in;
  ncclEpDispatchOutputs_t out;
  ncclEpDispatchConfig_t config;
  ncclEpDispatchExtConfig_t ext;
  ncclEpTensor_t inScales, outScales;
  size_t inSizes[2], outSizes[2];
} trial;

static void rightAgain(trial *t) {
  t->in = NCCL_EP_DISPATCH_INPUTS_INIT, t->out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  t->config = NCCL_EP_DISPATCH_CONFIG_INIT, t->ext = NCCL_EP_DISPATCH_EXT_CONFIG_INIT;
  t->config.quant_recipe = NCCL_EP_DISP_QUANT_FWD;
  t->inScales = t->run.scales.t, t->outScales = t->run.outScales.t;
  memcpy(t->inSizes, t->run.scales.sizes, sizeof(t->inSizes));
  memcpy(t->outSizes, t->run.outScales.sizes, sizeof(t->outSizes));
  t->inScales.sizes = t->inSizes, t->outScales.sizes = t->outSizes;
  t->in.tokens = &t->run.x.t, t->in.topk_weights = &t->run.w.t, t->in.scales = &t->inScales;
  t->out.tokens = &t->run.out.t, t->out.topk_weights = &t->run.outW.t, t->out.scales = &t->outScales;
}

static ncclResult_t attempt(trial *t) {
  return ncclEpDispatchExt(t->run.handle, &t->in, &t->out, NULL, &t->config, &t->ext, NULL);
}

static void wrongScales(epTestRank *me, trial *t) {
#define REFUSED(change, want, words)           \
  do {                                         \
    rightAgain(t);                             \
    change;                                    \
    EXPECT_ERROR(me, attempt(t), want, words); \
  } while (0)
  REFUSED(t->in.scales = NULL, ncclInvalidArgument, "inputs.scales is NULL|2-dimensional");
  REFUSED(t->out.scales = NULL, ncclInvalidArgument, "outputs.scales is NULL|2-dimensional");
  REFUSED(t->config.quant_recipe = NCCL_EP_DISP_QUANT_NONE, ncclInvalidArgument,
          "inputs.scales is given|expected NULL|NCCL_EP_DISP_QUANT_FWD");
  REFUSED((t->config.quant_recipe = NCCL_EP_DISP_QUANT_NONE, t->in.scales = NULL), ncclInvalidArgument,
          "outputs.scales is given|expected NULL");
  REFUSED(t->config.quant_recipe = NCCL_EP_DISP_QUANT_DS_FP8E3M4, ncclInvalidUsage,
          "quant_recipe is NCCL_EP_DISP_QUANT_DS_FP8E3M4|NCCL_EP_DISP_QUANT_FWD in high throughput");
  REFUSED(t->config.quant_recipe = (ncclEpDispQuant_t)9, ncclInvalidArgument, "quant_recipe is 9");
  REFUSED(t->config.round_scales = 1, ncclInvalidUsage, "round_scales is 1: expected 0");
  REFUSED(t->inScales.ndim = 1, ncclInvalidArgument, "inputs.scales has 1 dimensions: expected 2");
  REFUSED(t->inScales.magic = 0, ncclInvalidArgument, "inputs.scales is not an initialised descriptor");
  REFUSED(t->inScales.datatype = ncclFloat64, ncclInvalidArgument, "inputs.scales is float64: expected float32");
  REFUSED(t->inScales.datatype = ncclFloat4x2, ncclInvalidArgument, "inputs.scales is float4x2: expected float32");
  REFUSED(t->inSizes[0]++, ncclInvalidArgument, "inputs.scales.sizes[0] is 9: expected 8 (tokens)");
  REFUSED(t->inSizes[1] = 0, ncclInvalidArgument, "inputs.scales has 0 bytes: expected a multiple of 4");
  REFUSED((t->inScales.datatype = ncclUint8, t->inSizes[1] = 6), ncclInvalidArgument,
          "a row of inputs.scales has 6 bytes: expected a multiple of 4");
  REFUSED((t->inScales.datatype = ncclBfloat16, t->inSizes[1] = 3), ncclInvalidArgument, "6 bytes|multiple of 4");
  REFUSED(t->inSizes[1] = 37, ncclInvalidArgument, "148 bytes of inputs.scales|160|max_token_bytes, 288");
  REFUSED(t->inSizes[1] = SIZE_MAX / 4 + 2, ncclInvalidArgument, "inputs.scales.sizes[1]|expected at most 65536");
  REFUSED(t->inScales.data = (char *)t->inScales.data + 2, ncclInvalidArgument, "inputs.scales|multiple of 4");
  REFUSED(t->inScales.data = &t->inSizes, ncclInvalidArgument, "inputs.scales|not memory of this group's device");
  REFUSED(t->inScales.data = NULL, ncclInvalidArgument, "inputs.scales has neither data nor a window");
  REFUSED(t->outScales.ndim = 3, ncclInvalidArgument, "outputs.scales has 3 dimensions: expected 2");
  REFUSED(t->outScales.datatype = ncclInt32, ncclInvalidArgument, "outputs.scales is int32: expected float32");
  REFUSED(t->outSizes[0]--, ncclInvalidArgument, "outputs.scales.sizes[0]|rows of outputs.tokens");
  REFUSED(t->outSizes[1]++, ncclInvalidArgument, "outputs.scales.sizes[1] is 15: expected 14");
  REFUSED(t->outScales.data = (char *)t->outScales.data + 1, ncclInvalidArgument, "outputs.scales|multiple of 4");
}

static void wrongOptions(epTestRank *me, trial *t) {
#define COLUMNS t->ext.scale_layout = NCCL_EP_SCALE_COLUMN_MAJOR
#define STRIDE(n) (COLUMNS, t->ext.scale_column_stride = (n))
  REFUSED(t->ext.size = 8, ncclInvalidArgument, "ext_config has size 8");
  REFUSED(t->ext.magic = 1, ncclInvalidArgument, "ext_config has magic 0x1");
  REFUSED(t->ext.scale_layout = (ncclEpScaleLayout_t)7, ncclInvalidArgument, "ext_config.scale_layout is 7");
  REFUSED(t->ext.scale_column_stride = 4096, ncclInvalidArgument, "scale_column_stride is 4096: expected 0");
  REFUSED(STRIDE(4 * t->rows + 4), ncclInvalidArgument, "scale_column_stride|multiple of 16");
  REFUSED(STRIDE((4 * t->rows - 1) / 16 * 16), ncclInvalidArgument, "scale_column_stride|at least|4 bytes for each");
  REFUSED((COLUMNS, t->outScales.data = (char *)t->outScales.data + 4), ncclInvalidArgument,
          "outputs.scales|multiple of 16");
  REFUSED((COLUMNS, t->config.quant_recipe = NCCL_EP_DISP_QUANT_NONE), ncclInvalidArgument,
          "NCCL_EP_SCALE_COLUMN_MAJOR|NCCL_EP_DISP_QUANT_FWD");
#undef STRIDE
#undef COLUMNS
#undef REFUSED
  rightAgain(t);
  EXPECT_OK(me, attempt(t)); /* what was changed was what was wrong */
  EXPECT_OK(me, ncclEpDispatchExt(t->run.handle, &t->in, &t->out, NULL, &t->config, NULL, NULL));
  EXPECT_OK(me, ncclEpDispatch(t->run.handle, &t->in, &t->out, NULL, &t->config, NULL));
}

static void wrongBody(epTestRank *me) {
  const epRound *round = me->arg;
  trial t = {.rows = round->ref->rank[0].needed};
  epGroupMake(me, round->c);
  if (!me->group) return;
  epRunUpdate(me, &t.run, round);
  epRunDispatch(me, &t.run);
  t.rows = t.run.out.sizes[0];
  wrongScales(me, &t);
  wrongOptions(me, &t);
  EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
  epRunFree(me, &t.run);
  epGroupFree(me);
}

static void wrongArgumentsAreNamed(void **state) {
  (void)state;
  epCase c = small(1, NCCL_EP_LAYOUT_EXPERT_MAJOR, 14);
  epRound round;
  uint64_t seed = 12;
  epRoundMake(&round, &c, (uint32_t[]){8}, epPickRandom, &seed);
  epTestWorld world = {.ranks = 1, .seed = 31, .arg = &round};
  epWorldRun(&world, wrongBody);
  epRoundFree(&round);
}

/* ---- Sizes, and compiling ahead
 * ------------------------------------------------------------------------------------------------ */

static void aheadBody(epTestRank *me) {
  const epRound *round = me->arg;
  const epCase *c = round->c;
  epRun run = {0};
  ncclEpBufferSizeConfig_t sizing = NCCL_EP_BUFFER_SIZE_CONFIG_INIT;
  ncclEpBufferSize_t sizes = NCCL_EP_BUFFER_SIZE_INIT;
  ncclEpGroupProperties_t properties = NCCL_EP_GROUP_PROPERTIES_INIT;
  ncclEpPrepareConfig_t prepare = NCCL_EP_PREPARE_CONFIG_INIT;
  epGroupMake(me, c);
  if (!me->group) return;
  sizing.num_experts = c->experts, sizing.max_tokens = c->maxTokens, sizing.hidden = c->hidden, sizing.top_k = c->topk;
  sizing.datatype = c->type, sizing.scale_bytes = 4 * c->scales, sizing.combine_datatype = ncclBfloat16;
  EXPECT_OK(me, ncclEpCalculateBufferSize(me->comm, &sizing, &sizes));
  EXPECT_OK(me, ncclEpGetGroupProperties(me->group, &properties));
  EXPECT(me, sizes.window_bytes == properties.window_bytes, "%zu bytes calculated, %zu in the group",
         sizes.window_bytes, properties.window_bytes);
  sizing.scale_bytes = 6;
  EXPECT_ERROR(me, ncclEpCalculateBufferSize(me->comm, &sizing, &sizes), ncclInvalidArgument, "scale_bytes is 6");
  sizing.scale_bytes = 4, sizing.combine_datatype = (ncclDataType_t)77;
  EXPECT_ERROR(me, ncclEpCalculateBufferSize(me->comm, &sizing, &sizes), ncclInvalidArgument, "combine_datatype is 77");
  prepare.layout = c->layout, prepare.hidden = c->hidden, prepare.top_k = c->topk, prepare.index_type = ncclInt64;
  prepare.dispatch_type = c->type, prepare.combine_type = ncclBfloat16, prepare.backward = 1;
  prepare.scale_bytes = 4 * c->scales;
  EXPECT_OK(me, ncclEpPrepare(me->group, &prepare));
  prepare.scale_bytes = 6;
  EXPECT_ERROR(me, ncclEpPrepare(me->group, &prepare), ncclInvalidArgument, "6 bytes: expected a multiple of 4");
  prepare.scale_bytes = 148;
  EXPECT_ERROR(me, ncclEpPrepare(me->group, &prepare), ncclInvalidArgument, "148 bytes|max_token_bytes");
  epRunUpdate(me, &run, round);
  epRunDispatch(me, &run);
  epRunFree(me, &run);
  epGroupFree(me);
}

static void sizesAndKernelsAhead(void **state) {
  (void)state;
  epCase c = small(2, NCCL_EP_LAYOUT_FLAT, 14);
  epRound round;
  uint64_t seed = 13;
  epRoundMake(&round, &c, (uint32_t[]){8, 3}, epPickRandom, &seed);
  epTestWorld world = {.ranks = 2, .seed = 32, .arg = &round};
  epWorldRun(&world, aheadBody);
  epRoundFree(&round);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(widthsRanksAndOrders),      cmocka_unit_test(manySchedules),
      cmocka_unit_test(typesOfTokensAndScales),    cmocka_unit_test(minusOneEntries),
      cmocka_unit_test(changingBatchesAndBudgets), cmocka_unit_test(paddingIsLeftAlone),
      cmocka_unit_test(wrongArgumentsAreNamed),    cmocka_unit_test(sizesAndKernelsAhead),
  };
  return cmocka_run_group_tests_name("scales", tests, NULL, NULL);
}
