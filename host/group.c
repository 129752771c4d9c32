/* Making and destroying groups. A group's window is collective; everything else of it is local. */
#include "runtime.h"

#include <stdlib.h>
#include <string.h>

#include "env.h"
#include "fail.h"
#include "hybrid.h"
#include "links_find.h"
#include "low_latency.h"
#include "masks.h"
#include "operation.h"
#include "object.h"

#define EP_IN_FLIGHT 2u /* staged operations, where nobody says another number: one micro-batch beside another */

ncclResult_t epInFlightOf(const char *call, const char *name, unsigned asked, uint32_t *count) {
  uint64_t number;
  if (asked > EP_MAX_IN_FLIGHT)
    return epFail(ncclInvalidArgument, "%s: %s is %u: expected at most %u", call, name, asked, EP_MAX_IN_FLIGHT);
  *count = asked ? asked : EP_IN_FLIGHT;
  if (epEnvNumber(EP_ENV_MAX_IN_FLIGHT, 0, EP_MAX_IN_FLIGHT, &number)) *count = (uint32_t)number;
  return ncclSuccess;
}

ncclResult_t epGroupFind(const char *call, ncclEpGroup_t group) {
  if (group && epObjectExists(group, EP_OBJECT_GROUP)) return ncclSuccess;
  return epFail(ncclInvalidArgument,
                "%s: ep_group %p is not a group: expected one of ncclEpCreateGroup that is not "
                "destroyed",
                call, (void *)group);
}

uint32_t epLocals(const struct ncclEpGroup *group) { return group->shape.experts / group->shape.ranks; }

epGroupArgs epGroupArgsOf(const struct ncclEpGroup *g) {
  epGroupArgs a;
  memset(&a, 0, sizeof a);
  a.windows = (uint8_t *const *)g->windowTable;
  a.scratch = g->scratch;
  a.error = (epErrorRecord *)(void *)(g->sharedDev + offsetof(epGroupShared, error));
  a.abortWord = (uint32_t *)(void *)(g->sharedDev + offsetof(epGroupShared, abortWord));
  a.timeoutNs = g->config.timeout_ns;
  a.window = g->windowLayout;
  a.scratchLayout = g->scratchLayout;
  a.rank = (uint32_t)g->topology.rank;
  a.maxTokens = g->shape.maxTokens;
  a.stageRows = g->shape.stageRows;
  a.windowTopk = g->shape.topk;
  return a;
}

/* Memory of this rank alone: scratch (zeroed), the table of windows, what host and kernels share. */
static ncclResult_t epGroupAllocate(struct ncclEpGroup *g) {
  const epBackendOps *ops = g->be->ops;
  void *host = NULL, *dev = NULL;
  ncclResult_t r = ops->allocMapped(g->be, &host, &dev, sizeof *g->shared);
  if (r != ncclSuccess) return r;
  g->shared = host;
  g->sharedDev = dev;
  r = ops->alloc(g->be, &g->scratch, epMaskScratchBytes(g));
  if (r == ncclSuccess) r = ops->alloc(g->be, &g->windowTable, g->shape.ranks * sizeof(void *));
  if (r == ncclSuccess) r = ops->memset(g->be, g->scratch, 0, epMaskScratchBytes(g), NULL);
  if (r == ncclSuccess) r = ops->synchronize(g->be, NULL);
  if (r == ncclSuccess) r = epCountsTake(g, NULL, 1); /* the first chunk */
  if (r == ncclSuccess && epProfileWanted()) r = epProfileSet(g, 1);
  return r;
}

/* Everything that can be released is; the first error is told. */
static ncclResult_t epGroupRelease(struct ncclEpGroup *g) {
  const epBackendOps *ops = g->be->ops;
  ncclResult_t first = ncclSuccess, r;
  while (g->handles) {
    r = epHandleOrphan(g->handles);
    first = first == ncclSuccess ? r : first;
  }
  r = epStreamsRelease(g);
  first = first == ncclSuccess ? r : first;
  r = epSlotsRelease(g);
  first = first == ncclSuccess ? r : first;
  if (g->window) {
    r = ops->windowDestroy(g->be, g->window);
    first = first == ncclSuccess ? r : first;
  }
  r = epCountsFree(g);
  first = first == ncclSuccess ? r : first;
  r = epProfileRelease(g);
  first = first == ncclSuccess ? r : first;
  if (g->windowTable) {
    r = ops->free(g->be, g->windowTable);
    first = first == ncclSuccess ? r : first;
  }
  if (g->scratch) {
    r = ops->free(g->be, g->scratch);
    first = first == ncclSuccess ? r : first;
  }
  if (g->shared) {
    r = ops->freeMapped(g->be, g->shared);
    first = first == ncclSuccess ? r : first;
  }
  free(g->kernels);
  free(g->windows);
  ops->destroy(g->be);
  pthread_mutex_destroy(&g->lock);
  free(g);
  return first;
}

/* Collective: ranks compare configurations, and how each fared so far. */
static ncclResult_t epGroupAgree(const char *call, struct ncclEpGroup *g, ncclResult_t status) {
  epGroupWire mine = epGroupWireOf(&g->config, &g->shape, g->maxInFlight, status),
              *all = calloc(g->shape.ranks, sizeof *all);
  ncclResult_t r;
  if (!all) return epFail(ncclSystemError, "%s: out of host memory", call);
  r = g->be->ops->allGather(g->be, &mine, all, sizeof mine);
  if (r == ncclSuccess && status != ncclSuccess)
    r = status; /* its own line is already the better one */
  else if (r == ncclSuccess)
    r = epGroupWireCompare(call, all, (int)g->shape.ranks);
  free(all);
  return r;
}

static ncclResult_t epGroupWindow(const char *call, struct ncclEpGroup *g) {
  void **peers = g->windows = calloc(g->shape.ranks, sizeof *peers);
  ncclResult_t r;
  if (!peers) return epFail(ncclSystemError, "%s: out of host memory", call);
  r = g->be->ops->windowCreate(g->be, epMaskWindowBytes(g), &g->window, peers);
  for (uint32_t i = 0; r == ncclSuccess && i < g->shape.ranks; i++)
    if (!peers[i] && (int)i / g->topology.scaleUpRanks == g->topology.scaleOutRank)
      r = epFail(ncclInternalError, "%s: the window of rank %u is not reachable from rank %d", call, i,
                 g->topology.rank);
  if (r == ncclSuccess) r = g->be->ops->copyToDevice(g->be, g->windowTable, peers, g->shape.ranks * sizeof *peers);
  if (r == ncclSuccess && epIsHybrid(g)) r = epHybridConnect(g, g->window, 0, &g->hybrid.gin);
  return r == ncclSuccess && g->config.enable_mask ? epMaskWindows(call, g) : r;
}

/* Options beyond the configuration. */
static ncclResult_t epGroupOptions(const char *call, struct ncclEpGroup *g, const ncclEpGroupExtConfig_t *ext) {
  if (ext->single_reduction != 0 && ext->single_reduction != 1)
    return epFail(ncclInvalidArgument, "%s: ext_config.single_reduction is %d: expected 0 or 1", call,
                  ext->single_reduction);
  if (ext->single_reduction && epIsLl(g))
    return epFail(
        ncclInvalidUsage,
        "%s: ext_config.single_reduction is 1: expected 0 in low latency, where the experts' rank applies the "
        "weights and sums, or (rank-major) the caller does",
        call);
  if (ext->single_reduction) g->shape.stageRows = g->shape.maxTokens * g->shape.topk;
  g->be->trafficClass = ext->traffic_class;
  return epInFlightOf(call, "ext_config.max_in_flight", ext->max_in_flight, &g->maxInFlight);
}

/* What the policy of SMs is summed from, where it is asked. */
static void epGroupLinks(struct ncclEpGroup *g) {
  epTopology *t = &g->topology;
  if (!t->arch || t->ranks < 2 || epIsHybrid(g) || epIsLl(g)) return;
  t->linkGbs = EP_NVLINK_SHARE * epLinksFind(&t->pci, NULL, 0).nvlinkGbs;
}

ncclResult_t epGroupCreate(const char *call, ncclEpGroup_t *out, ncclComm_t comm, const ncclEpGroupConfig_t *config,
                           const ncclEpGroupExtConfig_t *ext) {
  struct ncclEpGroup *g;
  ncclResult_t r;
  if (!out) return epFail(ncclInvalidArgument, "%s: ep_group is NULL: expected room for a group", call);
  g = calloc(1, sizeof *g);
  if (!g) return epFail(ncclSystemError, "%s: out of host memory", call);
  r = epBackendOpen(comm, &config->alloc, &g->be);
  if (r != ncclSuccess) {
    free(g);
    return r;
  }
  pthread_mutex_init(&g->lock, NULL);
  r = g->be->ops->topology(g->be, &g->topology);
  if (r == ncclSuccess) r = epGroupConfigCheck(call, config, &g->topology, &g->config, &g->shape);
  if (r == ncclSuccess) r = epGroupOptions(call, g, ext);
  if (r == ncclSuccess) r = epRefuseCapture(call, g, NULL, "a group cannot be made then");
  if (r != ncclSuccess) goto release;
  g->windowLayout = epWindowLayoutOf(g->shape);
  if (epIsLl(g)) epLlWindow(&g->shape, &g->windowLayout);
  g->scratchLayout = epScratchLayoutOf(g->shape.ranks, g->shape.experts);
  g->sms = epPolicySms(&g->topology, g->config.max_num_sms < NCCL_EP_SMS_FEW ? g->config.max_num_sms : 0);
  epGroupLinks(g);
  if (epIsHybrid(g)) {
    r = epHybridPlan(call, g);
    if (r != ncclSuccess) goto release;
    epHybridLayouts(g);
  }
  if (epIsLl(g)) r = epLlWindowCheck(call, &g->shape, g->windowLayout.bytes);
  if (r != ncclSuccess) goto release;
  g->budget = g->config.max_recv_tokens_per_rank;
  r = epGroupAllocate(g);
  if (r == ncclSuccess) r = epMaskOpen(call, g);
  r = epGroupAgree(call, g, r);
  if (r == ncclSuccess) r = epGroupWindow(call, g);
  if (r != ncclSuccess) goto release;
  if (!epObjectAdd(g, EP_OBJECT_GROUP)) {
    r = epFail(ncclSystemError, "%s: out of host memory", call);
    goto release;
  }
  epLog(EP_LOG_INFO,
        "group %p: %s, rank %d of %d, %u experts, at most %u tokens of %u bytes, top-k %u, window %llu bytes, %u SMs, "
        "timeout %llu ms",
        (void *)g, g->be->ops->name, g->topology.rank, g->topology.ranks, g->shape.experts, g->shape.maxTokens,
        g->shape.maxRowBytes, g->shape.topk, (unsigned long long)g->windowLayout.bytes, g->sms,
        (unsigned long long)(g->config.timeout_ns / 1000000));
  *out = g;
  return ncclSuccess;
release:
  epGroupRelease(g);
  return r;
}

ncclResult_t epGroupDestroy(ncclEpGroup_t g) {
  ncclResult_t r = ncclSuccess, released;
  uint32_t mine = 0, *all = NULL;
  if (!g) return ncclSuccess;
  r = epGroupFind("ncclEpGroupDestroy", g);
  if (r != ncclSuccess) return r;
  epObjectRemove(g, EP_OBJECT_GROUP);
  epGroupAsyncError(g); /* what kernels reported and nobody asked for still goes to the log */
  /* Peers store into this rank's window, credits even after the operation has ended here: it must outlive theirs.
   * Joined after a timeout too, because a peer that was only late knows nothing of it and waits here; the backend ends
   * the wait after another timeout, or when the communicator has an error. */
  if (g->config.enable_mask) {
    r = epMaskLeave(g); /* a masked rank may never come */
  } else if (g->shape.ranks > 1) {
    epBackendPatience(g->be, g->config.timeout_ns);
    all = calloc(g->shape.ranks, sizeof *all);
    r = all ? g->be->ops->allGather(g->be, &mine, all, sizeof mine)
            : epFail(ncclSystemError, "ncclEpGroupDestroy: out of host memory");
    free(all);
  }
  released = epGroupRelease(g);
  return r == ncclSuccess ? released : r;
}
