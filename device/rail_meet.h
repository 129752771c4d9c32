/* mask_meet.h in a group of several scale-up domains. */
#ifndef EP_DEVICE_RAIL_MEET_H_
#define EP_DEVICE_RAIL_MEET_H_

#include "rail_mask.h"

#include "mask_meet.h"

#endif
