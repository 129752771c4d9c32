/* NCCL's log: a line is made here, so that NCCL formats nothing of ours but a string. */
#include "log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>

static _Atomic(epRmaLogger) current;

void epRmaLogSet(epRmaLogger logger) { current = logger; }

void epRmaLog(int level, const char *where, int line, const char *format, ...) {
  epRmaLogger logger = current;
  if (!logger) return;
  char text[512];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof(text), format, args);
  va_end(args);
  unsigned long subsystems = level == EP_RMA_LOG_WARN ? ~0ul : EP_RMA_SUBSYS_INIT | EP_RMA_SUBSYS_NET;
  logger(level, subsystems, where, line, "RMA/EP : %s", text);
}
