/* Ranks for the provider's tests: processes (or threads) that load the plugin as NCCL does, with a bootstrap in shared
 * memory, in one network namespace or in two. */
#ifndef EP_TESTS_RMA_WORLD_H_
#define EP_TESTS_RMA_WORLD_H_

#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>

#include "abi.h"

enum { MAX_RANKS = 4, SIGNALS = 4096 };
typedef enum { HOST, GPU, GPU_PRIVATE } memoryKind; /* private: not exported, as NCCL's signals are */

typedef struct {
  int ranks;
  memoryKind memory;
  const char *env[8]; /* NAME=VALUE, for every rank */
  int timeoutMs;      /* NCCL_EP_RMA_TIMEOUT_MS; 0: 10 s */
  int namespaces;     /* ranks stand by turns in this many network namespaces: 1 or 2 */
  int spoiled;        /* rank whose handle is changed on its way to rank 0, less one; 0: none */
  int threads;        /* ranks are threads of one process */
} worldSetup;

typedef struct {
  _Atomic unsigned arrived, round;
  _Atomic int failed;
  atomic_long pids[MAX_RANKS];
  atomic_int flags[MAX_RANKS];
  char handles[MAX_RANKS][EP_RMA_HANDLE_BYTES];
} worldShared;

typedef struct {
  const worldSetup *setup;
  worldShared *shared;
  int rank, ranks;
  uint64_t dice;
  const epRmaTable14 *t;
  void *listen, *coll, *ctx;
  int contexts;
  char *data; /* window `window` */
  size_t bytes;
  uint64_t *signals; /* window `signal`, SIGNALS words */
  void *window, *signal;
} rankOf;

typedef int (*rankBody)(rankOf *me); /* 0: all is right */

/* -1: this kernel allows no network namespaces; else how many ranks failed or did not end in time. */
int worldRun(const worldSetup *setup, rankBody body);
void worldBarrier(rankOf *me);

/* Lines of the plugin's warnings so far in this process, and the last one. */
extern _Atomic int worldWarnings;
extern char worldLastWarning[512];
const epRmaTable14 *worldTable14(void);
const epRmaTable13 *worldTable13(const char *symbol);
const void *worldFake(const char *symbol); /* of the CUDA driver that is none */

unsigned rollOf(rankOf *me);
void napOf(rankOf *me); /* mostly nothing, at times some 100 us */
void *memoryOf(rankOf *me, size_t bytes, memoryKind kind);
void freeOf(void *memory, size_t bytes, memoryKind kind);

/* Connect, contexts, one data and one signal window; all ranks are there when it returns. */
int connectRank(rankOf *me);
int openRank(rankOf *me, int contexts, size_t bytes);
int closeRank(rankOf *me);
/* Until the request is done. */
int finish(rankOf *me, void *request);
int waitSignal(rankOf *me, int index, uint64_t value);

#define CHECK(condition)                                                                                           \
  do {                                                                                                             \
    if (!(condition)) {                                                                                            \
      fprintf(stderr, "%s:%d: rank %d: %s is false; last warning: %s\n", __FILE__, __LINE__, me->rank, #condition, \
              worldLastWarning);                                                                                   \
      return 1;                                                                                                    \
    }                                                                                                              \
  } while (0)

#endif
