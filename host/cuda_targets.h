/* What is known of a GPU from its compute capability alone: enough to choose and compile kernels without one. */
#ifndef EP_HOST_CUDA_TARGETS_H_
#define EP_HOST_CUDA_TARGETS_H_

#include "backend.h"

/* `arch` as in epTopology, for example 90. ncclInvalidArgument for one this library has no kernels for. */
ncclResult_t epCudaTarget(int arch, epTopology *out);

#endif
