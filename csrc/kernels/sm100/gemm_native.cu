#include "../../numerics/layout.h"
#include "../gemm.cuh"
#include "../ptx/tensor_core5.h"
#include "../ptx/tensor_map.h"

// tcgen05 on one CTA: 128 rows of x × 128 columns (rows of w), the sums in tensor memory.
//
//   warps 0-3  copy a step's scales into a ring of stages (cp.async: from rows into atoms, zeros past the edges), then
//              read the sums out of tensor memory and write y
//   warp 4     one thread issues: scales to tensor memory, four mma a step
//   warp 5     one thread has a step's codes copied into the ring (TMA)
//
//   full[s]    128 arrivals for the scales, and one with the bytes of the codes     empty[s]  one: the mma that read it are done
//
// TMA brings what follows an expert's rows, too: rows of y that nobody writes come of it.
//
// cp and mma of one thread run in order only where a cp comes first: each stage has scale columns of its own.
namespace fp4ext::kernels {
namespace {

constexpr int kThreads = 192, kLoaders = 128, kStages = 4;
constexpr int kRow = 128, kTileBytes = kTile * kRow, kAtom = 512, kMmas = 4;
static_assert(kTile == kBoxRows && kRow == kBoxBytes);

struct Nvfp4 {
  static constexpr int kStep = 256, kBlock = 16, kAtoms = 4;  // an atom of scales for each mma of K = 64
  static __device__ __forceinline__ void mma(uint32_t d, uint64_t a, uint64_t b, uint32_t a_scales, uint32_t b_scales, int i, bool add) {
    tensor_mma_nvfp4(d, a, b, nvfp4_instruction(kTile), a_scales + 4 * i, b_scales + 4 * i, add);
  }
};
struct Mxfp8 {
  static constexpr int kStep = 128, kBlock = 32, kAtoms = 1;  // a byte of one atom for each mma of K = 32
  static __device__ __forceinline__ void mma(uint32_t d, uint64_t a, uint64_t b, uint32_t a_scales, uint32_t b_scales, int i, bool add) {
    tensor_mma_mxfp8(d, a, b, mxfp8_instruction(kTile, static_cast<uint32_t>(i)), a_scales, b_scales, add);
  }
};

template <class Format>
inline constexpr int kStageBytes = 2 * (kTileBytes + Format::kAtoms * kAtom);
template <class Format>
inline constexpr int kColumns = 4 * Format::kAtoms;  // of tensor memory, for one operand's scales of a stage

// Copies the scales of 128 rows of a step into atoms, zeros for rows from `count` on and past K.
template <class Format>
__device__ __forceinline__ void copy_scales(const Operand& o, int64_t first, int count, int64_t k, char* scales) {
  FP4_ROLLED
  for (int i = threadIdx.x; i < kTile * Format::kAtoms; i += kLoaders) {
    const int row = i / Format::kAtoms, atom = i % Format::kAtoms;
    const bool exists = row < count && k / Format::kBlock + atom * 4 < o.k_stored / Format::kBlock;
    const uint8_t* from = o.scales + (first + row) * (o.k_stored / Format::kBlock) + k / Format::kBlock + atom * 4;
    copy_async<4>(scales + atom * kAtom + swizzled_offset(row, 0, 4), exists ? from : o.scales, exists);
  }
}

template <class Format>
__global__ void __launch_bounds__(kThreads) gemm_native_kernel(const __grid_constant__ GemmArgs a, const __grid_constant__ TensorMap x_map,
                                                               const __grid_constant__ TensorMap w_map) {
  char* memory = shared_memory();
  auto* full = reinterpret_cast<uint64_t*>(memory + kStages * kStageBytes<Format>);
  auto *empty = full + kStages, *done = empty + kStages;
  auto* address = reinterpret_cast<uint32_t*>(done + 1);
  constexpr int kAllColumns = 256, kScales = kTile;  // the sums take the first 128
  static_assert(kScales + kStages * 2 * kColumns<Format> <= kAllColumns);

  const Rows rows = rows_of_tile(a, blockIdx.y, kTile);
  if (rows.begin >= rows.end) return;
  const int64_t n0 = static_cast<int64_t>(blockIdx.x) * kTile;
  if (rows.expert == a.experts) return write_zeros(a, rows, n0);
  const int steps = static_cast<int>((a.w.k_stored + Format::kStep - 1) / Format::kStep), warp = threadIdx.x / 32;

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(full + s, kLoaders + 1);
      mbarrier_init(empty + s, 1);
    }
    mbarrier_init(done, 1);
    fence_for_engines();
  }
  if (warp == 4) tensor_alloc(address, kAllColumns);
  tensor_fence_before();
  __syncthreads();
  tensor_fence_after();
  const uint32_t sums = *address;

  if (warp < 4) {
    const int w_count = static_cast<int>(a.w.rows - n0 < kTile ? a.w.rows - n0 : kTile), x_count = static_cast<int>(rows.end - rows.begin);
    constexpr int kAhead = kStages - 1;
    for (int i = 0; i < steps + kAhead; ++i) {
      if (i < steps) {
        mbarrier_wait(empty + i % kStages, (i / kStages & 1) ^ 1);
        char* x_scales = memory + i % kStages * kStageBytes<Format> + 2 * kTileBytes;
        const int64_t k = static_cast<int64_t>(i) * Format::kStep;
        copy_scales<Format>(a.x, rows.begin, x_count, k, x_scales);
        copy_scales<Format>(a.w, rows.expert * a.w.rows + n0, w_count, k, x_scales + Format::kAtoms * kAtom);
      }
      commit_copies();
      if (i < kAhead) continue;
      wait_copies<kAhead>();
      fence_for_engines();
      mbarrier_arrive(full + (i - kAhead) % kStages);
    }
  } else if (warp == 5 && elect_one()) {
    for (int i = 0; i < steps; ++i) {
      const int s = i % kStages;
      mbarrier_wait(empty + s, (i / kStages & 1) ^ 1);
      char* x_tile = memory + s * kStageBytes<Format>;
      mbarrier_expect(full + s, 2 * kTileBytes);
      copy_box(x_tile, &x_map, i * kRow, static_cast<int>(rows.begin), full + s);
      copy_box(x_tile + kTileBytes, &w_map, i * kRow, static_cast<int>(rows.expert * a.w.rows + n0), full + s);
    }
  } else if (warp == 4 && elect_one()) {
    for (int i = 0; i < steps; ++i) {
      const int s = i % kStages;
      mbarrier_wait(full + s, i / kStages & 1);
      tensor_fence_after();
      const uint32_t x_tile = shared_address(memory + s * kStageBytes<Format>), w_tile = x_tile + kTileBytes,
                     x_scales = w_tile + kTileBytes, w_scales = x_scales + Format::kAtoms * kAtom;
      const uint32_t x_columns = sums + kScales + s * 2 * kColumns<Format>, w_columns = x_columns + kColumns<Format>;
      for (int atom = 0; atom < Format::kAtoms; ++atom) {
        tensor_copy_scales(x_columns + 4 * atom, scales_descriptor(x_scales + atom * kAtom));
        tensor_copy_scales(w_columns + 4 * atom, scales_descriptor(w_scales + atom * kAtom));
      }
      const uint64_t x = operand_descriptor(x_tile), w = operand_descriptor(w_tile);
      for (int j = 0; j < kMmas; ++j) Format::mma(sums, x + 2 * j, w + 2 * j, x_columns, w_columns, j, i > 0 || j > 0);
      tensor_commit(empty + s);
    }
    tensor_commit(done);
  }
  __syncwarp();

  if (warp < 4) {
    mbarrier_wait(done, 0);
    tensor_fence_after();
    const int64_t row = rows.begin + threadIdx.x;
    const bool exists = row < rows.end;
    const double g_x = global_of(a.x, 0, exists ? row : 0);
    for (int column = 0; column < kTile; column += 16) {
      float part[16];
      tensor_load_16(part, sums + (static_cast<uint32_t>(warp * 32) << 16) + column);
      for (int j = 0; j < 16; ++j) {
        const int64_t n = n0 + column + j;
        if (exists && n < a.w.rows) store(a, row * a.w.rows + n, finish(a, part[j], g_x, global_of(a.w, rows.expert, n), n));
      }
    }
    tensor_fence_before();
  }
  __syncthreads();
  if (warp == 4) tensor_free(sums, kAllColumns);
}

template <class Format>
cudaError_t run(const GemmArgs& a, cudaStream_t stream) {
  TensorMap x_map, w_map;
  cudaError_t error = make_tensor_map(x_map, a.x.codes, a.x.rows, row_bytes(a.x));
  if (error == cudaSuccess) error = make_tensor_map(w_map, a.w.codes, a.experts * a.w.rows, row_bytes(a.w));
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>((a.w.rows + kTile - 1) / kTile), static_cast<unsigned>(most_tiles(a, kTile)));
  return launch(gemm_native_kernel<Format>, grid, kThreads, kStages * kStageBytes<Format> + 128, stream, a, x_map, w_map);
}

}  // namespace

cudaError_t gemm_sm100(const GemmArgs& args, cudaStream_t stream) {
  if (args.x.rows == 0 || args.w.rows == 0) return cudaSuccess;
  return args.x.elem == Elem::e2m1 ? run<Nvfp4>(args, stream) : run<Mxfp8>(args, stream);
}

}  // namespace fp4ext::kernels
