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
#include "ranges.h"

#define EP_LINE_BYTES 1024

static _Thread_local char epErrorLine[EP_LINE_BYTES];
static _Thread_local const char *epCall, *epArgument; /* see epCallEnter */
static _Thread_local int epQuiet;
static epLogLevel epLevel;
static pthread_once_t epLevelOnce = PTHREAD_ONCE_INIT;

static void epWriteLine(epLogLevel level, const char *line) {
  static const char *const names[] = {"", "WARN", "INFO", "TRACE"};
  fprintf(stderr, "nccl_ep[%d] %s %s\n", (int)getpid(), names[level], line);
}

static void epReadLevel(void) {
  static const char *const names[] = {"NONE", "WARN", "INFO", "TRACE"};
  const char *own = getenv(epEnvName(EP_ENV_DEBUG)), *text = own;
  char line[EP_LINE_BYTES];
  int known = 0;
  if (!text) text = getenv("NCCL_DEBUG");
  if (!text) text = epEnvString(EP_ENV_DEBUG);
  epLevel = EP_LOG_WARN; /* also for NCCL's levels that are not ours */
  for (int i = 0; text && i < (int)(sizeof names / sizeof names[0]); i++)
    if (strcasecmp(text, names[i]) == 0) {
      epLevel = (epLogLevel)i;
      known = 1;
    }
  if (!own || !own[0] || known) return;
  snprintf(line, sizeof line, "%s=%.100s ignored: expected NONE, WARN, INFO or TRACE", epEnvName(EP_ENV_DEBUG), own);
  epWriteLine(EP_LOG_WARN, line); /* epLog would read the level again */
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
  size_t call = epCall ? strlen(epCall) : 0;
  int before = snprintf(line, 256, "%s%s%s%s", epCall ? epCall : "", epCall ? ": " : "", epArgument ? epArgument : "",
                        epArgument ? ": " : "");
  va_list args;
  if (before < 0 || before > 255) before = 0;
  va_start(args, format);
  vsnprintf(line + before, sizeof line - (size_t)before, format, args);
  va_end(args);
  if (call && strncmp(line + before, epCall, call) == 0 && line[(size_t)before + call] == ':')
    memmove(line, line + before, strlen(line + before) + 1); /* said already */
  memcpy(epErrorLine, line, sizeof line);
  if (!epQuiet) epLog(EP_LOG_WARN, "%s", line);
  return code;
}

epCallScope epCallEnter(const char *call) {
  epCallScope scope = {epCall, epRangesOn()};
  epCall = call;
  epArgument = NULL;
  if (scope.range) epRangePush(call);
  return scope;
}

void epCallLeave(epCallScope *scope) {
  if (scope->range) epRangePop();
  epCall = scope->before;
  epArgument = NULL;
}

void epFailQuietly(int on) { epQuiet = on; }

void epCallArgument(const char *name) { epArgument = name; }

const char *epLastError(void) { return epErrorLine; }
