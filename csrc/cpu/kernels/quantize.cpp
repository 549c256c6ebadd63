#include "quantize.h"

#include <algorithm>
#include <atomic>

#include "tile.h"

// Quantization of tiles (tile.h): load, rotate, choose each block's scale, round, pack.
namespace fp4ext::cpu::FP4EXT_ISA {
namespace {

// The outer scales of the lanes of a tile.
Outer<VF> lane_outer(const QuantizeArgs& a, const Lanes& lanes) {
  if (a.spec.outer != OuterKind::row) return {VF(a.outer_enc[0]), VF(a.outer_dec[0])};
  alignas(64) float enc[kLanes], dec[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    enc[l] = a.outer_enc[lanes.group[l]];
    dec[l] = a.outer_dec[lanes.group[l]];
  }
  return {load<VF>(enc), load<VF>(dec)};
}

// The random bits of a tile: they belong to logical coordinates (row, k) of the output, wherever the tile lies.
class RandomBits {
 public:
  RandomBits(const QuantizeArgs& a, const Lanes& lanes) : a_(a) {
    alignas(64) uint32_t row[kLanes], k8[kLanes];
    for (int l = 0; l < kLanes; ++l) {
      row[l] = static_cast<uint32_t>(lanes.row[l] + a.rng.row);
      k8[l] = static_cast<uint32_t>((lanes.k[l] + a.rng.k) / 8);
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
  FP4_UNROLL
  for (int i = 0; i < N; ++i) {
    m[i] = abs_of(t[i]);
    largest = max_magnitude(bits(m[i]), largest);
  }
  return largest;
}

// Gathers codes into 32-bit words, the first code lowest: eight 4-bit or four 8-bit ones each.
template <int kBits>
struct Words {
  static constexpr int kPerWord = 32 / kBits;
  VU* words;
  FP4_HD void put(int i, VU code) const {
    VU& word = words[i / kPerWord];
    const int shift = i % kPerWord * kBits;
    word = shift == 0 ? code : word | (code << shift);
  }
};

// The words of a 16×16 tile from its codes in the order of x. In the column-wise copy, element 16·r + c is position r of row c.
FP4_HD void gather_tile(const VU* codes, bool transposed, VU* words) {
  const int row = transposed ? 1 : 16, k = transposed ? 16 : 1;
  for (int w = 0; w < 32; ++w) {
    const VU* code = codes + w / 2 * row + w % 2 * 8 * k;
    VU word = code[0];
    FP4_UNROLL
    for (int j = 1; j < 8; ++j) word = word | (code[j * k] << (4 * j));
    words[w] = word;
  }
}

// Poisoned blocks have codes 0: their words are cleared.
FP4_HD void clear_where(VMask poisoned, VU* words, int count) {
  if (!any(poisoned)) return;
  for (int w = 0; w < count; ++w) words[w] = select(poisoned, VU(0u), words[w]);
}

// One NVFP4 block of N elements (16, or a 16×16 tile): its scale byte, returned, and its codes.
template <ScaleRule rule, Rounding rounding, int N>
FP4_HD VU encode_block(const VF* t, Outer<VF> outer, const VU* random, bool transposed, VU* words) {
  VF m[N];
  const VU largest = magnitudes<N>(t, m);
  VU scale;
  if constexpr (is_eden(rounding) && rule == ScaleRule::amax)
    scale = eden_scale(as_float(largest), outer.dec);
  else
    scale = choose_scale<rule, rounding == Rounding::stochastic, N>(m, as_float(largest), outer);
  scale = select(largest == VU(0u), VU(0u), scale);
  const VF enc = encode_multiplier(decode_multiplier(E4M3::decode(scale), outer.dec));
  const auto code = [&](int i) {
    const VF y = m[i] * enc;
    const VU magnitude = rounding == Rounding::stochastic ? E2M1::encode_stochastic(y, random[i]) : E2M1::encode(y);
    return E2M1::signed_code(magnitude, bits(t[i]));
  };
  if constexpr (N == 16) {
    VU gathered[2];  // registers
    FP4_UNROLL
    for (int i = 0; i < N; ++i) Words<4>{gathered}.put(i, code(i));
    words[0] = gathered[0], words[1] = gathered[1];
  } else {
    VU codes[N];
    for (int i = 0; i < N; ++i) codes[i] = code(i);
    gather_tile(codes, transposed, words);
  }
  const VMask poisoned = largest >= VU(kInfBits);
  clear_where(poisoned, words, N / 8);
  return select(poisoned, VU(kE4M3NaN), scale);
}

// MS-EDEN's correction of the scales of elements [k, k + n) of the tile, one rotated vector or one block of it: s·S,
// S = Σr²/Σr·r̂ over the outer scale's gain, rounded stochastically.
FP4_HD void eden_correct(const VF* t, int k, int n, VF S_dec, float gain, const VU* words, const RandomBits& random, VU* scales) {
  t += k, words += k / 8, scales += k / 16;
  const VF P = normalizer(S_dec);
  VF energy(0.0f), match(0.0f);
  for (int b = 0; b < n / 16; ++b) {
    const VF dec = decode_multiplier(E4M3::decode(scales[b] & VU(0x7fu)), S_dec) * P;
    for (int i = 16 * b; i < 16 * b + 16; ++i) {
      const VU code = (words[i / 8] >> (i % 8 * 4)) & VU(0xfu);
      const VF r = t[i] * P;
      energy = energy + r * r;
      match = match + r * (E2M1::signed_value(code) * dec);
    }
  }
  const VF infinity = as_float(VU(kInfBits));
  const VMask usable = (energy > VF(0.0f)) & (energy < infinity) & (match > VF(0.0f)) & (match < infinity);
  const VF S = select(usable, energy / match, VF(1.0f)) / VF(gain);
  for (int b = 0; b < n / 16; ++b) {
    const VF corrected = min_of(E4M3::decode(scales[b]) * S, VF(448.0f));
    const VU r = random16(random.words(0, k / 8 + 2 * b, Purpose::kScale), 0);
    scales[b] = select(scales[b] == VU(kE4M3NaN), scales[b], E4M3::encode_stochastic(corrected, r));
  }
}

// All blocks of a tile: words of codes in output order, scales[b] for each block.
using EncodeTile = void (*)(const Tiling&, const Lanes&, const VF*, VU*, VU*);

template <ScaleRule rule, Rounding rounding, int N>
void encode_nvfp4(const Tiling& tiling, const Lanes& lanes, const VF* t, VU* words, VU* scales) {
  const QuantizeArgs& a = tiling.args;
  const int length = lanes.length;
  const Outer<VF> outer = lane_outer(a, lanes);
  VU random[rounding == Rounding::stochastic ? kMaxVector : 1];
  if constexpr (rounding == Rounding::stochastic) RandomBits(a, lanes).elements(length, random);
  const int blocks = N == 256 ? 1 : length / 16;
  for (int b = 0; b < blocks; ++b)
    scales[b] = encode_block<rule, rounding, N>(t + b * N, outer, rounding == Rounding::stochastic ? random + b * N : nullptr, a.colwise,
                                                words + b * (N / 8));
  if constexpr (is_eden(rounding)) {
    const int n = rounding == Rounding::eden ? tiling.unit : 16;  // the elements that share a correction
    for (int k = 0; k < length; k += n) eden_correct(t, k, n, outer.dec, eden_gain(rule), words, RandomBits(a, lanes), scales);
  }
}

template <class Element, Rounding rounding>
void encode_mx(const Tiling& tiling, const Lanes& lanes, const VF* t, VU* words, VU* scales) {
  const QuantizeArgs& a = tiling.args;
  const int length = lanes.length;
  VU random[rounding == Rounding::stochastic ? kMaxVector : 1];
  if constexpr (rounding == Rounding::stochastic) RandomBits(a, lanes).elements(length, random);
  const float reciprocal_max = 1.0f / Element::max_value();
  for (int b = 0; b < length / 32; ++b) {
    const VF* block = t + 32 * b;
    VF m[32];
    const VU largest = magnitudes<32>(block, m);
    const VU scale = encode_e8m0<Element>(as_float(largest), a.spec.scale == ScaleRule::ceil, reciprocal_max);
    const VF enc = encode_multiplier_e8m0(scale);
    VU gathered[Element::kBits];
    const Words<Element::kBits> out{gathered};
    for (int i = 0; i < 32; ++i) {
      const VF y = m[i] * enc;
      const VU magnitude = rounding == Rounding::stochastic ? Element::encode_stochastic(y, random[32 * b + i]) : Element::encode(y);
      out.put(i, Element::signed_code(magnitude, bits(block[i])));
    }
    const VMask poisoned = largest >= VU(kInfBits);
    clear_where(poisoned, gathered, Element::kBits);
    for (int w = 0; w < Element::kBits; ++w) words[b * Element::kBits + w] = gathered[w];
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

// The contract's table of combinations; ops/parse.h has refused the others.
EncodeTile encoder(const QuantizeSpec& s) {
  switch (s.format) {
    case FormatId::mxfp8: return mx<E4M3>(s.rounding);
    case FormatId::mxfp8_e5m2: return mx<E5M2>(s.rounding);
    case FormatId::mxfp4: return mx<E2M1>(s.rounding);
    case FormatId::nvfp4: break;
  }
  if (s.rounding == Rounding::eden_block) return encode_nvfp4<ScaleRule::amax, Rounding::eden_block, 16>;
  if (s.rounding == Rounding::eden)
    return s.scale == ScaleRule::sweep ? encode_nvfp4<ScaleRule::sweep, Rounding::eden, 16>
                                       : encode_nvfp4<ScaleRule::amax, Rounding::eden, 16>;
  if (s.rounding == Rounding::stochastic)
    return s.scale == ScaleRule::minvar ? nvfp4<ScaleRule::minvar, Rounding::stochastic>(s.tile)
                                        : nvfp4<ScaleRule::amax, Rounding::stochastic>(s.tile);
  switch (s.scale) {
    case ScaleRule::four_over_six: return nvfp4<ScaleRule::four_over_six, Rounding::nearest>(s.tile);
    case ScaleRule::four_over_six_mae: return nvfp4<ScaleRule::four_over_six_mae, Rounding::nearest>(s.tile);
    case ScaleRule::four_over_six_absmax: return nvfp4<ScaleRule::four_over_six_absmax, Rounding::nearest>(s.tile);
    case ScaleRule::sweep: return nvfp4<ScaleRule::sweep, Rounding::nearest>(s.tile);
    case ScaleRule::minvar: return nvfp4<ScaleRule::minvar, Rounding::nearest>(s.tile);
    default: return nvfp4<ScaleRule::amax, Rounding::nearest>(s.tile);
  }
}

// A lane's words to consecutive bytes.
FP4_HD void scatter(const VU* words, int lane, int count, uint8_t* out) {
  const auto* p = reinterpret_cast<const uint32_t*>(words) + lane;
  for (int w = 0; w < count; ++w) std::memcpy(out + 4 * w, p + w * kLanes, 4);
}

// The same for all lanes, whole vectors at a time.
FP4_HD void store_words(const QuantizeArgs& a, const Lanes& lanes, int count, const VU* words) {
  for (int w = 0; w < count; w += kLanes) {
    VF part[kLanes];
    for (int i = 0; i < kLanes; ++i) part[i] = as_float(words[w + i]);
    transpose(part);
    for (int l = 0; l < lanes.valid; ++l) store(a.codes + lanes.code_byte[l] + 4 * w, part[l]);
  }
}

void store_tile(const QuantizeArgs& a, const Lanes& lanes, const VU* words, const VU* scales) {
  const int length = lanes.length;
  const auto* scale = reinterpret_cast<const uint32_t*>(scales);
  if (a.spec.tile) {
    const int64_t row_bytes = a.row_bytes(), row_scales = a.row_scales();
    for (int o = 0; o < 16; ++o)
      for (int l = 0; l < lanes.valid; ++l) {
        if (o >= lanes.rows[l]) continue;
        scatter(words + 2 * o, l, 2, a.codes + lanes.code_byte[l] + o * row_bytes);
        a.scales[lanes.scale_byte[l] + o * row_scales] = static_cast<uint8_t>(scale[l]);
      }
    return;
  }
  const int num_words = length / (a.spec.packed() ? 8 : 4), num_scales = length / a.spec.block();
  const bool in_line =
      !a.colwise && num_scales == 1 && lanes.valid == kLanes;  // lanes follow each other in the output, from row to row too
  if (in_line)
    store_bytes(a.scales + lanes.scale_byte[0], scales[0]);
  else
    for (int l = 0; l < lanes.valid; ++l)
      for (int b = 0; b < num_scales; ++b) a.scales[lanes.scale_byte[l] + b] = static_cast<uint8_t>(scale[b * kLanes + l]);
  if (in_line && num_words == 2)
    store_pairs(a.codes + lanes.code_byte[0], words[0], words[1]);
  else if (num_words % kLanes == 0)
    store_words(a, lanes, num_words, words);
  else
    for (int l = 0; l < lanes.valid; ++l) scatter(words, l, num_words, a.codes + lanes.code_byte[l]);
}

}  // namespace

int64_t num_tiles(const QuantizeArgs& args) { return Tiling(args).num_tiles(); }
int64_t num_bands(const QuantizeArgs& args) { return Tiling(args).num_bands(); }
Band band(const QuantizeArgs& args, int64_t i) { return Tiling(args).band(i); }

void quantize_tiles(const QuantizeArgs& args, int64_t begin, int64_t end) {
  const Tiling tiling(args);
  const Rotation rotation(args);
  const EncodeTile encode = encoder(args.spec);
  with_dtype(args.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    alignas(64) VU words[kMaxVector / 4], scales[kMaxVector / 16];
    for_tiles<T>(tiling, rotation, begin, end, [&](const Lanes& lanes, const VF* t) {
      encode(tiling, lanes, t, words, scales);
      store_tile(args, lanes, words, scales);
    });
  });
}

void amax_tiles(const QuantizeArgs& args, float* amax, int64_t begin, int64_t end) {
  const Tiling tiling(args);
  const Rotation rotation(args);
  with_dtype(args.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for_tiles<T>(tiling, rotation, begin, end, [&](const Lanes& lanes, const VF* t) {
      VU largest(0u);
      for (int i = 0; i < lanes.length * tiling.step; ++i) {
        const VU u = bits(abs_of(t[i]));
        largest = select((u > largest) & (u < VU(kInfBits)), u, largest);
      }
      for (int l = 0; l < lanes.valid; ++l) {
        std::atomic_ref<float> group(amax[lanes.group[l]]);
        const float mine = as_float(static_cast<uint32_t>(largest.v[l]));
        float seen = group.load(std::memory_order_relaxed);
        while (seen < mine && !group.compare_exchange_weak(seen, mine, std::memory_order_relaxed)) {
        }
      }
    });
  });
}

float amax_span(const void* x, Dtype dtype, int64_t begin, int64_t end) {
  float result = 0.0f;
  with_dtype(dtype, [&](auto* type) {
    const auto* p = static_cast<decltype(type)>(const_cast<void*>(x));
    VU part[4] = {VU(0u), VU(0u), VU(0u), VU(0u)};
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
