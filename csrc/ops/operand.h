#pragma once
#include "../cpu/gemm.h"
#include "checks.h"
#include "parse.h"

// An operand of a GEMM as it crosses a schema: codes, scales, global scale and the name of a format; or a plain tensor.
namespace fp4ext {

struct OperandFormat {
  Elem elem;
  cpu::ScaleElem scale;
  int block;  // 0: plain
  ScalarType codes, scales;
};

// The format of one operand, from its string.
inline OperandFormat operand_format(const char* name, const std::string& format) {
  using cpu::ScaleElem;
  static constexpr Choice<OperandFormat> kFormats[] = {
      {"nvfp4", {Elem::e2m1, ScaleElem::e4m3, 16, ScalarType::Byte, ScalarType::Byte}},
      {"mxfp8", {Elem::e4m3, ScaleElem::e8m0, 32, ScalarType::Byte, ScalarType::Byte}},
      {"mxfp8_e5m2", {Elem::e5m2, ScaleElem::e8m0, 32, ScalarType::Byte, ScalarType::Byte}},
      {"mxfp4", {Elem::e2m1, ScaleElem::e8m0, 32, ScalarType::Byte, ScalarType::Byte}},
      {"bf16", {Elem::bf16, ScaleElem::none, 0, ScalarType::BFloat16, ScalarType::BFloat16}},
      {"fp16", {Elem::fp16, ScaleElem::none, 0, ScalarType::Half, ScalarType::Half}},
      {"fp32", {Elem::fp32, ScaleElem::none, 0, ScalarType::Float, ScalarType::Float}}};
  return choose(name, format, kFormats);
}

// One operand and the tensors that keep its memory.
struct Input {
  cpu::Operand operand{};
  Tensor codes;
  std::optional<Tensor> scales, global;
  int64_t globals = 0;  // values of the global scale
};

// `side` is x or w; messages name x_codes, x_scales, x_global. dims: what codes has, 0 for any; `shape` says so.
// `experts` of them, each with a global scale of its own, share the rows, or (`along_k`) each have all rows.
inline Input check_operand(const std::string& side, const Tensor& codes, const std::optional<Tensor>& scales,
                           const std::optional<Tensor>& global, const std::string& format, int64_t dims, const char* shape,
                           int64_t experts = 1, bool along_k = false) {
  const OperandFormat f = operand_format((side + "_format").c_str(), format);
  const std::string codes_name = side + "_codes", scales_name = side + "_scales", global_name = side + "_global";
  check_dtype(codes_name.c_str(), codes, f.codes);
  const bool packed = f.elem == Elem::e2m1;
  STD_TORCH_CHECK(dims ? codes.dim() == dims : codes.dim() >= 1, codes_name, " has shape ", describe(sizes_of(codes)),
                  "; accepted: ", shape, packed ? ", two codes a byte" : "");
  Sizes sizes = sizes_of(codes);
  Input in;
  cpu::Operand& o = in.operand;
  o.elem = f.elem;
  o.scale = f.scale;
  o.block = f.block;
  o.rows = product(sizes, 0, sizes.size() - 1);
  o.k_stored = o.pitch = sizes.back() * (packed ? 2 : 1);

  if (f.block) {
    STD_TORCH_CHECK(o.k_stored % f.block == 0, codes_name, " stores ", o.k_stored, " elements a row; accepted for ", format,
                    ": a multiple of ", f.block);
    STD_TORCH_CHECK(scales.has_value(), scales_name, " is None; accepted for ", format, ": ", name_of(f.scales), " [.., K/", f.block, "]");
    check_dtype(scales_name.c_str(), *scales, f.scales);
    sizes.back() = o.k_stored / f.block;
    check_sizes(scales_name.c_str(), *scales, sizes);
    in.scales = torch::stable::contiguous(*scales);
    o.scales = static_cast<const uint8_t*>(in.scales->data_ptr());
  } else {
    STD_TORCH_CHECK(!scales.has_value(), scales_name, " is a tensor; accepted for ", format, ": None");
  }
  // A format without an outer scale may still bring an empty tensor in its place.
  if (global.has_value() && global->numel() > 0) {
    check_dtype(global_name.c_str(), *global, ScalarType::Float);
    const int64_t n = global->numel(), all = along_k ? experts * o.rows : o.rows;
    STD_TORCH_CHECK(n == 1 || n == experts || n == all, global_name, " has shape ", describe(sizes_of(*global)), "; accepted: one value, ",
                    experts > 1 ? "one an expert, " : "", "or [.., 1] with one a row of ", all);
    in.global = torch::stable::contiguous(*global);
    o.global = static_cast<const float*>(in.global->data_ptr());
    o.global_stride = n == all && n != 1 ? 1 : 0;
    in.globals = n;
  }
  in.codes = torch::stable::contiguous(codes);
  o.codes = in.codes.data_ptr();
  return in;
}

// How far the operands are contracted. Each stores K rounded up to its block, so that the shorter holds all of K;
// lengths that no one K could have given are refused. (Python compares the logical K, which it knows.)
inline int64_t contraction(const cpu::Operand& x, const cpu::Operand& w) {
  const int64_t x_least = x.block ? x.k_stored - x.block + 1 : x.k_stored, w_least = w.block ? w.k_stored - w.block + 1 : w.k_stored;
  STD_TORCH_CHECK(x_least <= w.k_stored && w_least <= x.k_stored, "x_codes stores ", x.k_stored, " elements a row and w_codes ", w.k_stored,
                  "; accepted: both the same K, each padded to its block");
  return std::min(x.k_stored, w.k_stored);
}

inline bool is_bf16(const std::string& out_dtype) {
  static constexpr Choice<bool> kDtypes[] = {{"bfloat16", true}, {"float32", false}};
  return choose("out_dtype", out_dtype, kDtypes);
}

}  // namespace fp4ext
