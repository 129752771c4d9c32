/* Units of the host runtime that need neither a GPU nor the emulated fabric: errors, environment, sizes and their
 * limits, launch policy, descriptor checks, the comparison of configurations, and what the public calls say without any
 * communicator. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "env.h"
#include "fail.h"
#include "runtime.h"
#include "nccl_ep.h"
#include "nccl_ep_ext.h"
#include "object.h"
#include "policy.h"
#include "sizes.h"
#include "sm_policy.h"
#include "tensor.h"

static void expectError(ncclResult_t got, ncclResult_t want, const char *word) {
  const char *text = ncclEpGetLastErrorString();
  if (got != want) fail_msg("%d instead of %d: %s", (int)got, (int)want, text);
  if (!strstr(text, word)) fail_msg("no \"%s\" in: %s", word, text);
  if (strchr(text, '\n')) fail_msg("more than one line: %s", text);
}

/* ---- Errors
 * ------------------------------------------------------------------------------------------------------------- */

static void *otherThread(void *arg) {
  *(int *)arg = ncclEpGetLastErrorString()[0] == 0;
  epFail(ncclInvalidUsage, "from the other thread");
  return NULL;
}

static void lastErrorIsPerThread(void **state) {
  (void)state;
  pthread_t thread;
  int empty = 0;
  assert_int_equal(epFail(ncclInvalidArgument, "x is %d: expected %s", 3, "four"), ncclInvalidArgument);
  assert_string_equal(ncclEpGetLastErrorString(), "x is 3: expected four");
  assert_int_equal(pthread_create(&thread, NULL, otherThread, &empty), 0);
  pthread_join(thread, NULL);
  assert_int_equal(empty, 1);
  assert_string_equal(ncclEpGetLastErrorString(), "x is 3: expected four");
}

static ncclResult_t ncclEpPretended(const char *text) {
  EP_CALL();
  return epFail(ncclInternalError, "%s", text);
}

/* A function deep below need not know for whom it works: its line begins with the call all the same. */
static void errorsNameTheirCall(void **state) {
  (void)state;
  ncclEpPretended("x is 3");
  assert_string_equal(ncclEpGetLastErrorString(), "ncclEpPretended: x is 3");
  ncclEpPretended("ncclEpPretended: x is 3");
  assert_string_equal(ncclEpGetLastErrorString(), "ncclEpPretended: x is 3");
  ncclEpPretended("ncclEpPretendedMore: x is 3");
  assert_string_equal(ncclEpGetLastErrorString(), "ncclEpPretended: ncclEpPretendedMore: x is 3");
  {
    EP_CALL();
    epCallArgument("inputs.tokens");
    epFail(ncclInternalError, "win_hdl is bad");
    assert_string_equal(ncclEpGetLastErrorString(), "errorsNameTheirCall: inputs.tokens: win_hdl is bad");
    ncclEpPretended("x is 3"); /* has no argument of its own */
    assert_string_equal(ncclEpGetLastErrorString(), "ncclEpPretended: x is 3");
    epFail(ncclInternalError, "y");
    assert_string_equal(ncclEpGetLastErrorString(), "errorsNameTheirCall: y");
  }
  epFail(ncclInternalError, "z");
  assert_string_equal(ncclEpGetLastErrorString(), "z");
}

/* Runs first, before the level is read: a child logs two lines with a level that is none, and says so once. */
static void unknownLevelIsNamed(void **state) {
  (void)state;
  char text[2048];
  size_t at = 0;
  int ends[2];
  assert_int_equal(pipe(ends), 0);
  pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    dup2(ends[1], 2);
    setenv("NCCL_EP_DEBUG", "LOUD", 1);
    epLog(EP_LOG_WARN, "first");
    epLog(EP_LOG_INFO, "second");
    _exit(0);
  }
  close(ends[1]);
  for (ssize_t n; at + 1 < sizeof text && (n = read(ends[0], text + at, sizeof text - 1 - at)) > 0;) at += (size_t)n;
  text[at] = 0;
  close(ends[0]);
  assert_int_equal(waitpid(child, NULL, 0), child);
  const char *said = strstr(text, "NCCL_EP_DEBUG=LOUD ignored: expected NONE, WARN, INFO or TRACE");
  assert_non_null(said);
  assert_null(strstr(said + 1, "NCCL_EP_DEBUG"));
  assert_non_null(strstr(text, "first"));
  assert_null(strstr(text, "second"));
}

static void longErrorsAreCut(void **state) {
  (void)state;
  char big[8192];
  memset(big, 'a', sizeof(big) - 1);
  big[sizeof(big) - 1] = 0;
  epFail(ncclInternalError, "%s", big);
  assert_true(strlen(ncclEpGetLastErrorString()) < sizeof(big));
  assert_int_equal(ncclEpGetLastErrorString()[0], 'a');
}

/* ---- Environment
 * ---------------------------------------------------------------------------------------------------------- */

static void environmentIsChecked(void **state) {
  (void)state;
  uint64_t v = 7;
  const char *name = epEnvName(EP_ENV_NUM_SMS);
  unsetenv(name);
  assert_int_equal(epEnvNumber(EP_ENV_NUM_SMS, 1, 100, &v), 0);
  setenv(name, "12", 1);
  assert_int_equal(epEnvNumber(EP_ENV_NUM_SMS, 1, 100, &v), 1);
  assert_int_equal(v, 12);
  static const char *const bad[] = {"", "0", "101", "-1", "1x", "x", "99999999999999999999999"};
  for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
    setenv(name, bad[i], 1);
    v = 7;
    assert_int_equal(epEnvNumber(EP_ENV_NUM_SMS, 1, 100, &v), 0);
    assert_int_equal(v, 7);
  }
  unsetenv(name);
}

static void environmentTableIsComplete(void **state) {
  (void)state;
  char *text = NULL;
  size_t bytes = 0;
  FILE *out = open_memstream(&text, &bytes);
  assert_non_null(out);
  epEnvPrint(out);
  fclose(out);
  assert_non_null(strstr(text, "NCCL_EP_NCCL")); /* the tools' own */
  for (int i = 0; i < EP_ENV_COUNT; i++) {
    assert_int_equal(strncmp(epEnvName((epEnvId)i), "NCCL_EP_", 8), 0);
    assert_non_null(strstr(text, epEnvName((epEnvId)i)));
  }
  free(text);
}

/* ---- Sizes
 * ------------------------------------------------------------------------------------------------------------------ */

static ncclEpBufferSizeConfig_t sizeConfig(void) {
  ncclEpBufferSizeConfig_t c = NCCL_EP_BUFFER_SIZE_CONFIG_INIT;
  c.num_experts = 256, c.max_tokens = 4096, c.hidden = 7168, c.top_k = 8, c.datatype = ncclBfloat16;
  return c;
}

static void bufferSizesAddUp(void **state) {
  (void)state;
  ncclEpBufferSize_t s = NCCL_EP_BUFFER_SIZE_INIT;
  ncclEpBufferSizeConfig_t c = sizeConfig();
  for (uint32_t ranks = 1; ranks <= 256; ranks *= 2) {
    assert_int_equal(calculate_ep_buffer_size(ranks, &c, &s), ncclSuccess);
    assert_int_equal(s.window_bytes, s.count_bytes + s.metadata_bytes + s.flag_bytes + s.staging_bytes);
    assert_true(s.staging_bytes >= (size_t)(ranks - 1) * 4096 * (14336 + 32));
    assert_true(s.handle_bytes >= 4u * 4096 * 8 * 3 && s.scratch_bytes > 0);
  }
  size_t partial = s.staging_bytes;
  c.multiple_reductions = 0;
  assert_int_equal(calculate_ep_buffer_size(32, &c, &s), ncclSuccess);
  assert_true(s.staging_bytes > 0 && s.window_bytes > 0);
  c = sizeConfig();
  c.scale_bytes = 224; /* more than the padding of a row to whole lines */
  assert_int_equal(calculate_ep_buffer_size(256, &c, &s), ncclSuccess);
  assert_true(s.staging_bytes > partial);
}

static void limitsAreNamed(void **state) {
  (void)state;
  ncclEpBufferSize_t s = NCCL_EP_BUFFER_SIZE_INIT;
  ncclEpBufferSizeConfig_t c = sizeConfig();
  expectError(calculate_ep_buffer_size(1025, &c, &s), ncclInvalidArgument, "1024");
  expectError(calculate_ep_buffer_size(3, &c, &s), ncclInvalidArgument, "multiple of the 3 ranks");
  c.num_experts = 4096;
  expectError(calculate_ep_buffer_size(2, &c, &s), ncclInvalidArgument, "2048");
  c = sizeConfig(), c.num_experts = 0;
  expectError(calculate_ep_buffer_size(2, &c, &s), ncclInvalidArgument, "num_experts is 0");
  c = sizeConfig(), c.top_k = 33;
  expectError(calculate_ep_buffer_size(2, &c, &s), ncclInvalidArgument, "32");
  c = sizeConfig(), c.max_tokens = 0;
  expectError(calculate_ep_buffer_size(2, &c, &s), ncclInvalidArgument, "max_dispatch_tokens_per_rank is 0");
  c = sizeConfig(), c.max_tokens = 1 << 20;
  expectError(calculate_ep_buffer_size(2, &c, &s), ncclInvalidArgument, "1048576");
  c = sizeConfig(), c.hidden = 12;
  expectError(calculate_ep_buffer_size(2, &c, &s), ncclInvalidArgument, "multiple of 16");
  c = sizeConfig(), c.hidden = 32769;
  expectError(calculate_ep_buffer_size(2, &c, &s), ncclInvalidArgument, "65536");
  c = sizeConfig(), c.datatype = (ncclDataType_t)99;
  expectError(calculate_ep_buffer_size(2, &c, &s), ncclInvalidArgument, "datatype is 99");
}

static void largestTopkKeepsPositionsInside(void **state) {
  (void)state;
  for (uint32_t b = 1; b <= EP_MAX_ENTRIES; b = b * 2 + 1) {
    uint32_t k = epLargestTopk(b);
    assert_true(k <= EP_MAX_TOPK && (uint64_t)k * b <= EP_MAX_ENTRIES);
    assert_true(k == EP_MAX_TOPK || (uint64_t)(k + 1) * b > EP_MAX_ENTRIES);
  }
}

/* ---- Policy
 * ----------------------------------------------------------------------------------------------------------------- */

static void launchesFitTheDevice(void **state) {
  (void)state;
  static const struct {
    int arch, sms, smem;
  } devices[] = {{80, 108, 166912},  {90, 132, 232448}, {100, 148, 232448},
                 {120, 170, 101376}, {0, 8, 232448},    {0, 1, 232448}};
  static const uint32_t rows[] = {16, 272, 5760, 14336, 32768, 65536};
  for (size_t d = 0; d < sizeof(devices) / sizeof(devices[0]); d++)
    for (uint32_t ranks = 1; ranks <= 1024; ranks *= 2)
      for (size_t h = 0; h < sizeof(rows) / sizeof(rows[0]); h++)
        for (int kernel = EP_KERNEL_UPDATE; kernel <= EP_KERNEL_COMBINE; kernel++) {
          epTopology t = {.ranks = (int)ranks,
                          .scaleUpRanks = (int)ranks,
                          .scaleOutRanks = 1,
                          .arch = devices[d].arch,
                          .numSms = devices[d].sms,
                          .smemPerBlock = devices[d].smem,
                          .bulkCopies = devices[d].arch >= 90};
          epConfig c = {.ranks = ranks,
                        .experts = 2 * ranks,
                        .topk = 8,
                        .rowBytes = kernel ? rows[h] : 0,
                        .dtype = EP_DTYPE_BF16,
                        .weights = 1,
                        .indexBytes = 8};
          epGrid g = {0};
          ncclResult_t r = kernel == EP_KERNEL_UPDATE ? epPolicyUpdate(&t, epPolicySms(&t, 0), 4096, &c, &g)
                                                      : epPolicyMove("test", &t, epPolicySms(&t, 0), kernel, &c, &g);
          if (r != ncclSuccess)
            fail_msg("sm_%d, %u ranks, %u-byte rows, kernel %d: %s", devices[d].arch, ranks, rows[h], kernel,
                     ncclEpGetLastErrorString());
          assert_true(g.blocks >= 1 && g.threads >= 32 && g.threads <= 1024 && g.threads % 32 == 0);
          assert_true(g.smemBytes <= (unsigned)devices[d].smem);
          assert_int_equal(g.threads, c.threads);
          if (kernel == EP_KERNEL_UPDATE)
            assert_true(g.blocks <= EP_MAX_UPDATE_BLOCKS && g.blocks <= (unsigned)devices[d].sms);
          else if (ranks > 1)
            assert_true(g.pushBlocks >= 1 && g.pushBlocks < g.blocks);
        }
}

/* A dispatch that makes the routing record itself: by a few of the blocks that receive, and only where a block has room for
 * the histograms. */
static void fusedWhereItFits(void **state) {
  (void)state;
  epTopology t = {.ranks = 8,
                  .scaleUpRanks = 8,
                  .scaleOutRanks = 1,
                  .arch = 90,
                  .numSms = 132,
                  .smemPerBlock = 232448,
                  .bulkCopies = 1};
  epConfig c = {.ranks = 8, .experts = 256, .topk = 8, .rowBytes = 14336, .weights = 1, .fused = 1, .indexBytes = 4},
           plain;
  epGrid g, alone;
  assert_int_equal(epPolicyMove("test", &t, 132, EP_KERNEL_DISPATCH, &c, &g), ncclSuccess);
  assert_int_equal(c.fused, 1);
  assert_int_equal(c.indexBytes, 4);
  assert_true(g.smemBytes >= epUpdateSmem(&c) && g.smemBytes <= 232448);
  assert_int_equal(epPolicyFusedBlocks(&t, &g, 0), 1);
  assert_int_equal(epPolicyFusedBlocks(&t, &g, 1), 1);
  assert_true(epPolicyFusedBlocks(&t, &g, 4096) > 1);
  assert_true(epPolicyFusedBlocks(&t, &g, UINT32_MAX / 2) <= EP_MAX_UPDATE_BLOCKS);
  g.blocks = g.pushBlocks + 3;
  assert_int_equal(epPolicyFusedBlocks(&t, &g, 4096), 3);
  /* Only update's histograms are larger than this block. */
  c.ranks = t.ranks = t.scaleUpRanks = 1024, c.experts = 2048;
  t.bulkCopies = 0, t.smemPerBlock = 40000;
  plain = c, plain.fused = plain.indexBytes = 0;
  assert_int_equal(epPolicyMove("test", &t, 132, EP_KERNEL_DISPATCH, &c, &g), ncclSuccess);
  assert_int_equal(epPolicyMove("test", &t, 132, EP_KERNEL_DISPATCH, &plain, &alone), ncclSuccess);
  assert_memory_equal(&c, &plain, sizeof c);
  assert_memory_equal(&g, &alone, sizeof g);
}

static unsigned smsOf(epTopology t, unsigned wanted, int kernel, uint32_t layout, uint32_t ranks, uint32_t rowBytes) {
  epConfig c = {.ranks = ranks, .experts = 256, .topk = 8, .rowBytes = rowBytes, .layout = layout};
  c.weights = kernel == EP_KERNEL_DISPATCH;
  return epSmPolicy(&t, wanted, kernel, &c);
}

/* SMs by the links: what curves on H200 have shown, and the direction in which other links and layouts move it. */
static void smsFollowLinksAndLayout(void **state) {
  (void)state;
  enum {
    FLAT = EP_LAYOUT_KIND_FLAT,
    MAJOR = EP_LAYOUT_KIND_EXPERT_MAJOR,
    D = EP_KERNEL_DISPATCH,
    C = EP_KERNEL_COMBINE
  };
  epTopology t = {
      .ranks = 2, .scaleUpRanks = 2, .scaleOutRanks = 1, .arch = 90, .numSms = 132, .linkGbs = 346, .memoryGbs = 4917};
  epTopology slow = t, fast = t, unknown = t;
  unsigned flat = smsOf(t, 0, D, FLAT, 2, 14336), major = smsOf(t, 0, D, MAJOR, 2, 14336);
  unsigned sums = smsOf(t, 0, C, FLAT, 2, 14336);
  slow.linkGbs = 25, fast.linkGbs = 700, unknown.linkGbs = 0;
  assert_in_range(flat, 36, 56);
  assert_in_range(major, 56, 96);
  assert_in_range(sums, 72, 104);
  assert_int_equal(smsOf(t, 0, C, MAJOR, 2, 14336), 132);
  assert_true(smsOf(fast, 0, D, FLAT, 2, 14336) > flat);
  assert_in_range(smsOf(slow, 0, D, FLAT, 2, 14336), 18, flat);
  assert_in_range(smsOf(t, 0, D, FLAT, 2, 7168), flat, 132);
  for (uint32_t ranks = 2; ranks <= 64; ranks *= 2)
    for (int kernel = D; kernel <= C; kernel++)
      for (uint32_t layout = FLAT; layout <= MAJOR; layout++) {
        unsigned few = smsOf(t, NCCL_EP_SMS_FEW, kernel, layout, ranks, 14336),
                 all = smsOf(t, 0, kernel, layout, ranks, 14336);
        assert_true(few >= 18 && few <= all && all <= 132);
        assert_int_equal(smsOf(t, NCCL_EP_SMS_ALL, kernel, layout, ranks, 14336), 132);
        assert_int_equal(smsOf(unknown, 0, kernel, layout, ranks, 14336), 132);
        for (unsigned wanted = 1; wanted < 140; wanted += 13)
          assert_int_equal(smsOf(t, wanted, kernel, layout, ranks, 14336), wanted < 132 ? wanted : 132);
      }
}

static void callersLimitIsKept(void **state) {
  (void)state;
  epTopology t = {.numSms = 132};
  assert_int_equal(epPolicySms(&t, 0), 132);
  assert_int_equal(epPolicySms(&t, 24), 24);
  assert_int_equal(epPolicySms(&t, 500), 132);
  t.numSms = 0;
  assert_int_equal(epPolicySms(&t, 0), 1);
}

/* ---- Tensors
 * ---------------------------------------------------------------------------------------------------------------- */

static void descriptorsAreChecked(void **state) {
  (void)state;
  const epArgName name = {"call", "inputs.tokens"};
  size_t sizes[2] = {3, 64};
  ncclEpTensor_t t = NCCL_EP_TENSOR_INIT;
  t.ndim = 2, t.datatype = ncclBfloat16, t.sizes = sizes;
  assert_int_equal(epTensorCheck(name, &t, 2), ncclSuccess);
  expectError(epTensorCheck(name, NULL, 2), ncclInvalidArgument, "inputs.tokens is NULL");
  expectError(epTensorCheck(name, &t, 1), ncclInvalidArgument, "2 dimensions: expected 1");
  t.magic = 0;
  expectError(epTensorCheck(name, &t, 2), ncclInvalidArgument, "not an initialised descriptor");
  t = NCCL_EP_TENSOR_INIT, t.ndim = 2, t.datatype = ncclBfloat16;
  expectError(epTensorCheck(name, &t, 2), ncclInvalidArgument, "sizes is NULL");
  t.sizes = sizes, t.size = 40;
  expectError(epTensorCheck(name, &t, 2), ncclInvalidArgument, "size 40");
  t.size = 48, t.datatype = (ncclDataType_t)77;
  expectError(epTensorCheck(name, &t, 2), ncclInvalidArgument, "77");
  t.datatype = ncclFloat32;
  expectError(epTensorType(name, &t, ncclBfloat16), ncclInvalidArgument, "expected bfloat16");
  expectError(epTensorExtent(name, &t, 1, 65, "hidden"), ncclInvalidArgument, "is 64: expected 65 (hidden)");
  expectError(epTensorAbsent(name, &t, "backward"), ncclInvalidArgument, "expected NULL");
}

static void heapDescriptors(void **state) {
  (void)state;
  ncclEpTensor_t *t = NULL, *untouched = (ncclEpTensor_t *)state;
  size_t sizes[3] = {2, 3, 4};
  assert_int_equal(ncclEpTensorAlloc(&t, 3, ncclFloat32, sizes, NULL), ncclSuccess);
  sizes[0] = 9;
  assert_int_equal(t->sizes[0], 2);
  assert_int_equal(t->ndim, 3);
  assert_int_equal(ncclEpTensorDestroy(t), ncclSuccess);
  t = untouched;
  expectError(ncclEpTensorAlloc(NULL, 1, ncclInt8, sizes, NULL), ncclInvalidArgument, "tensor");
  expectError(ncclEpTensorAlloc(&t, 1, ncclInt8, NULL, NULL), ncclInvalidArgument, "sizes");
  expectError(ncclEpTensorAlloc(&t, 0, ncclInt8, sizes, NULL), ncclInvalidArgument, "ndim is 0");
  expectError(ncclEpTensorAlloc(&t, 9, ncclInt8, sizes, NULL), ncclInvalidArgument, "ndim is 9");
  expectError(ncclEpTensorAlloc(&t, 1, (ncclDataType_t)99, sizes, NULL), ncclInvalidArgument, "99");
  assert_ptr_equal(t, untouched);
  ncclEpTensor_t stack = NCCL_EP_TENSOR_INIT;
  expectError(ncclEpTensorDestroy(&stack), ncclInvalidArgument, "ncclEpTensorAlloc");
  /* a copy is not the library's to free, and nothing is freed twice */
  assert_int_equal(ncclEpTensorAlloc(&t, 1, ncclInt8, sizes, NULL), ncclSuccess);
  ncclEpTensor_t copy = *t;
  expectError(ncclEpTensorDestroy(&copy), ncclInvalidArgument, "no copy");
  assert_int_equal(ncclEpTensorDestroy(t), ncclSuccess);
  expectError(ncclEpTensorDestroy(t), ncclInvalidArgument, "not destroyed");
}

/* ---- Objects and configurations
 * ------------------------------------------------------------------------------------------------ */

static void objectsAreKnownByKind(void **state) {
  (void)state;
  int a = 0, b = 0;
  assert_int_equal(epObjectAdd(&a, EP_OBJECT_GROUP), 1);
  assert_int_equal(epObjectAdd(&b, EP_OBJECT_HANDLE), 1);
  assert_int_equal(epObjectExists(&a, EP_OBJECT_GROUP), 1);
  assert_int_equal(epObjectExists(&a, EP_OBJECT_HANDLE), 0);
  assert_int_equal(epObjectRemove(&a, EP_OBJECT_HANDLE), 0);
  assert_int_equal(epObjectRemove(&a, EP_OBJECT_GROUP), 1);
  assert_int_equal(epObjectRemove(&a, EP_OBJECT_GROUP), 0);
  assert_int_equal(epObjectRemove(&b, EP_OBJECT_HANDLE), 1);
}

static ncclEpGroupConfig_t groupConfig(void) {
  ncclEpGroupConfig_t c = NCCL_EP_GROUP_CONFIG_INIT;
  c.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
  c.num_experts = 64, c.max_dispatch_tokens_per_rank = 128, c.max_token_bytes = 1024, c.num_topk = 8;
  return c;
}

static void configurationsAreChecked(void **state) {
  (void)state;
  epTopology t = {.ranks = 4, .scaleUpRanks = 4, .scaleOutRanks = 1, .numSms = 8};
  ncclEpGroupConfig_t c = groupConfig(), out;
  epShape shape;
  assert_int_equal(epGroupConfigCheck("ncclEpCreateGroup", &c, &t, &out, &shape), ncclSuccess);
  assert_int_equal(out.timeout_ns, EP_TIMEOUT_NS);
  assert_int_equal(shape.topk, 8);
#define REFUSED(field, value, code, word)                                                   \
  do {                                                                                      \
    c = groupConfig();                                                                      \
    c.field = value;                                                                        \
    expectError(epGroupConfigCheck("ncclEpCreateGroup", &c, &t, &out, &shape), code, word); \
  } while (0)
  REFUSED(algorithm, (ncclEpAlgorithm_t)7, ncclInvalidArgument, "algorithm is 7");
  REFUSED(version, 0, ncclInvalidArgument, "version is 0");
  REFUSED(num_experts, 63, ncclInvalidArgument, "num_experts is 63");
  REFUSED(max_dispatch_tokens_per_rank, 0, ncclInvalidArgument, "max_dispatch_tokens_per_rank is 0");
  REFUSED(max_dispatch_tokens_per_rank, UINT32_MAX, ncclInvalidArgument, "max_dispatch_tokens_per_rank is 4294967295");
  REFUSED(max_token_bytes, 0, ncclInvalidArgument, "max_token_bytes is 0");
  REFUSED(max_token_bytes, 24, ncclInvalidArgument, "max_token_bytes is 24");
  REFUSED(max_token_bytes, 65552, ncclInvalidArgument, "65536");
  REFUSED(max_recv_tokens_per_rank, 127, ncclInvalidArgument, "max_recv_tokens_per_rank is 127");
  REFUSED(num_topk, 33, ncclInvalidArgument, "num_topk is 33");
  REFUSED(zero_copy, (ncclEpZeroCopyMode_t)9, ncclInvalidArgument, "zero_copy is 9");
  REFUSED(overflow_policy, (ncclEpOverflowPolicy_t)3, ncclInvalidArgument, "overflow_policy is 3");
  REFUSED(alloc.alloc_fn, (ncclEpAllocFn_t)(uintptr_t)state, ncclInvalidArgument, "alloc");
#undef REFUSED
  c = groupConfig();
  c.enable_mask = 1;
  assert_int_equal(epGroupConfigCheck("ncclEpCreateGroup", &c, &t, &out, &shape), ncclSuccess);
  c.zero_copy = NCCL_EP_ZERO_COPY_ON;
  expectError(epGroupConfigCheck("ncclEpCreateGroup", &c, &t, &out, &shape), ncclInvalidUsage, "enable_mask");
  c = groupConfig();
  c.zero_copy = NCCL_EP_ZERO_COPY_ON;
  assert_int_equal(epGroupConfigCheck("ncclEpCreateGroup", &c, &t, &out, &shape), ncclSuccess);
  t.ranks = t.scaleUpRanks = 64;
  expectError(epGroupConfigCheck("ncclEpCreateGroup", &c, &t, &out, &shape), ncclInvalidUsage, "more than 32 ranks");
  t.ranks = t.scaleUpRanks = 4;
  c = groupConfig();
  t.scaleOutRanks = 2, t.scaleUpRanks = 2;
  expectError(epGroupConfigCheck("ncclEpCreateGroup", &c, &t, &out, &shape), ncclInvalidUsage, "scale-up domains");
  t.gin = 1, c.zero_copy = NCCL_EP_ZERO_COPY_ON;
  expectError(epGroupConfigCheck("ncclEpCreateGroup", &c, &t, &out, &shape), ncclInvalidUsage, "zero_copy");
}

static void timeoutComesFromTheEnvironment(void **state) {
  (void)state;
  epTopology t = {.ranks = 4, .scaleUpRanks = 4, .scaleOutRanks = 1, .numSms = 8};
  ncclEpGroupConfig_t c = groupConfig(), out;
  epShape shape;
  c.timeout_ns = 5;
  setenv("NCCL_EP_TIMEOUT_MS", "250", 1);
  assert_int_equal(epGroupConfigCheck("ncclEpCreateGroup", &c, &t, &out, &shape), ncclSuccess);
  unsetenv("NCCL_EP_TIMEOUT_MS");
  assert_int_equal(out.timeout_ns, 250000000);
  assert_int_equal(epGroupConfigCheck("ncclEpCreateGroup", &c, &t, &out, &shape), ncclSuccess);
  assert_int_equal(out.timeout_ns, 5);
}

/* Hosts are given 2 s at least: a timeout may be shorter than a host is late for reasons of its own. */
static void hostsArePatient(void **state) {
  (void)state;
  epBackend be = {0};
  assert_int_equal(epBackendTimeout(), EP_TIMEOUT_NS);
  setenv("NCCL_EP_TIMEOUT_MS", "250", 1);
  assert_int_equal(epBackendTimeout(), 250000000);
  unsetenv("NCCL_EP_TIMEOUT_MS");
  epBackendPatience(&be, 250000000);
  assert_int_equal(be.patienceNs, 2000000000);
  epBackendPatience(&be, 2500000000);
  assert_int_equal(be.patienceNs, 2500000000);
}

static void differencesAreNamed(void **state) {
  (void)state;
  epTopology t = {.ranks = 4, .scaleUpRanks = 4, .scaleOutRanks = 1, .numSms = 8};
  ncclEpGroupConfig_t c = groupConfig(), out;
  epShape shape;
  epGroupWire all[4];
  assert_int_equal(epGroupConfigCheck("ncclEpCreateGroup", &c, &t, &out, &shape), ncclSuccess);
  for (int i = 0; i < 4; i++) all[i] = epGroupWireOf(&out, &shape, 2, ncclSuccess);
  assert_int_equal(epGroupWireCompare("ncclEpCreateGroup", all, 4), ncclSuccess);
  out.max_token_bytes = 2048;
  all[2] = epGroupWireOf(&out, &shape, 2, ncclSuccess);
  expectError(epGroupWireCompare("ncclEpCreateGroup", all, 4), ncclInvalidArgument,
              "max_token_bytes differs between ranks: 1024 on rank 0, 2048 on rank 2");
  all[3] = epGroupWireOf(&out, &shape, 2, ncclSystemError);
  expectError(epGroupWireCompare("ncclEpCreateGroup", all, 4), ncclSystemError, "rank 3");
}

/* ---- Public calls without anything behind them
 * ------------------------------------------------------------------------------------ */

static void versionIsTheHeaders(void **state) {
  (void)state;
  int version = 0;
  assert_int_equal(ncclEpGetVersion(&version), ncclSuccess);
  assert_int_equal(version, NCCL_EP_VERSION_CODE);
  expectError(ncclEpGetVersion(NULL), ncclInvalidArgument, "version");
}

static void nullsAndStrangersAreRefused(void **state) {
  (void)state;
  int dummy = 0;
  size_t bytes = 0;
  ncclEpGroup_t group = (ncclEpGroup_t)(void *)&dummy, none = NULL;
  ncclEpHandle_t handle = (ncclEpHandle_t)(void *)&dummy, newHandle = NULL;
  ncclEpGroupConfig_t config = groupConfig();
  ncclEpErrorInfo_t info = NCCL_EP_ERROR_INFO_INIT;
  ncclEpGroupProperties_t properties = NCCL_EP_GROUP_PROPERTIES_INIT;
  ncclEpHostCounts_t counts = NCCL_EP_HOST_COUNTS_INIT;
  expectError(ncclEpCreateGroup(&none, NULL, &config), ncclInvalidArgument, "ncclEpCreateGroup: comm is NULL");
  expectError(ncclEpCreateGroup(NULL, (ncclComm_t)(void *)&dummy, &config), ncclInvalidArgument, "ep_group");
  expectError(ncclEpCreateGroup(&none, (ncclComm_t)(void *)&dummy, NULL), ncclInvalidArgument, "config");
  assert_null(none);
  assert_int_equal(ncclEpGroupDestroy(NULL), ncclSuccess);
  assert_int_equal(ncclEpHandleDestroy(NULL), ncclSuccess);
  expectError(ncclEpGroupDestroy(group), ncclInvalidArgument, "group");
  expectError(ncclEpHandleDestroy(handle), ncclInvalidArgument, "handle");
  expectError(ncclEpHandleMemSize(group, NCCL_EP_LAYOUT_FLAT, NULL, &bytes, 4), ncclInvalidArgument, "group");
  expectError(ncclEpInitHandle(&newHandle, group, NCCL_EP_LAYOUT_FLAT, NULL, 4, NULL), ncclInvalidArgument, "group");
  expectError(ncclEpUpdateHandle(handle, NULL, NULL, NULL), ncclInvalidArgument, "handle");
  ncclEpUpdateExtConfig_t borrow = NCCL_EP_UPDATE_EXT_CONFIG_INIT;
  expectError(ncclEpUpdateHandleExt(handle, NULL, NULL, NULL, NULL), ncclInvalidArgument,
              "ncclEpUpdateHandleExt: handle");
  borrow.borrow_topk_idx = 2;
  expectError(ncclEpUpdateHandleExt(handle, NULL, NULL, &borrow, NULL), ncclInvalidArgument,
              "ncclEpUpdateHandleExt: config.borrow_topk_idx is 2: expected 0 or 1");
  borrow.magic = 0;
  expectError(ncclEpUpdateHandleExt(handle, NULL, NULL, &borrow, NULL), ncclInvalidArgument,
              "ncclEpUpdateHandleExt: config has magic");
  ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  expectError(ncclEpDispatch(handle, &in, &out, NULL, NULL, NULL), ncclInvalidArgument, "ncclEpDispatch: handle");
  expectError(ncclEpDispatchExt(handle, &in, &out, NULL, NULL, NULL, NULL), ncclInvalidArgument,
              "ncclEpDispatchExt: handle");
  expectError(ncclEpDispatchExt(handle, NULL, &out, NULL, NULL, NULL, NULL), ncclInvalidArgument,
              "ncclEpDispatchExt: inputs is NULL: expected");
  expectError(ncclEpComplete(handle, NULL, NULL), ncclInvalidArgument, "handle");
  expectError(ncclEpGetErrorInfo(group, &info), ncclInvalidArgument, "group");
  expectError(ncclEpGetGroupProperties(group, &properties), ncclInvalidArgument, "group");
  expectError(ncclEpGetHostCounts(handle, &counts), ncclInvalidArgument, "handle");
  expectError(ncclEpGetAsyncError(group, &dummy), ncclInvalidArgument, "group");
  expectError(ncclEpErrorClear(group), ncclInvalidArgument, "group");
}

/* A config struct of another release: too small or with the wrong cookie. */
static void structsAreRecognised(void **state) {
  (void)state;
  int dummy = 0;
  ncclEpGroup_t group = NULL;
  ncclEpGroupConfig_t config = groupConfig();
  ncclComm_t comm = (ncclComm_t)(void *)&dummy;
  config.size = NCCL_EP_GROUP_CONFIG_V1_SIZE - 8;
  expectError(ncclEpCreateGroup(&group, comm, &config), ncclInvalidArgument, "size");
  config = groupConfig(), config.magic = 1;
  expectError(ncclEpCreateGroup(&group, comm, &config), ncclInvalidArgument, "magic");
  /* One that has grown: the first version's size still passes. */
  ncclEpPrepareConfig_t prepare = NCCL_EP_PREPARE_CONFIG_INIT;
  prepare.size = offsetof(ncclEpPrepareConfig_t, num_bias);
  expectError(ncclEpPrepare(NULL, &prepare), ncclInvalidArgument, "ep_group");
  prepare.size -= 4;
  expectError(ncclEpPrepare(NULL, &prepare), ncclInvalidArgument, "size");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(unknownLevelIsNamed), /* first */
      cmocka_unit_test(lastErrorIsPerThread),
      cmocka_unit_test(errorsNameTheirCall),
      cmocka_unit_test(longErrorsAreCut),
      cmocka_unit_test(environmentIsChecked),
      cmocka_unit_test(environmentTableIsComplete),
      cmocka_unit_test(bufferSizesAddUp),
      cmocka_unit_test(limitsAreNamed),
      cmocka_unit_test(largestTopkKeepsPositionsInside),
      cmocka_unit_test(launchesFitTheDevice),
      cmocka_unit_test(fusedWhereItFits),
      cmocka_unit_test(smsFollowLinksAndLayout),
      cmocka_unit_test(callersLimitIsKept),
      cmocka_unit_test(descriptorsAreChecked),
      cmocka_unit_test(heapDescriptors),
      cmocka_unit_test(objectsAreKnownByKind),
      cmocka_unit_test(configurationsAreChecked),
      cmocka_unit_test(timeoutComesFromTheEnvironment),
      cmocka_unit_test(hostsArePatient),
      cmocka_unit_test(differencesAreNamed),
      cmocka_unit_test(versionIsTheHeaders),
      cmocka_unit_test(nullsAndStrangersAreRefused),
      cmocka_unit_test(structsAreRecognised),
  };
  setenv("NCCL_EP_DEBUG", "NONE", 1); /* every failure here is wanted */
  return cmocka_run_group_tests_name("host", tests, NULL, NULL);
}
