/* The provider under NCCL on real GPUs, without a kernel: NCCL's host RMA calls (2.30.7 and newer) put and signal between
 * ranks that NCCL_LSA_TEAM_SIZE=1 sets apart, so everything goes through the plugin. Each byte is checked; a bandwidth is
 * printed. Not run by the test suite.
 *
 *   NCCL_LSA_TEAM_SIZE=1 NCCL_GIN_TYPE=2 NCCL_RMA_PLUGIN=ep LD_LIBRARY_PATH=…/plugin/rma rma_gpu_check [RANKS [LIBNCCL]]
 *
 * More ranks than GPUs need NCCL_MULTI_RANK_GPU_ENABLE=1. */
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MAX_RANKS = 16, PART = 64 << 20, ROUNDS = 20, WAIT_S = 60, NOT_READY = 600, SYMMETRIC = 1 };

typedef struct {
  char bytes[128];
} uniqueId;
typedef struct {
  int count, peer, signal, context;
} waitFor; /* ncclWaitSignalDesc_t */

#define CUDA(X)                                                   \
  X(init, cuInit, (unsigned))                                     \
  X(deviceCount, cuDeviceGetCount, (int *))                       \
  X(deviceGet, cuDeviceGet, (int *, int))                         \
  X(retain, cuDevicePrimaryCtxRetain, (void **, int))             \
  X(setContext, cuCtxSetCurrent, (void *))                        \
  X(streamCreate, cuStreamCreate, (void **, unsigned))            \
  X(streamQuery, cuStreamQuery, (void *))                         \
  X(toDevice, cuMemcpyHtoD_v2, (uintptr_t, const void *, size_t)) \
  X(toHost, cuMemcpyDtoH_v2, (void *, uintptr_t, size_t))         \
  X(clear, cuMemsetD8_v2, (uintptr_t, unsigned char, size_t))
#define NCCL(X)                                                                                                     \
  X(getUniqueId, ncclGetUniqueId, (uniqueId *))                                                                     \
  X(commInit, ncclCommInitRank, (void **, int, uniqueId, int))                                                      \
  X(commDestroy, ncclCommDestroy, (void *))                                                                         \
  X(asyncError, ncclCommGetAsyncError, (void *, int *))                                                             \
  X(memAlloc, ncclMemAlloc, (void **, size_t))                                                                      \
  X(memFree, ncclMemFree, (void *))                                                                                 \
  X(windowRegister, ncclCommWindowRegister, (void *, void *, size_t, void **, int))                                 \
  X(windowDeregister, ncclCommWindowDeregister, (void *, void *))                                                   \
  X(groupStart, ncclGroupStart, (void))                                                                             \
  X(groupEnd, ncclGroupEnd, (void))                                                                                 \
  X(putSignal, ncclPutSignal, (const void *, size_t, int, int, void *, size_t, int, int, unsigned, void *, void *)) \
  X(signal, ncclSignal, (int, int, int, unsigned, void *, void *))                                                  \
  X(waitSignal, ncclWaitSignal, (int, waitFor *, void *, void *))
static struct {
#define X(slot, symbol, parameters) int(*slot) parameters;
  CUDA(X) NCCL(X)
#undef X
} call;

typedef struct {
  atomic_int ready;
  uniqueId id;
} board;

static uint32_t host[PART / 4];

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static int bindAll(const char *nccl) {
  void *cuda = dlopen("libcuda.so.1", RTLD_NOW), *lib = cuda ? dlopen(nccl, RTLD_NOW) : NULL, *symbol;
  if (!lib) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
#define X(slot, name, parameters)                                              \
  symbol = dlsym(from, #name);                                                 \
  if (!symbol) {                                                               \
    fprintf(stderr, "%s is missing: NCCL 2.30.7 or newer is needed\n", #name); \
    return 1;                                                                  \
  }                                                                            \
  memcpy(&call.slot, &symbol, sizeof(symbol));
  void *from = cuda;
  CUDA(X)
  from = lib;
  NCCL(X)
#undef X
  return 0;
}

#define MUST(condition)                                                             \
  do {                                                                              \
    if (!(condition)) {                                                             \
      fprintf(stderr, "rank %d, line %d: %s failed\n", rank, __LINE__, #condition); \
      return 1;                                                                     \
    }                                                                               \
  } while (0)

static int finish(int rank, void *comm, void *stream) {
  double deadline = now() + WAIT_S;
  int error = 0, rc;
  while ((rc = call.streamQuery(stream)) == NOT_READY) {
    MUST(call.asyncError(comm, &error) == 0);
    MUST(error == 0);
    MUST(now() < deadline);
  }
  MUST(rc == 0);
  return 0;
}

static uint32_t patternOf(int from, int to, int round, size_t at) {
  return (uint32_t)at * 2654435761u + (uint32_t)(from * 31 + to * 17 + round * 7919);
}

static int rankBody(int rank, int ranks, board *shared, const char *nccl) {
  static const size_t sizes[] = {4, 4096, 1 << 20, PART};
  int devices = 0, device = 0;
  void *context = NULL, *comm = NULL, *window = NULL, *memory = NULL, *stream = NULL;
  size_t bytes = (size_t)2 * (size_t)ranks * PART;
  waitFor all[MAX_RANKS];
  MUST(bindAll(nccl) == 0);
  MUST(call.init(0) == 0 && call.deviceCount(&devices) == 0 && devices > 0);
  MUST(call.deviceGet(&device, rank % devices) == 0 && call.retain(&context, device) == 0);
  MUST(call.setContext(context) == 0);
  if (rank == 0) {
    MUST(call.getUniqueId(&shared->id) == 0);
    shared->ready = 1;
  }
  while (!shared->ready) usleep(1000);
  MUST(call.commInit(&comm, ranks, shared->id, rank) == 0);
  MUST(call.streamCreate(&stream, 1) == 0);
  MUST(call.memAlloc(&memory, bytes) == 0);
  MUST(call.windowRegister(comm, memory, bytes, &window, SYMMETRIC) == 0 && window);
  uintptr_t base = (uintptr_t)memory;
  int peers = 0;
  for (int peer = 0; peer < ranks; peer++)
    if (peer != rank) all[peers++] = (waitFor){1, peer, 0, 0};
  for (int round = 0; round < ROUNDS; round++) {
    size_t size = sizes[round % 4];
    for (int peer = 0; peer < ranks; peer++) {
      for (size_t i = 0; i < size / 4; i++) host[i] = patternOf(rank, peer, round, i);
      MUST(call.toDevice(base + (size_t)peer * PART, host, size) == 0);
    }
    MUST(call.clear(base + (size_t)ranks * PART, 0, (size_t)ranks * PART) == 0);
    /* Everybody's memory is ready; then the puts. */
    for (int i = 0; i < peers; i++) MUST(call.signal(all[i].peer, 0, 0, 0, comm, stream) == 0);
    MUST(call.waitSignal(peers, all, comm, stream) == 0 && finish(rank, comm, stream) == 0);
    double start = now();
    MUST(call.groupStart() == 0);
    for (int i = 0; i < peers; i++)
      MUST(call.putSignal((void *)(base + (size_t)all[i].peer * PART), size, 0, all[i].peer, window,
                          (size_t)(ranks + rank) * PART, 0, 0, 0, comm, stream) == 0);
    MUST(call.groupEnd() == 0);
    MUST(call.waitSignal(peers, all, comm, stream) == 0 && finish(rank, comm, stream) == 0);
    double took = now() - start;
    for (int i = 0; i < peers; i++) {
      MUST(call.toHost(host, base + (size_t)(ranks + all[i].peer) * PART, size) == 0);
      for (size_t k = 0; k < size / 4; k++) MUST(host[k] == patternOf(all[i].peer, rank, round, k));
    }
    if (rank == 0 && round >= ROUNDS - 4)
      printf("%9zu bytes to each of %d peers: %.1f us, %.2f GB/s out of a rank, all right\n", size, peers, took * 1e6,
             1e-9 * (double)size * peers / took);
  }
  MUST(call.windowDeregister(comm, window) == 0);
  MUST(call.commDestroy(comm) == 0);
  MUST(call.memFree(memory) == 0);
  return 0;
}

int main(int argc, char **argv) {
  int ranks = argc > 1 ? (int)strtol(argv[1], NULL, 10) : 2, failed = 0;
  board *shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (ranks < 2 || ranks > MAX_RANKS || shared == MAP_FAILED) {
    fprintf(stderr, "usage: rma_gpu_check [RANKS, 2 to %d [path of libnccl]]\n", MAX_RANKS);
    return 2;
  }
  for (int rank = 0; rank < ranks; rank++) {
    pid_t pid = fork();
    if (pid < 0) return 2;
    if (pid == 0) {
      alarm(5 * WAIT_S);
      int rc = rankBody(rank, ranks, shared, argc > 2 ? argv[2] : "libnccl.so.2");
      fflush(NULL);
      _exit(rc);
    }
  }
  for (int rank = 0; rank < ranks; rank++) {
    int status = 1;
    wait(&status);
    failed += status != 0;
  }
  if (failed)
    printf("%d ranks FAILED\n", failed);
  else
    printf("all ranks passed\n");
  return failed != 0;
}
