/* The functions of nccl_ep.h: struct headers are checked and copied to the current version here, then the host runtime
 * does the work. */
#include "fail.h"
#include "masks.h"
#include "operation.h"
#include "runtime.h"
#include "structs.h"
#include "tensor.h"

#define TAKE(call, base, type, field, from, to) \
  epTakeStruct(call, #from, from, base##_V1_SIZE, field, to, (unsigned)sizeof(type))
#define TAKE_OPTIONAL(call, base, type, field, from, to) \
  epTakeOptional(call, #from, from, base##_V1_SIZE, field, to, (unsigned)sizeof(type))

ncclResult_t ncclEpGetVersion(int *version) {
  EP_CALL();
  if (!version) return epFail(ncclInvalidArgument, "ncclEpGetVersion: version is NULL: expected room for an int");
  *version = NCCL_EP_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t ncclEpTensorAlloc(ncclEpTensor_t **tensor, unsigned int ndim, ncclDataType_t datatype, const size_t *sizes,
                               const ncclEpTensorAllocConfig_t *config) {
  EP_CALL();
  ncclEpTensorAllocConfig_t c;
  ncclResult_t r =
      TAKE_OPTIONAL("ncclEpTensorAlloc", NCCL_EP_TENSOR_ALLOC_CONFIG, ncclEpTensorAllocConfig_t, 4, config, &c);
  return r == ncclSuccess ? epTensorAlloc(tensor, ndim, datatype, sizes) : r;
}

ncclResult_t ncclEpTensorDestroy(ncclEpTensor_t *tensor) {
  EP_CALL();
  return epTensorDestroy(tensor);
}

ncclResult_t ncclEpCreateGroup(ncclEpGroup_t *ep_group, ncclComm_t comm, const ncclEpGroupConfig_t *config) {
  EP_CALL();
  static const char call[] = "ncclEpCreateGroup";
  ncclEpGroupConfig_t c;
  ncclResult_t r = TAKE(call, NCCL_EP_GROUP_CONFIG, ncclEpGroupConfig_t, 4, config, &c);
  return r == ncclSuccess ? epGroupCreate(call, ep_group, comm, &c, &(ncclEpGroupExtConfig_t){0}) : r;
}

ncclResult_t ncclEpGroupDestroy(ncclEpGroup_t ep_group) {
  EP_CALL();
  return epGroupDestroy(ep_group);
}

ncclResult_t ncclEpHandleMemSize(ncclEpGroup_t ep_group, ncclEpLayout_t layout, const ncclEpHandleConfig_t *config,
                                 size_t *size_out, int num_topk) {
  EP_CALL();
  ncclEpHandleConfig_t c;
  ncclResult_t r = TAKE_OPTIONAL("ncclEpHandleMemSize", NCCL_EP_HANDLE_CONFIG, ncclEpHandleConfig_t, 8, config, &c);
  return r == ncclSuccess ? epHandleMemSize(ep_group, layout, &c, size_out, num_topk) : r;
}

ncclResult_t ncclEpInitHandle(ncclEpHandle_t *handle, ncclEpGroup_t ep_group, ncclEpLayout_t layout,
                              const ncclEpHandleConfig_t *config, int num_topk, const ncclEpTensor_t *handle_mem) {
  EP_CALL();
  ncclEpHandleConfig_t c;
  ncclResult_t r = TAKE_OPTIONAL("ncclEpInitHandle", NCCL_EP_HANDLE_CONFIG, ncclEpHandleConfig_t, 8, config, &c);
  return r == ncclSuccess ? epHandleInit(handle, ep_group, layout, &c, num_topk, handle_mem) : r;
}

ncclResult_t ncclEpUpdateHandle(ncclEpHandle_t handle, const ncclEpTensor_t *topk_idx,
                                const ncclEpLayoutInfo_t *layout_info, cudaStream_t stream) {
  EP_CALL();
  static const char call[] = "ncclEpUpdateHandle";
  ncclEpLayoutInfo_t info;
  ncclResult_t r = TAKE_OPTIONAL(call, NCCL_EP_LAYOUT_INFO, ncclEpLayoutInfo_t, 4, layout_info, &info);
  return r == ncclSuccess ? epUpdate(call, handle, topk_idx, &info, 0, stream) : r;
}

ncclResult_t ncclEpCreateHandle(ncclEpHandle_t *handle, ncclEpGroup_t ep_group, ncclEpLayout_t layout,
                                const ncclEpTensor_t *topk_idx, const ncclEpLayoutInfo_t *layout_info,
                                const ncclEpHandleConfig_t *config, cudaStream_t stream) {
  EP_CALL();
  static const char call[] = "ncclEpCreateHandle";
  ncclEpLayoutInfo_t info;
  ncclEpHandleConfig_t c;
  ncclResult_t r = TAKE_OPTIONAL(call, NCCL_EP_LAYOUT_INFO, ncclEpLayoutInfo_t, 4, layout_info, &info);
  if (r == ncclSuccess) r = TAKE_OPTIONAL(call, NCCL_EP_HANDLE_CONFIG, ncclEpHandleConfig_t, 8, config, &c);
  return r == ncclSuccess ? epHandleCreate(handle, ep_group, layout, topk_idx, &info, &c, stream) : r;
}

ncclResult_t ncclEpHandleDestroy(ncclEpHandle_t handle) {
  EP_CALL();
  return epHandleDestroy(handle);
}

ncclResult_t epEntryDispatch(const char *call, ncclEpHandle_t handle, const ncclEpDispatchInputs_t *inputs,
                             const ncclEpDispatchOutputs_t *outputs, const ncclEpLayoutInfo_t *layout_info,
                             const ncclEpDispatchConfig_t *config, const ncclEpDispatchExtConfig_t *ext,
                             cudaStream_t stream) {
  ncclEpDispatchInputs_t in;
  ncclEpDispatchOutputs_t out;
  ncclEpLayoutInfo_t info;
  ncclEpDispatchConfig_t c;
  ncclResult_t r = TAKE(call, NCCL_EP_DISPATCH_INPUTS, ncclEpDispatchInputs_t, 8, inputs, &in);
  if (r == ncclSuccess) r = TAKE(call, NCCL_EP_DISPATCH_OUTPUTS, ncclEpDispatchOutputs_t, 8, outputs, &out);
  if (r == ncclSuccess) r = TAKE_OPTIONAL(call, NCCL_EP_LAYOUT_INFO, ncclEpLayoutInfo_t, 4, layout_info, &info);
  if (r == ncclSuccess) r = TAKE_OPTIONAL(call, NCCL_EP_DISPATCH_CONFIG, ncclEpDispatchConfig_t, 4, config, &c);
  return r == ncclSuccess ? epDispatch(call, handle, &in, &out, &info, &c, ext, stream) : r;
}

ncclResult_t ncclEpDispatch(ncclEpHandle_t handle, const ncclEpDispatchInputs_t *inputs,
                            const ncclEpDispatchOutputs_t *outputs, const ncclEpLayoutInfo_t *layout_info,
                            const ncclEpDispatchConfig_t *config, cudaStream_t stream) {
  EP_CALL();
  const ncclEpDispatchExtConfig_t none = NCCL_EP_DISPATCH_EXT_CONFIG_INIT;
  return epEntryDispatch("ncclEpDispatch", handle, inputs, outputs, layout_info, config, &none, stream);
}

ncclResult_t epEntryCombine(const char *call, ncclEpHandle_t handle, const ncclEpCombineInputs_t *inputs,
                            const ncclEpCombineOutputs_t *outputs, const ncclEpCombineConfig_t *config,
                            const ncclEpCombineExtConfig_t *ext, cudaStream_t stream) {
  ncclEpCombineInputs_t in;
  ncclEpCombineOutputs_t out;
  ncclEpCombineConfig_t c;
  ncclResult_t r = TAKE(call, NCCL_EP_COMBINE_INPUTS, ncclEpCombineInputs_t, 8, inputs, &in);
  if (r == ncclSuccess) r = TAKE(call, NCCL_EP_COMBINE_OUTPUTS, ncclEpCombineOutputs_t, 8, outputs, &out);
  if (r == ncclSuccess) r = TAKE_OPTIONAL(call, NCCL_EP_COMBINE_CONFIG, ncclEpCombineConfig_t, 4, config, &c);
  return r == ncclSuccess ? epCombine(call, handle, &in, &out, &c, ext, stream) : r;
}

ncclResult_t ncclEpCombine(ncclEpHandle_t handle, const ncclEpCombineInputs_t *inputs,
                           const ncclEpCombineOutputs_t *outputs, const ncclEpCombineConfig_t *config,
                           cudaStream_t stream) {
  EP_CALL();
  const ncclEpCombineExtConfig_t none = NCCL_EP_COMBINE_EXT_CONFIG_INIT;
  return epEntryCombine("ncclEpCombine", handle, inputs, outputs, config, &none, stream);
}

ncclResult_t ncclEpComplete(ncclEpHandle_t handle, const ncclEpCompleteConfig_t *config, cudaStream_t stream) {
  EP_CALL();
  static const char call[] = "ncclEpComplete";
  ncclEpCompleteConfig_t c;
  ncclResult_t r = TAKE_OPTIONAL(call, NCCL_EP_COMPLETE_CONFIG, ncclEpCompleteConfig_t, 4, config, &c);
  epIssue how = {0};
  return r == ncclSuccess ? epOperationComplete(call, handle, &how, stream) : r;
}

ncclResult_t ncclEpMaskQuery(ncclEpGroup_t ep_group, int *mask_status, cudaStream_t stream) {
  EP_CALL();
  return epMaskQuery(ep_group, mask_status, stream);
}

ncclResult_t ncclEpMaskUpdate(ncclEpGroup_t ep_group, const int *mask, cudaStream_t stream) {
  EP_CALL();
  return epMaskUpdate(ep_group, mask, stream);
}

ncclResult_t ncclEpMaskClean(ncclEpGroup_t ep_group, cudaStream_t stream) {
  EP_CALL();
  return epMaskClean(ep_group, stream);
}

ncclResult_t ncclEpGetAsyncError(ncclEpGroup_t ep_group, int *error_out) {
  EP_CALL();
  ncclResult_t r = epGroupFind("ncclEpGetAsyncError", ep_group);
  if (r == ncclSuccess && !error_out)
    r = epFail(ncclInvalidArgument, "ncclEpGetAsyncError: error_out is NULL: expected room for an int");
  if (r == ncclSuccess) *error_out = epGroupAsyncError(ep_group);
  return r;
}

ncclResult_t ncclEpErrorClear(ncclEpGroup_t ep_group) {
  EP_CALL();
  ncclResult_t r = epGroupFind("ncclEpErrorClear", ep_group);
  if (r == ncclSuccess) epGroupErrorClear(ep_group);
  return r;
}
