/* Configuration -> the text that is compiled: constants, one include of a kernel, one entry point. */
#ifndef EP_JIT_SOURCE_H_
#define EP_JIT_SOURCE_H_

#include "abi.h"
#include "nccl_ep.h"

/* The text in *out is the caller's to free(). */
ncclResult_t epJitSource(int kernelId, const epConfig *config, int arch, char **out);

#endif
