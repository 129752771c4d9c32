/* Comparison of one rank's results with the reference. Rows are generated when they are compared, from the hash that
 * made the inputs: no rank needs another's memory, and nothing large is kept. */
#include "check.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "failure.h"
#include "spread.h"

#define UPLOAD_ROWS 4096u

static void take(uint64_t *hash, const void *data, size_t bytes) {
  if (hash) *hash = XXH3_64bits_withSeed(data, bytes, *hash);
}

/* ---- Inputs ----------------------------------------------------------------------------------------------------- */

typedef struct tokenRows {
  const epLayerConfig *config;
  const epCheckCase *what;
  epDataKind kind;
  uint32_t rank;
  unsigned char *rows, *scales;
  float *weights;
} tokenRows;

static void makeTokens(void *context, unsigned part, uint64_t first, uint64_t end) {
  const tokenRows *m = context;
  const epLayerConfig *c = m->config;
  size_t row = epLayerRowBytes(c), scales = epLayerScaleBytes(c);
  (void)part;
  for (uint64_t t = first; t < end; t++) {
    epDataScales(m->what->seed, m->kind, m->rank, t, m->scales + t * scales, (uint32_t)scales);
    epDataRow(c->type, m->what->seed, m->kind, m->rank, t, m->rows + t * row, c->hidden);
    for (uint32_t k = 0; k < c->topk; k++)
      m->weights[t * c->topk + k] = epDataWeight(m->what->seed, EP_DATA_WEIGHT, m->rank, t, k);
  }
}

int epCheckUploadTokens(epLayer *layer, const epCheckCase *what, epDataKind kind) {
  const epLayerConfig *c = &layer->config;
  uint32_t rank = (uint32_t)layer->port->rank, tokens = what->routing->tokens[rank];
  size_t row = epLayerRowBytes(c), scales = epLayerScaleBytes(c);
  unsigned char *rows = malloc(tokens * row + 1), *scaleRows = malloc(tokens * scales + 1);
  float *weights = malloc((size_t)tokens * c->topk * sizeof(*weights) + 1);
  int rc = -1;
  if (!rows || !scaleRows || !weights) {
    epToolFail("out of host memory");
    goto done;
  }
  tokenRows make = {c, what, kind, rank, rows, scaleRows, weights};
  epSpread(tokens, makeTokens, &make);
  rc = epPortCopy(layer->port, layer->inTokens.data, rows, tokens * row) ||
       epPortCopy(layer->port, layer->inWeights.data, weights, (size_t)tokens * c->topk * sizeof(*weights)) ||
       (scales && epPortCopy(layer->port, layer->inScales.data, scaleRows, tokens * scales));
done:
  free(rows);
  free(scaleRows);
  free(weights);
  return rc ? -1 : 0;
}

/* The rows that combine's sums start from. */
static int uploadBias(epLayer *layer, const epCheckCase *what) {
  const epLayerConfig *c = &layer->config;
  uint32_t rank = (uint32_t)layer->port->rank, tokens = what->routing->tokens[rank];
  size_t row = epLayerCombineRowBytes(c);
  unsigned char *rows = malloc(tokens * row + 1);
  int rc = rows ? 0 : epToolFail("out of host memory");
  for (uint32_t b = 0; b < c->bias && !rc; b++) {
    for (uint32_t t = 0; t < tokens; t++)
      epDataRow(c->combineType, what->seed, (epDataKind)(EP_DATA_BIAS + b), rank, t, rows + t * row, c->hidden);
    rc = epPortCopy(layer->port, layer->bias[b].data, rows, tokens * row);
  }
  free(rows);
  return rc;
}

typedef struct outputRows {
  const epLayerConfig *config;
  const epCheckCase *what;
  uint32_t rank;
  uint64_t first; /* row of the first that is made */
  unsigned char *rows;
  float *weights, *scales;
} outputRows;

/* Padding rows are NaN: combine must not look at them. */
static void makeOutputs(void *context, unsigned part, uint64_t first, uint64_t end) {
  const outputRows *m = context;
  const epLayerConfig *c = m->config;
  uint32_t perRow = epLayerRowWeights(c);
  size_t row = epLayerCombineRowBytes(c);
  (void)part;
  for (uint64_t i = first; i < end; i++) {
    uint64_t at = m->first + i;
    int padding = m->what->ref->rank[m->rank].row[at].source < 0;
    if (padding)
      memset(m->rows + i * row, EP_FILL_NAN, row);
    else
      epDataRow(c->combineType, m->what->seed, EP_DATA_OUTPUT, m->rank, at, m->rows + i * row, c->hidden);
    if (c->nvfp4) m->scales[i] = padding ? NAN : epRefNvfp4Scale(c->combineType, m->rows + i * row, c->hidden);
    for (uint32_t k = 0; k < perRow; k++)
      m->weights[i * perRow + k] = padding ? NAN : epDataWeight(m->what->seed, EP_DATA_GRAD_WEIGHT, m->rank, at, k);
  }
}

int epCheckUploadOutputs(epLayer *layer, const epCheckCase *what) {
  const epLayerConfig *c = &layer->config;
  uint32_t rank = (uint32_t)layer->port->rank, perRow = epLayerRowWeights(c);
  const epRefRank *mine = &what->ref->rank[rank];
  size_t row = epLayerCombineRowBytes(c);
  unsigned char *rows = malloc(UPLOAD_ROWS * row);
  float *weights = malloc((size_t)UPLOAD_ROWS * perRow * sizeof(*weights) + 1);
  float *scales = malloc(UPLOAD_ROWS * sizeof(*scales));
  int rc = -1;
  if (!rows || !weights || !scales) {
    epToolFail("out of host memory");
    goto done;
  }
  for (uint64_t first = 0; first < mine->rows; first += UPLOAD_ROWS) {
    size_t count = mine->rows - first < UPLOAD_ROWS ? (size_t)(mine->rows - first) : UPLOAD_ROWS;
    outputRows make = {c, what, rank, first, rows, weights, scales};
    epSpread(count, makeOutputs, &make);
    if (epPortCopy(layer->port, layer->expertOut.data + first * row, rows, count * row) ||
        (c->nvfp4 && epPortCopy(layer->port, layer->expertScales.data + first * sizeof(*scales), scales,
                                count * sizeof(*scales))) ||
        (c->backward && epPortCopy(layer->port, layer->expertWeights.data + first * perRow * sizeof(*weights), weights,
                                   count * perRow * sizeof(*weights))))
      goto done;
  }
  rc = uploadBias(layer, what);
done:
  free(rows);
  free(weights);
  free(scales);
  return rc;
}

/* ---- Comparing -------------------------------------------------------------------------------------------------- */

/* One tensor's comparison: tells the first wrong byte, counts wrong rows. */
typedef struct comparison {
  int rank;
  const char *tensor;
  uint64_t wrongRows;
  char first[256];
} comparison;

static void describe(char *out, size_t size, epRefRow from) {
  if (from.source < 0)
    snprintf(out, size, from.source == EP_REF_UNUSED ? "unused" : "padding");
  else if (from.k < 0)
    snprintf(out, size, "from rank %d, token %d", from.source, from.token);
  else
    snprintf(out, size, "from rank %d, token %d, k %d", from.source, from.token, from.k);
}

static void noteRow(comparison *c, uint64_t row, const char *origin, const void *got, const void *want, size_t bytes,
                    size_t element) {
  const unsigned char *g = got, *w = want;
  char gotText[2 * 8 + 1] = "", wantText[2 * 8 + 1] = "";
  size_t at = 0, from;
  if (c->wrongRows++) return;
  while (at < bytes && g[at] == w[at]) at++;
  from = at / element * element;
  for (size_t i = 0; i < element; i++) { /* most significant byte first, as one reads numbers */
    snprintf(gotText + 2 * i, 3, "%02x", g[from + element - 1 - i]);
    snprintf(wantText + 2 * i, 3, "%02x", w[from + element - 1 - i]);
  }
  snprintf(c->first, sizeof(c->first), "row %llu (%s), byte %zu: got 0x%s, want 0x%s", (unsigned long long)row, origin,
           at, gotText, wantText);
}

static void compareRow(comparison *c, uint64_t row, epRefRow from, const void *got, const void *want, size_t bytes,
                       size_t element) {
  char origin[64];
  if (!memcmp(got, want, bytes)) return;
  describe(origin, sizeof(origin), from);
  noteRow(c, row, origin, got, want, bytes, element);
}

/* What the parts of a loop found, in their order. */
static void gather(comparison *all, const comparison *parts, unsigned count) {
  for (unsigned p = 0; p < count; p++) {
    if (!all->wrongRows && parts[p].wrongRows) memcpy(all->first, parts[p].first, sizeof(all->first));
    all->wrongRows += parts[p].wrongRows;
  }
}

typedef struct fillRows {
  comparison part[EP_SPREAD_MOST];
  const unsigned char *got;
  uint64_t first;
  size_t bytes, element;
  int fill;
} fillRows;

static void compareFilled(void *context, unsigned part, uint64_t first, uint64_t end) {
  fillRows *f = context;
  unsigned char want[8];
  memset(want, f->fill, sizeof(want));
  for (uint64_t row = f->first + first; row < f->first + end; row++) {
    const unsigned char *got = f->got + row * f->bytes;
    size_t at = 0;
    while (at + sizeof(want) <= f->bytes && !memcmp(got + at, want, sizeof(want))) at += sizeof(want);
    while (at < f->bytes && got[at] == f->fill) at++;
    if (at == f->bytes) continue;
    char origin[64];
    snprintf(origin, sizeof(origin), "beyond the received rows, column %zu", at / f->element);
    noteRow(&f->part[part], row, origin, got + at / f->element * f->element, want, f->element, f->element);
  }
}

/* Rows that nobody may touch still hold what they were filled with. */
static void compareFill(comparison *c, const unsigned char *got, uint64_t first, uint64_t end, size_t bytes, int fill,
                        size_t element) {
  fillRows all = {.got = got, .first = first, .bytes = bytes, .element = element, .fill = fill};
  if (end > first) gather(c, all.part, epSpread(end - first, compareFilled, &all));
}

static void conclude(const comparison *c, uint64_t rows) {
  if (c->wrongRows)
    epToolFail("rank %d: %s: %s; %llu of %llu rows are wrong", c->rank, c->tensor, c->first,
               (unsigned long long)c->wrongRows, (unsigned long long)rows);
}

typedef struct dispatchedRows {
  comparison part[EP_SPREAD_MOST];
  const epLayerConfig *config;
  const epCheckCase *what;
  epDataKind kind;
  uint32_t rank;
  const unsigned char *got;
  unsigned char *want; /* a row for each part */
} dispatchedRows;

static void compareDispatched(void *context, unsigned part, uint64_t first, uint64_t end) {
  dispatchedRows *d = context;
  const epLayerConfig *c = d->config;
  size_t row = epLayerRowBytes(c);
  unsigned char *want = d->want + part * row;
  for (uint64_t i = first; i < end; i++) {
    epRefRow from = d->what->ref->rank[d->rank].row[i];
    if (from.source < 0)
      memset(want, c->noZeroPad || from.source == EP_REF_UNUSED ? EP_FILL_BYTE : 0, row);
    else
      epDataRow(c->type, d->what->seed, d->kind, (uint32_t)from.source, (uint64_t)from.token, want, c->hidden);
    compareRow(&d->part[part], i, from, d->got + i * row, want, row, epRefTypeBytes(c->type));
  }
}

static void dispatchTokens(epLayer *layer, const epCheckCase *what, epDataKind kind, int backward,
                           const unsigned char *got, unsigned char *want) {
  const epLayerConfig *c = &layer->config;
  uint32_t rank = (uint32_t)layer->port->rank;
  uint64_t rows = what->ref->rank[rank].rows;
  comparison cmp = {.rank = layer->port->rank, .tensor = backward ? "dispatch (backward): tokens" : "dispatch: tokens"};
  dispatchedRows all = {.config = c, .what = what, .kind = kind, .rank = rank, .got = got, .want = want};
  gather(&cmp, all.part, epSpread(rows, compareDispatched, &all));
  compareFill(&cmp, got, rows, c->capacity, epLayerRowBytes(c), EP_FILL_BYTE, epRefTypeBytes(c->type));
  conclude(&cmp, rows);
}

/* Compares the rows, and blanks what it has compared: then nothing but the fill may be left, between columns too. */
static void dispatchScales(epLayer *layer, const epCheckCase *what, epDataKind kind, int backward, unsigned char *got,
                           unsigned char *work) {
  const epLayerConfig *c = &layer->config;
  const epRefRank *mine = &what->ref->rank[layer->port->rank];
  comparison cmp = {.rank = layer->port->rank, .tensor = backward ? "dispatch (backward): scales" : "dispatch: scales"};
  uint32_t bytes = epLayerScaleBytes(c);
  uint64_t stride = epLayerScaleStride(c);
  unsigned char *want = work, *found = work + bytes;
  for (uint64_t i = 0; i < mine->rows; i++) {
    epRefRow from = mine->row[i];
    if (from.source < 0)
      memset(want, c->noZeroPad || epLayerIsLl(c) ? EP_FILL_BYTE : 0, bytes);
    else
      epDataScales(what->seed, kind, (uint32_t)from.source, (uint64_t)from.token, want, bytes);
    for (uint32_t b = 0; b < bytes; b++) {
      unsigned char *at = got + epRefScaleOffset(bytes, stride, i, b);
      found[b] = *at;
      *at = EP_FILL_BYTE;
    }
    compareRow(&cmp, i, from, found, want, bytes, 4);
  }
  compareFill(&cmp, got, 0, 1, layer->outScales.bytes, EP_FILL_BYTE, 4);
  conclude(&cmp, mine->rows);
}

/* Rows of index and weights past the received ones are set in the flat layout with a budget, untouched otherwise. */
static void dispatchWeights(epLayer *layer, const epCheckCase *what, const float *got) {
  const epLayerConfig *c = &layer->config;
  uint32_t rank = (uint32_t)layer->port->rank, perRow = epLayerRowWeights(c);
  const epRefRank *mine = &what->ref->rank[rank];
  comparison cmp = {.rank = layer->port->rank, .tensor = "dispatch: topk_weights"};
  uint64_t filled = c->layout == EP_REF_FLAT && c->budget ? c->capacity : mine->rows;
  for (uint64_t i = 0; i < filled; i++) {
    epRefRow from = i < mine->rows ? mine->row[i] : (epRefRow){-1, -1, -1};
    float want[32] = {0};
    if (from.source == EP_REF_UNUSED || (c->layout == EP_REF_EXPERT_MAJOR && from.source < 0 && c->noZeroPad))
      memset(want, EP_FILL_NAN, sizeof(want));
    for (uint32_t k = 0; k < perRow && from.source >= 0; k++) {
      uint32_t at = perRow > 1 || from.k < 0 ? k : (uint32_t)from.k;
      if (c->layout == EP_REF_RANK_MAJOR || /* the source's weights, all of them */
          epRefOwner(what->ref, (uint32_t)from.source, (uint32_t)from.token, at) == (int)rank)
        want[k] = epDataWeight(what->seed, EP_DATA_WEIGHT, (uint32_t)from.source, (uint64_t)from.token, at);
    }
    compareRow(&cmp, i, from, got + i * perRow, want, perRow * sizeof(float), sizeof(float));
  }
  compareFill(&cmp, (const unsigned char *)got, filled, c->capacity, perRow * sizeof(float), EP_FILL_NAN,
              sizeof(float));
  conclude(&cmp, filled);
}

static void dispatchIndices(epLayer *layer, const epCheckCase *what, const int64_t *got) {
  const epLayerConfig *c = &layer->config;
  uint32_t rank = (uint32_t)layer->port->rank;
  const epRefRank *mine = &what->ref->rank[rank];
  comparison cmp = {.rank = layer->port->rank, .tensor = "dispatch: topk_idx"};
  uint64_t filled = c->budget ? c->capacity : mine->rows;
  for (uint64_t i = 0; i < filled; i++) {
    epRefRow from = i < mine->rows ? mine->row[i] : (epRefRow){-1, -1, -1};
    int64_t want[32];
    if (i < mine->rows)
      epRefIndexRow(what->ref, rank, i, 0, want);
    else
      for (uint32_t k = 0; k < c->topk; k++) want[k] = -1;
    compareRow(&cmp, i, from, got + i * c->topk, want, c->topk * sizeof(int64_t), sizeof(int64_t));
  }
  compareFill(&cmp, (const unsigned char *)got, filled, c->capacity, c->topk * sizeof(int64_t), EP_FILL_BYTE,
              sizeof(int64_t));
  conclude(&cmp, filled);
}

/* Rank-major: int32, and -1 in every unused place. */
static void dispatchPlaces(epLayer *layer, const epCheckCase *what, const int32_t *got) {
  const epLayerConfig *c = &layer->config;
  uint32_t rank = (uint32_t)layer->port->rank;
  const epRefRank *mine = &what->ref->rank[rank];
  comparison cmp = {.rank = layer->port->rank, .tensor = "dispatch: topk_idx"};
  for (uint64_t i = 0; i < mine->rows; i++) {
    int64_t wide[32];
    int32_t want[32];
    if (mine->row[i].source >= 0) epRefIndexRow(what->ref, rank, i, 0, wide);
    for (uint32_t k = 0; k < c->topk; k++) want[k] = mine->row[i].source >= 0 ? (int32_t)wide[k] : -1;
    compareRow(&cmp, i, mine->row[i], got + i * c->topk, want, c->topk * sizeof(int32_t), sizeof(int32_t));
  }
  conclude(&cmp, mine->rows);
}

int epCheckDispatch(epLayer *layer, const epCheckCase *what, epDataKind kind, int backward, uint64_t *hash) {
  const epLayerConfig *c = &layer->config;
  void *tokens = NULL, *weights = NULL, *idx = NULL, *scales = NULL;
  void *want = malloc(EP_SPREAD_MOST * epLayerRowBytes(c) + 2 * epLayerScaleBytes(c) + 8);
  int rc = -1;
  if (!want) {
    epToolFail("out of host memory");
    goto done;
  }
  if (epLayerRead(layer, &layer->outTokens, layer->outTokens.bytes, &tokens)) goto done;
  dispatchTokens(layer, what, kind, backward, tokens, want);
  take(hash, tokens, layer->outTokens.bytes);
  if (c->scales != EP_SCALES_NONE) {
    if (epLayerRead(layer, &layer->outScales, layer->outScales.bytes, &scales)) goto done;
    take(hash, scales, layer->outScales.bytes);
    dispatchScales(layer, what, kind, backward, scales, want);
  }
  if (!backward && layer->outWeights.base) {
    if (epLayerRead(layer, &layer->outWeights, layer->outWeights.bytes, &weights)) goto done;
    dispatchWeights(layer, what, weights);
    take(hash, weights, layer->outWeights.bytes);
    if (layer->outIdx.base) {
      if (epLayerRead(layer, &layer->outIdx, layer->outIdx.bytes, &idx)) goto done;
      if (c->layout == EP_REF_FLAT)
        dispatchIndices(layer, what, idx);
      else
        dispatchPlaces(layer, what, idx);
      take(hash, idx, layer->outIdx.bytes);
    }
  }
  rc = 0;
done:
  free(tokens);
  free(weights);
  free(idx);
  free(scales);
  free(want);
  return rc;
}

/* ---- Combine ---------------------------------------------------------------------------------------------------- */

/* NaN compares as NaN: the payload of a sum is the machine's affair. */
static void equaliseNan(epRefType type, uint32_t hidden, const void *got, void *want) {
  size_t bytes = epRefTypeBytes(type);
  for (uint32_t h = 0; h < hidden; h++)
    if (isnan(epRefLoad(type, want, h)) && isnan(epRefLoad(type, got, h)))
      memcpy((char *)want + h * bytes, (const char *)got + h * bytes, bytes);
}

typedef struct combinedRows {
  comparison part[EP_SPREAD_MOST];
  const epLayerConfig *config;
  const epCheckCase *what;
  uint32_t rank;
  const unsigned char *got;
  int failed; /* a part had no memory */
} combinedRows;

static void compareCombined(void *context, unsigned part, uint64_t first, uint64_t end) {
  combinedRows *d = context;
  const epLayerConfig *c = d->config;
  const epCheckCase *what = d->what;
  uint32_t rank = d->rank;
  epRefCombine how = {.type = c->combineType,
                      .hidden = c->hidden,
                      .scaleUp = what->scaleUp,
                      .multipleReductions = !c->single,
                      .places = what->places};
  size_t row = epLayerCombineRowBytes(c), element = epRefTypeBytes(c->combineType);
  unsigned char *work = malloc((c->topk + 3) * row), *want = work + c->topk * row, *bias = want + row;
  float *scratch = malloc(4ull * c->hidden * sizeof(*scratch));
  if (!work || !scratch) {
    __atomic_store_n(&d->failed, 1, __ATOMIC_RELAXED);
    goto done;
  }
  how.bias0 = c->bias > 0 ? bias : NULL;
  how.bias1 = c->bias > 1 ? bias + row : NULL;
  for (uint32_t t = (uint32_t)first; t < end; t++) {
    const void *rows[32] = {NULL};
    float weights[32], scales[32];
    how.weights = c->layout == EP_REF_EXPERT_MAJOR_3D ? weights : NULL;
    how.nvfp4 = c->nvfp4 ? scales : NULL;
    for (uint32_t k = 0; k < c->topk; k++) {
      int64_t slot = what->ref->slot[rank][(size_t)t * c->topk + k];
      weights[k] = epDataWeight(what->seed, EP_DATA_WEIGHT, rank, t, k);
      if (slot < 0) continue;
      epDataRow(c->combineType, what->seed, EP_DATA_OUTPUT, (uint32_t)epRefOwner(what->ref, rank, t, k), (uint64_t)slot,
                work + k * row, c->hidden);
      if (c->nvfp4) scales[k] = epRefNvfp4Scale(c->combineType, work + k * row, c->hidden);
      rows[k] = work + k * row;
    }
    for (uint32_t b = 0; b < c->bias; b++)
      epDataRow(c->combineType, what->seed, (epDataKind)(EP_DATA_BIAS + b), rank, t, bias + b * row, c->hidden);
    epRefCombineToken(what->ref, &how, rank, t, rows, scratch, want);
    if (memcmp(d->got + t * row, want, row)) equaliseNan(c->combineType, c->hidden, d->got + t * row, want);
    compareRow(&d->part[part], t, (epRefRow){(int32_t)rank, (int32_t)t, -1}, d->got + t * row, want, row, element);
  }
done:
  free(work);
  free(scratch);
}

static int combineTokens(epLayer *layer, const epCheckCase *what, int backward, const unsigned char *got) {
  const epLayerConfig *c = &layer->config;
  uint32_t rank = (uint32_t)layer->port->rank, tokens = what->routing->tokens[rank];
  comparison cmp = {.rank = layer->port->rank, .tensor = backward ? "combine (backward): tokens" : "combine: tokens"};
  combinedRows all = {.config = c, .what = what, .rank = rank, .got = got};
  gather(&cmp, all.part, epSpread(tokens, compareCombined, &all));
  if (all.failed) return epToolFail("out of host memory");
  compareFill(&cmp, got, tokens, c->maxTokens, epLayerCombineRowBytes(c), EP_FILL_NAN, epRefTypeBytes(c->combineType));
  conclude(&cmp, tokens);
  return 0;
}

static void combineWeights(epLayer *layer, const epCheckCase *what, const float *got) {
  const epLayerConfig *c = &layer->config;
  uint32_t rank = (uint32_t)layer->port->rank, tokens = what->routing->tokens[rank];
  comparison cmp = {.rank = layer->port->rank, .tensor = "combine (backward): topk_weights"};
  for (uint32_t t = 0; t < tokens; t++) {
    float want[32] = {0};
    for (uint32_t k = 0; k < c->topk; k++) {
      int64_t slot = what->ref->slot[rank][(size_t)t * c->topk + k];
      if (slot >= 0)
        want[k] = epDataWeight(what->seed, EP_DATA_GRAD_WEIGHT, (uint32_t)epRefOwner(what->ref, rank, t, k),
                               (uint64_t)slot, c->layout == EP_REF_FLAT ? k : 0);
    }
    compareRow(&cmp, t, (epRefRow){(int32_t)rank, (int32_t)t, -1}, got + (size_t)t * c->topk, want,
               c->topk * sizeof(float), sizeof(float));
  }
  compareFill(&cmp, (const unsigned char *)got, tokens, c->maxTokens, c->topk * sizeof(float), EP_FILL_NAN,
              sizeof(float));
  conclude(&cmp, tokens);
}

int epCheckCombine(epLayer *layer, const epCheckCase *what, int backward, uint64_t *hash) {
  void *y = NULL, *weights = NULL;
  int rc = -1;
  if (epLayerRead(layer, &layer->y, layer->y.bytes, &y) || combineTokens(layer, what, backward, y)) goto done;
  take(hash, y, layer->y.bytes);
  if (backward) {
    if (epLayerRead(layer, &layer->yWeights, layer->yWeights.bytes, &weights)) goto done;
    combineWeights(layer, what, weights);
    take(hash, weights, layer->yWeights.bytes);
  }
  rc = 0;
done:
  free(y);
  free(weights);
  return rc;
}

/* ---- Counts ----------------------------------------------------------------------------------------------------- */

static int64_t counterAt(const epLayer *layer, const void *counters, uint32_t i) {
  return layer->config.index32 ? ((const int32_t *)counters)[i] : ((const int64_t *)counters)[i];
}

static int compareCounters(epLayer *layer, const epBuffer *buffer, const uint64_t *want, uint32_t count) {
  void *got = NULL;
  if (epLayerRead(layer, buffer, buffer->bytes, &got)) return -1;
  for (uint32_t i = 0; i < count; i++)
    if (counterAt(layer, got, i) != (int64_t)want[i]) {
      epToolFail("rank %d: %s[%u]: got %lld, want %llu", layer->port->rank, buffer->name, i,
                 (long long)counterAt(layer, got, i), (unsigned long long)want[i]);
      break;
    }
  free(got);
  return 0;
}

static void compareHost(int rank, const char *name, const unsigned *got, const uint64_t *want, uint32_t count) {
  for (uint32_t i = 0; i < count; i++)
    if (got[i] != want[i]) {
      epToolFail("rank %d: host counts: %s[%u]: got %u, want %llu", rank, name, i, got[i], (unsigned long long)want[i]);
      return;
    }
}

static int checkHostCounts(epLayer *layer, const epCheckCase *what) {
  const epRefRank *mine = &what->ref->rank[layer->port->rank];
  uint32_t ranks = what->ref->in.ranks, locals = what->ref->locals;
  ncclEpHostCounts_t counts = NCCL_EP_HOST_COUNTS_INIT;
  unsigned *words = calloc(ranks + 2ull * locals, sizeof(*words));
  uint64_t totals[2] = {mine->total, mine->needed};
  ncclResult_t rc;
  if (!words) return epToolFail("out of host memory");
  counts.per_source = words;
  counts.per_expert = words + ranks;
  counts.per_expert_padded = words + ranks + locals;
  rc = ncclEpGetHostCounts(layer->handle, &counts);
  if (rc != ncclSuccess) {
    epToolFail("rank %d: ncclEpGetHostCounts: error %d: %s", layer->port->rank, (int)rc, ncclEpGetLastErrorString());
  } else {
    compareHost(layer->port->rank, "total", &counts.total, &totals[0], 1);
    compareHost(layer->port->rank, "total_padded", &counts.total_padded, &totals[1], 1);
    compareHost(layer->port->rank, "per_source", counts.per_source, mine->perSource, ranks);
    compareHost(layer->port->rank, "per_expert", counts.per_expert, mine->perExpert, locals);
    compareHost(layer->port->rank, "per_expert_padded", counts.per_expert_padded, mine->perExpertPadded, locals);
  }
  free(words);
  return rc == ncclSuccess ? 0 : -1;
}

int epCheckCounts(epLayer *layer, const epCheckCase *what) {
  const epRefRank *mine = &what->ref->rank[layer->port->rank];
  if (epLayerIsLl(&layer->config))
    return compareCounters(layer, &layer->counters, mine->perExpert, what->ref->locals) ||
                   compareCounters(layer, &layer->sources, mine->perSource, what->ref->in.ranks) ||
                   compareCounters(layer, &layer->total, &mine->total, 1)
               ? -1
               : 0;
  if (compareCounters(layer, &layer->counters, mine->counter, what->ref->locals) ||
      compareCounters(layer, &layer->total, &mine->needed, 1) ||
      (layer->config.layout == EP_REF_EXPERT_MAJOR &&
       compareCounters(layer, &layer->offsets, mine->first, what->ref->locals)))
    return -1;
  return checkHostCounts(layer, what);
}

/* ---- Metadata --------------------------------------------------------------------------------------------------- */

static int compareMetadata(epLayer *layer, const epCheckCase *what, const ncclEpHandleMetadata_t *got) {
  const epRef *ref = what->ref;
  uint32_t rank = (uint32_t)layer->port->rank, row = 0;
  for (uint32_t s = 0; s < ref->in.ranks; s++)
    for (uint32_t t = 0; t < ref->in.tokens[s]; t++) {
      int here = 0;
      for (uint32_t k = 0; k < ref->in.topk; k++) here |= epRefOwner(ref, s, t, k) == (int)rank;
      if (!here) continue;
      if (row >= got->received || got->source_rank[row] != (int)s || got->source_token[row] != (int)t)
        return epToolFail(
            "rank %u: metadata: received row %u: got rank %d, token %d of %u rows, want rank %u, token %u", rank, row,
            row < got->received ? got->source_rank[row] : -1, row < got->received ? got->source_token[row] : -1,
            got->received, s, t);
      row++;
    }
  if (row != got->received) return epToolFail("rank %u: metadata: received: got %u, want %u", rank, got->received, row);
  for (uint32_t t = 0; t < ref->in.tokens[rank]; t++)
    for (uint32_t k = 0; k < ref->in.topk; k++) {
      size_t at = (size_t)t * ref->in.topk + k;
      int owner = epRefOwner(ref, rank, t, k);
      int dropped = owner >= 0 && ref->slot[rank][at] < 0;
      if (got->sent_slot[at] != ref->slot[rank][at] && !dropped)
        return epToolFail("rank %u: metadata: sent_slot of token %u, k %u: got %lld, want %lld", rank, t, k,
                          got->sent_slot[at], (long long)ref->slot[rank][at]);
    }
  return 0;
}

int epCheckMetadata(epLayer *layer, const epCheckCase *what) {
  uint32_t rank = (uint32_t)layer->port->rank;
  ncclEpHandleMetadata_t metadata = NCCL_EP_HANDLE_METADATA_INIT;
  size_t received = 0, sent = (size_t)what->routing->tokens[rank] * layer->config.topk;
  ncclResult_t rc;
  int wrong = -1;
  if (epLayerIsLl(&layer->config)) return 0;
  for (uint32_t s = 0; s < what->ref->in.ranks; s++) received += what->ref->rank[rank].perSource[s];
  metadata.source_rank = calloc(received + 1, sizeof(int));
  metadata.source_token = calloc(received + 1, sizeof(int));
  metadata.sent_slot = calloc(sent + 1, sizeof(long long));
  metadata.received_capacity = received + 1;
  metadata.sent_capacity = sent + 1;
  if (!metadata.source_rank || !metadata.source_token || !metadata.sent_slot) {
    epToolFail("out of host memory");
    goto done;
  }
  rc = ncclEpGetHandleMetadata(layer->handle, &metadata);
  if (rc != ncclSuccess) {
    epToolFail("rank %u: ncclEpGetHandleMetadata: error %d: %s", rank, (int)rc, ncclEpGetLastErrorString());
    goto done;
  }
  compareMetadata(layer, what, &metadata);
  wrong = 0;
done:
  free(metadata.source_rank);
  free(metadata.source_token);
  free(metadata.sent_slot);
  return wrong;
}

/* ---- Asynchronous errors ---------------------------------------------------------------------------------------- */

int epCheckErrors(epLayer *layer, const epCheckCase *what) {
  uint32_t rank = (uint32_t)layer->port->rank;
  const epRefRank *mine = &what->ref->rank[rank];
  ncclEpErrorInfo_t info = NCCL_EP_ERROR_INFO_INIT;
  int overflow = mine->needed > mine->rows, asyncError = 0;
  ncclResult_t rc = ncclEpGetErrorInfo(layer->group, &info);
  if (rc == ncclSuccess) rc = ncclEpGetAsyncError(layer->group, &asyncError);
  if (rc != ncclSuccess)
    return epToolFail("rank %u: asking for the asynchronous error: error %d: %s", rank, (int)rc,
                      ncclEpGetLastErrorString());
  if (!info.code != !asyncError)
    epToolFail("rank %u: ncclEpGetErrorInfo says code %d, ncclEpGetAsyncError says %d", rank, info.code, asyncError);
  if (!overflow) {
    if (!info.code) return 0;
    return epToolFail("rank %u: asynchronous error: %s", rank, info.text);
  }
  if (info.code != 4 || info.expected != mine->needed)
    epToolFail("rank %u: asynchronous error: expected too many rows, %llu needed, got code %d: %s", rank,
               (unsigned long long)mine->needed, info.code, info.code ? info.text : "none");
  rc = ncclEpErrorClear(layer->group);
  if (rc != ncclSuccess)
    return epToolFail("rank %u: ncclEpErrorClear: error %d: %s", rank, (int)rc, ncclEpGetLastErrorString());
  return 0;
}
