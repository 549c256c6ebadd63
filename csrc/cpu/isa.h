#pragma once
#include <functional>
#include <cstdint>

// Which instruction set the CPU kernels use. Every kernel file of csrc/cpu/kernels/ is compiled once for each, in a
// namespace of that name; the ".cpp" beside it picks one at run time. All give the same bytes, and tests force each
// one.
#if !defined(FP4EXT_ISA)
#define FP4EXT_ISA portable
#endif

namespace fp4ext::cpu {

enum class Isa { portable, avx2, avx512 };

// What this machine can run (and this build holds), best last: asked of the CPU once.
bool isa_available(Isa isa);
Isa isa_best();
// The one in use: the best, or what FP4EXT_ISA in the environment or force_isa() says.
Isa isa_in_use();
void force_isa(Isa isa);
const char* isa_name(Isa isa);
// The isa of that name; throws std::invalid_argument that lists the names, or says that this CPU lacks it.
Isa isa_from_name(const char* name);

// Runs f(begin, end) over parts of [0, n), in any order, perhaps in several threads; ops/ hands in torch's own pool.
using Parallel = std::function<void(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>&)>;

}  // namespace fp4ext::cpu

// Calls one function of the namespace in use: FP4EXT_DISPATCH(quantize_rows(args...)).
#if defined(FP4EXT_X86)
#define FP4EXT_DISPATCH(...)                                                    \
  switch (::fp4ext::cpu::isa_in_use()) {                                        \
    case ::fp4ext::cpu::Isa::avx512: return ::fp4ext::cpu::avx512::__VA_ARGS__; \
    case ::fp4ext::cpu::Isa::avx2: return ::fp4ext::cpu::avx2::__VA_ARGS__;     \
    default: return ::fp4ext::cpu::portable::__VA_ARGS__;                       \
  }
#else
#define FP4EXT_DISPATCH(...) return ::fp4ext::cpu::portable::__VA_ARGS__
#endif
