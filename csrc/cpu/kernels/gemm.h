#pragma once
#include "../gemm.h"

// What one instruction set offers to gemm.cpp: the three verbs of a summation order, over panels whose layout only they
// know.
namespace fp4ext::cpu {

// Work for the micro-kernel: `rows` rows times `vectors` vectors of columns, over one step of K.
struct GemmTile {
  const uint8_t* x;  // packed
  const uint8_t* w;  // packed
  int rows, vectors;
  int64_t blocks;  // of 16 elements of K
  bool opens;      // the step is the first of its chunk: start from 0, else from `part`
  bool closes;     // it is the last: add to `total`, else leave the sums in `part`
  bool first;      // its chunk is the first: start `total`
  float* part;     // [rows][strip columns]
  float* total;
};

struct GemmKernel {
  int tile_rows;      // rows of x a tile
  int lanes;          // columns a vector
  int strip_vectors;  // vectors a strip
  int64_t step;       // elements of K a panel of w; divides the chunk
  int64_t x_bytes;    // of packed x, a row and 16 elements of K
  int64_t w_bytes;    // of packed w, a column and 16 elements of K
  // Packs rows [row, row + rows) of x, the whole of [0, k).
  void (*pack_x)(const Operand& x, int64_t row, int rows, int64_t k, uint8_t* out);
  // Packs columns [column, column + columns) over [k0, k1), columns rounded up to a vector by repeating the last one.
  void (*pack_w)(const Operand& w, int64_t column, int columns, int64_t k0, int64_t k1, uint8_t* out);
  void (*multiply)(const GemmTile& tile);

  int strip_columns() const { return lanes * strip_vectors; }
};

// A few rows of x, a decode, times w as it is stored: no panel, every weight is read once.
struct GemmFew {
  int rows;         // at most
  int64_t x_bytes;  // of packed x, a row and 16 elements of K
  // Packs rows [row, row + rows) of x, the whole of [0, k), rounded up to 32.
  void (*pack_x)(const Operand& x, int64_t row, int rows, int64_t k, uint8_t* out);
  // total[r·stride + c]: columns [column, column + columns) of w.
  void (*multiply)(const uint8_t* x, int rows, const Operand& w, int64_t column, int columns, int64_t k, float* total, int64_t stride);
};

inline constexpr int64_t kGemmChunk = 1024;
constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// float(s) of each scale byte.
struct ScaleTable {
  float value[256];
};
const ScaleTable& scale_table(ScaleElem kind);

// One row of results: y = fl32(double(total)·(g_x·g_w)), then + bias, then the output's rounding. A NaN becomes the
// canonical one, so that its sign and payload depend on no instruction set.
struct GemmRow {
  const float* total;
  const double* g_w;  // [columns]
  double g_x;
  const float* bias;  // [columns] or null
  int64_t columns;
  bool add;  // y = what y holds + this
};

#define FP4EXT_GEMM_KERNELS(isa)                       \
  namespace isa {                                      \
  const GemmKernel& gemm_block_kernel(bool both_e4m3); \
  const GemmKernel& gemm_lane_kernel();                \
  const GemmFew& gemm_block_few(bool both_e4m3);       \
  const GemmFew& gemm_lane_few();                      \
  void gemm_finish(const GemmRow& row, float* y);      \
  void gemm_finish(const GemmRow& row, uint16_t* y);   \
  }
FP4EXT_GEMM_KERNELS(portable)
FP4EXT_GEMM_KERNELS(avx2)
FP4EXT_GEMM_KERNELS(avx512)
#undef FP4EXT_GEMM_KERNELS

}  // namespace fp4ext::cpu
