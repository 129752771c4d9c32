/* Whether the peers may store the rows of a dispatch straight into this rank's output, and where that is for them.
 *
 * All symmetric windows of a communicator lie in one address space, the same on every rank: what is `distance` bytes from
 * this rank's own window of the group is as far from it in the peers' mappings. So a rank tells its peers a distance, and
 * nobody needs to know which window the other's tensor is in; ranks may use different windows, or different offsets. */
#include "fail.h"
#include "hybrid.h"
#include "low_latency.h"
#include "runtime.h"

/* Distances are told as positive numbers of units of 16 bytes in 32 bits: windows farther apart are staged. */
#define EP_DIRECT_REACH (1ull << 35)

/* NULL: no reason against it. */
static const char *epGroupObstacle(const struct ncclEpGroup *g, ncclEpLayout_t layout) {
  if (g->config.zero_copy == NCCL_EP_ZERO_COPY_OFF) return "zero_copy is NCCL_EP_ZERO_COPY_OFF";
  if (g->shape.ranks < 2) return "there are no peers";
  if (layout != NCCL_EP_LAYOUT_FLAT) return "expected NCCL_EP_LAYOUT_FLAT: in other layouts receivers place rows";
  if (epIsHybrid(g)) return "the communicator spans several scale-up domains";
  if (g->shape.ranks > EP_MAX_DIRECT) return "there are more ranks than that is supported for";
  if (!g->topology.bulkCopies) return "the device has no bulk copies";
  if (g->config.enable_mask) return "a masked rank that comes late must not reach outputs (enable_mask)";
  return NULL;
}

static const char *epTensorObstacle(const struct ncclEpGroup *g, const ncclEpTensor_t *t, const void *shared,
                                    uint64_t *offset) {
  /* An output without rows is never stored to; the kernel does not depend on the number of its rows all the same. */
  const void *own = g->windows[g->topology.rank], *at = shared ? shared : own;
  if (t->data || !t->win_hdl)
    return "expected a window-backed tensor (data NULL, win_hdl a window of the communicator)";
  *offset = (uint64_t)((uintptr_t)at - (uintptr_t)own) + EP_DIRECT_REACH; /* modulo 2^64 */
  if (*offset < EP_ROW_ALIGN || *offset >= 2 * EP_DIRECT_REACH - EP_ROW_ALIGN)
    return "expected a window within 32 GiB of the group's";
  return *offset % EP_ROW_ALIGN ? "expected a window whose start is a multiple of 16" : NULL;
}

int epMayGoDirect(const struct ncclEpGroup *g, ncclEpLayout_t layout) { return !epGroupObstacle(g, layout); }

const char *epDirectOutput(const struct ncclEpHandle *h, const ncclEpTensor_t *t, const void *shared, epConfig *config,
                           epDispatchArgs *a) {
  const struct ncclEpGroup *g = h->group;
  const char *obstacle = epGroupObstacle(g, h->layout);
  uint64_t offset = 0;
  if (!obstacle) obstacle = epTensorObstacle(g, t, shared, &offset);
  if (obstacle) return obstacle;
  config->direct = 1;
  a->outOffset = offset;
  for (uint32_t r = 0; r < g->shape.ranks; r++) a->outPeers[r] = (uint64_t)(uintptr_t)g->windows[r] - EP_DIRECT_REACH;
  return NULL;
}

/* With few SMs it is worth it, where the caller has limited them: the library's own choice is enough of them to stage as fast. */
int epDirectPays(const struct ncclEpGroup *g, unsigned askedSms, const epConfig *config) {
  int limited = askedSms || g->config.max_num_sms || !g->topology.arch;
  if (g->config.zero_copy == NCCL_EP_ZERO_COPY_ON) return 1;
  return limited && epPolicyDirectPays(&g->topology, epCallSms(g, askedSms, EP_KERNEL_DISPATCH, config));
}

ncclResult_t epDirectAsked(const char *call, const struct ncclEpGroup *g, const epConfig *config,
                           const char *obstacle) {
  if (config->direct || g->config.zero_copy != NCCL_EP_ZERO_COPY_ON || g->shape.ranks < 2) return ncclSuccess;
  return epFail(ncclInvalidArgument,
                "%s: zero_copy is NCCL_EP_ZERO_COPY_ON, and rows cannot go straight into outputs.tokens: %s", call,
                obstacle ? obstacle : "they are too wide for bulk copies on this device");
}
