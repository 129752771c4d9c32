/* The low-latency algorithm on the host: sizes, and the launches of its kernels. */
#ifndef EP_HOST_LOW_LATENCY_H_
#define EP_HOST_LOW_LATENCY_H_

#include "ll_layout.h"
#include "streams.h"

int epIsLl(const struct ncclEpGroup *group);
/* Of the group's layout, what kernels of low latency look for there. */
void epLlWindow(const epShape *shape, epWindowLayout *window);
/* Refuses a window beyond what low latency is for. */
ncclResult_t epLlWindowCheck(const char *call, const epShape *shape, uint64_t bytes);
/* What sizes.c asks for; in several scale-up domains hybrid.c adds to it. */
ncclResult_t epLlBufferSize(const epShape *shape, ncclEpBufferSize_t *sizes);
/* Layouts that the algorithm has; alignment is not one of its ideas. */
ncclResult_t epLlHandleCheck(const char *call, ncclEpLayout_t layout, const ncclEpHandleConfig_t *config);
epLlRecordLayout epLlHandleLayout(const struct ncclEpHandle *handle);
size_t epLlRecordBytes(const struct ncclEpGroup *group, uint32_t topk);

ncclResult_t epLlUpdate(const char *call, struct ncclEpHandle *handle, const epIndices *indices,
                        const ncclEpLayoutInfo_t *info, int borrow, cudaStream_t stream);
/* The launch of an update; the handle's state is the caller's affair. */
ncclResult_t epLlUpdateLaunch(const char *call, struct ncclEpHandle *handle, const epIndices *indices,
                              cudaStream_t stream);
ncclResult_t epLlDispatch(const char *call, struct ncclEpHandle *handle, const ncclEpDispatchInputs_t *in,
                          const ncclEpDispatchOutputs_t *out, const ncclEpLayoutInfo_t *info,
                          const ncclEpDispatchConfig_t *config, const ncclEpDispatchExtConfig_t *ext, epIssue *how,
                          cudaStream_t stream);
ncclResult_t epLlCombine(const char *call, struct ncclEpHandle *handle, const ncclEpCombineInputs_t *in,
                         const ncclEpCombineOutputs_t *out, const ncclEpCombineConfig_t *config, epIssue *how,
                         cudaStream_t stream);

/* Sets threads, and gives the grid. `tokens`: T, the best guess of the work there is. */
ncclResult_t epPolicyLl(const char *call, const epTopology *topology, unsigned sms, int kernelId, uint32_t tokens,
                        epConfig *config, epGrid *grid);
/* Channels of a group of several scale-up domains. */
uint32_t epLlChannels(const epTopology *topology);
/* Tokens that a sending block of dispatch takes at a time. */
uint32_t epLlTokensABlock(uint32_t tokens, const epGrid *grid, uint32_t topk);
ncclResult_t epLlPrepareWishes(const struct ncclEpGroup *group, const ncclEpPrepareConfig_t *p, epWishes *out);

#endif
