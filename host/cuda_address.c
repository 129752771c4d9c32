/* Whether an address is memory of the group's device: asked for every tensor of every call, so the driver is asked once an
 * allocation and not once a tensor. A thread remembers the address ranges of the allocations it was last told of.
 *
 * Only plain memory of the device is remembered, never a refusal. (Pinned, managed and pageable memory goes back to the
 * system when it is freed, and malloc may get its addresses next; what device memory leaves is most likely device memory
 * again.) A wrong address outside the ranges that were this device's is always refused; one that was good, was freed and
 * became another device's is refused once the range is asked for again, every EP_TRUSTED uses. The allocation's
 * CU_POINTER_ATTRIBUTE_BUFFER_ID would tell at once, but to learn it is the same question to the driver. */
#include "cuda_internal.h"

#define EP_RANGES 16u   /* a call has up to seven tensors; frameworks cut them out of few allocations */
#define EP_TRUSTED 256u /* uses of a range before it is asked for again */

typedef struct knownRange {
  epCuPtr start, bytes;
  int device;
  unsigned uses;
} knownRange;

static _Thread_local knownRange ranges[EP_RANGES];
static _Thread_local unsigned oldest; /* the next to be replaced */

static int isKnown(int device, epCuPtr p) {
  for (unsigned i = 0; i < EP_RANGES; i++) {
    knownRange *r = &ranges[i];
    if (p - r->start >= r->bytes || r->device != device) continue;
    if (r->uses++ < EP_TRUSTED) return 1;
    r->bytes = 0;
  }
  return 0;
}

/* One question, which may be asked while a stream is captured. */
static int ask(epCuda *be, epCuPtr p) {
  unsigned type = 0, managed = 0;
  int ordinal = -1, pageable = 0;
  epCuPtr start = 0;
  size_t bytes = 0;
  int wanted[] = {EP_CU_POINTER_MEMORY_TYPE, EP_CU_POINTER_IS_MANAGED, EP_CU_POINTER_DEVICE_ORDINAL,
                  EP_CU_POINTER_RANGE_START_ADDR, EP_CU_POINTER_RANGE_SIZE};
  void *values[] = {&type, &managed, &ordinal, &start, &bytes};
  epCuResult rc = be->cu->pointerGetAttributes(sizeof wanted / sizeof wanted[0], wanted, values, p);
  if (rc == EP_CU_INVALID_VALUE || (rc == EP_CU_SUCCESS && type == 0)) {
    /* Memory CUDA knows nothing of: kernels reach it only where the system shares page tables with the GPU. */
    rc = be->cu->deviceGetAttribute(&pageable, EP_CU_ATTR_PAGEABLE_MEMORY_ACCESS, be->device);
    return rc != EP_CU_SUCCESS || pageable;
  }
  if (rc != EP_CU_SUCCESS || type != EP_CU_MEMORYTYPE_DEVICE || managed) return 1;
  if (ordinal != be->topology.device) return 0;
  if (p - start < bytes) ranges[oldest++ % EP_RANGES] = (knownRange){start, bytes, ordinal, 0};
  return 1;
}

ncclResult_t epCudaIsDeviceAddress(epBackend *base, const void *dev, int *yes) {
  epCuda *be = (epCuda *)base;
  epCudaScope scope;
  ncclResult_t r;
  if (isKnown(be->topology.device, (epCuPtr)dev)) {
    *yes = 1;
    return ncclSuccess;
  }
  r = epCudaCurrent(be, &scope);
  if (r != ncclSuccess) return r;
  *yes = ask(be, (epCuPtr)dev);
  epCudaRestore(be, &scope);
  return ncclSuccess;
}
