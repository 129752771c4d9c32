/* Our operations beside what the link and NCCL do with the same bytes, all in one run. */
#ifndef EP_TOOLS_BENCH_COMPARE_H_
#define EP_TOOLS_BENCH_COMPARE_H_

#include "bench_run.h"

typedef struct epBenchComparison {
  epBench *cases; /* prepared; one fabric and one result */
  unsigned count;
} epBenchComparison;

/* Body of epFabricRun; `context` is an epBenchComparison. */
int epBenchCompare(epPort *port, void *context);

/* Body of epFabricRun: both operations with each number of SMs of --sm-curve, a group for each. `context`: an epBench. */
int epBenchCurve(epPort *port, void *context);

#endif
