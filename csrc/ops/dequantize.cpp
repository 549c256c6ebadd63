#include "stored.h"

// dequantize on the CPU.
namespace fp4ext {
namespace {

Tensor dequantize(const Tensor& codes, const Tensor& scales, const Tensor& global_scale, Text format, int64_t k, Text out_dtype) {
  Stored in(codes, scales, global_scale, format, k);
  Tensor out = torch::stable::new_empty(codes, in.sizes, parse_dtype("out_dtype", out_dtype));
  in.args.out = out.data_ptr();
  in.args.dtype = check_float("out", out);
  cpu::dequantize(in.args, torch_threads());
  return out;
}

}  // namespace
}  // namespace fp4ext

STABLE_TORCH_LIBRARY_IMPL(fp4ext, CPU, m) { m.impl("dequantize", FP4EXT_BOX(&fp4ext::dequantize)); }
