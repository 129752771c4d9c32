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

static ncclResult_t epReceived(struct ncclEpHandle *h, ncclEpHandleMetadata_t *m) {
  const epShape *s = &h->group->shape;
  epRecordLayout l = epHandleRecordLayout(h);
  uint32_t *base = NULL, *meta = NULL, width = 1 + h->topk, rows;
  ncclResult_t r = epSection(h, l.recvBase, (s->ranks + 1ull) * 4, (void **)&base);
  if (r != ncclSuccess) return r;
  rows = base[s->ranks];
  if ((m->source_rank || m->source_token) && m->received_capacity < rows) {
    r = epFail(ncclInvalidArgument, "%s: received_capacity is %zu: the routing has %u received rows", call,
               m->received_capacity, rows);
    goto done;
  }
  for (uint32_t rank = 0; r == ncclSuccess && rank < s->ranks && (m->source_rank || m->source_token); rank++) {
    uint32_t n = base[rank + 1] - base[rank];
    r = epSection(h, l.recvMeta + 4ull * rank * s->maxTokens * width, 4ull * n * width, (void **)&meta);
    for (uint32_t j = 0; r == ncclSuccess && j < n; j++) {
      if (m->source_rank) m->source_rank[base[rank] + j] = (int)rank;
      if (m->source_token) m->source_token[base[rank] + j] = (int)meta[(size_t)j * width];
    }
    if (r == ncclSuccess) free(meta);
  }
  if (r == ncclSuccess) m->received = rows;
done:
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
    m->sent_slot[i] = e < 0 ? -1 : (long long)((uint32_t *)base)[from] + ((int32_t *)place)[i];
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
  if (r == ncclSuccess) r = epHandleRouted(call, h, NULL);
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
