#include "dispatch_cuda.h"

#include <array>
#include <cstdio>
#include <mutex>

#include "cuda.h"

namespace fp4ext {
namespace {

using kernels::Gemm;

int capability(int device) {
  int major = 0, minor = 0;
  check_launch("cudaDeviceGetAttribute", cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  check_launch("cudaDeviceGetAttribute", cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  return 10 * major + minor;
}

// The table: a row for each native kernel.
Gemm native_gemm(int sm) {
  if (sm == 100 || sm == 103) return kernels::gemm_sm100;
  if (sm == 120 || sm == 121) return kernels::gemm_sm120;
  return nullptr;
}

constexpr char kNativeTakes[] = "backend 'native' takes NVFP4·NVFP4 with K a multiple of 64, or MXFP8·MXFP8 with K a multiple of 128";

// What is known of a device's native kernel: nothing until its first use, when it tests itself.
struct Native {
  Gemm gemm = nullptr;
  bool tested = false;
  std::string why_not;
};

const Native& native_on(int device) {
  static std::mutex mutex;
  static std::array<Native, 64> devices;
  STD_TORCH_CHECK(device >= 0 && device < static_cast<int>(devices.size()), "CUDA device ", device, "; accepted: 0 to ",
                  devices.size() - 1);
  const std::lock_guard lock(mutex);
  Native& native = devices[device];
  if (native.tested) return native;
  const int sm = capability(device);
  native.gemm = native_gemm(sm);
  if (!native.gemm) {
    native.why_not = "no native kernel for sm_" + std::to_string(sm) + "; there are for sm_100, 103, 120 and 121";
  } else {
    STD_TORCH_CHECK(!is_recording(),
                    "the first product on a device tests its kernels, which a CUDA graph cannot record; "
                    "multiply once, or call fp4ext.backends(), before recording");
    const std::string failure = kernels::self_test(native.gemm);
    if (!failure.empty()) {
      native.gemm = nullptr;
      native.why_not = "it failed its self-test on device " + std::to_string(device) + ": " + failure;
      std::fprintf(stderr, "fp4ext: the native GEMM is not used: %s. The emulated one is.\n", native.why_not.c_str());
    }
  }
  native.tested = true;
  return native;
}

}  // namespace

Route choose_gemm(const kernels::GemmArgs& args, bool invariant, const std::string& backend, int device) {
  enum Wanted { any, emulated, fast, native_only };
  static constexpr Choice<Wanted> kBackends[] = {{"auto", any}, {"emulated", emulated}, {"fast", fast}, {"native", native_only}};
  const Wanted wanted = choose("backend for CUDA tensors", backend, kBackends);
  const int sm = capability(device);
  STD_TORCH_CHECK(sm >= 80, "this device is sm_", sm, "; accepted: sm_80 and later");
  if (wanted == fast) {
    STD_TORCH_CHECK(!invariant, "backend 'fast' is not row-invariant; accepted with it: accumulate 'fast'");
    STD_TORCH_CHECK(!args.offsets, "backend 'fast' takes dense products; accepted for experts: auto, emulated, native");
    STD_TORCH_CHECK(kernels::bf16_holds(args), "backend 'fast' multiplies in bfloat16; accepted for float32 and float16: auto, emulated");
    return {"fast", nullptr};
  }
  if (!kernels::bf16_holds(args)) {
    STD_TORCH_CHECK(wanted != native_only, kNativeTakes);
    return {"emulated", kernels::gemm_lanes};
  }
  if (wanted != emulated) {
    const Native& native = native_on(device);
    const bool takes = kernels::native_takes(args);
    if (native.gemm && takes) return {"native", native.gemm};
    STD_TORCH_CHECK(wanted == any || native.gemm, "backend 'native' is not available: ", native.why_not);
    STD_TORCH_CHECK(wanted == any, kNativeTakes);
  }
  // The same bits either way.
  if (kernels::decode_takes(args)) return {"emulated", kernels::gemm_decode};
  if (wanted == any && !invariant && !args.offsets) return {"fast", nullptr};
  return {"emulated", kernels::gemm_invariant};
}

std::string native_status(int device) {
  const Native& native = native_on(device);
  return native.gemm ? "available: passed its self-test on sm_" + std::to_string(capability(device)) +
                           "; row-invariant, in the hardware's own order of summation"
                     : "built, but " + native.why_not;
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
