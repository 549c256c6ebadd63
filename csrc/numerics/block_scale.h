#pragma once
#include "e8m0.h"
#include <type_traits>

// How the 16 (or 16×16) elements of an NVFP4 block get their E4M3 scale (docs/numerics.md, 2 and 5).
//
// With S_dec the outer scale, a block whose scale byte is s encodes x as E2M1(x·enc(s)) and decodes q as q·dec(s):
//   dec(s) = fl(float(s)·S_dec),  enc(s) = min(1/dec(s), FLT_MAX).
// The near-equivalents are wrong: enc = S_enc/s changes 2.0e-4 of the codes, (a/6)·S_enc in rule amax 2.3e-4 of the
// scales.
namespace fp4ext {

enum class ScaleRule { amax, four_over_six, four_over_six_mae, four_over_six_absmax, sweep, minvar, ceil, floor };
enum class Rounding { nearest, stochastic, eden, eden_block };

// MS-EDEN corrects the block scales: by one S per rotated vector, or per block.
FP4_HD constexpr bool is_eden(Rounding rounding) { return rounding == Rounding::eden || rounding == Rounding::eden_block; }

template <class F>
struct Outer {
  F enc, dec;  // S_enc, S_dec
};

// What the largest element of the outer group is scaled to: 6·448, or 6·256 where a rule needs room for larger scales.
FP4_HD float outer_target(ScaleRule rule) { return rule == ScaleRule::amax ? 2688.0f : 1536.0f; }

// The smallest power of two >= x, at least 2^-126.
FP4_HD float power_of_two_up(float x) {
  const float p = as_float((bits(x) + 0x007fffffu) & 0xff800000u);
  return p < 0x1p-126f ? 0x1p-126f : p;
}

// A is the largest finite magnitude of the outer group.
FP4_HD Outer<float> outer_scale(float A, float target, bool pow2) {
  const float enc = A == 0.0f ? 1.0f : min_of(target / A, kFloatMax), dec = 1.0f / enc;
  if (!pow2) return {enc, dec};
  return {1.0f / power_of_two_up(dec), power_of_two_up(dec)};
}

// MS-EDEN's own outer scale (rule amax): dec = A/(255.99·val_max), val_max = 6/((17/16)·0.93).
inline constexpr double kEdenValMax = 6.0 / ((17.0 / 16.0) * 0.93);
FP4_HD Outer<float> eden_outer_scale(float A, bool pow2) {
  const float dec = A == 0.0f ? 1.0f : A / static_cast<float>(255.99 * kEdenValMax);
  return {0.0f, pow2 ? power_of_two_up(dec) : dec};  // eden_scale never asks for S_enc
}
// With rule sweep S is 1.0067 on average (rounding to nearest shrinks); decoding with an outer scale that much larger
// leaves the stored scales near the grid points they came from, where rounding them stochastically costs least: 7.15e-3
// of error instead of 7.32e-3.
FP4_HD float eden_gain(ScaleRule rule) { return rule == ScaleRule::sweep ? 1.0067f : 1.0f; }

// Both sides of a group's outer scale, and the multiplier that is stored and decodes it.
struct StoredOuter {
  Outer<float> outer;
  float global;
};
FP4_HD StoredOuter outer_scale_of(float A, ScaleRule rule, bool eden, bool pow2) {
  const Outer<float> outer = eden && rule == ScaleRule::amax ? eden_outer_scale(A, pow2) : outer_scale(A, outer_target(rule), pow2);
  return {outer, outer.dec * (eden ? eden_gain(rule) : 1.0f)};
}

template <class F>
FP4_HD UintOf<F> eden_scale(F a, F S_dec) {
  return E4M3::encode(min_of(a / (constant<F>(static_cast<float>(kEdenValMax)) * S_dec), constant<F>(448.0f)));
}

template <class F>
FP4_HD F decode_multiplier(F scale, F dec) {
  return scale * dec;
}
template <class F>
FP4_HD F encode_multiplier(F decode) {
  return min_of(constant<F>(1.0f) / decode, constant<F>(kFloatMax));
}

// P, the power of two that brings a normal S_dec into [1, 2). Squares are summed of values times P, so that neither the
// smallest nor the largest tensors underflow or overflow in them; on all others the multiplication is exact and moves no
// bit. P itself is always normal.
template <class F>
FP4_HD F normalizer(F S_dec) {
  using U = UintOf<F>;
  const U exponent = bits(S_dec) >> 23;
  return as_float((U(254u) - select(exponent > U(253u), U(253u), exponent)) << 23);
}

// The errors by which candidates are compared, accumulated in index order.
struct SquaredError {
  template <class F>
  static FP4_HD F add(F sum, F d) {
    return sum + d * d;
  }
};
struct AbsoluteError {
  template <class F>
  static FP4_HD F add(F sum, F d) {
    return sum + abs_of(d);
  }
};
struct MaximumError {
  template <class F>
  static FP4_HD F add(F sum, F d) {
    return max_of(abs_of(d), sum);
  }
};

// How C sums over a block's elements are taken in index order, term(sum, i, c) adding element i to sum c: here by one
// holder of all of them. (The threads that share a 16×16 tile on a GPU take turns.)
struct InOrder {
  template <int N, int C, class F, class Term>
  FP4_HD void operator()(F* sums, Term term) const {
    FP4_UNROLL
    for (int i = 0; i < N; ++i)
      for (int c = 0; c < C; ++c) sums[c] = term(sums[c], i, c);
  }
};

// The errors of a block, given as magnitudes, under each of C candidate scale bytes, times P. Signs never matter: x and
// its code have the same. The sums are chains of additions in index order; side by side, the candidates hide each other's
// latency.
template <class Error, int N, int C, class F, class Sum>
FP4_HD void nearest_errors(const F* magnitude, const UintOf<F>* s, F S_dec, F* error, const Sum& sum) {
  const F P = normalizer(S_dec);
  F dec[C], enc[C];  // dec: times P
  for (int c = 0; c < C; ++c) {
    const F decode = decode_multiplier(E4M3::decode(s[c]), S_dec);
    dec[c] = decode * P;
    enc[c] = encode_multiplier(decode);
    error[c] = constant<F>(0.0f);
  }
  sum.template operator()<N, C>(
      error, [&](F e, int i, int c) { return Error::add(e, magnitude[i] * P - E2M1::round(magnitude[i] * enc[c]) * dec[c]); });
}

// The variance of stochastic rounding, Σ (hi-y)(y-lo), in units of the block's scale, times that scale squared.
template <int N, class F, class Sum>
FP4_HD F stochastic_variance(const F* magnitude, UintOf<F> s, F S_dec, const Sum& sum) {
  using U = UintOf<F>;
  const F scale = E4M3::decode(s), enc = encode_multiplier(decode_multiplier(scale, S_dec));
  F total = constant<F>(0.0f);
  sum.template operator()<N, 1>(&total, [&](F v, int i, int) {
    const F y = min_of(magnitude[i] * enc, constant<F>(6.0f));
    // y lies between its nearest neighbour and the next code on the other side; where they coincide the product is 0
    // either way.
    const U code = E2M1::encode(y);
    const F near = E2M1::decode(code);
    const auto above = near > y;
    const F other = E2M1::decode(select(above, code - U(1u), code + U(1u)));
    const F hi = select(above, near, other), lo = select(above, other, near);
    return v + (hi - y) * (y - lo);
  });
  return total * (scale * scale);
}

// The scale byte of a block of N elements, given as magnitudes; a is the largest of them.
template <ScaleRule rule, bool kUp, int N, class F, class Sum = InOrder>
FP4_HD UintOf<F> choose_scale(const F* magnitude, F a, Outer<F> outer, const Sum& sum = {}) {
  using U = UintOf<F>;
  const F limit = constant<F>(448.0f);
  if constexpr (rule == ScaleRule::amax) {
    const F v = min_of(a * (outer.enc * constant<F>(1.0f / 6.0f)), constant<F>(kFloatMax));
    return kUp ? E4M3::encode_up(v) : E4M3::encode(v);
  } else {
    const F b = (a / constant<F>(6.0f)) * outer.enc;
    constexpr int C = rule == ScaleRule::sweep ? 5 : rule == ScaleRule::minvar ? 6 : 2;
    U s[C];
    F error[C];
    if constexpr (rule == ScaleRule::sweep) {
      const U c0 = E4M3::encode(min_of(b, limit));
      constexpr int kSteps[C] = {0, -1, 1, 4, 5};
      for (int c = 0; c < C; ++c) {
        const U up = c0 + U(static_cast<uint32_t>(kSteps[c] + 1));  // one too many, so that it is never negative
        s[c] = select(up < U(2u), U(1u), up - U(1u));
        s[c] = select(s[c] > U(126u), U(126u), s[c]);
      }
      nearest_errors<SquaredError, N, C>(magnitude, s, outer.dec, error, sum);
    } else if constexpr (rule == ScaleRule::minvar) {
      const U c0 = E4M3::encode_up(min_of(b, limit));
      for (uint32_t c = 0; c < C; ++c) {
        s[c] = select(c0 + U(c) > U(126u), U(126u), c0 + U(c));
        error[c] = stochastic_variance<N>(magnitude, s[c], outer.dec, sum);
      }
    } else {
      using Error = std::conditional_t<rule == ScaleRule::four_over_six_mae, AbsoluteError,
                                       std::conditional_t<rule == ScaleRule::four_over_six_absmax, MaximumError, SquaredError>>;
      s[0] = E4M3::encode(min_of(b, limit));
      s[1] = E4M3::encode(min_of(b * constant<F>(1.5f), limit));
      nearest_errors<Error, N, C>(magnitude, s, outer.dec, error, sum);
    }
    U best = s[0];
    F best_error = error[0];
    for (int c = 1; c < C; ++c) {
      const auto better = error[c] < best_error;
      best = select(better, s[c], best);
      best_error = select(better, error[c], best_error);
    }
    return best;
  }
}

}  // namespace fp4ext
