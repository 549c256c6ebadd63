#pragma once
#include "block_scale.h"

// What one quantization does, as C++ sees it: the parsed form of fp4ext.Spec's key (ops/parse.h reads the string).
namespace fp4ext {

enum class FormatId { nvfp4, mxfp8, mxfp8_e5m2, mxfp4 };
enum class OuterKind { tensor, row, expert, none };  // which elements share an outer scale

// The elements of an operand of a GEMM, and the bytes that so many of them take.
enum class Elem { e2m1, e4m3, e5m2, bf16, fp16, fp32 };
FP4_HD constexpr int64_t bytes_of(Elem elem, int64_t elements) {
  return elem == Elem::e2m1                         ? elements / 2
         : elem == Elem::fp32                       ? elements * 4
         : elem == Elem::bf16 || elem == Elem::fp16 ? elements * 2
                                                    : elements;
}

struct QuantizeSpec {
  FormatId format;
  ScaleRule scale;
  Rounding rounding;
  bool tile;  // 16×16 blocks
  OuterKind outer;
  bool pow2;       // outer scales are rounded up to powers of two
  int rht;         // the n asked for; 0 = none
  int rht_stages;  // 1 or 2

  int block() const { return format == FormatId::nvfp4 ? 16 : 32; }
  bool packed() const { return format == FormatId::nvfp4 || format == FormatId::mxfp4; }  // two codes per byte
};

}  // namespace fp4ext
