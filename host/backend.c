/* Picks the backend of a communicator, and answers for what a backend does not have. */
#include "backend.h"

#include "cuda_backend.h"
#include "emu.h"
#include "env.h"
#include "fail.h"

#define EP_UNSUPPORTED(name) \
  return epFail(ncclInvalidUsage, "backend: %s is not supported by the backend of this communicator", name)

static void noDestroy(epBackend *be) { (void)be; }
static ncclResult_t noTopology(epBackend *be, epTopology *out) {
  (void)be, (void)out;
  EP_UNSUPPORTED("topology");
}
static ncclResult_t noAllGather(epBackend *be, const void *mine, void *all, size_t bytes) {
  (void)be, (void)mine, (void)all, (void)bytes;
  EP_UNSUPPORTED("exchange");
}
static ncclResult_t noAlloc(epBackend *be, void **dev, size_t bytes) {
  (void)be, (void)dev, (void)bytes;
  EP_UNSUPPORTED("device memory");
}
static ncclResult_t noFree(epBackend *be, void *dev) {
  (void)be, (void)dev;
  EP_UNSUPPORTED("device memory");
}
static ncclResult_t noAllocMapped(epBackend *be, void **host, void **dev, size_t bytes) {
  (void)be, (void)host, (void)dev, (void)bytes;
  EP_UNSUPPORTED("mapped memory");
}
static ncclResult_t noWindowCreate(epBackend *be, size_t bytes, epWindow **out, void **peers) {
  (void)be, (void)bytes, (void)out, (void)peers;
  EP_UNSUPPORTED("symmetric windows");
}
static ncclResult_t noWindowDestroy(epBackend *be, epWindow *window) {
  (void)be, (void)window;
  EP_UNSUPPORTED("symmetric windows");
}
static ncclResult_t noWindowAddress(epBackend *be, ncclWindow_t win, uint64_t offset, uint64_t bytes, void **dev,
                                    void **shared) {
  (void)be, (void)win, (void)offset, (void)bytes, (void)dev, (void)shared;
  EP_UNSUPPORTED("a window-backed tensor");
}
static ncclResult_t noKernel(epBackend *be, int id, const epConfig *config, epKernel **out) {
  (void)be, (void)id, (void)config, (void)out;
  EP_UNSUPPORTED("kernels");
}
static ncclResult_t noLaunch(epBackend *be, epKernel *kernel, const epLaunch *launch, cudaStream_t stream) {
  (void)be, (void)kernel, (void)launch, (void)stream;
  EP_UNSUPPORTED("kernels");
}
static ncclResult_t noMemset(epBackend *be, void *dev, int value, size_t bytes, cudaStream_t stream) {
  (void)be, (void)dev, (void)value, (void)bytes, (void)stream;
  EP_UNSUPPORTED("memset");
}
static ncclResult_t noCopyToDevice(epBackend *be, void *dev, const void *host, size_t bytes) {
  (void)be, (void)dev, (void)host, (void)bytes;
  EP_UNSUPPORTED("copies");
}
static ncclResult_t noCopyToHost(epBackend *be, void *host, const void *dev, size_t bytes) {
  (void)be, (void)host, (void)dev, (void)bytes;
  EP_UNSUPPORTED("copies");
}
static ncclResult_t noSynchronize(epBackend *be, cudaStream_t stream) {
  (void)be, (void)stream;
  EP_UNSUPPORTED("synchronisation");
}
static ncclResult_t noIsCapturing(epBackend *be, cudaStream_t stream, int *capturing) {
  (void)be, (void)stream;
  *capturing = 0;
  return ncclSuccess;
}
static ncclResult_t noStreamCreate(epBackend *be, cudaStream_t *stream) {
  (void)be, (void)stream;
  EP_UNSUPPORTED("a communication stream");
}
static ncclResult_t noStreamDestroy(epBackend *be, cudaStream_t stream) {
  (void)be, (void)stream;
  EP_UNSUPPORTED("a communication stream");
}
static ncclResult_t noEventCreate(epBackend *be, cudaEvent_t *event) {
  (void)be, (void)event;
  EP_UNSUPPORTED("an event");
}
static ncclResult_t noEventDestroy(epBackend *be, cudaEvent_t event) {
  (void)be, (void)event;
  EP_UNSUPPORTED("an event");
}
static ncclResult_t noEventRecord(epBackend *be, cudaEvent_t event, cudaStream_t stream) {
  (void)be, (void)event, (void)stream;
  EP_UNSUPPORTED("an event");
}
static ncclResult_t noStreamWait(epBackend *be, cudaStream_t stream, cudaEvent_t event) {
  (void)be, (void)stream, (void)event;
  EP_UNSUPPORTED("an event");
}
static ncclResult_t noIsDeviceAddress(epBackend *be, const void *dev, int *yes) {
  (void)be, (void)dev;
  *yes = 1;
  return ncclSuccess;
}
static ncclResult_t noGinCreate(epBackend *be, epWindow *window, uint32_t contexts, uint32_t signals, uint32_t *aborted,
                                epGin *out) {
  (void)be, (void)window, (void)contexts, (void)signals, (void)aborted, (void)out;
  EP_UNSUPPORTED("a network between scale-up domains");
}
static void noRelax(epBackend *be, uint64_t deadlineNs) { (void)be, (void)deadlineNs; }

const epBackendOps epBackendUnsupported = {.name = "none",
                                           .destroy = noDestroy,
                                           .topology = noTopology,
                                           .allGather = noAllGather,
                                           .alloc = noAlloc,
                                           .free = noFree,
                                           .allocMapped = noAllocMapped,
                                           .freeMapped = noFree,
                                           .windowCreate = noWindowCreate,
                                           .windowDestroy = noWindowDestroy,
                                           .windowAddress = noWindowAddress,
                                           .kernel = noKernel,
                                           .launch = noLaunch,
                                           .memset = noMemset,
                                           .copyToDevice = noCopyToDevice,
                                           .copyToHost = noCopyToHost,
                                           .synchronize = noSynchronize,
                                           .isCapturing = noIsCapturing,
                                           .streamCreate = noStreamCreate,
                                           .streamDestroy = noStreamDestroy,
                                           .eventCreate = noEventCreate,
                                           .eventDestroy = noEventDestroy,
                                           .eventRecord = noEventRecord,
                                           .streamWait = noStreamWait,
                                           .isDeviceAddress = noIsDeviceAddress,
                                           .relax = noRelax,
                                           .ginCreate = noGinCreate};

/* A slot that a backend left empty is a mistake in it; found here once, so that nobody else tests for NULL. */
static int epOpsComplete(const epBackendOps *o) {
  return o && o->name && o->destroy && o->topology && o->allGather && o->alloc && o->free && o->allocMapped &&
         o->freeMapped && o->windowCreate && o->windowDestroy && o->windowAddress && o->kernel && o->launch &&
         o->memset && o->copyToDevice && o->copyToHost && o->synchronize && o->isCapturing && o->isDeviceAddress &&
         o->streamCreate && o->streamDestroy && o->eventCreate && o->eventDestroy && o->eventRecord && o->streamWait &&
         o->relax && o->ginCreate;
}

void epBackendPatience(epBackend *be, uint64_t ns) {
  be->patienceNs = ns > EP_HOST_PATIENCE_NS ? ns : EP_HOST_PATIENCE_NS;
}

uint64_t epBackendTimeout(void) {
  uint64_t ms;
  return epEnvNumber(EP_ENV_TIMEOUT_MS, 1, UINT64_MAX / 1000000, &ms) ? ms * 1000000 : EP_TIMEOUT_NS;
}

ncclResult_t epBackendOpen(ncclComm_t comm, const ncclEpAllocConfig_t *alloc, epBackend **out) {
  const epEmuModule *emu = epEmuLoaded();
  epBackend *be = NULL;
  ncclResult_t r;
  if (!comm)
    return epFail(ncclInvalidArgument,
                  "comm is NULL: expected a communicator (PyTorch's is NULL until its first collective, unless its "
                  "process group was made with a device id)");
  r = emu && emu->ownsComm(comm) ? emu->open(comm, &be) : epCudaBackendOpen(comm, alloc, &be);
  if (r != ncclSuccess) return r;
  if (!epOpsComplete(be->ops)) {
    r = epFail(ncclInternalError, "the backend of this communicator has an incomplete table of operations");
    if (be->ops && be->ops->destroy) be->ops->destroy(be);
    return r;
  }
  epBackendPatience(be, epBackendTimeout());
  *out = be;
  return ncclSuccess;
}
