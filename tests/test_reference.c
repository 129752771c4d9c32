/* The reference against small cases worked out by hand: where every row goes, what is counted, and in which order and
 * with which roundings combine sums. Everything else is compared with the reference, so nothing here is computed by it.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "reference.h"

#define LENGTH(a) (sizeof(a) / sizeof((a)[0]))

static epRef *make(epRefRouting in) {
  epRef *ref = NULL;
  assert_int_equal(epRefCreate(&in, &ref), 0);
  return ref;
}

static void checkRows(const epRef *ref, uint32_t rank, const epRefRow *want, size_t n) {
  const epRefRank *r = &ref->rank[rank];
  assert_int_equal(r->rows, n);
  for (size_t i = 0; i < n; i++)
    if (r->row[i].source != want[i].source || (want[i].source >= 0 && r->row[i].token != want[i].token) ||
        (want[i].source >= 0 && r->row[i].k != want[i].k))
      fail_msg("rank %u row %zu: (%d, %d, %d) instead of (%d, %d, %d)", rank, i, r->row[i].source, r->row[i].token,
               r->row[i].k, want[i].source, want[i].token, want[i].k);
}

static void checkCounts(const uint64_t *got, const uint64_t *want, size_t n) {
  for (size_t i = 0; i < n; i++) assert_int_equal(got[i], want[i]);
}

/* Two ranks of two experts; rank 0 has the four rows of the "-1 entries" case, rank 1 one row with a repeated id. */
static const int64_t rows0[] = {-1, -1, -1, -1, 0, -1, 3, -1, -1, 1, -1, -1, 0, 1, 2, 3};
static const int64_t rows1[] = {3, 3, -1, 0};
static const int64_t *const mixed[] = {rows0, rows1};
static const uint32_t mixedTokens[] = {4, 1};

static void flatByHand(void **state) {
  (void)state;
  epRef *ref = make((epRefRouting){.ranks = 2,
                                   .experts = 4,
                                   .topk = 4,
                                   .layout = EP_REF_FLAT,
                                   .align = 0,
                                   .budget = 0,
                                   .tokens = mixedTokens,
                                   .topkIdx = mixed});
  const epRefRow at0[] = {{0, 1, -1}, {0, 2, -1}, {0, 3, -1}, {1, 0, -1}};
  const epRefRow at1[] = {{0, 1, -1}, {0, 3, -1}, {1, 0, -1}};
  checkRows(ref, 0, at0, LENGTH(at0));
  checkRows(ref, 1, at1, LENGTH(at1));
  checkCounts(ref->rank[0].perSource, (uint64_t[]){3, 1}, 2);
  checkCounts(ref->rank[1].perSource, (uint64_t[]){2, 1}, 2);
  checkCounts(ref->rank[0].perExpert, (uint64_t[]){3, 2}, 2);
  checkCounts(ref->rank[1].perExpert, (uint64_t[]){1, 4}, 2);
  static const int64_t local0[][4] = {{0, -1, -1, -1}, {-1, 1, -1, -1}, {0, 1, -1, -1}, {-1, -1, -1, 0}};
  static const int64_t local1[][4] = {{-1, -1, 1, -1}, {-1, -1, 0, 1}, {1, 1, -1, -1}};
  static const int64_t global1[][4] = {{-1, -1, 3, -1}, {-1, -1, 2, 3}, {3, 3, -1, -1}};
  int64_t got[4];
  for (uint32_t i = 0; i < 4; i++) {
    epRefIndexRow(ref, 0, i, 0, got);
    assert_memory_equal(got, local0[i], sizeof(got));
  }
  for (uint32_t i = 0; i < 3; i++) {
    epRefIndexRow(ref, 1, i, 0, got);
    assert_memory_equal(got, local1[i], sizeof(got));
    epRefIndexRow(ref, 1, i, 1, got);
    assert_memory_equal(got, global1[i], sizeof(got));
  }
  static const int64_t slot0[] = {-1, -1, -1, -1, 0, -1, 0, -1, -1, 1, -1, -1, 2, 2, 1, 1}, slot1[] = {2, 2, -1, 3};
  assert_memory_equal(ref->slot[0], slot0, sizeof(slot0));
  assert_memory_equal(ref->slot[1], slot1, sizeof(slot1));
  epRefDestroy(ref);
}

static void expertMajorByHand(void **state) {
  (void)state;
  epRef *ref = make((epRefRouting){.ranks = 2,
                                   .experts = 4,
                                   .topk = 4,
                                   .layout = EP_REF_EXPERT_MAJOR,
                                   .align = 2,
                                   .budget = 0,
                                   .tokens = mixedTokens,
                                   .topkIdx = mixed});
  const epRefRow at0[] = {{0, 1, 0}, {0, 3, 0}, {1, 0, 3}, {-1, -1, -1}, {0, 2, 1}, {0, 3, 1}};
  const epRefRow at1[] = {{0, 3, 2}, {-1, -1, -1}, {0, 1, 2}, {0, 3, 3}, {1, 0, 0}, {1, 0, 1}};
  checkRows(ref, 0, at0, LENGTH(at0));
  checkRows(ref, 1, at1, LENGTH(at1));
  assert_int_equal(ref->rank[0].total, 5);
  assert_int_equal(ref->rank[0].needed, 6);
  checkCounts(ref->rank[0].perExpert, (uint64_t[]){3, 2}, 2);
  checkCounts(ref->rank[0].perExpertPadded, (uint64_t[]){4, 2}, 2);
  checkCounts(ref->rank[1].perExpertPadded, (uint64_t[]){2, 4}, 2);
  checkCounts(ref->rank[1].offset, (uint64_t[]){0, 2}, 2);
  static const int64_t slot0[] = {-1, -1, -1, -1, 0, -1, 2, -1, -1, 4, -1, -1, 1, 5, 0, 3}, slot1[] = {4, 5, -1, 2};
  assert_memory_equal(ref->slot[0], slot0, sizeof(slot0));
  assert_memory_equal(ref->slot[1], slot1, sizeof(slot1));
  assert_int_equal(epRefOwner(ref, 0, 0, 0), -1);
  assert_int_equal(epRefOwner(ref, 0, 1, 2), 1);
  assert_int_equal(epRefOwner(ref, 1, 0, 3), 0);
  epRefDestroy(ref);
}

/* Alignment 16; rank 0's experts receive 3, 0, 0, 5. */
static void emptyExpertsTakeNoRows(void **state) {
  (void)state;
  static const int64_t idx[] = {0, 0, 0, 3, 3, 3, 3, 3};
  epRef *ref = make((epRefRouting){.ranks = 2,
                                   .experts = 8,
                                   .topk = 1,
                                   .layout = EP_REF_EXPERT_MAJOR,
                                   .align = 16,
                                   .budget = 0,
                                   .tokens = (uint32_t[]){8, 0},
                                   .topkIdx = (const int64_t *[]){idx, NULL}});
  checkCounts(ref->rank[0].perExpert, (uint64_t[]){3, 0, 0, 5}, 4);
  checkCounts(ref->rank[0].perExpertPadded, (uint64_t[]){16, 0, 0, 16}, 4);
  checkCounts(ref->rank[0].offset, (uint64_t[]){0, 16, 16, 16}, 4);
  assert_int_equal(ref->rank[0].needed, 32);
  assert_int_equal(ref->rank[1].needed, 0);
  epRefDestroy(ref);
}

static void budgetDropsInOutputOrder(void **state) {
  (void)state;
  epRef *ref = make((epRefRouting){.ranks = 2,
                                   .experts = 4,
                                   .topk = 4,
                                   .layout = EP_REF_EXPERT_MAJOR,
                                   .align = 2,
                                   .budget = 5,
                                   .tokens = mixedTokens,
                                   .topkIdx = mixed});
  const epRefRow at0[] = {{0, 1, 0}, {0, 3, 0}, {1, 0, 3}, {-1, -1, -1}, {0, 2, 1}};
  checkRows(ref, 0, at0, LENGTH(at0));
  assert_int_equal(ref->rank[0].needed, 6);
  checkCounts(ref->rank[0].perExpertPadded, (uint64_t[]){4, 2}, 2);
  checkCounts(ref->rank[0].counter, (uint64_t[]){4, 1}, 2); /* what is told ends at the budget */
  checkCounts(ref->rank[0].first, (uint64_t[]){0, 4}, 2);
  assert_int_equal(ref->slot[0][13], -1); /* (token 3, k 1) was the sixth */
  assert_int_equal(ref->slot[0][9], 4);
  epRefDestroy(ref);
}

static void outOfRangeSelectsNothing(void **state) {
  (void)state;
  static const int64_t idx[] = {4, -2, INT64_MAX, 1};
  epRef *ref = make((epRefRouting){.ranks = 2,
                                   .experts = 4,
                                   .topk = 4,
                                   .layout = EP_REF_FLAT,
                                   .align = 0,
                                   .budget = 0,
                                   .tokens = (uint32_t[]){1, 0},
                                   .topkIdx = (const int64_t *[]){idx, NULL}});
  assert_int_equal(ref->rank[0].total, 1);
  assert_int_equal(ref->rank[1].total, 0);
  for (uint32_t k = 0; k < 3; k++) assert_int_equal(epRefOwner(ref, 0, 0, k), -1);
  epRefDestroy(ref);
}

/* Two words a row; in columns that are 48 bytes apart word 1 of row 3 follows word 1 of row 2. */
static void scalesInRowsAndColumns(void **state) {
  (void)state;
  assert_int_equal(epRefScaleOffset(8, 0, 3, 5), 29);
  assert_int_equal(epRefScaleOffset(8, 48, 3, 3), 15);
  assert_int_equal(epRefScaleOffset(8, 48, 3, 5), 61);
  assert_int_equal(epRefScaleOffset(8, 48, 2, 7), 59);
  assert_int_equal(epRefScaleOffset(4, 16, 0, 0), 0);
}

/* One token of rank 0 with its expert rows; `rows` in k order. */
static void combineOne(epRefType type, uint32_t ranks, uint32_t topk, const int64_t *idx, const float *values,
                       int multipleReductions, const float *bias, float *out) {
  uint32_t tokens[8] = {1};
  const int64_t *all[8] = {idx};
  epRef *ref = make((epRefRouting){.ranks = ranks,
                                   .experts = ranks,
                                   .topk = topk,
                                   .layout = EP_REF_EXPERT_MAJOR,
                                   .align = 0,
                                   .budget = 0,
                                   .tokens = tokens,
                                   .topkIdx = all});
  uint32_t row[8] = {0}, y = 0, biasRow = 0;
  const void *rows[8] = {0};
  for (uint32_t k = 0; k < topk; k++) {
    epRefStore(type, &row[k], 0, values[k]);
    rows[k] = idx[k] < 0 ? NULL : &row[k];
  }
  epRefCombine how = {.type = type, .hidden = 1, .scaleUp = ranks, .multipleReductions = multipleReductions};
  if (bias) {
    epRefStore(type, &biasRow, 0, *bias);
    how.bias0 = &biasRow;
  }
  float scratch[4];
  epRefCombineToken(ref, &how, 0, 0, rows, scratch, &y);
  *out = epRefLoad(type, &y, 0);
  epRefDestroy(ref);
}

/* The two slots of rank 0 sum to 1 + 2^-8, halfway between two BF16 numbers: rounded to the even one when partial sums
 * are. */
static void partialSumsAreRounded(void **state) {
  (void)state;
  const float tiny = 1.0f / 256;
  float y;
  combineOne(EP_REF_BF16, 2, 3, (int64_t[]){0, 1, 0}, (float[]){1, tiny, tiny}, 1, NULL, &y);
  assert_true(y == 1.0f);
  combineOne(EP_REF_BF16, 2, 3, (int64_t[]){0, 1, 0}, (float[]){1, tiny, tiny}, 0, NULL, &y);
  assert_true(y == 1.0f + 2 * tiny);
  const float bias = tiny;
  combineOne(EP_REF_BF16, 2, 3, (int64_t[]){0, 1, 0}, (float[]){1, tiny, tiny}, 1, &bias, &y);
  assert_true(y == 1.0f + 2 * tiny); /* (2^-8 + 2^-8) + 1 */
}

/* Ranks enter in the order of the highest k they hold: 1, 2, then 0. In ascending order of rank 2^24 would swallow both
 * ones. */
static void ranksEnterByHighestK(void **state) {
  (void)state;
  float y;
  combineOne(EP_REF_F32, 3, 4, (int64_t[]){0, 1, 2, 0}, (float[]){16777216, 1, 1, 0}, 1, NULL, &y);
  assert_true(y == 16777218.0f);
  combineOne(EP_REF_F32, 3, 3, (int64_t[]){0, 1, 2}, (float[]){16777216, 1, 1}, 1, NULL, &y);
  assert_true(y == 16777216.0f);
  combineOne(EP_REF_F32, 3, 4, (int64_t[]){0, 1, 2, 0}, (float[]){16777216, 1, 1, 0}, 0, NULL, &y);
  assert_true(y == 16777216.0f);
}

static void nothingSelectedGivesZero(void **state) {
  (void)state;
  float y = 5;
  combineOne(EP_REF_F16, 2, 2, (int64_t[]){-1, -1}, (float[]){1, 1}, 1, NULL, &y);
  assert_true(y == 0.0f);
}

/* Flat: one row for a rank, however many of its experts were selected. */
static void flatRowCountsOnce(void **state) {
  (void)state;
  static const int64_t idx[] = {0, 1, 1, 3};
  epRef *ref = make((epRefRouting){.ranks = 2,
                                   .experts = 4,
                                   .topk = 4,
                                   .layout = EP_REF_FLAT,
                                   .align = 0,
                                   .budget = 0,
                                   .tokens = (uint32_t[]){1, 0},
                                   .topkIdx = (const int64_t *[]){idx, NULL}});
  float a = 3, b = 5, y = 0, scratch[4];
  const void *rows[] = {&a, &a, &a, &b};
  for (int multiple = 0; multiple < 2; multiple++) {
    epRefCombine how = {.type = EP_REF_F32, .hidden = 1, .scaleUp = 2, .multipleReductions = multiple};
    epRefCombineToken(ref, &how, 0, 0, rows, scratch, &y);
    assert_true(y == 8.0f);
  }
  epRefDestroy(ref);
}

/* Blocks whose scales are 1, 2 and the largest: every tie of E2M1, what is past the largest, zeros, a NaN and a scale that says no. */
static void nvfp4ByHand(void **state) {
  (void)state;
  static const int64_t idx[] = {0};
  static const float in[64] = {6,     5,    3.5f, 2.5f, 1.75f, 1.25f, 0.75f, 0.25f, -5,   -0.3f, -0.2f, 4,    3,
                               2,     1.5f, 0.5f, 12,   10,    7,     -5,    3.5f,  2.5f, 1.5f,  0.5f,  -9,   0.6f,
                               -0.4f, 8,    6,    4,    3,     1,     2e5,   1e3,   224,  0,     -2e5,  3000, -225,
                               100,   0,    0,    0,    0,     0,     0,     0,     0,    1,     2,     NAN,  4};
  static const float out[48] = {6,    4,   4,   2,  2,     1,    1,    0, -4, -0.5f, 0, 4, 3, 2, 1.5f, 0.5f,
                                12,   8,   8,   -4, 4,     2,    2,    0, -8, 1,     0, 8, 6, 4, 3,    1,
                                2688, 896, 224, 0,  -2688, 2688, -224, 0, 0,  0,     0, 0, 0, 0, 0,    0};
  epRef *ref = make((epRefRouting){.ranks = 1,
                                   .experts = 1,
                                   .topk = 1,
                                   .layout = EP_REF_RANK_MAJOR,
                                   .tokens = (uint32_t[]){1},
                                   .topkIdx = (const int64_t *[]){idx},
                                   .maxTokens = 1});
  float y[64], scratch[4 * 64], scale = 1;
  epRefCombine how = {.type = EP_REF_F32, .hidden = 64, .scaleUp = 1, .multipleReductions = 1, .nvfp4 = &scale};
  epRefCombineToken(ref, &how, 0, 0, (const void *[]){in}, scratch, y);
  for (int h = 0; h < 48; h++)
    if (y[h] != out[h]) fail_msg("element %d: %g became %g instead of %g", h, in[h], y[h], out[h]);
  for (int h = 48; h < 64; h++) assert_true(isnan(y[h]));
  scale = 0, how.hidden = 32;
  epRefCombineToken(ref, &how, 0, 0, (const void *[]){in}, scratch, y);
  for (int h = 0; h < 32; h++) assert_true(y[h] == 0);
  scale = -1;
  epRefCombineToken(ref, &how, 0, 0, (const void *[]){in}, scratch, y);
  for (int h = 0; h < 32; h++) assert_true(isnan(y[h]));
  scale = epRefNvfp4Scale(EP_REF_F32, in, 32);
  assert_true(scale == 224);
  epRefDestroy(ref);
}

static void conversionsRoundToNearestEven(void **state) {
  (void)state;
  static const struct {
    epRefType type;
    float in;
    uint16_t bits;
  } want[] = {
      {EP_REF_BF16, 1.0f, 0x3f80},
      {EP_REF_BF16, -2.5f, 0xc020},
      {EP_REF_BF16, 1.00390625f, 0x3f80}, /* 1 + 2^-8: tie to even */
      {EP_REF_BF16, 1.01171875f, 0x3f82}, /* 1 + 3 * 2^-8: tie to even, upwards */
      {EP_REF_BF16, 1.00390637f, 0x3f81}, /* just above the tie */
      {EP_REF_F16, 1.0f, 0x3c00},
      {EP_REF_F16, 65504.0f, 0x7bff},
      {EP_REF_F16, 1.00048828125f, 0x3c00}, /* 1 + 2^-11: tie to even */
      {EP_REF_F16, 5.9604644775390625e-8f, 0x0001},
      {EP_REF_F16, 70000.0f, 0x7c00},
  };
  for (size_t i = 0; i < LENGTH(want); i++) {
    uint16_t got = 0;
    epRefStore(want[i].type, &got, 0, want[i].in);
    if (got != want[i].bits) fail_msg("case %zu: %04x instead of %04x", i, got, want[i].bits);
  }
  uint16_t sub = 0x0001, one = 0x3c00;
  assert_true(epRefLoad(EP_REF_F16, &sub, 0) == 5.9604644775390625e-8f);
  assert_true(epRefLoad(EP_REF_F16, &one, 0) == 1.0f);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(flatByHand),
      cmocka_unit_test(expertMajorByHand),
      cmocka_unit_test(emptyExpertsTakeNoRows),
      cmocka_unit_test(budgetDropsInOutputOrder),
      cmocka_unit_test(outOfRangeSelectsNothing),
      cmocka_unit_test(scalesInRowsAndColumns),
      cmocka_unit_test(partialSumsAreRounded),
      cmocka_unit_test(ranksEnterByHighestK),
      cmocka_unit_test(nothingSelectedGivesZero),
      cmocka_unit_test(flatRowCountsOnce),
      cmocka_unit_test(nvfp4ByHand),
      cmocka_unit_test(conversionsRoundToNearestEven),
  };
  return cmocka_run_group_tests_name("reference", tests, NULL, NULL);
}
