#pragma once
#include <string>

#include <torch/headeronly/util/Exception.h>

#include "../numerics/spec.h"

// From the strings that cross a schema to the enums of C++. Python's Spec (fp4ext/policy/spec.py) has refused what the
// numerics contract refuses; these checks are for callers of torch.ops.fp4ext.
namespace fp4ext {

template <class T>
struct Choice {
  const char* name;
  T value;
};

template <class T, size_t N>
T choose(const char* what, const std::string& name, const Choice<T> (&choices)[N]) {
  std::string accepted;
  for (const auto& c : choices) {
    if (name == c.name) return c.value;
    accepted += (accepted.empty() ? "" : ", ") + std::string(c.name);
  }
  STD_TORCH_CHECK(false, "unknown ", what, " '", name, "'; accepted: ", accepted);
}

inline FormatId parse_format(const std::string& name) {
  static constexpr Choice<FormatId> kFormats[] = {
      {"nvfp4", FormatId::nvfp4}, {"mxfp8", FormatId::mxfp8}, {"mxfp8_e5m2", FormatId::mxfp8_e5m2}, {"mxfp4", FormatId::mxfp4}};
  return choose("format", name, kFormats);
}

// Which elements share an outer scale, and whether it is a power of two.
struct OuterRule {
  OuterKind groups;
  bool pow2;
};

inline QuantizeSpec parse_spec(const std::string& key) {
  static constexpr Choice<ScaleRule> kScales[] = {{"amax", ScaleRule::amax},
                                                  {"four_over_six", ScaleRule::four_over_six},
                                                  {"four_over_six_mae", ScaleRule::four_over_six_mae},
                                                  {"four_over_six_absmax", ScaleRule::four_over_six_absmax},
                                                  {"sweep", ScaleRule::sweep},
                                                  {"minvar", ScaleRule::minvar},
                                                  {"ceil", ScaleRule::ceil},
                                                  {"floor", ScaleRule::floor}};
  static constexpr Choice<Rounding> kRoundings[] = {
      {"nearest", Rounding::nearest}, {"stochastic", Rounding::stochastic}, {"eden", Rounding::eden}, {"eden_block", Rounding::eden_block}};
  static constexpr Choice<bool> kBlocks[] = {{"1x16", false}, {"16x16", true}, {"1x32", false}};
  static constexpr Choice<OuterRule> kOuters[] = {{"tensor", {OuterKind::tensor, false}}, {"pow2", {OuterKind::tensor, true}},
                                                  {"row", {OuterKind::row, false}},       {"row_pow2", {OuterKind::row, true}},
                                                  {"expert", {OuterKind::expert, false}}, {"expert_pow2", {OuterKind::expert, true}},
                                                  {"none", {OuterKind::none, false}}};
  static constexpr Choice<int> kRhts[] = {{"none", 0},  {"16", 16},   {"32", 32},   {"64", 64},    {"128", 128},
                                          {"16x2", 16}, {"32x2", 32}, {"64x2", 64}, {"128x2", 128}};
  std::string part[6];
  size_t begin = 0;
  for (int i = 0; i < 6; ++i) {
    const size_t end = key.find('/', begin);
    STD_TORCH_CHECK((end == std::string::npos) == (i == 5), "a spec has six parts, format/scale/rounding/block/outer/rht; got '", key, "'");
    part[i] = key.substr(begin, end - begin);
    begin = end + 1;
  }
  QuantizeSpec s;
  s.format = parse_format(part[0]);
  s.scale = choose("scale rule", part[1], kScales);
  s.rounding = choose("rounding", part[2], kRoundings);
  s.tile = choose("block", part[3], kBlocks);
  const OuterRule outer = choose("outer scale", part[4], kOuters);
  s.outer = outer.groups, s.pow2 = outer.pow2;
  s.rht = choose("rht", part[5], kRhts);
  s.rht_stages = part[5].find('x') == std::string::npos ? 1 : 2;

  const bool nvfp4 = s.format == FormatId::nvfp4, power_rule = s.scale == ScaleRule::ceil || s.scale == ScaleRule::floor;
  STD_TORCH_CHECK(nvfp4 != power_rule && nvfp4 == (part[3] != "1x32") && nvfp4 == (s.outer != OuterKind::none), "spec '", key,
                  "': scale rule, block or outer scale does not belong to the format");
  if (s.rounding == Rounding::stochastic)
    STD_TORCH_CHECK(s.scale == ScaleRule::amax || s.scale == ScaleRule::minvar || s.scale == ScaleRule::ceil, "spec '", key,
                    "': stochastic rounding is biased with this scale rule; accepted: amax, minvar, ceil");
  if (s.rounding == Rounding::eden)
    STD_TORCH_CHECK(nvfp4 && s.rht && (s.scale == ScaleRule::amax || s.scale == ScaleRule::sweep), "spec '", key,
                    "': eden rounding needs nvfp4, an rht, and the scale rule amax or sweep");
  if (s.rounding == Rounding::eden_block)
    STD_TORCH_CHECK(nvfp4 && s.rht && s.scale == ScaleRule::amax, "spec '", key,
                    "': eden_block rounding needs nvfp4, an rht, and the scale rule amax");
  STD_TORCH_CHECK(!s.tile || (!is_eden(s.rounding) && !s.rht), "spec '", key, "': 16x16 blocks take neither eden rounding nor an rht");
  STD_TORCH_CHECK(!s.tile || s.outer != OuterKind::row, "spec '", key,
                  "': a 16x16 tile has one scale for 16 rows; accepted outer scales: tensor, pow2, expert, expert_pow2");
  return s;
}

}  // namespace fp4ext
