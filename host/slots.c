/* Windows of staged operations, one for each that is in flight. */
#include <stdlib.h>

#include "fail.h"
#include "hybrid.h"
#include "operation.h"

static ncclResult_t slotOpen(struct ncclEpGroup *g, unsigned slot) {
  epSlot *s = &g->slots[slot - 1];
  const epBackendOps *ops = g->be->ops;
  size_t bytes = g->shape.ranks * sizeof(void *);
  void **peers = calloc(g->shape.ranks, sizeof *peers);
  ncclResult_t r = peers ? ops->windowCreate(g->be, g->windowLayout.bytes, &s->window, peers)
                         : epFail(ncclSystemError, "staging: out of host memory");
  if (r == ncclSuccess) r = ops->alloc(g->be, &s->windowTable, bytes);
  if (r == ncclSuccess) r = ops->copyToDevice(g->be, s->windowTable, peers, bytes);
  if (r == ncclSuccess && epIsHybrid(g)) {
    s->network = g->hybrid;
    r = epHybridConnect(g, s->window, slot, &s->network.gin);
  }
  free(peers);
  s->ready = r == ncclSuccess;
  return r;
}

static ncclResult_t slotRelease(struct ncclEpGroup *g, epSlot *s) {
  ncclResult_t r = s->window ? g->be->ops->windowDestroy(g->be, s->window) : ncclSuccess, other = ncclSuccess;
  if (s->windowTable) other = g->be->ops->free(g->be, s->windowTable);
  *s = (epSlot){0};
  return r == ncclSuccess ? other : r;
}

static ncclResult_t slotReady(const char *call, struct ncclEpGroup *g, unsigned slot, cudaStream_t stream) {
  epSlot *s = &g->slots[slot - 1];
  ncclResult_t r;
  if (s->ready) return ncclSuccess;
  r = epRefuseCapture(call, g, stream,
                      "the memory of a staged operation cannot be made then (make as many such calls before, or "
                      "ncclEpPrepare with in_flight)");
  if (r != ncclSuccess) return r;
  r = slotOpen(g, slot);
  if (r == ncclSuccess) return r;
  slotRelease(g, s);
  epGroupLoseSlot(g);
  return epFail(r, "%s: a staged operation's memory, which all ranks make together: %s", call, epLastError());
}

ncclResult_t epSlotsOpen(const char *call, struct ncclEpGroup *g, unsigned count, cudaStream_t stream) {
  ncclResult_t r = ncclSuccess;
  for (unsigned i = 0; r == ncclSuccess && i < count; i++) r = slotReady(call, g, i + 1, stream);
  return r;
}

ncclResult_t epSlotTake(const char *call, struct ncclEpGroup *g, cudaStream_t stream, unsigned *slot) {
  for (unsigned i = 0; i < g->maxInFlight; i++) {
    epSlot *s = &g->slots[i];
    ncclResult_t r;
    if (s->taken) continue;
    r = slotReady(call, g, i + 1, stream);
    if (r != ncclSuccess) return r;
    s->taken = 1;
    *slot = i + 1;
    return ncclSuccess;
  }
  return epFail(ncclInvalidUsage,
                "%s: send_only: %u staged operations of the group are in flight: expected fewer than max_in_flight, %u "
                "(complete one first, or set NCCL_EP_MAX_IN_FLIGHT)",
                call, g->maxInFlight, g->maxInFlight);
}

void epSlotGive(struct ncclEpGroup *g, unsigned slot) { g->slots[slot - 1].taken = 0; }

void epSlotsGiveAll(struct ncclEpGroup *g) {
  for (unsigned i = 0; i < g->maxInFlight; i++) epSlotGive(g, i + 1);
}

ncclResult_t epSlotsRelease(struct ncclEpGroup *g) {
  ncclResult_t first = ncclSuccess;
  for (unsigned i = 0; i < EP_MAX_IN_FLIGHT; i++) {
    ncclResult_t r = slotRelease(g, &g->slots[i]);
    first = first == ncclSuccess ? r : first;
  }
  return first;
}

epGroupArgs epSlotArgs(const struct ncclEpGroup *g, unsigned slot) {
  epGroupArgs a = epGroupArgsOf(g);
  if (!slot) return a;
  a.windows = (uint8_t *const *)g->slots[slot - 1].windowTable;
  a.scratchLayout.state = epSlotState(slot);
  return a;
}

const epHybridGroup *epSlotNetwork(const struct ncclEpGroup *g, unsigned slot) {
  return slot ? &g->slots[slot - 1].network : &g->hybrid;
}
