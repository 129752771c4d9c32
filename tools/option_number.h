/* A number given to an option of a tool. */
#ifndef EP_TOOLS_OPTION_NUMBER_H_
#define EP_TOOLS_OPTION_NUMBER_H_

#include <argp.h>

/* `text`, which must be a decimal number from low to high; else argp's error for option `name`, which ends the tool. */
unsigned long long epOptionNumber(const char *text, unsigned long long low, unsigned long long high, const char *name,
                                  struct argp_state *state);

#endif
