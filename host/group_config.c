/* What a group's configuration must be, what its defaults become, and whether the ranks agree on it. */
#include "env.h"
#include "fail.h"
#include "runtime.h"
#include "sizes.h"

/* What belongs to later versions of this library: refused by name, never pretended. */
static ncclResult_t epGroupConfigSupported(const char *call, const ncclEpGroupConfig_t *c, const epTopology *topology) {
  if (c->enable_mask && c->zero_copy == NCCL_EP_ZERO_COPY_ON && c->algorithm != NCCL_EP_ALGO_LOW_LATENCY)
    return epFail(
        ncclInvalidUsage,
        "%s: zero_copy is NCCL_EP_ZERO_COPY_ON and enable_mask %u: expected one of them: a masked rank that comes "
        "late must not reach outputs",
        call, c->enable_mask);
  /* Low latency's rows travel as units, whatever is asked for. */
  if (c->zero_copy == NCCL_EP_ZERO_COPY_ON && c->algorithm != NCCL_EP_ALGO_LOW_LATENCY &&
      (topology->scaleOutRanks > 1 || topology->ranks > (int)EP_MAX_DIRECT))
    return epFail(
        ncclInvalidUsage,
        "%s: zero_copy NCCL_EP_ZERO_COPY_ON is not supported yet across scale-up domains and for more than %u "
        "ranks: expected AUTO or OFF",
        call, EP_MAX_DIRECT);
  return ncclSuccess;
}

static ncclResult_t epGroupConfigValues(const char *call, const ncclEpGroupConfig_t *c) {
  if (c->version < 1)
    return epFail(ncclInvalidArgument, "%s: version is %u: expected NCCL_EP_API_VERSION, %d", call, c->version,
                  NCCL_EP_API_VERSION);
  if (c->algorithm != NCCL_EP_ALGO_LOW_LATENCY && c->algorithm != NCCL_EP_ALGO_HIGH_THROUGHPUT)
    return epFail(ncclInvalidArgument, "%s: algorithm is %d: expected an ncclEpAlgorithm_t", call, (int)c->algorithm);
  if ((unsigned)c->zero_copy > NCCL_EP_ZERO_COPY_ON)
    return epFail(ncclInvalidArgument, "%s: zero_copy is %d: expected an ncclEpZeroCopyMode_t", call,
                  (int)c->zero_copy);
  if ((unsigned)c->overflow_policy > NCCL_EP_OVERFLOW_DROP)
    return epFail(ncclInvalidArgument, "%s: overflow_policy is %d: expected an ncclEpOverflowPolicy_t", call,
                  (int)c->overflow_policy);
  if (!c->alloc.alloc_fn != !c->alloc.free_fn)
    return epFail(ncclInvalidArgument, "%s: alloc has only one of alloc_fn and free_fn: expected both or neither",
                  call);
  if (c->max_token_bytes == 0 || c->max_token_bytes % EP_ROW_ALIGN || c->max_token_bytes > EP_MAX_ROW_BYTES)
    return epFail(ncclInvalidArgument, "%s: max_token_bytes is %u: expected a multiple of %u, 16 to %u", call,
                  c->max_token_bytes, EP_ROW_ALIGN, EP_MAX_ROW_BYTES);
  if (c->max_dispatch_tokens_per_rank < 1 || c->max_dispatch_tokens_per_rank > EP_MAX_ENTRIES)
    return epFail(ncclInvalidArgument, "%s: max_dispatch_tokens_per_rank is %u: expected 1 to %u", call,
                  c->max_dispatch_tokens_per_rank, EP_MAX_ENTRIES);
  if (c->max_recv_tokens_per_rank && c->max_recv_tokens_per_rank < c->max_dispatch_tokens_per_rank)
    return epFail(ncclInvalidArgument,
                  "%s: max_recv_tokens_per_rank is %u: expected at least max_dispatch_tokens_per_rank, %u, or "
                  "NCCL_EP_AUTO",
                  call, c->max_recv_tokens_per_rank, c->max_dispatch_tokens_per_rank);
  return ncclSuccess;
}

ncclResult_t epGroupConfigCheck(const char *call, const ncclEpGroupConfig_t *given, const epTopology *topology,
                                ncclEpGroupConfig_t *resolved, epShape *shape) {
  epSizeRequest request = {(uint32_t)topology->ranks,           given->num_experts,     given->num_topk,
                           given->max_dispatch_tokens_per_rank, given->max_token_bytes, 1};
  uint64_t number;
  ncclResult_t r = epGroupConfigValues(call, given);
  if (r == ncclSuccess) r = epGroupConfigSupported(call, given, topology);
  if (r == ncclSuccess) r = epShapeOf(call, &request, shape);
  if (r != ncclSuccess) return r;
  if (topology->scaleOutRanks > 1 && !topology->gin)
    return epFail(ncclInvalidUsage,
                  "%s: the communicator spans %d scale-up domains of %d ranks: not supported yet: several scale-up "
                  "domains",
                  call, topology->scaleOutRanks, topology->scaleUpRanks);
  *resolved = *given;
  resolved->num_topk = shape->topk;
  if (epEnvNumber(EP_ENV_TIMEOUT_MS, 1, UINT64_MAX / 1000000, &number)) resolved->timeout_ns = number * 1000000;
  if (resolved->timeout_ns == 0) resolved->timeout_ns = EP_TIMEOUT_NS;
  if (epEnvNumber(EP_ENV_NUM_SMS, 1, UINT32_MAX, &number)) resolved->max_num_sms = (unsigned)number;
  if (epEnvNumber(EP_ENV_NUM_QPS, 1, UINT32_MAX, &number)) resolved->num_qp_per_rank = (unsigned)number;
  return ncclSuccess;
}

/* The fields that must be equal on all ranks, and the names they have in messages. The first is how this rank itself
 * fares: a rank without memory says so, instead of leaving the others waiting. A rank that refuses its own arguments
 * never comes here; the others wait for it as long as the backend waits for a rank that does not call. */
static const char *const epWireNames[EP_WIRE_FIELDS] = {"status",
                                                        "library version",
                                                        "version of the window's layout",
                                                        "algorithm",
                                                        "num_experts",
                                                        "max_dispatch_tokens_per_rank",
                                                        "max_recv_tokens_per_rank",
                                                        "max_token_bytes",
                                                        "num_topk",
                                                        "enable_mask",
                                                        "zero_copy",
                                                        "overflow_policy",
                                                        "single_reduction",
                                                        "max_in_flight"};

epGroupWire epGroupWireOf(const ncclEpGroupConfig_t *c, const epShape *shape, uint32_t maxInFlight,
                          ncclResult_t status) {
  epGroupWire w = {{(uint64_t)status, NCCL_EP_VERSION_CODE, EP_RECORD_VERSION, (uint64_t)c->algorithm, c->num_experts,
                    c->max_dispatch_tokens_per_rank, c->max_recv_tokens_per_rank, c->max_token_bytes, shape->topk,
                    c->enable_mask, (uint64_t)c->zero_copy, (uint64_t)c->overflow_policy, epShapeSingle(shape),
                    maxInFlight}};
  return w;
}

ncclResult_t epGroupWireCompare(const char *call, const epGroupWire *all, int ranks) {
  for (int r = 0; r < ranks; r++)
    if (all[r].field[0] != ncclSuccess)
      return epFail((ncclResult_t)all[r].field[0], "%s: rank %d could not get its memory for the group", call, r);
  for (int f = 1; f < EP_WIRE_FIELDS; f++)
    for (int r = 1; r < ranks; r++)
      if (all[r].field[f] != all[0].field[f])
        return epFail(ncclInvalidArgument, "%s: %s differs between ranks: %llu on rank 0, %llu on rank %d", call,
                      epWireNames[f], (unsigned long long)all[0].field[f], (unsigned long long)all[r].field[f], r);
  return ncclSuccess;
}
