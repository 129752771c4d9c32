/* The run of one rank: checks, then times, on an open fabric. */
#ifndef EP_TOOLS_BENCH_RUN_H_
#define EP_TOOLS_BENCH_RUN_H_

#include "bench_options.h"
#include "bench_result.h"
#include "check.h"
#include "layer.h"

/* Shared by the ranks of a process; rank threads read it, and the one that prints also writes the result. */
typedef struct epBench {
  const epBenchOptions *options;
  epBenchResult *result;
  epFabric *fabric;
  uint64_t seed; /* of this schedule */
  unsigned routings;
  int headerPrinted;
  epRouting routing[EP_LAYER_ROUTINGS];
  epRef *ref[EP_LAYER_ROUTINGS];
  epLayerConfig layer;
  char label[EP_BENCH_LABEL]; /* of its rows, when several are compared */
} epBench;

/* Makes routings and references for one seed; frees them. */
int epBenchPrepare(epBench *bench, uint64_t seed);
void epBenchRelease(epBench *bench);
/* Bodies of epFabricRun; `context` is an epBench. The second one is --mask-test's (bench_masks.c). */
int epBenchRun(epPort *port, void *context);
int epBenchMasks(epPort *port, void *context);

/* The pieces of a run, for those who put them together otherwise. But for the first two they are collective; -1 ends the run. */
epCheckCase epBenchWhat(const epBench *bench, unsigned routing);
int epBenchReference(const epBench *bench, const epRouting *routing, epRef **out); /* the routing must outlive it */
int epBenchBegin(epBench *bench, epLayer *layer); /* header, checks where asked for, inputs of every routing */
/* One iteration of some calls (EP_PART_*); a sample of the row once i has reached --warmup. */
int epBenchTimeOnce(epBench *bench, epLayer *layer, epBenchRow *row, unsigned parts, unsigned i);
/* The row of an operation, for the rank that keeps the result; NULL for the others. */
epBenchRow *epBenchRowFor(epBench *bench, epLayer *layer, const char *name);
int epBenchSettled(epBench *bench, epLayer *layer); /* no asynchronous error but those the routing asks for */
/* Ends each rank's body: failures told to all, faults of the emulated fabric, the layer closed. */
int epBenchEnd(epLayer *layer, int rc);
int epBenchKeepMarks(epPort *port, epBenchRow *row); /* a sample: the time between the port's first two marks */
/* The largest of the ranks' microseconds becomes a sample of the row, where this rank has it (else NULL). Collective. */
int epBenchKeep(epPort *port, epBenchRow *row, double mine);

#endif
