/* The recipe NCCL_EP_DISP_QUANT_DS_FP8E3M4 of low-latency dispatch: BF16 rows become E4M3 with an FP32 scale for each block of 128
 * elements, as they are loaded. amax is the block's largest magnitude, at least 1e-4; an element is x * (448 / amax), rounded to nearest
 * even; the scale that travels is amax / 448. With round_scales it is the power of two that is not below that, and elements
 * are multiplied by its inverse. Every product is rounded to FP32, so that all backends make the same bytes. */
#ifndef EP_DEVICE_LL_QUANTISE_H_
#define EP_DEVICE_LL_QUANTISE_H_

#include "ll.h"

#define EP_QUANT_BLOCK 128u /* elements of a scale: eight vectors of E4M3 */

/* Of 16 BF16 elements: the largest magnitude's bits. */
DEV uint32_t ep_quant_amax(uint4 a, uint4 b, uint32_t most) {
  uint32_t w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 8; i++) {
    uint32_t lo = w[i] & 0x7fff, hi = w[i] >> 16 & 0x7fff;
    most = lo > most ? lo : most;
    most = hi > most ? hi : most;
  }
  return most;
}

/* What a block's elements are multiplied by, and the scale that undoes it. */
struct epQuantScale {
  float times, scale;
};
DEV epQuantScale ep_quant_scale(uint32_t amaxBits, bool powers) {
  epQuantScale s;
  float amax = p::as_float(amaxBits << 16);
  amax = amax < 1e-4f ? 1e-4f : amax;
  s.scale = amax * (1.0f / 448.0f);
  s.times = 448.0f / amax;
  if (powers) {
    uint32_t bits = p::as_u32(s.scale), exponent = (bits >> 23) + ((bits & 0x7fffff) != 0);
    s.scale = p::as_float(exponent << 23);
    s.times = p::as_float((254 - exponent) << 23);
  }
  return s;
}

/* To E4M3, nearest even, no further than 448. */
DEV uint32_t ep_quant_e4m3(float x) {
  uint32_t bits = p::as_u32(x), sign = bits >> 24 & 0x80, m = bits & 0x7fffffff;
  if (m > 0x7f800000) return sign | 0x7f;
  if (m >= 0x43e00000) /* 448 */
    return sign | 0x7e;
  if (m < 0x3c800000) /* 2^-6: steps of 2^-9, which are those of FP32 at 2^14 */
    return sign | (p::as_u32(p::fadd(p::as_float(m), 16384.0f)) - p::as_u32(16384.0f));
  return sign | (((m + 0x7ffff + (m >> 20 & 1)) >> 20) - (120u << 3));
}
/* Four elements, two words of BF16. */
DEV uint32_t ep_quant_four(uint32_t a, uint32_t b, float times) {
  return ep_quant_e4m3(p::as_float(a << 16) * times) | ep_quant_e4m3(p::as_float(a & 0xffff0000) * times) << 8 |
         ep_quant_e4m3(p::as_float(b << 16) * times) << 16 | ep_quant_e4m3(p::as_float(b & 0xffff0000) * times) << 24;
}

/* The scale of block `block` of a row, as bits. */
template <class C> DEV uint32_t ep_quant_scale_of(const C c, const uint8_t *row, uint32_t block) {
  uint32_t most = 0;
  row += 2ull * EP_QUANT_BLOCK * block;
#pragma unroll 2
  for (uint32_t i = 0; i < 2 * EP_QUANT_BLOCK; i += 32)
    most = ep_quant_amax(p::ldg<uint4>(row + i), p::ldg<uint4>(row + i + 16), most);
  return p::as_u32(ep_quant_scale(most, c.quantise == EP_QUANTISE_POWERS).scale);
}

/* A warp: the scales that strip `strip` has of a row, `at` on among the row's bytes of them, in shared memory at `buffer`; a loop, as its body is
 * long. The caller synchronises before the buffer is used again. */
template <class C> DEV void ep_quant_scales(const C c, const uint8_t *row, uint32_t buffer, uint32_t at, uint32_t end) {
#pragma unroll 1
  for (uint32_t k = at / 4 + p::lane(); k < end / 4; k += 32)
    p::sts<uint32_t>(buffer + 4 * k - at, ep_quant_scale_of(c, row, k));
  p::sync_warp();
}

/* A warp: strip `strip` of a row of BF16 at `row`, as it travels; `bytes` are the row's from there on, `own` of them elements. A strip
 * has whole blocks; their magnitudes meet in the warp's shared memory at `buffer`. */
template <class C>
DEV void ep_quant_load(const C c, const uint8_t *row, uint32_t buffer, uint32_t strip, uint32_t bytes, uint32_t own,
                       uint4 *v) {
  const uint8_t *from = row + 2 * (strip * EP_STRIP_DATA + 16 * p::lane());
  uint4 lo[EP_STRIP_VECTORS], hi[EP_STRIP_VECTORS];
#pragma unroll
  for (uint32_t i = 0; i < EP_STRIP_VECTORS; i++) v[i] = ep_ll_zero();
  if (bytes == 0) return;
#pragma unroll
  for (uint32_t i = 0; i < EP_STRIP_VECTORS; i++) {
    bool there = ep_ll_has(i, own);
    lo[i] = there ? p::ldg<uint4>(from + 2 * EP_STRIP_STEP * i) : ep_ll_zero();
    hi[i] = there ? p::ldg<uint4>(from + 2 * EP_STRIP_STEP * i + 16) : ep_ll_zero();
    if (p::lane() < EP_STRIP_LANES)
      p::sts<uint32_t>(buffer + 4 * (EP_STRIP_LANES * i + p::lane()), ep_quant_amax(lo[i], hi[i], 0));
  }
  p::sync_warp();
#pragma unroll
  for (uint32_t i = 0; i < EP_STRIP_VECTORS; i++) {
    uint32_t block = (EP_STRIP_LANES * i + (p::lane() < EP_STRIP_LANES ? p::lane() : 0)) / 8, most = 0;
#pragma unroll
    for (uint32_t j = 0; j < 8; j++) {
      uint32_t m = p::lds<uint32_t>(buffer + 4 * (8 * block + j));
      most = m > most ? m : most;
    }
    float times = ep_quant_scale(most, c.quantise == EP_QUANTISE_POWERS).times;
    v[i].x = ep_quant_four(lo[i].x, lo[i].y, times);
    v[i].y = ep_quant_four(lo[i].z, lo[i].w, times);
    v[i].z = ep_quant_four(hi[i].x, hi[i].y, times);
    v[i].w = ep_quant_four(hi[i].z, hi[i].w, times);
  }
  p::sync_warp();
}

#endif
