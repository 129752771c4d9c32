/* What the files of the CUDA backend share: its object, entering and leaving its context, and errors. */
#ifndef EP_HOST_CUDA_INTERNAL_H_
#define EP_HOST_CUDA_INTERNAL_H_

#include "cuda_backend.h"
#include "cuda_driver.h"
#include "cuda_nccl.h"
#include "fail.h"

typedef struct epCuda {
  epBackend base;
  const epCuDriver *cu;
  const epNccl *nccl;
  ncclComm_t comm;
  ncclEpAllocConfig_t alloc;
  epCuDevice device;
  epCuContext context; /* primary context of `device`, retained; the one NCCL and frameworks use */
  epCuStream stream;   /* private, non-blocking: never waits for the caller's streams */
  epTopology topology;
  epNcclTeam lsa;
  void *bounceHost; /* allGather's, grown on demand */
  epCuPtr bounceDev;
  size_t bounceBytes;
  epKernel *kernels; /* held by this object */
  int stuck; /* such a wait gave up: NCCL's kernel is still on the device, and whatever waits for that would hang */
} epCuda;

/* Between Current and Restore the backend's context is current, whatever device the caller works on: what every call of
 * an operation needs, so nothing is done where it is current already, as it is for most callers. `scope` remembers what
 * to put back. */
typedef struct epCudaScope {
  int pushed, captureMode;
} epCudaScope;
ncclResult_t epCudaCurrent(epCuda *be, epCudaScope *scope);
void epCudaRestore(epCuda *be, const epCudaScope *scope);
/* The same, and this thread may allocate and wait while some stream is captured. */
ncclResult_t epCudaEnter(epCuda *be, epCudaScope *scope);
void epCudaLeave(epCuda *be, const epCudaScope *scope);

/* Turns an NCCL result into ours: waits where a non-blocking communicator says "in progress", and on an error says what
 * failed with NCCL's own words. */
ncclResult_t epCudaNccl(epCuda *be, ncclResult_t result, const char *what);

/* Waits for the private stream, at most patienceNs; ends early when the communicator has failed or was aborted. */
ncclResult_t epCudaDrain(epCuda *be, const char *what);

/* Before calls in which the driver may wait for the device and let no other thread of the process in meanwhile: loading code,
 * freeing memory. A kernel of several scale-up domains may wait for what the network's proxy does with the driver in another
 * thread (libnccl-rma-ep.so does), and both would wait for ever: so the device is waited for first, which lets others in.
 * Nothing is done where the process has no such group. */
ncclResult_t epCudaQuiet(epCuda *be);

ncclResult_t epCudaAllGather(epBackend *base, const void *mine, void *all, size_t bytes);

ncclResult_t epCudaWindowCreate(epBackend *base, size_t bytes, epWindow **out, void **peers);
ncclResult_t epCudaWindowDestroy(epBackend *base, epWindow *window);
ncclResult_t epCudaWindowAddress(epBackend *base, ncclWindow_t win, uint64_t offset, uint64_t bytes, void **dev,
                                 void **shared);

/* Every rank tells whether it is well, and all learn of the first that is not: nobody is left alone in a collective. */
ncclResult_t epCudaAgree(epCuda *be, ncclResult_t mine, const char *step);

/* The network goes with its window, which keeps it from then on; NCCL's handle of the window. */
typedef struct epCudaGin epCudaGin;
ncclResult_t epCudaGinCreate(epBackend *base, epWindow *window, uint32_t contexts, uint32_t signals, uint32_t *aborted,
                             epGin *out);
/* With device headers of `version`, if they were found. */
ncclResult_t epCudaGinOpen(epCuda *be, epWindow *window, ncclResult_t found, int version, uint32_t contexts,
                           uint32_t signals, uint32_t *aborted, epGin *out);
int epCudaGinProxy(epCuda *be); /* the communicator's network is NCCL's proxy; 0 also where it cannot be asked */
int epCudaGinAnywhere(void);    /* some group of this process has a network */
void epCudaGinDestroy(epCuda *be, epCudaGin *gin);
ncclWindow_t epCudaWindowSetGin(epWindow *window, epCudaGin *gin);

ncclResult_t epCudaStreamCreate(epBackend *base, cudaStream_t *stream);
ncclResult_t epCudaStreamDestroy(epBackend *base, cudaStream_t stream);
ncclResult_t epCudaEventCreate(epBackend *base, cudaEvent_t *event);
ncclResult_t epCudaEventDestroy(epBackend *base, cudaEvent_t event);
ncclResult_t epCudaEventRecord(epBackend *base, cudaEvent_t event, cudaStream_t stream);
ncclResult_t epCudaStreamWait(epBackend *base, cudaStream_t stream, cudaEvent_t event);

ncclResult_t epCudaIsDeviceAddress(epBackend *base, const void *dev, int *yes);

ncclResult_t epCudaKernel(epBackend *base, int kernelId, const epConfig *config, epKernel **out);
ncclResult_t epCudaLaunch(epBackend *base, epKernel *kernel, const epLaunch *launch, cudaStream_t stream);
void epCudaKernelsRelease(epCuda *be);

#endif
