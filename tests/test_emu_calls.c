/* What the ncclEpEmu* calls refuse, and that each refusal names the argument and what was expected. None of these calls
 * may end the process or believe a size that wraps around. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "nccl_ep_ext.h"

#define BYTES 4096

/* words: all of them stand in the line, separated by '|'. */
static void refusedAt(int line, ncclResult_t got, const char *words) {
  const char *text = ncclEpGetLastErrorString();
  char copy[256], *save = NULL;
  if (got != ncclInvalidArgument && got != ncclSystemError) fail_msg("line %d: result %d: %s", line, (int)got, text);
  if (strchr(text, '\n')) fail_msg("line %d: more than one line: %s", line, text);
  strncpy(copy, words, sizeof(copy) - 1);
  copy[sizeof(copy) - 1] = 0;
  for (char *word = strtok_r(copy, "|", &save); word; word = strtok_r(NULL, "|", &save))
    if (!strstr(text, word)) fail_msg("line %d: no \"%s\" in: %s", line, word, text);
}
#define REFUSED(call, words) refusedAt(__LINE__, call, words)

static void open1(ncclComm_t *comm, char **memory) {
  assert_int_equal(ncclEpEmuCommInitAll(comm, 1, 1, NULL), ncclSuccess);
  assert_int_equal(ncclEpEmuMalloc(*comm, (void **)memory, BYTES, "mine"), ncclSuccess);
}

static void testOptions(void **state) {
  ncclComm_t comm = NULL;
  ncclEpEmuOptions_t o = NCCL_EP_EMU_OPTIONS_INIT;
  (void)state;
  o.bug = 99;
  REFUSED(ncclEpEmuCommInitAll(&comm, 1, 1, &o), "bug 99|expected");
  o.bug = 0, o.num_sms = 1025;
  REFUSED(ncclEpEmuCommInitAll(&comm, 1, 1, &o), "num_sms 1025|1024");
  o.num_sms = UINT32_MAX;
  REFUSED(ncclEpEmuCommInitAll(&comm, 1, 1, &o), "num_sms|1024");
  o.num_sms = 0, o.no_bulk_copies = 2;
  REFUSED(ncclEpEmuCommInitAll(&comm, 1, 1, &o), "no_bulk_copies 2|0 or 1");
  o.no_bulk_copies = 0, o.no_weak_memory = 2;
  REFUSED(ncclEpEmuCommInitAll(&comm, 1, 1, &o), "no_weak_memory 2|0 or 1");
  o.no_bulk_copies = o.no_weak_memory = 1, o.num_sms = 1024;
  assert_int_equal(ncclEpEmuCommInitAll(&comm, 1, 1, &o), ncclSuccess);
  assert_int_equal(ncclEpEmuCommDestroy(comm), ncclSuccess);
}

static void testMalloc(void **state) {
  ncclComm_t comm;
  char *memory;
  void *more = NULL;
  (void)state;
  open1(&comm, &memory);
  REFUSED(ncclEpEmuMalloc(comm, NULL, 1, "x"), "ptr|expected");
  REFUSED(ncclEpEmuMalloc(comm, &more, SIZE_MAX, "x"), "bytes");
  REFUSED(ncclEpEmuMalloc(comm, &more, SIZE_MAX - 4095, "x"), "bytes");
  REFUSED(ncclEpEmuMalloc(comm, &more, SIZE_MAX / 2, "x"), "bytes");
  assert_null(more);
  REFUSED(ncclEpEmuFree(comm, memory + 16), "expected");
  assert_int_equal(ncclEpEmuFree(comm, memory), ncclSuccess);
  REFUSED(ncclEpEmuFree(comm, memory), "expected");
  assert_int_equal(ncclEpEmuCommDestroy(comm), ncclSuccess);
}

static void testCopies(void **state) {
  static const size_t sizes[] = {BYTES - 15, 2 * BYTES, SIZE_MAX - 15, SIZE_MAX, SIZE_MAX / 2 + 1};
  ncclComm_t comm;
  char *memory, *freed, host[64] = {0};
  (void)state;
  open1(&comm, &memory);
  assert_int_equal(ncclEpEmuMalloc(comm, (void **)&freed, 64, "freed"), ncclSuccess);
  assert_int_equal(ncclEpEmuFree(comm, freed), ncclSuccess);
  for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
    REFUSED(ncclEpEmuMemcpy(comm, memory + 16, host, sizes[i], NULL), "dst|mine");
    REFUSED(ncclEpEmuMemcpy(comm, host, memory + 16, sizes[i], NULL), i > 1 ? "expected" : "src|mine");
    REFUSED(ncclEpEmuMemset(comm, memory + 16, 0, sizes[i], NULL), "dst|mine");
  }
  REFUSED(ncclEpEmuMemcpy(comm, NULL, host, 64, NULL), "dst is NULL|expected");
  REFUSED(ncclEpEmuMemcpy(comm, memory, NULL, 64, NULL), "src is NULL|expected");
  REFUSED(ncclEpEmuMemset(comm, NULL, 0, 64, NULL), "dst is NULL|expected");
  REFUSED(ncclEpEmuMemcpy(comm, freed, host, 64, NULL), "dst|freed");
  REFUSED(ncclEpEmuMemcpy(comm, memory, freed, 64, NULL), "src|freed");
  REFUSED(ncclEpEmuMemcpy(comm, memory, host, 64, (cudaStream_t)host), "stream|expected");
  REFUSED(ncclEpEmuMemset(comm, memory, 0, 0, (cudaStream_t)host), "stream|expected");
  assert_int_equal(ncclEpEmuMemcpy(comm, memory + BYTES - 64, host, 64, NULL), ncclSuccess);
  assert_int_equal(ncclEpEmuMemcpy(comm, memory, NULL, 0, NULL), ncclSuccess);
  assert_int_equal(ncclEpEmuMemset(comm, memory, 0, BYTES, NULL), ncclSuccess);
  assert_int_equal(ncclEpEmuStreamSynchronize(comm, NULL), ncclSuccess);
  assert_int_equal(ncclEpEmuCommDestroy(comm), ncclSuccess);
}

static void testStreamsAndEvents(void **state) {
  ncclComm_t comm;
  cudaEvent_t event;
  char *memory, host[64];
  (void)state;
  open1(&comm, &memory);
  REFUSED(ncclEpEmuStreamCreate(comm, NULL), "stream is NULL|expected");
  REFUSED(ncclEpEmuStreamDestroy(comm, (cudaStream_t)host), "stream|expected");
  REFUSED(ncclEpEmuEventCreate(comm, NULL), "event is NULL|expected");
  REFUSED(ncclEpEmuEventRecord(comm, NULL, NULL), "event|expected");
  REFUSED(ncclEpEmuStreamWaitEvent(comm, NULL, (cudaEvent_t)host), "event|expected");
  REFUSED(ncclEpEmuEventDestroy(comm, (cudaEvent_t)host), "event|expected");
  assert_int_equal(ncclEpEmuEventCreate(comm, &event), ncclSuccess);
  assert_int_equal(ncclEpEmuEventDestroy(comm, event), ncclSuccess);
  REFUSED(ncclEpEmuEventRecord(comm, event, NULL), "event|expected");
  assert_int_equal(ncclEpEmuCommDestroy(comm), ncclSuccess);
  REFUSED(ncclEpEmuEventCreate(comm, &event), "comm");
}

static void testWindows(void **state) {
  ncclComm_t comm;
  ncclWindow_t window = NULL;
  char *memory, host[64];
  (void)state;
  open1(&comm, &memory);
  REFUSED(ncclEpEmuWindowRegister(comm, memory, BYTES, NULL), "window is NULL");
  REFUSED(ncclEpEmuWindowRegister(comm, NULL, BYTES, &window), "expected");
  REFUSED(ncclEpEmuWindowRegister(comm, host, sizeof(host), &window), "expected");
  REFUSED(ncclEpEmuWindowRegister(comm, memory, 2 * BYTES, &window), "8192|mine");
  REFUSED(ncclEpEmuWindowRegister(comm, memory, SIZE_MAX, &window), "mine");
  REFUSED(ncclEpEmuWindowRegister(comm, memory + 2048, SIZE_MAX - 1024, &window), "mine");
  REFUSED(ncclEpEmuWindowRegister(comm, memory + BYTES + 64, SIZE_MAX - 32, &window), "expected");
  REFUSED(ncclEpEmuWindowDeregister(comm, (ncclWindow_t)host), "window|expected");
  assert_null(window);
  assert_int_equal(ncclEpEmuWindowRegister(comm, memory + 2048, 2048, &window), ncclSuccess);
  assert_int_equal(ncclEpEmuWindowDeregister(comm, window), ncclSuccess);
  assert_int_equal(ncclEpEmuCommDestroy(comm), ncclSuccess);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(testOptions), cmocka_unit_test(testMalloc),
                                     cmocka_unit_test(testCopies), cmocka_unit_test(testStreamsAndEvents),
                                     cmocka_unit_test(testWindows)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
