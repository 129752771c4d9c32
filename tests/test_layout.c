/* The layout header against brute force: sections are aligned and disjoint and hold what they are for, sizes grow with
 * every parameter, offsets survive 64-bit sizes. Element counts here are written down again on purpose, not taken from
 * the header. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "abi.h"
#include "ll_layout.h"

__extension__ typedef unsigned __int128 wideCount;

typedef struct section {
  const char *name;
  uint64_t at;
  wideCount bytes;
} section;

static void checkSections(const section *s, size_t n, uint64_t total) {
  for (size_t i = 0; i < n; i++) {
    if (s[i].at % EP_SECTION_ALIGN) fail_msg("%s is not aligned: %llu", s[i].name, (unsigned long long)s[i].at);
    if ((wideCount)s[i].at + s[i].bytes > total) fail_msg("%s passes the end", s[i].name);
    for (size_t j = 0; j < n; j++) {
      if (i == j || !s[i].bytes || !s[j].bytes) continue;
      if (s[i].at < (wideCount)s[j].at + s[j].bytes && s[j].at < (wideCount)s[i].at + s[i].bytes)
        fail_msg("%s overlaps %s", s[i].name, s[j].name);
    }
  }
  assert_int_equal(total % EP_SECTION_ALIGN, 0);
}

static wideCount roundUp(wideCount v, wideCount a) { return (v + a - 1) / a * a; }

static void checkWindow(epShape s) {
  epWindowLayout w = epWindowLayoutOf(s);
  wideCount R = s.ranks, words = s.experts / s.ranks + 1, K = s.topk, rows = s.stageRows;
  wideCount stride = roundUp(s.maxRowBytes + roundUp(4 * K, 16), 128);
  wideCount chunks = (wideCount)s.maxTokens * (s.maxRowBytes >= 8192 ? 4 : 1);
  assert_true(w.stageStride == stride);
  assert_true(w.chunks == chunks);
  assert_true(w.metaWords == 1 + K);
  section all[] = {
      {"counts", w.counts, 2 * R * words * 8},
      {"replies", w.replies, 2 * R * words * 8},
      {"meta", w.meta, 2 * R * s.maxTokens * (1 + K) * 4},
      {"metaFlags", w.metaFlags, R * 4},
      {"stageFlags", w.stageFlags, R * chunks * 4},
      {"credits", w.credits, R * 4},
      {"stage", w.stage, (R - 1) * rows * stride},
  };
  checkSections(all, sizeof(all) / sizeof(all[0]), w.bytes);
}

static void checkRecord(uint32_t ranks, uint32_t experts, uint32_t topk, uint32_t maxTokens) {
  epRecordLayout r = epRecordLayoutOf(ranks, experts, topk, maxTokens);
  wideCount R = ranks, E = experts, L = experts / ranks, B = maxTokens, K = topk;
  section all[] = {
      {"header", r.header, sizeof(epRecordHeader)},
      {"topk", r.topk, B * K * 4},
      {"sendRow", r.sendRow, B * K * 4},
      {"sendPos", r.sendPos, B * K * 4},
      {"sendSlot", r.sendSlot, E * 4},
      {"sendBase", r.sendBase, R * 4},
      {"recvCount", r.recvCount, R * 4},
      {"recvBase", r.recvBase, (R + 1) * 4},
      {"slotBase", r.slotBase, R * L * 4},
      {"zoneBase", r.zoneBase, (L + 1) * 4},
      {"zoneCount", r.zoneCount, L * 4},
      {"recvMeta", r.recvMeta, R * B * (1 + K) * 4},
  };
  assert_int_equal(r.header, 0);
  checkSections(all, sizeof(all) / sizeof(all[0]), r.bytes);
}

static void checkScratch(uint32_t ranks, uint32_t experts) {
  epScratchLayout s = epScratchLayoutOf(ranks, experts);
  section all[] = {
      {"state", s.state, sizeof(epGroupState)},
      {"histogram", s.histogram, (wideCount)EP_MAX_UPDATE_BLOCKS * ((wideCount)experts + ranks) * 4},
  };
  checkSections(all, sizeof(all) / sizeof(all[0]), s.bytes);
}

static const uint32_t rankCounts[] = {1, 2, 3, 5, 7, 8, 20, 64, 1024};
static const uint32_t topks[] = {1, 2, 3, 8, 9, 31, 32};
static const uint32_t tokenCounts[] = {1, 2, 7, 8, 9, 127, 4096, 32768};
static const uint32_t rowBytes[] = {16, 48, 272, 14336, 65536};
#define LENGTH(a) (sizeof(a) / sizeof((a)[0]))
#define EACH(i, a) for (size_t i = 0; i < LENGTH(a); i++)

static void sectionsAreDisjoint(void **state) {
  (void)state;
  EACH(r, rankCounts) EACH(k, topks) EACH(b, tokenCounts) {
    uint32_t ranks = rankCounts[r], topk = topks[k], tokens = tokenCounts[b];
    for (uint32_t locals = 1; locals <= 256; locals = locals * 3 + 1) {
      if (locals * ranks > EP_MAX_EXPERTS) break;
      EACH(h, rowBytes) {
        epShape s = {ranks, ranks * locals, topk, tokens, tokens, rowBytes[h]};
        checkWindow(s);
        s.stageRows = tokens * topk;
        checkWindow(s);
      }
      checkRecord(ranks, ranks * locals, topk, tokens);
      checkScratch(ranks, ranks * locals);
    }
  }
}

static void sizesAreMonotone(void **state) {
  (void)state;
  EACH(r, rankCounts) EACH(k, topks) EACH(b, tokenCounts) EACH(h, rowBytes) {
    if (rankCounts[r] * 2 > EP_MAX_EXPERTS) continue;
    epShape s = {rankCounts[r], rankCounts[r] * 2, topks[k], tokenCounts[b], tokenCounts[b], rowBytes[h]}, t;
    uint64_t bytes = epWindowLayoutOf(s).bytes,
             record = epRecordLayoutOf(s.ranks, s.experts, s.topk, s.maxTokens).bytes;
    t = s, t.topk++;
    assert_true(epWindowLayoutOf(t).bytes >= bytes);
    assert_true(epRecordLayoutOf(t.ranks, t.experts, t.topk, t.maxTokens).bytes >= record);
    t = s, t.maxTokens++, t.stageRows++;
    assert_true(epWindowLayoutOf(t).bytes >= bytes);
    assert_true(epRecordLayoutOf(t.ranks, t.experts, t.topk, t.maxTokens).bytes >= record);
    t = s, t.maxRowBytes += 16;
    assert_true(epWindowLayoutOf(t).bytes >= bytes);
    t = s, t.experts += t.ranks;
    assert_true(epWindowLayoutOf(t).bytes >= bytes);
    assert_true(epRecordLayoutOf(t.ranks, t.experts, t.topk, t.maxTokens).bytes >= record);
    assert_true(epScratchLayoutOf(t.ranks, t.experts).bytes >= epScratchLayoutOf(s.ranks, s.experts).bytes);
    t = s, t.ranks++, t.experts = t.ranks * 2;
    assert_true(epWindowLayoutOf(t).bytes >= bytes);
    assert_true(epRecordLayoutOf(t.ranks, t.experts, t.topk, t.maxTokens).bytes >= record);
  }
}

/* R = 1024 ranks, B = 32768 tokens, rows of 64 KiB: a window of 2.2 TB. */
static void offsetsAre64Bit(void **state) {
  (void)state;
  epShape s = {1024, 2048, 32, 32768, 32768, EP_MAX_ROW_BYTES};
  epWindowLayout w = epWindowLayoutOf(s);
  wideCount stride = 65536 + 128, stage = (wideCount)1023 * 32768 * stride;
  assert_true(w.bytes > stage && w.bytes < stage + ((wideCount)1 << 34));
  assert_true(w.stage > UINT32_MAX); /* 2 * 1024 * 32768 * 33 * 4 bytes of meta rows lie before it */
  assert_true(epStageRow(&w, s.stageRows, 0, 1023, 32767) == w.stage + stage - stride);
  assert_true(epStageRow(&w, s.stageRows, 1023, 1022, 32767) == w.stage + stage - stride);
  assert_true(epStageRow(&w, s.stageRows, 5, 900, 17) == w.stage + ((wideCount)899 * 32768 + 17) * stride);
  epRecordLayout r = epRecordLayoutOf(1024, 2048, 32, 32768);
  assert_true(r.bytes - r.recvMeta >= (wideCount)1024 * 32768 * 33 * 4);
  assert_true(epMaxFlatRows(1024, 32768) == (uint64_t)1024 * 32768);
  assert_true(epMaxSlots(1024, 32768, 32, 2, 128) >= (wideCount)1024 * 32768 * 32);
}

/* Every (writer, row) of an owner has bytes of its own inside the staging section. */
static void stageRowsAreInjective(void **state) {
  (void)state;
  static const uint32_t ranks[] = {1, 2, 3, 5, 8}, rows[] = {1, 2, 9, 33};
  EACH(r, ranks) EACH(b, rows) {
    epShape s = {ranks[r], ranks[r] * 3, 5, rows[b], rows[b], 48};
    epWindowLayout w = epWindowLayoutOf(s);
    char *used = calloc(1, w.bytes + 1);
    assert_non_null(used);
    for (uint32_t owner = 0; owner < s.ranks; owner++) {
      memset(used, 0, w.bytes);
      for (uint32_t writer = 0; writer < s.ranks; writer++) {
        if (writer == owner) continue;
        for (uint32_t row = 0; row < s.stageRows; row++) {
          uint64_t at = epStageRow(&w, s.stageRows, owner, writer, row);
          assert_true(at >= w.stage && at + w.stageStride <= w.bytes && at % EP_ROW_ALIGN == 0);
          for (uint64_t i = 0; i < w.stageStride; i++) assert_int_equal(used[at + i]++, 0);
        }
      }
    }
    free(used);
  }
}

static void regionsAreABijection(void **state) {
  (void)state;
  for (uint32_t ranks = 1; ranks <= 40; ranks++)
    for (uint32_t me = 0; me < ranks; me++) {
      char seen[40] = {0};
      for (uint32_t p = 0; p < ranks; p++)
        if (p != me) {
          uint32_t region = epRegionOf(me, p);
          assert_true(region < ranks - 1);
          assert_int_equal(seen[region]++, 0);
        }
    }
}

static void entriesRoundTrip(void **state) {
  (void)state;
  for (uint32_t expert = 0; expert < 256; expert += 5)
    for (uint32_t pos = 0; pos < EP_MAX_ENTRIES; pos += 4099) {
      uint32_t e = EP_ENTRY(expert, pos);
      assert_int_equal(EP_ENTRY_EXPERT(e), expert);
      assert_int_equal(EP_ENTRY_POS(e), pos);
      assert_int_not_equal(e, EP_NONE);
    }
  uint32_t last = EP_ENTRY(EP_MAX_EXPERTS - 1, EP_MAX_ENTRIES - 1);
  assert_int_equal(EP_ENTRY_EXPERT(last), EP_MAX_EXPERTS - 1);
  assert_int_not_equal(last, EP_NONE);
}

/* No routing needs more slots than the bound says, with repeated ids and any alignment. */
static void boundsHold(void **state) {
  (void)state;
  uint32_t seed = 12345;
  for (int n = 0; n < 20000; n++) {
#define RANDOM(limit) ((seed = seed * 1664525u + 1013904223u) >> 8) % (limit)
    uint32_t R = 1 + RANDOM(4), B = 1 + RANDOM(5), K = 1 + RANDOM(6), L = 1 + RANDOM(6), align = RANDOM(9);
    uint32_t count[6] = {0}, a = align ? align : 1;
    uint64_t slots = 0;
    for (uint32_t i = 0; i < R * B * K; i++)
      if (RANDOM(10)) count[RANDOM(L)]++;
    for (uint32_t e = 0; e < L; e++) slots += (count[e] + a - 1) / a * a;
    assert_true(slots <= epMaxSlots(R, B, K, L, align));
#undef RANDOM
  }
}

/* Rows of a chunk: at least one, never more for longer rows, so that there are flags enough for any row size. */
static void chunksFitTheirFlags(void **state) {
  (void)state;
  uint32_t before = UINT32_MAX;
  for (uint32_t bytes = 16; bytes <= EP_MAX_ROW_BYTES; bytes += 16) {
    uint32_t rows = epChunkRows(bytes);
    assert_true(rows >= 1 && rows <= before);
    before = rows;
  }
}

/* The configuration's bytes are a cache key: no padding. The kernel's arguments fit a launch. */
static void configurationHasNoPadding(void **state) {
  (void)state;
  size_t fields = 0;
#define X(name) fields++;
  EP_CONFIG_FIELDS(X)
#undef X
  assert_int_equal(sizeof(epConfig), fields * sizeof(uint32_t));
  assert_true(sizeof(epUpdateArgs) <= 4096 && sizeof(epDispatchArgs) <= 4096 && sizeof(epCombineArgs) <= 4096);
  assert_int_equal(sizeof(epRecordHeader) % 16, 0);
}

/* Low latency: within 2 * EP_LL_SLICES operations every unit of a half is cleared, so no tag comes back while an older unit has it. */
static void slicesCoverTheStage(void **state) {
  (void)state;
  static const uint64_t sizes[] = {0, 1, 7, EP_LL_SLICES - 1, EP_LL_SLICES, EP_LL_SLICES + 1, 5 * EP_LL_SLICES + 3};
  assert_true(2 * EP_LL_SLICES < EP_UNIT_TAG);
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
    for (uint32_t half = 0; half < 2; half++) {
      unsigned char *cleared = calloc(sizes[i] + 1, 1);
      assert_non_null(cleared);
      for (uint32_t g = 0; g < 2 * EP_LL_SLICES; g++) {
        uint32_t gen = 0xffff0000u + g; /* wraps around on the way */
        epLlSlice s = epLlSliceOf(sizes[i], gen);
        if (((gen + 1) & 1) != half) continue;
        assert_true(s.first + s.count <= sizes[i]);
        memset(cleared + s.first, 1, s.count);
      }
      assert_null(memchr(cleared, 0, sizes[i]));
      free(cleared);
    }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(sectionsAreDisjoint),
      cmocka_unit_test(sizesAreMonotone),
      cmocka_unit_test(offsetsAre64Bit),
      cmocka_unit_test(stageRowsAreInjective),
      cmocka_unit_test(regionsAreABijection),
      cmocka_unit_test(entriesRoundTrip),
      cmocka_unit_test(boundsHold),
      cmocka_unit_test(chunksFitTheirFlags),
      cmocka_unit_test(configurationHasNoPadding),
      cmocka_unit_test(slicesCoverTheStage),
  };
  return cmocka_run_group_tests_name("layout", tests, NULL, NULL);
}
