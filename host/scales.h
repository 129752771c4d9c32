/* Rows of scales beside dispatch's token rows: what both algorithms ask of them. */
#ifndef EP_HOST_SCALES_H_
#define EP_HOST_SCALES_H_

#include "runtime.h"
#include "tensor.h"

/* The recipe is one that the algorithm has, and no option contradicts it. `*forwarded`: the caller's scales travel. */
ncclResult_t epScalesRecipe(const char *call, const ncclEpDispatchConfig_t *config, int lowLatency, int *forwarded);
/* inputs.scales of `tokens` rows: absent unless they are forwarded; else a row's bytes, and where they are. */
ncclResult_t epScalesIn(const char *call, const struct ncclEpGroup *group, const ncclEpTensor_t *scales, int forwarded,
                        uint32_t tokens, uint32_t rowBytes, uint32_t *scaleBytes, const uint8_t **dev);
/* outputs.scales where there are none. */
ncclResult_t epScalesNotOut(const char *call, const ncclEpTensor_t *scales);

#endif
