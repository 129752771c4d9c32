/* An NCCL that is none: ranks are threads of this process, windows are shared memory mapped where NCCL would map them.
 * Linked into the backend's test, which exports these names, and a library of its own for the tools. Versions 2.28 and
 * 2.30 (EP_FAKE_NCCL_230) tell peer addresses differently, and take other requests for device communicators. */
#include "fake_nccl.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef NCCL_EP_NO_CUDA_HEADERS
#define NCCL_EP_NO_CUDA_HEADERS /* NCCL's own names are declared below */
#endif
#include "cuda_nccl.h"
#include "nccl_abi.h"

/* What the library reads of it on 2.28 */
struct ncclWindow_vidmem {
  void *winHost;
  char *lsaFlatBase;
  int lsaRank, worldRank;
  uint32_t stride4G;
  void *user;
  size_t bytes;
};

world theWorld;
_Thread_local struct ncclComm *mine;
int failMemAlloc = -1, noSymmetric, wrongAddress, ginType = 2, failDevComm = -1;
fakeGin askedFor[RANKS];
atomic_int ncclLive;
static int memFd[RANKS] = {-1, -1};

int fakeNcclStart(void) {
  theWorld.flat = mmap(NULL, (size_t)RANKS << 32, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return theWorld.flat != MAP_FAILED;
}

#define API(type, name, ...)                                     \
  __attribute__((visibility("default"))) type name(__VA_ARGS__); \
  type name(__VA_ARGS__)

API(ncclResult_t, ncclGetVersion, int *version) {
#ifdef EP_FAKE_NCCL_230
  *version = 23007;
#else
  *version = 22809;
#endif
  return ncclSuccess;
}
API(const char *, ncclGetErrorString, ncclResult_t result) { return result ? "fake error" : "fine"; }
API(const char *, ncclGetLastError, ncclComm_t comm) { return comm ? "as the test wished" : ""; }
API(ncclResult_t, ncclCommGetAsyncError, ncclComm_t comm, ncclResult_t *error) {
  (void)comm;
  *error = ncclSuccess;
  return ncclSuccess;
}
/* A non-blocking communicator's answer, once a call. */
API(ncclResult_t, ncclCommCount, const ncclComm_t comm, int *count) {
  *count = comm->ranks;
  return ncclInProgress;
}
API(ncclResult_t, ncclCommCuDevice, const ncclComm_t comm, int *device) {
  *device = comm->rank;
  mine = comm;
  return ncclSuccess;
}
API(ncclResult_t, ncclCommUserRank, const ncclComm_t comm, int *rank) {
  *rank = comm->rank;
  return ncclSuccess;
}
API(epNcclTeam, ncclTeamLsa, ncclComm_t comm) {
  return comm->apart ? (epNcclTeam){1, 0, 1} : (epNcclTeam){comm->ranks, comm->rank, 1};
}
API(ncclResult_t, ncclAllGather, const void *send, void *receive, size_t count, ncclDataType_t type, ncclComm_t comm,
    cudaStream_t stream) {
  world *w = comm->world;
  (void)type, (void)stream;
  if (count > sizeof(w->slots[0])) return ncclInvalidArgument;
  memcpy(w->slots[comm->rank], send, count);
  if (comm->ranks > 1) pthread_barrier_wait(&w->barrier);
  for (int r = 0; r < comm->ranks; r++) memcpy((char *)receive + (size_t)r * count, w->slots[r], count);
  if (comm->ranks > 1) pthread_barrier_wait(&w->barrier);
  return ncclSuccess;
}
API(ncclResult_t, ncclMemAlloc, void **ptr, size_t bytes) {
  if (mine->rank == failMemAlloc) return ncclUnhandledCudaError;
  memFd[mine->rank] = memfd_create("window", 0);
  if (memFd[mine->rank] < 0 || ftruncate(memFd[mine->rank], WINDOW_BYTES) != 0 || bytes > WINDOW_BYTES)
    return ncclSystemError;
  void *p = mmap(NULL, WINDOW_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, memFd[mine->rank], 0);
  if (p == MAP_FAILED) return ncclSystemError;
  memset(p, 0xAB, WINDOW_BYTES);
  *ptr = p;
  ncclLive++;
  return ncclSuccess;
}
API(ncclResult_t, ncclMemFree, void *ptr) {
  munmap(ptr, WINDOW_BYTES);
  close(memFd[mine->rank]);
  ncclLive--;
  return ncclSuccess;
}
API(ncclResult_t, ncclCommWindowRegister, ncclComm_t comm, void *buffer, size_t bytes, ncclWindow_t *window,
    int flags) {
  *window = NULL;
  if (flags != 1 || bytes > WINDOW_BYTES) return ncclInvalidArgument;
  pthread_barrier_wait(&comm->world->barrier);
  if (noSymmetric) return ncclSuccess;
  size_t *used = &comm->world->used[comm->rank];
  char *at = comm->world->flat + ((size_t)comm->rank << 32) + *used;
  if (mmap(at, WINDOW_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memFd[comm->rank], 0) != at)
    return ncclSystemError;
  struct ncclWindow_vidmem *w = calloc(1, sizeof(*w));
  if (!w) return ncclSystemError;
  *w = (struct ncclWindow_vidmem){w, comm->world->flat + *used, comm->rank, comm->rank, 1, buffer, bytes};
  *used += WINDOW_BYTES;
  if (comm->apart) w->lsaFlatBase = at, w->lsaRank = 0;
  if (wrongAddress == 1) w->lsaFlatBase += 4096;
  if (wrongAddress == 2 && comm->rank == 1) {
    w->lsaFlatBase = at;
    w->stride4G = 0;
  }
  *window = w;
  ncclLive++;
  pthread_barrier_wait(&comm->world->barrier);
  return ncclSuccess;
}
API(ncclResult_t, ncclCommWindowDeregister, ncclComm_t comm, ncclWindow_t window) {
  (void)comm;
  free(window);
  ncclLive--;
  return ncclSuccess;
}
int fakeWindowOpen(struct ncclComm *comm, void *buffer, size_t bytes, ncclWindow_t *window) {
  return ncclCommWindowRegister(comm, buffer, bytes, window, EP_NCCL_WIN_COLL_SYMMETRIC);
}
int fakeWindowClose(struct ncclComm *comm, ncclWindow_t window) { return ncclCommWindowDeregister(comm, window); }
#ifdef EP_FAKE_NCCL_230
API(ncclResult_t, ncclGetLsaDevicePointer, ncclWindow_t window, size_t offset, int rank, void **out) {
  if (offset >= window->bytes) return ncclInvalidArgument;
  *out = window->lsaFlatBase + ((size_t)window->stride4G << 32) * (size_t)rank + offset;
  return ncclSuccess;
}
API(ncclResult_t, ncclWinGetUserPtr, ncclComm_t comm, ncclWindow_t window, void **out) {
  (void)comm;
  *out = window->user;
  return ncclSuccess;
}
#endif

#ifdef EP_FAKE_NCCL_230
API(ncclResult_t, ncclCommQueryProperties, ncclComm_t comm, void *properties) {
  epNcclProperties *p = properties;
  if (p->magic != EP_NCCL_MAGIC || p->size != EP_NCCL_PROPERTIES_BYTES(p->version)) return ncclInvalidUsage;
  p->deviceApi = true;
  p->ginType = p->railedGinType = ginType;
  p->lsaTeams = comm->apart ? comm->ranks : 1;
  return ncclSuccess;
}
#endif
API(ncclResult_t, ncclDevCommCreate, ncclComm_t comm, const void *request, void *devComm) {
#ifdef EP_FAKE_NCCL_230
  const epNcclRequest *q = request;
  int version = (int)q->version;
  askedFor[comm->rank] =
      (fakeGin){q->contexts, q->signals, q->connection, q->strongSignals, q->vaSignals, version, q->trafficClass};
  if (q->magic != EP_NCCL_MAGIC || q->size != EP_NCCL_REQUEST_BYTES(version) || q->forceEnable || q->barriers ||
      q->counters)
    return ncclInvalidUsage;
#else
  const epNcclRequest228 *q = request;
  int version = 22809;
  askedFor[comm->rank] = (fakeGin){q->contexts, q->signals, q->forceEnable, 1, 0, version, EP_NCCL_UNSET};
#endif
  pthread_barrier_wait(&comm->world->barrier);
  if (comm->rank == failDevComm) return ncclSystemError;
  memset(devComm, 0x5c, (size_t)EP_NCCL_COMM_BYTES(version));
  ncclLive++;
  return ncclSuccess;
}
API(ncclResult_t, ncclDevCommDestroy, ncclComm_t comm, const void *devComm) {
  (void)comm;
  if (*(const unsigned char *)devComm != 0x5c) return ncclInvalidArgument;
  ncclLive--;
  return ncclSuccess;
}

/* ---- What the tools call besides ----------------------------------------------------------------------------------- */

typedef struct ncclUniqueId {
  char bytes[128];
} ncclUniqueId;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int started;

static void start(void) { started = fakeNcclStart() && !pthread_barrier_init(&theWorld.barrier, NULL, RANKS); }

API(ncclResult_t, ncclGetUniqueId, ncclUniqueId *id) {
  memset(id, 0, sizeof(*id));
  return ncclSuccess;
}
API(ncclResult_t, ncclCommInitRank, ncclComm_t *comm, int ranks, ncclUniqueId id, int rank) {
  (void)id;
  pthread_once(&once, start);
  if (ranks != RANKS || !started) return ncclInvalidArgument;
  *comm = calloc(1, sizeof(**comm));
  if (!*comm) return ncclSystemError;
  **comm = (struct ncclComm){rank, ranks, &theWorld, 0};
  return ncclSuccess;
}
API(ncclResult_t, ncclCommDestroy, ncclComm_t comm) {
  free(comm);
  return ncclSuccess;
}
API(ncclResult_t, ncclCommAbort, ncclComm_t comm) { return ncclCommDestroy(comm); }

/* Sends and receives of a group must be the same bytes on both sides. */
static size_t sent[RANKS], wanted[RANKS];
static _Thread_local int depth;
API(ncclResult_t, ncclGroupStart, void) {
  depth++;
  return ncclSuccess;
}
API(ncclResult_t, ncclSend, const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
    cudaStream_t stream) {
  (void)stream;
  if (!from || type != ncclUint8 || peer == comm->rank || !depth) return ncclInvalidArgument;
  mine = comm;
  sent[comm->rank] = count;
  return ncclSuccess;
}
API(ncclResult_t, ncclRecv, void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
    cudaStream_t stream) {
  (void)stream;
  if (!to || type != ncclUint8 || peer == comm->rank || !depth) return ncclInvalidArgument;
  mine = comm;
  wanted[comm->rank] = count;
  return ncclSuccess;
}
API(ncclResult_t, ncclGroupEnd, void) {
  int same;
  if (!depth--) return ncclInvalidUsage;
  pthread_barrier_wait(&theWorld.barrier);
  same = sent[0] == wanted[1] && sent[1] == wanted[0];
  pthread_barrier_wait(&theWorld.barrier);
  return same ? ncclSuccess : ncclInvalidUsage;
}
