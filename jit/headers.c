/* Picks NCCL's header set and finds CUDA's headers, for the kernels that include them. */
#include "headers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fail.h"
#include "nccl_abi.h"

/* From this version on NCCL takes GIN requests of older headers, back to it; before, each took its own minor version's alone. */
#define EP_NCCL_COMPATIBLE 23000

int epNcclAccepts(int runtime, int set) {
  if (set > runtime || !EP_NCCL_KNOWN(set)) return 0;
  return set >= EP_NCCL_COMPATIBLE || runtime / 100 == set / 100;
}

static const epBundle *pickSet(int runtime) {
  for (int i = epNcclBundleCount - 1; i >= 0; i--) /* oldest first */
    if (epNcclAccepts(runtime ? runtime : epNcclBundles[i].code, epNcclBundles[i].code)) return &epNcclBundles[i];
  return NULL;
}

static int hasHeaders(const char *folder) {
  char probe[1200];
  int n = snprintf(probe, sizeof(probe), "%s/cuda_runtime.h", folder);
  return n > 0 && (size_t)n < sizeof(probe) && access(probe, R_OK) == 0;
}

/* A toolkit that is named, one beside the compiler (toolkits, and CUDA 13's packages; CUDA 12's packages are a folder a
 * component), one at the usual place. */
static int findCuda(const char *nvrtc, char *folder, size_t bytes) {
  static const char *const beside[] = {"../include", "../../include", "../../../include", "../../cuda_runtime/include"};
  const char *named[] = {getenv("CUDA_HOME"), getenv("CUDA_PATH"), "/usr/local/cuda", "/usr"};
  const char *slash = strrchr(nvrtc, '/');
  for (size_t i = 0; i < sizeof(named) / sizeof(named[0]); i++) {
    if (i == 2) /* before the usual places */
      for (size_t b = 0; slash && b < sizeof(beside) / sizeof(beside[0]); b++)
        if ((size_t)snprintf(folder, bytes, "%.*s/%s", (int)(slash - nvrtc), nvrtc, beside[b]) < bytes &&
            hasHeaders(folder))
          return 1;
    if (named[i] && *named[i] && (size_t)snprintf(folder, bytes, "%s/include", named[i]) < bytes && hasHeaders(folder))
      return 1;
  }
  return 0;
}

static ncclResult_t findSet(int runtime, const epBundle **out) {
  *out = pickSet(runtime);
  if (*out) return ncclSuccess;
  return epFail(
      ncclInvalidUsage,
      "several scale-up domains: NCCL %d.%d.%d takes kernels built with its own or older device headers (back to "
      "2.30.0, "
      "or its own minor version; 2.29's are not supported); this library was built with those of: %s. One scale-up "
      "domain works",
      runtime / 10000, runtime / 100 % 100, runtime % 100, epNcclBundleVersions());
}

ncclResult_t epHeadersVersion(int runtime, int *version) {
  const epBundle *set;
  ncclResult_t r = findSet(runtime, &set);
  if (r == ncclSuccess) *version = set->code;
  return r;
}

ncclResult_t epHeadersFind(int runtime, const char *nvrtc, epHeaders *out) {
  char folder[1024];
  ncclResult_t r = findSet(runtime, &out->nccl);
  if (r != ncclSuccess) return r;
  if (!findCuda(nvrtc, folder, sizeof(folder)))
    return epFail(ncclSystemError,
                  "several scale-up domains: their kernels need CUDA's headers: cuda_runtime.h is neither in "
                  "$CUDA_HOME/include nor beside %s nor in /usr/local/cuda/include. One scale-up domain works without",
                  nvrtc);
  snprintf(out->cuda, sizeof(out->cuda), "--include-path=%s", folder);
  snprintf(out->cccl, sizeof(out->cccl), "--include-path=%s/cccl", folder);
  return ncclSuccess;
}
