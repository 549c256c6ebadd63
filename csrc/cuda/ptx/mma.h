#pragma once
#include "async_copy.h"

#if !defined(__CUDACC__)
#include "../../numerics/half.h"
#endif

// Tensor cores of Ampere and later, bf16 (PTX ISA 9.7.14.5). With g = lane / 4, t = lane % 4:
//   A, 16×16  register r, half j: row g + 8(r & 1), k = 2t + j + 8(r >> 1)
//   B, 16×8   register r, half j: column g,         k = 2t + j + 8r
//   D, 16×8   register i:         row g + 8(i >> 1), column 2t + (i & 1)
namespace fp4ext::cuda {

#if defined(__CUDACC__)

// a·b of two bf16 each, rounded once. (mul.bf16x2 is Hopper's; -0 keeps the sign of zero.)
__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
  return d;
}

// Four 8×8 matrices of 16-bit elements; lane 8m + r holds the address of row r of matrix m, and gets elements 2t, 2t + 1
// of row g of each.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// d += a·b.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#else

inline float bf16_half(uint32_t pair, int j) { return bf16_to_float(static_cast<uint16_t>(pair >> (16 * j))); }

inline uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d = 0;
  for (int j = 0; j < 2; ++j) d |= static_cast<uint32_t>(float_to_bf16(bf16_half(a, j) * bf16_half(b, j))) << (16 * j);
  return d;
}

__attribute__((always_inline)) inline void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  simt::check_aligned("ldmatrix");
  const void* const* rows = simt::exchange("ldmatrix", row);
  const int lane = simt::me().lane;
  for (int m = 0; m < 4; ++m) {
    const char* p = static_cast<const char*>(rows[8 * m + lane / 4]);
    if (reinterpret_cast<uintptr_t>(p) % 16) simt::fail("ldmatrix: the address of a row is not a multiple of 16");
    std::memcpy(&r[m], p + 4 * (lane % 4), 4);
  }
}

// The ISA leaves the order and the rounding of the sum open.
__attribute__((always_inline)) inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  simt::check_aligned("mma");
  struct Fragments {
    uint32_t a[4], b[2];
    float d[4];
  };
  struct Results {
    float d[4];
  };
  const auto make = [](const Fragments* all, Results* results) __attribute__((no_sanitize_thread)) {
    simt::Bf16Line rows[16], columns[8];
    uint32_t pairs[8];
    for (int row = 0; row < 16; ++row) {
      for (int p = 0; p < 8; ++p) pairs[p] = all[row % 8 * 4 + p % 4].a[row / 8 + 2 * (p / 4)];
      rows[row].decode(pairs);
    }
    for (int column = 0; column < 8; ++column) {
      for (int p = 0; p < 8; ++p) pairs[p] = all[column * 4 + p % 4].b[p / 4];
      columns[column].decode(pairs);
    }
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i)
        results[lane].d[i] = simt::dot(rows[lane / 4 + 8 * (i >> 1)], columns[lane % 4 * 2 + (i & 1)], all[lane].d[i]);
  };
  const Results& mine = simt::together<Results>("mma", Fragments{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, {d[0], d[1], d[2], d[3]}}, make);
  std::memcpy(d, mine.d, sizeof(d));
}

#endif

}  // namespace fp4ext::cuda
