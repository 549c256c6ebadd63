#pragma once
#include "grouped.h"
#include "parse.h"

// What a quantization does, on every device: its checked arguments, the shapes of its results, and the groups that share
// an outer scale.
//
//   x [.., rows, K],           axis -1: codes [.., rows, ⌈K⌉]    ⌈ ⌉: rounded up to whole blocks
//                              axis -2: codes [.., K, ⌈rows⌉]
//   experts' x [T, K],         axis -1: codes [T, ⌈K⌉]
//   by offsets [E]             axis -2: codes [K, padded_capacity], expert e's tokens in a span of the columns
namespace fp4ext {

// Each expert's matrix is a tensor of its own: the rows of x [T, K] between offsets [E], or, without offsets, the matrices
// of x [E, N, K].
struct Experts {
  std::optional<Tensor> offsets;
};

struct QuantizePlan {
  QuantizeSpec spec;  // of experts, `outer` is row or expert
  bool colwise;
  uint32_t role;
  Sizes sizes;  // of the input
  int64_t batch, rows, cols;
  int64_t experts = 0;  // of offsets; 0 without

  // on: a tensor of the input's device.
  QuantizePlan(const Tensor& on, Sizes input, const std::string& key, int64_t axis, const std::optional<Tensor>& rng, int64_t role_code,
               const std::optional<Experts>& of = {})
      : spec(parse_spec(key)), colwise(axis == -2), role(static_cast<uint32_t>(role_code)), sizes(std::move(input)) {
    STD_TORCH_CHECK(axis == -1 || axis == -2, "axis is ", axis,
                    "; accepted: -1 (along the last axis), -2 (the transpose, along its last axis)");
    STD_TORCH_CHECK(role_code >= 0 && role_code <= 2, "role is ", role_code, "; accepted: 0 (x), 1 (w), 2 (dy)");
    check_rng(rng, is_random(), on);
    const size_t dim = sizes.size(), least = colwise ? 2 : 1;
    if (of) {
      STD_TORCH_CHECK(dim == (of->offsets ? 2u : 3u), "x has shape ", describe(sizes),
                      "; accepted: [T, K] with offsets, or [E, N, K] without");
      if (of->offsets) {
        check_ends(*of->offsets);
        experts = of->offsets->numel();
      }
      if (spec.outer == OuterKind::tensor) spec.outer = OuterKind::expert;
    }
    STD_TORCH_CHECK(dim >= least, "x has ", dim, " dimensions; accepted: at least ", least, " with axis=", axis);
    STD_TORCH_CHECK(spec.outer != OuterKind::expert || dim == 3 || of, "x has ", dim,
                    " dimensions; accepted with outer='expert': 3, [experts, rows, K]");
    batch = dim > 2 ? product(sizes, 0, dim - 2) : 1;
    rows = dim > 1 ? sizes[dim - 2] : 1;
    cols = sizes[dim - 1];
  }

  bool is_random() const { return spec.rounding != Rounding::nearest || spec.rht; }
  bool along_rows() const { return experts && !colwise; }
  bool along_tokens() const { return experts && colwise; }  // the contraction holds one expert's tokens after the other's
  int64_t k() const { return colwise ? rows : cols; }
  int64_t out_rows() const { return colwise ? cols : rows; }
  int64_t padded_k() const {
    const int64_t block = spec.block();
    return along_tokens() ? padded_capacity(rows, experts, block) : (k() + block - 1) / block * block;
  }
  int64_t row_bytes() const { return padded_k() / (spec.packed() ? 2 : 1); }
  int64_t row_scales() const { return padded_k() / spec.block(); }

  int64_t num_groups() const {
    const int64_t matrices = experts ? experts : batch;
    if (spec.outer == OuterKind::row) return along_rows() ? rows : matrices * out_rows();
    return spec.outer == OuterKind::expert ? matrices : 1;
  }
  // The shape of the result, with `last` elements in the last axis.
  Sizes out_sizes(int64_t last) const {
    Sizes s = sizes;
    if (colwise) s[s.size() - 2] = out_rows();
    s.back() = last;
    return s;
  }
  // The shape of what each group has one of.
  Sizes group_sizes() const {
    switch (spec.outer) {
      case OuterKind::none: return {0};
      case OuterKind::row: return along_tokens() ? Sizes{experts, cols, 1} : out_sizes(1);
      case OuterKind::expert: return {num_groups(), 1, 1};
      default: return {};
    }
  }

  Tensor new_groups(const Tensor& on) const { return torch::stable::new_empty(on, group_sizes(), ScalarType::Float); }
  Tensor new_codes(const Tensor& on) const { return new_bytes(on, row_bytes()); }
  Tensor new_scales(const Tensor& on) const { return new_bytes(on, row_scales()); }

  // Whether the other direction of the same x has the same amaxes: it does where groups don't run along rows and nothing is rotated.
  bool same_amax(const QuantizePlan& other) const {
    const bool both_whole = spec.outer == OuterKind::tensor || spec.outer == OuterKind::expert;
    return !spec.rht && !other.spec.rht && spec.outer == other.spec.outer && both_whole;
  }
  // Whether one read of x can serve both.
  bool shares_the_read(const QuantizePlan& other) const {
    const QuantizeSpec &a = spec, &b = other.spec;
    return a.format == b.format && a.scale == b.scale && a.rounding == b.rounding && a.tile == b.tile && a.outer == b.outer &&
           a.pow2 == b.pow2;
  }

  // An amax that a caller measured, [.., 1] as group_sizes() has it.
  void check_amax(const Tensor& amax, const Tensor& on) const {
    STD_TORCH_CHECK(spec.outer != OuterKind::none, "amax is given, but this format has no outer scale");
    check_dtype("amax", amax, ScalarType::Float);
    check_sizes("amax", amax, group_sizes());
    check_same_device("amax", amax, on);
  }

 private:
  // What belongs to no expert is zero.
  Tensor new_bytes(const Tensor& on, int64_t last) const {
    return experts ? torch::stable::new_zeros(on, out_sizes(last), ScalarType::Byte)
                   : torch::stable::new_empty(on, out_sizes(last), ScalarType::Byte);
  }
};

}  // namespace fp4ext
