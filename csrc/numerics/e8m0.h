#pragma once
#include "minifloat.h"

// E8M0, the block scale of the MX formats: 2^(byte-127), one byte, no sign (docs/numerics.md, 3).
namespace fp4ext {

inline constexpr uint32_t kE8M0NaN = 0xff;

// 2^(byte-127). Byte 0 is an fp32 subnormal, not 0.
template <class U>
FP4_HD auto decode_e8m0(U byte) {
  const auto u = select(byte == U(0u), U(0x00400000u), byte << 23);
  return as_float(select(byte == U(kE8M0NaN), U(0x7fc00000u), u));
}

// 2^(127-byte), what an element is multiplied by. From the bits: a division would be exact too, but slower. Byte 254
// gives a subnormal.
template <class U>
FP4_HD auto encode_multiplier_e8m0(U byte) {
  const U power = U(254u) - byte;
  return as_float(select(byte == U(254u), U(0x00400000u), power << 23));
}

// What bounds the exponent of a scale: element·2^e must be exact in bf16, whose normal exponents are -126..127.
template <class Element>
struct MXLimits {
  static constexpr int kMaxExponent = static_cast<int>(Element::kMaxCode >> (23 - Element::kDropped)) +
                                      static_cast<int>(Element::kMinNormalBits >> 23) - 127 - 1;                      // floor(log2 max)
  static constexpr int kMinPower = static_cast<int>(Element::kMinNormalBits >> 23) - 127 - (23 - Element::kDropped);  // log2 min
  static constexpr uint32_t kLowest = 127 - 126 - kMinPower;
  static constexpr uint32_t kHighest = 127 + 127 - kMaxExponent;
};

// The byte for a block whose largest magnitude is a; reciprocal_max = fl(1/max of the element). a = 0 gives 0.
//   ceil:  the smallest power of two that brings a/max to at most 1
//   floor: the power of two below a, less the element's own largest exponent (OCP MX v1.0)
// Both on the bits: a float log2 rounds up one ulp below a power of two.
template <class Element, class F>
FP4_HD UintOf<F> encode_e8m0(F a, bool ceil, float reciprocal_max) {
  using U = UintOf<F>;
  using Limits = MXLimits<Element>;
  U e;
  if (ceil) {
    const U r = bits(a * constant<F>(reciprocal_max));
    e = (r >> 23) + select((r & U(0x007fffffu)) > U(0u), U(1u), U(0u));
  } else {
    const U b = bits(a) >> 23;
    e = select(b > U(uint32_t(Limits::kMaxExponent)), b - U(uint32_t(Limits::kMaxExponent)), U(0u));
  }
  e = select(e < U(Limits::kLowest), U(Limits::kLowest), e);
  e = select(e > U(Limits::kHighest), U(Limits::kHighest), e);
  return select(bits(a) == U(0u), U(0u), e);
}

}  // namespace fp4ext
