#include "../cpu/attention.h"

#include <cmath>

#include <torch/csrc/stable/library.h>

#include "checks.h"

// attention on the CPU: check, allocate, run.
namespace fp4ext {
namespace {

// Sizes [batch, heads, rows, d]; the last axis contiguous in memory (the same tensor if it is already).
Tensor check_heads(const char* name, const Tensor& t, int64_t (&strides)[3]) {
  STD_TORCH_CHECK(t.dim() == 4, name, " has shape ", describe(sizes_of(t)), "; accepted: [batch, heads, rows, head_dim]");
  const Tensor dense = t.size(3) > 1 && t.stride(3) != 1 ? torch::stable::contiguous(t) : t;
  for (int i = 0; i < 3; ++i) strides[i] = dense.stride(i);
  return dense;
}

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, std::optional<Tensor> start, double scale) {
  cpu::AttentionArgs args{};
  args.q_dtype = check_float("q", q);
  args.kv_dtype = check_float("k", k);
  check_dtype("v", v, k.scalar_type());
  const Tensor q_dense = check_heads("q", q, args.q_strides), k_dense = check_heads("k", k, args.k_strides);
  args.batch = q.size(0), args.heads = q.size(1), args.m = q.size(2), args.d = q.size(3);
  args.kv_heads = k.size(1), args.t = k.size(2);
  check_sizes("k", k, {args.batch, args.kv_heads, args.t, args.d});
  const Tensor v_dense = check_heads("v", v, args.v_strides);
  check_sizes("v", v, sizes_of(k));
  STD_TORCH_CHECK(args.kv_heads > 0 ? args.heads % args.kv_heads == 0 : args.heads == 0, "q has ", args.heads, " heads and k ",
                  args.kv_heads, "; accepted: a multiple");
  STD_TORCH_CHECK(std::isfinite(scale), "scale is ", scale, "; accepted: a finite number");

  Sizes first(args.batch, args.t - args.m);
  if (start.has_value()) {
    check_dtype("start", *start, ScalarType::Long);
    check_sizes("start", *start, {args.batch});
    const Tensor dense = torch::stable::contiguous(*start);
    std::copy_n(static_cast<const int64_t*>(dense.data_ptr()), args.batch, first.begin());
  }
  for (int64_t s : first)
    STD_TORCH_CHECK(s >= 0 && s <= args.t - args.m, "start is ", s, " for ", args.m, " queries and ", args.t,
                    " keys; accepted: from 0 to keys - queries");
  args.start = first.data();
  args.scale = static_cast<float>(scale * 1.4426950408889634);

  Tensor y = torch::stable::new_empty(q, sizes_of(q));
  args.q = q_dense.data_ptr(), args.k = k_dense.data_ptr(), args.v = v_dense.data_ptr(), args.y = y.data_ptr();
  cpu::attention(args, torch_threads());
  return y;
}

}  // namespace
}  // namespace fp4ext

STABLE_TORCH_LIBRARY_IMPL(fp4ext, CPU, m) { m.impl("attention", TORCH_BOX(&fp4ext::attention)); }
