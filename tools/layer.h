/* One rank's half of a MoE layer as the tools run it: group, handle, guarded buffers, and the five calls (update,
 * dispatch, combine, and the backward pass of each). Nothing here knows what the right answer is. */
#ifndef EP_TOOLS_LAYER_H_
#define EP_TOOLS_LAYER_H_

#include "data.h"
#include "fabric.h"
#include "reference.h"

#define EP_LAYER_ROUTINGS 8 /* prepared at most */

/* Calls that run together. */
enum { EP_PART_UPDATE = 1, EP_PART_DISPATCH = 2, EP_PART_COMBINE = 4, EP_PART_BACKWARD = 8, EP_PARTS = 16 };

/* What travels beside a dispatched row: nothing, an FP32 for every 128 elements, or a byte (UE8M0, a power of two) for
 * every 128, filled up to whole words. */
typedef enum { EP_SCALES_NONE = 0, EP_SCALES_FP32, EP_SCALES_UE8M0 } epScales;

typedef struct epLayerConfig {
  epRefType type, combineType; /* of dispatched rows; of the experts' outputs */
  epScales scales;
  int scaleColumns; /* dispatch writes scales in columns, not rows */
  int noZeroPad;    /* dispatch leaves padding rows alone */
  epRefLayout layout;
  uint32_t hidden, experts, topk, maxTokens, align;
  uint64_t budget;   /* max_recv_tokens_per_rank; 0: eager */
  uint64_t capacity; /* rows allocated */
  int index32;       /* topk_idx and counters are int32, else int64 */
  int fused;         /* updates borrow topk_idx, so that dispatch can do their work */
  int backward;      /* also the buffers of the backward pass */
  int graph;         /* epLayerRun replays graphs */
  int staged; /* dispatch and combine are sent first and completed by a call of their own; 2: sent on the group's stream */
  int windowOut;       /* dispatch's output tokens are window-backed */
  int single;          /* combine sums nothing on the way (single_reduction) */
  unsigned masks;      /* the group has them (enable_mask) */
  unsigned bias;       /* rows that combine's sums start from, 0 to 2 */
  int nvfp4;           /* low latency: combine's rows travel as NVFP4 */
  unsigned queuePairs; /* num_qps of each call, 0: the group's */
  unsigned routings;   /* index buffers */
  unsigned sms, timeoutMs;
} epLayerConfig;

/* Device memory with a guard band on either side. */
typedef struct epBuffer {
  unsigned char *base, *data;
  size_t bytes;
  const char *name;
} epBuffer;

typedef struct epLayer {
  epPort *port;
  epLayerConfig config;
  ncclEpGroup_t group;
  ncclEpHandle_t handle;
  uint32_t tokens[EP_LAYER_ROUTINGS]; /* T of each uploaded routing */
  uint64_t eagerRows;                 /* rows of the outputs in eager mode; set after the update */
  epBuffer idx[EP_LAYER_ROUTINGS], inTokens, inWeights, inScales;
  epBuffer outTokens, outWeights, outIdx, outScales;
  void *outMemory; /* of outTokens, when it is a window */
  ncclWindow_t outWindow;
  epBuffer counters, offsets, total, sources;      /* sources: low latency, rows from each rank */
  epBuffer expertOut, expertWeights, expertScales; /* input of combine */
  epBuffer y, yWeights, bias[2];
  unsigned current; /* routing of the last update */
  int alone;        /* the next update is not followed by its dispatch, so it borrows nothing */
  void *graphs[EP_PARTS][EP_LAYER_ROUTINGS];
} epLayer;

int epLayerIsLl(const epLayerConfig *config); /* a layout of the low-latency algorithm */
/* topk_weights of a dispatch output row: all K, one, or none. */
uint32_t epLayerRowWeights(const epLayerConfig *config);
int epLayerOpen(epPort *port, const epLayerConfig *config, epLayer **out);
int epLayerClose(epLayer *layer);

ncclDataType_t epLayerType(epRefType type);
ncclEpLayout_t epLayerLayout(const epLayerConfig *config);
size_t epLayerRowBytes(const epLayerConfig *config);        /* of dispatch, without scales */
size_t epLayerCombineRowBytes(const epLayerConfig *config); /* of combine */
size_t epLayerCombineTravels(const epLayerConfig *config);  /* the same on its way */
uint32_t epLayerScaleBytes(const epLayerConfig *config);
size_t epLayerScaleStride(const epLayerConfig *config); /* between columns of dispatch's scales; 0: rows */
/* Rows that no routing can exceed. repeats: a row may hold an id twice. */
uint64_t epLayerWorstRows(const epLayerConfig *config, int ranks, int repeats);

int epLayerSetIndices(epLayer *layer, unsigned routing, const int64_t *idx, uint32_t tokens);

/* Queued on the port's stream. */
int epLayerUpdate(epLayer *layer, unsigned routing);
int epLayerDispatch(epLayer *layer, int backward);
int epLayerCombine(epLayer *layer, int backward);

/* Some of these calls on a routing, now. An update without a dispatch behind it is a launch of its own. */
int epLayerCalls(epLayer *layer, unsigned parts, unsigned routing);
/* The same; with config.graph, the replay of a graph that holds them. Ready captures that graph,
 * if it is not there yet: the last update the host has seen must be this routing's (or be among the parts), and each
 * call must have been made before, as capturing compiles nothing. */
int epLayerReady(epLayer *layer, unsigned parts, unsigned routing);
int epLayerRun(epLayer *layer, unsigned parts, unsigned routing);

/* Every output buffer the next run may write, guard bands included. */
int epLayerPrefill(epLayer *layer);
/* -1 after naming the first buffer whose guard bands were written. */
int epLayerCheckGuards(epLayer *layer);
/* Reads a buffer back, all of it. The caller frees. */
int epLayerRead(epLayer *layer, const epBuffer *buffer, size_t bytes, void **out);

#define EP_FILL_BYTE 0xAB /* outputs that move bytes */
#define EP_FILL_NAN 0xFF  /* outputs that are sums: NaN in every type */

#endif
