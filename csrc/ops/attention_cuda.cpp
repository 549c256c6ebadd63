#include "../cuda/attention.h"

#include "attention.h"
#include "cuda.h"

// attention on CUDA: check, allocate, launch. The starts stay on the device.
namespace fp4ext {
namespace {

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, std::optional<Tensor> start, double scale) {
  check_same_device("k", k, q);
  check_same_device("v", v, q);
  const cuda::Dtype q_dtype = cuda_dtype("q", q), kv_dtype = cuda_dtype("k", k);
  Heads<cuda::AttentionArgs> heads(q, k, v, scale);
  cuda::AttentionArgs& args = heads.args;
  args.q_dtype = q_dtype, args.kv_dtype = kv_dtype;
  STD_TORCH_CHECK(args.batch == 0 || args.t >= args.m, "k has ", args.t, " rows and q ", args.m, "; accepted: at least as many");
  std::optional<Tensor> first;
  if (start.has_value()) {
    check_same_device("start", *start, q);
    heads.check_start(*start, args.batch);
    first = torch::stable::contiguous(*start);
    args.start = static_cast<const int64_t*>(first->data_ptr());
  }
  Tensor y = torch::stable::new_empty(q, sizes_of(q));
  args.y = y.data_ptr();
  const OnDevice device(q);
  const Tensor workspace = torch::stable::new_empty(q, {cuda::attention_workspace(args)}, ScalarType::Byte);
  check_launch("attention", cuda::attention(args, workspace.data_ptr(), device.stream()));
  return y;
}

}  // namespace
}  // namespace fp4ext

STABLE_TORCH_LIBRARY_IMPL(FP4EXT_CUDA_LIBRARY, FP4EXT_CUDA_KEY, m) { m.impl("attention", FP4EXT_BOX(&fp4ext::attention)); }
