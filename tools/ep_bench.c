/* Measures and checks dispatch and combine, on GPUs or on the emulated fabric: the main of it. Everything it prints is
 * also what tests read: exit status 1 and one line that names the cause on any wrong value, fault or error. */
#include <stdio.h>
#include <unistd.h>

#include "bench_options.h"
#include "bench_result.h"
#include "bench_run.h"
#include "failure.h"

/* One fabric, from opening to closing, under one seed. */
static int runSchedule(epBench *bench, unsigned long long seed) {
  epFabricOptions fabric = bench->options->fabric;
  int rc = epBenchPrepare(bench, seed);
  fabric.seed = seed;
  if (rc || (rc = epFabricOpen(&fabric, &bench->fabric)) != 0) goto done;
  rc = epFabricRun(bench->fabric, epBenchRun, bench);
  if (epToolFailures() && !epFabricIsCuda(bench->fabric))
    fprintf(stderr, "ep_bench: seed %llu failed: the same options with --seed %llu --schedules 1 repeat it\n", seed,
            seed);
  epFabricClose(bench->fabric);
done:
  epBenchRelease(bench);
  return rc;
}

static void showProgress(const epBenchOptions *o, unsigned done) {
  if (o->schedules > 1 && isatty(2))
    fprintf(stderr, "\r# schedule %u of %u%s", done, o->schedules, done == o->schedules ? "\r\033[K" : "");
}

int main(int argc, char **argv) {
  epBenchOptions options;
  epBenchResult result = {.options = &options};
  epBench bench = {.options = &options, .result = &result};
  epToolInit("ep_bench", 0);
  if (epBenchParse(argc, argv, &options)) return 2;
  epToolInit("ep_bench", options.fabric.timeoutMs / 1000 + 90);
  if (epBenchResolve(&options)) goto done;
  for (unsigned i = 0; i < options.schedules && !epToolFailures(); i++) {
    runSchedule(&bench, options.seed + i);
    showProgress(&options, i + 1);
  }
  if (result.ranks) { /* this process holds rank 0 */
    epBenchPrintRows(&result);
    if (options.jsonPath) epBenchWriteJson(&result, options.jsonPath);
  }
done:
  epBenchResultFree(&result);
  epBenchFree(&options);
  return epToolFailures() ? 1 : 0;
}
