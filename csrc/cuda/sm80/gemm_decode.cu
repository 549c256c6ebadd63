#include "bf16.cuh"

// Few rows of x, at most 16: what a sampler does, bound by reading w. A block computes 16 columns of y; each of its warps
// takes whole chunks of K for itself, copies codes ahead of itself into a ring in shared memory, decodes them straight
// into fragments and multiplies. The chunks' sums are then added in order: the same additions as in gemm_invariant, so the
// same bits.
namespace fp4ext::cuda {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kColumns = 16, kMaxRows = 16;
constexpr int kStep = 128, kStages = 4, kStepsPerChunk = kChunk / kStep;

// Where an operand's codes and scales of a step lie in a stage of the ring. 16 bytes more a row: lanes of different rows
// meet in no bank.
struct Slab {
  int code_bytes, pitch, scale_bytes;
  __host__ __device__ explicit Slab(const Operand& o)
      : code_bytes(o.elem == Elem::e2m1   ? kStep / 2
                   : o.elem == Elem::bf16 ? kStep * 2
                                          : kStep),
        pitch(code_bytes + 16),
        scale_bytes(o.block ? kStep / o.block : 0) {}
  __host__ __device__ int bytes() const { return 16 * (pitch + 8); }
};
__host__ __device__ inline int stage_bytes(const GemmArgs& a) { return Slab(a.w).bytes() + Slab(a.x).bytes(); }

// Copies `count` rows of a step, lanes side by side.
__device__ __forceinline__ void copy_step(const Operand& o, int64_t first_row, int count, int64_t k, char* slab) {
  const Slab s(o);
  const int lane = threadIdx.x % 32, pieces = s.code_bytes / 16;
  const auto* codes = static_cast<const char*>(o.codes);
  for (int i = lane; i < count * pieces; i += 32) {
    const int row = i / pieces, piece = i % pieces;
    const int64_t byte = k * s.code_bytes / kStep + piece * 16;
    copy_async<16>(slab + row * s.pitch + piece * 16, codes + (first_row + row) * row_bytes(o) + byte);
  }
  const int words = s.scale_bytes / 4;
  for (int i = lane; i < count * words; i += 32) {
    const int row = i / words, word = i % words;
    copy_async<4>(slab + 16 * s.pitch + row * 8 + word * 4, o.scales + (first_row + row) * (o.k_stored / o.block) + k / o.block + word * 4);
  }
}

// The halves of a fragment that lane (g, t) holds of one row and one 16 of K: elements 2t, 2t+1 and 2t+8, 2t+9.
__device__ __forceinline__ void fragment_pairs(const Operand& o, const char* slab, int row, int k16, uint32_t& low, uint32_t& high) {
  const Slab s(o);
  const int t = threadIdx.x % 4;
  const char* codes = slab + row * s.pitch;
  const uint32_t byte = o.block ? static_cast<uint8_t>(slab[16 * s.pitch + row * 8 + k16 * 16 / o.block]) : 0;
  const uint32_t scale = scale_pair(o, byte);
  if (o.elem == Elem::e2m1) {
    const uint2 u = *reinterpret_cast<const uint2*>(codes + k16 * 8);
    low = e2m1_pair(u.x >> (8 * t), scale);
    high = e2m1_pair(u.y >> (8 * t), scale);
  } else if (o.elem == Elem::bf16) {
    low = *reinterpret_cast<const uint32_t*>(codes + k16 * 32 + 4 * t);
    high = *reinterpret_cast<const uint32_t*>(codes + k16 * 32 + 16 + 4 * t);
  } else {
    low = fp8_pair(o.elem, *reinterpret_cast<const uint16_t*>(codes + k16 * 16 + 2 * t), scale);
    high = fp8_pair(o.elem, *reinterpret_cast<const uint16_t*>(codes + k16 * 16 + 8 + 2 * t), scale);
  }
}

__global__ void __launch_bounds__(kThreads, 1) gemm_decode_kernel(const GemmArgs a) {
  char* memory = shared_memory();
  const int across = static_cast<int>((a.w.rows + kColumns - 1) / kColumns);
  const Rows rows = rows_of_tile(a, static_cast<int>(blockIdx.x / across), kMaxRows);
  const int64_t n0 = static_cast<int64_t>(blockIdx.x % across) * kColumns;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  if (rows.begin >= rows.end) return;
  const int x_rows = static_cast<int>(rows.end - rows.begin);
  const int w_rows = static_cast<int>(a.w.rows - n0 < kColumns ? a.w.rows - n0 : kColumns);
  if (rows.expert == a.experts) {
    for (int i = threadIdx.x; i < x_rows * w_rows; i += kThreads) store(a, (rows.begin + i / w_rows) * a.w.rows + n0 + i % w_rows, 0.0f);
    return;
  }

  const int64_t k_size = a.x.k_stored < a.w.k_stored ? a.x.k_stored : a.w.k_stored;
  const int chunks = static_cast<int>((k_size + kChunk - 1) / kChunk), steps = static_cast<int>(k_size / kStep);
  auto* sums = reinterpret_cast<float*>(memory);  // [chunks][16 rows][16 columns]
  char* ring = memory + chunks * kMaxRows * kColumns * sizeof(float) + warp * kStages * stage_bytes(a);

  // The steps of this warp's chunks, one after the other.
  const int last_chunk = chunks - 1, my_chunks = chunks > warp ? (chunks - warp + kWarps - 1) / kWarps : 0;
  const bool has_last = my_chunks > 0 && (last_chunk - warp) % kWarps == 0;
  const int my_steps = my_chunks * kStepsPerChunk - (has_last ? chunks * kStepsPerChunk - steps : 0);
  const auto step_of = [&](int i) { return (i / kStepsPerChunk * kWarps + warp) * kStepsPerChunk + i % kStepsPerChunk; };
  const auto copy = [&](int i) {
    if (i < my_steps) {
      char* stage = ring + i % kStages * stage_bytes(a);
      const int64_t k = static_cast<int64_t>(step_of(i)) * kStep;
      copy_step(a.w, rows.expert * a.w.rows + n0, w_rows, k, stage);
      copy_step(a.x, rows.begin, x_rows, k, stage + Slab(a.w).bytes());
    }
    commit_copies();
  };

  for (int i = 0; i < kStages - 1; ++i) copy(i);
  float acc[2][4] = {};
  for (int i = 0; i < my_steps; ++i) {
    wait_copies<kStages - 2>();
    __syncwarp();  // what every lane copied is here
    copy(i + kStages - 1);
    const char* stage = ring + i % kStages * stage_bytes(a);
    const char* x_slab = stage + Slab(a.w).bytes();
    for (int k16 = 0; k16 < kStep / 16; ++k16) {
      uint32_t w[4], x[2];
      fragment_pairs(a.w, stage, g, k16, w[0], w[2]);
      fragment_pairs(a.w, stage, g + 8, k16, w[1], w[3]);
      fragment_pairs(a.x, x_slab, g, k16, x[0], x[1]);
      mma_bf16(acc[0], w, x);
      if (x_rows > 8) {
        fragment_pairs(a.x, x_slab, g + 8, k16, x[0], x[1]);
        mma_bf16(acc[1], w, x);
      }
    }
    const int step = step_of(i);
    if (step % kStepsPerChunk == kStepsPerChunk - 1 || step == steps - 1) {
      for (int j = 0; j < 2; ++j)
        for (int r = 0; r < 4; ++r) {
          const int column = g + 8 * (r >> 1), row = 8 * j + 2 * t + (r & 1);
          sums[(step / kStepsPerChunk * kMaxRows + row) * kColumns + column] = acc[j][r];
          acc[j][r] = 0.0f;
        }
    }
  }
  __syncthreads();

  for (int i = threadIdx.x; i < x_rows * kColumns; i += kThreads) {
    const int row = i / kColumns, column = i % kColumns;
    if (column >= w_rows) continue;
    float total = chunks ? sums[row * kColumns + column] : 0.0f;
    for (int c = 1; c < chunks; ++c) total = total + sums[(c * kMaxRows + row) * kColumns + column];
    const double g_x = global_of(a.x, 0, rows.begin + row), g_w = global_of(a.w, rows.expert, n0 + column);
    store(a, (rows.begin + row) * a.w.rows + n0 + column, finish(a, total, g_x, g_w, n0 + column));
  }
}

}  // namespace

int64_t decode_shared_bytes(const GemmArgs& a) {
  const int64_t k = a.x.k_stored < a.w.k_stored ? a.x.k_stored : a.w.k_stored;
  return (k + kChunk - 1) / kChunk * kMaxRows * kColumns * sizeof(float) + kWarps * kStages * stage_bytes(a);
}

cudaError_t gemm_decode(const GemmArgs& args, cudaStream_t stream) {
  if (args.x.rows == 0 || args.w.rows == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>((args.w.rows + kColumns - 1) / kColumns * most_tiles(args, kMaxRows)));
  return launch(gemm_decode_kernel, grid, kThreads, decode_shared_bytes(args), stream, args);
}

}  // namespace fp4ext::cuda
