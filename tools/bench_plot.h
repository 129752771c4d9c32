/* The result as a drawing that needs nothing else: an SVG, or an HTML page with the drawing and the numbers. */
#ifndef EP_TOOLS_BENCH_PLOT_H_
#define EP_TOOLS_BENCH_PLOT_H_

#include "bench_result.h"

/* By the ending of the path, .svg or .html. A curve over SMs where rows have them, else bars with their spread. */
int epBenchPlot(const epBenchResult *result, const char *path);

#endif
