#include "../../numerics/layout.h"
#include "../device.h"
#include "../gemm.cuh"
#include "../ptx/tensor_core5.h"
#include "../ptx/tensor_map.h"

// tcgen05: 128 rows of x × 128 columns (rows of w) a CTA, the sums in tensor memory. A persistent grid: a CTA a multiprocessor, which
// takes one tile after the other, and writes one while it multiplies the next. With kCtas = 2 a pair takes a tile of 256 rows: each has
// its own 128 rows of x, the scales of all 128 columns, and the codes of 64 of them, which the tensor cores of both read. So a pair
// fetches three quarters of the codes that two CTAs fetch. It is not 256 columns: the sums of two tiles would fill tensor memory, and
// leave no columns for scales.
//
//   warps 0-3  read the sums of a tile out of tensor memory and write y
//   warps 4-9  each copies the scales of one stage of the ring (cp.async: from rows into atoms, zeros past the edges)
//   warp 10    one thread has a step's codes copied into the ring (TMA)
//   warp 11    in the leading CTA one thread issues: scales to tensor memory, four mma a step
//
//   full[s]    the leader's: an arrival for each CTA's scales, and one with the bytes of all codes     empty[s]   one: the mma are done
//   summed[b]  one: all mma of a tile are done                                     written[b] the leader's: its sums have been read
//
// Steps are counted through the tiles, so that the ring never runs dry between two. TMA brings what follows an expert's rows, too: rows of
// y that nobody writes come of it. cp and mma of one thread run in order only where a cp comes first: each stage has scale columns of its own.
namespace fp4ext::cuda {
namespace {

constexpr int kStages = 6, kWriters = 4, kFetcher = kWriters + kStages, kIssuer = kFetcher + 1, kThreads = 32 * (kIssuer + 1);  // warps
constexpr int kRow = 128, kAtom = 512, kMmas = 4;
static_assert(kRow == kBoxBytes && kTile == 32 * kWriters);

template <int kCtas>
struct Nvfp4 {
  static constexpr int kStep = 256, kBlock = 16, kAtoms = 4;  // an atom of scales for each mma of K = 64
  static __device__ __forceinline__ void mma(uint32_t d, uint64_t a, uint64_t b, uint32_t a_scales, uint32_t b_scales, int i, bool add) {
    tensor_mma_nvfp4<kCtas>(d, a, b, nvfp4_instruction(kCtas * kTile, kTile), a_scales + 4 * i, b_scales + 4 * i, add);
  }
};
template <int kCtas>
struct Mxfp8 {
  static constexpr int kStep = 128, kBlock = 32, kAtoms = 1;  // a byte of one atom for each mma of K = 32
  static __device__ __forceinline__ void mma(uint32_t d, uint64_t a, uint64_t b, uint32_t a_scales, uint32_t b_scales, int i, bool add) {
    tensor_mma_mxfp8<kCtas>(d, a, b, mxfp8_instruction(kCtas * kTile, kTile, static_cast<uint32_t>(i)), a_scales, b_scales, add);
  }
};

// What a CTA has of a step in its shared memory, and of tensor memory for one operand's scales.
template <class Format, int kCtas>
struct Sizes {
  static constexpr int kCodesOfX = kTile * kRow, kCodesOfW = kTile / kCtas * kRow, kScales = Format::kAtoms * kAtom;
  static constexpr int kStage = kCodesOfX + kCodesOfW + 2 * kScales, kColumns = 4 * Format::kAtoms;
};

// A CTA's part of a tile of y, and its cluster's way through all of them.
struct Tile {
  Rows rows;  // none, where the other CTA's are the last
  int64_t n0;
  bool is_product;  // else it is past the last, or of unassigned rows
};
template <int kCtas>
struct Tiles {
  int rank, across, count;
  __device__ explicit Tiles(const GemmArgs& a)
      : rank(cta_rank<kCtas>()),
        across(static_cast<int>((a.w.rows + kTile - 1) / kTile)),
        count(across * static_cast<int>(most_tiles(a, kCtas * kTile))) {}
  __device__ int first() const { return blockIdx.x / kCtas; }
  __device__ int stride() const { return gridDim.x / kCtas; }
  __device__ Tile operator()(const GemmArgs& a, int i) const {
    Rows rows = rows_of_tile(a, i / across, kCtas * kTile);
    const bool is_product = rows.begin < rows.end && rows.expert < a.experts;
    rows.begin += rank * kTile;
    rows.end = rows.end < rows.begin + kTile ? rows.end : rows.begin + kTile;
    return {rows, static_cast<int64_t>(i % across) * kTile, is_product};
  }
};

// The stage of the i-th step, the parity of its phase, and where its parts lie.
template <class Format, int kCtas>
struct Stage {
  using S = Sizes<Format, kCtas>;
  int at, parity;
  char *x_tile, *w_tile, *x_scales, *w_scales;
  __device__ Stage(char* memory, int i)
      : at(i % kStages),
        parity(i / kStages & 1),
        x_tile(memory + at * S::kStage),
        w_tile(x_tile + S::kCodesOfX),
        x_scales(w_tile + S::kCodesOfW),
        w_scales(x_scales + S::kScales) {}
};

// A warp copies the scales of 128 rows of a step into atoms, zeros for rows from `count` on and past K.
template <class Format>
__device__ __forceinline__ void copy_scales(const Operand& o, int64_t first, int64_t count, int64_t k, char* scales) {
  FP4_ROLLED
  for (int i = threadIdx.x % 32; i < kTile * Format::kAtoms; i += 32) {
    const int row = i / Format::kAtoms, atom = i % Format::kAtoms;
    const bool exists = row < count && k / Format::kBlock + atom * 4 < o.k_stored / Format::kBlock;
    const uint8_t* from = o.scales + (first + row) * (o.k_stored / Format::kBlock) + k / Format::kBlock + atom * 4;
    copy_async<4>(scales + atom * kAtom + swizzled_offset(row, 0, 4), exists ? from : o.scales, exists);
  }
}

// What the lanes of a warp did is handed over by one of them.
template <int kCtas>
__device__ __forceinline__ void arrive_of_warp(uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive<kCtas>(barrier);
}

template <class Format, int kCtas>
__global__ void __launch_bounds__(kThreads, 1)
    gemm_native_kernel(const __grid_constant__ GemmArgs a, const __grid_constant__ TensorMap x_map,
                       const __grid_constant__ TensorMap w_map) {
  using S = Sizes<Format, kCtas>;
  char* memory = shared_memory();
  auto* full = reinterpret_cast<uint64_t*>(memory + kStages * S::kStage);
  auto *empty = full + kStages, *summed = empty + kStages, *written = summed + 2;
  auto* address = reinterpret_cast<uint32_t*>(written + 2);
  constexpr int kAllColumns = 512, kScaleColumns = 2 * kTile;  // the sums of two tiles come first
  static_assert(kScaleColumns + kStages * 2 * S::kColumns <= kAllColumns);
  const int steps = static_cast<int>((a.w.k_stored + Format::kStep - 1) / Format::kStep), warp = threadIdx.x / 32;

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(full + s, kCtas + 1);
      mbarrier_init(empty + s, 1);
    }
    for (int b = 0; b < 2; ++b) {
      mbarrier_init(summed + b, 1);
      mbarrier_init(written + b, kCtas * kWriters);
    }
    mbarriers_are_made();
  }
  if constexpr (kCtas > 1) meet_cluster<kCtas>();  // a pair allocates once both of its CTAs run
  __syncwarp();
  if (warp == kIssuer) tensor_alloc<kCtas>(address, kAllColumns);
  tensor_fence_before();
  meet_cluster<kCtas>();
  tensor_fence_after();
  const uint32_t sums = *address;

  const Tiles<kCtas> tiles(a);
  int i = 0, turn = 0;  // steps and products so far
  if (warp < kWriters) {
    for (int t = tiles.first(); t < tiles.count; t += tiles.stride()) {
      const auto [rows, n0, is_product] = tiles(a, t);
      if (!is_product) {
        write_zeros(a, rows, n0, 32 * kWriters);
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
      arrive_of_warp<kCtas>(written + b);
    }
  } else if (warp < kFetcher) {
    for (int t = tiles.first(); t < tiles.count; t += tiles.stride()) {
      const auto [rows, n0, is_product] = tiles(a, t);
      for (int k = 0; is_product && k < steps; ++k, ++i) {
        const Stage<Format, kCtas> stage(memory, i);
        if (stage.at != warp - kWriters) continue;
        mbarrier_wait(empty + stage.at, stage.parity ^ 1);
        const int64_t at = static_cast<int64_t>(k) * Format::kStep;
        copy_scales<Format>(a.x, rows.begin, rows.end - rows.begin, at, stage.x_scales);
        copy_scales<Format>(a.w, rows.expert * a.w.rows + n0, a.w.rows - n0, at, stage.w_scales);
        commit_copies();
        wait_copies<0>();
        fence_for_engines<kCtas>();
        arrive_of_warp<kCtas>(full + stage.at);
      }
    }
  } else if (warp == kFetcher && elect_one()) {
    for (int t = tiles.first(); t < tiles.count; t += tiles.stride()) {
      const auto [rows, n0, is_product] = tiles(a, t);
      const int w_row = static_cast<int>(rows.expert * a.w.rows + n0) + tiles.rank * (kTile / kCtas);
      for (int k = 0; is_product && k < steps; ++k, ++i) {
        const Stage<Format, kCtas> stage(memory, i);
        mbarrier_wait(empty + stage.at, stage.parity ^ 1);
        if (tiles.rank == 0) mbarrier_expect(full + stage.at, kCtas * (S::kCodesOfX + S::kCodesOfW));
        copy_box<kCtas>(stage.x_tile, &x_map, k * kRow, static_cast<int>(rows.begin), full + stage.at);
        copy_box<kCtas>(stage.w_tile, &w_map, k * kRow, w_row, full + stage.at);
      }
    }
    // No arrival may be under way to a CTA that has exited.
    for (const int end = i + kStages; i < end; ++i) mbarrier_wait(empty + i % kStages, i / kStages & 1 ^ 1);
  } else if (warp == kIssuer && tiles.rank == 0 && elect_one()) {
    for (int t = tiles.first(); t < tiles.count; t += tiles.stride()) {
      if (!tiles(a, t).is_product) continue;
      const int b = turn & 1, parity = turn++ >> 1 & 1;
      mbarrier_wait<kCtas>(written + b, parity ^ 1);
      tensor_fence_after();
      for (int k = 0; k < steps; ++k, ++i) {
        const Stage<Format, kCtas> stage(memory, i);
        mbarrier_wait<kCtas>(full + stage.at, stage.parity);
        tensor_fence_after();
        const uint32_t x_columns = sums + kScaleColumns + stage.at * 2 * S::kColumns, w_columns = x_columns + S::kColumns;
        for (int atom = 0; atom < Format::kAtoms; ++atom) {
          tensor_copy_scales<kCtas>(x_columns + 4 * atom, scales_descriptor(shared_address(stage.x_scales + atom * kAtom)));
          tensor_copy_scales<kCtas>(w_columns + 4 * atom, scales_descriptor(shared_address(stage.w_scales + atom * kAtom)));
        }
        const uint64_t x = operand_descriptor(shared_address(stage.x_tile)), w = operand_descriptor(shared_address(stage.w_tile));
        for (int j = 0; j < kMmas; ++j) Format::mma(sums + b * kTile, x + 2 * j, w + 2 * j, x_columns, w_columns, j, k > 0 || j > 0);
        tensor_commit<kCtas>(empty + stage.at);
      }
      tensor_commit<kCtas>(summed + b);
    }
  }
  __syncwarp();
  meet_cluster<kCtas>();
  if (warp == kIssuer) tensor_free<kCtas>(sums, kAllColumns);
}

template <class Format, int kCtas>
cudaError_t run(const GemmArgs& a, cudaStream_t stream) {
  using S = Sizes<Format, kCtas>;
  TensorMap x_map, w_map;
  cudaError_t error = make_tensor_map(x_map, a.x.codes, a.x.rows, row_bytes(a.x), kTile);
  if (error == cudaSuccess) error = make_tensor_map(w_map, a.w.codes, a.experts * a.w.rows, row_bytes(a.w), kTile / kCtas);
  if (error != cudaSuccess) return error;
  const int64_t tiles = (a.w.rows + kTile - 1) / kTile * most_tiles(a, kCtas * kTile), most = multiprocessors() / kCtas;
  const dim3 grid(kCtas * static_cast<unsigned>(tiles < most ? tiles : most));
  return launch_clusters<kCtas>(gemm_native_kernel<Format, kCtas>, grid, kThreads, kStages * S::kStage + 256, stream, a, x_map, w_map);
}

template <int kCtas>
cudaError_t gemm(const GemmArgs& args, cudaStream_t stream) {
  if (args.x.rows == 0 || args.w.rows == 0) return cudaSuccess;
  return args.x.elem == Elem::e2m1 ? run<Nvfp4<kCtas>, kCtas>(args, stream) : run<Mxfp8<kCtas>, kCtas>(args, stream);
}

}  // namespace

cudaError_t gemm_sm100(const GemmArgs& args, cudaStream_t stream) { return gemm<1>(args, stream); }
cudaError_t gemm_sm100_pairs(const GemmArgs& args, cudaStream_t stream) { return gemm<2>(args, stream); }

}  // namespace fp4ext::cuda
