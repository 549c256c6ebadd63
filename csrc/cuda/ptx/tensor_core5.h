#pragma once
#include "mbarrier.h"

// tcgen05, the fifth generation of tensor cores (PTX ISA 9.7.16; sm_100a, sm_103a). It is an engine of its own: a
// thread hands it operands in shared memory and accumulators in tensor memory (128 lanes × 512 columns of 32 bits), and it
// arrives at an mbarrier when it is done.
//
// A pair of CTAs (kCtas = 2, cta_group::2) multiplies 256 rows of a, 128 from the shared memory of each, by n rows of b, n/2 from each.
// Each gets its 128 rows of d, all n columns, in its tensor memory, and has there the scales of its rows of a and of all n of b. The
// leading CTA's thread hands it all over: addresses are the same in both, and what is copied to tensor memory lies in each one's own
// shared memory. All tcgen05 of a kernel are of one kCtas.
namespace fp4ext::cuda {

// An operand in shared memory, K-major, rows of 128 bytes whose 16-byte pieces are at their place XOR row % 8, in atoms of
// 8 rows (1024 bytes apart). 32 bytes further along K add 2.
__device__ inline uint64_t operand_descriptor(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(1024 >> 4) << 32 | uint64_t{1} << 46 | uint64_t{2} << 61;
}
// An atom of scales: 512 bytes, as numerics/layout.h has it; 8 rows × 16 bytes after each other.
__device__ inline uint64_t scales_descriptor(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(128 >> 4) << 16 | static_cast<uint64_t>(128 >> 4) << 32 |
         uint64_t{1} << 46;
}
// What is multiplied: m rows × n columns; E2M1 with E4M3 scales, or E4M3 with E8M0 scales, of which `scale` is the byte.
__device__ inline uint32_t product_size(int m, int n) { return static_cast<uint32_t>(n >> 3) << 17 | static_cast<uint32_t>(m >> 7) << 27; }
__device__ inline uint32_t nvfp4_instruction(int m, int n) { return product_size(m, n) | 1u << 7 | 1u << 10; }
__device__ inline uint32_t mxfp8_instruction(int m, int n, uint32_t scale) {
  return product_size(m, n) | scale << 4 | 1u << 23 | scale << 29;
}

#if defined(__CUDACC__)

// The digit of cta_group in the text of an instruction.
template <int kCtas>
struct CtaGroup {
  static constexpr char digit[] = {'0' + kCtas, '\0'};
};

// A whole warp allocates and frees, in a pair one of each CTA; the address lands in shared memory.
template <int kCtas>
__device__ __forceinline__ void tensor_alloc(uint32_t* address, int columns) {
  asm volatile("tcgen05.alloc.cta_group::%2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(shared_address(address)), "r"(columns),
               "C"(CtaGroup<kCtas>::digit)
               : "memory");
}
template <int kCtas>
__device__ __forceinline__ void tensor_free(uint32_t address, int columns) {
  asm volatile("tcgen05.dealloc.cta_group::%2.sync.aligned.b32 %0, %1;" ::"r"(address), "r"(columns), "C"(CtaGroup<kCtas>::digit));
}
// An atom of scales to four columns of tensor memory, for all four quarters of its lanes.
template <int kCtas>
__device__ __forceinline__ void tensor_copy_scales(uint32_t to, uint64_t atom) {
  asm volatile("tcgen05.cp.cta_group::%2.32x128b.warpx4 [%0], %1;" ::"r"(to), "l"(atom), "C"(CtaGroup<kCtas>::digit) : "memory");
}
// d = a·bᵀ, or with `add` d += a·bᵀ: K of 64 (E2M1) or 32 (E4M3).
template <int kCtas>
__device__ __forceinline__ void tensor_mma_nvfp4(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t a_scales,
                                                 uint32_t b_scales, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
      "tcgen05.mma.cta_group::%7.kind::mxf4nvf4.block_scale.block16 [%0], %1, %2, %3, [%4], [%5], p;\n}" ::"r"(d),
      "l"(a), "l"(b), "r"(instruction), "r"(a_scales), "r"(b_scales), "r"(static_cast<int>(add)), "C"(CtaGroup<kCtas>::digit)
      : "memory");
}
template <int kCtas>
__device__ __forceinline__ void tensor_mma_mxfp8(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t a_scales,
                                                 uint32_t b_scales, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
      "tcgen05.mma.cta_group::%7.kind::mxf8f6f4.block_scale.block32 [%0], %1, %2, %3, [%4], [%5], p;\n}" ::"r"(d),
      "l"(a), "l"(b), "r"(instruction), "r"(a_scales), "r"(b_scales), "r"(static_cast<int>(add)), "C"(CtaGroup<kCtas>::digit)
      : "memory");
}
// Arrives at the barrier, in a pair at both CTAs', when all that this thread has issued is done.
template <int kCtas>
__device__ __forceinline__ void tensor_commit(uint64_t* barrier) {
  if constexpr (kCtas == 1)
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
  else
    asm volatile(
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" ::"r"(shared_address(barrier)),
        "h"(static_cast<uint16_t>(0b11))
        : "memory");
}
// Order between tcgen05 and a synchronization of threads: before arriving, and after having waited.
__device__ __forceinline__ void tensor_fence_before() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
__device__ __forceinline__ void tensor_fence_after() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }

// Sixteen columns of this lane. Warp w of a block may read lanes 32·(w % 4) and the 31 after.
__device__ __forceinline__ void tensor_load_16(float (&r)[16], uint32_t address) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x16.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, [%16];\n"
      "tcgen05.wait::ld.sync.aligned;"
      : "=f"(r[0]), "=f"(r[1]), "=f"(r[2]), "=f"(r[3]), "=f"(r[4]), "=f"(r[5]), "=f"(r[6]), "=f"(r[7]), "=f"(r[8]), "=f"(r[9]), "=f"(r[10]),
        "=f"(r[11]), "=f"(r[12]), "=f"(r[13]), "=f"(r[14]), "=f"(r[15])
      : "r"(address)
      : "memory");
}

#else

// Shared memory as engines address it.
inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(static_cast<const char*>(p) - shared_memory()) + 1024; }

namespace simt_tensor {

// Where a byte of an operand lies in shared memory, through its descriptor. The swizzle is on the bits of the address.
inline size_t place_of(const simt::Block& block, uint64_t descriptor, int row, int byte) {
  const uint32_t start = (descriptor & 0x3fff) << 4, group = (descriptor >> 32 & 0x3fff) << 4, across = (descriptor >> 16 & 0x3fff) << 4;
  if ((descriptor >> 46 & 7) != 1) simt::fail("tcgen05: a descriptor without its constant");
  uint32_t address;
  if (descriptor >> 61 == 2) {
    address = start + row / 8 * group + row % 8 * 128 + byte;
    address ^= (address >> 7 & 7) << 4;
  } else {
    address = start + row / 8 * group + byte / 16 * across + row % 8 * 16 + byte % 16;
  }
  if (address < 1024 || address - 1024 >= block.shared_bytes) simt::fail("tcgen05: a descriptor outside of shared memory");
  return address - 1024;
}
// Sixteen bytes side by side, read by the tensor core.
inline const uint8_t* piece_of(simt::Block& block, uint64_t descriptor, int row, int byte, const simt::Order& order) {
  const size_t place = place_of(block, descriptor, row, byte);
  simt::engine_reads(block, place, 16, simt::block().tensor_engine, order);
  return reinterpret_cast<const uint8_t*>(block.shared.get()) + place;
}

// The blocks of a group, none of which may have exited.
template <int kCtas>
std::array<simt::Block*, kCtas> group() {
  if constexpr (kCtas == 1) return {&simt::block()};
  std::array<simt::Block*, kCtas> blocks;
  for (int rank = 0; rank < kCtas; ++rank) {
    blocks[rank] = &simt::block_of_cluster(rank);
    if (!blocks[rank]->alive) simt::fail("tcgen05: a CTA of the pair has exited");
  }
  return blocks;
}

// Scales lie in each quarter of the lanes on their own: rows 32 q to 32 q + 31 of d are made with those of quarter q.
template <int kCtas, class Line>
void mma(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t a_scales, uint32_t b_scales, bool add,
         const simt::Order& order) {
  const int n = (instruction >> 17 & 63) * 8;
  if ((instruction >> 27 & 3) != kCtas || n == 0) simt::fail("tcgen05.mma: an instruction descriptor that is not 128 rows for each CTA");
  if (n % (16 * kCtas) != 0) simt::fail("tcgen05.mma: columns that the group cannot share");
  const uint32_t a_byte = instruction >> 29 & 3, b_byte = instruction >> 4 & 3;
  const auto blocks = group<kCtas>();
  std::array<Line, 32> rows;
  std::vector<Line> columns(n);
  for (simt::Block* own : blocks)
    for (int quarter = 0; quarter < 4; ++quarter) {
      // Row `row` of an operand in the shared memory of `block`; its scales are row `scaled` in this quarter.
      const auto decode = [&](Line& line, simt::Block* block, uint64_t operand, int row, uint32_t scales, uint32_t first, int scaled) {
        uint8_t codes[32];
        for (int half = 0; half < 2; ++half) std::memcpy(codes + 16 * half, piece_of(*block, operand, row, 16 * half, order), 16);
        line.decode(codes, simt::tensor_word(*own, 32 * quarter + scaled % 32, (scales & 0xffff) + scaled / 32) >> (8 * first));
      };
      for (int r = 0; r < 32; ++r) decode(rows[r], own, a, 32 * quarter + r, a_scales, a_byte, 32 * quarter + r);
      for (int c = 0; c < n; ++c) decode(columns[c], blocks[c / (n / kCtas)], b, c % (n / kCtas), b_scales, b_byte, c);
      for (int r = 0; r < 32; ++r)
        for (int c = 0; c < n; ++c) {
          const int lane = 32 * quarter + r, column = (d & 0xffff) + c;
          uint32_t& at = simt::tensor_word(*own, lane, column);
          float sum = 0.0f;
          if (add) std::memcpy(&sum, &at, 4);
          sum = simt::dot(rows[r], columns[c], sum);
          std::memcpy(&at, &sum, 4);
          simt::tensor_writes(simt::tensor_cell(*own, lane, column), simt::block().tensor_engine, order);
        }
    }
}

template <int kCtas>
void issue(bool copy_of_scales, std::function<void(const simt::Order&)> run) {
  if (kCtas > 1 && simt::block().rank != 0) simt::fail("tcgen05: the CTA that does not lead the pair hands over work");
  const simt::Order order = simt::order(simt::block().tensor_engine, simt::me().agent.fenced);
  simt::block().tensor.push_back({copy_of_scales, [run = std::move(run), order] { run(order); }});
}

}  // namespace simt_tensor

// In a pair both CTAs take part, so both must run.
template <int kCtas>
__attribute__((always_inline)) inline void tensor_alloc(uint32_t* address, int columns) {
  simt::check_aligned("tcgen05.alloc");
  if (kCtas > 1 && !simt::cluster_has_met()) simt::fail("tcgen05.alloc: the other CTA of the pair may not run yet");
  if (simt::me().lane == 0) *address = simt::tensor_allocate(columns);
  simt::meet_warp("tcgen05.alloc");
}
template <int kCtas>
__attribute__((always_inline)) inline void tensor_free(uint32_t address, int columns) {
  simt::check_aligned("tcgen05.dealloc");
  simt::meet_warp("tcgen05.dealloc");
  bool outstanding = false;
  for (int rank = 0; rank < kCtas; ++rank) outstanding |= !(kCtas == 1 ? simt::block() : simt::block_of_cluster(rank)).tensor.empty();
  if (simt::me().lane == 0) simt::tensor_release(address, columns, outstanding);
}

template <int kCtas>
void tensor_copy_scales(uint32_t to, uint64_t atom) {
  simt_tensor::issue<kCtas>(true, [=](const simt::Order& order) {
    for (simt::Block* block : simt_tensor::group<kCtas>())
      for (int row = 0; row < 32; ++row) {
        const uint8_t* words = simt_tensor::piece_of(*block, atom, row, 0, order);
        for (int column = 0; column < 4; ++column)
          for (int quarter = 0; quarter < 4; ++quarter)
            std::memcpy(&simt::tensor_word(*block, quarter * 32 + row, (to & 0xffff) + column), words + 4 * column, 4);
      }
  });
}
template <int kCtas>
void tensor_mma_nvfp4(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t a_scales, uint32_t b_scales, bool add) {
  if ((instruction >> 7 & 7) != 1 || (instruction >> 10 & 3) != 1 || (instruction >> 23 & 1)) simt::fail("tcgen05.mma: not NVFP4");
  simt_tensor::issue<kCtas>(false, [=](const simt::Order& order) {
    simt_tensor::mma<kCtas, simt::Fp4Line>(d, a, b, instruction, a_scales, b_scales, add, order);
  });
}
template <int kCtas>
void tensor_mma_mxfp8(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t a_scales, uint32_t b_scales, bool add) {
  if ((instruction >> 7 & 63) || !(instruction >> 23 & 1)) simt::fail("tcgen05.mma: not MXFP8");
  simt_tensor::issue<kCtas>(false, [=](const simt::Order& order) {
    simt_tensor::mma<kCtas, simt::Fp8Line>(d, a, b, instruction, a_scales, b_scales, add, order);
  });
}
// The arrival at the other CTA travels: it may come late, and after a later one.
template <int kCtas>
void tensor_commit(uint64_t* barrier) {
  simt_tensor::issue<kCtas>(false, [=](const simt::Order& order) {
    const simt::Message done = simt::done(simt::block().tensor_engine, order);
    simt::barrier_engine_arrives(simt::block(), barrier, done, order.knew);
    for (int rank = 1; rank < kCtas; ++rank)
      simt::block().bulk.push_back({false, [=] {
                                      void* other = simt::in_block(rank, barrier);
                                      simt::barrier_engine_arrives(simt::block_of_cluster(rank), other, done, order.knew);
                                    }});
  });
  ++simt::block().tensor_engine.epoch;
}
inline void tensor_fence_before() { simt::tensor_fence_before(simt::me().agent); }
inline void tensor_fence_after() { simt::tensor_fence_after(simt::me().agent); }

__attribute__((always_inline)) inline void tensor_load_16(float (&r)[16], uint32_t address) {
  simt::check_aligned("tcgen05.ld");
  const int first = simt::me().warp % 4 * 32;
  if (static_cast<int>(address >> 16) != first) simt::fail("tcgen05.ld: a warp reads lanes that are not its own");
  for (int i = 0; i < 16; ++i) {
    std::memcpy(&r[i], &simt::tensor_word(simt::block(), first + simt::me().lane, (address & 0xffff) + i), 4);
    simt::tensor_reads(simt::tensor_cell(simt::block(), first + simt::me().lane, (address & 0xffff) + i));
  }
  simt::meet_warp("tcgen05.ld");
}

#endif

}  // namespace fp4ext::cuda
