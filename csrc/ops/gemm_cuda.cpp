#include "dispatch_cuda.h"
#include "gemm_fast_cuda.h"

// gemm, gemm_add and grouped_gemm on CUDA: check, allocate, dispatch. Offsets of experts stay on the device.
namespace fp4ext {
namespace {

using Optional = std::optional<Tensor>;

// An operand of one expert of several. along_k: each has all rows, and its own part of the contraction.
cuda::Operand for_kernels(const Input& in, int64_t experts, bool along_k) {
  using enum cuda::Elem;
  static constexpr cuda::Elem kElems[] = {e2m1, e4m3, e5m2, bf16, fp16, fp32};
  const cpu::Operand& o = in.operand;
  const int64_t rows = along_k ? o.rows : o.rows / experts;
  const int64_t expert_stride = in.globals == experts * rows ? rows : in.globals == experts;
  return {o.codes, o.scales, o.global, expert_stride, o.global_stride, kElems[static_cast<int>(o.elem)], o.block, rows, o.k_stored};
}

// A product, all but y: its checked operands, and what the kernels are told of them.
struct Product {
  Input x, w;
  Optional bias, offsets;  // fp32; int32
  cuda::GemmArgs args{};

  Product(const Tensor& x_codes, const Optional& x_scales, const Optional& x_global, const std::string& x_format, const Tensor& w_codes,
          const Optional& w_scales, const Optional& w_global, const std::string& w_format, const Optional& ends) {
    check_devices(x_codes, w_codes, x_scales, w_scales, x_global, w_global);
    const bool by_rows = ends.has_value() && w_codes.dim() == 3, by_tokens = ends.has_value() && !by_rows;
    if (ends.has_value()) {
      check_offsets_on_device(*ends, x_codes);
      STD_TORCH_CHECK(by_rows || w_codes.dim() == 2, "w_codes has shape ", describe(sizes_of(w_codes)),
                      "; accepted: [E, N, K], or [N, tokens] to contract over tokens");
      STD_TORCH_CHECK(!by_rows || w_codes.size(0) == ends->numel(), "w_codes has shape ", describe(sizes_of(w_codes)), "; accepted for ",
                      ends->numel(), " offsets: [", ends->numel(), ", N, K]");
      offsets = torch::stable::contiguous(*ends);
    }
    const int64_t experts = offsets ? offsets->numel() : 1;
    x = check_operand("x", x_codes, x_scales, x_global, x_format, offsets ? 2 : 0,
                      by_tokens ? "[M, tokens]"
                      : by_rows ? "[T, K]"
                                : "[.., K]",
                      by_tokens ? experts : 1, by_tokens);
    w = check_operand("w", w_codes, w_scales, w_global, w_format, by_rows ? 3 : 2,
                      by_tokens ? "[N, tokens]"
                      : by_rows ? "[E, N, K]"
                                : "[N, K]",
                      experts, by_tokens);
    if (!by_tokens) contraction(x.operand, w.operand);
    args.x = for_kernels(x, by_tokens ? experts : 1, by_tokens);
    args.w = for_kernels(w, experts, by_tokens);
    args.offsets = offsets ? static_cast<const int32_t*>(offsets->data_ptr()) : nullptr;
    args.experts = static_cast<int>(experts);
    args.over_tokens = by_tokens;
  }

  void set_bias(const Optional& plain) {
    if (!plain.has_value()) return;
    check_float("bias", *plain);
    check_sizes("bias", *plain, {args.w.rows});
    check_same_device("bias", *plain, x.codes);
    bias = torch::stable::contiguous(torch::stable::to(*plain, ScalarType::Float));
    args.bias = static_cast<const float*>(bias->data_ptr());
  }

  Sizes sizes(const Tensor& x_codes) const {
    if (args.over_tokens) return {args.experts, args.x.rows, args.w.rows};
    Sizes s = sizes_of(x_codes);
    s.back() = args.w.rows;
    return s;
  }

  // Into y, fp32 or bf16.
  void run(const Tensor& y, const std::string& accumulate, const std::string& backend) {
    static constexpr Choice<bool> kAccumulate[] = {{"invariant", true}, {"fast", false}};
    const bool invariant = choose("accumulate", accumulate, kAccumulate);
    args.y = y.data_ptr();
    args.y_bf16 = y.scalar_type() == ScalarType::BFloat16;
    const OnDevice device(y);
    const Route route = choose_gemm(args, invariant, backend, OnDevice::index(y));
    if (route.gemm)
      check_launch(route.name, route.gemm(args, device.stream()));
    else
      gemm_fast(x, w, args, device);
  }

 private:
  // Everything lies where x does.
  static void check_devices(const Tensor& x, const Tensor& w, const Optional& x_scales, const Optional& w_scales, const Optional& x_global,
                            const Optional& w_global) {
    check_same_device("w_codes", w, x);
    if (x_scales) check_same_device("x_scales", *x_scales, x);
    if (w_scales) check_same_device("w_scales", *w_scales, x);
    if (x_global) check_same_device("x_global", *x_global, x);
    if (w_global) check_same_device("w_global", *w_global, x);
  }
};

ScalarType y_dtype(const std::string& out_dtype) { return is_bf16(out_dtype) ? ScalarType::BFloat16 : ScalarType::Float; }

Tensor gemm(const Tensor& x_codes, Optional x_scales, Optional x_global, Text x_format, const Tensor& w_codes, Optional w_scales,
            Optional w_global, Text w_format, Optional bias, Text out_dtype, Text accumulate, Text backend) {
  Product product(x_codes, x_scales, x_global, x_format, w_codes, w_scales, w_global, w_format, {});
  product.set_bias(bias);
  Tensor y = torch::stable::new_empty(x_codes, product.sizes(x_codes), y_dtype(out_dtype));
  product.run(y, accumulate, backend);
  return y;
}

void gemm_add(const Tensor& x_codes, Optional x_scales, Optional x_global, Text x_format, const Tensor& w_codes, Optional w_scales,
              Optional w_global, Text w_format, Optional bias, Tensor out, Text accumulate, Text backend) {
  Product product(x_codes, x_scales, x_global, x_format, w_codes, w_scales, w_global, w_format, {});
  product.set_bias(bias);
  check_dtype("out", out, ScalarType::Float);
  check_same_device("out", out, x_codes);
  check_sizes("out", out, product.sizes(x_codes));
  check_out(out, product.x, product.w, product.bias);
  product.args.add = true;
  product.run(out, accumulate, backend);
}

Tensor grouped_gemm(const Tensor& x_codes, Optional x_scales, Optional x_global, Text x_format, const Tensor& w_codes, Optional w_scales,
                    Optional w_global, Text w_format, const Tensor& offsets, Text out_dtype, Text accumulate, Text backend) {
  Product product(x_codes, x_scales, x_global, x_format, w_codes, w_scales, w_global, w_format, offsets);
  Tensor y = torch::stable::new_empty(x_codes, product.sizes(x_codes), y_dtype(out_dtype));
  product.run(y, accumulate, backend);
  return y;
}

}  // namespace
}  // namespace fp4ext

STABLE_TORCH_LIBRARY_IMPL(FP4EXT_CUDA_LIBRARY, FP4EXT_CUDA_KEY, m) {
  m.impl("gemm", FP4EXT_BOX(&fp4ext::gemm));
  m.impl("gemm_add", FP4EXT_BOX(&fp4ext::gemm_add));
  m.impl("grouped_gemm", FP4EXT_BOX(&fp4ext::grouped_gemm));
}
