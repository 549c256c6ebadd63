#include <torch/csrc/stable/library.h>

#include "stored_cuda.h"

// quantize, quantize_rowcol, requantize and amax on CUDA: check, allocate, and three launches, amax → outer_scales →
// quantize. Both directions of quantize_rowcol come from one read of x where their specs differ by no more than the RHT.
namespace fp4ext {
namespace {

using std::optional;
using std::string;

// One direction of one quantization.
struct Job {
  Sizes sizes;  // of the input
  kernels::Input in{};
  QuantizeSpec spec;
  uint32_t role;
  kernels::Copy copy{};
  Tensor on;                       // a tensor of the device
  optional<Tensor> rng;            // contiguous
  optional<Tensor> codes, scales;  // the results
  Tensor global, enc, dec;

  Job(const Tensor& x, const string& key, int64_t axis, const optional<Tensor>& rng, int64_t role)
      : Job(x, sizes_of(x), key, axis, rng, role) {
    on = torch::stable::contiguous(x);
    in.x = on.data_ptr();
    in.dtype = cuda_dtype("x", x);
  }
  Job(const Stored& from, const string& key, int64_t axis, const optional<Tensor>& rng, int64_t role)
      : Job(from.codes, from.sizes, key, axis, rng, role) {
    in.dtype = kernels::Dtype::stored;
    in.stored = stored_for_kernels(from);
  }
  Job(const Tensor& device, Sizes input_sizes, const string& key, int64_t axis, const optional<Tensor>& random, int64_t role)
      : sizes(std::move(input_sizes)), spec(parse_spec(key)), role(static_cast<uint32_t>(role)), on(device) {
    STD_TORCH_CHECK(axis == -1 || axis == -2, "axis is ", axis,
                    "; accepted: -1 (along the last axis), -2 (the transpose, along its last axis)");
    const size_t dim = sizes.size(), least = axis == -2 ? 2 : 1;
    STD_TORCH_CHECK(dim >= least, "x has ", dim, " dimensions; accepted: at least ", least, " with axis=", axis);
    STD_TORCH_CHECK(spec.outer != OuterKind::expert || dim == 3, "x has ", dim,
                    " dimensions; accepted with outer='expert': 3, [experts, rows, K]");
    STD_TORCH_CHECK(role >= 0 && role <= 2, "role is ", role, "; accepted: 0 (x), 1 (w), 2 (dy)");
    in.batch = dim > 2 ? product(sizes, 0, dim - 2) : 1;
    in.rows = dim > 1 ? sizes[dim - 2] : 1;
    in.cols = sizes[dim - 1];
    copy.colwise = axis == -2;
    copy.outer = spec.outer;
    copy.rht = kernels::rht_n(spec, k());
    copy.stages = spec.rht_stages;
    if (spec.rounding != Rounding::nearest || spec.rht) set_rng(random);
  }

  void set_rng(const optional<Tensor>& random) {
    STD_TORCH_CHECK(random.has_value(), "rng is missing: this spec rounds or rotates at random; accepted: an int64 tensor {seed, offset}");
    check_dtype("rng", *random, ScalarType::Long);
    STD_TORCH_CHECK(random->dim() == 1 && (random->size(0) == 2 || random->size(0) == 4), "rng has shape ", describe(sizes_of(*random)),
                    "; accepted: [2] {seed, offset} or [4] {seed, offset, row, k}");
    check_same_device("rng", *random, on);
    rng = torch::stable::contiguous(*random);
    copy.rng = static_cast<const int64_t*>(rng->data_ptr());
    copy.sharded = random->size(0) == 4;
  }

  int64_t k() const { return copy.colwise ? in.rows : in.cols; }
  int64_t out_rows() const { return copy.colwise ? in.cols : in.rows; }
  int64_t padded_k() const { return (k() + spec.block() - 1) / spec.block() * spec.block(); }
  int64_t num_groups() const {
    return spec.outer == OuterKind::row ? in.batch * out_rows() : spec.outer == OuterKind::expert ? in.batch : 1;
  }
  // The shape of the result, with `last` elements in the last axis.
  Sizes out_sizes(int64_t last) const {
    Sizes s = sizes;
    if (copy.colwise) s[s.size() - 2] = out_rows();
    s.back() = last;
    return s;
  }
  Sizes global_sizes() const {
    switch (spec.outer) {
      case OuterKind::none: return {0};
      case OuterKind::row: return out_sizes(1);
      case OuterKind::expert: return {sizes[0], 1, 1};
      default: return {};
    }
  }
  Tensor new_global() const { return torch::stable::new_empty(on, global_sizes(), ScalarType::Float); }

  // Whether the other direction of the same x has the same amaxes.
  bool same_amax(const Job& other) const {
    const auto whole = [](OuterKind k) { return k == OuterKind::tensor || k == OuterKind::pow2; };
    const OuterKind a = spec.outer, b = other.spec.outer;
    return !spec.rht && !other.spec.rht && ((whole(a) && whole(b)) || (a == OuterKind::expert && b == OuterKind::expert));
  }
  // Whether one read of x can serve both.
  bool shares_the_read(const Job& other) const {
    const QuantizeSpec &a = spec, &b = other.spec;
    return a.format == b.format && a.scale == b.scale && a.rounding == b.rounding && a.tile == b.tile && a.outer == b.outer;
  }

  Tensor measure(const OnDevice& device) const {
    Tensor amax = new_global();
    check_launch("amax", kernels::amax(in, copy, static_cast<float*>(amax.data_ptr()), num_groups(), device.stream()));
    return amax;
  }

  // Allocates the results and, from the amaxes, the outer scales.
  void prepare(const OnDevice& device, const optional<Tensor>& given) {
    codes = torch::stable::new_empty(on, out_sizes(padded_k() / (spec.packed() ? 2 : 1)), ScalarType::Byte);
    scales = torch::stable::new_empty(on, out_sizes(padded_k() / spec.block()), ScalarType::Byte);
    copy.codes = static_cast<uint8_t*>(codes->data_ptr());
    copy.scales = static_cast<uint8_t*>(scales->data_ptr());
    global = new_global();
    if (spec.outer == OuterKind::none) return;
    const Tensor amax = given ? *given : measure(device);
    enc = new_global(), dec = new_global();
    auto *e = static_cast<float*>(enc.data_ptr()), *d = static_cast<float*>(dec.data_ptr());
    const kernels::OuterArgs args{static_cast<const float*>(amax.data_ptr()),
                                  num_groups(),
                                  spec.scale,
                                  spec.rounding == Rounding::eden,
                                  spec.outer == OuterKind::pow2,
                                  e,
                                  d,
                                  static_cast<float*>(global.data_ptr())};
    check_launch("outer_scales", kernels::outer_scales(args, device.stream()));
    copy.outer_enc = e, copy.outer_dec = d;
  }
  void run(const OnDevice& device, const Job* other = nullptr) const {
    kernels::QuantizeArgs args{in, spec, role, {}};
    args.copies[copy.colwise] = copy;
    if (other) args.copies[other->copy.colwise] = other->copy;
    check_launch("quantize", kernels::quantize(args, device.stream()));
  }
};

std::tuple<Tensor, Tensor, Tensor> quantize(const Tensor& x, Text spec, int64_t axis, optional<Tensor> rng, int64_t role,
                                            optional<Tensor> amax) {
  Job job(x, spec, axis, rng, role);
  if (amax) {
    STD_TORCH_CHECK(job.spec.outer != OuterKind::none, "amax is given, but this format has no outer scale");
    check_dtype("amax", *amax, ScalarType::Float);
    check_sizes("amax", *amax, job.global_sizes());
    check_same_device("amax", *amax, x);
    amax = torch::stable::contiguous(*amax);
  }
  const OnDevice device(x);
  job.prepare(device, amax);
  job.run(device);
  return {*job.codes, *job.scales, job.global};
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
  const OnDevice device(codes);
  job.prepare(device, {});
  job.run(device);
  return {*job.codes, *job.scales, job.global};
}

Tensor amax(const Tensor& x, Text spec, int64_t axis, optional<Tensor> rng) {
  const Job job(x, spec, axis, rng, 0);
  STD_TORCH_CHECK(job.spec.outer != OuterKind::none, "amax: this format has no outer scale");
  return job.measure(OnDevice(x));
}

}  // namespace
}  // namespace fp4ext

STABLE_TORCH_LIBRARY_IMPL(FP4EXT_CUDA_LIBRARY, FP4EXT_CUDA_KEY, m) {
  m.impl("quantize", TORCH_BOX(&fp4ext::quantize));
  m.impl("quantize_rowcol", TORCH_BOX(&fp4ext::quantize_rowcol));
  m.impl("requantize", TORCH_BOX(&fp4ext::requantize));
  m.impl("amax", TORCH_BOX(&fp4ext::amax));
}
