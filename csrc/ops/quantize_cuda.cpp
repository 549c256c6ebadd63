#include "quantize_plan.h"
#include "stored_cuda.h"

// quantize, quantize_rowcol, requantize, grouped_quantize, grouped_requantize and amax on CUDA: allocate, and three
// launches, amax → outer_scales → quantize. Both directions of quantize_rowcol come from one read of x where their specs
// differ by no more than the RHT.
namespace fp4ext {
namespace {

using std::optional;

// One direction of one quantization.
struct Job {
  QuantizePlan plan;
  Tensor x;  // contiguous; of a stored input, its codes
  cuda::Input in{};
  cuda::Copy copy{};
  optional<Tensor> rng, offsets;  // contiguous
  Tensor codes, scales, global, enc, dec;

  Job(const Tensor& input, const std::string& key, int64_t axis, const optional<Tensor>& rng, int64_t role,
      const optional<Experts>& of = {})
      : Job(torch::stable::contiguous(input), sizes_of(input), key, axis, rng, role, of) {
    in.x = x.data_ptr();
    in.dtype = cuda_dtype("x", input);
  }
  Job(const Stored& from, const std::string& key, int64_t axis, const optional<Tensor>& rng, int64_t role, const optional<Experts>& of = {})
      : Job(from.codes, from.sizes, key, axis, rng, role, of) {
    in.dtype = cuda::Dtype::stored;
    in.stored = stored_for_kernels(from);
  }

  Tensor measure(const OnDevice& device) const {
    Tensor amax = plan.new_groups(x);
    check_launch("amax", cuda::amax(in, copy, static_cast<float*>(amax.data_ptr()), plan.num_groups(), device.stream()));
    return amax;
  }

  // Allocates the results and, from the amaxes, the outer scales.
  void prepare(const OnDevice& device, const optional<Tensor>& given) {
    codes = plan.new_codes(x), scales = plan.new_scales(x), global = plan.new_groups(x);
    copy.codes = static_cast<uint8_t*>(codes.data_ptr());
    copy.scales = static_cast<uint8_t*>(scales.data_ptr());
    const QuantizeSpec& spec = plan.spec;
    if (spec.outer == OuterKind::none) return;
    const Tensor amax = given ? *given : measure(device);
    enc = plan.new_groups(x), dec = plan.new_groups(x);
    auto *e = static_cast<float*>(enc.data_ptr()), *d = static_cast<float*>(dec.data_ptr());
    const cuda::OuterArgs args{
        static_cast<const float*>(amax.data_ptr()), plan.num_groups(), spec.scale, is_eden(spec.rounding), spec.pow2, e, d,
        static_cast<float*>(global.data_ptr())};
    check_launch("outer_scales", cuda::outer_scales(args, device.stream()));
    copy.outer_enc = e, copy.outer_dec = d;
    if (plan.along_rows()) spread(device);
  }

  // other: the other direction of the same input, from the same read.
  void run(const OnDevice& device, const Job* other = nullptr) const {
    cuda::QuantizeArgs args{in, plan.spec, plan.role, {}};
    args.copies[copy.colwise] = copy;
    if (other) args.copies[other->copy.colwise] = other->copy;
    check_launch("quantize", cuda::quantize(args, device.stream()));
  }

 private:
  Job(const Tensor& dense, Sizes sizes, const std::string& key, int64_t axis, const optional<Tensor>& random, int64_t role,
      const optional<Experts>& of)
      : plan(dense, std::move(sizes), key, axis, random, role, of), x(dense) {
    in.batch = plan.batch, in.rows = plan.rows, in.cols = plan.cols;
    if (plan.experts) {
      check_same_device("offsets", *of->offsets, x);
      offsets = torch::stable::contiguous(*of->offsets);
      in.offsets = static_cast<const int32_t*>(offsets->data_ptr());
      in.experts = static_cast<int>(plan.experts);
    }
    copy.colwise = plan.colwise;
    copy.outer = plan.spec.outer;
    copy.rht = cuda::rht_n(plan.spec, plan.along_tokens() ? 0 : plan.k());  // along tokens each expert has its own
    copy.stages = plan.spec.rht_stages;
    if (plan.along_tokens()) copy.pitch = plan.padded_k();
    if (!plan.is_random()) return;
    // What it holds stays on the device: a shard's k that does not begin a block is not seen.
    rng = torch::stable::contiguous(*random);
    copy.rng = static_cast<const int64_t*>(rng->data_ptr());
    copy.sharded = rng->size(0) == 4;
  }

  // A row of x has its expert's global scale.
  void spread(const OnDevice& device) {
    Tensor of_rows = torch::stable::new_empty(x, {plan.rows, 1}, ScalarType::Float);
    const auto* of_group = static_cast<const float*>(global.data_ptr());
    check_launch("global_of_rows", cuda::global_of_rows(of_group, copy.outer == OuterKind::row, in.offsets, in.experts, in.rows,
                                                        static_cast<float*>(of_rows.data_ptr()), device.stream()));
    global = of_rows;
  }
};

std::tuple<Tensor, Tensor, Tensor> finished(Job& job, const OnDevice& device, const optional<Tensor>& amax = {}) {
  job.prepare(device, amax);
  job.run(device);
  return {job.codes, job.scales, job.global};
}

std::tuple<Tensor, Tensor, Tensor> quantize(const Tensor& x, Text spec, int64_t axis, optional<Tensor> rng, int64_t role,
                                            optional<Tensor> amax) {
  Job job(x, spec, axis, rng, role);
  if (amax) {
    job.plan.check_amax(*amax, x);
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
  if (row.plan.same_amax(col.plan)) amax = row.measure(device);
  row.prepare(device, amax);
  col.prepare(device, amax);
  if (row.plan.shares_the_read(col.plan)) {
    row.run(device, &col);
  } else {
    row.run(device);
    col.run(device);
  }
  return {row.codes, row.scales, row.global, col.codes, col.scales, col.global};
}

std::tuple<Tensor, Tensor, Tensor> requantize(const Tensor& codes, const Tensor& scales, const Tensor& global_scale, Text format, int64_t k,
                                              Text spec, int64_t axis, optional<Tensor> rng, int64_t role) {
  const Stored input(codes, scales, global_scale, format, k);
  Job job(input, spec, axis, rng, role);
  return finished(job, OnDevice(codes));
}

std::tuple<Tensor, Tensor, Tensor> grouped_quantize(const Tensor& x, optional<Tensor> offsets, Text spec, int64_t axis,
                                                    optional<Tensor> rng, int64_t role) {
  Job job(x, spec, axis, rng, role, Experts{offsets});
  return finished(job, OnDevice(x));
}

std::tuple<Tensor, Tensor, Tensor> grouped_requantize(const Tensor& codes, const Tensor& scales, const Tensor& global_scale, Text format,
                                                      int64_t k, optional<Tensor> offsets, Text spec, int64_t axis, optional<Tensor> rng,
                                                      int64_t role) {
  const Stored input(codes, scales, global_scale, format, k);
  Job job(input, spec, axis, rng, role, Experts{offsets});
  return finished(job, OnDevice(codes));
}

Tensor amax(const Tensor& x, Text spec, int64_t axis, optional<Tensor> rng) {
  const Job job(x, spec, axis, rng, 0);
  STD_TORCH_CHECK(job.plan.spec.outer != OuterKind::none, "amax: this format has no outer scale");
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
