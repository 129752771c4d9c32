/* Fixed-width types for text that gcc, clang, nvcc and NVRTC all read. NVRTC has no C headers of its own. */
#ifndef EP_DEVICE_TYPES_H_
#define EP_DEVICE_TYPES_H_

#ifdef __CUDACC_RTC__
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef signed int int32_t;
typedef unsigned int uint32_t;
typedef signed long long int64_t;
typedef unsigned long long uint64_t;
#define EP_HD __host__ __device__ inline
#else
#include <stdint.h>
#ifdef __CUDACC__
#define EP_HD __host__ __device__ static inline
#else
#define EP_HD static inline
#endif
#endif

#endif
