#pragma once
#include <cuda_runtime_api.h>

namespace fp4ext::cuda {

// Of the current device: how many blocks a persistent grid has.
inline int multiprocessors() {
  int device = 0, count = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

}  // namespace fp4ext::cuda
