/* Questions a test asks the CUDA driver that is none (fake_cuda.c). */
#ifndef EP_TESTS_FAKE_H_
#define EP_TESTS_FAKE_H_

/* Makes the n-th driver call from now fail (1: the next; 0: none). Returns how many were left to go of the last wish:
 * 0 means it happened. */
typedef int (*fakeFailFn)(int n);
/* Objects alive: memory, streams, modules, retained contexts. */
typedef int (*fakeLiveFn)(void);
/* Contexts on this thread's stack, and 1000 more when its capture mode was not put back. */
typedef int (*fakeThreadFn)(void);
/* Launches so far, and the first bytes of the last one's arguments. */
typedef int (*fakeLaunchedFn)(unsigned *firstWord);
/* Driver calls that this thread has made. */
typedef unsigned (*fakeCallsFn)(void);
/* 1: streams never come to an end, as when a peer does not join. */
typedef void (*fakeHangFn)(int on);

#endif
