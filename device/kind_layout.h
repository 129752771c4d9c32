/* What an operation is, as one rank tells another when it begins one: dispatch and combine use the same rows and flags of a window, and the
 * number of an operation does not say which of them it is, nor along which routing. Shared by host and kernels.
 *
 * A greeting is a word of 64 bits in the window (`hello` of layout.h): the operation's generation << 32, and below it
 *
 *   bits 0 - 15   along which routing: low bits of the generation of the update that made the record, in low latency of the dispatch
 *                 that filled it; 0: not told
 *   bits 16 - 26  a hash of what makes rows as wide as they are
 *   bit  27       of a backward pass
 *   bits 28, 29   layout
 *   bits 30, 31   EP_KIND_*
 *
 * Across scale-up domains a rank whose rail is in another operation says so to its domain instead, which is not that one's neighbour
 * (EP_KIND_ELSEWHERE): layout and pass of that operation are where they are above, bits 16 - 25 are that rank, bit 26 says that it is in a
 * combine, bit 15 that both differ in their routing alone, bits 4 - 14 are of its routing, and bits 0 - 3 the teller's own layout, pass (4)
 * and whether it is in a combine (8).
 *
 * There are two for each peer, by generation & 1: who begins operation g has ended g - 1, for which it had this rank's greeting of g - 1, so
 * this rank had ended g - 2. */
#ifndef EP_DEVICE_KIND_LAYOUT_H_
#define EP_DEVICE_KIND_LAYOUT_H_

#include "types.h"

enum { EP_KIND_NONE = 0, EP_KIND_DISPATCH, EP_KIND_COMBINE, EP_KIND_ELSEWHERE };

#define EP_KIND_ROUTING 0xffffu
#define EP_KIND_WIDTHS_BITS 11u
#define EP_KIND(kind, layout, backward, widths, routing)                                                         \
  ((uint32_t)(kind) << 30 | (uint32_t)(layout) << 28 | ((backward) ? 1u << 27 : 0u) | (uint32_t)(widths) << 16 | \
   ((uint32_t)(routing)&EP_KIND_ROUTING))
#define EP_KIND_OF(word) ((uint32_t)(word) >> 30)
#define EP_KIND_LAYOUT_OF(word) ((uint32_t)(word) >> 28 & 3u)
#define EP_KIND_BACKWARD_OF(word) ((uint32_t)(word) >> 27 & 1u)

/* The word of a rank that is in `mine` about one that is in `its`. */
EP_HD uint32_t epKindElsewhere(uint32_t mine, uint32_t its, uint32_t rank) {
  uint32_t routing = (its & 0x7ffu) << 4 | ((mine ^ its) <= EP_KIND_ROUTING ? 1u << 15 : 0);
  uint32_t teller =
      EP_KIND_LAYOUT_OF(mine) | EP_KIND_BACKWARD_OF(mine) << 2 | (EP_KIND_OF(mine) == EP_KIND_COMBINE ? 8u : 0);
  return EP_KIND(EP_KIND_ELSEWHERE, EP_KIND_LAYOUT_OF(its), EP_KIND_BACKWARD_OF(its),
                 rank | (EP_KIND_OF(its) == EP_KIND_COMBINE ? 1u << 10 : 0), routing | teller);
}

/* Who reads such a word of `*peer` and is in `mine` knows that either the teller or the other one is in another operation: makes *peer that one,
 * and gives what it is in, as a greeting that differs from `mine`. */
EP_HD uint32_t epKindThere(uint32_t word, uint32_t mine, uint32_t *peer) {
  uint32_t alike = mine & ((1u << 27) - 1u); /* hash and routing */
  uint32_t its = EP_KIND(word >> 26 & 1u ? EP_KIND_COMBINE : EP_KIND_DISPATCH, EP_KIND_LAYOUT_OF(word),
                         EP_KIND_BACKWARD_OF(word), 0, 0);
  uint32_t teller = EP_KIND(word >> 3 & 1u ? EP_KIND_COMBINE : EP_KIND_DISPATCH, word & 3u, word >> 2 & 1u, 0, 0);
  int routing = (int)(word >> 15 & 1u), itsRouting = (word >> 4 & 0x7ffu) == (mine & 0x7ffu);
  if ((its | alike) == mine && (routing ? itsRouting : (teller | alike) != mine))
    its = teller;
  else
    *peer = word >> 16 & 1023u;
  its |= alike;
  return its != mine ? its : its ^ (!routing ? 1u << 16 : (its & EP_KIND_ROUTING) == 1 ? 2u : 1u); /* never to 0 */
}

/* Both are the same operation, as far as is told. */
EP_HD int epKindSame(uint32_t a, uint32_t b) {
  uint32_t differ = a ^ b;
  return differ == 0 || (differ <= EP_KIND_ROUTING && ((a & EP_KIND_ROUTING) == 0 || (b & EP_KIND_ROUTING) == 0));
}

/* Hash of the configuration's fields that all ranks must have alike. */
EP_HD uint32_t epKindWidths(uint32_t topk, uint32_t rowBytes, uint32_t dtype, uint32_t scaleBytes) {
  uint32_t h = (topk << 2 | dtype) * 0x9e3779b1u;
  h = (h ^ rowBytes) * 0x85ebca6bu;
  h = (h ^ h >> 15 ^ scaleBytes) * 0xc2b2ae35u;
  return h >> (32 - EP_KIND_WIDTHS_BITS);
}

#endif
