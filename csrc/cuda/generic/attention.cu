#include "../attention.h"

#include "../../numerics/exp2.h"
#include "../ptx/launch.h"
#include "number.cuh"

// Causal attention as two products whose sums are chains of fma in the order of the numerics contract, so that every
// element is a thread's own work:
//
//   scores   t[row][key] = scale · Σ_d q·k            a tile of rows × a tile of keys; the largest of a row by atomicMax
//   values   o[chunk][row][d] = Σ_j exp2(t − max)·v   a tile of rows × a chunk of 256 keys; Σ weights in 16 lanes
//   finish   y = Σ o / Σ weights                      chunks in order
//
// Rows are queries that share keys, as in csrc/cpu/attention.h: row r of a (sequence, kv head) is query r / group of head
// kv·group + r % group. Tiles of rows are worked on in bands, so that the scores fit a workspace; few rows (a decode) have tiles of 8.
namespace fp4ext::cuda {
namespace {

constexpr int kThreads = 256, kChunk = 256, kDepth = 32;  // kDepth: terms of a chain that lie in shared memory at a time

// How kThreads threads share a tile of R rows × kColumns columns: 4 rows each, and columns `column`, `column` + kAcross, …
template <int R>
struct Shape {
  static constexpr int kGroups = R / 4, kAcross = kThreads / kGroups, kEach = R == 64 ? 4 : 1, kColumns = kAcross * kEach;
  static constexpr int kRowPitch = R + 4, kPitch = kColumns + 1;  // of a term in shared memory: rows by four, columns without conflicts
  int row, column;
  __device__ Shape() : row(threadIdx.x / kAcross * 4), column(threadIdx.x % kAcross) {}
};

// Where the workspace has what, for a band of `rows` rows.
struct Workspace {
  int64_t keys, chunks, d;
  float* scores;      // [rows, keys]
  float* parts;       // [rows, chunks, d]
  float* weights;     // [rows, chunks]
  uint32_t* largest;  // [rows], as ordered()
  __host__ __device__ Workspace(const AttentionArgs& a, void* memory, int64_t rows)
      : keys((a.t + 3) / 4 * 4), chunks((a.t + kChunk - 1) / kChunk), d(a.d) {
    scores = static_cast<float*>(memory);
    parts = scores + rows * keys;
    weights = parts + rows * chunks * d;
    largest = reinterpret_cast<uint32_t*>(weights + rows * chunks);
  }
  static int64_t bytes_a_row(const AttentionArgs& a) {
    const Workspace w(a, nullptr, 0);
    return (w.keys + w.chunks * (w.d + 1) + 1) * 4;
  }
};

// A tile of rows: whose, and which.
template <int R>
struct Tile {
  int64_t batch, kv_head, row, rows;  // rows: of the sequence and head
  int64_t start;
  __device__ Tile(const AttentionArgs& a, int64_t index) : rows(a.rows()) {
    const int64_t tiles = (rows + R - 1) / R, head = index / tiles;
    batch = head / a.kv_heads, kv_head = head % a.kv_heads, row = index % tiles * R;
    const int64_t most = a.t - a.m, given = a.start ? a.start[batch] : most;
    start = given < 0 ? 0 : given > most ? most : given;
  }
  __device__ bool holds(int r) const { return row + r < rows; }
  __device__ int64_t query_of(const AttentionArgs& a, int r) const { return (row + r) / a.group(); }
  __device__ int64_t head_of(const AttentionArgs& a, int r) const { return kv_head * a.group() + (row + r) % a.group(); }
  // How many keys a row reads; 0 past the last row.
  __device__ int64_t keys_of(const AttentionArgs& a, int r) const { return holds(r) ? start + query_of(a, r) + 1 : 0; }
  __device__ int64_t most_keys(const AttentionArgs& a) const { return keys_of(a, static_cast<int>(rows - row < R ? rows - row : R) - 1); }
};

__device__ inline float load_number(const void* p, Dtype dtype, int64_t at) {
  if (dtype == Dtype::fp32) return static_cast<const float*>(p)[at];
  const uint16_t half = static_cast<const uint16_t*>(p)[at];
  return dtype == Dtype::bf16 ? bf16_to_float(half) : fp16_to_float(half);
}

// Floats as integers of the same order, all above 0; a NaN does not occur.
__device__ inline uint32_t ordered(float x) { return bits(x) & kSignBit ? ~bits(x) : bits(x) | kSignBit; }
__device__ inline float unordered(uint32_t u) { return as_float(u & kSignBit ? u & ~kSignBit : ~u); }

// acc[i][j] = fma(rows[k][i], columns[k][j], acc[i][j]) for k in order; row i takes part in the terms before limit[i].
template <int R>
__device__ __forceinline__ void multiply(const float* rows, const float* columns, int count, const int (&limit)[4],
                                         float (&acc)[4][Shape<R>::kEach]) {
  using S = Shape<R>;
  const S at;
  for (int k = 0; k < count; ++k) {
    const float4 r = *reinterpret_cast<const float4*>(rows + k * S::kRowPitch + at.row);
    const float x[4] = {r.x, r.y, r.z, r.w};
    FP4_UNROLL
    for (int j = 0; j < S::kEach; ++j) {
      const float c = columns[k * S::kPitch + at.column + j * S::kAcross];
      FP4_UNROLL
      for (int i = 0; i < 4; ++i)
        if (k < limit[i]) acc[i][j] = __fmaf_rn(x[i], c, acc[i][j]);
    }
  }
}

template <int R>
inline constexpr int kShared = kDepth * (Shape<R>::kRowPitch + Shape<R>::kPitch);  // floats

template <int R>
__global__ void __launch_bounds__(kThreads)
    scores_kernel(const __grid_constant__ AttentionArgs a, const __grid_constant__ Workspace space, int64_t first) {
  using S = Shape<R>;
  const Tile<R> tile(a, first + blockIdx.y);
  const int64_t key = static_cast<int64_t>(blockIdx.x) * S::kColumns, most = tile.most_keys(a);
  if (key >= most) return;
  auto* rows = reinterpret_cast<float*>(shared_memory());
  float* columns = rows + kDepth * S::kRowPitch;
  const S at;
  float acc[4][S::kEach] = {};
  FP4_ROLLED
  for (int64_t d = 0; d < a.d; d += kDepth) {
    const int depth = static_cast<int>(a.d - d < kDepth ? a.d - d : kDepth);
    const int term = threadIdx.x % kDepth;
    __syncthreads();
    if (term < depth) {
      for (int r = threadIdx.x / kDepth; r < R; r += kThreads / kDepth) {
        const int64_t from = tile.batch * a.q_strides[0] + tile.head_of(a, r) * a.q_strides[1] + tile.query_of(a, r) * a.q_strides[2];
        rows[term * S::kRowPitch + r] = tile.holds(r) ? load_number(a.q, a.q_dtype, from + d + term) : 0.0f;
      }
      FP4_UNROLL
      for (int c = threadIdx.x / kDepth; c < S::kColumns; c += kThreads / kDepth) {
        const int64_t from = tile.batch * a.k_strides[0] + tile.kv_head * a.k_strides[1] + (key + c) * a.k_strides[2];
        columns[term * S::kPitch + c] = key + c < most ? load_number(a.k, a.kv_dtype, from + d + term) : 0.0f;
      }
    }
    __syncthreads();
    const int whole[4] = {depth, depth, depth, depth};
    multiply<R>(rows, columns, depth, whole, acc);
  }
  FP4_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int64_t row = static_cast<int64_t>(blockIdx.y) * R + at.row + i, keys = tile.keys_of(a, at.row + i);
    float largest = as_float(kInfBits | kSignBit);
    FP4_UNROLL
    for (int j = 0; j < S::kEach; ++j) {
      const int64_t k = key + at.column + j * S::kAcross;
      if (k >= keys) continue;
      const float t = acc[i][j] * a.scale;
      space.scores[row * space.keys + k] = t;
      largest = max_of(t, largest);
    }
    // The lanes of a row's group stand side by side: 16, or a whole warp.
    for (int h = (S::kAcross < 32 ? S::kAcross : 32) / 2; h > 0; h /= 2)
      largest = max_of(__shfl_xor_sync(0xffffffffu, largest, h), largest);
    if (at.column % 32 == 0 && keys > 0) atomicMax(space.largest + row, ordered(largest));
  }
}

template <int R>
__global__ void __launch_bounds__(kThreads)
    values_kernel(const __grid_constant__ AttentionArgs a, const __grid_constant__ Workspace space, int64_t first) {
  using S = Shape<R>;
  const Tile<R> tile(a, first + blockIdx.y);
  const int64_t chunk = blockIdx.x, begin = chunk * kChunk, most = tile.most_keys(a), d = static_cast<int64_t>(blockIdx.z) * S::kColumns;
  if (begin >= most) return;
  const int count = static_cast<int>(most - begin < kChunk ? most - begin : kChunk);
  auto* rows = reinterpret_cast<float*>(shared_memory());
  float* columns = rows + kDepth * S::kRowPitch;
  const S at;
  int keys[4];  // of this chunk, of each row
  FP4_UNROLL
  for (int i = 0; i < 4; ++i) keys[i] = static_cast<int>(tile.keys_of(a, at.row + i) - begin);
  float acc[4][S::kEach] = {};
  constexpr int kSums = R * 16, kSumsEach = (kSums + kThreads - 1) / kThreads;  // lane l of row r is sum 16r + l
  float sums[kSumsEach] = {};
  FP4_ROLLED
  for (int j = 0; j < count; j += kDepth) {
    const int depth = count - j < kDepth ? count - j : kDepth;
    __syncthreads();
    const int term = threadIdx.x % kDepth;
    for (int r = threadIdx.x / kDepth; r < R; r += kThreads / kDepth) {
      const int64_t row = static_cast<int64_t>(blockIdx.y) * R + r, key = begin + j + term;
      float w = 0.0f;
      if (key < tile.keys_of(a, r)) w = exp2_of(space.scores[row * space.keys + key] - unordered(space.largest[row]));
      rows[term * S::kRowPitch + r] = w;
    }
    FP4_UNROLL
    for (int i = threadIdx.x; i < kDepth * S::kColumns; i += kThreads) {
      const int k = i / S::kColumns, c = i % S::kColumns;
      const int64_t from = tile.batch * a.v_strides[0] + tile.kv_head * a.v_strides[1] + (begin + j + k) * a.v_strides[2];
      columns[k * S::kPitch + c] = k < depth && d + c < a.d ? load_number(a.v, a.kv_dtype, from + d + c) : 0.0f;
    }
    __syncthreads();
    const int limit[4] = {keys[0] - j, keys[1] - j, keys[2] - j, keys[3] - j};
    multiply<R>(rows, columns, depth, limit, acc);
    if (blockIdx.z == 0) {
      FP4_UNROLL
      for (int s = 0; s < kSumsEach; ++s) {
        const int i = threadIdx.x + s * kThreads;
        if (i >= kSums) continue;
        FP4_UNROLL
        for (int l = 0; l < kDepth; l += 16) sums[s] = sums[s] + rows[(l + i % 16) * S::kRowPitch + i / 16];
      }
    }
  }
  FP4_UNROLL
  for (int i = 0; i < 4; ++i) FP4_UNROLL
  for (int j = 0; j < S::kEach; ++j) {
    const int64_t row = static_cast<int64_t>(blockIdx.y) * R + at.row + i, column = d + at.column + j * S::kAcross;
    if (keys[i] > 0 && column < a.d) space.parts[(row * space.chunks + chunk) * space.d + column] = acc[i][j];
  }
  if (blockIdx.z == 0) {
    FP4_UNROLL
    for (int s = 0; s < kSumsEach; ++s) {
      for (int h = 8; h > 0; h /= 2) sums[s] = sums[s] + __shfl_xor_sync(0xffffffffu, sums[s], h);
      const int i = threadIdx.x + s * kThreads;
      if (i < kSums && i % 16 == 0) space.weights[(static_cast<int64_t>(blockIdx.y) * R + i / 16) * space.chunks + chunk] = sums[s];
    }
  }
}

// A block a row.
template <int R>
__global__ void __launch_bounds__(kThreads)
    finish_kernel(const __grid_constant__ AttentionArgs a, const __grid_constant__ Workspace space, int64_t first) {
  const Tile<R> tile(a, first + blockIdx.y);
  const int r = blockIdx.x;
  if (!tile.holds(r)) return;
  const int64_t row = static_cast<int64_t>(blockIdx.y) * R + r, chunks = (tile.keys_of(a, r) + kChunk - 1) / kChunk;
  const float* weights = space.weights + row * space.chunks;
  const float* parts = space.parts + row * space.chunks * space.d;
  float weight = weights[0];
  for (int64_t c = 1; c < chunks; ++c) weight = weight + weights[c];
  const int64_t to = ((tile.batch * a.heads + tile.head_of(a, r)) * a.m + tile.query_of(a, r)) * a.d;
  for (int64_t d = threadIdx.x; d < a.d; d += kThreads) {
    float total = parts[d];
    for (int64_t c = 1; c < chunks; ++c) total = total + parts[c * space.d + d];
    float y = total / weight;
    y = y != y ? as_float(0x7fc00000u) : y;
    if (a.q_dtype == Dtype::fp32)
      static_cast<float*>(a.y)[to + d] = y;
    else
      static_cast<uint16_t*>(a.y)[to + d] = a.q_dtype == Dtype::bf16 ? float_to_bf16(y) : float_to_fp16(y);
  }
}

bool few_rows(const AttentionArgs& a) { return a.rows() <= 16; }
bool is_empty(const AttentionArgs& a) { return a.batch * a.heads * a.m * a.d == 0; }
int64_t num_tiles(const AttentionArgs& a, int size) { return a.batch * a.kv_heads * ((a.rows() + size - 1) / size); }
// Tiles worked on at once.
int64_t band(const AttentionArgs& a, int size) {
  const int64_t fit = a.budget / (Workspace::bytes_a_row(a) * size), tiles = num_tiles(a, size);
  const int64_t most = fit < 1 ? 1 : fit > kMostAlongY ? kMostAlongY : fit;
  return tiles < most ? tiles : most;
}

template <int R>
cudaError_t run(const AttentionArgs& a, void* memory, cudaStream_t stream) {
  const int64_t tiles = num_tiles(a, R), step = band(a, R);
  const Workspace space(a, memory, step * R);
  constexpr size_t kBytes = kShared<R> * sizeof(float);
  const auto blocks = [](int64_t n, int64_t size) { return static_cast<unsigned>((n + size - 1) / size); };
  for (int64_t first = 0; first < tiles; first = first + step) {
    const auto down = static_cast<unsigned>(tiles - first < step ? tiles - first : step);
    cudaError_t error = cudaMemsetAsync(space.largest, 0, step * R * sizeof(uint32_t), stream);
    if (error != cudaSuccess) return error;
    error = launch(scores_kernel<R>, dim3(blocks(a.t, Shape<R>::kColumns), down), kThreads, kBytes, stream, a, space, first);
    if (error != cudaSuccess) return error;
    const dim3 values(static_cast<unsigned>(space.chunks), down, blocks(a.d, Shape<R>::kColumns));
    error = launch(values_kernel<R>, values, kThreads, kBytes, stream, a, space, first);
    if (error != cudaSuccess) return error;
    error = launch(finish_kernel<R>, dim3(R, down), kThreads, 0, stream, a, space, first);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

int64_t attention_workspace(const AttentionArgs& a) {
  if (is_empty(a)) return 0;
  const int size = few_rows(a) ? 8 : 64;
  return band(a, size) * size * Workspace::bytes_a_row(a);
}

cudaError_t attention(const AttentionArgs& args, void* workspace, cudaStream_t stream) {
  if (is_empty(args)) return cudaSuccess;
  return few_rows(args) ? run<8>(args, workspace, stream) : run<64>(args, workspace, stream);
}

}  // namespace fp4ext::cuda
