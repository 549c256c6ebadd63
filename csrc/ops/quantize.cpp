#include "quantization.h"

// quantize, quantize_rowcol, requantize and amax on the CPU: check, measure the outer scale, allocate, run.
namespace fp4ext {
namespace {

using std::optional;
using std::string;

// One direction of one quantization; holds what the pointers in `args` point to.
struct Job {
  Tensor x;     // or, where the input is `stored`, a tensor of its device
  Sizes sizes;  // of the input
  const cpu::DequantizeArgs* stored = nullptr;
  cpu::QuantizeArgs args;
  OuterScales outer;

  Job(const Tensor& input, const string& key, int64_t axis, const optional<Tensor>& rng, int64_t role)
      : Job(input, check_float("x", input), sizes_of(input), key, axis, rng, role) {
    x = torch::stable::contiguous(input);
    args.x = x.data_ptr();
  }
  Job(const Stored& input, const string& key, int64_t axis, const optional<Tensor>& rng, int64_t role)
      : Job(input.codes, cpu::Dtype::fp32, input.sizes, key, axis, rng, role) {
    x = input.codes;
    stored = &input.args;
  }
  Job(const Tensor& on, cpu::Dtype dtype, Sizes input_sizes, const string& key, int64_t axis, const optional<Tensor>& rng, int64_t role)
      : sizes(std::move(input_sizes)), args(check_quantization(on, dtype, key, axis, rng, role)) {
    const size_t dim = sizes.size(), least = axis == -2 ? 2 : 1;
    STD_TORCH_CHECK(dim >= least, "x has ", dim, " dimensions; accepted: at least ", least, " with axis=", axis);
    STD_TORCH_CHECK(args.spec.outer != OuterKind::expert || dim == 3, "x has ", dim,
                    " dimensions; accepted with outer='expert': 3, [experts, rows, K]");
    args.batch = dim > 2 ? product(sizes, 0, dim - 2) : 1;
    args.rows = dim > 1 ? sizes[dim - 2] : 1;
    args.cols = sizes[dim - 1];
    check_shard(args.rng, args.vector_length());
  }

  // The shape of the result, with `last` elements in the last axis.
  Sizes out_sizes(int64_t last) const {
    Sizes s = sizes;
    if (args.colwise) s[s.size() - 2] = args.out_rows();
    s.back() = last;
    return s;
  }
  Sizes global_sizes() const {
    switch (args.spec.outer) {
      case OuterKind::none: return {0};
      case OuterKind::row: return out_sizes(1);
      case OuterKind::expert: return {sizes[0], 1, 1};
      default: return {};
    }
  }
  Tensor new_global() const { return torch::stable::new_empty(x, global_sizes(), ScalarType::Float); }

  // Whether the other direction of the same x has the same amaxes: it does where groups don't run along rows and nothing is rotated.
  bool same_amax(const Job& other) const {
    const QuantizeSpec &a = args.spec, &b = other.args.spec;
    const auto whole = [](OuterKind k) { return k == OuterKind::tensor || k == OuterKind::pow2; };
    return !a.rht && !b.rht && ((whole(a.outer) && whole(b.outer)) || (a.outer == OuterKind::expert && b.outer == OuterKind::expert));
  }

  std::vector<cpu::RequantizeArgs> requantized() const { return {{stored, 0, args}}; }

  void measure(float* amax) const {
    std::fill(amax, amax + args.num_groups(), 0.0f);
    if (stored)
      cpu::requantize_amax(requantized(), amax, torch_threads());
    else
      cpu::amax({&args, 1}, amax, torch_threads());
  }

  // From the amaxes; fills `global` with the decode side.
  void set_outer(const float* amax, float* global) {
    if (args.spec.outer == OuterKind::none) return;
    outer = OuterScales(args.spec, amax, args.num_groups(), global);
    args.outer_enc = outer.enc.data(), args.outer_dec = outer.dec.data();
  }
};

struct Result {
  Tensor codes, scales, global;
};

// `amax`: of each outer group, as measured or checked.
Result run(Job& job, const optional<Tensor>& amax) {
  auto& a = job.args;
  Tensor global = job.new_global();
  auto* g = static_cast<float*>(global.data_ptr());
  if (amax) {
    job.set_outer(static_cast<const float*>(amax->data_ptr()), g);
  } else if (a.spec.outer != OuterKind::none) {
    job.measure(g);
    const std::vector<float> measured(g, g + a.num_groups());
    job.set_outer(measured.data(), g);
  }
  Tensor codes = torch::stable::new_empty(job.x, job.out_sizes(a.row_bytes()), ScalarType::Byte);
  Tensor scales = torch::stable::new_empty(job.x, job.out_sizes(a.row_scales()), ScalarType::Byte);
  a.codes = static_cast<uint8_t*>(codes.data_ptr());
  a.scales = static_cast<uint8_t*>(scales.data_ptr());
  if (a.k() == 0) return {codes, scales, global};
  if (job.stored)
    cpu::requantize(job.requantized(), torch_threads());
  else
    cpu::quantize({&a, 1}, torch_threads());
  return {codes, scales, global};
}

std::tuple<Tensor, Tensor, Tensor> quantize(const Tensor& x, Text spec, int64_t axis, optional<Tensor> rng, int64_t role,
                                            optional<Tensor> amax) {
  Job job(x, spec, axis, rng, role);
  if (amax) {
    STD_TORCH_CHECK(job.args.spec.outer != OuterKind::none, "amax is given, but this format has no outer scale");
    check_dtype("amax", *amax, ScalarType::Float);
    check_sizes("amax", *amax, job.global_sizes());
    amax = torch::stable::contiguous(*amax);
    check_amax(static_cast<const float*>(amax->data_ptr()), amax->numel());
  }
  auto r = run(job, amax);
  return {r.codes, r.scales, r.global};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> quantize_rowcol(const Tensor& x, Text row_spec, Text col_spec,
                                                                           optional<Tensor> row_rng, optional<Tensor> col_rng,
                                                                           int64_t role) {
  Job row(x, row_spec, -1, row_rng, role), col(x, col_spec, -2, col_rng, role);
  optional<Tensor> amax;
  if (row.same_amax(col)) {
    amax = row.new_global();
    row.measure(static_cast<float*>(amax->data_ptr()));
  }
  auto r = run(row, amax), c = run(col, amax);
  return {r.codes, r.scales, r.global, c.codes, c.scales, c.global};
}

std::tuple<Tensor, Tensor, Tensor> requantize(const Tensor& codes, const Tensor& scales, const Tensor& global_scale, Text format, int64_t k,
                                              Text spec, int64_t axis, optional<Tensor> rng, int64_t role) {
  const Stored input(codes, scales, global_scale, format, k);
  Job job(input, spec, axis, rng, role);
  auto r = run(job, {});
  return {r.codes, r.scales, r.global};
}

Tensor amax(const Tensor& x, Text spec, int64_t axis, optional<Tensor> rng) {
  Job job(x, spec, axis, rng, 0);
  STD_TORCH_CHECK(job.args.spec.outer != OuterKind::none, "amax: this format has no outer scale");
  Tensor out = job.new_global();
  job.measure(static_cast<float*>(out.data_ptr()));
  return out;
}

}  // namespace
}  // namespace fp4ext

STABLE_TORCH_LIBRARY_IMPL(fp4ext, CPU, m) {
  m.impl("quantize", FP4EXT_BOX(&fp4ext::quantize));
  m.impl("quantize_rowcol", FP4EXT_BOX(&fp4ext::quantize_rowcol));
  m.impl("requantize", FP4EXT_BOX(&fp4ext::requantize));
  m.impl("amax", FP4EXT_BOX(&fp4ext::amax));
}
