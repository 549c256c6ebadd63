#pragma once
#include "grouped.h"
#include "stored_cuda.h"

// One direction of one quantization on CUDA: check, allocate, and three launches, amax → outer_scales → quantize.
namespace fp4ext {

// The experts of an input: the runs of rows between offsets [E] of x [T, K]; or, without offsets, the matrices of x [E, N, K].
struct Experts {
  std::optional<Tensor> offsets;

  Experts(const std::optional<Tensor>& ends, const Sizes& sizes, const Tensor& on) {
    STD_TORCH_CHECK(sizes.size() == (ends.has_value() ? 2u : 3u), "x has shape ", describe(sizes),
                    "; accepted: [T, K] with offsets, or [E, N, K] without");
    if (!ends.has_value()) return;
    check_offsets_on_device(*ends, on);
    offsets = torch::stable::contiguous(*ends);
  }
};

struct Job {
  Sizes sizes;  // of the input
  cuda::Input in{};
  QuantizeSpec spec;
  uint32_t role;
  cuda::Copy copy{};
  Tensor on;                            // a tensor of the device
  std::optional<Tensor> rng, offsets;   // contiguous
  std::optional<Tensor> codes, scales;  // the results
  Tensor global, enc, dec;

  Job(const Tensor& x, const std::string& key, int64_t axis, const std::optional<Tensor>& rng, int64_t role,
      const std::optional<Experts>& experts = {})
      : Job(x, sizes_of(x), key, axis, rng, role, experts) {
    on = torch::stable::contiguous(x);
    in.x = on.data_ptr();
    in.dtype = cuda_dtype("x", x);
  }
  Job(const Stored& from, const std::string& key, int64_t axis, const std::optional<Tensor>& rng, int64_t role,
      const std::optional<Experts>& experts = {})
      : Job(from.codes, from.sizes, key, axis, rng, role, experts) {
    in.dtype = cuda::Dtype::stored;
    in.stored = stored_for_kernels(from);
  }
  Job(const Tensor& device, Sizes input_sizes, const std::string& key, int64_t axis, const std::optional<Tensor>& random, int64_t role,
      const std::optional<Experts>& experts)
      : sizes(std::move(input_sizes)), spec(parse_spec(key)), role(static_cast<uint32_t>(role)), on(device) {
    STD_TORCH_CHECK(axis == -1 || axis == -2, "axis is ", axis,
                    "; accepted: -1 (along the last axis), -2 (the transpose, along its last axis)");
    const size_t dim = sizes.size(), least = axis == -2 ? 2 : 1;
    STD_TORCH_CHECK(dim >= least, "x has ", dim, " dimensions; accepted: at least ", least, " with axis=", axis);
    STD_TORCH_CHECK(spec.outer != OuterKind::expert || dim == 3 || experts, "x has ", dim,
                    " dimensions; accepted with outer='expert': 3, [experts, rows, K]");
    STD_TORCH_CHECK(role >= 0 && role <= 2, "role is ", role, "; accepted: 0 (x), 1 (w), 2 (dy)");
    in.batch = dim > 2 ? product(sizes, 0, dim - 2) : 1;
    in.rows = dim > 1 ? sizes[dim - 2] : 1;
    in.cols = sizes[dim - 1];
    copy.colwise = axis == -2;
    copy.outer = spec.outer;
    if (experts) take(*experts);
    copy.rht = cuda::rht_n(spec, along_tokens() ? 0 : k());  // there each expert has its own
    copy.stages = spec.rht_stages;
    const bool needed = spec.rounding != Rounding::nearest || spec.rht;
    check_rng(random, needed, on);
    if (needed) set_rng(*random);
  }

  void take(const Experts& experts) {
    if (spec.outer == OuterKind::tensor || spec.outer == OuterKind::pow2) copy.outer = OuterKind::expert;  // each is a tensor
    if (!experts.offsets) return;
    offsets = experts.offsets;
    in.offsets = static_cast<const int32_t*>(offsets->data_ptr());
    in.experts = static_cast<int>(offsets->numel());
    if (copy.colwise) copy.pitch = padded_capacity(in.rows, in.experts, spec.block());
  }

  // What it holds stays on the device: a shard's k that does not begin a block is not seen.
  void set_rng(const Tensor& random) {
    rng = torch::stable::contiguous(random);
    copy.rng = static_cast<const int64_t*>(rng->data_ptr());
    copy.sharded = random.size(0) == 4;
  }

  bool along_tokens() const { return offsets && copy.colwise; }  // the contraction holds one expert's tokens after the other's
  bool along_rows() const { return offsets && !copy.colwise; }
  int64_t k() const { return copy.colwise ? in.rows : in.cols; }
  int64_t out_rows() const { return copy.colwise ? in.cols : in.rows; }
  int64_t padded_k() const { return along_tokens() ? copy.pitch : (k() + spec.block() - 1) / spec.block() * spec.block(); }

  int64_t num_groups() const {
    const int64_t matrices = offsets ? in.experts : in.batch;
    if (copy.outer == OuterKind::row) return along_rows() ? in.rows : matrices * out_rows();
    return copy.outer == OuterKind::expert ? matrices : 1;
  }
  // The shape of the result, with `last` elements in the last axis.
  Sizes out_sizes(int64_t last) const {
    Sizes s = sizes;
    if (copy.colwise) s[s.size() - 2] = out_rows();
    s.back() = last;
    return s;
  }
  // The shape of what each outer group has one of.
  Sizes group_sizes() const {
    switch (copy.outer) {
      case OuterKind::none: return {0};
      case OuterKind::row: return along_tokens() ? Sizes{in.experts, in.cols, 1} : out_sizes(1);
      case OuterKind::expert: return {num_groups(), 1, 1};
      default: return {};
    }
  }
  Tensor new_groups() const { return torch::stable::new_empty(on, group_sizes(), ScalarType::Float); }

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
    Tensor amax = new_groups();
    check_launch("amax", cuda::amax(in, copy, static_cast<float*>(amax.data_ptr()), num_groups(), device.stream()));
    return amax;
  }

  // Allocates the results and, from the amaxes, the outer scales.
  void prepare(const OnDevice& device, const std::optional<Tensor>& given) {
    const auto bytes = [&](int64_t last) {  // what belongs to no expert is zero
      return offsets ? torch::stable::new_zeros(on, out_sizes(last), ScalarType::Byte)
                     : torch::stable::new_empty(on, out_sizes(last), ScalarType::Byte);
    };
    codes = bytes(padded_k() / (spec.packed() ? 2 : 1));
    scales = bytes(padded_k() / spec.block());
    copy.codes = static_cast<uint8_t*>(codes->data_ptr());
    copy.scales = static_cast<uint8_t*>(scales->data_ptr());
    global = new_groups();
    if (spec.outer == OuterKind::none) return;
    const Tensor amax = given ? *given : measure(device);
    enc = new_groups(), dec = new_groups();
    auto *e = static_cast<float*>(enc.data_ptr()), *d = static_cast<float*>(dec.data_ptr());
    const cuda::OuterArgs args{
        static_cast<const float*>(amax.data_ptr()), num_groups(), spec.scale, is_eden(spec.rounding), spec.outer == OuterKind::pow2, e, d,
        static_cast<float*>(global.data_ptr())};
    check_launch("outer_scales", cuda::outer_scales(args, device.stream()));
    copy.outer_enc = e, copy.outer_dec = d;
    if (along_rows()) spread(device);
  }
  // A row of x has its expert's global scale.
  void spread(const OnDevice& device) {
    Tensor of_rows = torch::stable::new_empty(on, {in.rows, 1}, ScalarType::Float);
    const auto* of_group = static_cast<const float*>(global.data_ptr());
    check_launch("global_of_rows", cuda::global_of_rows(of_group, copy.outer == OuterKind::row, in.offsets, in.experts, in.rows,
                                                        static_cast<float*>(of_rows.data_ptr()), device.stream()));
    global = of_rows;
  }
  void run(const OnDevice& device, const Job* other = nullptr) const {
    cuda::QuantizeArgs args{in, spec, role, {}};
    args.copies[copy.colwise] = copy;
    if (other) args.copies[other->copy.colwise] = other->copy;
    check_launch("quantize", cuda::quantize(args, device.stream()));
  }
};

}  // namespace fp4ext
