#include <algorithm>

#include "grouped.h"
#include "quantization.h"

// grouped_quantize and grouped_requantize on the CPU: each expert's matrix is a tensor of its own, with its own outer
// scale and its own padding; all are one piece of work.
//
//   x [T, K] and offsets, axis -1:  codes [T, ⌈K⌉],    global scale [T, 1]: an expert's value for each of its rows
//                         axis -2:  codes [K, ⌈T⌉],    global scale [E, 1, 1]: expert e's tokens in a span of the columns
//   x [E, N, K],          axis -1:  codes [E, N, ⌈K⌉], global scale [E, 1, 1]
//                         axis -2:  codes [E, K, ⌈N⌉], global scale [E, 1, 1]
namespace fp4ext {
namespace {

using std::optional;
using std::string;

struct Quantized {
  Tensor codes, scales, global;
};

class Grouped {
 public:
  // `input`: any tensor of the input's device; `stored`: where x is not plain.
  Grouped(const Tensor& input, Sizes sizes, cpu::QuantizeArgs common, const optional<Tensor>& offsets, const cpu::DequantizeArgs* stored)
      : input_(input), sizes_(std::move(sizes)), common_(common), stored_(stored), ragged_(sizes_.size() == 2) {
    STD_TORCH_CHECK(sizes_.size() == (offsets.has_value() ? 2u : 3u), "x has shape ", describe(sizes_),
                    "; accepted: [T, K] with offsets, or [E, N, K] without");
    if (ragged_) {
      bounds_ = check_offsets(*offsets, sizes_[0], "rows of x");
    } else {
      for (int64_t e = 0; e <= sizes_[0]; ++e) bounds_.push_back(e * sizes_[1]);
    }
    if (common_.spec.outer == OuterKind::expert) common_.spec.outer = OuterKind::tensor;  // each expert is a tensor
    common_.batch = 1, common_.cols = sizes_.back();
  }

  Quantized run() {
    allocate();
    std::vector<cpu::QuantizeArgs> tensors;
    for (int64_t e = 0; e < experts(); ++e) tensors.push_back(expert(e));
    set_outer(tensors);
    if (stored_)
      cpu::requantize(requantized(tensors), torch_threads());
    else
      cpu::quantize(tensors, torch_threads());
    return out_;
  }

 private:
  int64_t experts() const { return static_cast<int64_t>(bounds_.size()) - 1; }
  bool colwise() const { return common_.colwise; }
  bool packed() const { return common_.spec.packed(); }

  void allocate() {
    const int64_t block = common_.spec.block(), k = sizes_.back();
    Sizes s = sizes_;  // of the codes, in elements
    if (!colwise()) {
      s.back() = (k + block - 1) / block * block;
    } else if (ragged_) {
      s = {k, padded_capacity(sizes_[0], experts(), block)};
      starts_ = padded_bounds(bounds_, block);
      common_.pitch = s.back();
    } else {
      s = {sizes_[0], k, (sizes_[1] + block - 1) / block * block};
    }
    rows_ = product(s, 0, s.size() - 1), row_ = s.back();
    s.back() = row_ / (packed() ? 2 : 1);
    out_.codes = torch::stable::new_empty(input_, s, ScalarType::Byte);
    s.back() = row_ / block;
    out_.scales = torch::stable::new_empty(input_, s, ScalarType::Byte);
    if (ragged_) clear_rest();
  }

  // What belongs to no expert is zero: rows past the last one, or tokens past the last padded one.
  void clear_rest() {
    const int64_t first_row = colwise() ? 0 : bounds_.back(), first = colwise() ? starts_.back() : 0;
    const auto clear = [&](const Tensor& t, int64_t elements) {  // a byte of t holds so many
      auto* p = static_cast<uint8_t*>(t.data_ptr());
      for (int64_t r = first_row; r < rows_; ++r) std::fill(p + (r * row_ + first) / elements, p + (r + 1) * row_ / elements, 0);
    };
    clear(out_.codes, packed() ? 2 : 1);
    clear(out_.scales, common_.spec.block());
  }

  // Random bits hang on the row in x, or, column-wise, on the row of a stack of the experts' outputs.
  cpu::QuantizeArgs expert(int64_t e) const {
    cpu::QuantizeArgs a = common_;
    a.rows = bounds_[e + 1] - bounds_[e];
    if (a.x) a.x = static_cast<const uint8_t*>(a.x) + bounds_[e] * a.cols * (a.dtype == cpu::Dtype::fp32 ? 4 : 2);
    const int64_t row = colwise() ? e * a.cols : bounds_[e];
    a.rng.row += static_cast<uint32_t>(row);
    const int64_t at = colwise() && ragged_ ? starts_[e] : row * row_;  // in elements
    a.codes = static_cast<uint8_t*>(out_.codes.data_ptr()) + at / (packed() ? 2 : 1);
    a.scales = static_cast<uint8_t*>(out_.scales.data_ptr()) + at / a.spec.block();
    return a;
  }

  std::vector<cpu::RequantizeArgs> requantized(const std::vector<cpu::QuantizeArgs>& tensors) const {
    std::vector<cpu::RequantizeArgs> r;
    for (int64_t e = 0; e < experts(); ++e) r.push_back({stored_, bounds_[e], tensors[e]});
    return r;
  }

  void set_outer(std::vector<cpu::QuantizeArgs>& tensors) {
    const bool by_row = common_.spec.outer == OuterKind::row, one_a_row = ragged_ && !colwise();
    if (common_.spec.outer == OuterKind::none) {
      out_.global = torch::stable::new_empty(input_, {0}, ScalarType::Float);
      return;
    }
    int64_t groups = 0;
    for (const auto& a : tensors) groups += a.num_groups();
    std::vector<float> amax(groups, 0.0f), global(groups);
    if (stored_)
      cpu::requantize_amax(requantized(tensors), amax.data(), torch_threads());
    else
      cpu::amax(tensors, amax.data(), torch_threads());
    outer_ = OuterScales(common_.spec, amax.data(), groups, global.data());
    int64_t first = 0;
    for (auto& a : tensors) {
      a.outer_enc = outer_.enc.data() + first, a.outer_dec = outer_.dec.data() + first;
      first += a.num_groups();
    }
    const Sizes s = one_a_row ? Sizes{sizes_[0], 1} : Sizes{experts(), by_row ? (colwise() ? sizes_.back() : sizes_[1]) : 1, 1};
    out_.global = torch::stable::new_empty(input_, s, ScalarType::Float);
    auto* g = static_cast<float*>(out_.global.data_ptr());
    if (one_a_row && !by_row) {
      for (int64_t e = 0; e < experts(); ++e) std::fill(g + bounds_[e], g + bounds_[e + 1], global[e]);
    } else {
      std::copy(global.begin(), global.end(), g);
    }
    if (one_a_row) std::fill(g + bounds_.back(), g + sizes_[0], 1.0f);
  }

  Tensor input_;
  Sizes sizes_;
  cpu::QuantizeArgs common_;
  const cpu::DequantizeArgs* stored_;
  bool ragged_;
  Bounds bounds_;       // rows of the experts
  Bounds starts_;       // column-wise: where their tokens begin
  int64_t rows_, row_;  // of the codes; elements of a row
  OuterScales outer_;
  Quantized out_;
};

std::tuple<Tensor, Tensor, Tensor> grouped_quantize(const Tensor& x, optional<Tensor> offsets, Text spec, int64_t axis,
                                                    optional<Tensor> rng, int64_t role) {
  cpu::QuantizeArgs args = check_quantization(x, check_float("x", x), spec, axis, rng, role);
  const Tensor dense = torch::stable::contiguous(x);
  args.x = dense.data_ptr();
  auto r = Grouped(dense, sizes_of(x), args, offsets, nullptr).run();
  return {r.codes, r.scales, r.global};
}

std::tuple<Tensor, Tensor, Tensor> grouped_requantize(const Tensor& codes, const Tensor& scales, const Tensor& global_scale, Text format,
                                                      int64_t k, optional<Tensor> offsets, Text spec, int64_t axis, optional<Tensor> rng,
                                                      int64_t role) {
  const Stored input(codes, scales, global_scale, format, k);
  const cpu::QuantizeArgs args = check_quantization(codes, cpu::Dtype::fp32, spec, axis, rng, role);
  auto r = Grouped(input.codes, input.sizes, args, offsets, &input.args).run();
  return {r.codes, r.scales, r.global};
}

}  // namespace
}  // namespace fp4ext

STABLE_TORCH_LIBRARY_IMPL(fp4ext, CPU, m) {
  m.impl("grouped_quantize", FP4EXT_BOX(&fp4ext::grouped_quantize));
  m.impl("grouped_requantize", FP4EXT_BOX(&fp4ext::grouped_requantize));
}
