#include <algorithm>
#include <array>
#include <memory>
#include <new>
#include <vector>

#include "../numerics/e8m0.h"
#include "kernels/gemm.h"

namespace fp4ext::cpu {

const ScaleTable& scale_table(ScaleElem kind) {
  static const auto tables = [] {
    std::array<ScaleTable, 2> t;
    for (uint32_t byte = 0; byte < 256; ++byte) {
      t[0].value[byte] = decode_e4m3_scale(byte);
      t[1].value[byte] = decode_e8m0(byte);
    }
    return t;
  }();
  return tables[kind == ScaleElem::e4m3 ? 0 : 1];
}

namespace {

constexpr int64_t kPassRows = 512;   // rows of x packed at a time: each pass unpacks w once
constexpr int64_t kMinRows = 64;     // a strip is cut along M when there are few of them, but not finer than this
constexpr int64_t kManyItems = 32;   // enough work items for the threads to share evenly
constexpr int64_t kGrain = 1 << 16;  // multiplications worth a thread

const GemmKernel& block_kernel(bool both_e4m3) { FP4EXT_DISPATCH(gemm_block_kernel(both_e4m3)); }
const GemmKernel& lane_kernel() { FP4EXT_DISPATCH(gemm_lane_kernel()); }
void finish(const GemmRow& row, float* y) { FP4EXT_DISPATCH(gemm_finish(row, y)); }
void finish(const GemmRow& row, uint16_t* y) { FP4EXT_DISPATCH(gemm_finish(row, y)); }

constexpr std::align_val_t kAlign{64};
struct Free {
  void operator()(void* p) const { ::operator delete(p, kAlign); }
};
template <class T>
using Buffer = std::unique_ptr<T, Free>;
template <class T>
Buffer<T> buffer(int64_t n) {
  return Buffer<T>(static_cast<T*>(::operator new(n * sizeof(T), kAlign)));
}

double global_of(const Operand& o, int64_t row) { return o.global ? static_cast<double>(o.global[row * o.global_stride]) : 1.0; }

// Rows [row, row + rows) of x, packed, times every row of w.
struct Pass {
  const GemmKernel& kernel;
  const Operand& x;
  const Operand& w;
  int64_t k;
  const float* bias;
  void* y;
  bool y_bf16;
  int64_t row, rows;
  const uint8_t* packed;

  // Rows [begin, end) of the pass times the columns of one strip. panel, part, total: scratch of this thread.
  void strip(int64_t column, int64_t begin, int64_t end, uint8_t* panel, float* part, float* total) const {
    const int columns = static_cast<int>(std::min<int64_t>(kernel.strip_columns(), w.rows - column));
    const int vectors = (columns + kernel.lanes - 1) / kernel.lanes;
    for (int64_t k0 = 0; k0 < k; k0 += kernel.step) {
      const int64_t k1 = std::min(k, k0 + kernel.step);
      kernel.pack_w(w, column, columns, k0, k1, panel);
      GemmTile tile;
      tile.w = panel;
      tile.vectors = vectors;
      tile.blocks = (k1 - k0 + 15) / 16;
      tile.opens = k0 % kGemmChunk == 0;
      tile.closes = k1 % kGemmChunk == 0 || k1 == k;
      tile.first = k0 < kGemmChunk;
      for (int64_t r = begin; r < end; r += kernel.tile_rows) {
        tile.rows = static_cast<int>(std::min<int64_t>(kernel.tile_rows, end - r));
        tile.x = packed + (r * (round_up(k, 16) / 16) + k0 / 16 * tile.rows) * kernel.x_bytes;
        tile.part = part + (r - begin) * kernel.strip_columns();
        tile.total = total + (r - begin) * kernel.strip_columns();
        kernel.multiply(tile);
      }
    }
    std::vector<double> g_w(columns);
    for (int c = 0; c < columns; ++c) g_w[c] = global_of(w, column + c);
    for (int64_t r = begin; r < end; ++r) {
      const GemmRow result = {total + (r - begin) * kernel.strip_columns(), g_w.data(), global_of(x, row + r),
                              bias ? bias + column : nullptr, columns};
      const int64_t at = (row + r) * w.rows + column;
      if (y_bf16)
        finish(result, static_cast<uint16_t*>(y) + at);
      else
        finish(result, static_cast<float*>(y) + at);
    }
  }

  void run(const Parallel& parallel) const {
    const int64_t strips = (w.rows + kernel.strip_columns() - 1) / kernel.strip_columns();
    // The bounds of the parts fall on whole tiles, as packed. Where they fall, and who does what, changes no bit of y.
    const int64_t wanted = std::min((kManyItems + strips - 1) / strips, (rows + kMinRows - 1) / kMinRows);
    const int64_t part_rows = round_up((rows + wanted - 1) / wanted, kernel.tile_rows);
    const int64_t parts = (rows + part_rows - 1) / part_rows;
    const int64_t work = part_rows * kernel.strip_columns() * std::max<int64_t>(k, 1);
    parallel(strips * parts, kGrain / work + 1, [&](int64_t begin, int64_t end) {
      const int64_t sums = part_rows * kernel.strip_columns();
      const auto panel = buffer<uint8_t>(kernel.step / 16 * kernel.strip_columns() * kernel.w_bytes);
      const auto part = buffer<float>(sums), total = buffer<float>(sums);
      if (k == 0) std::fill_n(total.get(), sums, 0.0f);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t first = i % parts * part_rows;
        strip(i / parts * kernel.strip_columns(), first, std::min(rows, first + part_rows), panel.get(), part.get(), total.get());
      }
    });
  }
};

}  // namespace

void gemm(const Operand& x, const Operand& w, int64_t k, const float* bias, void* y, bool y_bf16, const Parallel& parallel) {
  if (x.rows == 0 || w.rows == 0) return;
  const bool block_order = x.elem == Elem::e2m1 && w.elem == Elem::e2m1;
  const bool both_e4m3 = x.scale == ScaleElem::e4m3 && w.scale == ScaleElem::e4m3;
  const GemmKernel& kernel = block_order ? block_kernel(both_e4m3) : lane_kernel();
  const int64_t row_bytes = round_up(k, 16) / 16 * kernel.x_bytes;
  const auto packed = buffer<uint8_t>(std::min(kPassRows, x.rows) * row_bytes);
  for (int64_t row = 0; row < x.rows; row += kPassRows) {
    const int64_t rows = std::min(kPassRows, x.rows - row);
    const int64_t tiles = (rows + kernel.tile_rows - 1) / kernel.tile_rows;
    parallel(tiles, kGrain / (kernel.tile_rows * (k + 1)) + 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const int64_t r = t * kernel.tile_rows;
        kernel.pack_x(x, row + r, static_cast<int>(std::min<int64_t>(kernel.tile_rows, rows - r)), k, packed.get() + r * row_bytes);
      }
    });
    Pass{kernel, x, w, k, bias, y, y_bf16, row, rows, packed.get()}.run(parallel);
  }
}

}  // namespace fp4ext::cpu
