/* Worlds of the harness: one thread a rank, failures noted instead of thrown, a limit on how long a run may take. */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "harness.h"

typedef struct start {
  epTestRank *me;
  void (*body)(epTestRank *me);
} start;

static void *threadMain(void *arg) {
  start *s = arg;
  s->body(s->me);
  return NULL;
}

void epNote(epTestRank *me, const char *file, int line, const char *format, ...) {
  if (me->failures++) return;
  va_list args;
  int n = snprintf(me->first, sizeof(me->first), "rank %d, %s:%d: ", me->rank,
                   strrchr(file, '/') ? strrchr(file, '/') + 1 : file, line);
  va_start(args, format);
  if (n > 0 && (size_t)n < sizeof(me->first)) vsnprintf(me->first + n, sizeof(me->first) - (size_t)n, format, args);
  va_end(args);
}

void epExpectError(epTestRank *me, const char *file, int line, const char *call, ncclResult_t got, ncclResult_t want,
                   const char *words) {
  const char *text = ncclEpGetLastErrorString();
  if (got != want) {
    epNote(me, file, line, "%s: %d instead of %d: %s", call, (int)got, (int)want, text);
    return;
  }
  if (strchr(text, '\n')) epNote(me, file, line, "%s: more than one line: %s", call, text);
  char copy[256], *save = NULL;
  snprintf(copy, sizeof(copy), "%s", words);
  for (char *word = strtok_r(copy, "|", &save); word; word = strtok_r(NULL, "|", &save))
    if (!strstr(text, word)) epNote(me, file, line, "%s: no \"%s\" in: %s", call, word, text);
}

/* A rank that never comes back cannot be ended from outside: the whole program is. */
static void joinAll(pthread_t *threads, int n, unsigned seconds) {
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += seconds ? seconds : 120;
  for (int i = 0; i < n; i++)
    if (pthread_timedjoin_np(threads[i], NULL, &until) == ETIMEDOUT) {
      fprintf(stderr, "rank %d did not come back in %u s\n[  FAILED  ] 1 test(s)\n", i, seconds ? seconds : 120);
      _exit(1);
    }
}

/* EP_TEST_DOMAINS: into how many scale-up domains worlds are divided whose ranks allow it. */
static int domainsOf(int ranks) {
  const char *wanted = getenv("EP_TEST_DOMAINS");
  int domains = wanted ? atoi(wanted) : 1;
  return domains > 1 && ranks % domains == 0 ? domains : 1;
}

unsigned epWorldTry(epTestWorld *world, void (*body)(epTestRank *me), char *text, size_t textBytes) {
  int n = world->ranks;
  ncclComm_t comms[EP_TEST_MAX_RANKS] = {0};
  epTestRank *ranks = calloc((size_t)n, sizeof(*ranks));
  start starts[EP_TEST_MAX_RANKS];
  pthread_t threads[EP_TEST_MAX_RANKS];
  unsigned failures = 0;
  text[0] = 0, world->faults = 0, world->report[0] = 0;
  ncclEpEmuOptions_t options = NCCL_EP_EMU_OPTIONS_INIT;
  options.seed = world->seed, options.num_sms = world->sms, options.bug = world->bug;
  if (!ranks || ncclEpEmuCommInitAll(comms, domainsOf(n), n / domainsOf(n), &options) != ncclSuccess) {
    snprintf(text, textBytes, "no emulated communicators: %s", ncclEpGetLastErrorString());
    free(ranks);
    return 1;
  }
  for (int i = 0; i < n; i++) {
    ranks[i] = (epTestRank){.world = world, .ranks = n, .rank = i, .comm = comms[i], .arg = world->arg};
    starts[i] = (start){&ranks[i], body};
    if (pthread_create(&threads[i], NULL, threadMain, &starts[i])) {
      fprintf(stderr, "no thread for rank %d\n", i);
      _exit(1);
    }
  }
  joinAll(threads, n, world->seconds);
  for (int i = 0; i < n; i++) {
    if (ranks[i].failures && !failures) snprintf(text, textBytes, "%s", ranks[i].first);
    failures += ranks[i].failures;
    ncclEpEmuReport_t report = NCCL_EP_EMU_REPORT_INIT;
    if (ncclEpEmuGetReport(comms[i], &report) == ncclSuccess && report.faults) {
      if (!world->faults) memcpy(world->report, report.text, sizeof(world->report));
      world->faults += report.faults;
    }
  }
  for (int i = 0; i < n; i++)
    if (ncclEpEmuCommDestroy(comms[i]) != ncclSuccess && !failures++)
      snprintf(text, textBytes, "ncclEpEmuCommDestroy: %s", ncclEpGetLastErrorString());
  free(ranks);
  return failures;
}

void epWorldRun(epTestWorld *world, void (*body)(epTestRank *me)) {
  char text[700];
  unsigned failures = epWorldTry(world, body, text, sizeof(text));
  if (failures)
    fail_msg("%u failures under seed %llu, first: %s%s%s", failures, world->seed, text,
             world->faults ? "\nthe fabric reports: " : "", world->report);
  if (world->faults) fail_msg("under seed %llu the fabric reports: %s", world->seed, world->report);
}
