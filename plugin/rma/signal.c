/* A signal at its receiver. GPU memory that holds signals can be written by its owner alone (NCCL exports none of it), and
 * the CPU cannot add to it in place: the sum is kept in a shadow and written behind the copies that arrived before, those
 * that came in one turn by one call. */
#include <stdlib.h>

#include "rma.h"

static epRmaResult writeLater(epRmaColl *coll, void *to, uint64_t value) {
  for (int i = coll->wordCount; i > 0; i--)
    if (coll->words[i - 1].to == to) {
      coll->words[i - 1].value = value;
      return EP_RMA_OK;
    }
  epRmaResult rc = coll->wordCount == EP_RMA_WORDS ? epRmaSignalsWrite(coll) : EP_RMA_OK;
  if (!rc) coll->words[coll->wordCount++] = (epRmaGpuWord){to, value};
  return rc;
}

epRmaResult epRmaSignalsWrite(epRmaColl *coll) {
  epRmaResult rc = epRmaGpuWriteWords(&coll->gpu, coll->words, coll->wordCount);
  coll->tally.writes += coll->wordCount > 0;
  coll->wordCount = 0;
  return rc ? epRmaNote(coll, rc) : EP_RMA_OK;
}

epRmaResult epRmaSignalApply(epRmaColl *coll, epRmaWindow *window, uint64_t offset, uint64_t value) {
  char *at = window->base + offset;
  coll->tally.signals++;
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
    return writeLater(coll, at, window->shadow[offset / sizeof(uint64_t)] += value);
  }
  rc = epRmaGpuReadWord(&coll->gpu, at, &old);
  if (!rc) rc = epRmaGpuWriteWords(&coll->gpu, &(epRmaGpuWord){at, old + value}, 1);
  return rc ? epRmaNote(coll, rc) : EP_RMA_OK;
}
