#pragma once
#include "grouped.h"
#include "operand.h"

// What a product computes, on every device: its checked operands, and the shape of y.
//
//   dense                  x [.., K],       w [N, K]       -> y [.., N]
//   by rows                x [T, K],        w [E, N, K]    -> y [T, N],   y[rows_e] = x[rows_e] · w[e]ᵀ       (fprop, dgrad)
//   over tokens            x [M, tokens],   w [N, tokens]  -> y [E, M, N],  y[e] = x[:, tokens_e] · w[:, tokens_e]ᵀ  (wgrad)
//
// Expert e has the rows, or tokens, offsets[e-1] to offsets[e]. Over tokens each expert's stand at the place that
// grouped_quantize gave them (padded_bounds).
namespace fp4ext {

// One operand as it crosses a schema.
struct OperandArgs {
  const Tensor& codes;
  const std::optional<Tensor>&scales, &global;
  const std::string& format;
};

struct GemmPlan {
  Input x, w;
  std::optional<Tensor> bias;  // fp32
  int64_t experts = 1;
  bool by_rows = false, over_tokens = false;
  int64_t m, n;  // of one product; by rows, m is of all
  Sizes sizes;   // of y

  // ends: the offsets of experts, whose values each device checks in its own way.
  GemmPlan(const OperandArgs& xs, const OperandArgs& ws, const std::optional<Tensor>& ends) {
    check_same_device("w_codes", ws.codes, xs.codes);
    const auto check_beside = [&](const char* name, const std::optional<Tensor>& t) {
      if (t) check_same_device(name, *t, xs.codes);
    };
    check_beside("x_scales", xs.scales), check_beside("w_scales", ws.scales);
    check_beside("x_global", xs.global), check_beside("w_global", ws.global);
    check_beside("offsets", ends);
    if (ends) {
      const size_t dim = ws.codes.dim();
      STD_TORCH_CHECK(dim == 3 || dim == 2, "w_codes has shape ", describe(sizes_of(ws.codes)),
                      "; accepted: [E, N, K], or [N, tokens] to contract over tokens");
      by_rows = dim == 3, over_tokens = dim == 2;
      check_ends(*ends);
      experts = ends->numel();
      STD_TORCH_CHECK(!by_rows || ws.codes.size(0) == experts, "w_codes has shape ", describe(sizes_of(ws.codes)), "; accepted for ",
                      experts, " offsets: [", experts, ", N, K]");
    }
    const char *x_shape = over_tokens ? "[M, tokens]"
                          : by_rows   ? "[T, K]"
                                      : "[.., K]",
               *w_shape = over_tokens ? "[N, tokens]"
                          : by_rows   ? "[E, N, K]"
                                      : "[N, K]";
    x = check_operand("x", xs.codes, xs.scales, xs.global, xs.format, ends ? 2 : 0, x_shape, over_tokens ? experts : 1, over_tokens);
    w = check_operand("w", ws.codes, ws.scales, ws.global, ws.format, by_rows ? 3 : 2, w_shape, experts, over_tokens);
    if (!over_tokens) contraction(x.operand, w.operand);
    m = x.operand.rows, n = by_rows ? ws.codes.size(1) : w.operand.rows;
    sizes = over_tokens ? Sizes{experts, m, n} : sizes_of(xs.codes);
    sizes.back() = n;
  }

  void set_bias(const std::optional<Tensor>& plain) {
    if (!plain) return;
    check_float("bias", *plain);
    check_sizes("bias", *plain, {n});
    check_same_device("bias", *plain, x.codes);
    bias = torch::stable::contiguous(torch::stable::to(*plain, ScalarType::Float));
  }
  const float* bias_data() const { return bias ? static_cast<const float*>(bias->data_ptr()) : nullptr; }

  Tensor new_y(const std::string& out_dtype) const {
    return torch::stable::new_empty(x.codes, sizes, is_bf16(out_dtype) ? ScalarType::BFloat16 : ScalarType::Float);
  }

  // What a product is added to.
  void check_out(const Tensor& out) const {
    check_dtype("out", out, ScalarType::Float);
    check_same_device("out", out, x.codes);
    check_sizes("out", out, sizes);
    STD_TORCH_CHECK(out.is_contiguous(), "out has gaps between its elements; accepted: a contiguous tensor");
    // An operand that is not contiguous was copied: its copy overlaps nothing.
    const auto check = [&](const char* name, const std::optional<Tensor>& t) {
      if (t) check_no_overlap(name, *t, out);
    };
    check("x_codes", x.codes), check("x_scales", x.scales), check("x_global", x.global);
    check("w_codes", w.codes), check("w_scales", w.scales), check("w_global", w.global);
    check("bias", bias);
  }
};

}  // namespace fp4ext
