/* Key -> generated source -> NVRTC -> cached cubin. Knows nothing of the driver: it yields machine code; the CUDA
 * backend loads it. Thread-safe. Options from the environment are read at epJitOpen: NCCL_EP_JIT_CACHE_DIR   folder
 * (default $XDG_CACHE_HOME/nccl_ep or ~/.cache/nccl_ep); empty: no disk cache NCCL_EP_JIT_DUMP        folder that
 * receives source, PTX, cubin and, where cuobjdump/nvdisasm is found, SASS NCCL_EP_JIT_LINEINFO    1: line information
 *   NCCL_EP_JIT_VERBOSE     1: one log line a compile or cache hit, with time, registers and spills
 *   NCCL_EP_NVRTC           path of libnvrtc, when it is neither loaded nor found by the loader */
#ifndef EP_JIT_JIT_H_
#define EP_JIT_JIT_H_

#include <stddef.h>

#include "abi.h"
#include "nccl_ep.h"

typedef struct epJit epJit;

typedef struct epJitCode {
  void *cubin; /* owned by the caller: epJitFree */
  size_t bytes;
  int fromCache;
  double seconds;
  int registers, spillBytes, localBytes, staticSmemBytes; /* from ptxas -v, -1 when unknown (cache hit keeps them) */
} epJitCode;

ncclResult_t epJitOpen(epJit **out);
/* Version code of the NCCL that will run the kernels: those of several scale-up domains are compiled with headers that it
 * accepts. Not called: with the newest that are embedded. */
void epJitUseNccl(epJit *jit, int version);
void epJitClose(epJit *jit);
/* arch: 80, 90, 100, 120 (or a relative such as 86, 103: compiled for exactly that). */
ncclResult_t epJitCompile(epJit *jit, int kernelId, const epConfig *config, int arch, epJitCode *out);
void epJitFree(epJitCode *code);
/* Name of the extern "C" __global__ function in the cubin. */
const char *epJitEntryName(int kernelId);
/* NVRTC's version, 1000 * major + 10 * minor; 0 and a reason in the last error when none is there. */
int epJitCompilerVersion(epJit *jit);

#endif
