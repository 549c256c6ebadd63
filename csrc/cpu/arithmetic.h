#pragma once
#if defined(__SSE2__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace fp4ext::cpu {

// While it lives, this thread computes as docs/numerics.md says: it rounds to nearest even, keeps subnormals and traps
// nothing, whatever torch.set_flush_denormal or fesetround left behind. Each thread has an environment of its own, so
// each share of an op's work needs one.
class Arithmetic {
 public:
#if defined(__SSE2__)
  Arithmetic() : before_(_mm_getcsr()) { _mm_setcsr(0x1F80); }  // the processor's state at power-up: all exceptions masked
  ~Arithmetic() { _mm_setcsr(before_); }
#else
  Arithmetic() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~Arithmetic() { std::fesetenv(&before_); }
#endif
  Arithmetic(const Arithmetic&) = delete;
  Arithmetic& operator=(const Arithmetic&) = delete;

 private:
#if defined(__SSE2__)
  unsigned before_;
#else
  std::fenv_t before_;
#endif
};

}  // namespace fp4ext::cpu
