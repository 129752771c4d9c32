// Vector clocks: raising, joining and comparing them. Everything shared is immutable, so joins that add nothing return
// one of their inputs instead of a copy.
#include "order.h"

#include <algorithm>

namespace emu {

void View::raise(Clock k, u32 slot, u32 epoch) {
  if (slot >= clock[k].size()) clock[k].resize(slot + 1, floor);
  clock[k][slot] = std::max(clock[k][slot], epoch);
  top = std::max(top, clock[k][slot]);
}

static void raiseAll(std::vector<u32> &to, u32 toFloor, const std::vector<u32> &from, u32 fromFloor) {
  if (to.size() < from.size()) to.resize(from.size(), toFloor);
  for (size_t i = 0; i < from.size(); i++) to[i] = std::max(to[i], from[i]);
  for (size_t i = from.size(); i < to.size(); i++) to[i] = std::max(to[i], fromFloor);
}

void View::absorb(const View &o, bool sharedFenced, bool globalFenced) {
  raiseAll(clock[SEEN], floor, o.clock[SEEN], o.floor);
  raiseAll(clock[SHARED_FENCED], floor, o.clock[sharedFenced ? SEEN : SHARED_FENCED], o.floor);
  raiseAll(clock[GLOBAL_FENCED], floor, o.clock[globalFenced ? SEEN : GLOBAL_FENCED], o.floor);
  floor = std::max(floor, o.floor);
  top = std::max(top, o.top);
}

bool View::covers(const View &o) const {
  if (floor >= o.top) return true;
  if (floor < o.floor || top < o.top) return false;
  for (Clock k : {SEEN, GLOBAL_FENCED}) {
    size_t mine = clock[k].size(), its = o.clock[k].size(), n = std::min(mine, its);
    const u32 *a = clock[k].data(), *b = o.clock[k].data();
    u32 missing = 0; // no early exit, so that the loops become vector code
    for (size_t i = 0; i < n; i++) missing |= u32(a[i] < b[i]);
    for (size_t i = n; i < mine; i++) missing |= u32(a[i] < o.floor);
    for (size_t i = n; i < its; i++) missing |= u32(floor < b[i]);
    if (missing) return false;
  }
  return true;
}

ViewRef floorView(u32 floor) {
  ViewRef v(new View);
  v->floor = v->top = floor;
  return v;
}

static ViewRef joinViews(const ViewRef &a, const ViewRef &b) {
  if (!b || a == b) return a;
  if (!a) return b;
  if (a->covers(*b)) return a;
  if (b->covers(*a)) return b;
  ViewRef v(new View);
  v->floor = a->floor, v->top = a->top;
  for (int k = 0; k < CLOCKS; k++) v->clock[k] = a->clock[k];
  v->absorb(*b, false, false);
  return v;
}

KnownRef knownWith(const KnownRef &base, u32 identity, const ViewRef &view) {
  KnownRef k(new Known);
  if (base) k->of = base->of;
  if (k->of.size() <= identity) k->of.resize(identity + 1);
  k->of[identity] = joinViews(k->of[identity], view);
  return k;
}

static KnownRef joinFresh(const KnownRef &a, const KnownRef &b) {
  size_t n = std::max(a->of.size(), b->of.size());
  bool isA = true, isB = true;
  static std::vector<u8> from; // 1: a covers b, 2: b covers a, 3: the same, 0: to be joined
  from.assign(n, 3);
  for (size_t i = 0; i < n; i++) {
    const View *x = i < a->of.size() ? a->of[i].get() : nullptr, *y = i < b->of.size() ? b->of[i].get() : nullptr;
    if (x == y) continue;
    from[i] = !y || (x && x->covers(*y)) ? 1 : !x || y->covers(*x) ? 2 : 0;
    isA = isA && from[i] == 1;
    isB = isB && from[i] == 2;
  }
  if (isA) return a;
  if (isB) return b;
  KnownRef k(new Known);
  k->of.resize(n);
  for (size_t i = 0; i < n; i++)
    k->of[i] = from[i] == 2 ? b->of[i]
               : from[i]    ? (i < a->of.size() ? a->of[i] : ViewRef())
                            : joinViews(a->of[i], b->of[i]);
  return k;
}

KnownRef KnownJoiner::join(const KnownRef &a, const KnownRef &b) {
  if (!b || a == b) return a;
  if (!a) return b;
  size_t h = ((reinterpret_cast<uintptr_t>(a.get()) >> 4) * 31 + (reinterpret_cast<uintptr_t>(b.get()) >> 4)) % MEMOS;
  Memo &m = memo[h];
  if (!(m.a == a && m.b == b)) m = {a, b, joinFresh(a, b)};
  return m.result;
}

} // namespace emu
