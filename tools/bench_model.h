/* ep_bench --model: predicts instead of running. */
#ifndef EP_TOOLS_BENCH_MODEL_H_
#define EP_TOOLS_BENCH_MODEL_H_

#include "bench_options.h"

/* The options resolved. Prints, and writes the JSON file if one is asked for. 0, or -1 after telling why. */
int epBenchModel(const epBenchOptions *options);

#endif
