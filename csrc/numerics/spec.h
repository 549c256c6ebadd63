#pragma once
#include "block_scale.h"

// What one quantization does, as C++ sees it: the parsed form of fp4ext.Spec's key (ops/parse.h reads the string).
namespace fp4ext {

enum class FormatId { nvfp4, mxfp8, mxfp8_e5m2, mxfp4 };
enum class OuterKind { tensor, pow2, row, expert, none };

struct QuantizeSpec {
  FormatId format;
  ScaleRule scale;
  Rounding rounding;
  bool tile;  // 16×16 blocks
  OuterKind outer;
  int rht;         // the n asked for; 0 = none
  int rht_stages;  // 1 or 2

  int block() const { return format == FormatId::nvfp4 ? 16 : 32; }
  bool packed() const { return format == FormatId::nvfp4 || format == FormatId::mxfp4; }  // two codes a byte
};

}  // namespace fp4ext
