#pragma once
#include "tile.cuh"

// From the elements of a block to its scale and codes, by the functions of numerics/, F being float: what sixteen SIMD
// lanes do in csrc/cpu a CUDA thread does here.
namespace fp4ext::cuda {

// Where a block lies in the output: its random bits hang on that alone.
struct Site {
  Rng rng;
  uint32_t role;
  bool colwise;
  int64_t row, k;  // row counted through the batch
  __device__ PhiloxWords<uint32_t> words(int offset, Purpose purpose) const {
    return philox4x32<uint32_t>(static_cast<uint32_t>((k + rng.k + offset) / 8), static_cast<uint32_t>(row + rng.row),
                                philox_usage(purpose, colwise, role), rng.offset, rng.key);
  }
};

template <int N>
__device__ __forceinline__ uint32_t magnitudes(const float (&t)[N], float (&m)[N]) {
  uint32_t largest = 0;
  FP4_UNROLL
  for (int i = 0; i < N; ++i) {
    m[i] = abs_of(t[i]);
    largest = bits(m[i]) > largest ? bits(m[i]) : largest;
  }
  return largest;
}

// The codes of N elements under one multiplier, the first in the lowest bits; 0 where the block is poisoned.
template <class Element, bool kStochastic, int N>
__device__ __forceinline__ void encode_elements(const float (&t)[N], float enc, bool poisoned, const Site& site,
                                                uint32_t (&words)[N * Element::kBits / 32]) {
  constexpr int kPerWord = 32 / Element::kBits;
  PhiloxWords<uint32_t> random{};
  FP4_UNROLL
  for (int i = 0; i < N; ++i) {
    if (kStochastic && i % 8 == 0) random = site.words(i, Purpose::kElement);
    const float y = abs_of(t[i]) * enc;
    const uint32_t magnitude = kStochastic ? Element::encode_stochastic(y, random16(random, i % 8)) : Element::encode(y);
    const uint32_t code = Element::signed_code(magnitude, bits(t[i])) << (i % kPerWord * Element::kBits);
    words[i / kPerWord] = i % kPerWord == 0 ? code : words[i / kPerWord] | code;
  }
  FP4_UNROLL
  for (int w = 0; w < N / kPerWord; ++w) words[w] = poisoned ? 0u : words[w];
}

// An encoder of blocks along the contraction: N elements of each of the lanes that share an RHT vector → codes, scale.
template <ScaleRule rule, Rounding rounding>
struct Nvfp4 {
  static constexpr int kBlock = 16, kWords = 2, kBlocksAtOnce = 2;  // thread blocks a multiprocessor has registers for
  static constexpr bool kOuter = true, kStochastic = rounding == Rounding::stochastic;

  static __device__ __forceinline__ uint32_t encode(const float (&t)[16], Outer<float> outer, const QuantizeSpec&, const Site& site,
                                                    const Rotation<16>& rotation, uint32_t (&words)[2]) {
    float m[16];
    const uint32_t largest = magnitudes(t, m);
    uint32_t scale;
    if constexpr (is_eden(rounding) && rule == ScaleRule::amax)
      scale = eden_scale(as_float(largest), outer.dec);
    else
      scale = choose_scale<rule, kStochastic, 16>(m, as_float(largest), outer);
    scale = largest == 0 ? 0u : scale;
    const bool poisoned = largest >= kInfBits;
    const float dec = decode_multiplier(E4M3::decode(scale), outer.dec);
    encode_elements<E2M1, kStochastic>(t, encode_multiplier(dec), poisoned, site, words);
    if constexpr (is_eden(rounding)) scale = correct(t, words, scale, dec, normalizer(outer.dec), site, rotation);
    return poisoned ? kE4M3NaN : scale;
  }

 private:
  // MS-EDEN's correction: s·S, S = Σr²/Σr·r̂ in index order over the block, or over the vector, whose lanes take turns at
  // the sums.
  static __device__ __forceinline__ uint32_t correct(const float (&t)[16], const uint32_t (&words)[2], uint32_t scale, float dec, float P,
                                                     const Site& site, const Rotation<16>& rotation) {
    float energy = 0.0f, match = 0.0f;
    const auto add_block = [&] {
      FP4_UNROLL
      for (int i = 0; i < 16; ++i) {
        const float value = E2M1::signed_value((words[i / 8] >> (i % 8 * 4)) & 15u);
        const float r = t[i] * P;
        energy = energy + r * r;
        match = match + r * (value * (dec * P));
      }
    };
    if constexpr (rounding == Rounding::eden_block) {
      add_block();
    } else {
      const int first = static_cast<int>(threadIdx.x % 32) - rotation.place;
      FP4_ROLLED
      for (int turn = 0; turn < rotation.lanes(); ++turn) {
        if (turn == rotation.place) add_block();
        energy = __shfl_sync(kAllLanes, energy, first + turn);
        match = __shfl_sync(kAllLanes, match, first + turn);
      }
    }
    const float infinity = as_float(kInfBits);
    const bool usable = energy > 0.0f && energy < infinity && match > 0.0f && match < infinity;
    const float S = (usable ? energy / match : 1.0f) / eden_gain(rule);
    const float corrected = min_of(E4M3::decode(scale) * S, 448.0f);
    return E4M3::encode_stochastic(corrected, random16(site.words(0, Purpose::kScale), 0));
  }
};

template <class Element, bool kStochastic>
struct Mx {
  static constexpr int kBlock = 32, kWords = Element::kBits, kBlocksAtOnce = 1;
  static constexpr bool kOuter = false;

  static __device__ __forceinline__ uint32_t encode(const float (&t)[32], Outer<float>, const QuantizeSpec& spec, const Site& site,
                                                    const Rotation<32>&, uint32_t (&words)[kWords]) {
    float m[32];
    const uint32_t largest = magnitudes(t, m);
    const uint32_t scale = encode_e8m0<Element>(as_float(largest), spec.scale == ScaleRule::ceil, 1.0f / Element::max_value());
    const bool poisoned = largest >= kInfBits;
    encode_elements<Element, kStochastic>(t, encode_multiplier_e8m0(scale), poisoned, site, words);
    return poisoned ? kE8M0NaN : scale;
  }
};

// Where one block's codes and scale go: blocks are counted through the whole output, but for swizzled scales.
struct Output {
  int64_t columns, pitch;  // of scales: in a row of this matrix, and from one row to the next
  int64_t first;           // blocks before the matrix
  __device__ Output(const Copy& c, const View& v, int block)
      : columns((v.k_size + block - 1) / block),
        pitch(c.pitch ? c.pitch / block : columns),
        first(c.pitch ? v.tokens / block : v.first * columns) {}
  __device__ bool holds(const View& v, int64_t row, int64_t column) const { return row < v.rows && column < columns; }
  __device__ int64_t at(int64_t row, int64_t column) const { return first + row * pitch + column; }

  __device__ void store_scale(const Copy& c, const View& v, int64_t row, int64_t column, uint32_t scale) const {
    const bool exists = holds(v, row, column);
    if (!c.swizzled) {
      if (exists) c.scales[at(row, column)] = static_cast<uint8_t>(scale);
    } else if (row < padded_rows(v.rows) && column < padded_columns(columns)) {
      uint8_t* matrix = c.scales + v.batch * padded_rows(v.rows) * padded_columns(columns);
      matrix[swizzled_offset(row, column, columns)] = static_cast<uint8_t>(exists ? scale : 0u);
    }
  }
  template <int kWords>
  __device__ void store_codes(const Copy& c, int64_t row, int64_t column, const uint32_t (&words)[kWords]) const {
    uint8_t* out = c.codes + at(row, column) * (4 * kWords);
    if constexpr (kWords == 2) {
      *reinterpret_cast<uint2*>(out) = make_uint2(words[0], words[1]);
    } else {
      FP4_UNROLL
      for (int w = 0; w < kWords; w += 4)
        *reinterpret_cast<uint4*>(out + 4 * w) = make_uint4(words[w], words[w + 1], words[w + 2], words[w + 3]);
    }
  }
};

__device__ inline Outer<float> outer_of(const Copy& c, const View& v, int64_t row) {
  const int64_t group = group_of(c, v, row);
  return {c.outer_enc[group], c.outer_dec[group]};
}

}  // namespace fp4ext::cuda
