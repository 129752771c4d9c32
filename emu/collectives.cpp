// Warp collectives, block barriers and mbarriers: where threads meet, and which meetings order memory. shfl, ballot and
// match order nothing; sync_warp, barriers and mbarriers join what the participants know.
#include <algorithm>

#include "engine.h"

namespace emu {

static const char *const names[] = {"shfl", "ballot", "match_any", "sync_warp"};

void Engine::absorbOwn(View &v, const Fiber *f) {
  v.raise(SEEN, f->tid, f->epoch);
  v.raise(SHARED_FENCED, f->tid, f->sharedFenced);
  v.raise(GLOBAL_FENCED, f->tid, f->globalFenced);
  if (f->bulkSlot) {
    v.raise(SEEN, f->bulkSlot, f->bulkReadDone);
    v.raise(SEEN, f->bulkSlot + 1, f->bulkWriteDone);
  }
}

// All of `fs` now know what each of them knew.
void Engine::join(Fiber **fs, u32 n) {
  ViewRef v(new View);
  v->floor = v->top = fs[0]->block->base;
  for (auto &c : v->clock) {
    c.reserve(fs[0]->block->slots);
    c.resize(fs[0]->block->threads, v->floor);
  }
  struct Seen {
    View *view;
    bool shared, global;
  } seen[16];
  u32 views = 0;
  KnownRef known = fs[0]->known, fencedKnown = fs[0]->fencedKnown;
  for (u32 i = 0; i < n; i++) {
    Fiber *f = fs[i];
    bool found = false;
    for (u32 k = 0; k < views && !found; k++)
      found = seen[k].view == f->view.get() && seen[k].shared == f->viewSharedFenced &&
              seen[k].global == f->viewGlobalFenced;
    if (!found) {
      v->absorb(*f->view, f->viewSharedFenced, f->viewGlobalFenced);
      if (views < 16) seen[views++] = {f->view.get(), f->viewSharedFenced, f->viewGlobalFenced};
    }
    absorbOwn(*v, f);
    if (!(f->known == known)) known = joiner.join(known, f->known);
    if (!(f->fencedKnown == fencedKnown)) fencedKnown = joiner.join(fencedKnown, f->fencedKnown);
  }
  for (u32 i = 0; i < n; i++) {
    fs[i]->view = v;
    fs[i]->viewSharedFenced = fs[i]->viewGlobalFenced = false;
    if (!(fs[i]->known == known)) fs[i]->known = known;
    if (!(fs[i]->fencedKnown == fencedKnown)) fs[i]->fencedKnown = fencedKnown;
    fs[i]->epoch++;
  }
}

void Engine::warpCollective(Collective kind, u32 mask, u32 value, u32 source, u32 *result) {
  Fiber *f = cur;
  Warp *w = f->warp;
  w->value[f->lane] = value, w->source[f->lane] = source;
  f->collective = kind, f->mask = mask;
  u32 bit = 1u << f->lane;
  const char *name = names[int(kind)];
  if (!(mask & bit)) report(Fault::Collective, 1, "%s: %s, calling lane not in mask %08x", me(0).c_str(), name, mask);
  OpenCollective *c = nullptr;
  for (OpenCollective &o : w->open) {
    if (o.mask == mask)
      c = &o;
    else if (o.mask & mask & (o.arrived | bit))
      report(Fault::Collective, 2, "%s: %s mask %08x overlaps an open %s with mask %08x", me(0).c_str(), name, mask,
             names[int(o.kind)], o.mask);
  }
  if (!c) {
    w->open.push_back({mask, 0, kind});
    c = &w->open.back();
  }
  if (c->kind != kind)
    report(Fault::Collective, 3, "%s: lanes of mask %08x disagree: %s and %s", me(0).c_str(), mask, name,
           names[int(c->kind)]);
  c->arrived |= bit;
  if (c->arrived != mask) {
    block(State::Collective);
    if (result) *result = w->result[f->lane];
    return;
  }
  Fiber *part[32];
  u32 n = 0, votes = 0;
  for (u32 m = mask; m; m &= m - 1) {
    u32 lane = u32(__builtin_ctz(m));
    part[n++] = w->fiber[lane];
    if (w->value[lane]) votes |= 1u << lane;
  }
  for (u32 m = mask; m; m &= m - 1) {
    u32 lane = u32(__builtin_ctz(m));
    if (kind == Collective::Ballot)
      w->result[lane] = votes;
    else if (kind == Collective::Shfl) {
      bool in = mask >> w->source[lane] & 1;
      if (!in)
        report(Fault::Collective, 4, "%s: shfl reads lane %u outside mask %08x", me(0).c_str(), w->source[lane], mask);
      w->result[lane] = in ? w->value[w->source[lane]] : 0xDEADBEEF;
    } else if (kind == Collective::Match) {
      w->result[lane] = 0;
      for (u32 o = mask; o; o &= o - 1)
        if (w->value[__builtin_ctz(o)] == w->value[lane]) w->result[lane] |= o & (0u - o);
    }
  }
  if (kind == Collective::SyncWarp) join(part, n);
  *c = w->open.back();
  w->open.pop_back();
  for (u32 i = 0; i < n; i++)
    if (part[i] != f) wake(part[i]);
  if (result) *result = w->result[f->lane];
}

void Engine::barrier(u32 id, u32 count, bool wait) {
  Fiber *f = cur;
  f->polled.clear();
  if (id >= f->block->barriers.size() || (count & 31 && id)) {
    report(Fault::Collective, 5, "%s: barrier %u with %u threads: no such barrier or not whole warps", me(0).c_str(),
           id, count);
    return;
  }
  NamedBarrier &x = f->block->barriers[id];
  if (x.arrived && x.expected != count && id)
    report(Fault::Collective, 6, "%s: barrier %u expects %u threads, this one says %u", me(0).c_str(), id, x.expected,
           count);
  x.expected = count;
  x.arrived++;
  x.in.push_back(f);
  if (wait) x.waiters.push_back(f);
  if (x.arrived >= count) {
    barrierDone(x, f);
  } else if (wait) {
    f->waitOn = id;
    block(State::Barrier);
  }
}

void Engine::barrierDone(NamedBarrier &x, Fiber *self) {
  join(x.in.data(), u32(x.in.size()));
  for (Fiber *g : x.waiters)
    if (g != self) wake(g);
  x.in.clear();
  x.waiters.clear();
  x.arrived = 0;
}

// ---- mbarriers ------------------------------------------------------------------------------------------------------

void Engine::mbarInit(u32 addr, u32 count) {
  Fiber *f = cur;
  if (addr % 8 || addr + 8 > f->block->shared.size()) {
    report(Fault::Bounds, 20, "%s: mbarrier at shared+0x%x", me(0).c_str(), addr);
    return;
  }
  std::vector<Mbarrier> &v = f->block->mbarriers;
  for (size_t i = 0; i < v.size(); i++)
    if (v[i].addr == addr) v[i].addr = ~0u;
  Mbarrier m{};
  m.addr = addr, m.count = m.pending = count;
  m.slot = newSlot(f->block, ~0u);
  m.initThread = f->tid, m.initEpoch = f->epoch;
  v.push_back(m);
}

void Engine::mbarFenceInit() {
  for (Mbarrier &m : cur->block->mbarriers)
    if (m.initThread == cur->tid) m.initFenced = true;
}

Mbarrier *Engine::mbarrier(Block *b, u32 addr) {
  for (Mbarrier &m : b->mbarriers)
    if (m.addr == addr) {
      if (cur && cur->block == b && !slotSeen(cur, m.initThread, m.initEpoch))
        report(Fault::SharedRace, 1ull << 40 | addr,
               "%s: mbarrier at shared+0x%x used without synchronising with its init", me(0).c_str(), addr);
      return &m;
    }
  report(Fault::Misuse, 10, "%s: mbarrier at shared+0x%x is not initialised", me(0).c_str(), addr);
  return nullptr;
}

void Engine::mbarCheck(Block *b, Mbarrier *m) {
  if (m->pending || m->bytes) return;
  m->phase++;
  m->pending = m->count;
  m->finished = m->building;
  m->finishedKnown = m->buildingKnown;
  m->finishedFenced = m->buildingFenced;
  m->building = ViewRef(new View);
  m->building->floor = m->building->top = b->base;
  if (m->finished) m->building->absorb(*m->finished, false, false);
  for (Fiber *f : m->waiters) wake(f);
  m->waiters.clear();
}

void Engine::mbarArrive(u32 addr, u32 bytes) {
  Fiber *f = cur;
  f->polled.clear();
  Mbarrier *m = mbarrier(f->block, addr);
  if (!m) return;
  m->bytes += int(bytes);
  if (!m->building) {
    m->building = ViewRef(new View);
    m->building->floor = m->building->top = f->block->base;
  }
  m->building->absorb(*f->view, f->viewSharedFenced, f->viewGlobalFenced);
  absorbOwn(*m->building, f);
  m->buildingKnown = joiner.join(m->buildingKnown, f->known);
  m->buildingFenced = joiner.join(m->buildingFenced, f->fencedKnown);
  f->epoch++;
  if (m->pending)
    m->pending--;
  else
    report(Fault::Collective, 7, "%s: more arrivals than the mbarrier at shared+0x%x expects", me(0).c_str(), addr);
  mbarCheck(f->block, m);
}

void Engine::mbarWait(u32 addr, u32 parity) {
  Fiber *f = cur;
  f->polled.clear();
  Mbarrier *m = mbarrier(f->block, addr);
  while (m && (m->phase & 1) == parity) {
    m->waiters.push_back(f);
    f->waitOn = addr;
    block(State::Mbarrier);
    m = mbarrier(f->block, addr);
  }
  if (!m || !m->finished) return;
  f->known = joiner.join(f->known, m->finishedKnown);
  f->fencedKnown = joiner.join(f->fencedKnown, m->finishedFenced);
  if (!(memo.in == f->view && memo.finished == m->finished && memo.sharedFenced == f->viewSharedFenced &&
        memo.globalFenced == f->viewGlobalFenced)) {
    ViewRef v(new View);
    v->floor = v->top = f->block->base;
    v->absorb(*f->view, f->viewSharedFenced, f->viewGlobalFenced);
    v->absorb(*m->finished, false, false);
    memo.in = f->view, memo.finished = m->finished, memo.result = v;
    memo.sharedFenced = f->viewSharedFenced, memo.globalFenced = f->viewGlobalFenced;
  }
  f->view = memo.result;
  f->viewSharedFenced = f->viewGlobalFenced = false;
}

} // namespace emu
