/* The rates of a GPU's links, as this machine tells them. */
#ifndef EP_HOST_LINKS_FIND_H_
#define EP_HOST_LINKS_FIND_H_

#include <stddef.h>

#include "links.h"

/* NVLink from NVML (links that are up times their speed), the NIC from sysfs; NCCL_EP_NVLINK_GBS and NCCL_EP_NIC_GBS
 * go first. What is not found is 0. gpu NULL: only what the environment says. `from`: a line that tells where each
 * figure comes from, or why there is none. */
epLinks epLinksFind(const epPciAddress *gpu, char *from, size_t room);

/* GB/s of the GPU's share of its nearest NICs, as they lie in `root` (normally "/sys"); 0: none is up. The nearest are those
 * with the longest way through PCIe in common; GPUs that are as near share them, and one GPU has at most one NIC's.
 * name: of the fastest of them. */
double epNicRate(const char *root, const epPciAddress *gpu, char *name, size_t room);

#endif
