#include <algorithm>

#include "io.h"
#include "quantize.h"

// x̂ = element · fl(float(scale)·global), row by row.
namespace fp4ext::cpu::FP4EXT_ISA {
namespace {

template <class Element, class T>
void rows(const DequantizeArgs& a, int64_t begin, int64_t end) {
  constexpr int kPerByte = 8 / Element::kBits;
  const bool e4m3_scale = a.format == FormatId::nvfp4;
  const int block = e4m3_scale ? 16 : 32;
  T* out = static_cast<T*>(a.out);
  float value[256];
  for (uint32_t c = 0; c < (1u << Element::kBits); ++c)
    value[c] = Element::kBits == 8 && (c & 0x7f) > Element::kMaxCode ? as_float(0x7fc00000u) : Element::signed_value(c);
  for (int64_t r = begin; r < end; ++r) {
    const uint8_t* codes = a.codes + r * (a.padded_k / kPerByte);
    const uint8_t* scales = a.scales + r * (a.padded_k / block);
    const float global = a.global ? a.global[r / a.rows_per_group] : 1.0f;
    for (int64_t k = 0; k < a.k; k += block) {
      const uint32_t s = scales[k / block];
      const float scale = e4m3_scale ? decode_e4m3_scale(s) * global : decode_e8m0(s);
      for (int64_t i = k; i < std::min(k + block, a.k); ++i) {
        const uint8_t byte = codes[i / kPerByte];
        const uint32_t code = kPerByte == 1 ? byte : i & 1 ? byte >> 4 : byte & 15;
        from_float(value[code] * scale, out[r * a.k + i]);
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
