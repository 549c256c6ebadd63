#pragma once
#include "quantize.h"

// Causal attention in the order of docs/numerics.md, 11: row i of sequence b and head h is a function of its query and of the
// keys and values 0 … start[b] + i, whatever else is in the call.
//
// Queries that share keys stand together: row r of a (sequence, kv head) is query r / group of head kv·group + r % group, so that positions
// rise with r. A block of rows is the unit of work:
//
//   for tiles of keys:    packed with a key in each lane; s[row][key] = Σ_d q·k in order, times the scale
//   for rows:             p = exp2(s − max); Σ p in 16 lanes
//   for chunks of keys:   values packed in fp32; o[row][d] = Σ_j p·v in order, a d in each lane
namespace fp4ext::cpu {

// q and y: [batch, heads, m, d]; k and v: [batch, kv_heads, t, d]. Strides in elements, of every axis but d, whose is 1; y is contiguous
// and has the type of q.
struct AttentionArgs {
  const void* q;
  const void* k;
  const void* v;
  void* y;
  Dtype q_dtype, kv_dtype;
  int64_t batch, heads, kv_heads, m, t, d;
  int64_t q_strides[3], k_strides[3], v_strides[3];
  const int64_t* start;  // [batch]; start[b] + m <= t
  float scale;           // times log2(e)

  int64_t group() const { return heads / kv_heads; }
  int64_t rows() const { return m * group(); }  // that share keys
};

void attention(const AttentionArgs& args, const Parallel& parallel);

}  // namespace fp4ext::cpu
