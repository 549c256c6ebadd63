#include "gemm.h"

// What each route takes: asked on the host, before anything is launched.
namespace fp4ext::cuda {
namespace {

bool is_aligned(const void* p, uintptr_t to) { return reinterpret_cast<uintptr_t>(p) % to == 0; }

// Codes are copied 16 bytes at a time, scales 4.
bool copies_align(const Operand& o) {
  return row_bytes(o) % 16 == 0 && is_aligned(o.codes, 16) && (!o.block || (o.k_stored / o.block % 4 == 0 && is_aligned(o.scales, 4)));
}

}  // namespace

bool bf16_holds(const GemmArgs& a) {
  const auto holds = [](const Operand& o) { return o.elem != Elem::fp32 && o.elem != Elem::fp16; };
  return holds(a.x) && holds(a.w);
}

bool decode_takes(const GemmArgs& a) {
  return a.x.rows <= 16 && bf16_holds(a) && !a.over_tokens && a.w.elem != Elem::bf16 && a.x.k_stored == a.w.k_stored &&
         a.x.k_stored % 128 == 0 && copies_align(a.x) && copies_align(a.w) &&
         decode_shared_bytes(a) <= 99 * 1024;  // what every device since sm_80 has
}

bool native_takes(const GemmArgs& a) {
  const bool nvfp4 = a.x.elem == Elem::e2m1 && a.w.elem == Elem::e2m1 && a.x.block == 16 && a.w.block == 16;
  const bool mxfp8 = a.x.elem == Elem::e4m3 && a.w.elem == Elem::e4m3;
  return (nvfp4 || mxfp8) && !a.over_tokens && a.x.k_stored > 0 && a.x.k_stored == a.w.k_stored && copies_align(a.x) && copies_align(a.w);
}

bool pairs_pay(const GemmArgs& a) { return a.x.rows > 128 * static_cast<int64_t>(a.experts); }

}  // namespace fp4ext::cuda
