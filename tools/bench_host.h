/* What a call costs the thread that makes it. */
#ifndef EP_TOOLS_BENCH_HOST_H_
#define EP_TOOLS_BENCH_HOST_H_

#include "bench_run.h"

/* Row host-prepare: microseconds of ncclEpPrepare for the layer's shape, where nothing is compiled yet in this process: from
 * the disk cache, or cold. Collective. */
int epBenchPrepareTime(epBench *bench, epLayer *layer);
/* Rows host-update, host-dispatch, host-combine: microseconds from call to return. Collective. */
int epBenchHostTimes(epBench *bench, epLayer *layer);

#endif
