#pragma once
#include <type_traits>

#include "isa.h"
#include "../numerics/host_device.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// Vectors of kLanes floats or uint32s, for whichever instruction set this file is compiled for (FP4EXT_ISA names its
// namespace, see isa.h). GCC's and Clang's vector extension carries the arithmetic; only what it says badly has
// intrinsics. The types are structs, so that the numerics templates find these operators by their namespace and each
// instruction set instantiates its own code.
namespace fp4ext::cpu::FP4EXT_ISA {

// The scalar overloads of host_device.h, beside those for vectors below.
using fp4ext::as_float;
using fp4ext::bits;
using fp4ext::mul_wide;
using fp4ext::select;

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif

typedef float RawF __attribute__((vector_size(kLanes * 4)));
typedef uint32_t RawU __attribute__((vector_size(kLanes * 4)));
typedef int32_t RawI __attribute__((vector_size(kLanes * 4)));

struct VMask {
  RawI m;
};
struct VU {
  RawU v;
  VU() = default;
  FP4_HD VU(RawU u) : v(u) {}
  FP4_HD VU(uint32_t u) : v(RawU{} + u) {}
};
struct VF {
  RawF v;
  VF() = default;
  FP4_HD VF(RawF f) : v(f) {}
  FP4_HD VF(float f) {
    for (int i = 0; i < kLanes; ++i) v[i] = f;
  }  // not RawF{} + f, which would lose the sign of -0
};

#define FP4EXT_BINARY(T, op) \
  FP4_HD T operator op(T a, T b) { return T(a.v op b.v); }
FP4EXT_BINARY(VF, +)
FP4EXT_BINARY(VF, -)
FP4EXT_BINARY(VF, *)
FP4EXT_BINARY(VF, /)
FP4EXT_BINARY(VU, +)
FP4EXT_BINARY(VU, -)
FP4EXT_BINARY(VU, *)
FP4EXT_BINARY(VU, &)
FP4EXT_BINARY(VU, |)
FP4EXT_BINARY(VU, ^)
#undef FP4EXT_BINARY
#define FP4EXT_COMPARE(T, op) \
  FP4_HD VMask operator op(T a, T b) { return VMask{RawI(a.v op b.v)}; }
FP4EXT_COMPARE(VF, <)
FP4EXT_COMPARE(VF, <=)
FP4EXT_COMPARE(VF, >)
FP4EXT_COMPARE(VF, >=)
FP4EXT_COMPARE(VF, ==)
#undef FP4EXT_COMPARE
// As signed numbers, which AVX2 has in one instruction: everything the numerics compare (magnitudes, codes) is below
// 2^31.
#define FP4EXT_COMPARE(op) \
  FP4_HD VMask operator op(VU a, VU b) { return VMask{RawI(RawI(a.v) op RawI(b.v))}; }
FP4EXT_COMPARE(<)
FP4EXT_COMPARE(>)
FP4EXT_COMPARE(>=)
FP4EXT_COMPARE(==)
#undef FP4EXT_COMPARE
FP4_HD VU operator<<(VU a, int n) { return VU(a.v << n); }
FP4_HD VU operator>>(VU a, int n) { return VU(a.v >> n); }
FP4_HD VMask operator&(VMask a, VMask b) { return VMask{a.m & b.m}; }
FP4_HD VMask operator|(VMask a, VMask b) { return VMask{a.m | b.m}; }
FP4_HD VMask operator!(VMask a) { return VMask{~a.m}; }

FP4_HD VU bits(VF x) { return VU(RawU(x.v)); }
FP4_HD VF as_float(VU x) { return VF(RawF(x.v)); }
FP4_HD VF select(VMask c, VF a, VF b) { return VF(c.m ? a.v : b.v); }
FP4_HD VU select(VMask c, VU a, VU b) { return VU(c.m ? a.v : b.v); }

// The larger of two magnitudes' bits: one instruction where a select would take two.
FP4_HD VU max_magnitude(VU a, VU b) { return VU(RawU(RawI(a.v) > RawI(b.v) ? RawI(a.v) : RawI(b.v))); }

// The same as the templates of host_device.h, bit for bit, in one instruction.
FP4_HD VF min_of(VF a, VF b) {
#if defined(__AVX512F__)
  return VF(RawF(_mm512_min_ps(__m512(a.v), __m512(b.v))));
#elif defined(__AVX2__)
  return VF(RawF(_mm256_min_ps(__m256(a.v), __m256(b.v))));
#else
  return select(a < b, a, b);
#endif
}
FP4_HD VF max_of(VF a, VF b) {
#if defined(__AVX512F__)
  return VF(RawF(_mm512_max_ps(__m512(a.v), __m512(b.v))));
#elif defined(__AVX2__)
  return VF(RawF(_mm256_max_ps(__m256(a.v), __m256(b.v))));
#else
  return select(a > b, a, b);
#endif
}

FP4_HD bool any(VMask c) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(__m512i(c.m), __m512i(c.m)) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256(__m256i(c.m), __m256i(c.m));
#else
  int32_t r = 0;
  for (int i = 0; i < kLanes; ++i) r |= c.m[i];
  return r != 0;
#endif
}

FP4_HD void mul_wide(VU a, uint32_t b, VU& hi, VU& lo) {
#if defined(__AVX512F__)
  const __m512i x = __m512i(a.v), y = _mm512_set1_epi32(static_cast<int>(b));
  const __m512i even = _mm512_mul_epu32(x, y), odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), y);
  hi = VU(RawU(_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd)));
  lo = VU(RawU(_mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32))));
#elif defined(__AVX2__)
  const __m256i x = __m256i(a.v), y = _mm256_set1_epi32(static_cast<int>(b));
  const __m256i even = _mm256_mul_epu32(x, y), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), y);
  hi = VU(RawU(_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA)));
  lo = VU(RawU(_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA)));
#else
  for (int i = 0; i < kLanes; ++i) {
    const uint64_t p = static_cast<uint64_t>(a.v[i]) * b;
    hi.v[i] = static_cast<uint32_t>(p >> 32);
    lo.v[i] = static_cast<uint32_t>(p);
  }
#endif
}

// a·b + c, rounded once.
FP4_HD VF fma(VF a, VF b, VF c) {
#if defined(__AVX512F__)
  return VF(RawF(_mm512_fmadd_ps(__m512(a.v), __m512(b.v), __m512(c.v))));
#elif defined(__FMA__)
  return VF(RawF(_mm256_fmadd_ps(__m256(a.v), __m256(b.v), __m256(c.v))));
#else
  VF r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
  return r;
#endif
}

// Vectors in memory of any alignment. Not memcpy: GCC moves a vector that has an address in halves and quarters.
typedef float LooseF __attribute__((vector_size(kLanes * 4), aligned(1), may_alias));
typedef uint32_t LooseU __attribute__((vector_size(kLanes * 4), aligned(1), may_alias));
template <class V, class T>
FP4_HD V load(const T* p) {
  if constexpr (std::is_same_v<V, VF>)
    return VF(RawF(*reinterpret_cast<const LooseF*>(p)));
  else
    return VU(RawU(*reinterpret_cast<const LooseU*>(p)));
}
FP4_HD void store(void* p, VF x) { *reinterpret_cast<LooseF*>(p) = x.v; }
FP4_HD void store(void* p, VU x) { *reinterpret_cast<LooseU*>(p) = x.v; }

// lo and hi interleaved, lo first: 2·kLanes consecutive words.
FP4_HD void store_pairs(uint8_t* p, VU lo, VU hi) {
#if defined(__AVX512F__)
  const __m512i a = _mm512_unpacklo_epi32(__m512i(lo.v), __m512i(hi.v)), b = _mm512_unpackhi_epi32(__m512i(lo.v), __m512i(hi.v));
  const __m512i order = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i order2 = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  _mm512_storeu_si512(p, _mm512_permutex2var_epi64(a, order, b));
  _mm512_storeu_si512(p + 64, _mm512_permutex2var_epi64(a, order2, b));
#elif defined(__AVX2__)
  const __m256i a = _mm256_unpacklo_epi32(__m256i(lo.v), __m256i(hi.v)), b = _mm256_unpackhi_epi32(__m256i(lo.v), __m256i(hi.v));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute2x128_si256(a, b, 0x20));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), _mm256_permute2x128_si256(a, b, 0x31));
#else
  uint32_t words[2 * kLanes];
  for (int l = 0; l < kLanes; ++l) words[2 * l] = lo.v[l], words[2 * l + 1] = hi.v[l];
  std::memcpy(p, words, sizeof(words));
#endif
}
// The low byte of each lane.
FP4_HD void store_bytes(uint8_t* p, VU x) {
  typedef uint8_t RawB __attribute__((vector_size(kLanes)));
  const RawB b = __builtin_convertvector(x.v, RawB);
  std::memcpy(p, &b, sizeof(b));
}

// kLanes rows of kLanes floats, transposed in place: a 4×4 step inside each 128-bit part, then the parts.
FP4_HD void transpose(VF (&t)[kLanes]) {
#define FP4EXT_SHUFFLE(a, b, ...) RawF(__builtin_shuffle(a, b, RawI{__VA_ARGS__}))
#if defined(__AVX512F__)
  for (int p = 0; p < kLanes; p += 4) {
    const __m512 a = __m512(t[p].v), b = __m512(t[p + 1].v), c = __m512(t[p + 2].v), d = __m512(t[p + 3].v);
    const __m512d ab0 = __m512d(_mm512_unpacklo_ps(a, b)), ab1 = __m512d(_mm512_unpackhi_ps(a, b));
    const __m512d cd0 = __m512d(_mm512_unpacklo_ps(c, d)), cd1 = __m512d(_mm512_unpackhi_ps(c, d));
    t[p].v = RawF(_mm512_unpacklo_pd(ab0, cd0));
    t[p + 1].v = RawF(_mm512_unpackhi_pd(ab0, cd0));
    t[p + 2].v = RawF(_mm512_unpacklo_pd(ab1, cd1));
    t[p + 3].v = RawF(_mm512_unpackhi_pd(ab1, cd1));
  }
  for (int i = 0; i < 4; ++i) {
    const __m512 a = __m512(t[i].v), b = __m512(t[i + 4].v), c = __m512(t[i + 8].v), d = __m512(t[i + 12].v);
    const __m512 ab0 = _mm512_shuffle_f32x4(a, b, 0x88), ab1 = _mm512_shuffle_f32x4(a, b, 0xdd);
    const __m512 cd0 = _mm512_shuffle_f32x4(c, d, 0x88), cd1 = _mm512_shuffle_f32x4(c, d, 0xdd);
    t[i].v = RawF(_mm512_shuffle_f32x4(ab0, cd0, 0x88));
    t[i + 4].v = RawF(_mm512_shuffle_f32x4(ab1, cd1, 0x88));
    t[i + 8].v = RawF(_mm512_shuffle_f32x4(ab0, cd0, 0xdd));
    t[i + 12].v = RawF(_mm512_shuffle_f32x4(ab1, cd1, 0xdd));
  }
#elif defined(__AVX2__)
  for (int p = 0; p < kLanes; p += 4) {
    const __m256 a = __m256(t[p].v), b = __m256(t[p + 1].v), c = __m256(t[p + 2].v), d = __m256(t[p + 3].v);
    const __m256d ab0 = __m256d(_mm256_unpacklo_ps(a, b)), ab1 = __m256d(_mm256_unpackhi_ps(a, b));
    const __m256d cd0 = __m256d(_mm256_unpacklo_ps(c, d)), cd1 = __m256d(_mm256_unpackhi_ps(c, d));
    t[p].v = RawF(_mm256_unpacklo_pd(ab0, cd0));
    t[p + 1].v = RawF(_mm256_unpackhi_pd(ab0, cd0));
    t[p + 2].v = RawF(_mm256_unpacklo_pd(ab1, cd1));
    t[p + 3].v = RawF(_mm256_unpackhi_pd(ab1, cd1));
  }
  for (int i = 0; i < 4; ++i) {
    const __m256 a = __m256(t[i].v), b = __m256(t[i + 4].v);
    t[i].v = RawF(_mm256_permute2f128_ps(a, b, 0x20));
    t[i + 4].v = RawF(_mm256_permute2f128_ps(a, b, 0x31));
  }
#else
  const RawF a = t[0].v, b = t[1].v, c = t[2].v, d = t[3].v;
  const RawF ab0 = FP4EXT_SHUFFLE(a, b, 0, 4, 1, 5), ab1 = FP4EXT_SHUFFLE(a, b, 2, 6, 3, 7);
  const RawF cd0 = FP4EXT_SHUFFLE(c, d, 0, 4, 1, 5), cd1 = FP4EXT_SHUFFLE(c, d, 2, 6, 3, 7);
  t[0].v = FP4EXT_SHUFFLE(ab0, cd0, 0, 1, 4, 5);
  t[1].v = FP4EXT_SHUFFLE(ab0, cd0, 2, 3, 6, 7);
  t[2].v = FP4EXT_SHUFFLE(ab1, cd1, 0, 1, 4, 5);
  t[3].v = FP4EXT_SHUFFLE(ab1, cd1, 2, 3, 6, 7);
#endif
#undef FP4EXT_SHUFFLE
}

}  // namespace fp4ext::cpu::FP4EXT_ISA
