#pragma once
#include <string>

#include "gemm.h"

namespace fp4ext::cuda {

using Gemm = cudaError_t (*)(const GemmArgs& args, cudaStream_t stream);

// Whether `native` does on this device what its instructions are believed to do: small products of integers under scales
// that are powers of two, ragged and grouped, NVFP4 and MXFP8. All partial sums are exact, so the bits must be those of
// gemm_invariant, whose instructions are older; twice, since a race may hide once. Empty if so, else what went wrong.
// Allocates, waits for the device, and launches on the legacy stream: not while a graph is recorded.
std::string self_test(Gemm native);

// Whether two native kernels give the same bits on this device for any operands: products of random codes and scales, whose sums
// show every rounding. Then either may be chosen by size, and rows stay invariant. Empty if so, else what differs. As self_test.
std::string same_bits(Gemm native, Gemm other);

}  // namespace fp4ext::cuda
