/* The CUDA backend on a driver and an NCCL that are none: every call in its place, contexts balanced, windows found and
 * checked, failures agreed between ranks, and nothing left behind whichever driver call fails. Built twice: with NCCL
 * 2.28's way to peer addresses and its request for a device communicator, and with 2.30's. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cuda_internal.h"
#include "cuda_nccl.h"
#include "fail.h"
#include "fake/fake.h"
#include "fake/fake_nccl.h"
#include "headers.h"
#include "jit_ext.h"
#include "nccl_abi.h"
#include "runtime.h"

/* The fake NCCL defines it; only a real nccl.h would declare it, and the tests build without one. */
ncclResult_t ncclGetVersion(int *version);

/* ---- the driver's answers
 * ------------------------------------------------------------------------------------------------ */

static fakeFailFn failCall;
static fakeLiveFn live;
static fakeThreadFn thread;
static fakeLaunchedFn launched;
static fakeHangFn hang;
static fakeCallsFn calls;
static int (*pushContext)(void *context), (*popContext)(void **context);
static int (*streamCreate)(void **stream, unsigned flags), (*streamDestroy)(void *stream);
static int (*beginCapture)(void *stream, int mode), (*endCapture)(void *stream, void **graph);
static int (*graphDestroy)(void *graph);
static int haveCompiler;

static void bind(void *lib, const char *name, void *slot) {
  void *address = dlsym(lib, name);
  memcpy(slot, &address, sizeof(address));
}

/* ---- tests
 * --------------------------------------------------------------------------------------------------------------- */

#define CHECK(condition)                                                                           \
  do {                                                                                             \
    if (!(condition)) {                                                                            \
      fprintf(stderr, "%s:%d: rank %d: not so: %s\n", __FILE__, __LINE__, mine->rank, #condition); \
      return (void *)1;                                                                            \
    }                                                                                              \
  } while (0)

static epConfig someConfig(void) {
  epConfig config;
  memset(&config, 0, sizeof(config));
  config.ranks = 2;
  config.experts = 8;
  config.topk = 2;
  config.indexBytes = 8;
  config.threads = 64;
  return config;
}

/* A second window over the memory of the library's own: what a rank says of its place in it leads a peer to the same
 * bytes, though the peer never sees the handle. */
static void *userWindow(epBackend *be, void **peers) {
  ncclWindow_t user = NULL, other = NULL;
  void *dev = NULL, *shared = NULL;
  unsigned char *own = peers[mine->rank];
  int64_t distance, all[RANKS];
  CHECK(fakeWindowOpen(mine, own, 5000, &other) == 0 && fakeWindowOpen(mine, own, 5000, &user) == 0);
  distance = 64 + 64 * mine->rank;
  CHECK(be->ops->windowAddress(be, mine->rank ? user : other, (uint64_t)distance, 128, &dev, &shared) == ncclSuccess);
  distance = (char *)shared - (char *)own;
  CHECK(be->ops->allGather(be, &distance, all, sizeof(distance)) == ncclSuccess);
  for (int r = 0; r < mine->ranks; r++) {
    unsigned char *there = (unsigned char *)peers[r] + all[r];
    there[mine->rank] = (unsigned char)(100 + mine->rank);
  }
  CHECK(be->ops->allGather(be, &distance, all, sizeof(distance)) == ncclSuccess);
  for (int r = 0; r < mine->ranks; r++) {
    CHECK(((unsigned char *)dev)[r] == 100 + r);
    CHECK(own[64 + 64 * mine->rank + r] == 100 + r);
  }
  /* without `shared` nothing more is asked of NCCL */
  CHECK(be->ops->windowAddress(be, user, 8, 16, &shared, NULL) == ncclSuccess && shared);
#ifdef EP_FAKE_NCCL_230
  CHECK(be->ops->windowAddress(be, user, 4992, 8, &dev, &shared) == ncclSuccess);
  CHECK(be->ops->windowAddress(be, user, 4992, 16, &dev, &shared) != ncclSuccess); /* beyond its end */
#endif
  CHECK(fakeWindowClose(mine, user) == 0 && fakeWindowClose(mine, other) == 0);
  return NULL;
}

/* Everything a group does with its backend, in order. NULL: all well. */
static void *life(void *arg) {
  mine = arg;
  epBackend *be = NULL;
  epTopology t;
  epWindow *window = NULL;
  void *peers[RANKS] = {NULL}, *dev = NULL, *host = NULL, *mapped = NULL;
  cudaStream_t stream = NULL;
  cudaEvent_t event = NULL;
  int capturing = -1, yes = -1, words[RANKS], word = 100 + mine->rank;
  CHECK(epCudaBackendOpen(mine, NULL, &be) == ncclSuccess);
  CHECK(be->ops->topology(be, &t) == ncclSuccess);
  CHECK(t.ranks == mine->ranks && t.rank == mine->rank && t.scaleUpRanks == mine->ranks && t.scaleOutRanks == 1);
  CHECK(t.arch == 90 && t.numSms == 132 && t.bulkCopies && t.device == mine->rank);
  CHECK(be->ops->allGather(be, &word, words, sizeof(word)) == ncclSuccess);
  for (int r = 0; r < mine->ranks; r++) CHECK(words[r] == 100 + r);

  CHECK(be->ops->windowCreate(be, 5000, &window, peers) == ncclSuccess);
  for (int r = 0; r < mine->ranks; r++)
    for (int i = 0; i < 5000; i++) CHECK(((unsigned char *)peers[r])[i] == 0);
  CHECK(be->ops->allGather(be, &word, words, sizeof(word)) == ncclSuccess); /* all have looked */
  for (int r = 0; r < mine->ranks; r++) ((unsigned char *)peers[r])[100 + mine->rank] = (unsigned char)(1 + mine->rank);
  CHECK(be->ops->allGather(be, &word, words, sizeof(word)) == ncclSuccess);
  for (int r = 0; r < mine->ranks; r++) CHECK(((unsigned char *)peers[mine->rank])[100 + r] == 1 + r);

  if (mine->ranks > 1) CHECK(userWindow(be, peers) == NULL);
  CHECK(be->ops->alloc(be, &dev, 1000) == ncclSuccess && dev);
  CHECK(be->ops->memset(be, dev, 7, 1000, NULL) == ncclSuccess);
  CHECK(be->ops->copyToDevice(be, dev, "abc", 4) == ncclSuccess);
  char text[4];
  CHECK(be->ops->copyToHost(be, text, dev, 4) == ncclSuccess && strcmp(text, "abc") == 0);
  CHECK(be->ops->allocMapped(be, &host, &mapped, 64) == ncclSuccess && *(int *)host == 0);
  CHECK(be->ops->isCapturing(be, NULL, &capturing) == ncclSuccess && capturing == 0);
  CHECK(be->ops->isCapturing(be, (cudaStream_t)0x77, &capturing) == ncclSuccess && capturing == 1);
  CHECK(be->ops->isCapturing(be, (cudaStream_t)0x78, &capturing) == ncclInvalidUsage);
  CHECK(be->ops->isDeviceAddress(be, dev, &yes) == ncclSuccess);
  CHECK(be->ops->streamCreate(be, &stream) == ncclSuccess && stream);
  CHECK(be->ops->eventCreate(be, &event) == ncclSuccess && event);
  CHECK(be->ops->eventRecord(be, event, NULL) == ncclSuccess);
  CHECK(be->ops->streamWait(be, stream, event) == ncclSuccess);
  CHECK(be->ops->eventDestroy(be, event) == ncclSuccess);
  CHECK(be->ops->streamDestroy(be, stream) == ncclSuccess);
  if (haveCompiler) {
    epConfig config = someConfig();
    epUpdateArgs args;
    epKernel *kernel = NULL, *again = NULL;
    memset(&args, 0x5a, sizeof(args));
    epLaunch launch = {3, 64, 4096, &args, sizeof(args)};
    unsigned first = 0;
    CHECK(be->ops->kernel(be, EP_KERNEL_UPDATE, &config, &kernel) == ncclSuccess);
    CHECK(be->ops->kernel(be, EP_KERNEL_UPDATE, &config, &again) == ncclSuccess && again == kernel);
    CHECK(be->ops->launch(be, kernel, &launch, NULL) == ncclSuccess);
    CHECK(launched(&first) > 0 && first == 0x5a5a5a5a);
  }
  be->ops->relax(be, 0);
  CHECK(be->ops->synchronize(be, NULL) == ncclSuccess);
  CHECK(be->ops->freeMapped(be, host) == ncclSuccess);
  CHECK(be->ops->free(be, dev) == ncclSuccess);
  CHECK(be->ops->windowDestroy(be, window) == ncclSuccess);
  be->ops->destroy(be);
  CHECK(thread() == 0);
  return NULL;
}

/* A window that a rank cannot have: no rank gets it, none hangs. */
static void *lifeWithoutWindow(void *arg) {
  mine = arg;
  epBackend *be = NULL;
  epWindow *window = NULL;
  void *peers[RANKS];
  CHECK(epCudaBackendOpen(mine, NULL, &be) == ncclSuccess);
  CHECK(be->ops->windowCreate(be, 5000, &window, peers) != ncclSuccess);
  CHECK(window == NULL && epLastError()[0]);
  be->ops->destroy(be);
  CHECK(thread() == 0);
  return NULL;
}

/* Ranks that are scale-up domains of their own: the network is asked for with what the group counts, kernels get a copy that
 * knows the abort word, and a failure on one rank is one on all. */
static int apart;
static const char *expectedError;
#ifdef EP_FAKE_NCCL_230
enum { HEADERS = 23007 };
#else
enum { HEADERS = 22809 };
#endif
static void *lifeApart(void *arg) {
  mine = arg;
  epBackend *be = NULL;
  epTopology t;
  epWindow *window = NULL;
  void *peers[RANKS] = {NULL};
  uint32_t aborted = 0;
  epGin gin = {0, 0};
  CHECK(epCudaBackendOpen(mine, NULL, &be) == ncclSuccess);
  CHECK(be->ops->topology(be, &t) == ncclSuccess);
  CHECK(t.scaleUpRanks == 1 && t.scaleOutRanks == RANKS && t.scaleOutRank == mine->rank && t.gin == 1);
  CHECK(be->ops->windowCreate(be, 5000, &window, peers) == ncclSuccess && window);
  CHECK(peers[mine->rank] && !peers[!mine->rank]);
  unsigned wished = HEADERS < 23000 ? 0 : 4 * (unsigned)mine->rank; /* rank 0: none */
  be->trafficClass = wished;
  ncclResult_t r = epCudaGinOpen((epCuda *)be, window, ncclSuccess, HEADERS, 3, 134, &aborted, &gin);
  if (expectedError) {
    CHECK(r != ncclSuccess && !gin.comm);
    if (!strstr(epLastError(), expectedError)) fprintf(stderr, "instead: %s\n", epLastError());
    CHECK(strstr(epLastError(), expectedError) || strstr(epLastError(), "see its log"));
  } else {
    const fakeGin *asked = &askedFor[mine->rank];
    uint64_t word = 0, flag = 0;
    CHECK(r == ncclSuccess && gin.window);
    CHECK(asked->contexts == 3 && asked->signals == 134 && asked->strong && !asked->va);
    CHECK(asked->trafficClass == (wished ? (int)wished - 1 : EP_NCCL_UNSET));
    CHECK(asked->connection == (HEADERS < 23000 ? 1 : EP_NCCL_CONNECTION_RAIL));
    CHECK(asked->version == HEADERS);
    CHECK(be->ops->copyToHost(be, &word, (void *)(uintptr_t)gin.comm, sizeof(word)) == ncclSuccess);
    CHECK(word == 0x5c5c5c5c5c5c5c5cu);
    int at = EP_NCCL_ABORT_FLAG(HEADERS);
    CHECK(be->ops->copyToHost(be, &flag, (void *)(uintptr_t)(gin.comm + (uint64_t)at), sizeof(flag)) == ncclSuccess);
    CHECK(flag == (at ? (uint64_t)(uintptr_t)&aborted : word));
  }
  CHECK(be->ops->windowDestroy(be, window) == ncclSuccess);
  be->ops->destroy(be);
  CHECK(thread() == 0);
  return NULL;
}

/* The headers that the library has of itself: they fit, or it says what would. */
static void *lifeByItsHeaders(void *arg) {
  mine = arg;
  epBackend *be = NULL;
  epWindow *window = NULL;
  void *peers[RANKS];
  uint32_t aborted = 0;
  epGin gin = {0, 0};
  int version = 0, fits = epHeadersVersion(HEADERS, &version) == ncclSuccess;
  CHECK(epCudaBackendOpen(mine, NULL, &be) == ncclSuccess);
  CHECK(be->ops->windowCreate(be, 5000, &window, peers) == ncclSuccess);
  ncclResult_t r = be->ops->ginCreate(be, window, 1, 1, &aborted, &gin);
  CHECK((r == ncclSuccess) == fits);
  if (fits) CHECK(EP_NCCL_KNOWN(version) && version <= HEADERS && askedFor[mine->rank].version == version);
  if (!fits) CHECK(strstr(epLastError(), "device headers") && strstr(epLastError(), "One scale-up domain works"));
  CHECK(be->ops->windowDestroy(be, window) == ncclSuccess);
  be->ops->destroy(be);
  CHECK(thread() == 0);
  return NULL;
}

static int everywhere(void *(*what)(void *)) {
  struct ncclComm comms[RANKS];
  pthread_t threads[RANKS];
  void *result;
  int bad = 0;
  pthread_barrier_init(&theWorld.barrier, NULL, RANKS);
  memset(theWorld.used, 0, sizeof(theWorld.used));
  for (int r = 0; r < RANKS; r++) {
    comms[r] = (struct ncclComm){r, RANKS, &theWorld, apart};
    if (pthread_create(&threads[r], NULL, what, &comms[r]) != 0) return -1;
  }
  for (int r = 0; r < RANKS; r++) {
    pthread_join(threads[r], &result);
    bad += result != NULL;
  }
  pthread_barrier_destroy(&theWorld.barrier);
  return bad;
}

static void twoRanks(void **state) {
  (void)state;
  for (int i = 0; i < 3; i++) {
    assert_int_equal(everywhere(life), 0);
    assert_int_equal(live(), 0);
    assert_int_equal(ncclLive, 0);
  }
}

static void severalDomains(void **state) {
  (void)state;
  apart = 1;
  assert_int_equal(everywhere(lifeApart), 0);
  assert_int_equal(everywhere(lifeByItsHeaders), 0);
  failDevComm = 1;
  expectedError = "device communicator: NCCL: fake error";
  assert_int_equal(everywhere(lifeApart), 0);
  failDevComm = -1;
#ifdef EP_FAKE_NCCL_230
  ginType = 0;
  expectedError = "NCCL_RMA_PLUGIN=ep";
  assert_int_equal(everywhere(lifeApart), 0);
  ginType = 2;
#endif
  expectedError = NULL;
  apart = 0;
  assert_int_equal(live(), 0);
  assert_int_equal(ncclLive, 0);
}

static void noWindow(void **state) {
  (void)state;
  failMemAlloc = 1;
  assert_int_equal(everywhere(lifeWithoutWindow), 0);
  failMemAlloc = -1;
  noSymmetric = 1;
  assert_int_equal(everywhere(lifeWithoutWindow), 0);
  noSymmetric = 0;
  assert_int_equal(live(), 0);
  assert_int_equal(ncclLive, 0);
}

/* Addresses that lead elsewhere are noticed before anybody stores through them: off by a page everywhere, and a rank
 * that takes its own window for its peer's. */
static void wrongWindow(void **state) {
  (void)state;
  for (wrongAddress = 1; wrongAddress <= 2; wrongAddress++) {
    assert_int_equal(everywhere(lifeWithoutWindow), 0);
    assert_int_equal(live(), 0);
    assert_int_equal(ncclLive, 0);
  }
  wrongAddress = 0;
}

/* One rank alone, and every driver call of its life failing in turn. */
static void anyCallFails(void **state) {
  (void)state;
  struct ncclComm comm = {0, 1, &theWorld, 0};
  int n;
  (void)setenv("NCCL_EP_DEBUG", "NONE", 1);
  for (n = 1; n < 500; n++) {
    epBackend *be = NULL;
    epWindow *window = NULL;
    void *peers[1], *dev = NULL, *host = NULL, *mapped = NULL;
    int capturing, word = 1, all;
    epKernel *kernel = NULL;
    epConfig config = someConfig();
    mine = &comm;
    (void)failCall(n);
    ncclResult_t r = epCudaBackendOpen(&comm, NULL, &be);
    if (r == ncclSuccess) {
      r = be->ops->allGather(be, &word, &all, sizeof(word));
      if (r == ncclSuccess) r = be->ops->windowCreate(be, 5000, &window, peers);
      if (r == ncclSuccess) r = be->ops->alloc(be, &dev, 100);
      if (r == ncclSuccess) r = be->ops->copyToDevice(be, dev, "abc", 4);
      if (r == ncclSuccess) r = be->ops->allocMapped(be, &host, &mapped, 64);
      if (r == ncclSuccess) r = be->ops->isCapturing(be, NULL, &capturing);
      if (r == ncclSuccess && haveCompiler) r = be->ops->kernel(be, EP_KERNEL_UPDATE, &config, &kernel);
      if (r != ncclSuccess) assert_true(epLastError()[0]);
      int left = failCall(0); /* cleaning up is not made to fail */
      assert_int_equal(be->ops->freeMapped(be, host), ncclSuccess);
      assert_int_equal(be->ops->free(be, dev), ncclSuccess);
      assert_int_equal(be->ops->windowDestroy(be, window), ncclSuccess);
      be->ops->destroy(be);
      assert_int_equal(live(), 0);
      assert_int_equal(thread(), 0);
      if (left > 0) break; /* the whole life has fewer calls than n */
      assert_int_not_equal(r, ncclSuccess);
    } else {
      assert_int_equal(failCall(0), 0);
      assert_int_equal(live(), 0);
      assert_int_equal(thread(), 0);
    }
  }
  printf("%d driver calls, each failed once\n", n - 1);
  assert_true(n > 20 && n < 500);
}

static void refusals(void **state) {
  (void)state;
  struct ncclComm comm = {0, 1, &theWorld, 0};
  epBackend *be = NULL;
  ncclEpAllocConfig_t half = {0};
  assert_int_equal(epCudaBackendOpen(NULL, NULL, &be), ncclInvalidArgument);
  assert_non_null(strstr(epLastError(), "PyTorch"));
  half.free_fn = (ncclEpFreeFn_t)(void (*)(void))free;
  assert_int_equal(epCudaBackendOpen(&comm, &half, &be), ncclInvalidArgument);
  comm.rank = 7; /* device 7 does not exist */
  assert_int_not_equal(epCudaBackendOpen(&comm, NULL, &be), ncclSuccess);
  assert_null(be);
  assert_int_equal(live(), 0);
}

/* A peer that never joins: the wait ends, and nothing that would wait for the device is called afterwards. */
static void peersThatStayAway(void **state) {
  (void)state;
  struct ncclComm comm = {0, 1, &theWorld, 0};
  epBackend *be = NULL;
  void *dev = NULL;
  int word = 1, all = 0;
  mine = &comm;
  (void)setenv("NCCL_EP_TIMEOUT_MS", "50", 1);
  assert_int_equal(epCudaBackendOpen(&comm, NULL, &be), ncclSuccess);
  (void)unsetenv("NCCL_EP_TIMEOUT_MS");
  assert_int_equal(be->ops->alloc(be, &dev, 100), ncclSuccess);
  hang(1);
  assert_int_equal(be->ops->allGather(be, &word, &all, sizeof(word)), ncclSystemError);
  assert_non_null(strstr(epLastError(), "rank 0 of 1 has waited 50 ms"));
  assert_non_null(strstr(epLastError(), "NCCL_EP_TIMEOUT_MS"));
  int before = live();
  assert_int_equal(be->ops->free(be, dev), ncclSuccess);
  assert_int_equal(live(), before);
  hang(0); /* the peer came after all, so that the rest can be given back here */
  ((epCuda *)be)->stuck = 0;
  assert_int_equal(be->ops->free(be, dev), ncclSuccess);
  be->ops->destroy(be);
  assert_int_equal(live(), 0);
  assert_int_equal(thread(), 0);
}

/* What operations ask of the driver, call after call: nothing more than it takes, and the right answer. */
static void fewDriverCalls(void **state) {
  (void)state;
  struct ncclComm comm = {0, 1, &theWorld, 0};
  epBackend *be = NULL;
  void *dev = NULL, *context = NULL;
  int yes = -1, capturing = -1;
  unsigned before;
  mine = &comm;
  assert_int_equal(epCudaBackendOpen(&comm, NULL, &be), ncclSuccess);
  assert_int_equal(be->ops->alloc(be, &dev, 100), ncclSuccess);
  assert_int_equal(pushContext(((epCuda *)be)->context), 0); /* as frameworks have it */
  before = calls();
  assert_int_equal(be->ops->isDeviceAddress(be, dev, &yes), ncclSuccess);
  assert_int_equal(yes, 1);
  assert_int_equal(calls() - before, 2); /* which context, what address */
  before = calls();
  for (int i = 0; i < 256; i++) { /* the rest of the allocation goes unasked, for a while */
    yes = -1;
    assert_int_equal(be->ops->isDeviceAddress(be, (char *)dev + i % 100, &yes), ncclSuccess);
    assert_int_equal(yes, 1);
  }
  assert_int_equal(calls() - before, 0);
  assert_int_equal(be->ops->isDeviceAddress(be, dev, &yes), ncclSuccess);
  assert_int_equal(calls() - before, 2);
  before = calls();
  assert_int_equal(be->ops->isCapturing(be, NULL, &capturing), ncclSuccess);
  assert_int_equal(calls() - before, 2);
  if (haveCompiler) {
    epConfig config = someConfig();
    epKernel *kernel = NULL;
    epUpdateArgs args;
    epLaunch launch = {1, 64, 0, &args, sizeof(args)};
    memset(&args, 0, sizeof(args));
    assert_int_equal(be->ops->kernel(be, EP_KERNEL_UPDATE, &config, &kernel), ncclSuccess);
    before = calls();
    assert_int_equal(be->ops->launch(be, kernel, &launch, NULL), ncclSuccess);
    assert_int_equal(calls() - before, 2);
    unsigned word;
    int launchesBefore = launched(&word);
    config.mask = 1;
    assert_int_equal(be->ops->kernel(be, EP_KERNEL_MASK, &config, &kernel), ncclSuccess);
    assert_int_equal(launched(&word), launchesBefore); /* to load it is not to run it: it would reach for windows */
  }
  assert_int_equal(thread(), 1);
  assert_int_equal(popContext(&context), 0);
  assert_ptr_equal(context, ((epCuda *)be)->context);
  /* With another context, or none, the answers are the same and the caller's context comes back. */
  assert_int_equal(pushContext((void *)0x1001), 0);
  assert_int_equal(be->ops->isDeviceAddress(be, (void *)0x30, &yes), ncclSuccess); /* pinned host memory */
  assert_int_equal(yes, 1);
  assert_int_equal(be->ops->isDeviceAddress(be, (void *)0x40, &yes), ncclSuccess); /* malloc's */
  assert_int_equal(yes, 0);
  ((epCuda *)be)->topology.device = 1;
  assert_int_equal(be->ops->isDeviceAddress(be, dev, &yes), ncclSuccess); /* of another device */
  assert_int_equal(yes, 0);
  ((epCuda *)be)->topology.device = 0;
  assert_int_equal(popContext(&context), 0);
  assert_ptr_equal(context, (void *)0x1001);
  assert_int_equal(be->ops->free(be, dev), ncclSuccess);
  be->ops->destroy(be);
  assert_int_equal(live(), 0);
  assert_int_equal(thread(), 0);
}

/* ---- kernels ahead of their use ---------------------------------------------------------------------------------------- */

enum { TOKENS = 8, TOPK = 2, HIDDEN = 128, EXPERTS = 8 };

static ncclEpTensor_t tensorOf(unsigned ndim, ncclDataType_t type, const size_t *sizes) {
  static _Alignas(64) char memory[1 << 16]; /* kernels do nothing: all tensors may lie at one place */
  ncclEpTensor_t t = NCCL_EP_TENSOR_INIT;
  t.ndim = ndim;
  t.datatype = type;
  t.sizes = (size_t *)(uintptr_t)sizes;
  t.data = memory;
  return t;
}

/* A rank alone, one layer: tensors and calls. */
typedef struct {
  size_t choices[2], rows[2], place[3], placeTopk[3];
  ncclEpTensor_t idx, x, w, y, out, outW, outIdx;
  ncclEpDispatchInputs_t in;
  ncclEpDispatchOutputs_t result;
  ncclEpCombineInputs_t back;
  ncclEpCombineOutputs_t sums;
  ncclEpHandle_t handle;
  unsigned spent[3]; /* driver calls of update, dispatch, combine */
} oneLayer;

static void layerInit(oneLayer *l, ncclEpGroup_t g, ncclEpLayout_t layout) {
  int ll = g->config.algorithm == NCCL_EP_ALGO_LOW_LATENCY, rankMajor = layout == NCCL_EP_LAYOUT_RANK_MAJOR;
  *l = (oneLayer){.choices = {TOKENS, TOPK},
                  .rows = {TOKENS, HIDDEN},
                  .place = {rankMajor ? 1 : EXPERTS, TOKENS, HIDDEN},
                  .placeTopk = {1, TOKENS, TOPK},
                  .in = NCCL_EP_DISPATCH_INPUTS_INIT,
                  .result = NCCL_EP_DISPATCH_OUTPUTS_INIT,
                  .back = NCCL_EP_COMBINE_INPUTS_INIT,
                  .sums = NCCL_EP_COMBINE_OUTPUTS_INIT};
  l->idx = tensorOf(2, ncclInt64, l->choices), l->x = tensorOf(2, ncclBfloat16, l->rows);
  l->w = tensorOf(2, ncclFloat32, l->choices), l->y = tensorOf(2, ncclBfloat16, l->rows);
  l->out = ll ? tensorOf(3, ncclBfloat16, l->place) : tensorOf(2, ncclBfloat16, l->rows);
  l->outW = ll ? tensorOf(3, ncclFloat32, l->placeTopk) : tensorOf(2, ncclFloat32, l->choices);
  l->outIdx = ll ? tensorOf(3, ncclInt32, l->placeTopk) : tensorOf(2, ncclInt64, l->choices);
  l->in.tokens = &l->x, l->result.tokens = &l->out, l->back.tokens = &l->out, l->sums.tokens = &l->y;
  if (!ll || rankMajor) l->in.topk_weights = &l->w, l->result.topk_weights = &l->outW, l->result.topk_idx = &l->outIdx;
  if (ll && !rankMajor) l->sums.topk_weights = &l->w;
  assert_int_equal(ncclEpInitHandle(&l->handle, g, layout, NULL, TOPK, NULL), ncclSuccess);
}

static ncclResult_t layerUpdate(oneLayer *l, int borrow, cudaStream_t stream) {
  ncclEpUpdateExtConfig_t config = NCCL_EP_UPDATE_EXT_CONFIG_INIT;
  config.borrow_topk_idx = borrow;
  return ncclEpUpdateHandleExt(l->handle, &l->idx, NULL, &config, stream);
}

static ncclResult_t layerDispatch(oneLayer *l, cudaStream_t stream) {
  return ncclEpDispatch(l->handle, &l->in, &l->result, NULL, NULL, stream);
}

static void layerRun(oneLayer *l, int borrow) {
  unsigned start = calls();
  assert_int_equal(layerUpdate(l, borrow, NULL), ncclSuccess);
  l->spent[0] = calls() - start, start = calls();
  assert_int_equal(layerDispatch(l, NULL), ncclSuccess);
  l->spent[1] = calls() - start, start = calls();
  assert_int_equal(ncclEpCombine(l->handle, &l->back, &l->sums, NULL, NULL), ncclSuccess);
  l->spent[2] = calls() - start;
}

static ncclEpGroupConfig_t layerConfig(int ll) {
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.algorithm = ll ? NCCL_EP_ALGO_LOW_LATENCY : NCCL_EP_ALGO_HIGH_THROUGHPUT;
  config.num_experts = EXPERTS;
  config.max_dispatch_tokens_per_rank = TOKENS;
  config.max_recv_tokens_per_rank = ll ? NCCL_EP_AUTO : TOKENS;
  config.max_token_bytes = 2 * HIDDEN;
  config.num_topk = TOPK;
  return config;
}

static ncclEpPrepareConfig_t layerPrepare(ncclEpLayout_t layout) {
  ncclEpPrepareConfig_t prepare = NCCL_EP_PREPARE_CONFIG_INIT;
  prepare.layout = layout;
  prepare.hidden = HIDDEN;
  prepare.top_k = TOPK;
  prepare.dispatch_type = prepare.combine_type = ncclBfloat16;
  prepare.index_type = ncclInt64;
  return prepare;
}

static void layerOnce(ncclEpGroup_t g, ncclEpLayout_t layout) {
  oneLayer l;
  layerInit(&l, g, layout);
  layerRun(&l, 0);
  assert_int_equal(ncclEpHandleDestroy(l.handle), ncclSuccess);
}

/* What the first kernel makes the library expect is what the layer then asks for; compiling together loads each once; and
 * nothing is compiled any more after ncclEpPrepare. */
static void kernelsAhead(void **state) {
  static const ncclEpLayout_t layouts[] = {NCCL_EP_LAYOUT_FLAT, NCCL_EP_LAYOUT_RANK_MAJOR, NCCL_EP_LAYOUT_EXPERT_MAJOR};
  struct ncclComm comm = {0, 1, &theWorld, 0};
  void *context = NULL;
  int version = 0;
  (void)state;
  ncclGetVersion(&version);
  if (!haveCompiler || version >= 22900) skip(); /* it has nothing to do with NCCL: once is enough */
  mine = &comm;
  pthread_barrier_init(&theWorld.barrier, NULL, 1);
  for (int i = 0; i < 3; i++) {
    ncclEpGroupConfig_t config = layerConfig(i > 0);
    ncclEpPrepareConfig_t prepare = layerPrepare(layouts[i]);
    ncclEpGroup_t g = NULL;
    oneLayer l;
    epWishes wishes;
    int before;
    assert_int_equal(ncclEpCreateGroup(&g, (ncclComm_t)&comm, &config), ncclSuccess);
    layerOnce(g, layouts[i]);
    assert_int_equal(g->kernelCount, 3);
    for (int k = 0; k < 2; k++) { /* from the update, and from the dispatch */
      epForesee(g, g->kernels[k].id, &g->kernels[k].config, &wishes);
      assert_int_equal(wishes.count, 3 - k);
      for (int j = k; j < 3; j++) {
        assert_int_equal(wishes.wish[j - k].id, g->kernels[j].id);
        assert_memory_equal(&wishes.wish[j - k].config, &g->kernels[j].config, sizeof(epConfig));
      }
    }
    epForesee(g, g->kernels[0].id, &g->kernels[0].config, &wishes);
    assert_int_equal(ncclEpGroupDestroy(g), ncclSuccess);

    assert_int_equal(ncclEpCreateGroup(&g, (ncclComm_t)&comm, &config), ncclSuccess);
    before = live();
    epCompileTogether(g, &wishes);
    assert_int_equal(live() - before, 3); /* modules */
    epCompileTogether(g, &wishes);
    assert_int_equal(live() - before, 3);
    assert_int_equal(thread(), 0);
    assert_int_equal(ncclEpPrepare(g, &prepare), ncclSuccess);
    assert_int_equal(g->kernelCount, 3);
    assert_int_equal(pushContext(((epCuda *)g->be)->context), 0); /* as frameworks have it */
    layerInit(&l, g, layouts[i]);
    layerRun(&l, 0);
    assert_int_equal(g->kernelCount, 3);
    assert_int_equal(l.spent[0], i ? 2 : 4); /* which context, launch; high throughput also: is this a capture */
    assert_int_equal(l.spent[1], 2);
    assert_int_equal(l.spent[2], 2);
    prepare.borrow_topk_idx = 1;
    assert_int_equal(ncclEpPrepare(g, &prepare), ncclSuccess);
    layerRun(&l, 1);
    assert_int_equal(g->kernelCount, i ? 3 : 4);
    assert_int_equal(l.spent[0], 0);
    assert_int_equal(l.spent[1], i ? 2 : 4);
    assert_int_equal(l.spent[2], 2);
    assert_int_equal(ncclEpHandleDestroy(l.handle), ncclSuccess);
    assert_int_equal(popContext(&context), 0);
    assert_int_equal(ncclEpGroupDestroy(g), ncclSuccess);
    assert_int_equal(live(), 0);
  }
  pthread_barrier_destroy(&theWorld.barrier);
}

/* A dispatch that makes the routing record itself, inside a capture: refused in one line until it is compiled, which leaves
 * the update pending; then recorded. And the library expects what follows it. */
static void borrowedInCapture(void **state) {
  struct ncclComm comm = {0, 1, &theWorld, 0};
  ncclEpGroupConfig_t config = layerConfig(0);
  ncclEpPrepareConfig_t prepare = layerPrepare(NCCL_EP_LAYOUT_EXPERT_MAJOR);
  ncclEpGroup_t g = NULL;
  epWishes wishes;
  oneLayer l;
  void *context = NULL, *stream = NULL, *graph = NULL;
  unsigned word;
  int version = 0, before;
  (void)state;
  ncclGetVersion(&version);
  if (!haveCompiler || version >= 22900) skip();
  mine = &comm;
  pthread_barrier_init(&theWorld.barrier, NULL, 1);
  assert_int_equal(ncclEpCreateGroup(&g, (ncclComm_t)&comm, &config), ncclSuccess);
  assert_int_equal(pushContext(((epCuda *)g->be)->context), 0);
  assert_int_equal(streamCreate(&stream, 1), 0);
  layerInit(&l, g, NCCL_EP_LAYOUT_EXPERT_MAJOR);
  l.result.topk_idx = NULL;
  l.result.topk_weights->ndim = 1;
  assert_int_equal(ncclEpPrepare(g, &prepare), ncclSuccess); /* all but that one */
  assert_int_equal(beginCapture(stream, 1), 0);
  assert_int_equal(layerUpdate(&l, 1, stream), ncclSuccess);
  for (int i = 0; i < 2; i++) {
    assert_int_equal(layerDispatch(&l, stream), ncclInvalidUsage);
    assert_non_null(
        strstr(epLastError(), "ncclEpDispatch: the stream is being captured: its kernel is not compiled yet"));
    assert_null(strchr(epLastError(), '\n'));
    assert_int_equal(l.handle->pending.on, 1);
  }
  assert_int_equal(endCapture(stream, &graph), 0);
  assert_int_equal(*(int *)graph, 0);
  assert_int_equal(graphDestroy(graph), 0);
  before = launched(&word);
  assert_int_equal(layerDispatch(&l, stream), ncclSuccess);
  assert_int_equal(launched(&word), before + 1);
  assert_int_equal(l.handle->pending.on, 0);
  assert_int_equal(l.handle->captured, 0);
  assert_int_equal(g->updatesIssued, 1);
  assert_int_equal(g->kernelCount, 4);
  assert_int_equal(g->kernels[3].config.fused, 1);
  epForesee(g, g->kernels[3].id, &g->kernels[3].config, &wishes);
  assert_int_equal(wishes.count, 2);
  assert_memory_equal(&wishes.wish[0].config, &g->kernels[3].config, sizeof(epConfig));
  assert_int_equal(wishes.wish[1].id, EP_KERNEL_COMBINE);
  assert_int_equal(wishes.wish[1].config.fused, 0);

  assert_int_equal(beginCapture(stream, 1), 0);
  assert_int_equal(layerUpdate(&l, 1, stream), ncclSuccess);
  assert_int_equal(layerDispatch(&l, stream), ncclSuccess);
  assert_int_equal(endCapture(stream, &graph), 0);
  assert_int_equal(*(int *)graph, 1);
  assert_int_equal(graphDestroy(graph), 0);
  assert_int_equal(l.handle->captured, 1);
  assert_int_equal(g->updatesIssued, 1);
  assert_int_equal(ncclEpHandleDestroy(l.handle), ncclSuccess);
  assert_int_equal(streamDestroy(stream), 0);
  assert_int_equal(ncclEpGroupDestroy(g), ncclSuccess);
  assert_int_equal(popContext(&context), 0);
  assert_int_equal(live(), 0);
  pthread_barrier_destroy(&theWorld.barrier);
}

/* Staged operations inside a capture: refused in one line until both parts are compiled, and until there is memory for as many; then
 * recorded, also through the communication stream. */
static void stagedInCapture(void **state) {
  struct ncclComm comm = {0, 1, &theWorld, 0};
  ncclEpGroupConfig_t config = layerConfig(1);
  ncclEpPrepareConfig_t prepare = layerPrepare(NCCL_EP_LAYOUT_RANK_MAJOR);
  ncclEpDispatchConfig_t send = NCCL_EP_DISPATCH_CONFIG_INIT;
  ncclEpCombineConfig_t sendBack = NCCL_EP_COMBINE_CONFIG_INIT;
  ncclEpCompleteExtConfig_t own = NCCL_EP_COMPLETE_EXT_CONFIG_INIT;
  ncclEpGroup_t g = NULL;
  oneLayer l, other;
  void *context = NULL, *stream = NULL, *graph = NULL;
  cudaEvent_t event = NULL;
  int version = 0;
  (void)state;
  ncclGetVersion(&version);
  if (!haveCompiler || version >= 22900) skip();
  mine = &comm;
  pthread_barrier_init(&theWorld.barrier, NULL, 1);
  assert_int_equal(ncclEpCreateGroup(&g, (ncclComm_t)&comm, &config), ncclSuccess);
  assert_int_equal(pushContext(((epCuda *)g->be)->context), 0);
  assert_int_equal(streamCreate(&stream, 1), 0);
  assert_int_equal(g->be->ops->eventCreate(g->be, &event), ncclSuccess);
  layerInit(&l, g, NCCL_EP_LAYOUT_RANK_MAJOR);
  layerInit(&other, g, NCCL_EP_LAYOUT_RANK_MAJOR);
  send.send_only = sendBack.send_only = 1;
  assert_int_equal(ncclEpPrepare(g, &prepare), ncclSuccess); /* whole operations */
  assert_int_equal(g->kernelCount, 3);
  assert_int_equal(layerUpdate(&l, 0, stream), ncclSuccess);
  assert_int_equal(layerUpdate(&other, 0, stream), ncclSuccess);
  assert_int_equal(beginCapture(stream, 1), 0);
  assert_int_equal(ncclEpDispatch(l.handle, &l.in, &l.result, NULL, &send, stream), ncclInvalidUsage);
  assert_non_null(
      strstr(epLastError(), "ncclEpDispatch: the stream is being captured: its kernel is not compiled yet"));
  assert_int_equal(endCapture(stream, &graph), 0);
  assert_int_equal(graphDestroy(graph), 0);
  prepare.in_flight = 1;
  assert_int_equal(ncclEpPrepare(g, &prepare), ncclSuccess);
  assert_int_equal(g->kernelCount, 7);

  assert_int_equal(beginCapture(stream, 1), 0);
  assert_int_equal(layerUpdate(&l, 0, stream), ncclSuccess);
  assert_int_equal(ncclEpDispatch(l.handle, &l.in, &l.result, NULL, &send, stream), ncclSuccess);
  assert_int_equal(ncclEpDispatch(other.handle, &other.in, &other.result, NULL, &send, stream), ncclInvalidUsage);
  assert_non_null(
      strstr(epLastError(), "ncclEpDispatch: the stream is being captured: the memory of a staged operation"));
  assert_null(strchr(epLastError(), '\n'));
  assert_int_equal(ncclEpCombine(l.handle, &l.back, &l.sums, &sendBack, stream),
                   ncclInvalidUsage); /* one after the other */
  assert_int_equal(ncclEpComplete(l.handle, NULL, stream), ncclSuccess);
  assert_int_equal(ncclEpCombine(l.handle, &l.back, &l.sums, &sendBack, stream),
                   ncclSuccess); /* one rank: nothing to send */
  assert_int_equal(ncclEpComplete(l.handle, NULL, stream), ncclSuccess);
  assert_int_equal(ncclEpComplete(l.handle, NULL, stream), ncclSuccess);
  assert_int_equal(endCapture(stream, &graph), 0);
  assert_int_equal(*(int *)graph, 4); /* update, both parts, the sums */
  assert_int_equal(graphDestroy(graph), 0);
  assert_int_equal(g->kernelCount, 7);

  assert_int_equal(ncclEpDispatch(l.handle, &l.in, &l.result, NULL, &send, stream), ncclSuccess);
  own.communication_stream = 1, own.done_event = event;
  assert_int_equal(ncclEpCompleteExt(l.handle, &own, stream), ncclSuccess);
  assert_int_equal(ncclEpDispatch(l.handle, &l.in, &l.result, NULL, &send, stream),
                   ncclSuccess); /* and goes with it in flight */
  assert_int_equal(ncclEpHandleDestroy(l.handle), ncclSuccess);
  assert_int_equal(ncclEpHandleDestroy(other.handle), ncclSuccess);
  assert_int_equal(g->be->ops->eventDestroy(g->be, event), ncclSuccess);
  assert_int_equal(streamDestroy(stream), 0);
  assert_int_equal(ncclEpGroupDestroy(g), ncclSuccess);
  assert_int_equal(popContext(&context), 0);
  assert_int_equal(live(), 0);
  pthread_barrier_destroy(&theWorld.barrier);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(twoRanks),          cmocka_unit_test(severalDomains), cmocka_unit_test(noWindow),
      cmocka_unit_test(wrongWindow),       cmocka_unit_test(anyCallFails),   cmocka_unit_test(refusals),
      cmocka_unit_test(peersThatStayAway), cmocka_unit_test(fewDriverCalls), cmocka_unit_test(kernelsAhead),
      cmocka_unit_test(borrowedInCapture), cmocka_unit_test(stagedInCapture)};
  epJit *jit;
  void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (lib) {
    bind(lib, "fakeFail", &failCall);
    bind(lib, "fakeLive", &live);
    bind(lib, "fakeThread", &thread);
    bind(lib, "fakeLaunched", &launched);
    bind(lib, "fakeHang", &hang);
    bind(lib, "fakeCalls", &calls);
    bind(lib, "cuCtxPushCurrent_v2", &pushContext);
    bind(lib, "cuCtxPopCurrent_v2", &popContext);
    bind(lib, "cuStreamCreate", &streamCreate);
    bind(lib, "cuStreamDestroy_v2", &streamDestroy);
    bind(lib, "cuStreamBeginCapture_v2", &beginCapture);
    bind(lib, "cuStreamEndCapture", &endCapture);
    bind(lib, "cuGraphDestroy", &graphDestroy);
  }
  if (!failCall || !live || !thread || !launched || !hang || !calls || !pushContext || !popContext || !streamCreate ||
      !streamDestroy || !beginCapture || !endCapture || !graphDestroy) {
    printf("skipped: the fake libcuda.so.1 is not first in LD_LIBRARY_PATH\n");
    return 77;
  }
  (void)setenv("NCCL_EP_JIT_CACHE_DIR", "", 1);
  if (epJitOpen(&jit) == ncclSuccess) {
    haveCompiler = epJitCompilerVersion(jit) != 0;
    epJitClose(jit);
  }
  if (!fakeNcclStart()) {
    printf("skipped: no address space\n");
    return 77;
  }
  return cmocka_run_group_tests(tests, NULL, NULL);
}
