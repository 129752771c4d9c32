/* The command line of ep_bench. Defaults are those of the machine: DeepSeek-V3's shape on GPUs, a small layer on the
 * emulated fabric. */
#include "bench_options.h"

#include <argp.h>
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "bootstrap.h"
#include "bugs.h"
#include "failure.h"
#include "layout.h"
#include "spread.h"
#include "option_number.h"

#define MASK_TEST_MS 50 /* many times what a layer takes */
#define RUN_RANKS 1024u
#define MAX_RANKS 2048u       /* of --model */
#define MAX_TOKENS (1u << 20) /* the library's own limit is lower with a top-k above 1 */

const char *argp_program_version = "ep_bench 0.1.0";

enum {
  OPT_BACKEND = 256,
  OPT_TOPOLOGY,
  OPT_OP,
  OPT_ALGO,
  OPT_LAYOUT,
  OPT_DTYPE,
  OPT_SCALES,
  OPT_SCALE_LAYOUT,
  OPT_NO_ZERO_PAD,
  OPT_WINDOW_OUT,
  OPT_SINGLE,
  OPT_NUM_QPS,
  OPT_MASKS,
  OPT_BIAS,
  OPT_COMBINE_QUANT,
  OPT_STAGED,
  OPT_TOKENS,
  OPT_HIDDEN,
  OPT_TOPK,
  OPT_EXPERTS,
  OPT_ALIGN,
  OPT_ROUTING,
  OPT_MINUS_ONE,
  OPT_SEED,
  OPT_SCHEDULES,
  OPT_SMS,
  OPT_EMU_SMS,
  OPT_NO_BULK,
  OPT_WARMUP,
  OPT_ITERS,
  OPT_CHECK,
  OPT_BACKWARD,
  OPT_INDEX,
  OPT_FUSED,
  OPT_NO_FUSED,
  OPT_BUG,
  OPT_MAX_RECV,
  OPT_TIMEOUT,
  OPT_JSON,
  OPT_LIMITS,
  OPT_PARTS,
  OPT_GRAPH,
  OPT_HOST_TIME,
  OPT_COMPARE,
  OPT_SM_CURVE,
  OPT_PLOT,
  OPT_MODEL,
  OPT_PROFILE,
  OPT_DELAY,
  OPT_MASK_TEST
};

static const struct argp_option optionTable[] = {
    {0, 0, 0, 0, "Machine", 1},
    {"backend", OPT_BACKEND, "auto|cuda|emu", 0, "GPUs, or the emulated fabric (default: auto, GPUs if there are any)",
     0},
    {"topology", OPT_TOPOLOGY, "OxU", 0, "scale-out x scale-up ranks (default: all GPUs; emulated 1x4)", 0},
    {"sms", OPT_SMS, "N|few|all", 0,
     "SMs the library may use at most (default: its own choice, the fewest for 95 % of the best bandwidth)", 0},
    {"emu-sms", OPT_EMU_SMS, "N", 0, "resident blocks of an emulated rank (default: 8)", 0},
    {"no-bulk", OPT_NO_BULK, 0, 0, "emulated: kernels as on SM80, without bulk copies", 0},
    {"timeout-ms", OPT_TIMEOUT, "N", 0, "bound of every wait in a kernel (default: 10000)", 0},
    {0, 0, 0, 0, "Layer", 2},
    {"op", OPT_OP, "dispatch,combine", 0, "operations to measure (default: both)", 0},
    {"algo", OPT_ALGO, "ht|ll", 0, "high throughput or low latency (default: what the layout belongs to, else ht)", 0},
    {"layout", OPT_LAYOUT, "flat|expert-major|rank-major|expert-major-3d", 0,
     "of dispatch's output; the last two are low latency's (default: expert-major; ll: rank-major)", 0},
    {"dtype", OPT_DTYPE, "bf16|fp16|fp32|fp8", 0,
     "of token rows (default: bf16); fp8 (e4m3) is dispatched, and combine then moves bf16 rows", 0},
    {"scales", OPT_SCALES, "fp32|ue8m0|none", 0,
     "dispatched beside each row: 4 bytes or 1 byte for every 128 elements (default: fp32 for fp8, else none)", 0},
    {"scale-layout", OPT_SCALE_LAYOUT, "row|column", 0, "how dispatch's scales lie (default: row)", 0},
    {"no-zero-pad", OPT_NO_ZERO_PAD, 0, 0, "expert-major: leave padding rows as they are", 0},
    {"window-out", OPT_WINDOW_OUT, 0, 0,
     "dispatch's output tokens lie in a registered window, where peers may store rows in place", 0},
    {"single-reduction", OPT_SINGLE, 0, 0,
     "combine sums nothing on the way: every slot travels (see ncclEpCreateGroupExt)", 0},
    {"masks", OPT_MASKS, 0, 0, "the group can leave out ranks that do not answer (enable_mask)", 0},
    {"bias", OPT_BIAS, "N", 0, "rows that combine's sums start from, 0 to 2 (default: 0)", 0},
    {"combine-quant", OPT_COMBINE_QUANT, "none|nvfp4", 0,
     "low latency: how combine's bf16 rows travel (default: none, as they are)", 0},
    {"num-qps", OPT_NUM_QPS, "N", 0,
     "queue pairs that a call's rows go by between scale-up domains (default 0: the group's)", 0},
    {"tokens", OPT_TOKENS, "LIST", 0,
     "tokens a rank: one value, or one per rank separated by commas; LOW-HIGH draws anew for each routing (default: "
     "4096; "
     "emulated 16)",
     0},
    {"hidden", OPT_HIDDEN, "N", 0, "elements of a row (default: 7168; emulated 512)", 0},
    {"topk", OPT_TOPK, "N", 0, "experts a token selects (default: 8)", 0},
    {"experts", OPT_EXPERTS, "N", 0, "of the group (default: 256; emulated 8 a rank)", 0},
    {"align", OPT_ALIGN, "N", 0, "rows an expert's zone is aligned to, expert-major (default: 128; emulated 16)", 0},
    {"max-recv", OPT_MAX_RECV, "N", 0, "rows of the output (default: what no routing exceeds; 0: eager)", 0},
    {"index", OPT_INDEX, "int32|int64", 0, "type of topk_idx and of the counters (default: int64)", 0},
    {0, 0, 0, 0, "Data", 3},
    {"routing", OPT_ROUTING, "KIND", 0,
     "uniform, grouped (8 groups, a token sees 4), zipf, one-expert, repeated (ids may repeat in a row), none, or a "
     "file with "
     "the ids of one token a line, rank after rank (default: uniform)",
     0},
    {"minus-one", OPT_MINUS_ONE, "P", 0, "fraction of entries replaced by -1 (default: 0)", 0},
    {"seed", OPT_SEED, "N", 0, "of data, routing and emulated schedule (default: 1)", 0},
    {0, 0, 0, 0, "Run", 4},
    {"fused", OPT_FUSED, 0, 0,
     "updates borrow topk_idx and leave their work to dispatch where it can do it (default; see ncclEpUpdateHandleExt)",
     0},
    {"no-fused", OPT_NO_FUSED, 0, 0, "an update is always a launch of its own", 0},
    {"staged", OPT_STAGED, "own-stream", OPTION_ARG_OPTIONAL,
     "dispatch and combine send only, with own-stream on the group's communication stream, and ncclEpDeferredRun "
     "receives",
     0},
    {"schedules", OPT_SCHEDULES, "N", 0, "emulated: seeds tried, from --seed on, each on a fresh fabric (default: 1)",
     0},
    {"warmup", OPT_WARMUP, "N", 0, "iterations before the measured ones (default: 10; emulated 0)", 0},
    {"iters", OPT_ITERS, "N", 0, "measured iterations (default: 50; emulated 1)", 0},
    {"check", OPT_CHECK, 0, 0, "compare every byte with the reference, and a repeated run with the first", 0},
    {"backward", OPT_BACKWARD, 0, 0, "also the backward pass of both operations", 0},
    {"bug", OPT_BUG, "NAME", 0, "emulated: plant a fault in the kernels ('list' shows the names)", 0},
    {"limits", OPT_LIMITS, 0, 0, "GPUs: also measure copy engine and memory with the same bytes", 0},
    {"profile-parts", OPT_PARTS, 0, 0, "also time update, dispatch and combine alone and all together", 0},
    {"graph", OPT_GRAPH, 0, 0, "GPUs: check and time replays of CUDA graphs, one for each prepared routing", 0},
    {"host-time", OPT_HOST_TIME, 0, 0,
     "also time the calls on the host, from call to return, and ncclEpPrepare before them", 0},
    {"compare", OPT_COMPARE, "CASES", OPTION_ARG_OPTIONAL,
     "measure the operations beside the link's limits and NCCL's all-to-all of the same bytes, in turn; CASES: "
     "LAYOUT:TOKENS,... (default: one, of --layout and --tokens)",
     0},
    {"sm-curve", OPT_SM_CURVE, "LIST", 0, "measure the operations with each of these numbers of SMs", 0},
    {"plot", OPT_PLOT, "FILE", 0, "draw the result: FILE.svg or FILE.html", 0},
    {"model", OPT_MODEL, "FILE", 0,
     "emulated: run nothing, but predict times and the busiest link on the machine that a file describes "
     "(docs/models/), for up to 2048 ranks",
     0},
    {"profile", OPT_PROFILE, "BASE", OPTION_ARG_OPTIONAL,
     "also profile the operations: their spans, and who waited how long for whom; BASE: a timeline too, as BASE.json "
     "for "
     "chrome://tracing and as BASE.svg",
     0},
    {"delay", OPT_DELAY, "RANK:US", 0, "with --profile: this rank comes so many microseconds late to each operation",
     0},
    {"mask-test", OPT_MASK_TEST, "RANK", 0,
     "measure nothing: this rank stays away from some layers of a group with masks and comes back; prints what the "
     "others saw, all of it checked (from 3 ranks on; the first of those layers lasts --timeout-ms)",
     0},
    {"json", OPT_JSON, "FILE", 0, "write everything to a file, too", 0},
    {0}};

/* ---- Values ----------------------------------------------------------------------------------------------------- */

static unsigned choice(const char *text, const char *const *names, const char *option, struct argp_state *state) {
  char all[256] = "";
  size_t used = 0;
  for (unsigned i = 0; names[i]; i++) {
    if (strcmp(text, names[i]) == 0) return i;
    if (used < sizeof(all)) used += (size_t)snprintf(all + used, sizeof(all) - used, "%s%s", i ? ", " : "", names[i]);
  }
  argp_error(state, "--%s %s: expected one of %s", option, text, all);
  return 0;
}

static const char *const layoutNames[] = {"flat", "expert-major", "rank-major", "expert-major-3d", NULL};

const char *epBenchLayoutName(epRefLayout layout) { return layoutNames[layout]; }

static unsigned parseOps(const char *text, struct argp_state *state) {
  if (!strcmp(text, "dispatch")) return EP_OP_DISPATCH;
  if (!strcmp(text, "combine")) return EP_OP_COMBINE;
  if (strcmp(text, "dispatch,combine") != 0 && strcmp(text, "combine,dispatch") != 0)
    argp_error(state, "--op %s: expected dispatch, combine or dispatch,combine", text);
  return EP_OP_DISPATCH | EP_OP_COMBINE;
}

static void parseTopology(const char *text, epFabricOptions *fabric, struct argp_state *state) {
  char *end;
  unsigned long out = strtoul(text, &end, 10), up = 0;
  if (*end == 'x') up = strtoul(end + 1, &end, 10);
  if (*end || out < 1 || up < 1 || out > MAX_RANKS || up > MAX_RANKS || out * up > MAX_RANKS)
    argp_error(state, "--topology %s: expected OxU, for example 1x8, with at most %u ranks (with --model %u)", text,
               RUN_RANKS, MAX_RANKS);
  fabric->scaleOut = (unsigned)out;
  fabric->scaleUp = (unsigned)up;
}

static unsigned parseBug(const char *text, struct argp_state *state) {
  static const char *const names[] = {
#define X(id, name) name,
      EP_BUGS(X)
#undef X
          NULL};
  if (!strcmp(text, "list")) {
    for (unsigned i = 0; names[i]; i++) puts(names[i]);
    exit(0);
  }
  return choice(text, names, "bug", state);
}

static void parseCurve(const char *text, epBenchOptions *o, struct argp_state *state) {
  const char *at = text;
  for (o->curveCount = 0;; at++) {
    char *end;
    unsigned long value = strtoul(at, &end, 10);
    if (*at < '0' || *at > '9' || (*end && *end != ',') || value < 1 || value > 1024)
      argp_error(state, "--sm-curve %s: expected numbers from 1 to 1024 separated by commas", text);
    if (o->curveCount == EP_BENCH_POINTS)
      argp_error(state, "--sm-curve %s: expected at most %d numbers", text, EP_BENCH_POINTS);
    o->curve[o->curveCount++] = (unsigned)value;
    if (!*end) return;
    at = end;
  }
}

static void parseDelay(const char *text, epBenchOptions *o, struct argp_state *state) {
  char *end;
  unsigned long rank = strtoul(text, &end, 10), us = *end == ':' ? strtoul(end + 1, &end, 10) : 0;
  if (*end || *text < '0' || *text > '9' || rank >= RUN_RANKS || us < 1 || us > 1000000)
    argp_error(state, "--delay %s: expected RANK:US, for example 1:300, with 1 to 1000000 microseconds", text);
  o->delayRank = (unsigned)rank;
  o->delayUs = (unsigned)us;
}

static error_t parseOption(int key, char *text, struct argp_state *state) {
  static const char *const backends[] = {"auto", "cuda", "emu", NULL}, *const algos[] = {"ht", "ll", NULL};
  static const char *const scales[] = {"none", "fp32", "ue8m0", NULL}, *const scaleLayouts[] = {"row", "column", NULL};
  static const char *const types[] = {"bf16", "fp16", "fp32", "fp8", NULL}, *const integers[] = {"int64", "int32",
                                                                                                 NULL};
  static const char *const recipes[] = {"none", "nvfp4", NULL};
  epBenchOptions *o = state->input;
  char *end;
  switch (key) {
  case OPT_BACKEND:
    o->fabric.kind = (epFabricKind)choice(text, backends, "backend", state);
    break;
  case OPT_TOPOLOGY:
    parseTopology(text, &o->fabric, state);
    break;
  case OPT_OP:
    o->ops = parseOps(text, state);
    break;
  case OPT_ALGO:
    o->algo = (int)choice(text, algos, "algo", state);
    break;
  case OPT_LAYOUT:
    o->layoutGiven = 1;
    o->layout = (epRefLayout)choice(text, layoutNames, "layout", state);
    break;
  case OPT_DTYPE:
    o->type = (epRefType)choice(text, types, "dtype", state);
    break;
  case OPT_SCALES:
    o->scales = (int)choice(text, scales, "scales", state);
    break;
  case OPT_SCALE_LAYOUT:
    o->scaleColumns = (int)choice(text, scaleLayouts, "scale-layout", state);
    break;
  case OPT_NO_ZERO_PAD:
    o->noZeroPad = 1;
    break;
  case OPT_WINDOW_OUT:
    o->windowOut = 1;
    break;
  case OPT_SINGLE:
    o->single = 1;
    break;
  case OPT_MASKS:
    o->masks = 1;
    break;
  case OPT_BIAS:
    o->bias = (int)epOptionNumber(text, 0, 2, "bias", state);
    break;
  case OPT_COMBINE_QUANT:
    o->nvfp4 = (int)choice(text, recipes, "combine-quant", state);
    break;
  case OPT_NUM_QPS:
    o->queuePairs = (int)epOptionNumber(text, 0, INT_MAX, "num-qps", state);
    break;
  case OPT_STAGED:
    if (text && strcmp(text, "own-stream") != 0) argp_error(state, "--staged=%s: expected own-stream or nothing", text);
    o->staged = text ? 2 : 1;
    break;
  case OPT_TOKENS:
    o->tokensText = text;
    break;
  case OPT_HIDDEN:
    o->hidden = (uint32_t)epOptionNumber(text, 1, 1 << 24, "hidden", state);
    break;
  case OPT_TOPK:
    o->topk = (uint32_t)epOptionNumber(text, 1, 32, "topk", state);
    break;
  case OPT_EXPERTS:
    o->experts = (uint32_t)epOptionNumber(text, 1, 1 << 20, "experts", state);
    break;
  case OPT_ALIGN:
    o->align = (uint32_t)epOptionNumber(text, 0, 1 << 20, "align", state);
    break;
  case OPT_ROUTING:
    o->routingText = text;
    break;
  case OPT_MINUS_ONE:
    o->route.minusOne = strtod(text, &end);
    if (end == text || *end || !(o->route.minusOne >= 0 && o->route.minusOne <= 1))
      argp_error(state, "--minus-one %s: expected 0 to 1", text);
    break;
  case OPT_SEED:
    o->seed = epOptionNumber(text, 0, ULLONG_MAX, "seed", state);
    break;
  case OPT_SCHEDULES:
    o->schedules = (unsigned)epOptionNumber(text, 1, 1000000, "schedules", state);
    break;
  case OPT_SMS:
    if (!strcmp(text, "few"))
      o->sms = NCCL_EP_SMS_FEW;
    else if (!strcmp(text, "all"))
      o->sms = NCCL_EP_SMS_ALL;
    else if (*text < '0' || *text > '9')
      argp_error(state, "--sms %s: expected a number from 0 to 1024, few or all", text);
    else
      o->sms = (unsigned)epOptionNumber(text, 0, 1024, "sms", state);
    break;
  case OPT_EMU_SMS:
    o->fabric.emuSms = (unsigned)epOptionNumber(text, 1, 1024, "emu-sms", state);
    break;
  case OPT_NO_BULK:
    o->fabric.emuNoBulk = 1;
    break;
  case OPT_WARMUP:
    o->warmup = (unsigned)epOptionNumber(text, 0, 1000000, "warmup", state);
    break;
  case OPT_ITERS:
    o->iters = (unsigned)epOptionNumber(text, 0, 1000000, "iters", state);
    break;
  case OPT_CHECK:
    o->check = 1;
    break;
  case OPT_BACKWARD:
    o->backward = 1;
    break;
  case OPT_INDEX:
    o->index32 = (int)choice(text, integers, "index", state);
    break;
  case OPT_FUSED:
  case OPT_NO_FUSED:
    o->noFused = key == OPT_NO_FUSED;
    break;
  case OPT_BUG:
    o->bugText = text;
    o->fabric.emuBug = parseBug(text, state);
    break;
  case OPT_MAX_RECV:
    o->maxRecv = (long long)epOptionNumber(text, 0, UINT32_MAX, "max-recv", state);
    break;
  case OPT_TIMEOUT:
    o->fabric.timeoutMs = (unsigned)epOptionNumber(text, 1, 1000000, "timeout-ms", state);
    break;
  case OPT_JSON:
    o->jsonPath = text;
    break;
  case OPT_LIMITS:
    o->limits = 1;
    break;
  case OPT_PARTS:
    o->parts = 1;
    break;
  case OPT_GRAPH:
    o->graph = 1;
    break;
  case OPT_HOST_TIME:
    o->hostTime = 1;
    break;
  case OPT_COMPARE:
    o->compare = 1;
    o->compareText = text;
    break;
  case OPT_SM_CURVE:
    parseCurve(text, o, state);
    break;
  case OPT_PROFILE:
    o->profile = 1;
    o->profilePath = text;
    break;
  case OPT_DELAY:
    parseDelay(text, o, state);
    break;
  case OPT_MASK_TEST:
    o->maskRank = (int)epOptionNumber(text, 0, RUN_RANKS - 1, "mask-test", state);
    break;
  case OPT_MODEL:
    o->modelPath = text;
    break;
  case OPT_PLOT:
    end = strrchr(text, '.');
    if (!end || (strcmp(end, ".svg") != 0 && strcmp(end, ".html") != 0))
      argp_error(state, "--plot %s: expected a name that ends in .svg or .html", text);
    o->plotPath = text;
    break;
  case ARGP_KEY_ARG:
    argp_error(state, "%s: arguments are options only", text);
    break;
  default:
    return ARGP_ERR_UNKNOWN;
  }
  return 0;
}

int epBenchParse(int argc, char **argv, epBenchOptions *o) {
  static const struct argp argp = {.options = optionTable,
                                   .parser = parseOption,
                                   .doc = "Measures and checks dispatch and combine, on GPUs or on the emulated "
                                          "fabric. Exit status 1 on any wrong value, "
                                          "fault of the emulated fabric or asynchronous error.\v"
                                          "One process drives all GPUs with a thread each. Under torchrun or mpirun it "
                                          "is one process per rank: rank and size "
                                          "come from the launcher's variables, and rank 0 is found through "
                                          "NCCL_EP_BENCH_ID_FILE (a path all ranks see) or "
                                          "MASTER_ADDR and MASTER_PORT + 1 (NCCL_EP_BENCH_PORT chooses another port)."};
  size_t used = 0;
  *o = (epBenchOptions){.ops = EP_OP_DISPATCH | EP_OP_COMBINE,
                        .layout = EP_REF_EXPERT_MAJOR,
                        .routingText = "uniform",
                        .seed = 1,
                        .schedules = 1,
                        .warmup = UINT_MAX,
                        .iters = UINT_MAX,
                        .align = UINT_MAX,
                        .maxRecv = -1,
                        .scales = -1,
                        .algo = -1,
                        .maskRank = -1,
                        .topk = 8};
  o->fabric.timeoutMs = 10000;
  for (int i = 0; i < argc && used + 1 < sizeof(o->command); i++)
    used += (size_t)snprintf(o->command + used, sizeof(o->command) - used, "%s%s", i ? " " : "", argv[i]);
  return argp_parse(&argp, argc, argv, 0, NULL, o) ? -1 : 0;
}

/* ---- What depends on the machine -------------------------------------------------------------------------------- */

static int parseTokens(epBenchOptions *o) {
  const char *at = o->tokensText;
  uint32_t count = 0;
  o->tokensLow = calloc(o->ranks, sizeof(*o->tokensLow));
  o->tokensHigh = calloc(o->ranks, sizeof(*o->tokensHigh));
  if (!o->tokensLow || !o->tokensHigh) return epToolFail("out of host memory");
  while (count < o->ranks) {
    char *end;
    unsigned long low = strtoul(at, &end, 10), high = low;
    if (end != at && *end == '-') {
      at = end + 1;
      high = strtoul(at, &end, 10);
    }
    if (end == at || (*end && *end != ',') || high < low || strpbrk(o->tokensText, "+ "))
      return epToolFail("--tokens %s: expected one value or range, or one per rank separated by commas", o->tokensText);
    if (high > MAX_TOKENS)
      return epToolFail("--tokens %s: expected at most %u tokens a rank", o->tokensText, MAX_TOKENS);
    o->tokensLow[count] = (uint32_t)low;
    o->tokensHigh[count++] = (uint32_t)high;
    if (!*end) break;
    at = end + 1;
    if (count == o->ranks) return epToolFail("--tokens %s: more values than the %u ranks", o->tokensText, o->ranks);
  }
  if (count != 1 && count != o->ranks)
    return epToolFail("--tokens %s: %u values for %u ranks", o->tokensText, count, o->ranks);
  for (uint32_t r = 0; r < o->ranks; r++) {
    if (r >= count) {
      o->tokensLow[r] = o->tokensLow[0];
      o->tokensHigh[r] = o->tokensHigh[0];
    }
    if (o->tokensHigh[r] > o->maxTokens) o->maxTokens = o->tokensHigh[r];
  }
  if (!o->maxTokens) o->maxTokens = 1; /* a group must allow one */
  return 0;
}

/* What low latency cannot do must not look as if it had been measured. */
static int checkFit(const epBenchOptions *o, int ll) {
  static const char *const useHt = "expected --layout flat or expert-major (high throughput)";
  size_t row = o->hidden * epRefTypeBytes(o->type), back = o->hidden * epRefTypeBytes(EP_REF_BF16);
  if (ll && o->scaleColumns) return epToolFail("--scale-layout column: low latency has scales in rows: %s", useHt);
  if (ll && o->backward) return epToolFail("--backward: low latency has the forward pass only: %s", useHt);
  if (ll && o->maxRecv >= 0) return epToolFail("--max-recv: low latency's rows have fixed places: %s", useHt);
  if (ll && o->single) return epToolFail("--single-reduction: low latency has partial sums always: %s", useHt);
  if (ll && o->bias) return epToolFail("--bias %d: low latency adds none: %s", o->bias, useHt);
  if (ll && o->queuePairs) return epToolFail("--num-qps %d: low latency takes its group's: %s", o->queuePairs, useHt);
  if (ll && o->noZeroPad) return epToolFail("--no-zero-pad: low latency pads nothing: %s", useHt);
  if (o->nvfp4 && !ll)
    return epToolFail("--combine-quant nvfp4: high throughput has no recipe: expected --layout rank-major or "
                      "expert-major-3d (low latency)");
  if (o->nvfp4 && o->type != EP_REF_BF16 && o->type != EP_REF_E4M3)
    return epToolFail("--combine-quant nvfp4: of bf16 rows: expected --dtype bf16 or fp8");
  if (o->nvfp4 && o->fabric.scaleOut > 1)
    return epToolFail("--combine-quant nvfp4: not supported yet across scale-up domains: expected --topology 1xN");
  if (o->nvfp4 && o->hidden % 16)
    return epToolFail("--hidden %u: expected a multiple of 16 with --combine-quant nvfp4", o->hidden);
  if (row % EP_ROW_ALIGN || (row > back ? row : back) > EP_MAX_ROW_BYTES)
    return epToolFail("--hidden %u: rows of %zu bytes, back of %zu: expected a multiple of %u, at most %u", o->hidden,
                      row, row > back ? row : back, EP_ROW_ALIGN, EP_MAX_ROW_BYTES);
  if (ll && o->align != UINT_MAX) return epToolFail("--align %u: low latency aligns no zones: %s", o->align, useHt);
  return 0;
}

/* The rank that is away must be one of at least three, and nothing else may be told in its place. */
static int checkMasks(epBenchOptions *o) {
  int r = o->maskRank;
  if (r < 0) return 0;
  if ((uint32_t)r >= o->ranks) return epToolFail("--mask-test %d: expected a rank below %u", r, o->ranks);
  if (o->ranks < 3)
    return epToolFail("--mask-test %d: of %u ranks: expected at least 3, so that two are left", r, o->ranks);
  if (o->maxRecv >= 0)
    return epToolFail("--mask-test %d: rows that are dropped, or counted on the host, hide the timeout: expected no "
                      "--max-recv",
                      r);
  if (o->compare || o->curveCount || o->limits || o->parts || o->hostTime || o->graph || o->profile || o->backward ||
      o->plotPath || o->jsonPath)
    return epToolFail("--mask-test %d: a run of its own: expected none of --compare, --sm-curve, --limits, "
                      "--profile-parts, --host-time, --graph, --profile, --backward, --plot and --json beside it",
                      r);
  if (o->fabric.timeoutMs < MASK_TEST_MS)
    return epToolFail("--timeout-ms %u: expected at least %d with --mask-test, as layers themselves take time",
                      o->fabric.timeoutMs, MASK_TEST_MS);
  o->masks = 1;
  o->iters = 0;
  return 0;
}

/* Before anything is measured: after that it would be lost. Only rank 0's process writes the file. */
static int checkWritable(const char *option, const char *path) {
  epNetPlace place = {0, 0, 0};
  FILE *file;
  if (!path || (epNetPlaceFromEnvironment(&place) > 0 && place.rank != 0)) return 0;
  file = fopen(path, "a");
  if (!file || fclose(file)) return epToolFail("--%s %s: cannot write it: %s", option, path, strerror(errno));
  return 0;
}

/* What a prediction cannot do must not look as if it had been done. */
static int checkModel(epBenchOptions *o) {
  if (o->modelPath && o->fabric.kind == EP_FABRIC_CUDA)
    return epToolFail("--model %s: nothing runs on GPUs: expected --backend emu", o->modelPath);
  if (o->modelPath && (o->check || o->backward || o->schedules != 1 || o->bugText || o->compare || o->curveCount ||
                       o->plotPath || o->limits || o->parts || o->graph || o->hostTime || o->windowOut || o->single ||
                       o->masks || o->bias || o->queuePairs || o->staged || o->maskRank >= 0))
    return epToolFail("--model %s: nothing is run: expected none of --check, --backward, --schedules, --bug, "
                      "--compare, --sm-curve, --plot, --limits, --profile-parts, --graph, --host-time, --window-out, "
                      "--single-reduction, --masks, --mask-test, --bias, --num-qps and --staged",
                      o->modelPath);
  if (o->modelPath && (o->algo == 1 || o->layout > EP_REF_EXPERT_MAJOR))
    return epToolFail("--model %s: high throughput only: expected --layout flat or expert-major", o->modelPath);
  if (!o->modelPath && o->fabric.scaleOut * o->fabric.scaleUp > RUN_RANKS)
    return epToolFail("--topology %ux%u: expected at most %u ranks, or --model", o->fabric.scaleOut, o->fabric.scaleUp,
                      RUN_RANKS);
  if (o->modelPath) o->fabric.kind = EP_FABRIC_EMU;
  return 0;
}

int epBenchResolve(epBenchOptions *o) {
  int gpus, launched = epFabricLaunchedRanks(), cuda, real; /* real: sizes are those of real layers */
  if (launched < 0 || checkModel(o)) return -1;
  o->fabric.kind = epFabricChoose(o->fabric.kind, &gpus, NULL);
  cuda = o->fabric.kind == EP_FABRIC_CUDA;
  real = cuda || o->modelPath;
  if (!o->fabric.scaleUp && !cuda) {
    o->fabric.scaleOut = 1;
    o->fabric.scaleUp = 4;
  }
  o->ranks = o->fabric.scaleUp ? o->fabric.scaleOut * o->fabric.scaleUp
             : launched        ? (uint32_t)launched
                               : (uint32_t)gpus;
  if (!o->ranks) return epToolFail("--backend cuda: the driver finds no GPU");
  if (cuda) epSpreadShare(o->ranks); /* an emulated rank is a thread, and its fabric may use all cores */
  if (cuda && o->bugText) return epToolFail("--bug %s: faults are planted on the emulated fabric only", o->bugText);
  if (cuda && o->fabric.emuNoBulk)
    return epToolFail("--no-bulk: the emulated fabric's only: a GPU has bulk copies from SM90 on");
  if (cuda && o->fabric.emuSms) return epToolFail("--emu-sms %u: the emulated fabric's only", o->fabric.emuSms);
  if (cuda && o->schedules != 1)
    return epToolFail("--schedules %u: only the emulated fabric has schedules", o->schedules);
  if (!cuda && o->limits) return epToolFail("--limits: the emulated fabric has none to measure");
  if (!cuda && o->graph) return epToolFail("--graph: the emulated fabric has no graphs: expected --backend cuda");
  if (o->graph && !o->maxRecv)
    return epToolFail("--graph: an eager update waits on the host: expected --max-recv above 0, or without it");
  if (o->hostTime && !o->maxRecv)
    return epToolFail("--host-time: an eager update waits for its counts: expected --max-recv above 0, or without it");
  if (o->compare && (o->schedules != 1 || o->curveCount || o->limits || o->parts || o->hostTime))
    return epToolFail(
        "--compare: a run of its own: expected none of --schedules, --sm-curve, --limits, --profile-parts "
        "and --host-time beside it");
  if (o->curveCount && (o->schedules != 1 || o->limits || o->parts || o->hostTime || o->sms))
    return epToolFail(
        "--sm-curve: a run of its own: expected none of --schedules, --sms, --limits, --profile-parts and "
        "--host-time beside it");
  if (o->curveCount && getenv("NCCL_EP_NUM_SMS"))
    return epToolFail("--sm-curve: NCCL_EP_NUM_SMS=%s overrides every number of it: expected it unset",
                      getenv("NCCL_EP_NUM_SMS"));
  if (o->profile && (o->compare || o->curveCount || o->graph || o->schedules != 1))
    return epToolFail("--profile: expected none of --compare, --sm-curve, --graph and --schedules beside it");
  if (o->profile && !o->maxRecv)
    return epToolFail("--profile: an eager update waits for its counts: expected --max-recv above 0, or without it");
  if (o->delayUs && (!o->profile || o->delayRank >= o->ranks))
    return epToolFail("--delay %u:%u: expected --profile, and a rank below %u", o->delayRank, o->delayUs, o->ranks);
  o->tokensText = o->tokensText ? o->tokensText : real ? "4096" : "16";
  o->hidden = o->hidden ? o->hidden : real ? 7168 : 512;
  if (!o->experts && o->modelPath) o->experts = (255 + o->ranks) / o->ranks * o->ranks;
  o->experts = o->experts ? o->experts : cuda ? 256 : 8 * o->ranks;
  o->warmup = o->warmup != UINT_MAX ? o->warmup : cuda ? 10 : 0;
  o->iters = o->iters != UINT_MAX ? o->iters : cuda ? 50 : 1;
  if (o->algo == 1 && !o->layoutGiven) o->layout = EP_REF_RANK_MAJOR;
  int ll = o->layout == EP_REF_RANK_MAJOR || o->layout == EP_REF_EXPERT_MAJOR_3D;
  if (o->algo >= 0 && o->algo != ll)
    return epToolFail("--layout: expected %s",
                      o->algo ? "rank-major or expert-major-3d with --algo ll" : "flat or expert-major with --algo ht");
  if (checkFit(o, ll) || checkMasks(o)) return -1;
  o->align = o->layout != EP_REF_EXPERT_MAJOR ? 0 : o->align != UINT_MAX ? o->align : cuda ? 128 : 16;
  if (o->scales < 0) o->scales = o->type == EP_REF_E4M3 ? EP_SCALES_FP32 : EP_SCALES_NONE;
  if (o->scaleColumns && o->scales == EP_SCALES_NONE)
    return epToolFail("--scale-layout column: there are no scales: expected --scales fp32 or ue8m0");
  if (o->experts % o->ranks)
    return epToolFail("--experts %u: expected a multiple of the %u ranks", o->experts, o->ranks);
  if (parseTokens(o)) return -1;
  o->route.ranks = o->ranks;
  o->route.experts = o->experts;
  o->route.topk = o->topk;
  o->route.tokensLow = o->tokensLow;
  o->route.tokensHigh = o->tokensHigh;
  return epRouteParse(o->routingText, &o->route) || checkWritable("json", o->jsonPath) ||
                 checkWritable("plot", o->plotPath)
             ? -1
             : 0;
}

void epBenchFree(epBenchOptions *o) {
  free(o->tokensLow);
  free(o->tokensHigh);
  epRouteSpecFree(&o->route);
}

/* ---- Cases ------------------------------------------------------------------------------------------------------ */

int epBenchCases(const epBenchOptions *o, epBenchCase *cases, unsigned *count) {
  static const char *const wanted = "expected LAYOUT:TOKENS,..., for example flat:4096,rank-major:128";
  const char *at = o->compareText;
  if (at && o->algo >= 0)
    return epToolFail("--compare=%s: --algo is given: expected none, as each case's layout says its algorithm", at);
  for (*count = 0; at; (*count)++) {
    epBenchCase *c = &cases[*count];
    const char *colon = strchr(at, ':'), *comma = strchr(at, ',');
    size_t length = comma ? (size_t)(comma - at) : strlen(at), name = colon ? (size_t)(colon - at) : 0;
    int layout = 0;
    if (*count == EP_BENCH_CASES)
      return epToolFail("--compare=%s: expected at most %d cases", o->compareText, EP_BENCH_CASES);
    while (layoutNames[layout] && (strlen(layoutNames[layout]) != name || strncmp(at, layoutNames[layout], name) != 0))
      layout++;
    if (!name || name + 1 >= length || length - name - 1 >= sizeof(c->tokens) || !layoutNames[layout])
      return epToolFail("--compare=%s: %.*s: %s", o->compareText, (int)length, at, wanted);
    c->options = *o;
    c->options.layout = (epRefLayout)layout;
    c->options.layoutGiven = 1;
    c->options.algo = -1;
    if (layout != EP_REF_EXPERT_MAJOR) c->options.align = UINT_MAX;
    snprintf(c->tokens, sizeof(c->tokens), "%.*s", (int)(length - name - 1), colon + 1);
    c->options.tokensText = c->tokens;
    at = comma ? comma + 1 : NULL;
  }
  if (!o->compareText) {
    cases[0].options = *o;
    *count = 1;
  }
  for (unsigned i = 0; i < *count; i++) {
    if (epBenchResolve(&cases[i].options)) return -1;
    snprintf(cases[i].label, sizeof(cases[i].label), "%s:%.16s", layoutNames[cases[i].options.layout],
             cases[i].options.tokensText);
  }
  return 0;
}
