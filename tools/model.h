/* Predicts dispatch and combine on machines that are not there: traffic is counted from a drawn routing, link by link as the
 * kernels send it, and goes through a pipeline of links that each have a rate and a latency. No rank is run.
 * docs/scale.md has the assumptions. */
#ifndef EP_TOOLS_MODEL_H_
#define EP_TOOLS_MODEL_H_

#include <stdint.h>

#include "data.h"

#define EP_MODEL_RANKS 2048u

/* A machine, all GPUs alike. Rates: GB/s of one GPU in one direction, as stated; share: what of it rows reach. */
typedef struct epModelMachine {
  char name[96];
  double nvlinkGbs, nvlinkShare, nvlinkUs;
  double nicGbs, nicShare, nicUs; /* 0: no network */
  double pcieGbs, pcieShare;      /* between GPU and NIC; 0: not a limit */
  double hbmGbs, hbmShare;        /* reads and writes together */
  double hbmGb;                   /* there is of it */
  double smGbs;                   /* that one SM stores */
  unsigned sms;
  double launchUs;                /* from the launch to the first row */
  double updateUs, updateTokenNs; /* of an update: launch and latencies of one domain, and a token's share */
} epModelMachine;
/* From a JSON file. 0, or -1 after telling what is wrong with it. */
int epModelRead(const char *path, epModelMachine *machine);

typedef struct epModelShape {
  uint32_t scaleOut, scaleUp, experts, topk;
  uint32_t dispatchBytes, combineBytes; /* of a row on its way, weights and scales included */
  uint32_t outputRows;                  /* expert-major writes one a slot: 1; flat one a rank: 0 */
} epModelShape;

/* Rows, in sums over a rank; combine sends what dispatch received. */
typedef struct epModelRank {
  double tokens;
  double received, slots;   /* rows of its output in flat, in expert-major */
  double sentNear, gotNear; /* to and from ranks of its domain, straight */
  double toRail, fromRail;  /* out of and into its NIC */
  double forwarded, gotFar; /* from its rail to others of its domain; to it from others' rails */
  double domains;           /* its tokens times the domains they go to, its own included */
  double staged;            /* tokens that go to another domain at all */
} epModelRank;

typedef struct epModelTraffic {
  uint32_t ranks;
  epModelRank *rank;
  uint64_t counted, tokens; /* tokens that were drawn, and that there are: fewer were drawn where there are very many */
} epModelTraffic;
/* spec: of all ranks, as for epRoutingMake. 0, or -1 after telling why. */
int epModelCount(const epModelShape *shape, const epRouteSpec *spec, uint64_t seed, epModelTraffic *out);
void epModelTrafficFree(epModelTraffic *traffic);

enum {
  EP_MODEL_NIC_OUT,
  EP_MODEL_NIC_IN,
  EP_MODEL_NVLINK_OUT,
  EP_MODEL_NVLINK_IN,
  EP_MODEL_HBM,
  EP_MODEL_SM_SEND, /* stores of senders and forwarders */
  EP_MODEL_SM_COPY, /* stores of the other blocks */
  EP_MODEL_LINKS
};
const char *epModelLinkName(int link);

typedef struct epModelLink {
  double us, bytes; /* of the rank that has most to carry: how long its link is busy */
  uint32_t rank;
} epModelLink;

typedef struct epModelTime {
  double us;
  epModelLink link[EP_MODEL_LINKS];
  int busiest;
  double scaleOutGbs,
      scaleUpGbs; /* logical: rows to domains, and to ranks, its own included, over the time; mean of ranks */
} epModelTime;

typedef struct epModelLaunch {
  unsigned sms, sendBlocks, pushBlocks, channels, contexts;
  int fitted; /* by the links; else the library's defaults */
} epModelLaunch;
/* The library's own choice, at most `limit` SMs; 0: no limit. */
epModelLaunch epModelLaunchOf(const epModelMachine *machine, const epModelShape *shape, unsigned limit);
/* -1: out of memory. */
int epModelDispatch(const epModelMachine *machine, const epModelShape *shape, const epModelLaunch *launch,
                    const epModelTraffic *traffic, epModelTime *out);
int epModelCombine(const epModelMachine *machine, const epModelShape *shape, const epModelLaunch *launch,
                   const epModelTraffic *traffic, epModelTime *out);
double epModelUpdateUs(const epModelMachine *machine, const epModelShape *shape, uint32_t tokens);

#endif
