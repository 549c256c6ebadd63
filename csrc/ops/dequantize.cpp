#include <torch/csrc/stable/library.h>

#include "checks.h"
#include "parse.h"

// dequantize on the CPU.
namespace fp4ext {
namespace {

Tensor dequantize(const Tensor& codes, const Tensor& scales, const Tensor& global_scale, std::string format, int64_t k,
                  std::string out_dtype) {
  const FormatId f = parse_format(format);
  const ScalarType dtype = parse_dtype("out_dtype", out_dtype);
  const int64_t block = block_of(f), padded = (k + block - 1) / block * block;
  check_bytes("codes", codes);
  check_bytes("scales", scales);
  STD_TORCH_CHECK(codes.dim() >= 1, "codes has no dimensions; accepted: at least 1");
  Sizes sizes = sizes_of(codes);
  STD_TORCH_CHECK(k >= 0 && sizes.back() == padded / codes_per_byte(f), "codes has shape ", describe(sizes), "; accepted for k=", k,
                  ": [.., ", padded / codes_per_byte(f), "]");
  sizes.back() = padded / block;
  check_sizes("scales", scales, sizes);
  sizes.back() = k;
  const int64_t rows = product(sizes, 0, sizes.size() - 1);

  cpu::DequantizeArgs a{};
  Tensor global;
  if (f == FormatId::nvfp4) {
    check_dtype("global_scale", global_scale, ScalarType::Float);
    const int64_t groups = global_scale.numel();
    STD_TORCH_CHECK(groups > 0 ? rows % groups == 0 : rows == 0, "global_scale has shape ", describe(sizes_of(global_scale)),
                    "; accepted: one value, one an expert, or one a row of ", rows);
    global = torch::stable::contiguous(global_scale);
    a.global = static_cast<const float*>(global.data_ptr());
    a.rows_per_group = groups > 0 ? rows / groups : 1;
  }
  const Tensor c = torch::stable::contiguous(codes), s = torch::stable::contiguous(scales);
  Tensor out = torch::stable::new_empty(codes, sizes, dtype);
  a.codes = static_cast<const uint8_t*>(c.data_ptr());
  a.scales = static_cast<const uint8_t*>(s.data_ptr());
  a.format = f;
  a.rows = rows, a.k = k, a.padded_k = padded;
  a.rows_per_group = std::max<int64_t>(a.rows_per_group, 1);
  a.out = out.data_ptr();
  a.dtype = check_float("out", out);
  cpu::dequantize(a, torch_threads());
  return out;
}

}  // namespace
}  // namespace fp4ext

STABLE_TORCH_LIBRARY_IMPL(fp4ext, CPU, m) { m.impl("dequantize", TORCH_BOX(&fp4ext::dequantize)); }
