/* Cases that users of comparable libraries ran into, on the emulated fabric and under several schedules each: sizes and
 * routings at the edges. Every one checks dispatch, combine and both backward passes, byte for byte. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "harness.h"
#include "runtime.h"

#define LENGTH(a) (sizeof(a) / sizeof((a)[0]))
#define SCHEDULES 4

static const ncclEpLayout_t layouts[] = {NCCL_EP_LAYOUT_FLAT, NCCL_EP_LAYOUT_EXPERT_MAJOR};

static epCase small(uint32_t ranks, ncclEpLayout_t layout) {
  return (epCase){.ranks = ranks,
                  .experts = 4 * ranks,
                  .topk = 2,
                  .hidden = 64,
                  .maxTokens = 8,
                  .layout = layout,
                  .type = ncclBfloat16};
}

static void runRounds(const epCase *c, const uint32_t (*tokens)[2], unsigned count, unsigned schedules) {
  epRound rounds[8];
  uint64_t seed = 99;
  for (unsigned i = 0; i < count; i++) epRoundMake(&rounds[i], c, tokens[i], epPickRandom, &seed);
  epCaseRun(c, rounds, count, schedules);
  for (unsigned i = 0; i < count; i++) epRoundFree(&rounds[i]);
}

static void zeroTokens(void **state) {
  (void)state;
  static const uint32_t tokens[][2] = {{5, 0}, {0, 5}, {0, 0}, {3, 4}};
  for (size_t l = 0; l < LENGTH(layouts); l++) {
    epCase c = small(2, layouts[l]);
    runRounds(&c, tokens, LENGTH(tokens), SCHEDULES);
    c.budget = 64, c.align = 8;
    runRounds(&c, tokens, LENGTH(tokens), SCHEDULES);
  }
}

static int64_t pickRankZero(const epCase *c, uint32_t rank, uint32_t token, uint32_t k, void *arg) {
  (void)arg, (void)rank;
  return (token + k) % (c->experts / c->ranks);
}

static void nothingReceived(void **state) {
  (void)state;
  for (size_t l = 0; l < LENGTH(layouts); l++)
    for (int budget = 0; budget < 2; budget++) {
      epCase c = small(2, layouts[l]);
      epRound round;
      c.budget = budget ? 32 : 0;
      epRoundMake(&round, &c, (uint32_t[]){4, 4}, pickRankZero, NULL);
      assert_int_equal(round.ref->rank[1].needed, 0);
      epCaseRun(&c, &round, 1, SCHEDULES);
      epRoundFree(&round);
    }
}

/* Sizes change at every call on one group; nobody exchanges counts on the host. */
static void raggedAndChanging(void **state) {
  (void)state;
  static const uint32_t tokens[][2] = {{1024, 7}, {63, 65}, {4095, 1}};
  for (size_t l = 0; l < LENGTH(layouts); l++) {
    epCase c = small(2, layouts[l]);
    c.maxTokens = 4096, c.hidden = 8;
    runRounds(&c, tokens, LENGTH(tokens), 1);
  }
}

static void oddCounts(void **state) {
  (void)state;
  static const uint32_t tokens[][2] = {{1, 1}, {3, 3}, {63, 63}, {127, 127}};
  for (size_t l = 0; l < LENGTH(layouts); l++) {
    epCase c = small(2, layouts[l]);
    c.maxTokens = 128, c.hidden = 136;
    runRounds(&c, tokens, LENGTH(tokens), 2);
    c.maxTokens = 4095, c.hidden = 8, c.topk = 1;
    epCaseRunRandom(&c, (uint32_t[]){4095, 4095}, 1);
  }
}

static int64_t pickMixed(const epCase *c, uint32_t rank, uint32_t token, uint32_t k, void *arg) {
  static const int64_t rows[4][4] = {{-1, -1, -1, -1}, {0, -1, 3, -1}, {-1, 1, -1, -1}, {0, 1, 2, 3}};
  (void)c, (void)arg;
  return rows[(token + rank) % 4][k];
}

static void minusOneEntries(void **state) {
  (void)state;
  for (size_t l = 0; l < LENGTH(layouts); l++)
    for (int wide = 0; wide < 2; wide++) {
      epCase c = small(2, layouts[l]);
      c.experts = 4, c.topk = 4, c.indexType = wide ? ncclInt64 : ncclInt32;
      epRound round;
      epRoundMake(&round, &c, (uint32_t[]){4, 4}, pickMixed, NULL);
      epCaseRun(&c, &round, 1, SCHEDULES);
      epRoundFree(&round);
    }
}

static void wideTopk(void **state) {
  (void)state;
  static const uint32_t topks[] = {1, 8, 9, 10, 16, 22, 32};
  for (size_t l = 0; l < LENGTH(layouts); l++)
    for (size_t i = 0; i < LENGTH(topks); i++) {
      epCase c = small(2, layouts[l]);
      c.experts = 64, c.topk = topks[i];
      epCaseRunRandom(&c, (uint32_t[]){4, 4}, 2);
    }
}

static void topkDoesNotDivideAWarp(void **state) {
  (void)state;
  static const uint32_t topks[] = {3, 5, 6, 7, 10, 12};
  for (size_t l = 0; l < LENGTH(layouts); l++)
    for (size_t i = 0; i < LENGTH(topks); i++) {
      epCase c = small(2, layouts[l]);
      c.experts = 32, c.topk = topks[i], c.maxTokens = 128, c.hidden = 8;
      epCaseRunRandom(&c, (uint32_t[]){128, 128}, 1);
    }
}

static void hiddenSizes(void **state) {
  (void)state;
  static const uint32_t hidden[] = {8, 136, 2880, 3072, 3584, 7168, 16384};
  for (size_t l = 0; l < LENGTH(layouts); l++) {
    epCase c = small(2, layouts[l]);
    for (size_t i = 0; i < LENGTH(hidden); i++) {
      c.hidden = hidden[i];
      epCaseRunRandom(&c, (uint32_t[]){3, 2}, 1);
    }
    c.type = ncclFloat32, c.hidden = 2884;
    epCaseRunRandom(&c, (uint32_t[]){3, 2}, 1);
    c.type = ncclFloat16, c.hidden = 1432;
    epCaseRunRandom(&c, (uint32_t[]){3, 2}, 1);
  }
}

/* Dispatch moves bytes of any type. */
static void byteTypes(void **state) {
  (void)state;
  static const ncclDataType_t types[] = {ncclFloat8e4m3, ncclFloat8e5m2, ncclUint8};
  for (size_t l = 0; l < LENGTH(layouts); l++)
    for (size_t i = 0; i < LENGTH(types); i++) {
      epCase c = small(2, layouts[l]);
      c.type = types[i], c.hidden = i ? 48 : 2880;
      epCaseRunRandom(&c, (uint32_t[]){5, 4}, 2);
    }
}

static void rankCounts(void **state) {
  (void)state;
  static const uint32_t ranks[] = {1, 3, 5, 6, 7, 12, 20, 24};
  uint32_t tokens[EP_TEST_MAX_RANKS];
  for (size_t l = 0; l < LENGTH(layouts); l++)
    for (size_t i = 0; i < LENGTH(ranks); i++) {
      epCase c = small(ranks[i], layouts[l]);
      c.experts = 2 * ranks[i], c.align = 4;
      for (uint32_t r = 0; r < ranks[i]; r++) tokens[r] = 1 + r % 6;
      epCaseRunRandom(&c, tokens, ranks[i] < 10 ? 2 : 1);
    }
}

static void expertsNotAMultipleOf8(void **state) {
  (void)state;
  for (size_t l = 0; l < LENGTH(layouts); l++) {
    epCase c = small(4, layouts[l]);
    c.experts = 20, c.topk = 5;
    epCaseRunRandom(&c, (uint32_t[]){8, 3, 0, 7}, SCHEDULES);
  }
}

static int64_t pickThreeAndFive(const epCase *c, uint32_t rank, uint32_t token, uint32_t k, void *arg) {
  (void)c, (void)k, (void)arg;
  if (rank) return token < 2 ? 3 : -1;
  return token < 3 ? 0 : 3;
}

/* Rank 0's experts receive 3, 0, 0, 5: counters must read {16, 0, 0, 16}, {0, 16, 16, 16}, 32. */
static void alignmentWithEmptyExperts(void **state) {
  (void)state;
  static const uint64_t padded[] = {16, 0, 0, 16}, offsets[] = {0, 16, 16, 16};
  epCase c = small(2, NCCL_EP_LAYOUT_EXPERT_MAJOR);
  c.topk = 1, c.align = 16;
  epRound round;
  epRoundMake(&round, &c, (uint32_t[]){6, 4}, pickThreeAndFive, NULL);
  assert_memory_equal(round.ref->rank[0].perExpertPadded, padded, sizeof(padded));
  assert_memory_equal(round.ref->rank[0].offset, offsets, sizeof(offsets));
  assert_int_equal(round.ref->rank[0].needed, 32);
  epCaseRun(&c, &round, 1, SCHEDULES);
  epRoundFree(&round);
}

static void alignments(void **state) {
  (void)state;
  static const uint32_t aligns[] = {1, 2, 3, 7, 16, 100, 128};
  for (size_t i = 0; i < LENGTH(aligns); i++) {
    epCase c = small(3, NCCL_EP_LAYOUT_EXPERT_MAJOR);
    c.align = aligns[i];
    epCaseRunRandom(&c, (uint32_t[]){8, 1, 5}, 2);
  }
}

static void moreRanksThanBlocks(void **state) {
  (void)state;
  static const uint32_t ranks[] = {20, 32};
  uint32_t tokens[EP_TEST_MAX_RANKS];
  for (size_t i = 0; i < LENGTH(ranks); i++) {
    epCase c = small(ranks[i], layouts[i % 2]);
    c.experts = ranks[i], c.maxSms = 4, c.maxTokens = 4;
    for (uint32_t r = 0; r < ranks[i]; r++) tokens[r] = r % 5;
    epCaseRunRandom(&c, tokens, 1);
  }
}

static int64_t pickRepeated(const epCase *c, uint32_t rank, uint32_t token, uint32_t k, void *arg) {
  (void)arg;
  return (rank + token + k / 2) % c->experts;
}

static void repeatedIds(void **state) {
  (void)state;
  for (size_t l = 0; l < LENGTH(layouts); l++) {
    epCase c = small(3, layouts[l]);
    c.topk = 6;
    epRound round;
    epRoundMake(&round, &c, (uint32_t[]){8, 8, 7}, pickRepeated, NULL);
    epCaseRun(&c, &round, 1, SCHEDULES);
    epRoundFree(&round);
  }
}

static void bigBudget(void **state) {
  (void)state;
  for (size_t l = 0; l < LENGTH(layouts); l++) {
    epCase c = small(3, layouts[l]);
    c.budget = 200, c.align = 8, c.groupTopk = 8;
    epCaseRunRandom(&c, (uint32_t[]){8, 2, 5}, SCHEDULES);
  }
}

/* Kernels of a group after each batch size: the first compiles all that the shape needs, no other compiles any. */
static void batchSizesBody(epTestRank *me) {
  const epRound *rounds = me->arg;
  epRun run = {0};
  int kernels = 0;
  epGroupMake(me, rounds[0].c);
  if (!me->group) return;
  for (int i = 0; i < 8; i++) {
    epRunUpdate(me, &run, &rounds[i]);
    epRunDispatch(me, &run);
    epRunCombine(me, &run);
    if (i == 0) kernels = me->group->kernelCount;
    EXPECT(me, kernels == 3 && me->group->kernelCount == kernels, "%d kernels after %d batch sizes, %d after the first",
           me->group->kernelCount, i + 1, kernels);
  }
  epRunFree(me, &run);
  epGroupFree(me);
}

static void oneKernelForAllBatchSizes(void **state) {
  (void)state;
  static const uint32_t tokens[8][2] = {{1, 1}, {2, 1}, {3, 3}, {8, 5}, {31, 0}, {64, 64}, {100, 7}, {128, 128}};
  for (size_t l = 0; l < LENGTH(layouts); l++) {
    epCase c = small(2, layouts[l]);
    epRound rounds[8];
    uint64_t seed = 7;
    c.maxTokens = 128;
    for (int i = 0; i < 8; i++) epRoundMake(&rounds[i], &c, tokens[i], epPickRandom, &seed);
    epTestWorld world = {.ranks = 2, .seed = 900 + l, .arg = rounds};
    epWorldRun(&world, batchSizesBody);
    for (int i = 0; i < 8; i++) epRoundFree(&rounds[i]);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(zeroTokens),
      cmocka_unit_test(nothingReceived),
      cmocka_unit_test(raggedAndChanging),
      cmocka_unit_test(oddCounts),
      cmocka_unit_test(minusOneEntries),
      cmocka_unit_test(wideTopk),
      cmocka_unit_test(topkDoesNotDivideAWarp),
      cmocka_unit_test(hiddenSizes),
      cmocka_unit_test(byteTypes),
      cmocka_unit_test(rankCounts),
      cmocka_unit_test(expertsNotAMultipleOf8),
      cmocka_unit_test(alignmentWithEmptyExperts),
      cmocka_unit_test(alignments),
      cmocka_unit_test(moreRanksThanBlocks),
      cmocka_unit_test(repeatedIds),
      cmocka_unit_test(bigBudget),
      cmocka_unit_test(oneKernelForAllBatchSizes),
  };
  return cmocka_run_group_tests_name("cases", tests, NULL, NULL);
}
