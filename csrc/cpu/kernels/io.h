#pragma once
#include "../../numerics/half.h"
#include "../quantize.h"
#include "../simd.h"

// Numbers in memory to lanes of fp32 and back. Every input type is exact in fp32.
namespace fp4ext::cpu::FP4EXT_ISA {

struct BF16 {
  uint16_t u;
};
struct FP16 {
  uint16_t u;
};

typedef uint16_t RawH __attribute__((vector_size(kLanes * 2)));
typedef uint16_t LooseH __attribute__((vector_size(kLanes * 2), aligned(1), may_alias));

FP4_HD float to_float(float x) { return x; }
FP4_HD float to_float(BF16 x) { return bf16_to_float(x.u); }
FP4_HD float to_float(FP16 x) { return fp16_to_float(x.u); }

// kLanes consecutive elements.
FP4_HD VF load_lanes(const float* p) { return load<VF>(p); }
FP4_HD VF load_lanes(const BF16* p) {
  const RawH h = *reinterpret_cast<const LooseH*>(p);
  return as_float(VU(__builtin_convertvector(h, RawU)) << 16);
}
FP4_HD VF load_lanes(const FP16* p) {
#if defined(__AVX512F__)
  return VF(RawF(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))));
#elif defined(__F16C__)
  return VF(RawF(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))));
#else
  VF r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = to_float(p[i]);
  return r;
#endif
}

// Nearest even; a NaN stays a NaN.
FP4_HD void from_float(float x, float& out) { out = x; }
FP4_HD void from_float(float x, BF16& out) { out.u = float_to_bf16(x); }
FP4_HD void from_float(float x, FP16& out) { out.u = float_to_fp16(x); }

// Calls f with a null pointer of the C++ type of that dtype.
template <class Fn>
FP4_HD void with_dtype(Dtype dtype, Fn&& f) {
  switch (dtype) {
    case Dtype::fp32: return f(static_cast<float*>(nullptr));
    case Dtype::bf16: return f(static_cast<BF16*>(nullptr));
    case Dtype::fp16: return f(static_cast<FP16*>(nullptr));
  }
}

}  // namespace fp4ext::cpu::FP4EXT_ISA
