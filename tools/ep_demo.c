/* The main job in one picture: a MoE layer's dispatch -> experts -> combine at DeepSeek-V3's shape on the GPUs found,
 * else at a small shape on the emulated fabric, checked against the reference, with a result table and a drawing. */
#include <argp.h>
#include <langinfo.h>
#include <limits.h>
#include <locale.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "demo_picture.h"
#include "failure.h"
#include "option_number.h"

const char *argp_program_version = "ep_demo 0.1.0";

enum { WARMUP = 3, ITERATIONS = 10, STEPS = 10 };

typedef struct demoOptions {
  epFabricOptions fabric;
  uint32_t tokens, hidden, topk, experts, align;
  unsigned long long seed;
} demoOptions;

typedef struct demoResult {
  uint64_t rows, most;              /* of the output: all ranks, the busiest */
  double dispatch, expert, combine; /* microseconds */
  double worst;                     /* relative difference to the dense sum */
  unsigned wrong;
} demoResult;

typedef struct demo {
  demoOptions options;
  epLayerConfig layer;
  epFabric *fabric;
  epRouting routing;
  epRef *ref;
  uint64_t seed;
  demoResult result[2];
  double *times; /* [ranks][3] */
  double *worst; /* [ranks] */
  int step;
} demo;

/* ---- Progress --------------------------------------------------------------------------------------------------- */

static void progress(demo *d, const epPort *port, const char *text) {
  int terminal = isatty(1);
  if (port->rank) return;
  d->step++;
  if (terminal) {
    printf("\r\033[K  [");
    for (int i = 0; i < STEPS; i++) putchar(i < d->step ? '#' : '.');
    printf("] %s, %s", d->layer.layout == EP_REF_FLAT ? "flat" : "expert-major", text);
  } else {
    printf("  [%2d/%d] %s, %s\n", d->step, STEPS, d->layer.layout == EP_REF_FLAT ? "flat" : "expert-major", text);
  }
  fflush(stdout);
}

/* ---- The experts
 * ------------------------------------------------------------------------------------------------------ */

static epCheckCase caseOf(const demo *d) {
  return (epCheckCase){.ref = d->ref,
                       .routing = &d->routing,
                       .seed = d->seed,
                       .scaleUp = d->options.fabric.scaleUp ? d->options.fabric.scaleUp : (uint32_t)d->ref->in.ranks};
}

/* Expert e multiplies by this. On GPUs the expert is the identity and weights are left out: the host would be too slow.
 */
static float factorOf(int64_t expert) { return 1.0f + 0.125f * (float)(expert % 8); }

/* What the expert side of `rank` sends back for a row: of one (token, k), or in the flat layout of all its local ones.
 */
static void expertRow(const demo *d, int cuda, int rank, epRefRow from, const void *in, void *out) {
  const epRefRouting *r = &d->ref->in;
  uint32_t token = (uint32_t)from.token, source = (uint32_t)from.source;
  float factor = 0;
  for (uint32_t k = 0; k < r->topk; k++)
    if (epRefOwner(d->ref, source, token, k) == rank && (from.k < 0 || from.k == (int32_t)k))
      factor += epDataWeight(d->seed, EP_DATA_WEIGHT, source, token, k) *
                factorOf(r->topkIdx[source][(size_t)token * r->topk + k]);
  if (cuda) memcpy(out, in, epLayerRowBytes(&d->layer));
  for (uint32_t h = 0; h < d->layer.hidden && !cuda; h++)
    epRefStore(d->layer.type, out, h, epRefLoad(d->layer.type, in, h) * factor);
}

static int runExperts(demo *d, epLayer *layer) {
  const epRefRank *mine = &d->ref->rank[layer->port->rank];
  size_t row = epLayerRowBytes(&d->layer), bytes = (size_t)mine->rows * row;
  unsigned char *in = NULL, *out;
  int rc;
  if (layer->port->cuda) return epPortCopyAsync(layer->port, layer->expertOut.data, layer->outTokens.data, bytes);
  out = calloc(mine->rows + 1, row);
  if (!out) return epToolFail("out of host memory");
  rc = epLayerRead(layer, &layer->outTokens, bytes, (void **)&in);
  for (uint64_t i = 0; i < mine->rows && !rc; i++)
    if (mine->row[i].source >= 0) expertRow(d, 0, layer->port->rank, mine->row[i], in + i * row, out + i * row);
  rc = rc || epPortCopy(layer->port, layer->expertOut.data, out, bytes) ? -1 : 0;
  free(in);
  free(out);
  return rc;
}

/* ---- The check
 * -------------------------------------------------------------------------------------------------------- */

/* One token's expected result, exactly; and how far it is from the sum that a dense layer would give. */
static void expectToken(demo *d, const epPort *port, uint32_t token, const void *x, unsigned char *work, float *scratch,
                        double *worst) {
  const epRefRouting *r = &d->ref->in;
  epCheckCase what = caseOf(d);
  epRefCombine how = {
      .type = d->layer.type, .hidden = d->layer.hidden, .scaleUp = what.scaleUp, .multipleReductions = 1};
  size_t row = epLayerRowBytes(&d->layer);
  const void *rows[32] = {NULL};
  double dense = 0;
  for (uint32_t k = 0; k < r->topk; k++) {
    int owner = epRefOwner(d->ref, (uint32_t)port->rank, token, k);
    int32_t slotK = d->layer.layout == EP_REF_FLAT ? -1 : (int32_t)k;
    if (owner < 0) continue;
    expertRow(d, port->cuda, owner, (epRefRow){port->rank, (int32_t)token, slotK}, x, work + k * row);
    rows[k] = work + k * row;
    dense += (double)epDataWeight(d->seed, EP_DATA_WEIGHT, (uint32_t)port->rank, token, k) *
             factorOf(r->topkIdx[port->rank][(size_t)token * r->topk + k]);
  }
  epRefCombineToken(d->ref, &how, (uint32_t)port->rank, token, rows, scratch, work + r->topk * row);
  for (uint32_t h = 0; h < d->layer.hidden && !port->cuda; h++) {
    double want = dense * epRefLoad(d->layer.type, x, h), got = epRefLoad(d->layer.type, work + r->topk * row, h);
    double off = fabs(got - want) / (fabs(want) + 1e-30);
    *worst = off > *worst ? off : *worst;
  }
}

static int checkResult(demo *d, epLayer *layer) {
  epPort *port = layer->port;
  epCheckCase what = caseOf(d);
  uint32_t tokens = d->routing.tokens[port->rank], wrong = 0;
  size_t row = epLayerRowBytes(&d->layer);
  unsigned char *y = NULL, *x = malloc(row + 8), *work = malloc((d->layer.topk + 1) * row);
  float *scratch = malloc(4ull * d->layer.hidden * sizeof(*scratch));
  int rc = -1;
  if (!x || !work || !scratch) {
    epToolFail("out of host memory");
    goto done;
  }
  if (epCheckErrors(layer, &what) || epLayerCheckGuards(layer) || epCheckCounts(layer, &what) ||
      epCheckDispatch(layer, &what, EP_DATA_GRADIENT, 0, NULL) ||
      epLayerRead(layer, &layer->y, tokens * row, (void **)&y))
    goto done;
  for (uint32_t t = 0; t < tokens; t++) {
    epDataRow(d->layer.type, d->seed, EP_DATA_GRADIENT, (uint32_t)port->rank, t, x, d->layer.hidden);
    expectToken(d, port, t, x, work, scratch, &d->worst[port->rank]);
    if (memcmp(y + t * row, work + d->layer.topk * row, row) != 0 && !wrong++)
      epToolFail("rank %d: combine: token %u differs from the reference", port->rank, t);
  }
  rc = 0;
done:
  free(y);
  free(x);
  free(work);
  free(scratch);
  return rc;
}

/* ---- One layout
 * ------------------------------------------------------------------------------------------------------- */

/* Times of one pass; the expert step of the emulated fabric runs on the host, between its ends. */
static int pass(demo *d, epLayer *layer, int first, double *times) {
  epPort *port = layer->port;
  int hold = port->cuda && !first; /* the first call may load a kernel, which can wait for the stream */
  if (epPortSync(port) || epPortBarrier(port) || (hold && epPortHold(port)) || epPortMark(port, 0) ||
      epLayerUpdate(layer, 0) || epLayerDispatch(layer, 0) || epPortMark(port, 1) || runExperts(d, layer) ||
      epPortMark(port, 2) || epLayerCombine(layer, 0) || epPortMark(port, 3) || (hold && epPortRelease(port)) ||
      epPortSync(port))
    return -1;
  for (unsigned i = 0; i < 3; i++)
    if (epPortElapsed(port, i, i + 1, &times[i])) return -1;
  return 0;
}

static int keepBest(double *best, const double *times, int first) {
  for (int i = 0; i < 3; i++) best[i] = first || times[i] < best[i] ? times[i] : best[i];
  return 0;
}

static int rankBody(epPort *port, void *context) {
  demo *d = context;
  epCheckCase what = caseOf(d);
  epLayer *layer = NULL;
  double times[3], *best = d->times + 3 * (size_t)port->rank;
  int rc = -1, rounds = port->cuda ? WARMUP + ITERATIONS : 1;
  progress(d, port, "group and handle");
  if (epLayerOpen(port, &d->layer, &layer)) goto done;
  progress(d, port, "filling tokens");
  if (epLayerSetIndices(layer, 0, d->routing.idx[port->rank], d->routing.tokens[port->rank]) ||
      epCheckUploadTokens(layer, &what, EP_DATA_GRADIENT))
    goto done;
  progress(d, port, "dispatch, experts, combine");
  if (epLayerPrefill(layer) || pass(d, layer, 1, best)) goto done;
  progress(d, port, "checking against the reference");
  if (checkResult(d, layer)) goto done;
  if (rounds > 1)
    progress(d, port, "measuring");
  else
    progress(d, port, "done");
  for (int i = 1; i < rounds; i++)
    if (pass(d, layer, 0, times) || keepBest(best, times, i == WARMUP)) goto done;
  rc = 0;
done:
  rc |= epPortFaults(port);
  if (rc) epPortAbort(port); /* closing is collective: let the others come to it */
  if (layer) rc |= epLayerClose(layer);
  return rc ? -1 : 0;
}

static int runLayout(demo *d, epRefLayout layout) {
  demoResult *result = &d->result[layout];
  epRefRouting in = {.ranks = (uint32_t)epFabricRanks(d->fabric),
                     .experts = d->options.experts,
                     .topk = d->options.topk,
                     .layout = layout,
                     .align = layout == EP_REF_FLAT ? 0 : d->options.align,
                     .tokens = d->routing.tokens,
                     .topkIdx = (const int64_t *const *)d->routing.idx};
  unsigned before = epToolFailures();
  int rc;
  d->layer = (epLayerConfig){.type = EP_REF_BF16,
                             .layout = layout,
                             .hidden = d->options.hidden,
                             .experts = in.experts,
                             .topk = in.topk,
                             .maxTokens = d->options.tokens,
                             .align = in.align,
                             .routings = 1,
                             .timeoutMs = d->options.fabric.timeoutMs};
  d->layer.budget = d->layer.capacity = epLayerWorstRows(&d->layer, (int)in.ranks, 0);
  epRefDestroy(d->ref);
  d->ref = NULL;
  rc = epRefCreate(&in, &d->ref);
  if (rc) return epToolFail("reference: %s", strerror(rc));
  rc = epFabricRun(d->fabric, rankBody, d);
  for (uint32_t r = 0; r < in.ranks; r++) {
    const double *t = d->times + 3 * (size_t)r;
    result->rows += d->ref->rank[r].rows;
    result->most = d->ref->rank[r].rows > result->most ? d->ref->rank[r].rows : result->most;
    result->dispatch = t[0] > result->dispatch ? t[0] : result->dispatch;
    result->expert = t[1] > result->expert ? t[1] : result->expert;
    result->combine = t[2] > result->combine ? t[2] : result->combine;
    result->worst = d->worst[r] > result->worst ? d->worst[r] : result->worst;
  }
  result->wrong = epToolFailures() - before;
  return rc;
}

/* ---- The program
 * ------------------------------------------------------------------------------------------------------ */

static void printTable(const demo *d, int cuda) {
  static const char *const names[] = {"flat", "expert-major"};
  size_t row = epLayerRowBytes(&d->layer);
  printf("%s\n  %-13s %10s %12s %12s %12s %12s  %s\n", isatty(1) ? "\r\033[K" : "", "layout", "rows", "MB busiest",
         "dispatch us", "experts us", "combine us", "against the reference");
  for (int i = 0; i < 2; i++) {
    const demoResult *r = &d->result[i];
    printf("  %-13s %10llu %12.2f %12.1f %12.1f %12.1f  ", names[i], (unsigned long long)r->rows,
           (double)r->most * (double)row * 1e-6, r->dispatch, r->expert, r->combine);
    if (r->wrong)
      printf("WRONG (%u reports)\n", r->wrong);
    else
      printf("every byte equal\n");
  }
  if (cuda)
    printf("\n  Times: CUDA events, best of %d, slowest rank; dispatch includes the routing update. The expert is a "
           "copy.\n\n",
           ITERATIONS);
  else
    printf("\n  Times are the host's for the emulated ranks and say nothing about GPUs. Expert e multiplies by 1 + (e "
           "mod 8) / 8;\n"
           "  the largest relative difference to the dense sum is %.4f (rounding of bf16).\n\n",
           d->result[0].worst > d->result[1].worst ? d->result[0].worst : d->result[1].worst);
}

static error_t parseOption(int key, char *text, struct argp_state *state) {
  demoOptions *o = state->input;
  unsigned out, up;
  char end;
  switch (key) {
  case 'b':
    if (strcmp(text, "auto") != 0 && strcmp(text, "cuda") != 0 && strcmp(text, "emu") != 0)
      argp_error(state, "--backend %s: expected one of auto, cuda, emu", text);
    o->fabric.kind = !strcmp(text, "cuda") ? EP_FABRIC_CUDA : !strcmp(text, "emu") ? EP_FABRIC_EMU : EP_FABRIC_AUTO;
    break;
  case 'u':
    if (sscanf(text, "%ux%u%c", &out, &up, &end) != 2 || !out || !up || out > 1024 || up > 1024 || out * up > 1024)
      argp_error(state, "--topology %s: expected OxU, for example 1x8", text);
    o->fabric.scaleOut = out;
    o->fabric.scaleUp = up;
    break;
  case 't':
    o->tokens = (uint32_t)epOptionNumber(text, 1, 1 << 20, "tokens", state);
    break;
  case 'h':
    o->hidden = (uint32_t)epOptionNumber(text, 1, 1 << 24, "hidden", state);
    break;
  case 'k':
    o->topk = (uint32_t)epOptionNumber(text, 1, 32, "topk", state);
    break;
  case 'e':
    o->experts = (uint32_t)epOptionNumber(text, 1, 1 << 20, "experts", state);
    break;
  case 's':
    o->seed = epOptionNumber(text, 0, ULLONG_MAX, "seed", state);
    break;
  case ARGP_KEY_ARG:
    argp_error(state, "%s: arguments are options only", text);
    break;
  default:
    return ARGP_ERR_UNKNOWN;
  }
  return 0;
}

static int parse(int argc, char **argv, demoOptions *o) {
  static const struct argp_option table[] = {
      {"backend", 'b', "auto|cuda|emu", 0, "GPUs, or the emulated fabric", 0},
      {"topology", 'u', "OxU", 0, "scale-out x scale-up ranks (default: all GPUs; emulated 1x8)", 0},
      {"tokens", 't', "N", 0, "tokens a rank (default: 4096; emulated 16)", 0},
      {"hidden", 'h', "N", 0, "elements of a token (default: 7168; emulated 512)", 0},
      {"topk", 'k', "N", 0, "experts a token selects (default: 8)", 0},
      {"experts", 'e', "N", 0, "of all ranks (default: 256; emulated 8 a rank)", 0},
      {"seed", 's', "N", 0, "of the data", 0},
      {0}};
  static const struct argp argp = {
      .options = table, .parser = parseOption, .doc = "One MoE layer: dispatch, experts, combine, checked and drawn."};
  const char *reason = "";
  int gpus, cuda;
  *o = (demoOptions){.seed = 1};
  o->fabric.timeoutMs = 20000;
  if (argp_parse(&argp, argc, argv, 0, NULL, o)) return -1;
  o->fabric.kind = epFabricChoose(o->fabric.kind, &gpus, &reason);
  cuda = o->fabric.kind == EP_FABRIC_CUDA;
  if (!cuda && !o->fabric.scaleUp) {
    o->fabric.scaleOut = 1;
    o->fabric.scaleUp = 8;
  }
  o->tokens = o->tokens ? o->tokens : cuda ? 4096 : 16;
  o->hidden = o->hidden ? o->hidden : cuda ? 7168 : 512;
  o->topk = o->topk ? o->topk : 8;
  o->experts = o->experts ? o->experts : cuda ? 256 : 8 * o->fabric.scaleOut * o->fabric.scaleUp;
  o->align = cuda ? 128 : 16;
  o->fabric.seed = o->seed;
  if (epFabricLaunchedRanks() > 0)
    return epToolFail("ep_demo drives all GPUs from one process: start it without a launcher");
  if (cuda)
    printf("One MoE layer of DeepSeek-V3's shape on %d GPUs\n", gpus);
  else
    printf("One MoE layer on the emulated fabric, %u ranks%s%s\n", o->fabric.scaleOut * o->fabric.scaleUp,
           gpus ? "" : ": ", gpus ? "" : reason);
  return 0;
}

static int prepare(demo *d) {
  uint32_t ranks = (uint32_t)epFabricRanks(d->fabric), *tokens = calloc(ranks, sizeof(*tokens));
  epRouteSpec spec = {.kind = EP_ROUTE_UNIFORM,
                      .ranks = ranks,
                      .experts = d->options.experts,
                      .topk = d->options.topk,
                      .tokensLow = tokens,
                      .tokensHigh = tokens};
  int rc;
  d->times = calloc(3 * (size_t)ranks, sizeof(*d->times));
  d->worst = calloc(ranks, sizeof(*d->worst));
  if (!tokens || !d->times || !d->worst) {
    free(tokens);
    return epToolFail("out of host memory");
  }
  for (uint32_t r = 0; r < ranks; r++) tokens[r] = d->options.tokens;
  if (d->options.experts >= 64 && d->options.experts % 8 == 0 && d->options.topk <= d->options.experts / 2)
    spec.kind = EP_ROUTE_GROUPED; /* as DeepSeek-V3 gates */
  rc = epRoutingMake(&spec, d->options.seed, &d->routing);
  free(tokens);
  printf("  %u tokens a rank, hidden %u, top-%u of %u experts, bf16%s%s\n\n", d->options.tokens, d->options.hidden,
         d->options.topk, d->options.experts, spec.kind == EP_ROUTE_GROUPED ? ", 4 of 8 groups a token" : "",
         epFabricVersions(d->fabric));
  return rc;
}

int main(int argc, char **argv) {
  demo d = {.seed = 7};
  int rc = -1;
  setlocale(LC_CTYPE, "");
  epToolInit("ep_demo", 0);
  if (parse(argc, argv, &d.options)) return 1;
  epToolInit("ep_demo", d.options.fabric.timeoutMs / 1000 + 60);
  if (epFabricOpen(&d.options.fabric, &d.fabric)) return 1;
  if (!prepare(&d) && !runLayout(&d, EP_REF_FLAT) && !runLayout(&d, EP_REF_EXPERT_MAJOR)) {
    printTable(&d, epFabricIsCuda(d.fabric));
    epDemoDraw(stdout, d.ref, !strcmp(nl_langinfo(CODESET), "UTF-8"));
    rc = 0;
  }
  epFabricClose(d.fabric);
  epRefDestroy(d.ref);
  epRoutingFree(&d.routing);
  free(d.times);
  free(d.worst);
  return rc || epToolFailures() ? 1 : 0;
}
