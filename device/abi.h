/* What crosses from host to kernel: the configuration a kernel is specialised by, the arguments of a launch, and the
 * record in which a kernel tells the host what went wrong. Read by C, by the emulator and by NVRTC. */
#ifndef EP_DEVICE_ABI_H_
#define EP_DEVICE_ABI_H_

#include "kind_layout.h"
#include "layout.h"

enum {
  EP_KERNEL_UPDATE = 0,
  EP_KERNEL_DISPATCH,
  EP_KERNEL_COMBINE,
  EP_KERNEL_LL_UPDATE, /* low latency: arguments and sizes are in ll_layout.h */
  EP_KERNEL_LL_DISPATCH,
  EP_KERNEL_LL_COMBINE,
  EP_KERNEL_HYBRID_UPDATE, /* several scale-up domains: arguments and sizes are in hybrid_layout.h; same order as the first three */
  EP_KERNEL_HYBRID_DISPATCH,
  EP_KERNEL_HYBRID_COMBINE,
  EP_KERNEL_HYBRID_LL_DISPATCH, /* low latency's are in hybrid_ll_layout.h */
  EP_KERNEL_HYBRID_LL_COMBINE,
  EP_KERNEL_HYBRID_MASK,
  EP_KERNEL_MASK, /* arguments are in mask_layout.h */
  EP_KERNEL_COUNT
};
EP_HD int epKernelIsHybrid(int id) { return id >= EP_KERNEL_HYBRID_UPDATE && id <= EP_KERNEL_HYBRID_MASK; }

enum {
  EP_QUANTISE_NONE = 0,
  EP_QUANTISE_E4M3,   /* dispatch's */
  EP_QUANTISE_POWERS, /* the same with scales that are powers of two */
  EP_QUANTISE_NVFP4   /* combine's */
};

enum { EP_DTYPE_BYTES = 0, EP_DTYPE_BF16, EP_DTYPE_F16, EP_DTYPE_F32 };

enum { EP_LAYOUT_KIND_FLAT = 0, EP_LAYOUT_KIND_EXPERT_MAJOR, EP_LAYOUT_KINDS_HT };

/* Which part of a dispatch or combine a kernel is: all of it, or of a staged operation what sends or what receives. Both parts have
 * the whole operation's generation: the sending part leaves it as it was, and returns no credits. */
enum { EP_PART_WHOLE = 0, EP_PART_SEND, EP_PART_RECEIVE };

/* Everything a kernel is specialised by, and nothing that changes with the tokens. All fields are uint32_t, so that the
 * struct's bytes are the cache key. The GPU compiles each field as a constexpr; the emulator reads the same names at
 * run time. Fields that a kernel does not use are 0. The X-macro is the one list of them. */
#define EP_CONFIG_FIELDS(X)                                                                                                 \
  X(ranks)                                                                                                                  \
  X(experts)                                                                                                                \
  X(topk)                                                                                                                   \
  X(rowBytes)   /* token bytes of a row; 0 for update */                                                                    \
  X(dtype)      /* EP_DTYPE_*: combine only */                                                                              \
  X(layout)     /* EP_LAYOUT_KIND_* */                                                                                      \
  X(scaleBytes) /* of a token's row of scales, a multiple of 4; 0: none */                                                  \
  X(quantise)   /* low latency: EP_QUANTISE_*; rowBytes of dispatch are then those it makes */                              \
  X(bias)       /* rows that combine's sums start from: 0, 1 or 2 */                                                        \
  X(single)     /* combine only: nothing is summed before a token's own rank sums all its slots */                          \
  X(weights)    /* rows carry K FP32 weights: forward dispatch, backward combine */                                         \
  X(indexBytes) /* 4 or 8: update's topk_idx */                                                                             \
  X(threads)    /* a block */                                                                                               \
  X(stageBytes) /* of a warp stage in dispatch and combine */                                                               \
  X(fused)      /* dispatch only: it makes the routing record itself, from the caller's topk_idx */                         \
  X(direct) /* dispatch only, flat: the output is window-backed, and rows are stored into the peers' where those are too */ \
  X(part)    /* EP_PART_*: dispatch and combine */                                                                          \
  X(bulk)    /* the target has bulk copies (SM90 and up) */                                                                 \
  X(scaleUp) /* ranks of a scale-up domain; hybrid kernels only, else 0 */                                                  \
  X(profile) /* kernels write what profile_layout.h says */                                                                 \
  X(mask)    /* ranks that do not answer are left out (mask.h) */                                                           \
  X(bug)     /* emulator's planted faults (device/bugs.h); 0 on GPUs */

typedef struct epConfig {
#define X(name) uint32_t name;
  EP_CONFIG_FIELDS(X)
#undef X
} epConfig;

/* Why a kernel gave up. */
enum {
  EP_ERR_NONE = 0,
  EP_ERR_TIMEOUT,
  EP_ERR_ABORT,
  EP_ERR_MISMATCH,    /* of EP_ROWS_TAG */
  EP_ERR_APART,       /* the peer is in another operation: expected and seen are what both are in, kind_layout.h */
  EP_ERR_MASKED,      /* with masks, here and below: the peer timed out; the operation went on */
  EP_ERR_MASKED_BY,   /* the peer has masked this rank */
  EP_ERR_STALE_RECORD /* of the epoch `seen`; nothing was moved */
};
enum {
  EP_PHASE_NONE = 0,
  EP_PHASE_UPDATE_COUNTS,   /* waiting for a source's counts */
  EP_PHASE_UPDATE_META,     /* waiting for a source's meta rows */
  EP_PHASE_UPDATE_REPLY,    /* waiting for a destination's bases */
  EP_PHASE_GRID,            /* waiting for blocks of the same kernel */
  EP_PHASE_DISPATCH_CREDIT, /* waiting for a peer to free its staging */
  EP_PHASE_DISPATCH_ROWS,   /* waiting for a source's rows */
  EP_PHASE_COMBINE_CREDIT,
  EP_PHASE_COMBINE_ROWS,
  EP_PHASE_NETWORK,   /* waiting for the network to have read what was put */
  EP_PHASE_MASK_CLEAN /* waiting for a rank to meet */
};

/* Host-visible (mapped) memory, one a group. The kernel fills the fields, then sets `code` last (release). */
typedef struct epErrorRecord {
  uint32_t code;      /* EP_ERR_* ; first error wins */
  uint32_t operation; /* of EP_ERR_APART: its generation */
  uint32_t phase, peer, block;
  uint32_t expected, seen;
  uint32_t badIndexCode; /* 1: some topk_idx was outside [0, E) and not -1 */
  uint32_t badIndexToken, badIndexK, badIndexValue;
  uint32_t overflowNeeded; /* rows the last routing needs, when more than the budget; else 0 */
  uint32_t badIndexHigh;   /* upper word of the value */
  uint32_t pad[3];
} epErrorRecord;

/* Exact counts for the host (mapped memory, one a handle that asked). `generation` is written last (release). */
typedef struct epHostCounts {
  uint32_t generation; /* of the update, 0 = none yet */
  uint32_t total, totalPadded;
  uint32_t pad;
  /* then u32 perSource[R], perExpert[L], perExpertPadded[L] */
} epHostCounts;

/* Common to all kernels. Pointers are device addresses. */
typedef struct epGroupArgs {
  uint8_t *const *windows; /* [R] base address of each rank's window, mine included */
  uint8_t *scratch;        /* group scratch */
  epErrorRecord *error;    /* host-visible */
  uint32_t *abortWord;     /* host-visible: nonzero ends all waits */
  uint64_t timeoutNs;
  epWindowLayout window;
  epScratchLayout scratchLayout;
  uint32_t rank, maxTokens, stageRows, windowTopk;
} epGroupArgs;

/* In the word that says how wide a counter is (1: int64): it is added to, and counts are those without padding. */
#define EP_COUNTER_ADDS 2u

typedef struct epUpdateArgs {
  epGroupArgs group;
  epRecordLayout recordLayout;
  uint8_t *record;
  const void *topkIdx; /* [T][K] int32 or int64 */
  uint32_t tokens;     /* T */
  uint32_t blocks;     /* grid; all co-resident */
  uint32_t align;      /* of an expert's zone, 0 and 1: none */
  uint32_t budget;     /* rows of the output; 0: eager, no bound */
  /* caller's counters, NULL where not asked for; *Wide: int64 instead of int32 */
  void *expertCounters, *expertOffsets, *recvTotal;
  uint32_t expertCountersWide, expertOffsetsWide, recvTotalWide;
  uint32_t firstBlock; /* of the grid: an update inside a dispatch has its blocks behind the senders */
  epHostCounts *hostCounts;
} epUpdateArgs;

typedef struct epDispatchArgs {
  epGroupArgs group;
  epRecordLayout recordLayout;
  const uint8_t *record;
  const uint8_t *tokens;            /* [T][rowBytes] */
  const float *weights;             /* [T][K] when cfg.weights */
  const uint8_t *scales;            /* [T][scaleBytes] when cfg.scaleBytes */
  uint8_t *outTokens;               /* [capacity][rowBytes] */
  uint8_t *outScales;               /* [capacity][scaleBytes], or columns: see scaleColumn */
  uint64_t scaleColumn;             /* 0: row-major; else bytes from one 4-byte column of scales to the next */
  float *outWeights;                /* flat [capacity][K], expert-major [capacity]; when cfg.weights */
  int64_t *outIdx;                  /* flat [capacity][K] or NULL */
  uint32_t numTokens;               /* T */
  uint32_t capacity;                /* rows of the output */
  uint32_t fillTail;                /* flat, not eager: set idx and weights of rows past N to -1 and 0 */
  uint32_t globalIdx;               /* outIdx holds global ids instead of local ones */
  uint32_t zeroPad;                 /* expert-major: zero-fill padding rows */
  uint32_t pushBlocks, blocks;      /* blocks [0, pushBlocks) send, the rest run the epilogue */
  uint64_t outPeers[EP_MAX_DIRECT]; /* when cfg.direct: where the offsets that rank r tells begin (host/direct.c) */
  uint64_t outOffset;               /* that this rank tells, of its output */
  epUpdateArgs update;              /* when cfg.fused: by the first blocks of the epilogue, before it */
} epDispatchArgs;

typedef struct epCombineArgs {
  epGroupArgs group;
  epRecordLayout recordLayout;
  const uint8_t *record;
  const uint8_t *tokens;  /* expert outputs [capacity][rowBytes] */
  const float *weights;   /* flat [capacity][K], expert-major [capacity]; when cfg.weights */
  uint8_t *outTokens;     /* [T][rowBytes] */
  float *outWeights;      /* [T][K] when cfg.weights */
  const uint8_t *bias[2]; /* [T][rowBytes] each, the first cfg.bias of them */
  uint32_t numTokens, capacity;
  uint32_t pushBlocks, blocks; /* as in dispatch */
} epCombineArgs;

/* Shared memory of a block. Its first bytes hold a word on which the threads agree. */
#define EP_VERDICT_BYTES 16u
/* update: a histogram a warp; later, in the same place, what the gathering block knows of all sources */
EP_HD uint32_t epUpdateSmem(const epConfig *c) {
  uint32_t histograms = (c->threads / 32) * (c->experts + c->ranks);
  uint32_t gather = c->experts + 2 * c->ranks + 2 * (c->experts / c->ranks) + 2;
  return EP_VERDICT_BYTES + 4 * (histograms > gather ? histograms : gather);
}
/* dispatch and combine: the verdict word, the mbarriers between senders and their signaller, the tickets it deals, two mbarriers a sender, the
 * window addresses, rows and first flat rows of all ranks; then two stages a sender, so that one is loaded while the other is stored. The block's last
 * warp is the signaller and has no stage. */
#define EP_ROUNDS_A_FENCE 6u                    /* of a signaller, at most */
#define EP_SIGNAL_DEPTH (EP_ROUNDS_A_FENCE + 2) /* rounds that senders may be ahead of their signaller */
EP_HD uint32_t epSenders(uint32_t threads) { return threads / 32 - 1; }
/* 16 bytes stay free behind the mbarriers: compute-sanitizer's racecheck takes one for more than its 8 bytes */
#define EP_DEALT (2 * EP_SIGNAL_DEPTH) /* rounds whose tickets are kept */
EP_HD uint32_t epDealOffset(void) { return EP_VERDICT_BYTES + 16 * EP_SIGNAL_DEPTH; }
EP_HD uint32_t epBarOffset(void) { return epDealOffset() + 12 * EP_DEALT; }
/* behind the mbarriers: a word for each sender and round under way, how its chunk went */
EP_HD uint32_t epWentOffset(uint32_t senders) { return epBarOffset() + 16 * senders + 16; }
EP_HD uint32_t epTableOffset(uint32_t senders) {
  return (uint32_t)epAlignUp(epWentOffset(senders) + 4 * EP_DEALT * senders, 16);
}
EP_HD uint32_t epControlSmem(uint32_t senders, uint32_t ranks) {
  return (uint32_t)epAlignUp(epTableOffset(senders) + 16ull * ranks, 128);
}
/* what travels behind the token bytes of a row: weights, then scales */
EP_HD uint32_t epTailBytes(const epConfig *c) {
  return (c->weights ? epWeightBytes(c->topk) : 0) + (uint32_t)epAlignUp(c->scaleBytes, EP_ROW_ALIGN);
}
EP_HD uint32_t epRowBufferBytes(const epConfig *c) {
  return (uint32_t)epAlignUp((uint64_t)c->rowBytes + epTailBytes(c), EP_LINE);
}
EP_HD uint32_t epMoveSmem(const epConfig *c) {
  uint32_t senders = epSenders(c->threads);
  uint32_t move = epControlSmem(senders, c->ranks) + (c->bulk ? 2 * senders * c->stageBytes : 0);
  uint32_t update = c->fused ? epUpdateSmem(c) : 0;
  return move > update ? move : update;
}
/* Sets threads and stageBytes of a dispatch or combine from the shared memory of a block: at most `maxSenders` warps beside the
 * signaller. A stage of dispatch is a chunk of rows; one of combine holds pieces of up to K rows, as large as fits. Returns
 * the senders; 0: the rows do not fit. */
EP_HD uint32_t epMovePlan(int kernelId, epConfig *c, uint32_t smemPerBlock, uint32_t maxSenders) {
  uint32_t senders = maxSenders, stage = epChunkRows(c->rowBytes) * epRowBufferBytes(c);
  uint32_t least = kernelId == EP_KERNEL_DISPATCH ? stage : (uint32_t)epAlignUp((uint64_t)EP_ROW_ALIGN * c->topk, 128);
  while (senders && c->bulk && epControlSmem(senders, c->ranks) + 2ull * senders * least > smemPerBlock) senders--;
  if (senders && c->bulk && kernelId == EP_KERNEL_COMBINE) {
    uint32_t room = (smemPerBlock - epControlSmem(senders, c->ranks)) / (2 * senders) & ~127u;
    uint32_t most = c->topk * c->rowBytes;
    stage = room < most ? room : (uint32_t)epAlignUp(most, 128);
  }
  c->threads = ((senders ? senders : 1) + 1) * 32;
  c->stageBytes = c->bulk ? stage : 0;
  return senders;
}

#endif
