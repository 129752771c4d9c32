/* A CUDA driver without a GPU: memory is host memory, streams do everything at once, kernels do nothing. It exists to
 * see that the CUDA backend calls in pairs, balances contexts, and cleans up whichever call fails. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "fake.h"

typedef uintptr_t ptr;
enum { OK = 0, INVALID = 1, OUT_OF_MEMORY = 2, DEVICES = 2 };

static atomic_int live, failIn, launches;
static atomic_uint lastWord;
static _Thread_local int depth, captureMode;
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
  return OK;
}
CALL(cuMemAlloc_v2, ptr *dev, size_t bytes) {
  NEED_CONTEXT();
  void *p = malloc(bytes);
  if (!p || !bytes) return OUT_OF_MEMORY;
  memset(p, 0xAB, bytes);
  *dev = (ptr)p;
  live++;
  return OK;
}
CALL(cuMemFree_v2, ptr dev) {
  if (depth == 0) return 201;
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
/* Device memory of the first device; host memory; memory of nobody. */
CALL(cuPointerGetAttributes, unsigned count, int *attributes, void **values, ptr p) {
  ENTER();
  for (unsigned i = 0; i < count; i++) *(int *)values[i] = attributes[i] == 2 ? (p == 0x30 ? 1 : p == 0x40 ? 0 : 2) : 0;
  return OK;
}
CALL(cuStreamCreate, void **stream, unsigned flags) {
  NEED_CONTEXT();
  (void)flags;
  *stream = malloc(1);
  live++;
  return *stream ? OK : OUT_OF_MEMORY;
}
CALL(cuStreamDestroy_v2, void *stream) {
  if (depth == 0) return 201;
  free(stream);
  live--;
  return OK;
}
CALL(cuStreamQuery, void *stream) {
  (void)stream;
  NEED_CONTEXT();
  return hangs ? 600 : OK;
}
CALL(cuStreamSynchronize, void *stream) {
  (void)stream;
  NEED_CONTEXT();
  return OK;
}
CALL(cuStreamIsCapturing, void *stream, int *status) {
  NEED_CONTEXT();
  *status = stream == (void *)0x77;
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
  if (memcmp(image, "\177ELF", 4) != 0) return 200;
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
  return strncmp(name, "ep_", 3) == 0 ? OK : 500;
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
  (void)stream, (void)smem;
  if (!function || !gx || gy != 1 || gz != 1 || !bx || by != 1 || bz != 1 || extra || !params[0]) return INVALID;
  lastWord = *(const unsigned *)params[0];
  launches++;
  return OK;
}
