/* Loops over rows on several threads, so that large results are compared in time. */
#ifndef EP_TOOLS_SPREAD_H_
#define EP_TOOLS_SPREAD_H_

#include <stdint.h>

#define EP_SPREAD_MOST 64

/* As many threads a loop from now on as a rank can have of this machine's cores, two for other work left out; one unless called.
 * Before any loop runs. */
void epSpreadShare(unsigned ranks);
/* Calls fn for parts of [0, count), each on a thread of its own: part p (from 0 on, below EP_SPREAD_MOST) comes before part
 * p + 1. Returns when all have: how many parts there were. Where no thread can be had, this one does the work. */
typedef void (*epSpreadFn)(void *context, unsigned part, uint64_t first, uint64_t end);
unsigned epSpread(uint64_t count, epSpreadFn fn, void *context);

#endif
