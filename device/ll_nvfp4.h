/* The recipe NCCL_EP_COMB_QUANT_NVFP4 of low-latency combine: what a rank returns of a token travels as E2M1 elements, an E4M3 scale for each
 * block of 16 and an FP32 scale for the row, and is added from these again, also where it stays on its rank: sums do not depend on where experts are.
 *
 *   row    the caller's scale g of a row is 2688 / amax: the row's scale is 1 / g, with g at most 2^117, so that nothing below overflows. Of a
 *          weighted sum it is the sum of |weight| / g of its slots, which bounds the sum's magnitude as well, and costs no look at the whole row
 *   block  amax times 1 / row times 1 / 6, to E4M3; where an element is NaN or infinite E4M3's NaN, which makes the block NaN
 *   x      times (1 / row) / block, to E2M1
 *
 * All to nearest even, no further than the type's largest number; every product and quotient is rounded to FP32, so that all backends make the
 * same bytes. It enters a sum as element times (block times row), by fused multiply-add.
 *
 * A strip (ll.h) is 896 elements of BF16 in the row. As it travels it begins as far into the staged row, and is the words
 *
 *   0       the row's scale
 *   1 - 14  block scales: byte i of word 1 + p is that of vector i of lanes 2 p and 2 p + 1
 *   15 -    eight elements a word, the first one lowest
 */
#ifndef EP_DEVICE_LL_NVFP4_H_
#define EP_DEVICE_LL_NVFP4_H_

#include "ll_quantise.h"
#include "numbers.h"

/* Where combine's rows are quantised. What is not compiled leaves no trace in other kernels, not in the numbers of their registers either. */
#ifdef EP_EMU
#define EP_IF_NVFP4(c) if ((c).quantise)
#define EP_NVFP4_KNOWN(c) 0 /* when it is compiled */
#else
#define EP_IF_NVFP4(c) if constexpr ((c).quantise != 0)
#define EP_NVFP4_KNOWN(c) ((c).quantise != 0)
#endif

#define EP_NVFP4_UNITS 2   /* a lane, at most */
#define EP_NVFP4_HEAD 60u  /* bytes before the elements */
#define EP_NVFP4_NAN 0x7fu /* of E4M3 */

/* Bytes that a strip of `bytes` bytes of BF16 takes. */
DEV uint32_t ep_nvfp4_bytes(uint32_t bytes) {
  return EP_NVFP4_HEAD + (bytes < EP_STRIP_DATA ? bytes : EP_STRIP_DATA) / 4;
}

/* A strip's sum in a lane. */
struct epLlSum {
  epVec v[EP_STRIP_VECTORS];
};

/* A rank's part of a strip of a token, and the scale of its row. */
struct epNvfp4Part {
  epLlSum sum;
  float row;
};

/* The scale of a row whose caller's scale is g; one that is negative counts as NaN. */
DEV float ep_nvfp4_row(float g) {
  float most = p::as_float((127 + 117) << 23);
  return g == 0 ? 0 : g > 0 ? 1 / (g < most ? g : most) : p::as_float(0x7fc00000);
}
/* Of a weighted sum of slots: the weight and the caller's scale are of the lane's, if it is in `slots`. */
DEV float ep_nvfp4_sum_row(uint32_t slots, float weight, float g) {
  float part = p::as_float(p::as_u32(weight) & 0x7fffffff) * ep_nvfp4_row(g), row = 0,
        least = p::as_float((127 - 117) << 23);
#pragma unroll 1
  for (uint32_t m = slots; m; m &= m - 1)
    row = p::fadd(row, p::as_float(p::shfl(p::FULL, p::as_u32(part), p::ffs(m) - 1)));
  return row > 0 && row < least ? least : row;
}

DEV float ep_nvfp4_block(uint32_t code) { /* E4M3, positive: FP32's bits at another exponent */
  return code == EP_NVFP4_NAN ? p::as_float(0x7fc00000) : p::as_float(code << 20) * p::as_float((127 + 120) << 23);
}
DEV float ep_nvfp4_element(uint32_t code) {
  return p::as_float((code & 8) << 28 | (code & 7) << 22) * p::as_float((127 + 126) << 23);
}
DEV uint32_t ep_nvfp4_e2m1(float x) {
  uint32_t bits = p::as_u32(x), sign = bits >> 28 & 8, m = bits & 0x7fffffff;
  if (m >= 0x40c00000) /* 6 */
    return sign | 7;
  if (m < 0x3f800000) /* 1: steps of 2^-1, which are those of FP32 at 2^22 */
    return sign | (p::as_u32(p::fadd(p::as_float(m), 4194304.0f)) - p::as_u32(4194304.0f));
  return sign | (((m + 0x1fffff + (m >> 22 & 1)) >> 22) - (126u << 1));
}

/* A warp: a strip of a row as it travels, into shared memory at `to`. What is past the row is 0 there. */
DEV void ep_nvfp4_encode(uint32_t to, const epNvfp4Part &part) {
  uint32_t l = p::lane(), blocks = 0;
  float inverse = part.row == 0 ? 0 : 1 / part.row, sixth = inverse * (1.0f / 6.0f);
#pragma unroll
  for (uint32_t i = 0; i < EP_STRIP_VECTORS; i++) {
    uint32_t most = 0, word = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      uint32_t m = p::as_u32(part.sum.v[i].v[j]) & 0x7fffffff;
      most = m > most ? m : most;
    }
    uint32_t other = p::shfl_xor(p::FULL, most, 1);
    most = other > most ? other : most;
    uint32_t block = most >= 0x7f800000 ? EP_NVFP4_NAN : ep_quant_e4m3(p::as_float(most) * sixth) & 0x7f;
    float times = block == 0 || block == EP_NVFP4_NAN ? 0 : inverse / ep_nvfp4_block(block);
#pragma unroll
    for (int j = 0; j < 8 && times != 0; j++) word |= ep_nvfp4_e2m1(part.sum.v[i].v[j] * times) << 4 * j;
    blocks |= block << 8 * i;
    if (l < EP_STRIP_LANES) p::sts<uint32_t>(to + EP_NVFP4_HEAD + 4 * (EP_STRIP_LANES * i + l), word);
  }
  if (l < EP_STRIP_LANES && (l & 1) == 0) p::sts<uint32_t>(to + 4 + 2 * l, blocks);
  if (l == 1) p::sts<uint32_t>(to, p::as_u32(part.row));
  if (l >= EP_STRIP_LANES) /* the last unit reads on */
    p::sts<uint32_t>(to + EP_NVFP4_HEAD + EP_STRIP_DATA / 4 + 4 * (l - EP_STRIP_LANES), 0);
  p::sync_warp();
}

/* A warp: adds such a strip to a sum. */
DEV void ep_nvfp4_add(uint32_t from, epLlSum &s) {
  uint32_t l = p::lane() < EP_STRIP_LANES ? p::lane() : 0, blocks = p::lds<uint32_t>(from + 4 + 4 * (l / 2));
  float row = p::as_float(p::lds<uint32_t>(from));
#pragma unroll
  for (uint32_t i = 0; i < EP_STRIP_VECTORS; i++) {
    uint32_t word = p::lds<uint32_t>(from + EP_NVFP4_HEAD + 4 * (EP_STRIP_LANES * i + l));
    float factor = ep_nvfp4_block(blocks >> 8 * i & 0xff) * row;
#pragma unroll
    for (int j = 0; j < 8; j++) s.v[i].v[j] = p::fma(ep_nvfp4_element(word >> 4 * j), factor, s.v[i].v[j]);
  }
  p::sync_warp();
}

/* The same by way of units, through the warp's shared memory at `buffer`. */
DEV void ep_nvfp4_to_units(uint32_t buffer, uint32_t gen, const epNvfp4Part &part, uint32_t wanted, uint4 *u) {
  ep_nvfp4_encode(buffer, part);
#pragma unroll
  for (uint32_t i = 0; i < EP_NVFP4_UNITS; i++)
    if (wanted >> i & 1) u[i] = ep_ll_read_unit(buffer, gen, (p::lane() & 1) * 16, i);
  p::sync_warp();
}
DEV void ep_nvfp4_from_units(uint32_t buffer, const uint4 *u, epLlSum &s) {
#pragma unroll
  for (uint32_t i = 0; i < EP_NVFP4_UNITS; i++) ep_ll_write_unit(buffer, u[i], i);
  p::sync_warp();
  ep_nvfp4_add(buffer, s);
}

#endif
