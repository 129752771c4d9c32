/* The group's table of compiled kernels, by configuration. */
#include <stdlib.h>
#include <string.h>

#include "fail.h"
#include "hybrid.h"
#include "runtime.h"

static epKernel *epKernelFind(const struct ncclEpGroup *g, int id, const epConfig *config) {
  for (int i = 0; i < g->kernelCount; i++)
    if (g->kernels[i].id == id && memcmp(&g->kernels[i].config, config, sizeof *config) == 0)
      return g->kernels[i].kernel;
  return NULL;
}

static ncclResult_t epKernelAdd(struct ncclEpGroup *g, int id, const epConfig *config, epKernel **out) {
  ncclResult_t r;
  if (g->kernelCount == g->kernelRoom) {
    int room = g->kernelRoom ? 2 * g->kernelRoom : 8;
    epKernelEntry *more = realloc(g->kernels, (size_t)room * sizeof *more);
    if (!more) return epFail(ncclSystemError, "kernel table: out of host memory");
    g->kernels = more;
    g->kernelRoom = room;
  }
  r = g->be->ops->kernel(g->be, epHybridKernel(id, config), config, out);
  if (r != ncclSuccess) return r;
  g->kernels[g->kernelCount].id = id;
  g->kernels[g->kernelCount].config = *config;
  g->kernels[g->kernelCount++].kernel = *out;
  return ncclSuccess;
}

ncclResult_t epRefuseCapture(const char *call, struct ncclEpGroup *g, cudaStream_t stream, const char *why) {
  int capturing = 0;
  ncclResult_t r = g->be->ops->isCapturing(g->be, stream, &capturing);
  if (r == ncclSuccess && capturing) r = epFail(ncclInvalidUsage, "%s: the stream is being captured: %s", call, why);
  return r;
}

static ncclResult_t epKernelCompile(struct ncclEpGroup *g, int id, const epConfig *config, epKernel **out) {
  ncclResult_t r = ncclSuccess;
  pthread_mutex_lock(&g->lock);
  *out = epKernelFind(g, id, config);
  if (!*out) r = epKernelAdd(g, id, config, out);
  pthread_mutex_unlock(&g->lock);
  return r;
}

/* Those of a profiled group write down where their time goes. */
static epConfig epProfiled(const struct ncclEpGroup *g, const epConfig *config) {
  epConfig c = *config;
  c.profile = (uint32_t)g->profiling.on;
  return c;
}

static void epCompileProfiled(struct ncclEpGroup *g, const epWishes *wishes) {
  epWishes all = {.count = 0};
  for (int i = 0; i < wishes->count; i++) {
    epConfig c = epProfiled(g, &wishes->wish[i].config);
    epWishAdd(&all, wishes->wish[i].id, &c);
  }
  epCompileTogether(g, &all);
}

ncclResult_t epKernelCompileAll(struct ncclEpGroup *g, const epWishes *wishes) {
  epKernel *kernel;
  ncclResult_t r = ncclSuccess;
  epCompileProfiled(g, wishes);
  for (int i = 0; r == ncclSuccess && i < wishes->count; i++) {
    epConfig c = epProfiled(g, &wishes->wish[i].config);
    r = epKernelCompile(g, wishes->wish[i].id, &c, &kernel);
  }
  return r;
}

ncclResult_t epKernelGet(const char *call, struct ncclEpGroup *g, int id, const epConfig *config, cudaStream_t stream,
                         epKernel **out) {
  epWishes wishes;
  epConfig wanted = epProfiled(g, config);
  ncclResult_t r;
  pthread_mutex_lock(&g->lock);
  *out = epKernelFind(g, id, &wanted);
  pthread_mutex_unlock(&g->lock);
  if (*out) return ncclSuccess;
  r = epRefuseCapture(
      call, g, stream,
      "its kernel is not compiled yet, and cannot be then (make one such call before, or ncclEpPrepare)");
  if (r != ncclSuccess) return r;
  if (epMayGuess(g)) {
    epForesee(g, id, config, &wishes);
    epCompileProfiled(g, &wishes);
  }
  return epKernelCompile(g, id, &wanted, out);
}
