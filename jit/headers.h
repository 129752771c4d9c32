/* What kernels of several scale-up domains are compiled with beside their own text: NCCL's device headers, embedded, in a
 * version that the NCCL of the process accepts; and CUDA's, which those include and which must be found. */
#ifndef EP_JIT_HEADERS_H_
#define EP_JIT_HEADERS_H_

#include "bundle.h"
#include "nccl_ep.h"

typedef struct epHeaders {
  const epBundle *nccl;
  char cuda[1100], cccl[1100]; /* options for the compiler; cccl: where toolkits keep libcu++ */
} epHeaders;

/* Whether NCCL `runtime` takes device communicators of kernels that were compiled with the headers of `set` (version codes). */
int epNcclAccepts(int runtime, int set);
/* The version code of the set that kernels for NCCL `runtime` are compiled with; says in one line what is missing. */
ncclResult_t epHeadersVersion(int runtime, int *version);
/* runtime 0: none is bound yet, the newest set. nvrtc: path of the bound compiler, beside which CUDA's headers may be. Says in
 * one line what is missing. */
ncclResult_t epHeadersFind(int runtime, const char *nvrtc, epHeaders *out);

#endif
