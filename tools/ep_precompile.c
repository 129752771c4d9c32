/* Fills a kernel cache ahead of time, on a machine that need not have a GPU: for container images, and so that the
 * first step of a job compiles nothing. Kernels are chosen by the runtime's own functions, so the keys are those it
 * will ask for. */
#include <argp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "cuda_targets.h"
#include "fail.h"
#include "runtime.h"
#include "jit_ext.h"
#include "low_latency.h"
#include "policy.h"
#include "tensor.h"

#define MAX_VALUES 32
#define MAX_THREADS 64

/* As ep_bench has them; the library's name for the last is that of the second. */
enum { LAYOUTS = 4 };
typedef struct {
  const char *name;
  ncclEpLayout_t layout;
  uint32_t kind;
  int ll;
} layoutName;
static const layoutName layouts[LAYOUTS] = {
    {"flat", NCCL_EP_LAYOUT_FLAT, EP_LAYOUT_KIND_FLAT, 0},
    {"expert-major", NCCL_EP_LAYOUT_EXPERT_MAJOR, EP_LAYOUT_KIND_EXPERT_MAJOR, 0},
    {"rank-major", NCCL_EP_LAYOUT_RANK_MAJOR, EP_LAYOUT_KIND_RANK_MAJOR, 1},
    {"expert-major-3d", NCCL_EP_LAYOUT_EXPERT_MAJOR, EP_LAYOUT_KIND_EXPERT_MAJOR_3D, 1}};

static const char *layoutOf(const epConfig *config) {
  for (int i = 0; i < LAYOUTS; i++)
    if (layouts[i].kind == config->layout) return layouts[i].name;
  return "";
}

const char *argp_program_version = "ep_precompile 0.1.0";
static const char doc[] = "Compile dispatch and combine kernels into a cache folder.\v"
                          "Every combination of the listed values is compiled. Lists are separated by commas.\n"
                          "Example, DeepSeek-V3 on 8 and 16 Hopper GPUs:\n"
                          "  ep_precompile --arch 90 --ranks 8,16 --experts 256 --topk 8 --hidden 7168";

enum {
  OPT_CACHE = 256,
  OPT_DISPATCH,
  OPT_COMBINE,
  OPT_COMBINE_QUANT,
  OPT_LAYOUT,
  OPT_INDEX,
  OPT_BACKWARD,
  OPT_SCALES,
  OPT_BORROW,
  OPT_WINDOW_OUT,
  OPT_STAGED,
  OPT_SINGLE
};
static const struct argp_option options[] = {
    {"arch", 'a', "LIST", 0, "targets, as 80, 90, 100, 120 (default 80,90,100,120)", 0},
    {"ranks", 'r', "LIST", 0, "ranks of the group (default 8)", 0},
    {"experts", 'e', "LIST", 0, "experts of the group (default 256)", 0},
    {"topk", 'k', "LIST", 0, "top-k (default 8)", 0},
    {"hidden", 'H', "LIST", 0, "elements of a token (default 7168)", 0},
    {"dispatch-type", OPT_DISPATCH, "TYPE", 0, "of dispatched tokens: bf16, f16, f32, fp8 (default bf16)", 0},
    {"scale-bytes", OPT_SCALES, "N", 0, "of a dispatched token's row of scales (default 0: without scales)", 0},
    {"combine-type", OPT_COMBINE, "TYPE", 0, "of expert outputs: bf16, f16, f32 (default bf16)", 0},
    {"combine-quant", OPT_COMBINE_QUANT, "RECIPE", 0,
     "how expert outputs travel in low latency: none, nvfp4 (default none)", 0},
    {"layout", OPT_LAYOUT, "LIST", 0,
     "flat, expert-major, rank-major, expert-major-3d (the last two are low latency's); both: the first two; all "
     "(default "
     "both)",
     0},
    {"index", OPT_INDEX, "TYPE", 0, "of topk_idx: int64, int32 or both (default int64)", 0},
    {"backward", OPT_BACKWARD, NULL, 0, "also the kernels of the backward pass", 0},
    {"borrow", OPT_BORROW, NULL, 0, "also the dispatch after an update that borrows topk_idx", 0},
    {"staged", OPT_STAGED, NULL, 0, "also both parts of staged operations (send_only)", 0},
    {"window-out", OPT_WINDOW_OUT, NULL, 0, "dispatch for window-backed outputs instead of ordinary ones", 0},
    {"single-reduction", OPT_SINGLE, NULL, 0, "combine of groups made with single_reduction", 0},
    {"cache-dir", OPT_CACHE, "DIR", 0, "the folder (default: the one the library uses)", 0},
    {"jobs", 'j', "N", 0, "compile N at once (default: all cores, at most 8)", 0},
    {"quiet", 'q', NULL, 0, "only the summary", 0},
    {0}};

typedef struct {
  unsigned values[MAX_VALUES];
  int count;
} list;

typedef struct {
  list archs, ranks, experts, topks, hiddens;
  ncclDataType_t dispatchType, combineType;
  unsigned scaleBytes;
  int layout[LAYOUTS], index64, index32, backward, borrow, windowOut, staged, single, nvfp4, jobs, quiet;
  const char *cacheDir;
} precompile;

typedef struct {
  int kernel, arch;
  unsigned hidden;
  epConfig config;
} job;

static struct {
  pthread_mutex_t mutex;
  job *jobs;
  int count, room, next, failed, found;
  epJit *jit;
  int quiet;
} work = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static void parseList(struct argp_state *state, const char *name, const char *text, list *out) {
  out->count = 0;
  for (const char *at = text;; at++) {
    char *end;
    unsigned long v = strtoul(at, &end, 10);
    if (*at < '0' || *at > '9' || (*end && *end != ',') || v == 0 || v > 1u << 20)
      argp_error(state, "--%s %s: expected numbers from 1 to 1048576 separated by commas", name, text);
    if (out->count == MAX_VALUES) argp_error(state, "--%s %s: more than %d values", name, text, MAX_VALUES);
    out->values[out->count++] = (unsigned)v;
    if (!*end) return;
    at = end;
  }
}

static void parseLayouts(struct argp_state *state, const char *text, int *wanted) {
  memset(wanted, 0, LAYOUTS * sizeof(*wanted));
  for (const char *at = text;; at++) {
    size_t n = strcspn(at, ",");
    int known = 0;
    for (int i = 0; i < LAYOUTS; i++) {
      int named = (strlen(layouts[i].name) == n && !strncmp(at, layouts[i].name, n)) ||
                  (n == 3 && !strncmp(at, "all", n)) || (i < 2 && n == 4 && !strncmp(at, "both", n));
      wanted[i] |= named;
      known |= named;
    }
    if (!known)
      argp_error(state, "--layout %s: expected flat, expert-major, rank-major, expert-major-3d, both or all", text);
    at += n;
    if (!*at) return;
  }
}

static ncclDataType_t parseType(struct argp_state *state, const char *name, const char *text, int combine) {
  if (!strcmp(text, "bf16")) return ncclBfloat16;
  if (!strcmp(text, "f16")) return ncclFloat16;
  if (!strcmp(text, "f32")) return ncclFloat32;
  if (!combine && !strcmp(text, "fp8")) return ncclFloat8e4m3;
  argp_error(state, "--%s: '%s': expected bf16, f16, f32%s", name, text, combine ? "" : " or fp8");
  return ncclBfloat16;
}

static error_t parse(int key, char *arg, struct argp_state *state) {
  precompile *p = state->input;
  list scales;
  char *end;
  long n;
  switch (key) {
  case 'a':
    parseList(state, "arch", arg, &p->archs);
    return 0;
  case 'r':
    parseList(state, "ranks", arg, &p->ranks);
    return 0;
  case 'e':
    parseList(state, "experts", arg, &p->experts);
    return 0;
  case 'k':
    parseList(state, "topk", arg, &p->topks);
    return 0;
  case 'H':
    parseList(state, "hidden", arg, &p->hiddens);
    return 0;
  case OPT_DISPATCH:
    p->dispatchType = parseType(state, "dispatch-type", arg, 0);
    return 0;
  case OPT_COMBINE:
    p->combineType = parseType(state, "combine-type", arg, 1);
    return 0;
  case OPT_COMBINE_QUANT:
    p->nvfp4 = !strcmp(arg, "nvfp4");
    if (!p->nvfp4 && strcmp(arg, "none") != 0) argp_error(state, "--combine-quant: '%s': expected none or nvfp4", arg);
    return 0;
  case OPT_LAYOUT:
    parseLayouts(state, arg, p->layout);
    return 0;
  case OPT_INDEX:
    p->index64 = !strcmp(arg, "int64") || !strcmp(arg, "both");
    p->index32 = !strcmp(arg, "int32") || !strcmp(arg, "both");
    if (!p->index64 && !p->index32) argp_error(state, "--index: '%s': expected int64, int32 or both", arg);
    return 0;
  case OPT_BACKWARD:
    p->backward = 1;
    return 0;
  case OPT_BORROW:
    p->borrow = 1;
    return 0;
  case OPT_WINDOW_OUT:
    p->windowOut = 1;
    return 0;
  case OPT_STAGED:
    p->staged = 1;
    return 0;
  case OPT_SINGLE:
    p->single = 1;
    return 0;
  case OPT_SCALES:
    parseList(state, "scale-bytes", arg, &scales);
    if (scales.count != 1) argp_error(state, "--scale-bytes: expected one number");
    p->scaleBytes = scales.values[0];
    return 0;
  case OPT_CACHE:
    p->cacheDir = arg;
    return 0;
  case 'j':
    n = strtol(arg, &end, 10);
    p->jobs = *end || end == arg || n < 1 || n > MAX_THREADS ? 0 : (int)n;
    if (!p->jobs) argp_error(state, "--jobs: '%s' is not from 1 to %d", arg, MAX_THREADS);
    return 0;
  case 'q':
    p->quiet = 1;
    return 0;
  case ARGP_KEY_ARG:
    argp_error(state, "unexpected argument '%s'", arg);
    return 0;
  default:
    return ARGP_ERR_UNKNOWN;
  }
}

static int addJob(int kernel, int arch, unsigned hidden, const epConfig *config) {
  for (int i = 0; i < work.count; i++)
    if (work.jobs[i].kernel == kernel && work.jobs[i].arch == arch &&
        memcmp(&work.jobs[i].config, config, sizeof(*config)) == 0)
      return 1;
  if (work.count == work.room) {
    int room = work.room ? 2 * work.room : 64;
    job *more = realloc(work.jobs, (size_t)room * sizeof(*more));
    if (!more) {
      fprintf(stderr, "ep_precompile: out of memory\n");
      return 0;
    }
    work.jobs = more;
    work.room = room;
  }
  work.jobs[work.count++] = (job){kernel, arch, hidden, *config};
  return 1;
}

/* What no layout asked for has kernels of would be left out without a word. */
static int fits(const precompile *p) {
  int ht = p->layout[0] || p->layout[1], ll = p->layout[2] || p->layout[3];
  const char *option = !ht && p->backward ? "backward"
                       : !ht && p->single ? "single-reduction"
                       : !ll && p->nvfp4  ? "combine-quant nvfp4"
                                          : NULL;
  if (option)
    fprintf(stderr, "ep_precompile: --%s: expected --layout with %s\n", option,
            ht ? "rank-major or expert-major-3d (low latency)" : "flat or expert-major (high throughput)");
  return !option;
}

/* All kernels of one group's shape on one target, for one layout, hidden size and index type. */
static int addConfig(const precompile *p, const struct ncclEpGroup *g, const layoutName *layout, unsigned hidden,
                     ncclDataType_t index) {
  ncclEpPrepareConfig_t c = NCCL_EP_PREPARE_CONFIG_INIT;
  epWishes wishes;
  c.layout = layout->layout;
  c.hidden = hidden;
  c.top_k = g->shape.topk;
  c.dispatch_type = p->dispatchType;
  c.combine_type = p->combineType;
  c.index_type = index;
  c.scale_bytes = p->scaleBytes;
  c.backward = p->backward && !layout->ll; /* low latency has the forward pass only */
  c.borrow_topk_idx = p->borrow;
  c.window_output = p->windowOut;
  c.in_flight = p->staged != 0;
  c.combine_quant = p->nvfp4 && layout->ll ? NCCL_EP_COMB_QUANT_NVFP4 : NCCL_EP_COMB_QUANT_NONE;
  if (epPrepareWishes(g, &c, &wishes) != ncclSuccess) return 0;
  for (int i = 0; i < wishes.count; i++) {
    const epConfig *config = &wishes.wish[i].config;
    if (!addJob(wishes.wish[i].id, g->topology.arch, config->rowBytes ? hidden : 0, config)) return 0;
  }
  return 1;
}

static int addShape(const precompile *p, struct ncclEpGroup *g) {
  for (int l = 0; l < LAYOUTS; l++) {
    if (!p->layout[l]) continue;
    g->config.algorithm = layouts[l].ll ? NCCL_EP_ALGO_LOW_LATENCY : NCCL_EP_ALGO_HIGH_THROUGHPUT;
    for (int h = 0; h < p->hiddens.count; h++)
      if ((p->index64 && !addConfig(p, g, &layouts[l], p->hiddens.values[h], ncclInt64)) ||
          (p->index32 && !addConfig(p, g, &layouts[l], p->hiddens.values[h], ncclInt32)))
        return 0;
  }
  return 1;
}

static int addAll(const precompile *p) {
  for (int a = 0; a < p->archs.count; a++) {
    struct ncclEpGroup g;
    memset(&g, 0, sizeof(g)); /* only what kernels are chosen by */
    if (epCudaTarget((int)p->archs.values[a], &g.topology) != ncclSuccess) return 0;
    g.sms = epPolicySms(&g.topology, 0);
    if (p->windowOut) g.config.zero_copy = NCCL_EP_ZERO_COPY_ON; /* AUTO asks how many SMs a caller will allow */
    for (int r = 0; r < p->ranks.count; r++) {
      for (int e = 0; e < p->experts.count; e++) {
        for (int k = 0; k < p->topks.count; k++) {
          g.shape.ranks = p->ranks.values[r];
          g.shape.experts = p->experts.values[e];
          g.shape.topk = p->topks.values[k];
          g.shape.maxRowBytes = EP_MAX_ROW_BYTES;
          g.shape.stageRows = p->single ? g.shape.topk : 0; /* of no tokens: what tells the combines apart */
          if (g.shape.ranks > EP_MAX_RANKS || g.shape.experts > EP_MAX_EXPERTS || g.shape.topk > EP_MAX_TOPK ||
              g.shape.experts % g.shape.ranks) {
            fprintf(stderr,
                    "ep_precompile: %u ranks, %u experts, top-k %u: expected at most %u, %u (a multiple of the ranks) "
                    "and %u\n",
                    g.shape.ranks, g.shape.experts, g.shape.topk, EP_MAX_RANKS, EP_MAX_EXPERTS, EP_MAX_TOPK);
            return 0;
          }
          if (!addShape(p, &g)) return 0;
        }
      }
    }
  }
  return 1;
}

/* Said here as well as in the library's log, which may be off. */
static void tellLibraryError(void) {
  if (*epLastError()) fprintf(stderr, "ep_precompile: %s\n", epLastError());
}

static void *compileJobs(void *unused) {
  (void)unused;
  for (;;) {
    pthread_mutex_lock(&work.mutex);
    int at = work.next < work.count ? work.next++ : -1;
    pthread_mutex_unlock(&work.mutex);
    if (at < 0) return NULL;
    const job *j = &work.jobs[at];
    epJitCode code;
    ncclResult_t r = epJitCompile(work.jit, j->kernel, &j->config, j->arch, &code);
    pthread_mutex_lock(&work.mutex);
    if (r != ncclSuccess) {
      if (!work.failed++) tellLibraryError(); /* the others' will be the same */
    } else {
      work.found += code.fromCache;
      if (!work.quiet)
        printf("%-21s sm_%-4d %5u %7u %4u %7u %-15s %-8s %6d %6d %8.3f\n", epJitEntryName(j->kernel), j->arch,
               j->config.ranks, j->config.experts, j->config.topk, j->hidden, layoutOf(&j->config),
               code.fromCache ? "found" : "compiled", code.registers, code.spillBytes, code.seconds);
      epJitFree(&code);
    }
    pthread_mutex_unlock(&work.mutex);
  }
}

/* Of those that were compiled. */
static int allCached(const char *folder) {
  for (int i = 0; i < work.count && !work.failed; i++) {
    if (epJitCached(work.jit, work.jobs[i].kernel, &work.jobs[i].config, work.jobs[i].arch)) continue;
    fprintf(stderr, "ep_precompile: %s is not in %s after compiling: cannot write to it, see the warning above\n",
            epJitEntryName(work.jobs[i].kernel), folder);
    return 0;
  }
  return 1;
}

static double seconds(void) {
  struct timespec t;
  (void)clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int main(int argc, char **argv) {
  const struct argp argp = {options, parse, NULL, doc, NULL, NULL, NULL};
  precompile p = {.archs = {{80, 90, 100, 120}, 4},
                  .ranks = {{8}, 1},
                  .experts = {{256}, 1},
                  .topks = {{8}, 1},
                  .hiddens = {{7168}, 1},
                  .dispatchType = ncclBfloat16,
                  .combineType = ncclBfloat16,
                  .layout = {1, 1},
                  .index64 = 1};
  pthread_t threads[MAX_THREADS];
  int started = 0, status = 1;
  const char *why = "";
  if (argp_parse(&argp, argc, argv, 0, NULL, &p) != 0) return 2;
  if (!p.jobs) {
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    p.jobs = cores < 1 ? 1 : cores > 8 ? 8 : (int)cores;
  }
  work.quiet = p.quiet;
  double start = seconds();
  if (!fits(&p)) return 2;
  if (!addAll(&p) || epJitOpenAt(&work.jit, p.cacheDir) != ncclSuccess) {
    tellLibraryError();
    goto done;
  }
  const char *folder = epJitCacheFolder(work.jit, &why);
  if (!folder) {
    fprintf(stderr, "ep_precompile: there is no cache to fill: %s\n", why);
    goto done;
  }
  if (!epJitCompilerVersion(work.jit)) {
    fprintf(stderr, "ep_precompile: %s\n", epLastError());
    goto done;
  }
  printf("# NVRTC %d.%d, %s\n# cache %s\n", epJitCompilerVersion(work.jit) / 1000,
         epJitCompilerVersion(work.jit) % 1000 / 10, epJitCompilerPath(work.jit), folder);
  if (!p.quiet)
    printf("# %-19s %-7s %5s %7s %4s %7s %-15s %-8s %6s %6s %8s\n", "kernel", "target", "ranks", "experts", "topk",
           "hidden", "layout", "how", "regs", "spill", "seconds");
  /* The first alone: a cache that could not be written to is no cache, and what was compiled must be found again. */
  int all = work.count;
  work.count = all ? 1 : 0;
  compileJobs(NULL);
  if (!allCached(folder)) goto done;
  work.count = all;
  for (; started < p.jobs && started < work.count - 1; started++)
    if (pthread_create(&threads[started], NULL, compileJobs, NULL) != 0) break;
  if (!started) compileJobs(NULL);
  for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
  printf("# %d kernels: %d compiled, %d found, %d failed; %.1f s\n", work.count, work.count - work.found - work.failed,
         work.found, work.failed, seconds() - start);
  status = work.failed || !allCached(folder);

done:
  epJitClose(work.jit);
  free(work.jobs);
  return status;
}
