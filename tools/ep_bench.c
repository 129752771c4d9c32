/* Measures and checks dispatch and combine, on GPUs or on the emulated fabric: the main of it. Everything it prints is
 * also what tests read: exit status 1 and one line that names the cause on any wrong value, fault or error. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "bench_compare.h"
#include "bench_model.h"
#include "bench_options.h"
#include "bench_plot.h"
#include "bench_result.h"
#include "bench_run.h"
#include "failure.h"

/* One fabric, from opening to closing, under one seed. */
static int runSchedule(epBench *bench, unsigned long long seed) {
  epFabricOptions fabric = bench->options->fabric;
  int rc = epBenchPrepare(bench, seed);
  fabric.seed = seed;
  if (rc || (rc = epFabricOpen(&fabric, &bench->fabric)) != 0) goto done;
  rc = epFabricRun(bench->fabric,
                   bench->options->maskRank >= 0 ? epBenchMasks
                   : bench->options->curveCount  ? epBenchCurve
                                                 : epBenchRun,
                   bench);
  if (epToolFailures() && !epFabricIsCuda(bench->fabric))
    fprintf(stderr, "ep_bench: seed %llu failed: the same options with --seed %llu --schedules 1 repeat it\n", seed,
            seed);
  epFabricClose(bench->fabric);
done:
  epBenchRelease(bench);
  return rc;
}

/* All cases on one fabric. */
static void runComparison(epBenchResult *result, epBenchCase *cases, unsigned count) {
  epBench benches[EP_BENCH_CASES];
  epBenchComparison comparison = {.cases = benches, .count = count};
  epFabricOptions fabric = cases[0].options.fabric;
  int rc = 0;
  memset(benches, 0, sizeof(benches));
  for (unsigned i = 0; i < count && !rc; i++) {
    benches[i].options = &cases[i].options;
    benches[i].result = result;
    benches[i].headerPrinted = i > 0;
    snprintf(benches[i].label, sizeof(benches[i].label), "%s", cases[i].label);
    rc = epBenchPrepare(&benches[i], cases[i].options.seed);
  }
  fabric.seed = cases[0].options.seed;
  if (!rc && !epFabricOpen(&fabric, &benches[0].fabric)) {
    for (unsigned i = 1; i < count; i++) benches[i].fabric = benches[0].fabric;
    epFabricRun(benches[0].fabric, epBenchCompare, &comparison);
    epFabricClose(benches[0].fabric);
  }
  for (unsigned i = 0; i < count; i++) epBenchRelease(&benches[i]);
}

static void showProgress(const epBenchOptions *o, unsigned done) {
  if (o->schedules > 1 && isatty(2))
    fprintf(stderr, "\r# schedule %u of %u%s", done, o->schedules, done == o->schedules ? "\r\033[K" : "");
}

int main(int argc, char **argv) {
  epBenchOptions options;
  epBenchResult result = {.options = &options};
  epBench bench = {.options = &options, .result = &result};
  static epBenchCase cases[EP_BENCH_CASES];
  unsigned count = 0;
  epToolInit("ep_bench", 0);
  if (epBenchParse(argc, argv, &options)) return 2;
  epToolInit("ep_bench", options.fabric.timeoutMs / 1000 + 90);
  if (options.compare) {
    if (epBenchCases(&options, cases, &count)) goto done;
    result.options = &cases[0].options;
    runComparison(&result, cases, count);
  } else {
    if (epBenchResolve(&options)) goto done;
    if (options.modelPath) {
      epBenchModel(&options);
      goto done;
    }
    for (unsigned i = 0; i < options.schedules && !epToolFailures(); i++) {
      runSchedule(&bench, options.seed + i);
      showProgress(&options, i + 1);
    }
  }
  if (result.ranks) { /* this process holds rank 0 */
    if (options.maskRank < 0) epBenchPrintRows(&result);
    if (options.jsonPath) epBenchWriteJson(&result, options.jsonPath);
    if (options.plotPath) epBenchPlot(&result, options.plotPath);
  }
done:
  epBenchResultFree(&result);
  epBenchFree(&options);
  for (unsigned i = 0; i < EP_BENCH_CASES; i++) epBenchFree(&cases[i].options);
  return epToolFailures() ? 1 : 0;
}
