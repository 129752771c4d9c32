/* The ncclEpEmu* functions: each loads the emulator's module if need be, and forwards. */
#include "emu.h"
#include "fail.h"
#include "nccl_ep_ext.h"
#include "structs.h"

#define FORWARD(call)             \
  const epEmuModule *m = NULL;    \
  ncclResult_t r = epEmuLoad(&m); \
  return r == ncclSuccess ? m->call : r

ncclResult_t ncclEpEmuCommInitAll(ncclComm_t *comms, int scaleOut, int scaleUp, const ncclEpEmuOptions_t *options) {
  EP_CALL();
  static const char call[] = "ncclEpEmuCommInitAll";
  ncclEpEmuOptions_t o;
  const epEmuModule *m = NULL;
  ncclResult_t r =
      epTakeOptional(call, "options", options, (unsigned)sizeof(ncclEpEmuOptions_t), 4, &o, (unsigned)sizeof o);
  if (r == ncclSuccess && !comms)
    r = epFail(ncclInvalidArgument, "%s: comms is NULL: expected room for scaleOut * scaleUp communicators", call);
  if (r == ncclSuccess && (scaleOut < 1 || scaleUp < 1 || (int64_t)scaleOut * scaleUp > EP_MAX_RANKS))
    r = epFail(ncclInvalidArgument, "%s: %d domains of %d ranks: expected 1 to %u ranks", call, scaleOut, scaleUp,
               EP_MAX_RANKS);
  if (r == ncclSuccess) r = epEmuLoad(&m);
  return r == ncclSuccess ? m->commInitAll(comms, scaleOut, scaleUp, &o) : r;
}

ncclResult_t ncclEpEmuCommDestroy(ncclComm_t comm) {
  EP_CALL();
  FORWARD(commDestroy(comm));
}

ncclResult_t ncclEpEmuMalloc(ncclComm_t comm, void **ptr, size_t bytes, const char *name) {
  EP_CALL();
  FORWARD(malloc(comm, ptr, bytes, name));
}

ncclResult_t ncclEpEmuFree(ncclComm_t comm, void *ptr) {
  EP_CALL();
  FORWARD(free(comm, ptr));
}

ncclResult_t ncclEpEmuMemcpy(ncclComm_t comm, void *dst, const void *src, size_t bytes, cudaStream_t stream) {
  EP_CALL();
  FORWARD(memcpy(comm, dst, src, bytes, stream));
}

ncclResult_t ncclEpEmuMemset(ncclComm_t comm, void *dst, int value, size_t bytes, cudaStream_t stream) {
  EP_CALL();
  FORWARD(memset(comm, dst, value, bytes, stream));
}

ncclResult_t ncclEpEmuStreamCreate(ncclComm_t comm, cudaStream_t *stream) {
  EP_CALL();
  FORWARD(streamCreate(comm, stream));
}

ncclResult_t ncclEpEmuStreamDestroy(ncclComm_t comm, cudaStream_t stream) {
  EP_CALL();
  FORWARD(streamDestroy(comm, stream));
}

ncclResult_t ncclEpEmuStreamSynchronize(ncclComm_t comm, cudaStream_t stream) {
  EP_CALL();
  FORWARD(streamSynchronize(comm, stream));
}

ncclResult_t ncclEpEmuStreamDelay(ncclComm_t comm, cudaStream_t stream, unsigned long long ns) {
  EP_CALL();
  FORWARD(streamDelay(comm, stream, ns));
}

ncclResult_t ncclEpEmuEventCreate(ncclComm_t comm, cudaEvent_t *event) {
  EP_CALL();
  FORWARD(eventCreate(comm, event));
}

ncclResult_t ncclEpEmuEventDestroy(ncclComm_t comm, cudaEvent_t event) {
  EP_CALL();
  FORWARD(eventDestroy(comm, event));
}

ncclResult_t ncclEpEmuEventRecord(ncclComm_t comm, cudaEvent_t event, cudaStream_t stream) {
  EP_CALL();
  FORWARD(eventRecord(comm, event, stream));
}

ncclResult_t ncclEpEmuStreamWaitEvent(ncclComm_t comm, cudaStream_t stream, cudaEvent_t event) {
  EP_CALL();
  FORWARD(streamWaitEvent(comm, stream, event));
}

ncclResult_t ncclEpEmuWindowRegister(ncclComm_t comm, void *buffer, size_t bytes, ncclWindow_t *window) {
  EP_CALL();
  FORWARD(windowRegister(comm, buffer, bytes, window));
}

ncclResult_t ncclEpEmuWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
  EP_CALL();
  FORWARD(windowDeregister(comm, window));
}

ncclResult_t ncclEpEmuRankStop(ncclComm_t comm, int stopped, unsigned long long after) {
  EP_CALL();
  FORWARD(rankStop(comm, stopped, after));
}

ncclResult_t ncclEpEmuGetReport(ncclComm_t comm, ncclEpEmuReport_t *report) {
  EP_CALL();
  ncclEpEmuReport_t out;
  const epEmuModule *m = NULL;
  ncclResult_t r = epTakeStruct("ncclEpEmuGetReport", "report", report, (unsigned)offsetof(ncclEpEmuReport_t, gin_puts),
                                8, &out, (unsigned)sizeof out);
  if (r == ncclSuccess) r = epEmuLoad(&m);
  if (r == ncclSuccess) r = m->report(comm, &out);
  if (r == ncclSuccess) epGiveStruct(&out, sizeof out, report);
  return r;
}
