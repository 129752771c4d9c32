/* A drawing of who sent how many tokens to whom, in characters. */
#ifndef EP_TOOLS_DEMO_PICTURE_H_
#define EP_TOOLS_DEMO_PICTURE_H_

#include <stdint.h>
#include <stdio.h>

#include "reference.h"

void epDemoDraw(FILE *out, const epRef *ref, int utf8);

#endif
