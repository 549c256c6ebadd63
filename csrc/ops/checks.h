#pragma once
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "../cpu/quantize.h"
#include "text.h"

// What every op asks of its arguments: a refusal names the argument, what it is, and what would be accepted.
namespace fp4ext {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Sizes = std::vector<int64_t>;

inline Sizes sizes_of(const Tensor& t) {
  const auto s = t.sizes();
  return Sizes(s.begin(), s.end());
}

inline std::string describe(const Sizes& sizes) {
  std::string s = "[";
  for (size_t i = 0; i < sizes.size(); ++i) s += (i ? ", " : "") + std::to_string(sizes[i]);
  return s + "]";
}

inline int64_t product(const Sizes& sizes, size_t begin, size_t end) {
  int64_t p = 1;
  for (size_t i = begin; i < end; ++i) p *= sizes[i];
  return p;
}

inline const char* name_of(ScalarType t) {
  switch (t) {
    case ScalarType::Float: return "float32";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Double: return "float64";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Bool: return "bool";
    case ScalarType::Float8_e4m3fn: return "float8_e4m3fn";
    case ScalarType::Float8_e5m2: return "float8_e5m2";
    case ScalarType::Float8_e8m0fnu: return "float8_e8m0fnu";
    default: return "another dtype";
  }
}

inline cpu::Dtype check_float(const char* name, const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return cpu::Dtype::fp32;
    case ScalarType::BFloat16: return cpu::Dtype::bf16;
    case ScalarType::Half: return cpu::Dtype::fp16;
    default:
      STD_TORCH_CHECK(false, name, " is ", name_of(t.scalar_type()), "; accepted: float32, bfloat16, float16",
                      t.scalar_type() == ScalarType::Double ? " (rounding float64 twice is not rounding it once)" : "");
  }
}

inline void check_dtype(const char* name, const Tensor& t, ScalarType wanted) {
  STD_TORCH_CHECK(t.scalar_type() == wanted, name, " is ", name_of(t.scalar_type()), "; accepted: ", name_of(wanted));
}

// Codes and scales are bytes to an op; fp4ext/ops.py views them as torch's 8-bit float types, which few torch functions
// know.
inline void check_bytes(const char* name, const Tensor& t) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Byte, name, " is ", name_of(t.scalar_type()),
                  "; accepted: uint8 (the bytes of an 8-bit float: x.view(torch.uint8))");
}

// Block scales, linear; of experts, whose rows stand one after the other, they are one matrix.
inline void check_scales(const Tensor& scales, bool experts) {
  check_bytes("scales", scales);
  STD_TORCH_CHECK(experts ? scales.dim() == 2 : scales.dim() >= 2, "scales has shape ", describe(sizes_of(scales)),
                  "; accepted: ", experts ? "[rows, blocks] with offsets" : "[.., rows, blocks]");
}

inline void check_sizes(const char* name, const Tensor& t, const Sizes& wanted) {
  STD_TORCH_CHECK(sizes_of(t) == wanted, name, " has shape ", describe(sizes_of(t)), "; accepted: ", describe(wanted));
}

inline ScalarType parse_dtype(const char* name, const std::string& dtype) {
  if (dtype == "float32") return ScalarType::Float;
  if (dtype == "bfloat16") return ScalarType::BFloat16;
  if (dtype == "float16") return ScalarType::Half;
  STD_TORCH_CHECK(false, "unknown ", name, " '", dtype, "'; accepted: float32, bfloat16, float16");
}

inline int block_of(FormatId f) { return f == FormatId::nvfp4 ? 16 : 32; }
inline int codes_per_byte(FormatId f) { return f == FormatId::nvfp4 || f == FormatId::mxfp4 ? 2 : 1; }

// torch's own threads.
inline const cpu::Parallel& torch_threads() {
  static const cpu::Parallel parallel = [](int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& f) {
    torch::stable::parallel_for(0, n, grain, f);
  };
  return parallel;
}

}  // namespace fp4ext
