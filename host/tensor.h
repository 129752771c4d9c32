/* Checks of tensor descriptors: pure functions of the descriptor and what is expected of it. Each failure is one line
 * that names the call, the tensor, what it is and what was expected. */
#ifndef EP_HOST_TENSOR_H_
#define EP_HOST_TENSOR_H_

#include <stddef.h>
#include <stdint.h>

#include "backend.h"
#include "nccl_ep.h"

#define EP_TENSOR_MAX_DIMS 8u
#define EP_TENSOR_MAGIC_HEAP 0xCAFED00Du /* of descriptors from ncclEpTensorAlloc */

/* "call: name", as it appears in messages. */
typedef struct epArgName {
  const char *call, *tensor;
} epArgName;

/* Bytes of an element; 0 for a type this library does not know. */
uint32_t epTypeBytes(ncclDataType_t type);
const char *epTypeName(ncclDataType_t type);

/* A usable descriptor with `ndim` dimensions and a known type; t may be NULL (refused). */
ncclResult_t epTensorCheck(epArgName name, const ncclEpTensor_t *t, unsigned ndim);
/* Dimension `dim` must be `extent`; `what` says what that is ("hidden", "tokens of the update"). */
ncclResult_t epTensorExtent(epArgName name, const ncclEpTensor_t *t, unsigned dim, uint64_t extent, const char *what);
ncclResult_t epTensorType(epArgName name, const ncclEpTensor_t *t, ncclDataType_t type);
/* The tensor must not be given. */
ncclResult_t epTensorAbsent(epArgName name, const ncclEpTensor_t *t, const char *why);
/* Resolves the local device address: `data`, or the window's. NULL without error when there are no elements. Checks the
 * alignment and that the device can address it. Not pure: asks the backend. */
ncclResult_t epTensorAddress(epArgName name, epBackend *be, const ncclEpTensor_t *t, uint32_t align, void **dev);
/* The same, and for a window-backed tensor also where peers find it (epBackendOps.windowAddress); *shared is NULL for one
 * that is not, or has no elements. */
ncclResult_t epTensorShared(epArgName name, epBackend *be, const ncclEpTensor_t *t, uint32_t align, void **dev,
                            void **shared);

/* Of each of `rows` (said as `what`) its `topk` weights or indices of `type`, or with topk 0 one: all the checks above, and the address. */
ncclResult_t epTensorChoices(epArgName name, epBackend *be, const ncclEpTensor_t *t, ncclDataType_t type, uint64_t rows,
                             const char *what, uint32_t topk, void **dev);

ncclResult_t epTensorAlloc(ncclEpTensor_t **tensor, unsigned ndim, ncclDataType_t type, const size_t *sizes);
ncclResult_t epTensorDestroy(ncclEpTensor_t *tensor);

#endif
