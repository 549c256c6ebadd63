#include "../quantize.h"

// One thread quantizes one block, with the very functions that csrc/cpu runs sixteen lanes wide: F is float here. The
// straightforward kernel; it proves that the numerics headers are device code. The one for the memory roofline comes
// with the CUDA backend.
namespace fp4ext::kernels {
namespace {

constexpr int kThreads = 128;

template <int N>
struct Block {
  float value[N], magnitude[N];
  float largest;
  bool poisoned;
};

template <int N>
__device__ Block<N> load_block(const uint16_t* x) {
  Block<N> b;
  uint32_t largest = 0;
  for (int i = 0; i < N; ++i) {
    b.value[i] = as_float(static_cast<uint32_t>(x[i]) << 16);
    b.magnitude[i] = abs_of(b.value[i]);
    largest = bits(b.magnitude[i]) > largest ? bits(b.magnitude[i]) : largest;
  }
  b.largest = as_float(largest);
  b.poisoned = largest >= kInfBits;
  return b;
}

// Rounds a block with the multiplier `enc`, and writes its codes.
template <class Element, bool kStochastic, int N>
__device__ void store_codes(const Block<N>& b, float enc, const QuantizeRowsArgs& a, int64_t row, int64_t k, uint8_t* out) {
  constexpr int kPerByte = 8 / Element::kBits;
  for (int g = 0; g < N; g += 8) {
    PhiloxWords<uint32_t> words{};
    if (kStochastic)
      words = philox4x32<uint32_t>(static_cast<uint32_t>((k + g + a.rng.k) / 8), static_cast<uint32_t>(row + a.rng.row),
                                   philox_usage(Purpose::kElement, false, a.role), a.rng.offset, a.rng.key);
    uint64_t packed = 0;
    for (int j = 0; j < 8; ++j) {
      const float y = b.magnitude[g + j] * enc;
      const uint32_t magnitude = kStochastic ? Element::encode_stochastic(y, random16(words, j)) : Element::encode(y);
      const uint32_t code = b.poisoned ? 0u : Element::signed_code(magnitude, bits(b.value[g + j]));
      packed |= static_cast<uint64_t>(code) << (Element::kBits * j);
    }
    if (kPerByte == 2)
      *reinterpret_cast<uint32_t*>(out + g / 2) = static_cast<uint32_t>(packed);
    else
      *reinterpret_cast<uint64_t*>(out + g) = packed;
  }
}

template <ScaleRule rule, bool kStochastic>
__global__ void nvfp4_kernel(QuantizeRowsArgs a) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x, per_row = a.cols / 16;
  if (i >= a.rows * per_row) return;
  const Block<16> b = load_block<16>(a.x + i * 16);
  const Outer<float> outer{*a.outer_enc, *a.outer_dec};
  uint32_t scale = choose_scale<rule, kStochastic, 16>(b.magnitude, b.largest, outer);
  if (b.largest == 0.0f) scale = 0;
  const float enc = encode_multiplier(decode_multiplier(E4M3::decode(scale), outer.dec));
  store_codes<E2M1, kStochastic>(b, enc, a, i / per_row, i % per_row * 16, a.codes + i * 8);
  a.scales[i] = static_cast<uint8_t>(b.poisoned ? kE4M3NaN : scale);
}

template <class Element, bool kStochastic>
__global__ void mx_kernel(QuantizeRowsArgs a) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x, per_row = a.cols / 32;
  if (i >= a.rows * per_row) return;
  const Block<32> b = load_block<32>(a.x + i * 32);
  const uint32_t scale = encode_e8m0<Element>(b.largest, a.spec.scale == ScaleRule::ceil, 1.0f / Element::max_value());
  store_codes<Element, kStochastic>(b, encode_multiplier_e8m0(scale), a, i / per_row, i % per_row * 32, a.codes + i * (4 * Element::kBits));
  a.scales[i] = static_cast<uint8_t>(b.poisoned ? kE8M0NaN : scale);
}

using Kernel = void (*)(QuantizeRowsArgs);

template <class Element>
Kernel mx(bool stochastic) {
  return stochastic ? mx_kernel<Element, true> : mx_kernel<Element, false>;
}

Kernel choose_kernel(const QuantizeSpec& s) {
  const bool stochastic = s.rounding == Rounding::stochastic;
  switch (s.format) {
    case FormatId::mxfp8: return mx<E4M3>(stochastic);
    case FormatId::mxfp8_e5m2: return mx<E5M2>(stochastic);
    case FormatId::mxfp4: return mx<E2M1>(stochastic);
    case FormatId::nvfp4: break;
  }
  if (stochastic) return s.scale == ScaleRule::minvar ? nvfp4_kernel<ScaleRule::minvar, true> : nvfp4_kernel<ScaleRule::amax, true>;
  switch (s.scale) {
    case ScaleRule::four_over_six: return nvfp4_kernel<ScaleRule::four_over_six, false>;
    case ScaleRule::four_over_six_mae: return nvfp4_kernel<ScaleRule::four_over_six_mae, false>;
    case ScaleRule::four_over_six_absmax: return nvfp4_kernel<ScaleRule::four_over_six_absmax, false>;
    case ScaleRule::sweep: return nvfp4_kernel<ScaleRule::sweep, false>;
    case ScaleRule::minvar: return nvfp4_kernel<ScaleRule::minvar, false>;
    default: return nvfp4_kernel<ScaleRule::amax, false>;
  }
}

}  // namespace

cudaError_t quantize_rows(const QuantizeRowsArgs& args, cudaStream_t stream) {
  const int64_t blocks = args.rows * (args.cols / args.spec.block());
  if (blocks == 0) return cudaSuccess;
  choose_kernel(args.spec)<<<static_cast<unsigned>((blocks + kThreads - 1) / kThreads), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace fp4ext::kernels
