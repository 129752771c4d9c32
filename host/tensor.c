/* Tensor descriptors: checks, addresses, and those that live on the heap. */
#include "tensor.h"

#include <stdlib.h>
#include <string.h>

#include "fail.h"
#include "object.h"

static const struct {
  int type;
  uint32_t bytes;
  const char *name;
} epTypes[] = {{ncclInt8, 1, "int8"},       {ncclUint8, 1, "uint8"},
               {ncclInt32, 4, "int32"},     {ncclUint32, 4, "uint32"},
               {ncclInt64, 8, "int64"},     {ncclUint64, 8, "uint64"},
               {ncclFloat16, 2, "float16"}, {ncclFloat32, 4, "float32"},
               {ncclFloat64, 8, "float64"}, {ncclBfloat16, 2, "bfloat16"},
               {10, 1, "float8e4m3"},       {11, 1, "float8e5m2"},
               {12, 1, "float4x2"}};

uint32_t epTypeBytes(ncclDataType_t type) {
  for (size_t i = 0; i < sizeof epTypes / sizeof epTypes[0]; i++)
    if (epTypes[i].type == (int)type) return epTypes[i].bytes;
  return 0;
}

const char *epTypeName(ncclDataType_t type) {
  for (size_t i = 0; i < sizeof epTypes / sizeof epTypes[0]; i++)
    if (epTypes[i].type == (int)type) return epTypes[i].name;
  return "unknown type";
}

ncclResult_t epTensorCheck(epArgName name, const ncclEpTensor_t *t, unsigned ndim) {
  if (!t)
    return epFail(ncclInvalidArgument, "%s: %s is NULL: expected a %u-dimensional tensor", name.call, name.tensor,
                  ndim);
  if ((t->magic != NCCL_EP_TENSOR_MAGIC && t->magic != EP_TENSOR_MAGIC_HEAP) || t->size < NCCL_EP_TENSOR_V1_SIZE)
    return epFail(ncclInvalidArgument,
                  "%s: %s is not an initialised descriptor (size %u, magic %#x): expected NCCL_EP_TENSOR_INIT or "
                  "ncclEpTensorAlloc",
                  name.call, name.tensor, t->size, t->magic);
  if (t->ndim != ndim)
    return epFail(ncclInvalidArgument, "%s: %s has %u dimensions: expected %u", name.call, name.tensor, t->ndim, ndim);
  if (!t->sizes)
    return epFail(ncclInvalidArgument, "%s: %s.sizes is NULL: expected %u extents", name.call, name.tensor, ndim);
  if (!epTypeBytes(t->datatype))
    return epFail(ncclInvalidArgument, "%s: %s.datatype is %d: expected an ncclDataType_t", name.call, name.tensor,
                  (int)t->datatype);
  return ncclSuccess;
}

ncclResult_t epTensorExtent(epArgName name, const ncclEpTensor_t *t, unsigned dim, uint64_t extent, const char *what) {
  if (t->sizes[dim] == extent) return ncclSuccess;
  return epFail(ncclInvalidArgument, "%s: %s.sizes[%u] is %zu: expected %llu (%s)", name.call, name.tensor, dim,
                t->sizes[dim], (unsigned long long)extent, what);
}

ncclResult_t epTensorType(epArgName name, const ncclEpTensor_t *t, ncclDataType_t type) {
  if (t->datatype == type) return ncclSuccess;
  return epFail(ncclInvalidArgument, "%s: %s is %s: expected %s", name.call, name.tensor, epTypeName(t->datatype),
                epTypeName(type));
}

ncclResult_t epTensorAbsent(epArgName name, const ncclEpTensor_t *t, const char *why) {
  if (!t) return ncclSuccess;
  return epFail(ncclInvalidArgument, "%s: %s is given: expected NULL (%s)", name.call, name.tensor, why);
}

/* Of the whole tensor; the largest number where there is none. */
static uint64_t epTensorBytes(const ncclEpTensor_t *t) {
  uint64_t bytes = epTypeBytes(t->datatype);
  for (unsigned i = 0; i < t->ndim; i++)
    if (__builtin_mul_overflow(bytes, (uint64_t)t->sizes[i], &bytes)) return UINT64_MAX;
  return bytes;
}

static ncclResult_t epTensorResolve(epArgName name, epBackend *be, const ncclEpTensor_t *t, uint32_t align, void **dev,
                                    void **shared) {
  ncclResult_t r;
  void *address = t->data;
  int yes = 1, empty = 0;
  for (unsigned i = 0; i < t->ndim; i++) empty |= t->sizes[i] == 0;
  *dev = NULL;
  if (empty) return ncclSuccess;
  if (!address && t->win_hdl) {
    epCallArgument(name.tensor);
    r = be->ops->windowAddress(be, t->win_hdl, t->win_offset, epTensorBytes(t), &address, shared);
    epCallArgument(NULL);
    if (r != ncclSuccess) return r;
  }
  if (!address)
    return epFail(ncclInvalidArgument, "%s: %s has neither data nor a window: expected device memory", name.call,
                  name.tensor);
  if ((uintptr_t)address % align)
    return t->data ? epFail(ncclInvalidArgument, "%s: %s is at %p: expected an address that is a multiple of %u",
                            name.call, name.tensor, address, align)
                   : epFail(ncclInvalidArgument,
                            "%s: %s.win_offset is %llu: expected the window's address and it to make a multiple of %u",
                            name.call, name.tensor, (unsigned long long)t->win_offset, align);
  r = be->ops->isDeviceAddress(be, address, &yes);
  if (r != ncclSuccess) return r;
  if (!yes)
    return epFail(ncclInvalidArgument, "%s: %s at %p is not memory of this group's device: expected memory of it",
                  name.call, name.tensor, address);
  *dev = address;
  return ncclSuccess;
}

ncclResult_t epTensorAddress(epArgName name, epBackend *be, const ncclEpTensor_t *t, uint32_t align, void **dev) {
  return epTensorResolve(name, be, t, align, dev, NULL);
}

ncclResult_t epTensorShared(epArgName name, epBackend *be, const ncclEpTensor_t *t, uint32_t align, void **dev,
                            void **shared) {
  *shared = NULL;
  return epTensorResolve(name, be, t, align, dev, shared);
}

/* A descriptor from the heap and its own copy of the extents: the caller may replace `sizes` for a while. */
typedef struct epHeapTensor {
  ncclEpTensor_t tensor;
  size_t sizes[EP_TENSOR_MAX_DIMS];
} epHeapTensor;

ncclResult_t epTensorChoices(epArgName name, epBackend *be, const ncclEpTensor_t *t, ncclDataType_t type, uint64_t rows,
                             const char *what, uint32_t topk, void **dev) {
  ncclResult_t r = epTensorCheck(name, t, topk ? 2 : 1);
  if (r == ncclSuccess) r = epTensorType(name, t, type);
  if (r == ncclSuccess) r = epTensorExtent(name, t, 0, rows, what);
  if (r == ncclSuccess && topk) r = epTensorExtent(name, t, 1, topk, "top-k of the routing");
  return r == ncclSuccess ? epTensorAddress(name, be, t, epTypeBytes(type), dev) : r;
}

ncclResult_t epTensorAlloc(ncclEpTensor_t **tensor, unsigned ndim, ncclDataType_t type, const size_t *sizes) {
  epHeapTensor *heap;
  if (!tensor || !sizes)
    return epFail(ncclInvalidArgument, "ncclEpTensorAlloc: %s",
                  tensor ? "sizes is NULL: expected ndim extents" : "tensor is NULL: expected room for a pointer");
  if (ndim == 0 || ndim > EP_TENSOR_MAX_DIMS)
    return epFail(ncclInvalidArgument, "ncclEpTensorAlloc: ndim is %u: expected 1 to %u", ndim, EP_TENSOR_MAX_DIMS);
  if (!epTypeBytes(type))
    return epFail(ncclInvalidArgument, "ncclEpTensorAlloc: datatype is %d: expected an ncclDataType_t", (int)type);
  heap = calloc(1, sizeof *heap);
  if (!heap) return epFail(ncclSystemError, "ncclEpTensorAlloc: out of host memory");
  memcpy(heap->sizes, sizes, ndim * sizeof sizes[0]);
  heap->tensor = NCCL_EP_TENSOR_INIT;
  heap->tensor.magic = EP_TENSOR_MAGIC_HEAP;
  heap->tensor.ndim = ndim;
  heap->tensor.datatype = type;
  heap->tensor.sizes = heap->sizes;
  if (!epObjectAdd(&heap->tensor, EP_OBJECT_TENSOR)) {
    free(heap);
    return epFail(ncclSystemError, "ncclEpTensorAlloc: out of host memory");
  }
  *tensor = &heap->tensor;
  return ncclSuccess;
}

ncclResult_t epTensorDestroy(ncclEpTensor_t *tensor) {
  if (!tensor) return ncclSuccess;
  /* Looked up before it is read: a copy of a descriptor, or one that is destroyed, is not ours to free. */
  if (!epObjectRemove(tensor, EP_OBJECT_TENSOR))
    return epFail(
        ncclInvalidArgument,
        "ncclEpTensorDestroy: tensor %p is not a descriptor that ncclEpTensorAlloc made: expected one that is "
        "not destroyed, and no copy",
        (void *)tensor);
  tensor->magic = 0;
  free((epHeapTensor *)(void *)tensor);
  return ncclSuccess;
}
