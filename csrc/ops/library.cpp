#include <torch/csrc/stable/library.h>

// Every schema of the library, and nothing else: read this file for the whole tensor API. fp4ext/functional/ops.py wraps each one
// and says what its arguments mean. A `spec` is the canonical string of fp4ext.Spec; rng is an int64 tensor {seed,
// offset} (or {seed, offset, row, k}).
STABLE_TORCH_LIBRARY(fp4ext, m) {
  m.def(
      "quantize(Tensor x, str spec, int axis, Tensor? rng, int role, Tensor? amax)"
      " -> (Tensor codes, Tensor scales, Tensor global_scale)");
  m.def(
      "quantize_rowcol(Tensor x, str row_spec, str col_spec, Tensor? row_rng, Tensor? col_rng, int role)"
      " -> (Tensor row_codes, Tensor row_scales, Tensor row_global_scale,"
      " Tensor col_codes, Tensor col_scales, Tensor col_global_scale)");
  m.def(
      "requantize(Tensor codes, Tensor scales, Tensor global_scale, str format, int k, str spec, int axis, Tensor? rng, int role)"
      " -> (Tensor codes_out, Tensor scales_out, Tensor global_scale_out)");
  m.def(
      "grouped_quantize(Tensor x, Tensor? offsets, str spec, int axis, Tensor? rng, int role)"
      " -> (Tensor codes, Tensor scales, Tensor global_scale)");
  m.def(
      "grouped_requantize(Tensor codes, Tensor scales, Tensor global_scale, str format, int k, Tensor? offsets,"
      " str spec, int axis, Tensor? rng, int role) -> (Tensor codes_out, Tensor scales_out, Tensor global_scale_out)");
  m.def("amax(Tensor x, str spec, int axis, Tensor? rng) -> Tensor");
  m.def("dequantize(Tensor codes, Tensor scales, Tensor global_scale, str format, int k, str out_dtype) -> Tensor");
  m.def(
      "gemm(Tensor x_codes, Tensor? x_scales, Tensor? x_global, str x_format,"
      " Tensor w_codes, Tensor? w_scales, Tensor? w_global, str w_format,"
      " Tensor? bias, str out_dtype, str accumulate, str backend) -> Tensor");
  m.def("attention(Tensor q, Tensor k, Tensor v, Tensor? start, float scale) -> Tensor");
  m.def(
      "gemm_add(Tensor x_codes, Tensor? x_scales, Tensor? x_global, str x_format,"
      " Tensor w_codes, Tensor? w_scales, Tensor? w_global, str w_format,"
      " Tensor? bias, Tensor(a!) out, str accumulate, str backend) -> ()");
  m.def(
      "grouped_gemm(Tensor x_codes, Tensor? x_scales, Tensor? x_global, str x_format,"
      " Tensor w_codes, Tensor? w_scales, Tensor? w_global, str w_format,"
      " Tensor offsets, str out_dtype, str accumulate, str backend) -> Tensor");
  m.def("swizzle(Tensor scales, Tensor? offsets=None) -> Tensor");
  m.def("unswizzle(Tensor swizzled, int rows, int columns) -> Tensor");
}
