/* Masks of a group: what they add to its memory, and the launches that tell, set and clear them. */
#ifndef EP_HOST_MASKS_H_
#define EP_HOST_MASKS_H_

#include "runtime.h"

/* Bytes of the window and of the scratch, with what masks need behind them. */
uint64_t epMaskWindowBytes(const struct ncclEpGroup *group);
uint64_t epMaskScratchBytes(const struct ncclEpGroup *group);
/* Tells kernels where the words of masks are, and makes the windows of staged operations: later a rank may be missing. Collective. */
ncclResult_t epMaskWindows(const char *call, struct ncclEpGroup *group);
/* Compiles what ncclEpMask* launch, so that they may be captured. Nothing without enable_mask. */
ncclResult_t epMaskOpen(const char *call, struct ncclEpGroup *group);
ncclResult_t epMaskQuery(ncclEpGroup_t group, int *out, cudaStream_t stream);
ncclResult_t epMaskUpdate(ncclEpGroup_t group, const int *mask, cudaStream_t stream);
ncclResult_t epMaskClean(ncclEpGroup_t group, cudaStream_t stream);
/* Waits, at most the timeout, until the ranks that are not masked want to destroy the group as well. */
ncclResult_t epMaskLeave(struct ncclEpGroup *group);

#endif
