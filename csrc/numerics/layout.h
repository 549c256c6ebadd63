#pragma once
#include "host_device.h"

// Where the tensor cores want the block scales (docs/numerics.md, 10): atoms of 128 rows × 4 block columns, 512 bytes
// each.
namespace fp4ext {

FP4_HD int64_t padded_rows(int64_t rows) { return (rows + 127) / 128 * 128; }
FP4_HD int64_t padded_columns(int64_t columns) { return (columns + 3) / 4 * 4; }

// The place of the scale of row i, block column j, where rows have `columns` block columns.
FP4_HD int64_t swizzled_offset(int64_t i, int64_t j, int64_t columns) {
  return ((i / 128) * (padded_columns(columns) / 4) + j / 4) * 512 + (i % 32) * 16 + ((i % 128) / 32) * 4 + j % 4;
}

}  // namespace fp4ext
