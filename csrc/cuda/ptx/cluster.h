#pragma once
#include "launch.h"

// A cluster: thread blocks (CTAs) that run together and reach each other's shared memory (sm_90 and later). Here kCtas is 1, a
// block as ever, or 2, a pair whose first CTA leads.
namespace fp4ext::cuda {

#if defined(__CUDACC__)

// kernel<<<…>>> with `grid` blocks in clusters of kCtas along x.
template <int kCtas, class... P, class... A>
cudaError_t launch_clusters(void (*kernel)(P...), dim3 grid, int threads, size_t shared, cudaStream_t stream, const A&... args) {
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kCtas, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = dim3(threads), config.dynamicSmemBytes = shared, config.stream = stream;
  config.attrs = &cluster, config.numAttrs = 1;
  error = cudaLaunchKernelEx(&config, kernel, args...);
  const cudaError_t last = cudaGetLastError();
  return error == cudaSuccess ? last : error;
}

// Which CTA of its cluster this is.
template <int kCtas>
__device__ __forceinline__ int cta_rank() {
  if constexpr (kCtas == 1) return 0;
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
// All threads of the cluster; what each wrote is seen by all. Nobody may exit while others reach into its shared memory.
template <int kCtas>
__device__ __forceinline__ void meet_cluster() {
  if constexpr (kCtas == 1)
    __syncthreads();
  else
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

#else

template <int kCtas, class... P, class... A>
cudaError_t launch_clusters(void (*kernel)(P...), dim3 grid, int threads, size_t shared, cudaStream_t, const A&... args) {
  if (grid.x % kCtas != 0) return cudaErrorInvalidValue;
  return simt::run(grid, threads, shared, [=] { kernel(args...); }, kCtas) ? cudaErrorLaunchFailure : cudaSuccess;
}

template <int kCtas>
int cta_rank() {
  return simt::block().rank;
}
template <int kCtas>
__attribute__((always_inline)) inline void meet_cluster() {
  kCtas == 1 ? simt::meet_block() : simt::meet_cluster();
}

#endif

}  // namespace fp4ext::cuda
