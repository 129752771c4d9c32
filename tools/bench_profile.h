/* ep_bench --profile: where the time of the operations goes, and who waited for whom. */
#ifndef EP_TOOLS_BENCH_PROFILE_H_
#define EP_TOOLS_BENCH_PROFILE_H_

#include "bench_run.h"

#define EP_PROFILE_OPS 48  /* operations kept of each rank */
#define EP_PROFILE_WORST 6 /* waits kept of each of them: the longest */

typedef struct epProfiledOp {
  ncclEpProfileOperation_t op;
  ncclEpProfileWait_t waits[EP_PROFILE_WORST]; /* the longest first */
  unsigned waitCount;
} epProfiledOp;

/* What one rank's operations wrote. */
typedef struct epProfiledRank {
  long long clockNs; /* of its device, ahead of rank 0's */
  unsigned count;
  epProfiledOp ops[EP_PROFILE_OPS];
} epProfiledRank;

/* Profiles dispatch and combine, prints what was found, and draws it where the options ask for that. Collective. */
int epBenchProfile(epBench *bench, epLayer *layer);

/* bench_timeline.c: BASE.json, all operations as Chrome's trace viewer reads them, and BASE.svg, the last layer drawn. */
int epTimelineWrite(const epProfiledRank *ranks, unsigned count, const char *base);

extern const char *const epProfileKindNames[3], *const epProfileSpanNames[NCCL_EP_SPANS];

#endif
