/* What kernels reported, in words. The record is host memory that kernels write: read with acquire, never waited for.
 */
#include <stdio.h>
#include <string.h>

#include "fail.h"
#include "low_latency.h"
#include "runtime.h"

enum { EP_SEEN_INDEX = 1, EP_SEEN_OVERFLOW = 2, EP_SEEN_MASK = 4 };
/* Why the group is lost: EP_ERR_* of a kernel, that rows overflowed where overflow_policy says that it must not be, or that the
 * memory of a staged operation was not made on all ranks. */
enum { EP_LOST_OVERFLOW = 100, EP_LOST_SLOT };

static uint32_t epShared(const uint32_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

const char *epPhaseName(uint32_t phase) {
  switch (phase) {
  case EP_PHASE_NONE:
    return "none: nothing was waited for";
  case EP_PHASE_UPDATE_COUNTS:
    return "update: counts";
  case EP_PHASE_UPDATE_META:
    return "update: routing rows";
  case EP_PHASE_UPDATE_REPLY:
    return "update: places";
  case EP_PHASE_GRID:
    return "own blocks";
  case EP_PHASE_DISPATCH_CREDIT:
    return "dispatch: staging to be free";
  case EP_PHASE_DISPATCH_ROWS:
    return "dispatch: rows";
  case EP_PHASE_COMBINE_CREDIT:
    return "combine: staging to be free";
  case EP_PHASE_COMBINE_ROWS:
    return "combine: rows";
  case EP_PHASE_NETWORK:
    return "network: puts to be sent";
  case EP_PHASE_MASK_CLEAN:
    return "mask clean: to meet";
  default:
    return "unknown phase";
  }
}

/* "flat backward combine" */
static void epKindText(uint32_t kind, char *text, size_t bytes) {
  static const char *const kinds[] = {"another operation", "dispatch", "combine", "another operation"};
  static const char *const layouts[] = {"flat", "expert-major", "rank-major", "3-D expert-major"};
  snprintf(text, bytes, "%s %s%s", layouts[EP_KIND_LAYOUT_OF(kind)], EP_KIND_BACKWARD_OF(kind) ? "backward " : "",
           kinds[EP_KIND_OF(kind)]);
}

/* What two ranks that are apart differ in: the operation, the width of its rows, or the handle. */
static void epApartText(const struct ncclEpGroup *g, const epErrorRecord *e, char *text, size_t bytes) {
  char mine[48], its[48];
  const char *what = "";
  epKindText(e->expected, mine, sizeof mine);
  epKindText(e->seen, its, sizeof its);
  if (strcmp(mine, its) == 0)
    what = (e->expected ^ e->seen) > EP_KIND_ROUTING ? ", of rows of another width, type, recipe or top-k"
           : epIsLl(g)                               ? ", along another dispatch's handle"
                                                     : ", along another update's handle";
  snprintf(text, bytes, "rank %u is in %s (operation %u)%s, while rank %d is in %s: expected the same on all ranks",
           e->peer, its, e->operation, what, g->topology.rank, mine);
}

static void epLostText(const struct ncclEpGroup *g, const epErrorRecord *e, char *text, size_t bytes) {
  if (e->code == EP_ERR_MISMATCH) { /* the words compared are EP_ROWS_TAG */
    snprintf(text, bytes,
             "rank %d updated a handle with top-k %u and layout %s, rank %u one with top-k %u and layout %s: expected "
             "the same on all ranks",
             g->topology.rank, e->expected >> 1, e->expected & 1 ? "expert-major" : "flat", e->peer, e->seen >> 1,
             e->seen & 1 ? "expert-major" : "flat");
    return;
  }
  if (e->code == EP_ERR_APART) {
    epApartText(g, e, text, bytes);
    return;
  }
  if (e->code == EP_LOST_OVERFLOW) {
    snprintf(text, bytes,
             "rank %d: a routing needs %u rows, more than %s, and overflow_policy is NCCL_EP_OVERFLOW_TRAP",
             g->topology.rank, e->overflowNeeded, g->budget ? "max_recv_tokens_per_rank" : "the outputs had");
    return;
  }
  if (e->code == EP_LOST_SLOT) {
    snprintf(text, bytes, "rank %d: the memory of a staged operation was not made on all ranks", g->topology.rank);
    return;
  }
  if (e->code == EP_ERR_MASKED_BY) {
    snprintf(
        text, bytes,
        "rank %d is masked by rank %u, found in %s (expected generation %u, seen %u), and masks it: ncclEpMaskClean on "
        "both lets them meet again",
        g->topology.rank, e->peer, epPhaseName(e->phase), e->expected, e->seen);
    return;
  }
  if (e->code == EP_ERR_STALE_RECORD) {
    snprintf(
        text, bytes,
        "rank %d used a handle of before ncclEpMaskClean (%u re-admissions, the handle knows %u): nothing was moved, "
        "update the handle on all ranks",
        g->topology.rank, e->expected, e->seen);
    return;
  }
  snprintf(text, bytes, "rank %d %s in %s, waiting for rank %u: expected generation %u, seen %u (timeout %llu ms)%s",
           g->topology.rank, e->code == EP_ERR_ABORT ? "was aborted" : "timed out", epPhaseName(e->phase), e->peer,
           e->expected, e->seen, (unsigned long long)(g->config.timeout_ns / 1000000),
           e->code == EP_ERR_MASKED ? "; that rank is masked" : "");
}

/* Update writes both words of the value, the low-latency kernels one with a sign. */
static void epIndexText(const struct ncclEpGroup *g, const epErrorRecord *e, char *text, size_t bytes) {
  long long value = (long long)((uint64_t)e->badIndexHigh << 32 | e->badIndexValue);
  snprintf(text, bytes, "topk_idx[%u][%u] is %lld: expected -1 or an expert below %u; taken as -1", e->badIndexToken,
           e->badIndexK, value, g->shape.experts);
}

/* Rows there were room for; 0: eager, where each dispatch has its own. */
static uint32_t epRoom(const struct ncclEpGroup *g) {
  return epIsLl(g) ? g->shape.ranks * g->shape.maxTokens : g->budget;
}

static void epOverflowText(const struct ncclEpGroup *g, uint32_t needed, char *text, size_t bytes) {
  if (epIsLl(g))
    snprintf(
        text, bytes,
        "an expert was chosen %u times, more than its %u places (ranks times max_dispatch_tokens_per_rank); the rest "
        "was dropped",
        needed, epRoom(g));
  else if (g->budget)
    snprintf(text, bytes, "a routing needs %u rows, more than max_recv_tokens_per_rank, %u; the rest was dropped",
             needed, g->budget);
  else
    snprintf(text, bytes,
             "a routing needs %u rows, more than the outputs of ncclEpDispatch had (the group is eager); the rest was "
             "dropped",
             needed);
}

/* In low latency the policy means nothing, as in NVIDIA's: places are fixed. */
static int epOverflowLoses(const struct ncclEpGroup *g) {
  return g->config.overflow_policy == NCCL_EP_OVERFLOW_TRAP && !epIsLl(g);
}

/* Looks at the record; what is new goes to the log once. Caller holds the lock. */
static void epGroupLook(struct ncclEpGroup *g) {
  epErrorRecord *e = &g->shared->error;
  char text[256];
  uint32_t code = epShared(&e->code);
  if (code >= EP_ERR_MASKED && !(g->reported & EP_SEEN_MASK)) {
    g->reported |= EP_SEEN_MASK;
    epLostText(g, e, text, sizeof text);
    epLog(EP_LOG_WARN, "group %p: %s", (void *)g, text);
  }
  if (!g->lost && code != EP_ERR_NONE && code < EP_ERR_MASKED) {
    g->lostBy = *e;
    __atomic_store_n(&g->lost, 1, __ATOMIC_RELEASE);
    epLostText(g, e, text, sizeof text);
    epLog(EP_LOG_WARN, "group %p: %s", (void *)g, text);
  }
  if (!g->lost && epOverflowLoses(g) && epShared(&e->overflowNeeded)) {
    g->lostBy = *e;
    g->lostBy.code = EP_LOST_OVERFLOW;
    __atomic_store_n(&g->lost, 1, __ATOMIC_RELEASE);
  }
  if (!(g->reported & EP_SEEN_INDEX) && epShared(&e->badIndexCode)) {
    g->reported |= EP_SEEN_INDEX;
    epIndexText(g, e, text, sizeof text);
    epLog(EP_LOG_WARN, "group %p: rank %d: %s", (void *)g, g->topology.rank, text);
  }
  if (!(g->reported & EP_SEEN_OVERFLOW) && epShared(&e->overflowNeeded)) {
    g->reported |= EP_SEEN_OVERFLOW;
    epOverflowText(g, e->overflowNeeded, text, sizeof text);
    epLog(EP_LOG_WARN, "group %p: rank %d: %s", (void *)g, g->topology.rank, text);
  }
}

/* Kernels have reported something since the report was last cleared. */
static int epReported(const epErrorRecord *e) {
  return epShared(&e->code) || epShared(&e->badIndexCode) || epShared(&e->overflowNeeded);
}

void epGroupLoseSlot(struct ncclEpGroup *g) {
  pthread_mutex_lock(&g->lock);
  if (!g->lost) {
    g->lostBy = (epErrorRecord){.code = EP_LOST_SLOT};
    __atomic_store_n(&g->lost, 1, __ATOMIC_RELEASE);
  }
  pthread_mutex_unlock(&g->lock);
}

ncclResult_t epGroupUsable(const char *call, struct ncclEpGroup *g) {
  ncclResult_t r = ncclSuccess;
  char text[256];
  /* As almost always: nothing to tell. */
  if (!__atomic_load_n(&g->lost, __ATOMIC_ACQUIRE) && !epReported(&g->shared->error)) return ncclSuccess;
  pthread_mutex_lock(&g->lock);
  epGroupLook(g);
  if (g->lost) {
    epLostText(g, &g->lostBy, text, sizeof text);
    r = epFail(ncclRemoteError, "%s: the group is lost, destroy it on all ranks and make a new one: %s", call, text);
  }
  pthread_mutex_unlock(&g->lock);
  return r;
}

int epGroupAsyncError(struct ncclEpGroup *g) {
  const epErrorRecord *e = &g->shared->error;
  pthread_mutex_lock(&g->lock);
  epGroupLook(g);
  pthread_mutex_unlock(&g->lock);
  return epReported(e);
}

void epGroupErrorClear(struct ncclEpGroup *g) {
  epErrorRecord *e = &g->shared->error;
  pthread_mutex_lock(&g->lock);
  epGroupLook(g); /* a timeout is remembered before it is cleared */
  __atomic_store_n(&e->overflowNeeded, 0, __ATOMIC_RELAXED);
  __atomic_store_n(&e->badIndexCode, 0, __ATOMIC_RELAXED);
  __atomic_store_n(&e->code, EP_ERR_NONE, __ATOMIC_RELEASE);
  g->reported = 0;
  pthread_mutex_unlock(&g->lock);
}

/* As nccl_ep_ext.h numbers them. */
static int epInfoCode(uint32_t code) {
  switch (code) {
  case EP_ERR_ABORT:
    return 2;
  case EP_ERR_MISMATCH:
    return 5;
  case EP_ERR_APART:
    return 8;
  case EP_ERR_MASKED_BY:
    return 6;
  case EP_ERR_STALE_RECORD:
    return 7;
  default:
    return 1;
  }
}

void epGroupErrorInfo(struct ncclEpGroup *g, ncclEpErrorInfo_t *info) {
  const epErrorRecord *e = &g->shared->error;
  uint32_t code;
  pthread_mutex_lock(&g->lock);
  epGroupLook(g);
  code = epShared(&e->code);
  info->rank = g->topology.rank;
  info->peer = -1;
  info->phase[0] = info->text[0] = 0;
  info->code = 0;
  info->expected = info->seen = 0;
  if (code != EP_ERR_NONE) {
    info->code = epInfoCode(code);
    info->peer = code == EP_ERR_STALE_RECORD ? -1 : (int)e->peer;
    info->expected = code == EP_ERR_APART ? e->operation : e->expected;
    info->seen = code == EP_ERR_APART ? e->operation : e->seen;
    snprintf(info->phase, sizeof info->phase, "%s", epPhaseName(e->phase));
    epLostText(g, e, info->text, sizeof info->text);
  } else if (epShared(&e->badIndexCode)) {
    info->code = 3;
    info->expected = g->shape.experts;
    info->seen = e->badIndexValue;
    snprintf(info->phase, sizeof info->phase, "update: topk_idx");
    epIndexText(g, e, info->text, sizeof info->text);
  } else if (epShared(&e->overflowNeeded)) {
    info->code = 4;
    info->expected = e->overflowNeeded;
    info->seen = epRoom(g);
    snprintf(info->phase, sizeof info->phase, "overflow");
    epOverflowText(g, e->overflowNeeded, info->text, sizeof info->text);
  }
  pthread_mutex_unlock(&g->lock);
}
