#pragma once
#include "host_device.h"

// The 16-bit floats of inputs and outputs, as bits. To fp32 exactly; from it nearest even, a NaN staying a NaN.
namespace fp4ext {

FP4_HD float bf16_to_float(uint16_t u) { return as_float(static_cast<uint32_t>(u) << 16); }
FP4_HD float fp16_to_float(uint16_t u) {
  // Rebase the exponent by a multiplication, which also normalizes subnormals; infinities and NaNs keep a full
  // exponent.
  const uint32_t sign = (u & 0x8000u) << 16, magnitude = u & 0x7fffu;
  const uint32_t v = magnitude >= 0x7c00u ? (magnitude << 13) | kInfBits : bits(as_float(magnitude << 13) * 0x1p112f);
  return as_float(v | sign);
}

FP4_HD uint16_t float_to_bf16(float x) {
  const uint32_t u = bits(x);
  const bool nan = (u & ~kSignBit) > kInfBits;
  return static_cast<uint16_t>(nan ? 0x7fc0u : (u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}
FP4_HD uint16_t float_to_fp16(float x) {
  const uint32_t u = bits(x), sign = (u >> 16) & 0x8000u;
  const float v = abs_of(x);
  uint32_t h;
  if (!(v < 65520.0f)) {
    h = v != v ? 0x7e00u : 0x7c00u;
  } else if (v < 0x1p-14f) {
    h = bits(v + 0.5f) - bits(0.5f);  // ulp(0.5) = 2^-24, the subnormal step
  } else {
    const uint32_t m = bits(v);
    h = ((m + 0xfffu + ((m >> 13) & 1)) >> 13) - (112u << 10);
  }
  return static_cast<uint16_t>(h | sign);
}

}  // namespace fp4ext
