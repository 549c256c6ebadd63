#pragma once
#if defined(__SSE2__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace fp4ext::cpu {

// While it lives, this thread computes as the law says: to nearest even, subnormals kept, nothing trapped, whatever torch.set_flush_denormal
// or fesetround left behind. Each thread has an environment of its own, so that each share of an op's work needs one.
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
