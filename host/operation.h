/* An operation of dispatch or combine from its arguments to its launches: whole, as two parts one behind the other, or staged, where
 * ncclEpComplete launches the second part later. */
#ifndef EP_HOST_OPERATION_H_
#define EP_HOST_OPERATION_H_

#include "streams.h"

typedef struct epOperation {
  int kernelId;    /* EP_KERNEL_DISPATCH, EP_KERNEL_COMBINE, or low latency's */
  epConfig config; /* of the whole */
  epGrid grid;
  void *args;        /* the kernel's, but for the group and the blocks */
  int route;         /* an update that is pending is launched first */
  uint32_t contexts; /* of the network, where there is one; 0: the group's */
} epOperation;

/* Refuses what a handle with a staged operation must not do now. */
ncclResult_t epStagedNone(const char *call, const struct ncclEpHandle *handle);
/* The same of all handles of a group. */
ncclResult_t epStagedNowhere(const char *call, struct ncclEpGroup *group);
/* The operation must not route by itself where it runs in parts: epInParts. */
ncclResult_t epOperationRun(const char *call, struct ncclEpHandle *handle, const epOperation *op, epIssue *how,
                            cudaStream_t stream);
int epInParts(const epIssue *how);
/* Launches the receiving part of the handle's staged operation, if there is one; what `how` asks for is done without one, too. */
ncclResult_t epOperationComplete(const char *call, struct ncclEpHandle *handle, epIssue *how, cudaStream_t stream);
/* Adds both parts of each whole dispatch and combine among the wishes. */
void epWishParts(epWishes *wishes);

/* ---- slots.c: windows of staged operations (layout.h, EP_SLOTS). They are made when they are first needed, as many as are in flight at
 * once, on all ranks alike, because all issue and complete operations in the same order; with masks, where a rank may be missing then, all of
 * them with the group. */
ncclResult_t epSlotTake(const char *call, struct ncclEpGroup *group, cudaStream_t stream, unsigned *slot);
void epSlotGive(struct ncclEpGroup *group, unsigned slot);
/* Those too whose operation went with its handle. */
void epSlotsGiveAll(struct ncclEpGroup *group);
/* Makes the memory of the first `count` slots. Collective. */
ncclResult_t epSlotsOpen(const char *call, struct ncclEpGroup *group, unsigned count, cudaStream_t stream);
ncclResult_t epSlotsRelease(struct ncclEpGroup *group);
/* Arguments and network of an operation on a slot. */
epGroupArgs epSlotArgs(const struct ncclEpGroup *group, unsigned slot);
const epHybridGroup *epSlotNetwork(const struct ncclEpGroup *group, unsigned slot);

#endif
