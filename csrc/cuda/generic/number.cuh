#pragma once
#include "../../numerics/e8m0.h"
#include "../../numerics/half.h"
#include "../quantize.h"

// Numbers in memory to floats and back, one or 16 bytes at a time.
namespace fp4ext::cuda {

// The elements of 16 bytes.
template <class T>
inline constexpr int kPerPiece = 16 / sizeof(T);

__device__ __forceinline__ void unpack(uint4 u, float* t) {
  t[0] = as_float(u.x), t[1] = as_float(u.y), t[2] = as_float(u.z), t[3] = as_float(u.w);
}
__device__ __forceinline__ void unpack(uint4 u, uint16_t* t) {
  const uint32_t words[4] = {u.x, u.y, u.z, u.w};
  FP4_UNROLL
  for (int i = 0; i < 8; ++i) t[i] = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
}

__device__ inline bool is_aligned(const void* p, int bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

// kWords words of codes. Views into a flat buffer may begin at any byte; a load of a word that is not aligned would fault.
template <int kWords>
__device__ __forceinline__ void load_words(const uint8_t* p, uint32_t (&words)[kWords]) {
  static_assert(kWords == 2 || kWords == 4);
  if (!is_aligned(p, 4 * kWords)) {
    FP4_UNROLL
    for (int i = 0; i < kWords; ++i)
      words[i] = p[4 * i] | p[4 * i + 1] << 8 | p[4 * i + 2] << 16 | static_cast<uint32_t>(p[4 * i + 3]) << 24;
  } else if constexpr (kWords == 2) {
    const uint2 u = *reinterpret_cast<const uint2*>(p);
    words[0] = u.x, words[1] = u.y;
  } else {
    const uint4 u = *reinterpret_cast<const uint4*>(p);
    words[0] = u.x, words[1] = u.y, words[2] = u.z, words[3] = u.w;
  }
}

// The multiplier that decodes a block of a stored tensor.
__device__ inline float stored_multiplier(const Stored& s, int64_t row, int64_t block) {
  if (s.format != FormatId::nvfp4) return decode_e8m0<uint32_t>(s.scales[row * (s.padded_k / 32) + block]);
  const float global = s.global ? s.global[row / s.rows_per_group] : 1.0f;
  return decode_e4m3_scale<uint32_t>(s.scales[row * (s.padded_k / 16) + block]) * global;
}

// An 8-bit element, infinities (E5M2) and NaNs included.
template <class Element>
__device__ inline float decode_byte(uint32_t code) {
  const uint32_t magnitude = code & 0x7f;
  if (magnitude <= Element::kMaxCode) return Element::signed_value(code);
  const bool infinite = std::is_same_v<Element, E5M2> && magnitude == Element::kMaxCode + 1;
  return as_float(infinite ? kInfBits | (code & 0x80) << 24 : 0x7fc00000u);
}

// 16 elements of row `row` from k on (a multiple of 16 within padded_k), as x̂.
__device__ inline void decode_16(const Stored& s, int64_t row, int64_t k, float* t) {
  const bool packed = s.format == FormatId::nvfp4 || s.format == FormatId::mxfp4;
  const float multiplier = stored_multiplier(s, row, k / (s.format == FormatId::nvfp4 ? 16 : 32));
  if (packed) {
    uint32_t words[2];
    load_words(s.codes + (row * s.padded_k + k) / 2, words);
    FP4_UNROLL
    for (int i = 0; i < 16; ++i) t[i] = E2M1::signed_value((words[i / 8] >> (i % 8 * 4)) & 15u) * multiplier;
  } else {
    uint32_t words[4];
    load_words(s.codes + row * s.padded_k + k, words);
    FP4_UNROLL
    for (int i = 0; i < 16; ++i) {
      const uint32_t code = (words[i / 4] >> (i % 4 * 8)) & 0xffu;
      t[i] = (s.format == FormatId::mxfp8 ? decode_byte<E4M3>(code) : decode_byte<E5M2>(code)) * multiplier;
    }
  }
}

}  // namespace fp4ext::cuda
