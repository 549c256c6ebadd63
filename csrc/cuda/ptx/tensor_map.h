#pragma once
#include "mbarrier.h"

#if defined(__CUDACC__)
#include <cudaTypedefs.h>
#endif

// TMA: an engine that copies a box of a matrix to shared memory and counts its bytes at an mbarrier (PTX ISA 9.7.9.25.5, sm_90 and later).
// Here: bytes, in boxes of some rows × 128; what lies outside of the matrix arrives as zeros, and counts. In shared memory a row's
// 16-byte pieces are at their place XOR row % 8.
namespace fp4ext::cuda {

inline constexpr int kBoxBytes = 128;

#if defined(__CUDACC__)

using TensorMap = CUtensorMap;

// The map of a matrix, rows one after the other, in boxes of box_rows; its address and row_bytes are multiples of 16. On the host.
inline cudaError_t make_tensor_map(TensorMap& map, const void* matrix, int64_t rows, int64_t row_bytes, int box_rows) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  if (error != cudaSuccess) return error;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(row_bytes), static_cast<cuuint64_t>(rows)}, stride = sizes[0];
  const cuuint32_t box[2] = {kBoxBytes, static_cast<cuuint32_t>(box_rows)}, step[2] = {1, 1};
  const CUresult result = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function)(
      &map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(matrix), sizes, &stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Copies the box whose first byte is `byte` of row `row`, to a multiple of 1024 in this CTA's shared memory. The bytes
// count at `barrier`; in a pair, at the leader's. The map is a __grid_constant__ of the kernel.
template <int kCtas>
__device__ __forceinline__ void copy_box(void* to, const TensorMap* map, int byte, int row, uint64_t* barrier) {
  if constexpr (kCtas == 1)
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(byte), "r"(row)
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.cta_group::2 [%0], [%1, {%3, %4}], [%2];" ::"r"(
            shared_address(to)),
        "l"(map), "r"(leader_address(barrier)), "r"(byte), "r"(row)
        : "memory");
}

#else

struct TensorMap {
  const char* matrix;
  int64_t rows, row_bytes;
  int box_rows;
};

inline cudaError_t make_tensor_map(TensorMap& map, const void* matrix, int64_t rows, int64_t row_bytes, int box_rows) {
  if ((reinterpret_cast<uintptr_t>(matrix) | row_bytes) % 16 != 0 || rows <= 0 || row_bytes <= 0 || box_rows > 256)
    return cudaErrorInvalidValue;
  map = {static_cast<const char*>(matrix), rows, row_bytes, box_rows};
  return cudaSuccess;
}

template <int kCtas>
void copy_box(void* to, const TensorMap* map, int byte, int row, uint64_t* barrier) {
  if (reinterpret_cast<uintptr_t>(to) % 1024 != 0) simt::fail("cp.async.bulk.tensor: a swizzled box begins at a multiple of 1024");
  simt::Block& own = simt::block();
  const size_t offset = static_cast<char*>(to) - shared_memory();
  if (offset + map->box_rows * kBoxBytes > own.shared_bytes) simt::fail("cp.async.bulk.tensor: beyond shared memory");
  const simt::Order order = simt::order(own.bulk_engine, simt::me().agent.knows);
  ++own.bulk_engine.epoch;
  simt::engine_copy_begins(own, offset, map->box_rows * kBoxBytes, order);
  own.bulk.push_back({false, [to, m = *map, byte, row, barrier, order, offset] {
                        for (int r = 0; r < m.box_rows; ++r)
                          for (int b = 0; b < kBoxBytes; b += 16) {
                            char* piece = static_cast<char*>(to) + r * kBoxBytes + (b ^ (r % 8 * 16));
                            if (row + r < m.rows && byte + b < m.row_bytes)
                              std::memcpy(piece, m.matrix + (row + r) * m.row_bytes + byte + b, 16);
                            else
                              std::memset(piece, 0, 16);
                          }
                        simt::Block& block = simt::block();
                        simt::engine_copy_ends(block, offset, m.box_rows * kBoxBytes, block.bulk_engine, order);
                        void* counted = kCtas == 1 ? barrier : simt::in_block(0, barrier);
                        simt::barrier_engine_counts(kCtas == 1 ? block : simt::block_of_cluster(0), counted, m.box_rows * kBoxBytes,
                                                    simt::done(block.bulk_engine, {{}, {}, order.rank, order.epoch}), order.knew);
                      }});
}

#endif

}  // namespace fp4ext::cuda
