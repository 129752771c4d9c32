/* NCCL as the library calls it, bound at run time to the copy that made the caller's communicator. The optional
 * functions came with later versions and are NULL before. */
#ifndef EP_HOST_CUDA_NCCL_H_
#define EP_HOST_CUDA_NCCL_H_

#include <stddef.h>

#include "nccl_ep.h"

#define EP_NCCL_MIN_VERSION 22800 /* symmetric windows with load/store access, and ncclTeamLsa */
#define EP_NCCL_WIN_COLL_SYMMETRIC 1

typedef struct epNcclTeam {
  int nRanks, rank, stride;
} epNcclTeam; /* ncclTeam_t */

/* X(slot, symbol, result, parameters) */
#define EP_NCCL_FUNCTIONS(X)                                                                                    \
  X(getVersion, ncclGetVersion, ncclResult_t, (int *version))                                                   \
  X(getErrorString, ncclGetErrorString, const char *, (ncclResult_t result))                                    \
  X(getLastError, ncclGetLastError, const char *, (ncclComm_t comm))                                            \
  X(commGetAsyncError, ncclCommGetAsyncError, ncclResult_t, (ncclComm_t comm, ncclResult_t * error))            \
  X(commCount, ncclCommCount, ncclResult_t, (const ncclComm_t comm, int *count))                                \
  X(commCuDevice, ncclCommCuDevice, ncclResult_t, (const ncclComm_t comm, int *device))                         \
  X(commUserRank, ncclCommUserRank, ncclResult_t, (const ncclComm_t comm, int *rank))                           \
  X(allGather, ncclAllGather, ncclResult_t,                                                                     \
    (const void *send, void *receive, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream)) \
  X(memAlloc, ncclMemAlloc, ncclResult_t, (void **ptr, size_t bytes))                                           \
  X(memFree, ncclMemFree, ncclResult_t, (void *ptr))                                                            \
  X(windowRegister, ncclCommWindowRegister, ncclResult_t,                                                       \
    (ncclComm_t comm, void *buffer, size_t bytes, ncclWindow_t *window, int flags))                             \
  X(windowDeregister, ncclCommWindowDeregister, ncclResult_t, (ncclComm_t comm, ncclWindow_t window))           \
  X(teamLsa, ncclTeamLsa, epNcclTeam, (ncclComm_t comm))

typedef struct epNccl {
#define X(slot, symbol, result, parameters) result(*slot) parameters;
  EP_NCCL_FUNCTIONS(X)
#undef X
  /* NCCL 2.29 and up */
  ncclResult_t (*getLsaDevicePointer)(ncclWindow_t window, size_t offset, int lsaRank, void **ptr);
  ncclResult_t (*winGetUserPtr)(ncclComm_t comm, ncclWindow_t window, void **ptr);
  /* for several scale-up domains; structures as in device/nccl_abi.h */
  ncclResult_t (*queryProperties)(ncclComm_t comm, void *properties);
  ncclResult_t (*devCommCreate)(ncclComm_t comm, const void *request, void *devComm);
  ncclResult_t (*devCommDestroy)(ncclComm_t comm, const void *devComm);
  int version; /* NCCL_VERSION_CODE */
  char path[1024];
} epNccl;

/* `mayLoad` 0: only a copy that the process has loaded counts, as must be for a communicator that exists. */
ncclResult_t epNcclOpen(int mayLoad, const epNccl **out);

#endif
