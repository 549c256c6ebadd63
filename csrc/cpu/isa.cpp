#include "isa.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace fp4ext::cpu {
namespace {

constexpr const char* kNames[] = {"portable", "avx2", "avx512"};

Isa initial() {
  const char* wish = std::getenv("FP4EXT_ISA");
  return wish && *wish ? isa_from_name(wish) : isa_best();
}

std::atomic<Isa>& current() {
  static std::atomic<Isa> isa{initial()};
  return isa;
}

}  // namespace

bool isa_available(Isa isa) {
#if defined(FP4EXT_X86)
  // libgcc's cpuid also asks the operating system whether it saves the wider registers.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#if defined(FP4EXT_AVX512_DOUBLE)
  const bool avx512 = avx2;
#else
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
#endif
  return isa == Isa::portable || (isa == Isa::avx2 && avx2) || (isa == Isa::avx512 && avx512);
#else
  return isa == Isa::portable;
#endif
}

Isa isa_best() { return isa_available(Isa::avx512) ? Isa::avx512 : isa_available(Isa::avx2) ? Isa::avx2 : Isa::portable; }
Isa isa_in_use() { return current().load(std::memory_order_relaxed); }
void force_isa(Isa isa) { current().store(isa, std::memory_order_relaxed); }
const char* isa_name(Isa isa) { return kNames[static_cast<int>(isa)]; }

Isa isa_from_name(const char* name) {
  for (int i = 0; i < 3; ++i) {
    if (std::string(name) != kNames[i]) continue;
    if (!isa_available(static_cast<Isa>(i))) throw std::invalid_argument(std::string("this CPU (or build) has no ") + name);
    return static_cast<Isa>(i);
  }
  throw std::invalid_argument(std::string("unknown instruction set '") + name + "'; accepted: portable, avx2, avx512");
}

}  // namespace fp4ext::cpu
