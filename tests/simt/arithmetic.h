#pragma once
#include <cstdint>

// What tensor cores make of a sum of products, after the measurements of MMA-Sim (arXiv 2511.10909), whose authors
// report that hardware agrees bit for bit. A product of significands in [1, 2) has the sum of both exponents, whether
// or not it reaches 2. All terms of a sum, and what it is added to, are cut off toward zero F bits below the largest
// exponent among them, added exactly, and the sum is rounded toward zero to fp32:
//
//   bf16    F = 24, eight products at a time (sm_80 to sm_89); F = 25, sixteen (since sm_90)
//   MXFP8   F = 25, 32 products, their scales' exponents added
//   NVFP4   F = 35, four terms: a block's sixteen products are summed exactly, with the exponent of both scales
//
// Two more arithmetics, which no hardware has, tell an error of a kernel from one of rounding: the exact sum, rounded
// once to nearest or toward zero.
namespace simt {

enum class Arithmetic { hardware, nearest, toward_zero };

struct Bf16Line {  // a row of an operand in one instruction
  double value[16];
  int16_t exponent[16];
  bool finite;
  void decode(const uint32_t (&pairs)[8]);
};
struct Fp8Line {
  static constexpr int kSize = 32;
  float value[32];  // without the scale
  int16_t exponent[32];
  int scale;  // its exponent
  bool finite;
  // scales: in the lowest byte.
  void decode(const uint8_t* codes, uint32_t scales);
};
struct Fp4Line {
  static constexpr int kSize = 64;
  int16_t value[64];             // twice the element
  int significand[4], scale[4];  // of each block's scale: eighths, and the exponent
  bool finite;
  void decode(const uint8_t* codes, uint32_t scales);
};

// Σ a·b + c.
float dot(const Bf16Line& a, const Bf16Line& b, float c);
float dot(const Fp8Line& a, const Fp8Line& b, float c);
float dot(const Fp4Line& a, const Fp4Line& b, float c);

}  // namespace simt
