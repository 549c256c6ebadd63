#pragma once
#include "async_copy.h"
#include "cluster.h"

// mbarrier: a barrier in shared memory that counts arrivals, and turns its phase when all have come (PTX ISA 9.7.13.15).
// With kCtas = 2 the threads of a pair arrive at the barrier of the leading CTA: at the same place, in its shared memory. What the
// other CTA's threads wrote is handed over at the scope of the cluster alone; to wait for an engine's arrival takes none.
namespace fp4ext::cuda {

#if defined(__CUDACC__)

// Of the same place in the shared memory of the leading CTA.
__device__ __forceinline__ uint32_t leader_address(const void* p) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(address) : "r"(shared_address(p)));
  return address;
}

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
// After all have been made: engines know of them, and once the cluster has met, its other CTA.
__device__ __forceinline__ void mbarriers_are_made() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}
template <int kCtas>
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  if constexpr (kCtas == 1)
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
  else
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(leader_address(barrier)) : "memory");
}
// Arrives at a barrier of this CTA, and makes the phase wait for so many bytes of bulk copies besides.
__device__ __forceinline__ void mbarrier_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
// Until the phase of that parity is over. A fresh barrier is in phase 0: to wait for parity 1 returns at once.
// kCtas: whose threads arrive there.
template <int kCtas = 1>
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, int parity) {
  static constexpr char kScope[] = "mbarrier.try_wait.parity.acquire.cta", kPairs[] = "mbarrier.try_wait.parity.acquire.cluster";
  asm volatile("{\n.reg .pred done;\nWAIT:\n%2.shared::cta.b64 done, [%0], %1;\n@!done bra WAIT;\n}" ::"r"(shared_address(barrier)),
               "r"(parity), "C"(kCtas == 1 ? kScope : kPairs)
               : "memory");
}
// What this thread wrote to shared memory, cp.async included, is seen by engines that read it on their own; in a pair, by
// those that the other CTA hands work to.
template <int kCtas>
__device__ __forceinline__ void fence_for_engines() {
  if constexpr (kCtas == 1)
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  else
    asm volatile("fence.proxy.async.shared::cluster;" ::: "memory");
}
// One lane of a whole warp.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected != 0;
}

#else

inline void mbarrier_init(uint64_t* barrier, int count) { simt::barrier_init(barrier, count); }
inline void mbarriers_are_made() { simt::fence_proxy(simt::me().agent, simt::Scope::cluster); }
template <int kCtas>
void mbarrier_arrive(uint64_t* barrier) {
  if constexpr (kCtas == 1)
    simt::barrier_arrive(simt::block(), barrier, simt::Scope::block);
  else
    simt::barrier_arrive(simt::block_of_cluster(0), simt::in_block(0, barrier), simt::Scope::cluster);
}
inline void mbarrier_expect(uint64_t* barrier, int bytes) { simt::barrier_expect(barrier, bytes); }
template <int kCtas = 1>
void mbarrier_wait(uint64_t* barrier, int parity) {
  simt::barrier_wait(barrier, parity, kCtas == 1 ? simt::Scope::block : simt::Scope::cluster);
}
template <int kCtas>
void fence_for_engines() {
  simt::fence_proxy(simt::me().agent, kCtas == 1 ? simt::Scope::block : simt::Scope::cluster);
}
inline bool elect_one() {
  simt::me().diverged = true;
  return simt::me().lane == 0;
}

#endif

}  // namespace fp4ext::cuda
