#pragma once
#include "cuda.h"
#include "operand.h"
#include "../cuda/gemm.h"

namespace fp4ext {

// The route `fast` of a dense product: both operands decoded into bf16 workspaces, which hold them exactly without their
// global scales; torch's product of those with fp32 sums; then the epilogue, docs/numerics.md, 9. cuBLAS orders the
// sums by shape, so rows are not invariant.
void gemm_fast(const Input& x, const Input& w, const cuda::GemmArgs& args, const OnDevice& device);

}  // namespace fp4ext
