#pragma once
#include_next <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

// A stand-in for the AVX-512 intrinsics that csrc/cpu uses, by the pseudocode of Intel's Intrinsics Guide, so that the avx512 kernels
// run, and are tested, on a CPU without them (CMake option FP4EXT_AVX512_DOUBLE). It defines __AVX512F__, and is included before anything.
// It proves what the kernels compute, not what the compiler makes of the real intrinsics, nor their speed.
namespace fp4ext_avx512_double {

template <class T>
struct Lanes {
  static constexpr int kCount = 64 / sizeof(T);
  T v[kCount];
  template <class V>
  explicit Lanes(V x) {
    std::memcpy(v, &x, sizeof(x) < 64 ? sizeof(x) : 64);
  }
  Lanes() : v{} {}
  template <class V>
  V as() const {
    V x;
    std::memcpy(&x, v, sizeof(x));
    return x;
  }
};
using F32 = Lanes<float>;
using I32 = Lanes<int32_t>;
using U8 = Lanes<uint8_t>;
using U64 = Lanes<uint64_t>;

// One result for each lane i.
template <class T, class V, class Fn>
inline V each(Fn&& f) {
  Lanes<T> r;
  for (int i = 0; i < Lanes<T>::kCount; ++i) r.v[i] = f(i);
  return r.template as<V>();
}

inline __m512i castsi128(__m128i a) { return U8(a).as<__m512i>(); }
inline __m512 cvtepi32(__m512i a) {
  const I32 x(a);
  return each<float, __m512>([&](int i) { return static_cast<float>(x.v[i]); });
}
inline __m512i cvtepu8(__m128i a) {
  const U8 x(a);
  return each<int32_t, __m512i>([&](int i) { return x.v[i]; });
}
inline __m512 cvtph(__m256i a) {
  __m128i h[2];
  std::memcpy(h, &a, 32);
  const __m256 f[2] = {_mm256_cvtph_ps(h[0]), _mm256_cvtph_ps(h[1])};
  __m512 r;
  std::memcpy(&r, f, 64);
  return r;
}
inline __m512i dpbusd(__m512i sum, __m512i a, __m512i b) {  // a unsigned, b signed
  const I32 s(sum);
  const U8 x(a), y(b);
  return each<int32_t, __m512i>([&](int i) {
    int32_t t = s.v[i];
    for (int j = 4 * i; j < 4 * i + 4; ++j) t += static_cast<int>(x.v[j]) * static_cast<int8_t>(y.v[j]);
    return t;
  });
}
inline __m512 fmadd(__m512 a, __m512 b, __m512 c) {
  const F32 x(a), y(b), z(c);
  return each<float, __m512>([&](int i) { return std::fmaf(x.v[i], y.v[i], z.v[i]); });
}
inline __m512 min_ps(__m512 a, __m512 b) {
  const F32 x(a), y(b);
  return each<float, __m512>([&](int i) { return x.v[i] < y.v[i] ? x.v[i] : y.v[i]; });
}
inline __m512 max_ps(__m512 a, __m512 b) {
  const F32 x(a), y(b);
  return each<float, __m512>([&](int i) { return x.v[i] > y.v[i] ? x.v[i] : y.v[i]; });
}
inline __m512i inserti32x4(__m512i a, __m128i b, int part) {
  U8 r(a);
  std::memcpy(r.v + 16 * part, &b, 16);
  return r.as<__m512i>();
}
inline __m512i mask_blend(unsigned mask, __m512i a, __m512i b) {
  const I32 x(a), y(b);
  return each<int32_t, __m512i>([&](int i) { return mask >> i & 1 ? y.v[i] : x.v[i]; });
}
inline __m512i mul_epu32(__m512i a, __m512i b) {
  const U64 x(a), y(b);
  return each<uint64_t, __m512i>([&](int i) { return (x.v[i] & 0xffffffffu) * (y.v[i] & 0xffffffffu); });
}
inline __m512 permutexvar(__m512i index, __m512 a) {
  const I32 k(index);
  const F32 x(a);
  return each<float, __m512>([&](int i) { return x.v[k.v[i] & 15]; });
}
inline __m512i permutex2var_epi64(__m512i a, __m512i index, __m512i b) {
  const U64 x(a), k(index), y(b);
  return each<uint64_t, __m512i>([&](int i) { return k.v[i] & 8 ? y.v[k.v[i] & 7] : x.v[k.v[i] & 7]; });
}
inline __m512i set1_epi32(int32_t a) {
  return each<int32_t, __m512i>([&](int) { return a; });
}
inline __m512 set1_ps(float a) {
  return each<float, __m512>([&](int) { return a; });
}
template <class... T>
inline __m512 setr_ps(T... a) {
  const float list[] = {static_cast<float>(a)...};
  return each<float, __m512>([&](int i) { return list[i]; });
}
template <class... T>
inline __m512i setr_epi64(T... a) {
  const uint64_t list[] = {static_cast<uint64_t>(a)...};
  return each<uint64_t, __m512i>([&](int i) { return list[i]; });
}
inline __m512i setzero() { return U8().as<__m512i>(); }
inline __m512i shuffle_epi8(__m512i a, __m512i control) {  // within each 128-bit part
  const U8 x(a), k(control);
  return each<uint8_t, __m512i>([&](int i) { return k.v[i] & 128 ? uint8_t{0} : x.v[i / 16 * 16 + (k.v[i] & 15)]; });
}
inline __m512 shuffle_ps(__m512 a, __m512 b, int control) {  // within each 128-bit part
  const F32 x(a), y(b);
  return each<float, __m512>([&](int i) { return (i % 4 < 2 ? x : y).v[i / 4 * 4 + (control >> (2 * (i % 4)) & 3)]; });
}
inline __m512i broadcast_i32x4(__m128i a) {
  U8 r;
  for (int part = 0; part < 4; ++part) std::memcpy(r.v + 16 * part, &a, 16);
  return r.as<__m512i>();
}
inline __m512 shuffle_f32x4(__m512 a, __m512 b, int control) {
  const F32 x(a), y(b);
  return each<float, __m512>([&](int i) { return (i < 8 ? x : y).v[(control >> (2 * (i / 4)) & 3) * 4 + i % 4]; });
}
inline __m512i slli_epi64(__m512i a, int n) {
  const U64 x(a);
  return each<uint64_t, __m512i>([&](int i) { return x.v[i] << n; });
}
inline __m512i srli_epi64(__m512i a, int n) {
  const U64 x(a);
  return each<uint64_t, __m512i>([&](int i) { return x.v[i] >> n; });
}
inline void storeu(void* p, __m512i a) { std::memcpy(p, &a, 64); }
inline unsigned test_epi32_mask(__m512i a, __m512i b) {
  const I32 x(a), y(b);
  unsigned mask = 0;
  for (int i = 0; i < 16; ++i) mask |= static_cast<unsigned>((x.v[i] & y.v[i]) != 0) << i;
  return mask;
}
// Interleaves the low or high halves of each 128-bit part.
template <class T, int kHigh, class V>
inline V unpack(V a, V b) {
  constexpr int n = 16 / sizeof(T);
  const Lanes<T> x(a), y(b);
  return each<T, V>([&](int i) { return (i & 1 ? y : x).v[i / n * n + kHigh * n / 2 + i % n / 2]; });
}

}  // namespace fp4ext_avx512_double

#define __AVX512F__ 1
#define _mm512_broadcast_i32x4 fp4ext_avx512_double::broadcast_i32x4
#define _mm512_castsi128_si512 fp4ext_avx512_double::castsi128
#define _mm512_cvtepi32_ps fp4ext_avx512_double::cvtepi32
#define _mm512_cvtepu8_epi32 fp4ext_avx512_double::cvtepu8
#define _mm512_cvtph_ps fp4ext_avx512_double::cvtph
#define _mm512_dpbusd_epi32 fp4ext_avx512_double::dpbusd
#define _mm512_fmadd_ps fp4ext_avx512_double::fmadd
#define _mm512_inserti32x4 fp4ext_avx512_double::inserti32x4
#define _mm512_mask_blend_epi32 fp4ext_avx512_double::mask_blend
#define _mm512_max_ps fp4ext_avx512_double::max_ps
#define _mm512_min_ps fp4ext_avx512_double::min_ps
#define _mm512_mul_epu32 fp4ext_avx512_double::mul_epu32
#define _mm512_permutex2var_epi64 fp4ext_avx512_double::permutex2var_epi64
#define _mm512_permutexvar_ps fp4ext_avx512_double::permutexvar
#define _mm512_set1_epi32 fp4ext_avx512_double::set1_epi32
#define _mm512_set1_ps fp4ext_avx512_double::set1_ps
#undef _mm512_setr_epi64
#define _mm512_setr_epi64 fp4ext_avx512_double::setr_epi64
#undef _mm512_setr_ps
#define _mm512_setr_ps fp4ext_avx512_double::setr_ps
#define _mm512_setzero_si512 fp4ext_avx512_double::setzero
#define _mm512_shuffle_epi8 fp4ext_avx512_double::shuffle_epi8
#undef _mm512_shuffle_f32x4
#define _mm512_shuffle_f32x4 fp4ext_avx512_double::shuffle_f32x4
#undef _mm512_shuffle_ps
#define _mm512_shuffle_ps fp4ext_avx512_double::shuffle_ps
#define _mm512_slli_epi64 fp4ext_avx512_double::slli_epi64
#define _mm512_srli_epi64 fp4ext_avx512_double::srli_epi64
#define _mm512_storeu_si512 fp4ext_avx512_double::storeu
#define _mm512_test_epi32_mask fp4ext_avx512_double::test_epi32_mask
#define _mm512_unpackhi_epi32 fp4ext_avx512_double::unpack<int32_t, 1>
#define _mm512_unpackhi_epi64 fp4ext_avx512_double::unpack<uint64_t, 1>
#define _mm512_unpackhi_epi8 fp4ext_avx512_double::unpack<uint8_t, 1>
#define _mm512_unpackhi_pd fp4ext_avx512_double::unpack<double, 1>
#define _mm512_unpackhi_ps fp4ext_avx512_double::unpack<float, 1>
#define _mm512_unpacklo_epi32 fp4ext_avx512_double::unpack<int32_t, 0>
#define _mm512_unpacklo_epi64 fp4ext_avx512_double::unpack<uint64_t, 0>
#define _mm512_unpacklo_epi8 fp4ext_avx512_double::unpack<uint8_t, 0>
#define _mm512_unpacklo_pd fp4ext_avx512_double::unpack<double, 0>
#define _mm512_unpacklo_ps fp4ext_avx512_double::unpack<float, 0>
