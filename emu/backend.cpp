// The host runtime's table of operations (host/backend.h) on the emulated fabric.
#include "backend_emu.h"

#include <cstdio>
#include <cstring>

#include "kernels.h"

namespace emu {

static const int SMEM_PER_BLOCK = 227 << 10;
static const unsigned MAX_THREADS = 1024;

struct Kernel {
  int id;
  epConfig config;
};

struct Backend {
  epBackend base; // first: the host knows this object by it
  std::shared_ptr<Fabric> fabric;
  int rank;
  std::vector<std::unique_ptr<Kernel>> kernels;
  std::vector<std::shared_ptr<Window>> windows;
};

static Backend *of(epBackend *be) { return reinterpret_cast<Backend *>(be); }

// One call of one rank: takes the lock, checks the rank.
struct Call {
  Call(epBackend *be, const char *name) : b(of(be)), lock(lockEmulator()), rc(b->fabric->enter(b->rank, name)) {}
  explicit Call(epBackend *be) : b(of(be)), lock(lockEmulator()), rc(ncclSuccess) {
    b->fabric->touch(b->rank);
  } // gives back
  Backend *b;
  Lock lock;
  ncclResult_t rc;
  Fabric &fabric() { return *b->fabric; }
  Rank &rank() { return b->fabric->ranks[size_t(b->rank)]; }
};

static ncclResult_t allocate(Fabric &f, int rank, const char *name, RegionKind kind, size_t bytes, u8 **out) {
  *out = f.engine.memory.allocate(name, rank, kind, bytes);
  return *out ? ncclSuccess
              : fail(ncclSystemError, "emulated memory: %zu bytes for %s of rank %d are not there", bytes, name, rank);
}

ncclResult_t freeRegion(Lock &lock, Fabric &f, int rank, void *p, bool mapped, const char *call) {
  if (!p) return ncclSuccess;
  Region *r = f.engine.memory.regionAt(p);
  if (!r || r->base != p || r->freed || r->rank != rank || (r->kind == RegionKind::Mapped) != mapped)
    return fail(ncclInvalidArgument,
                "%s: %p is not the start of memory that rank %d holds: expected an address as it "
                "was given out, not yet freed",
                call, p, rank);
  if (f.ranks[size_t(rank)].broken.empty())
    f.synchronizeRank(lock, rank, call); // as cudaFree does; an error is told by others
  f.engine.memory.release(r);
  return ncclSuccess;
}

static void destroy(epBackend *be) {
  Lock lock = lockEmulator();
  delete of(be);
}

static ncclResult_t topology(epBackend *be, epTopology *out) {
  Call c(be, "topology");
  Fabric &f = c.fabric();
  int rank = c.b->rank;
  *out = epTopology{};
  out->ranks = f.scaleOut * f.scaleUp, out->rank = rank;
  out->scaleUpRanks = f.scaleUp, out->scaleUpRank = rank % f.scaleUp;
  out->scaleOutRanks = f.scaleOut, out->scaleOutRank = rank / f.scaleUp;
  out->device = -1;
  out->arch = 0;
  out->numSms = int(f.numSms);
  out->smemPerBlock = SMEM_PER_BLOCK;
  out->gin = 1;
  out->bulkCopies = !f.noBulkCopies;
  return c.rc;
}

static ncclResult_t allGather(epBackend *be, const void *mine, void *all, size_t bytes) {
  Call c(be, "all-gather");
  if (c.rc != ncclSuccess) return c.rc;
  return c.fabric().exchange(c.lock, c.b->rank, "all-gather", mine, all, bytes, c.b->base.patienceNs);
}

static ncclResult_t alloc(epBackend *be, void **dev, size_t bytes) {
  Call c(be, "alloc");
  u8 *p;
  ncclResult_t rc =
      c.rc != ncclSuccess ? c.rc : allocate(c.fabric(), c.b->rank, "library memory", RegionKind::Device, bytes, &p);
  if (rc == ncclSuccess) *dev = p;
  return rc;
}

static ncclResult_t freeDevice(epBackend *be, void *dev) {
  Call c(be);
  return freeRegion(c.lock, c.fabric(), c.b->rank, dev, false, "free");
}

static ncclResult_t allocMapped(epBackend *be, void **host, void **dev, size_t bytes) {
  Call c(be, "allocMapped");
  u8 *p;
  ncclResult_t rc =
      c.rc != ncclSuccess ? c.rc : allocate(c.fabric(), c.b->rank, "mapped memory", RegionKind::Mapped, bytes, &p);
  if (rc == ncclSuccess) *host = *dev = p;
  return rc;
}

static ncclResult_t freeMapped(epBackend *be, void *host) {
  Call c(be);
  return freeRegion(c.lock, c.fabric(), c.b->rank, host, true, "freeMapped");
}

static ncclResult_t windowCreate(epBackend *be, size_t bytes, epWindow **out, void **peers) {
  Call c(be, "windowCreate");
  Fabric &f = c.fabric();
  size_t n = f.ranks.size();
  u8 *mine;
  ncclResult_t rc = c.rc != ncclSuccess ? c.rc : allocate(f, c.b->rank, "window", RegionKind::Window, bytes, &mine);
  if (rc != ncclSuccess) return rc;
  auto w = std::make_shared<Window>();
  w->base.resize(n);
  w->bytes.assign(n, bytes);
  w->owned = true;
  rc = f.exchange(c.lock, c.b->rank, "windowCreate", &mine, w->base.data(), sizeof mine, c.b->base.patienceNs);
  if (rc != ncclSuccess) {
    f.engine.memory.release(f.engine.memory.regionAt(mine));
    return rc;
  }
  for (size_t r = 0; r < n; r++) peers[r] = f.reaches(c.b->rank, int(r)) ? w->base[r] : nullptr;
  c.b->windows.push_back(w);
  *out = reinterpret_cast<epWindow *>(w.get());
  return ncclSuccess;
}

static ncclResult_t windowDestroy(epBackend *be, epWindow *window) {
  Call c(be);
  auto &v = c.b->windows;
  for (size_t i = 0; i < v.size(); i++)
    if (reinterpret_cast<epWindow *>(v[i].get()) == window) {
      u8 *base = v[i]->base[size_t(c.b->rank)], *signals = v[i]->signals;
      GinPort *gin = v[i]->gin;
      v.erase(v.begin() + long(i));
      ncclResult_t rc = freeRegion(c.lock, c.fabric(), c.b->rank, base, false, "windowDestroy");
      ncclResult_t other = freeRegion(c.lock, c.fabric(), c.b->rank, signals, false, "windowDestroy");
      if (gin) c.fabric().engine.closeGin(gin);
      return rc != ncclSuccess ? rc : other;
    }
  return fail(ncclInvalidArgument, "windowDestroy: not a window of this group");
}

static ncclResult_t windowAddress(epBackend *be, ncclWindow_t win, uint64_t offset, uint64_t size, void **dev,
                                  void **shared) {
  Call c(be, "windowAddress");
  for (auto &w : c.rank().windows)
    if (reinterpret_cast<ncclWindow_t>(w.get()) == win) {
      size_t bytes = w->bytes[size_t(c.b->rank)];
      if (offset >= bytes || size > bytes - offset)
        return fail(ncclInvalidArgument, "win_offset %llu: %llu bytes from there are not inside the window's %zu",
                    static_cast<unsigned long long>(offset), static_cast<unsigned long long>(size), bytes);
      *dev = w->base[size_t(c.b->rank)] + offset;
      if (shared) *shared = *dev; // one address space for all ranks
      return c.rc;
    }
  return fail(ncclInvalidArgument, "win_hdl is not a window registered with this emulated communicator");
}

static ncclResult_t kernel(epBackend *be, int id, const epConfig *config, epKernel **out) {
  Call c(be, "kernel");
  if (c.rc != ncclSuccess) return c.rc;
  if (id < 0 || id >= EP_KERNEL_COUNT) return fail(ncclInternalError, "no kernel %d", id);
  c.b->kernels.emplace_back(new Kernel{id, *config});
  c.b->kernels.back()->config.bug = c.fabric().bug;
  *out = reinterpret_cast<epKernel *>(c.b->kernels.back().get());
  return ncclSuccess;
}

static ncclResult_t launch(epBackend *be, epKernel *k, const epLaunch *l, cudaStream_t stream) {
  Call c(be, "launch");
  Stream *s;
  ncclResult_t rc = c.rc != ncclSuccess ? c.rc : c.fabric().findStream(c.b->rank, stream, "launch", &s);
  if (rc != ncclSuccess) return rc;
  Kernel *kernel = reinterpret_cast<Kernel *>(k);
  if (!l->blocks || !l->threads || l->threads % 32 || l->threads > MAX_THREADS ||
      l->smemBytes > unsigned(SMEM_PER_BLOCK) || l->threads != kernel->config.threads)
    return fail(ncclInternalError,
                "launch of %s: %u blocks of %u threads (compiled for %u) with %u bytes of shared memory",
                kernelName(kernel->id), l->blocks, l->threads, kernel->config.threads, l->smemBytes);
  StreamOp op{StreamOp::Kernel};
  op.name = kernelName(kernel->id);
  op.body = kernelBody(kernel->id, kernel->config, l->args, l->argBytes);
  op.together = kernel->id == EP_KERNEL_UPDATE || kernel->id == EP_KERNEL_HYBRID_UPDATE ||
                kernel->config.fused; // updates alone have a barrier of the grid
  op.blocks = l->blocks, op.threads = l->threads, op.sharedBytes = l->smemBytes;
  if (!op.body)
    return fail(ncclInternalError, "launch of %s with %zu bytes of arguments", op.name.c_str(), l->argBytes);
  c.fabric().queue(c.b->rank, s, std::move(op));
  return ncclSuccess;
}

ncclResult_t queueFill(Fabric &f, int rank, void *dst, int value, size_t bytes, cudaStream_t stream, const char *call) {
  Stream *s;
  ncclResult_t rc = f.findStream(rank, stream, call, &s);
  if (rc != ncclSuccess) return rc;
  StreamOp op{StreamOp::Fill};
  op.dst = static_cast<u8 *>(dst), op.value = value, op.bytes = bytes;
  f.queue(rank, s, std::move(op));
  return ncclSuccess;
}

static ncclResult_t fill(epBackend *be, void *dev, int value, size_t bytes, cudaStream_t stream) {
  Call c(be, "memset");
  return c.rc != ncclSuccess ? c.rc : queueFill(c.fabric(), c.b->rank, dev, value, bytes, stream, "memset");
}

static ncclResult_t copyToDevice(epBackend *be, void *dev, const void *host, size_t bytes) {
  Call c(be, "copyToDevice");
  if (c.rc == ncclSuccess) c.fabric().copyNow(c.b->rank, dev, host, bytes);
  return c.rc;
}

static ncclResult_t copyToHost(epBackend *be, void *host, const void *dev, size_t bytes) {
  Call c(be, "copyToHost");
  if (c.rc == ncclSuccess) c.fabric().copyNow(c.b->rank, host, dev, bytes);
  return c.rc;
}

static ncclResult_t synchronize(epBackend *be, cudaStream_t stream) {
  Call c(be, "synchronize");
  Stream *s;
  ncclResult_t rc = c.rc != ncclSuccess ? c.rc : c.fabric().findStream(c.b->rank, stream, "synchronize", &s);
  return rc != ncclSuccess ? rc : c.fabric().synchronize(c.lock, c.b->rank, s, "synchronize");
}

static ncclResult_t isCapturing(epBackend *, cudaStream_t, int *capturing) {
  *capturing = 0; // the emulated fabric has no graphs
  return ncclSuccess;
}

static ncclResult_t streamCreate(epBackend *be, cudaStream_t *stream) {
  Call c(be, "streamCreate");
  Stream *s;
  ncclResult_t rc = c.rc != ncclSuccess ? c.rc : c.fabric().createStream(c.b->rank, &s);
  if (rc == ncclSuccess) *stream = reinterpret_cast<cudaStream_t>(s);
  return rc;
}

static ncclResult_t streamDestroy(epBackend *be, cudaStream_t stream) {
  Call c(be);
  Stream *s;
  ncclResult_t rc = c.fabric().findStream(c.b->rank, stream, "streamDestroy", &s);
  return rc != ncclSuccess ? rc : c.fabric().destroyStream(c.lock, c.b->rank, s, "streamDestroy");
}

static ncclResult_t eventCreate(epBackend *be, cudaEvent_t *event) {
  Call c(be, "eventCreate");
  if (c.rc == ncclSuccess) *event = reinterpret_cast<cudaEvent_t>(makeEvent(c.fabric(), c.b->rank).get());
  return c.rc;
}

static ncclResult_t eventDestroy(epBackend *be, cudaEvent_t event) {
  Call c(be);
  return dropEvent(c.fabric(), c.b->rank, event, "eventDestroy");
}

static ncclResult_t eventRecord(epBackend *be, cudaEvent_t event, cudaStream_t stream) {
  Call c(be, "eventRecord");
  return c.rc != ncclSuccess ? c.rc : queueEvent(c.fabric(), c.b->rank, event, stream, true, "eventRecord");
}

static ncclResult_t streamWait(epBackend *be, cudaStream_t stream, cudaEvent_t event) {
  Call c(be, "streamWait");
  return c.rc != ncclSuccess ? c.rc : queueEvent(c.fabric(), c.b->rank, event, stream, false, "streamWait");
}

static ncclResult_t isDeviceAddress(epBackend *be, const void *dev, int *yes) {
  Call c(be, "isDeviceAddress");
  Region *r = c.fabric().engine.memory.regionAt(dev);
  *yes = r && !r->freed && c.fabric().reaches(r->rank, c.b->rank) &&
         (r->rank == c.b->rank || r->kind == RegionKind::Window);
  return ncclSuccess;
}

static void relax(epBackend *be, uint64_t deadlineNs) {
  Backend *b = of(be);
  Lock lock = lockEmulator();
  b->fabric->relax(lock, b->rank, deadlineNs);
}

static ncclResult_t ginCreate(epBackend *be, epWindow *window, uint32_t contexts, uint32_t signals, uint32_t *,
                              epGin *out) {
  Call c(be, "ginCreate");
  Fabric &f = c.fabric();
  Window *w = reinterpret_cast<Window *>(window);
  size_t n = f.ranks.size();
  u8 *mine = nullptr;
  std::vector<u8 *> all(n);
  ncclResult_t rc = c.rc;
  if (rc == ncclSuccess)
    rc = allocate(f, c.b->rank, "signals", RegionKind::Window, 8 * size_t(contexts) * signals, &mine);
  if (rc != ncclSuccess) return rc;
  w->signals = mine;
  rc = f.exchange(c.lock, c.b->rank, "ginCreate", &mine, all.data(), sizeof mine, c.b->base.patienceNs);
  if (rc != ncclSuccess) return rc;
  GinPort port;
  port.rank = c.b->rank, port.contexts = contexts, port.signals = signals;
  port.domain = u32(c.b->rank / f.scaleUp);
  for (int o = 0; o < f.scaleOut; o++) { // the rail
    size_t r = size_t(o * f.scaleUp + c.b->rank % f.scaleUp);
    port.window.push_back(w->base[r]);
    port.windowBytes.push_back(w->bytes[r]);
    port.signal.push_back(all[r]);
  }
  w->gin = f.engine.openGin(port);
  out->comm = reinterpret_cast<uintptr_t>(w->gin);
  out->window = 0;
  return ncclSuccess;
}

static const epBackendOps ops = {
    "emu",        destroy,      topology,      allGather,       alloc,        freeDevice,    allocMapped,
    freeMapped,   windowCreate, windowDestroy, windowAddress,   kernel,       launch,        fill,
    copyToDevice, copyToHost,   synchronize,   isCapturing,     streamCreate, streamDestroy, eventCreate,
    eventDestroy, eventRecord,  streamWait,    isDeviceAddress, relax,        ginCreate};

epBackend *makeBackend(const std::shared_ptr<Fabric> &fabric, int rank) {
  Backend *b = new Backend;
  b->base.ops = &ops;
  b->fabric = fabric;
  b->rank = rank;
  return &b->base;
}

} // namespace emu
