#include "gemm.h"
#include "io.h"

// The end of a GEMM: the global scales in double, so that neither the product of two large ones nor that of two small
// ones is lost.
namespace fp4ext::cpu::FP4EXT_ISA {
namespace {

template <class T>
void finish(const GemmRow& row, T* y) {
  for (int64_t n = 0; n < row.columns; ++n) {
    float v = static_cast<float>(static_cast<double>(row.total[n]) * (row.g_x * row.g_w[n]));
    if (row.bias) v = v + row.bias[n];
    if (row.add) v = to_float(y[n]) + v;
    from_float(select(v != v, as_float(0x7fc00000u), v), y[n]);
  }
}

}  // namespace

void gemm_finish(const GemmRow& row, float* y) { finish(row, y); }
void gemm_finish(const GemmRow& row, uint16_t* y) { finish(row, reinterpret_cast<BF16*>(y)); }

}  // namespace fp4ext::cpu::FP4EXT_ISA
