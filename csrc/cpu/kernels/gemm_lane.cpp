#include <bit>

#include "gemm.h"
#include "row_reader.h"

// Lane order: sixteen partial sums over k ≡ l mod 16, each a chain of fmas, then a tree.
//
// The contract's sixteen lanes are not SIMD lanes here: those are columns, so nothing is ever added across a vector. The
// chunk is reordered instead. Its panel holds all k of lane 0, then of lane 8, 4, 12, …: sixteen short ordinary GEMMs
// whose results are the lanes. In bit-reversed order the tree is a binary counter: after lane 0 and 8 comes their sum,
// after 4 and 12 theirs, then the sum of both, so at most four results wait at a time.
//
// Panels, for each chunk: elements times their scale, in fp32 (exact); x is [16 lanes][k/16][rows], w is [16
// lanes][k/16][vectors][kLanes]. A cache line of padding after each lane of w keeps sixteen streams of stores out of
// one set of the cache.
namespace fp4ext::cpu::FP4EXT_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kRows = 8, kVectors = 3;
#elif defined(__AVX2__)
constexpr int kRows = 6, kVectors = 2;
#else
constexpr int kRows = 4, kVectors = 2;
#endif
constexpr int64_t kPadding = 16;  // floats
constexpr int64_t w_lane_stride(int64_t steps, int vectors) { return steps * vectors * kLanes + kPadding; }

// Where lane l stands in a panel.
constexpr int bit_reversed(int l) { return (l & 1) << 3 | (l & 2) << 1 | (l & 4) >> 1 | (l & 8) >> 3; }

// ---- panels ----

template <Elem E>
void pack_x(const Operand& x, int64_t row, int rows, int64_t k, float* out) {
  const int64_t padded = round_up(k, kWidth);
  for (int r = 0; r < rows; ++r) {
    const RowReader<E> reader(x, row + r);
    for (int64_t k0 = 0; k0 < padded; k0 += kGemmChunk) {
      const int64_t n = (padded - k0 < kGemmChunk ? padded - k0 : kGemmChunk) / kWidth;  // k of a lane
      float* to = out + k0 * rows + r;
      for (int64_t j = 0; j < n; ++j) {
        VF v[kWidth / kLanes];
        float lanes[kWidth];
        reader.read(k0 + j * kWidth, k, v);
        for (int i = 0; i < kWidth / kLanes; ++i) store(lanes + i * kLanes, v[i]);
        for (int l = 0; l < kWidth; ++l) to[(bit_reversed(l) * n + j) * rows] = lanes[l];
      }
    }
  }
}

template <Elem E>
void pack_w(const Operand& w, int64_t column, int columns, int64_t k0, int64_t k1, float* out) {
  const int vectors = (columns + kLanes - 1) / kLanes;
  const int64_t n = (k1 - k0 + kWidth - 1) / kWidth, stride = w_lane_stride(n, vectors);
  for (int v = 0; v < vectors; ++v) {
    RowReader<E> readers[kLanes];
    for (int c = 0; c < kLanes; ++c) {
      const int at = v * kLanes + c;
      readers[c] = RowReader<E>(w, column + (at < columns ? at : columns - 1));
    }
    for (int64_t j = 0; j < n; ++j) {
      VF t[kWidth / kLanes][kLanes];
      for (int c = 0; c < kLanes; ++c) {
        VF row[kWidth / kLanes];
        readers[c].read(k0 + j * kWidth, k1, row);
        for (int i = 0; i < kWidth / kLanes; ++i) t[i][c] = row[i];
      }
      for (int i = 0; i < kWidth / kLanes; ++i) {
        transpose(t[i]);
        for (int l = 0; l < kLanes; ++l) store(out + bit_reversed(i * kLanes + l) * stride + (j * vectors + v) * kLanes, t[i][l]);
      }
    }
  }
}

void pack_x_any(const Operand& x, int64_t row, int rows, int64_t k, uint8_t* out) {
  with_elem(x.elem, [&]<Elem E>() { pack_x<E>(x, row, rows, k, reinterpret_cast<float*>(out)); });
}
void pack_w_any(const Operand& w, int64_t column, int columns, int64_t k0, int64_t k1, uint8_t* out) {
  with_elem(w.elem, [&]<Elem E>() { pack_w<E>(w, column, columns, k0, k1, reinterpret_cast<float*>(out)); });
}

// ---- the micro-kernel ----

// One lane of the numerics contract: a plain GEMM of `steps` k. Its sums live in registers and leave once.
template <int R, int V>
FP4_HD void lane_sums(const float* x, const float* w, int64_t steps, VF (&out)[R][V]) {
  VF acc[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[r][v] = VF(0.0f);
  for (int64_t j = 0; j < steps; ++j, x += R, w += V * kLanes) {
    VF column[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) column[v] = load<VF>(w + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const VF row = splat(x + r);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[r][v] = fma(row, column[v], acc[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) out[r][v] = acc[r][v];
}

template <int R, int V>
void add(const VF (&a)[R][V], VF (&b)[R][V]) {
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) b[r][v] = a[r][v] + b[r][v];
}

template <int R, int V>
void multiply_tile(const GemmTile& tile) {
  const auto* x = reinterpret_cast<const float*>(tile.x);
  const auto* w = reinterpret_cast<const float*>(tile.w);
  // sums[n] waits at level n of the counter; what is new stands one above the levels that wait.
  VF sums[5][R][V];
  for (int i = 0; i < kWidth; ++i) {
    const int carries = std::countr_one(static_cast<unsigned>(i));
    lane_sums<R, V>(x + i * tile.blocks * R, w + i * w_lane_stride(tile.blocks, V), tile.blocks, sums[carries]);
    for (int level = 0; level < carries; ++level) add<R, V>(sums[level], sums[carries]);
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) {
      float* total = tile.total + (r * kVectors + v) * kLanes;
      store(total, tile.first ? sums[4][r][v] : load<VF>(total) + sums[4][r][v]);
    }
}

template <int R = kRows, int V = kVectors>
void multiply(const GemmTile& tile) {
  if (tile.rows == R && tile.vectors == V) return multiply_tile<R, V>(tile);
  if constexpr (R > 1)
    if (tile.rows < R) return multiply<R - 1, V>(tile);
  if constexpr (V > 1) return multiply<R, V - 1>(tile);
}

}  // namespace

const GemmKernel& gemm_lane_kernel() {
  static constexpr GemmKernel kKernel = {kRows,          kLanes,     kVectors,   kGemmChunk, kWidth * 4,
                                         kWidth * 4 + 4, pack_x_any, pack_w_any, multiply<>};
  return kKernel;
}

}  // namespace fp4ext::cpu::FP4EXT_ISA
