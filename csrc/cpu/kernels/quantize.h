#pragma once
#include "../quantize.h"

namespace fp4ext::cpu {
// Tiles that need only `rows` consecutive rows of the input: what requantize holds in a cache at a time.
struct Band {
  int64_t first_row, rows, first_tile, tiles;
};
}  // namespace fp4ext::cpu

// The kernels that csrc/cpu/quantize.cpp chooses among, once an instruction set.
#define FP4EXT_DECLARE(isa)                                                           \
  namespace fp4ext::cpu::isa {                                                        \
  int64_t num_tiles(const QuantizeArgs& args);                                        \
  int64_t num_bands(const QuantizeArgs& args);                                        \
  Band band(const QuantizeArgs& args, int64_t i);                                     \
  void quantize_tiles(const QuantizeArgs& args, int64_t begin, int64_t end);          \
  void amax_tiles(const QuantizeArgs& args, float* amax, int64_t begin, int64_t end); \
  float amax_span(const void* x, Dtype dtype, int64_t begin, int64_t end);            \
  void dequantize_rows(const DequantizeArgs& args, int64_t begin, int64_t end);       \
  }
FP4EXT_DECLARE(portable)
FP4EXT_DECLARE(avx2)
FP4EXT_DECLARE(avx512)
#undef FP4EXT_DECLARE
