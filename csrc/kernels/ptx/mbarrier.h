#pragma once
#include "async_copy.h"

// mbarrier: a barrier in shared memory that counts arrivals, and turns its phase when all have come (PTX ISA 9.7.13.15).
namespace fp4ext::kernels {

#if defined(__CUDACC__)

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives, and makes the phase wait for so many bytes of bulk copies besides.
__device__ __forceinline__ void mbarrier_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
// Until the phase of that parity is over. A fresh barrier is in phase 0: to wait for parity 1 returns at once.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, int parity) {
  asm volatile("{\n.reg .pred done;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra WAIT;\n}" ::"r"(
                   shared_address(barrier)),
               "r"(parity)
               : "memory");
}
// What this thread wrote to shared memory, cp.async included, is seen by engines that read it on their own.
__device__ __forceinline__ void fence_for_engines() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// One lane of a whole warp.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected != 0;
}

#else

struct SimtBarrier {
  int16_t count, pending;
  int32_t bytes : 31;
  uint32_t phase : 1;
  void turn_if_all_have_come() {
    if (pending == 0 && bytes == 0) {
      pending = count;
      phase ^= 1;
    }
    ++simt::block().progress;
  }
};
static_assert(sizeof(SimtBarrier) == 8);

inline void mbarrier_init(uint64_t* barrier, int count) {
  *reinterpret_cast<SimtBarrier*>(barrier) = {static_cast<int16_t>(count), static_cast<int16_t>(count), 0, 0};
}
inline void mbarrier_arrive(uint64_t* barrier) {
  auto* b = reinterpret_cast<SimtBarrier*>(barrier);
  if (b->pending <= 0) simt::fail("mbarrier: more arrivals than it was made for");
  --b->pending;
  b->turn_if_all_have_come();
}
inline void mbarrier_expect(uint64_t* barrier, int bytes) {
  reinterpret_cast<SimtBarrier*>(barrier)->bytes += bytes;
  mbarrier_arrive(barrier);
}
inline void mbarrier_wait(uint64_t* barrier, int parity) {
  while (static_cast<int>(reinterpret_cast<SimtBarrier*>(barrier)->phase) == parity) simt::yield();
}
inline void fence_for_engines() {}
inline bool elect_one() { return simt::me().lane == 0; }

#endif

}  // namespace fp4ext::kernels
