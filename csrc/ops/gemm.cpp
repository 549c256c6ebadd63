#include "operand.h"

// gemm on the CPU: check, allocate, run.
namespace fp4ext {
namespace {

using Optional = std::optional<Tensor>;

// The checked arguments of a product, all but y.
struct Product {
  Input x, w;
  Optional bias;  // fp32
  cpu::GemmArgs args{};
  Sizes sizes;  // of y

  Product(const Tensor& x_codes, const Optional& x_scales, const Optional& x_global, const std::string& x_format, const Tensor& w_codes,
          const Optional& w_scales, const Optional& w_global, const std::string& w_format, const Optional& plain_bias)
      : x(check_operand("x", x_codes, x_scales, x_global, x_format, 0, "[.., K]")),
        w(check_operand("w", w_codes, w_scales, w_global, w_format, 2, "[N, K]")),
        sizes(sizes_of(x_codes)) {
    const int64_t n = w.operand.rows;
    args.x = x.operand, args.w = w.operand;
    args.k = contraction(x.operand, w.operand);
    if (plain_bias.has_value()) {
      check_float("bias", *plain_bias);
      check_sizes("bias", *plain_bias, {n});
      bias = torch::stable::contiguous(torch::stable::to(*plain_bias, ScalarType::Float));
      args.bias = static_cast<const float*>(bias->data_ptr());
    }
    sizes.back() = n;
  }

  void run(const Tensor& y) {
    args.y = y.data_ptr();
    cpu::gemm({&args, 1}, torch_threads());
  }
};

Tensor gemm(const Tensor& x_codes, Optional x_scales, Optional x_global, Text x_format, const Tensor& w_codes, Optional w_scales,
            Optional w_global, Text w_format, Optional bias, Text out_dtype, Text accumulate, Text backend) {
  Product product(x_codes, x_scales, x_global, x_format, w_codes, w_scales, w_global, w_format, bias);
  product.args.y_bf16 = is_bf16(out_dtype);
  check_choices(accumulate, backend);
  Tensor y = torch::stable::new_empty(x_codes, product.sizes, product.args.y_bf16 ? ScalarType::BFloat16 : ScalarType::Float);
  product.run(y);
  return y;
}

void gemm_add(const Tensor& x_codes, Optional x_scales, Optional x_global, Text x_format, const Tensor& w_codes, Optional w_scales,
              Optional w_global, Text w_format, Optional bias, Tensor out, Text accumulate, Text backend) {
  Product product(x_codes, x_scales, x_global, x_format, w_codes, w_scales, w_global, w_format, bias);
  check_choices(accumulate, backend);
  check_dtype("out", out, ScalarType::Float);
  check_sizes("out", out, product.sizes);
  check_out(out, product.x, product.w, product.bias);
  product.args.add = true;
  product.run(out);
}

}  // namespace
}  // namespace fp4ext

STABLE_TORCH_LIBRARY_IMPL(fp4ext, CPU, m) {
  m.impl("gemm", FP4EXT_BOX(&fp4ext::gemm));
  m.impl("gemm_add", FP4EXT_BOX(&fp4ext::gemm_add));
}
