#include "../gemm.cuh"
#include "number.cuh"

// Operands that bf16 does not hold, fp32 and fp16, and whatever stands beside them: in fp32 FMA, by the lane order of the contract,
// so the CPU's bytes.
//
// The contract's sixteen lanes are lanes of a warp. A thread has lane l of 8 × 8 elements of y (8 × 4 if rows are few),
// acc = fma(x'_k, w'_k, acc) over its k ≡ l mod 16; the other half of the warp has the same rows and the next 8
// columns. The tree is exchanges between lanes: at h = 8 a thread keeps half of its elements and hands the other half's
// sums to lane l ± 8, so that after h = 1 it has four whole sums.
//
//   elements of step s+1 → registers     while step s is multiplied
//   registers → fp32, times their scale → the other tile in shared memory, then one barrier
namespace fp4ext::cuda {
namespace {

constexpr int kLanes = 16, kStep = 2 * kLanes;  // of K; a lane's two elements of a step stand side by side
constexpr int kSide = 8;                        // rows of a thread's sums
constexpr int kBand = 16;                       // tiles side by side whose blocks are neighbours, so that what they read stays in the cache

// A block's tile: kDown × kAcross warps, whose threads have kWide columns each. A line is a row of x, or of w after those.
template <int kDown, int kAcross, int kWide>
struct Shape {
  static constexpr int kThreads = 32 * kDown * kAcross;
  static constexpr int kRows = kSide * kDown, kColumns = 2 * kWide * kAcross, kLines = kRows + kColumns, kTileFloats = kLines * kStep;
  static constexpr int kQuads = kLines * kLanes / 4, kEach = (kQuads + kThreads - 1) / kThreads;  // a quad: four lanes of a line
  static constexpr int kAcrossEach = kWide, kSums = kSide * kWide, kWhole = kSums / kLanes;  // kWhole: how many a thread has in the end
  int lane, row, column;
  __device__ Shape()
      : lane(threadIdx.x % kLanes),
        row(threadIdx.x / 32 / kAcross * kSide),
        column((threadIdx.x / 32 % kAcross * 2 + threadIdx.x / kLanes % 2) * kWide) {}
};
using Few = Shape<1, 8, 4>;  // rows of x: bound by reading w
using Many = Shape<4, 2, 8>;

// Four elements of a row side by side, as stored, and the byte of their scale.
struct Four {
  uint32_t words[4];
  uint32_t scale;
};

// Part of a row: k_size elements, from the first on.
struct Source {
  const Operand& o;
  const uint8_t* codes;
  const uint8_t* scales;
  int k_size;

  __device__ Source(const Operand& operand, int64_t row, bool exists, int64_t first, int k) : o(operand), k_size(exists ? k : 0) {
    codes = static_cast<const uint8_t*>(o.codes) + row * row_bytes(o) + first * bytes_of_four() / 4;
    scales = o.scales + (o.block ? (row * o.k_stored + first) >> shift() : 0);
  }
  __device__ int shift() const { return o.block == 16 ? 4 : 5; }
  __device__ int bytes_of_four() const {
    return o.elem == Elem::fp32 ? 16 : o.elem == Elem::fp16 || o.elem == Elem::bf16 ? 8 : o.elem == Elem::e2m1 ? 2 : 4;
  }

  // From k on, zeros past the end.
  __device__ __forceinline__ void load(int k, Four& four) const {
    FP4_UNROLL
    for (int w = 0; w < 4; ++w) four.words[w] = 0;
    four.scale = 0;
    if (k >= k_size) return;
    const int size = bytes_of_four();
    const uint8_t* from = codes + static_cast<int64_t>(k / 4) * size;
    if (k + 4 <= k_size && is_aligned(from, size)) {
      if (size == 16) {
        const uint4 u = *reinterpret_cast<const uint4*>(from);
        four.words[0] = u.x, four.words[1] = u.y, four.words[2] = u.z, four.words[3] = u.w;
      } else if (size == 8) {
        const uint2 u = *reinterpret_cast<const uint2*>(from);
        four.words[0] = u.x, four.words[1] = u.y;
      } else {
        four.words[0] = size == 4 ? *reinterpret_cast<const uint32_t*>(from) : *reinterpret_cast<const uint16_t*>(from);
      }
    } else {
      const int count = k_size - k < 4 ? k_size - k : 4;
      FP4_UNROLL
      for (int b = 0; b < 16; ++b)
        if (4 * b < count * size) four.words[b / 4] |= static_cast<uint32_t>(from[b]) << (b % 4 * 8);
      if (o.elem == Elem::e2m1) four.words[0] &= (1u << 4 * count) - 1;
    }
    if (o.block) four.scale = scales[k >> shift()];
  }
};

// The contract's x' = element · scale, exact in fp32.
__device__ __forceinline__ void decode(const Operand& o, const Four& four, float (&t)[4]) {
  const float scale = o.block == 16 ? decode_e4m3_scale<uint32_t>(four.scale) : o.block ? decode_e8m0<uint32_t>(four.scale) : 1.0f;
  const auto each = [&](auto&& value) {
    FP4_UNROLL
    for (int i = 0; i < 4; ++i) t[i] = value(i) * scale;
  };
  const auto bits_of = [&](int i, int size) { return four.words[i * size / 32] >> (i * size % 32) & ((1u << size) - 1); };
  switch (o.elem) {
    case Elem::fp32: return each([&](int i) { return as_float(four.words[i]); });
    case Elem::bf16: return each([&](int i) { return bf16_to_float(static_cast<uint16_t>(bits_of(i, 16))); });
    case Elem::fp16: return each([&](int i) { return fp16_to_float(static_cast<uint16_t>(bits_of(i, 16))); });
    case Elem::e4m3: return each([&](int i) { return decode_byte<E4M3>(bits_of(i, 8)); });
    case Elem::e5m2: return each([&](int i) { return decode_byte<E5M2>(bits_of(i, 8)); });
    case Elem::e2m1: return each([&](int i) { return E2M1::signed_value(bits_of(i, 4)); });
  }
}

// kBoth: whether the step has both its sixteens; a zero that is not the contract's would turn -0 into +0.
template <class S, bool kBoth>
__device__ __forceinline__ void multiply(const float* tile, float (&acc)[S::kSums]) {
  const S at;
  const auto* x = reinterpret_cast<const float2*>(tile) + at.row * kLanes + at.lane;
  const auto* w = reinterpret_cast<const float2*>(tile) + (S::kRows + at.column) * kLanes + at.lane;
  float2 rows[kSide];
  FP4_UNROLL
  for (int r = 0; r < kSide; ++r) rows[r] = x[r * kLanes];
  FP4_UNROLL
  for (int c = 0; c < S::kAcrossEach; ++c) {
    const float2 column = w[c * kLanes];
    FP4_UNROLL
    for (int r = 0; r < kSide; ++r) {
      float& sum = acc[r * S::kAcrossEach + c];
      sum = __fmaf_rn(rows[r].x, column.x, sum);
      if (kBoth) sum = __fmaf_rn(rows[r].y, column.y, sum);
    }
  }
}

// One level of the tree: a lane keeps the half of its sums that has its bit h, and adds what the other lane has of it.
template <int h, int kSums>
__device__ __forceinline__ void fold(float (&acc)[kSums]) {
  constexpr int kKept = kSums / kLanes * h;
  const bool upper = threadIdx.x & h;
  FP4_UNROLL
  for (int i = 0; i < kKept; ++i) {
    const float kept = upper ? acc[i + kKept] : acc[i], given = upper ? acc[i] : acc[i + kKept];
    acc[i] = kept + __shfl_xor_sync(0xffffffffu, given, h);
  }
}
// Adds the sum of a chunk: sums kWhole·lane to kWhole·(lane + 1) are this thread's then. Clears them for the next.
template <int kSums, int kWhole>
__device__ __forceinline__ void close_chunk(float (&acc)[kSums], float (&total)[kWhole]) {
  fold<8>(acc);
  fold<4>(acc);
  fold<2>(acc);
  fold<1>(acc);
  FP4_UNROLL
  for (int i = 0; i < kWhole; ++i) total[i] = total[i] + acc[i];
  FP4_UNROLL
  for (int i = 0; i < kSums; ++i) acc[i] = 0.0f;
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, 2) gemm_lanes_kernel(const __grid_constant__ GemmArgs a, uint32_t across, uint32_t down) {
  auto* tiles = reinterpret_cast<float*>(shared_memory());
  const uint32_t band = blockIdx.x / (kBand * down) * kBand, place = blockIdx.x % (kBand * down);
  const uint32_t wide = across - band < kBand ? across - band : kBand;
  const Rows rows = rows_of_tile(a, static_cast<int>(place / wide), S::kRows);
  if (rows.begin >= rows.end) return;
  const int64_t n0 = static_cast<int64_t>(band + place % wide) * S::kColumns;
  if (rows.expert == a.experts) return write_zeros(a, rows, n0, S::kThreads, S::kColumns);
  const S at;
  const Span span = span_of(a, rows.expert);
  const int64_t w_rows = (a.over_tokens ? 0 : rows.expert * a.w.rows) + n0;
  const int k_size = static_cast<int>(span.k), steps = (k_size + kStep - 1) / kStep;

  // What a thread brings: of line i / 4 the lanes 4(i % 4) to 4(i % 4) + 3, of both sixteens of a step.
  Four fours[S::kEach][2];
  const int x_lines = static_cast<int>(rows.end - rows.begin),
            w_lines = static_cast<int>(a.w.rows - n0 < S::kColumns ? a.w.rows - n0 : S::kColumns);
  const auto load = [&](int step) {
    FP4_UNROLL
    for (int e = 0; e < S::kEach; ++e) {
      const int i = threadIdx.x + e * S::kThreads, line = i / 4, k = step * kStep + i % 4 * 4;
      if (line >= S::kLines) continue;
      const Source source = line < S::kRows ? Source(a.x, rows.begin + line, line < x_lines, span.x, k_size)
                                            : Source(a.w, w_rows + line - S::kRows, line - S::kRows < w_lines, span.w, k_size);
      source.load(k, fours[e][0]);
      source.load(k + kLanes, fours[e][1]);
    }
  };
  const auto put = [&](int step) {
    FP4_UNROLL
    for (int e = 0; e < S::kEach; ++e) {
      const int i = threadIdx.x + e * S::kThreads, line = i / 4;
      if (line >= S::kLines) continue;
      float first[4], second[4];
      decode(line < S::kRows ? a.x : a.w, fours[e][0], first);
      decode(line < S::kRows ? a.x : a.w, fours[e][1], second);
      auto* to = reinterpret_cast<float4*>(tiles + step % 2 * S::kTileFloats + line * kStep + i % 4 * 8);
      to[0] = float4{first[0], second[0], first[1], second[1]};
      to[1] = float4{first[2], second[2], first[3], second[3]};
    }
  };

  float acc[S::kSums] = {}, total[S::kWhole];
  FP4_UNROLL
  for (int i = 0; i < S::kWhole; ++i) total[i] = steps > 0 ? -0.0f : 0.0f;  // the first chunk's sum adds to -0 unchanged
  if (steps > 0) {
    load(0);
    put(0);
  }
  __syncthreads();
  FP4_ROLLED
  for (int step = 0; step < steps; ++step) {
    const float* tile = tiles + step % 2 * S::kTileFloats;
    if (step + 1 < steps) load(step + 1);
    if (step * kStep + kLanes < k_size)
      multiply<S, true>(tile, acc);
    else
      multiply<S, false>(tile, acc);
    if (step + 1 < steps) put(step + 1);
    constexpr int kPerChunk = kChunk / kStep;
    if (step % kPerChunk == kPerChunk - 1 || step + 1 == steps) close_chunk(acc, total);
    __syncthreads();
  }

  const int64_t row = rows.begin + at.row + at.lane / 2, n = n0 + at.column + at.lane % 2 * S::kWhole;
  if (row >= rows.end) return;
  const double g_x = global_of(a.x, a.over_tokens ? rows.expert : 0, row);
  FP4_UNROLL
  for (int i = 0; i < S::kWhole; ++i)
    if (n + i < a.w.rows) {
      const double g_w = global_of(a.w, rows.expert, n + i);
      store(a, (rows.before + row) * a.w.rows + n + i, finish(a, total[i], g_x, g_w, n + i));
    }
}

template <class S>
cudaError_t run(const GemmArgs& a, cudaStream_t stream) {
  const int64_t across = (a.w.rows + S::kColumns - 1) / S::kColumns, down = most_tiles(a, S::kRows);
  return launch(gemm_lanes_kernel<S>, dim3(static_cast<unsigned>(across * down)), S::kThreads, 2 * S::kTileFloats * sizeof(float), stream,
                a, static_cast<uint32_t>(across), static_cast<uint32_t>(down));
}

}  // namespace

cudaError_t gemm_lanes(const GemmArgs& args, cudaStream_t stream) {
  if (args.x.rows == 0 || args.w.rows == 0) return cudaSuccess;
  return args.x.rows <= 16 ? run<Few>(args, stream) : run<Many>(args, stream);
}

}  // namespace fp4ext::cuda
