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

struct SimtBarrier {
  int16_t count, pending;
  int32_t bytes : 30;
  uint32_t remote : 1;  // threads of another CTA arrive here
  uint32_t phase : 1;
  void turn_if_all_have_come() {
    if (pending == 0 && bytes == 0) {
      pending = count;
      phase ^= 1;
    }
    simt::made_progress();
  }
};
static_assert(sizeof(SimtBarrier) == 8);

inline void mbarrier_init(uint64_t* barrier, int count) {
  *reinterpret_cast<SimtBarrier*>(barrier) = {static_cast<int16_t>(count), static_cast<int16_t>(count), 0, 0, 0};
  simt::written(barrier, sizeof *barrier);
}
inline void mbarriers_are_made() { simt::fence_for_engines(simt::Known::in_cluster); }
template <int kCtas>
void mbarrier_arrive(uint64_t* barrier) {
  if (simt::me().accessed) simt::fail("tcgen05: an arrival without fence::before_thread_sync");
  auto* b = static_cast<SimtBarrier*>(kCtas == 1 ? barrier : simt::in_block(0, barrier));
  if (kCtas > 1 && simt::block().rank != 0) b->remote = 1;
  if (b->pending <= 0) simt::fail("mbarrier: more arrivals than it was made for");
  --b->pending;
  b->turn_if_all_have_come();
}
// An engine's arrival, which that of a tensor core is.
inline void engine_arrives(const simt::Block& block, uint64_t* barrier) {
  simt::engine_reads(block, block, barrier, sizeof *barrier);
  auto* b = reinterpret_cast<SimtBarrier*>(barrier);
  if (b->pending <= 0) simt::fail("mbarrier: more arrivals than it was made for");
  --b->pending;
  b->turn_if_all_have_come();
}
inline void mbarrier_expect(uint64_t* barrier, int bytes) {
  reinterpret_cast<SimtBarrier*>(barrier)->bytes += bytes;
  mbarrier_arrive<1>(barrier);
}
template <int kCtas = 1>
void mbarrier_wait(uint64_t* barrier, int parity) {
  const auto* b = reinterpret_cast<SimtBarrier*>(barrier);
  while (static_cast<int>(b->phase) == parity) simt::yield();
  if (kCtas == 1 && b->remote) simt::fail("mbarrier: a wait at the scope of a CTA for what threads of another CTA wrote");
  simt::me().synchronized = true;
}
template <int kCtas>
void fence_for_engines() {
  simt::fence_for_engines(kCtas == 1 ? simt::Known::in_cta : simt::Known::in_cluster);
}
inline bool elect_one() { return simt::me().lane == 0; }

#endif

}  // namespace fp4ext::cuda
