/* Groups of several scale-up domains on the host: sizes, launches, and what their kernels get beside the plain arguments. */
#ifndef EP_HOST_HYBRID_H_
#define EP_HOST_HYBRID_H_

#include "runtime.h"

int epIsHybrid(const struct ncclEpGroup *group);
/* Channels, contexts and, where the caller leaves it open, SMs from the links, as the slowest rank has them. Collective. */
ncclResult_t epHybridPlan(const char *call, struct ncclEpGroup *group);
/* Window and scratch layouts of the group instead of the plain ones. */
void epHybridLayouts(struct ncclEpGroup *group);
/* Signals of each context of a slot's network. */
uint32_t epHybridSignals(const struct ncclEpGroup *group, unsigned slot);
/* Contexts of an operation whose caller asked for `asked` queue pairs; 0: the group's. */
ncclResult_t epHybridQueuePairs(const char *call, const struct ncclEpGroup *group, unsigned asked, uint32_t *contexts);
/* The network of the window of a slot. Collective. */
ncclResult_t epHybridConnect(struct ncclEpGroup *group, epWindow *window, unsigned slot, epGin *out);
size_t epHybridRecordBytes(const struct ncclEpGroup *group, uint32_t topk);
/* The kernel that does what plain kernel `id` does, low latency's among them, if the configuration is one of several domains; else `id`. */
int epHybridKernel(int id, const epConfig *config);
/* As epPolicyMove, which calls it. */
ncclResult_t epPolicyHybridMove(const epTopology *topology, unsigned sms, int kernelId, epConfig *config, epGrid *grid);
/* What sizes.c cannot know without a topology; links are those of this rank. */
void epHybridBufferSize(const epTopology *topology, const epShape *shape, int masks, ncclEpBufferSize_t *sizes);
/* The same beside what epLlBufferSize has told. */
ncclResult_t epHybridLlBufferSize(const epTopology *topology, const epShape *shape, int masks,
                                  ncclEpBufferSize_t *sizes);

#endif
