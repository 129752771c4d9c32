/* Failures of the tools: a counter, the first line, and the watch. Nothing here is on a timed path. */
#include "failure.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAX_LINES 20

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const char *toolName = "tool";
static unsigned watchSeconds, failures;
static unsigned long watchRound; /* a watch of an older round has nothing to do */
static int watching;
static char firstLine[1024];
static _Thread_local unsigned failuresHere;

void epToolInit(const char *name, unsigned seconds) {
  toolName = name;
  watchSeconds = seconds;
}

static void *watch(void *round) {
  struct timespec nap = {(time_t)watchSeconds, 0};
  int stuck;
  nanosleep(&nap, NULL);
  pthread_mutex_lock(&lock);
  stuck = watching && watchRound == (unsigned long)(size_t)round;
  if (stuck)
    fprintf(stderr, "%s: FAIL: ranks did not come back within %u s of the first failure; giving up\n", toolName,
            watchSeconds);
  pthread_mutex_unlock(&lock);
  if (stuck) _exit(1);
  return NULL;
}

/* Called with the lock held. */
static void startWatch(void) {
  pthread_attr_t attributes;
  pthread_t thread;
  if (watching || !watchSeconds || pthread_attr_init(&attributes)) return;
  watching = 1;
  watchRound++;
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  if (pthread_create(&thread, &attributes, watch, (void *)(size_t)watchRound)) watching = 0;
  pthread_attr_destroy(&attributes);
}

int epToolFail(const char *format, ...) {
  char line[5000]; /* a report of the emulated fabric fits */
  size_t end;
  va_list args;
  va_start(args, format);
  vsnprintf(line, sizeof(line), format, args);
  va_end(args);
  for (end = strlen(line); end && line[end - 1] == '\n'; end--) line[end - 1] = 0;
  failuresHere++;
  pthread_mutex_lock(&lock);
  if (!failures) snprintf(firstLine, sizeof(firstLine), "%.*s", (int)strcspn(line, "\n"), line);
  if (failures < MAX_LINES)
    fprintf(stderr, "%s: FAIL: %s\n", toolName, line);
  else if (failures == MAX_LINES)
    fprintf(stderr, "%s: FAIL: more failures follow, not shown\n", toolName);
  failures++;
  startWatch();
  pthread_mutex_unlock(&lock);
  return -1;
}

unsigned epToolFailures(void) {
  unsigned count;
  pthread_mutex_lock(&lock);
  count = failures;
  pthread_mutex_unlock(&lock);
  return count;
}

unsigned epToolFailuresHere(void) { return failuresHere; }

const char *epToolFirstFailure(void) { return firstLine; }

void epToolCalm(void) {
  pthread_mutex_lock(&lock);
  watching = 0;
  pthread_mutex_unlock(&lock);
}
