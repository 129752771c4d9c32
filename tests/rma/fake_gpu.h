/* What the tests ask of the CUDA driver that is none (fake_gpu.c). */
#ifndef EP_TESTS_RMA_FAKE_GPU_H_
#define EP_TESTS_RMA_FAKE_GPU_H_

#include <stddef.h>

/* GPU memory: exportable by a descriptor, or as NCCL allocates its signals, not. */
typedef void *(*fakeAllocateFn)(size_t bytes, int exportable);
typedef void (*fakeReleaseFn)(void *memory);
/* Objects alive: contexts, streams, events, pinned memory, handles, mappings. */
typedef int (*fakeAliveFn)(void);
/* 1: this GPU reaches no other one's memory. */
typedef void (*fakeAloneFn)(int alone);
/* Makes the n-th call from now that may fail do so (0: none). Returns what is left to go of the last wish: 0, it happened. */
typedef int (*fakeFailFn)(int n);
/* Calls made without a context: 0 is right. */
typedef int (*fakeMistakesFn)(void);

#endif
