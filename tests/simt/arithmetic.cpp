#include "arithmetic.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "../../csrc/numerics/e8m0.h"
#include "../../csrc/numerics/half.h"
#include "machine.h"

namespace simt {
namespace {

constexpr int kNone = -8000;  // in the place of the exponent of 0: below all, and so is a sum of two

// 2^e; 0 where that is too small to matter, e being at most 1023.
double power(int e) {
  const uint64_t u = e < -1022 ? 0 : static_cast<uint64_t>(e + 1023) << 52;
  double d;
  std::memcpy(&d, &u, 8);
  return d;
}
int exponent_of(float x, int least) {
  if (x == 0.0f) return kNone;
  return std::max(std::ilogb(x), least);
}

float toward_zero(double sum) {
  const float nearest = static_cast<float>(sum);
  const bool away = std::fabs(static_cast<double>(nearest)) > std::fabs(sum) && std::fabs(sum) < power(128);
  return away ? std::nextafterf(nearest, 0.0f) : nearest;
}
float rounded(double sum) { return options().arithmetic == Arithmetic::toward_zero ? toward_zero(sum) : static_cast<float>(sum); }

// The largest exponent of a sum, whose products' is `products`.
int largest_of(int products, float c) { return std::max(products, exponent_of(c, -126)); }
// c and the products' sum, both cut off kBits below `largest`.
template <int kBits>
float finish(int64_t products, float c, int largest) {
  if (largest <= kNone) return products == 0 ? c : 0.0f;
  const auto cut = static_cast<int64_t>(static_cast<double>(c) * power(kBits - largest));
  return toward_zero(static_cast<double>(products + cut) * power(largest - kBits));
}

template <int kBits, int kCount>
float cut_dot(const double* a, const int16_t* a_exponent, const double* b, const int16_t* b_exponent, float c) {
  if (!std::isfinite(c)) return c;
  int16_t products = 2 * kNone;
  for (int k = 0; k < kCount; ++k) products = std::max<int16_t>(products, a_exponent[k] + b_exponent[k]);
  const int largest = largest_of(products, c);
  if (largest <= kNone) return c + 0.0f;
  const double scale = power(kBits - largest);
  int32_t sum = 0;
  for (int k = 0; k < kCount; ++k) sum += static_cast<int32_t>(a[k] * b[k] * scale);
  return finish<kBits>(sum, c, largest);
}

struct Code {
  float value;
  int16_t exponent;
};
std::array<Code, 256> e4m3_codes() {
  std::array<Code, 256> codes;
  for (uint32_t u = 0; u < 256; ++u) {
    const float value = fp4ext::decode_e4m3_scale(u);
    codes[u] = {value, static_cast<int16_t>(value != value ? kNone : exponent_of(value, -6))};
  }
  return codes;
}
const std::array<Code, 256> kE4M3 = e4m3_codes();
constexpr int16_t kE2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // twice

}  // namespace

void Bf16Line::decode(const uint32_t (&pairs)[8]) {
  finite = true;
  for (int k = 0; k < 16; ++k) {
    const float x = fp4ext::bf16_to_float(static_cast<uint16_t>(pairs[k / 2] >> (k % 2 * 16)));
    const uint32_t bits = pairs[k / 2] >> (k % 2 * 16) & 0xffff, field = bits >> 7 & 0xff;
    value[k] = x;
    exponent[k] = static_cast<int16_t>((bits & 0x7fff) == 0 ? kNone : field == 0 ? -126 : static_cast<int>(field) - 127);
    finite &= field != 0xff;
  }
}
void Fp8Line::decode(const uint8_t* codes, uint32_t scales) {
  const uint32_t byte = scales & 0xff;
  scale = static_cast<int>(byte) - 127;
  finite = byte != 0xff;
  for (int k = 0; k < 32; ++k) {
    const Code& code = kE4M3[codes[k]];
    value[k] = code.value, exponent[k] = code.exponent;
    finite &= code.value == code.value;
  }
}
void Fp4Line::decode(const uint8_t* codes, uint32_t scales) {
  for (int k = 0; k < 64; ++k) value[k] = kE2M1[codes[k / 2] >> (k % 2 * 4) & 15];
  finite = true;
  for (int b = 0; b < 4; ++b) {
    const Code& code = kE4M3[scales >> (8 * b) & 0x7f];
    finite &= code.value == code.value;
    scale[b] = code.exponent;
    significand[b] = code.exponent == kNone ? 0 : static_cast<int>(code.value * static_cast<float>(power(3 - code.exponent)));
  }
}

float dot(const Bf16Line& a, const Bf16Line& b, float c) {
  if (!a.finite || !b.finite || !std::isfinite(c) || options().arithmetic != Arithmetic::hardware) {
    double sum = c;
    for (int k = 0; k < 16; ++k) sum += a.value[k] * b.value[k];
    return rounded(sum);
  }
  if (options().devices[options().device] >= 90) return cut_dot<25, 16>(a.value, a.exponent, b.value, b.exponent, c);
  const float half = cut_dot<24, 8>(a.value, a.exponent, b.value, b.exponent, c);
  return cut_dot<24, 8>(a.value + 8, a.exponent + 8, b.value + 8, b.exponent + 8, half);
}

float dot(const Fp8Line& a, const Fp8Line& b, float c) {
  if (!a.finite || !b.finite) return NAN;
  const int scale = a.scale + b.scale;
  if (!std::isfinite(c) || options().arithmetic != Arithmetic::hardware) {
    double sum = 0.0;
    for (int k = 0; k < 32; ++k) sum += static_cast<double>(a.value[k]) * static_cast<double>(b.value[k]);
    return rounded(c + sum * power(scale));
  }
  int16_t products = 2 * kNone;
  for (int k = 0; k < 32; ++k) products = std::max<int16_t>(products, a.exponent[k] + b.exponent[k]);
  const int largest = largest_of(products <= kNone ? kNone : products + scale, c), shift = 25 + scale - largest;
  if (largest <= kNone) return c + 0.0f;
  // A product is at most 2^18, and exact in fp32.
  const auto factor = static_cast<float>(power(std::max(shift, -100)));
  int32_t low = 0, high = 0;  // each of them fits
  for (int k = 0; k < 16; ++k) low += static_cast<int32_t>(a.value[k] * b.value[k] * factor);
  for (int k = 16; k < 32; ++k) high += static_cast<int32_t>(a.value[k] * b.value[k] * factor);
  return finish<25>(static_cast<int64_t>(low) + high, c, largest);
}

float dot(const Fp4Line& a, const Fp4Line& b, float c) {
  if (!a.finite || !b.finite) return NAN;
  int64_t terms[4];  // in units of 2^(exponent - 8)
  int exponents[4];
  for (int g = 0; g < 4; ++g) {
    int32_t sum = 0;
    for (int k = 16 * g; k < 16 * (g + 1); ++k) sum += a.value[k] * b.value[k];
    terms[g] = static_cast<int64_t>(sum) * (a.significand[g] * b.significand[g]);
    exponents[g] = a.scale[g] + b.scale[g];
  }
  const bool exact = !std::isfinite(c) || options().arithmetic != Arithmetic::hardware;
  int largest = exponent_of(c, -126);
  for (int e : exponents) largest = std::max(largest, e);
  if (largest <= kNone) return c + 0.0f;
  if (exact) {
    double sum = c;
    for (int g = 0; g < 4; ++g) sum += static_cast<double>(terms[g]) * power(exponents[g] - 8);
    return rounded(sum);
  }
  int64_t sum = 0;
  for (int g = 0; g < 4; ++g) sum += static_cast<int64_t>(static_cast<double>(terms[g]) * power(27 + exponents[g] - largest));
  return finish<35>(sum, c, largest);
}

}  // namespace simt
