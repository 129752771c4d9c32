/* The plain C reference of dispatch and combine: what each call must give, for all ranks at once, in the simplest
 * loops. Everything that moves tokens (GPU kernels, emulated fabric) is compared with it, so it shares no arithmetic
 * with them. */
#ifndef EP_TOOLS_REFERENCE_H_
#define EP_TOOLS_REFERENCE_H_

#include <stddef.h>
#include <stdint.h>

/* The last two are low latency's: [R][B] and [L][R * B] rows at fixed places, most of them unused. */
typedef enum { EP_REF_FLAT = 0, EP_REF_EXPERT_MAJOR, EP_REF_RANK_MAJOR, EP_REF_EXPERT_MAJOR_3D } epRefLayout;
/* E4M3 is for dispatch alone, which moves bytes: it is never loaded, summed or stored. */
typedef enum { EP_REF_BF16 = 0, EP_REF_F16, EP_REF_F32, EP_REF_E4M3 } epRefType;

/* What every rank decided. The arrays are the caller's and must outlive the reference. */
typedef struct epRefRouting {
  uint32_t ranks, experts, topk;
  epRefLayout layout;
  uint32_t align;                /* rows at which an expert's zone may start; 0 and 1: any */
  uint64_t budget;               /* rows that the output holds; 0: as many as needed */
  const uint32_t *tokens;        /* [ranks] T of each rank */
  const int64_t *const *topkIdx; /* [ranks] -> [T][topk]; entries outside [0, experts) select nothing */
  uint32_t maxTokens;            /* B: of the low-latency layouts */
} epRefRouting;

/* Where a row of a dispatch output comes from. Flat and rank-major rows stand for all k of the token: k is -1. Padding:
 * source is -1. A place that the low-latency layouts leave as it is: source is EP_REF_UNUSED. */
#define EP_REF_UNUSED (-2)
typedef struct epRefRow {
  int32_t source, token, k;
} epRefRow;

/* What one rank receives. Counts are those of the whole routing, also where the budget cuts rows off. */
typedef struct epRefRank {
  uint64_t needed;           /* rows of the output, padding included */
  uint64_t rows;             /* of these, rows that fit the budget */
  uint64_t total;            /* the same without padding */
  epRefRow *row;             /* [rows] */
  uint64_t *perSource;       /* [ranks] tokens that arrive from each rank */
  uint64_t *perExpert;       /* [locals] (token, k) of each local expert */
  uint64_t *perExpertPadded; /* [locals] the same, rounded up to the alignment (flat: not rounded) */
  uint64_t *offset;          /* [locals] exclusive prefix of perExpertPadded */
  uint64_t *counter,
      *first; /* [locals] the last two as expert_counters and expert_offsets tell them: where the layout has slots by
                                expert, cut at the budget */
} epRefRank;

typedef struct epRef {
  epRefRouting in;
  uint32_t locals;
  epRefRank *rank; /* [ranks] */
  int64_t **slot;  /* [ranks] -> [T][topk]: row at the owner's rank, or -1 (nothing selected, or dropped) */
} epRef;

/* 0, EINVAL or ENOMEM. */
int epRefCreate(const epRefRouting *in, epRef **out);
void epRefDestroy(epRef *ref);

/* Rank that owns the expert which (token, k) of `rank` selected, or -1. */
int epRefOwner(const epRef *ref, uint32_t rank, uint32_t token, uint32_t k);

/* Row `row` of the topk_idx that `rank` receives (flat and rank-major): local ids, or global ones; -1 elsewhere. */
void epRefIndexRow(const epRef *ref, uint32_t rank, uint64_t row, int global, int64_t *out);

/* Where byte `byte` of row `row` lies in an output of scales: rows of `scaleBytes` where columnStride is 0, else
 * columns of 4 bytes that start columnStride bytes apart. */
size_t epRefScaleOffset(uint32_t scaleBytes, uint64_t columnStride, uint64_t row, uint32_t byte);

/* Combine of one token of `rank`. rows[k] is the expert output at ref->slot[rank][token * topk + k] of the owner, NULL
 * where that is -1. scaleUp: ranks of a domain, ref->in.ranks for plain. out: [hidden] elements of `type`. `scratch`
 * holds 4 * hidden floats. nvfp4 (one domain, low latency): a rank's sum is quantised instead of rounded. */
typedef struct epRefCombine {
  epRefType type;
  uint32_t hidden, scaleUp;
  int multipleReductions;
  const void *bias0, *bias1; /* the token's rows, or NULL */
  const float *weights;      /* [topk], applied to the slots by fused multiply-add; NULL: 1 */
  const float *nvfp4;        /* [topk], the callers' scales of rows; NULL: not quantised */
  const epRef *places;       /* whose choices order the domains' sums, also where no row came of them; NULL: the same */
} epRefCombine;
void epRefCombineToken(const epRef *ref, const epRefCombine *how, uint32_t rank, uint32_t token,
                       const void *const *rows, float *scratch, void *out);

/* What a caller gives as a row's scale for NVFP4: 2688 / amax, 0 for a row of zeros. */
float epRefNvfp4Scale(epRefType type, const void *row, uint32_t hidden);

size_t epRefTypeBytes(epRefType type);
const char *epRefTypeName(epRefType type);
float epRefLoad(epRefType type, const void *row, size_t index);
void epRefStore(epRefType type, void *row, size_t index, float value); /* rounds to nearest even */

#endif
