/* Comes before NCCL's device headers when NVRTC compiles them, and makes them compile there. Those headers are written
 * for nvcc with a GNU host compiler; each part below says what of that NVRTC lacks. Written to be true of NCCL 2.28
 * to 2.30. */
#ifndef EP_NCCL_PRELUDE_H_
#define EP_NCCL_PRELUDE_H_

/* NVRTC refuses functions that are marked for the host alone; unmarked declarations that nobody calls do no harm. */
#undef __host__
#define __host__

/* The NIC headers return errno values and use GNU C spellings. */
#define EIO 5
#define ENOMEM 12
#define EBUSY 16
#define EINVAL 22
#define __builtin_memcpy(to, from, bytes) memcpy(to, from, bytes)

#include <stdint.h>
#include <cuda/std/type_traits>

#define __typeof__(x) cuda::std::remove_reference_t<decltype(x)>
#define typeof(x) cuda::std::remove_reference_t<decltype(x)>
#define ACCESS_ONCE(x) (*(volatile cuda::std::remove_reference_t<decltype(x)> *)&(x))

/* EFA's header of NCCL 2.32 ends a struct with an array of no length, which NVRTC refuses. */
#define NCCL_GIN_EFA_GDA_ENABLE 0

/* loadConst picks a load by size in branches that only a GNU compiler drops unread; overloads found first avoid them.
 */
#include <nccl_device/utility.h>
namespace nccl {
namespace utility {
__device__ inline int loadConst(int const *at) { return __ldg(at); }
__device__ inline uint32_t loadConst(uint32_t const *at) { return __ldg(at); }
template <typename T> __device__ inline T *loadConst(T *const *at) {
  return (T *)__ldg((unsigned long long const *)at);
}
} // namespace utility
} // namespace nccl

/* The proxy's queue entry is packed by an attribute that NVRTC ignores where it stands. */
#pragma pack(push, 1)
#include <nccl_device/gin/proxy/gin_proxy_device_host_common.h>
#pragma pack(pop)

#endif
