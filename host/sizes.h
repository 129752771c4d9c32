/* Window, record and scratch bytes from a group's sizes, and the limits they must respect. Pure. */
#ifndef EP_HOST_SIZES_H_
#define EP_HOST_SIZES_H_

#include "layout.h"
#include "nccl_ep.h"
#include "nccl_ep_ext.h"

#define EP_SCALE_WORD 4u /* kernels move scales in words of 4 bytes; also the width of a column of them */

/* What the sizes depend on, before it is known to be possible. */
typedef struct epSizeRequest {
  uint32_t ranks, experts, topk; /* topk 0: the largest that maxTokens allows */
  uint32_t maxTokens;            /* B */
  uint64_t rowBytes;             /* of the widest row, scales included */
  int multipleReductions;
} epSizeRequest;

/* Largest K for B tokens: EP_MAX_TOPK, or less so that B * K stays within EP_MAX_ENTRIES. 0: B itself is too large. */
uint32_t epLargestTopk(uint32_t maxTokens);
/* Checks every limit of layout.h; `call` opens the message, and fields are called by their public names. */
ncclResult_t epShapeOf(const char *call, const epSizeRequest *request, epShape *shape);
/* Bytes of a group's window and the parts they are made of, from a communicator's ranks. */
/* The shape that a configuration of sizes means. */
ncclResult_t epBufferShape(const char *call, uint32_t ranks, const ncclEpBufferSizeConfig_t *config, epShape *shape);
ncclResult_t calculate_ep_buffer_size(uint32_t ranks, const ncclEpBufferSizeConfig_t *config,
                                      ncclEpBufferSize_t *sizes);

#endif
