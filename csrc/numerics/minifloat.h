#pragma once
#include "host_device.h"

// The element formats E2M1, E4M3 and E5M2 (docs/numerics.md, 1): one idea, three sets of constants.
//
// A minifloat with m mantissa bits has steps of 2^(e-m) in the binade of 2^e, and of 2^(e_min-m) all the way down from
// its smallest normal value 2^e_min. Adding M = 2^(e-m+23), e >= e_min, makes fp32's own rounding round to that grid,
// ties to even, and leaves the number of steps in the low bits of the sum:
//   value = (v + M) - M,   code = bits(v + M) - bits(M) + 2^m·(e - e_min).
// Everything here works on magnitudes >= 0; `signed_code` and `signed_value` put the sign around it.
namespace fp4ext {

template <int kMantissaBits, int kMinExponent, uint32_t kMaxCodeValue, int kBitsValue>
struct Minifloat {
  static constexpr int kBits = kBitsValue;             // of a code, sign included
  static constexpr int kDropped = 23 - kMantissaBits;  // fp32 mantissa bits that the format lacks
  static constexpr uint32_t kMaxCode = kMaxCodeValue;  // of a magnitude: the largest finite one
  static constexpr uint32_t kSignCode = 1u << (kBits - 1);
  static constexpr uint32_t kMinNormalBits = static_cast<uint32_t>(127 + kMinExponent) << 23;
  static constexpr uint32_t kMinNormalCode = 1u << kMantissaBits;
  static constexpr uint32_t kRebase = (kMinNormalBits >> kDropped) - kMinNormalCode;

  // The value of a magnitude code up to kMaxCode.
  template <class U>
  static FP4_HD auto decode(U code) {
    // Below the smallest normal: code/2^m · 2^e_min = (2^e_min with mantissa `code`) - 2^e_min, exactly.
    const auto normal = as_float((code + U(kRebase)) << kDropped);
    const auto subnormal = as_float((code << kDropped) + U(kMinNormalBits)) - as_float(U(kMinNormalBits));
    return select(code < U(kMinNormalCode), subnormal, normal);
  }

  static FP4_HD float max_value() { return as_float((kMaxCode + kRebase) << kDropped); }

  // bits(M) of a magnitude.
  template <class F>
  static FP4_HD UintOf<F> magic_bits(F v) {
    using U = UintOf<F>;
    return (bits(max_of(v, as_float(U(kMinNormalBits)))) & U(kInfBits)) + U(static_cast<uint32_t>(kDropped) << 23);
  }

  // Nearest, ties to the even code, saturating. v must not be NaN.
  template <class F>
  static FP4_HD UintOf<F> encode(F v) {
    using U = UintOf<F>;
    v = min_of(v, constant<F>(max_value()));
    const U magic = magic_bits(v);
    return bits(v + as_float(magic)) - magic + (magic >> kDropped) - U(((kMinNormalBits >> 23) + kDropped) << (23 - kDropped));
  }

  // The value that encode would give, without the code: the error-driven scale rules need only this.
  template <class F>
  static FP4_HD F round(F v) {
    v = min_of(v, constant<F>(max_value()));
    const F magic = as_float(magic_bits(v));
    return (v + magic) - magic;
  }

  // The smallest code whose value is >= v, saturating.
  template <class F>
  static FP4_HD UintOf<F> encode_up(F v) {
    using U = UintOf<F>;
    const U nearest = encode(v);
    return nearest + select((decode(nearest) < v) & (nearest < U(kMaxCode)), U(1u), U(0u));
  }

  // Stochastic, from 16 random bits r: up with the probability of the fraction, to within 2^-17. The noise stands at
  // the top of the dropped bits with a half bin below, so that granularity itself has no bias and no carry ever moves a
  // representable value.
  template <class F>
  static FP4_HD UintOf<F> encode_stochastic(F v, UintOf<F> r) {
    using U = UintOf<F>;
    v = min_of(v, constant<F>(max_value()));
    const U noise = (r << (kDropped - 16)) | U(1u << (kDropped - 17));
    const U normal = ((bits(v) + noise) >> kDropped) - U(kRebase);
    // 2^e_min + v lies in the first normal binade, whose step is the subnormal one.
    const U subnormal = ((bits(v + as_float(U(kMinNormalBits))) + noise) >> kDropped) - U(kRebase + kMinNormalCode);
    const U code = select(bits(v) < U(kMinNormalBits), subnormal, normal);
    return select(code > U(kMaxCode), U(kMaxCode), code);
  }

  // The code with the sign of x in front.
  template <class U>
  static FP4_HD U signed_code(U magnitude, U x_bits) {
    return magnitude | ((x_bits >> (32 - kBits)) & U(kSignCode));
  }
  template <class U>
  static FP4_HD auto signed_value(U code) {
    return as_float(bits(decode(code & U(kSignCode - 1))) | ((code & U(kSignCode)) << (32 - kBits)));
  }
};

//                     m  e_min max code bits
using E2M1 = Minifloat<1, 0, 7, 4>;       // 6
using E4M3 = Minifloat<3, -6, 0x7e, 8>;   // 448; 0x7f is NaN
using E5M2 = Minifloat<2, -14, 0x7b, 8>;  // 57344; 0x7c is infinity

inline constexpr uint32_t kE4M3NaN = 0x7f;

// The value of an E4M3 scale byte, NaN included.
template <class U>
FP4_HD auto decode_e4m3_scale(U byte) {
  const auto magnitude = E4M3::decode(byte & U(0x7fu));
  const auto value = select((byte & U(0x7fu)) == U(kE4M3NaN), as_float(U(0x7fc00000u)), magnitude);
  return as_float(bits(value) | ((byte & U(0x80u)) << 24));
}

}  // namespace fp4ext
