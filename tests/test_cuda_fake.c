/* The CUDA backend on a driver and an NCCL that are none: every call in its place, contexts balanced, windows found and
 * checked, failures agreed between ranks, and nothing left behind whichever driver call fails. Built twice: with NCCL
 * 2.28's way to peer addresses and with 2.29's. */
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
#include "jit_ext.h"
#include "runtime.h"

/* ---- the driver's answers
 * ------------------------------------------------------------------------------------------------ */

static fakeFailFn failCall;
static fakeLiveFn live;
static fakeThreadFn thread;
static fakeLaunchedFn launched;
static fakeHangFn hang;
static fakeCallsFn calls;
static int (*pushContext)(void *context), (*popContext)(void **context);
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

/* Everything a group does with its backend, in order. NULL: all well. */
static void *life(void *arg) {
  mine = arg;
  epBackend *be = NULL;
  epTopology t;
  epWindow *window = NULL;
  void *peers[RANKS] = {NULL}, *dev = NULL, *host = NULL, *mapped = NULL;
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

static int everywhere(void *(*what)(void *)) {
  struct ncclComm comms[RANKS];
  pthread_t threads[RANKS];
  void *result;
  int bad = 0;
  pthread_barrier_init(&theWorld.barrier, NULL, RANKS);
  memset(theWorld.used, 0, sizeof(theWorld.used));
  for (int r = 0; r < RANKS; r++) {
    comms[r] = (struct ncclComm){r, RANKS, &theWorld};
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
  struct ncclComm comm = {0, 1, &theWorld};
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
  struct ncclComm comm = {0, 1, &theWorld};
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
  struct ncclComm comm = {0, 1, &theWorld};
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
  struct ncclComm comm = {0, 1, &theWorld};
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

static unsigned spent[3]; /* driver calls of the last layer's update, dispatch, combine */

/* A rank alone, one layer: update, dispatch, combine. */
static void oneLayer(ncclEpGroup_t g, ncclEpLayout_t layout) {
  int ll = g->config.algorithm == NCCL_EP_ALGO_LOW_LATENCY, rankMajor = layout == NCCL_EP_LAYOUT_RANK_MAJOR;
  const size_t choices[] = {TOKENS, TOPK}, rows[] = {TOKENS, HIDDEN}, flat[] = {TOKENS, HIDDEN},
               flatTopk[] = {TOKENS, TOPK};
  const size_t place[] = {rankMajor ? 1 : EXPERTS, TOKENS, HIDDEN}, placeTopk[] = {1, TOKENS, TOPK};
  ncclEpTensor_t idx = tensorOf(2, ncclInt64, choices), x = tensorOf(2, ncclBfloat16, rows);
  ncclEpTensor_t w = tensorOf(2, ncclFloat32, choices), y = tensorOf(2, ncclBfloat16, rows);
  ncclEpTensor_t out = ll ? tensorOf(3, ncclBfloat16, place) : tensorOf(2, ncclBfloat16, flat);
  ncclEpTensor_t outW = ll ? tensorOf(3, ncclFloat32, placeTopk) : tensorOf(2, ncclFloat32, flatTopk);
  ncclEpTensor_t outIdx = ll ? tensorOf(3, ncclInt32, placeTopk) : tensorOf(2, ncclInt64, flatTopk);
  ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t result = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpCombineInputs_t back = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t sums = NCCL_EP_COMBINE_OUTPUTS_INIT;
  ncclEpHandle_t h = NULL;
  in.tokens = &x, result.tokens = &out, back.tokens = &out, sums.tokens = &y;
  if (!ll || rankMajor) in.topk_weights = &w, result.topk_weights = &outW, result.topk_idx = &outIdx;
  if (ll && !rankMajor) sums.topk_weights = &w;
  assert_int_equal(ncclEpInitHandle(&h, g, layout, NULL, TOPK, NULL), ncclSuccess);
  spent[0] = calls();
  assert_int_equal(ncclEpUpdateHandle(h, &idx, NULL, NULL), ncclSuccess);
  spent[0] = calls() - spent[0];
  spent[1] = calls();
  assert_int_equal(ncclEpDispatch(h, &in, &result, NULL, NULL, NULL), ncclSuccess);
  spent[1] = calls() - spent[1];
  spent[2] = calls();
  assert_int_equal(ncclEpCombine(h, &back, &sums, NULL, NULL), ncclSuccess);
  spent[2] = calls() - spent[2];
  assert_int_equal(ncclEpHandleDestroy(h), ncclSuccess);
}

/* What the first kernel makes the library expect is what the layer then asks for; compiling together loads each once; and
 * nothing is compiled any more after ncclEpPrepare. */
static void kernelsAhead(void **state) {
  static const ncclEpLayout_t layouts[] = {NCCL_EP_LAYOUT_FLAT, NCCL_EP_LAYOUT_RANK_MAJOR, NCCL_EP_LAYOUT_EXPERT_MAJOR};
  struct ncclComm comm = {0, 1, &theWorld};
  void *context = NULL;
  int version = 0;
  (void)state;
  ncclGetVersion(&version);
  if (!haveCompiler || version >= 22900) skip(); /* it has nothing to do with NCCL: once is enough */
  mine = &comm;
  pthread_barrier_init(&theWorld.barrier, NULL, 1);
  for (int i = 0; i < 3; i++) {
    ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
    ncclEpPrepareConfig_t prepare = NCCL_EP_PREPARE_CONFIG_INIT;
    ncclEpGroup_t g = NULL;
    epWishes wishes;
    int before;
    config.algorithm = i ? NCCL_EP_ALGO_LOW_LATENCY : NCCL_EP_ALGO_HIGH_THROUGHPUT;
    config.num_experts = EXPERTS;
    config.max_dispatch_tokens_per_rank = TOKENS;
    config.max_recv_tokens_per_rank = i ? NCCL_EP_AUTO : TOKENS;
    config.max_token_bytes = 2 * HIDDEN;
    config.num_topk = TOPK;
    assert_int_equal(ncclEpCreateGroup(&g, (ncclComm_t)&comm, &config), ncclSuccess);
    oneLayer(g, layouts[i]);
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
    prepare.layout = layouts[i];
    prepare.hidden = HIDDEN;
    prepare.top_k = TOPK;
    prepare.dispatch_type = prepare.combine_type = ncclBfloat16;
    prepare.index_type = ncclInt64;
    assert_int_equal(ncclEpPrepare(g, &prepare), ncclSuccess);
    assert_int_equal(g->kernelCount, 3);
    assert_int_equal(pushContext(((epCuda *)g->be)->context), 0); /* as frameworks have it */
    oneLayer(g, layouts[i]);
    assert_int_equal(g->kernelCount, 3);
    assert_int_equal(spent[0], i ? 2 : 4); /* which context, launch; high throughput also: is this a capture */
    assert_int_equal(spent[1], 2);
    assert_int_equal(spent[2], 2);
    assert_int_equal(popContext(&context), 0);
    assert_int_equal(ncclEpGroupDestroy(g), ncclSuccess);
    assert_int_equal(live(), 0);
  }
  pthread_barrier_destroy(&theWorld.barrier);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(twoRanks),       cmocka_unit_test(noWindow),
                                     cmocka_unit_test(wrongWindow),    cmocka_unit_test(anyCallFails),
                                     cmocka_unit_test(refusals),       cmocka_unit_test(peersThatStayAway),
                                     cmocka_unit_test(fewDriverCalls), cmocka_unit_test(kernelsAhead)};
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
  }
  if (!failCall || !live || !thread || !launched || !hang || !calls || !pushContext || !popContext) {
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
