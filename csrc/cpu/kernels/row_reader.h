#pragma once
#include "../bytes.h"
#include "gemm.h"
#include "io.h"

// Rows of any operand as fp32, for the lane order: element times scale, exact.
namespace fp4ext::cpu::FP4EXT_ISA {

inline constexpr int64_t kWidth = 16;  // the contract's lanes

template <Elem E>
constexpr int kBits = E == Elem::e2m1                      ? 4
                      : E == Elem::e4m3 || E == Elem::e5m2 ? 8
                      : E == Elem::fp32                    ? 32
                                                           : 16;

// kLanes consecutive elements of a row.
template <Elem E>
FP4_HD VF load_elements(const uint8_t* p) {
  if constexpr (E == Elem::e2m1) {
    return decode_lanes_e2m1(p);
  } else if constexpr (E == Elem::e4m3) {
    return decode_lanes_e4m3(p);
  } else if constexpr (E == Elem::e5m2) {
    return decode_lanes_e5m2(p);
  } else if constexpr (E == Elem::bf16) {
    return load_lanes(reinterpret_cast<const BF16*>(p));
  } else if constexpr (E == Elem::fp16) {
    return load_lanes(reinterpret_cast<const FP16*>(p));
  } else {
    return load_lanes(reinterpret_cast<const float*>(p));
  }
}

// One row of an operand, sixteen elements at a time: x'[k .. k+16) as 16 / kLanes vectors, zeros from k_end on.
template <Elem E>
struct RowReader {
  const uint8_t* codes;
  const uint8_t* scales;
  const float* table;  // values of scale bytes
  int shift;           // of the block

  RowReader() = default;
  RowReader(const Operand& o, int64_t row)
      : codes(o.row(row)), scales(o.block ? o.row_scales(row) : nullptr), table(scale_table(o.scale).value), shift(o.block_shift()) {}

  FP4_HD void read(int64_t k, int64_t k_end, VF (&out)[kWidth / kLanes]) const {
    const uint8_t* p = codes + k * kBits<E> / 8;
    uint8_t padded[kWidth * 4];
    if (k + kWidth > k_end) {
      std::memset(padded, 0, sizeof(padded));
      std::memcpy(padded, p, ((k_end - k) * kBits<E> + 7) / 8);
      if (E == Elem::e2m1 && (k_end - k) % 2) padded[(k_end - k) / 2] &= 15;
      p = padded;
    }
    for (int i = 0; i < kWidth / kLanes; ++i) out[i] = load_elements<E>(p + i * kLanes * kBits<E> / 8);
    if (scales) {
      const VF s = splat(table + scales[k >> shift]);
      for (int i = 0; i < kWidth / kLanes; ++i) out[i] = out[i] * s;
    }
  }
};

template <class Fn>
FP4_HD void with_elem(Elem elem, Fn&& f) {
  switch (elem) {
    case Elem::e2m1: return f.template operator()<Elem::e2m1>();
    case Elem::e4m3: return f.template operator()<Elem::e4m3>();
    case Elem::e5m2: return f.template operator()<Elem::e5m2>();
    case Elem::bf16: return f.template operator()<Elem::bf16>();
    case Elem::fp16: return f.template operator()<Elem::fp16>();
    case Elem::fp32: return f.template operator()<Elem::fp32>();
  }
}

}  // namespace fp4ext::cpu::FP4EXT_ISA
