/* Structures through which the host asks NCCL for a device communicator, as NCCL's headers lay them out. Those headers are
 * C++ and come in many versions, so the host has these instead; kernels are compiled with the headers themselves, and
 * gin_nccl.h asserts there that the two agree. A version here is that of the headers the kernels are compiled with. */
#ifndef EP_DEVICE_NCCL_ABI_H_
#define EP_DEVICE_NCCL_ABI_H_

#ifdef __CUDACC_RTC__
#include "types.h"
#else
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#endif

#define EP_NCCL_MAGIC 0xcafebeefu
#define EP_NCCL_UNSET (-2147483647 - 1)
#define EP_NCCL_CONNECTION_FULL 1
#define EP_NCCL_CONNECTION_RAIL 2

/* Headers that this file knows: 2.28, and 2.30 to 2.32. Those of 2.29 have a third layout, which no other version takes. */
#define EP_NCCL_KNOWN(version) ((version) / 100 == 228 || ((version) >= 23000 && (version) < 23300))

/* What the caller allocates for a device communicator; where the address of its abort word is, 0: it has none. */
#define EP_NCCL_COMM_BYTES(version) ((version) < 23000 ? 200 : (version) < 23100 ? 240 : 248)
#define EP_NCCL_ABORT_FLAG(version) ((version) < 23000 ? 0 : (version) < 23100 ? 208 : 168)
#define EP_NCCL_REQUEST_BYTES(version) ((version) < 23000 ? 56 : (version) < 23100 ? 96 : 120)
#define EP_NCCL_PROPERTIES_BYTES(version) ((version) < 23100 ? 56 : (version) < 23200 ? 144 : 152)

/* ncclDevCommRequirements; older ones end earlier. */
typedef struct epNcclRequest {
  uint64_t size;
  uint32_t magic, version;
  void *resources, *teams;
  bool lsaMultimem;
  int32_t barriers, lsaBarriers, railBarriers, blocks, slots;
  bool forceEnable;
  int32_t contexts, signals, counters;
  int32_t connection;
  bool exclusiveContexts;
  int32_t queueDepth, trafficClass, worldBarriers;
  bool strongSignals, vaSignals; /* 2.30.5 */
  int32_t customStride, type;    /* 2.31 */
  bool runtimeVersion;
  int32_t cftCaps, cftBarriers;
} epNcclRequest;

/* The same of 2.28. */
typedef struct epNcclRequest228 {
  void *resources, *teams;
  bool lsaMultimem;
  int32_t barriers, lsaBarriers, railBarriers, blocks, slots;
  bool forceEnable;
  int32_t contexts, signals, counters;
} epNcclRequest228;

/* ncclCommProperties as far as it is read; 2.28 has none. */
typedef struct epNcclProperties {
  uint64_t size;
  uint32_t magic, version;
  int32_t rank, ranks, device, nvmlDevice;
  bool deviceApi, multimem;
  int32_t ginType, lsaTeams;
  bool hostRma;
  int32_t railedGinType;
  uint8_t later[128];
} epNcclProperties;

#endif
