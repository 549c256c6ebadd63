#pragma once
#include "../numerics/minifloat.h"
#include "simd.h"

// Vectors of 4·kLanes bytes, seen as kLanes/4 parts of 16: what integer dot products and nibble tables need beyond
// simd.h. "In each part" is how x86 shuffles work, and the layouts of gemm_block.cpp are built on it.
namespace fp4ext::cpu::FP4EXT_ISA {

typedef uint8_t RawB __attribute__((vector_size(kLanes * 4)));
inline constexpr int kParts = kLanes / 4;

struct VB {
  RawB v;
};

FP4_HD void store(void* p, VB x) { store(p, VU(RawU(x.v))); }

// 16 bytes, repeated in each part.
FP4_HD VB repeat16(const uint8_t* p) {
  VB r;
  for (int i = 0; i < kParts; ++i) std::memcpy(reinterpret_cast<char*>(&r) + 16 * i, p, 16);
  return r;
}

// Part i: the 16 bytes at rows[4i] + offset.
FP4_HD VB gather16(const uint8_t* const* rows, int64_t offset) {
#if defined(__AVX512F__)
  __m512i r = _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[0] + offset)));
  r = _mm512_inserti32x4(r, _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[4] + offset)), 1);
  r = _mm512_inserti32x4(r, _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[8] + offset)), 2);
  r = _mm512_inserti32x4(r, _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[12] + offset)), 3);
  return VB{RawB(r)};
#elif defined(__AVX2__)
  const __m256i r = _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[0] + offset)));
  return VB{RawB(_mm256_inserti128_si256(r, _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[4] + offset)), 1))};
#else
  return repeat16(rows[0] + offset);
#endif
}

FP4_HD VB load_bytes(const uint8_t* p) {
  VB r;
  std::memcpy(&r.v, p, sizeof(r.v));
  return r;
}

FP4_HD VB low_nibbles(VB a) { return VB{a.v & (RawB{} + uint8_t{15})}; }
FP4_HD VB high_nibbles(VB a) { return VB{RawB(RawU(a.v) >> 4) & (RawB{} + uint8_t{15})}; }

// table[index] in each part; index < 16.
FP4_HD VB lookup16(VB table, VB index) {
#if defined(__AVX512F__)
  return VB{RawB(_mm512_shuffle_epi8(__m512i(table.v), __m512i(index.v)))};
#elif defined(__AVX2__)
  return VB{RawB(_mm256_shuffle_epi8(__m256i(table.v), __m256i(index.v)))};
#else
  VB r;
  for (int i = 0; i < kLanes * 4; ++i) r.v[i] = table.v[index.v[i]];
  return r;
#endif
}

// a0 b0 a1 b1 … of the low or the high halves of each part, in units of 8, 32 or 64 bits.
#if defined(__AVX512F__)
#define FP4EXT_INTERLEAVE(name, intrinsic, ...) \
  FP4_HD VB name(VB a, VB b) { return VB{RawB(_mm512_##intrinsic(__m512i(a.v), __m512i(b.v)))}; }
#elif defined(__AVX2__)
#define FP4EXT_INTERLEAVE(name, intrinsic, ...) \
  FP4_HD VB name(VB a, VB b) { return VB{RawB(_mm256_##intrinsic(__m256i(a.v), __m256i(b.v)))}; }
#else
#define FP4EXT_INTERLEAVE(name, intrinsic, ...) \
  FP4_HD VB name(VB a, VB b) { return VB{__builtin_shuffle(a.v, b.v, RawB{__VA_ARGS__})}; }
#endif
FP4EXT_INTERLEAVE(low8, unpacklo_epi8, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
FP4EXT_INTERLEAVE(high8, unpackhi_epi8, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
FP4EXT_INTERLEAVE(low32, unpacklo_epi32, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23)
FP4EXT_INTERLEAVE(high32, unpackhi_epi32, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31)
FP4EXT_INTERLEAVE(low64, unpacklo_epi64, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
FP4EXT_INTERLEAVE(high64, unpackhi_epi64, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)
#undef FP4EXT_INTERLEAVE

// Sums of products of bytes, one a 32-bit lane: Σ unsigned w · signed x over the lane's four bytes, four such groups at
// a time. AVX2 adds pairs in 16 bits, which holds as long as |Σ of 8 products| < 2^15 (gemm_block.cpp: 8·24·12).
struct DotSums {
#if defined(__AVX512F__) || !defined(__AVX2__)
  RawI v;
#else
  __m256i v;
#endif
};
FP4_HD DotSums dot4(DotSums sum, bool start, VB w, const int32_t* x) {
#if defined(__AVX512F__)
  return {RawI(_mm512_dpbusd_epi32(start ? _mm512_setzero_si512() : __m512i(sum.v), __m512i(w.v), _mm512_set1_epi32(*x)))};
#elif defined(__AVX2__)
  const __m256i products = _mm256_maddubs_epi16(__m256i(w.v), _mm256_set1_epi32(*x));
  __m256i r = start ? products : _mm256_add_epi16(sum.v, products);
  asm("" : "+x"(r));  // else GCC makes the chain of adds a tree, whose leaves do not fit the registers: half the speed
  return {r};
#else
  int8_t a[4];
  std::memcpy(a, x, 4);
  RawI r = start ? RawI{} : sum.v;
  for (int i = 0; i < kLanes; ++i) r[i] += w.v[4 * i] * a[0] + w.v[4 * i + 1] * a[1] + w.v[4 * i + 2] * a[2] + w.v[4 * i + 3] * a[3];
  return {r};
#endif
}
FP4_HD VF to_float(DotSums sum) {
#if defined(__AVX512F__)
  return VF(RawF(_mm512_cvtepi32_ps(__m512i(sum.v))));
#elif defined(__AVX2__)
  return VF(RawF(_mm256_cvtepi32_ps(_mm256_madd_epi16(sum.v, _mm256_set1_epi16(1)))));
#else
  return VF(__builtin_convertvector(sum.v, RawF));
#endif
}

// One float in every lane, its sign of zero kept (VF(float) adds it to +0).
FP4_HD VF splat(const float* p) {
#if defined(__AVX512F__)
  return VF(RawF(_mm512_set1_ps(*p)));
#elif defined(__AVX2__)
  return VF(RawF(_mm256_broadcast_ss(p)));
#else
  return VF(RawF{*p, *p, *p, *p});
#endif
}

// kLanes bytes, or kLanes nibbles (low first), zero-extended.
FP4_HD VU widen8(const uint8_t* p) {
#if defined(__AVX512F__)
  return VU(RawU(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))));
#elif defined(__AVX2__)
  return VU(RawU(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))));
#else
  return VU(RawU{p[0], p[1], p[2], p[3]});
#endif
}
FP4_HD VU widen4(const uint8_t* p) {
#if defined(__AVX512F__)
  uint32_t low, high;
  std::memcpy(&low, p, 4);
  std::memcpy(&high, p + 4, 4);
  const RawU words = {low, low, low, low, low, low, low, low, high, high, high, high, high, high, high, high};
  return VU(words >> RawU{0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28}) & VU(15u);
#elif defined(__AVX2__)
  uint32_t word;
  std::memcpy(&word, p, 4);
  return VU(RawU(_mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int>(word)), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28)))) & VU(15u);
#else
  return VU(RawU{p[0] & 15u, p[0] / 16u, p[1] & 15u, p[1] / 16u});
#endif
}

// Twice the value of an E2M1 code, as a signed byte; and that plus 12, unsigned.
inline constexpr uint8_t kTwiceE2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, 255, 254, 253, 252, 250, 248, 244};
inline constexpr uint8_t kTwiceE2M1Plus12[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// kLanes elements at p, as the numerics headers decode them, by table or by the half-precision conversion where there
// is one.
FP4_HD VF decode_lanes_e2m1(const uint8_t* p) {
#if defined(__AVX512F__)
  const __m512 table = _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6);
  return VF(RawF(_mm512_permutexvar_ps(__m512i(widen4(p).v), table)));
#elif defined(__AVX2__)
  const __m256i code = __m256i(widen4(p).v);
  const __m256 magnitude = _mm256_permutevar8x32_ps(_mm256_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6), code);
  const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(code, 3), 31);
  return VF(RawF(_mm256_or_ps(magnitude, _mm256_castsi256_ps(sign))));
#else
  return E2M1::signed_value(widen4(p));
#endif
}
// E4M3 is a half with a rebased exponent, less the NaN, which comes out as ±480. E5M2 is the high byte of a half.
FP4_HD VF decode_lanes_e4m3(const uint8_t* p) {
#if defined(__AVX512F__)
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const VF v = VF(RawF(_mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(short(0xbfff)))))) * VF(256.0f);
#elif defined(__AVX2__)
  const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const VF v = VF(RawF(_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(short(0xbfff)))))) * VF(256.0f);
#endif
#if defined(__AVX2__)
  return select(abs_of(v) == VF(480.0f), as_float(VU(0x7fc00000u)), v);
#else
  return decode_e4m3_scale(widen8(p));
#endif
}
FP4_HD VF decode_lanes_e5m2(const uint8_t* p) {
#if defined(__AVX512F__)
  return VF(RawF(_mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 8))));
#elif defined(__AVX2__)
  return VF(RawF(_mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))), 8))));
#else
  const VU code = widen8(p), magnitude = code & VU(0x7fu);
  const VU special = VU(kInfBits) | (code << 21 & VU(0x007fffffu)) | (code & VU(0x80u)) << 24;
  return select(magnitude > VU(E5M2::kMaxCode), as_float(special), E5M2::signed_value(code));
#endif
}

#if defined(__AVX2__)
// For a few rows of x (gemm_block_few.cpp), which the portable build leaves to the panels.

// As repeat16, in one load.
FP4_HD VB broadcast16(const uint8_t* p) {
#if defined(__AVX512F__)
  return VB{RawB(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
#else
  return VB{RawB(_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
#endif
}

// Byte 4n+i of each part in lane i of it, times 2^16: a word of four bytes becomes four lanes.
template <int n>
FP4_HD VU widen_word(VB a) {
  static constexpr uint8_t kControl[16] = {128, 128, 4 * n,     128, 128, 128, 4 * n + 1, 128,
                                           128, 128, 4 * n + 2, 128, 128, 128, 4 * n + 3, 128};
  return VU(RawU(lookup16(a, repeat16(kControl)).v));
}

FP4_HD VB max8(VB a, VB b) { return VB{a.v > b.v ? a.v : b.v}; }
FP4_HD uint8_t largest_byte(VB a) {
  uint8_t largest = 0;
  for (int i = 0; i < kLanes * 4; ++i) largest = a.v[i] > largest ? a.v[i] : largest;
  return largest;
}

// a0 a2 b0 b2, or a1 a3 b1 b3, of the 32-bit words of each part.
FP4_HD VB even32(VB a, VB b) {
#if defined(__AVX512F__)
  return VB{RawB(_mm512_shuffle_ps(__m512(a.v), __m512(b.v), 0x88))};
#else
  return VB{RawB(_mm256_shuffle_ps(__m256(a.v), __m256(b.v), 0x88))};
#endif
}
FP4_HD VB odd32(VB a, VB b) {
#if defined(__AVX512F__)
  return VB{RawB(_mm512_shuffle_ps(__m512(a.v), __m512(b.v), 0xdd))};
#else
  return VB{RawB(_mm256_shuffle_ps(__m256(a.v), __m256(b.v), 0xdd))};
#endif
}

// Σ unsigned w · signed x for two vectors of bytes each, in 32 bits: lane j has bytes 4j .. 4j+3 of both products.
FP4_HD VB dot_words(VB w0, VB x0, VB w1, VB x1) {
#if defined(__AVX512F__)
  const __m512i first = _mm512_dpbusd_epi32(_mm512_setzero_si512(), __m512i(w0.v), __m512i(x0.v));
  return VB{RawB(_mm512_dpbusd_epi32(first, __m512i(w1.v), __m512i(x1.v)))};
#else
  const __m256i a = _mm256_maddubs_epi16(__m256i(w0.v), __m256i(x0.v)), b = _mm256_maddubs_epi16(__m256i(w1.v), __m256i(x1.v));
  return VB{RawB(_mm256_madd_epi16(_mm256_add_epi16(a, b), _mm256_set1_epi16(1)))};
#endif
}
FP4_HD VF to_float(VB words) {
#if defined(__AVX512F__)
  return VF(RawF(_mm512_cvtepi32_ps(__m512i(words.v))));
#else
  return VF(RawF(_mm256_cvtepi32_ps(__m256i(words.v))));
#endif
}
#endif

}  // namespace fp4ext::cpu::FP4EXT_ISA
