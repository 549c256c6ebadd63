#pragma once
#include "philox.h"

// The random Hadamard transform (docs/numerics.md, 6): r = H·D·x / sqrt(n), one stage; twice with fresh signs, two
// stages. It spreads an outlier over n elements; both operands of a GEMM take the same one, and it cancels. The order
// of the butterflies fixes the bits.
//
// Signs alone leave a lone outlier on a lattice, all its images multiples of one number, and a quantizer that fits its
// scale to the lattice is biased. So the first butterfly of the second stage turns its pairs by eight fixed angles
// instead of 45 degrees: as orthogonal, and the lattice is gone.
namespace fp4ext {

inline constexpr int kMaxRht = 128;

// The signs of one stage: bit i of the 128 says that element i is negated.
FP4_HD PhiloxWords<uint32_t> rht_signs(const Rng& rng, uint32_t stage) {
  return philox4x32<uint32_t>(stage, 0u, philox_usage(Purpose::kSigns, false, 0), rng.offset, rng.key);
}

// The largest power of two up to n that divides k (a multiple of 16), so that the vectors tile the contraction.
FP4_HD int rht_length(int64_t k, int n) {
  while (k % n != 0) n /= 2;
  return n;
}

// fl(1/sqrt(n)): exact for n = 16 and 64.
FP4_HD float rht_norm(int n) { return n == 16 ? 0.25f : n == 32 ? 0.17677669f : n == 64 ? 0.125f : 0.088388346f; }

// sqrt(2)·(cos, sin) of the angle of pair j of the second stage, 20 + 6·(j mod 8) degrees.
struct Turn {
  float c, s;
};
FP4_HD Turn rht_turn(int j) {
  constexpr Turn kTurns[8] = {{1.3289261f, 0.48368952f}, {1.2710867f, 0.6199504f},  {1.1993212f, 0.74941903f}, {1.1144155f, 0.8706768f},
                              {1.0173001f, 0.9823953f},  {0.90903896f, 1.0833504f}, {0.7908182f, 1.1724362f},  {0.66393304f, 1.2486764f}};
  return kTurns[j % 8];
}

// One stage, in place, on n elements; `turned` is the second one.
template <class F>
FP4_HD void rht_stage(F* t, int n, const PhiloxWords<uint32_t>& signs, bool turned) {
  using U = UintOf<F>;
  for (int i = 0; i < n; ++i) t[i] = as_float(bits(t[i]) ^ U((signs.w[i / 32] >> (i % 32)) << 31));
  if (turned)
    for (int j = 0; j < n / 2; ++j) {
      const F c = constant<F>(rht_turn(j).c), s = constant<F>(rht_turn(j).s), a = t[2 * j], b = t[2 * j + 1];
      t[2 * j] = c * a + s * b;
      t[2 * j + 1] = s * a - c * b;
    }
  for (int h = turned ? 2 : 1; h < n; h *= 2)
    for (int i = 0; i < n; i += 2 * h)
      for (int j = i; j < i + h; ++j) {
        const F a = t[j], b = t[j + h];
        t[j] = a + b;
        t[j + h] = a - b;
      }
  const F norm = constant<F>(rht_norm(n));
  for (int i = 0; i < n; ++i) t[i] = t[i] * norm;
}

}  // namespace fp4ext
