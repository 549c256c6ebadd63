#pragma once
#include "mma.h"

#if !defined(__CUDACC__)
#include "../../numerics/e8m0.h"
#endif

// Block-scaled tensor cores of GeForce Blackwell (PTX ISA 9.7.14.5.14; sm_120f). With g = lane / 4, t = lane % 4:
//   m16n8k64, E2M1   A register r, nibble j: row g + 8(r & 1), k = 8t + j + 32(r >> 1)   B: column g, k = 8t + j + 32r
//   m16n8k32, 8-bit  A register r, byte j:   row g + 8(r & 1), k = 4t + j + 16(r >> 1)   B: column g, k = 4t + j + 16r
//   D                as in mma.h
// Scales: for A, lane 4g holds those of row g and lane 4g + 1 those of row g + 8; for B, lane 4g those of column g. Byte j
// of the register is that of the j-th block of K.
namespace fp4ext::cuda {

#if defined(__CUDACC__)

// d += (a·s_a)·(b·s_b), E2M1 with E4M3 scales of 16: four blocks.
__device__ __forceinline__ void mma_nvfp4(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t a_scales,
                                          uint32_t b_scales) {
  asm volatile(
      "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {0, 0}, {%11}, {0, 0};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(a_scales), "r"(b_scales));
}

// E4M3 with E8M0 scales of 32: one block, whose scale is the lowest byte.
__device__ __forceinline__ void mma_mxfp8(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t a_scales,
                                          uint32_t b_scales) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {0, 0}, {%11}, {0, 0};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(a_scales), "r"(b_scales));
}

#else

namespace simt_block_scaled {

struct Fragments {
  uint32_t a[4], b[2], a_scales, b_scales;
};

// kBits: of an element; the k of one register are 32 / kBits, of the instruction 8 · 32 / kBits.
template <int kBits, int kBlock, class Value, class Scale>
void mma(const char* name, float (&d)[4], const Fragments& mine, Value value, Scale scale) {
  constexpr int kPer = 32 / kBits, kSize = 8 * kPer;
  const Fragments* all = simt::exchange(name, mine);
  const int g = simt::me().lane / 4, t = simt::me().lane % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + 8 * (i >> 1), col = 2 * t + (i & 1);
    simt::ScaledTerms<kBits> terms(kBlock);
    for (int k = 0; k < kSize; ++k) {
      const int lane = k % (kSize / 2) / kPer, upper = k / (kSize / 2), shift = k % kPer * kBits, block = k / kBlock;
      const double a = value(all[row % 8 * 4 + lane].a[row / 8 + 2 * upper] >> shift);
      const double b = value(all[col * 4 + lane].b[upper] >> shift);
      const double s =
          static_cast<double>(scale(all[row % 8 * 4 + row / 8].a_scales >> (8 * block))) * scale(all[col * 4].b_scales >> (8 * block));
      terms.add(k, a * b * s);
    }
    d[i] = terms.sum_with(d[i]);
  }
}

}  // namespace simt_block_scaled

inline void mma_nvfp4(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t a_scales, uint32_t b_scales) {
  simt_block_scaled::mma<4, 16>(
      "mma nvfp4", d, {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, a_scales, b_scales}, [](uint32_t u) { return E2M1::signed_value(u & 15u); },
      [](uint32_t u) { return decode_e4m3_scale(u & 0x7fu); });
}

inline void mma_mxfp8(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t a_scales, uint32_t b_scales) {
  simt_block_scaled::mma<8, 32>(
      "mma mxfp8", d, {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, a_scales, b_scales}, [](uint32_t u) { return decode_e4m3_scale(u & 0xffu); },
      [](uint32_t u) { return decode_e8m0(u & 0xffu); });
}

#endif

}  // namespace fp4ext::cuda
