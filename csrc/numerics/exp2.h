#pragma once
#include "host_device.h"

// 2^t for t <= 0, the exponential of a softmax (docs/numerics.md, 11).
//
//   n = t rounded to an integer, f = t − n in [−1/2, 1/2] (exact),   2^t = 2^n · (1 + c1·f + … + c6·f^6)
//
// Multiplications and additions are rounded apart, in Horner's order; 2^n is built from bits and its product is exact. Below −126 the
// result is 0: beside the largest weight of its row, which is 1, nothing that small is seen. A NaN stays a NaN.
namespace fp4ext {

template <class F>
FP4_HD F exp2_of(F t) {
  using U = UintOf<F>;
  const F round = constant<F>(12582912.0f);  // 1.5·2^23: the sum's low bits are n
  const F shifted = t + round, f = t - (shifted - round);
  F p = constant<F>(0x1.41fbbcp-13f);
  p = p * f + constant<F>(0x1.5f3e54p-10f);
  p = p * f + constant<F>(0x1.3b2d4cp-7f);
  p = p * f + constant<F>(0x1.c6aee8p-5f);
  p = p * f + constant<F>(0x1.ebfbdcp-3f);
  p = p * f + constant<F>(0x1.62e43p-1f);
  p = p * f + constant<F>(1.0f);
  const F power = as_float((bits(shifted) + U(127u)) << 23);
  return select(t >= constant<F>(-126.0f), p * power, select(t < constant<F>(-126.0f), constant<F>(0.0f), t));
}

}  // namespace fp4ext
