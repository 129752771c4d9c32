/* One small interface over both kinds of machine that the tools run on: ranks with their communicator, memory, stream
 * and clock, on GPUs (one process with a thread per GPU, or one process per rank) or on the emulated fabric. */
#ifndef EP_TOOLS_FABRIC_H_
#define EP_TOOLS_FABRIC_H_

#include <stddef.h>
#include <stdint.h>

#include "nccl_ep.h"
#include "nccl_ep_ext.h"

typedef struct epFabric epFabric;

typedef enum { EP_FABRIC_AUTO = 0, EP_FABRIC_CUDA, EP_FABRIC_EMU } epFabricKind;

typedef struct epFabricOptions {
  epFabricKind kind;
  unsigned scaleOut, scaleUp; /* 0: all GPUs found; the emulated fabric needs both */
  unsigned long long seed;    /* of the emulated schedule */
  unsigned emuSms, emuBug;
  unsigned emuPlain;  /* no weak memory */
  unsigned emuNoBulk; /* kernels as on SM80 */
  unsigned timeoutMs; /* of the group; the host waits a little longer */
} epFabricOptions;

#define EP_PORT_EVENTS 8

/* One rank's end. Used by one thread at a time; every function returns 0, or -1 after telling what went wrong. */
typedef struct epPort {
  epFabric *fabric;
  int rank, ranks;
  int cuda; /* 0: emulated */
  int device;
  ncclComm_t comm;
  cudaStream_t stream;
  cudaEvent_t done; /* for the caller */
  char name[160];   /* device, for people */
  char bus[32];     /* its PCI bus id; empty: emulated */
  /* backend's own */
  void *context;
  void *events[EP_PORT_EVENTS];
  double hostTime[EP_PORT_EVENTS];
  uint32_t holds;
  struct epMeet *meet; /* meet.h; NULL until it is used */
} epPort;

/* EP_FABRIC_AUTO becomes what is there: GPUs if any, else the emulated fabric. reason: why there are no GPUs. */
epFabricKind epFabricChoose(epFabricKind wanted, int *gpus, const char **reason);
/* Ranks that a launcher's variables ask for, or 0 when this process is alone; -1 after telling what is wrong. */
int epFabricLaunchedRanks(void);

int epFabricOpen(const epFabricOptions *options, epFabric **out);
void epFabricClose(epFabric *fabric);
int epFabricRanks(const epFabric *fabric);
int epFabricIsCuda(const epFabric *fabric);
const char *epFabricVersions(const epFabric *fabric);
/* Runs `body` for every rank of this process, each on its own thread. -1 when any of them failed; a body that returns
 * -1 wakes the others from their barriers. */
int epFabricRun(epFabric *fabric, int (*body)(epPort *port, void *context), void *context);

int epPortAlloc(epPort *port, void **device, size_t bytes, const char *name);
void epPortFree(epPort *port, void *device);
/* Memory that peers may store into: registered as a window of the communicator. Collective, with the same bytes. */
int epPortAllocWindow(epPort *port, void **device, size_t bytes, const char *name, ncclWindow_t *window);
int epPortFreeWindow(epPort *port, void *device, ncclWindow_t window);
/* Both end when the work is done. Either side of a copy may be host memory. */
int epPortCopy(epPort *port, void *to, const void *from, size_t bytes);
int epPortFill(epPort *port, void *device, int value, size_t bytes);
/* In stream order; device memory only. */
int epPortCopyAsync(epPort *port, void *to, const void *from, size_t bytes);
/* Waits for the stream, but not for ever. */
int epPortSync(epPort *port);

/* Marks a point of the stream, and the microseconds between two of them after epPortSync. The emulated fabric has no
 * clock of its own: there a mark waits for the stream and takes the host's time. */
int epPortMark(epPort *port, unsigned event);
int epPortElapsed(epPort *port, unsigned from, unsigned to, double *microseconds);

/* Wakes the other ranks of this process from their barriers, with an error: this rank will not come. */
void epPortAbort(epPort *port);

/* Ranks' meeting points. */
int epPortBarrier(epPort *port);
int epPortGather(epPort *port, const void *mine, void *all, size_t bytes);
/* What follows in the stream starts when all ranks have called Release: between the two, work is queued without the
 * cost of its launch showing up in the times. Collective. Hosts of one run each have their own start. */
int epPortHold(epPort *port);
int epPortRelease(epPort *port);

/* What is queued between the two becomes a graph instead of running; a graph is replayed in stream order. GPUs only. */
int epPortCaptureBegin(epPort *port);
int epPortCaptureEnd(epPort *port, void **graph);
int epPortReplay(epPort *port, void *graph);
void epPortGraphFree(epPort *port, void *graph);

/* Whether ranks run on several hosts. Collective. */
int epPortSeveralHosts(epPort *port, int *several);
/* Addresses of the peers' `mine`, usable in this rank's copies (GPUs of one host). Collective. */
int epPortMapPeers(epPort *port, void *mine, void **peers);
void epPortUnmapPeers(epPort *port, void **peers);

/* 0 when the emulated fabric's checkers saw nothing since the last call; -1 after telling what they saw. */
int epPortFaults(epPort *port);

#endif
