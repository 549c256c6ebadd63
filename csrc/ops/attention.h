#pragma once
#include <cmath>

#include "checks.h"

namespace fp4ext {

// What attention asks of its arguments on every device. Args: cpu::AttentionArgs or cuda::AttentionArgs, of which everything is set but
// the dtypes, y and start.
template <class Args>
struct Heads {
  Args args{};
  Tensor q, k, v;  // the last axis contiguous in memory

  Heads(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, double scale)
      : q(dense("q", q_in, args.q_strides)), k(dense("k", k_in, args.k_strides)), v(dense("v", v_in, args.v_strides)) {
    check_dtype("v", v, k.scalar_type());
    args.batch = q.size(0), args.heads = q.size(1), args.m = q.size(2), args.d = q.size(3);
    args.kv_heads = k.size(1), args.t = k.size(2);
    check_sizes("k", k, {args.batch, args.kv_heads, args.t, args.d});
    check_sizes("v", v, sizes_of(k));
    STD_TORCH_CHECK(args.kv_heads > 0 ? args.heads % args.kv_heads == 0 : args.heads == 0, "q has ", args.heads, " heads and k ",
                    args.kv_heads, "; accepted: a multiple");
    STD_TORCH_CHECK(std::isfinite(scale), "scale is ", scale, "; accepted: a finite number");
    args.q = q.data_ptr(), args.k = k.data_ptr(), args.v = v.data_ptr();
    args.scale = static_cast<float>(scale * 1.4426950408889634);
  }

  static void check_start(const Tensor& start, int64_t batch) {
    check_dtype("start", start, ScalarType::Long);
    check_sizes("start", start, {batch});
  }

 private:
  // Sizes [batch, heads, rows, d]; the same tensor if it is dense already.
  static Tensor dense(const char* name, const Tensor& t, int64_t (&strides)[3]) {
    STD_TORCH_CHECK(t.dim() == 4, name, " has shape ", describe(sizes_of(t)), "; accepted: [batch, heads, rows, head_dim]");
    const Tensor d = t.size(3) > 1 && t.stride(3) != 1 ? torch::stable::contiguous(t) : t;
    for (int i = 0; i < 3; ++i) strides[i] = d.stride(i);
    return d;
  }
};

}  // namespace fp4ext
