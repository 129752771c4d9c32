/* Counts what each rank's links carry, token by token, by the rules of docs/hybrid.md: once per domain over the NIC to
 * the rank of the own index, once per rank inside a domain. Only sums are kept, so memory grows with ranks alone. */
#include <stdlib.h>
#include <string.h>

#include "failure.h"
#include "model.h"

/* Tokens drawn at most, in all; a share of each rank's where there are more. */
#define EP_MODEL_DRAWN (1u << 22)
#define EP_MODEL_LEAST 64u     /* of a rank */
#define EP_MODEL_ZIPF_COST 16u /* experts that cost as much as a token */

typedef struct counter {
  const epModelShape *shape;
  epModelRank *rank;
  uint32_t *rankSeen, *domainSeen; /* number of the last token that went there */
  uint32_t stamp;
} counter;

static void count(counter *c, uint32_t s, const int64_t *row, double weight) {
  const epModelShape *m = c->shape;
  uint32_t ups = m->scaleUp, home = s / ups, u = s % ups, locals = m->experts / (m->scaleOut * ups), far = 0;
  epModelRank *me = &c->rank[s];
  c->stamp++;
  for (uint32_t k = 0; k < m->topk; k++) {
    if (row[k] < 0) continue;
    uint32_t d = (uint32_t)row[k] / locals, domain = d / ups, rail = domain * ups + u;
    c->rank[d].slots += weight;
    if (c->domainSeen[domain] != c->stamp) {
      c->domainSeen[domain] = c->stamp;
      me->domains += weight;
      if (domain != home) {
        far = 1;
        me->toRail += weight;
        c->rank[rail].fromRail += weight;
      }
    }
    if (c->rankSeen[d] == c->stamp) continue;
    c->rankSeen[d] = c->stamp;
    c->rank[d].received += weight;
    if (domain == home && d != s) {
      me->sentNear += weight;
      c->rank[d].gotNear += weight;
    } else if (domain != home && d != rail) {
      c->rank[rail].forwarded += weight;
      c->rank[d].gotFar += weight;
    }
  }
  if (far) me->staged += weight;
}

/* Tokens of a rank that are drawn. */
static uint32_t share(const epRouteSpec *spec) {
  uint64_t all = EP_MODEL_DRAWN;
  if (spec->kind == EP_ROUTE_ZIPF) all /= 1 + spec->experts / EP_MODEL_ZIPF_COST;
  all /= spec->ranks;
  return all < EP_MODEL_LEAST ? EP_MODEL_LEAST : (uint32_t)all;
}

int epModelCount(const epModelShape *shape, const epRouteSpec *spec, uint64_t seed, epModelTraffic *out) {
  counter c = {shape, calloc(spec->ranks, sizeof(*c.rank)), calloc(spec->ranks, sizeof(*c.rankSeen)),
               calloc(shape->scaleOut, sizeof(*c.domainSeen)), 0};
  uint32_t most = share(spec);
  size_t fileRow = 0;
  int rc = -1;
  *out = (epModelTraffic){.ranks = spec->ranks, .rank = c.rank};
  if (!c.rank || !c.rankSeen || !c.domainSeen) {
    epToolFail("model: out of host memory");
    goto done;
  }
  for (uint32_t s = 0; s < spec->ranks; s++) {
    epRouteSpec one = *spec;
    epRouting routing;
    uint32_t low = spec->tokensLow[s], high = spec->tokensHigh[s];
    uint32_t tokens = low + (uint32_t)(epDataHash(seed, 17, s) % ((uint64_t)high - low + 1));
    uint32_t drawn = tokens < most ? tokens : most;
    one.ranks = 1;
    one.tokensLow = one.tokensHigh = &drawn;
    if (spec->kind == EP_ROUTE_FILE) { /* each rank's rows come behind the last one's */
      if (fileRow + tokens > spec->fileRows) {
        epToolFail("--routing %s: it holds %zu rows (tokens), but rank %u needs rows %zu to %zu", spec->filePath,
                   spec->fileRows, s, fileRow + 1, fileRow + tokens);
        goto done;
      }
      one.fileEntries += fileRow * spec->topk;
      one.fileRows -= fileRow;
      fileRow += tokens;
    }
    /* One expert for all is the seed's, so all ranks draw by the same. */
    if (epRoutingMake(&one, spec->kind == EP_ROUTE_ONE_EXPERT ? seed : epDataHash(seed, 19, s), &routing)) goto done;
    c.rank[s].tokens = tokens;
    for (uint32_t t = 0; t < drawn; t++) count(&c, s, routing.idx[0] + (size_t)t * spec->topk, (double)tokens / drawn);
    epRoutingFree(&routing);
    out->counted += drawn;
    out->tokens += tokens;
  }
  rc = 0;
done:
  free(c.rankSeen);
  free(c.domainSeen);
  if (rc) epModelTrafficFree(out);
  return rc;
}

void epModelTrafficFree(epModelTraffic *traffic) {
  free(traffic->rank);
  traffic->rank = NULL;
}
