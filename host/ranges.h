/* Public calls as ranges of NVTX's domain "nccl_ep", for Nsight and other tools that attach to it. */
#ifndef EP_HOST_RANGES_H_
#define EP_HOST_RANGES_H_

/* Whether a tool is attached; found out at the first call. Without one a call costs the look at this word. */
int epRangesOn(void);
void epRangePush(const char *name);
void epRangePop(void);

#endif
