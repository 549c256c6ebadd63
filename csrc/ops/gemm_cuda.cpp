#include <torch/csrc/stable/library.h>

#include "cuda.h"
#include "dispatch_cuda.h"
#include "operand.h"

// gemm and grouped_gemm on CUDA: check, allocate, dispatch. Offsets of experts stay on the device.
namespace fp4ext {
namespace {

kernels::Operand for_kernels(const char* side, const Input& in, int64_t experts) {
  const cpu::Operand& o = in.operand;
  STD_TORCH_CHECK(o.elem != cpu::Elem::fp16 && o.elem != cpu::Elem::fp32, side, " is ", o.elem == cpu::Elem::fp16 ? "float16" : "float32",
                  "; accepted on CUDA: quantized, or bfloat16");
  static constexpr kernels::Elem kElems[] = {kernels::Elem::e2m1, kernels::Elem::e4m3, kernels::Elem::e5m2, kernels::Elem::bf16};
  const int64_t rows = o.rows / experts;
  return {
      o.codes, o.scales, o.global,  in.globals == o.rows ? rows : in.globals == experts, o.global_stride, kElems[static_cast<int>(o.elem)],
      o.block, rows,     o.k_stored};
}

// Both operands share what follows: everything lies where x does.
void check_devices(const Tensor& x, const Tensor& w, const std::optional<Tensor>& x_scales, const std::optional<Tensor>& w_scales,
                   const std::optional<Tensor>& x_global, const std::optional<Tensor>& w_global) {
  check_same_device("w_codes", w, x);
  if (x_scales) check_same_device("x_scales", *x_scales, x);
  if (w_scales) check_same_device("w_scales", *w_scales, x);
  if (x_global && x_global->numel()) check_same_device("x_global", *x_global, x);
  if (w_global && w_global->numel()) check_same_device("w_global", *w_global, x);
}

void run(kernels::GemmArgs& args, const Tensor& x, const std::string& accumulate, const std::string& backend) {
  static constexpr Choice<bool> kAccumulate[] = {{"invariant", true}, {"fast", true}};  // every kernel here is invariant
  choose("accumulate", accumulate, kAccumulate);
  const OnDevice device(x);
  const Route route = choose_gemm(args, backend, OnDevice::index(x));
  check_launch(route.name, route.gemm(args, device.stream()));
}

Tensor gemm(const Tensor& x_codes, std::optional<Tensor> x_scales, std::optional<Tensor> x_global, Text x_format, const Tensor& w_codes,
            std::optional<Tensor> w_scales, std::optional<Tensor> w_global, Text w_format, std::optional<Tensor> bias, Text out_dtype,
            Text accumulate, Text backend) {
  check_devices(x_codes, w_codes, x_scales, w_scales, x_global, w_global);
  const Input x = check_operand("x", x_codes, x_scales, x_global, x_format, 0, "[.., K]");
  const Input w = check_operand("w", w_codes, w_scales, w_global, w_format, 2, "[N, K]");
  contraction(x.operand, w.operand);
  const int64_t n = w.operand.rows;
  std::optional<Tensor> bias_fp32;
  if (bias.has_value()) {
    check_float("bias", *bias);
    check_sizes("bias", *bias, {n});
    check_same_device("bias", *bias, x_codes);
    bias_fp32 = torch::stable::contiguous(torch::stable::to(*bias, ScalarType::Float));
  }
  Sizes sizes = sizes_of(x_codes);
  sizes.back() = n;
  const bool y_bf16 = is_bf16(out_dtype);
  Tensor y = torch::stable::new_empty(x_codes, sizes, y_bf16 ? ScalarType::BFloat16 : ScalarType::Float);
  kernels::GemmArgs args{for_kernels("x", x, 1),
                         for_kernels("w", w, 1),
                         bias_fp32 ? static_cast<const float*>(bias_fp32->data_ptr()) : nullptr,
                         y.data_ptr(),
                         y_bf16,
                         nullptr,
                         1};
  run(args, x_codes, accumulate, backend);
  return y;
}

Tensor grouped_gemm(const Tensor& x_codes, std::optional<Tensor> x_scales, std::optional<Tensor> x_global, Text x_format,
                    const Tensor& w_codes, std::optional<Tensor> w_scales, std::optional<Tensor> w_global, Text w_format,
                    const Tensor& offsets, Text out_dtype, Text accumulate, Text backend) {
  check_devices(x_codes, w_codes, x_scales, w_scales, x_global, w_global);
  check_same_device("offsets", offsets, x_codes);
  check_dtype("offsets", offsets, ScalarType::Int);
  STD_TORCH_CHECK(offsets.dim() == 1 && offsets.numel() > 0, "offsets has shape ", describe(sizes_of(offsets)),
                  "; accepted: [E], the ends of the rows of at least 1 expert");
  const int64_t experts = offsets.numel();
  STD_TORCH_CHECK(w_codes.dim() == 3 && w_codes.size(0) == experts, "w_codes has shape ", describe(sizes_of(w_codes)),
                  "; accepted on CUDA for ", experts, " offsets: [", experts, ", N, K]");
  const Input x = check_operand("x", x_codes, x_scales, x_global, x_format, 2, "[T, K]");
  const Input w = check_operand("w", w_codes, w_scales, w_global, w_format, 3, "[E, N, K]", experts);
  contraction(x.operand, w.operand);
  // A global scale for each expert is w's; x's rows of an expert have it too where x was quantized expert by expert.
  STD_TORCH_CHECK(x.globals <= 1 || x.globals == x.operand.rows, "x_global has ", x.globals,
                  " values; accepted on CUDA: one, or one a row");
  const bool y_bf16 = is_bf16(out_dtype);
  const Tensor ends = torch::stable::contiguous(offsets);
  Tensor y = torch::stable::new_empty(x_codes, {x.operand.rows, w_codes.size(1)}, y_bf16 ? ScalarType::BFloat16 : ScalarType::Float);
  kernels::GemmArgs args{
      for_kernels("x", x, 1),   for_kernels("w", w, experts), nullptr, y.data_ptr(), y_bf16, static_cast<const int32_t*>(ends.data_ptr()),
      static_cast<int>(experts)};
  run(args, x_codes, accumulate, backend);
  return y;
}

}  // namespace
}  // namespace fp4ext

STABLE_TORCH_LIBRARY_IMPL(FP4EXT_CUDA_LIBRARY, FP4EXT_CUDA_KEY, m) {
  m.impl("gemm", TORCH_BOX(&fp4ext::gemm));
  m.impl("grouped_gemm", TORCH_BOX(&fp4ext::grouped_gemm));
}
