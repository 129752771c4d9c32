/* The log and each thread's last error. */
#include "fail.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "env.h"

#define EP_LINE_BYTES 1024

static _Thread_local char epErrorLine[EP_LINE_BYTES];
static epLogLevel epLevel;
static pthread_once_t epLevelOnce = PTHREAD_ONCE_INIT;

static void epReadLevel(void) {
  static const char *const names[] = {"NONE", "WARN", "INFO", "TRACE"};
  const char *text = getenv(epEnvName(EP_ENV_DEBUG));
  if (!text) text = getenv("NCCL_DEBUG");
  if (!text) text = epEnvString(EP_ENV_DEBUG);
  epLevel = EP_LOG_WARN; /* also for NCCL's levels that are not ours */
  for (int i = 0; text && i < (int)(sizeof names / sizeof names[0]); i++)
    if (strcasecmp(text, names[i]) == 0) epLevel = (epLogLevel)i;
}

static void epWriteLine(epLogLevel level, const char *line) {
  static const char *const names[] = {"", "WARN", "INFO", "TRACE"};
  fprintf(stderr, "nccl_ep[%d] %s %s\n", (int)getpid(), names[level], line);
}

void epLog(epLogLevel level, const char *format, ...) {
  char line[EP_LINE_BYTES];
  va_list args;
  pthread_once(&epLevelOnce, epReadLevel);
  if (level > epLevel || level == EP_LOG_NONE) return;
  va_start(args, format);
  vsnprintf(line, sizeof line, format, args);
  va_end(args);
  epWriteLine(level, line);
}

ncclResult_t(epFail)(ncclResult_t code, const char *format, ...) {
  char line[EP_LINE_BYTES]; /* apart, because an argument may be the last error itself */
  va_list args;
  va_start(args, format);
  vsnprintf(line, sizeof line, format, args);
  va_end(args);
  memcpy(epErrorLine, line, sizeof line);
  epLog(EP_LOG_WARN, "%s", line);
  return code;
}

const char *epLastError(void) { return epErrorLine; }
