#include <algorithm>

#include "grouped.h"
#include "operand.h"

// grouped_gemm on the CPU: one product an expert, all of them one piece of work. Expert e has the rows, or tokens,
// offsets[e-1] to offsets[e]:
//
//   w of 3 dimensions: y[rows_e] = x[rows_e] · w[e]ᵀ        x [T, K], w [E, N, K] -> y [T, N]     fprop, dgrad
//   w of 2 dimensions: y[e] = x[:, tokens_e] · w[:, tokens_e]ᵀ  x [M, T], w [N, T] -> y [E, M, N]     wgrad
//
// The second contracts over tokens: each expert's stand at the place that grouped_quantize gave them (padded_bounds).
namespace fp4ext {
namespace {

// Rows [row, row + rows) of an operand, and k elements of each from `k0` on, as expert e has them.
cpu::Operand part(const Input& in, int64_t e, int64_t row, int64_t rows, int64_t k0, int64_t k, int64_t first_global) {
  cpu::Operand o = in.operand;
  o.codes = o.row(row) + o.bytes(k0);
  if (o.scales) o.scales = o.row_scales(row) + k0 / o.block;
  if (o.global_stride)
    o.global += first_global;
  else if (in.globals > 1)
    o.global += e;
  o.rows = rows;
  o.k_stored = k;
  return o;
}

// Tokens along the contraction of x or w.
struct Tokens {
  Bounds starts;
  Tokens(const char* name, const Input& in, const Bounds& bounds) : starts(padded_bounds(bounds, in.operand.block ? in.operand.block : 1)) {
    STD_TORCH_CHECK(starts.back() <= in.operand.k_stored, name, " stores ", in.operand.k_stored, " elements a row; accepted: at least ",
                    starts.back(), ", each expert's tokens padded to blocks (as grouped_quantize stores them)");
  }
};

Tensor grouped_gemm(const Tensor& x_codes, std::optional<Tensor> x_scales, std::optional<Tensor> x_global, Text x_format,
                    const Tensor& w_codes, std::optional<Tensor> w_scales, std::optional<Tensor> w_global, Text w_format,
                    const Tensor& offsets, Text out_dtype, Text accumulate, Text backend) {
  const bool y_bf16 = is_bf16(out_dtype);
  check_choices(accumulate, backend);
  STD_TORCH_CHECK(w_codes.dim() == 3 || w_codes.dim() == 2, "w_codes has shape ", describe(sizes_of(w_codes)),
                  "; accepted: [E, N, K], or [N, tokens] to contract over tokens");
  const bool by_rows = w_codes.dim() == 3;
  const int64_t experts = offsets.numel();
  const Input x =
      check_operand("x", x_codes, x_scales, x_global, x_format, 2, by_rows ? "[T, K]" : "[M, tokens]", by_rows ? 1 : experts, true);
  const Input w =
      check_operand("w", w_codes, w_scales, w_global, w_format, by_rows ? 3 : 2, by_rows ? "[E, N, K]" : "[N, tokens]", experts, !by_rows);
  const ScalarType dtype = y_bf16 ? ScalarType::BFloat16 : ScalarType::Float;
  const int64_t y_bytes = y_bf16 ? 2 : 4, m = x.operand.rows;
  std::vector<cpu::GemmArgs> products;

  if (by_rows) {
    const Bounds bounds = check_offsets(offsets, m, "rows of x");
    STD_TORCH_CHECK(w_codes.size(0) == experts, "w_codes has shape ", describe(sizes_of(w_codes)), "; accepted for ", experts,
                    " offsets: [", experts, ", N, K]");
    const int64_t k = contraction(x.operand, w.operand), n = w_codes.size(1);
    Tensor y = torch::stable::new_empty(x_codes, {m, n}, dtype);
    auto* p = static_cast<uint8_t*>(y.data_ptr());
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t row = bounds[e], rows = bounds[e + 1] - row;
      products.push_back({part(x, e, row, rows, 0, x.operand.k_stored, row), part(w, e, e * n, n, 0, w.operand.k_stored, e * n), k, nullptr,
                          p + row * n * y_bytes, y_bf16, false});
    }
    cpu::gemm(products, torch_threads());
    std::fill(p + bounds.back() * n * y_bytes, p + m * n * y_bytes, 0);  // rows of no expert
    return y;
  }

  const int64_t n = w.operand.rows, tokens = std::min(x.operand.k_stored, w.operand.k_stored);
  const Bounds bounds = check_offsets(offsets, tokens, "tokens of both operands");
  const Tokens in_x("x_codes", x, bounds), in_w("w_codes", w, bounds);
  Tensor y = torch::stable::new_empty(x_codes, {experts, m, n}, dtype);
  auto* p = static_cast<uint8_t*>(y.data_ptr());
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t x_k = in_x.starts[e + 1] - in_x.starts[e], w_k = in_w.starts[e + 1] - in_w.starts[e];
    products.push_back({part(x, e, 0, m, in_x.starts[e], x_k, e * m), part(w, e, 0, n, in_w.starts[e], w_k, e * n), std::min(x_k, w_k),
                        nullptr, p + e * m * n * y_bytes, y_bf16, false});
  }
  cpu::gemm(products, torch_threads());
  return y;
}

}  // namespace
}  // namespace fp4ext

STABLE_TORCH_LIBRARY_IMPL(fp4ext, CPU, m) { m.impl("grouped_gemm", FP4EXT_BOX(&fp4ext::grouped_gemm)); }
