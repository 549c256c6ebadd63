#pragma once
#include "../numerics/half.h"
#include "gemm.h"
#include "ptx/launch.h"

// What the GEMM kernels share: whose rows a block has, the sums of a warp, and the epilogue.
namespace fp4ext::cuda {

inline constexpr int kChunk = 1024;  // of K, summed on its own

// Which rows of x a thread block has, and whose.
struct Rows {
  int64_t begin, end;
  int expert;          // the number of experts: unassigned rows, which give zeros
  int64_t before = 0;  // rows of y that stand before row 0 of x
};

// Tile number `tile` of `size` rows, counting each expert's on their own, then the unassigned ones.
__device__ inline Rows rows_of_tile(const GemmArgs& a, int tile, int size) {
  if (!a.offsets) {
    const int64_t begin = static_cast<int64_t>(tile) * size;
    return {begin, begin + size < a.x.rows ? begin + size : a.x.rows, 0};
  }
  if (a.over_tokens) {
    const int tiles = static_cast<int>((a.x.rows + size - 1) / size), e = tile / tiles;
    const int64_t begin = static_cast<int64_t>(tile % tiles) * size;
    return {begin, begin + size < a.x.rows ? begin + size : a.x.rows, e, e * a.x.rows};
  }
  int64_t begin = 0;
  for (int e = 0; e <= a.experts; ++e) {
    int64_t end = e < a.experts ? a.offsets[e] : a.x.rows;
    end = end < begin ? begin : end > a.x.rows ? a.x.rows : end;
    const int tiles = static_cast<int>((end - begin + size - 1) / size);
    if (tile < tiles) {
      const int64_t first = begin + static_cast<int64_t>(tile) * size;
      return {first, first + size < end ? first + size : end, e};
    }
    tile -= tiles;
    begin = end;
  }
  return {0, 0, 0};
}
// At least as many tiles as there are, whatever the offsets.
__host__ __device__ inline int64_t most_tiles(const GemmArgs& a, int size) {
  const int64_t tiles = (a.x.rows + size - 1) / size;
  return a.over_tokens ? tiles * a.experts : tiles + (a.offsets ? a.experts : 0);
}

// What of K is contracted: k elements, from x on in x and from w on in w.
struct Span {
  int64_t x, w, k;
};
__device__ inline Span span_of(const GemmArgs& a, int expert) {
  const auto least = [](int64_t p, int64_t q) { return p < q ? p : q; };
  if (!a.over_tokens) return {0, 0, least(a.x.k_stored, a.w.k_stored)};
  // How much n tokens take, of what is left from `at` on.
  const auto padded = [&](const Operand& o, int64_t n, int64_t at) {
    return least(o.block ? (n + o.block - 1) / o.block * o.block : n, o.k_stored - at);
  };
  Span s{};
  int64_t begin = 0;
  for (int e = 0;; ++e) {
    const int64_t end = a.offsets[e] < begin ? begin : a.offsets[e];
    const int64_t x = padded(a.x, end - begin, s.x), w = padded(a.w, end - begin, s.w);
    s.k = least(x, w);
    if (e == expert) return s;
    s.x += x, s.w += w, begin = end;
  }
}

__device__ inline double global_of(const Operand& o, int expert, int64_t row) {
  return o.global ? static_cast<double>(o.global[expert * o.global_expert_stride + row * o.global_row_stride]) : 1.0;
}

// The epilogue: global scales in double, then bias; `store` adds to y and rounds.
__device__ inline float finish(const GemmArgs& a, float sum, double g_x, double g_w, int64_t n) {
  float v = static_cast<float>(static_cast<double>(sum) * (g_x * g_w));
  if (a.bias) v = v + a.bias[n];
  return v;
}
__device__ inline void store(const GemmArgs& a, int64_t at, float v) {
  if (a.add) v = static_cast<const float*>(a.y)[at] + v;
  v = v != v ? as_float(0x7fc00000u) : v;
  if (a.y_bf16)
    static_cast<uint16_t*>(a.y)[at] = float_to_bf16(v);
  else
    static_cast<float*>(a.y)[at] = v;
}

// Eight warps share a tile of 128 columns (rows of w, the A operand) × 128 rows of x (the B operand): 32 × 64 each.
inline constexpr int kTile = 128, kGemmThreads = 256;
struct Warp {
  int lane, n, m;  // n, m: where its part of the tile begins
  __device__ Warp() : lane(threadIdx.x % 32), n(threadIdx.x / 64 * 32), m(threadIdx.x / 32 % 2 * 64) {}
};
struct Sums {
  float v[2][8][4];
};

__device__ __forceinline__ void fill(Sums& sums, float value) {
  FP4_UNROLL
  for (int i = 0; i < 64; ++i) sums.v[i / 32][i / 4 % 8][i % 4] = value;
}
// Adds the sum of a chunk and clears it for the next. Totals start from -0, to which the first sum adds unchanged.
__device__ __forceinline__ void close_chunk(Sums& total, Sums& acc) {
  FP4_UNROLL
  for (int i = 0; i < 64; ++i) {
    float &t = total.v[i / 32][i / 4 % 8][i % 4], &c = acc.v[i / 32][i / 4 % 8][i % 4];
    t = t + c;
    c = 0.0f;
  }
}

// Through shared memory, so that rows of y are written in one piece. Column n of row m stands at n XOR a key of m, and the
// fragments' stores meet in no bank.
__device__ inline void write(const GemmArgs& a, const Rows& rows, int64_t n0, const Sums& total, float* staged) {
  const Warp warp;
  FP4_UNROLL
  for (int i = 0; i < 2; ++i) FP4_UNROLL
  for (int j = 0; j < 8; ++j) FP4_UNROLL
  for (int r = 0; r < 4; ++r) {
    const int n = warp.n + i * 16 + warp.lane / 4 + 8 * (r >> 1), m = warp.m + j * 8 + warp.lane % 4 * 2 + (r & 1);
    staged[m * kTile + (n ^ (m / 2 % 4 * 8))] = total.v[i][j][r];
  }
  __syncthreads();
  const int64_t n_size = a.w.rows;
  for (int i = threadIdx.x; i < kTile * kTile / 4; i += kGemmThreads) {
    const int m = i / (kTile / 4), n = i % (kTile / 4) * 4;
    const int64_t row = rows.begin + m;
    if (row >= rows.end) continue;
    const float4 sums = *reinterpret_cast<const float4*>(staged + m * kTile + (n ^ (m / 2 % 4 * 8)));
    const float part[4] = {sums.x, sums.y, sums.z, sums.w};
    const double g_x = global_of(a.x, a.over_tokens ? rows.expert : 0, row);
    for (int j = 0; j < 4; ++j) {
      const int64_t column = n0 + n + j;
      if (column < n_size)
        store(a, (rows.before + row) * n_size + column, finish(a, part[j], g_x, global_of(a.w, rows.expert, column), column));
    }
  }
}

// What unassigned rows get, in `columns` columns from n0 on, by the first `threads` of the block.
__device__ inline void write_zeros(const GemmArgs& a, const Rows& rows, int64_t n0, int threads, int columns = kTile) {
  for (int64_t i = threadIdx.x; i < (rows.end - rows.begin) * columns; i += threads)
    if (n0 + i % columns < a.w.rows) store(a, (rows.begin + i / columns) * a.w.rows + n0 + i % columns, 0.0f);
}

}  // namespace fp4ext::cuda
