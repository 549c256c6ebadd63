#pragma once
#include <cuda_runtime_api.h>

#include "../numerics/hadamard.h"
#include "../numerics/layout.h"
#include "../numerics/spec.h"

// Launchers are torch-free: raw pointers, sizes, a stream. They check nothing but the launch; csrc/ops has checked the
// rest. Every pointer is device memory; nothing is read back to the host, so all of it can be captured in a graph.
//
//   amax → outer_scales → quantize        codes and scales equal csrc/cpu's byte for byte
namespace fp4ext::cuda {

enum class Dtype { fp32, bf16, fp16, stored };

// A tensor that is quantized already: x̂ = element · fl(float(scale)·global), `rows_per_group` rows to a global scale.
struct Stored {
  const uint8_t* codes;
  const uint8_t* scales;
  const float* global;  // null for the MX formats, and for x̂ without its global scale
  FormatId format;
  int64_t padded_k, rows_per_group;
};

// What is quantized, contiguous [batch, rows, cols]: x, or where dtype says so x̂ of `stored`, decoded on the fly.
//
// Experts (offsets not null, batch 1): rows offsets[e-1] to offsets[e] of x are a tensor of their own, with its own tiles, padding, RHT
// and outer scale; rows past the last offset are unassigned. offsets are read on the device, and clamped.
struct Input {
  const void* x;
  Dtype dtype;
  int64_t batch, rows, cols;
  Stored stored;
  const int32_t* offsets;
  int experts;
};

// One copy: along the rows of the input, or along its columns ([batch, cols, rows], contraction last).
//
// Of experts: codes [rows, ⌈cols⌉], or along columns [cols, pitch], each expert's tokens padded to whole blocks, one after the other.
// What belongs to no expert, rows or columns at the end, is left as it is: the caller zeroes it. Outer groups: the experts, or with
// OuterKind::row the rows of x, or along columns e·cols + column.
struct Copy {
  bool colwise;
  OuterKind outer;
  int rht, stages;     // as rht_n() has it for this contraction; 0 = none
  const int64_t* rng;  // {seed, offset}, or {seed, offset, row, k}; null where nothing is random
  bool sharded;        // rng has four entries
  bool swizzled;       // scales in the tensor cores' layout, padding zeroed, each matrix of the batch on its own
  const float* outer_enc;
  const float* outer_dec;  // of each outer group; null for the MX formats
  uint8_t* codes;          // null: this copy is not wanted
  uint8_t* scales;
  int64_t pitch;  // of experts, along columns: elements a row of the codes, at least padded_capacity (ops/grouped.h)
};

// The RHT's length for a contraction of k elements.
// (Of experts along columns, whose contraction only the device knows: pass k = 0, and it is shortened there.)
inline int rht_n(const QuantizeSpec& spec, int64_t k) { return spec.rht ? rht_length((k + 15) / 16 * 16, spec.rht) : 0; }

// Both copies come from one read of the input. They share the spec but for its RHT.
struct QuantizeArgs {
  Input in;
  QuantizeSpec spec;
  uint32_t role;
  Copy copies[2];  // row-wise, column-wise
};
cudaError_t quantize(const QuantizeArgs& args, cudaStream_t stream);

// The largest finite magnitude of each outer group of one copy, after its RHT, into `amax`, which is zeroed first.
cudaError_t amax(const Input& in, const Copy& copy, float* amax, int64_t groups, cudaStream_t stream);

// From amaxes to what quantize reads (enc, dec) and what is stored (global); as cpu/… set_outer does.
struct OuterArgs {
  const float* amax;
  int64_t groups;
  ScaleRule rule;
  bool eden, pow2;
  float *enc, *dec, *global;
};
cudaError_t outer_scales(const OuterArgs& args, cudaStream_t stream);

// of_group's value for each row of the experts' matrix, 1 for unassigned rows: [rows]. by_row: of_group has one for each row already.
cudaError_t global_of_rows(const float* of_group, bool by_row, const int32_t* offsets, int experts, int64_t rows, float* out,
                           cudaStream_t stream);

// x̂ [rows, k] of a stored tensor.
cudaError_t dequantize(const Stored& from, int64_t rows, int64_t k, Dtype dtype, void* out, cudaStream_t stream);

// Rows of block scales: matrices of a stack; or of experts (offsets not null, stack 1), read on the device, and clamped.
struct ScaleRows {
  int64_t stack, rows;
  const int32_t* offsets;
  int experts;

  // What they take in the tensor cores' layout, each matrix padded on its own, whatever the offsets.
  int64_t padded() const { return offsets ? (rows + experts * int64_t{127}) / 128 * 128 : stack * padded_rows(rows); }
};
// Block scales [.., columns] to the tensor cores' layout and back (numerics/layout.h). What is no matrix's is zero.
cudaError_t swizzle(const uint8_t* scales, const ScaleRows& rows, int64_t columns, uint8_t* out, cudaStream_t stream);
cudaError_t unswizzle(const uint8_t* swizzled, int64_t stack, int64_t rows, int64_t columns, uint8_t* out, cudaStream_t stream);

}  // namespace fp4ext::cuda
