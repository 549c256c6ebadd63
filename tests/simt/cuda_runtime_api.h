#pragma once
#include <cmath>

#include "machine.h"

// A stand-in for the CUDA runtime and for the words of CUDA C++, by which g++ compiles csrc/cuda for the SIMT machine.
// Instructions that are PTX have their meaning in csrc/cuda/ptx/, beside their text.

#define __global__
#define __device__
#define __host__
#define __shared__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__ __restrict

#define threadIdx (simt::me().index)
#define blockIdx (simt::block().index)
#define blockDim (simt::block_size())
#define gridDim (simt::grid_size())

using dim3 = simt::Dim3;
using cudaStream_t = struct Stream*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719 };

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

__attribute__((always_inline)) inline void __syncthreads() { simt::meet_block(); }
inline void __syncwarp() { simt::meet_warp_and_memory(); }

inline void simt_check_mask(unsigned mask) {
  if (mask != 0xffffffffu) simt::fail("a shuffle without the whole warp: its lanes would have to be counted");
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
  simt_check_mask(mask);
  return simt::exchange("__shfl_xor_sync", value)[simt::me().lane ^ bits];
}
template <class T>
T __shfl_sync(unsigned mask, T value, int lane) {
  simt_check_mask(mask);
  return simt::exchange("__shfl_sync", value)[lane & 31];
}

// Threads are fibres of one thread: nothing comes between the read and the write.
inline uint32_t atomicMax(uint32_t* p, uint32_t value) {
  const uint32_t old = *p;
  if (value > old) *p = value;
  return old;
}

inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }

// The runtime's calls. Device memory is the host's; the device is whatever the test says.
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor, cudaDevAttrComputeCapabilityMinor, cudaDevAttrMultiProcessorCount };
inline cudaError_t cudaMalloc(void** p, size_t bytes) {
  *p = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  return *p ? cudaSuccess : cudaErrorInvalidValue;
}
inline cudaError_t cudaFree(void* p) {
  std::free(p);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  if (bytes) std::memcpy(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = simt::options().device;
  return cudaSuccess;
}
// Three multiprocessors: few, so that a persistent grid has blocks with several tiles.
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  const int sm = simt::options().devices[device];
  *value = attribute == cudaDevAttrMultiProcessorCount ? 3 : attribute == cudaDevAttrComputeCapabilityMajor ? sm / 10 : sm % 10;
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) {
  std::memset(p, value, bytes);
  return cudaSuccess;
}
