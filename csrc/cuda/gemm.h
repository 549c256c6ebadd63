#pragma once
#include <cuda_runtime_api.h>

#include "../numerics/spec.h"

// y[m,n] = (Σ_k x[m,k]·w[n,k]) · g_x[m]·g_w[n] + bias[n] on CUDA: the contract of docs/numerics.md, 9, in the tensor cores' order
// of summation. Launchers are torch-free and check nothing but the launch.
namespace fp4ext::cuda {

using fp4ext::Elem;

// One operand, contraction last, contiguous.
struct Operand {
  const void* codes;      // [.., rows, k_stored], two a byte for e2m1
  const uint8_t* scales;  // [.., rows, k_stored / block]; null for plain formats
  const float* global;    // decode multipliers, or null; that of row r of expert e is at e·expert_stride + r·row_stride
  int64_t global_expert_stride, global_row_stride;
  Elem elem;
  int block;         // 16 (E4M3 scales), 32 (E8M0), 0 (plain)
  int64_t rows;      // of one expert
  int64_t k_stored;  // elements a row, padding included
};

FP4_HD int64_t row_bytes(const Operand& o) { return bytes_of(o.elem, o.k_stored); }

// Dense: x [M, K], w [N, K]. Grouped (offsets not null): w [E, N, K], rows offsets[e-1] to offsets[e] of x times w[e]ᵀ; an
// expert may have no rows, and rows of x past the last offset give zeros. offsets are read on the device, and clamped.
//
// Over tokens (offsets not null, over_tokens): x [M, tokens], w [N, tokens], y [E, M, N] = x[:, tokens_e]·w[:, tokens_e]ᵀ. In either
// operand each expert's tokens are padded to whole blocks and stand where grouped quantization puts them; what lies past the last
// one is not read. An expert without tokens gets zeros. Global scales: both operands have one an expert (global_expert_stride).
struct GemmArgs {
  Operand x, w;
  const float* bias;  // [N] or null
  void* y;            // [M, N]
  bool y_bf16;
  const int32_t* offsets;
  int experts;       // 1 if dense
  bool over_tokens;  // gemm_invariant and gemm_lanes alone
  bool add;          // y += the product, once, in fp32
};

// Emulated: both operands decoded to bf16, which holds them exactly (bf16_holds), and multiplied by mma.sync. Row m of y depends on row
// m of x and on w alone: K is summed 16 at a time in one order, in chunks of 1024 whose sums are added in order, whatever M
// is. gemm_decode, for few rows, gives the same bits.
bool bf16_holds(const GemmArgs& args);
cudaError_t gemm_invariant(const GemmArgs& args, cudaStream_t stream);

// The same bits for at most 16 rows of x, bound by reading w: quantized weights, K a multiple of 128.
bool decode_takes(const GemmArgs& args);
int64_t decode_shared_bytes(const GemmArgs& args);
cudaError_t gemm_decode(const GemmArgs& args, cudaStream_t stream);

// Operands of which bf16 does not hold one: fp32 or fp16, beside any other. In fp32 FMA and the contract's own lane
// order, so the CPU's bytes.
cudaError_t gemm_lanes(const GemmArgs& args, cudaStream_t stream);

// The epilogue over `sums`, fp32 [M, N], of operands without their global scales: what another product leaves.
cudaError_t gemm_finish(const GemmArgs& args, const float* sums, cudaStream_t stream);

// Native: block-scaled tensor cores take codes and scales as they are. Both operands NVFP4 or both MXFP8 (E4M3), linear
// scales; K a multiple of 64 (NVFP4) or 128 (MXFP8). Rows are invariant here too, but the bits are not those of
// gemm_invariant: what one instruction sums is the hardware's own.
bool native_takes(const GemmArgs& args);
cudaError_t gemm_sm120(const GemmArgs& args, cudaStream_t stream);  // GeForce Blackwell
cudaError_t gemm_sm100(const GemmArgs& args, cudaStream_t stream);  // data-centre Blackwell

// gemm_sm100 by pairs of thread blocks: two multiprocessors share 256 rows of x. pairs_pay: not half of them would be idle, as far
// as the host knows; experts' rows are taken to be equally many.
bool pairs_pay(const GemmArgs& args);
cudaError_t gemm_sm100_pairs(const GemmArgs& args, cudaStream_t stream);

}  // namespace fp4ext::cuda
