/* Texts embedded in the library at build time: the kernels, and NCCL's device headers, so that compiling needs no file
 * from outside. jit/embed.py writes the arrays. */
#ifndef EP_JIT_BUNDLE_H_
#define EP_JIT_BUNDLE_H_

#include <stddef.h>

typedef struct epBundle {
  const char *version; /* of an NCCL header set, "2.28.9"; empty for the kernels */
  int code;            /* NCCL_VERSION_CODE of the set; 0 for the kernels */
  int count;
  const char *const *names; /* as #include writes them */
  const char *const *texts;
  const char *license; /* text that goes with the set; empty when every file carries its own */
} epBundle;

/* Kernel sources (device/). */
extern const epBundle epKernelBundle;
/* NCCL's device headers, one set a version, oldest first; may be none. */
extern const epBundle epNcclBundles[];
extern const int epNcclBundleCount;

/* C headers that NCCL's headers want beyond CUDA's own, and nccl_prelude.h, which makes NVRTC take them: a source
 * includes the prelude first. */
extern const epBundle epNcclShimBundle;
extern const epBundle epNcclPreludeBundle;

/* Hash of all names and texts: part of every cache key. Not for security. */
void epBundleHash(const epBundle *bundle, unsigned long long hash[2]);

/* Versions of the embedded sets, for people: "2.28.9, 2.30.7", or "none". */
const char *epNcclBundleVersions(void);

#endif
