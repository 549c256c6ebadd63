#include "quantize.h"

#include <algorithm>
#include <atomic>

#include "tile.h"

// Quantization of tiles (tile.h): load, rotate, choose each block's scale, round, pack.
namespace fp4ext::cpu::FP4EXT_ISA {
namespace {

// The outer scales of the lanes of a tile.
Outer<VF> lane_outer(const QuantizeArgs& a, const Lane (&lanes)[kLanes]) {
  alignas(64) float enc[kLanes], dec[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    enc[l] = a.outer_enc ? a.outer_enc[lanes[l].group] : 1.0f;
    dec[l] = a.outer_dec ? a.outer_dec[lanes[l].group] : 1.0f;
  }
  return {load<VF>(enc), load<VF>(dec)};
}

// The random bits of a tile: they belong to logical coordinates (row, k) of the output, wherever the tile lies.
class RandomBits {
 public:
  RandomBits(const QuantizeArgs& a, const Lane (&lanes)[kLanes]) : a_(a) {
    alignas(64) uint32_t row[kLanes], k8[kLanes];
    for (int l = 0; l < kLanes; ++l) {
      row[l] = static_cast<uint32_t>(lanes[l].row + a.rng.row);
      k8[l] = static_cast<uint32_t>((lanes[l].k + a.rng.k) / 8);
    }
    row_ = load<VU>(row);
    k8_ = load<VU>(k8);
  }
  PhiloxWords<VU> words(uint32_t row, uint32_t k8, Purpose purpose) const {
    return philox4x32<VU>(k8_ + VU(k8), row_ + VU(row), VU(philox_usage(purpose, a_.colwise, a_.role)), VU(a_.rng.offset), a_.rng.key);
  }
  // For each element of the tile, 16 bits.
  void elements(int length, VU* r) const {
    if (!a_.spec.tile) {
      for (int i = 0; i < length; i += 8) {
        const auto w = words(0, i / 8, Purpose::kElement);
        for (int j = 0; j < 8; ++j) r[i + j] = random16(w, j);
      }
      return;
    }
    // Row `o` of the output's tile, elements k = 0..7 and 8..15: row o of x's tile, or its column o.
    for (uint32_t o = 0; o < 16; ++o)
      for (uint32_t h = 0; h < 2; ++h) {
        const auto w = words(o, h, Purpose::kElement);
        for (int j = 0; j < 8; ++j) r[a_.colwise ? (8 * h + j) * 16 + o : o * 16 + 8 * h + j] = random16(w, j);
      }
  }

 private:
  const QuantizeArgs& a_;
  VU row_, k8_;
};

// Magnitudes and the largest of them; a block that holds a NaN or an infinity is told by largest >= infinity.
template <int N>
FP4_HD VU magnitudes(const VF* t, VF* m) {
  VU largest(0u);
  for (int i = 0; i < N; ++i) {
    m[i] = abs_of(t[i]);
    largest = max_magnitude(bits(m[i]), largest);
  }
  return largest;
}

// One NVFP4 block of N elements (16, or a 16×16 tile): its scale byte and its codes.
template <ScaleRule rule, Rounding rounding, int N>
FP4_HD VU encode_block(const VF* t, Outer<VF> outer, const VU* random, VU* codes) {
  VF m[N];
  const VU largest = magnitudes<N>(t, m);
  const VMask poisoned = largest >= VU(kInfBits);
  VU scale;
  if constexpr (rounding == Rounding::eden && rule == ScaleRule::amax)
    scale = eden_scale(as_float(largest), outer.dec);
  else
    scale = choose_scale<rule, rounding == Rounding::stochastic, N>(m, as_float(largest), outer);
  scale = select(largest == VU(0u), VU(0u), scale);
  const VF enc = encode_multiplier(decode_multiplier(E4M3::decode(scale), outer.dec));
  const VU keep = select(poisoned, VU(0u), VU(0xffffffffu));
  for (int i = 0; i < N; ++i) {
    const VF y = m[i] * enc;
    const VU magnitude = rounding == Rounding::stochastic ? E2M1::encode_stochastic(y, random[i]) : E2M1::encode(y);
    codes[i] = E2M1::signed_code(magnitude, bits(t[i])) & keep;
  }
  return select(poisoned, VU(kE4M3NaN), scale);
}

// MS-EDEN's correction of the scales of one rotated vector: s·S, S = Σr²/Σr·r̂ over the outer scale's gain, rounded stochastically.
FP4_HD void eden_correct(const VF* t, int n, VF S_dec, float gain, const VU* codes, const RandomBits& random, VU* scales) {
  VF energy(0.0f), match(0.0f);
  for (int b = 0; b < n / 16; ++b) {
    const VF dec = decode_multiplier(E4M3::decode(scales[b] & VU(0x7fu)), S_dec);
    for (int i = 16 * b; i < 16 * b + 16; ++i) {
      energy = energy + t[i] * t[i];
      match = match + t[i] * (E2M1::signed_value(codes[i]) * dec);
    }
  }
  const VF infinity = as_float(VU(kInfBits));
  const VMask usable = (energy > VF(0.0f)) & (energy < infinity) & (match > VF(0.0f)) & (match < infinity);
  const VF S = select(usable, energy / match, VF(1.0f)) / VF(gain);
  for (int b = 0; b < n / 16; ++b) {
    const VF corrected = min_of(E4M3::decode(scales[b]) * S, VF(448.0f));
    const VU r = random16(random.words(0, 2 * b, Purpose::kScale), 0);
    scales[b] = select(scales[b] == VU(kE4M3NaN), scales[b], E4M3::encode_stochastic(corrected, r));
  }
}

// All blocks of a tile: codes[i] for each element, scales[b] for each block.
using EncodeTile = void (*)(const QuantizeArgs&, const Lane (&)[kLanes], const VF*, int, VU*, VU*);

template <ScaleRule rule, Rounding rounding, int N>
void encode_nvfp4(const QuantizeArgs& a, const Lane (&lanes)[kLanes], const VF* t, int length, VU* codes, VU* scales) {
  const Outer<VF> outer = lane_outer(a, lanes);
  const RandomBits bits_of(a, lanes);
  VU random[rounding == Rounding::stochastic ? kMaxVector : 1];
  if constexpr (rounding == Rounding::stochastic) bits_of.elements(length, random);
  const int blocks = N == 256 ? 1 : length / 16;
  for (int b = 0; b < blocks; ++b)
    scales[b] = encode_block<rule, rounding, N>(t + b * N, outer, rounding == Rounding::stochastic ? random + b * N : nullptr, codes + b * N);
  if constexpr (rounding == Rounding::eden) eden_correct(t, length, outer.dec, eden_gain(rule), codes, bits_of, scales);
}

template <class Element, Rounding rounding>
void encode_mx(const QuantizeArgs& a, const Lane (&lanes)[kLanes], const VF* t, int length, VU* codes, VU* scales) {
  VU random[rounding == Rounding::stochastic ? kMaxVector : 1];
  if constexpr (rounding == Rounding::stochastic) RandomBits(a, lanes).elements(length, random);
  const float reciprocal_max = 1.0f / Element::max_value();
  for (int b = 0; b < length / 32; ++b) {
    VF m[32];
    const VU largest = magnitudes<32>(t + 32 * b, m);
    const VMask poisoned = largest >= VU(kInfBits);
    const VU scale = encode_e8m0<Element>(as_float(largest), a.spec.scale == ScaleRule::ceil, reciprocal_max);
    const VF enc = encode_multiplier_e8m0(scale);
    const VU keep = select(poisoned, VU(0u), VU(0xffffffffu));
    for (int i = 0; i < 32; ++i) {
      const int j = 32 * b + i;
      const VF y = m[i] * enc;
      const VU magnitude = rounding == Rounding::stochastic ? Element::encode_stochastic(y, random[j]) : Element::encode(y);
      codes[j] = Element::signed_code(magnitude, bits(t[j])) & keep;
    }
    scales[b] = select(poisoned, VU(kE8M0NaN), scale);
  }
}

template <ScaleRule rule, Rounding rounding>
EncodeTile nvfp4(bool tile) {
  return tile ? encode_nvfp4<rule, rounding, 256> : encode_nvfp4<rule, rounding, 16>;
}
template <class Element>
EncodeTile mx(Rounding rounding) {
  return rounding == Rounding::stochastic ? encode_mx<Element, Rounding::stochastic> : encode_mx<Element, Rounding::nearest>;
}

// The law's table of combinations; ops/parse.h has refused the others.
EncodeTile encoder(const QuantizeSpec& s) {
  switch (s.format) {
    case FormatId::mxfp8: return mx<E4M3>(s.rounding);
    case FormatId::mxfp8_e5m2: return mx<E5M2>(s.rounding);
    case FormatId::mxfp4: return mx<E2M1>(s.rounding);
    case FormatId::nvfp4: break;
  }
  if (s.rounding == Rounding::eden)
    return s.scale == ScaleRule::sweep ? encode_nvfp4<ScaleRule::sweep, Rounding::eden, 16> : encode_nvfp4<ScaleRule::amax, Rounding::eden, 16>;
  if (s.rounding == Rounding::stochastic)
    return s.scale == ScaleRule::minvar ? nvfp4<ScaleRule::minvar, Rounding::stochastic>(s.tile) : nvfp4<ScaleRule::amax, Rounding::stochastic>(s.tile);
  switch (s.scale) {
    case ScaleRule::four_over_six: return nvfp4<ScaleRule::four_over_six, Rounding::nearest>(s.tile);
    case ScaleRule::four_over_six_mae: return nvfp4<ScaleRule::four_over_six_mae, Rounding::nearest>(s.tile);
    case ScaleRule::four_over_six_absmax: return nvfp4<ScaleRule::four_over_six_absmax, Rounding::nearest>(s.tile);
    case ScaleRule::sweep: return nvfp4<ScaleRule::sweep, Rounding::nearest>(s.tile);
    case ScaleRule::minvar: return nvfp4<ScaleRule::minvar, Rounding::nearest>(s.tile);
    default: return nvfp4<ScaleRule::amax, Rounding::nearest>(s.tile);
  }
}

// Codes of `count` elements, `stride` apart, to 32-bit words: eight 4-bit or four 8-bit codes each, the first one lowest.
template <int kBits>
FP4_HD void pack(const VU* codes, int stride, int count, uint32_t* words) {
  constexpr int kPerWord = 32 / kBits;
  for (int w = 0; w < count / kPerWord; ++w) {
    VU word = codes[w * kPerWord * stride];
    for (int j = 1; j < kPerWord; ++j) word = word | (codes[(w * kPerWord + j) * stride] << (kBits * j));
    store(words + w * kLanes, word);
  }
}

FP4_HD void scatter(const uint32_t* words, int lane, int count, uint8_t* out) {
  for (int w = 0; w < count; ++w) std::memcpy(out + 4 * w, words + w * kLanes + lane, 4);
}

void store_tile(const QuantizeArgs& a, const Lane (&lanes)[kLanes], int valid, int length, const VU* codes, const VU* scales) {
  alignas(64) uint32_t words[kMaxVector * kLanes / 4];
  alignas(64) uint32_t scale[(kMaxVector / 16) * kLanes];
  if (a.spec.tile) {
    const int64_t row_bytes = a.row_bytes(), row_scales = a.row_scales();
    store(scale, scales[0]);
    for (int o = 0; o < 16; ++o) {
      pack<4>(codes + (a.colwise ? o : 16 * o), a.colwise ? 16 : 1, 16, words);
      for (int l = 0; l < valid; ++l) {
        if (o >= lanes[l].rows) continue;
        scatter(words, l, 2, a.codes + lanes[l].code_byte + o * row_bytes);
        a.scales[lanes[l].scale_byte + o * row_scales] = static_cast<uint8_t>(scale[l]);
      }
    }
    return;
  }
  const int block = a.spec.block(), num_words = length / (a.spec.packed() ? 8 : 4);
  if (a.spec.packed()) pack<4>(codes, 1, length, words);
  else pack<8>(codes, 1, length, words);
  for (int b = 0; b < length / block; ++b) store(scale + b * kLanes, scales[b]);
  for (int l = 0; l < valid; ++l) {
    uint8_t* out = a.codes + lanes[l].code_byte;
    if (num_words == 2) scatter(words, l, 2, out);
    else scatter(words, l, num_words, out);
    uint8_t* s = a.scales + lanes[l].scale_byte;
    for (int b = 0; b < length / block; ++b) s[b] = static_cast<uint8_t>(scale[b * kLanes + l]);
  }
}

}  // namespace

int64_t num_tiles(const QuantizeArgs& args) { return Tiling(args).num_tiles(); }

void quantize_tiles(const QuantizeArgs& args, int64_t begin, int64_t end) {
  const Tiling tiling(args);
  const Rotation rotation(args);
  const EncodeTile encode = encoder(args.spec);
  with_dtype(args.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    alignas(64) VU codes[kMaxVector], scales[kMaxVector / 16];
    for_tiles<T>(tiling, rotation, begin, end, [&](const Lane(&lanes)[kLanes], int valid, const VF* t) {
      encode(args, lanes, t, tiling.length, codes, scales);
      store_tile(args, lanes, valid, tiling.length, codes, scales);
    });
  });
}

void amax_tiles(const QuantizeArgs& args, float* amax, int64_t begin, int64_t end) {
  const Tiling tiling(args);
  const Rotation rotation(args);
  with_dtype(args.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for_tiles<T>(tiling, rotation, begin, end, [&](const Lane(&lanes)[kLanes], int valid, const VF* t) {
      VU largest(0u);
      for (int i = 0; i < tiling.length; ++i) {
        const VU u = bits(abs_of(t[i]));
        largest = select((u > largest) & (u < VU(kInfBits)), u, largest);
      }
      for (int l = 0; l < valid; ++l) {
        std::atomic_ref<float> group(amax[lanes[l].group]);
        const float mine = as_float(static_cast<uint32_t>(largest.v[l]));
        float seen = group.load(std::memory_order_relaxed);
        while (seen < mine && !group.compare_exchange_weak(seen, mine, std::memory_order_relaxed)) {}
      }
    });
  });
}

float amax_span(const void* x, Dtype dtype, int64_t begin, int64_t end) {
  float result = 0.0f;
  with_dtype(dtype, [&](auto* type) {
    const auto* p = static_cast<decltype(type)>(const_cast<void*>(x));
    VU part[4];
    int64_t i = begin;
    for (; i + 4 * kLanes <= end; i += 4 * kLanes)
      for (int j = 0; j < 4; ++j) {
        const VU u = bits(abs_of(load_lanes(p + i + j * kLanes)));
        part[j] = select((u > part[j]) & (u < VU(kInfBits)), u, part[j]);
      }
    for (; i < end; ++i) {
      const float v = abs_of(to_float(p[i]));
      if (v <= kFloatMax && v > result) result = v;
    }
    for (int j = 0; j < 4; ++j)
      for (int l = 0; l < kLanes; ++l) result = std::max(result, as_float(static_cast<uint32_t>(part[j].v[l])));
  });
  return result;
}

}  // namespace fp4ext::cpu::FP4EXT_ISA
