// Runs fibers: who is next, when blocks start and end, how streams advance. The order is random but fair: a quarter of
// the warps is starved for bounded stretches, lanes run in one of three orders, and every choice comes from the seed.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <map>
#include <set>
#include <sys/mman.h>

#include "stream.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace emu {

using boost::context::detail::jump_fcontext;
using boost::context::detail::make_fcontext;
using boost::context::detail::transfer_t;

#if defined(__SANITIZE_ADDRESS__)
static const size_t STACK = 256 << 10;
#else
static const size_t STACK = 64 << 10; // address space; a fiber touches 7 to 12 KiB of it
#endif
static const u64 CANARY = 0x5AFE57AC5AFE57ACull;
static const u32 NAMED_BARRIERS = 16;
static const u64 CLOCK_LIMIT_NS = 1000ull * 3600 * 1000000000ull; // the clock is not moved further for a wait

Engine::Engine(const EngineOptions &o) : weak(o.weakMemory), rng(o.seed), residentLimit(o.residentBlocks) {
  laneMode = rng.below(3);
  delay = 4u << rng.below(10);
  startDelay = 4u << rng.below(14);
  identities.resize(1);
  identities[0].used = true;
  streams.resize(o.ranks);
  waiting.resize(o.ranks);
  resident.resize(o.ranks);
}

Engine::~Engine() {
  abandon();
  for (Block *b : idleBlocks) {
    munmap(b->stacks, b->stackBytes);
    delete b;
  }
  for (PendingStore *p : storePool) delete p;
}

// ---- reports --------------------------------------------------------------------------------------------------------

std::string Engine::describe(Actor a, u32 epoch) const {
  const Identity &i = identities[identityOf(a)];
  char text[160];
  u32 slot = slotOf(a);
  if (i.nic)
    snprintf(text, sizeof text, "%s %u of rank %d's GIN", slot & 1 ? "put" : "the source of put", epoch, i.rank);
  else if (i.stream)
    snprintf(text, sizeof text, "a stream copy of rank %d", i.rank);
  else if (epoch <= i.base || slot >= i.threads + i.slotThread.size())
    snprintf(text, sizeof text, "an earlier kernel of rank %d", i.rank);
  else if (slot < i.threads)
    snprintf(text, sizeof text, "rank %d block %u thread %u of %s", i.rank, i.index, slot, i.name.c_str());
  else if (i.slotThread[slot - i.threads] == ~0u)
    snprintf(text, sizeof text, "a bulk load of rank %d block %u of %s", i.rank, i.index, i.name.c_str());
  else
    snprintf(text, sizeof text, "a bulk store of rank %d block %u thread %u of %s", i.rank, i.index,
             i.slotThread[slot - i.threads], i.name.c_str());
  return text;
}

std::string Engine::me(Place place) const {
  if (!cur) return "a stream copy" + placeText(place);
  char text[96];
  snprintf(text, sizeof text, "%s: rank %d block %u thread %u", cur->block->launch->name.c_str(), cur->block->rank,
           cur->block->index, cur->tid);
  return text + placeText(place);
}

void Engine::report(Fault kind, u64 key, const char *format, ...) {
  if (!note(kind, key)) return;
  char text[640];
  va_list a;
  va_start(a, format);
  vsnprintf(text, sizeof text, format, a);
  va_end(a);
  reports.write(kind, text);
}

// ---- identities and streams -----------------------------------------------------------------------------------------

// An identity is used again only by its own rank, and by one that is ordered after its last use: no order is made up.
u32 Engine::allocIdentity(int rank, u32 index, u32 threads, const std::string &name, const KnownRef &known,
                          bool stream) {
  u32 id = 1;
  auto fits = [&](u32 i) {
    const Identity &x = identities[i];
    return !x.used && x.rank == rank && known && known->at(SEEN, actorOf(i, NOBODY)) >= x.base;
  };
  while (id < identities.size() && !fits(id)) id++;
  if (id == identities.size()) identities.emplace_back();
  Identity &i = identities[id];
  i.used = true, i.stream = stream, i.rank = rank, i.index = index, i.threads = threads, i.name = name;
  i.slotThread.clear();
  return id;
}

void Engine::freeIdentity(u32 id, u32 lastEpoch) {
  identities[id].used = false;
  identities[id].live = nullptr;
  identities[id].base = std::max(identities[id].base, lastEpoch);
}

void Engine::addStream(Stream *s, const KnownRef &known) {
  s->identity = allocIdentity(s->rank, 0, 0, "", known, true);
  s->epoch = identities[s->identity].base;
  streams[size_t(s->rank)].push_back(s);
}

void Engine::removeStream(Stream *s) {
  auto &v = streams[size_t(s->rank)];
  v.erase(std::find(v.begin(), v.end(), s));
  freeIdentity(s->identity, s->epoch);
}

// ---- the ready list -------------------------------------------------------------------------------------------------

void Engine::wake(Fiber *f) {
  f->state = State::Ready;
  Warp *w = f->warp;
  w->ready |= 1u << f->lane;
  if (w->position < 0 && !frozen(w)) {
    w->position = int(ready.size());
    ready.push_back(w);
  }
}

bool Engine::frozen(const Warp *w) const { return !freezeAt.empty() && now >= freezeAt[size_t(w->block->rank)]; }

void Engine::freeze(int rank, u64 after) {
  freezeAt.resize(streams.size(), ~0ull);
  freezeAt[size_t(rank)] = after > ~0ull - now ? ~0ull : now + after;
}

void Engine::thaw(int rank) {
  if (!freezeAt.empty()) freezeAt[size_t(rank)] = ~0ull;
  for (Block *b : liveBlocks)
    for (Warp &w : b->warps)
      if (w.ready && w.position < 0) {
        w.position = int(ready.size());
        ready.push_back(&w);
      }
  hostDidSomething();
}

void Engine::unready(Warp *w) {
  Warp *last = ready.back();
  ready[size_t(w->position)] = last;
  last->position = w->position;
  ready.pop_back();
  w->position = -1;
}

// Threads run, but for very long nothing became visible: waits that vote, or loops of weak loads. Longer than a scan takes, in
// which warps vote and store nothing.
bool Engine::nothingChanges() const {
  return hopeless || (liveFibers && events.empty() && now - lastChange > 1000000 + 200ull * liveFibers);
}

// The next fiber, or NULL when the main context must decide (nothing ready, a block ended, the slice is over).
Fiber *Engine::pick() {
  now++;
  clockNs += 2;
  while (!events.empty() && events.top().due <= now) {
    Event e = events.top();
    events.pop();
    fire(e);
  }
  if (!freezeAt.empty())
    for (size_t i = ready.size(); i-- > 0;)
      if (frozen(ready[i])) unready(ready[i]);
  if (wantMain || ready.empty() || picksLeft == 0 || nothingChanges()) return nullptr;
  picksLeft--;
  if ((now & 1023) == 0)
    for (Block *b : liveBlocks)
      for (Warp &w : b->warps) w.starved = rng.oneIn(4);
  if ((now & 0xffff) == 0) wakeAllParked(); // timed waits look at the clock now and then
  Warp *w = lastWarp;
  if (!w || w->position < 0 || rng.oneIn(16)) {
    int tries = 0;
    do w = ready[rng.below(u32(ready.size()))];
    while (w->starved && ++tries < 8);
  }
  lastWarp = w;
  u32 m = w->ready, lane;
  if (laneMode == 0) {
    u32 r = rng.below(32), rotated = m >> r | (r ? m << (32 - r) : 0);
    lane = (r + u32(__builtin_ctz(rotated))) & 31;
  } else
    lane = laneMode == 1 ? u32(__builtin_ctz(m)) : 31 - u32(__builtin_clz(m));
  w->ready &= ~(1u << lane);
  if (!w->ready) unready(w);
  return w->fiber[lane];
}

// Leaves the current fiber (or the main context) for whoever is next.
void Engine::switchAway() {
  Fiber *self = cur, *next = pick();
  if (next == self) return;
  switches++;
  cur = next;
  from = self;
  transfer_t t = jump_fcontext(next ? next->context : mainContext, nullptr);
  (from ? from->context : mainContext) = t.fctx;
}

void Engine::block(State s) {
  cur->state = s;
  switchAway();
}

void Engine::yield() {
  wake(cur);
  switchAway();
}

void Engine::sleep() { yield(); }

// Kernels before this one on the stream have ended already; what can be checked is that nothing was touched before.
void Engine::gridWait() {
  if (cur->touchedGlobal) report(Fault::Misuse, 4, "%s uses global memory before its grid_wait", me(0).c_str());
}

u64 Engine::clock() {
  clockReads++;
  return clockNs += 1;
}

void Engine::fiberMain(transfer_t t) {
  Engine *e = engine;
  (e->from ? e->from->context : e->mainContext) = t.fctx;
  cur->block->launch->body();
  e->exitThread();
  e->switchAway(); // never comes back
}

void Engine::exitThread() {
  Fiber *f = cur;
  Block *b = f->block;
  f->state = State::Done;
  f->warp->exited |= 1u << f->lane;
  for (BulkCopy *c : f->bulk)
    if (c->epoch > f->bulkReadDone) {
      report(Fault::Misuse, 1,
             "%s exits while its bulk store may still read shared memory: no wait_group before the end", me(0).c_str());
      break;
    }
  u64 canary;
  memcpy(&canary, b->stacks + f->tid * STACK, sizeof canary);
  if (canary != CANARY) report(Fault::Misuse, 2, "%s overflowed the emulator's stack", me(0).c_str());
  b->exitKnown = joiner.join(b->exitKnown, f->known);
  lastChange = now;
  progress++;
  liveFibers--;
  if (--b->alive == 0) {
    finishedBlocks.push_back(b);
    wantMain = true;
    return;
  }
  NamedBarrier &all = b->barriers[0];
  if (all.arrived && all.arrived == b->alive) barrierDone(all, nullptr);
}

u64 Engine::later() {
  if (!weak) return now;
  return now + 1 + rng.below(rng.oneIn(8) ? delay * 32 : delay); // heavy tail, bounded
}

void Engine::fire(const Event &e) {
  if (e.start) {
    e.start->starting = false;
    streamStep(e.start);
    return;
  }
  if (e.gin) {
    ginStep(e.gin);
    return;
  }
  lastChange = now;
  if (e.store) {
    PendingStore *p = e.store;
    BulkCopy *c = p->copy;
    if (!p->done && !(c && c->dead)) commit(p);
    p->release = ReleaseRef();
    storePool.push_back(p);
    if (c) {
      c->chunksLeft--;
      c->events--;
      copyDone(c);
    }
    return;
  }
  BulkCopy *c = e.copy;
  c->events--;
  if (!c->dead)
    c->load ? finishBulkLoad(c) : stepBulkStore(c);
  else
    copyDone(c);
}

// ---- blocks and launches --------------------------------------------------------------------------------------------

Block *Engine::takeBlock(u32 threads) {
  for (size_t i = idleBlocks.size(); i--;)
    if (idleBlocks[i]->threads == threads) {
      Block *b = idleBlocks[i];
      idleBlocks.erase(idleBlocks.begin() + long(i));
      return b;
    }
  size_t bytes = threads * STACK;
  void *stacks = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) return nullptr;
  Block *b = new Block();
  b->stacks = static_cast<char *>(stacks);
  b->stackBytes = bytes;
  b->threads = threads;
  b->fibers.resize(threads);
  b->warps.resize((threads + 31) / 32);
  b->barriers.resize(NAMED_BARRIERS);
  b->hasPending.resize((threads + 63) / 64);
  for (u32 t = 0; t < threads; t++) {
    Fiber &f = b->fibers[t];
    f.block = b, f.warp = &b->warps[t / 32], f.tid = t, f.lane = t & 31;
    f.warp->block = b, f.warp->id = t / 32, f.warp->fiber[f.lane] = &f;
  }
  return b;
}

void Engine::startBlock(Launch *l) {
  Block *b = takeBlock(l->threads);
  if (!b) {
    report(Fault::Misuse, 3, "no memory for the stacks of %s", l->name.c_str());
    l->started++;
    l->finished++;
    return;
  }
  int rank = l->stream->rank;
  b->launch = l, b->rank = rank, b->index = l->started++;
  b->alive = b->slots = l->threads;
  b->identity = allocIdentity(rank, b->index, l->threads, l->name, l->initial, false);
  identities[b->identity].live = b;
  b->base = identities[b->identity].base;
  b->shared.assign(l->sharedBytes, 0xCD);
  b->sharedShadow.assign(l->sharedBytes / 4 + 1,
                         SharedWord{NOBODY, NOBODY, NOBODY, 0, 0, 0, 0, 0xCDCDCDCD, 0, 0, 0, 0});
  for (NamedBarrier &x : b->barriers) x.arrived = x.expected = 0, x.in.clear(), x.waiters.clear();
  b->mbarriers.clear();
  b->relaxedFlags.clear();
  b->exitKnown = l->initial;
  std::fill(b->hasPending.begin(), b->hasPending.end(), 0);
  ViewRef view = floorView(b->base);
  for (Warp &w : b->warps) w.ready = w.exited = 0, w.position = -1, w.starved = false, w.open.clear();
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(b->stacks, b->stackBytes);
#endif
  for (Fiber &f : b->fibers) {
    char *low = b->stacks + f.tid * STACK;
    memcpy(low, &CANARY, sizeof CANARY);
    char *top = low + STACK - (f.tid * 5 % 61) * 64; // tops of stacks must not share cache sets
    f.context = make_fcontext(top, size_t(top - low) - 64, fiberMain);
    f.view = view;
    f.known = f.fencedKnown = l->initial;
    f.epoch = b->base + 1;
    f.sharedFenced = f.globalFenced = f.bulkIssued = f.bulkReadDone = f.bulkWriteDone = b->base;
    f.viewSharedFenced = f.viewGlobalFenced = f.touchedGlobal = false;
    f.fenceRelease = ReleaseRef();
    f.relaxedSeen = f.relaxedSeenFenced = KnownRef();
    f.anyEpoch = f.lookEpoch = 0;
    f.pending.clear();
    f.bulk.clear();
    f.bulkGroup = f.bulkSlot = 0;
    f.polled.clear();
    wake(&f);
  }
  liveFibers += l->threads;
  resident[size_t(rank)]++;
  liveBlocks.push_back(b);
  l->live.push_back(b);
  lastChange = now;
}

void Engine::retire(Block *b) {
  Launch *l = b->launch;
  u32 last = b->base;
  for (Fiber &f : b->fibers) {
    while (!f.pending.empty()) commit(f.pending[0]);
    b->exitKnown = joiner.join(b->exitKnown, f.relaxedSeen);
    last = std::max({last, f.epoch, f.bulkIssued});
  }
  for (BulkCopy *c : b->copies) { // stores nobody waited for complete here
    c->dead = true;
    if (!c->load && c->state != BulkCopy::Complete) {
      if (c->state == BulkCopy::Issued) c->data.assign(&b->shared[c->shared], &b->shared[c->shared] + c->bytes);
      writeBytes(c->global, c->data.data(), c->bytes, ReleaseRef(), 0);
    }
    if (!c->events) delete c;
  }
  b->copies.clear();
  for (Mbarrier &m : b->mbarriers) last = std::max(last, b->base + m.phase + 2);
  KnownRef all = knownWith(b->exitKnown, b->identity, floorView(last));
  l->known = joiner.join(l->known, all);
  identities[b->identity].live = nullptr;
  l->identities.push_back({b->identity, last}); // in use until the launch ends
  liveBlocks.erase(std::find(liveBlocks.begin(), liveBlocks.end(), b));
  l->live.erase(std::find(l->live.begin(), l->live.end(), b));
  idleBlocks.push_back(b);
  resident[size_t(b->rank)]--;
  if (lastWarp && lastWarp->block == b) lastWarp = nullptr;
  l->finished++;
}

void Engine::admit() {
  for (size_t r = 0; r < waiting.size(); r++)
    while (!waiting[r].empty() && resident[r] < residentLimit) {
      Launch *l = waiting[r].front();
      if (l->started - l->finished >= l->residentLimit) break;
      startBlock(l);
      if (l->started == l->blocks) waiting[r].pop_front();
    }
}

void Engine::startLaunch(Stream *s) {
  StreamOp &op = s->ops.front();
  Launch *l = new Launch;
  l->stream = s, l->name = op.name, l->body = op.body;
  l->blocks = op.blocks, l->threads = op.threads, l->sharedBytes = op.sharedBytes;
  l->initial = l->known = s->known;
  l->residentLimit = op.together || rng.oneIn(2) ? l->blocks : 1 + rng.below(std::min(l->blocks, residentLimit));
  s->running = l;
  liveLaunches++;
  waiting[size_t(s->rank)].push_back(l);
  wantMain = true;
}

void Engine::finishLaunch(Launch *l) {
  Stream *s = l->stream;
  if (!l->suspect.empty()) report(Fault::NotResident, 1000 + u64(s->rank), "%s", l->suspect.c_str());
  s->known = joiner.join(s->known, l->known);
  s->running = nullptr;
  s->ops.pop_front();
  liveLaunches--;
  scanStreams = true;
  for (auto &i : l->identities) freeIdentity(i.first, i.second);
  delete l;
}

// Schedules the heads of idle streams. In rank order, so that the order in which host threads queued them is no matter.
void Engine::startHeads() {
  scanStreams = false;
  for (auto &ofRank : streams)
    for (Stream *s : ofRank) {
      if (s->running || s->starting || s->ops.empty()) continue;
      StreamOp &op = s->ops.front();
      if (op.kind == StreamOp::Wait && op.event->recordsDone < op.record) continue;
      s->starting = true;
      at(now + 1 + (weak || rng.oneIn(2) ? rng.below(startDelay) : 0), nullptr, nullptr, s);
    }
}

// Runs the head operation of a stream; a kernel goes on by itself.
void Engine::streamStep(Stream *s) {
  StreamOp &op = s->ops.front();
  s->known = joiner.join(s->known, op.hostKnown);
  lastChange = now;
  progress++;
  switch (op.kind) {
  case StreamOp::Kernel:
    startLaunch(s);
    return;
  case StreamOp::Copy:
    copyInStream(s, op.dst, op.staged.empty() ? op.src : op.staged.data(), op.bytes, 0, false);
    break;
  case StreamOp::Fill:
    copyInStream(s, op.dst, nullptr, op.bytes, op.value, true);
    break;
  case StreamOp::Record:
    op.event->known = s->known;
    op.event->recordsDone++;
    break;
  case StreamOp::Wait:
    s->known = joiner.join(s->known, op.event->known);
    break;
  case StreamOp::Delay:
    if (!op.untilNs) {
      op.untilNs = clockNs + op.delayNs;
      s->starting = true;
      at(now + op.delayNs / 2, nullptr, nullptr, s); // a step takes 2 ns
      return;
    }
    clockNs = std::max(clockNs, op.untilNs);
    break;
  }
  s->ops.pop_front();
  scanStreams = true;
  wantMain = true;
}

// ---- the main context -----------------------------------------------------------------------------------------------

Engine::Outcome Engine::run(u64 picks) {
  engine = this;
  picksLeft = picks;
  for (;;) {
    wantMain = false;
    while (!finishedBlocks.empty()) {
      Block *b = finishedBlocks.back();
      finishedBlocks.pop_back();
      Launch *l = b->launch;
      retire(b);
      if (l->finished == l->blocks) finishLaunch(l);
    }
    if (scanStreams) startHeads();
    admit();
    if (picksLeft == 0) return Outcome::Busy;
    if (nothingChanges()) return Outcome::Idle;
    if (ready.empty()) {
      if (!events.empty()) {
        now = std::max(now, events.top().due);
        Event e = events.top();
        events.pop();
        fire(e);
        continue;
      }
      // A repeated read need not be a wait: one may look at many words in turn and go on, or give up some rounds later.
      if (!parked.empty() && idleRounds < 256) {
        idleRounds++;
        wakeAllParked();
        continue;
      }
      return Outcome::Idle;
    }
    switchAway();
  }
}

void Engine::hostDidSomething() {
  scanStreams = true;
  lastChange = now;
  idleRounds = 0; // kernels that come now may repeat reads too
  wakeChangedMapped();
}

bool Engine::advanceClock() {
  if (!liveFibers || hopeless) return false;
  for (auto &ofRank : streams)
    for (Stream *s : ofRank)
      if (s->running) s->running->suspect.clear(); // more blocks did not help: it waits for something else
  if (clockReads != clockReadsAtJump)
    fruitlessJumps = 0;
  else if (++fruitlessJumps > 100)
    return false; // nobody looks at the clock
  clockReadsAtJump = clockReads;
  if (clockNs > CLOCK_LIMIT_NS) return false;
  jumpNs = clockJumps++ ? std::min<u64>(jumpNs + jumpNs / 8, 65536000000ull)
                        : 1000000ull; // small beside what has passed already
  clockNs += jumpNs;
  lastChange = now;
  wakeAllParked();
  return true;
}

void Engine::wakeAllParked() {
  while (!parked.empty()) {
    Fiber *f = parked.back();
    unpark(f);
    wake(f);
  }
}

// A launch that can end only after this depended on blocks being resident together; finishLaunch() says so.
bool Engine::liftLimits() {
  bool any = false;
  for (auto &launches : waiting)
    for (Launch *l : launches) {
      if (l->residentLimit >= l->blocks) continue;
      char text[256];
      snprintf(text, sizeof text,
               "rank %d: with %u blocks of %s resident all of them waited for block %u or a later one, which could not "
               "start",
               l->stream->rank, l->residentLimit, l->name.c_str(), l->started);
      l->suspect = text;
      l->residentLimit = l->blocks;
      any = true;
    }
  return any;
}

void Engine::checkResidency() {
  for (size_t r = 0; r < waiting.size(); r++)
    if (!waiting[r].empty()) {
      Launch *l = waiting[r].front();
      report(Fault::NotResident, r,
             "rank %zu: blocks %u to %u of %s cannot start: %u blocks are resident (num_sms %u) and all of them wait",
             r, l->started, l->blocks - 1, l->name.c_str(), resident[r], residentLimit);
    }
}

static const char *const stateNames[] = {
    "ready",           "warp collective",     "barrier",  "mbarrier", "polling global memory",
    "bulk wait_group", "room in a GIN queue", "GIN flush"};
static const char *const collectiveNames[] = {"shfl", "ballot", "match_any", "sync_warp"};

// Who waits for what, threads that wait alike counted together.
void Engine::reportStuck() {
  if (!note(Fault::Deadlock, progress)) return;
  reports.write(Fault::Deadlock, hopeless ? "given up after too many faults" : "no thread can go on");
  std::map<std::string, int> groups;
  for (Block *b : liveBlocks)
    for (Fiber &f : b->fibers) {
      if (f.state == State::Done) continue;
      char text[256];
      snprintf(text, sizeof text, "%s: rank %d block %u warp %u waits: %s", b->launch->name.c_str(), b->rank, b->index,
               f.warp->id, stateNames[int(f.state)]);
      std::string line = text;
      if (f.state == State::Polling || f.state == State::Ready)
        for (PolledWord &w : f.polled) line += " " + memory.where(w.addr);
      if (f.state == State::Collective) {
        u32 arrived = 0;
        for (OpenCollective &o : f.warp->open)
          if (o.mask == f.mask) arrived = o.arrived;
        snprintf(text, sizeof text, " %s mask %08x arrived %08x exited %08x", collectiveNames[int(f.collective)],
                 f.mask, arrived, f.warp->exited);
        line += text;
      }
      if (f.state == State::Barrier) {
        snprintf(text, sizeof text, " %u: %u of %u arrived", f.waitOn, b->barriers[f.waitOn].arrived,
                 b->barriers[f.waitOn].expected);
        line += text;
      }
      if (f.state == State::Mbarrier)
        for (Mbarrier &m : b->mbarriers)
          if (m.addr == f.waitOn) {
            snprintf(text, sizeof text, " shared+0x%x: %u arrivals and %d bytes missing", m.addr, m.pending, m.bytes);
            line += text;
          }
      groups[line]++;
    }
  int lines = 0;
  for (auto &g : groups) {
    if (++lines > 12) {
      reports.addDetail("...");
      break;
    }
    reports.addDetail(g.first + " (" + std::to_string(g.second) + " threads)");
  }
}

// Forgets all kernels in flight: their fibers never run again.
void Engine::abandon() {
  ready.clear();
  lastWarp = nullptr;
  for (Fiber *f : parked)
    for (PolledWord &w : f->polled) w.seen = 0;
  while (!parked.empty()) unpark(parked.back());
  std::set<BulkCopy *> copies;
  std::vector<PendingStore *> stores;
  for (; !events.empty(); events.pop()) {
    const Event &e = events.top();
    if (e.start) e.start->starting = false;
    if (e.copy) copies.insert(e.copy);
    if (e.gin) delete e.gin;
    if (e.store) {
      stores.push_back(e.store);
      if (e.store->copy) copies.insert(e.store->copy);
    }
  }
  for (Block *b : liveBlocks) {
    copies.insert(b->copies.begin(), b->copies.end());
    b->copies.clear();
    freeIdentity(b->identity, b->base + (1u << 24)); // more than any kernel reaches
    resident[size_t(b->rank)]--;
    for (Fiber &f : b->fibers) {
      for (PendingStore *p : f.pending)
        if (Region *r = memory.regionAt(p->addr); r && !r->freed && r->shadow)
          for (u8 *a = p->addr; a < p->addr + p->bytes; a += 4) Memory::wordAt(r, a)->pending = 0;
      f.pending.clear();
      f.bulk.clear();
      f.view = ViewRef();
      f.known = f.fencedKnown = KnownRef();
    }
    idleBlocks.push_back(b);
  }
  for (PendingStore *p : stores) {
    p->release = ReleaseRef();
    storePool.push_back(p);
  }
  for (BulkCopy *c : copies) delete c;
  ginForget();
  liveBlocks.clear();
  finishedBlocks.clear();
  for (auto &w : waiting) w.clear();
  for (auto &ofRank : streams)
    for (Stream *s : ofRank)
      if (s->running) {
        for (auto &i : s->running->identities) freeIdentity(i.first, i.second);
        delete s->running;
        s->running = nullptr;
        s->ops.clear();
        s->dropped = true;
      }
  liveLaunches = liveFibers = 0;
  hopeless = false;
  scanStreams = true;
}

} // namespace emu
