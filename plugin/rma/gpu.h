/* The GPU of a communicator: the CUDA driver bound at run time, streams and events, and windows of peers on this host
 * mapped here. Functions that say "inside" want the GPU entered, which makes its context this thread's. */
#ifndef EP_RMA_GPU_H_
#define EP_RMA_GPU_H_

#include "abi.h"

typedef uintptr_t epRmaCuPtr;
typedef unsigned long long epRmaCuHandle; /* CUmemGenericAllocationHandle */

enum { EP_RMA_OUT_STREAMS = 4, EP_RMA_SUBMISSIONS = 64, EP_RMA_WORDS = 64 };

/* A stream of copies that leave. Those asked for since the last event share the next one: submission n is done when the event
 * behind it is. */
typedef struct {
  void *stream;
  void *events[EP_RMA_SUBMISSIONS];
  uint64_t submitted, done; /* numbers, from 1 on */
  bool open;                /* copies wait for submission `submitted + 1` */
} epRmaGpuOut;

typedef struct {
  int device; /* CUDA ordinal */
  void *context;
  epRmaGpuOut out[EP_RMA_OUT_STREAMS]; /* contexts in turn */
  void *in;                            /* copies that arrive, and signals behind them */
  uint64_t *word;                      /* pinned: a signal's old value, where memory may be reset behind our back */
  int captureMode;
  bool ready;
} epRmaGpu;

/* Binds the driver and takes the device that owns this memory; later calls only check that it is the same one. */
epRmaResult epRmaGpuOpen(epRmaGpu *gpu, void *memory);
void epRmaGpuClose(epRmaGpu *gpu); /* outside */
/* No call of ours may spoil a graph capture of the application: the thread's mode is relaxed meanwhile. */
epRmaResult epRmaGpuEnter(epRmaGpu *gpu);
void epRmaGpuLeave(epRmaGpu *gpu);

/* All inside. */
epRmaResult epRmaGpuPinned(void **host, size_t bytes);
void epRmaGpuFreePinned(void *host);
epRmaResult epRmaGpuEvent(void **event);
void epRmaGpuFreeEvent(void *event);
/* A copy of the next submission, whose number is told. */
bool epRmaGpuOutRoom(const epRmaGpuOut *out);
epRmaResult epRmaGpuOutCopy(epRmaGpuOut *out, void *to, const void *from, size_t bytes, uint64_t *number);
epRmaResult epRmaGpuOutSubmit(epRmaGpuOut *out);
epRmaResult epRmaGpuOutCollect(epRmaGpuOut *out);                                              /* `done` moves on */
epRmaResult epRmaGpuCopy(void *to, const void *from, size_t bytes, void *stream, void *event); /* event: may be NULL */
epRmaResult epRmaGpuDone(void *event, bool *done);
epRmaResult epRmaGpuSync(void *stream);
typedef struct {
  void *to;
  uint64_t value;
} epRmaGpuWord;
/* At most EP_RMA_WORDS, in turn, behind what arrived before. */
epRmaResult epRmaGpuWriteWords(epRmaGpu *gpu, const epRmaGpuWord *words, int count);
epRmaResult epRmaGpuReadWord(epRmaGpu *gpu, const void *from, uint64_t *value);

/* A file descriptor by which a process of this host maps the memory, or -1 where CUDA exports none (which is no error),
 * and where in the exported allocation the memory lies. */
int epRmaGpuExport(const void *memory, size_t bytes, uint64_t *offset, uint64_t *allocation);
/* The peer's allocation in our address space; NULL where this GPU cannot reach it. Takes no ownership of fd. */
void *epRmaGpuMap(epRmaGpu *gpu, int fd, uint64_t allocation);
void epRmaGpuUnmap(void *mapped, uint64_t allocation);

#endif
