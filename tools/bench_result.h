/* What ep_bench found, and how it says so: the header and the rows in the style of nccl-tests, and the same as JSON. */
#ifndef EP_TOOLS_BENCH_RESULT_H_
#define EP_TOOLS_BENCH_RESULT_H_

#include "bench_options.h"

#define EP_BENCH_ROWS 16

/* One operation. Samples are microseconds, each the largest of the ranks. */
typedef struct epBenchRow {
  const char *name;
  double algBytes, busBytes; /* per rank; the largest of the ranks, mean over the routings */
  double *samples;
  unsigned count, room;
  unsigned errors; /* -1u: not checked */
  int host;        /* time of a call on the host, not on the stream */
} epBenchRow;

typedef struct epBenchRank {
  int rank, device;
  long pid;
  char name[160], host[64];
} epBenchRank;

typedef struct epBenchResult {
  const epBenchOptions *options;
  char versions[256]; /* what follows the library's own */
  int cuda, routings;
  epBenchRank *ranks; /* [options->ranks] */
  ncclEpGroupProperties_t properties;
  ncclEpBufferSize_t sizes;
  uint64_t budget;
  uint32_t scaleBytes; /* of a dispatched row */
  double outputRows;   /* rows of the output, padding included; largest rank, mean over the routings */
  epBenchRow rows[EP_BENCH_ROWS];
  unsigned rowCount;
} epBenchResult;

epBenchRow *epBenchRowOf(epBenchResult *result, const char *name); /* found by name or added; NULL: full */
int epBenchAddSample(epBenchRow *row, double microseconds);
void epBenchResultFree(epBenchResult *result);

void epBenchPrintHeader(const epBenchResult *result);
void epBenchPrintRows(const epBenchResult *result);
int epBenchWriteJson(const epBenchResult *result, const char *path);

#endif
