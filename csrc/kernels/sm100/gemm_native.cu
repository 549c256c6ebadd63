#include "../../numerics/layout.h"
#include "../device.h"
#include "../gemm.cuh"
#include "../ptx/tensor_core5.h"
#include "../ptx/tensor_map.h"

// tcgen05, a CTA a tile: 128 rows of x × 128 columns (rows of w), the sums in tensor memory. A persistent grid: a CTA a multiprocessor,
// which takes one tile after the other, and writes one while it multiplies the next.
//
//   warps 0-3  read the sums of a tile out of tensor memory and write y
//   warps 4-7  copy a step's scales into a ring of stages (cp.async: from rows into atoms, zeros past the edges)
//   warp 8     one thread has a step's codes copied into the ring (TMA)
//   warp 9     one thread issues: scales to tensor memory, four mma a step
//
//   full[s]    128 arrivals for the scales, and one with the bytes of the codes     empty[s]   one: the mma that read it are done
//   summed[b]  one: all mma of a tile are done                                      written[b] 128: its sums have been read
//
// Steps are counted through the tiles, so that the ring never runs dry between two. TMA brings what follows an expert's rows, too: rows of
// y that nobody writes come of it. cp and mma of one thread run in order only where a cp comes first: each stage has scale columns of its own.
namespace fp4ext::kernels {
namespace {

constexpr int kThreads = 320, kWriters = 128, kLoaders = 128, kStages = 4, kAhead = kStages - 1;
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

// A tile of y, and the CTA's way through all of them.
struct Tile {
  Rows rows;
  int64_t n0;
  bool is_product;  // else it is past the last, or of rows of nobody
};
struct Tiles {
  int across, count;
  __device__ explicit Tiles(const GemmArgs& a)
      : across(static_cast<int>((a.w.rows + kTile - 1) / kTile)), count(across * static_cast<int>(most_tiles(a, kTile))) {}
  __device__ Tile operator()(const GemmArgs& a, int i) const {
    const Rows rows = rows_of_tile(a, i / across, kTile);
    return {rows, static_cast<int64_t>(i % across) * kTile, rows.begin < rows.end && rows.expert < a.experts};
  }
};

// The stage of the i-th step, the parity of its phase, and where its parts lie.
template <class Format>
struct Stage {
  int at, parity;
  char *x_tile, *w_tile, *x_scales, *w_scales;
  __device__ Stage(char* memory, int i)
      : at(i % kStages),
        parity(i / kStages & 1),
        x_tile(memory + at * kStageBytes<Format>),
        w_tile(x_tile + kTileBytes),
        x_scales(w_tile + kTileBytes),
        w_scales(x_scales + Format::kAtoms * kAtom) {}
};

// Copies the scales of 128 rows of a step into atoms, zeros for rows from `count` on and past K.
template <class Format>
__device__ __forceinline__ void copy_scales(const Operand& o, int64_t first, int count, int64_t k, char* scales) {
  FP4_ROLLED
  for (int i = threadIdx.x - kWriters; i < kTile * Format::kAtoms; i += kLoaders) {
    const int row = i / Format::kAtoms, atom = i % Format::kAtoms;
    const bool exists = row < count && k / Format::kBlock + atom * 4 < o.k_stored / Format::kBlock;
    const uint8_t* from = o.scales + (first + row) * (o.k_stored / Format::kBlock) + k / Format::kBlock + atom * 4;
    copy_async<4>(scales + atom * kAtom + swizzled_offset(row, 0, 4), exists ? from : o.scales, exists);
  }
}

template <class Format>
__global__ void __launch_bounds__(kThreads, 1)
    gemm_native_kernel(const __grid_constant__ GemmArgs a, const __grid_constant__ TensorMap x_map,
                       const __grid_constant__ TensorMap w_map) {
  char* memory = shared_memory();
  auto* full = reinterpret_cast<uint64_t*>(memory + kStages * kStageBytes<Format>);
  auto *empty = full + kStages, *summed = empty + kStages, *written = summed + 2;
  auto* address = reinterpret_cast<uint32_t*>(written + 2);
  constexpr int kAllColumns = 512, kScales = 2 * kTile;  // the sums of two tiles come first
  static_assert(kScales + kStages * 2 * kColumns<Format> <= kAllColumns);
  const int steps = static_cast<int>((a.w.k_stored + Format::kStep - 1) / Format::kStep), warp = threadIdx.x / 32;

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(full + s, kLoaders + 1);
      mbarrier_init(empty + s, 1);
    }
    for (int b = 0; b < 2; ++b) {
      mbarrier_init(summed + b, 1);
      mbarrier_init(written + b, kWriters);
    }
    fence_for_engines();
  }
  if (warp == 9) tensor_alloc(address, kAllColumns);
  tensor_fence_before();
  __syncthreads();
  tensor_fence_after();
  const uint32_t sums = *address;

  const Tiles tiles(a);
  int i = 0, turn = 0;  // steps and products so far
  if (warp < 4) {
    for (int t = blockIdx.x; t < tiles.count; t += gridDim.x) {
      const auto [rows, n0, is_product] = tiles(a, t);
      if (!is_product) {
        write_zeros(a, rows, n0, kWriters);
        continue;
      }
      const int b = turn & 1, parity = turn++ >> 1 & 1;
      mbarrier_wait(summed + b, parity);
      tensor_fence_after();
      const int64_t row = rows.begin + threadIdx.x;
      const bool exists = row < rows.end;
      const double g_x = global_of(a.x, 0, exists ? row : 0);
      for (int column = 0; column < kTile; column += 16) {
        float part[16];
        tensor_load_16(part, sums + b * kTile + (static_cast<uint32_t>(warp * 32) << 16) + column);
        for (int j = 0; j < 16; ++j) {
          const int64_t n = n0 + column + j;
          if (exists && n < a.w.rows) store(a, row * a.w.rows + n, finish(a, part[j], g_x, global_of(a.w, rows.expert, n), n));
        }
      }
      tensor_fence_before();
      mbarrier_arrive(written + b);
    }
  } else if (warp < 8) {
    // A step's copies have landed when kAhead more have been issued.
    const auto arrive = [&](int step) {
      commit_copies();
      if (step < kAhead) return;
      wait_copies<kAhead>();
      fence_for_engines();
      mbarrier_arrive(full + (step - kAhead) % kStages);
    };
    for (int t = blockIdx.x; t < tiles.count; t += gridDim.x) {
      const auto [rows, n0, is_product] = tiles(a, t);
      if (!is_product) continue;
      const int w_count = static_cast<int>(a.w.rows - n0 < kTile ? a.w.rows - n0 : kTile),
                x_count = static_cast<int>(rows.end - rows.begin);
      for (int k = 0; k < steps; ++k, ++i) {
        const Stage<Format> stage(memory, i);
        mbarrier_wait(empty + stage.at, stage.parity ^ 1);
        copy_scales<Format>(a.x, rows.begin, x_count, static_cast<int64_t>(k) * Format::kStep, stage.x_scales);
        copy_scales<Format>(a.w, rows.expert * a.w.rows + n0, w_count, static_cast<int64_t>(k) * Format::kStep, stage.w_scales);
        arrive(i);
      }
    }
    for (const int end = i + kAhead; i < end; ++i) arrive(i);
  } else if (warp == 8 && elect_one()) {
    for (int t = blockIdx.x; t < tiles.count; t += gridDim.x) {
      const auto [rows, n0, is_product] = tiles(a, t);
      for (int k = 0; is_product && k < steps; ++k, ++i) {
        const Stage<Format> stage(memory, i);
        mbarrier_wait(empty + stage.at, stage.parity ^ 1);
        mbarrier_expect(full + stage.at, 2 * kTileBytes);
        copy_box(stage.x_tile, &x_map, k * kRow, static_cast<int>(rows.begin), full + stage.at);
        copy_box(stage.w_tile, &w_map, k * kRow, static_cast<int>(rows.expert * a.w.rows + n0), full + stage.at);
      }
    }
  } else if (warp == 9 && elect_one()) {
    for (int t = blockIdx.x; t < tiles.count; t += gridDim.x) {
      if (!tiles(a, t).is_product) continue;
      const int b = turn & 1, parity = turn++ >> 1 & 1;
      mbarrier_wait(written + b, parity ^ 1);
      tensor_fence_after();
      for (int k = 0; k < steps; ++k, ++i) {
        const Stage<Format> stage(memory, i);
        mbarrier_wait(full + stage.at, stage.parity);
        tensor_fence_after();
        const uint32_t x_columns = sums + kScales + stage.at * 2 * kColumns<Format>, w_columns = x_columns + kColumns<Format>;
        for (int atom = 0; atom < Format::kAtoms; ++atom) {
          tensor_copy_scales(x_columns + 4 * atom, scales_descriptor(shared_address(stage.x_scales + atom * kAtom)));
          tensor_copy_scales(w_columns + 4 * atom, scales_descriptor(shared_address(stage.w_scales + atom * kAtom)));
        }
        const uint64_t x = operand_descriptor(shared_address(stage.x_tile)), w = operand_descriptor(shared_address(stage.w_tile));
        for (int j = 0; j < kMmas; ++j) Format::mma(sums + b * kTile, x + 2 * j, w + 2 * j, x_columns, w_columns, j, k > 0 || j > 0);
        tensor_commit(empty + stage.at);
      }
      tensor_commit(summed + b);
    }
  }
  __syncwarp();
  __syncthreads();
  if (warp == 9) tensor_free(sums, kAllColumns);
}

template <class Format>
cudaError_t run(const GemmArgs& a, cudaStream_t stream) {
  TensorMap x_map, w_map;
  cudaError_t error = make_tensor_map(x_map, a.x.codes, a.x.rows, row_bytes(a.x));
  if (error == cudaSuccess) error = make_tensor_map(w_map, a.w.codes, a.experts * a.w.rows, row_bytes(a.w));
  if (error != cudaSuccess) return error;
  const int64_t tiles = (a.w.rows + kTile - 1) / kTile * most_tiles(a, kTile), most = multiprocessors();
  const dim3 grid(static_cast<unsigned>(tiles < most ? tiles : most));
  return launch(gemm_native_kernel<Format>, grid, kThreads, kStages * kStageBytes<Format> + 128, stream, a, x_map, w_map);
}

}  // namespace

cudaError_t gemm_sm100(const GemmArgs& args, cudaStream_t stream) {
  if (args.x.rows == 0 || args.w.rows == 0) return cudaSuccess;
  return args.x.elem == Elem::e2m1 ? run<Nvfp4>(args, stream) : run<Mxfp8>(args, stream);
}

}  // namespace fp4ext::kernels
