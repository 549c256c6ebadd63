#include "dispatch_cuda.h"

#include <array>
#include <cstdio>
#include <mutex>

#include "cuda.h"

namespace fp4ext {
namespace {

using cuda::Gemm;

int capability(int device) {
  int major = 0, minor = 0;
  check_launch("cudaDeviceGetAttribute", cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  check_launch("cudaDeviceGetAttribute", cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  return 10 * major + minor;
}

// What a device has, or null. pairs: the same product by pairs of thread blocks.
struct Kernels {
  Gemm gemm, pairs;
};

// The table: a row for each native kernel.
Kernels native_kernels(int sm) {
  if (sm == 100 || sm == 103) return {cuda::gemm_sm100, cuda::gemm_sm100_pairs};
  if (sm == 120 || sm == 121) return {cuda::gemm_sm120, nullptr};
  return {nullptr, nullptr};
}

constexpr char kNativeTakes[] = "backend 'native' takes NVFP4·NVFP4 with K a multiple of 64, or MXFP8·MXFP8 with K a multiple of 128";

// What is known of a device's native kernels: nothing until their first use, when they test themselves.
struct Native : Kernels {
  bool tested = false;
  std::string why_not, why_no_pairs;
};

// Says once why a kernel is not used, and returns it.
std::string refuse(const char* what, const std::string& why, const char* instead) {
  std::fprintf(stderr, "fp4ext: %s not used: %s. %s.\n", what, why.c_str(), instead);
  return why;
}

// Pairs are for products of many rows, so that which kernel runs hangs on M; their bits must not.
void test_pairs(Native& native, int device) {
  const std::string on_device = " on device " + std::to_string(device) + ": ";
  std::string why = cuda::self_test(native.pairs);
  if (!why.empty())
    why = "they failed their self-test" + on_device + why;
  else if (why = cuda::same_bits(native.pairs, native.gemm); !why.empty())
    why = "they do not give a single block's bits" + on_device + why;
  else
    return;
  native.pairs = nullptr;
  native.why_no_pairs = refuse("pairs of thread blocks in the native GEMM are", why, "Single ones are");
}

const Native& native_on(int device) {
  static std::mutex mutex;
  static std::array<Native, 64> devices;
  STD_TORCH_CHECK(device >= 0 && device < static_cast<int>(devices.size()), "CUDA device ", device, "; accepted: 0 to ",
                  devices.size() - 1);
  const std::lock_guard lock(mutex);
  Native& native = devices[device];
  if (native.tested) return native;
  const OnDevice here(device);  // whichever device is the current one
  const int sm = capability(device);
  static_cast<Kernels&>(native) = native_kernels(sm);
  if (!native.gemm) {
    native.why_not = "no native kernel for sm_" + std::to_string(sm) + "; there are for sm_100, 103, 120 and 121";
  } else {
    STD_TORCH_CHECK(!is_recording(),
                    "the first product on a device tests its kernels, which a CUDA graph cannot record; "
                    "multiply once, or call fp4ext.backends(), before recording");
    const std::string failure = cuda::self_test(native.gemm);
    if (!failure.empty()) {
      native.gemm = native.pairs = nullptr;
      native.why_not = refuse("the native GEMM is", "it failed its self-test on device " + std::to_string(device) + ": " + failure,
                              "The emulated one is");
    }
    if (native.pairs) test_pairs(native, device);
  }
  native.tested = true;
  return native;
}

}  // namespace

Route choose_gemm(const cuda::GemmArgs& args, bool invariant, const std::string& backend, int device) {
  enum Wanted { any, emulated, fast, native_only };
  static constexpr Choice<Wanted> kBackends[] = {{"auto", any}, {"emulated", emulated}, {"fast", fast}, {"native", native_only}};
  const Wanted wanted = choose("backend for CUDA tensors", backend, kBackends);
  const int sm = capability(device);
  STD_TORCH_CHECK(sm >= 80, "this device is sm_", sm, "; accepted: sm_80 and later");
  if (wanted == fast) {
    STD_TORCH_CHECK(!invariant, "backend 'fast' is not row-invariant; accepted with it: accumulate 'fast'");
    STD_TORCH_CHECK(!args.offsets, "backend 'fast' takes dense products; accepted for experts: auto, emulated, native");
    STD_TORCH_CHECK(cuda::bf16_holds(args), "backend 'fast' multiplies in bfloat16; accepted for float32 and float16: auto, emulated");
    return {"fast", nullptr};
  }
  if (!cuda::bf16_holds(args)) {
    STD_TORCH_CHECK(wanted != native_only, kNativeTakes);
    return {"emulated", cuda::gemm_lanes};
  }
  if (wanted != emulated) {
    const Native& native = native_on(device);
    const bool takes = cuda::native_takes(args);
    if (native.pairs && takes && cuda::pairs_pay(args)) return {"native by pairs", native.pairs};
    if (native.gemm && takes) return {"native", native.gemm};
    STD_TORCH_CHECK(wanted == any || native.gemm, "backend 'native' is not available: ", native.why_not);
    STD_TORCH_CHECK(wanted == any, kNativeTakes);
  }
  // The same bits either way.
  if (cuda::decode_takes(args)) return {"emulated", cuda::gemm_decode};
  if (wanted == any && !invariant && !args.offsets) return {"fast", nullptr};
  return {"emulated", cuda::gemm_invariant};
}

std::string native_status(int device) {
  const Native& native = native_on(device);
  if (!native.gemm) return "built, but " + native.why_not;
  return "available: passed its self-test on sm_" + std::to_string(capability(device)) +
         "; row-invariant, in the hardware's own order of summation" +
         (native.pairs                  ? "; for many rows by pairs of thread blocks, which give the same bits"
          : native.why_no_pairs.empty() ? ""
                                        : "; not by pairs of thread blocks: " + native.why_no_pairs);
}

std::string emulated_status(int device) {
  const int sm = capability(device);
  return sm >= 80 ? "available: bf16 tensor cores of sm_" + std::to_string(sm) +
                        "; row-invariant, K in steps of 16 in an order of its own; float32 and float16 by FMA, the CPU's bytes"
                  : "built, but this device is sm_" + std::to_string(sm) + ", and it needs sm_80";
}

std::string fast_status(int device) {
  const int sm = capability(device);
  return sm >= 80 ? "available: decoded to bf16 for torch's product, with accumulate='fast'; not row-invariant"
                  : "built, but this device is sm_" + std::to_string(sm) + ", and it needs sm_80";
}

}  // namespace fp4ext
