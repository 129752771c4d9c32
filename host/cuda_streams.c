/* Streams and events of the CUDA backend. */
#include "cuda_internal.h"

ncclResult_t epCudaStreamCreate(epBackend *base, cudaStream_t *stream) {
  epCuda *be = (epCuda *)base;
  epCudaScope scope;
  int least = 0, greatest = 0;
  epCuStream made = NULL;
  epCuResult rc;
  ncclResult_t r = epCudaEnter(be, &scope);
  if (r != ncclSuccess) return r;
  rc = be->cu->ctxGetStreamPriorityRange(&least, &greatest);
  if (rc == EP_CU_SUCCESS) rc = be->cu->streamCreateWithPriority(&made, EP_CU_STREAM_NON_BLOCKING, greatest);
  if (rc != EP_CU_SUCCESS)
    r = epCuFail(be->cu, rc, "a communication stream on device %d", be->topology.device);
  else
    *stream = (cudaStream_t)made;
  epCudaLeave(be, &scope);
  return r;
}

ncclResult_t epCudaStreamDestroy(epBackend *base, cudaStream_t stream) {
  epCuda *be = (epCuda *)base;
  epCudaScope scope;
  ncclResult_t r = epCudaEnter(be, &scope);
  if (r != ncclSuccess) return r;
  epCuResult rc = be->cu->streamDestroy((epCuStream)stream);
  if (rc != EP_CU_SUCCESS) r = epCuFail(be->cu, rc, "release of the communication stream");
  epCudaLeave(be, &scope);
  return r;
}

ncclResult_t epCudaEventCreate(epBackend *base, cudaEvent_t *event) {
  epCuda *be = (epCuda *)base;
  epCudaScope scope;
  epCuEvent made = NULL;
  ncclResult_t r = epCudaEnter(be, &scope);
  if (r != ncclSuccess) return r;
  epCuResult rc = be->cu->eventCreate(&made, EP_CU_EVENT_DISABLE_TIMING);
  if (rc != EP_CU_SUCCESS)
    r = epCuFail(be->cu, rc, "an event on device %d", be->topology.device);
  else
    *event = (cudaEvent_t)made;
  epCudaLeave(be, &scope);
  return r;
}

ncclResult_t epCudaEventDestroy(epBackend *base, cudaEvent_t event) {
  epCuda *be = (epCuda *)base;
  epCudaScope scope;
  ncclResult_t r = epCudaEnter(be, &scope);
  if (r != ncclSuccess) return r;
  epCuResult rc = be->cu->eventDestroy((epCuEvent)event);
  if (rc != EP_CU_SUCCESS) r = epCuFail(be->cu, rc, "release of an event");
  epCudaLeave(be, &scope);
  return r;
}

ncclResult_t epCudaEventRecord(epBackend *base, cudaEvent_t event, cudaStream_t stream) {
  epCuda *be = (epCuda *)base;
  epCudaScope scope;
  ncclResult_t r = epCudaCurrent(be, &scope);
  if (r != ncclSuccess) return r;
  epCuResult rc = be->cu->eventRecord((epCuEvent)event, (epCuStream)stream);
  if (rc != EP_CU_SUCCESS)
    r = epCuFail(be->cu, rc, "event %p: it cannot be recorded on stream %p", (void *)event, (void *)stream);
  epCudaRestore(be, &scope);
  return r;
}

ncclResult_t epCudaStreamWait(epBackend *base, cudaStream_t stream, cudaEvent_t event) {
  epCuda *be = (epCuda *)base;
  epCudaScope scope;
  ncclResult_t r = epCudaCurrent(be, &scope);
  if (r != ncclSuccess) return r;
  epCuResult rc = be->cu->streamWaitEvent((epCuStream)stream, (epCuEvent)event, 0);
  if (rc != EP_CU_SUCCESS)
    r = epCuFail(be->cu, rc, "stream %p: it cannot wait for event %p", (void *)stream, (void *)event);
  epCudaRestore(be, &scope);
  return r;
}
