/* The part of the CUDA driver API that the tools use, and NCCL's communicators, both found at run time: the tools
 * compile and start without either. */
#ifndef EP_TOOLS_DRIVER_H_
#define EP_TOOLS_DRIVER_H_

#include <stddef.h>
#include <stdint.h>

typedef int epCuResult;
typedef int epCuDevice;
typedef void *epCuContext, *epCuStream, *epCuEvent, *epCuGraph, *epCuGraphExec;
typedef unsigned long long epCuPointer;
typedef struct epCuIpcHandle {
  char bytes[64];
} epCuIpcHandle;
typedef struct epNcclId {
  char bytes[128];
} epNcclId;

#define EP_CU_NOT_READY 600
#define EP_CU_PEER_ALREADY_ENABLED 704
#define EP_CU_EVENT_DEFAULT 0u
#define EP_CU_STREAM_NON_BLOCKING 1u
#define EP_CU_WAIT_GEQ 0u
#define EP_CU_HOST_PORTABLE 1u
#define EP_CU_HOST_DEVICEMAP 2u
#define EP_CU_IPC_LAZY_PEER 1u
#define EP_CU_CAPTURE_THREAD_LOCAL 1
#define EP_CU_ATTR_SMS 16
#define EP_NCCL_BYTES 1     /* ncclUint8 */
#define EP_NCCL_SYMMETRIC 1 /* NCCL_WIN_COLL_SYMMETRIC */
#define EP_CU_ATTR_MAJOR 75
#define EP_CU_ATTR_MINOR 76

/* X(field, symbol, arguments): the newest ABI of each name that drivers since CUDA 12.0 export. */
#define EP_DRIVER_CALLS(X)                                                                                            \
  X(init, "cuInit", (unsigned flags))                                                                                 \
  X(driverVersion, "cuDriverGetVersion", (int *version))                                                              \
  X(deviceCount, "cuDeviceGetCount", (int *count))                                                                    \
  X(deviceGet, "cuDeviceGet", (epCuDevice * device, int ordinal))                                                     \
  X(deviceName, "cuDeviceGetName", (char *name, int size, epCuDevice device))                                         \
  X(devicePciBusId, "cuDeviceGetPCIBusId", (char *id, int size, epCuDevice device))                                   \
  X(deviceAttribute, "cuDeviceGetAttribute", (int *value, int attribute, epCuDevice device))                          \
  X(contextRetain, "cuDevicePrimaryCtxRetain", (epCuContext * context, epCuDevice device))                            \
  X(contextRelease, "cuDevicePrimaryCtxRelease_v2", (epCuDevice device))                                              \
  X(contextSet, "cuCtxSetCurrent", (epCuContext context))                                                             \
  X(peerEnable, "cuCtxEnablePeerAccess", (epCuContext peer, unsigned flags))                                          \
  X(memAlloc, "cuMemAlloc_v2", (epCuPointer * pointer, size_t bytes))                                                 \
  X(memFree, "cuMemFree_v2", (epCuPointer pointer))                                                                   \
  X(memcpyAsync, "cuMemcpyAsync", (epCuPointer to, epCuPointer from, size_t bytes, epCuStream stream))                \
  X(memsetAsync, "cuMemsetD8Async", (epCuPointer to, unsigned char value, size_t bytes, epCuStream stream))           \
  X(hostRegister, "cuMemHostRegister_v2", (void *pointer, size_t bytes, unsigned flags))                              \
  X(hostUnregister, "cuMemHostUnregister", (void *pointer))                                                           \
  X(hostDevicePointer, "cuMemHostGetDevicePointer_v2", (epCuPointer * device, void *host, unsigned flags))            \
  X(ipcGet, "cuIpcGetMemHandle", (epCuIpcHandle * handle, epCuPointer pointer))                                       \
  X(ipcOpen, "cuIpcOpenMemHandle_v2", (epCuPointer * pointer, epCuIpcHandle handle, unsigned flags))                  \
  X(ipcClose, "cuIpcCloseMemHandle", (epCuPointer pointer))                                                           \
  X(streamCreate, "cuStreamCreate", (epCuStream * stream, unsigned flags))                                            \
  X(streamDestroy, "cuStreamDestroy_v2", (epCuStream stream))                                                         \
  X(streamQuery, "cuStreamQuery", (epCuStream stream))                                                                \
  X(streamWaitValue, "cuStreamWaitValue32_v2", (epCuStream stream, epCuPointer word, uint32_t value, unsigned flags)) \
  X(captureBegin, "cuStreamBeginCapture_v2", (epCuStream stream, int mode))                                           \
  X(captureEnd, "cuStreamEndCapture", (epCuStream stream, epCuGraph * graph))                                         \
  X(graphInstantiate, "cuGraphInstantiateWithFlags",                                                                  \
    (epCuGraphExec * exec, epCuGraph graph, unsigned long long flags))                                                \
  X(graphLaunch, "cuGraphLaunch", (epCuGraphExec exec, epCuStream stream))                                            \
  X(graphDestroy, "cuGraphDestroy", (epCuGraph graph))                                                                \
  X(graphExecDestroy, "cuGraphExecDestroy", (epCuGraphExec exec))                                                     \
  X(eventCreate, "cuEventCreate", (epCuEvent * event, unsigned flags))                                                \
  X(eventDestroy, "cuEventDestroy_v2", (epCuEvent event))                                                             \
  X(eventRecord, "cuEventRecord", (epCuEvent event, epCuStream stream))                                               \
  X(eventElapsed, "cuEventElapsedTime", (float *milliseconds, epCuEvent start, epCuEvent end))                        \
  X(moduleLoadData, "cuModuleLoadData", (void **module, const void *image))                                           \
  X(moduleUnload, "cuModuleUnload", (void *module))                                                                   \
  X(moduleGetFunction, "cuModuleGetFunction", (void **function, void *module, const char *name))                      \
  X(launchKernel, "cuLaunchKernel",                                                                                   \
    (void *function, unsigned gridX, unsigned gridY, unsigned gridZ, unsigned blockX, unsigned blockY,                \
     unsigned blockZ, unsigned smemBytes, epCuStream stream, void **params, void **extra))                            \
  X(errorString, "cuGetErrorString", (epCuResult error, const char **text))

typedef struct epDriver {
#define X(field, symbol, arguments) epCuResult(*field) arguments;
  EP_DRIVER_CALLS(X)
#undef X
} epDriver;

typedef struct epNccl {
  int (*getVersion)(int *version);
  int (*getUniqueId)(epNcclId *id);
  int (*commInitRank)(void **comm, int ranks, epNcclId id, int rank);
  int (*commDestroy)(void *comm);
  int (*commAbort)(void *comm);
  const char *(*getErrorString)(int result);
  int (*groupStart)(void);
  int (*groupEnd)(void);
  int (*send)(const void *from, size_t count, int type, int peer, void *comm, void *stream);
  int (*receive)(void *to, size_t count, int type, int peer, void *comm, void *stream);
  /* since NCCL 2.27; NULL before */
  int (*memAlloc)(void **pointer, size_t bytes);
  int (*memFree)(void *pointer);
  int (*windowRegister)(void *comm, void *pointer, size_t bytes, void **window, int flags);
  int (*windowDeregister)(void *comm, void *window);
} epNccl;

/* The driver with cuInit done, or NULL and why not. Opened once, never closed. */
const epDriver *epDriverOpen(const char **reason);
/* NCCL: $NCCL_EP_NCCL, else libnccl.so.2 as the loader finds it (or as the process already holds it). */
const epNccl *epNcclOpen(const char **reason);
/* 0, or -1 after telling which call failed and why. */
int epDriverCheck(const epDriver *driver, epCuResult result, const char *what);

#endif
