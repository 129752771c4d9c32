/* Low-latency update: keeps a batch's top-k decisions in the record, checked, and says what the record is. Local: dispatch
 * exchanges the routing. A launch of its own so that the caller may overwrite topk_idx; on GPUs from SM90 on dispatch's blocks
 * take their places meanwhile, so it costs about what a copy of T * K words does. */
#ifndef EP_DEVICE_LL_UPDATE_H_
#define EP_DEVICE_LL_UPDATE_H_

#include "ll.h"

template <class C> DEV void ep_ll_update(const C c, const epLlUpdateArgs &a) {
  p::grid_wait();
  p::grid_launch();
  epRecordHeader *h = (epRecordHeader *)(a.record + a.recordLayout.header);
  int32_t *topk = (int32_t *)(a.record + a.recordLayout.topk);
  for (uint32_t i = p::bid() * c.threads + p::tid(); i < a.tokens * c.topk; i += a.blocks * c.threads) {
    int64_t e = c.indexBytes == 8 ? p::ldg<int64_t>((const int64_t *)a.topkIdx + i)
                                  : (int64_t)p::ldg<int32_t>((const int32_t *)a.topkIdx + i);
    bool valid = e >= 0 && e < (int64_t)c.experts;
    p::stg<int32_t>(topk + i, valid ? (int32_t)e : -1);
    if (!valid && e != -1) ep_report_index(a.group, i / c.topk, i % c.topk, e);
  }
  if (p::bid() != 0 || p::tid() != 0) return;
  ep_ll_write_header(c, a.group, h, a.tokens);
  p::stg<uint32_t>(&h->generation, EP_LL_UPDATED);
}

#endif
