#include "../cpu/gemm.h"

#include <torch/csrc/stable/library.h>

#include "checks.h"
#include "parse.h"

// gemm on the CPU: check, allocate, run.
namespace fp4ext {
namespace {

using cpu::Elem;
using cpu::ScaleElem;

struct Format {
  Elem elem;
  ScaleElem scale;
  int block;  // 0: plain
  ScalarType codes, scales;
};

// The format of one operand, from its string.
Format operand_format(const char* name, const std::string& format) {
  static constexpr Choice<Format> kFormats[] = {{"nvfp4", {Elem::e2m1, ScaleElem::e4m3, 16, ScalarType::Byte, ScalarType::Byte}},
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
};

// `side` is x or w; messages name x_codes, x_scales, x_global.
Input check_input(const std::string& side, const Tensor& codes, const std::optional<Tensor>& scales, const std::optional<Tensor>& global,
                  const std::string& format) {
  const Format f = operand_format((side + "_format").c_str(), format);
  const std::string codes_name = side + "_codes", scales_name = side + "_scales", global_name = side + "_global";
  check_dtype(codes_name.c_str(), codes, f.codes);
  const bool matrix = side == "w";
  STD_TORCH_CHECK(matrix ? codes.dim() == 2 : codes.dim() >= 1, codes_name, " has shape ", describe(sizes_of(codes)),
                  "; accepted: ", matrix ? "[N, K]" : "[.., K]", f.elem == Elem::e2m1 ? ", two codes a byte" : "");
  Sizes sizes = sizes_of(codes);
  Input in;
  cpu::Operand& o = in.operand;
  o.elem = f.elem;
  o.scale = f.scale;
  o.block = f.block;
  o.rows = product(sizes, 0, sizes.size() - 1);
  o.k_stored = sizes.back() * (f.elem == Elem::e2m1 ? 2 : 1);

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
    const int64_t n = global->numel();
    STD_TORCH_CHECK(n == 1 || n == o.rows, global_name, " has shape ", describe(sizes_of(*global)),
                    "; accepted: one value, or [.., 1] with one a row of ", o.rows);
    in.global = torch::stable::contiguous(*global);
    o.global = static_cast<const float*>(in.global->data_ptr());
    o.global_stride = n == 1 ? 0 : 1;
  }
  in.codes = torch::stable::contiguous(codes);
  o.codes = in.codes.data_ptr();
  return in;
}

// How far the operands are contracted. Each stores K rounded up to its block, so that the shorter holds all of K;
// lengths that no one K could have given are refused. (Python compares the logical K, which it knows.)
int64_t contraction(const cpu::Operand& x, const cpu::Operand& w) {
  const int64_t x_least = x.block ? x.k_stored - x.block + 1 : x.k_stored, w_least = w.block ? w.k_stored - w.block + 1 : w.k_stored;
  STD_TORCH_CHECK(x_least <= w.k_stored && w_least <= x.k_stored, "x_codes stores ", x.k_stored, " elements a row and w_codes ", w.k_stored,
                  "; accepted: both the same K, each padded to its block");
  return std::min(x.k_stored, w.k_stored);
}

Tensor gemm(const Tensor& x_codes, std::optional<Tensor> x_scales, std::optional<Tensor> x_global, std::string x_format,
            const Tensor& w_codes, std::optional<Tensor> w_scales, std::optional<Tensor> w_global, std::string w_format,
            std::optional<Tensor> bias, std::string out_dtype, std::string accumulate, std::string backend) {
  const Input x = check_input("x", x_codes, x_scales, x_global, x_format);
  const Input w = check_input("w", w_codes, w_scales, w_global, w_format);
  const int64_t k = contraction(x.operand, w.operand), n = w.operand.rows;
  static constexpr Choice<bool> kDtypes[] = {{"bfloat16", true}, {"float32", false}};
  const bool y_bf16 = choose("out_dtype", out_dtype, kDtypes);
  // The CPU has one order of summation, the law's, and one backend.
  static constexpr Choice<bool> kAccumulate[] = {{"invariant", true}, {"fast", true}};
  static constexpr Choice<bool> kBackends[] = {{"auto", true}, {"cpu", true}};
  choose("accumulate", accumulate, kAccumulate);
  choose("backend", backend, kBackends);

  std::optional<Tensor> bias_fp32;
  if (bias.has_value()) {
    check_float("bias", *bias);
    check_sizes("bias", *bias, {n});
    bias_fp32 = torch::stable::contiguous(torch::stable::to(*bias, ScalarType::Float));
  }
  Sizes sizes = sizes_of(x_codes);
  sizes.back() = n;
  Tensor y = torch::stable::new_empty(x_codes, sizes, y_bf16 ? ScalarType::BFloat16 : ScalarType::Float);
  cpu::gemm(x.operand, w.operand, k, bias_fp32 ? static_cast<const float*>(bias_fp32->data_ptr()) : nullptr, y.data_ptr(), y_bf16,
            torch_threads());
  return y;
}

}  // namespace
}  // namespace fp4ext

STABLE_TORCH_LIBRARY_IMPL(fp4ext, CPU, m) { m.impl("gemm", TORCH_BOX(&fp4ext::gemm)); }
