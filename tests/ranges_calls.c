/* Calls that fail early, one of them inside another: what test_ranges.py runs. */
#include "nccl_ep.h"
#include "nccl_ep_ext.h"

int main(void) {
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  ncclEpGroup_t group = NULL;
  int version = 0;
  return ncclEpGetVersion(&version) != ncclSuccess || ncclEpCreateGroup(&group, NULL, &config) == ncclSuccess ||
         ncclEpSetProfiling(group, 1) == ncclSuccess;
}
