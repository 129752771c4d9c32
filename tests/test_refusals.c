/* Wrong arguments of every call, from tables: each tensor of each call in every wrong form, each struct with a wrong header,
 * each object that is none, each output without room, calls in the wrong order. A refusal is a code and one line that begins with
 * the call and names the argument; after all of them the call still works. One emulated rank, both algorithms. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "harness.h"

#define LENGTH(a) (sizeof(a) / sizeof((a)[0]))

enum { EXPERTS = 4, TOPK = 2, HIDDEN = 64, TOKENS = 4, MOST_TOKENS = 8, ROWS = 32, SCALES = 4 };

/* All that the calls of one layout take. */
typedef struct bench {
  epTestRank *me;
  ncclEpLayout_t layout;
  int ll, flat, major3; /* major3: low latency's expert-major */
  ncclEpHandle_t handle;
  epTestTensor topk, x, w, scales, out, outW, outIdx, outScales, y, yW, back, backW, bias, counters, offsets, total,
      sources, backScales;
  ncclEpDispatchInputs_t in;
  ncclEpDispatchOutputs_t result;
  ncclEpLayoutInfo_t info;
  ncclEpDispatchConfig_t config;
  ncclEpDispatchExtConfig_t ext;
  ncclEpCombineInputs_t from;
  ncclEpCombineOutputs_t sums;
  ncclEpCombineConfig_t how;
  ncclEpCombineExtConfig_t howExt;
  ncclEpUpdateExtConfig_t borrow;
} bench;

static void expect(epTestRank *me, const char *what, ncclResult_t got, ncclResult_t want, const char *call,
                   const char *argument) {
  const char *text = ncclEpGetLastErrorString();
  size_t n = strlen(call);
  EXPECT(me, got == want, "%s: %d instead of %d: %s", what, (int)got, (int)want, text);
  EXPECT(me, !strncmp(text, call, n) && text[n] == ':', "%s: the line does not begin with %s: %s", what, call, text);
  EXPECT(me, strstr(text, argument) != NULL, "%s: no \"%s\" in: %s", what, argument, text);
  EXPECT(me, !strchr(text, '\n'), "%s: more than one line: %s", what, text);
}

/* ---- The calls ---------------------------------------------------------------------------------------------------------- */

static ncclResult_t update(bench *b) {
  ncclEpLayoutInfo_t info = b->info;
  if (b->ll) info.expert_counters = info.src_rank_counters = info.recv_total_counter = NULL;
  info.src_rank_counters = NULL;
  return ncclEpUpdateHandleExt(b->handle, &b->topk.t, &info, &b->borrow, NULL);
}
static ncclResult_t dispatch(bench *b) {
  return ncclEpDispatchExt(b->handle, &b->in, &b->result, &b->info, &b->config, &b->ext, NULL);
}
static ncclResult_t combine(bench *b) {
  return ncclEpCombineExt(b->handle, &b->from, &b->sums, &b->how, &b->howExt, NULL);
}
static ncclResult_t backward(bench *b) {
  ncclEpCombineInputs_t from = b->from;
  ncclEpCombineOutputs_t sums = b->sums;
  ncclEpCombineConfig_t how = b->how;
  how.pass_direction = NCCL_EP_BWD_PASS;
  from.topk_weights = &b->backW.t, sums.topk_weights = &b->yW.t;
  return ncclEpCombine(b->handle, &from, &sums, &how, NULL);
}
static ncclResult_t prepareNvfp4(bench *b) {
  ncclEpPrepareConfig_t config = NCCL_EP_PREPARE_CONFIG_INIT;
  config.layout = b->layout, config.hidden = HIDDEN, config.top_k = TOPK, config.index_type = ncclInt64;
  config.dispatch_type = config.combine_type = ncclBfloat16, config.combine_quant = NCCL_EP_COMB_QUANT_NVFP4;
  return ncclEpPrepare(b->me->group, &config);
}
static ncclResult_t create(bench *b) {
  ncclEpHandle_t h = NULL;
  ncclResult_t r = ncclEpCreateHandle(&h, b->me->group, b->layout, &b->topk.t, NULL, NULL, NULL);
  return r == ncclSuccess ? ncclEpHandleDestroy(h) : r;
}

/* ---- Tensors ------------------------------------------------------------------------------------------------------------ */

/* `slot`: where the call finds it, so that it can be left out; NULL: it is passed as it is. */
typedef struct site {
  const char *call, *name;
  ncclResult_t (*make)(bench *b);
  epTestTensor *t;
  ncclEpTensor_t **slot;
  unsigned align; /* that its address needs; 0: any */
  int optional;   /* may be NULL */
  int moreRows;   /* a larger extent 0 is as good */
  unsigned fewer; /* the first so many extents may be smaller */
} site;

static void tried(bench *b, const site *s, const char *form) {
  char what[128];
  snprintf(what, sizeof(what), "layout %d%s, %s of %s, %s", (int)b->layout, b->ll ? " (low latency)" : "", s->name,
           s->call, form);
  expect(b->me, what, s->make(b), ncclInvalidArgument, s->call, s->name);
}

static void wrongTensor(bench *b, const site *s) {
  ncclEpTensor_t good = s->t->t, *t = &s->t->t;
  size_t sizes[3], host[4] = {0};
  memcpy(sizes, s->t->sizes, sizeof(sizes));
  char form[64];
  if (s->slot) {
    ncclEpTensor_t *given = *s->slot;
    if (!s->optional) *s->slot = NULL, tried(b, s, "NULL"), *s->slot = given;
  }
#define FORM(name, change) (change, tried(b, s, name), *t = good)
  FORM("magic", t->magic = 0x1234);
  FORM("size", t->size = 8);
  FORM("one dimension more", t->ndim++);
  FORM("no dimension", t->ndim = 0);
  FORM("no extents", t->sizes = NULL);
  FORM("unknown type", t->datatype = (ncclDataType_t)99);
  FORM("another type", t->datatype = ncclFloat64);
  FORM("no memory", t->data = NULL);
  FORM("host memory", t->data = host);
  if (s->align) FORM("misaligned", t->data = (char *)t->data + s->align / 2);
#undef FORM
  for (unsigned d = 0; d < good.ndim; d++) {
    snprintf(form, sizeof(form), "extent %u", d);
    if (d || !s->moreRows) s->t->sizes[d]++, tried(b, s, form), s->t->sizes[d]--;
    if (d >= s->fewer) s->t->sizes[d]--, tried(b, s, form), s->t->sizes[d]++;
    s->t->sizes[d] = (size_t)1 << 62, tried(b, s, "an extent beyond all memory"), s->t->sizes[d] = sizes[d];
  }
}

static void wrongTensors(bench *b) {
  static const char U[] = "ncclEpUpdateHandleExt", D[] = "ncclEpDispatchExt", C[] = "ncclEpCombineExt";
  const site always[] = {
      {"ncclEpCreateHandle", "topk_idx", create, &b->topk, NULL, 8, 0, 1, 2},
      {U, "topk_idx", update, &b->topk, NULL, 8, 0, 1, 1},
      {D, "inputs.tokens", dispatch, &b->x, &b->in.tokens, 16, 0, 0, 0},
      {D, "inputs.scales", dispatch, &b->scales, &b->in.scales, 4, 0, 0, 0},
      {D, "outputs.tokens", dispatch, &b->out, &b->result.tokens, 16, 0, !b->ll, 0},
      {D, "outputs.scales", dispatch, &b->outScales, &b->result.scales, 4, 0, 0, 0},
      {C, "inputs.tokens", combine, &b->back, &b->from.tokens, 16, 0, !b->ll, 0},
      {C, "outputs.tokens", combine, &b->y, &b->sums.tokens, 16, 0, 0, 0},
  };
  const site weighted[] = {{D, "inputs.topk_weights", dispatch, &b->w, &b->in.topk_weights, 4, 0, 0, 0},
                           {D, "outputs.topk_weights", dispatch, &b->outW, &b->result.topk_weights, 4, 0, 0, 0}};
  const site indexed[] = {{D, "outputs.topk_idx", dispatch, &b->outIdx, &b->result.topk_idx, 4, 0, 0, 0}};
  const site counted[] = {{b->ll ? D : U, "layout_info.expert_counters", b->ll ? dispatch : update, &b->counters,
                           &b->info.expert_counters, 4, 1, 0, 0},
                          {b->ll ? D : U, "layout_info.recv_total_counter", b->ll ? dispatch : update, &b->total,
                           &b->info.recv_total_counter, 4, 1, 0, 0}};
  const site sources = {D, "layout_info.src_rank_counters", dispatch, &b->sources, &b->info.src_rank_counters, 4, 1, 0,
                        0};
  const site offsets = {U, "layout_info.expert_offsets", update, &b->offsets, &b->info.expert_offsets, 4, 1, 0, 0};
  const site bias = {C, "ext_config.bias[0]", combine, &b->bias, NULL, 16, 1, 0, 0};
  const site scales = {C, "inputs.scales", combine, &b->backScales, &b->from.scales, 4, 0, 0, 0};
  const site weights3 = {C, "outputs.topk_weights", combine, &b->yW, &b->sums.topk_weights, 4, 0, 0, 0};
  const site back[] = {{"ncclEpCombine", "inputs.topk_weights", backward, &b->backW, NULL, 4, 0, 0, 0},
                       {"ncclEpCombine", "outputs.topk_weights", backward, &b->yW, NULL, 4, 0, 0, 0}};
  for (size_t i = 0; i < LENGTH(always); i++) wrongTensor(b, &always[i]);
  for (size_t i = 0; i < LENGTH(counted); i++) wrongTensor(b, &counted[i]);
  for (size_t i = 0; i < LENGTH(weighted) && !b->major3; i++) wrongTensor(b, &weighted[i]);
  for (size_t i = 0; i < LENGTH(indexed) && b->result.topk_idx; i++) wrongTensor(b, &indexed[i]);
  for (size_t i = 0; i < LENGTH(back) && !b->ll; i++) wrongTensor(b, &back[i]);
  if (b->ll) wrongTensor(b, &sources);
  if (b->info.expert_offsets) wrongTensor(b, &offsets);
  if (!b->ll) wrongTensor(b, &bias);
  if (b->major3) wrongTensor(b, &weights3);
  if (b->ll) {
    b->how.quant_recipe = NCCL_EP_COMB_QUANT_NVFP4, b->from.scales = &b->backScales.t;
    wrongTensor(b, &scales);
    b->how.quant_recipe = NCCL_EP_COMB_QUANT_NONE, b->from.scales = NULL;
  }
}

/* ---- Tensors that must not be there, values ----------------------------------------------------------------------------- */

/* A change of the bench, undone afterwards. */
#define REFUSED(change, call, want, name, words)          \
  do {                                                    \
    bench kept = *b;                                      \
    change;                                               \
    expect(b->me, #change, (call)(b), want, name, words); \
    *b = kept;                                            \
  } while (0)

static void wrongValues(bench *b) {
  static const char D[] = "ncclEpDispatchExt", C[] = "ncclEpCombineExt", U[] = "ncclEpUpdateHandleExt";
  REFUSED(b->config.quant_recipe = NCCL_EP_DISP_QUANT_NONE, dispatch, ncclInvalidArgument, D, "inputs.scales is given");
  REFUSED(b->config.quant_recipe = (ncclEpDispQuant_t)7, dispatch, ncclInvalidArgument, D, "quant_recipe is 7");
  REFUSED(b->config.pass_direction = (ncclEpPassDir_t)7, dispatch, ncclInvalidArgument, D, "pass_direction is 7");
  REFUSED(b->config.round_scales = 1, dispatch, ncclInvalidUsage, D, "round_scales is 1");
  REFUSED(b->how.pass_direction = (ncclEpPassDir_t)7, combine, ncclInvalidArgument, C, "pass_direction is 7");
  REFUSED(b->how.quant_recipe = (ncclEpCombQuant_t)7, combine, ncclInvalidArgument, C, "quant_recipe is 7");
  REFUSED(b->from.scales = &b->backScales.t, combine, ncclInvalidArgument, C, "inputs.scales is given");
  REFUSED(b->from.topk_weights = &b->backW.t, combine, ncclInvalidArgument, C, "inputs.topk_weights is given");
  REFUSED(b->borrow.borrow_topk_idx = 2, update, ncclInvalidArgument, U, "borrow_topk_idx is 2");
  REFUSED(b->ext.scale_layout = (ncclEpScaleLayout_t)7, dispatch, b->ll ? ncclInvalidUsage : ncclInvalidArgument, D,
          "scale_layout is 7");
  if (b->flat || (b->ll && !b->major3)) {
    REFUSED(b->info.recv_topk_idx_kind = (ncclEpExpertIdKind_t)7, dispatch, ncclInvalidArgument, D,
            "recv_topk_idx_kind is 7");
  } else {
    REFUSED(b->result.topk_idx = &b->outIdx.t, dispatch, ncclInvalidArgument, D, "outputs.topk_idx is given");
  }
  if (b->ll) {
    REFUSED(b->info.expert_offsets = &b->offsets.t, dispatch, ncclInvalidArgument, D, "expert_offsets is given");
    REFUSED(b->config.pass_direction = NCCL_EP_BWD_PASS, dispatch, ncclInvalidUsage, D, "pass_direction is backward");
    REFUSED(b->how.pass_direction = NCCL_EP_BWD_PASS, combine, ncclInvalidUsage, C, "pass_direction is backward");
  } else {
    REFUSED(b->how.quant_recipe = NCCL_EP_COMB_QUANT_NVFP4, combine, ncclInvalidUsage, C,
            "quant_recipe is NCCL_EP_COMB_QUANT_NVFP4: expected NCCL_EP_COMB_QUANT_NONE in high throughput");
    expect(b->me, "NVFP4 prepared", prepareNvfp4(b), ncclInvalidUsage, "ncclEpPrepare",
           "combine_quant is NCCL_EP_COMB_QUANT_NVFP4: expected NCCL_EP_COMB_QUANT_NONE in high throughput");
    REFUSED(b->config.pass_direction = NCCL_EP_BWD_PASS, dispatch, ncclInvalidArgument, D,
            "inputs.topk_weights is given");
  }
  if (b->flat)
    REFUSED(b->info.expert_offsets = &b->offsets.t, update, ncclInvalidArgument, U, "expert_offsets is given");
  if (b->major3)
    REFUSED(b->result.topk_weights = &b->outW.t, dispatch, ncclInvalidArgument, D, "outputs.topk_weights is given");
}

/* ---- Structs ------------------------------------------------------------------------------------------------------------ */

static void wrongStructs(bench *b) {
  static const char D[] = "ncclEpDispatchExt", C[] = "ncclEpCombineExt", U[] = "ncclEpUpdateHandleExt";
  const struct {
    const char *call, *name;
    ncclResult_t (*make)(bench *b);
    unsigned *header; /* size, then magic */
  } all[] = {{D, "inputs", dispatch, &b->in.size},      {D, "outputs", dispatch, &b->result.size},
             {D, "config", dispatch, &b->config.size},  {D, "ext_config", dispatch, &b->ext.size},
             {C, "inputs", combine, &b->from.size},     {C, "outputs", combine, &b->sums.size},
             {C, "config", combine, &b->how.size},      {C, "ext_config", combine, &b->howExt.size},
             {U, "layout_info", update, &b->info.size}, {U, "config", update, &b->borrow.size}};
  for (size_t i = 0; i < LENGTH(all); i++) {
    unsigned size = all[i].header[0], magic = all[i].header[1];
    char words[64];
    all[i].header[0] = 4;
    snprintf(words, sizeof(words), "%s has size 4", all[i].name);
    expect(b->me, words, all[i].make(b), ncclInvalidArgument, all[i].call, words);
    all[i].header[0] = size, all[i].header[1] = 0x77;
    snprintf(words, sizeof(words), "%s has magic 0x77", all[i].name);
    expect(b->me, words, all[i].make(b), ncclInvalidArgument, all[i].call, words);
    all[i].header[1] = magic;
    all[i].header[0] = size + 64; /* a newer caller: the tail is not read */
    expect(b->me, words, ncclEpDispatch(NULL, NULL, NULL, NULL, NULL, NULL), ncclInvalidArgument, "ncclEpDispatch",
           "NULL");
    all[i].header[0] = size;
  }
}

/* ---- One layout ----------------------------------------------------------------------------------------------------------- */

static void places(bench *b, epTestTensor *t, ncclDataType_t type, size_t columns, const char *name) {
  size_t rows = b->ll ? (size_t)(b->major3 ? EXPERTS : 1) * MOST_TOKENS : ROWS;
  epTensorMake(b->me, t, type, 2, rows, columns, name);
  if (!b->ll) return;
  t->sizes[0] = b->major3 ? EXPERTS : 1, t->sizes[1] = MOST_TOKENS, t->sizes[2] = columns;
  t->t.ndim = 3;
}

static void benchMake(epTestRank *me, bench *b, int ll, ncclEpLayout_t layout) {
  int64_t choices[TOKENS * TOPK];
  *b = (bench){.me = me,
               .ll = ll,
               .layout = layout,
               .flat = layout == NCCL_EP_LAYOUT_FLAT,
               .major3 = ll && layout == NCCL_EP_LAYOUT_EXPERT_MAJOR,
               .in = NCCL_EP_DISPATCH_INPUTS_INIT,
               .result = NCCL_EP_DISPATCH_OUTPUTS_INIT,
               .info = NCCL_EP_LAYOUT_INFO_INIT,
               .config = NCCL_EP_DISPATCH_CONFIG_INIT,
               .ext = NCCL_EP_DISPATCH_EXT_CONFIG_INIT,
               .from = NCCL_EP_COMBINE_INPUTS_INIT,
               .sums = NCCL_EP_COMBINE_OUTPUTS_INIT,
               .how = NCCL_EP_COMBINE_CONFIG_INIT,
               .howExt = NCCL_EP_COMBINE_EXT_CONFIG_INIT,
               .borrow = NCCL_EP_UPDATE_EXT_CONFIG_INIT};
  for (int i = 0; i < TOKENS * TOPK; i++) choices[i] = i % EXPERTS;
  epTensorMake(me, &b->topk, ncclInt64, 2, TOKENS, TOPK, "topk_idx");
  epTensorFill(me, &b->topk, choices);
  epTensorMake(me, &b->x, ncclUint8, 2, TOKENS, HIDDEN, "x");
  epTensorMake(me, &b->w, ncclFloat32, 2, TOKENS, TOPK, "w");
  epTensorMake(me, &b->scales, ncclFloat32, 2, TOKENS, SCALES, "scales");
  epTensorMake(me, &b->y, ncclBfloat16, 2, TOKENS, HIDDEN, "y");
  epTensorMake(me, &b->yW, ncclFloat32, 2, TOKENS, TOPK, "y weights");
  epTensorMake(me, &b->bias, ncclBfloat16, 2, TOKENS, HIDDEN, "bias");
  places(b, &b->out, ncclUint8, HIDDEN, "out");
  places(b, &b->outScales, ncclFloat32, SCALES, "out scales");
  places(b, &b->back, ncclBfloat16, HIDDEN, "back");
  places(b, &b->backScales, ncclFloat32, 1, "back scales");
  places(b, &b->outW, ncclFloat32, TOPK, "out weights");
  places(b, &b->outIdx, ll ? ncclInt32 : ncclInt64, TOPK, "out idx");
  epTensorMake(me, &b->backW, ncclFloat32, 2, ROWS, TOPK, "back weights");
  if (!ll && !b->flat) b->outW.t.ndim = b->backW.t.ndim = 1;
  epTensorMake(me, &b->counters, ncclInt32, 1, EXPERTS, 1, "expert_counters");
  epTensorMake(me, &b->offsets, ncclInt32, 1, EXPERTS, 1, "expert_offsets");
  epTensorMake(me, &b->total, ncclInt32, 1, 1, 1, "recv_total_counter");
  epTensorMake(me, &b->sources, ncclInt32, 1, 1, 1, "src_rank_counters");
  b->config.quant_recipe = NCCL_EP_DISP_QUANT_FWD;
  b->in.tokens = &b->x.t, b->in.scales = &b->scales.t;
  b->result.tokens = &b->out.t, b->result.scales = &b->outScales.t;
  if (!b->major3) b->in.topk_weights = &b->w.t, b->result.topk_weights = &b->outW.t;
  if (b->flat || (ll && !b->major3)) b->result.topk_idx = &b->outIdx.t;
  b->info.expert_counters = &b->counters.t, b->info.recv_total_counter = &b->total.t;
  if (ll) b->info.src_rank_counters = &b->sources.t;
  if (!ll && !b->flat) b->info.expert_offsets = &b->offsets.t;
  b->from.tokens = &b->back.t, b->sums.tokens = &b->y.t;
  if (b->major3) b->sums.topk_weights = &b->yW.t;
  if (!ll) b->howExt.bias[0] = &b->bias.t;
}

static void benchFree(bench *b) {
  epTestTensor *all[] = {&b->topk,   &b->x,         &b->w,       &b->scales, &b->out,     &b->outW,
                         &b->outIdx, &b->outScales, &b->y,       &b->yW,     &b->back,    &b->backW,
                         &b->bias,   &b->counters,  &b->offsets, &b->total,  &b->sources, &b->backScales};
  for (size_t i = 0; i < LENGTH(all); i++) {
    epTensorCheckGuards(b->me, all[i], "a tensor");
    epTensorFree(b->me, all[i]);
  }
}

static void groupOf(epTestRank *me, int ll) {
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.algorithm = ll ? NCCL_EP_ALGO_LOW_LATENCY : NCCL_EP_ALGO_HIGH_THROUGHPUT;
  config.num_experts = EXPERTS, config.max_dispatch_tokens_per_rank = MOST_TOKENS, config.num_topk = TOPK;
  config.max_token_bytes = 2 * HIDDEN, config.max_recv_tokens_per_rank = ll ? 0 : ROWS;
  EXPECT_OK(me, ncclEpCreateGroup(&me->group, me->comm, &config));
}

static void layoutBody(epTestRank *me) {
  static const struct {
    int ll;
    ncclEpLayout_t layout;
  } all[] = {{0, NCCL_EP_LAYOUT_FLAT},
             {0, NCCL_EP_LAYOUT_EXPERT_MAJOR},
             {1, NCCL_EP_LAYOUT_RANK_MAJOR},
             {1, NCCL_EP_LAYOUT_EXPERT_MAJOR}};
  for (size_t i = 0; i < LENGTH(all); i++) {
    bench *b = calloc(1, sizeof(*b));
    EXPECT(me, b != NULL, "out of memory");
    if (!b) return;
    groupOf(me, all[i].ll);
    benchMake(me, b, all[i].ll, all[i].layout);
    EXPECT_OK(me, ncclEpInitHandle(&b->handle, me->group, b->layout, NULL, TOPK, NULL));
    expect(me, "no routing", dispatch(b), ncclInvalidUsage, "ncclEpDispatchExt", "no routing yet");
    expect(me, "no routing", combine(b), ncclInvalidUsage, "ncclEpCombineExt", "no routing yet");
    EXPECT_OK(me, update(b));
    if (b->ll) expect(me, "no dispatch", combine(b), ncclInvalidUsage, "ncclEpCombineExt", "nothing was dispatched");
    EXPECT_OK(me, dispatch(b));
    wrongTensors(b);
    wrongValues(b);
    wrongStructs(b);
    EXPECT_OK(me, update(b));
    EXPECT_OK(me, dispatch(b));
    EXPECT_OK(me, combine(b));
    EXPECT_OK(me, ncclEpEmuStreamSynchronize(me->comm, NULL));
    EXPECT_OK(me, ncclEpHandleDestroy(b->handle));
    benchFree(b);
    free(b);
    epGroupFree(me);
  }
}

static void wrongArguments(void **state) {
  (void)state;
  epTestWorld world = {.ranks = 1};
  epWorldRun(&world, layoutBody);
}

/* ---- Objects and outputs -------------------------------------------------------------------------------------------------- */

/* Each call that takes a group, or a handle, with one that is none. */
static void wrongObjects(epTestRank *me, ncclEpGroup_t g, ncclEpHandle_t h, const char *groupWords,
                         const char *handleWords) {
  ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpCombineInputs_t from = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t sums = NCCL_EP_COMBINE_OUTPUTS_INIT;
  ncclEpErrorInfo_t error = NCCL_EP_ERROR_INFO_INIT;
  ncclEpGroupProperties_t properties = NCCL_EP_GROUP_PROPERTIES_INIT;
  ncclEpPrepareConfig_t prepare = NCCL_EP_PREPARE_CONFIG_INIT;
  ncclEpHostCounts_t counts = NCCL_EP_HOST_COUNTS_INIT;
  ncclEpHandleMetadata_t metadata = NCCL_EP_HANDLE_METADATA_INIT;
  ncclEpCompleteExtConfig_t completion = NCCL_EP_COMPLETE_EXT_CONFIG_INIT;
  ncclEpDeviceCounts_t device = NCCL_EP_DEVICE_COUNTS_INIT;
  cudaStream_t stream = NULL;
  ncclEpTensor_t t = NCCL_EP_TENSOR_INIT;
  ncclEpHandle_t made = NULL;
  size_t bytes = 7, one[2] = {1, 1};
  int number = 7;
  t.ndim = 2, t.datatype = ncclInt64, t.sizes = one;
#define NO(call, words, ...) expect(me, #call, call(__VA_ARGS__), ncclInvalidArgument, #call, words)
  NO(ncclEpHandleMemSize, groupWords, g, NCCL_EP_LAYOUT_FLAT, NULL, &bytes, 1);
  NO(ncclEpInitHandle, groupWords, &made, g, NCCL_EP_LAYOUT_FLAT, NULL, 1, NULL);
  NO(ncclEpCreateHandle, groupWords, &made, g, NCCL_EP_LAYOUT_FLAT, &t, NULL, NULL, NULL);
  NO(ncclEpGetAsyncError, groupWords, g, &number);
  NO(ncclEpErrorClear, groupWords, g);
  NO(ncclEpGetErrorInfo, groupWords, g, &error);
  NO(ncclEpGetGroupProperties, groupWords, g, &properties);
  NO(ncclEpPrepare, groupWords, g, &prepare);
  NO(ncclEpUpdateHandle, handleWords, h, &t, NULL, NULL);
  NO(ncclEpDispatch, handleWords, h, &in, &out, NULL, NULL, NULL);
  NO(ncclEpCombine, handleWords, h, &from, &sums, NULL, NULL);
  NO(ncclEpComplete, handleWords, h, NULL, NULL);
  NO(ncclEpGetHostCounts, handleWords, h, &counts);
  NO(ncclEpGetHandleMetadata, handleWords, h, &metadata);
  NO(ncclEpCompleteExt, handleWords, h, &completion, NULL);
  NO(ncclEpGetDeviceCounts, handleWords, h, &device);
  NO(ncclEpMaskQuery, groupWords, g, &number, NULL);
  NO(ncclEpMaskUpdate, groupWords, g, &number, NULL);
  NO(ncclEpMaskClean, groupWords, g, NULL);
  NO(ncclEpGetCommunicationStream, groupWords, g, &stream);
  EXPECT(me, !made && bytes == 7 && number == 7, "an output was set");
}

static void objectsBody(epTestRank *me) {
  static char garbage[4096];
  void *junk = garbage;
  ncclEpHandle_t h = NULL, orphan = NULL;
  ncclEpGroup_t g;
  groupOf(me, 0);
  g = me->group;
  EXPECT_OK(me, ncclEpInitHandle(&h, g, NCCL_EP_LAYOUT_FLAT, NULL, TOPK, NULL));
  EXPECT_OK(me, ncclEpInitHandle(&orphan, g, NCCL_EP_LAYOUT_FLAT, NULL, TOPK, NULL));
  wrongObjects(me, NULL, NULL, "not a group", "not a handle");
  wrongObjects(me, junk, junk, "not a group", "not a handle");
  wrongObjects(me, (ncclEpGroup_t)(void *)h, (ncclEpHandle_t)(void *)g, "not a group", "not a handle");
  EXPECT_OK(me, ncclEpHandleDestroy(h));
  NO(ncclEpHandleDestroy, "not a handle", h);
  NO(ncclEpHandleDestroy, "not a handle", junk);
  EXPECT_OK(me, ncclEpHandleDestroy(NULL));
  EXPECT_OK(me, ncclEpGroupDestroy(g));
  wrongObjects(me, g, h, "not a group", "not a handle");
  wrongObjects(me, g, orphan, "not a group", "destroyed");
  NO(ncclEpGroupDestroy, "not a group", g);
  NO(ncclEpGroupDestroy, "not a group", junk);
  EXPECT_OK(me, ncclEpGroupDestroy(NULL));
  EXPECT_OK(me, ncclEpHandleDestroy(orphan));
  me->group = NULL;
}

static void wrongObjectsOfEveryCall(void **state) {
  (void)state;
  epTestWorld world = {.ranks = 1};
  epWorldRun(&world, objectsBody);
}

static void outputsBody(epTestRank *me) {
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  ncclEpBufferSizeConfig_t sizing = NCCL_EP_BUFFER_SIZE_CONFIG_INIT;
  ncclEpBufferSize_t bytes = NCCL_EP_BUFFER_SIZE_INIT;
  ncclEpHandle_t h = NULL;
  ncclEpTensor_t *heap = NULL;
  ncclEpTensor_t t = NCCL_EP_TENSOR_INIT;
  size_t one[2] = {1, 1};
  t.ndim = 2, t.datatype = ncclInt64, t.sizes = one;
  groupOf(me, 0);
  EXPECT_OK(me, ncclEpInitHandle(&h, me->group, NCCL_EP_LAYOUT_FLAT, NULL, TOPK, NULL));
  config.num_experts = 4, config.max_dispatch_tokens_per_rank = 4, config.max_token_bytes = 16;
  config.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
  NO(ncclEpGetVersion, "version is NULL", NULL);
  NO(ncclEpTensorAlloc, "tensor is NULL", NULL, 1, ncclInt32, one, NULL);
  NO(ncclEpTensorAlloc, "sizes is NULL", &heap, 1, ncclInt32, NULL, NULL);
  NO(ncclEpTensorAlloc, "ndim is 9", &heap, 9, ncclInt32, one, NULL);
  NO(ncclEpTensorDestroy, "not a descriptor", &t);
  NO(ncclEpCreateGroup, "NULL", NULL, me->comm, &config);
  NO(ncclEpCreateGroup, "comm is NULL", &me->group, NULL, &config);
  NO(ncclEpCreateGroup, "config is NULL", &me->group, me->comm, NULL);
  NO(ncclEpHandleMemSize, "NULL", me->group, NCCL_EP_LAYOUT_FLAT, NULL, NULL, 1);
  NO(ncclEpInitHandle, "handle is NULL", NULL, me->group, NCCL_EP_LAYOUT_FLAT, NULL, 1, NULL);
  NO(ncclEpInitHandle, "num_topk is 33", &h, me->group, NCCL_EP_LAYOUT_FLAT, NULL, 33, NULL);
  NO(ncclEpInitHandle, "layout is 0", &h, me->group, NCCL_EP_LAYOUT_UNSET, NULL, 1, NULL);
  NO(ncclEpCreateHandle, "handle is NULL", NULL, me->group, NCCL_EP_LAYOUT_FLAT, &t, NULL, NULL, NULL);
  NO(ncclEpCreateHandle, "topk_idx is NULL", &h, me->group, NCCL_EP_LAYOUT_FLAT, NULL, NULL, NULL, NULL);
  NO(ncclEpUpdateHandle, "topk_idx is NULL", h, NULL, NULL, NULL);
  NO(ncclEpDispatch, "inputs is NULL", h, NULL, NULL, NULL, NULL, NULL);
  NO(ncclEpCombine, "inputs is NULL", h, NULL, NULL, NULL, NULL);
  NO(ncclEpGetAsyncError, "NULL", me->group, NULL);
  NO(ncclEpGetErrorInfo, "NULL", me->group, NULL);
  NO(ncclEpGetGroupProperties, "NULL", me->group, NULL);
  NO(ncclEpGetHostCounts, "NULL", h, NULL);
  NO(ncclEpGetHandleMetadata, "NULL", h, NULL);
  NO(ncclEpPrepare, "NULL", me->group, NULL);
  NO(ncclEpCalculateBufferSize, "comm is NULL", NULL, &sizing, &bytes);
  NO(ncclEpCalculateBufferSize, "NULL", me->comm, NULL, &bytes);
  NO(ncclEpCalculateBufferSize, "NULL", me->comm, &sizing, NULL);
  expect(me, "layout", ncclEpInitHandle(&h, me->group, NCCL_EP_LAYOUT_RANK_MAJOR, NULL, 1, NULL), ncclInvalidUsage,
         "ncclEpInitHandle", "layout is NCCL_EP_LAYOUT_RANK_MAJOR");
  EXPECT_OK(me, ncclEpHandleDestroy(h));
  epGroupFree(me);
}

static void outputsWithoutRoom(void **state) {
  (void)state;
  epTestWorld world = {.ranks = 1};
  epWorldRun(&world, outputsBody);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(wrongArguments), cmocka_unit_test(wrongObjectsOfEveryCall),
                                     cmocka_unit_test(outputsWithoutRoom)};
  return cmocka_run_group_tests_name("refusals", tests, NULL, NULL);
}
