/* Digits only: no sign, no space, nothing behind. */
#include "option_number.h"

#include <errno.h>
#include <stdlib.h>

unsigned long long epOptionNumber(const char *text, unsigned long long low, unsigned long long high, const char *name,
                                  struct argp_state *state) {
  char *end;
  errno = 0;
  unsigned long long value = strtoull(text, &end, 10);
  if (*text < '0' || *text > '9' || *end || errno || value < low || value > high)
    argp_error(state, "--%s %s: expected a number from %llu to %llu", name, text, low, high);
  return value;
}
