/* Profiling of a group: the memory that its kernels write into, and what stands there in words. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "env.h"
#include "fail.h"
#include "runtime.h"

/* A wait is worth a word when it is this long and this part of its operation: what is on the link takes a few microseconds. */
#define EP_ADVICE_NS 20000u
#define EP_ADVICE_PART 4u

int epProfileWanted(void) {
  uint64_t on = 0;
  return epEnvNumber(EP_ENV_PROFILE, 0, 1, &on) && on;
}

static ncclResult_t epProfileOpen(struct ncclEpGroup *g) {
  const epBackendOps *ops = g->be->ops;
  void *area = NULL;
  ncclResult_t r;
  g->profiling.header = epProfileHeaderOf(g->shape.ranks);
  r = ops->alloc(g->be, &area, (size_t)epProfileBytes(&g->profiling.header));
  if (r != ncclSuccess) return r;
  r = ops->memset(g->be, area, 0, (size_t)epProfileBytes(&g->profiling.header), NULL);
  if (r == ncclSuccess) r = ops->synchronize(g->be, NULL);
  if (r == ncclSuccess) r = ops->copyToDevice(g->be, area, &g->profiling.header, sizeof g->profiling.header);
  if (r != ncclSuccess) {
    (void)ops->free(g->be, area);
    return r;
  }
  g->profiling.area = area;
  return ncclSuccess;
}

ncclResult_t epProfileSet(struct ncclEpGroup *g, int on) {
  uint8_t *state = (uint8_t *)g->scratch + g->scratchLayout.state;
  uint64_t area;
  ncclResult_t r = on && !g->profiling.area ? epProfileOpen(g) : ncclSuccess;
  if (r != ncclSuccess || (!on && !g->profiling.area)) return r;
  area = on ? (uint64_t)(uintptr_t)g->profiling.area : 0;
  r = g->be->ops->copyToDevice(g->be, state + offsetof(epGroupState, profile), &area, sizeof area);
  if (r == ncclSuccess) g->profiling.on = on;
  return r;
}

ncclResult_t epProfileRelease(struct ncclEpGroup *g) {
  return g->profiling.area ? g->be->ops->free(g->be, g->profiling.area) : ncclSuccess;
}

/* ---- Reading ----------------------------------------------------------------------------------------------------- */

static ncclEpProfileKind_t epProfileKind(uint32_t kernel) {
  switch (kernel) {
  case EP_KERNEL_UPDATE:
  case EP_KERNEL_LL_UPDATE:
  case EP_KERNEL_HYBRID_UPDATE:
    return NCCL_EP_PROFILE_UPDATE;
  case EP_KERNEL_DISPATCH:
  case EP_KERNEL_LL_DISPATCH:
  case EP_KERNEL_HYBRID_DISPATCH:
  case EP_KERNEL_HYBRID_LL_DISPATCH:
    return NCCL_EP_PROFILE_DISPATCH;
  default:
    return NCCL_EP_PROFILE_COMBINE;
  }
}

static uint32_t epProfilePhase(uint32_t wait, ncclEpProfileKind_t kind) {
  static const uint32_t phases[EP_WAITS][2] = {{EP_PHASE_UPDATE_COUNTS, EP_PHASE_UPDATE_COUNTS},
                                               {EP_PHASE_UPDATE_META, EP_PHASE_UPDATE_META},
                                               {EP_PHASE_UPDATE_REPLY, EP_PHASE_UPDATE_REPLY},
                                               {EP_PHASE_DISPATCH_CREDIT, EP_PHASE_COMBINE_CREDIT},
                                               {EP_PHASE_DISPATCH_ROWS, EP_PHASE_COMBINE_ROWS}};
  return phases[wait][kind == NCCL_EP_PROFILE_COMBINE];
}

static uint32_t epSince(uint32_t start, uint32_t stamp) {
  return stamp && (int32_t)(stamp - start) > 0 ? stamp - start : 0;
}

static const epProfileWait *epProfileWaitsOf(const epProfileRecord *r) { return (const epProfileWait *)(r + 1); }

static uint32_t epProfileWaitCount(const struct ncclEpGroup *g, const epProfileRecord *r) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < EP_WAITS * g->shape.ranks; i++) n += epProfileWaitsOf(r)[i].count != 0;
  return n;
}

static void epProfileTell(const struct ncclEpGroup *g, const epProfileRecord *r, ncclEpProfile_t *out) {
  ncclEpProfileOperation_t *op = &out->operations[out->operation_count++];
  memset(op, 0, sizeof *op);
  op->number = r->number;
  op->kind = epProfileKind(r->kind);
  op->end_ns = r->end;
  op->start_ns = r->end - ((uint32_t)r->end - r->start);
  for (int i = 0; i < EP_SPANS; i++) {
    op->span_start_ns[i] = epSince(r->start, r->spans[i].first);
    op->span_end_ns[i] = epSince(r->start, r->spans[i].last);
  }
  for (uint32_t i = 0; out->waits && i < EP_WAITS * g->shape.ranks; i++) {
    const epProfileWait *w = &epProfileWaitsOf(r)[i];
    ncclEpProfileWait_t *to;
    if (!w->count) continue;
    to = &out->waits[out->wait_count++];
    memset(to, 0, sizeof *to);
    to->number = r->number;
    to->rank = (int)(i % g->shape.ranks);
    snprintf(to->phase, sizeof to->phase, "%s", epPhaseName(epProfilePhase(i / g->shape.ranks, op->kind)));
    to->waits = w->count;
    to->longest_ns = w->longest;
    to->first_ns = epSince(r->start, w->first);
    to->last_ns = epSince(r->start, w->last);
    to->total_ns = (unsigned long long)w->total * EP_WAIT_UNIT;
  }
}

/* When the first of what this rank missed of rank `peer` came: about how late that one began. Rows that are far behind others are
 * waited for long, also from a rank that is in time; what it gave back of the operation before says nothing, and places, which it tells once it has heard of all, may be another's fault. *wait: the kind. */
static uint32_t epLateness(const struct ncclEpGroup *g, const epProfileRecord *r, uint32_t peer, uint32_t *wait) {
  uint32_t late = 0;
  for (uint32_t w = 0; w < EP_WAITS; w++) {
    const epProfileWait *of = &epProfileWaitsOf(r)[w * g->shape.ranks + peer];
    uint32_t came = epSince(r->start, of->first);
    if (!of->count || w == EP_WAIT_STAGING || w == EP_WAIT_PLACES || (late && came >= late)) continue;
    late = came;
    *wait = w;
  }
  return late;
}

/* Keeps the wait that cost most of those that dominate their operation. */
static void epProfileAdvise(const struct ncclEpGroup *g, const epProfileRecord *r, uint32_t *worst, char *advice,
                            size_t bytes) {
  static const char *const names[] = {"update", "dispatch", "combine"};
  uint32_t took = (uint32_t)r->end - r->start;
  ncclEpProfileKind_t kind = epProfileKind(r->kind);
  for (uint32_t peer = 0; peer < g->shape.ranks; peer++) {
    uint32_t wait = 0, late = epLateness(g, r, peer, &wait);
    if (late <= *worst || late < EP_ADVICE_NS || late < took / EP_ADVICE_PART) continue;
    *worst = late;
    snprintf(advice, bytes, "rank %u was late by %.0f us in %s (of the %.0f us that %s %u took on rank %d)", peer,
             1e-3 * late, epPhaseName(epProfilePhase(wait, kind)), 1e-3 * took, names[kind], r->number,
             g->topology.rank);
  }
}

/* A copy of the area; *held: operations that it still has, the last of them `header.number`. */
static ncclResult_t epProfileRead(struct ncclEpGroup *g, uint8_t **out) {
  size_t bytes = (size_t)epProfileBytes(&g->profiling.header);
  uint8_t *copy = malloc(bytes);
  ncclResult_t r;
  if (!copy) return epFail(ncclSystemError, "ncclEpGetProfile: out of host memory");
  r = g->be->ops->copyToHost(g->be, copy, g->profiling.area, bytes);
  if (r != ncclSuccess) {
    free(copy);
    return r;
  }
  *out = copy;
  return ncclSuccess;
}

ncclResult_t epProfileGet(struct ncclEpGroup *g, ncclEpProfile_t *out) {
  static const char call[] = "ncclEpGetProfile";
  epProfileHeader header;
  uint8_t *copy = NULL;
  uint32_t worst = 0, n, held;
  ncclResult_t r;
  if (!g->profiling.area)
    return epFail(ncclInvalidUsage, "%s: the group is not profiled: expected ncclEpSetProfiling or NCCL_EP_PROFILE=1",
                  call);
  if (!out->operations || !out->operation_capacity)
    return epFail(ncclInvalidArgument, "%s: profile.%s: expected room for one operation at least", call,
                  out->operations ? "operation_capacity is 0" : "operations is NULL");
  r = epProfileRead(g, &copy);
  if (r != ncclSuccess) return r;
  memcpy(&header, copy, sizeof header);
  out->operation_count = out->wait_count = out->lost = 0;
  out->advice[0] = 0;
  n = g->profiling.told;
  held = header.records - 1; /* one is clear for the operation that runs */
  if (header.number - n > held) {
    out->lost = header.number - n - held;
    n += out->lost;
  }
  while (n != header.number && out->operation_count < out->operation_capacity) {
    const epProfileRecord *record = (const epProfileRecord *)(void *)(copy + epProfileRecordAt(&header, n + 1));
    uint32_t waits = out->waits ? epProfileWaitCount(g, record) : 0;
    if (waits > out->wait_capacity - out->wait_count) {
      if (!out->operation_count)
        r = epFail(ncclInvalidArgument, "%s: profile.wait_capacity is %u: operation %u has %u waits", call,
                   out->wait_capacity, n + 1, waits);
      break;
    }
    epProfileTell(g, record, out);
    epProfileAdvise(g, record, &worst, out->advice, sizeof out->advice);
    n++;
  }
  if (r == ncclSuccess) g->profiling.told = n;
  free(copy);
  return r;
}
