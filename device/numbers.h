/* Sixteen bytes of a row as floats and back: 8 BF16 or FP16 elements, or 4 FP32. Sums are in FP32, one rounding at the
 * end, round to nearest even. */
#ifndef EP_DEVICE_NUMBERS_H_
#define EP_DEVICE_NUMBERS_H_

#include "abi.h"
#include "prim.h"

struct epVec {
  float v[8];
};

DEV void ep_vec_zero(epVec &a) {
#pragma unroll
  for (int i = 0; i < 8; i++) a.v[i] = 0.0f;
}

template <class C> DEV void ep_vec_add(const C c, epVec &a, uint4 x) {
  uint32_t w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (c.dtype == EP_DTYPE_F32) {
      a.v[i] = p::fadd(a.v[i], p::as_float(w[i]));
    } else {
      a.v[2 * i] = p::fadd(a.v[2 * i], c.dtype == EP_DTYPE_BF16 ? p::bf16_lo(w[i]) : p::f16_lo(w[i]));
      a.v[2 * i + 1] = p::fadd(a.v[2 * i + 1], c.dtype == EP_DTYPE_BF16 ? p::bf16_hi(w[i]) : p::f16_hi(w[i]));
    }
  }
}

/* What the sum of the 16 bytes at `at` of the biases starts from. */
template <class C> DEV void ep_vec_start(const C c, const uint8_t *const *bias, uint64_t at, epVec &a) {
  ep_vec_zero(a);
  if (c.bias > 0) ep_vec_add(c, a, p::ldg<uint4>(bias[0] + at));
  if (c.bias > 1) ep_vec_add(c, a, p::ldg<uint4>(bias[1] + at));
}

template <class C> DEV uint4 ep_vec_round(const C c, const epVec &a) {
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (c.dtype == EP_DTYPE_F32)
      w[i] = p::as_u32(a.v[i]);
    else if (c.dtype == EP_DTYPE_BF16)
      w[i] = p::pack_bf16(a.v[2 * i], a.v[2 * i + 1]);
    else
      w[i] = p::pack_f16(a.v[2 * i], a.v[2 * i + 1]);
  }
  uint4 r;
  r.x = w[0];
  r.y = w[1];
  r.z = w[2];
  r.w = w[3];
  return r;
}

#endif
