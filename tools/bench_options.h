/* What ep_bench was asked to do: the command line, with defaults that depend on the machine. */
#ifndef EP_TOOLS_BENCH_OPTIONS_H_
#define EP_TOOLS_BENCH_OPTIONS_H_

#include "data.h"
#include "fabric.h"
#include "layer.h"
#include "reference.h"

#define EP_BENCH_CASES 8   /* of --compare */
#define EP_BENCH_POINTS 32 /* of --sm-curve */

enum { EP_OP_DISPATCH = 1, EP_OP_COMBINE = 2 };

typedef struct epBenchOptions {
  epFabricOptions fabric;
  unsigned ops;
  epRefLayout layout;
  int algo, layoutGiven; /* algo: -1 not given, 0 ht, 1 ll */
  epRefType type;        /* of dispatched rows; combine's are bf16 where this is fp8 */
  int scales;            /* epScales; -1: as the type wants */
  int scaleColumns, noZeroPad, windowOut, single, masks, bias, queuePairs, nvfp4;
  const char *tokensText, *routingText, *bugText, *jsonPath, *backendText;
  uint32_t ranks;                   /* filled in when the machine is known */
  uint32_t *tokensLow, *tokensHigh; /* [ranks] */
  uint32_t maxTokens, hidden, topk, experts, align;
  epRouteSpec route;
  unsigned long long seed;
  unsigned schedules, sms, warmup, iters;
  int check, backward, index32, noFused, staged, limits, parts, graph, hostTime;
  long long maxRecv;                           /* -1: worst case; 0: eager */
  int compare;                                 /* beside others' transfers, interleaved */
  const char *compareText;                     /* its cases; NULL: the run's own layout and tokens */
  unsigned curve[EP_BENCH_POINTS], curveCount; /* SMs of --sm-curve */
  const char *plotPath, *modelPath;
  int profile;  /* also where the time of each operation goes */
  int maskRank; /* of --mask-test; -1: not asked for */
  const char *profilePath;
  unsigned delayRank, delayUs; /* a rank that comes late to what is profiled; 0 us: none does */
  char command[1024];
} epBenchOptions;

/* Parses the command line; exits the process for --help and for syntax, as argp does. */
int epBenchParse(int argc, char **argv, epBenchOptions *options);
/* Fills in what depends on the number of ranks and on the backend. */
int epBenchResolve(epBenchOptions *options);
void epBenchFree(epBenchOptions *options);
const char *epBenchLayoutName(epRefLayout layout);
/* The options of each case of --compare, not resolved yet, and their labels. tokens: storage for the cases' texts. -1
 * after telling what is wrong. */
typedef struct epBenchCase {
  epBenchOptions options;
  char label[40], tokens[24];
} epBenchCase;
int epBenchCases(const epBenchOptions *options, epBenchCase *cases, unsigned *count);

#endif
