/* A signal at its receiver. GPU memory that holds signals can be written by its owner alone (NCCL exports none of it), and
 * the CPU cannot add to it in place: the sum is kept in a shadow and written behind the copies that arrived before. */
#include <stdlib.h>

#include "rma.h"

epRmaResult epRmaSignalApply(epRmaColl *coll, epRmaWindow *window, uint64_t offset, uint64_t value) {
  char *at = window->base + offset;
  epRmaResult rc = EP_RMA_OK;
  uint64_t old = 0;
  if ((uintptr_t)at % sizeof(uint64_t) != 0)
    return epRmaFail(coll, EP_RMA_REMOTE_ERROR, "a signal came for offset %llu of window %u, which is not aligned",
                     (unsigned long long)offset, window->id);
  if (window->type == EP_RMA_PTR_HOST) {
    /* It may stand for GPU memory that is still on its way out of the staging. */
    if (epRmaStageEnding(&coll->arriving)) rc = epRmaGpuSync(coll->gpu.in);
    if (rc) return epRmaNote(coll, rc);
    __atomic_fetch_add((uint64_t *)(void *)at, value, __ATOMIC_RELEASE);
    return EP_RMA_OK;
  }
  if (window->neverReset) {
    /* NCCL clears such memory before it registers it: the shadow starts from zeros, too. */
    if (!window->shadow) window->shadow = calloc(window->size / sizeof(uint64_t), sizeof(uint64_t));
    if (!window->shadow)
      return epRmaFail(coll, EP_RMA_SYSTEM_ERROR, "no memory to follow %zu bytes of signals", window->size);
    value = window->shadow[offset / sizeof(uint64_t)] += value;
  } else {
    rc = epRmaGpuReadWord(&coll->gpu, at, &old);
    value += old;
  }
  if (!rc) rc = epRmaGpuWriteWord(&coll->gpu, at, value);
  return rc ? epRmaNote(coll, rc) : EP_RMA_OK;
}
