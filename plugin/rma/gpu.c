/* CUDA's driver, found by its one soname when the first GPU memory is registered: loading the plugin needs none. */
#include "gpu.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "log.h"

enum { SUCCESS = 0, NOT_READY = 600 };
enum { POINTER_DEVICE_ORDINAL = 9, STREAM_NON_BLOCKING = 1, EVENT_DISABLE_TIMING = 2, CAPTURE_RELAXED = 2 };
enum { CAN_USE_64_BIT_STREAM_MEM_OPS = 122 };
enum { WRITE_VALUE_64 = 5 };
enum { LOCATION_DEVICE = 1, HANDLE_POSIX_FD = 1, ACCESS_READ_WRITE = 3 };

/* CUmemAllocationProp and CUmemAccessDesc. */
typedef struct {
  int type, requestedHandleTypes;
  struct {
    int type, id;
  } location;
  void *win32;
  unsigned char flags[8];
} allocationProperties;
typedef struct {
  struct {
    int type, id;
  } location;
  int flags;
} accessDescription;

/* CUstreamBatchMemOpParams, as a write. */
typedef struct {
  int type;
  epRmaCuPtr to;
  uint64_t value;
  unsigned flags;
  epRmaCuPtr alias;
  uint64_t rest;
} writeOperation;
_Static_assert(sizeof(writeOperation) == 48, "CUstreamBatchMemOpParams");

#define CALLS(X)                                                                                  \
  X(init, cuInit, (unsigned))                                                                     \
  X(errorName, cuGetErrorName, (int, const char **))                                              \
  X(deviceGet, cuDeviceGet, (int *, int))                                                         \
  X(deviceAttribute, cuDeviceGetAttribute, (int *, int, int))                                     \
  X(retain, cuDevicePrimaryCtxRetain, (void **, int))                                             \
  X(release, cuDevicePrimaryCtxRelease_v2, (int))                                                 \
  X(push, cuCtxPushCurrent_v2, (void *))                                                          \
  X(pop, cuCtxPopCurrent_v2, (void **))                                                           \
  X(captureMode, cuThreadExchangeStreamCaptureMode, (int *))                                      \
  X(pointerAttribute, cuPointerGetAttribute, (void *, int, epRmaCuPtr))                           \
  X(priorities, cuCtxGetStreamPriorityRange, (int *, int *))                                      \
  X(streamCreate, cuStreamCreateWithPriority, (void **, unsigned, int))                           \
  X(streamDestroy, cuStreamDestroy_v2, (void *))                                                  \
  X(streamSync, cuStreamSynchronize, (void *))                                                    \
  X(eventCreate, cuEventCreate, (void **, unsigned))                                              \
  X(eventDestroy, cuEventDestroy_v2, (void *))                                                    \
  X(eventRecord, cuEventRecord, (void *, void *))                                                 \
  X(eventQuery, cuEventQuery, (void *))                                                           \
  X(copy, cuMemcpyAsync, (epRmaCuPtr, epRmaCuPtr, size_t, void *))                                \
  X(writeWords, cuStreamBatchMemOp_v2, (void *, unsigned, writeOperation *, unsigned))            \
  X(hostAlloc, cuMemHostAlloc, (void **, size_t, unsigned))                                       \
  X(hostFree, cuMemFreeHost, (void *))                                                            \
  X(addressRange, cuMemGetAddressRange_v2, (epRmaCuPtr *, size_t *, epRmaCuPtr))                  \
  X(handleOf, cuMemRetainAllocationHandle, (epRmaCuHandle *, void *))                             \
  X(handleRelease, cuMemRelease, (epRmaCuHandle))                                                 \
  X(properties, cuMemGetAllocationPropertiesFromHandle, (allocationProperties *, epRmaCuHandle))  \
  X(exportHandle, cuMemExportToShareableHandle, (void *, epRmaCuHandle, int, unsigned long long)) \
  X(importHandle, cuMemImportFromShareableHandle, (epRmaCuHandle *, void *, int))                 \
  X(reserve, cuMemAddressReserve, (epRmaCuPtr *, size_t, size_t, epRmaCuPtr, unsigned long long)) \
  X(unreserve, cuMemAddressFree, (epRmaCuPtr, size_t))                                            \
  X(map, cuMemMap, (epRmaCuPtr, size_t, size_t, epRmaCuHandle, unsigned long long))               \
  X(unmap, cuMemUnmap, (epRmaCuPtr, size_t))                                                      \
  X(setAccess, cuMemSetAccess, (epRmaCuPtr, size_t, const accessDescription *, size_t))

static struct {
#define X(slot, symbol, parameters) int(*slot) parameters;
  CALLS(X)
#undef X
} cu;
static pthread_mutex_t bindMutex = PTHREAD_MUTEX_INITIALIZER;
static bool bound;

static epRmaResult failed(const char *what, int error) {
  const char *name = NULL;
  if (cu.errorName(error, &name) != SUCCESS || !name) name = "unknown CUDA error";
  EP_RMA_WARN("%s: %s (%d)", what, name, error);
  return EP_RMA_CUDA_ERROR;
}

static epRmaResult bindDriver(void) {
  void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!lib) {
    EP_RMA_WARN("GPU memory needs the CUDA driver: %s", dlerror());
    return EP_RMA_SYSTEM_ERROR;
  }
  const char *missing = NULL;
  void *symbol;
#define X(slot, name, parameters)           \
  symbol = dlsym(lib, #name);               \
  if (!symbol && !missing) missing = #name; \
  memcpy(&cu.slot, &symbol, sizeof(symbol));
  CALLS(X)
#undef X
  if (missing) {
    EP_RMA_WARN("the CUDA driver lacks %s: 12.0 or newer is needed", missing);
    dlclose(lib);
    return EP_RMA_SYSTEM_ERROR;
  }
  int error = cu.init(0);
  if (error == SUCCESS) return EP_RMA_OK;
  epRmaResult rc = failed("cuInit", error);
  dlclose(lib);
  return rc;
}

static epRmaResult bindOnce(void) {
  epRmaResult rc = EP_RMA_OK;
  pthread_mutex_lock(&bindMutex);
  if (!bound) rc = bindDriver();
  if (!rc) bound = true;
  pthread_mutex_unlock(&bindMutex);
  return rc;
}

static epRmaResult makeStreams(epRmaGpu *gpu, const void *memory) {
  /* Streams share the few queues of a GPU, those of one priority among each other: behind a kernel that waits for us, ours must
   * not stand. */
  int least = 0, greatest = 0, error = cu.priorities(&least, &greatest);
  if (error == SUCCESS) error = cu.streamCreate(&gpu->in, STREAM_NON_BLOCKING, greatest);
  for (int i = 0; error == SUCCESS && i < EP_RMA_OUT_STREAMS; i++)
    error = cu.streamCreate(&gpu->out[i].stream, STREAM_NON_BLOCKING, greatest);
  if (error != SUCCESS) return failed("cuStreamCreateWithPriority", error);
  void *word = NULL;
  epRmaResult rc = epRmaGpuPinned(&word, sizeof(*gpu->word));
  gpu->word = word;
  /* Nothing needs to be created while kernels run. */
  for (int i = 0; !rc && i < EP_RMA_OUT_STREAMS * EP_RMA_SUBMISSIONS; i++)
    rc = epRmaGpuEvent(&gpu->out[i / EP_RMA_SUBMISSIONS].events[i % EP_RMA_SUBMISSIONS]);
  /* The driver allocates what a stream needs at its first copy: let that be now, too. */
  for (int i = 0; !rc && i <= EP_RMA_OUT_STREAMS; i++) {
    void *stream = i < EP_RMA_OUT_STREAMS ? gpu->out[i].stream : gpu->in;
    rc = epRmaGpuCopy(gpu->word, memory, 1, stream, NULL);
    if (!rc) rc = epRmaGpuSync(stream);
  }
  return rc;
}

epRmaResult epRmaGpuOpen(epRmaGpu *gpu, void *memory) {
  int ordinal = -1, device = 0, canWrite = 0;
  epRmaResult rc = bindOnce();
  if (rc) return rc;
  int error = cu.pointerAttribute(&ordinal, POINTER_DEVICE_ORDINAL, (epRmaCuPtr)memory);
  if (error != SUCCESS) return failed("the memory to register is not CUDA's: cuPointerGetAttribute", error);
  if (gpu->ready && ordinal == gpu->device) return EP_RMA_OK;
  if (gpu->ready) {
    EP_RMA_WARN("memory of GPU %d cannot be registered: this communicator's is GPU %d", ordinal, gpu->device);
    return EP_RMA_INVALID_USAGE;
  }
  error = cu.deviceGet(&device, ordinal);
  if (error == SUCCESS) error = cu.deviceAttribute(&canWrite, CAN_USE_64_BIT_STREAM_MEM_OPS, device);
  if (error == SUCCESS && !canWrite) {
    EP_RMA_WARN("GPU %d cannot write words from a stream (cuStreamBatchMemOp): signals would not arrive", ordinal);
    return EP_RMA_INVALID_USAGE;
  }
  if (error == SUCCESS) error = cu.retain(&gpu->context, device);
  if (error != SUCCESS) return failed("the GPU cannot be used: cuDevicePrimaryCtxRetain", error);
  gpu->device = ordinal;
  gpu->ready = true;
  rc = epRmaGpuEnter(gpu);
  if (!rc) {
    rc = makeStreams(gpu, memory);
    epRmaGpuLeave(gpu);
  }
  if (rc) epRmaGpuClose(gpu);
  return rc;
}

void epRmaGpuClose(epRmaGpu *gpu) {
  int device = 0;
  if (!gpu->ready) return;
  if (epRmaGpuEnter(gpu) == EP_RMA_OK) {
    if (gpu->in) cu.streamDestroy(gpu->in);
    for (int i = 0; i < EP_RMA_OUT_STREAMS; i++) {
      for (int k = 0; k < EP_RMA_SUBMISSIONS; k++)
        if (gpu->out[i].events[k]) epRmaGpuFreeEvent(gpu->out[i].events[k]);
      if (gpu->out[i].stream) cu.streamDestroy(gpu->out[i].stream);
    }
    if (gpu->word) cu.hostFree(gpu->word);
    epRmaGpuLeave(gpu);
  }
  if (cu.deviceGet(&device, gpu->device) == SUCCESS) cu.release(device);
  memset(gpu, 0, sizeof(*gpu));
}

epRmaResult epRmaGpuEnter(epRmaGpu *gpu) {
  if (!gpu->ready) return EP_RMA_OK;
  int error = cu.push(gpu->context);
  if (error != SUCCESS) return failed("cuCtxPushCurrent", error);
  gpu->captureMode = CAPTURE_RELAXED;
  error = cu.captureMode(&gpu->captureMode);
  if (error == SUCCESS) return EP_RMA_OK;
  void *popped = NULL;
  cu.pop(&popped);
  return failed("cuThreadExchangeStreamCaptureMode", error);
}

void epRmaGpuLeave(epRmaGpu *gpu) {
  void *popped = NULL;
  if (!gpu->ready) return;
  cu.captureMode(&gpu->captureMode);
  cu.pop(&popped);
}

epRmaResult epRmaGpuPinned(void **host, size_t bytes) {
  int error = cu.hostAlloc(host, bytes, 0);
  return error == SUCCESS ? EP_RMA_OK : failed("pinned staging: cuMemHostAlloc", error);
}

void epRmaGpuFreePinned(void *host) { cu.hostFree(host); }

epRmaResult epRmaGpuEvent(void **event) {
  int error = cu.eventCreate(event, EVENT_DISABLE_TIMING);
  return error == SUCCESS ? EP_RMA_OK : failed("cuEventCreate", error);
}

void epRmaGpuFreeEvent(void *event) { cu.eventDestroy(event); }

bool epRmaGpuOutRoom(const epRmaGpuOut *out) { return out->submitted - out->done < EP_RMA_SUBMISSIONS; }

epRmaResult epRmaGpuOutCopy(epRmaGpuOut *out, void *to, const void *from, size_t bytes, uint64_t *number) {
  int error = cu.copy((epRmaCuPtr)to, (epRmaCuPtr)from, bytes, out->stream);
  if (error != SUCCESS) return failed("cuMemcpyAsync", error);
  out->open = true;
  *number = out->submitted + 1;
  return EP_RMA_OK;
}

epRmaResult epRmaGpuOutSubmit(epRmaGpuOut *out) {
  if (!out->open) return EP_RMA_OK;
  int error = cu.eventRecord(out->events[out->submitted % EP_RMA_SUBMISSIONS], out->stream);
  if (error != SUCCESS) return failed("cuEventRecord", error);
  out->submitted++;
  out->open = false;
  return EP_RMA_OK;
}

epRmaResult epRmaGpuOutCollect(epRmaGpuOut *out) {
  bool done = true;
  while (out->done < out->submitted && done) {
    epRmaResult rc = epRmaGpuDone(out->events[out->done % EP_RMA_SUBMISSIONS], &done);
    if (rc) return rc;
    out->done += done;
  }
  return EP_RMA_OK;
}

epRmaResult epRmaGpuCopy(void *to, const void *from, size_t bytes, void *stream, void *event) {
  int error = cu.copy((epRmaCuPtr)to, (epRmaCuPtr)from, bytes, stream);
  if (error != SUCCESS) return failed("cuMemcpyAsync", error);
  error = event ? cu.eventRecord(event, stream) : SUCCESS;
  return error == SUCCESS ? EP_RMA_OK : failed("cuEventRecord", error);
}

epRmaResult epRmaGpuDone(void *event, bool *done) {
  int error = cu.eventQuery(event);
  *done = error == SUCCESS;
  return error == SUCCESS || error == NOT_READY ? EP_RMA_OK : failed("cuEventQuery", error);
}

epRmaResult epRmaGpuSync(void *stream) {
  int error = cu.streamSync(stream);
  return error == SUCCESS ? EP_RMA_OK : failed("cuStreamSynchronize", error);
}

epRmaResult epRmaGpuWriteWords(epRmaGpu *gpu, const epRmaGpuWord *words, int count) {
  writeOperation operations[EP_RMA_WORDS];
  if (count == 0) return EP_RMA_OK;
  for (int i = 0; i < count; i++)
    operations[i] = (writeOperation){.type = WRITE_VALUE_64, .to = (epRmaCuPtr)words[i].to, .value = words[i].value};
  int error = cu.writeWords(gpu->in, (unsigned)count, operations, 0);
  return error == SUCCESS ? EP_RMA_OK : failed("cuStreamBatchMemOp", error);
}

epRmaResult epRmaGpuReadWord(epRmaGpu *gpu, const void *from, uint64_t *value) {
  epRmaResult rc = epRmaGpuCopy(gpu->word, from, sizeof(*value), gpu->in, NULL);
  if (!rc) rc = epRmaGpuSync(gpu->in);
  if (!rc) *value = *gpu->word;
  return rc;
}

int epRmaGpuExport(const void *memory, size_t bytes, uint64_t *offset, uint64_t *allocation) {
  epRmaCuPtr base = 0, at = (epRmaCuPtr)memory;
  size_t size = 0;
  epRmaCuHandle handle = 0;
  allocationProperties properties = {0};
  int fd = -1;
  if (cu.addressRange(&base, &size, at) != SUCCESS || at < base || at - base + bytes > size) return -1;
  if (cu.handleOf(&handle, (void *)base) != SUCCESS) return -1; /* not memory of cuMemCreate */
  if (cu.properties(&properties, handle) != SUCCESS || !(properties.requestedHandleTypes & HANDLE_POSIX_FD) ||
      cu.exportHandle(&fd, handle, HANDLE_POSIX_FD, 0) != SUCCESS)
    fd = -1;
  cu.handleRelease(handle);
  *offset = at - base;
  *allocation = size;
  return fd;
}

void *epRmaGpuMap(epRmaGpu *gpu, int fd, uint64_t allocation) {
  epRmaCuHandle handle = 0;
  epRmaCuPtr at = 0;
  accessDescription access = {{LOCATION_DEVICE, gpu->device}, ACCESS_READ_WRITE};
  int error = cu.importHandle(&handle, (void *)(intptr_t)fd, HANDLE_POSIX_FD);
  if (error != SUCCESS) goto none;
  error = cu.reserve(&at, allocation, 0, 0, 0);
  if (error != SUCCESS) goto release;
  error = cu.map(at, allocation, 0, handle, 0);
  if (error != SUCCESS) goto unreserve;
  error = cu.setAccess(at, allocation, &access, 1);
  if (error != SUCCESS) goto unmap;
  cu.handleRelease(handle); /* the mapping keeps the memory */
  return (void *)at;
unmap:
  cu.unmap(at, allocation);
unreserve:
  cu.unreserve(at, allocation);
release:
  cu.handleRelease(handle);
none:
  return NULL;
}

void epRmaGpuUnmap(void *mapped, uint64_t allocation) {
  cu.unmap((epRmaCuPtr)mapped, allocation);
  cu.unreserve((epRmaCuPtr)mapped, allocation);
}
