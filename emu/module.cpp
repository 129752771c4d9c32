// The module's one exported symbol: the table behind the ncclEpEmu* calls of nccl_ep_ext.h, and the way from a
// communicator to its backend. No exception leaves it: memory that is not there becomes an error.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <set>

#include "backend_emu.h"
#include "bugs.h"

namespace emu {

static const unsigned MAX_SMS = 1024; // more than any GPU has: what is above is no count

static std::set<Comm *> &comms() { // under the lock
  static std::set<Comm *> s;
  return s;
}

static Comm *find(ncclComm_t comm) {
  Comm *c = reinterpret_cast<Comm *>(comm);
  return comms().count(c) ? c : nullptr;
}

// Runs `body(lock, comm)` for a live communicator, whose rank is not broken unless something is given back.
template <class Body> static ncclResult_t with(ncclComm_t handle, const char *call, Body body, bool givesBack = false) {
  try {
    Lock lock = lockEmulator();
    Comm *c = find(handle);
    if (!c)
      return fail(ncclInvalidArgument, "%s: comm %p is not an emulated communicator", call,
                  static_cast<void *>(handle));
    c->fabric->touch(c->rank);
    ncclResult_t rc = givesBack ? ncclSuccess : c->fabric->enter(c->rank, call);
    return rc != ncclSuccess ? rc : body(lock, *c);
  } catch (const std::exception &e) { // of the standard library's containers: no memory, or a size beyond all
    return fail(ncclSystemError, "%s: out of host memory (%s)", call, e.what());
  }
}

// Whether `bytes` at p can be copied or filled, as far as that can be known: of host memory only its address is.
static ncclResult_t checkSpan(Fabric &f, const char *call, const char *name, const void *p, size_t bytes) {
  Memory &memory = f.engine.memory;
  Region *r = memory.regionAt(p);
  if (!p)
    return fail(ncclInvalidArgument, "%s: %s is NULL: expected %zu bytes of host or emulated memory", call, name,
                bytes);
  if (r && r->freed)
    return fail(ncclInvalidArgument, "%s: %s is %s: expected memory that was not freed", call, name,
                memory.where(p).c_str());
  if (r && !r->holds(p, bytes))
    return fail(ncclInvalidArgument, "%s: %zu bytes at %s, which is %s: expected no more than its %zu bytes hold", call,
                bytes, name, memory.where(p).c_str(), r->bytes);
  if (!r && (memory.covers(p) || bytes > size_t(PTRDIFF_MAX)))
    return fail(ncclInvalidArgument, "%s: %zu bytes at %s %p: expected host memory, or memory from ncclEpEmuMalloc",
                call, bytes, name, p);
  return ncclSuccess;
}

static int ownsComm(ncclComm_t comm) {
  Lock lock = lockEmulator();
  return find(comm) != nullptr;
}

static ncclResult_t open(ncclComm_t comm, epBackend **out) {
  return with(comm, "open", [&](Lock &, Comm &c) {
    *out = makeBackend(c.fabric, c.rank);
    return ncclSuccess;
  });
}

static ncclResult_t commInitAll(ncclComm_t *out, int scaleOut, int scaleUp, const ncclEpEmuOptions_t *given) {
  if (!out || scaleOut < 1 || scaleUp < 1 || scaleOut > 1024 || scaleUp > 1024 || scaleOut * scaleUp > 1024)
    return fail(ncclInvalidArgument,
                "ncclEpEmuCommInitAll: comms %p, %d x %d ranks: expected an array and 1 to 1024 ranks",
                static_cast<void *>(out), scaleOut, scaleUp);
  ncclEpEmuOptions_t o{};
  o.seed = 1;
  if (given) memcpy(&o, given, std::min<size_t>(given->size, sizeof o));
  if (!o.num_sms) o.num_sms = 8;
  if (o.num_sms > MAX_SMS)
    return fail(ncclInvalidArgument, "ncclEpEmuCommInitAll: options.num_sms %u: expected at most %u, or 0 for 8",
                o.num_sms, MAX_SMS);
  if (o.bug >= EP_BUG_COUNT)
    return fail(ncclInvalidArgument, "ncclEpEmuCommInitAll: options.bug %u: expected 0 or a planted fault below %d",
                o.bug, int(EP_BUG_COUNT));
  if (o.no_weak_memory > 1 || o.no_bulk_copies > 1)
    return fail(ncclInvalidArgument,
                "ncclEpEmuCommInitAll: options.no_weak_memory %u, options.no_bulk_copies %u: expected 0 or 1",
                o.no_weak_memory, o.no_bulk_copies);
  try {
    Lock lock = lockEmulator();
    auto fabric = std::make_shared<Fabric>(scaleOut, scaleUp, o);
    for (int r = 0; r < scaleOut * scaleUp; r++) {
      Comm *c = new Comm{fabric, r};
      fabric->ranks[size_t(r)].comm = c;
      comms().insert(c);
      out[r] = reinterpret_cast<ncclComm_t>(c);
    }
  } catch (const std::exception &e) {
    return fail(ncclSystemError, "ncclEpEmuCommInitAll: out of host memory (%s)", e.what());
  }
  return ncclSuccess;
}

static ncclResult_t commDestroy(ncclComm_t comm) {
  Lock lock = lockEmulator();
  Comm *c = find(comm);
  if (!c)
    return fail(ncclInvalidArgument, "ncclEpEmuCommDestroy: %p is not an emulated communicator",
                static_cast<void *>(comm));
  std::shared_ptr<Fabric> fabric = c->fabric;
  fabric->touch(c->rank);
  if (fabric->ranks[size_t(c->rank)].broken.empty()) fabric->synchronizeRank(lock, c->rank, "ncclEpEmuCommDestroy");
  fabric->leave(c->rank);
  comms().erase(c);
  delete c;
  return ncclSuccess;
}

static ncclResult_t allocate(ncclComm_t comm, void **ptr, size_t bytes, const char *name) {
  return with(comm, "ncclEpEmuMalloc", [&](Lock &, Comm &c) {
    if (!ptr) return fail(ncclInvalidArgument, "ncclEpEmuMalloc: ptr is NULL: expected room for the address");
    u8 *p = c.fabric->engine.memory.allocate(name ? name : "memory", c.rank, RegionKind::Device, bytes);
    if (!p) return fail(ncclSystemError, "ncclEpEmuMalloc: %zu bytes are not there", bytes);
    *ptr = p;
    return ncclSuccess;
  });
}

static ncclResult_t release(ncclComm_t comm, void *ptr) {
  return with(
      comm, "ncclEpEmuFree",
      [&](Lock &lock, Comm &c) { return freeRegion(lock, *c.fabric, c.rank, ptr, false, "ncclEpEmuFree"); }, true);
}

static ncclResult_t copy(ncclComm_t comm, void *dst, const void *src, size_t bytes, cudaStream_t stream) {
  return with(comm, "ncclEpEmuMemcpy", [&](Lock &, Comm &c) {
    Stream *s;
    ncclResult_t rc = c.fabric->findStream(c.rank, stream, "ncclEpEmuMemcpy", &s);
    if (rc != ncclSuccess || !bytes) return rc;
    if ((rc = checkSpan(*c.fabric, "ncclEpEmuMemcpy", "dst", dst, bytes)) != ncclSuccess ||
        (rc = checkSpan(*c.fabric, "ncclEpEmuMemcpy", "src", src, bytes)) != ncclSuccess)
      return rc;
    StreamOp op{StreamOp::Copy};
    op.dst = static_cast<u8 *>(dst), op.src = static_cast<const u8 *>(src), op.bytes = bytes;
    if (!c.fabric->engine.memory.regionAt(src))
      op.staged.assign(op.src, op.src + bytes); // the host may reuse it at once
    c.fabric->queue(c.rank, s, std::move(op));
    return ncclSuccess;
  });
}

static ncclResult_t fill(ncclComm_t comm, void *dst, int value, size_t bytes, cudaStream_t stream) {
  return with(comm, "ncclEpEmuMemset", [&](Lock &, Comm &c) {
    Stream *s;
    ncclResult_t rc = c.fabric->findStream(c.rank, stream, "ncclEpEmuMemset", &s);
    if (rc != ncclSuccess || !bytes) return rc;
    rc = checkSpan(*c.fabric, "ncclEpEmuMemset", "dst", dst, bytes);
    return rc != ncclSuccess ? rc : queueFill(*c.fabric, c.rank, dst, value, bytes, stream, "ncclEpEmuMemset");
  });
}

static ncclResult_t streamCreate(ncclComm_t comm, cudaStream_t *stream) {
  return with(comm, "ncclEpEmuStreamCreate", [&](Lock &, Comm &c) {
    if (!stream) return fail(ncclInvalidArgument, "ncclEpEmuStreamCreate: stream is NULL: expected room for a stream");
    Stream *s;
    ncclResult_t rc = c.fabric->createStream(c.rank, &s);
    if (rc == ncclSuccess) *stream = reinterpret_cast<cudaStream_t>(s);
    return rc;
  });
}

static ncclResult_t streamDestroy(ncclComm_t comm, cudaStream_t stream) {
  return with(
      comm, "ncclEpEmuStreamDestroy",
      [&](Lock &lock, Comm &c) {
        Stream *s;
        ncclResult_t rc = c.fabric->findStream(c.rank, stream, "ncclEpEmuStreamDestroy", &s);
        return rc != ncclSuccess ? rc : c.fabric->destroyStream(lock, c.rank, s, "ncclEpEmuStreamDestroy");
      },
      true);
}

static ncclResult_t streamSynchronize(ncclComm_t comm, cudaStream_t stream) {
  return with(comm, "ncclEpEmuStreamSynchronize", [&](Lock &lock, Comm &c) {
    Stream *s;
    ncclResult_t rc = c.fabric->findStream(c.rank, stream, "ncclEpEmuStreamSynchronize", &s);
    return rc != ncclSuccess ? rc : c.fabric->synchronize(lock, c.rank, s, "ncclEpEmuStreamSynchronize");
  });
}

// ---- events ---------------------------------------------------------------------------------------------------------

static std::shared_ptr<StreamEvent> findEvent(Fabric &f, int rank, cudaEvent_t event) {
  for (auto &e : f.ranks[size_t(rank)].events)
    if (reinterpret_cast<cudaEvent_t>(e.get()) == event) return e;
  return nullptr;
}

static ncclResult_t noEvent(int rank, cudaEvent_t event, const char *call) {
  return fail(ncclInvalidArgument,
              "%s: event %p is not one of rank %d's: expected one that ncclEpEmuEventCreate gave "
              "for this communicator, not yet destroyed",
              call, static_cast<void *>(event), rank);
}

std::shared_ptr<StreamEvent> makeEvent(Fabric &f, int rank) {
  auto &v = f.ranks[size_t(rank)].events;
  v.push_back(std::make_shared<StreamEvent>());
  return v.back();
}

ncclResult_t dropEvent(Fabric &f, int rank, cudaEvent_t event, const char *call) {
  auto e = findEvent(f, rank, event);
  if (!e) return noEvent(rank, event, call);
  auto &v = f.ranks[size_t(rank)].events;
  v.erase(std::find(v.begin(), v.end(), e));
  return ncclSuccess;
}

ncclResult_t queueEvent(Fabric &f, int rank, cudaEvent_t event, cudaStream_t stream, bool record, const char *call) {
  auto e = findEvent(f, rank, event);
  Stream *s;
  ncclResult_t rc = f.findStream(rank, stream, call, &s);
  if (rc != ncclSuccess) return rc;
  if (!e) return noEvent(rank, event, call);
  if (!record && !e->recordsQueued) return ncclSuccess; // never recorded: nothing to wait for
  StreamOp op{record ? StreamOp::Record : StreamOp::Wait};
  op.event = e;
  op.record = record ? ++e->recordsQueued : e->recordsQueued;
  f.queue(rank, s, std::move(op));
  return ncclSuccess;
}

static ncclResult_t eventCreate(ncclComm_t comm, cudaEvent_t *event) {
  return with(comm, "ncclEpEmuEventCreate", [&](Lock &, Comm &c) {
    if (!event) return fail(ncclInvalidArgument, "ncclEpEmuEventCreate: event is NULL: expected room for an event");
    *event = reinterpret_cast<cudaEvent_t>(makeEvent(*c.fabric, c.rank).get());
    return ncclSuccess;
  });
}

static ncclResult_t eventDestroy(ncclComm_t comm, cudaEvent_t event) {
  static const char call[] = "ncclEpEmuEventDestroy";
  return with(
      comm, call, [&](Lock &, Comm &c) { return dropEvent(*c.fabric, c.rank, event, call); }, true);
}

static ncclResult_t eventRecord(ncclComm_t comm, cudaEvent_t event, cudaStream_t stream) {
  static const char call[] = "ncclEpEmuEventRecord";
  return with(comm, call, [&](Lock &, Comm &c) { return queueEvent(*c.fabric, c.rank, event, stream, true, call); });
}

static ncclResult_t streamWaitEvent(ncclComm_t comm, cudaStream_t stream, cudaEvent_t event) {
  static const char call[] = "ncclEpEmuStreamWaitEvent";
  return with(comm, call, [&](Lock &, Comm &c) { return queueEvent(*c.fabric, c.rank, event, stream, false, call); });
}

static ncclResult_t streamDelay(ncclComm_t comm, cudaStream_t stream, unsigned long long ns) {
  return with(comm, "ncclEpEmuStreamDelay", [&](Lock &, Comm &c) {
    Stream *s;
    ncclResult_t rc = c.fabric->findStream(c.rank, stream, "ncclEpEmuStreamDelay", &s);
    if (rc != ncclSuccess) return rc;
    StreamOp op(StreamOp::Delay);
    op.delayNs = ns;
    c.fabric->queue(c.rank, s, std::move(op));
    return ncclSuccess;
  });
}

// ---- windows and the report -----------------------------------------------------------------------------------------

static ncclResult_t windowRegister(ncclComm_t comm, void *buffer, size_t bytes, ncclWindow_t *window) {
  return with(comm, "ncclEpEmuWindowRegister", [&](Lock &lock, Comm &c) {
    Fabric &f = *c.fabric;
    Region *r = f.engine.memory.regionAt(buffer);
    if (!window)
      return fail(ncclInvalidArgument, "ncclEpEmuWindowRegister: window is NULL: expected room for a window");
    if (!r || r->freed || r->rank != c.rank || !r->holds(buffer, bytes))
      return fail(ncclInvalidArgument,
                  "ncclEpEmuWindowRegister: %zu bytes at %p, which is %s: expected bytes of one "
                  "ncclEpEmuMalloc of rank %d",
                  bytes, buffer, f.engine.memory.where(buffer).c_str(), c.rank);
    struct Part {
      u8 *base;
      size_t bytes;
    } mine{static_cast<u8 *>(buffer), bytes};
    std::vector<Part> all(f.ranks.size());
    ncclResult_t rc = f.exchange(lock, c.rank, "ncclEpEmuWindowRegister", &mine, all.data(), sizeof mine);
    if (rc != ncclSuccess) return rc;
    auto w = std::make_shared<Window>();
    w->owned = false;
    for (Part &p : all) {
      w->base.push_back(p.base);
      w->bytes.push_back(p.bytes);
    }
    f.ranks[size_t(c.rank)].windows.push_back(w);
    *window = reinterpret_cast<ncclWindow_t>(w.get());
    return ncclSuccess;
  });
}

static ncclResult_t windowDeregister(ncclComm_t comm, ncclWindow_t window) {
  return with(
      comm, "ncclEpEmuWindowDeregister",
      [&](Lock &, Comm &c) {
        auto &v = c.fabric->ranks[size_t(c.rank)].windows;
        for (size_t i = 0; i < v.size(); i++)
          if (reinterpret_cast<ncclWindow_t>(v[i].get()) == window) {
            v.erase(v.begin() + long(i));
            return ncclSuccess;
          }
        return fail(ncclInvalidArgument,
                    "ncclEpEmuWindowDeregister: window %p is not one of rank %d's: expected one "
                    "that ncclEpEmuWindowRegister gave for this communicator",
                    static_cast<void *>(window), c.rank);
      },
      true);
}

static ncclResult_t rankStop(ncclComm_t comm, int stopped, unsigned long long after) {
  return with(comm, "ncclEpEmuRankStop", [&](Lock &, Comm &c) {
    c.fabric->stop(c.rank, stopped != 0, after);
    return ncclSuccess;
  });
}

// Also for broken ranks: it is where the reason stands.
static ncclResult_t report(ncclComm_t comm, ncclEpEmuReport_t *out) {
  Lock lock = lockEmulator();
  Comm *c = find(comm);
  if (!c || !out || out->size < sizeof *out)
    return fail(ncclInvalidArgument, "ncclEpEmuGetReport: %s",
                c ? "report is NULL or its size is wrong" : "not an emulated communicator");
  Engine &e = c->fabric->engine;
  out->faults = e.reports.count();
  out->switches = e.switches;
  out->clock_ns = e.clockNs;
  out->gin_puts = e.ginPuts;
  out->gin_put_bytes = e.ginPutBytes;
  out->gin_contexts_used = e.ginContextsUsed;
  size_t n = std::min(e.reports.text().size(), sizeof out->text - 1);
  memcpy(out->text, e.reports.text().data(), n);
  out->text[n] = 0;
  e.reports.clear();
  return ncclSuccess;
}

static const epEmuModule module_ = {EP_EMU_MODULE_VERSION,
                                    ownsComm,
                                    open,
                                    commInitAll,
                                    commDestroy,
                                    allocate,
                                    release,
                                    copy,
                                    fill,
                                    streamCreate,
                                    streamDestroy,
                                    streamSynchronize,
                                    eventCreate,
                                    eventDestroy,
                                    eventRecord,
                                    streamWaitEvent,
                                    windowRegister,
                                    windowDeregister,
                                    report,
                                    streamDelay,
                                    rankStop};

} // namespace emu

extern "C" __attribute__((visibility("default"))) const epEmuModule *ncclEpEmuModule(epFailLineFn fail);

const epEmuModule *ncclEpEmuModule(epFailLineFn fail) {
  emu::failLine = fail;
  return &emu::module_;
}
