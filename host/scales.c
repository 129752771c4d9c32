/* Rows of scales: their recipes, types and extents. */
#include "scales.h"

#include "fail.h"
#include "sizes.h"

static const char epWhyNoScales[] = "only NCCL_EP_DISP_QUANT_FWD has scales";

ncclResult_t epScalesRecipe(const char *call, const ncclEpDispatchConfig_t *c, int lowLatency, int *forwarded) {
  if ((unsigned)c->quant_recipe > NCCL_EP_DISP_QUANT_DS_FP8E3M4)
    return epFail(ncclInvalidArgument, "%s: quant_recipe is %d: expected an ncclEpDispQuant_t", call,
                  (int)c->quant_recipe);
  *forwarded = c->quant_recipe == NCCL_EP_DISP_QUANT_FWD;
  if (c->quant_recipe == NCCL_EP_DISP_QUANT_DS_FP8E3M4)
    return lowLatency ? ncclSuccess
                      : epFail(ncclInvalidUsage,
                               "%s: quant_recipe is NCCL_EP_DISP_QUANT_DS_FP8E3M4: expected NCCL_EP_DISP_QUANT_NONE or "
                               "NCCL_EP_DISP_QUANT_FWD in high throughput",
                               call);
  if (c->round_scales)
    return epFail(ncclInvalidUsage,
                  "%s: round_scales is %u: expected 0 but with NCCL_EP_DISP_QUANT_DS_FP8E3M4, as the caller's scales "
                  "travel as they are",
                  call, c->round_scales);
  return ncclSuccess;
}

/* Any type whose elements are 1, 2 or 4 bytes: what the bits mean is the caller's affair. */
static int epIsScaleType(ncclDataType_t type) {
  static const int types[] = {
      ncclFloat32, ncclFloat16, ncclBfloat16, ncclUint8, ncclInt32, ncclUint32, 10 /* ncclFloat8e4m3 */,
      11 /* ncclFloat8e5m2 */};
  for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
    if (types[i] == (int)type) return 1;
  return 0;
}

ncclResult_t epScalesIn(const char *call, const struct ncclEpGroup *g, const ncclEpTensor_t *scales, int forwarded,
                        uint32_t tokens, uint32_t rowBytes, uint32_t *scaleBytes, const uint8_t **dev) {
  const epArgName name = {call, "inputs.scales"};
  void *address = NULL;
  ncclResult_t r;
  if (!forwarded) return epTensorAbsent(name, scales, epWhyNoScales);
  r = epTensorCheck(name, scales, 2);
  if (r == ncclSuccess && !epIsScaleType(scales->datatype))
    r = epFail(ncclInvalidArgument,
               "%s: inputs.scales is %s: expected float32, float16, bfloat16, float8, uint8, int32 or uint32", call,
               epTypeName(scales->datatype));
  if (r == ncclSuccess) r = epTensorExtent(name, scales, 0, tokens, "tokens");
  if (r == ncclSuccess && scales->sizes[1] > EP_MAX_ROW_BYTES)
    r = epFail(ncclInvalidArgument, "%s: inputs.scales.sizes[1] is %zu: expected at most %u bytes", call,
               scales->sizes[1], EP_MAX_ROW_BYTES);
  if (r == ncclSuccess)
    r = epScaleBytes(call, g, name.tensor, (uint64_t)scales->sizes[1] * epTypeBytes(scales->datatype), rowBytes,
                     scaleBytes);
  if (r == ncclSuccess) r = epTensorAddress(name, g->be, scales, EP_SCALE_WORD, &address);
  if (r == ncclSuccess) *dev = address;
  return r;
}

ncclResult_t epScalesNotOut(const char *call, const ncclEpTensor_t *scales) {
  const epArgName name = {call, "outputs.scales"};
  return epTensorAbsent(name, scales, epWhyNoScales);
}
