#include "attention.h"

#include "../cpu/attention.h"

// attention on the CPU: check, allocate, run.
namespace fp4ext {
namespace {

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, std::optional<Tensor> start, double scale) {
  const cpu::Dtype q_dtype = check_float("q", q), kv_dtype = check_float("k", k);
  Heads<cpu::AttentionArgs> heads(q, k, v, scale);
  cpu::AttentionArgs& args = heads.args;
  args.q_dtype = q_dtype, args.kv_dtype = kv_dtype;
  Sizes first(args.batch, args.t - args.m);
  if (start.has_value()) {
    heads.check_start(*start, args.batch);
    const Tensor dense = torch::stable::contiguous(*start);
    std::copy_n(static_cast<const int64_t*>(dense.data_ptr()), args.batch, first.begin());
  }
  for (int64_t s : first)
    STD_TORCH_CHECK(s >= 0 && s <= args.t - args.m, "start is ", s, " for ", args.m, " queries and ", args.t,
                    " keys; accepted: from 0 to keys - queries");
  args.start = first.data();
  Tensor y = torch::stable::new_empty(q, sizes_of(q));
  args.y = y.data_ptr();
  cpu::attention(args, torch_threads());
  return y;
}

}  // namespace
}  // namespace fp4ext

STABLE_TORCH_LIBRARY_IMPL(fp4ext, CPU, m) { m.impl("attention", FP4EXT_BOX(&fp4ext::attention)); }
