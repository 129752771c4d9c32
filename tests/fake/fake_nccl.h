/* An NCCL for two ranks of one process, as far as the library and the tools know NCCL: what tests see and spoil of it. */
#ifndef EP_TESTS_FAKE_NCCL_H_
#define EP_TESTS_FAKE_NCCL_H_

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

enum { RANKS = 2, WINDOW_BYTES = 1 << 20 };

typedef struct world {
  pthread_barrier_t barrier;
  char slots[RANKS][256];
  char *flat; /* each rank's windows 4 GiB apart */
  size_t used[RANKS];
} world;

struct ncclComm {
  int rank, ranks;
  world *world;
  int apart; /* each rank is a scale-up domain */
};

extern world theWorld;
extern _Thread_local struct ncclComm *mine; /* of this thread: NCCL's memory calls name no communicator */
extern int failMemAlloc, noSymmetric, wrongAddress;
extern atomic_int ncclLive; /* memory and windows */

/* A caller's windows, as ncclCommWindowRegister and ncclCommWindowDeregister: of memory that ncclMemAlloc gave last. */
struct ncclWindow_vidmem;
int fakeWindowOpen(struct ncclComm *comm, void *buffer, size_t bytes, struct ncclWindow_vidmem **window);
int fakeWindowClose(struct ncclComm *comm, struct ncclWindow_vidmem *window);

/* Device communicators: what the last one of each rank was asked for, what NCCL says of the network, and who fails. */
typedef struct fakeGin {
  int contexts, signals, connection, strong, va, version, trafficClass;
} fakeGin;
extern fakeGin askedFor[RANKS];
extern int ginType, failDevComm;

/* Address space for the windows; 0: there is none. */
int fakeNcclStart(void);

#endif
