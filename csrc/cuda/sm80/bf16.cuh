#pragma once
#include "../../numerics/e8m0.h"
#include "../../numerics/half.h"
#include "../gemm.cuh"
#include "../ptx/mma.h"

// Operands as bf16, exactly: an E2M1 element times an E4M3 scale has six significant bits, an 8-bit element times a power
// of two four, and the numerics contract keeps their exponents in range. The global scales are left to the epilogue.
namespace fp4ext::cuda {

// A block's scale, twice.
__device__ __forceinline__ uint32_t scale_pair(const Operand& o, uint32_t byte) {
  const float scale = o.block == 16 ? decode_e4m3_scale<uint32_t>(byte) : decode_e8m0<uint32_t>(byte);
  return bits(scale) >> 16 | (bits(scale) & 0xffff0000u);
}

// Two E2M1 codes, the first in the lowest bits. Their three bits, put where bf16 has the end of its exponent and the first
// of its mantissa, are the element times 2^-126, subnormal or not.
__device__ __forceinline__ uint32_t e2m1_pair(uint32_t byte, uint32_t scale) {
  const uint32_t two = (byte & 0xfu) | (byte & 0xf0u) << 12;
  return mul_bf16x2(mul_bf16x2((two & 0x00070007u) << 6 | (two & 0x00080008u) << 12, 0x7e807e80u), scale);
}

template <class Element>
__device__ __forceinline__ uint32_t fp8_one(uint32_t code) {
  const uint32_t magnitude = code & 0x7f;
  const bool infinite = Element::kMaxCode == E5M2::kMaxCode && magnitude == E5M2::kMaxCode + 1;
  const float value =
      magnitude <= Element::kMaxCode ? Element::signed_value(code) : as_float(infinite ? kInfBits | (code & 0x80) << 24 : 0x7fc00000u);
  return bits(value) >> 16;
}
__device__ __forceinline__ uint32_t fp8_pair(Elem elem, uint32_t two, uint32_t scale) {
  const uint32_t a = two & 0xffu, b = two >> 8 & 0xffu;
  return mul_bf16x2(elem == Elem::e4m3 ? fp8_one<E4M3>(a) | fp8_one<E4M3>(b) << 16 : fp8_one<E5M2>(a) | fp8_one<E5M2>(b) << 16, scale);
}

}  // namespace fp4ext::cuda
