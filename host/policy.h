/* How large a launch is: blocks, threads, and the split between sending and receiving. Pure functions of the topology,
 * the kernel's configuration and the caller's limit, with their reasons in policy.c. */
#ifndef EP_HOST_POLICY_H_
#define EP_HOST_POLICY_H_

#include "abi.h"
#include "backend.h"

typedef struct epGrid {
  unsigned blocks, threads, smemBytes;
  unsigned pushBlocks;    /* of `blocks`; dispatch and combine */
  unsigned forwardBlocks; /* of `blocks`; low latency across scale-up domains */
} epGrid;

/* SMs that a kernel may use: the device's, or fewer by the caller's limit (0: none). */
unsigned epPolicySms(const epTopology *topology, unsigned limit);
/* Sets config->threads and config->bulk, and gives the grid. `tokens`: T. Fails when a row does not fit a block. */
ncclResult_t epPolicyUpdate(const epTopology *topology, unsigned sms, uint32_t tokens, epConfig *config, epGrid *grid);
/* Takes config->fused away where the histograms of an update do not fit beside a dispatch's few warps, and config->direct
 * where there are no bulk copies; config->fused also where few blocks receive. */
ncclResult_t epPolicyMove(const char *call, const epTopology *topology, unsigned sms, int kernelId, epConfig *config,
                          epGrid *grid);

/* Whether rows straight into window-backed outputs are worth it where the caller leaves it open: with few SMs. */
int epPolicyDirectPays(const epTopology *topology, unsigned sms);
/* Blocks of the grid of a fused dispatch, behind its senders, that make the routing record of `tokens` tokens. */
unsigned epPolicyFusedBlocks(const epTopology *topology, const epGrid *grid, uint32_t tokens);

#endif
