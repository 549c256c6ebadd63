#pragma once
#include "quantize.h"

// Causal attention for a sampler, in the order of docs/numerics.md, 11: the bytes of csrc/cpu's, whatever the batch, the tiles and the
// chip. So it multiplies with fp32 FMA, one chain an element, and not on tensor cores.
namespace fp4ext::cuda {

// q and y: [batch, heads, m, d]; k and v: [batch, kv_heads, t, d], kv_heads dividing heads. Strides in elements, of every axis but d,
// whose is 1; y is contiguous and has the type of q. Any size may be 0, but t >= m.
struct AttentionArgs {
  const void *q, *k, *v;
  void* y;
  Dtype q_dtype, kv_dtype;
  int64_t batch, heads, kv_heads, m, t, d;
  int64_t q_strides[3], k_strides[3], v_strides[3];
  const int64_t* start;  // [batch], row i reads keys 0 … start[b] + i; null: t - m. Read on the device, and clamped to [0, t - m]
  float scale;           // times log2(e)
  int64_t budget = int64_t{256} << 20;  // about the most bytes of workspace: what does not fit is done in turns

  FP4_HD int64_t group() const { return heads / kv_heads; }
  FP4_HD int64_t rows() const { return m * group(); }  // that share keys
};

// Bytes of device memory, aligned to 4, that a call needs beside its tensors: scores and sums of a band of rows. At most the budget,
// unless a single tile of rows has more.
int64_t attention_workspace(const AttentionArgs& args);
cudaError_t attention(const AttentionArgs& args, void* workspace, cudaStream_t stream);

}  // namespace fp4ext::cuda
