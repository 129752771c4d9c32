// Shared memory and the async proxy: loads and stores of threads, bulk copies that read their source late and land in
// pieces, and the fences between the two. Every word remembers its last writer, reader and bulk reader.
#include <algorithm>
#include <cstring>

#include "engine.h"

namespace emu {

bool Engine::slotSeen(const Fiber *f, u32 slot, u32 epoch) const {
  if (slot == f->tid) return true;
  if (f->bulkSlot && slot == f->bulkSlot && epoch <= f->bulkReadDone) return true;
  if (f->bulkSlot && slot == f->bulkSlot + 1 && epoch <= f->bulkWriteDone) return true;
  return f->view->at(SEEN, slot) >= epoch;
}

bool Engine::slotFenced(const Fiber *f, u32 slot, u32 epoch) const {
  if (slot >= f->block->threads) return slotSeen(f, slot, epoch);
  if (slot == f->tid) return epoch <= f->sharedFenced;
  return f->view->at(f->viewSharedFenced ? SEEN : SHARED_FENCED, slot) >= epoch;
}

// A clock of its own for each mbarrier, and two for each thread that issues bulk stores (source read, complete).
u32 Engine::newSlot(Block *b, u32 thread) {
  identities[b->identity].slotThread.push_back(thread);
  return b->slots++;
}

// A write by the current thread, or by a bulk load it issues, must follow every earlier use of the words.
void Engine::checkSharedWrite(Fiber *f, u32 addr, u32 bytes, bool async, Place place) {
  Block *b = f->block;
  if (!weak) return;
  LastStamp writers, readers, bulkReaders, fences;
  auto isSeen = [&](LastStamp &s, u16 who, u32 epoch) {
    return s.check(who, epoch, [&] { return who == NOBODY || slotSeen(f, who, epoch); });
  };
  for (u32 i = 0; i < bytes; i += 4) {
    SharedWord &w = b->sharedShadow[(addr + i) >> 2];
    const char *what = async ? "bulk load into" : "store to";
    u64 key = u64(place) << 32;
    if (!isSeen(writers, w.writer, w.writeEpoch)) {
      report(w.writer >= b->threads ? Fault::SharedReuse : Fault::SharedRace, key | w.writePlace,
             "%s: %s shared+0x%x, written by %s%s; nothing orders the two", me(place).c_str(), what, addr + i,
             describe(actorOf(b->identity, w.writer), w.writeEpoch).c_str(), placeText(w.writePlace).c_str());
      return;
    }
    if (!isSeen(readers, w.reader, w.readEpoch)) {
      report(async ? Fault::SharedReuse : Fault::SharedRace, key | 0x10000 | w.readPlace,
             "%s: %s shared+0x%x, which thread %u may still read%s; nothing orders the two", me(place).c_str(), what,
             addr + i, w.reader, placeText(w.readPlace).c_str());
      return;
    }
    if (!isSeen(bulkReaders, w.bulkReader, w.bulkEpoch)) {
      report(
          Fault::SharedReuse, key | 0x20000 | w.bulkPlace,
          "%s: %s shared+0x%x: shared memory reused while a bulk store%s may still read it (wait_group.read missing)",
          me(place).c_str(), what, addr + i, placeText(w.bulkPlace).c_str());
      return;
    }
    if (async && !fences.check(w.writer, w.writeEpoch,
                               [&] { return w.writer == NOBODY || slotFenced(f, w.writer, w.writeEpoch); })) {
      report(Fault::MissingFence, key | w.writePlace,
             "%s: bulk load overwrites shared+0x%x, written by thread %u through the generic proxy%s: no "
             "fence.proxy.async in between",
             me(place).c_str(), addr + i, w.writer, placeText(w.writePlace).c_str());
      return;
    }
  }
}

void Engine::sharedStore(u32 addr, const void *data, u32 bytes, Place place) {
  Fiber *f = cur;
  Block *b = f->block;
  if (addr % bytes || u64(addr) + bytes > b->shared.size()) {
    report(Fault::Bounds, 1ull << 20 | place, "%s: store of %u bytes at shared+0x%x of 0x%zx", me(place).c_str(), bytes,
           addr, b->shared.size());
    return;
  }
  bool same = !memcmp(&b->shared[addr], data, bytes); // the same value again is no race
  if (!same) checkSharedWrite(f, addr, bytes, false, place);
  for (u32 i = 0; i < bytes; i += 4) {
    SharedWord &w = b->sharedShadow[(addr + i) >> 2];
    if (w.writer == NOBODY || slotFenced(f, w.writer, w.writeEpoch)) memcpy(&w.old, &b->shared[addr + i], 4);
    w.writer = u16(f->tid), w.writeEpoch = f->epoch, w.writePlace = place, w.added = 0;
    if (!same) w.reader = NOBODY;
  }
  memcpy(&b->shared[addr], data, bytes);
}

// Additions are no race among themselves; every other access must be ordered with them.
void Engine::sharedAdd(u32 addr, u32 value, Place place) {
  Fiber *f = cur;
  Block *b = f->block;
  u32 sum;
  if (addr % 4 || u64(addr) + 4 > b->shared.size()) {
    report(Fault::Bounds, 4ull << 20 | place, "%s: addition at shared+0x%x of 0x%zx", me(place).c_str(), addr,
           b->shared.size());
    return;
  }
  SharedWord &w = b->sharedShadow[addr >> 2];
  if (w.writer == NOBODY && weak)
    report(Fault::NeverWritten, 2ull << 20 | place, "%s adds to shared+0x%x, which nothing has written",
           me(place).c_str(), addr);
  if (!(w.added && w.reader == NOBODY)) checkSharedWrite(f, addr, 4, false, place);
  memcpy(&sum, &b->shared[addr], 4);
  sum += value;
  memcpy(&w.old, &b->shared[addr], 4);
  memcpy(&b->shared[addr], &sum, 4);
  w.writer = u16(f->tid), w.writeEpoch = f->epoch, w.writePlace = place, w.reader = NOBODY, w.added = 1;
}

void Engine::sharedLoad(u32 addr, void *out, u32 bytes, Place place) {
  if ((++sharedAccesses & 4095) == 0) yield(); // a loop over shared memory alone must not stop the world
  Fiber *f = cur;
  Block *b = f->block;
  if (addr % bytes || u64(addr) + bytes > b->shared.size()) {
    report(Fault::Bounds, 2ull << 20 | place, "%s: load of %u bytes at shared+0x%x of 0x%zx", me(place).c_str(), bytes,
           addr, b->shared.size());
    memset(out, 0xEE, bytes);
    return;
  }
  for (u32 i = 0; i < bytes; i += 4) {
    SharedWord &w = b->sharedShadow[(addr + i) >> 2];
    if (w.writer == NOBODY && weak)
      report(Fault::NeverWritten, 1ull << 20 | place, "%s reads shared+0x%x, which nothing has written",
             me(place).c_str(), addr + i);
    else if (w.writer != NOBODY && !slotSeen(f, w.writer, w.writeEpoch) && weak)
      report(Fault::SharedRace, u64(place) << 16 | w.writePlace,
             "%s reads shared+0x%x, written by %s%s; nothing orders the two", me(place).c_str(), addr + i,
             describe(actorOf(b->identity, w.writer), w.writeEpoch).c_str(), placeText(w.writePlace).c_str());
    w.reader = u16(f->tid), w.readEpoch = f->epoch, w.readPlace = place;
  }
  memcpy(out, &b->shared[addr], bytes);
}

// ---- bulk copies ----------------------------------------------------------------------------------------------------

void Engine::bulkLoad(u32 shared, const void *global, u32 bytes, u32 mbar, Place place) {
  Fiber *f = cur;
  Block *b = f->block;
  f->polled.clear();
  Mbarrier *m = mbarrier(b, mbar);
  Region *r = regionFor(global, bytes, 16, "bulk load", place);
  if (!m || !r) return;
  if (shared % 16 || bytes % 16 || !bytes || u64(shared) + bytes > b->shared.size()) {
    report(Fault::Bounds, 3ull << 20 | place, "%s: bulk load of %u bytes to shared+0x%x of 0x%zx", me(place).c_str(),
           bytes, shared, b->shared.size());
    return;
  }
  if (!m->initFenced && weak)
    report(Fault::MissingFence, 1ull << 20 | place,
           "%s: mbarrier at shared+0x%x used by a bulk load without fence_mbar_init", me(place).c_str(), mbar);
  checkSharedWrite(f, shared, bytes, true, place);
  BulkCopy *c = new BulkCopy{};
  c->load = true, c->fiber = f, c->block = b, c->shared = shared, c->bytes = bytes, c->mbar = mbar;
  c->global = static_cast<u8 *>(const_cast<void *>(global));
  c->epoch = b->base + m->phase + 1;
  u8 *g = c->global;
  LastStamp writers, fences;
  for (u32 i = 0; i < bytes && r->shadow; i += 4) {
    Word *w = Memory::wordAt(r, g + i);
    bool seen = writers.check(w->writer, w->writeEpoch, [&] { return ordered(f, w->writer, w->writeEpoch); });
    bool safe = fences.check(w->writer, w->writeEpoch, [&] { return fenced(f, w->writer, w->writeEpoch); }) && seen;
    if (!seen)
      reportRace(r, g + i, w, false, false, place);
    else if (!safe && weak)
      report(Fault::MissingFence, u64(place) << 20 | w->writePlace,
             "%s: bulk load reads %s, written by %s%s and acquired through the generic proxy: no fence.proxy.async "
             "(global) in between",
             me(place).c_str(), memory.where(g + i).c_str(), describe(w->writer, w->writeEpoch).c_str(),
             placeText(w->writePlace).c_str());
    if (!safe && weak) {
      if (c->staleWords.empty()) c->staleWords.resize(bytes / 4);
      c->staleWords[i / 4] = 1;
    }
    if (seen && w->pending) flushWord(w, g + i);
    if (seen && !r->bornValid && !(w->flags & W_VALID) && weak)
      report(Fault::NeverWritten, 2ull << 20 | place, "%s: bulk load reads %s, which nothing has written",
             me(place).c_str(), memory.where(g + i).c_str());
    w->reader = actorOf(b->identity, m->slot), w->readEpoch = c->epoch, w->readPlace = place;
  }
  for (u32 i = 0; i < bytes; i += 4)
    b->sharedShadow[(shared + i) >> 2] = {u16(m->slot), NOBODY, NOBODY, 0, c->epoch, 0, 0, 0xDBDBDBDB, place, 0, 0, 0};
  memset(&b->shared[shared], 0xDB, bytes); // garbage until complete
  b->copies.push_back(c);
  c->events = 1;
  at(later(), nullptr, c, nullptr);
  maybeYield(8);
}

void Engine::finishBulkLoad(BulkCopy *c) {
  Block *b = c->block;
  Region *r = memory.regionAt(c->global);
  if (r->freed)
    report(Fault::Freed, 2, "a bulk load in flight reads %s", memory.where(c->global).c_str());
  else
    memcpy(&b->shared[c->shared], c->global, c->bytes);
  for (size_t i = 0; i < c->staleWords.size() && r->shadow; i++)
    if (c->staleWords[i] && rng.oneIn(2))
      memcpy(&b->shared[c->shared + 4 * i], &Memory::wordAt(r, c->global + 4 * i)->old, 4);
  Fiber *saved = std::exchange(cur, nullptr);
  Mbarrier *m = mbarrier(b, c->mbar);
  cur = saved;
  if (m) {
    m->bytes -= int(c->bytes);
    if (!m->building) {
      m->building = ViewRef(new View);
      m->building->floor = m->building->top = b->base;
    }
    m->building->raise(SEEN, m->slot, c->epoch);
    mbarCheck(b, m);
  }
  b->copies.erase(std::find(b->copies.begin(), b->copies.end(), c));
  delete c;
}

void Engine::bulkStore(void *global, u32 shared, u32 bytes, Place place) {
  Fiber *f = cur;
  Block *b = f->block;
  f->polled.clear();
  Region *r = regionFor(global, bytes, 16, "bulk store", place);
  if (!r) return;
  if (shared % 16 || bytes % 16 || !bytes || u64(shared) + bytes > b->shared.size()) {
    report(Fault::Bounds, 4ull << 20 | place, "%s: bulk store of %u bytes from shared+0x%x of 0x%zx", me(place).c_str(),
           bytes, shared, b->shared.size());
    return;
  }
  if (!f->bulkSlot) {
    f->bulkSlot = newSlot(b, f->tid);
    newSlot(b, f->tid);
  }
  BulkCopy *c = new BulkCopy{};
  c->fiber = f, c->block = b, c->shared = shared, c->bytes = bytes, c->group = f->bulkGroup;
  c->global = static_cast<u8 *>(global);
  c->epoch = ++f->bulkIssued;
  LastStamp writers, fences;
  for (u32 i = 0; i < bytes; i += 4) {
    SharedWord &w = b->sharedShadow[(shared + i) >> 2];
    bool seen = writers.check(w.writer, w.writeEpoch,
                              [&] { return w.writer != NOBODY && slotSeen(f, w.writer, w.writeEpoch); });
    bool safe = seen && fences.check(w.writer, w.writeEpoch, [&] { return slotFenced(f, w.writer, w.writeEpoch); });
    if (w.writer == NOBODY && weak)
      report(Fault::NeverWritten, 3ull << 20 | place, "%s: bulk store reads shared+0x%x, which nothing has written",
             me(place).c_str(), shared + i);
    else if (!seen && weak)
      report(Fault::SharedRace, u64(place) << 16 | w.writePlace | 1ull << 40,
             "%s: bulk store reads shared+0x%x, written by %s%s; nothing orders the two", me(place).c_str(), shared + i,
             describe(actorOf(b->identity, w.writer), w.writeEpoch).c_str(), placeText(w.writePlace).c_str());
    else if (!safe && weak)
      report(Fault::MissingFence, u64(place) << 20 | 1ull << 50 | w.writePlace,
             "%s: bulk store reads shared+0x%x, written by thread %u through the generic proxy%s: no fence.proxy.async "
             "in between",
             me(place).c_str(), shared + i, w.writer, placeText(w.writePlace).c_str());
    if (!safe && weak) {
      if (c->staleWords.empty()) c->staleWords.resize(bytes / 4);
      c->staleWords[i / 4] = 1;
    }
    w.bulkReader = u16(f->bulkSlot), w.bulkEpoch = c->epoch, w.bulkPlace = place;
  }
  if (r->shadow) checkWrite(r, c->global, nullptr, bytes, actorOf(b->identity, f->bulkSlot + 1), c->epoch, 0, place);
  f->bulk.push_back(c);
  b->copies.push_back(c);
  c->events = 1;
  at(later(), nullptr, c, nullptr);
  maybeYield(8);
}

// The source is read some time after the issue; then the bytes leave in pieces, each at its own time.
void Engine::stepBulkStore(BulkCopy *c) {
  Block *b = c->block;
  c->data.assign(&b->shared[c->shared], &b->shared[c->shared] + c->bytes);
  for (size_t i = 0; i < c->staleWords.size(); i++)
    if (c->staleWords[i] && rng.oneIn(2)) memcpy(&c->data[4 * i], &b->sharedShadow[c->shared / 4 + i].old, 4);
  for (u32 i = 0; i < c->bytes;) {
    u32 n = std::min(c->bytes - i, 64u << rng.below(5));
    PendingStore *p = newStore();
    p->addr = c->global + i, p->bytes = n, p->data = &c->data[i];
    p->owner = c->fiber, p->copy = c;
    c->events++;
    c->chunksLeft++;
    at(later(), p, nullptr, nullptr);
    i += n;
  }
  c->state = BulkCopy::SourceRead;
  if (c->fiber->state == State::BulkStores) wake(c->fiber);
}

void Engine::copyDone(BulkCopy *c) {
  if (c->dead) {
    if (!c->events) delete c;
    return;
  }
  if (c->chunksLeft) return;
  c->state = BulkCopy::Complete;
  if (c->fiber->state == State::BulkStores) wake(c->fiber);
}

void Engine::bulkCommit() { cur->bulkGroup++; }

void Engine::bulkWait(u32 keep, bool sourceOnly) {
  Fiber *f = cur;
  f->polled.clear();
  auto covered = [&](const BulkCopy *c) { return c->group + keep < f->bulkGroup; };
  for (;;) {
    bool ok = true;
    for (BulkCopy *c : f->bulk)
      if (covered(c) && c->state < (sourceOnly ? BulkCopy::SourceRead : BulkCopy::Complete)) ok = false;
    if (ok) break;
    block(State::BulkStores);
  }
  for (size_t i = 0; i < f->bulk.size();) {
    BulkCopy *c = f->bulk[i];
    if (!covered(c)) {
      i++;
      continue;
    }
    f->bulkReadDone = std::max(f->bulkReadDone, c->epoch);
    if (sourceOnly) {
      i++;
      continue;
    }
    f->bulkWriteDone = std::max(f->bulkWriteDone, c->epoch);
    f->bulk.erase(f->bulk.begin() + long(i));
    f->block->copies.erase(std::find(f->block->copies.begin(), f->block->copies.end(), c));
    delete c;
  }
}

} // namespace emu
