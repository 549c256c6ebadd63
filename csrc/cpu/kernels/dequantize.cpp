#include <algorithm>

#include "io.h"
#include "quantize.h"

// x̂ = element · fl(float(scale)·global), row by row.
namespace fp4ext::cpu::FP4EXT_ISA {
namespace {

// The values of every byte of codes: two of E2M1, or one of an 8-bit element, whose codes past the largest are infinities (E5M2) and NaNs.
template <class Element>
struct ByteValues {
  static constexpr int kPerByte = 8 / Element::kBits;
  float value[256][kPerByte];
  ByteValues() {
    for (uint32_t byte = 0; byte < 256; ++byte)
      for (int i = 0; i < kPerByte; ++i) value[byte][i] = of_code(kPerByte == 1 ? byte : (byte >> (4 * i)) & 15);
  }
  static float of_code(uint32_t code) {
    const uint32_t magnitude = code & (Element::kSignCode - 1);
    if (Element::kBits == 4 || magnitude <= Element::kMaxCode) return Element::signed_value(code);
    const bool infinite = std::is_same_v<Element, E5M2> && magnitude == Element::kMaxCode + 1;
    return as_float(infinite ? kInfBits | (code & Element::kSignCode) << 24 : 0x7fc00000u);
  }
};

template <class Element, class T>
void rows(const DequantizeArgs& a, int64_t begin, int64_t end) {
  static const ByteValues<Element> values;
  constexpr int kPerByte = ByteValues<Element>::kPerByte;
  const bool e4m3_scale = a.format == FormatId::nvfp4;
  const int block = e4m3_scale ? 16 : 32;
  for (int64_t r = begin; r < end; ++r) {
    const uint8_t* codes = a.codes + r * (a.padded_k / kPerByte);
    const uint8_t* scales = a.scales + r * (a.padded_k / block);
    T* out = static_cast<T*>(a.out) + (r - a.first_row) * a.k;
    const float global = a.global ? a.global[r / a.rows_per_group] : 1.0f;
    for (int64_t k = 0; k < a.k; k += block, codes += block / kPerByte, ++scales, out += block) {
      const float scale = e4m3_scale ? decode_e4m3_scale<uint32_t>(*scales) * global : decode_e8m0<uint32_t>(*scales);
      if (k + block <= a.k) {
        for (int i = 0; i < block / kPerByte; ++i)
          for (int j = 0; j < kPerByte; ++j) from_float(values.value[codes[i]][j] * scale, out[i * kPerByte + j]);
      } else {
        for (int i = 0; i < a.k - k; ++i) from_float(values.value[codes[i / kPerByte]][i % kPerByte] * scale, out[i]);
      }
    }
  }
}

}  // namespace

void dequantize_rows(const DequantizeArgs& args, int64_t begin, int64_t end) {
  with_dtype(args.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    switch (args.format) {
      case FormatId::mxfp8: return rows<E4M3, T>(args, begin, end);
      case FormatId::mxfp8_e5m2: return rows<E5M2, T>(args, begin, end);
      default: return rows<E2M1, T>(args, begin, end);
    }
  });
}

}  // namespace fp4ext::cpu::FP4EXT_ISA
