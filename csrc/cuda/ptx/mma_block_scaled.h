#pragma once
#include "mma.h"

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
  float d[4];
};
struct Results {
  float d[4];
};

// A row of A is in the registers of four lanes, first the lower half of K; a column of B likewise.
template <class Line>
void make(const Fragments* all, Results* results) {
  Line rows[16], columns[8];
  uint32_t codes[8];
  for (int row = 0; row < 16; ++row) {
    for (int w = 0; w < 8; ++w) codes[w] = all[row % 8 * 4 + w % 4].a[row / 8 + 2 * (w / 4)];
    rows[row].decode(reinterpret_cast<const uint8_t*>(codes), all[row % 8 * 4 + row / 8].a_scales);
  }
  for (int column = 0; column < 8; ++column) {
    for (int w = 0; w < 8; ++w) codes[w] = all[column * 4 + w % 4].b[w / 4];
    columns[column].decode(reinterpret_cast<const uint8_t*>(codes), all[column * 4].b_scales);
  }
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i)
      results[lane].d[i] = simt::dot(rows[lane / 4 + 8 * (i >> 1)], columns[lane % 4 * 2 + (i & 1)], all[lane].d[i]);
}

template <class Line>
void mma(const char* name, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t a_scales, uint32_t b_scales) {
  const Fragments mine{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, a_scales, b_scales, {d[0], d[1], d[2], d[3]}};
  std::memcpy(d, simt::together<Results>(name, mine, make<Line>).d, sizeof(d));
}

}  // namespace simt_block_scaled

inline void mma_nvfp4(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t a_scales, uint32_t b_scales) {
  simt_block_scaled::mma<simt::Fp4Line>("mma nvfp4", d, a, b, a_scales, b_scales);
}

inline void mma_mxfp8(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t a_scales, uint32_t b_scales) {
  simt_block_scaled::mma<simt::Fp8Line>("mma mxfp8", d, a, b, a_scales, b_scales);
}

#endif

}  // namespace fp4ext::cuda
