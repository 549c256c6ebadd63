#pragma once
#include <cuda_runtime_api.h>

#include "../numerics/philox.h"
#include "../numerics/spec.h"

// Launchers are torch-free: raw pointers, sizes, a stream. They check nothing but the launch.
namespace fp4ext::kernels {

// Quantizes the rows of x [rows, cols], bf16 bits, cols a multiple of the block, by a spec without tiles, RHT or eden;
// outer scales as in cpu/quantize.h.
struct QuantizeRowsArgs {
  const uint16_t* x;
  int64_t rows, cols;
  QuantizeSpec spec;
  Rng rng;
  uint32_t role;
  const float* outer_enc;  // one value
  const float* outer_dec;
  uint8_t* codes;
  uint8_t* scales;
};
cudaError_t quantize_rows(const QuantizeRowsArgs& args, cudaStream_t stream);

}  // namespace fp4ext::kernels
