/* The network primitives of gin.h over NCCL's device API. epGin: an ncclDevComm in device memory, and the window's handle.
 * Only what every NCCL from 2.28 on has: puts and signals by index, no signals at addresses, no gets. */
#ifndef EP_DEVICE_GIN_NCCL_H_
#define EP_DEVICE_GIN_NCCL_H_

#include "nccl_prelude.h"
#include <nccl_device.h>

#if NCCL_VERSION_CODE >= 23005 /* from here on weak signals exist, and plain ones are what the host asked for */
#define EP_GIN_STRONG ncclGin_StrongSignalAdd
#define EP_GIN_WEAK ncclGin_WeakSignalAdd
#else
#define EP_GIN_STRONG ncclGin_SignalAdd
#define EP_GIN_WEAK ncclGin_SignalAdd
#endif

namespace p {

DEV const ncclDevComm &gin_comm(const epGin &g) { return *(const ncclDevComm *)g.comm; }

DEV void gin_put(const epGin &g, uint32_t context, uint32_t domain, uint64_t to, uint64_t from, uint32_t bytes) {
  ncclGin net(gin_comm(g), (int)context);
  net.put(ncclTeamRail(gin_comm(g)), (int)domain, (ncclWindow_t)g.window, to, (ncclWindow_t)g.window, from, bytes);
}
DEV void gin_signal(const epGin &g, uint32_t context, uint32_t domain, uint32_t signal, uint64_t add) {
  ncclGin net(gin_comm(g), (int)context);
  net.signal(ncclTeamRail(gin_comm(g)), (int)domain, EP_GIN_STRONG{signal, add});
}
DEV void gin_signal_weak(const epGin &g, uint32_t context, uint32_t domain, uint32_t signal, uint64_t add) {
  ncclGin net(gin_comm(g), (int)context);
  net.signal(ncclTeamRail(gin_comm(g)), (int)domain, EP_GIN_WEAK{signal, add});
}
DEV uint64_t gin_read(const epGin &g, uint32_t signal) {
  ncclGin net(gin_comm(g), 0);
  return net.readSignal(signal);
}
DEV void gin_flush(const epGin &g, uint32_t context) {
  ncclGin net(gin_comm(g), (int)context);
  net.flush(ncclCoopThread());
}

} // namespace p

#endif
