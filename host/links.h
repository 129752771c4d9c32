/* How many SMs, channels and queue pairs a group of several scale-up domains needs to keep its busiest link busy: sums over
 * what a token loads on each link, pure functions of the links' rates. links_find.c reads those from the machine. */
#ifndef EP_HOST_LINKS_H_
#define EP_HOST_LINKS_H_

#include <stdint.h>

typedef struct epPciAddress {
  int domain, bus, device;
} epPciAddress;

/* Rates of one GPU in one direction, GB/s as the hardware states them; 0: not known. */
typedef struct epLinks {
  double nvlinkGbs, nicGbs;
} epLinks;

/* What one token of a rank costs on average when its K distinct experts are drawn alike: rows, summed over what the
 * rank does for tokens of its own and of others, which is the same for all ranks. */
typedef struct epLinkRows {
  double domains; /* other domains a token goes to: rows out of (and into) the NIC, in dispatch and in combine */
  double ranks;   /* ranks a token goes to, its own included: rows of dispatch's output */
  double nvlink;  /* rows out of (and into) a GPU over NVLink, in dispatch and in combine */
  double sent;    /* rows that dispatch's senders store: one to the send section, and those of the own domain */
} epLinkRows;
epLinkRows epLinkRowsOf(uint32_t scaleOut, uint32_t scaleUp, uint32_t experts, uint32_t topk);

/* Rows a link carries or an SM stores, in GB/s. */
#define EP_NVLINK_SHARE \
  0.77                    /* of the stated rate that stores of both directions reach: 343 to 365 of 450 GB/s measured */
#define EP_NIC_SHARE 0.95 /* of the stated rate: 46 to 49 of 50 GB/s is what RDMA writes of such rows reach */
#define EP_SM_STORE_GBS 43.0 /* one SM's stores over NVLink: 4 reach 182, 8 reach 348 GB/s */
#define EP_WARP_GBS 2.9      /* one warp's, of hybrid's kernels: 2 KB loaded together, 0.7 us until they are there */

/* What a group should take. All 0 where a rate that matters is not known: the caller has defaults. */
typedef struct epLinkPlan {
  uint32_t sendBlocks;               /* blocks whose warps are channels: dispatch's senders, combine's forwarders */
  uint32_t pushBlocks, reduceBlocks; /* combine's others */
  uint32_t sms;                      /* blocks of dispatch and combine in all */
  uint32_t contexts;                 /* GIN contexts: queue pairs to each peer */
  int nicBound;                      /* the NIC is the busiest link, else NVLink */
} epLinkPlan;
/* rowBytes: the narrowest row that is to run at full rate. warps: of a block. */
epLinkPlan epLinkPlanOf(const epLinks *links, uint32_t scaleOut, uint32_t scaleUp, uint32_t experts, uint32_t topk,
                        uint32_t rowBytes, uint32_t warps);
/* Pushers among `blocks` of combine that do not forward, at least two; half where there is no plan. */
uint32_t epLinkPushers(const epLinkPlan *plan, uint32_t blocks);

#endif
