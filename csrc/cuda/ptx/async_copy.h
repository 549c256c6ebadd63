#pragma once
#include "launch.h"

// cp.async: copies from memory to shared memory that a thread starts, groups and waits for (PTX ISA 9.7.9.25.3). What
// landed is seen by the thread that waited; the others see it after a barrier.
namespace fp4ext::cuda {

#if defined(__CUDACC__)

__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// kBytes: 4, 8 or 16; both addresses are multiples of it. Only 16 may pass the L1 cache by. Without `exists` nothing is read,
// and zeros are written.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* to, const void* from, bool exists = true) {
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(exists ? 16 : 0) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from), "n"(kBytes), "r"(exists ? kBytes : 0)
                 : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until no more than kPending of this thread's groups are under way.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

#else

template <int kBytes>
void copy_async(void* to, const void* from, bool exists = true) {
  simt::copy_async(to, from, kBytes, exists);
}
inline void commit_copies() { simt::commit_copies(); }
template <int kPending>
void wait_copies() {
  simt::wait_copies(kPending);
}

#endif

}  // namespace fp4ext::cuda
