#include "dispatch_cuda.h"
#include "gemm_fast_cuda.h"
#include "gemm_plan.h"

// gemm, gemm_add and grouped_gemm on CUDA: allocate, dispatch. Offsets of experts stay on the device.
namespace fp4ext {
namespace {

using Optional = std::optional<Tensor>;

// An operand of one expert of several. along_k: each has all rows, and its own part of the contraction.
cuda::Operand for_kernels(const Input& in, int64_t experts, bool along_k) {
  const cpu::Operand& o = in.operand;
  const int64_t rows = along_k ? o.rows : o.rows / experts;
  const int64_t expert_stride = in.globals == experts * rows ? rows : in.globals == experts;
  return {o.codes, o.scales, o.global, expert_stride, o.global_stride, o.elem, o.block, rows, o.k_stored};
}

// Into y, fp32 or bf16.
void run(const GemmPlan& plan, const Optional& ends, const Tensor& y, bool add, const std::string& accumulate, const std::string& backend) {
  static constexpr Choice<bool> kAccumulate[] = {{"invariant", true}, {"fast", false}};
  const bool invariant = choose("accumulate", accumulate, kAccumulate);
  Optional offsets;
  if (ends) offsets = torch::stable::contiguous(*ends);
  const cuda::GemmArgs args{.x = for_kernels(plan.x, plan.over_tokens ? plan.experts : 1, plan.over_tokens),
                            .w = for_kernels(plan.w, plan.experts, plan.over_tokens),
                            .bias = plan.bias_data(),
                            .y = y.data_ptr(),
                            .y_bf16 = y.scalar_type() == ScalarType::BFloat16,
                            .offsets = offsets ? static_cast<const int32_t*>(offsets->data_ptr()) : nullptr,
                            .experts = static_cast<int>(plan.experts),
                            .over_tokens = plan.over_tokens,
                            .add = add};
  const OnDevice device(y);
  const Route route = choose_gemm(args, invariant, backend, OnDevice::index(y));
  if (route.gemm)
    check_launch(route.name, route.gemm(args, device.stream()));
  else
    gemm_fast(plan.x, plan.w, args, device);
}

Tensor gemm(const Tensor& x_codes, Optional x_scales, Optional x_global, Text x_format, const Tensor& w_codes, Optional w_scales,
            Optional w_global, Text w_format, Optional bias, Text out_dtype, Text accumulate, Text backend) {
  GemmPlan plan({x_codes, x_scales, x_global, x_format}, {w_codes, w_scales, w_global, w_format}, {});
  plan.set_bias(bias);
  Tensor y = plan.new_y(out_dtype);
  run(plan, {}, y, false, accumulate, backend);
  return y;
}

void gemm_add(const Tensor& x_codes, Optional x_scales, Optional x_global, Text x_format, const Tensor& w_codes, Optional w_scales,
              Optional w_global, Text w_format, Optional bias, Tensor out, Text accumulate, Text backend) {
  GemmPlan plan({x_codes, x_scales, x_global, x_format}, {w_codes, w_scales, w_global, w_format}, {});
  plan.set_bias(bias);
  plan.check_out(out);
  run(plan, {}, out, true, accumulate, backend);
}

Tensor grouped_gemm(const Tensor& x_codes, Optional x_scales, Optional x_global, Text x_format, const Tensor& w_codes, Optional w_scales,
                    Optional w_global, Text w_format, const Tensor& offsets, Text out_dtype, Text accumulate, Text backend) {
  const GemmPlan plan({x_codes, x_scales, x_global, x_format}, {w_codes, w_scales, w_global, w_format}, offsets);
  Tensor y = plan.new_y(out_dtype);
  run(plan, offsets, y, false, accumulate, backend);
  return y;
}

}  // namespace
}  // namespace fp4ext

STABLE_TORCH_LIBRARY_IMPL(FP4EXT_CUDA_LIBRARY, FP4EXT_CUDA_KEY, m) {
  m.impl("gemm", FP4EXT_BOX(&fp4ext::gemm));
  m.impl("gemm_add", FP4EXT_BOX(&fp4ext::gemm_add));
  m.impl("grouped_gemm", FP4EXT_BOX(&fp4ext::grouped_gemm));
}
