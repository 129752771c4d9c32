/* The network primitives of gin.h over NCCL's device API. epGin: an ncclDevComm in device memory, and the window's handle.
 * Only what every NCCL from 2.28 on has: puts and signals by index, no signals at addresses, no gets. */
#ifndef EP_DEVICE_GIN_NCCL_H_
#define EP_DEVICE_GIN_NCCL_H_

#include "nccl_prelude.h"
#include <nccl_device.h>
#include "nccl_abi.h"

#if NCCL_VERSION_CODE >= 23005 /* from here on weak signals exist, and plain ones are what the host asked for */
#define EP_GIN_STRONG ncclGin_StrongSignalAdd
#define EP_GIN_WEAK ncclGin_WeakSignalAdd
#else
#define EP_GIN_STRONG ncclGin_SignalAdd
#define EP_GIN_WEAK ncclGin_SignalAdd
#endif

/* What the host has built its request from. NVRTC has no offsetof without a C library; __INTADDR__ is what its front end makes
 * offsetof from. */
#define EP_AT(type, field) __INTADDR__(&((type *)0)->field)
#define EP_SAME(theirs, theirField, mine, field)                                                                      \
  static_assert(EP_AT(theirs, theirField) == EP_AT(mine, field) && sizeof(theirs::theirField) == sizeof(mine::field), \
                #theirs "::" #theirField " is not where the host has it")
static_assert(EP_NCCL_KNOWN(NCCL_VERSION_CODE), "NCCL headers of an unknown version");
static_assert(sizeof(ncclDevComm) == EP_NCCL_COMM_BYTES(NCCL_VERSION_CODE),
              "ncclDevComm has another size than the host's");
static_assert(sizeof(ncclDevCommRequirements) == EP_NCCL_REQUEST_BYTES(NCCL_VERSION_CODE),
              "ncclDevCommRequirements has another size than the host's");
#if NCCL_VERSION_CODE >= 23000
#define EP_REQUEST epNcclRequest
EP_SAME(ncclDevCommRequirements, size, epNcclRequest, size);
EP_SAME(ncclDevCommRequirements, magic, epNcclRequest, magic);
EP_SAME(ncclDevCommRequirements, version, epNcclRequest, version);
EP_SAME(ncclDevCommRequirements, ginConnectionType, epNcclRequest, connection);
EP_SAME(ncclDevCommRequirements, ginQueueDepth, epNcclRequest, queueDepth);
EP_SAME(ncclDevCommRequirements, ginTrafficClass, epNcclRequest, trafficClass);
EP_SAME(ncclDevCommRequirements, worldGinBarrierCount, epNcclRequest, worldBarriers);
EP_SAME(ncclCommProperties, deviceApiSupport, epNcclProperties, deviceApi);
EP_SAME(ncclCommProperties, ginType, epNcclProperties, ginType);
EP_SAME(ncclCommProperties, nLsaTeams, epNcclProperties, lsaTeams);
static_assert(sizeof(ncclCommProperties) == EP_NCCL_PROPERTIES_BYTES(NCCL_VERSION_CODE) &&
                  sizeof(ncclCommProperties) <= sizeof(epNcclProperties),
              "ncclCommProperties has another size than the host's");
static_assert(EP_AT(ncclDevComm, abortFlag) == EP_NCCL_ABORT_FLAG(NCCL_VERSION_CODE),
              "ncclDevComm::abortFlag is not where the host has it");
static_assert(NCCL_GIN_CONNECTION_FULL == EP_NCCL_CONNECTION_FULL &&
                  NCCL_GIN_CONNECTION_RAIL == EP_NCCL_CONNECTION_RAIL,
              "ncclGinConnectionType_t");
static_assert(NCCL_API_MAGIC == EP_NCCL_MAGIC, "NCCL_API_MAGIC");
#else
#define EP_REQUEST epNcclRequest228
#endif
#if NCCL_VERSION_CODE >= 23005
EP_SAME(ncclDevCommRequirements, ginStrongSignalsRequired, epNcclRequest, strongSignals);
EP_SAME(ncclDevCommRequirements, ginVaSignalsRequired, epNcclRequest, vaSignals);
#endif
#if NCCL_VERSION_CODE >= 23100
EP_SAME(ncclDevCommRequirements, ginCustomStride, epNcclRequest, customStride);
EP_SAME(ncclDevCommRequirements, useRuntimeVersion, epNcclRequest, runtimeVersion);
EP_SAME(ncclDevCommRequirements, cftBarrierCount, epNcclRequest, cftBarriers);
#endif
EP_SAME(ncclDevCommRequirements, resourceRequirementsList, EP_REQUEST, resources);
EP_SAME(ncclDevCommRequirements, ginForceEnable, EP_REQUEST, forceEnable);
EP_SAME(ncclDevCommRequirements, ginContextCount, EP_REQUEST, contexts);
EP_SAME(ncclDevCommRequirements, ginSignalCount, EP_REQUEST, signals);
EP_SAME(ncclDevCommRequirements, ginCounterCount, EP_REQUEST, counters);
#undef EP_REQUEST
#undef EP_SAME
#undef EP_AT

namespace p {

/* Functions of their own in machine code: NCCL's inline ones carry every kind of network, and a kernel would get them, and the
 * compiler's time for them, once a call. Next to a trip to the network a call is nothing. */
#define EP_OUTLINE static __device__ __noinline__

DEV const ncclDevComm &gin_comm(const epGin &g) { return *(const ncclDevComm *)g.comm; }

EP_OUTLINE void gin_put(epGin g, uint32_t context, uint32_t domain, uint64_t to, uint64_t from, uint32_t bytes) {
  ncclGin net(gin_comm(g), (int)context);
  net.put(ncclTeamRail(gin_comm(g)), (int)domain, (ncclWindow_t)g.window, to, (ncclWindow_t)g.window, from, bytes);
}
template <class Add>
EP_OUTLINE void gin_put_add(epGin g, uint32_t context, uint32_t domain, uint64_t to, uint64_t from, uint32_t bytes,
                            Add add) {
  ncclGin net(gin_comm(g), (int)context);
  net.put(ncclTeamRail(gin_comm(g)), (int)domain, (ncclWindow_t)g.window, to, (ncclWindow_t)g.window, from, bytes, add);
}
DEV void gin_put_signal(const epGin &g, uint32_t context, uint32_t domain, uint64_t to, uint64_t from, uint32_t bytes,
                        uint32_t signal, uint64_t add) {
  gin_put_add(g, context, domain, to, from, bytes, EP_GIN_STRONG{signal, add});
}
DEV void gin_put_signal_weak(const epGin &g, uint32_t context, uint32_t domain, uint64_t to, uint64_t from,
                             uint32_t bytes, uint32_t signal, uint64_t add) {
  gin_put_add(g, context, domain, to, from, bytes, EP_GIN_WEAK{signal, add});
}
template <class Add> EP_OUTLINE void gin_add(epGin g, uint32_t context, uint32_t domain, Add add) {
  ncclGin net(gin_comm(g), (int)context);
  net.signal(ncclTeamRail(gin_comm(g)), (int)domain, add);
}
DEV void gin_signal(const epGin &g, uint32_t context, uint32_t domain, uint32_t signal, uint64_t add) {
  gin_add(g, context, domain, EP_GIN_STRONG{signal, add});
}
DEV void gin_signal_weak(const epGin &g, uint32_t context, uint32_t domain, uint32_t signal, uint64_t add) {
  gin_add(g, context, domain, EP_GIN_WEAK{signal, add});
}
EP_OUTLINE uint64_t gin_read(epGin g, uint32_t context, uint32_t signal) {
  ncclGin net(gin_comm(g), (int)context);
  return net.readSignal(signal);
}
EP_OUTLINE void gin_flush_lane(epGin g, uint32_t context) {
  ncclGin net(gin_comm(g), (int)context);
  net.flush(ncclCoopThread());
}
/* NCCL's flush waits for the network alone and ends early only where the communicator's abort word, which came with 2.30, is
 * set: so another lane watches over lane 0's. */
template <class F> DEV bool gin_flush(const epGin &g, uint32_t context, F giveUp) {
  __shared__ volatile uint32_t flushed[32];
  bool ok = true;
  if (lane() == 0) flushed[warp()] = 0;
  sync_warp();
  if (lane() == 0) {
    gin_flush_lane(g, context);
    flushed[warp()] = 1;
  }
#if NCCL_VERSION_CODE >= 23000
  else if (lane() == 1) {
    for (uint32_t round = 0; ok && !flushed[warp()]; round++) ok = !giveUp(round);
  }
#endif
  sync_warp();
  return ballot(FULL, !ok) == 0;
}

#undef EP_OUTLINE

} // namespace p

#endif
