/* Whether one rank's results are the reference's, bit for bit, and what a run's inputs are. The first wrong byte of
 * each tensor is told with where it came from, what was found and what was expected. */
#ifndef EP_TOOLS_CHECK_H_
#define EP_TOOLS_CHECK_H_

#include "layer.h"

/* One routing with its data: everything a rank needs to know what all ranks hold. */
typedef struct epCheckCase {
  const epRef *ref;
  const epRef *places; /* epRefCombine's; NULL: ref's own */
  const epRouting *routing;
  uint64_t seed; /* of the data */
  uint32_t scaleUp;
} epCheckCase;

/* Uploads tokens and weights (kind: EP_DATA_TOKEN or EP_DATA_GRADIENT), and the expert outputs that combine will sum.
 */
int epCheckUploadTokens(epLayer *layer, const epCheckCase *what, epDataKind kind);
int epCheckUploadOutputs(epLayer *layer, const epCheckCase *what);

/* Compare what is in the layer's buffers; the stream is idle. hash, if not NULL, takes in every byte of the outputs.
 * -1: could not compare; wrong values are counted as failures and return 0. */
int epCheckDispatch(epLayer *layer, const epCheckCase *what, epDataKind kind, int backward, uint64_t *hash);
int epCheckCombine(epLayer *layer, const epCheckCase *what, int backward, uint64_t *hash);
int epCheckCounts(epLayer *layer, const epCheckCase *what);
int epCheckMetadata(epLayer *layer, const epCheckCase *what);
/* The group's asynchronous error is what the routing asks for: none, or too many rows. Clears the latter. */
int epCheckErrors(epLayer *layer, const epCheckCase *what);

#endif
