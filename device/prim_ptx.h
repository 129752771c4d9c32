/* PTX implementation of the primitives (prim.h lists them). Bulk copies, mbarriers and proxy fences exist from SM90 on;
 * for older targets they are declared away, and kernels must not reach them (config.bulk is 0 there). */
#ifndef EP_DEVICE_PRIM_PTX_H_
#define EP_DEVICE_PRIM_PTX_H_

#include "types.h"

#define DEV __device__ __forceinline__
#define DEV_APART __device__ __noinline__ /* what runs rarely and would take registers where it is called */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define EP_SM90(...) __trap()
#else
#define EP_SM90(...) asm volatile(__VA_ARGS__)
#endif

namespace p {

static constexpr uint32_t FULL = 0xffffffffu;
extern __shared__ __align__(128) unsigned char smemRaw[];

DEV uint32_t tid() { return threadIdx.x; }
DEV uint32_t bid() { return blockIdx.x; }
DEV uint32_t lane() { return threadIdx.x & 31; }
DEV uint32_t warp() { return threadIdx.x >> 5; }
DEV uint32_t popc(uint32_t x) { return (uint32_t)__popc((int)x); }
DEV uint32_t ffs(uint32_t x) { return (uint32_t)__ffs((int)x); }

DEV uint32_t shfl(uint32_t m, uint32_t v, uint32_t s) { return __shfl_sync(m, v, (int)s); }
DEV uint32_t shfl_xor(uint32_t m, uint32_t v, uint32_t x) { return __shfl_xor_sync(m, v, (int)x); }
DEV uint32_t shfl_up(uint32_t m, uint32_t v, uint32_t d) { return __shfl_up_sync(m, v, d); }
DEV uint32_t ballot(uint32_t m, bool b) { return __ballot_sync(m, b); }
DEV uint32_t match_any(uint32_t m, uint32_t v) { return __match_any_sync(m, v); }
DEV void sync_warp(uint32_t m = FULL) { __syncwarp(m); }
DEV void sync_threads() { __syncthreads(); }
DEV void bar_sync(int id, int n) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n) : "memory"); }
DEV void bar_arrive(int id, int n) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(n) : "memory"); }

DEV uint32_t smem_base() { return (uint32_t)__cvta_generic_to_shared(smemRaw); }
template <class T> struct Shared;
template <> struct Shared<uint32_t> {
  static DEV uint32_t load(uint32_t a) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a) : "memory");
    return v;
  }
  static DEV void store(uint32_t a, uint32_t v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(v) : "memory"); }
};
template <> struct Shared<uint64_t> {
  static DEV uint64_t load(uint32_t a) {
    uint64_t v;
    asm volatile("ld.shared.u64 %0, [%1];" : "=l"(v) : "r"(a) : "memory");
    return v;
  }
  static DEV void store(uint32_t a, uint64_t v) { asm volatile("st.shared.u64 [%0], %1;" ::"r"(a), "l"(v) : "memory"); }
};
template <> struct Shared<uint4> {
  static DEV uint4 load(uint32_t a) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(a)
                 : "memory");
    return v;
  }
  static DEV void store(uint32_t a, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
  }
};
template <class T> DEV T lds(uint32_t a) { return Shared<T>::load(a); }
template <class T> DEV void sts(uint32_t a, T v) { Shared<T>::store(a, v); }
DEV void sadd(uint32_t a, uint32_t v) { asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(a), "r"(v) : "memory"); }

DEV void mbar_init(uint32_t a, uint32_t n) {
  EP_SM90("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(a), "r"(n) : "memory");
}
DEV void fence_mbar_init() { EP_SM90("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEV void mbar_arrive(uint32_t a) {
  EP_SM90("{.reg .b64 s; mbarrier.arrive.shared::cta.b64 s, [%0];}" ::"r"(a) : "memory");
}
DEV void mbar_expect_tx(uint32_t a, uint32_t bytes) {
  EP_SM90("{.reg .b64 s; mbarrier.arrive.expect_tx.shared::cta.b64 s, [%0], %1;}" ::"r"(a), "r"(bytes) : "memory");
}
DEV void mbar_wait(uint32_t a, uint32_t parity) {
  uint32_t done = 0;
  while (!done) {
    EP_SM90("{.reg .pred q; mbarrier.try_wait.parity.shared::cta.b64 q, [%1], %2; selp.u32 %0, 1, 0, q;}"
            : "=r"(done)
            : "r"(a), "r"(parity)
            : "memory");
  }
}

DEV void bulk_g2s(uint32_t dst, const void *src, uint32_t bytes, uint32_t mbar) {
  EP_SM90("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
          "l"(src), "r"(bytes), "r"(mbar)
          : "memory");
}
DEV void bulk_s2g(void *dst, uint32_t src, uint32_t bytes) {
  EP_SM90("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(bytes) : "memory");
}
DEV void bulk_commit() { EP_SM90("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N> DEV void bulk_wait() { EP_SM90("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory"); }
template <int N> DEV void bulk_wait_read() { EP_SM90("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory"); }
DEV void fence_proxy_async() { EP_SM90("fence.proxy.async.shared::cta;" ::: "memory"); }
DEV void fence_proxy_async_global() { EP_SM90("fence.proxy.async;" ::: "memory"); }

template <class T> DEV T ldg(const void *a) { return *(const T *)a; }
template <class T> DEV void stg(void *a, T v) { *(T *)a = v; }
template <class T> DEV T ldg_any(const void *a) { return ldg<T>(a); }
DEV void confirm(const void *, uint32_t) {}

DEV uint32_t ld_acquire_sys(const uint32_t *a) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(a) : "memory");
  return v;
}
DEV uint64_t ld_acquire_sys(const uint64_t *a) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(a) : "memory");
  return v;
}
DEV uint32_t ld_relaxed_sys(const uint32_t *a) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(a) : "memory");
  return v;
}
DEV uint64_t ld_relaxed_sys(const uint64_t *a) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(a) : "memory");
  return v;
}
DEV void st_release_sys(uint32_t *a, uint32_t v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(a), "r"(v) : "memory");
}
DEV void st_release_sys(uint64_t *a, uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(a), "l"(v) : "memory");
}
DEV void st_release_gpu(uint32_t *a, uint32_t v) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(a), "r"(v) : "memory");
}
DEV void st_relaxed_sys(uint32_t *a, uint32_t v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(a), "r"(v) : "memory");
}
DEV void st_relaxed_sys(uint64_t *a, uint64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(a), "l"(v) : "memory");
}
/* Scalars of 128 bits are the widest that the memory model calls single-copy atomic; vectors of 4 x 32 bits are not. */
DEV uint4 ld_relaxed_sys128(const void *a) {
  uint64_t lo, hi;
  asm volatile("{.reg .b128 t; ld.relaxed.sys.global.b128 t, [%2]; mov.b128 {%0, %1}, t;}"
               : "=l"(lo), "=l"(hi)
               : "l"(a)
               : "memory");
  uint4 v;
  v.x = (uint32_t)lo;
  v.y = (uint32_t)(lo >> 32);
  v.z = (uint32_t)hi;
  v.w = (uint32_t)(hi >> 32);
  return v;
}
DEV void st_relaxed_sys128(void *a, uint4 v) {
  uint64_t lo = (uint64_t)v.y << 32 | v.x, hi = (uint64_t)v.w << 32 | v.z;
  asm volatile("{.reg .b128 t; mov.b128 t, {%1, %2}; st.relaxed.sys.global.b128 [%0], t;}" ::"l"(a), "l"(lo), "l"(hi)
               : "memory");
}
DEV void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
DEV uint32_t look_sys(const uint32_t *a) {
  fence_sys();
  return ld_acquire_sys(a);
}
DEV uint32_t ld_acquire_gpu(const uint32_t *a) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(a) : "memory");
  return v;
}
DEV uint32_t atomic_add(uint32_t *a, uint32_t v) { return atomicAdd((unsigned int *)a, v); }
DEV uint32_t atomic_add_acq_rel_gpu(uint32_t *a, uint32_t v) {
  uint32_t r;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(r) : "l"(a), "r"(v) : "memory");
  return r;
}
DEV uint32_t atomic_cas(uint32_t *a, uint32_t expect, uint32_t v) { return atomicCAS((unsigned int *)a, expect, v); }

DEV void grid_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEV void grid_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

DEV void nanosleep(uint32_t ns) { __nanosleep(ns); }
DEV uint64_t globaltimer() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

DEV float as_float(uint32_t v) { return __uint_as_float(v); }
DEV uint32_t as_u32(float v) { return __float_as_uint(v); }
DEV float fadd(float a, float b) { return __fadd_rn(a, b); }
DEV float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEV float bf16_lo(uint32_t v) { return __uint_as_float(v << 16); }
DEV float bf16_hi(uint32_t v) { return __uint_as_float(v & 0xffff0000u); }
DEV float f16_lo(uint32_t v) {
  float f;
  asm("{.reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.f32.f16 %0, lo;}" : "=f"(f) : "r"(v));
  return f;
}
DEV float f16_hi(uint32_t v) {
  float f;
  asm("{.reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.f32.f16 %0, hi;}" : "=f"(f) : "r"(v));
  return f;
}
DEV uint32_t pack_bf16(float lo, float hi) {
  uint32_t v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(hi), "f"(lo));
  return v;
}
DEV uint32_t pack_f16(float lo, float hi) {
  uint32_t v;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(hi), "f"(lo));
  return v;
}

} // namespace p

#endif
