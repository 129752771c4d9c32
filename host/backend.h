/* The one table through which the host runtime reaches a machine. CUDA + NCCL fill it (host/cuda_backend.c), the
 * emulator fills it (emu/, through the module's entry point); every slot is always callable: backendUnsupported*()
 * answers for what a backend does not have, so callers never test for NULL.
 *
 * Every function returns ncclSuccess or an error for which it has already set the thread's last error (epFail). All
 * pointers named `dev` are device addresses; `stream` is the caller's cudaStream_t. */
#ifndef EP_HOST_BACKEND_H_
#define EP_HOST_BACKEND_H_

#include <stddef.h>
#include <stdint.h>

#include "hybrid_layout.h"
#include "links.h"
#include "nccl_ep.h"
#include "nccl_ep_ext.h"

#define EP_TIMEOUT_NS 100000000000ull     /* of a wait for other ranks, unless the caller says otherwise */
#define EP_HOST_PATIENCE_NS 2000000000ull /* and of one on the host at least */

typedef struct epBackend epBackend; /* one object per group */
typedef struct epWindow epWindow;   /* a registered symmetric window; backend's own */
typedef struct epKernel epKernel;   /* a loaded kernel; backend's own, lives as long as the backend object */

typedef struct epTopology {
  int ranks, rank;
  int scaleUpRanks, scaleUpRank;   /* U and u */
  int scaleOutRanks, scaleOutRank; /* O and o */
  int device;                      /* CUDA ordinal; -1 on the emulated fabric */
  int arch;                        /* 10 * major + minor, for example 90; 0 on the emulated fabric */
  int numSms;
  int smemPerBlock; /* largest dynamic shared memory of a block, bytes */
  int gin;          /* there is a network between scale-up domains that kernels can use */
  int ginProxy; /* and a thread of the host works on what they ask for, an operation of a context and peer at a turn */
  int bulkCopies;   /* kernels may use bulk copies (SM90 and up; the emulator's) */
  epPciAddress pci; /* of a CUDA device */
  /* Of one domain, set by the group; 0: not known. What a GPU's stores reach over its links to the others, and what its memory states. */
  double linkGbs, memoryGbs;
  epLinkPlan plan; /* several domains: what the links want, set by the group; zeros: defaults */
} epTopology;

typedef struct epLaunch {
  unsigned blocks, threads, smemBytes;
  const void *args; /* one struct by value */
  size_t argBytes;
} epLaunch;

typedef struct epBackendOps {
  const char *name; /* "cuda" or "emu" */
  void (*destroy)(epBackend *be);
  ncclResult_t (*topology)(epBackend *be, epTopology *out);
  /* Collective, host-blocking: every rank gives `bytes` and receives all, in rank order. */
  ncclResult_t (*allGather)(epBackend *be, const void *mine, void *all, size_t bytes);
  ncclResult_t (*alloc)(epBackend *be, void **dev, size_t bytes);
  ncclResult_t (*free)(epBackend *be, void *dev);
  /* Pinned memory that kernels and host both read and write; *dev is its device address. Zero-filled. */
  ncclResult_t (*allocMapped)(epBackend *be, void **host, void **dev, size_t bytes);
  ncclResult_t (*freeMapped)(epBackend *be, void *host);
  /* Collective. Allocates and registers one symmetric window, zero-filled on every rank before any rank returns.
   * `peers` receives R base addresses usable from this rank's kernels (its own included). Only peers of the scale-up
   * domain are non-NULL. */
  ncclResult_t (*windowCreate)(epBackend *be, size_t bytes, epWindow **out, void **peers);
  ncclResult_t (*windowDestroy)(epBackend *be, epWindow *window);
  /* Resolves (win_hdl, win_offset) of a window-backed tensor of `bytes` to this rank's local device address.
   * `shared`: NULL, or receives where the tensor lies beside the windows of windowCreate: as far from peers[own] as it
   * lies from peers[r] of any rank r's kernels that want to reach rank own's tensor, whichever window it is in. A window
   * that the tensor overruns is refused where the backend knows its size. Possible while streams are captured. */
  ncclResult_t (*windowAddress)(epBackend *be, ncclWindow_t win, uint64_t offset, uint64_t bytes, void **dev,
                                void **shared);
  /* Compiles (or finds) and loads one kernel. Never called while capturing. */
  ncclResult_t (*kernel)(epBackend *be, int kernelId, const epConfig *config, epKernel **out);
  ncclResult_t (*launch)(epBackend *be, epKernel *kernel, const epLaunch *launch, cudaStream_t stream);
  ncclResult_t (*memset)(epBackend *be, void *dev, int value, size_t bytes, cudaStream_t stream);
  ncclResult_t (*copyToDevice)(epBackend *be, void *dev, const void *host, size_t bytes); /* synchronous */
  ncclResult_t (*copyToHost)(epBackend *be, void *host, const void *dev, size_t bytes);   /* synchronous */
  ncclResult_t (*synchronize)(epBackend *be, cudaStream_t stream);
  ncclResult_t (*isCapturing)(epBackend *be, cudaStream_t stream, int *capturing);
  /* A stream of the highest priority that never waits for the default stream, and events without timing. The caller's events are as
   * good as those made here; waiting for one that was never recorded is no wait. Possible while capturing. */
  ncclResult_t (*streamCreate)(epBackend *be, cudaStream_t *stream);
  ncclResult_t (*streamDestroy)(epBackend *be, cudaStream_t stream);
  ncclResult_t (*eventCreate)(epBackend *be, cudaEvent_t *event);
  ncclResult_t (*eventDestroy)(epBackend *be, cudaEvent_t event);
  ncclResult_t (*eventRecord)(epBackend *be, cudaEvent_t event, cudaStream_t stream);
  ncclResult_t (*streamWait)(epBackend *be, cudaStream_t stream, cudaEvent_t event);
  /* True when `dev` is memory that kernels of this rank can address (best effort; unknown answers 1). */
  ncclResult_t (*isDeviceAddress)(epBackend *be, const void *dev, int *yes);
  /* Lets a wait on the host give time to whoever makes progress (the emulator runs kernels here). Called in polling
   * loops; `deadlineNs` of CLOCK_MONOTONIC bounds it. */
  void (*relax)(epBackend *be, uint64_t deadlineNs);
  /* Collective. The network between scale-up domains for one window, with as many contexts, and zeroed signals in each,
   * on every rank; it goes with the window. *aborted (device memory): kernels set it when a wait for the network itself is to
   * end. */
  ncclResult_t (*ginCreate)(epBackend *be, epWindow *window, uint32_t contexts, uint32_t signals, uint32_t *aborted,
                            epGin *out);
} epBackendOps;

struct epBackend {
  const epBackendOps *ops;
  unsigned trafficClass; /* that ginCreate asks the network for, plus 1; 0: the communicator's */
  uint64_t patienceNs;   /* of the host's waits for other ranks, at most */
};

/* Every slot answers "not supported" (or, for questions, the harmless answer): for a backend to start from. */
extern const epBackendOps epBackendUnsupported;

/* Picks the backend that the communicator belongs to. */
ncclResult_t epBackendOpen(ncclComm_t comm, const ncclEpAllocConfig_t *alloc, epBackend **out);
/* How long the host waits for other ranks from here on: not less than hosts may be apart for reasons that are none of the kernels'. */
void epBackendPatience(epBackend *be, uint64_t ns);
/* NCCL_EP_TIMEOUT_MS, or its default. */
uint64_t epBackendTimeout(void);

/* Exported by the emulator's module (libnccl_ep_emu.so), found with dlsym; `version` guards against a stale module. */
#define EP_EMU_MODULE_VERSION 5
typedef struct epEmuModule {
  unsigned version;
  int (*ownsComm)(ncclComm_t comm);
  ncclResult_t (*open)(ncclComm_t comm, epBackend **out);
  /* the rest of nccl_ep_ext.h's ncclEpEmu* calls, same contracts */
  ncclResult_t (*commInitAll)(ncclComm_t *comms, int scaleOut, int scaleUp, const ncclEpEmuOptions_t *options);
  ncclResult_t (*commDestroy)(ncclComm_t comm);
  ncclResult_t (*malloc)(ncclComm_t comm, void **ptr, size_t bytes, const char *name);
  ncclResult_t (*free)(ncclComm_t comm, void *ptr);
  ncclResult_t (*memcpy)(ncclComm_t comm, void *dst, const void *src, size_t bytes, cudaStream_t stream);
  ncclResult_t (*memset)(ncclComm_t comm, void *dst, int value, size_t bytes, cudaStream_t stream);
  ncclResult_t (*streamCreate)(ncclComm_t comm, cudaStream_t *stream);
  ncclResult_t (*streamDestroy)(ncclComm_t comm, cudaStream_t stream);
  ncclResult_t (*streamSynchronize)(ncclComm_t comm, cudaStream_t stream);
  ncclResult_t (*eventCreate)(ncclComm_t comm, cudaEvent_t *event);
  ncclResult_t (*eventDestroy)(ncclComm_t comm, cudaEvent_t event);
  ncclResult_t (*eventRecord)(ncclComm_t comm, cudaEvent_t event, cudaStream_t stream);
  ncclResult_t (*streamWaitEvent)(ncclComm_t comm, cudaStream_t stream, cudaEvent_t event);
  ncclResult_t (*windowRegister)(ncclComm_t comm, void *buffer, size_t bytes, ncclWindow_t *window);
  ncclResult_t (*windowDeregister)(ncclComm_t comm, ncclWindow_t window);
  ncclResult_t (*report)(ncclComm_t comm, ncclEpEmuReport_t *report);
  ncclResult_t (*streamDelay)(ncclComm_t comm, cudaStream_t stream, unsigned long long ns);
  ncclResult_t (*rankStop)(ncclComm_t comm, int stopped, unsigned long long after);
} epEmuModule;
/* `fail` is epFail with the line already formatted: the module has no other way to the library's last error. */
typedef ncclResult_t (*epFailLineFn)(ncclResult_t code, const char *line);
typedef const epEmuModule *(*epEmuModuleFn)(epFailLineFn fail);
#define EP_EMU_MODULE_SYMBOL "ncclEpEmuModule"

#endif
