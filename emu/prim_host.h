/* The primitives of device/prim.h on the emulated GPU: every one is a call into the engine. Shared memory is a number,
 * never a pointer, so nothing escapes the checks; the source place travels along for the reports. */
#ifndef EP_EMU_PRIM_HOST_H_
#define EP_EMU_PRIM_HOST_H_

#include <cmath>
#include <cstring>

#include "engine.h"

#define DEV inline
#define DEV_APART inline

struct uint4 {
  uint32_t x, y, z, w;
};

namespace p {

/* Where a primitive is called; what std::source_location is, for compilers whose library does not have it. */
struct Here {
  const char *file;
  uint32_t line;
  static constexpr Here current(const char *f = __builtin_FILE(), uint32_t l = __builtin_LINE()) { return {f, l}; }
};
inline emu::Place at(const Here &h) { return emu::placeOf(h.file, h.line); }
inline emu::Engine &e() { return *emu::engine; }

static constexpr uint32_t FULL = 0xffffffffu;

DEV uint32_t tid() { return emu::cur->tid; }
DEV uint32_t bid() { return emu::cur->block->index; }
DEV uint32_t lane() { return emu::cur->lane; }
DEV uint32_t warp() { return emu::cur->warp->id; }
DEV uint32_t popc(uint32_t x) { return uint32_t(__builtin_popcount(x)); }
DEV uint32_t ffs(uint32_t x) { return uint32_t(__builtin_ffs(int(x))); }

DEV uint32_t collective(emu::Collective kind, uint32_t m, uint32_t v, uint32_t src) {
  uint32_t r = 0;
  e().warpCollective(kind, m, v, src, &r);
  return r;
}
DEV uint32_t shfl(uint32_t m, uint32_t v, uint32_t s) { return collective(emu::Collective::Shfl, m, v, s & 31); }
DEV uint32_t shfl_xor(uint32_t m, uint32_t v, uint32_t x) {
  return collective(emu::Collective::Shfl, m, v, (lane() ^ x) & 31);
}
DEV uint32_t shfl_up(uint32_t m, uint32_t v, uint32_t d) {
  return collective(emu::Collective::Shfl, m, v, lane() < d ? lane() : lane() - d);
}
DEV uint32_t ballot(uint32_t m, bool b) { return collective(emu::Collective::Ballot, m, b, 0); }
DEV uint32_t match_any(uint32_t m, uint32_t v) { return collective(emu::Collective::Match, m, v, 0); }
DEV void sync_warp(uint32_t m = FULL) { e().warpCollective(emu::Collective::SyncWarp, m, 0, 0, nullptr); }
DEV void sync_threads() { e().barrier(0, emu::cur->block->alive, true); }
DEV void bar_sync(int id, int n) { e().barrier(uint32_t(id), uint32_t(n), true); }
DEV void bar_arrive(int id, int n) { e().barrier(uint32_t(id), uint32_t(n), false); }

DEV uint32_t smem_base() { return 0; }
template <class T> DEV T lds(uint32_t a, Here h = Here::current()) {
  T v;
  e().sharedLoad(a, &v, sizeof(T), at(h));
  return v;
}
template <class T> DEV void sts(uint32_t a, T v, Here h = Here::current()) { e().sharedStore(a, &v, sizeof(T), at(h)); }
DEV void sadd(uint32_t a, uint32_t v, Here h = Here::current()) { e().sharedAdd(a, v, at(h)); }

DEV void mbar_init(uint32_t a, uint32_t n) { e().mbarInit(a, n); }
DEV void fence_mbar_init() { e().mbarFenceInit(); }
DEV void mbar_arrive(uint32_t a) { e().mbarArrive(a, 0); }
DEV void mbar_expect_tx(uint32_t a, uint32_t bytes) { e().mbarArrive(a, bytes); }
DEV void mbar_wait(uint32_t a, uint32_t parity) { e().mbarWait(a, parity); }

DEV void bulk_g2s(uint32_t dst, const void *src, uint32_t bytes, uint32_t mbar, Here h = Here::current()) {
  e().bulkLoad(dst, src, bytes, mbar, at(h));
}
DEV void bulk_s2g(void *dst, uint32_t src, uint32_t bytes, Here h = Here::current()) {
  e().bulkStore(dst, src, bytes, at(h));
}
DEV void bulk_commit() { e().bulkCommit(); }
template <int N> DEV void bulk_wait() { e().bulkWait(N, false); }
template <int N> DEV void bulk_wait_read() { e().bulkWait(N, true); }
DEV void fence_proxy_async() { e().fenceProxy(false); }
DEV void fence_proxy_async_global() { e().fenceProxy(true); }

template <class T> DEV T ldg(const void *a, Here h = Here::current()) {
  T v;
  e().load(a, &v, sizeof(T), at(h));
  return v;
}
template <class T> DEV void stg(void *a, T v, Here h = Here::current()) {
  e().store(a, &v, sizeof(T), emu::Engine::Order::Weak, at(h));
}

template <class T> DEV T ldg_any(const void *a, Here h = Here::current()) {
  T v;
  e().loadAny(a, &v, sizeof(T), at(h));
  return v;
}
// What ldg_any did not check, and that it saw the last word: nothing stores it meanwhile.
DEV void confirm(const void *a, uint32_t bytes, Here h = Here::current()) { e().confirm(a, bytes, at(h)); }
DEV uint32_t look_sys(const uint32_t *a, Here h = Here::current()) { return e().look(a, at(h)); }

DEV uint32_t ld_acquire_sys(const uint32_t *a, Here h = Here::current()) {
  return uint32_t(e().poll(a, 4, true, true, at(h)));
}
DEV uint64_t ld_acquire_sys(const uint64_t *a, Here h = Here::current()) { return e().poll(a, 8, true, true, at(h)); }
DEV uint32_t ld_relaxed_sys(const uint32_t *a, Here h = Here::current()) {
  return uint32_t(e().poll(a, 4, false, true, at(h)));
}
DEV uint64_t ld_relaxed_sys(const uint64_t *a, Here h = Here::current()) { return e().poll(a, 8, false, true, at(h)); }
DEV uint32_t ld_acquire_gpu(const uint32_t *a, Here h = Here::current()) {
  return uint32_t(e().poll(a, 4, true, false, at(h)));
}
DEV void st_release_gpu(uint32_t *a, uint32_t v, Here h = Here::current()) {
  e().store(a, &v, 4, emu::Engine::Order::Release, at(h));
}
DEV void st_release_sys(uint32_t *a, uint32_t v, Here h = Here::current()) {
  e().store(a, &v, 4, emu::Engine::Order::Release, at(h));
}
DEV void st_relaxed_sys(uint32_t *a, uint32_t v, Here h = Here::current()) {
  e().store(a, &v, 4, emu::Engine::Order::Relaxed, at(h));
}
DEV void st_release_sys(uint64_t *a, uint64_t v, Here h = Here::current()) {
  e().store(a, &v, 8, emu::Engine::Order::Release, at(h));
}
DEV void st_relaxed_sys(uint64_t *a, uint64_t v, Here h = Here::current()) {
  e().store(a, &v, 8, emu::Engine::Order::Relaxed, at(h));
}
DEV uint4 ld_relaxed_sys128(const void *a, Here h = Here::current()) {
  uint4 v;
  e().pollWide(a, &v, at(h));
  return v;
}
DEV void st_relaxed_sys128(void *a, uint4 v, Here h = Here::current()) {
  e().store(a, &v, 16, emu::Engine::Order::Relaxed, at(h));
}
DEV void fence_sys() { e().fence(); }
DEV uint32_t atomic_add(uint32_t *a, uint32_t v, Here h = Here::current()) {
  return e().atomicUpdate(a, false, 0, v, false, false, at(h));
}
DEV uint32_t atomic_add_acq_rel_gpu(uint32_t *a, uint32_t v, Here h = Here::current()) {
  return e().atomicUpdate(a, false, 0, v, true, false, at(h));
}
DEV uint32_t atomic_cas(uint32_t *a, uint32_t expect, uint32_t v, Here h = Here::current()) {
  return e().atomicUpdate(a, true, expect, v, false, true, at(h));
}

DEV void grid_wait() { e().gridWait(); } // a stream's kernels follow one another here
DEV void grid_launch() {}
DEV void nanosleep(uint32_t) { e().sleep(); }
DEV uint64_t globaltimer() { return e().clock(); }

DEV float as_float(uint32_t v) {
  float f;
  memcpy(&f, &v, 4);
  return f;
}
DEV uint32_t as_u32(float f) {
  uint32_t v;
  memcpy(&v, &f, 4);
  return v;
}
DEV float fadd(float a, float b) { return a + b; }
DEV float fma(float a, float b, float c) { return std::fmaf(a, b, c); }
DEV float bf16_lo(uint32_t v) { return as_float(v << 16); }
DEV float bf16_hi(uint32_t v) { return as_float(v & 0xffff0000u); }
/* Half to float and back by integers: subnormals, infinities and NaN as the hardware's conversions give them. */
DEV float half_to_float(uint32_t h) {
  uint32_t sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3ff;
  if (exponent == 31) return as_float(sign | 0x7f800000u | mantissa << 13);
  if (exponent) return as_float(sign | (exponent + 112) << 23 | mantissa << 13);
  float f = float(mantissa) * 0x1p-24f;
  return sign ? -f : f;
}
DEV uint32_t float_to_half(float f) {
  uint32_t v = as_u32(f), sign = v >> 16 & 0x8000u, a = v & 0x7fffffffu;
  if (a > 0x7f800000u) return 0x7fff;
  if (a >= 0x477ff000u) return sign | 0x7c00;
  if (a < 0x38800000u) return sign | uint32_t(std::nearbyint(double(as_float(a)) * 0x1p24));
  return sign | (((a + 0xfff + (a >> 13 & 1)) >> 13) - (112u << 10));
}
DEV uint32_t float_to_bf16(float f) {
  uint32_t v = as_u32(f);
  if ((v & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (v + 0x7fff + (v >> 16 & 1)) >> 16;
}
DEV float f16_lo(uint32_t v) { return half_to_float(v & 0xffff); }
DEV float f16_hi(uint32_t v) { return half_to_float(v >> 16); }
DEV uint32_t pack_bf16(float lo, float hi) { return float_to_bf16(lo) | float_to_bf16(hi) << 16; }
DEV uint32_t pack_f16(float lo, float hi) { return float_to_half(lo) | float_to_half(hi) << 16; }

} // namespace p

#endif
