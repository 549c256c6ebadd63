#pragma once
#include <span>

#include "../numerics/spec.h"
#include "isa.h"

// y[m,n] = (Σ_k x[m,k]·w[n,k]) · g_x[m]·g_w[n] + bias[n], in the order of docs/numerics.md, 9.
//
// K is cut into chunks of 1024, whose sums are added in order. Inside a chunk:
//   block order (both operands E2M1):  acc = fma(I_b, s_x·s_w, acc) over the 16-blocks b, I_b the exact sum of 16 element products
//   lane order (everything else):      acc_l = fma(x'_k, w'_k, acc_l) for k ≡ l mod 16, x' = element·scale; then a tree over the 16 lanes
//
// On a CPU both are the same loop. A SIMD lane is a column n of y, so every element of y has its own chain of
// operations, in the order of the numerics contract, however many rows and columns stand around it: the result cannot depend on M, on
// the tile, on the thread or on the width of a vector. One row (decode) and 512 (prefill) run the same code.
//
//   for 512 rows of x at a time (or of many x):     x packed once, in tiles of a few rows
//     for strips of a few vectors of columns of w:  in parallel
//       for steps of K:                             w unpacked into a panel that stays in the cache
//         for tiles of rows:                        the micro-kernel: tile × strip sums in registers
namespace fp4ext::cpu {

using fp4ext::Elem;
enum class ScaleElem { none, e4m3, e8m0 };

// One operand, contraction last.
struct Operand {
  const void* codes;      // [rows, k_stored], two a byte for e2m1
  const uint8_t* scales;  // [rows, k_stored / block]; null for plain formats
  const float* global;    // decode multiplier, or null
  int64_t global_stride;  // 0: one for all; 1: one a row
  Elem elem;
  ScaleElem scale;
  int block;  // 16 or 32; 0 for plain formats
  int64_t rows;
  int64_t k_stored;  // elements stored a row, padding included
  int64_t pitch;     // from one row to the next, in elements; k_stored, unless this is a part of a larger matrix

  int64_t bytes(int64_t elements) const { return bytes_of(elem, elements); }
  const uint8_t* row(int64_t r) const { return static_cast<const uint8_t*>(codes) + r * bytes(pitch); }
  const uint8_t* row_scales(int64_t r) const { return scales + r * (pitch / block); }
  int block_shift() const { return block == 16 ? 4 : 5; }  // k / block without a division in the loops
};

struct GemmArgs {
  Operand x, w;
  int64_t k;          // how far both are contracted, at most either k_stored; from k to the next multiple of 16 the elements count as 0
  const float* bias;  // [w.rows] or null
  void* y;            // [x.rows, w.rows]
  bool y_bf16;        // or fp32
  bool add;           // y += the product, in fp32
};

// Several products of the same formats as one piece of work: the experts of a group. Any size may be 0.
void gemm(std::span<const GemmArgs> products, const Parallel& parallel);

}  // namespace fp4ext::cpu
