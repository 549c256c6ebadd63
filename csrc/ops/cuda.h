#pragma once
#include <cuda_runtime_api.h>
#if defined(USE_CUDA)
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#endif

#include "../cuda/quantize.h"
#include "../numerics/layout.h"
#include "grouped.h"
#include "parse.h"

// What the ops of CUDA tensors share. A launch goes to torch's current stream of the tensor's device, nothing comes back
// to the host, and a launch that fails raises here, not as an assertion on the device.
//
// The tests of tests/simt compile these files without CUDA and register the ops under another name, for CPU tensors.
#if !defined(FP4EXT_CUDA_LIBRARY)
#define FP4EXT_CUDA_LIBRARY fp4ext
#define FP4EXT_CUDA_KEY CUDA
#endif

namespace fp4ext {

#if defined(USE_CUDA)
// The tensor's device made current, while this lives.
class OnDevice {
 public:
  explicit OnDevice(const Tensor& t) : guard_(t.get_device_index()) {
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream_) == 0, "no current CUDA stream");
  }
  explicit OnDevice(int device) : guard_(device) {}  // its legacy stream
  cudaStream_t stream() const { return static_cast<cudaStream_t>(stream_); }
  static int index(const Tensor& t) { return t.get_device_index(); }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_ = nullptr;
};
inline std::string error_text(cudaError_t error) { return cudaGetErrorString(error); }
// Whether the legacy stream's work would end up in a graph that is being recorded.
inline bool is_recording() {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  void* stream = nullptr;
  int device = 0;
  cudaGetDevice(&device);
  aoti_torch_get_current_cuda_stream(device, &stream);
  cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
  return status != cudaStreamCaptureStatusNone;
}
#else
struct OnDevice {
  explicit OnDevice(const Tensor&) {}
  explicit OnDevice(int) {}
  cudaStream_t stream() const { return nullptr; }
  static int index(const Tensor&) { return simt::options().device; }
};
inline std::string error_text(cudaError_t) { return simt::last_error(); }
inline bool is_recording() { return false; }
#endif

inline void check_launch(const char* what, cudaError_t error) {
  STD_TORCH_CHECK(error == cudaSuccess, what, " failed: ", error_text(error));
}

// The ends of the rows of experts stay on the device, where nothing raises: what they hold is clamped there.
inline void check_offsets_on_device(const Tensor& offsets, const Tensor& x) {
  check_same_device("offsets", offsets, x);
  check_ends(offsets);
}

inline cuda::Dtype cuda_dtype(const char* name, const Tensor& t) {
  switch (check_float(name, t)) {
    case cpu::Dtype::bf16: return cuda::Dtype::bf16;
    case cpu::Dtype::fp16: return cuda::Dtype::fp16;
    default: return cuda::Dtype::fp32;
  }
}

}  // namespace fp4ext
