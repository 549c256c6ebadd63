#pragma once
#include "cuda.h"
#include "stored.h"

namespace fp4ext {

// A quantized tensor that comes in as an argument, as the CUDA kernels read it.
inline cuda::Stored stored_for_kernels(const Stored& s) {
  return {s.args.codes, s.args.scales, s.args.global, s.args.format, s.args.padded_k, s.args.rows_per_group};
}

}  // namespace fp4ext
