#include <torch/csrc/stable/library.h>

#include "operand.h"

// gemm on the CPU: check, allocate, run.
namespace fp4ext {
namespace {

Tensor gemm(const Tensor& x_codes, std::optional<Tensor> x_scales, std::optional<Tensor> x_global, Text x_format, const Tensor& w_codes,
            std::optional<Tensor> w_scales, std::optional<Tensor> w_global, Text w_format, std::optional<Tensor> bias, Text out_dtype,
            Text accumulate, Text backend) {
  const Input x = check_operand("x", x_codes, x_scales, x_global, x_format, 0, "[.., K]");
  const Input w = check_operand("w", w_codes, w_scales, w_global, w_format, 2, "[N, K]");
  const int64_t k = contraction(x.operand, w.operand), n = w.operand.rows;
  const bool y_bf16 = is_bf16(out_dtype);
  check_choices(accumulate, backend);

  std::optional<Tensor> bias_fp32;
  if (bias.has_value()) {
    check_float("bias", *bias);
    check_sizes("bias", *bias, {n});
    bias_fp32 = torch::stable::contiguous(torch::stable::to(*bias, ScalarType::Float));
  }
  Sizes sizes = sizes_of(x_codes);
  sizes.back() = n;
  Tensor y = torch::stable::new_empty(x_codes, sizes, y_bf16 ? ScalarType::BFloat16 : ScalarType::Float);
  const cpu::GemmArgs args = {x.operand,    w.operand, k, bias_fp32 ? static_cast<const float*>(bias_fp32->data_ptr()) : nullptr,
                              y.data_ptr(), y_bf16};
  cpu::gemm({&args, 1}, torch_threads());
  return y;
}

}  // namespace
}  // namespace fp4ext

STABLE_TORCH_LIBRARY_IMPL(fp4ext, CPU, m) { m.impl("gemm", TORCH_BOX(&fp4ext::gemm)); }
