/* Calls of the JIT that tools and tests use and the runtime does not: a chosen cache folder, and what is bound. */
#ifndef EP_JIT_EXT_H_
#define EP_JIT_EXT_H_

#include "jit.h"

/* As epJitOpen; folder NULL: from the environment, empty: no disk cache. */
ncclResult_t epJitOpenAt(epJit **out, const char *folder);
/* NULL: no disk cache, and *why says why. */
const char *epJitCacheFolder(epJit *jit, const char **why);
/* 1 when the disk cache holds a good entry. */
int epJitCached(epJit *jit, int kernelId, const epConfig *config, int arch);
/* File of the bound NVRTC; empty when there is none. */
const char *epJitCompilerPath(epJit *jit);

#endif
