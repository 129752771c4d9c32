// Our own declarations of driver and NCCL functions against the vendors' headers, and our copy of the first fields of
// NCCL's window: same number of parameters, same sizes, same constants. Compiled only where those headers are
// installed.
#include <cstddef>
#include <cstdio>
#include <type_traits>

#include <cuda.h>
#include <cuda_runtime.h>
#include <nccl.h>
#include <nccl_device/core.h>
#include <nccl_device/impl/core__types.h>
#if __has_include(<nccl_device/host.h>) // since NCCL 2.31 or 2.32
#include <nccl_device/host.h>
#endif

#include "cuda_driver.h"
#include "cuda_nccl.h"

template <class T> constexpr std::size_t bytesOf() {
  if constexpr (std::is_void_v<T>)
    return 0;
  else
    return sizeof(T);
}

template <class R1, class... A1, class R2, class... A2> constexpr bool agree(R1 (*)(A1...), R2 (*)(A2...)) {
  if constexpr (sizeof...(A1) == sizeof...(A2))
    return bytesOf<R1>() == bytesOf<R2>() && (... && (sizeof(A1) == sizeof(A2)));
  else
    return false;
}

#define X(slot, symbol, parameters) static_assert(agree(decltype(epCuDriver::slot){}, decltype(&::symbol){}), #symbol);
EP_CU_FUNCTIONS(X)
#undef X
// NCCL overloads this name for devices; the one for hosts is meant.
inline ncclTeam teamLsaOfHost(ncclComm_t comm) { return ncclTeamLsa(comm); }
#define ncclTeamLsa teamLsaOfHost
#define X(slot, symbol, result, parameters) \
  static_assert(agree(decltype(epNccl::slot){}, decltype(&::symbol){}), #symbol);
EP_NCCL_FUNCTIONS(X)
#undef X
#undef ncclTeamLsa

constexpr bool same(int ours, int theirs) { return ours == theirs; }
static_assert(same(EP_CU_NOT_READY, CUDA_ERROR_NOT_READY));
static_assert(same(EP_CU_CAPTURE_IMPLICIT, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT));
static_assert(same(EP_CU_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE));
static_assert(same(EP_CU_ATTR_MULTIPROCESSOR_COUNT, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT));
static_assert(same(EP_CU_ATTR_MEMORY_CLOCK_RATE, CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE));
static_assert(same(EP_CU_ATTR_MEMORY_BUS_WIDTH, CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH));
static_assert(same(EP_CU_ATTR_COMPUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR));
static_assert(same(EP_CU_ATTR_COMPUTE_CAPABILITY_MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR));
static_assert(same(EP_CU_ATTR_PAGEABLE_MEMORY_ACCESS, CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS));
static_assert(same(EP_CU_ATTR_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
                   CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN));
static_assert(same(EP_CU_FUNC_MAX_DYNAMIC_SHARED_SIZE_BYTES, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES));
static_assert(same(EP_CU_POINTER_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_MEMORY_TYPE));
static_assert(same(EP_CU_POINTER_IS_MANAGED, CU_POINTER_ATTRIBUTE_IS_MANAGED));
static_assert(same(EP_CU_POINTER_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL));
static_assert(same(EP_CU_POINTER_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR));
static_assert(same(EP_CU_POINTER_RANGE_SIZE, CU_POINTER_ATTRIBUTE_RANGE_SIZE));
static_assert(same(EP_CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_HOST));
static_assert(same(EP_CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_DEVICE));
static_assert(same(EP_CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_PORTABLE));
static_assert(same(EP_CU_MEMHOSTALLOC_DEVICEMAP, CU_MEMHOSTALLOC_DEVICEMAP));
static_assert(same(EP_CU_STREAM_NON_BLOCKING, CU_STREAM_NON_BLOCKING));
static_assert(same(EP_CU_CAPTURE_STATUS_NONE, CU_STREAM_CAPTURE_STATUS_NONE));
static_assert(same(EP_CU_CAPTURE_MODE_RELAXED, CU_STREAM_CAPTURE_MODE_RELAXED));
static_assert(EP_NCCL_WIN_COLL_SYMMETRIC == NCCL_WIN_COLL_SYMMETRIC);
static_assert(sizeof(ncclTeam) == sizeof(epNcclTeam) && offsetof(ncclTeam, rank) == offsetof(epNcclTeam, rank) &&
              offsetof(ncclTeam, stride) == offsetof(epNcclTeam, stride));
static_assert(offsetof(ncclWindow_vidmem, lsaFlatBase) == 8 && offsetof(ncclWindow_vidmem, lsaRank) == 16 &&
              offsetof(ncclWindow_vidmem, worldRank) == 20 && offsetof(ncclWindow_vidmem, stride4G) == 24);

int main() {
  std::printf("declarations agree with CUDA %d and NCCL %d\n", CUDA_VERSION, NCCL_VERSION_CODE);
  return 0;
}
