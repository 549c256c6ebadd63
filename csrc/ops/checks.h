#pragma once
#include <atomic>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "../cpu/quantize.h"
#include "boundary.h"

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

// Of sizes [begin, end). Behind a size of 0 the others may be anything, which a product of some of them does not survive.
inline int64_t product(const Sizes& sizes, size_t begin, size_t end) {
  int64_t p = 1;
  for (size_t i = begin; i < end; ++i)
    STD_TORCH_CHECK(!__builtin_mul_overflow(p, sizes[i], &p), "a tensor has shape ", describe(sizes),
                    "; accepted: sizes whose product is below 2^63");
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

// Codes and scales are bytes to an op; fp4ext/functional/ops.py views them as torch's 8-bit float types, which few torch functions
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

inline std::string device_of(const Tensor& t) {
  return t.is_cpu() ? "the CPU" : t.is_cuda() ? "CUDA device " + std::to_string(t.get_device_index()) : "a device of another kind";
}

// `x`: the argument that says where everything lies.
inline void check_same_device(const char* name, const Tensor& t, const Tensor& x) {
  STD_TORCH_CHECK(t.is_cpu() == x.is_cpu() && t.is_cuda() == x.is_cuda() && t.get_device_index() == x.get_device_index(), name, " is on ",
                  device_of(t), "; accepted: ", device_of(x), ", where the input is");
}

// Refuses an argument that is read while `out` is written, if they share memory. Both are contiguous.
inline void check_no_overlap(const char* name, const Tensor& t, const Tensor& out) {
  const auto begin = [](const Tensor& a) { return reinterpret_cast<uintptr_t>(a.data_ptr()); };
  const auto bytes = [](const Tensor& a) { return static_cast<uintptr_t>(a.numel()) * a.element_size(); };
  STD_TORCH_CHECK(bytes(t) == 0 || bytes(out) == 0 || begin(t) + bytes(t) <= begin(out) || begin(out) + bytes(out) <= begin(t),
                  "out shares memory with ", name, "; accepted: a tensor that overlaps no other argument");
}

inline ScalarType parse_dtype(const char* name, const std::string& dtype) {
  if (dtype == "float32") return ScalarType::Float;
  if (dtype == "bfloat16") return ScalarType::BFloat16;
  if (dtype == "float16") return ScalarType::Half;
  STD_TORCH_CHECK(false, "unknown ", name, " '", dtype, "'; accepted: float32, bfloat16, float16");
}

// The random state of a spec that may need none.
inline void check_rng(const std::optional<Tensor>& rng, bool needed, const Tensor& x) {
  STD_TORCH_CHECK(rng.has_value() || !needed,
                  "rng is missing: this spec rounds or rotates at random; accepted: an int64 tensor {seed, offset}");
  if (!rng.has_value()) return;
  check_dtype("rng", *rng, ScalarType::Long);
  STD_TORCH_CHECK(rng->dim() == 1 && (rng->size(0) == 2 || rng->size(0) == 4), "rng has shape ", describe(sizes_of(*rng)),
                  "; accepted: [2] {seed, offset} or [4] {seed, offset, row, k}");
  check_same_device("rng", *rng, x);
}

// A length that no tensor gives, but an argument.
inline void check_length(const char* name, int64_t n) {
  STD_TORCH_CHECK(n >= 0 && n <= int64_t{1} << 48, name, " is ", n, "; accepted: from 0 to 2^48");
}

inline int block_of(FormatId f) { return f == FormatId::nvfp4 ? 16 : 32; }
inline int codes_per_byte(FormatId f) { return f == FormatId::nvfp4 || f == FormatId::mxfp4 ? 2 : 1; }

// torch's own threads, each in the arithmetic of docs/numerics.md. What a share throws is thrown again here: an exception
// that crosses torch's stable ABI loses its text.
inline const cpu::Parallel& torch_threads() {
  static const cpu::Parallel parallel = [](int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& f) {
    std::exception_ptr thrown;
    std::atomic_flag failed;
    torch::stable::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) {
      const cpu::Arithmetic arithmetic;
      try {
        f(begin, end);
      } catch (...) {
        if (!failed.test_and_set()) thrown = std::current_exception();
      }
    });
    if (thrown) std::rethrow_exception(thrown);
  };
  return parallel;
}

}  // namespace fp4ext
