/* Test data that every process can compute for any rank: token rows, expert outputs and weights from a hash of (seed,
 * rank, row, element), and routings of the usual and of the worst kinds. */
#ifndef EP_TOOLS_DATA_H_
#define EP_TOOLS_DATA_H_

#include <stddef.h>
#include <stdint.h>

#include "reference.h"

/* Tokens: any finite bits, dispatch moves bytes. Outputs: exponents near 1, so that every rounding of a sum matters. */
typedef enum {
  EP_DATA_TOKEN = 1,
  EP_DATA_OUTPUT,
  EP_DATA_GRADIENT,
  EP_DATA_WEIGHT,
  EP_DATA_GRAD_WEIGHT,
  EP_DATA_SCALE, /* of the rows of another kind */
  EP_DATA_BIAS   /* and the next kind: a second row of bias */
} epDataKind;

void epDataRow(epRefType type, uint64_t seed, epDataKind kind, uint32_t rank, uint64_t row, void *out, uint32_t hidden);
/* Scales of a row of tokens or gradients: any bytes that are finite as FP32. */
void epDataScales(uint64_t seed, epDataKind kind, uint32_t rank, uint64_t row, void *out, uint32_t bytes);
float epDataWeight(uint64_t seed, epDataKind kind, uint32_t rank, uint64_t row, uint32_t k); /* in (0, 1] */
uint64_t epDataHash(uint64_t seed, uint64_t a, uint64_t b);

typedef enum {
  EP_ROUTE_UNIFORM = 0,
  EP_ROUTE_GROUPED,    /* group-limited gating: 8 groups, of which a token sees 4 */
  EP_ROUTE_ZIPF,       /* expert e is chosen in proportion to 1 / (1 + e) */
  EP_ROUTE_ONE_EXPERT, /* every token selects one expert, the same for all */
  EP_ROUTE_REPEATED,   /* uniform with repetition: an id may occur twice in a row */
  EP_ROUTE_NONE,       /* nobody selects anything */
  EP_ROUTE_FILE
} epRouteKind;

typedef struct epRouteSpec {
  epRouteKind kind;
  double minusOne; /* fraction of entries replaced by -1 */
  uint32_t ranks, experts, topk;
  const uint32_t *tokensLow, *tokensHigh; /* [ranks] T is drawn from this range */
  const int64_t *fileEntries;             /* rows of topk entries, rank after rank */
  size_t fileRows;
  const char *filePath;
} epRouteSpec;

typedef struct epRouting {
  uint32_t ranks;
  uint32_t *tokens; /* [ranks] */
  int64_t **idx;    /* [ranks] -> [T][topk] */
} epRouting;

/* Name or path -> kind; fills the file's entries (freed by epRouteSpecFree). 0, or -1 after telling why. */
int epRouteParse(const char *text, epRouteSpec *spec);
void epRouteSpecFree(epRouteSpec *spec);
int epRoutingMake(const epRouteSpec *spec, uint64_t seed, epRouting *out);
void epRoutingFree(epRouting *routing);

#endif
