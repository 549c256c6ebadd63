#include <array>
#include <memory>
#include <new>
#include <vector>

#include "../numerics/e8m0.h"
#include "kernels/gemm.h"
#include "parallel.h"

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

constexpr int64_t kPassRows = 512;       // rows of x packed at a time: each pass unpacks w once
constexpr int64_t kWaveBytes = 1 << 20;  // of packed x: small passes go side by side until they fill it
constexpr int64_t kMinRows = 64;         // a strip is cut along M when there are few of them, but not finer than this
constexpr int64_t kManyItems = 32;       // enough work items for the threads to share evenly
constexpr int64_t kGrain = 1 << 16;      // multiplications worth a thread

const GemmKernel& block_kernel(bool both_e4m3) { FP4EXT_DISPATCH(gemm_block_kernel(both_e4m3)); }
const GemmKernel& lane_kernel() { FP4EXT_DISPATCH(gemm_lane_kernel()); }
const GemmFew& block_few(bool both_e4m3) { FP4EXT_DISPATCH(gemm_block_few(both_e4m3)); }
const GemmFew& lane_few() { FP4EXT_DISPATCH(gemm_lane_few()); }
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

struct Scratch {
  Buffer<uint8_t> panel;
  Buffer<float> part, total;
};

// Rows [row, row + rows) of x, packed, times every row of w.
struct Pass {
  const GemmKernel& kernel;
  const GemmFew& few;
  const GemmArgs& args;
  int64_t row, rows;
  int64_t packed_at;  // where its rows lie in the packed bytes of the wave

  bool is_few() const { return rows <= few.rows; }
  int64_t row_bytes() const { return round_up(args.k, 32) / 16 * (is_few() ? few.x_bytes : kernel.x_bytes); }
  int64_t tile_rows() const { return is_few() ? few.rows : kernel.tile_rows; }
  int64_t tiles() const { return (rows + tile_rows() - 1) / tile_rows(); }
  void pack(int64_t tile, uint8_t* packed) const {
    if (is_few()) return few.pack_x(args.x, row, static_cast<int>(rows), args.k, packed + packed_at);
    const int64_t r = tile * kernel.tile_rows;
    const int n = static_cast<int>(std::min<int64_t>(kernel.tile_rows, rows - r));
    kernel.pack_x(args.x, row + r, n, args.k, packed + packed_at + r * row_bytes());
  }

  // Work items: strips of columns of w, each in `parts` parts of rows whose bounds fall on whole tiles, as packed. Where
  // they fall, and who does what, changes no bit of y.
  int64_t strips() const { return (args.w.rows + kernel.strip_columns() - 1) / kernel.strip_columns(); }
  int64_t part_rows(int64_t passes) const {
    const int64_t items = strips() * passes, wanted = std::min((kManyItems + items - 1) / items, (rows + kMinRows - 1) / kMinRows);
    return is_few() ? rows : round_up((rows + wanted - 1) / wanted, kernel.tile_rows);
  }

  void multiply_panels(int64_t column, int columns, int64_t begin, int64_t end, const uint8_t* packed, const Scratch& scratch) const {
    const int64_t k = args.k;
    const int vectors = (columns + kernel.lanes - 1) / kernel.lanes;
    for (int64_t k0 = 0; k0 < k; k0 += kernel.step) {
      const int64_t k1 = std::min(k, k0 + kernel.step);
      kernel.pack_w(args.w, column, columns, k0, k1, scratch.panel.get());
      GemmTile tile;
      tile.w = scratch.panel.get();
      tile.vectors = vectors;
      tile.blocks = (k1 - k0 + 15) / 16;
      tile.opens = k0 % kGemmChunk == 0;
      tile.closes = k1 % kGemmChunk == 0 || k1 == k;
      tile.first = k0 < kGemmChunk;
      for (int64_t r = begin; r < end; r += kernel.tile_rows) {
        tile.rows = static_cast<int>(std::min<int64_t>(kernel.tile_rows, end - r));
        tile.x = packed + packed_at + r * row_bytes() + k0 / 16 * tile.rows * kernel.x_bytes;
        tile.part = scratch.part.get() + (r - begin) * kernel.strip_columns();
        tile.total = scratch.total.get() + (r - begin) * kernel.strip_columns();
        kernel.multiply(tile);
      }
    }
  }

  // Rows [begin, end) of the pass times the columns of one strip.
  void multiply(int64_t column, int64_t begin, int64_t end, const uint8_t* packed, const Scratch& scratch) const {
    const int64_t k = args.k;
    const int columns = static_cast<int>(std::min<int64_t>(kernel.strip_columns(), args.w.rows - column));
    if (k == 0) std::fill_n(scratch.total.get(), (end - begin) * kernel.strip_columns(), 0.0f);
    if (is_few() && k > 0)
      few.multiply(packed + packed_at, static_cast<int>(rows), args.w, column, columns, k, scratch.total.get(), kernel.strip_columns());
    else
      multiply_panels(column, columns, begin, end, packed, scratch);
    std::vector<double> g_w(columns);
    for (int c = 0; c < columns; ++c) g_w[c] = global_of(args.w, column + c);
    for (int64_t r = begin; r < end; ++r) {
      const GemmRow result = {scratch.total.get() + (r - begin) * kernel.strip_columns(),
                              g_w.data(),
                              global_of(args.x, row + r),
                              args.bias ? args.bias + column : nullptr,
                              columns,
                              args.add};
      const int64_t at = (row + r) * args.w.rows + column;
      if (args.y_bf16)
        finish(result, static_cast<uint16_t*>(args.y) + at);
      else
        finish(result, static_cast<float*>(args.y) + at);
    }
  }
};

// Passes that are packed and multiplied side by side.
void run(const GemmKernel& kernel, const std::vector<Pass>& wave, uint8_t* packed, const Parallel& parallel) {
  const int64_t passes = static_cast<int64_t>(wave.size());
  share(
      passes, kGrain, parallel, [&](int64_t p) { return wave[p].args.k ? wave[p].tiles() : 0; },
      [&](int64_t p) { return wave[p].tile_rows() * (wave[p].args.k + 1); },
      [&](int64_t p, int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) wave[p].pack(t, packed);
      });
  std::vector<int64_t> part_rows, parts;
  for (const Pass& pass : wave) {
    part_rows.push_back(pass.part_rows(passes));
    parts.push_back((pass.rows + part_rows.back() - 1) / part_rows.back());
  }
  share(
      passes, kGrain, parallel, [&](int64_t p) { return wave[p].strips() * parts[p]; },
      [&](int64_t p) { return part_rows[p] * kernel.strip_columns() * std::max<int64_t>(wave[p].args.k, 1); },
      [&](int64_t p, int64_t begin, int64_t end) {
        const int64_t sums = part_rows[p] * kernel.strip_columns();
        const Scratch scratch = {buffer<uint8_t>(kernel.step / 16 * kernel.strip_columns() * kernel.w_bytes), buffer<float>(sums),
                                 buffer<float>(sums)};
        for (int64_t i = begin; i < end; ++i) {
          const int64_t first = i % parts[p] * part_rows[p];
          wave[p].multiply(i / parts[p] * kernel.strip_columns(), first, std::min(wave[p].rows, first + part_rows[p]), packed, scratch);
        }
      });
}

}  // namespace

void gemm(std::span<const GemmArgs> products, const Parallel& parallel) {
  if (products.empty()) return;
  const Operand &x = products[0].x, &w = products[0].w;
  const bool block_order = x.elem == Elem::e2m1 && w.elem == Elem::e2m1;
  const bool both_e4m3 = x.scale == ScaleElem::e4m3 && w.scale == ScaleElem::e4m3;
  const GemmKernel& kernel = block_order ? block_kernel(both_e4m3) : lane_kernel();
  const GemmFew& few = block_order ? block_few(both_e4m3) : lane_few();

  std::vector<Pass> wave;
  Buffer<uint8_t> packed;
  int64_t bytes = 0, capacity = 0;
  const auto run_wave = [&] {
    if (bytes > capacity) packed = buffer<uint8_t>(capacity = bytes);
    run(kernel, wave, packed.get(), parallel);
    wave.clear(), bytes = 0;
  };
  for (const GemmArgs& args : products) {
    if (args.w.rows == 0) continue;
    for (int64_t row = 0; row < args.x.rows; row += kPassRows) {
      wave.push_back({kernel, few, args, row, std::min(kPassRows, args.x.rows - row), bytes});
      bytes += round_up(wave.back().rows * wave.back().row_bytes(), 64);
      if (bytes >= kWaveBytes) run_wave();
    }
  }
  run_wave();
}

}  // namespace fp4ext::cpu
