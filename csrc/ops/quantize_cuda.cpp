#include "job_cuda.h"

// quantize, quantize_rowcol, requantize and amax on CUDA, and what each expert's matrix alone makes of the first and third. Both
// directions of quantize_rowcol come from one read of x where their specs differ by no more than the RHT.
namespace fp4ext {
namespace {

using std::optional;

std::tuple<Tensor, Tensor, Tensor> finished(Job& job, const OnDevice& device, const optional<Tensor>& amax = {}) {
  job.prepare(device, amax);
  job.run(device);
  return {*job.codes, *job.scales, job.global};
}

std::tuple<Tensor, Tensor, Tensor> quantize(const Tensor& x, Text spec, int64_t axis, optional<Tensor> rng, int64_t role,
                                            optional<Tensor> amax) {
  Job job(x, spec, axis, rng, role);
  if (amax) {
    STD_TORCH_CHECK(job.spec.outer != OuterKind::none, "amax is given, but this format has no outer scale");
    check_dtype("amax", *amax, ScalarType::Float);
    check_sizes("amax", *amax, job.group_sizes());
    check_same_device("amax", *amax, x);
    amax = torch::stable::contiguous(*amax);
  }
  return finished(job, OnDevice(x), amax);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> quantize_rowcol(const Tensor& x, Text row_spec, Text col_spec,
                                                                           optional<Tensor> row_rng, optional<Tensor> col_rng,
                                                                           int64_t role) {
  Job row(x, row_spec, -1, row_rng, role), col(x, col_spec, -2, col_rng, role);
  const OnDevice device(x);
  optional<Tensor> amax;
  if (row.same_amax(col)) amax = row.measure(device);
  row.prepare(device, amax);
  col.prepare(device, amax);
  if (row.shares_the_read(col)) {
    row.run(device, &col);
  } else {
    row.run(device);
    col.run(device);
  }
  return {*row.codes, *row.scales, row.global, *col.codes, *col.scales, col.global};
}

std::tuple<Tensor, Tensor, Tensor> requantize(const Tensor& codes, const Tensor& scales, const Tensor& global_scale, Text format, int64_t k,
                                              Text spec, int64_t axis, optional<Tensor> rng, int64_t role) {
  const Stored input(codes, scales, global_scale, format, k);
  Job job(input, spec, axis, rng, role);
  return finished(job, OnDevice(codes));
}

std::tuple<Tensor, Tensor, Tensor> grouped_quantize(const Tensor& x, optional<Tensor> offsets, Text spec, int64_t axis,
                                                    optional<Tensor> rng, int64_t role) {
  Job job(x, spec, axis, rng, role, Experts(offsets, sizes_of(x), x));
  return finished(job, OnDevice(x));
}

std::tuple<Tensor, Tensor, Tensor> grouped_requantize(const Tensor& codes, const Tensor& scales, const Tensor& global_scale, Text format,
                                                      int64_t k, optional<Tensor> offsets, Text spec, int64_t axis, optional<Tensor> rng,
                                                      int64_t role) {
  const Stored input(codes, scales, global_scale, format, k);
  Job job(input, spec, axis, rng, role, Experts(offsets, input.sizes, codes));
  return finished(job, OnDevice(codes));
}

Tensor amax(const Tensor& x, Text spec, int64_t axis, optional<Tensor> rng) {
  const Job job(x, spec, axis, rng, 0);
  STD_TORCH_CHECK(job.spec.outer != OuterKind::none, "amax: this format has no outer scale");
  return job.measure(OnDevice(x));
}

}  // namespace
}  // namespace fp4ext

STABLE_TORCH_LIBRARY_IMPL(FP4EXT_CUDA_LIBRARY, FP4EXT_CUDA_KEY, m) {
  m.impl("quantize", FP4EXT_BOX(&fp4ext::quantize));
  m.impl("quantize_rowcol", FP4EXT_BOX(&fp4ext::quantize_rowcol));
  m.impl("requantize", FP4EXT_BOX(&fp4ext::requantize));
  m.impl("grouped_quantize", FP4EXT_BOX(&fp4ext::grouped_quantize));
  m.impl("grouped_requantize", FP4EXT_BOX(&fp4ext::grouped_requantize));
  m.impl("amax", FP4EXT_BOX(&fp4ext::amax));
}
