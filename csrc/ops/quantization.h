#pragma once
#include "stored.h"

// What every op that quantizes asks of its arguments, and how it makes outer scales of amaxes.
namespace fp4ext {

inline Rng read_rng(const std::optional<Tensor>& rng, bool needed) {
  if (!rng) {
    STD_TORCH_CHECK(!needed, "rng is missing: this spec rounds or rotates at random; accepted: an int64 tensor {seed, offset}");
    return {};
  }
  check_dtype("rng", *rng, ScalarType::Long);
  STD_TORCH_CHECK(rng->dim() == 1 && (rng->size(0) == 2 || rng->size(0) == 4), "rng has shape ", describe(sizes_of(*rng)),
                  "; accepted: [2] {seed, offset} or [4] {seed, offset, row, k}");
  STD_TORCH_CHECK(rng->is_cpu(), "rng must be on the device of x, the CPU");
  const Tensor dense = torch::stable::contiguous(*rng);
  const auto* p = static_cast<const int64_t*>(dense.data_ptr());
  const bool shard = rng->size(0) == 4;
  return {{static_cast<uint32_t>(p[0]), static_cast<uint32_t>(static_cast<uint64_t>(p[0]) >> 32)},
          static_cast<uint32_t>(p[1]),
          shard ? static_cast<uint32_t>(p[2]) : 0,
          shard ? static_cast<uint32_t>(p[3]) : 0};
}

// What a quantization says of itself; the sizes are not filled in.
inline cpu::QuantizeArgs check_quantization(cpu::Dtype dtype, const std::string& key, int64_t axis, const std::optional<Tensor>& rng,
                                            int64_t role) {
  cpu::QuantizeArgs args{};
  args.dtype = dtype;
  args.spec = parse_spec(key);
  STD_TORCH_CHECK(axis == -1 || axis == -2, "axis is ", axis,
                  "; accepted: -1 (along the last axis), -2 (the transpose, along its last axis)");
  STD_TORCH_CHECK(role >= 0 && role <= 2, "role is ", role, "; accepted: 0 (x), 1 (w), 2 (dy)");
  args.rng = read_rng(rng, args.spec.rounding != Rounding::nearest || args.spec.rht);
  args.colwise = axis == -2;
  args.role = static_cast<uint32_t>(role);
  return args;
}

// Both sides of the outer scale of each of n groups; the decode side is also written to `global`, as users see it.
struct OuterScales {
  std::vector<float> enc, dec;

  OuterScales() = default;
  OuterScales(const QuantizeSpec& spec, const float* amax, int64_t n, float* global) : enc(n), dec(n) {
    const bool eden = spec.rounding == Rounding::eden, pow2 = spec.outer == OuterKind::pow2;
    for (int64_t i = 0; i < n; ++i) {
      const auto outer =
          eden && spec.scale == ScaleRule::amax ? eden_outer_scale(amax[i], pow2) : outer_scale(amax[i], outer_target(spec.scale), pow2);
      enc[i] = outer.enc, dec[i] = outer.dec;
      global[i] = outer.dec * (eden ? eden_gain(spec.scale) : 1.0f);
    }
  }
};

}  // namespace fp4ext
