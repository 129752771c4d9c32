/* The routing record in the caller's terms: where each received row came from, where each sent (token, k) went. */
#include <stdlib.h>
#include <string.h>

#include "fail.h"
#include "low_latency.h"
#include "runtime.h"

static const char call[] = "ncclEpGetHandleMetadata";

/* Host copy of a section of the record. */
static ncclResult_t epSection(struct ncclEpHandle *h, uint64_t offset, size_t bytes, void **out) {
  void *copy = calloc(1, bytes ? bytes : 1);
  ncclResult_t r = ncclSuccess;
  if (!copy) return epFail(ncclSystemError, "%s: out of host memory", call);
  if (bytes) r = h->group->be->ops->copyToHost(h->group->be, copy, h->record + offset, bytes);
  if (r != ncclSuccess) {
    free(copy);
    return r;
  }
  *out = copy;
  return ncclSuccess;
}

/* Rows [first, first + n) of the flat order, which came from `rank`: `meta` is theirs, `slotBase` that rank's. */
static void epReceivedRows(const struct ncclEpHandle *h, ncclEpHandleMetadata_t *m, const uint32_t *meta,
                           const uint32_t *slotBase, uint32_t rank, uint32_t first, uint32_t n) {
  int flat = h->layout == NCCL_EP_LAYOUT_FLAT;
  for (uint32_t j = 0; j < n; j++, meta += 1 + h->topk) {
    if (m->source_rank) m->source_rank[first + j] = (int)rank;
    if (m->source_token) m->source_token[first + j] = (int)EP_META_TOKEN(meta[0]);
    for (uint32_t k = 0; m->received_slot && k < h->topk; k++) {
      uint32_t entry = meta[1 + k];
      long long slot = entry == EP_NONE ? -1
                       : flat           ? (long long)first + j
                                        : (long long)slotBase[EP_ENTRY_EXPERT(entry)] + EP_ENTRY_POS(entry);
      m->received_slot[(size_t)(first + j) * h->topk + k] = slot;
    }
  }
}

static ncclResult_t epReceived(struct ncclEpHandle *h, ncclEpHandleMetadata_t *m) {
  const epShape *s = &h->group->shape;
  epRecordLayout l = epHandleRecordLayout(h);
  uint32_t *base = NULL, *slots = NULL, *meta = NULL, width = 1 + h->topk, rows;
  int wanted = m->source_rank || m->source_token || m->received_slot;
  ncclResult_t r = epSection(h, l.recvBase, (s->ranks + 1ull) * 4, (void **)&base);
  if (r == ncclSuccess) r = epSection(h, l.slotBase, s->experts * 4ull, (void **)&slots);
  if (r != ncclSuccess) goto done;
  rows = base[s->ranks];
  if (wanted && m->received_capacity < rows) {
    r = epFail(ncclInvalidArgument, "%s: received_capacity is %zu: the routing has %u received rows", call,
               m->received_capacity, rows);
    goto done;
  }
  for (uint32_t rank = 0; r == ncclSuccess && rank < s->ranks && wanted; rank++) {
    uint32_t n = base[rank + 1] - base[rank];
    r = epSection(h, l.recvMeta + 4ull * rank * s->maxTokens * width, 4ull * n * width, (void **)&meta);
    if (r != ncclSuccess) break;
    epReceivedRows(h, m, meta, slots + (size_t)rank * epLocals(h->group), rank, base[rank], n);
    free(meta);
  }
  if (r == ncclSuccess) m->received = rows;
done:
  free(slots);
  free(base);
  return r;
}

static ncclResult_t epSent(struct ncclEpHandle *h, ncclEpHandleMetadata_t *m) {
  const epShape *s = &h->group->shape;
  epRecordLayout l = epHandleRecordLayout(h);
  int flat = h->layout == NCCL_EP_LAYOUT_FLAT;
  void *header = NULL, *topk = NULL, *place = NULL, *base = NULL;
  uint32_t bases = flat ? s->ranks : s->experts;
  size_t entries;
  ncclResult_t r = epSection(h, l.header, sizeof(epRecordHeader), &header);
  if (r != ncclSuccess) return r;
  entries = (size_t)((epRecordHeader *)header)->tokens * h->topk;
  if (m->sent_capacity < entries)
    r = epFail(ncclInvalidArgument, "%s: sent_capacity is %zu: the routing has %zu entries", call, m->sent_capacity,
               entries);
  if (r == ncclSuccess) r = epSection(h, l.topk, entries * 4, &topk);
  if (r == ncclSuccess) r = epSection(h, flat ? l.sendRow : l.sendPos, entries * 4, &place);
  if (r == ncclSuccess) r = epSection(h, flat ? l.sendBase : l.sendSlot, bases * 4ull, &base);
  for (size_t i = 0; r == ncclSuccess && i < entries; i++) {
    int32_t e = ((int32_t *)topk)[i];
    uint32_t from = e < 0 ? 0 : flat ? (uint32_t)e / epLocals(h->group) : (uint32_t)e;
    int goes = e >= 0 && ((uint32_t *)base)[from] != EP_NONE; /* a masked rank has no place for it */
    m->sent_slot[i] = goes ? (long long)((uint32_t *)base)[from] + ((int32_t *)place)[i] : -1;
  }
  free(base);
  free(place);
  free(topk);
  free(header);
  return r;
}

ncclResult_t epHandleMetadata(ncclEpHandle_t h, ncclEpHandleMetadata_t *m) {
  ncclResult_t r = epHandleFind(call, h);
  if (r == ncclSuccess && epIsLl(h->group))
    r = epFail(ncclInvalidUsage, "%s: low latency has no metadata: places are fixed by rank or expert", call);
  if (r == ncclSuccess) r = epHandleRouted(call, h, h->stream);
  if (r == ncclSuccess && h->updated && !h->captured) {
    /* the whole kernel, not only its counts: the record is complete at its end */
    r = epRefuseCapture(call, h->group, h->stream, "the host cannot wait for it then");
    if (r == ncclSuccess) r = h->group->be->ops->synchronize(h->group->be, h->stream);
  }
  if (r == ncclSuccess) r = epGroupUsable(call, h->group);
  if (r == ncclSuccess) r = epReceived(h, m);
  if (r == ncclSuccess && m->sent_slot) r = epSent(h, m);
  return r;
}

ncclResult_t epDeviceCounts(ncclEpHandle_t h, ncclEpDeviceCounts_t *counts) {
  static const char name[] = "ncclEpGetDeviceCounts";
  epRecordLayout l;
  ncclResult_t r = epHandleFind(name, h);
  if (r != ncclSuccess) return r;
  if (epIsLl(h->group))
    return epFail(ncclInvalidUsage, "%s: low latency exchanges no counts beforehand: give ncclEpDispatch a layout_info",
                  name);
  if (!h->topk) return epFail(ncclInvalidUsage, "%s: the handle has no routing yet: expected an update before", name);
  l = epHandleRecordLayout(h);
  counts->per_source = (const unsigned *)(const void *)(h->record + l.recvCount);
  counts->per_expert = (const unsigned *)(const void *)(h->record + l.zoneCount);
  counts->expert_start = (const unsigned *)(const void *)(h->record + l.zoneBase);
  return ncclSuccess;
}
