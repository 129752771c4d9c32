/* What a call costs the thread that makes it. */
#ifndef EP_TOOLS_BENCH_HOST_H_
#define EP_TOOLS_BENCH_HOST_H_

#include "bench_run.h"

/* Rows host-update, host-dispatch, host-combine: microseconds from call to return. Collective. */
int epBenchHostTimes(epBench *bench, epLayer *layer);

#endif
