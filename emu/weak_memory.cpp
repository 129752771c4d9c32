// Global memory as a GPU may show it: stores become visible late and out of order unless released, racing loads may see
// the value before, and every pair of accesses that nothing orders is reported. Happens-before is exact for the
// schedule that runs; it is computed when an access is issued, independent of when its bytes move.
#include <algorithm>
#include <cstring>

#include "stream.h"

namespace emu {

// ---- happens-before -------------------------------------------------------------------------------------------------

bool Engine::ordered(const Fiber *f, Actor a, u32 epoch) const {
  if (!a) return true;
  if (identityOf(a) == f->block->identity) return slotSeen(f, slotOf(a), epoch);
  return f->known && f->known->at(SEEN, a) >= epoch;
}

// Ordered, and through a generic -> async fence since.
bool Engine::fenced(const Fiber *f, Actor a, u32 epoch) const {
  if (!a) return true;
  u32 slot = slotOf(a);
  if (identityOf(a) == f->block->identity) {
    if (slot >= f->block->threads) return slotSeen(f, slot, epoch);
    if (slot == f->tid) return epoch <= f->globalFenced;
    return f->view->at(f->viewGlobalFenced ? SEEN : GLOBAL_FENCED, slot) >= epoch;
  }
  return (f->fencedKnown && f->fencedKnown->at(SEEN, a) >= epoch) ||
         (f->known && f->known->at(GLOBAL_FENCED, a) >= epoch);
}

ReleaseRef Engine::makeRelease(bool system) {
  Fiber *f = cur;
  ViewRef v(new View);
  v->floor = v->top = f->block->base;
  v->absorb(*f->view, f->viewSharedFenced, f->viewGlobalFenced);
  absorbOwn(*v, f);
  ReleaseRef r(new Release);
  r->seen = knownWith(f->known, f->block->identity, v);
  r->fenced = f->fencedKnown;
  r->rank = f->block->rank;
  r->system = system;
  f->epoch++;
  return r;
}

void Engine::acquire(const ReleaseRef &r, bool system) {
  Fiber *f = cur;
  if (!r || !((r->system && system) || r->rank == f->block->rank)) return; // scopes must include each other
  f->known = joiner.join(f->known, r->seen);
  f->fencedKnown = joiner.join(f->fencedKnown, r->fenced);
}

void Engine::fence() {
  Fiber *f = cur;
  drain();
  f->known = joiner.join(f->known, f->relaxedSeen);
  f->fencedKnown = joiner.join(f->fencedKnown, f->relaxedSeenFenced);
  f->relaxedSeen = f->relaxedSeenFenced = KnownRef();
  f->fenceRelease = makeRelease(true);
}

void Engine::fenceProxy(bool global) {
  Fiber *f = cur;
  f->sharedFenced = f->epoch;
  f->viewSharedFenced = true;
  if (global) {
    f->globalFenced = f->epoch;
    f->viewGlobalFenced = true;
    f->fencedKnown = joiner.join(f->fencedKnown, f->known);
  }
  f->epoch++;
}

static const u32 FAULT_STORM = 300000;

// ---- checks ---------------------------------------------------------------------------------------------------------

Region *Engine::regionFor(const void *addr, size_t bytes, u32 align, const char *what, Place place) {
  Region *r = memory.regionAt(addr);
  if (cur) cur->touchedGlobal = true;
  if (cur && reports.count() > FAULT_STORM) { // a loop over garbage: no use in going on
    hopeless = true;
    yield();
  }
  if (!r || !r->holds(addr, bytes)) {
    report(Fault::Bounds, place, "%s: %s of %zu bytes at %s%s", me(place).c_str(), what, bytes,
           memory.where(addr).c_str(), r ? ", past the end of the region" : "");
    return nullptr;
  }
  if (r->freed) {
    report(Fault::Freed, place, "%s: %s of %zu bytes at %s", me(place).c_str(), what, bytes,
           memory.where(addr).c_str());
    return nullptr;
  }
  if (reinterpret_cast<uintptr_t>(addr) % align) {
    report(Fault::Bounds, 0x10000u | place, "%s: %s of %zu bytes at %s is not aligned to %u", me(place).c_str(), what,
           bytes, memory.where(addr).c_str(), align);
    return nullptr;
  }
  return r;
}

// One line that names both accesses, and what is known of why nothing orders them.
void Engine::reportRace(Region *, const u8 *addr, Word *w, bool isWrite, bool againstReader, Place place) {
  Place other = againstReader ? w->readPlace : w->writePlace;
  Actor actor = againstReader ? w->reader : w->writer;
  u32 epoch = againstReader ? w->readEpoch : w->writeEpoch;
  if (!weak || !note(Fault::Race, u64(place) << 20 | u64(other) << 4 | (isWrite ? 2 : 0) | (againstReader ? 1 : 0)))
    return;
  std::string line = me(place) + (isWrite ? " writes " : " reads ") + memory.where(addr) +
                     (againstReader ? ", which may still be read by " : ", written by ") + describe(actor, epoch) +
                     placeText(other) + "; nothing orders the two";
  const Identity &id = identities[identityOf(actor)];
  bool bulkStore = !id.stream && !id.nic && slotOf(actor) >= id.threads;
  if (cur) {
    bool sameBlock = identityOf(actor) == cur->block->identity;
    u32 seen = sameBlock ? cur->view->at(SEEN, slotOf(actor)) : cur->known ? cur->known->at(SEEN, actor) : 0;
    const u8 *flag = nullptr;
    for (auto &x : cur->block->relaxedFlags)
      if (x.first == identityOf(actor)) flag = x.second;
    if (id.nic && !againstReader)
      line += ": no strong signal after the put, on its context and peer, was acquired";
    else if (id.nic)
      line += ": no flush of the put's context before this write";
    else if (againstReader)
      line += ": no credit or barrier from the reader, or the reader's flag was raised before this write";
    else if (flag)
      line += ": the flag at " + memory.where(flag) + " was stored without release";
    else if (bulkStore && seen < epoch)
      line += ": the bulk store was not complete (wait_group without .read) before the flag's release";
    else if (seen > id.base)
      line += ": what was acquired was released before this write";
    else
      line += ": no release and acquire, or barrier, between them";
  }
  reports.write(Fault::Race, line);
}

// True when a racing value may be returned. `epoch`: when it was loaded, 0: now.
bool Engine::checkRead(Region *r, const u8 *addr, u32 bytes, bool strong, bool system, Place place, u32 epoch) {
  Fiber *f = cur;
  bool race = false;
  LastStamp writers;
  for (u32 i = 0; i < bytes; i += 4) {
    Word *w = Memory::wordAt(r, addr + i);
    if (!writers.check(w->writer, w->writeEpoch, [&] { return ordered(f, w->writer, w->writeEpoch); })) {
      bool bothStrong = strong && (w->flags & W_STRONG) &&
                        ((system && (w->flags & W_SYSTEM)) || identities[identityOf(w->writer)].rank == f->block->rank);
      if (!bothStrong) {
        reportRace(r, addr + i, w, false, false, place);
        race = true;
      }
    } else if (w->pending)
      flushWord(w, addr + i);
    if (!race && !r->bornValid && !(w->flags & W_VALID) && weak)
      report(Fault::NeverWritten, place, "%s reads %s, which nothing has written", me(place).c_str(),
             memory.where(addr + i).c_str());
    if (!strong) {
      w->reader = actorOf(f->block->identity, f->tid);
      w->readEpoch = epoch ? epoch : f->epoch;
      w->readPlace = place;
    }
  }
  return race;
}

void Engine::checkWrite(Region *r, u8 *addr, const void *data, u32 bytes, Actor actor, u32 epoch, u8 strength,
                        Place place) {
  Fiber *f = cur;
  bool bulk = slotOf(actor) >= f->block->threads;
  LastStamp writers, readers;
  for (u32 i = 0; i < bytes; i += 4) {
    Word *w = Memory::wordAt(r, addr + i);
    bool unordered = !writers.check(w->writer, w->writeEpoch, [&] { return ordered(f, w->writer, w->writeEpoch); });
    if (unordered && (w->flags & W_STRONG) && (strength & W_STRONG) &&
        (((w->flags & W_SYSTEM) && (strength & W_SYSTEM)) || identities[identityOf(w->writer)].rank == f->block->rank))
      unordered = false; // two strong stores: the flag's own business
    if (w->pending) flushWord(w, addr + i);
    bool unread = !readers.check(w->reader, w->readEpoch, [&] { return ordered(f, w->reader, w->readEpoch); });
    if ((unordered || unread) && !(data && !memcmp(addr + i, static_cast<const u8 *>(data) + i, 4) && !bulk))
      reportRace(r, addr + i, w, true, unread && !unordered, place); // the same value again is no race
    w->writer = actor;
    w->writeEpoch = epoch;
    w->writePlace = place;
    w->reader = 0;
    w->flags = u8((w->flags & W_VALID) | strength);
  }
}

// ---- stores ---------------------------------------------------------------------------------------------------------

PendingStore *Engine::newStore() {
  PendingStore *p;
  if (storePool.empty())
    p = new PendingStore();
  else {
    p = storePool.back();
    storePool.pop_back();
  }
  p->done = false;
  p->copy = nullptr;
  p->data = p->inlineData;
  return p;
}

void Engine::addPending(Fiber *f, PendingStore *p) {
  f->pending.push_back(p);
  f->block->hasPending[f->tid >> 6] |= 1ull << (f->tid & 63);
  if (Region *r = memory.regionAt(p->addr); r->shadow)
    for (u32 i = 0; i < p->bytes; i += 4) Memory::wordAt(r, p->addr + i)->pending++;
}

// Bytes reach memory; pollers of changed words wake.
void Engine::writeBytes(u8 *addr, const u8 *data, u32 bytes, const ReleaseRef &release, Actor actor) {
  Region *r = memory.regionAt(addr);
  lastChange = now;
  progress++;
  idleRounds = clockJumps = 0;
  fruitlessJumps = 0;
  if (!r || r->freed) {
    report(Fault::Freed, 1, "a store in flight reaches %s after it was freed", memory.where(addr).c_str());
    return;
  }
  if (!r->shadow) { // the host reads these without a lock
    if (bytes == 4) {
      u32 v;
      memcpy(&v, data, 4);
      __atomic_store_n(reinterpret_cast<u32 *>(addr), v, __ATOMIC_RELEASE);
    } else if (bytes == 8) {
      u64 v;
      memcpy(&v, data, 8);
      __atomic_store_n(reinterpret_cast<u64 *>(addr), v, __ATOMIC_RELEASE);
    } else
      memcpy(addr, data, bytes);
    wakeChangedMapped();
    return;
  }
  for (u32 i = 0; i < bytes; i += 4) {
    Word *w = Memory::wordAt(r, addr + i);
    memcpy(&w->old, addr + i, 4);
    memcpy(addr + i, data + i, 4);
    w->flags |= W_VALID;
    if (w->sync) {
      SyncWord &s = memory.syncOf(w);
      s.change = ++changes;
      s.release = release;
      s.unreleased = release ? 0 : actor;
      while (!s.waiting.empty()) {
        Fiber *f = s.waiting.back();
        unpark(f);
        wake(f);
      }
    }
  }
}

void Engine::commit(PendingStore *p) {
  if (p->done) return;
  if (!p->copy) {
    auto &v = p->owner->pending;
    for (size_t i = 0; i < v.size() && v[i] != p; i++) // program order of one address
      if (v[i]->addr < p->addr + p->bytes && p->addr < v[i]->addr + v[i]->bytes) {
        commit(v[i]);
        i = size_t(-1);
      }
    v.erase(std::find(v.begin(), v.end(), p));
    if (v.empty()) p->owner->block->hasPending[p->owner->tid >> 6] &= ~(1ull << (p->owner->tid & 63));
    if (Region *r = memory.regionAt(p->addr); r && r->shadow)
      for (u32 i = 0; i < p->bytes; i += 4) Memory::wordAt(r, p->addr + i)->pending--;
  }
  p->done = true;
  if (Region *r = memory.regionAt(p->addr); !p->copy && r && r->shadow)
    if (Word *w = Memory::wordAt(r, p->addr); w->sync && (w->flags & W_SYSTEM))
      p->owner->relaxedSeen = joiner.join(p->owner->relaxedSeen, memory.sync(w->sync).looked);
  writeBytes(p->addr, p->data, p->bytes, p->release, p->copy ? 0 : actorOf(p->owner->block->identity, p->owner->tid));
}

// Makes the pending stores to one word visible: its own thread, or one ordered after it, is about to read or write it.
void Engine::flushWord(Word *w, const u8 *addr) {
  if (slotOf(w->writer) >= identities[identityOf(w->writer)].threads) return;
  Block *b = identities[identityOf(w->writer)].live;
  if (!b) return;
  Fiber &f = b->fibers[slotOf(w->writer)];
  for (size_t i = 0; i < f.pending.size(); i++) {
    PendingStore *p = f.pending[i];
    if (p->addr < addr + 4 && addr < p->addr + p->bytes) {
      commit(p);
      i = size_t(-1);
    }
  }
}

// Before a release: all that happened before it, in any thread of the block, becomes visible.
void Engine::drain() {
  Fiber *f = cur;
  Block *b = f->block;
  for (size_t k = 0; k < b->hasPending.size(); k++)
    for (u64 m = b->hasPending[k]; m; m &= m - 1) {
      Fiber &g = b->fibers[k * 64 + size_t(__builtin_ctzll(m))];
      for (size_t i = 0; i < g.pending.size(); i++)
        if (&g == f || g.pending[i]->epoch <= f->view->at(SEEN, g.tid)) {
          commit(g.pending[i]);
          i = size_t(-1);
        }
    }
}

void Engine::store(void *addr, const void *data, u32 bytes, Order order, Place place) {
  Fiber *f = cur;
  f->polled.clear();
  Region *r = regionFor(addr, bytes, bytes, "store", place);
  if (!r) return;
  ReleaseRef release;
  u32 epoch = f->epoch;
  if (order == Order::Release) {
    drain();
    release = makeRelease(true);
  } else if (order == Order::Relaxed)
    release = f->fenceRelease;
  if (r->shadow)
    checkWrite(r, static_cast<u8 *>(addr), data, bytes, actorOf(f->block->identity, f->tid), epoch,
               order == Order::Weak ? u8(0) : u8(W_STRONG | W_SYSTEM), place);
  PendingStore *p = newStore();
  p->addr = static_cast<u8 *>(addr);
  p->bytes = bytes;
  memcpy(p->inlineData, data, bytes);
  p->owner = f;
  p->epoch = epoch;
  p->release = release;
  if (order != Order::Weak && r->shadow) memory.syncOf(Memory::wordAt(r, addr));
  addPending(f, p);
  if (!weak) commit(p);
  at(later(), p, nullptr, nullptr);
  maybeYield(8);
}

// ---- loads ----------------------------------------------------------------------------------------------------------

void Engine::load(const void *addr, void *out, u32 bytes, Place place) {
  maybeYield(64); // a loop of weak loads must not stop the world
  Region *r = regionFor(addr, bytes, bytes, "load", place);
  if (!r) {
    memset(out, 0xEE, bytes);
    return;
  }
  const u8 *a = static_cast<const u8 *>(addr);
  bool race = r->shadow && checkRead(r, a, bytes, false, false, place);
  memcpy(out, addr, bytes);
  if (race && weak && rng.oneIn(2))
    for (u32 i = 0; i < bytes; i += 4) {
      Word *w = Memory::wordAt(r, a + i);
      if (!ordered(cur, w->writer, w->writeEpoch) && (w->flags & W_VALID))
        memcpy(static_cast<u8 *>(out) + i, &w->old, 4);
    }
}

void Engine::loadAny(const void *addr, void *out, u32 bytes, Place place) {
  maybeYield(64);
  cur->anyEpoch = cur->epoch;
  if (regionFor(addr, bytes, bytes, "load", place))
    memcpy(out, addr, bytes);
  else
    memset(out, 0xEE, bytes);
}

// What came before a look is judged as of then: no other thread runs in between.
void Engine::confirm(const void *addr, u32 bytes, Place place) {
  Fiber *f = cur;
  u32 looked = f->anyEpoch <= f->lookEpoch ? f->lookEpoch : 0;
  if (!looked) maybeYield(64);
  Region *r = regionFor(addr, bytes, bytes, "load", place);
  if (r && r->shadow) checkRead(r, static_cast<const u8 *>(addr), bytes, false, false, place, looked);
}

static u64 readWord(const void *addr, u32 bytes) {
  if (bytes == 8) return __atomic_load_n(static_cast<const u64 *>(addr), __ATOMIC_ACQUIRE);
  return __atomic_load_n(static_cast<const u32 *>(addr), __ATOMIC_ACQUIRE);
}

// A strong load. The second look at an unchanged set of words parks the thread until one of them changes.
u64 Engine::poll(const void *addr, u32 bytes, bool acquiring, bool system, Place place) {
  Fiber *f = cur;
  maybeYield(8);
  Region *r = regionFor(addr, bytes, bytes, "strong load", place);
  if (!r) return 0;
  const u8 *a = static_cast<const u8 *>(addr);
  Word *w = r->shadow ? Memory::wordAt(r, a) : nullptr;
  u32 sync = 0;
  if (w) {
    memory.syncOf(w);
    sync = w->sync;
  }
  auto present = [&](const PolledWord &p) { return p.sync ? memory.sync(p.sync).change : readWord(p.addr, 4); };
  bool known = false, changed = false;
  size_t own = 0;
  for (size_t i = 0; i < f->polled.size(); i++) {
    PolledWord &p = f->polled[i];
    u64 v = present(p);
    if (v != p.seen || (p.addr == a && v != p.read))
      changed = true; // news of one word are news until it is read itself
    p.seen = v;
    if (p.addr == a) known = true, own = i;
  }
  if (!known) {
    own = f->polled.size();
    f->polled.push_back(PolledWord{a, 0, sync, 0});
  } else if (!changed) {
    park(f);
    block(State::Polling);
    for (PolledWord &p : f->polled) p.seen = present(p);
    if (r->freed) return 0;
  }
  f->polled[own].seen = f->polled[own].read = present(f->polled[own]);
  if (!w) return readWord(addr, bytes);
  checkRead(r, a, bytes, true, system, place);
  ReleaseRef release = memory.sync(sync).release;
  if (acquiring) {
    acquire(release, system);
    if (u32 storer = identityOf(memory.sync(sync).unreleased)) {
      auto &v = f->block->relaxedFlags;
      std::pair<u32, const u8 *> x(storer, a);
      if (std::find(v.begin(), v.end(), x) == v.end() && v.size() < 64) v.push_back(x);
    }
  } else if (release && ((release->system && system) || release->rank == f->block->rank)) {
    f->relaxedSeen = joiner.join(f->relaxedSeen, release->seen);
    f->relaxedSeenFenced = joiner.join(f->relaxedSeenFenced, release->fenced);
  }
  return readWord(addr, bytes);
}

// Who reads a word that is not stored yet has done before the store what it did before its fence. That orders no value that it may load, but
// says which stores cannot have changed one: those that follow the word's.
u32 Engine::look(const u32 *word, Place place) {
  Fiber *f = cur;
  fence();
  f->lookEpoch = f->epoch - 1;
  u32 v = u32(poll(word, 4, true, true, place));
  if (Region *r = memory.regionAt(word); r && !r->freed && r->shadow) {
    SyncWord &s = memory.syncOf(Memory::wordAt(r, reinterpret_cast<const u8 *>(word)));
    s.looked = joiner.join(s.looked, f->fenceRelease->seen);
  }
  return v;
}

void Engine::pollWide(const void *addr, void *out, Place place) {
  Region *r = regionFor(addr, 16, 16, "strong load", place);
  memset(out, 0xEE, 16);
  if (!r) return;
  poll(addr, 4, false, true, place);
  if (r->freed) return;
  if (r->shadow) checkRead(r, static_cast<const u8 *>(addr), 16, true, true, place);
  memcpy(out, addr, 16); // no other thread runs in between
}

void Engine::park(Fiber *f) {
  f->parkedAt = parked.size();
  parked.push_back(f);
  for (PolledWord &p : f->polled)
    if (p.sync) memory.sync(p.sync).waiting.push_back(f);
}

void Engine::unpark(Fiber *f) {
  parked[f->parkedAt] = parked.back();
  parked[f->parkedAt]->parkedAt = f->parkedAt;
  parked.pop_back();
  for (PolledWord &p : f->polled)
    if (p.sync) {
      auto &v = memory.sync(p.sync).waiting;
      v.erase(std::find(v.begin(), v.end(), f));
    }
}

// The host may have written mapped words that threads poll.
void Engine::wakeChangedMapped() {
  for (size_t i = parked.size(); i--;) {
    Fiber *f = parked[i];
    bool changed = false;
    for (PolledWord &p : f->polled) changed = changed || (!p.sync && readWord(p.addr, 4) != p.seen);
    if (!changed) continue;
    unpark(f);
    wake(f);
    i = std::min(i, parked.size());
  }
}

// ---- atomics --------------------------------------------------------------------------------------------------------

// Add, or compare and swap. A relaxed one keeps what was released through the word: it continues the release sequence.
u32 Engine::atomicUpdate(u32 *addr, bool compare, u32 expected, u32 operand, bool acquireRelease, bool system,
                         Place place) {
  Fiber *f = cur;
  f->polled.clear();
  maybeYield(4);
  Region *r = regionFor(addr, 4, 4, "atomic", place);
  if (!r) return 0;
  u8 *a = reinterpret_cast<u8 *>(addr);
  u32 epoch = f->epoch, seen, next;
  ReleaseRef release;
  if (r->shadow) {
    Word *w = Memory::wordAt(r, a);
    SyncWord &s = memory.syncOf(w);
    if (acquireRelease) drain();
    checkRead(r, a, 4, true, system, place);
    if (w->pending) flushWord(w, a);
    release = s.release;
    if (acquireRelease) {
      acquire(release, system);
      ReleaseRef mine = makeRelease(system);
      if (release) { // readers of this value synchronise with the whole sequence
        mine->seen = joiner.join(mine->seen, release->seen);
        mine->fenced = joiner.join(mine->fenced, release->fenced);
      }
      release = mine;
    } else if (f->fenceRelease) {
      ReleaseRef both(new Release);
      *both = *f->fenceRelease;
      both->refs = 1;
      if (release) {
        both->seen = joiner.join(both->seen, release->seen);
        both->fenced = joiner.join(both->fenced, release->fenced);
      }
      release = both;
    }
    if (compare && *addr != expected) return *addr;
    checkWrite(r, a, nullptr, 4, actorOf(f->block->identity, f->tid), epoch, u8(W_STRONG | (system ? W_SYSTEM : 0)),
               place);
  }
  seen = *addr;
  if (compare && seen != expected) return seen;
  next = compare ? operand : seen + operand;
  writeBytes(a, reinterpret_cast<u8 *>(&next), 4, release, actorOf(f->block->identity, f->tid));
  return seen;
}

// ---- copies of streams ----------------------------------------------------------------------------------------------

// memcpy and memset: performed at once in the stream's order. Either side of a copy may be host memory.
void Engine::copyInStream(Stream *s, u8 *dst, const u8 *src, size_t bytes, int value, bool fill) {
  Fiber *saved = std::exchange(cur, nullptr);
  auto sees = [&](Actor a, u32 epoch) {
    return !a || identityOf(a) == s->identity || (s->known && s->known->at(SEEN, a) >= epoch);
  };
  Actor actor = actorOf(s->identity, 0);
  u32 epoch = ++s->epoch;
  Region *from = fill ? nullptr : memory.regionAt(src), *to = memory.regionAt(dst);
  bool ok = true;
  if (from) ok = regionFor(src, bytes, 1, "copy", 0) != nullptr;
  if (to) ok = regionFor(dst, bytes, 1, "copy", 0) != nullptr && ok;
  auto wordStart = [](const u8 *p) { return const_cast<u8 *>(p) - (reinterpret_cast<uintptr_t>(p) & 3); };
  LastStamp sources, writers, readers;
  for (u8 *a = wordStart(src); ok && from && from->shadow && a < src + bytes; a += 4) {
    Word *w = Memory::wordAt(from, a);
    if (!sources.check(w->writer, w->writeEpoch, [&] { return sees(w->writer, w->writeEpoch); }))
      reportRace(from, a, w, false, false, 0);
    w->reader = actor, w->readEpoch = epoch, w->readPlace = 0;
  }
  for (u8 *a = wordStart(dst); ok && to && to->shadow && a < dst + bytes; a += 4) {
    Word *w = Memory::wordAt(to, a);
    if (!writers.check(w->writer, w->writeEpoch, [&] { return sees(w->writer, w->writeEpoch); }))
      reportRace(to, a, w, true, false, 0);
    if (!readers.check(w->reader, w->readEpoch, [&] { return sees(w->reader, w->readEpoch); }))
      reportRace(to, a, w, true, true, 0);
    bool valid = true; // a copy of never-written memory is never-written
    if (from && from->shadow && src + (a - dst) >= from->base) {
      Word *v = Memory::wordAt(from, src + (a - dst));
      valid = from->bornValid || (v->flags & W_VALID);
    }
    memcpy(&w->old, a, 4);
    w->writer = actor, w->writeEpoch = epoch, w->writePlace = 0, w->reader = 0;
    w->flags = valid ? W_VALID : 0;
    if (w->sync) {
      SyncWord &y = memory.syncOf(w);
      y.change = ++changes;
      y.release = ReleaseRef();
      y.unreleased = 0;
      while (!y.waiting.empty()) {
        Fiber *f = y.waiting.back();
        unpark(f);
        wake(f);
      }
    }
  }
  if (ok) fill ? memset(dst, value, bytes) : memmove(dst, src, bytes);
  s->known = knownWith(s->known, s->identity, floorView(epoch));
  idleRounds = clockJumps = 0;
  cur = saved;
}

} // namespace emu
