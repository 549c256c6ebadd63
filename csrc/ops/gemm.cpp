#include <algorithm>

#include "gemm_plan.h"

// gemm, gemm_add and grouped_gemm on the CPU: one product, or one per expert, all of them one piece of work.
namespace fp4ext {
namespace {

using Optional = std::optional<Tensor>;

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

// Where each expert's tokens begin along the contraction of x or w.
Bounds token_starts(const char* name, const Input& in, const Bounds& bounds) {
  Bounds starts = padded_bounds(bounds, in.operand.block ? in.operand.block : 1);
  STD_TORCH_CHECK(starts.back() <= in.operand.k_stored, name, " stores ", in.operand.k_stored, " elements a row; accepted: at least ",
                  starts.back(), ", each expert's tokens padded to blocks (as grouped_quantize stores them)");
  return starts;
}

// The products of a plan into y.
std::vector<cpu::GemmArgs> products_of(const GemmPlan& plan, const Optional& offsets, const Tensor& y, bool add) {
  const Input &x = plan.x, &w = plan.w;
  const int64_t m = plan.m, n = plan.n;
  const bool bf16 = y.scalar_type() == ScalarType::BFloat16;
  auto* p = static_cast<uint8_t*>(y.data_ptr());
  const auto at = [&](int64_t row) { return p + row * n * (bf16 ? 2 : 4); };
  if (!offsets) return {{x.operand, w.operand, contraction(x.operand, w.operand), plan.bias_data(), p, bf16, add}};

  std::vector<cpu::GemmArgs> products;
  if (plan.by_rows) {
    const Bounds bounds = check_offsets(*offsets, m, "rows of x");
    const int64_t k = contraction(x.operand, w.operand);
    for (int64_t e = 0; e < plan.experts; ++e) {
      const int64_t row = bounds[e], rows = bounds[e + 1] - row;
      products.push_back({part(x, e, row, rows, 0, x.operand.k_stored, row), part(w, e, e * n, n, 0, w.operand.k_stored, e * n), k, nullptr,
                          at(row), bf16, add});
    }
    std::fill(at(bounds.back()), at(m), 0);  // rows of no expert
    return products;
  }
  const Bounds bounds = check_offsets(*offsets, std::min(x.operand.k_stored, w.operand.k_stored), "tokens of both operands");
  const Bounds in_x = token_starts("x_codes", x, bounds), in_w = token_starts("w_codes", w, bounds);
  for (int64_t e = 0; e < plan.experts; ++e) {
    const int64_t x_k = in_x[e + 1] - in_x[e], w_k = in_w[e + 1] - in_w[e];
    products.push_back(
        {part(x, e, 0, m, in_x[e], x_k, e * m), part(w, e, 0, n, in_w[e], w_k, e * n), std::min(x_k, w_k), nullptr, at(e * m), bf16, add});
  }
  return products;
}

// The CPU has one order of summation, that of the numerics contract, and one backend.
void check_choices(const std::string& accumulate, const std::string& backend) {
  static constexpr Choice<bool> kAccumulate[] = {{"invariant", true}, {"fast", true}};
  static constexpr Choice<bool> kBackends[] = {{"auto", true}, {"cpu", true}};
  choose("accumulate", accumulate, kAccumulate);
  choose("backend", backend, kBackends);
}

Tensor run(const GemmPlan& plan, const Optional& offsets, const std::string& out_dtype, const std::string& accumulate,
           const std::string& backend) {
  check_choices(accumulate, backend);
  Tensor y = plan.new_y(out_dtype);
  cpu::gemm(products_of(plan, offsets, y, false), torch_threads());
  return y;
}

Tensor gemm(const Tensor& x_codes, Optional x_scales, Optional x_global, Text x_format, const Tensor& w_codes, Optional w_scales,
            Optional w_global, Text w_format, Optional bias, Text out_dtype, Text accumulate, Text backend) {
  GemmPlan plan({x_codes, x_scales, x_global, x_format}, {w_codes, w_scales, w_global, w_format}, {});
  plan.set_bias(bias);
  return run(plan, {}, out_dtype, accumulate, backend);
}

void gemm_add(const Tensor& x_codes, Optional x_scales, Optional x_global, Text x_format, const Tensor& w_codes, Optional w_scales,
              Optional w_global, Text w_format, Optional bias, Tensor out, Text accumulate, Text backend) {
  GemmPlan plan({x_codes, x_scales, x_global, x_format}, {w_codes, w_scales, w_global, w_format}, {});
  plan.set_bias(bias);
  check_choices(accumulate, backend);
  plan.check_out(out);
  cpu::gemm(products_of(plan, {}, out, true), torch_threads());
}

Tensor grouped_gemm(const Tensor& x_codes, Optional x_scales, Optional x_global, Text x_format, const Tensor& w_codes, Optional w_scales,
                    Optional w_global, Text w_format, const Tensor& offsets, Text out_dtype, Text accumulate, Text backend) {
  const GemmPlan plan({x_codes, x_scales, x_global, x_format}, {w_codes, w_scales, w_global, w_format}, offsets);
  return run(plan, offsets, out_dtype, accumulate, backend);
}

}  // namespace
}  // namespace fp4ext

STABLE_TORCH_LIBRARY_IMPL(fp4ext, CPU, m) {
  m.impl("gemm", FP4EXT_BOX(&fp4ext::gemm));
  m.impl("gemm_add", FP4EXT_BOX(&fp4ext::gemm_add));
  m.impl("grouped_gemm", FP4EXT_BOX(&fp4ext::grouped_gemm));
}
