/* Combine across scale-up domains without partial sums: every slot travels as it is, by the same two hops as the sums that
 * hybrid_combine.h makes otherwise, in rows numbered by k; the token's rank adds them all in ascending k, FP32, rounded once. A
 * flat row is one slot, at the highest k that its rank has of the token. */
#ifndef EP_DEVICE_HYBRID_SLOTS_H_
#define EP_DEVICE_HYBRID_SLOTS_H_

#include "numbers.h"
#include "rail.h"

/* Slots of a token in one domain. `rows`: lanes whose slot is a row. The lane's row is that of lane `top`. */
struct epSlots {
  uint32_t rows, top, weight;
  uint64_t address; /* of the lane's row; 0: none, or dropped by this rank */
};

/* Slot k of token t of the rank of domain o that rank `owner` of my domain stands for; its flag. */
template <class C>
DEV uint64_t ep_slot_index(const C c, const epGroupArgs &g, const epPlace &w, uint32_t owner, uint32_t writer,
                           uint32_t o, uint32_t k, uint32_t t) {
  return (c.mask ? ep_near_rows(c, g, w, owner, writer) : 0) + ((uint64_t)o * g.windowTopk + k) * g.maxTokens + t;
}
template <class C>
DEV uint8_t *ep_slot_row(const C c, const epGroupArgs &g, const epPlace &w, uint32_t owner, uint32_t writer, uint32_t o,
                         uint32_t k, uint32_t t) {
  return ep_stage_at(g, w, owner, ep_slot_index(c, g, w, owner, writer, o, k, t));
}
template <class C>
DEV uint32_t *ep_slot_flag(const C c, const epGroupArgs &g, const epHybridGroup &h, const epPlace &w, uint32_t owner,
                           uint32_t writer, uint32_t o, uint32_t k, uint32_t t) {
  return ep_sum_flag_at(g, h, w, owner, ep_slot_index(c, g, w, owner, writer, o, k, t));
}
/* Window offset of slot k of token t from (to) domain o. */
template <class C>
DEV uint64_t ep_rail_slot(const C c, const epGroupArgs &g, uint64_t section, uint32_t owner, uint32_t o, uint32_t t,
                          uint32_t k) {
  uint64_t row = (uint64_t)epRegionOf(owner, o) * g.stageRows + (uint64_t)t * c.topk + k;
  return section + row * ep_rail_stride(c);
}

/* The lane at which the lane's row enters; `mates`: those of its rank, itself among them. */
template <class C> DEV uint32_t ep_slot_top(const C c, uint32_t mates) {
  if (c.layout != EP_LAYOUT_KIND_FLAT) return p::lane();
  while (mates & (mates - 1)) mates &= mates - 1;
  return p::ffs(mates) - 1;
}

/* Whole warp: the row at `from`, or where that is 0 what a sum does not notice: -0 (combine.h). */
template <class C> DEV void ep_slot_move(const C c, uint8_t *to, uint64_t from) {
  epPart none;
#pragma unroll
  for (uint32_t u = 0; u < EP_WIDE; u++)
    none.v[u].x = none.v[u].y = none.v[u].z = none.v[u].w = c.dtype == EP_DTYPE_F32 ? 0x80000000u : 0x80008000u;
  for (uint32_t at = 16 * p::lane(); at - 16 * p::lane() < c.rowBytes; at += EP_PART)
    ep_part_store(to, at, c.rowBytes, from ? ep_part_load((const uint8_t *)from, at, c.rowBytes) : none);
}

/* Whole warp: this rank's slots of row j of source s to the rank that stands for it. */
template <class C>
DEV void ep_slots_push(const C c, const epHybridCombineArgs &a, const epPlace &w, uint32_t s, uint32_t j,
                       uint32_t gen) {
  const epCombineArgs &b = a.plain;
  const uint32_t *meta = ep_record_meta(c, b.group, b.recordLayout, b.record, s, j);
  uint32_t l = p::lane(), o = s / w.ups, u = s % w.ups, t = EP_META_TOKEN(p::ldg<uint32_t>(meta));
  uint32_t entry = l < c.topk ? p::ldg<uint32_t>(meta + 1 + l) : EP_NONE, row = ep_own_slot(c, b, s, j, entry);
  uint32_t mates = p::ballot(p::FULL, entry != EP_NONE), top = entry != EP_NONE ? ep_slot_top(c, mates) : l;
  uint32_t rows = p::ballot(p::FULL, entry != EP_NONE && top == l);
  uint64_t address = row != EP_NONE ? ep_own_address(c, b, row) : 0;
  for (uint32_t m = rows; m; m &= m - 1) {
    uint32_t k = p::ffs(m) - 1;
    ep_slot_move(c, ep_slot_row(c, b.group, w, u, w.up, o, k, t), ep_lane_address(address, k));
  }
  if (c.weights && entry != EP_NONE)
    p::stg<uint32_t>(ep_slot_row(c, b.group, w, u, w.up, o, top, t) + c.rowBytes + 4 * l, ep_own_weight(c, b, row));
  p::sync_warp();
  if (rows >> l & 1) p::st_release_sys(ep_slot_flag(c, b.group, a.hybrid, w, u, w.up, o, l, t), gen);
}

/* Whole warp: the slots that this domain holds of token t of my rail's rank in domain o; arguments as of ep_combine_domain. False:
 * gave up. */
template <class C>
DEV bool ep_slots_domain(const C c, const epHybridCombineArgs &a, const epPlace &w, uint32_t o, uint32_t t, bool here,
                         uint32_t owner, uint32_t row, uint32_t entry, uint32_t gen, epSlots *slots) {
  const epCombineArgs &b = a.plain;
  uint32_t l = p::lane(), mates = p::match_any(p::FULL, here ? owner : ep_lone_key());
  bool mine = here && owner == w.rank, ok = true;
  slots->top = here ? ep_slot_top(c, mates) : l;
  if (here && slots->top == l && !mine && c.bug != EP_BUG_SKIP_WAIT)
    ok = ep_await_flag(c, b.group, ep_slot_flag(c, b.group, a.hybrid, w, w.up, owner % w.ups, o, l, t), gen,
                       EP_PHASE_COMBINE_ROWS, owner);
  bool there = here;
  if (!ep_parts_stay(c, b.group, ok, mates, &there)) return false;
  p::sync_warp();
  uint32_t slot = mine ? ep_own_slot(c, b, o * w.ups + w.up, row, entry) : EP_NONE;
  const uint8_t *staged = there && !mine ? ep_slot_row(c, b.group, w, w.up, owner % w.ups, o, slots->top, t) : nullptr;
  slots->rows = p::ballot(p::FULL, here && slots->top == l);
  slots->address = slot != EP_NONE ? ep_own_address(c, b, slot) : (uint64_t)staged;
  slots->weight = 0;
  if (c.weights)
    slots->weight = mine ? ep_own_weight(c, b, slot) : there ? p::ldg<uint32_t>(staged + c.rowBytes + 4 * l) : 0;
  return true;
}

/* Whole warp: those slots, home to domain o. */
template <class C>
DEV void ep_slots_forward(const C c, const epHybridCombineArgs &a, const epPlace &w, const epChannel &ch, uint32_t o,
                          uint32_t t, bool here, const epSlots &slots) {
  const epGroupArgs &g = a.plain.group;
  const epHybridLayout &h = a.hybrid.layout;
  uint8_t *window = ep_window(g, w.rank);
  for (uint32_t m = slots.rows; m; m &= m - 1) {
    uint32_t k = p::ffs(m) - 1;
    ep_slot_move(c, window + ep_rail_slot(c, g, h.send, w.domain, o, t, k), ep_lane_address(slots.address, k));
  }
  if (c.weights && here)
    p::stg<uint32_t>(window + ep_rail_slot(c, g, h.send, w.domain, o, t, slots.top) + c.rowBytes + 4 * p::lane(),
                     slots.weight);
  p::sync_warp();
  for (uint32_t m = slots.rows; m; m &= m - 1) {
    uint32_t k = p::ffs(m) - 1;
    ep_channel_put(c, a.hybrid, ch, o, ep_rail_slot(c, g, h.rail, o, w.domain, t, k),
                   ep_rail_slot(c, g, h.send, w.domain, o, t, k), c.rowBytes + (c.weights ? epWeightBytes(c.topk) : 0));
  }
}

/* Whole warp: token t of this rank from all its slots. `slots`: those of its own domain; `far`: the lane's k is with `owner` of
 * another, in domain o, whose rows have come. */
template <class C>
DEV void ep_slots_sum(const C c, const epHybridCombineArgs &a, const epPlace &w, uint32_t t, epSlots slots, bool far,
                      uint32_t owner, uint32_t o) {
  const epCombineArgs &b = a.plain;
  uint32_t l = p::lane(), mates = p::match_any(p::FULL, far ? owner : ep_lone_key()),
           top = far ? ep_slot_top(c, mates) : l;
  if (far)
    slots.address =
        (uint64_t)(ep_window(b.group, w.rank) + ep_rail_slot(c, b.group, a.hybrid.layout.rail, w.domain, o, t, top));
  uint32_t rows = (slots.rows | p::ballot(p::FULL, far && top == l)) & p::ballot(p::FULL, slots.address != 0);
  ep_make_row(c, b.outTokens + (uint64_t)t * c.rowBytes, [&](uint32_t v) {
    epSums total = ep_sums_start(c, b, t, v);
    for (uint32_t m = rows; m; m &= m - 1) ep_sums_add(c, total, ep_lane_part(c, slots.address, p::ffs(m) - 1, v));
    return ep_sums_round(c, total);
  });
  if (!c.weights || l >= c.topk) return;
  if (far) slots.weight = p::ldg<uint32_t>((const uint8_t *)slots.address + c.rowBytes + 4 * l);
  p::stg<float>(b.outWeights + (uint64_t)t * c.topk + l, p::as_float(slots.weight));
}

#endif
