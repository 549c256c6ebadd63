#pragma once
#include <cmath>

#include "stored.h"

// What every op that quantizes asks of its arguments, and how it makes outer scales of amaxes.
namespace fp4ext {

// A checked one, on the host.
inline Rng read_rng(const std::optional<Tensor>& rng) {
  if (!rng) return {};
  const Tensor dense = torch::stable::contiguous(*rng);
  const auto* p = static_cast<const int64_t*>(dense.data_ptr());
  const bool shard = rng->size(0) == 4;
  for (int64_t i = 2; i < rng->size(0); ++i)
    STD_TORCH_CHECK(p[i] >= 0 && p[i] < int64_t{1} << 32, "rng has ", i == 2 ? "row " : "k ", p[i], "; accepted: from 0 to 2^32 - 1");
  return {{static_cast<uint32_t>(p[0]), static_cast<uint32_t>(static_cast<uint64_t>(p[0]) >> 32)},
          static_cast<uint32_t>(p[1]),
          shard ? static_cast<uint32_t>(p[2]) : 0,
          shard ? static_cast<uint32_t>(p[3]) : 0};
}

// Random bits are drawn for blocks and for vectors of the RHT, so that a shard has to begin where one of them does.
inline void check_shard(const Rng& rng, int64_t unit) {
  STD_TORCH_CHECK(rng.k % unit == 0, "rng has k ", rng.k, "; accepted: a multiple of ", unit, ", the length of a block or of the RHT");
}

// What a quantization says of itself; the sizes are not filled in. on: a tensor of its device.
inline cpu::QuantizeArgs check_quantization(const Tensor& on, cpu::Dtype dtype, const std::string& key, int64_t axis,
                                            const std::optional<Tensor>& rng, int64_t role) {
  cpu::QuantizeArgs args{};
  args.dtype = dtype;
  args.spec = parse_spec(key);
  STD_TORCH_CHECK(axis == -1 || axis == -2, "axis is ", axis,
                  "; accepted: -1 (along the last axis), -2 (the transpose, along its last axis)");
  STD_TORCH_CHECK(role >= 0 && role <= 2, "role is ", role, "; accepted: 0 (x), 1 (w), 2 (dy)");
  check_rng(rng, args.spec.rounding != Rounding::nearest || args.spec.rht, on);
  args.rng = read_rng(rng);
  args.colwise = axis == -2;
  args.role = static_cast<uint32_t>(role);
  check_shard(args.rng, args.spec.block());
  return args;
}

// An amax that the caller measured, of n groups.
inline void check_amax(const float* amax, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    STD_TORCH_CHECK(amax[i] >= 0 && std::isfinite(amax[i]), "amax holds ", amax[i], "; accepted: finite numbers from 0 on");
}

// Both sides of the outer scale of each of n groups; the decode side is also written to `global`, as users see it.
struct OuterScales {
  std::vector<float> enc, dec;

  OuterScales() = default;
  OuterScales(const QuantizeSpec& spec, const float* amax, int64_t n, float* global) : enc(n), dec(n) {
    const bool eden = is_eden(spec.rounding), pow2 = spec.outer == OuterKind::pow2;
    for (int64_t i = 0; i < n; ++i) {
      const auto outer =
          eden && spec.scale == ScaleRule::amax ? eden_outer_scale(amax[i], pow2) : outer_scale(amax[i], outer_target(spec.scale), pow2);
      enc[i] = outer.enc, dec[i] = outer.dec;
      global[i] = outer.dec * (eden ? eden_gain(spec.scale) : 1.0f);
    }
  }
};

}  // namespace fp4ext
