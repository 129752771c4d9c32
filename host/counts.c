/* Exact counts on the host: mapped memory that the update kernel fills, and the wait for it. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fail.h"
#include "low_latency.h"
#include "runtime.h"

size_t epCountsBytes(const struct ncclEpGroup *g) {
  return (size_t)epAlignUp(sizeof(epHostCounts) + 4ull * (g->shape.ranks + 2 * epLocals(g)), 64);
}

static ncclResult_t epCountsGrow(struct ncclEpGroup *g) {
  epCountsChunk *chunk = calloc(1, sizeof *chunk);
  void *host = NULL, *dev = NULL;
  ncclResult_t r;
  if (!chunk) return epFail(ncclSystemError, "host counts: out of host memory");
  r = g->be->ops->allocMapped(g->be, &host, &dev, EP_COUNTS_SLOTS * epCountsBytes(g));
  if (r != ncclSuccess) {
    free(chunk);
    return r;
  }
  chunk->host = host;
  chunk->dev = dev;
  chunk->next = g->counts;
  g->counts = chunk;
  return ncclSuccess;
}

static int epCountsTakeFree(struct ncclEpGroup *g, struct ncclEpHandle *h) {
  size_t bytes = epCountsBytes(g);
  for (epCountsChunk *chunk = g->counts; chunk; chunk = chunk->next)
    for (uint32_t i = 0; i < EP_COUNTS_SLOTS; i++)
      if (!chunk->users[i]) {
        chunk->users[i] = h;
        h->counts = (epHostCounts *)(void *)(chunk->host + i * bytes);
        h->countsDev = chunk->dev + i * bytes;
        __atomic_store_n(&h->counts->generation, 0, __ATOMIC_RELEASE); /* of an earlier user */
        return 1;
      }
  return 0;
}

ncclResult_t epCountsTake(struct ncclEpGroup *g, struct ncclEpHandle *h, int mayAllocate) {
  ncclResult_t r = ncclSuccess;
  pthread_mutex_lock(&g->lock);
  if (!h) {
    r = epCountsGrow(g);
  } else if (!epCountsTakeFree(g, h) && mayAllocate) {
    r = epCountsGrow(g);
    if (r == ncclSuccess) epCountsTakeFree(g, h);
  }
  pthread_mutex_unlock(&g->lock);
  return r;
}

void epCountsGive(struct ncclEpGroup *g, struct ncclEpHandle *h) {
  pthread_mutex_lock(&g->lock);
  for (epCountsChunk *chunk = g->counts; chunk; chunk = chunk->next)
    for (uint32_t i = 0; i < EP_COUNTS_SLOTS; i++)
      if (chunk->users[i] == h) chunk->users[i] = NULL;
  h->counts = NULL;
  h->countsDev = NULL;
  pthread_mutex_unlock(&g->lock);
}

ncclResult_t epCountsFree(struct ncclEpGroup *g) {
  ncclResult_t first = ncclSuccess;
  while (g->counts) {
    epCountsChunk *chunk = g->counts;
    ncclResult_t r = g->be->ops->freeMapped(g->be, chunk->host);
    first = first == ncclSuccess ? r : first;
    g->counts = chunk->next;
    free(chunk);
  }
  return first;
}

static uint64_t epNow(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Whether generation `seen` is `wanted` or a later one of the same handle (it wraps around). */
static int epReached(uint32_t seen, uint32_t wanted) { return seen != 0 && (int32_t)(seen - wanted) >= 0; }

int epCountsKnown(const struct ncclEpHandle *h) {
  return h->updated && !h->pending.on && h->counts && !h->captured && !h->group->updatesCaptured &&
         epReached(__atomic_load_n(&h->counts->generation, __ATOMIC_ACQUIRE), h->generation);
}

ncclResult_t epUpdateWait(const char *call, struct ncclEpHandle *h) {
  struct ncclEpGroup *g = h->group;
  const epBackendOps *ops = g->be->ops;
  uint64_t now, deadline, most = g->config.timeout_ns;
  ncclResult_t r = epUpdatePending(call, h, h->stream);
  if (r != ncclSuccess) return r;
  /* An update inside a graph runs when the graph does; who replays it waits for it. */
  if (!h->updated || h->captured) return ncclSuccess;
  r = epRefuseCapture(call, g, h->stream, "the host cannot wait for it then");
  if (r != ncclSuccess) return r;
  /* Without a slot, or when graphs have moved the generation beyond what the host counted, only the stream tells. */
  if (!h->counts || g->updatesCaptured) return ops->synchronize(g->be, h->stream);
  if (g->config.enable_mask && most <= UINT64_MAX / 2) most *= 2; /* it may be waiting for a rank that does not come */
  now = epNow();
  deadline = most < UINT64_MAX - now ? now + most : UINT64_MAX;
  while (!epCountsKnown(h)) {
    r = epGroupUsable(call, g);
    if (r != ncclSuccess) return r;
    if (epNow() > deadline)
      return epFail(ncclSystemError, "%s: the handle's update has not run within the group's timeout of %llu ms", call,
                    (unsigned long long)(g->config.timeout_ns / 1000000));
    ops->relax(g->be, deadline);
  }
  return ncclSuccess;
}

static void epCountsCopy(const struct ncclEpGroup *g, const epHostCounts *from, ncclEpHostCounts_t *to) {
  const uint32_t *values = (const uint32_t *)(from + 1);
  uint32_t ranks = g->shape.ranks, locals = epLocals(g);
  to->total = from->total;
  to->total_padded = from->totalPadded;
  if (to->per_source) memcpy(to->per_source, values, ranks * sizeof *values);
  if (to->per_expert) memcpy(to->per_expert, values + ranks, locals * sizeof *values);
  if (to->per_expert_padded) memcpy(to->per_expert_padded, values + ranks + locals, locals * sizeof *values);
}

/* The same from the record: for handles without a slot, and records that another handle wrote. */
static ncclResult_t epCountsFromRecord(struct ncclEpHandle *h, epHostCounts *out) {
  struct ncclEpGroup *g = h->group;
  epRecordLayout l = epHandleRecordLayout(h);
  uint32_t ranks = g->shape.ranks, locals = epLocals(g), *values = (uint32_t *)(out + 1), *zones;
  const epBackendOps *ops = g->be->ops;
  int flat = h->layout == NCCL_EP_LAYOUT_FLAT;
  ncclResult_t r;
  zones = calloc(locals + 1, sizeof *zones);
  if (!zones) return epFail(ncclSystemError, "ncclEpGetHostCounts: out of host memory");
  r = ops->copyToHost(g->be, values, h->record + l.recvCount, ranks * sizeof *values);
  if (r == ncclSuccess) r = ops->copyToHost(g->be, values + ranks, h->record + l.zoneCount, locals * sizeof *values);
  if (r == ncclSuccess) r = ops->copyToHost(g->be, zones, h->record + l.zoneBase, (locals + 1) * sizeof *zones);
  out->total = 0;
  for (uint32_t e = 0; e < locals; e++) values[ranks + locals + e] = zones[e + 1] - zones[e];
  for (uint32_t i = 0; i < (flat ? ranks : locals); i++) out->total += values[flat ? i : ranks + i];
  out->totalPadded = flat ? out->total : zones[locals];
  free(zones);
  return r;
}

ncclResult_t epHostCountsGet(ncclEpHandle_t h, ncclEpHostCounts_t *counts) {
  static const char call[] = "ncclEpGetHostCounts";
  epHostCounts *copy;
  ncclResult_t r = epHandleFind(call, h);
  if (r == ncclSuccess && epIsLl(h->group))
    return epFail(ncclInvalidUsage, "%s: low latency exchanges no counts beforehand: give ncclEpDispatch a layout_info",
                  call);
  if (r == ncclSuccess) r = epUpdateWait(call, h);
  if (r == ncclSuccess && !h->updated) r = epHandleRouted(call, h, NULL);
  if (r != ncclSuccess) return r;
  if (h->updated && h->counts) {
    if (!__atomic_load_n(&h->counts->generation, __ATOMIC_ACQUIRE))
      return epFail(ncclInvalidUsage, "%s: no update of this handle has run yet", call);
    epCountsCopy(h->group, h->counts, counts);
    return ncclSuccess;
  }
  copy = calloc(1, epCountsBytes(h->group));
  if (!copy) return epFail(ncclSystemError, "%s: out of host memory", call);
  r = epCountsFromRecord(h, copy);
  if (r == ncclSuccess) epCountsCopy(h->group, copy, counts);
  free(copy);
  return r;
}
