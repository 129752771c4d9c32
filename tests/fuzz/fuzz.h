/* A fuzzed program: bytes decoded into calls of the host API, made alike by every rank of a small emulated world. What the
 * files of this folder share. */
#ifndef EP_TESTS_FUZZ_H_
#define EP_TESTS_FUZZ_H_

#include <stddef.h>
#include <stdint.h>

#include "nccl_ep.h"
#include "nccl_ep_ext.h"

#define FUZZ_MAX_RANKS 3
#define FUZZ_GROUPS 2
#define FUZZ_HANDLES 4
#define FUZZ_RESULTS 256u
#define FUZZ_WINDOW_BYTES 65536u

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* ---- Bytes: a call has FUZZ_CALL_BYTES of them and reads them round and round, so that calls stay where they are, on every rank,
 * however much one of them reads. */
#define FUZZ_CALL_BYTES 40u
typedef struct fuzzBytes {
  const uint8_t *at; /* of this call */
  unsigned count, read;
  int wild; /* this call may have wrong arguments */
} fuzzBytes;

static inline unsigned fuzzByte(fuzzBytes *b) { return b->count ? b->at[b->read++ % b->count] : 0; }
static inline unsigned fuzzPick(fuzzBytes *b, unsigned n) { return fuzzByte(b) % n; }
/* Whether this argument of a wild call is a wrong one. */
static inline int fuzzWrong(fuzzBytes *b) { return b->wild && fuzzPick(b, 12) == 0; }
/* The value, or another one. */
static inline unsigned fuzzValue(fuzzBytes *b, unsigned right) {
  static const unsigned others[] = {0, 1, 0x7fffffffu, 0x80000000u, 0xffffffffu, 33, 65552};
  unsigned n;
  if (!fuzzWrong(b)) return right;
  n = fuzzPick(b, 9);
  return n < 7 ? others[n] : n == 7 ? right + 1 : right - 1;
}

/* ---- What a rank has made. `old`: what the slot held before, for calls on destroyed objects. */
typedef struct fuzzGroup {
  ncclEpGroup_t group, old;
  int lowLatency;
  unsigned experts, tokens, budget, rowBytes, topk;
} fuzzGroup;

typedef struct fuzzHandle {
  ncclEpHandle_t handle, old;
  unsigned group; /* slot */
  ncclEpLayout_t layout;
  unsigned align, fixedTopk; /* 0: any */
  unsigned topk, tokens;     /* of the last update */
  void *memory;              /* the caller's, or NULL */
  size_t memoryBytes;
} fuzzHandle;

typedef struct fuzzBlock {
  struct fuzzBlock *next;
  void *ptr;
} fuzzBlock;

typedef struct fuzzRank {
  const uint8_t *data; /* the program */
  size_t size;
  fuzzBytes in;
  int ranks, rank, plain, tame; /* plain: one scale-up domain; tame: no call is wild */
  ncclComm_t comm;
  fuzzGroup groups[FUZZ_GROUPS];
  fuzzHandle handles[FUZZ_HANDLES];
  ncclEpTensor_t *heap; /* of ncclEpTensorAlloc, still alive */
  ncclWindow_t window;
  uint8_t *windowBase;
  size_t windowUsed;
  void *filled;      /* where the last tensor lies, NULL: where it says it lies is not to be written */
  fuzzBlock *device; /* emulated memory, until the end */
  fuzzBlock *host;   /* sources of copies, until the end */
  fuzzBlock *call;   /* descriptors and structs of the call being made, released right after it */
  uint8_t results[FUZZ_RESULTS];
  unsigned
      resultCount; /* until the group was lost or the fabric stuck: these may be told late, and are told at the end */
  int lost, traps; /* traps: a group is lost where rows are dropped */
  int blind;       /* the program did what the library cannot see and the emulator rightly reports */
} fuzzRank;

/* ---- memory.c */
/* Ends the process: the property that is violated. */
void fuzzFail(const fuzzRank *me, const char *format, ...) __attribute__((format(printf, 2, 3), noreturn));
void *fuzzKeep(fuzzBlock **list, size_t bytes); /* host memory of exactly that many bytes */
void fuzzRelease(fuzzBlock **list);
/* Emulated memory, every byte `fill`; -1: never written. */
void *fuzzDevice(fuzzRank *me, size_t bytes, int fill);
/* A copy of a struct on the heap that ends where its `size` says, or one whose head is wrong, or NULL. */
void *fuzzStruct(fuzzRank *me, const void *from, size_t bytes);
typedef struct fuzzShape {
  ncclDataType_t type;
  unsigned ndim;
  size_t sizes[3];
  size_t bytes; /* of its memory, 0: by its extents */
  int fill;     /* as of fuzzDevice */
} fuzzShape;
/* A descriptor: in ordinary memory or in a window, now and then a wrong one. */
ncclEpTensor_t *fuzzTensor(fuzzRank *me, const fuzzShape *shape);
size_t fuzzTypeBytes(ncclDataType_t type);
/* Takes a result: refusals have one line of text. Releases what the call was given. */
ncclResult_t fuzzResult(fuzzRank *me, const char *call, ncclResult_t result);

/* ---- calls.c */
/* Decodes one call and makes it. Collective calls that make the host wait follow from what all ranks have alike. */
void fuzzCall(fuzzRank *me);
void fuzzSync(fuzzRank *me);
void fuzzGroupEnd(fuzzRank *me, unsigned slot);

#endif
