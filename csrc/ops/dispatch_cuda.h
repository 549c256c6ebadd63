#pragma once
#include <string>

#include "../cuda/self_test.h"

// Which kernel a product takes on a device. dispatch_cuda.cpp is the only place that asks for the architecture.
namespace fp4ext {

struct Route {
  const char* name;
  cuda::Gemm gemm;  // null: torch's own product (gemm_fast_cuda.h)
};

// backend: "auto", "emulated", "fast" or "native"; invariant: whether a row may depend on itself and on w alone. Raises where
// it is asked for what this device, or these operands, cannot have.
Route choose_gemm(const cuda::GemmArgs& args, bool invariant, const std::string& backend, int device);

// One line for fp4ext.backends(): "available: …" or "built, but …". Tests the native kernels of the device where that has not
// been done.
std::string native_status(int device);
std::string emulated_status(int device);
std::string fast_status(int device);

}  // namespace fp4ext
