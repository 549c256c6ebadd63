#include "gemm_fast_cuda.h"

#include "../cuda/quantize.h"

namespace fp4ext {
namespace {

FormatId format_of(const cuda::Operand& o) {
  switch (o.elem) {
    case cuda::Elem::e2m1: return o.block == 16 ? FormatId::nvfp4 : FormatId::mxfp4;
    case cuda::Elem::e4m3: return FormatId::mxfp8;
    default: return FormatId::mxfp8_e5m2;
  }
}

// [rows, k] in bf16, without the global scale.
Tensor decoded(const Input& in, const cuda::Operand& o, int64_t k, const OnDevice& device) {
  if (o.elem == cuda::Elem::bf16) return torch::stable::view(in.codes, {o.rows, o.k_stored});  // k: nothing pads a plain operand
  Tensor out = torch::stable::new_empty(in.codes, {o.rows, k}, ScalarType::BFloat16);
  const cuda::Stored from{static_cast<const uint8_t*>(o.codes), o.scales, nullptr, format_of(o), o.k_stored, 1};
  check_launch("dequantize", cuda::dequantize(from, o.rows, k, cuda::Dtype::bf16, out.data_ptr(), device.stream()));
  return out;
}

// x·wᵀ in fp32. The variants that write into `sums` are left alone by autocast.
void multiply(const Tensor& x, const Tensor& w, const Tensor& sums) {
  using torch::stable::detail::from;
#if defined(USE_CUDA)
  std::array stack{from(x), from(torch::stable::transpose(w, 0, 1)), from(ScalarType::Float), from(sums)};
  const char* overload = "dtype_out";
#else  // torch has no such product on the CPU
  std::array stack{from(torch::stable::to(x, ScalarType::Float)),
                   from(torch::stable::transpose(torch::stable::to(w, ScalarType::Float), 0, 1)), from(sums)};
  const char* overload = "out";
#endif
  STD_TORCH_CHECK(torch_call_dispatcher("aten::mm", overload, stack.data(), TORCH_ABI_VERSION) == 0, "torch's product failed");
  torch::stable::detail::to<Tensor>(stack[0]);  // what it returns is ours to free
}

}  // namespace

void gemm_fast(const Input& x, const Input& w, const cuda::GemmArgs& args, const OnDevice& device) {
  const int64_t k = std::min(args.x.k_stored, args.w.k_stored);
  const Tensor sums = torch::stable::new_empty(x.codes, {args.x.rows, args.w.rows}, ScalarType::Float);
  multiply(decoded(x, args.x, k, device), decoded(w, args.w, k, device), sums);
  check_launch("fast", cuda::gemm_finish(args, static_cast<const float*>(sums.data_ptr()), device.stream()));
}

}  // namespace fp4ext
