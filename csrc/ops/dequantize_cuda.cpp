#include "stored_cuda.h"

// dequantize, swizzle and unswizzle on CUDA.
namespace fp4ext {
namespace {

Tensor dequantize(const Tensor& codes, const Tensor& scales, const Tensor& global_scale, Text format, int64_t k, Text out_dtype) {
  const Stored in(codes, scales, global_scale, format, k);
  Tensor out = torch::stable::new_empty(codes, in.sizes, parse_dtype("out_dtype", out_dtype));
  const OnDevice device(codes);
  check_launch("dequantize",
               cuda::dequantize(stored_for_kernels(in), in.args.rows, k, cuda_dtype("out", out), out.data_ptr(), device.stream()));
  return out;
}

Tensor swizzle(const Tensor& scales, std::optional<Tensor> offsets) {
  check_scales(scales, offsets.has_value());
  Sizes sizes = sizes_of(scales);
  const size_t dim = sizes.size();
  const int64_t columns = sizes[dim - 1];
  cuda::ScaleRows rows{product(sizes, 0, dim - 2), sizes[dim - 2], nullptr, 0};
  if (offsets) {
    check_offsets_on_device(*offsets, scales);
    offsets = torch::stable::contiguous(*offsets);
    rows.offsets = static_cast<const int32_t*>(offsets->data_ptr()), rows.experts = static_cast<int>(offsets->numel());
    sizes = {rows.padded(), padded_columns(columns)};
  } else {
    sizes.resize(dim - 1);
    sizes.back() = padded_rows(rows.rows) * padded_columns(columns);
  }
  const Tensor in = torch::stable::contiguous(scales);
  Tensor out = torch::stable::new_empty(scales, sizes, ScalarType::Byte);
  const OnDevice device(scales);
  check_launch("swizzle", cuda::swizzle(static_cast<const uint8_t*>(in.data_ptr()), rows, columns, static_cast<uint8_t*>(out.data_ptr()),
                                        device.stream()));
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
  const OnDevice device(swizzled);
  check_launch("unswizzle", cuda::unswizzle(static_cast<const uint8_t*>(in.data_ptr()), stack, rows, columns,
                                            static_cast<uint8_t*>(out.data_ptr()), device.stream()));
  return out;
}

}  // namespace
}  // namespace fp4ext

STABLE_TORCH_LIBRARY_IMPL(FP4EXT_CUDA_LIBRARY, FP4EXT_CUDA_KEY, m) {
  m.impl("dequantize", FP4EXT_BOX(&fp4ext::dequantize));
  m.impl("swizzle", FP4EXT_BOX(&fp4ext::swizzle));
  m.impl("unswizzle", FP4EXT_BOX(&fp4ext::unswizzle));
}
