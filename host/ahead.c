/* Kernels compiled before they are needed, several at once: all that ncclEpPrepare is asked for, and with the first
 * kernel of a configuration those that will most likely follow it. Compilers in different threads do not wait for each
 * other, so a cold start takes as long as the slowest kernel and not as long as all. */
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <string.h>

#include "fail.h"
#include "hybrid.h"
#include "low_latency.h"
#include "runtime.h"

/* A wrong guess must cost nobody time: two kernels more need two cores more. */
#define EP_GUESS_CORES 3
#define EP_COMPILER_STACK (16u << 20) /* the default may be 2 MB, and compilers recurse */

typedef struct epCompilers {
  epBackend *be;
  const epWishes *wishes;
  int next; /* atomic */
} epCompilers;

void epWishAdd(epWishes *wishes, int id, const epConfig *config) {
  if (wishes->count == EP_WISHES) return; /* compiled when it is needed */
  wishes->wish[wishes->count].id = id;
  wishes->wish[wishes->count++].config = *config;
}

static int epCores(void) {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

/* A failure says nothing here: whoever needs the kernel tries again, and tells. */
static void *epCompileSome(void *argument) {
  epCompilers *c = argument;
  int i;
  epFailQuietly(1);
  while ((i = __atomic_fetch_add(&c->next, 1, __ATOMIC_RELAXED)) < c->wishes->count) {
    const epConfig *config = &c->wishes->wish[i].config;
    epKernel *kernel;
    (void)c->be->ops->kernel(c->be, epHybridKernel(c->wishes->wish[i].id, config), config, &kernel);
  }
  epFailQuietly(0);
  return NULL;
}

void epCompileTogether(struct ncclEpGroup *g, const epWishes *wishes) {
  epCompilers compilers = {g->be, wishes, 0};
  pthread_t threads[EP_WISHES];
  pthread_attr_t attributes;
  sigset_t every, before;
  int started = 0, wanted = wishes->count - 1, cores = epCores();
  if (!g->topology.arch || wanted < 1) return; /* the emulated fabric's kernels are compiled already */
  if (wanted > cores - 1) wanted = cores - 1;
  if (pthread_attr_init(&attributes)) return;
  /* The program's signal handlers are not for these threads. */
  sigfillset(&every);
  pthread_sigmask(SIG_SETMASK, &every, &before);
  if (!pthread_attr_setstacksize(&attributes, EP_COMPILER_STACK))
    while (started < wanted && !pthread_create(&threads[started], &attributes, epCompileSome, &compilers)) started++;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  pthread_attr_destroy(&attributes);
  epCompileSome(&compilers);
  for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
}

/* The same shape for another kernel; `threads` and `bulk` are the policy's. */
static void epGuessMove(const struct ncclEpGroup *g, int id, uint32_t kind, uint32_t topk, uint32_t rowBytes,
                        epWishes *out) {
  int ll = epIsLl(g), combine = id == EP_KERNEL_COMBINE;
  int weights = !combine && (!ll || kind == EP_LAYOUT_KIND_RANK_MAJOR);
  epConfig c = epMoveConfig(g, kind, topk, rowBytes, combine ? EP_DTYPE_BF16 : EP_DTYPE_BYTES, weights);
  epGrid grid;
  ncclResult_t r;
  if (ll) id = combine ? EP_KERNEL_LL_COMBINE : EP_KERNEL_LL_DISPATCH;
  r = ll ? epPolicyLl("", &g->topology, g->sms, id, g->shape.maxTokens, &c, &grid)
         : epPolicyMove("", &g->topology, epCallSms(g, 0, id, &c), id, &c, &grid);
  if (r == ncclSuccess) epWishAdd(out, id, &c);
}

void epForesee(const struct ncclEpGroup *g, int id, const epConfig *config, epWishes *out) {
  int update = id == EP_KERNEL_UPDATE || id == EP_KERNEL_LL_UPDATE;
  int forward = id == EP_KERNEL_LL_DISPATCH || (id == EP_KERNEL_DISPATCH && config->weights);
  /* Rows with scales are 8-bit, and combine's are not. */
  uint32_t back = forward && !config->scaleBytes ? config->rowBytes : g->shape.maxRowBytes;
  out->count = 0;
  epWishAdd(out, id, config);
  epFailQuietly(1);
  /* The widest rows of a group are those of its 16-bit tokens, or with 8-bit ones those that combine returns. */
  if (update) epGuessMove(g, EP_KERNEL_DISPATCH, config->layout, config->topk, g->shape.maxRowBytes, out);
  if (update || forward) epGuessMove(g, EP_KERNEL_COMBINE, config->layout, config->topk, back, out);
  epFailQuietly(0);
}

void epAheadOfHandle(struct ncclEpGroup *g, ncclEpLayout_t layout, uint32_t topk) {
  ncclEpPrepareConfig_t p = NCCL_EP_PREPARE_CONFIG_INIT;
  epWishes wishes;
  int capturing = 1;
  if (!epMayGuess(g) || g->be->ops->isCapturing(g->be, NULL, &capturing) != ncclSuccess || capturing) return;
  p.layout = layout;
  p.hidden = g->shape.maxRowBytes / 2;
  p.top_k = topk;
  p.dispatch_type = p.combine_type = ncclBfloat16;
  p.index_type = ncclInt64;
  epFailQuietly(1);
  if (epPrepareWishes(g, &p, &wishes) == ncclSuccess) (void)epKernelCompileAll(g, &wishes);
  epFailQuietly(0);
}

int epMayGuess(const struct ncclEpGroup *g) { return g->topology.arch && epCores() >= EP_GUESS_CORES; }
