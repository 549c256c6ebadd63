#pragma once
#include <span>

#include "../numerics/hadamard.h"
#include "../numerics/spec.h"
#include "isa.h"

// Quantization on the CPU. The unit of work is a *tile*: kLanes independent vectors side by side, one a SIMD lane, so
// that everything the numerics contract says about a block (its largest element, its candidates' errors in index order, the
// butterflies of an RHT, its random bits) is vertical arithmetic and is the same code that one CUDA thread runs on one
// block. Rows are transposed into lanes on the way in; columns lie so already.
namespace fp4ext::cpu {

enum class Dtype { fp32, bf16, fp16 };

struct QuantizeArgs {
  // The input, contiguous [batch, rows, cols]; x points to row `first_row` of it, counted through the batch.
  const void* x;
  int64_t first_row;
  Dtype dtype;
  int64_t batch, rows, cols;
  // What to do. colwise: quantize the transpose of each matrix, [batch, cols, rows].
  QuantizeSpec spec;
  bool colwise;
  Rng rng;
  uint32_t role;
  // The outer scales of each group: one (tensor, none), or one per output row (row). Experts are tensors of their own.
  const float* outer_enc;
  const float* outer_dec;
  // The result, [batch, out_rows(), padded_k()] codes (packed two a byte for E2M1), [.., padded_k() / block] scales. A
  // row of it begins `pitch` elements after the last one, or, where that is 0, padded_k().
  uint8_t* codes;
  uint8_t* scales;
  int64_t pitch;

  int64_t out_rows() const { return colwise ? cols : rows; }
  int64_t k() const { return colwise ? rows : cols; }
  int64_t padded_k() const { return (k() + spec.block() - 1) / spec.block() * spec.block(); }
  int64_t row_bytes() const { return (pitch ? pitch : padded_k()) / (spec.packed() ? 2 : 1); }
  int64_t row_scales() const { return (pitch ? pitch : padded_k()) / spec.block(); }
  // The RHT's length for this contraction (0 without one), and the length of the vectors a tile holds.
  int rht_n() const { return spec.rht ? rht_length((k() + 15) / 16 * 16, spec.rht) : 0; }
  int vector_length() const { return rht_n() > spec.block() ? rht_n() : spec.block(); }
  int64_t num_groups() const { return spec.outer == OuterKind::row ? batch * out_rows() : 1; }
};

// Both take several tensors of one spec and direction as one piece of work: the experts of a group (ops/quantize.cpp).
//
// The largest finite magnitude of each outer group, after the RHT: `amax` has, for one tensor after the other,
// num_groups() zeros. outer_*, codes, scales are not read.
void amax(std::span<const QuantizeArgs> tensors, float* amax, const Parallel& parallel);
void quantize(std::span<const QuantizeArgs> tensors, const Parallel& parallel);

// x̂ = element · fl(float(scale)·global); global has num_groups() entries of `rows_per_group` rows each, or is null.
struct DequantizeArgs {
  const uint8_t* codes;
  const uint8_t* scales;
  const float* global;
  FormatId format;
  int64_t rows, k, padded_k, rows_per_group;
  void* out;  // points to row `first_row`
  Dtype dtype;
  int64_t first_row;
};
void dequantize(const DequantizeArgs& args, const Parallel& parallel);

// quantize(dequantize(from)) without a whole x̂ in memory: strips of it, in fp32, live in a thread's cache. `to` has no x:
// it is the rows from `first_row` on of `from`, which has no out.
struct RequantizeArgs {
  const DequantizeArgs* from;
  int64_t first_row;
  QuantizeArgs to;
};
void requantize_amax(std::span<const RequantizeArgs> tensors, float* amax, const Parallel& parallel);
void requantize(std::span<const RequantizeArgs> tensors, const Parallel& parallel);

}  // namespace fp4ext::cpu
