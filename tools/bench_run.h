/* The run of one rank: checks, then times, on an open fabric. */
#ifndef EP_TOOLS_BENCH_RUN_H_
#define EP_TOOLS_BENCH_RUN_H_

#include "bench_options.h"
#include "bench_result.h"
#include "layer.h"

/* Shared by the ranks of a process; rank threads read it, and the one that prints also writes the result. */
typedef struct epBench {
  const epBenchOptions *options;
  epBenchResult *result;
  epFabric *fabric;
  uint64_t seed; /* of this schedule */
  unsigned routings;
  epRouting routing[EP_LAYER_ROUTINGS];
  epRef *ref[EP_LAYER_ROUTINGS];
  epLayerConfig layer;
  int headerPrinted;
} epBench;

/* Makes routings and references for one seed; frees them. */
int epBenchPrepare(epBench *bench, uint64_t seed);
void epBenchRelease(epBench *bench);
/* Body of epFabricRun; `context` is an epBench. */
int epBenchRun(epPort *port, void *context);
/* The largest of the ranks' microseconds becomes a sample of the row, where this rank has it (else NULL). Collective. */
int epBenchKeep(epPort *port, epBenchRow *row, double mine);

#endif
