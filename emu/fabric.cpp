// Host threads and the engine: who waits, who runs the fibers, and what happens when nothing can go on. Time is real
// only where the engine must decide that a missing host call will not come.
#include "fabric.h"

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace emu {

using namespace std::chrono_literals;

epFailLineFn failLine;

static const auto GRACE = 100ms;         // a rank's host thread that is away this long is not waited for
static const auto MISSING_CALL = 2000ms; // without any call, kernels that wait for a peer's call see time pass
static const auto RELAX_CALL = 100ms;    // the same while hosts poll
static const u64 SLICE = 200000;         // scheduling decisions between looks at the lock
static const u64 OWN_STREAMS = 2;

ncclResult_t fail(ncclResult_t code, const char *format, ...) {
  char line[512];
  va_list a;
  va_start(a, format);
  vsnprintf(line, sizeof line, format, a);
  va_end(a);
  return failLine ? failLine(code, line) : code;
}

static std::mutex mutex_;
static std::atomic<int> wanting; // threads that ask for the lock

Lock lockEmulator() {
  wanting++;
  Lock l(mutex_);
  wanting--;
  return l;
}

static EngineOptions engineOptions(int ranks, const ncclEpEmuOptions_t &o) {
  EngineOptions e;
  e.seed = o.seed;
  e.ranks = u32(ranks);
  e.residentBlocks = o.num_sms;
  e.weakMemory = !o.no_weak_memory;
  return e;
}

Fabric::Fabric(int out, int up, const ncclEpEmuOptions_t &o)
    : scaleOut(out), scaleUp(up), numSms(o.num_sms), bug(o.bug), noBulkCopies(o.no_bulk_copies),
      ranks(size_t(out) * size_t(up)), engine(engineOptions(out * up, o)) {
  lastCall = idleSince = Clock_::now();
  for (size_t r = 0; r < ranks.size(); r++) {
    ranks[r].thread = std::this_thread::get_id();
    ranks[r].calledAt = lastCall;
    for (u64 i = 0; i < OWN_STREAMS; i++) {
      Stream *s;
      createStream(int(r), &s);
    }
  }
}

Fabric::~Fabric() {
  engine.abandon();
  for (Rank &r : ranks)
    for (auto &s : r.streams) engine.removeStream(s.get());
}

void Fabric::touch(int rank) {
  Rank &r = ranks[size_t(rank)];
  r.thread = std::this_thread::get_id();
  r.calledAt = lastCall = Clock_::now();
}

ncclResult_t Fabric::enter(int rank, const char *call) {
  touch(rank);
  Rank &r = ranks[size_t(rank)];
  if (!r.broken.empty())
    return fail(ncclInternalError, "%s: rank %d of the emulated fabric is stuck since an earlier call: %s", call, rank,
                r.broken.c_str());
  return ncclSuccess;
}

ncclResult_t Fabric::createStream(int rank, Stream **out) {
  Rank &r = ranks[size_t(rank)];
  r.streams.emplace_back(new Stream);
  *out = r.streams.back().get();
  (*out)->rank = rank;
  engine.addStream(*out, r.hostKnown);
  return ncclSuccess;
}

ncclResult_t Fabric::destroyStream(Lock &lock, int rank, Stream *s, const char *call) {
  Rank &r = ranks[size_t(rank)];
  if (r.broken.empty()) synchronize(lock, rank, s, call);
  for (size_t i = OWN_STREAMS; i < r.streams.size(); i++)
    if (r.streams[i].get() == s) {
      engine.removeStream(s);
      r.streams.erase(r.streams.begin() + long(i));
      return ncclSuccess;
    }
  return fail(ncclInvalidArgument, "%s: the default stream cannot be destroyed", call);
}

ncclResult_t Fabric::findStream(int rank, cudaStream_t handle, const char *call, Stream **out) {
  Rank &r = ranks[size_t(rank)];
  if (!handle) {
    *out = r.streams[0].get();
    return ncclSuccess;
  }
  for (auto &s : r.streams)
    if (reinterpret_cast<cudaStream_t>(s.get()) == handle) {
      *out = s.get();
      return ncclSuccess;
    }
  return fail(ncclInvalidArgument,
              "%s: stream %p is not one of rank %d's emulated streams: expected NULL or one that "
              "ncclEpEmuStreamCreate gave for this communicator",
              call, static_cast<void *>(handle), rank);
}

void Fabric::queue(int rank, Stream *s, StreamOp op) {
  op.hostKnown = ranks[size_t(rank)].hostKnown;
  s->ops.push_back(std::move(op));
  activity++;
  engine.hostDidSomething();
  changed.notify_all();
}

// ---- waiting --------------------------------------------------------------------------------------------------------

bool Fabric::satisfied(const Waiter &w) const {
  const Rank &r = ranks[size_t(w.rank)];
  switch (w.kind) {
  case Kind::Meeting:
    return w.meeting->done;
  case Kind::Relax:
    return episodes > w.episode || !r.broken.empty();
  case Kind::Stream:
    break;
  }
  if (!r.broken.empty()) return true;
  if (w.stream) return w.stream->ops.empty();
  return std::all_of(r.streams.begin(), r.streams.end(), [](auto &s) { return s->ops.empty(); });
}

// Releases the waiters whose wish is fulfilled; their threads count as away from now on. True when one of them waited
// for more than a chance to look again.
bool Fabric::settle() {
  bool any = false;
  for (Waiter *w : waiters)
    if (!w->released && satisfied(*w)) {
      w->released = true;
      Rank &r = ranks[size_t(w->rank)];
      r.calledAt = Clock_::now();
      any = any || w->kind != Kind::Relax;
    }
  changed.notify_all();
  return any;
}

// True when every rank's host thread waits here, or has been away for long enough not to be waited for.
bool Fabric::hostsAreWaiting(bool *someoneAway) const {
  auto now = Clock_::now();
  *someoneAway = false;
  for (const Rank &r : ranks) {
    if (!r.comm || r.away) continue;
    bool waits =
        std::any_of(waiters.begin(), waiters.end(), [&](Waiter *w) { return !w->released && w->thread == r.thread; });
    if (waits) continue;
    *someoneAway = true;
    if (now - r.calledAt < GRACE) return false;
  }
  return true;
}

bool Fabric::work() const {
  if (engine.anythingRunning()) return true;
  for (const Rank &r : ranks)
    for (auto &s : r.streams)
      if (!s->ops.empty()) return true;
  return false;
}

void Fabric::runToIdle(Lock &lock) {
  running = true;
  while (engine.run(SLICE) == Engine::Outcome::Busy) { // let host calls of late ranks in
    if (!wanting) continue;
    lock.unlock();
    while (wanting) std::this_thread::yield();
    lock.lock();
  }
  running = false;
  episodes++;
}

// Nothing can run, no timed wait is left, no host call will come: the ranks whose work hangs fail from here on.
void Fabric::breakStuck() {
  engine.checkResidency();
  engine.reportStuck();
  std::string text = engine.reports.text(), why = text.substr(0, text.find('\n')); // the first fault may be the cause
  size_t from = text.rfind("[deadlock]");
  if (from != 0 && from != std::string::npos) why += "; then " + text.substr(from, 250);
  if (from == 0) why = text.substr(0, 300);
  std::replace(why.begin(), why.end(), '\n', ';');
  engine.abandon();
  for (Rank &r : ranks) {
    bool stuck = false;
    for (auto &s : r.streams) {
      stuck = stuck || !s->ops.empty() || s->dropped;
      s->ops.clear();
      s->dropped = false;
    }
    if (stuck) r.broken = why;
  }
  endMeeting("a rank is stuck in an earlier call");
}

// Nobody else will come.
void Fabric::endMeeting(const std::string &why) {
  if (!meeting) return;
  meeting->error = why;
  meeting->done = true;
  meeting.reset();
}

bool Fabric::wait(Lock &lock, Waiter &w, Clock_::time_point deadline) {
  w.thread = std::this_thread::get_id();
  w.episode = episodes;
  if (w.kind != Kind::Relax && satisfied(w)) return true;
  waiters.push_back(&w);
  while (!w.released) {
    auto now = Clock_::now();
    if (now >= deadline) break;
    bool away = false;
    if (running || !hostsAreWaiting(&away)) {
      changed.wait_for(lock, std::min<Clock_::duration>(deadline - now, 5ms));
      continue;
    }
    u64 before = engine.progress;
    bool fresh = activity != activityRun;
    activityRun = activity;
    engine.hostDidSomething();
    runToIdle(lock);
    if (fresh || (engine.progress != before && !advanced)) idleSince = Clock_::now();
    advanced = advanced && !fresh;
    if (settle()) continue;
    // Nobody's wish came true. Time passes for the kernels once no host call can be expected any more.
    bool polling = std::any_of(waiters.begin(), waiters.end(), [](Waiter *x) { return x->kind == Kind::Relax; });
    auto since = std::max(idleSince, away ? lastCallOfAway() : idleSince);
    Clock_::duration patience = away ? Clock_::duration(MISSING_CALL) : polling ? Clock_::duration(RELAX_CALL) : 0ms;
    if (work() && Clock_::now() - since >= patience) {
      idleSince = since;
      if (engine.liftLimits()) continue;
      bool stopped = std::any_of(ranks.begin(), ranks.end(), [](const Rank &r) { return r.away; });
      if (!away && !stopped) engine.checkResidency(); // a wait for a rank that is stopped ends in time
      if (!engine.advanceClock()) {
        breakStuck();
        settle();
      }
      advanced = true; // what happens now is no reason to be patient again
      continue;
    }
    if (!w.released) changed.wait_for(lock, std::min<Clock_::duration>(deadline - Clock_::now(), away ? 5ms : 1ms));
  }
  bool released = w.released;
  waiters.erase(std::find(waiters.begin(), waiters.end(), &w));
  return released;
}

Clock_::time_point Fabric::lastCallOfAway() const {
  Clock_::time_point last{};
  for (const Rank &r : ranks) {
    bool waits = std::any_of(waiters.begin(), waiters.end(), [&](Waiter *w) { return w->thread == r.thread; });
    if (r.comm && !r.away && !waits) last = std::max(last, r.calledAt);
  }
  return last;
}

ncclResult_t Fabric::synchronize(Lock &lock, int rank, Stream *s, const char *call) {
  Waiter w{Kind::Stream, rank, {}};
  w.stream = s;
  wait(lock, w, Clock_::time_point::max());
  ncclResult_t rc = enter(rank, call);
  if (rc == ncclSuccess) ranks[size_t(rank)].hostKnown = engine.joiner.join(ranks[size_t(rank)].hostKnown, s->known);
  return rc;
}

ncclResult_t Fabric::synchronizeRank(Lock &lock, int rank, const char *call) {
  Waiter w{Kind::Stream, rank, {}};
  wait(lock, w, Clock_::time_point::max());
  ncclResult_t rc = enter(rank, call);
  Rank &r = ranks[size_t(rank)];
  if (rc == ncclSuccess)
    for (auto &s : r.streams) r.hostKnown = engine.joiner.join(r.hostKnown, s->known);
  return rc;
}

void Fabric::copyNow(int rank, void *dst, const void *src, size_t bytes) {
  Rank &r = ranks[size_t(rank)];
  Stream *s = r.streams[1].get();
  s->known = engine.joiner.join(s->known, r.hostKnown);
  engine.copyInStream(s, static_cast<u8 *>(dst), static_cast<const u8 *>(src), bytes, 0, false);
  r.hostKnown = engine.joiner.join(r.hostKnown, s->known);
  activity++;
}

void Fabric::relax(Lock &lock, int rank, u64 deadlineNs) {
  Waiter w{Kind::Relax, rank, {}};
  Clock_::time_point deadline{std::chrono::nanoseconds(deadlineNs)}; // steady_clock is CLOCK_MONOTONIC
  u64 before = engine.progress;
  wait(lock, w, deadline);
  if (engine.progress == before) changed.wait_for(lock, 200us);
}

ncclResult_t Fabric::exchange(Lock &lock, int rank, const char *call, const void *mine, void *all, size_t bytes,
                              u64 patienceNs) {
  size_t n = ranks.size();
  for (size_t r = 0; r < n; r++) { // it will not come any more
    if (!ranks[r].broken.empty())
      return fail(ncclInternalError, "%s: rank %zu is stuck since an earlier call", call, r);
    if (!ranks[r].comm) return fail(ncclInvalidUsage, "%s: rank %zu has destroyed its communicator", call, r);
  }
  if (!meeting) {
    meeting = std::make_shared<Meeting>();
    meeting->call = call;
    meeting->bytes = bytes;
    meeting->data.resize(bytes * n);
    meeting->here.resize(n);
  }
  std::shared_ptr<Meeting> m = meeting;
  if (m->here[size_t(rank)])
    return fail(ncclInvalidUsage, "%s: rank %d is in a collective call already: one thread a rank", call, rank);
  m->here[size_t(rank)] = true;
  m->arrived++;
  if (m->call != call || m->bytes != bytes) {
    char text[256];
    snprintf(text, sizeof text, "rank %d calls %s with %zu bytes a rank, another rank %s with %zu", rank, call, bytes,
             m->call.c_str(), m->bytes);
    m->error = text;
  } else
    memcpy(&m->data[bytes * size_t(rank)], mine, bytes);
  if (m->arrived == int(n)) {
    m->done = true;
    meeting.reset();
    KnownRef together; // the hosts have met: what one had synchronised with, all have
    for (Rank &r : ranks) together = engine.joiner.join(together, r.hostKnown);
    for (Rank &r : ranks) r.hostKnown = together;
    settle();
  }
  Waiter w{Kind::Meeting, rank, {}};
  w.meeting = m.get();
  const auto patience = std::chrono::nanoseconds(std::min(patienceNs, MEETING_NS));
  if (!wait(lock, w, Clock_::now() + patience) && !m->done) {
    std::string missing;
    for (size_t i = 0; i < n; i++)
      if (!m->here[i]) missing += (missing.empty() ? "" : ", ") + std::to_string(i);
    m->error = "waited " + std::to_string(patience / 1ms) + " ms for rank " + missing + ", which did not call";
    m->done = true;
    if (meeting == m) meeting.reset();
    settle();
  }
  if (!m->error.empty()) return fail(ncclInvalidUsage, "%s: %s", call, m->error.c_str());
  memcpy(all, m->data.data(), bytes * n);
  return enter(rank, call);
}

void Fabric::stop(int rank, bool stopped, u64 after) {
  ranks[size_t(rank)].away = stopped;
  if (stopped)
    engine.freeze(rank, after);
  else
    engine.thaw(rank);
  activity++;
  changed.notify_all();
}

void Fabric::leave(int rank) {
  Rank &r = ranks[size_t(rank)];
  r.comm = nullptr;
  endMeeting("rank " + std::to_string(rank) + " has destroyed its communicator");
  settle();
  activity++;
  changed.notify_all();
}

bool Fabric::empty() const {
  return std::all_of(ranks.begin(), ranks.end(), [](const Rank &r) { return !r.comm; });
}

} // namespace emu
