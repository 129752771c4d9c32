/* How the tools report what went wrong: one line a failure, counted, from any thread. The first failure also starts a
 * watch that ends the process when other threads, waiting for the one that failed, do not come back. */
#ifndef EP_TOOLS_FAILURE_H_
#define EP_TOOLS_FAILURE_H_

#if defined(__GNUC__)
#define EP_TOOL_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define EP_TOOL_PRINTF(fmt, args)
#endif

/* Name in front of each line, and seconds after the first failure at which the process ends itself (0: never). */
void epToolInit(const char *name, unsigned watchSeconds);
/* Always -1, so that callers can write `return epToolFail(...)`. Prints the first 20 lines only. */
int epToolFail(const char *format, ...) EP_TOOL_PRINTF(1, 2);
unsigned epToolFailures(void);
unsigned epToolFailuresHere(void); /* of the calling thread */
/* First line reported, "" when none. */
const char *epToolFirstFailure(void);
/* Ends the watch: the threads came back. A later failure starts it again. */
void epToolCalm(void);

#endif
