#include "../numerics/layout.h"
#include "grouped.h"

// swizzle and unswizzle on the CPU: block scales from linear [.., rows, columns] to the tensor cores' layout and back.
// Each matrix of a stack is padded on its own, and the padding is zero: garbage there would reach a GEMM.
namespace fp4ext {
namespace {

// One matrix, rows [begin, end) of scales; gives the end of what it wrote.
uint8_t* swizzle_rows(const uint8_t* scales, int64_t begin, int64_t end, int64_t columns, uint8_t* out) {
  for (int64_t i = begin; i < end; ++i)
    for (int64_t j = 0; j < columns; ++j) out[swizzled_offset(i - begin, j, columns)] = scales[i * columns + j];
  return out + padded_rows(end - begin) * padded_columns(columns);
}

Tensor swizzle(const Tensor& scales, std::optional<Tensor> offsets) {
  check_scales(scales, offsets.has_value());
  Sizes sizes = sizes_of(scales);
  const size_t dim = sizes.size();
  const int64_t rows = sizes[dim - 2], columns = sizes[dim - 1], stack = product(sizes, 0, dim - 2);
  Bounds bounds{0};
  if (offsets) {
    bounds = check_offsets(*offsets, rows, "rows of scales");
    sizes = {padded_capacity(rows, offsets->numel(), 128), padded_columns(columns)};
  } else {
    for (int64_t e = 0; e < stack; ++e) bounds.push_back(bounds.back() + rows);
    sizes.resize(dim - 1);
    sizes.back() = padded_rows(rows) * padded_columns(columns);
  }
  const Tensor in = torch::stable::contiguous(scales);
  Tensor out = torch::stable::new_zeros(scales, sizes, ScalarType::Byte);
  const auto* p = static_cast<const uint8_t*>(in.data_ptr());
  auto* q = static_cast<uint8_t*>(out.data_ptr());
  for (size_t e = 0; e + 1 < bounds.size(); ++e) q = swizzle_rows(p, bounds[e], bounds[e + 1], columns, q);
  return out;
}

Tensor unswizzle(const Tensor& swizzled, int64_t rows, int64_t columns) {
  check_bytes("swizzled", swizzled);
  Sizes sizes = sizes_of(swizzled);
  check_length("rows", rows);
  check_length("columns", columns);
  const int64_t size = product({padded_rows(rows), padded_columns(columns)}, 0, 2);
  STD_TORCH_CHECK(!sizes.empty() && sizes.back() == size, "swizzled has shape ", describe(sizes), "; accepted for ", rows, " rows and ",
                  columns, " blocks: [.., ", size, "]");
  const int64_t stack = product(sizes, 0, sizes.size() - 1);
  sizes.back() = rows;
  sizes.push_back(columns);
  const Tensor in = torch::stable::contiguous(swizzled);
  Tensor out = torch::stable::new_empty(swizzled, sizes, ScalarType::Byte);
  const auto* p = static_cast<const uint8_t*>(in.data_ptr());
  auto* q = static_cast<uint8_t*>(out.data_ptr());
  for (int64_t e = 0; e < stack; ++e)
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) q[(e * rows + i) * columns + j] = p[e * size + swizzled_offset(i, j, columns)];
  return out;
}

}  // namespace
}  // namespace fp4ext

STABLE_TORCH_LIBRARY_IMPL(fp4ext, CPU, m) {
  m.impl("swizzle", FP4EXT_BOX(&fp4ext::swizzle));
  m.impl("unswizzle", FP4EXT_BOX(&fp4ext::unswizzle));
}
