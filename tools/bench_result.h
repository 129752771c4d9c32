/* What ep_bench found, and how it says so: the header and the rows in the style of nccl-tests, and the same as JSON. */
#ifndef EP_TOOLS_BENCH_RESULT_H_
#define EP_TOOLS_BENCH_RESULT_H_

#include "bench_options.h"
#include "clocks.h"

#define EP_BENCH_ROWS 128
#define EP_BENCH_LABEL 40

/* One operation. Samples are microseconds, each the largest of the ranks. */
typedef struct epBenchRow {
  char label[EP_BENCH_LABEL]; /* of the case it belongs to; empty: there is one */
  const char *name;
  unsigned sms;              /* that the library might use; 0: as the options say */
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
  epClocks *clocks;   /* [options->ranks], NULL: not read */
  char skipped[1024]; /* what --compare could not measure, and why; lines */
} epBenchResult;

/* Of a row's samples. */
typedef struct epBenchSummary {
  double median, low, high, p10, p90;
} epBenchSummary;
epBenchSummary epBenchSummarise(const epBenchRow *row);
double epBenchBandwidth(double bytes, double microseconds);                                             /* GB/s */
const epBenchRow *epBenchPartner(const epBenchResult *result, const epBenchRow *row, const char *name); /* same case */
double epBenchLink(const epBenchResult *result,
                   const epBenchRow *row); /* GB/s of the case's faster link limit; 0: none */
void epBenchVersion(char *out, size_t size);
const char *epBenchSmsText(const epBenchOptions *options); /* how their number was chosen */
int epBenchSms(const ncclEpGroupProperties_t *properties, epRefLayout layout, int combine);

/* Found by all three or added; NULL: full. */
epBenchRow *epBenchRowOf(epBenchResult *result, const char *label, const char *name, unsigned sms);
int epBenchAddSample(epBenchRow *row, double microseconds);
void epBenchResultFree(epBenchResult *result);

void epBenchPrintHeader(const epBenchResult *result);
void epBenchPrintRows(const epBenchResult *result);
int epBenchWriteJson(const epBenchResult *result, const char *path);

#endif
