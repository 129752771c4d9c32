/* The fuzzed property: whatever the bytes say, no call of the host API crashes, hangs, leaks or refuses without one line of
 * text; and where all ranks' calls fared alike and kept the contract, the fabric's checkers have nothing to report and
 * no wait ends by its timeout. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"

#define CALLS 24u /* at most, of one program */

static void *fuzzRun(void *arg) {
  fuzzRank *me = arg;
  me->windowBase = fuzzDevice(me, FUZZ_WINDOW_BYTES, -1);
  if (ncclEpEmuWindowRegister(me->comm, me->windowBase, FUZZ_WINDOW_BYTES, &me->window) != ncclSuccess)
    fuzzFail(me, "no window: %s", ncclEpGetLastErrorString());
  for (size_t i = 0; i < CALLS && i * FUZZ_CALL_BYTES < me->size; i++) {
    const size_t left = me->size - i * FUZZ_CALL_BYTES;
    me->in =
        (fuzzBytes){me->data + i * FUZZ_CALL_BYTES, left < FUZZ_CALL_BYTES ? (unsigned)left : FUZZ_CALL_BYTES, 0, 0};
    fuzzCall(me);
  }
  fuzzSync(me);
  /* Handles before and after their groups. */
  for (int i = 0; i < FUZZ_HANDLES / 2; i++)
    fuzzResult(me, "ncclEpHandleDestroy", ncclEpHandleDestroy(me->handles[i].handle));
  for (unsigned i = 0; i < FUZZ_GROUPS; i++) fuzzGroupEnd(me, i);
  for (int i = FUZZ_HANDLES / 2; i < FUZZ_HANDLES; i++)
    fuzzResult(me, "ncclEpHandleDestroy", ncclEpHandleDestroy(me->handles[i].handle));
  fuzzResult(me, "ncclEpTensorDestroy", ncclEpTensorDestroy(me->heap));
  (void)ncclEpEmuWindowDeregister(me->comm,
                                  me->window); /* refused, as the next, when the rank is stuck: see the report */
  for (fuzzBlock *b = me->device; b; b = b->next) (void)ncclEpEmuFree(me->comm, b->ptr);
  while (me->device) { /* the emulator's, only the list is ours */
    fuzzBlock *b = me->device;
    me->device = b->next;
    free(b);
  }
  fuzzRelease(&me->host);
  return NULL;
}

static void fuzzEnvironment(void) {
  /* Waits inside kernels pass in simulated time, those of the host in real time: short, and nothing in the log. */
  if (setenv("NCCL_EP_TIMEOUT_MS", "200", 1) || setenv("NCCL_EP_DEBUG", "NONE", 0)) fuzzFail(NULL, "setenv failed");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  fuzzRank ranks[FUZZ_MAX_RANKS];
  ncclComm_t comms[FUZZ_MAX_RANKS] = {0};
  pthread_t threads[FUZZ_MAX_RANKS];
  ncclEpEmuOptions_t options = NCCL_EP_EMU_OPTIONS_INIT;
  ncclEpEmuReport_t report = NCCL_EP_EMU_REPORT_INIT;
  const unsigned world = size ? data[0] : 0, n = 1 + world % FUZZ_MAX_RANKS, hybrid = world / 3 % 4 == 0;
  int blind = 0, lost = 0, traps = 0;
  pthread_once(&once, fuzzEnvironment);
  options.num_sms = world / 12 % 5, options.no_bulk_copies = world / 60 % 2, options.seed = size > 1 ? data[1] : 0;
  if (ncclEpEmuCommInitAll(comms, hybrid ? (int)n : 1, hybrid ? 1 : (int)n, &options) != ncclSuccess)
    fuzzFail(NULL, "no emulated communicators: %s", ncclEpGetLastErrorString());
  for (unsigned i = 0; i < n; i++) {
    ranks[i] = (fuzzRank){.data = size > 2 ? data + 2 : data,
                          .size = size > 2 ? size - 2 : 0,
                          .ranks = (int)n,
                          .rank = (int)i,
                          .plain = n == 1 || !hybrid,
                          .tame = world / 128,
                          .comm = comms[i]};
    if (pthread_create(&threads[i], NULL, fuzzRun, &ranks[i])) fuzzFail(NULL, "no thread for rank %u", i);
  }
  for (unsigned i = 0; i < n; i++)
    if (pthread_join(threads[i], NULL)) fuzzFail(NULL, "rank %u cannot be joined", i);
  for (unsigned i = 0; i < n; i++) {
    const unsigned both = ranks[i].resultCount < ranks[0].resultCount ? ranks[i].resultCount : ranks[0].resultCount;
    blind |= ranks[i].blind | (memcmp(ranks[i].results, ranks[0].results, both) != 0);
    lost |= ranks[i].lost, traps |= ranks[i].traps;
  }
  if (ncclEpEmuGetReport(comms[0], &report) != ncclSuccess) fuzzFail(NULL, "no report: %s", ncclEpGetLastErrorString());
  if (getenv("FUZZ_TRACE"))
    fprintf(stderr, "blind %d tame %d faults %u n %u\n", blind, ranks[0].tame, report.faults, n);
  if (lost && !traps && !report.faults && !blind)
    fuzzFail(NULL, "a group was lost although all ranks' calls fared alike");
  if (report.faults && !blind) fuzzFail(NULL, "the fabric reports %u: %s", report.faults, report.text);
  for (unsigned i = 0; i < n; i++)
    if (ncclEpEmuCommDestroy(comms[i]) != ncclSuccess)
      fuzzFail(NULL, "ncclEpEmuCommDestroy: %s", ncclEpGetLastErrorString());
  return 0;
}
