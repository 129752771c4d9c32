/* The backend of real communicators: the CUDA driver and NCCL behind epBackendOps. */
#ifndef EP_HOST_CUDA_BACKEND_H_
#define EP_HOST_CUDA_BACKEND_H_

#include "backend.h"

/* `alloc` NULL or empty: device memory comes from the driver. The communicator must outlive the backend. */
ncclResult_t epCudaBackendOpen(ncclComm_t comm, const ncclEpAllocConfig_t *alloc, epBackend **out);

#endif
