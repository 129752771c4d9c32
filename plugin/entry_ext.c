/* The functions of nccl_ep_ext.h, but for those of the emulated fabric. */
#include "fail.h"
#include "operation.h"
#include "runtime.h"
#include "nccl_ep_ext.h"
#include "structs.h"

/* Structs that have had one version so far: their size is the least. */
#define TAKE(call, type, from, to) \
  epTakeStruct(call, #from, from, (unsigned)sizeof(type), 4, to, (unsigned)sizeof(type))

const char *ncclEpGetLastErrorString(void) { return epLastError(); }

ncclResult_t ncclEpGetErrorInfo(ncclEpGroup_t group, ncclEpErrorInfo_t *info) {
  EP_CALL();
  static const char call[] = "ncclEpGetErrorInfo";
  ncclEpErrorInfo_t out;
  ncclResult_t r = TAKE(call, ncclEpErrorInfo_t, info, &out);
  if (r == ncclSuccess) r = epGroupFind(call, group);
  if (r == ncclSuccess) {
    epGroupErrorInfo(group, &out);
    epGiveStruct(&out, sizeof out, info);
  }
  return r;
}

ncclResult_t ncclEpCalculateBufferSize(ncclComm_t comm, const ncclEpBufferSizeConfig_t *config,
                                       ncclEpBufferSize_t *sizes) {
  EP_CALL();
  static const char call[] = "ncclEpCalculateBufferSize";
  ncclEpBufferSizeConfig_t c;
  ncclEpBufferSize_t out;
  ncclResult_t r = epTakeStruct(call, "config", config, NCCL_EP_FIELD_END(ncclEpBufferSizeConfig_t, combine_datatype),
                                4, &c, (unsigned)sizeof c); /* low_latency came later, then enable_mask and in_flight */
  if (r == ncclSuccess)
    r = epTakeStruct(call, "sizes", sizes, NCCL_EP_FIELD_END(ncclEpBufferSize_t, queue_pairs), 4, &out,
                     (unsigned)sizeof out); /* all_window_bytes came later */
  if (r == ncclSuccess) r = epBufferSize(comm, &c, &out);
  if (r == ncclSuccess) epGiveStruct(&out, sizeof out, sizes);
  return r;
}

ncclResult_t ncclEpCreateGroupExt(ncclEpGroup_t *ep_group, ncclComm_t comm, const ncclEpGroupConfig_t *config,
                                  const ncclEpGroupExtConfig_t *ext_config) {
  EP_CALL();
  static const char call[] = "ncclEpCreateGroupExt";
  ncclEpGroupConfig_t c;
  ncclEpGroupExtConfig_t ext;
  ncclResult_t r = epTakeStruct(call, "config", config, NCCL_EP_GROUP_CONFIG_V1_SIZE, 4, &c, (unsigned)sizeof c);
  if (r == ncclSuccess)
    r = epTakeOptional(call, "ext_config", ext_config, NCCL_EP_FIELD_END(ncclEpGroupExtConfig_t, single_reduction), 4,
                       &ext, (unsigned)sizeof ext); /* traffic_class came later, then max_in_flight */
  return r == ncclSuccess ? epGroupCreate(call, ep_group, comm, &c, &ext) : r;
}

ncclResult_t ncclEpGetGroupProperties(ncclEpGroup_t group, ncclEpGroupProperties_t *properties) {
  EP_CALL();
  ncclEpGroupProperties_t out;
  ncclResult_t r = epTakeStruct("ncclEpGetGroupProperties", "properties", properties,
                                NCCL_EP_FIELD_END(ncclEpGroupProperties_t, queue_pairs), 4, &out,
                                (unsigned)sizeof out); /* those of expert-major came later, then all_window_bytes */
  if (r == ncclSuccess) r = epGroupProperties(group, &out);
  if (r == ncclSuccess) epGiveStruct(&out, sizeof out, properties);
  return r;
}

ncclResult_t ncclEpUpdateHandleExt(ncclEpHandle_t handle, const ncclEpTensor_t *topk_idx,
                                   const ncclEpLayoutInfo_t *layout_info, const ncclEpUpdateExtConfig_t *config,
                                   cudaStream_t stream) {
  EP_CALL();
  static const char call[] = "ncclEpUpdateHandleExt";
  ncclEpLayoutInfo_t info;
  ncclEpUpdateExtConfig_t c;
  int options;
  ncclResult_t r =
      epTakeOptional(call, "layout_info", layout_info, NCCL_EP_LAYOUT_INFO_V1_SIZE, 4, &info, (unsigned)sizeof info);
  if (r == ncclSuccess)
    r = epTakeOptional(call, "config", config, NCCL_EP_FIELD_END(ncclEpUpdateExtConfig_t, borrow_topk_idx), 4, &c,
                       (unsigned)sizeof c); /* cumulative_counters came later */
  if (r == ncclSuccess && c.borrow_topk_idx != 0 && c.borrow_topk_idx != 1)
    r = epFail(ncclInvalidArgument, "%s: config.borrow_topk_idx is %d: expected 0 or 1", call, c.borrow_topk_idx);
  if (r == ncclSuccess && c.cumulative_counters != 0 && c.cumulative_counters != 1)
    r = epFail(ncclInvalidArgument, "%s: config.cumulative_counters is %d: expected 0 or 1", call,
               c.cumulative_counters);
  if (r != ncclSuccess) return r;
  options = (c.borrow_topk_idx ? EP_UPDATE_BORROW : 0) | (c.cumulative_counters ? EP_UPDATE_ADD : 0);
  return epUpdate(call, handle, topk_idx, &info, options, stream);
}

ncclResult_t ncclEpDispatchExt(ncclEpHandle_t handle, const ncclEpDispatchInputs_t *inputs,
                               const ncclEpDispatchOutputs_t *outputs, const ncclEpLayoutInfo_t *layout_info,
                               const ncclEpDispatchConfig_t *config, const ncclEpDispatchExtConfig_t *ext_config,
                               cudaStream_t stream) {
  EP_CALL();
  static const char call[] = "ncclEpDispatchExt";
  ncclEpDispatchExtConfig_t ext;
  ncclResult_t r =
      epTakeOptional(call, "ext_config", ext_config, NCCL_EP_FIELD_END(ncclEpDispatchExtConfig_t, scale_column_stride),
                     4, &ext, (unsigned)sizeof ext); /* num_sms came later, then events */
  return r == ncclSuccess ? epEntryDispatch(call, handle, inputs, outputs, layout_info, config, &ext, stream) : r;
}

ncclResult_t ncclEpCombineExt(ncclEpHandle_t handle, const ncclEpCombineInputs_t *inputs,
                              const ncclEpCombineOutputs_t *outputs, const ncclEpCombineConfig_t *config,
                              const ncclEpCombineExtConfig_t *ext_config, cudaStream_t stream) {
  EP_CALL();
  static const char call[] = "ncclEpCombineExt";
  ncclEpCombineExtConfig_t ext;
  ncclResult_t r = epTakeOptional(call, "ext_config", ext_config, NCCL_EP_FIELD_END(ncclEpCombineExtConfig_t, bias), 4,
                                  &ext, (unsigned)sizeof ext); /* events came later */
  return r == ncclSuccess ? epEntryCombine(call, handle, inputs, outputs, config, &ext, stream) : r;
}

ncclResult_t ncclEpCompleteExt(ncclEpHandle_t handle, const ncclEpCompleteExtConfig_t *config, cudaStream_t stream) {
  EP_CALL();
  static const char call[] = "ncclEpCompleteExt";
  ncclEpCompleteExtConfig_t c;
  epIssue how = {0};
  ncclResult_t r = epTakeOptional(call, "config", config, (unsigned)sizeof c, 4, &c, (unsigned)sizeof c);
  if (r != ncclSuccess) return r;
  how.start = c.start_event, how.done = c.done_event, how.communication = c.communication_stream;
  return epOperationComplete(call, handle, &how, stream);
}

ncclResult_t ncclEpDeferredRun(ncclEpDeferred_t *deferred, cudaStream_t stream) {
  EP_CALL();
  static const char call[] = "ncclEpDeferredRun";
  ncclEpDeferred_t d;
  epIssue how = {0};
  ncclResult_t r = TAKE(call, ncclEpDeferred_t, deferred, &d);
  if (r != ncclSuccess || d.done) return r;
  how.start = d.event;
  r = epOperationComplete(call, d.handle, &how, stream);
  if (r == ncclSuccess) deferred->done = 1;
  return r;
}

ncclResult_t ncclEpGetCommunicationStream(ncclEpGroup_t group, cudaStream_t *stream) {
  EP_CALL();
  static const char call[] = "ncclEpGetCommunicationStream";
  ncclResult_t r = epGroupFind(call, group);
  if (r == ncclSuccess && !stream)
    r = epFail(ncclInvalidArgument, "%s: stream is NULL: expected room for a stream", call);
  return r == ncclSuccess ? epCommunicationStream(group, stream) : r;
}

ncclResult_t ncclEpGetHostCounts(ncclEpHandle_t handle, ncclEpHostCounts_t *counts) {
  EP_CALL();
  ncclEpHostCounts_t out;
  ncclResult_t r = TAKE("ncclEpGetHostCounts", ncclEpHostCounts_t, counts, &out);
  if (r == ncclSuccess) r = epHostCountsGet(handle, &out);
  if (r == ncclSuccess) epGiveStruct(&out, sizeof out, counts);
  return r;
}

ncclResult_t ncclEpGetDeviceCounts(ncclEpHandle_t handle, ncclEpDeviceCounts_t *counts) {
  EP_CALL();
  ncclEpDeviceCounts_t out;
  ncclResult_t r = TAKE("ncclEpGetDeviceCounts", ncclEpDeviceCounts_t, counts, &out);
  if (r == ncclSuccess) r = epDeviceCounts(handle, &out);
  if (r == ncclSuccess) epGiveStruct(&out, sizeof out, counts);
  return r;
}

ncclResult_t ncclEpGetHandleMetadata(ncclEpHandle_t handle, ncclEpHandleMetadata_t *metadata) {
  EP_CALL();
  ncclEpHandleMetadata_t out;
  ncclResult_t r = epTakeStruct("ncclEpGetHandleMetadata", "metadata", metadata,
                                NCCL_EP_FIELD_END(ncclEpHandleMetadata_t, sent_capacity), sizeof out.received_slot,
                                &out, (unsigned)sizeof out); /* received_slot came later */
  if (r == ncclSuccess) r = epHandleMetadata(handle, &out);
  if (r == ncclSuccess) epGiveStruct(&out, sizeof out, metadata);
  return r;
}

ncclResult_t ncclEpPrepare(ncclEpGroup_t group, const ncclEpPrepareConfig_t *config) {
  EP_CALL();
  ncclEpPrepareConfig_t c;
  ncclResult_t r =
      epTakeStruct("ncclEpPrepare", "config", config, NCCL_EP_FIELD_END(ncclEpPrepareConfig_t, scale_bytes), 4, &c,
                   (unsigned)sizeof c); /* num_bias came later, then borrow_topk_idx */
  return r == ncclSuccess ? epPrepare(group, &c) : r;
}

ncclResult_t ncclEpSetProfiling(ncclEpGroup_t group, int on) {
  EP_CALL();
  static const char call[] = "ncclEpSetProfiling";
  ncclResult_t r = epGroupFind(call, group);
  if (r == ncclSuccess && on != 0 && on != 1)
    r = epFail(ncclInvalidArgument, "%s: on is %d: expected 0 or 1", call, on);
  if (r == ncclSuccess) r = epRefuseCapture(call, group, NULL, "profiling cannot be switched then");
  return r == ncclSuccess ? epProfileSet(group, on) : r;
}

ncclResult_t ncclEpGetProfile(ncclEpGroup_t group, ncclEpProfile_t *profile) {
  EP_CALL();
  ncclEpProfile_t out;
  ncclResult_t r = TAKE("ncclEpGetProfile", ncclEpProfile_t, profile, &out);
  if (r == ncclSuccess) r = epGroupFind("ncclEpGetProfile", group);
  if (r == ncclSuccess) r = epProfileGet(group, &out);
  if (r == ncclSuccess) epGiveStruct(&out, sizeof out, profile);
  return r;
}
