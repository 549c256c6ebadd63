#pragma once
#include <dlfcn.h>

#include <new>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "../cpu/arithmetic.h"
#include "text.h"

// Where a call of an op comes in: FP4EXT_BOX(&f) is TORCH_BOX(&f), and
//  - the str arguments are freed when the call ends, however it ends;
//  - the call computes in the contract's arithmetic (cpu/arithmetic.h), and the caller's is restored;
//  - what torch refuses inside (memory, most often) is raised with torch's reason.
namespace fp4ext {

// The str arguments of a call, by the types of the op's parameters.
template <class List>
class Strings;
template <class... P>
class Strings<torch::headeronly::guts::typelist::typelist<P...>> {
 public:
  explicit Strings(const StableIValue* stack) { take(stack, std::index_sequence_for<P...>{}); }
  ~Strings() {
    for (StringHandle handle : handles_) torch_delete_string(handle);
  }
  Strings(const Strings&) = delete;
  Strings& operator=(const Strings&) = delete;

 private:
  template <size_t... I>
  void take(const StableIValue* stack, std::index_sequence<I...>) {
    (take_one<P>(stack[I]), ...);
  }
  template <class T>
  void take_one(StableIValue value) {
    if constexpr (std::is_same_v<std::decay_t<T>, Text>) handles_.push_back(torch::stable::detail::to<Text>(value).handle);
  }
  std::vector<StringHandle> handles_;
};

// Why torch refused the last call of this thread. torch 2.13 and later say it; the text is empty before.
inline std::string torch_reason() {
  using What = const char* (*)();
  static const What what = reinterpret_cast<What>(dlsym(RTLD_DEFAULT, "torch_exception_get_what_without_backtrace"));
  const char* text = what ? what() : nullptr;
  return text ? text : "";
}

template <class F, F* f>
struct Boundary {
  static void boxed(StableIValue* stack, uint64_t inputs, uint64_t outputs) {
    const Strings<typename torch::headeronly::guts::infer_function_traits_t<F>::parameter_types> strings(stack);
    const cpu::Arithmetic arithmetic;
    try {
      run(stack, inputs, outputs);
    } catch (const std::bad_alloc&) {
      throw std::runtime_error("out of memory: no room for what this call keeps beside its tensors");
    } catch (const std::runtime_error& error) {
      // Of a call into torch that fails, the stable ABI tells the text of the call alone.
      const std::string what = error.what();
      if (what.find("API call failed") == std::string::npos) throw;
      const std::string reason = torch_reason();
      throw std::runtime_error(reason.empty() ? "torch refused a call, most often for want of memory (it says why on stderr): " + what
                                              : "torch refused a call: " + reason);
    }
  }

 private:
  // Not inlined: no computation may move out of the scope of the arithmetic.
  [[gnu::noinline]] static void run(StableIValue* stack, uint64_t inputs, uint64_t outputs) {
    torch::stable::detail::boxer<F, f>::boxed_fn(stack, inputs, outputs);
  }
};

}  // namespace fp4ext

#define FP4EXT_BOX(func) fp4ext::Boundary<std::remove_pointer_t<std::remove_reference_t<decltype(func)>>, (func)>::boxed
