/* How many SMs an operation takes where nobody has said it: as few as keep its busiest link or memory busy. */
#ifndef EP_HOST_SM_POLICY_H_
#define EP_HOST_SM_POLICY_H_

#include "abi.h"
#include "backend.h"

/* SMs of a high-throughput operation. `wanted`: a number, at most the device's; 0: the fewest for at least 95 % of the best
 * bandwidth; NCCL_EP_SMS_FEW: about half of it, NCCL_EP_SMS_ALL: all. All, too, where the links' rate is not known, and for several
 * scale-up domains, whose links are summed in links.c. */
unsigned epSmPolicy(const epTopology *topology, unsigned wanted, int kernelId, const epConfig *config);

#endif
