#pragma once
#include "mbarrier.h"

#if !defined(__CUDACC__)
#include "../../numerics/e8m0.h"
#endif

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

inline uint32_t& memory(simt::Block& block, uint32_t lane, uint32_t column) {
  if (lane >= 128 || column >= block.tensor_columns) simt::fail("tcgen05: outside of tensor memory that was allocated");
  return block.tensor_memory[lane * block.tensor_columns + column];
}

// A byte of an operand through its descriptor, as block `by` has it read. The swizzle is on the bits of the address.
inline uint8_t byte_of(const simt::Block& block, const simt::Block& by, uint64_t descriptor, int row, int byte) {
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
  const char* p = block.shared.get() + (address - 1024);
  simt::engine_reads(block, by, p, 1);
  return static_cast<uint8_t>(*p);
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

inline void check_fenced() {
  if (simt::me().synchronized) simt::fail("tcgen05: after a synchronization, without fence::after_thread_sync");
}

// kBits: of an element; value(byte or nibble), scale(byte); the instruction's K is 256 / kBits.
template <int kCtas, int kBits, int kBlock, class Value, class Scale>
void mma(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t a_scales, uint32_t b_scales, bool add, Value value,
         Scale scale) {
  constexpr int kSize = 256 / kBits;
  const int n = (instruction >> 17 & 63) * 8;
  if ((instruction >> 27 & 3) != kCtas || n == 0) simt::fail("tcgen05.mma: an instruction descriptor that is not 128 rows for each CTA");
  if (n % (16 * kCtas) != 0) simt::fail("tcgen05.mma: columns that the group cannot share");
  const uint32_t a_byte = instruction >> 29 & 3, b_byte = instruction >> 4 & 3;
  const auto blocks = group<kCtas>();
  const simt::Block& by = simt::block();
  for (simt::Block* own : blocks) {
    // Row `row` of an operand in the shared memory of `block`; its scales are row `scaled` in this CTA's tensor memory.
    // Each quarter of tensor memory's lanes has the scales, and the hardware may take them from any.
    const auto element = [&](simt::Block* block, uint64_t operand, int row, uint32_t scales, uint32_t first, int scaled, int k) {
      const uint32_t quarter = (row + k) % 4;
      const uint32_t code = byte_of(*block, by, operand, row, k * kBits / 8) >> (k * kBits % 8);
      const uint32_t factor = memory(*own, quarter * 32 + scaled % 32, (scales & 0xffff) + scaled / 32) >> (8 * (first + k / kBlock));
      return static_cast<double>(value(code)) * static_cast<double>(scale(factor & 0xff));
    };
    std::vector<double> rows(128 * kSize), columns(n * kSize);
    for (int m = 0; m < 128; ++m)
      for (int k = 0; k < kSize; ++k) rows[m * kSize + k] = element(own, a, m, a_scales, a_byte, m, k);
    for (int c = 0; c < n; ++c)
      for (int k = 0; k < kSize; ++k) columns[c * kSize + k] = element(blocks[c / (n / kCtas)], b, c % (n / kCtas), b_scales, b_byte, c, k);
    for (int m = 0; m < 128; ++m)
      for (int c = 0; c < n; ++c) {
        float old = 0.0f;
        if (add) std::memcpy(&old, &memory(*own, m, (d & 0xffff) + c), 4);
        simt::ScaledTerms<kBits> terms(kBlock);
        for (int k = 0; k < kSize; ++k) terms.add(k, rows[m * kSize + k] * columns[c * kSize + k]);
        const float rounded = terms.sum_with(old);
        std::memcpy(&memory(*own, m, (d & 0xffff) + c), &rounded, 4);
      }
  }
}

template <int kCtas>
void issue(bool copy_of_scales, std::function<void()> run) {
  if (kCtas > 1 && simt::block().rank != 0) simt::fail("tcgen05: the CTA that does not lead the pair hands over work");
  check_fenced();
  simt::block().tensor.push_back({copy_of_scales, std::move(run)});
}

}  // namespace simt_tensor

// To allocate and to free may make a pair's CTAs wait for each other: nothing may be built on that.
template <int kCtas>
void tensor_alloc(uint32_t* address, int columns) {
  if (columns < 32 || columns > 512 || (columns & (columns - 1))) simt::fail("tcgen05.alloc: not a power of two from 32 to 512");
  if (kCtas > 1 && !simt::cluster_has_met()) simt::fail("tcgen05.alloc: the other CTA of the pair may not run yet");
  if (simt::me().lane == 0) {
    *address = 0;
    simt::block().tensor_columns = columns;
    simt::block().tensor_memory.assign(128 * columns, 0x7fc0dead);
    simt::written(address, sizeof *address);
  }
  simt::me().accessed = true;
  simt::meet_warp("tcgen05.alloc");
}
template <int kCtas>
void tensor_free(uint32_t, int columns) {
  if (columns != static_cast<int>(simt::block().tensor_columns)) simt::fail("tcgen05.dealloc: other columns than were allocated");
  for (int rank = 0; rank < kCtas; ++rank) {
    const simt::Block& block = kCtas == 1 ? simt::block() : simt::block_of_cluster(rank);
    if (!block.tensor.empty()) simt::fail("tcgen05.dealloc: with work outstanding");
  }
  simt::meet_warp("tcgen05.dealloc");
  simt::block().tensor_columns = 0;
}

template <int kCtas>
void tensor_copy_scales(uint32_t to, uint64_t atom) {
  simt_tensor::issue<kCtas>(true, [=] {
    const simt::Block& by = simt::block();
    for (simt::Block* block : simt_tensor::group<kCtas>())
      for (int row = 0; row < 32; ++row)
        for (int column = 0; column < 4; ++column) {
          uint32_t word = 0;
          for (int k = 0; k < 4; ++k) word |= static_cast<uint32_t>(simt_tensor::byte_of(*block, by, atom, row, column * 4 + k)) << (8 * k);
          for (int quarter = 0; quarter < 4; ++quarter) simt_tensor::memory(*block, quarter * 32 + row, (to & 0xffff) + column) = word;
        }
  });
}
template <int kCtas>
void tensor_mma_nvfp4(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t a_scales, uint32_t b_scales, bool add) {
  if ((instruction >> 7 & 7) != 1 || (instruction >> 10 & 3) != 1 || (instruction >> 23 & 1)) simt::fail("tcgen05.mma: not NVFP4");
  simt_tensor::issue<kCtas>(false, [=] {
    simt_tensor::mma<kCtas, 4, 16>(
        d, a, b, instruction, a_scales, b_scales, add, [](uint32_t u) { return E2M1::signed_value(u & 15u); },
        [](uint32_t u) { return decode_e4m3_scale(u & 0x7fu); });
  });
}
template <int kCtas>
void tensor_mma_mxfp8(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t a_scales, uint32_t b_scales, bool add) {
  if ((instruction >> 7 & 63) || !(instruction >> 23 & 1)) simt::fail("tcgen05.mma: not MXFP8");
  simt_tensor::issue<kCtas>(false, [=] {
    simt_tensor::mma<kCtas, 8, 32>(
        d, a, b, instruction, a_scales, b_scales, add, [](uint32_t u) { return decode_e4m3_scale(u & 0xffu); },
        [](uint32_t u) { return decode_e8m0(u); });
  });
}
// The arrival at the other CTA travels: it may come late, and after a later one.
template <int kCtas>
void tensor_commit(uint64_t* barrier) {
  simt_tensor::issue<kCtas>(false, [=] {
    engine_arrives(simt::block(), barrier);
    for (int rank = 1; rank < kCtas; ++rank)
      simt::block().bulk.push_back(
          {false, [=] { engine_arrives(simt::block_of_cluster(rank), static_cast<uint64_t*>(simt::in_block(rank, barrier))); }});
  });
}
inline void tensor_fence_before() { simt::me().accessed = false; }
inline void tensor_fence_after() { simt::me().synchronized = false; }

inline void tensor_load_16(float (&r)[16], uint32_t address) {
  simt_tensor::check_fenced();
  simt::me().accessed = true;
  const int first = simt::me().warp % 4 * 32;
  if (static_cast<int>(address >> 16) != first) simt::fail("tcgen05.ld: a warp reads lanes that are not its own");
  for (int i = 0; i < 16; ++i) std::memcpy(&r[i], &simt_tensor::memory(simt::block(), first + simt::me().lane, (address & 0xffff) + i), 4);
  simt::meet_warp("tcgen05.ld");
}

#endif

}  // namespace fp4ext::cuda
