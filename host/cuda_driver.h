/* The few functions of the CUDA driver that the library calls, bound at run time: no CUDA header and no link to
 * libcuda. Names and values follow cuda.h; types have names of their own, so that this header and cuda.h can meet. */
#ifndef EP_HOST_CUDA_DRIVER_H_
#define EP_HOST_CUDA_DRIVER_H_

#include <stddef.h>
#include <stdint.h>

#include "nccl_ep.h"

typedef int epCuResult;
typedef int epCuDevice;
typedef uintptr_t epCuPtr; /* CUdeviceptr */
typedef struct CUctx_st *epCuContext;
typedef struct CUmod_st *epCuModule;
typedef struct CUfunc_st *epCuFunction;
typedef struct CUstream_st *epCuStream; /* cudaStream_t is the same pointer */
typedef struct CUevent_st *epCuEvent;   /* cudaEvent_t is, too */

enum { EP_CU_SUCCESS = 0, EP_CU_INVALID_VALUE = 1, EP_CU_NOT_READY = 600, EP_CU_CAPTURE_IMPLICIT = 906 };
enum {
  EP_CU_ATTR_MULTIPROCESSOR_COUNT = 16,
  EP_CU_ATTR_PCI_BUS_ID = 33,
  EP_CU_ATTR_PCI_DEVICE_ID = 34,
  EP_CU_ATTR_MEMORY_CLOCK_RATE = 36,
  EP_CU_ATTR_MEMORY_BUS_WIDTH = 37,
  EP_CU_ATTR_PCI_DOMAIN_ID = 50,
  EP_CU_ATTR_COMPUTE_CAPABILITY_MAJOR = 75,
  EP_CU_ATTR_COMPUTE_CAPABILITY_MINOR = 76,
  EP_CU_ATTR_PAGEABLE_MEMORY_ACCESS = 88,
  EP_CU_ATTR_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97
};
enum { EP_CU_FUNC_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8 };
enum {
  EP_CU_POINTER_MEMORY_TYPE = 2,
  EP_CU_POINTER_IS_MANAGED = 8,
  EP_CU_POINTER_DEVICE_ORDINAL = 9,
  EP_CU_POINTER_RANGE_START_ADDR = 11,
  EP_CU_POINTER_RANGE_SIZE = 12
};
enum { EP_CU_MEMORYTYPE_HOST = 1, EP_CU_MEMORYTYPE_DEVICE = 2 };
enum { EP_CU_MEMHOSTALLOC_PORTABLE = 1, EP_CU_MEMHOSTALLOC_DEVICEMAP = 2 };
enum { EP_CU_STREAM_NON_BLOCKING = 1 };
enum { EP_CU_EVENT_DISABLE_TIMING = 2 };
enum { EP_CU_CAPTURE_STATUS_NONE = 0, EP_CU_CAPTURE_MODE_RELAXED = 2 };

/* X(slot, symbol, parameters), symbols not quoted so that tests can compare with cuda.h: they carry the ABI version
 * that cuda.h maps the plain name to. */
#define EP_CU_FUNCTIONS(X)                                                                                       \
  X(init, cuInit, (unsigned flags))                                                                              \
  X(driverGetVersion, cuDriverGetVersion, (int *version))                                                        \
  X(getErrorName, cuGetErrorName, (epCuResult error, const char **name))                                         \
  X(getErrorString, cuGetErrorString, (epCuResult error, const char **text))                                     \
  X(deviceGetCount, cuDeviceGetCount, (int *count))                                                              \
  X(deviceGet, cuDeviceGet, (epCuDevice * device, int ordinal))                                                  \
  X(deviceGetName, cuDeviceGetName, (char *name, int bytes, epCuDevice device))                                  \
  X(deviceTotalMem, cuDeviceTotalMem_v2, (size_t * bytes, epCuDevice device))                                    \
  X(deviceGetAttribute, cuDeviceGetAttribute, (int *value, int attribute, epCuDevice device))                    \
  X(deviceCanAccessPeer, cuDeviceCanAccessPeer, (int *can, epCuDevice device, epCuDevice peer))                  \
  X(primaryCtxRetain, cuDevicePrimaryCtxRetain, (epCuContext * context, epCuDevice device))                      \
  X(primaryCtxRelease, cuDevicePrimaryCtxRelease_v2, (epCuDevice device))                                        \
  X(ctxGetCurrent, cuCtxGetCurrent, (epCuContext * context))                                                     \
  X(ctxPushCurrent, cuCtxPushCurrent_v2, (epCuContext context))                                                  \
  X(ctxPopCurrent, cuCtxPopCurrent_v2, (epCuContext * context))                                                  \
  X(ctxSynchronize, cuCtxSynchronize, (void))                                                                    \
  X(memAlloc, cuMemAlloc_v2, (epCuPtr * dev, size_t bytes))                                                      \
  X(memFree, cuMemFree_v2, (epCuPtr dev))                                                                        \
  X(memHostAlloc, cuMemHostAlloc, (void **host, size_t bytes, unsigned flags))                                   \
  X(memHostGetDevicePointer, cuMemHostGetDevicePointer_v2, (epCuPtr * dev, void *host, unsigned flags))          \
  X(memFreeHost, cuMemFreeHost, (void *host))                                                                    \
  X(memcpyHtoDAsync, cuMemcpyHtoDAsync_v2, (epCuPtr dst, const void *src, size_t bytes, epCuStream stream))      \
  X(memcpyDtoHAsync, cuMemcpyDtoHAsync_v2, (void *dst, epCuPtr src, size_t bytes, epCuStream stream))            \
  X(memsetD8Async, cuMemsetD8Async, (epCuPtr dst, unsigned char value, size_t bytes, epCuStream stream))         \
  X(pointerGetAttribute, cuPointerGetAttribute, (void *value, int attribute, epCuPtr ptr))                       \
  X(pointerGetAttributes, cuPointerGetAttributes, (unsigned count, int *attributes, void **values, epCuPtr ptr)) \
  X(streamCreate, cuStreamCreate, (epCuStream * stream, unsigned flags))                                         \
  X(streamDestroy, cuStreamDestroy_v2, (epCuStream stream))                                                      \
  X(streamCreateWithPriority, cuStreamCreateWithPriority, (epCuStream * stream, unsigned flags, int priority))   \
  X(streamWaitEvent, cuStreamWaitEvent, (epCuStream stream, epCuEvent event, unsigned flags))                    \
  X(ctxGetStreamPriorityRange, cuCtxGetStreamPriorityRange, (int *least, int *greatest))                         \
  X(eventCreate, cuEventCreate, (epCuEvent * event, unsigned flags))                                             \
  X(eventDestroy, cuEventDestroy_v2, (epCuEvent event))                                                          \
  X(eventRecord, cuEventRecord, (epCuEvent event, epCuStream stream))                                            \
  X(streamQuery, cuStreamQuery, (epCuStream stream))                                                             \
  X(streamSynchronize, cuStreamSynchronize, (epCuStream stream))                                                 \
  X(streamIsCapturing, cuStreamIsCapturing, (epCuStream stream, int *status))                                    \
  X(threadExchangeCaptureMode, cuThreadExchangeStreamCaptureMode, (int *mode))                                   \
  X(moduleLoadData, cuModuleLoadData, (epCuModule * module, const void *image))                                  \
  X(moduleUnload, cuModuleUnload, (epCuModule module))                                                           \
  X(moduleGetFunction, cuModuleGetFunction, (epCuFunction * function, epCuModule module, const char *name))      \
  X(funcSetAttribute, cuFuncSetAttribute, (epCuFunction function, int attribute, int value))                     \
  X(launchKernel, cuLaunchKernel,                                                                                \
    (epCuFunction function, unsigned gridX, unsigned gridY, unsigned gridZ, unsigned blockX, unsigned blockY,    \
     unsigned blockZ, unsigned smemBytes, epCuStream stream, void **params, void **extra))

/* cuLaunchKernelEx's structs (CUDA 12.0 on), as far as one attribute needs them. */
#define EP_CU_LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION 6
typedef struct epCuLaunchAttribute {
  int id;
  char pad[8 - sizeof(int)];
  union {
    char room[64];
    int programmaticStreamSerializationAllowed;
  } value;
} epCuLaunchAttribute;
typedef struct epCuLaunchConfig {
  unsigned gridX, gridY, gridZ, blockX, blockY, blockZ, smemBytes;
  epCuStream stream;
  epCuLaunchAttribute *attributes;
  unsigned count;
} epCuLaunchConfig;

typedef struct epCuDriver {
#define X(slot, symbol, parameters) epCuResult(*slot) parameters;
  EP_CU_FUNCTIONS(X)
#undef X
  epCuResult (*funcLoad)(epCuFunction function); /* since 12.4; NULL before */
  epCuResult (*launchKernelEx)(const epCuLaunchConfig *config, epCuFunction function, void **params,
                               void **extra); /* since 12.0; NULL before */
  int version;                                /* 1000 * major + 10 * minor: the CUDA version that the driver runs */
} epCuDriver;

/* Binds and initialises the driver once; a failure is not remembered, so that a later call may succeed. */
ncclResult_t epCuDriverOpen(const epCuDriver **out);

/* epFail with the driver's name and text of the error: "cuMemAlloc_v2 of 64 bytes: CUDA_ERROR_OUT_OF_MEMORY: out of
 * memory". */
ncclResult_t epCuFail(const epCuDriver *cu, epCuResult error, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
