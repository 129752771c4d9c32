/* Loaded kernels. One compiler serves the process; a kernel is loaded once a context, shared by the groups of that
 * device and unloaded with the last of them. Loading is eager: a kernel that is loaded lazily at its first launch could
 * wait for the device while peers spin on it. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_internal.h"
#include "jit.h"

typedef struct loadedKernel {
  struct loadedKernel *next;
  epCuContext context;
  int kernelId;
  epConfig config;
  int users;
  epCuModule module;
  epCuFunction function;
} loadedKernel;

/* What a backend object holds of it. */
struct epKernel {
  struct epKernel *next;
  loadedKernel *loaded;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards what follows, not held while compiling */
static epJit *jit; /* lives as long as the process: its memory is the warm start */
static loadedKernel *all;

static ncclResult_t openJit(epJit **out) {
  ncclResult_t r = ncclSuccess;
  pthread_mutex_lock(&mutex);
  if (!jit) r = epJitOpen(&jit);
  *out = jit;
  pthread_mutex_unlock(&mutex);
  return r;
}

static loadedKernel *findLoaded(epCuContext context, int kernelId, const epConfig *config) {
  for (loadedKernel *k = all; k; k = k->next)
    if (k->context == context && k->kernelId == kernelId && memcmp(&k->config, config, sizeof(*config)) == 0) return k;
  return NULL;
}

/* The first launch of a kernel may grow the device's room for stacks, for which the driver waits as it does for code: so a
 * kernel that others may wait for is launched once with nothing to do. */
static epCuResult rehearse(epCuda *be, epCuFunction function) {
  static _Alignas(16) const unsigned char nothing[4096];
  void *params[] = {(void *)(uintptr_t)nothing};
  epCuResult rc = be->cu->launchKernel(function, 1, 1, 1, 32, 1, 1, 0, be->stream, params, NULL);
  return rc == EP_CU_SUCCESS ? be->cu->streamSynchronize(be->stream) : rc;
}

static ncclResult_t load(epCuda *be, int kernelId, const epConfig *config, loadedKernel **out) {
  epJit *compiler;
  epJitCode code;
  const char *entry = epJitEntryName(kernelId);
  loadedKernel *k = NULL;
  memset(&code, 0, sizeof(code));
  ncclResult_t r = openJit(&compiler);
  if (r != ncclSuccess) return r;
  epJitUseNccl(compiler, be->nccl->version);
  r = epJitCompile(compiler, kernelId, config, be->topology.arch, &code);
  if (r != ncclSuccess) return r;
  k = calloc(1, sizeof(*k));
  if (!k) {
    r = epFail(ncclSystemError, "out of memory: %zu bytes for a kernel's record", sizeof(*k));
    goto done;
  }
  k->context = be->context;
  k->kernelId = kernelId;
  k->config = *config;
  if ((r = epCudaQuiet(be)) != ncclSuccess) goto done;
  epCuResult rc = be->cu->moduleLoadData(&k->module, code.cubin);
  if (rc != EP_CU_SUCCESS) {
    k->module = NULL;
    r = epCuFail(be->cu, rc, "loading %s for sm_%d (CUDA %d by the driver, %d by NVRTC)", entry, be->topology.arch,
                 be->cu->version, epJitCompilerVersion(compiler));
    goto done;
  }
  rc = be->cu->moduleGetFunction(&k->function, k->module, entry);
  if (rc == EP_CU_SUCCESS)
    rc = be->cu->funcSetAttribute(k->function, EP_CU_FUNC_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                  be->topology.smemPerBlock - (code.staticSmemBytes > 0 ? code.staticSmemBytes : 0));
  if (rc == EP_CU_SUCCESS && be->cu->funcLoad) rc = be->cu->funcLoad(k->function);
  if (rc == EP_CU_SUCCESS && epKernelIsHybrid(kernelId)) rc = rehearse(be, k->function);
  if (rc != EP_CU_SUCCESS) r = epCuFail(be->cu, rc, "preparing %s", entry);

done:
  epJitFree(&code);
  if (r == ncclSuccess) {
    *out = k;
  } else if (k) {
    if (k->module) (void)be->cu->moduleUnload(k->module);
    free(k);
  }
  return r;
}

ncclResult_t epCudaKernel(epBackend *base, int kernelId, const epConfig *config, epKernel **out) {
  epCuda *be = (epCuda *)base;
  epCudaScope scope;
  loadedKernel *k, *other;
  epKernel *held;
  ncclResult_t r = ncclSuccess;

  pthread_mutex_lock(&mutex);
  for (held = be->kernels; held; held = held->next)
    if (held->loaded->kernelId == kernelId && memcmp(&held->loaded->config, config, sizeof(*config)) == 0) break;
  k = held ? NULL : findLoaded(be->context, kernelId, config);
  if (k) k->users++;
  pthread_mutex_unlock(&mutex);
  if (held) {
    *out = held;
    return ncclSuccess;
  }

  held = calloc(1, sizeof(*held));
  if (!held) r = epFail(ncclSystemError, "out of memory: %zu bytes for a kernel's record", sizeof(*held));
  if (r == ncclSuccess && !k) {
    r = epCudaEnter(be, &scope);
    if (r == ncclSuccess) {
      r = load(be, kernelId, config, &k);
      epCudaLeave(be, &scope);
    }
    if (r == ncclSuccess) {
      /* Another thread may have loaded the same meanwhile: the first one stays. */
      loadedKernel *spare = NULL;
      pthread_mutex_lock(&mutex);
      other = findLoaded(be->context, kernelId, config);
      if (other) {
        spare = k;
        k = other;
      } else {
        k->next = all;
        all = k;
      }
      k->users++;
      pthread_mutex_unlock(&mutex);
      if (spare && epCudaEnter(be, &scope) == ncclSuccess) {
        (void)be->cu->moduleUnload(spare->module);
        epCudaLeave(be, &scope);
      }
      free(spare);
    }
  } else if (r != ncclSuccess && k) {
    pthread_mutex_lock(&mutex);
    k->users--; /* somebody else still holds it, or nobody will: then it stays until the next group of this device goes
                 */
    pthread_mutex_unlock(&mutex);
  }
  if (r != ncclSuccess) {
    free(held);
    return r;
  }
  held->loaded = k;
  pthread_mutex_lock(&mutex);
  held->next = be->kernels;
  be->kernels = held;
  pthread_mutex_unlock(&mutex);
  *out = held;
  return ncclSuccess;
}

void epCudaKernelsRelease(epCuda *be) {
  while (be->kernels) {
    epKernel *held = be->kernels;
    be->kernels = held->next;
    pthread_mutex_lock(&mutex);
    held->loaded->users--;
    pthread_mutex_unlock(&mutex);
    free(held);
  }
  /* The context is current: see destroy(). */
  pthread_mutex_lock(&mutex);
  for (loadedKernel **at = &all; *at;) {
    loadedKernel *k = *at;
    if (k->context != be->context || k->users > 0) {
      at = &k->next;
      continue;
    }
    *at = k->next;
    (void)be->cu->moduleUnload(k->module);
    free(k);
  }
  pthread_mutex_unlock(&mutex);
}

/* From SM90 on every kernel begins by waiting for those before it (prim.h, grid_wait), so its blocks may take their places
 * while the kernel before is still running: 2 to 3 us less between two kernels. Graphs record such launches since 12.3. */
static epCuResult launchOverlapped(epCuda *be, epKernel *kernel, const epLaunch *l, cudaStream_t stream,
                                   void **params) {
  epCuLaunchAttribute attribute = {.id = EP_CU_LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION};
  epCuLaunchConfig config = {l->blocks, 1, 1, l->threads, 1, 1, l->smemBytes, stream, &attribute, 1};
  attribute.value.programmaticStreamSerializationAllowed = 1;
  return be->cu->launchKernelEx(&config, kernel->loaded->function, params, NULL);
}

ncclResult_t epCudaLaunch(epBackend *base, epKernel *kernel, const epLaunch *launch, cudaStream_t stream) {
  epCuda *be = (epCuda *)base;
  epCudaScope scope;
  void *params[] = {(void *)(uintptr_t)launch->args};
  epCuResult rc;
  /* Only the context: a launch is exactly what a capture may record, so the capture mode stays the caller's. */
  ncclResult_t r = epCudaCurrent(be, &scope);
  if (r != ncclSuccess) return r;
  if (be->topology.arch >= 90 && be->cu->launchKernelEx && be->cu->version >= 12030)
    rc = launchOverlapped(be, kernel, launch, stream, params);
  else
    rc = be->cu->launchKernel(kernel->loaded->function, launch->blocks, 1, 1, launch->threads, 1, 1, launch->smemBytes,
                              stream, params, NULL);
  epCudaRestore(be, &scope);
  if (rc != EP_CU_SUCCESS)
    return epCuFail(be->cu, rc, "launch of %s: %u blocks of %u threads, %u bytes of shared memory, stream %p",
                    epJitEntryName(kernel->loaded->kernelId), launch->blocks, launch->threads, launch->smemBytes,
                    (void *)stream);
  return ncclSuccess;
}
