#pragma once
#include <cstdint>
#include <cstring>

// The one place that knows which compiler pass this is.
//
// The numerics headers are templates over F, the type of a value: `float` on the device and in scalar host code, a
// vector of floats in csrc/cpu/ (simd.h). They use only operators and the functions declared here, which simd.h
// overloads for its own types, so one statement of the contract serves a CUDA thread and sixteen AVX-512 lanes.
//
// FP4_HD is always inlined on the host: csrc/cpu compiles these headers once an instruction set, and the linker must
// never merge an AVX-512 copy of a function into the code that runs without it.
#if defined(__CUDACC__)
#define FP4_HD __host__ __device__ __forceinline__
#else
#define FP4_HD inline __attribute__((always_inline))
#endif

// Before a loop of constant length whose arrays should become registers; before one whose body should stay single.
#if defined(__CUDACC__)
#define FP4_UNROLL _Pragma("unroll")
#define FP4_ROLLED _Pragma("unroll 1")
#else
#define FP4_UNROLL _Pragma("GCC unroll 16")
#define FP4_ROLLED _Pragma("GCC unroll 1")
#endif

namespace fp4ext {

// The bits of a float, and the float of some bits.
FP4_HD uint32_t bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
#endif
}
FP4_HD float as_float(uint32_t u) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(u);
#else
  float f;
  std::memcpy(&f, &u, 4);
  return f;
#endif
}

FP4_HD float select(bool c, float a, float b) { return c ? a : b; }
FP4_HD uint32_t select(bool c, uint32_t a, uint32_t b) { return c ? a : b; }

// a·b as two 32-bit halves.
FP4_HD void mul_wide(uint32_t a, uint32_t b, uint32_t& hi, uint32_t& lo) {
  const uint64_t p = static_cast<uint64_t>(a) * b;
  hi = static_cast<uint32_t>(p >> 32);
  lo = static_cast<uint32_t>(p);
}

// The unsigned type that goes with F, and F's constant.
template <class F>
using UintOf = decltype(bits(F()));
template <class F>
FP4_HD F constant(float x) {
  return F(x);
}

inline constexpr float kFloatMax = 3.402823466e+38f;
inline constexpr uint32_t kInfBits = 0x7f800000u;
inline constexpr uint32_t kSignBit = 0x80000000u;

template <class F>
FP4_HD F abs_of(F x) {
  return as_float(bits(x) & ~kSignBit);
}
// a < b ? a : b. A NaN in a gives b: callers put the value that may be NaN first.
template <class F>
FP4_HD F min_of(F a, F b) {
  return select(a < b, a, b);
}
template <class F>
FP4_HD F max_of(F a, F b) {
  return select(a > b, a, b);
}

}  // namespace fp4ext
