#include "../gemm.cuh"
#include "../ptx/mma_block_scaled.h"

// The block-scaled mma.sync of GeForce Blackwell: codes go to the tensor cores as they are stored, scales beside them.
//
//   cp.async, kStages - 1 steps of K ahead     codes and linear scales, zeros past the edges
//   ldmatrix, mma.sync                         32 columns × 64 rows a warp
//
// Tiles, operands and chunks of K are those of gemm_invariant (gemm.cuh): the order is fixed here too, so a row does not
// depend on its neighbours, but the sums of 64 or 32 products are the hardware's own.
namespace fp4ext::cuda {
namespace {

struct Nvfp4 {
  static constexpr int kStep = 128, kRow = 64, kScales = 8, kStages = 4, kMma = 64, kScalesPerMma = 4, kBlock = 16;
  static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t a_scales,
                                             uint32_t b_scales) {
    mma_nvfp4(d, a, b, a_scales, b_scales);
  }
};
struct Mxfp8 {
  static constexpr int kStep = 128, kRow = 128, kScales = 4, kStages = 2, kMma = 32, kScalesPerMma = 1, kBlock = 32;
  static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t a_scales,
                                             uint32_t b_scales) {
    mma_mxfp8(d, a, b, a_scales, b_scales);
  }
};

// A stage of the ring: codes of w and x, 128 rows of kRow bytes (of a step of K), then their scales.
template <class Format>
inline constexpr int kTileBytes = kTile * Format::kRow;
template <class Format>
inline constexpr int kScaleBytes = kTile * Format::kScales;
template <class Format>
inline constexpr int kStageBytes = 2 * (kTileBytes<Format> + kScaleBytes<Format>);

// Sixteen bytes of a row at their place XOR a key of the row: ldmatrix meets in no bank.
template <class Format>
__device__ __forceinline__ char* piece_of(char* tile, int row, int piece) {
  const int key = Format::kRow == 64 ? row / 2 & 3 : row & 7;
  return tile + row * Format::kRow + ((piece ^ key) << 4);
}

// Copies 128 rows of a step, from `first` on, zeros for rows from `count` on and for what lies past K.
template <class Format>
__device__ __forceinline__ void copy_step(const Operand& o, int64_t first, int count, int64_t k, char* tile, char* scales) {
  constexpr int kPieces = Format::kRow / 16, kPerPiece = Format::kStep / kPieces;
  const auto* codes = static_cast<const char*>(o.codes);
  FP4_ROLLED
  for (int i = threadIdx.x; i < kTile * kPieces; i += kGemmThreads) {
    const int row = i / kPieces, piece = i % kPieces;
    const bool exists = row < count && k + piece * kPerPiece < o.k_stored;
    const char* from = codes + (first + row) * row_bytes(o) + k * Format::kRow / Format::kStep + piece * 16;
    copy_async<16>(piece_of<Format>(tile, row, piece), exists ? from : codes, exists);
  }
  constexpr int kWords = Format::kScales / 4;
  FP4_ROLLED
  for (int i = threadIdx.x; i < kTile * kWords; i += kGemmThreads) {
    const int row = i / kWords, word = i % kWords;
    const bool exists = row < count && k / Format::kBlock + word * 4 < o.k_stored / Format::kBlock;
    const uint8_t* from = o.scales + (first + row) * (o.k_stored / Format::kBlock) + k / Format::kBlock + word * 4;
    copy_async<4>(scales + row * Format::kScales + word * 4, exists ? from : o.scales, exists);
  }
}

// The scales of row `row` for the i-th mma of a step, the first block's in the lowest byte.
template <class Format>
__device__ __forceinline__ uint32_t scales_of(const char* scales, int row, int i) {
  const int byte = i * Format::kScalesPerMma;
  return *reinterpret_cast<const uint32_t*>(scales + row * Format::kScales + byte / 4 * 4) >> (byte % 4 * 8);
}

template <class Format>
__device__ __forceinline__ void multiply_step(char* stage, Sums& acc) {
  char *w_tile = stage, *x_tile = stage + kTileBytes<Format>, *w_scales = x_tile + kTileBytes<Format>,
       *x_scales = w_scales + kScaleBytes<Format>;
  const Warp warp;
  const int lane = warp.lane;
  FP4_ROLLED
  for (int k = 0; k < Format::kStep / Format::kMma; ++k) {
    uint32_t a[2][4], a_scales[2];
    FP4_UNROLL
    for (int i = 0; i < 2; ++i) {
      ldmatrix_x4(a[i], piece_of<Format>(w_tile, warp.n + i * 16 + lane % 16, 2 * k + lane / 16));
      a_scales[i] = scales_of<Format>(w_scales, warp.n + i * 16 + (lane & 1) * 8 + lane / 4, k);
    }
    FP4_UNROLL
    for (int j = 0; j < 8; j += 2) {
      uint32_t r[4];
      ldmatrix_x4(r, piece_of<Format>(x_tile, warp.m + j * 8 + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
      FP4_UNROLL
      for (int h = 0; h < 2; ++h) {
        const uint32_t b[2] = {r[2 * h], r[2 * h + 1]}, b_scales = scales_of<Format>(x_scales, warp.m + (j + h) * 8 + lane / 4, k);
        FP4_UNROLL
        for (int i = 0; i < 2; ++i) Format::mma(acc.v[i][j + h], a[i], b, a_scales[i], b_scales);
      }
    }
  }
}

template <class Format>
__global__ void __launch_bounds__(kGemmThreads) gemm_native_kernel(const __grid_constant__ GemmArgs a) {
  char* memory = shared_memory();
  const int across = static_cast<int>((a.w.rows + kTile - 1) / kTile);
  const Rows rows = rows_of_tile(a, static_cast<int>(blockIdx.x / across), kTile);
  if (rows.begin >= rows.end) return;
  const int64_t n0 = static_cast<int64_t>(blockIdx.x % across) * kTile;
  if (rows.expert == a.experts) return write_zeros(a, rows, n0, kGemmThreads);
  const int w_count = static_cast<int>(a.w.rows - n0 < kTile ? a.w.rows - n0 : kTile), x_count = static_cast<int>(rows.end - rows.begin);
  const int steps = static_cast<int>((a.w.k_stored + Format::kStep - 1) / Format::kStep);
  const auto copy = [&](int step) {
    if (step < steps) {
      char* stage = memory + step % Format::kStages * kStageBytes<Format>;
      char* scales = stage + 2 * kTileBytes<Format>;
      const int64_t k = static_cast<int64_t>(step) * Format::kStep;
      copy_step<Format>(a.w, rows.expert * a.w.rows + n0, w_count, k, stage, scales);
      copy_step<Format>(a.x, rows.begin, x_count, k, stage + kTileBytes<Format>, scales + kScaleBytes<Format>);
    }
    commit_copies();
  };
  for (int i = 0; i < Format::kStages - 1; ++i) copy(i);
  Sums acc, total;
  fill(acc, 0.0f);
  fill(total, steps > 0 ? -0.0f : 0.0f);
  for (int step = 0; step < steps; ++step) {
    wait_copies<Format::kStages - 2>();
    __syncthreads();  // the step is here for all, and the stage that is filled next has been read by all
    copy(step + Format::kStages - 1);
    multiply_step<Format>(memory + step % Format::kStages * kStageBytes<Format>, acc);
    constexpr int kPerChunk = kChunk / Format::kStep;
    if (step % kPerChunk == kPerChunk - 1 || step + 1 == steps) close_chunk(total, acc);
  }
  __syncthreads();
  write(a, rows, n0, total, reinterpret_cast<float*>(memory));
}

template <class Format>
cudaError_t run(const GemmArgs& a, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((a.w.rows + kTile - 1) / kTile * most_tiles(a, kTile)));
  constexpr size_t kRing = Format::kStages * kStageBytes<Format>, kStaged = kTile * kTile * sizeof(float);
  return launch(gemm_native_kernel<Format>, grid, kGemmThreads, kRing > kStaged ? kRing : kStaged, stream, a);
}

}  // namespace

cudaError_t gemm_sm120(const GemmArgs& args, cudaStream_t stream) {
  if (args.x.rows == 0 || args.w.rows == 0) return cudaSuccess;
  return args.x.elem == Elem::e2m1 ? run<Nvfp4>(args, stream) : run<Mxfp8>(args, stream);
}

}  // namespace fp4ext::cuda
