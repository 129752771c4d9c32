/* Pinned slots on the way between GPU memory and sockets. */
#include <string.h>

#include "rma.h"

epRmaResult epRmaStageMake(epRmaStage *stage) {
  void *memory = NULL;
  epRmaResult rc = epRmaGpuPinned(&memory, (size_t)EP_RMA_SLOTS * EP_RMA_CHUNK);
  stage->memory = memory;
  for (int i = 0; !rc && i < EP_RMA_SLOTS; i++) rc = epRmaGpuEvent(&stage->events[i]);
  return rc;
}

void epRmaStageFree(epRmaStage *stage) {
  for (int i = 0; i < EP_RMA_SLOTS; i++)
    if (stage->events[i]) epRmaGpuFreeEvent(stage->events[i]);
  if (stage->memory) epRmaGpuFreePinned(stage->memory);
  memset(stage, 0, sizeof(*stage));
}

epRmaResult epRmaStageTake(epRmaStage *stage, int *slot) {
  *slot = -1;
  for (int i = 0; i < EP_RMA_SLOTS; i++) {
    bool done = false;
    if (stage->busy[i] && stage->ending[i]) {
      epRmaResult rc = epRmaGpuDone(stage->events[i], &done);
      if (rc) return rc;
      if (done) stage->busy[i] = stage->ending[i] = false;
    }
    if (stage->busy[i]) continue;
    stage->busy[i] = true;
    *slot = i;
    return EP_RMA_OK;
  }
  return EP_RMA_OK;
}

bool epRmaStageEnding(const epRmaStage *stage) {
  for (int i = 0; i < EP_RMA_SLOTS; i++)
    if (stage->busy[i] && stage->ending[i]) return true;
  return false;
}

char *epRmaStageAt(const epRmaStage *stage, int slot) { return stage->memory + (size_t)slot * EP_RMA_CHUNK; }
