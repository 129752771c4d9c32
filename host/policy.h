/* How large a launch is: blocks, threads, and the split between sending and receiving. Pure functions of the topology,
 * the kernel's configuration and the caller's limit, with their reasons in policy.c. */
#ifndef EP_HOST_POLICY_H_
#define EP_HOST_POLICY_H_

#include "abi.h"
#include "backend.h"

typedef struct epGrid {
  unsigned blocks, threads, smemBytes;
  unsigned pushBlocks; /* of `blocks`; dispatch and combine */
} epGrid;

/* SMs that a kernel may use: the device's, or fewer by the caller's limit (0: none). */
unsigned epPolicySms(const epTopology *topology, unsigned limit);
/* Sets config->threads and config->bulk, and gives the grid. `tokens`: T. Fails when a row does not fit a block. */
ncclResult_t epPolicyUpdate(const epTopology *topology, unsigned sms, uint32_t tokens, epConfig *config, epGrid *grid);
ncclResult_t epPolicyMove(const char *call, const epTopology *topology, unsigned sms, int kernelId, epConfig *config,
                          epGrid *grid);

#endif
