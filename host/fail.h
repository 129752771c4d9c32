/* Errors are values: the first function that decides an error says so once, with the exact cause, through epFail. It
 * stores the line for ncclEpGetLastErrorString (per thread) and writes it to the log at level WARN. */
#ifndef EP_HOST_FAIL_H_
#define EP_HOST_FAIL_H_

#include "nccl_ep.h"

#if defined(__GNUC__)
#define EP_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define EP_PRINTF(fmt, args)
#endif

/* Returns `code`, so that callers can write `return epFail(ncclInvalidArgument, "...")`. One line, no newline, that
 * names the argument, the value and what was expected. */
ncclResult_t epFail(ncclResult_t code, const char *format, ...) EP_PRINTF(2, 3);
#ifdef __clang_analyzer__ /* which does not look into it: the result is its first argument */
#define epFail(code, ...) ((void)(epFail)(code, __VA_ARGS__), (code))
#endif

/* The public call that this thread is in, and the argument that it looks at: what epFail puts before a line that does
 * not begin with the call itself, so that functions which serve many calls need not be told. */
typedef struct epCallScope {
  const char *before;
  int range; /* of NVTX, to be ended */
} epCallScope;
epCallScope epCallEnter(const char *call);
void epCallLeave(epCallScope *scope);
#define EP_CALL_AS(name) __attribute__((cleanup(epCallLeave), unused)) epCallScope epThisCall = epCallEnter(name)
#define EP_CALL() EP_CALL_AS(__func__)
void epCallArgument(const char *name); /* NULL: none any more */

/* Failures of this thread stay out of the log: who tries on behalf of another, who will tell. */
void epFailQuietly(int on);

typedef enum { EP_LOG_NONE = 0, EP_LOG_WARN, EP_LOG_INFO, EP_LOG_TRACE } epLogLevel;
/* Level from NCCL_EP_DEBUG (else NCCL_DEBUG): NONE, WARN, INFO, TRACE; read once. Lines go to stderr. */
void epLog(epLogLevel level, const char *format, ...) EP_PRINTF(2, 3);
const char *epLastError(void);

#endif
