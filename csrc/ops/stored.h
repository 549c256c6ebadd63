#pragma once
#include "checks.h"
#include "parse.h"

// A quantized tensor that comes in as an argument: checked, and as the kernels read it.
namespace fp4ext {

struct Stored {
  Tensor codes, scales, global;
  Sizes sizes;  // of x̂
  cpu::DequantizeArgs args{};

  Stored(const Tensor& c, const Tensor& s, const Tensor& global_scale, const std::string& format, int64_t k) : sizes(sizes_of(c)) {
    const FormatId f = parse_format(format);
    check_length("k", k);
    const int64_t block = block_of(f), padded = (k + block - 1) / block * block;
    check_bytes("codes", c);
    check_bytes("scales", s);
    check_same_device("scales", s, c);
    check_same_device("global_scale", global_scale, c);
    STD_TORCH_CHECK(!sizes.empty(), "codes has no dimensions; accepted: at least 1");
    STD_TORCH_CHECK(sizes.back() == padded / codes_per_byte(f), "codes has shape ", describe(sizes), "; accepted for k=", k, ": [.., ",
                    padded / codes_per_byte(f), "]");
    sizes.back() = padded / block;
    check_sizes("scales", s, sizes);
    sizes.back() = k;
    args.format = f;
    args.rows = product(sizes, 0, sizes.size() - 1);
    args.k = k, args.padded_k = padded;
    args.rows_per_group = 1;
    if (f == FormatId::nvfp4) {
      check_dtype("global_scale", global_scale, ScalarType::Float);
      const int64_t groups = global_scale.numel();
      const bool experts = sizes.size() == 3 && groups == sizes[0];
      STD_TORCH_CHECK(groups == 1 || groups == args.rows || experts, "global_scale has shape ", describe(sizes_of(global_scale)),
                      "; accepted: one value, one an expert, or one a row of ", args.rows);
      global = torch::stable::contiguous(global_scale);
      args.global = static_cast<const float*>(global.data_ptr());
      args.rows_per_group = groups > 0 ? std::max<int64_t>(args.rows / groups, 1) : 1;
    }
    codes = torch::stable::contiguous(c);
    scales = torch::stable::contiguous(s);
    args.codes = static_cast<const uint8_t*>(codes.data_ptr());
    args.scales = static_cast<const uint8_t*>(scales.data_ptr());
  }
};

}  // namespace fp4ext
