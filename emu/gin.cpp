// Puts and signals of the emulated network: when their bytes move, and what their arrival lets the receiver know. As
// everywhere, accesses are checked when they are issued, whenever the bytes move.
#include "gin.h"

#include <algorithm>
#include <cstring>

#include "engine.h"

namespace emu {

static const u32 SHALLOWEST = 2, DEPTHS = 4; // queues have room for 2, 4, 8 or 16 operations

// Each context has signals of its own.
static u8 *ginSignalAt(const GinPort *port, u32 domain, u32 context, u32 signal) {
  return port->signal[domain] + 8 * (size_t(context) * port->signals + signal);
}

static u32 sourceSlot(const GinQueue *q) { return 2 * q->index; }
static u32 settledSlot(const GinQueue *q) { return 2 * q->index + 1; }

// Knowledge of the NIC's clock in one slot, up to `epoch`.
static KnownRef knowledge(const GinPort *port, u32 slot, u32 epoch) {
  ViewRef v(new View);
  v->raise(SEEN, slot, epoch);
  return knownWith(KnownRef(), port->identity, v);
}

// A port whose window is gone stays until what it has sent has arrived: that is what reports where it arrives.
void Engine::closeGin(GinPort *port) {
  if (port) port->closed = true;
  auto over = [](const std::unique_ptr<GinPort> &p) {
    return p->closed && std::none_of(p->queues.begin(), p->queues.end(), [](const GinQueue &q) { return q.used; });
  };
  ginPorts.erase(std::remove_if(ginPorts.begin(), ginPorts.end(), over), ginPorts.end());
}

GinPort *Engine::openGin(const GinPort &port) {
  closeGin(nullptr); // those that were still busy
  ginPorts.emplace_back(new GinPort(port));
  GinPort *p = ginPorts.back().get();
  p->identity = allocIdentity(p->rank, 0, 0, "GIN", KnownRef(), false);
  identities[p->identity].nic = true;
  u32 domains = u32(p->window.size());
  for (u32 i = 0; i < p->contexts * domains; i++) {
    GinQueue q{};
    q.port = p, q.index = i, q.domain = i % domains, q.depth = SHALLOWEST << (p->identity + i) % DEPTHS;
    p->queues.push_back(q);
  }
  return p;
}

GinQueue *Engine::ginQueue(GinPort *port, u32 context, u32 domain, Place place) {
  Fiber *f = cur;
  f->polled.clear();
  f->touchedGlobal = true;
  if (context < port->contexts && domain < port->window.size() && domain != port->domain &&
      port->rank == f->block->rank)
    return &port->queues[context * port->window.size() + domain];
  report(Fault::Misuse, 1000 + place, "%s: GIN context %u of %u to domain %u of %zu, from domain %u", me(place).c_str(),
         context, port->contexts, domain, port->window.size(), port->domain);
  return nullptr;
}

// Takes a place in the queue, and waits for one if need be.
void Engine::ginEnter(GinQueue *q) {
  maybeYield(4);
  while (q->used >= q->depth) {
    q->waiters.push_back(cur);
    block(State::GinRoom);
  }
  q->used++;
}

void Engine::ginSchedule(GinStep *step) { events.push({later(), sequence++, nullptr, nullptr, nullptr, step}); }

// The put's number in its queue; 0: none.
u32 Engine::ginPut(GinPort *port, u32 context, u32 domain, u64 to, u64 from, u32 bytes, Place place) {
  Fiber *f = cur;
  GinQueue *q = ginQueue(port, context, domain, place);
  if (!q || !bytes) return 0;
  u8 *src = port->window[port->domain] + from, *dst = port->window[domain] + to;
  if (from + bytes > port->windowBytes[port->domain] || to + bytes > port->windowBytes[domain]) {
    report(Fault::Bounds, 5ull << 20 | place, "%s: put of %u bytes from window offset 0x%llx to 0x%llx of 0x%zx",
           me(place).c_str(), bytes, static_cast<unsigned long long>(from), static_cast<unsigned long long>(to),
           port->windowBytes[domain]);
    return 0;
  }
  Region *r = regionFor(src, bytes, 4, "put from", place), *target = regionFor(dst, bytes, 4, "put to", place);
  if (!r || !target || bytes % 4) return 0;
  ginEnter(q);
  drain(); // what happened before the put is what it reads
  u32 number = ++q->issued;
  ginPuts++, ginPutBytes += bytes, ginContextsUsed |= 1ull << std::min(context, 63u);
  LastStamp writers;
  for (u32 i = 0; i < bytes; i += 4) {
    Word *w = Memory::wordAt(r, src + i);
    if (!writers.check(w->writer, w->writeEpoch, [&] { return ordered(f, w->writer, w->writeEpoch); }))
      reportRace(r, src + i, w, false, false, place);
    else if (w->pending)
      flushWord(w, src + i);
    w->reader = actorOf(port->identity, sourceSlot(q)), w->readEpoch = number, w->readPlace = place;
  }
  checkWrite(target, dst, nullptr, bytes, actorOf(port->identity, settledSlot(q)), number, 0, place);
  GinPut *put = new GinPut{q, number, dst, src, bytes, 0, false, {}};
  q->puts.push_back(put);
  ginSchedule(new GinStep{GinStep::ReadSource, put, 0, 0, q, 0, 0, 0, 0, {}});
  return number;
}

void Engine::ginSignal(GinPort *port, u32 context, u32 domain, u32 signal, u64 add, bool strong, Place place) {
  GinQueue *q = ginQueue(port, context, domain, place);
  if (!q) return;
  ginSignalAfter(q, signal, add, 0, strong ? q->issued : 0, place);
}

// A put and its signal are two entries of the queue, as they are of a NIC's; nothing comes between them.
void Engine::ginPutSignal(GinPort *port, u32 context, u32 domain, u64 to, u64 from, u32 bytes, u32 signal, u64 add,
                          bool strong, Place place) {
  GinQueue *q = ginQueue(port, context, domain, place);
  if (!q) return;
  u32 mine = ginPut(port, context, domain, to, from, bytes, place);
  if (strong)
    ginSignal(port, context, domain, signal, add, true, place);
  else if (mine)
    ginSignalAfter(q, signal, add, mine, mine, place);
}

// Clocks tell of all puts up to one: a receiver of a weak signal is told of none, not even the one it comes behind.
void Engine::ginSignalAfter(GinQueue *q, u32 signal, u64 add, u32 first, u32 last, Place place) {
  if (signal >= q->port->signals) {
    report(Fault::Bounds, 6ull << 20 | place, "%s: GIN signal %u of %u", me(place).c_str(), signal, q->port->signals);
    return;
  }
  ginEnter(q);
  drain();
  ReleaseRef release = makeRelease(true);
  if (!first && last) release->seen = joiner.join(release->seen, knowledge(q->port, settledSlot(q), last));
  ginSchedule(new GinStep{GinStep::Signal, nullptr, 0, 0, q, signal, first, last, add, release});
}

u64 Engine::ginRead(GinPort *port, u32 context, u32 signal, Place place) {
  if (context >= port->contexts || signal >= port->signals || port->rank != cur->block->rank) {
    report(Fault::Bounds, 7ull << 20 | place, "%s: GIN signal %u of %u, context %u of %u", me(place).c_str(), signal,
           port->signals, context, port->contexts);
    return 0;
  }
  return poll(ginSignalAt(port, port->domain, context, signal), 8, true, true, place);
}

// The sources of the context's puts may be written again; nothing is known of their arrival.
void Engine::ginFlush(GinPort *port, u32 context) {
  Fiber *f = cur;
  f->polled.clear();
  if (context >= port->contexts) return;
  u32 domains = u32(port->window.size());
  for (u32 d = 0; d < domains; d++) {
    GinQueue &q = port->queues[context * domains + d];
    u32 last = q.issued;
    auto unread = [&](const GinPut *p) { return p->number <= last && !p->read; };
    while (std::any_of(q.puts.begin(), q.puts.end(), unread)) {
      port->flushing.push_back(f);
      block(State::GinFlush);
    }
    if (last) f->known = joiner.join(f->known, knowledge(port, sourceSlot(&q), last));
  }
}

// ---- what happens later ---------------------------------------------------------------------------------------------

void Engine::ginStep(GinStep *s) {
  lastChange = now;
  progress++;
  GinPut *p = s->put;
  switch (s->kind) {
  case GinStep::ReadSource: {
    Region *r = memory.regionAt(p->from);
    if (r && !r->freed)
      p->data.assign(p->from, p->from + p->bytes);
    else {
      report(Fault::Freed, 3, "a put in flight reads %s", memory.where(p->from).c_str());
      p->data.resize(p->bytes);
    }
    p->read = true;
    for (u32 i = 0; i < p->bytes;) {
      u32 n = std::min(p->bytes - i, 64u << rng.below(7));
      p->piecesLeft++;
      ginSchedule(new GinStep{GinStep::Piece, p, i, n, s->queue, 0, 0, 0, 0, {}});
      i += n;
    }
    auto &v = s->queue->port->flushing;
    for (Fiber *f : v) wake(f);
    v.clear();
    break;
  }
  case GinStep::Piece:
    writeBytes(p->to + s->offset, &p->data[s->offset], s->bytes, ReleaseRef(), 0);
    if (!--p->piecesLeft) ginSettled(s->queue, p);
    break;
  case GinStep::Signal: {
    auto before = [&](const GinPut *x) { return x->number >= s->first && x->number <= s->last; };
    if (std::any_of(s->queue->puts.begin(), s->queue->puts.end(), before))
      s->queue->held.push_back(s);
    else
      ginDeliver(s);
    return;
  }
  }
  delete s;
}

static void leave(GinQueue *q, std::vector<Fiber *> &woken) {
  q->used--;
  woken.swap(q->waiters);
}

void Engine::ginSettled(GinQueue *q, GinPut *put) {
  std::vector<Fiber *> woken;
  q->puts.erase(std::find(q->puts.begin(), q->puts.end(), put));
  delete put;
  leave(q, woken);
  for (Fiber *f : woken) wake(f);
  std::vector<GinStep *> held;
  held.swap(q->held);
  for (GinStep *s : held) ginStep(s); // those that still wait are held again
}

void Engine::ginDeliver(GinStep *s) {
  GinQueue *q = s->queue;
  u8 *at = ginSignalAt(q->port, q->domain, q->index / u32(q->port->window.size()), s->signal);
  Region *r = memory.regionAt(at);
  if (r && !r->freed) {
    SyncWord &word = memory.syncOf(Memory::wordAt(r, at));
    ReleaseRef all(new Release); // whoever reads this value knows what every signal so far has told
    all->seen = s->release->seen, all->fenced = s->release->fenced;
    all->rank = s->release->rank, all->system = true;
    if (word.release) {
      all->seen = joiner.join(all->seen, word.release->seen);
      all->fenced = joiner.join(all->fenced, word.release->fenced);
    }
    u64 value;
    memcpy(&value, at, sizeof value);
    value += s->add;
    writeBytes(at, reinterpret_cast<u8 *>(&value), sizeof value, all, 0);
  } else
    report(Fault::Freed, 4, "a signal in flight reaches %s after it was freed", memory.where(at).c_str());
  std::vector<Fiber *> woken;
  leave(q, woken);
  for (Fiber *f : woken) wake(f);
  delete s;
}

// Everything in flight is dropped with the kernels that sent it; the events are gone already.
void Engine::ginForget() {
  for (auto &port : ginPorts) {
    port->flushing.clear();
    for (GinQueue &q : port->queues) {
      for (GinPut *p : q.puts) delete p;
      for (GinStep *s : q.held) delete s;
      q.puts.clear();
      q.held.clear();
      q.waiters.clear();
      q.used = 0;
    }
  }
}

} // namespace emu
