/* Ranks of an emulated world as threads of one process, and the steps of one MoE layer with all checks: what arrives is
 * compared with the reference, sums with the closed form that +-1 data has, outputs with guard bands around them. */
#ifndef EP_TESTS_HARNESS_H_
#define EP_TESTS_HARNESS_H_

#include <stddef.h>
#include <stdint.h>

#include "nccl_ep.h"
#include "nccl_ep_ext.h"
#include "reference.h"

#define EP_TEST_MAX_RANKS 64

typedef struct epTestRank epTestRank;

/* ---- Worlds ---------------------------------------------------------------------------------------------------------
 * EP_TEST_DOMAINS in the environment: so many scale-up domains, for worlds whose ranks it divides. */

typedef struct epTestWorld {
  int ranks;
  unsigned sms;            /* resident blocks a rank, 0: the default */
  unsigned long long seed; /* of the schedule */
  unsigned bug;            /* planted fault */
  unsigned seconds;        /* wall-clock limit of a run, 0: 120 */
  void *arg;               /* for the body */
  unsigned faults;         /* OUT: reports of the emulator */
  char report[4096];       /* OUT */
} epTestWorld;

struct epTestRank {
  epTestWorld *world;
  int ranks, rank;
  ncclComm_t comm;
  ncclEpGroup_t group;
  void *arg;
  unsigned failures;
  char first[600]; /* what failed first */
};

/* Runs `body` on every rank and fails the running test when a rank noted a failure or the emulator reported one. */
void epWorldRun(epTestWorld *world, void (*body)(epTestRank *me));
/* The same, but only notes: returns the number of failures, with the first one in `text`. */
unsigned epWorldTry(epTestWorld *world, void (*body)(epTestRank *me), char *text, size_t textBytes);

/* Notes a failure of this rank; never ends the thread, so that the other ranks are not left waiting. */
void epNote(epTestRank *me, const char *file, int line, const char *format, ...) __attribute__((format(printf, 4, 5)));
#define EXPECT(me, condition, ...)                                 \
  do {                                                             \
    if (!(condition)) epNote(me, __FILE__, __LINE__, __VA_ARGS__); \
  } while (0)
#define EXPECT_OK(me, call)                                                                          \
  do {                                                                                               \
    ncclResult_t result_ = (call);                                                                   \
    if (result_ != ncclSuccess)                                                                      \
      epNote(me, __FILE__, __LINE__, "%s: %d: %s", #call, (int)result_, ncclEpGetLastErrorString()); \
  } while (0)
/* The call fails with this code, and its line contains every word (separated by |). */
void epExpectError(epTestRank *me, const char *file, int line, const char *call, ncclResult_t got, ncclResult_t want,
                   const char *words);
#define EXPECT_ERROR(me, call, want, words) epExpectError(me, __FILE__, __LINE__, #call, (call), want, words)

/* ---- Tensors
 * --------------------------------------------------------------------------------------------------------- */

typedef struct epTestTensor {
  ncclEpTensor_t t;
  size_t sizes[3];
  unsigned char *base; /* with guard bands; NULL when there are no elements */
  size_t bytes;        /* without guard bands */
} epTestTensor;

size_t epTestTypeBytes(ncclDataType_t type);
/* Emulated memory with guard bands, all 0xAB. No elements: no memory, data NULL. */
void epTensorMake(epTestRank *me, epTestTensor *t, ncclDataType_t type, unsigned ndim, size_t a, size_t b,
                  const char *name);
void epTensorFill(epTestRank *me, epTestTensor *t, const void *host); /* whole tensor */
void epTensorCheckGuards(epTestRank *me, const epTestTensor *t, const char *name);
void epTensorFree(epTestRank *me, epTestTensor *t);

/* ---- One layer
 * ------------------------------------------------------------------------------------------------------- */

typedef struct epCase {
  uint32_t ranks, experts, topk, hidden, maxTokens;
  ncclEpLayout_t layout;
  ncclDataType_t type;      /* of dispatched rows */
  ncclDataType_t indexType; /* ncclInt64 or ncclInt32; 0: ncclInt64 */
  uint32_t align;
  uint32_t budget;          /* 0: eager */
  uint32_t scales;          /* S: elements of a row of scales, 0: none */
  ncclDataType_t scaleType; /* of them */
  int scaleColumns;         /* dispatch writes them in columns */
  int noZeroPad;            /* padding rows stay as they are */
  uint64_t windows; /* bit r: rank r's tokens and weights of dispatch, and its output tokens, are window-backed */
  ncclEpZeroCopyMode_t zeroCopy;
  uint32_t groupTopk;
  int single; /* combine sums nothing on the way */
  uint32_t maxSms;
  uint64_t timeoutNs;
  int masks;
} epCase;

/* One batch's routing on all ranks, with what it must give. */
typedef struct epRound {
  const epCase *c;
  uint32_t tokens[EP_TEST_MAX_RANKS];
  int64_t *idx[EP_TEST_MAX_RANKS]; /* [T][topk] */
  epRef *ref, *flat;
  int gone;   /* rank whose rows are empty and whose sums are left out, plus one; 0: none */
  int ups;    /* and the ranks of a scale-up domain, for whose other domains it stands; 0: there is one */
  int silent; /* a rank that cannot tell its domain the places at ranks of its index, plus one */
} epRound;

/* What `source` sends to `owner` is lost with the rank that is gone. */
int epRoundLost(const epRound *round, int source, int owner);

/* Routing from a function; frees with epRoundFree. */
typedef int64_t (*epPickFn)(const epCase *c, uint32_t rank, uint32_t token, uint32_t k, void *arg);
void epRoundMake(epRound *round, const epCase *c, const uint32_t *tokens, epPickFn pick, void *arg);
void epRoundFree(epRound *round);
/* Distinct experts drawn at random (seed in *(uint64_t *)arg), every eighth entry -1. */
int64_t epPickRandom(const epCase *c, uint32_t rank, uint32_t token, uint32_t k, void *arg);

/* What one rank holds for a handle and its last outputs. */
typedef struct epRun {
  const epRound *round;
  ncclEpHandle_t handle;
  epTestTensor topk, x, w, scales, out, outW, outIdx, outScales, y, expertCounters, expertOffsets, total;
  size_t scaleStride;                                   /* between columns of outScales, 0: row-major */
  ncclWindow_t outWindows[2], xWindows[2], wWindows[2]; /* over the memory of out, x and w */
  unsigned salt;       /* varies what may be varied: counter types, slack of outputs, what follows a borrowing update */
  int borrow;          /* updates borrow topk_idx; the same on all ranks */
  unsigned queuePairs; /* num_qps of dispatches and forward combines */
  int staged;          /* dispatches are sent and completed by two calls */
  unsigned long long delayNs; /* the next dispatch comes so much later */
  int unchecked;              /* the last one's routing is not there yet */
} epRun;

void epGroupConfigOf(const epCase *c, ncclEpGroupConfig_t *config);
void epGroupMake(epTestRank *me, const epCase *c);
void epGroupFree(epTestRank *me);
void epRunUpdate(epTestRank *me, epRun *run, const epRound *round); /* creates the handle at the first call */
void epRunDispatch(epTestRank *me, epRun *run);                     /* forward, checked */
void epRunCombine(epTestRank *me, epRun *run);                      /* forward, identity experts, checked */
void epRunBackward(epTestRank *me, epRun *run);                     /* both backward passes, checked */
void epRunFree(epTestRank *me, epRun *run);
void epExpectNoAsyncError(epTestRank *me);

/* All rounds one after the other on one group and one handle, forward and backward, under `schedules` seeds. */
void epCaseRun(const epCase *c, const epRound *rounds, unsigned count, unsigned schedules);
/* The same for one round with random distinct experts. */
void epCaseRunRandom(const epCase *c, const uint32_t *tokens, unsigned schedules);

#endif
