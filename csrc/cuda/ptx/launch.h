#pragma once
#include <cuda_runtime_api.h>

// kernel<<<grid, threads, shared, stream>>>(args…), and the dynamic shared memory it asks for. Without nvcc the kernel
// runs on the SIMT machine of tests/simt.
namespace fp4ext::cuda {

// The most blocks of a grid along y and z. What grows with a tensor goes along x, where there may be 2^31 - 1; the SIMT
// machine allows few along y, so that a test sees what does not.
#if defined(__CUDACC__)
inline constexpr int64_t kMostAlongY = 65535;
#else
inline constexpr int64_t kMostAlongY = 7;
#endif

#if defined(__CUDACC__)

template <class... P, class... A>
cudaError_t launch(void (*kernel)(P...), dim3 grid, int threads, size_t shared, cudaStream_t stream, const A&... args) {
  if (shared > 48 * 1024) {  // more than every device gives unasked
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
    if (error != cudaSuccess) return error;
  }
  kernel<<<grid, threads, shared, stream>>>(args...);
  return cudaGetLastError();
}

__device__ __forceinline__ char* shared_memory() {
  extern __shared__ __align__(1024) char memory[];
  return memory;
}

#else

template <class... P, class... A>
cudaError_t launch(void (*kernel)(P...), dim3 grid, int threads, size_t shared, cudaStream_t, const A&... args) {
  if (grid.y > kMostAlongY || grid.z > kMostAlongY) return cudaErrorInvalidValue;
  return simt::run(grid, threads, shared, [=] { kernel(args...); }) ? cudaErrorLaunchFailure : cudaSuccess;
}

inline char* shared_memory() { return simt::block().shared.get(); }

#endif

}  // namespace fp4ext::cuda
