/* A CUDA driver without a GPU: memory is host memory, streams do everything at once, kernels do nothing. It exists to
 * see that the CUDA backend calls in pairs, balances contexts, and cleans up whichever call fails. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "fake.h"

typedef uintptr_t ptr;
enum { OK = 0, INVALID = 1, OUT_OF_MEMORY = 2, CAPTURE_UNSUPPORTED = 900, DEVICES = 2, RELAXED = 2 };

/* Launches on a captured stream become a graph's nodes instead of running. */
typedef struct fakeStream {
  int capturing;
  int nodes;
} fakeStream;

static atomic_int live, failIn, launches;
static atomic_uint lastWord;
static _Thread_local int depth, captureMode, capturing;
enum { DEPTH = 16 };
static _Thread_local void *stack[DEPTH];
static _Thread_local unsigned calls;

int fakeFail(int n);
int fakeFail(int n) { return atomic_exchange(&failIn, n); }
int fakeLive(void);
int fakeLive(void) { return live; }
int fakeThread(void);
int fakeThread(void) { return depth + (captureMode ? 1000 : 0); }
static atomic_int hangs;
void fakeHang(int on);
void fakeHang(int on) { hangs = on; }
unsigned fakeCalls(void);
unsigned fakeCalls(void) { return calls; }
int fakeLaunched(unsigned *firstWord);
int fakeLaunched(unsigned *firstWord) {
  *firstWord = lastWord;
  return launches;
}

static int fails(void) {
  int n = failIn;
  while (n > 0 && !atomic_compare_exchange_weak(&failIn, &n, n - 1)) continue;
  return n == 1;
}
#define ENTER()                        \
  do {                                 \
    calls++;                           \
    if (fails()) return OUT_OF_MEMORY; \
  } while (0)
#define NEED_CONTEXT()          \
  do {                          \
    ENTER();                    \
    if (depth == 0) return 201; \
  } while (0)
/* What a thread that captures may not do, unless it says that it knows better. */
#define NOT_CAPTURING()                                                  \
  do {                                                                   \
    if (capturing && captureMode != RELAXED) return CAPTURE_UNSUPPORTED; \
  } while (0)
#define CALL(name, ...)  \
  int name(__VA_ARGS__); \
  int name(__VA_ARGS__)

CALL(cuInit, unsigned flags) { return flags ? INVALID : OK; }
/* NVRTC looks for this one, and for it only. */
CALL(cuGetExportTable, const void **table, const void *id) {
  (void)id;
  *table = NULL;
  return 500;
}
CALL(cuDriverGetVersion, int *version) {
  *version = 13000;
  return OK;
}
CALL(cuGetErrorName, int error, const char **name) {
  *name = error == OUT_OF_MEMORY ? "FAKE_OUT_OF_MEMORY" : "FAKE_ERROR";
  return OK;
}
CALL(cuGetErrorString, int error, const char **text) {
  *text = error == OUT_OF_MEMORY ? "as the test wished" : "a mistake in the caller";
  return OK;
}
CALL(cuDeviceGetCount, int *count) {
  *count = DEVICES;
  return OK;
}
CALL(cuDeviceGet, int *device, int ordinal) {
  ENTER();
  *device = ordinal;
  return ordinal < DEVICES ? OK : 101;
}
CALL(cuDeviceGetName, char *name, int bytes, int device) {
  (void)device;
  strncpy(name, "Fake GPU", (size_t)bytes);
  return OK;
}
CALL(cuDeviceTotalMem_v2, size_t *bytes, int device) {
  (void)device;
  *bytes = 1ull << 30;
  return OK;
}
CALL(cuDeviceGetAttribute, int *value, int attribute, int device) {
  (void)device;
  ENTER();
  *value = attribute == 16 ? 132 : attribute == 75 ? 9 : attribute == 97 ? 227 * 1024 : 0;
  return OK;
}
CALL(cuDeviceCanAccessPeer, int *can, int device, int peer) {
  *can = device != peer;
  return OK;
}
CALL(cuDevicePrimaryCtxRetain, void **context, int device) {
  ENTER();
  *context = (void *)(uintptr_t)(0x1000 + device);
  live++;
  return OK;
}
CALL(cuDevicePrimaryCtxRelease_v2, int device) {
  (void)device;
  live--;
  return OK;
}
CALL(cuCtxGetCurrent, void **context) {
  calls++;
  *context = depth ? stack[depth - 1] : NULL;
  return OK;
}
CALL(cuCtxPushCurrent_v2, void *context) {
  ENTER();
  if (!context || depth == DEPTH) return INVALID;
  stack[depth++] = context;
  return OK;
}
CALL(cuCtxPopCurrent_v2, void **context) {
  calls++;
  if (depth == 0) return 201;
  *context = stack[--depth];
  return OK;
}
CALL(cuCtxSynchronize, void) {
  NEED_CONTEXT();
  NOT_CAPTURING();
  return OK;
}
/* Which device has what; what no allocation tells is the first one's, a page of it. */
enum { ALLOCATIONS = 1024 };
static struct {
  ptr at;
  size_t bytes;
  int device;
} allocations[ALLOCATIONS];
static pthread_mutex_t allocationsLock = PTHREAD_MUTEX_INITIALIZER;

/* bytes 0: forgets. */
static void remember(ptr at, size_t bytes) {
  pthread_mutex_lock(&allocationsLock);
  for (int i = 0; i < ALLOCATIONS; i++)
    if (allocations[i].at == (bytes ? 0 : at)) {
      allocations[i].at = bytes ? at : 0;
      allocations[i].bytes = bytes;
      allocations[i].device = (int)((uintptr_t)stack[depth - 1] - 0x1000);
      break;
    }
  pthread_mutex_unlock(&allocationsLock);
}
static int deviceOf(ptr p, ptr *start, size_t *bytes) {
  int device = 0;
  *start = p & ~(ptr)4095;
  *bytes = 4096;
  pthread_mutex_lock(&allocationsLock);
  for (int i = 0; i < ALLOCATIONS; i++)
    if (allocations[i].at && p >= allocations[i].at && p - allocations[i].at < allocations[i].bytes) {
      device = allocations[i].device;
      *start = allocations[i].at;
      *bytes = allocations[i].bytes;
    }
  pthread_mutex_unlock(&allocationsLock);
  return device;
}
CALL(cuMemAlloc_v2, ptr *dev, size_t bytes) {
  NEED_CONTEXT();
  NOT_CAPTURING();
  void *p = malloc(bytes);
  if (!p || !bytes) return OUT_OF_MEMORY;
  memset(p, 0xAB, bytes);
  *dev = (ptr)p;
  remember(*dev, bytes);
  live++;
  return OK;
}
CALL(cuMemFree_v2, ptr dev) {
  if (depth == 0) return 201;
  remember(dev, 0);
  free((void *)dev);
  live--;
  return OK;
}
CALL(cuMemHostAlloc, void **host, size_t bytes, unsigned flags) {
  (void)flags;
  ptr dev = 0;
  int rc = cuMemAlloc_v2(&dev, bytes);
  *host = (void *)dev;
  return rc;
}
CALL(cuMemHostGetDevicePointer_v2, ptr *dev, void *host, unsigned flags) {
  NEED_CONTEXT();
  *dev = (ptr)host;
  return flags ? INVALID : OK;
}
CALL(cuMemFreeHost, void *host) { return cuMemFree_v2((ptr)host); }
CALL(cuMemcpyHtoDAsync_v2, ptr dst, const void *src, size_t bytes, void *stream) {
  (void)stream;
  NEED_CONTEXT();
  memcpy((void *)dst, src, bytes);
  return OK;
}
CALL(cuMemcpyDtoHAsync_v2, void *dst, ptr src, size_t bytes, void *stream) {
  (void)stream;
  NEED_CONTEXT();
  memcpy(dst, (const void *)src, bytes);
  return OK;
}
CALL(cuMemsetD8Async, ptr dst, unsigned char value, size_t bytes, void *stream) {
  (void)stream;
  NEED_CONTEXT();
  memset((void *)dst, value, bytes);
  return OK;
}
CALL(cuPointerGetAttribute, void *value, int attribute, ptr p) {
  ENTER();
  (void)p;
  *(int *)value = attribute == 2 ? 2 : 0;
  return OK;
}
/* 0x77 stands for a stream that is captured, 0x78 for one that cannot be asked. */
static int isCaptured(const void *stream) {
  if (stream == (void *)0x77) return 1;
  return stream && stream != (void *)0x78 && ((const fakeStream *)stream)->capturing;
}
/* Host memory; memory of nobody; device memory. */
CALL(cuPointerGetAttributes, unsigned count, int *attributes, void **values, ptr p) {
  ptr start;
  size_t bytes;
  int device = deviceOf(p, &start, &bytes);
  ENTER();
  for (unsigned i = 0; i < count; i++)
    if (attributes[i] == 11)
      *(ptr *)values[i] = start;
    else if (attributes[i] == 12)
      *(size_t *)values[i] = bytes;
    else
      *(int *)values[i] = attributes[i] == 9 ? device : attributes[i] != 2 ? 0 : p == 0x30 ? 1 : p == 0x40 ? 0 : 2;
  return OK;
}
CALL(cuStreamCreate, void **stream, unsigned flags) {
  NEED_CONTEXT();
  (void)flags;
  *stream = calloc(1, sizeof(fakeStream));
  live++;
  return *stream ? OK : OUT_OF_MEMORY;
}
CALL(cuCtxGetStreamPriorityRange, int *least, int *greatest) {
  NEED_CONTEXT();
  *least = 0;
  *greatest = -5;
  return OK;
}
CALL(cuStreamCreateWithPriority, void **stream, unsigned flags, int priority) {
  if (priority != -5) return INVALID;
  return cuStreamCreate(stream, flags);
}
CALL(cuStreamDestroy_v2, void *stream) {
  if (depth == 0) return 201;
  free(stream);
  live--;
  return OK;
}
CALL(cuStreamQuery, void *stream) {
  NEED_CONTEXT();
  NOT_CAPTURING();
  if (isCaptured(stream)) return CAPTURE_UNSUPPORTED;
  return hangs ? 600 : OK;
}
CALL(cuStreamSynchronize, void *stream) {
  NEED_CONTEXT();
  NOT_CAPTURING();
  if (isCaptured(stream)) return CAPTURE_UNSUPPORTED;
  return OK;
}
CALL(cuStreamIsCapturing, void *stream, int *status) {
  NEED_CONTEXT();
  *status = isCaptured(stream);
  return stream == (void *)0x78 ? 906 : OK;
}
CALL(cuThreadExchangeStreamCaptureMode, int *mode) {
  calls++;
  int old = captureMode;
  captureMode = *mode;
  *mode = old;
  return OK;
}
CALL(cuModuleLoadData, void **module, const void *image) {
  NEED_CONTEXT();
  NOT_CAPTURING();
  if (memcmp(image, "\177ELF", 4) != 0 && memcmp(image, ".version", 8) != 0) return 200;
  *module = malloc(1);
  live++;
  return *module ? OK : OUT_OF_MEMORY;
}
CALL(cuModuleUnload, void *module) {
  if (depth == 0) return 201;
  free(module);
  live--;
  return OK;
}
CALL(cuModuleGetFunction, void **function, void *module, const char *name) {
  NEED_CONTEXT();
  *function = module;
  return strncmp(name, "ep_", 3) == 0 || strcmp(name, "copy16") == 0 ? OK : 500;
}
CALL(cuFuncSetAttribute, void *function, int attribute, int value) {
  (void)function;
  NEED_CONTEXT();
  return attribute == 8 && value > 0 && value <= 227 * 1024 ? OK : INVALID;
}
CALL(cuFuncLoad, void *function) {
  (void)function;
  NEED_CONTEXT();
  return OK;
}
CALL(cuLaunchKernel, void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
     unsigned smem, void *stream, void **params, void **extra) {
  NEED_CONTEXT();
  (void)smem;
  if (!function || !gx || gy != 1 || gz != 1 || !bx || by != 1 || bz != 1 || extra || !params[0]) return INVALID;
  if (isCaptured(stream)) {
    ((fakeStream *)stream)->nodes++;
    return OK;
  }
  lastWord = *(const unsigned *)params[0];
  launches++;
  return OK;
}

/* ---- What the tools call besides ----------------------------------------------------------------------------------- */

CALL(cuCtxSetCurrent, void *context) {
  if (!depth) depth = 1;
  stack[depth - 1] = context;
  return OK;
}
CALL(cuCtxEnablePeerAccess, void *peer, unsigned flags) {
  NEED_CONTEXT();
  return peer && peer != stack[depth - 1] && !flags ? OK : INVALID;
}
CALL(cuDeviceGetPCIBusId, char *id, int bytes, int device) {
  strncpy(id, device ? "0000:02:00.0" : "0000:01:00.0", (size_t)bytes);
  return OK;
}
CALL(cuMemcpyAsync, ptr to, ptr from, size_t bytes, void *stream) {
  (void)stream;
  NEED_CONTEXT();
  memcpy((void *)to, (const void *)from, bytes);
  return OK;
}
CALL(cuMemHostRegister_v2, void *pointer, size_t bytes, unsigned flags) {
  NEED_CONTEXT();
  (void)flags;
  return pointer && bytes ? OK : INVALID;
}
CALL(cuMemHostUnregister, void *pointer) { return pointer ? OK : INVALID; }
/* One process: handles to other processes' memory are not asked for. */
CALL(cuIpcGetMemHandle, void *handle, ptr pointer) {
  (void)handle, (void)pointer;
  return INVALID;
}
typedef struct fakeIpcHandle {
  char bytes[64];
} fakeIpcHandle;
CALL(cuIpcOpenMemHandle_v2, ptr *pointer, fakeIpcHandle handle, unsigned flags) {
  (void)pointer, (void)handle, (void)flags;
  return INVALID;
}
CALL(cuIpcCloseMemHandle, ptr pointer) {
  (void)pointer;
  return INVALID;
}
/* Work is done when it is queued, so that nothing can be held. */
CALL(cuStreamWaitValue32_v2, void *stream, ptr word, unsigned value, unsigned flags) {
  NEED_CONTEXT();
  (void)value, (void)flags;
  return word && !isCaptured(stream) ? OK : INVALID;
}
CALL(cuEventCreate, void **event, unsigned flags) {
  NEED_CONTEXT();
  (void)flags;
  *event = malloc(1);
  live++;
  return *event ? OK : OUT_OF_MEMORY;
}
CALL(cuEventDestroy_v2, void *event) {
  free(event);
  live--;
  return OK;
}
CALL(cuEventRecord, void *event, void *stream) {
  (void)stream;
  NEED_CONTEXT();
  return event ? OK : INVALID;
}
CALL(cuStreamWaitEvent, void *stream, void *event, unsigned flags) {
  NEED_CONTEXT();
  (void)stream;
  return event && !flags ? OK : INVALID;
}
CALL(cuEventElapsedTime, float *milliseconds, void *start, void *end) {
  NEED_CONTEXT();
  *milliseconds = 0.01f;
  return start && end && start != end ? OK : INVALID;
}
CALL(cuStreamBeginCapture_v2, void *stream, int mode) {
  NEED_CONTEXT();
  if (!stream || isCaptured(stream) || mode != 1) return INVALID;
  *(fakeStream *)stream = (fakeStream){1, 0};
  capturing++;
  return OK;
}
/* A graph is its number of launches. */
CALL(cuStreamEndCapture, void *stream, void **graph) {
  NEED_CONTEXT();
  if (!isCaptured(stream)) return INVALID;
  ((fakeStream *)stream)->capturing = 0;
  capturing--;
  *graph = malloc(sizeof(int));
  if (!*graph) return OUT_OF_MEMORY;
  *(int *)*graph = ((fakeStream *)stream)->nodes;
  live++;
  return OK;
}
CALL(cuGraphInstantiateWithFlags, void **exec, void *graph, unsigned long long flags) {
  NEED_CONTEXT();
  *exec = malloc(sizeof(int));
  if (!*exec || flags) return INVALID;
  *(int *)*exec = *(int *)graph;
  live++;
  return OK;
}
CALL(cuGraphLaunch, void *exec, void *stream) {
  NEED_CONTEXT();
  if (!exec || isCaptured(stream)) return INVALID;
  launches += *(int *)exec;
  return OK;
}
CALL(cuGraphDestroy, void *graph) {
  free(graph);
  live--;
  return OK;
}
CALL(cuGraphExecDestroy, void *exec) { return cuGraphDestroy(exec); }
