/* One text -> machine code, through NVRTC. Stateless and thread-safe: several threads compile at once. */
#ifndef EP_JIT_COMPILE_H_
#define EP_JIT_COMPILE_H_

#include <stddef.h>

#include "bundle.h"
#include "nvrtc.h"

#define EP_COMPILE_MAX_OPTIONS 16
#define EP_COMPILE_MAX_BUNDLES 4

typedef struct epCompileJob {
  const char *name; /* in messages, "ep_dispatch_kernel" */
  const char *source;
  const epBundle *bundles[EP_COMPILE_MAX_BUNDLES]; /* headers; NULL ends the list */
  const char *options[EP_COMPILE_MAX_OPTIONS];
  int optionCount;
  int keepPtx;
} epCompileJob;

/* What the assembler said of the program; -1 where it said nothing. */
typedef struct epCompileUsage {
  int registers, spillBytes, localBytes, staticSmemBytes;
} epCompileUsage;

typedef struct epCompiled {
  void *cubin;
  size_t bytes;
  char *ptx; /* when keepPtx; NUL-terminated */
  char *log; /* NUL-terminated, may be empty */
  epCompileUsage usage;
} epCompiled;

ncclResult_t epCompile(const epNvrtc *nvrtc, const epCompileJob *job, epCompiled *out);
void epCompiledFree(epCompiled *compiled);

/* Reads registers, spills, stack and shared memory from what `--ptxas-options=-v` adds to the log: the largest of each
 * over all functions. */
epCompileUsage epCompileUsageOf(const char *log);

#endif
