/* Test data from a hash, so that any process can say what any rank holds without asking it. The hash is splitmix64's
 * finaliser: fast enough to fill gigabytes, good enough that neighbouring rows differ everywhere. */
#include "data.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "failure.h"

#define GOLDEN 0x9e3779b97f4a7c15ull

static uint64_t mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebull;
  return x ^ x >> 31;
}

uint64_t epDataHash(uint64_t seed, uint64_t a, uint64_t b) {
  return mix(mix(mix(seed + GOLDEN) + a * GOLDEN) + (b + 1) * GOLDEN);
}

/* Where the exponent of a type lies, and the bits of an element. */
typedef struct exponentField {
  unsigned width, low, bias;
  uint64_t mask;
} exponentField;
static const exponentField exponents[] = {[EP_REF_BF16] = {16, 7, 127, 255},
                                          [EP_REF_F16] = {16, 10, 15, 31},
                                          [EP_REF_F32] = {32, 23, 127, 255},
                                          [EP_REF_E4M3] = {8, 3, 7, 15}};

/* Makes each element of a 64-bit word finite: an exponent of all ones loses its lowest bit. */
static uint64_t finiteWord(const exponentField *e, uint64_t word) {
  for (unsigned at = e->low; at < 64; at += e->width)
    if ((word >> at & e->mask) == e->mask) word &= ~(1ull << at);
  return word;
}

/* Exponents of 2^-8 to 2^7: four random bits over the bias less 8. */
static uint64_t nearOneWord(const exponentField *e, uint64_t word) {
  for (unsigned at = e->low; at < 64; at += e->width) {
    uint64_t exponent = e->bias - 8 + (word >> at & 15);
    word = (word & ~(e->mask << at)) | exponent << at;
  }
  return word;
}

void epDataRow(epRefType type, uint64_t seed, epDataKind kind, uint32_t rank, uint64_t row, void *out,
               uint32_t hidden) {
  size_t bytes = hidden * epRefTypeBytes(type);
  uint64_t state = epDataHash(seed, (uint64_t)kind << 32 | rank, row);
  int moved = kind == EP_DATA_TOKEN || kind == EP_DATA_SCALE || type == EP_REF_E4M3; /* and not summed */
  for (size_t at = 0; at < bytes; at += 8) {
    uint64_t word = mix(state += GOLDEN);
    word = moved ? finiteWord(&exponents[type], word) : nearOneWord(&exponents[type], word);
    memcpy((char *)out + at, &word, bytes - at < 8 ? bytes - at : 8);
  }
}

void epDataScales(uint64_t seed, epDataKind kind, uint32_t rank, uint64_t row, void *out, uint32_t bytes) {
  epDataRow(EP_REF_F32, epDataHash(seed, (uint64_t)kind, 13), EP_DATA_SCALE, rank, row, out, bytes / 4);
}

float epDataWeight(uint64_t seed, epDataKind kind, uint32_t rank, uint64_t row, uint32_t k) {
  uint64_t bits = epDataHash(epDataHash(seed, (uint64_t)kind << 32 | rank, row), 7, k);
  return (float)((bits >> 40) + 1) * 0x1p-24f;
}

/* ---- Routing ---------------------------------------------------------------------------------------------------- */

typedef struct generator {
  uint64_t state;
} generator;

static uint64_t next(generator *g) { return mix(g->state += GOLDEN); }
static uint32_t below(generator *g, uint32_t n) { return (uint32_t)((next(g) >> 32) * n >> 32); }
static double unit(generator *g) { return (double)((next(g) >> 11) + 1) * 0x1p-53; }

static int holds(const int64_t *row, uint32_t count, int64_t value) {
  for (uint32_t i = 0; i < count; i++)
    if (row[i] == value) return 1;
  return 0;
}

/* Distinct experts out of `groups` groups of `width` experts. */
static void drawDistinct(generator *g, const uint32_t *groups, uint32_t groupCount, uint32_t width, uint32_t topk,
                         int64_t *row) {
  for (uint32_t k = 0; k < topk;) {
    uint32_t pick = below(g, groupCount * width);
    int64_t expert = (int64_t)groups[pick / width] * width + pick % width;
    if (!holds(row, k, expert)) row[k++] = expert;
  }
}

static void drawGrouped(generator *g, const epRouteSpec *spec, int64_t *row) {
  uint32_t groups[4];
  for (uint32_t i = 0; i < 4;) {
    uint32_t j = 0, group = below(g, 8);
    while (j < i && groups[j] != group) j++;
    if (j == i) groups[i++] = group;
  }
  drawDistinct(g, groups, 4, spec->experts / 8, spec->topk, row);
}

/* Weighted sampling without replacement: the topk smallest of exponential variates with rate 1 / (1 + e). */
static void drawZipf(generator *g, const epRouteSpec *spec, int64_t *row) {
  double keys[32];
  uint32_t held = 0;
  for (uint32_t e = 0; e < spec->experts; e++) {
    double key = -log(unit(g)) * (1.0 + e);
    uint32_t at = held < spec->topk ? held++ : spec->topk;
    while (at > 0 && keys[at - 1] > key) {
      if (at < spec->topk) {
        keys[at] = keys[at - 1];
        row[at] = row[at - 1];
      }
      at--;
    }
    if (at < spec->topk) {
      keys[at] = key;
      row[at] = (int64_t)e;
    }
  }
}

static void drawRow(generator *g, const epRouteSpec *spec, uint64_t seed, uint32_t token, size_t fileRow,
                    int64_t *row) {
  const uint32_t all = 0;
  for (uint32_t k = 0; k < spec->topk; k++) row[k] = -1;
  switch (spec->kind) {
  case EP_ROUTE_UNIFORM:
    drawDistinct(g, &all, 1, spec->experts, spec->topk, row);
    break;
  case EP_ROUTE_GROUPED:
    drawGrouped(g, spec, row);
    break;
  case EP_ROUTE_ZIPF:
    drawZipf(g, spec, row);
    break;
  case EP_ROUTE_ONE_EXPERT:
    row[token % spec->topk] = (int64_t)(epDataHash(seed, 11, 0) % spec->experts);
    break;
  case EP_ROUTE_REPEATED:
    for (uint32_t k = 0; k < spec->topk; k++) row[k] = below(g, spec->experts);
    break;
  case EP_ROUTE_NONE:
    break;
  case EP_ROUTE_FILE:
    memcpy(row, spec->fileEntries + fileRow * spec->topk, spec->topk * sizeof(*row));
    break;
  }
  for (uint32_t k = 0; k < spec->topk && spec->minusOne > 0; k++)
    if (unit(g) <= spec->minusOne) row[k] = -1;
}

static int checkSpec(const epRouteSpec *spec) {
  if (spec->topk < 1 || spec->topk > 32) return epToolFail("--topk %u: expected 1 to 32", spec->topk);
  if ((spec->kind == EP_ROUTE_UNIFORM || spec->kind == EP_ROUTE_ZIPF) && spec->topk > spec->experts)
    return epToolFail("--topk %u: a token cannot select more than the %u experts there are, unless it repeats some",
                      spec->topk, spec->experts);
  if (spec->kind == EP_ROUTE_GROUPED && (spec->experts % 8 || spec->topk > spec->experts / 2))
    return epToolFail(
        "--routing grouped: expected experts in 8 equal groups and topk at most half of them, got %u experts "
        "and topk %u",
        spec->experts, spec->topk);
  return 0;
}

int epRoutingMake(const epRouteSpec *spec, uint64_t seed, epRouting *out) {
  size_t fileRow = 0;
  generator g = {epDataHash(seed, 3, 0)};
  *out = (epRouting){.ranks = spec->ranks};
  if (checkSpec(spec)) return -1;
  out->tokens = calloc(spec->ranks, sizeof(*out->tokens));
  out->idx = calloc(spec->ranks, sizeof(*out->idx));
  if (!out->tokens || !out->idx) goto noMemory;
  for (uint32_t r = 0; r < spec->ranks; r++) {
    uint32_t low = spec->tokensLow[r], high = spec->tokensHigh[r];
    out->tokens[r] = low == high ? low : low + below(&g, high - low + 1);
    out->idx[r] = malloc(((size_t)out->tokens[r] * spec->topk + 1) * sizeof(int64_t));
    if (!out->idx[r]) goto noMemory;
    if (spec->kind == EP_ROUTE_FILE && fileRow + out->tokens[r] > spec->fileRows) {
      epToolFail("--routing %s: it holds %zu rows (tokens), but rank %u needs rows %zu to %zu", spec->filePath,
                 spec->fileRows, r, fileRow + 1, fileRow + out->tokens[r]);
      goto fail;
    }
    for (uint32_t t = 0; t < out->tokens[r]; t++)
      drawRow(&g, spec, seed, t, fileRow++, out->idx[r] + (size_t)t * spec->topk);
  }
  return 0;
noMemory:
  epToolFail("routing: out of host memory");
fail:
  epRoutingFree(out);
  return -1;
}

void epRoutingFree(epRouting *routing) {
  for (uint32_t r = 0; routing->idx && r < routing->ranks; r++) free(routing->idx[r]);
  free(routing->idx);
  free(routing->tokens);
  *routing = (epRouting){0};
}

#define SEPARATORS " \t,\r"

/* -1 or an expert's id. What is no number keeps only what a terminal can show, for the message. */
static int parseId(char *text, uint32_t experts, int64_t *id) {
  char *end;
  errno = 0;
  *id = strtoll(text, &end, 10);
  if (end != text && !*end && !errno && *id >= -1 && *id < (int64_t)experts) return 0;
  if (strlen(text) > 40) text[40] = 0;
  for (char *c = text; *c; c++)
    if (*c < ' ' || *c > '~') *c = '?';
  return -1;
}

/* One token a line: topk ids, separated by blanks or commas; '#' starts a comment. */
static int readFile(const char *path, epRouteSpec *spec) {
  FILE *file = fopen(path, "r");
  char *line = NULL, *rest = NULL;
  size_t lineSize = 0, number = 0, capacity = 0;
  int64_t *entries = NULL;
  int rc = -1;
  if (!file)
    return epToolFail(
        "--routing %s: neither a kind (uniform, grouped, zipf, one-expert, repeated, none) nor a file: %s", path,
        strerror(errno));
  spec->fileRows = 0;
  spec->filePath = path;
  while (getline(&line, &lineSize, file) >= 0) {
    uint32_t count = 0;
    char *at;
    number++;
    line[strcspn(line, "#\n")] = 0;
    if (spec->fileRows * spec->topk + spec->topk > capacity) {
      int64_t *more = realloc(entries, (capacity = 2 * capacity + 64 * (size_t)spec->topk) * sizeof(*more));
      if (!more) {
        epToolFail("--routing %s: out of host memory", path);
        goto done;
      }
      entries = more;
    }
    for (at = strtok_r(line, SEPARATORS, &rest); at; at = strtok_r(NULL, SEPARATORS, &rest)) {
      int64_t id;
      if (parseId(at, spec->experts, &id)) {
        epToolFail("--routing %s:%zu: '%s': expected an expert id from 0 to %u, or -1", path, number, at,
                   spec->experts - 1);
        goto done;
      }
      if (count < spec->topk) entries[spec->fileRows * spec->topk + count] = id;
      count++;
    }
    if (count && count != spec->topk) {
      epToolFail("--routing %s:%zu: %u expert ids: expected %u, as --topk says", path, number, count, spec->topk);
      goto done;
    }
    spec->fileRows += count > 0;
  }
  if (ferror(file)) {
    epToolFail("--routing %s: cannot read it: %s", path, strerror(errno));
    goto done;
  }
  spec->fileEntries = entries;
  entries = NULL;
  rc = 0;
done:
  free(entries);
  free(line);
  fclose(file);
  return rc;
}

int epRouteParse(const char *text, epRouteSpec *spec) {
  static const char *const names[] = {"uniform", "grouped", "zipf", "one-expert", "repeated", "none"};
  for (unsigned i = 0; i < sizeof(names) / sizeof(*names); i++)
    if (!strcmp(text, names[i])) {
      spec->kind = (epRouteKind)i;
      return 0;
    }
  spec->kind = EP_ROUTE_FILE;
  return readFile(text, spec);
}

void epRouteSpecFree(epRouteSpec *spec) {
  free((void *)(uintptr_t)spec->fileEntries);
  spec->fileEntries = NULL;
}
