/* Time stamps of a profiled group's kernels, and what their waits cost (profile_layout.h). Where a group is not profiled all of
 * it compiles to nothing: a kernel's machine code is that of a text without these calls. The emulator, whose kernels are compiled
 * once, looks at the group's pointer instead.
 *
 * Several threads keep the least or the greatest stamp of the same word, so words are changed by compare-and-swap; what a thread
 * adds is small against what it has waited for. */
#ifndef EP_DEVICE_PROFILE_H_
#define EP_DEVICE_PROFILE_H_

#include "abi.h"
#include "prim.h"
#include "profile_layout.h"

#if defined(EP_EMU) || defined(EP_PROFILE)

/* NULL: the group is not profiled. */
DEV uint8_t *ep_profile_area(const epGroupArgs &g) {
  return (uint8_t *)p::ldg<uint64_t>(&((epGroupState *)(g.scratch + g.scratchLayout.state))->profile);
}

DEV uint32_t ep_profile_stamp() { return (uint32_t)p::globaltimer() | 1; }

DEV void ep_profile_keep(uint32_t *at, uint32_t value, bool greatest) {
  uint32_t old = p::ld_relaxed_sys(at);
  while (old == 0 || (value != old && ((int32_t)(value - old) > 0) == greatest)) {
    uint32_t seen = p::atomic_cas(at, old, value);
    if (seen == old) return;
    old = seen;
  }
}

DEV epProfileRecord *ep_profile_record(uint8_t *area, uint32_t number) {
  const epProfileHeader *h = (const epProfileHeader *)area;
  uint32_t records = p::ldg<uint32_t>(&h->records), bytes = p::ldg<uint32_t>(&h->recordBytes);
  return (epProfileRecord *)(area + sizeof(epProfileHeader) + (uint64_t)(number % records) * bytes);
}

/* Of the operation that runs: the next to end. */
DEV uint32_t ep_profile_number(uint8_t *area) { return p::ld_relaxed_sys(&((epProfileHeader *)area)->number) + 1; }

struct epProfile {
  uint8_t *area;
  uint32_t last; /* where the next span begins */
};

/* Whole block, behind grid_wait. */
DEV epProfile ep_profile_begin(const epGroupArgs &g, uint32_t kind) {
  epProfile x;
  x.area = ep_profile_area(g);
  x.last = 0;
  if (!x.area) return x;
  x.last = ep_profile_stamp();
  if (p::tid() != 0) return x;
  epProfileRecord *r = ep_profile_record(x.area, ep_profile_number(x.area));
  ep_profile_keep(&r->start, x.last, false);
  if (p::bid() == 0) p::st_relaxed_sys(&r->kind, kind);
  return x;
}

/* Whole block: what it has done since the last span, or since it began. */
DEV void ep_profile_span(epProfile &x, uint32_t span) {
  if (!x.area) return;
  uint32_t now = ep_profile_stamp();
  if (p::tid() == 0) {
    epProfileRecord *r = ep_profile_record(x.area, ep_profile_number(x.area));
    ep_profile_keep(&r->spans[span].first, x.last, false);
    ep_profile_keep(&r->spans[span].last, now, true);
  }
  x.last = now;
}

/* Whole block, at its end, which is that of a span as well. The last one ends the operation and clears a record for the next. */
DEV void ep_profile_end(epProfile &x, uint32_t span, uint32_t blocks) {
  if (!x.area) return;
  p::sync_threads();
  ep_profile_span(x, span);
  if (p::warp() != 0) return;
  epProfileHeader *h = (epProfileHeader *)x.area;
  uint32_t number = ep_profile_number(x.area), before = 0;
  if (p::lane() == 0) before = p::atomic_add_acq_rel_gpu(&h->done, 1);
  if (p::shfl(p::FULL, before, 0) != blocks - 1) return;
  uint32_t *next = (uint32_t *)ep_profile_record(x.area, number + 1);
  for (uint32_t i = p::lane(); i < p::ldg<uint32_t>(&h->recordBytes) / 4; i += 32) p::st_relaxed_sys(next + i, 0);
  p::sync_warp();
  if (p::lane() != 0) return;
  epProfileRecord *r = ep_profile_record(x.area, number);
  p::st_relaxed_sys(&r->end, p::globaltimer());
  p::st_relaxed_sys(&h->done, 0);
  p::st_release_sys(&r->number, number);
  p::st_release_sys(&h->number, number);
}

/* Rounded: of many threads whose waits end together few have something new to keep. */
DEV uint32_t ep_profile_round(uint32_t ns) { return (ns & ~(EP_PROFILE_GRAIN - 1)) | 1; }

/* A wait for `peer` that began at `start` has ended well. Waits for this rank's own blocks and words are no rank's fault. */
DEV void ep_profile_waited(const epGroupArgs &g, uint64_t start, uint32_t phase, uint32_t peer) {
  uint8_t *area = ep_profile_area(g);
  uint32_t wait = phase == EP_PHASE_UPDATE_COUNTS                                         ? EP_WAIT_COUNTS
                  : phase == EP_PHASE_UPDATE_META                                         ? EP_WAIT_META
                  : phase == EP_PHASE_UPDATE_REPLY                                        ? EP_WAIT_PLACES
                  : phase == EP_PHASE_DISPATCH_CREDIT || phase == EP_PHASE_COMBINE_CREDIT ? EP_WAIT_STAGING
                                                                                          : EP_WAIT_ROWS;
  if (!area || phase == EP_PHASE_GRID || peer == g.rank) return;
  uint64_t now = p::globaltimer(), took = now - start;
  uint32_t ns = took < 0x7fffffffu ? (uint32_t)took : 0x7fffffffu, stamp = ep_profile_round((uint32_t)now);
  epProfileRecord *r = ep_profile_record(area, ep_profile_number(area));
  epProfileWait *w = (epProfileWait *)(r + 1) + wait * p::ldg<uint32_t>(&((epProfileHeader *)area)->ranks) + peer;
  p::atomic_add(&w->count, 1);
  p::atomic_add(&w->total, (uint32_t)(took / EP_WAIT_UNIT));
  ep_profile_keep(&w->longest, ep_profile_round(ns), true);
  ep_profile_keep(&w->first, stamp, false);
  ep_profile_keep(&w->last, stamp, true);
}

#else

struct epProfile {};
DEV epProfile ep_profile_begin(const epGroupArgs &, uint32_t) { return {}; }
DEV void ep_profile_span(epProfile &, uint32_t) {}
DEV void ep_profile_end(epProfile &, uint32_t, uint32_t) {}
DEV void ep_profile_waited(const epGroupArgs &, uint64_t, uint32_t, uint32_t) {}

#endif

#endif
