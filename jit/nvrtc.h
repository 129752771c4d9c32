/* NVRTC, found and bound at run time: the library neither links it nor needs its header. One binding serves the
 * process; it is never unloaded, because NVRTC keeps state of its own. */
#ifndef EP_JIT_NVRTC_H_
#define EP_JIT_NVRTC_H_

#include <stddef.h>

#include "nccl_ep.h"

typedef struct epNvrtcProgramOpaque *epNvrtcProgram; /* nvrtcProgram */
enum { EP_NVRTC_SUCCESS = 0, EP_NVRTC_ERROR_COMPILATION = 6 };
#define EP_NVRTC_MAX_ARCHS 64

typedef struct epNvrtc {
  int version;     /* 1000 * major + 10 * minor */
  char path[1024]; /* of the file that is bound */
  int archCount, archs[EP_NVRTC_MAX_ARCHS];
  const char *(*getErrorString)(int result);
  int (*createProgram)(epNvrtcProgram *prog, const char *src, const char *name, int numHeaders,
                       const char *const *headers, const char *const *includeNames);
  int (*destroyProgram)(epNvrtcProgram *prog);
  int (*compileProgram)(epNvrtcProgram prog, int numOptions, const char *const *options);
  int (*getProgramLogSize)(epNvrtcProgram prog, size_t *size);
  int (*getProgramLog)(epNvrtcProgram prog, char *log);
  int (*getCubinSize)(epNvrtcProgram prog, size_t *size);
  int (*getCubin)(epNvrtcProgram prog, char *cubin);
  int (*getPtxSize)(epNvrtcProgram prog, size_t *size);
  int (*getPtx)(epNvrtcProgram prog, char *ptx);
} epNvrtc;

/* The process's binding. A failed search is not remembered: NVRTC may be loaded later. */
ncclResult_t epNvrtcOpen(const epNvrtc **out);

#endif
