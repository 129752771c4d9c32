/* A backend object for a communicator: topology, memory, copies, and exchanges over NCCL. Windows are in cuda_window.c,
 * kernels in cuda_kernel.c, questions about addresses in cuda_address.c. */
#include "cuda_backend.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cuda_internal.h"
#include "env.h"

static epCuda *cudaOf(epBackend *base) { return (epCuda *)base; }

ncclResult_t epCudaCurrent(epCuda *be, epCudaScope *scope) {
  epCuContext current = NULL;
  epCuResult rc = be->cu->ctxGetCurrent(&current);
  scope->pushed = rc != EP_CU_SUCCESS || current != be->context;
  if (scope->pushed) rc = be->cu->ctxPushCurrent(be->context);
  if (rc != EP_CU_SUCCESS)
    return epCuFail(be->cu, rc, "device %d: its context cannot be made current", be->topology.device);
  return ncclSuccess;
}

void epCudaRestore(epCuda *be, const epCudaScope *scope) {
  epCuContext mine;
  if (scope->pushed) (void)be->cu->ctxPopCurrent(&mine);
}

ncclResult_t epCudaEnter(epCuda *be, epCudaScope *scope) {
  ncclResult_t r = epCudaCurrent(be, scope);
  if (r != ncclSuccess) return r;
  /* Allocations and waits on private streams are safe for any capture; in the stricter modes they would invalidate one
   * of another thread. */
  scope->captureMode = EP_CU_CAPTURE_MODE_RELAXED;
  epCuResult rc = be->cu->threadExchangeCaptureMode(&scope->captureMode);
  if (rc != EP_CU_SUCCESS) {
    epCudaRestore(be, scope);
    return epCuFail(be->cu, rc, "cuThreadExchangeStreamCaptureMode");
  }
  return ncclSuccess;
}

void epCudaLeave(epCuda *be, const epCudaScope *scope) {
  int mode = scope->captureMode;
  (void)be->cu->threadExchangeCaptureMode(&mode);
  epCudaRestore(be, scope);
}

static void nap(long ns) {
  struct timespec t = {0, ns};
  (void)nanosleep(&t, NULL);
}

static uint64_t now(void) {
  struct timespec t;
  (void)clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static ncclResult_t gaveUp(epCuda *be, const char *what) {
  be->stuck = 1;
  return epFail(ncclSystemError,
                "%s: rank %d of %d has waited %llu ms for the other ranks: expected the same call on all ranks of the "
                "communicator (a rank that cannot make it: ncclCommAbort on all; NCCL_EP_TIMEOUT_MS sets this limit)",
                what, be->topology.rank, be->topology.ranks, (unsigned long long)(be->base.patienceNs / 1000000));
}

ncclResult_t epCudaNccl(epCuda *be, ncclResult_t result, const char *what) {
  uint64_t start = now();
  while (result == ncclInProgress) {
    ncclResult_t state = ncclSuccess;
    nap(20000);
    if (now() - start > be->base.patienceNs) return gaveUp(be, what);
    result = be->nccl->commGetAsyncError(be->comm, &state);
    if (result == ncclSuccess) result = state;
  }
  if (result == ncclSuccess) return ncclSuccess;
  const char *detail = be->nccl->getLastError(be->comm);
  return epFail(result, "%s: NCCL: %s%s%s", what, be->nccl->getErrorString(result), detail && *detail ? ": " : "",
                detail ? detail : "");
}

ncclResult_t epCudaDrain(epCuda *be, const char *what) {
  uint64_t start = now();
  for (unsigned round = 0;; round++) {
    ncclResult_t state = ncclSuccess;
    epCuResult rc = be->cu->streamQuery(be->stream);
    if (rc == EP_CU_SUCCESS) return ncclSuccess;
    if (rc != EP_CU_NOT_READY) return epCuFail(be->cu, rc, "%s", what);
    if (round < 200) continue; /* the usual exchange takes tens of microseconds */
    nap(50000);
    if (now() - start > be->base.patienceNs) return gaveUp(be, what);
    if (round % 16 == 0 && be->nccl->commGetAsyncError(be->comm, &state) == ncclSuccess && state != ncclSuccess &&
        state != ncclInProgress)
      return epCudaNccl(be, state, what);
  }
}

ncclResult_t epCudaQuiet(epCuda *be) {
  epCuResult rc = epCudaGinAnywhere() ? be->cu->ctxSynchronize() : EP_CU_SUCCESS;
  return rc == EP_CU_SUCCESS ? ncclSuccess
                             : epCuFail(be->cu, rc, "waiting for device %d to be idle", be->topology.device);
}

static ncclResult_t growBounce(epCuda *be, size_t bytes) {
  void *host = NULL;
  epCuPtr dev = 0;
  if (bytes <= be->bounceBytes) return ncclSuccess;
  epCuResult rc = be->cu->memHostAlloc(&host, bytes, EP_CU_MEMHOSTALLOC_PORTABLE);
  if (rc != EP_CU_SUCCESS) return epCuFail(be->cu, rc, "%zu bytes of pinned memory for an exchange", bytes);
  rc = be->cu->memAlloc(&dev, bytes);
  if (rc != EP_CU_SUCCESS) {
    (void)be->cu->memFreeHost(host);
    return epCuFail(be->cu, rc, "%zu bytes of device memory for an exchange", bytes);
  }
  if (be->bounceHost) (void)be->cu->memFreeHost(be->bounceHost);
  if (be->bounceDev) (void)be->cu->memFree(be->bounceDev);
  be->bounceHost = host;
  be->bounceDev = dev;
  be->bounceBytes = bytes;
  return ncclSuccess;
}

ncclResult_t epCudaAllGather(epBackend *base, const void *mine, void *all, size_t bytes) {
  epCuda *be = cudaOf(base);
  epCudaScope scope;
  size_t total = bytes * (size_t)be->topology.ranks;
  if (bytes == 0) return ncclSuccess;
  ncclResult_t r = epCudaEnter(be, &scope);
  if (r != ncclSuccess) return r;
  r = growBounce(be, total);
  if (r != ncclSuccess) goto done;
  /* In place, as NCCL allows: my part is sent from where it is received. */
  epCuPtr part = be->bounceDev + (size_t)be->topology.rank * bytes;
  memcpy(be->bounceHost, mine, bytes);
  epCuResult rc = be->cu->memcpyHtoDAsync(part, be->bounceHost, bytes, be->stream);
  if (rc != EP_CU_SUCCESS) {
    r = epCuFail(be->cu, rc, "exchange between ranks: copy to the device");
    goto done;
  }
  r = epCudaNccl(be,
                 be->nccl->allGather((const void *)part, (void *)be->bounceDev, bytes, ncclUint8, be->comm, be->stream),
                 "exchange between ranks");
  if (r != ncclSuccess) goto done;
  /* Drained first, because the host buffer's first bytes are read by the copy before. */
  r = epCudaDrain(be, "exchange between ranks");
  if (r != ncclSuccess) goto done;
  rc = be->cu->memcpyDtoHAsync(be->bounceHost, be->bounceDev, total, be->stream);
  if (rc != EP_CU_SUCCESS) {
    r = epCuFail(be->cu, rc, "exchange between ranks: copy to the host");
    goto done;
  }
  r = epCudaDrain(be, "exchange between ranks");
  if (r == ncclSuccess) memcpy(all, be->bounceHost, total);
done:
  epCudaLeave(be, &scope);
  return r;
}

static ncclResult_t topologyOf(epBackend *base, epTopology *out) {
  *out = cudaOf(base)->topology;
  return ncclSuccess;
}

static ncclResult_t allocDevice(epBackend *base, void **dev, size_t bytes) {
  epCuda *be = cudaOf(base);
  epCudaScope scope;
  epCuPtr ptr = 0;
  ncclResult_t r = epCudaEnter(be, &scope);
  if (r != ncclSuccess) return r;
  if (bytes == 0) bytes = 16; /* an address of its own, also for nothing */
  if (be->alloc.alloc_fn) {
    void *given = NULL;
    cudaError_t rc = be->alloc.alloc_fn(&given, bytes, be->alloc.context);
    if (rc != cudaSuccess || !given)
      r = epFail(ncclUnhandledCudaError, "alloc.alloc_fn: %zu bytes: it returned error %d and pointer %p", bytes,
                 (int)rc, given);
    else
      *dev = given;
  } else {
    epCuResult rc = be->cu->memAlloc(&ptr, bytes);
    if (rc != EP_CU_SUCCESS)
      r = epCuFail(be->cu, rc, "%zu bytes of device memory", bytes);
    else
      *dev = (void *)ptr;
  }
  epCudaLeave(be, &scope);
  return r;
}

static ncclResult_t freeDevice(epBackend *base, void *dev) {
  epCuda *be = cudaOf(base);
  epCudaScope scope;
  if (!dev || be->stuck) return ncclSuccess; /* to free memory is to wait for the device */
  ncclResult_t r = epCudaEnter(be, &scope);
  if (r != ncclSuccess) return r;
  (void)epCudaQuiet(be);
  if (be->alloc.alloc_fn) {
    cudaError_t rc = be->alloc.free_fn(dev, be->alloc.context);
    if (rc != cudaSuccess) r = epFail(ncclUnhandledCudaError, "alloc.free_fn: %p: it returned error %d", dev, (int)rc);
  } else {
    epCuResult rc = be->cu->memFree((epCuPtr)dev);
    if (rc != EP_CU_SUCCESS) r = epCuFail(be->cu, rc, "free of device memory %p", dev);
  }
  epCudaLeave(be, &scope);
  return r;
}

static ncclResult_t allocMapped(epBackend *base, void **host, void **dev, size_t bytes) {
  epCuda *be = cudaOf(base);
  epCudaScope scope;
  void *h = NULL;
  epCuPtr d = 0;
  ncclResult_t r = epCudaEnter(be, &scope);
  if (r != ncclSuccess) return r;
  epCuResult rc = be->cu->memHostAlloc(&h, bytes, EP_CU_MEMHOSTALLOC_PORTABLE | EP_CU_MEMHOSTALLOC_DEVICEMAP);
  if (rc != EP_CU_SUCCESS) {
    r = epCuFail(be->cu, rc, "%zu bytes of mapped host memory", bytes);
    goto done;
  }
  rc = be->cu->memHostGetDevicePointer(&d, h, 0);
  if (rc != EP_CU_SUCCESS) {
    (void)be->cu->memFreeHost(h);
    r = epCuFail(be->cu, rc, "device address of %zu bytes of mapped host memory", bytes);
    goto done;
  }
  memset(h, 0, bytes);
  *host = h;
  *dev = (void *)d;
done:
  epCudaLeave(be, &scope);
  return r;
}

static ncclResult_t freeMapped(epBackend *base, void *host) {
  epCuda *be = cudaOf(base);
  epCudaScope scope;
  if (!host || be->stuck) return ncclSuccess;
  ncclResult_t r = epCudaEnter(be, &scope);
  if (r != ncclSuccess) return r;
  (void)epCudaQuiet(be);
  epCuResult rc = be->cu->memFreeHost(host);
  if (rc != EP_CU_SUCCESS) r = epCuFail(be->cu, rc, "free of mapped host memory %p", host);
  epCudaLeave(be, &scope);
  return r;
}

static ncclResult_t memsetDevice(epBackend *base, void *dev, int value, size_t bytes, cudaStream_t stream) {
  epCuda *be = cudaOf(base);
  epCudaScope scope;
  if (bytes == 0) return ncclSuccess;
  ncclResult_t r = epCudaEnter(be, &scope);
  if (r != ncclSuccess) return r;
  epCuResult rc = be->cu->memsetD8Async((epCuPtr)dev, (unsigned char)value, bytes, stream);
  if (rc != EP_CU_SUCCESS) r = epCuFail(be->cu, rc, "memset of %zu bytes at %p", bytes, dev);
  epCudaLeave(be, &scope);
  return r;
}

static ncclResult_t copyToDevice(epBackend *base, void *dev, const void *host, size_t bytes) {
  epCuda *be = cudaOf(base);
  epCudaScope scope;
  if (bytes == 0) return ncclSuccess;
  ncclResult_t r = epCudaEnter(be, &scope);
  if (r != ncclSuccess) return r;
  epCuResult rc = be->cu->memcpyHtoDAsync((epCuPtr)dev, host, bytes, be->stream);
  if (rc == EP_CU_SUCCESS) rc = be->cu->streamSynchronize(be->stream);
  if (rc != EP_CU_SUCCESS) r = epCuFail(be->cu, rc, "copy of %zu bytes to the device at %p", bytes, dev);
  epCudaLeave(be, &scope);
  return r;
}

static ncclResult_t copyToHost(epBackend *base, void *host, const void *dev, size_t bytes) {
  epCuda *be = cudaOf(base);
  epCudaScope scope;
  if (bytes == 0) return ncclSuccess;
  ncclResult_t r = epCudaEnter(be, &scope);
  if (r != ncclSuccess) return r;
  epCuResult rc = be->cu->memcpyDtoHAsync(host, (epCuPtr)dev, bytes, be->stream);
  if (rc == EP_CU_SUCCESS) rc = be->cu->streamSynchronize(be->stream);
  if (rc != EP_CU_SUCCESS) r = epCuFail(be->cu, rc, "copy of %zu bytes from the device at %p", bytes, dev);
  epCudaLeave(be, &scope);
  return r;
}

static ncclResult_t synchronize(epBackend *base, cudaStream_t stream) {
  epCuda *be = cudaOf(base);
  epCudaScope scope;
  ncclResult_t r = epCudaEnter(be, &scope);
  if (r != ncclSuccess) return r;
  epCuResult rc = be->cu->streamSynchronize(stream);
  if (rc != EP_CU_SUCCESS) r = epCuFail(be->cu, rc, "waiting for stream %p", (void *)stream);
  epCudaLeave(be, &scope);
  return r;
}

static ncclResult_t isCapturing(epBackend *base, cudaStream_t stream, int *capturing) {
  epCuda *be = cudaOf(base);
  epCudaScope scope;
  int status = EP_CU_CAPTURE_STATUS_NONE;
  ncclResult_t r = epCudaCurrent(be, &scope);
  if (r != ncclSuccess) return r;
  epCuResult rc = be->cu->streamIsCapturing(stream, &status);
  if (rc == EP_CU_CAPTURE_IMPLICIT)
    r = epFail(
        ncclInvalidUsage,
        "stream %p is the legacy default stream, and another stream of the device is being captured: work on the "
        "default stream would invalidate that capture",
        (void *)stream);
  else if (rc != EP_CU_SUCCESS)
    r = epCuFail(be->cu, rc, "stream %p: is it a stream of device %d?", (void *)stream, be->topology.device);
  else
    *capturing = status != EP_CU_CAPTURE_STATUS_NONE;
  epCudaRestore(be, &scope);
  return r;
}

static void relax(epBackend *base, uint64_t deadlineNs) {
  uint64_t ns = now();
  (void)base;
  if (ns < deadlineNs) nap(deadlineNs - ns < 20000 ? (long)(deadlineNs - ns) : 20000);
}

static void destroy(epBackend *base) {
  epCuda *be = cudaOf(base);
  epCudaScope scope;
  if (be->stuck)
    epLog(EP_LOG_WARN,
          "rank %d: a group's memory, window and kernels are kept until the process ends: an exchange between ranks is "
          "still on the device",
          be->topology.rank);
  else if (be->context && epCudaEnter(be, &scope) == ncclSuccess) {
    epCudaKernelsRelease(be);
    if (be->bounceHost) (void)be->cu->memFreeHost(be->bounceHost);
    if (be->bounceDev) (void)be->cu->memFree(be->bounceDev);
    if (be->stream) (void)be->cu->streamDestroy(be->stream);
    epCudaLeave(be, &scope);
  }
  if (be->context && !be->stuck) (void)be->cu->primaryCtxRelease(be->device);
  free(be);
}

static const epBackendOps ops = {.name = "cuda",
                                 .destroy = destroy,
                                 .topology = topologyOf,
                                 .allGather = epCudaAllGather,
                                 .alloc = allocDevice,
                                 .free = freeDevice,
                                 .allocMapped = allocMapped,
                                 .freeMapped = freeMapped,
                                 .windowCreate = epCudaWindowCreate,
                                 .windowDestroy = epCudaWindowDestroy,
                                 .windowAddress = epCudaWindowAddress,
                                 .kernel = epCudaKernel,
                                 .launch = epCudaLaunch,
                                 .memset = memsetDevice,
                                 .copyToDevice = copyToDevice,
                                 .copyToHost = copyToHost,
                                 .synchronize = synchronize,
                                 .isCapturing = isCapturing,
                                 .streamCreate = epCudaStreamCreate,
                                 .streamDestroy = epCudaStreamDestroy,
                                 .eventCreate = epCudaEventCreate,
                                 .eventDestroy = epCudaEventDestroy,
                                 .eventRecord = epCudaEventRecord,
                                 .streamWait = epCudaStreamWait,
                                 .isDeviceAddress = epCudaIsDeviceAddress,
                                 .relax = relax,
                                 .ginCreate = epCudaGinCreate};

static ncclResult_t readDevice(epCuda *be) {
  epTopology *t = &be->topology;
  int major = 0, minor = 0, clock = 0, width = 0;
  const struct {
    int attribute;
    int *value;
  } wanted[] = {{EP_CU_ATTR_COMPUTE_CAPABILITY_MAJOR, &major},
                {EP_CU_ATTR_COMPUTE_CAPABILITY_MINOR, &minor},
                {EP_CU_ATTR_MULTIPROCESSOR_COUNT, &t->numSms},
                {EP_CU_ATTR_PCI_DOMAIN_ID, &t->pci.domain},
                {EP_CU_ATTR_PCI_BUS_ID, &t->pci.bus},
                {EP_CU_ATTR_PCI_DEVICE_ID, &t->pci.device},
                {EP_CU_ATTR_MEMORY_CLOCK_RATE, &clock},
                {EP_CU_ATTR_MEMORY_BUS_WIDTH, &width},
                {EP_CU_ATTR_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, &t->smemPerBlock}};
  for (size_t i = 0; i < sizeof(wanted) / sizeof(wanted[0]); i++) {
    epCuResult rc = be->cu->deviceGetAttribute(wanted[i].value, wanted[i].attribute, be->device);
    if (rc != EP_CU_SUCCESS) return epCuFail(be->cu, rc, "attribute %d of device %d", wanted[i].attribute, t->device);
  }
  t->memoryGbs = 2e-6 * clock * width / 8; /* kHz and bits, two transfers a clock */
  t->arch = 10 * major + minor;
  t->bulkCopies = t->arch >= 90;
  if (t->arch < 80)
    return epFail(ncclInvalidUsage, "device %d has compute capability %d.%d: 8.0 or newer is needed", t->device, major,
                  minor);
  return ncclSuccess;
}

static ncclResult_t readTeams(epCuda *be) {
  epTopology *t = &be->topology;
  be->lsa = be->nccl->teamLsa(be->comm);
  if (be->lsa.nRanks <= 0) { /* NCCL's answer when it cannot set its device runtime up */
    if (t->ranks != 1)
      return epFail(ncclInvalidUsage, "NCCL gives this communicator no load/store team: %s",
                    be->nccl->getLastError(be->comm));
    be->lsa = (epNcclTeam){1, 0, 1};
  }
  if (be->lsa.rank < 0 || be->lsa.rank >= be->lsa.nRanks || t->ranks % be->lsa.nRanks || be->lsa.stride != 1 ||
      t->rank % be->lsa.nRanks != be->lsa.rank)
    return epFail(
        ncclInternalError,
        "NCCL's load/store team of rank %d of %d is (ranks %d, rank %d, stride %d): expected consecutive ranks "
        "in teams of one size",
        t->rank, t->ranks, be->lsa.nRanks, be->lsa.rank, be->lsa.stride);
  t->scaleUpRanks = be->lsa.nRanks;
  t->scaleUpRank = be->lsa.rank;
  t->scaleOutRanks = t->ranks / be->lsa.nRanks;
  t->scaleOutRank = t->rank / be->lsa.nRanks;
  t->gin = t->scaleOutRanks > 1; /* or making it says why not */
  t->ginProxy = t->gin && epCudaGinProxy(be);
  return ncclSuccess;
}

ncclResult_t epCudaBackendOpen(ncclComm_t comm, const ncclEpAllocConfig_t *alloc, epBackend **out) {
  ncclResult_t r;
  epCuResult rc;
  epCudaScope scope;
  if (!comm)
    return epFail(ncclInvalidArgument,
                  "comm is NULL: expected a communicator (PyTorch's is NULL until its first collective, unless its "
                  "process group was made with a device id)");
  if (alloc && !alloc->alloc_fn != !alloc->free_fn)
    return epFail(ncclInvalidArgument, "alloc.%s is NULL: expected both functions or neither",
                  alloc->alloc_fn ? "free_fn" : "alloc_fn");
  epCuda *be = calloc(1, sizeof(*be));
  if (!be) return epFail(ncclSystemError, "out of memory: %zu bytes for a backend", sizeof(*be));
  be->base.ops = &ops;
  be->comm = comm;
  if (alloc) be->alloc = *alloc;
  be->base.patienceNs = epBackendTimeout();

  if ((r = epNcclOpen(0, &be->nccl)) != ncclSuccess || (r = epCuDriverOpen(&be->cu)) != ncclSuccess) goto fail;
  epTopology *t = &be->topology;
  if ((r = epCudaNccl(be, be->nccl->commCount(comm, &t->ranks), "ranks of the communicator")) != ncclSuccess ||
      (r = epCudaNccl(be, be->nccl->commUserRank(comm, &t->rank), "rank in the communicator")) != ncclSuccess ||
      (r = epCudaNccl(be, be->nccl->commCuDevice(comm, &t->device), "device of the communicator")) != ncclSuccess)
    goto fail;
  rc = be->cu->deviceGet(&be->device, t->device);
  if (rc != EP_CU_SUCCESS) {
    r = epCuFail(be->cu, rc, "device %d of the communicator", t->device);
    goto fail;
  }
  if ((r = readDevice(be)) != ncclSuccess) goto fail;
  rc = be->cu->primaryCtxRetain(&be->context, be->device);
  if (rc != EP_CU_SUCCESS) {
    be->context = NULL;
    r = epCuFail(be->cu, rc, "primary context of device %d", t->device);
    goto fail;
  }
  if ((r = epCudaEnter(be, &scope)) != ncclSuccess) goto fail;
  rc = be->cu->streamCreate(&be->stream, EP_CU_STREAM_NON_BLOCKING);
  if (rc != EP_CU_SUCCESS) {
    be->stream = NULL;
    r = epCuFail(be->cu, rc, "a stream on device %d", t->device);
  } else {
    r = readTeams(be);
  }
  epCudaLeave(be, &scope);
  if (r != ncclSuccess) goto fail;
  *out = &be->base;
  return ncclSuccess;

fail:
  destroy(&be->base);
  return r;
}
