/* The plain C reference of dispatch and combine, written straight from the contract: one pass over all (source, token,
 * k) per output zone, sums element by element in the stated order. Slow on purpose where that keeps it obvious. */
#include "reference.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- Numbers ---------------------------------------------------------------------------------------------------- */

size_t epRefTypeBytes(epRefType type) { return type == EP_REF_F32 ? 4 : type == EP_REF_E4M3 ? 1 : 2; }

const char *epRefTypeName(epRefType type) {
  return type == EP_REF_BF16 ? "bf16" : type == EP_REF_F16 ? "fp16" : type == EP_REF_F32 ? "fp32" : "fp8";
}

static float floatOfBits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

static uint32_t bitsOfFloat(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

/* `kept` = bits >> drop, rounded to nearest, ties to even. */
static uint32_t roundShift(uint32_t bits, unsigned drop) {
  uint32_t kept = bits >> drop, rest = bits & ((1u << drop) - 1), half = 1u << (drop - 1);
  if (rest > half || (rest == half && (kept & 1))) kept++;
  return kept;
}

static uint16_t bf16OfFloat(float value) {
  uint32_t bits = bitsOfFloat(value);
  if (isnan(value)) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)roundShift(bits, 16);
}

static float floatOfF16(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 0x3ff;
  float magnitude;
  if (exponent == 31) return floatOfBits(sign | 0x7f800000u | fraction << 13);
  magnitude = exponent ? ldexpf((float)(fraction | 0x400), (int)exponent - 25) : ldexpf((float)fraction, -24);
  return sign ? -magnitude : magnitude;
}

static uint16_t f16OfFloat(float value) {
  uint32_t bits = bitsOfFloat(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffffu;
  int exponent = (int)(rest >> 23) - 127;
  uint32_t fraction = (rest & 0x7fffffu) | 0x800000u;
  if (isnan(value)) return (uint16_t)(sign | 0x7e00u);
  if (exponent > 15) return (uint16_t)(sign | 0x7c00u);
  if (exponent >= -14) /* a carry out of the fraction moves into the exponent, up to infinity, as it should */
    return (uint16_t)(sign | (((uint32_t)(exponent + 14) << 10) + roundShift(fraction, 13)));
  if (exponent < -25) return (uint16_t)sign;
  return (uint16_t)(sign | roundShift(fraction, (unsigned)(-1 - exponent)));
}

float epRefLoad(epRefType type, const void *row, size_t index) {
  if (type == EP_REF_F32) return ((const float *)row)[index];
  if (type == EP_REF_F16) return floatOfF16(((const uint16_t *)row)[index]);
  return floatOfBits((uint32_t)((const uint16_t *)row)[index] << 16);
}

void epRefStore(epRefType type, void *row, size_t index, float value) {
  if (type == EP_REF_F32)
    ((float *)row)[index] = value;
  else
    ((uint16_t *)row)[index] = type == EP_REF_F16 ? f16OfFloat(value) : bf16OfFloat(value);
}

static float roundTo(epRefType type, float value) {
  uint32_t element = 0;
  epRefStore(type, &element, 0, value);
  return epRefLoad(type, &element, 0);
}

/* ---- Dispatch --------------------------------------------------------------------------------------------------- */

int epRefOwner(const epRef *ref, uint32_t rank, uint32_t token, uint32_t k) {
  int64_t expert = ref->in.topkIdx[rank][(size_t)token * ref->in.topk + k];
  if (expert < 0 || expert >= (int64_t)ref->in.experts) return -1;
  return (int)(expert / ref->locals);
}

/* Adds one row to the output, unless the budget is used up. */
static void addRow(const epRef *ref, epRefRank *out, int32_t source, int32_t token, int32_t k) {
  if (!ref->in.budget || out->needed < ref->in.budget) {
    if (out->row) out->row[out->rows] = (epRefRow){source, token, k};
    out->rows++;
  }
  out->needed++;
}

static int sentTo(const epRef *ref, uint32_t source, uint32_t token, uint32_t destination) {
  for (uint32_t k = 0; k < ref->in.topk; k++)
    if (epRefOwner(ref, source, token, k) == (int)destination) return 1;
  return 0;
}

static void fillFlat(const epRef *ref, uint32_t rank, epRefRank *out) {
  for (uint32_t s = 0; s < ref->in.ranks; s++)
    for (uint32_t t = 0; t < ref->in.tokens[s]; t++)
      if (sentTo(ref, s, t, rank)) addRow(ref, out, (int32_t)s, (int32_t)t, -1);
}

static void fillExpertMajor(const epRef *ref, uint32_t rank, epRefRank *out) {
  for (uint32_t l = 0; l < ref->locals; l++) {
    int64_t expert = (int64_t)rank * ref->locals + l;
    for (uint32_t s = 0; s < ref->in.ranks; s++)
      for (uint32_t t = 0; t < ref->in.tokens[s]; t++)
        for (uint32_t k = 0; k < ref->in.topk; k++)
          if (ref->in.topkIdx[s][(size_t)t * ref->in.topk + k] == expert)
            addRow(ref, out, (int32_t)s, (int32_t)t, (int32_t)k);
    while (ref->in.align > 1 && out->needed % ref->in.align) addRow(ref, out, -1, -1, -1);
  }
}

/* Rows of the low-latency layouts: `regions` of `room` rows each, all unused at first. */
static void openRegions(const epRef *ref, epRefRank *out, uint64_t regions, uint64_t room) {
  (void)ref;
  out->needed = out->rows = regions * room;
  for (uint64_t i = 0; out->row && i < out->rows; i++) out->row[i] = (epRefRow){EP_REF_UNUSED, -1, -1};
}

static void fillRankMajor(const epRef *ref, uint32_t rank, epRefRank *out) {
  openRegions(ref, out, ref->in.ranks, ref->in.maxTokens);
  for (uint32_t s = 0; s < ref->in.ranks && out->row; s++) {
    epRefRow *next = out->row + (size_t)s * ref->in.maxTokens;
    for (uint32_t t = 0; t < ref->in.tokens[s]; t++)
      if (sentTo(ref, s, t, rank)) *next++ = (epRefRow){(int32_t)s, (int32_t)t, -1};
  }
}

/* What does not fit an expert's region, which repeated ids alone can cause, is dropped. */
static void fillExpertMajor3d(const epRef *ref, uint32_t rank, epRefRank *out) {
  uint64_t room = (uint64_t)ref->in.ranks * ref->in.maxTokens;
  openRegions(ref, out, ref->locals, room);
  for (uint32_t l = 0; l < ref->locals && out->row; l++) {
    uint64_t used = 0;
    for (uint32_t s = 0; s < ref->in.ranks; s++)
      for (uint32_t t = 0; t < ref->in.tokens[s]; t++)
        for (uint32_t k = 0; k < ref->in.topk; k++)
          if (ref->in.topkIdx[s][(size_t)t * ref->in.topk + k] == (int64_t)rank * ref->locals + l && used < room)
            out->row[l * room + used++] = (epRefRow){(int32_t)s, (int32_t)t, (int32_t)k};
  }
}

static void fillRows(const epRef *ref, uint32_t rank, epRefRank *out) {
  out->needed = out->rows = 0;
  if (ref->in.layout == EP_REF_FLAT)
    fillFlat(ref, rank, out);
  else if (ref->in.layout == EP_REF_RANK_MAJOR)
    fillRankMajor(ref, rank, out);
  else if (ref->in.layout == EP_REF_EXPERT_MAJOR_3D)
    fillExpertMajor3d(ref, rank, out);
  else
    fillExpertMajor(ref, rank, out);
}

static void fillCounts(const epRef *ref, uint32_t rank, epRefRank *out) {
  uint64_t offset = 0;
  for (uint32_t s = 0; s < ref->in.ranks; s++)
    for (uint32_t t = 0; t < ref->in.tokens[s]; t++) {
      if (sentTo(ref, s, t, rank)) out->perSource[s]++;
      for (uint32_t k = 0; k < ref->in.topk; k++)
        if (epRefOwner(ref, s, t, k) == (int)rank)
          out->perExpert[ref->in.topkIdx[s][(size_t)t * ref->in.topk + k] % ref->locals]++;
    }
  for (uint32_t l = 0; l < ref->locals; l++) {
    uint64_t padded = out->perExpert[l];
    while (ref->in.layout == EP_REF_EXPERT_MAJOR && ref->in.align > 1 && padded % ref->in.align) padded++;
    out->perExpertPadded[l] = padded;
    out->offset[l] = offset;
    uint64_t most = ref->in.layout == EP_REF_EXPERT_MAJOR && ref->in.budget ? ref->in.budget : UINT64_MAX;
    out->first[l] = offset < most ? offset : most;
    offset += padded;
    out->counter[l] = (offset < most ? offset : most) - out->first[l];
  }
  if (ref->in.layout == EP_REF_FLAT || ref->in.layout == EP_REF_RANK_MAJOR)
    for (uint32_t s = 0; s < ref->in.ranks; s++) out->total += out->perSource[s];
  else
    for (uint32_t l = 0; l < ref->locals; l++) out->total += out->perExpert[l];
}

/* The inverse of the rows: where each (token, k) of every rank went. */
static void fillSlots(epRef *ref) {
  for (uint32_t d = 0; d < ref->in.ranks; d++)
    for (uint64_t i = 0; i < ref->rank[d].rows; i++) {
      epRefRow row = ref->rank[d].row[i];
      if (row.source < 0) continue;
      for (uint32_t k = 0; k < ref->in.topk; k++)
        if (row.k < 0 ? epRefOwner(ref, (uint32_t)row.source, (uint32_t)row.token, k) == (int)d : row.k == (int32_t)k)
          ref->slot[row.source][(size_t)row.token * ref->in.topk + k] = (int64_t)i;
    }
}

void epRefIndexRow(const epRef *ref, uint32_t rank, uint64_t row, int global, int64_t *out) {
  epRefRow from = ref->rank[rank].row[row];
  for (uint32_t k = 0; k < ref->in.topk; k++) {
    int64_t expert = ref->in.topkIdx[from.source][(size_t)from.token * ref->in.topk + k];
    int mine = epRefOwner(ref, (uint32_t)from.source, (uint32_t)from.token, k) == (int)rank;
    out[k] = !mine ? -1 : global ? expert : expert % ref->locals;
  }
}

static int fillRank(epRef *ref, uint32_t rank) {
  epRefRank *out = &ref->rank[rank];
  out->perSource = calloc(ref->in.ranks, sizeof(uint64_t));
  out->perExpert = calloc(ref->locals, sizeof(uint64_t));
  out->perExpertPadded = calloc(ref->locals, sizeof(uint64_t));
  out->offset = calloc(ref->locals, sizeof(uint64_t));
  out->counter = calloc(ref->locals, sizeof(uint64_t));
  out->first = calloc(ref->locals, sizeof(uint64_t));
  if (!out->perSource || !out->perExpert || !out->perExpertPadded || !out->offset || !out->counter || !out->first)
    return ENOMEM;
  fillCounts(ref, rank, out);
  fillRows(ref, rank, out); /* first to count, then to fill */
  out->row = calloc(out->rows + 1, sizeof(epRefRow));
  if (!out->row) return ENOMEM;
  fillRows(ref, rank, out);
  return 0;
}

int epRefCreate(const epRefRouting *in, epRef **out) {
  epRef *ref;
  int rc = ENOMEM;
  if (!in->ranks || !in->experts || !in->topk || in->experts % in->ranks) return EINVAL;
  ref = calloc(1, sizeof(*ref));
  if (!ref) return ENOMEM;
  ref->in = *in;
  ref->locals = in->experts / in->ranks;
  ref->rank = calloc(in->ranks, sizeof(*ref->rank));
  ref->slot = calloc(in->ranks, sizeof(*ref->slot));
  if (!ref->rank || !ref->slot) goto fail;
  for (uint32_t r = 0; r < in->ranks; r++) {
    size_t entries = (size_t)in->tokens[r] * in->topk;
    ref->slot[r] = malloc((entries + 1) * sizeof(int64_t));
    if (!ref->slot[r]) goto fail;
    for (size_t i = 0; i < entries; i++) ref->slot[r][i] = -1;
    rc = fillRank(ref, r);
    if (rc) goto fail;
  }
  fillSlots(ref);
  *out = ref;
  return 0;
fail:
  epRefDestroy(ref);
  return rc;
}

void epRefDestroy(epRef *ref) {
  if (!ref) return;
  for (uint32_t r = 0; r < ref->in.ranks; r++) {
    if (ref->rank) {
      free(ref->rank[r].row);
      free(ref->rank[r].perSource);
      free(ref->rank[r].perExpert);
      free(ref->rank[r].perExpertPadded);
      free(ref->rank[r].offset);
      free(ref->rank[r].counter);
      free(ref->rank[r].first);
    }
    if (ref->slot) free(ref->slot[r]);
  }
  free(ref->rank);
  free(ref->slot);
  free(ref);
}

/* ---- Combine ---------------------------------------------------------------------------------------------------- */

static void clearSum(float *sum, uint32_t hidden) {
  for (uint32_t h = 0; h < hidden; h++) sum[h] = 0.0f;
}

static void addSum(float *sum, const float *other, uint32_t hidden) {
  for (uint32_t h = 0; h < hidden; h++) sum[h] += other[h];
}

static void roundSum(epRefType type, float *sum, uint32_t hidden) {
  for (uint32_t h = 0; h < hidden; h++) sum[h] = roundTo(type, sum[h]);
}

static void addElements(epRefType type, float *sum, const void *row, uint32_t hidden) {
  for (uint32_t h = 0; h < hidden; h++) sum[h] += epRefLoad(type, row, h);
}

static void addWeighted(epRefType type, float *sum, const void *row, uint32_t hidden, float weight) {
  for (uint32_t h = 0; h < hidden; h++) sum[h] = fmaf(weight, epRefLoad(type, row, h), sum[h]);
}

/* The token's slots as combine sees them: one a (token, k), but one a rank in the flat layout, at the highest k that the rank has. */
typedef struct tokenSlots {
  const epRef *ref;
  const epRefCombine *how;
  const void *const *rows;
  uint32_t rank, token;
} tokenSlots;

static int ownerOf(const tokenSlots *s, uint32_t k) {
  return s->rows[k] ? epRefOwner(s->ref, s->rank, s->token, k) : -1;
}

/* The rank whose sum the token's k gives a place, kept or dropped: the source does not know what others had to drop. */
static int chosenOf(const tokenSlots *s, uint32_t k) {
  return epRefOwner(s->how->places ? s->how->places : s->ref, s->rank, s->token, k);
}

static int domainOf(const tokenSlots *s, uint32_t k) {
  int owner = chosenOf(s, k);
  return owner < 0 ? -1 : owner / (int)s->how->scaleUp;
}

static int hasRows(const tokenSlots *s, int owner) {
  for (uint32_t k = 0; k < s->ref->in.topk; k++)
    if (ownerOf(s, k) == owner) return 1;
  return 0;
}

/* True when no larger k has the same owner (domain). */
static int highestOf(const tokenSlots *s, uint32_t k, int (*of)(const tokenSlots *, uint32_t)) {
  for (uint32_t j = k + 1; j < s->ref->in.topk; j++)
    if (of(s, j) == of(s, k)) return 0;
  return 1;
}

static int repeatsRow(const tokenSlots *s, uint32_t k) {
  if (s->ref->in.layout != EP_REF_FLAT && s->ref->in.layout != EP_REF_RANK_MAJOR) return 0;
  for (uint32_t j = k + 1; j < s->ref->in.topk; j++)
    if (ownerOf(s, j) == ownerOf(s, k)) return 1;
  return 0;
}

static void addSlot(const tokenSlots *s, uint32_t k, float *sum) {
  if (repeatsRow(s, k)) return;
  if (s->how->weights)
    addWeighted(s->how->type, sum, s->rows[k], s->how->hidden, s->how->weights[k]);
  else
    addElements(s->how->type, sum, s->rows[k], s->how->hidden);
}

/* The slots of one rank, in ascending k. */
static void addSlots(const tokenSlots *s, int owner, float *sum) {
  for (uint32_t k = 0; k < s->ref->in.topk; k++)
    if (ownerOf(s, k) == owner) addSlot(s, k, sum);
}

/* Their sum from +0, rounded. */
static void sumOfRank(const tokenSlots *s, int owner, float *sum) {
  clearSum(sum, s->how->hidden);
  addSlots(s, owner, sum);
  roundSum(s->how->type, sum, s->how->hidden);
}

/* Sum of the partial sums of one domain's ranks, in the order of the highest k that chose each, from +0, rounded. False: it has none. */
static int sumOfDomain(const tokenSlots *s, int domain, float *partial, float *sum) {
  int any = 0;
  clearSum(sum, s->how->hidden);
  for (uint32_t k = 0; k < s->ref->in.topk; k++)
    if (domainOf(s, k) == domain && highestOf(s, k, chosenOf) && hasRows(s, chosenOf(s, k))) {
      sumOfRank(s, chosenOf(s, k), partial);
      addSum(sum, partial, s->how->hidden);
      any = 1;
    }
  roundSum(s->how->type, sum, s->how->hidden);
  return any;
}

/* ---- NVFP4 -------------------------------------------------------------------------------------------------------- */

/* Value of code `code` of a type of `mantissa` bits of fraction whose smallest normal number is 2^low. */
static float smallFloat(unsigned code, unsigned mantissa, int low) {
  unsigned exponent = code >> mantissa, fraction = code & ((1u << mantissa) - 1);
  return ldexpf((float)((exponent ? 1u << mantissa : 0) + fraction),
                (exponent ? (int)exponent - 1 : 0) + low - (int)mantissa);
}

/* The nearest of the codes up to `most`, by trying them; of two as near the even one. */
static unsigned nearestCode(float magnitude, unsigned most, unsigned mantissa, int low) {
  unsigned best = 0;
  for (unsigned code = 1; code <= most; code++) {
    double d = fabs((double)smallFloat(code, mantissa, low) - magnitude);
    double least = fabs((double)smallFloat(best, mantissa, low) - magnitude);
    if (d < least || (d == least && !(code & 1))) best = code;
  }
  return magnitude > smallFloat(most, mantissa, low) ? most : best;
}

/* The scale of a row whose caller's scale is g. */
static float rowScale(float g) {
  if (g == 0) return 0;
  return g > 0 ? 1 / fminf(g, 0x1p117f) : NAN;
}

/* The scale of what one rank sends. */
static float rankScale(const tokenSlots *s, int owner) {
  float sum = 0;
  for (uint32_t k = 0; k < s->ref->in.topk; k++) {
    if (ownerOf(s, k) != owner || repeatsRow(s, k)) continue;
    sum += (s->how->weights ? fabsf(s->how->weights[k]) : 1) * rowScale(s->how->nvfp4[k]);
  }
  return sum > 0 && sum < 0x1p-117f ? 0x1p-117f : sum;
}

/* One block of 16: what it is when it has travelled, as elements and the factor they are multiplied by. */
static float quantiseBlock(float *x, float row) {
  float amax = 0, inverse = row == 0 ? 0 : 1 / row, block, times;
  for (int i = 0; i < 16; i++) {
    if (!isfinite(x[i])) row = NAN;
    amax = fmaxf(amax, fabsf(x[i]));
  }
  if (isnan(row)) return NAN;
  block = inverse * (1 / 6.0f);
  block = smallFloat(nearestCode(amax * block, 0x7e, 3, -6), 3, -6);
  times = block == 0 ? 0 : inverse / block;
  for (int i = 0; i < 16; i++) x[i] = copysignf(smallFloat(nearestCode(fabsf(x[i] * times), 7, 1, 0), 1, 0), x[i]);
  return block * row;
}

float epRefNvfp4Scale(epRefType type, const void *row, uint32_t hidden) {
  float amax = 0;
  for (uint32_t h = 0; h < hidden; h++) amax = fmaxf(amax, fabsf(epRefLoad(type, row, h)));
  return amax == 0 ? 0 : 2688 / amax;
}

/* Adds what a rank sends of a token, quantised. */
static void addQuantised(const tokenSlots *s, int owner, float *partial, float *sum) {
  float row = rankScale(s, owner);
  clearSum(partial, s->how->hidden);
  addSlots(s, owner, partial);
  for (uint32_t h = 0; h < s->how->hidden; h += 16) {
    float factor = quantiseBlock(partial + h, row);
    for (uint32_t i = h; i < h + 16; i++) sum[i] = fmaf(partial[i], factor, sum[i]);
  }
}

size_t epRefScaleOffset(uint32_t scaleBytes, uint64_t columnStride, uint64_t row, uint32_t byte) {
  if (!columnStride) return (size_t)(row * scaleBytes + byte);
  return (size_t)(byte / 4 * columnStride + row * 4 + byte % 4);
}

void epRefCombineToken(const epRef *ref, const epRefCombine *how, uint32_t rank, uint32_t token,
                       const void *const *rows, float *scratch, void *out) {
  tokenSlots s = {ref, how, rows, rank, token};
  float *total = scratch, *domain = scratch + how->hidden, *partial = domain + how->hidden;
  int ofDomains = how->multipleReductions && how->scaleUp < ref->in.ranks;
  clearSum(total, how->hidden);
  if (how->bias0) addElements(how->type, total, how->bias0, how->hidden);
  if (how->bias1) addElements(how->type, total, how->bias1, how->hidden);
  for (uint32_t k = 0; k < ref->in.topk; k++) {
    int chosen = chosenOf(&s, k);
    if (chosen < 0) continue;
    if (ofDomains) {
      if (highestOf(&s, k, domainOf) && sumOfDomain(&s, domainOf(&s, k), partial, domain))
        addSum(total, domain, how->hidden);
    } else if (!how->multipleReductions) {
      if (ownerOf(&s, k) >= 0) addSlot(&s, k, total);
    } else if (highestOf(&s, k, chosenOf) && hasRows(&s, chosen)) {
      if (how->nvfp4) {
        addQuantised(&s, chosen, partial, total);
      } else {
        sumOfRank(&s, chosen, partial);
        addSum(total, partial, how->hidden);
      }
    }
  }
  for (uint32_t h = 0; h < how->hidden; h++) epRefStore(how->type, out, h, total[h]);
}
