#include "bf16.cuh"

// A block of eight warps computes 128 columns (rows of w) × 128 rows of x, K in steps of 64:
//
//   codes of step s+1 → registers         while step s is multiplied
//   ldmatrix, mma.sync                    from the bf16 tiles of step s in shared memory
//   registers → bf16 → the other tiles    then one barrier
//
// w is the A operand and x the B operand of mma.sync, as in gemm_decode: the same products in the same places, so that a
// row alone and a row among thousands get the same bits.
namespace fp4ext::cuda {
namespace {

constexpr int kStep = 64;
constexpr int kTileBytes = kTile * kStep * 2;  // rows of 128 bytes
constexpr int kShared = 4 * kTileBytes;        // (w, x) twice; the epilogue needs as much

// Sixteen bytes of a row, at their place XOR the row: ldmatrix and the stores meet in no bank.
__device__ __forceinline__ char* piece_of(char* tile, int row, int piece) { return tile + row * 128 + ((piece ^ (row & 7)) << 4); }

// What a thread carries from memory to shared memory: half a row of a step, 32 elements, as stored.
struct Raw {
  uint32_t words[16];  // e2m1: 4, fp8: 8, bf16: 16
  uint32_t scales;     // bytes: two of E4M3, or one of E8M0
};

// A word of a row's codes, zeros past its end.
__device__ __forceinline__ uint32_t word_within(const uint8_t* row, int64_t byte, int64_t bytes) {
  uint32_t word = 0;
  for (int b = 0; b < 4; ++b)
    if (byte + b < bytes) word |= static_cast<uint32_t>(row[byte + b]) << (8 * b);
  return word;
}

struct Source {
  const Operand& o;
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t k_size, bytes;  // of the row, and what they take
  bool exists;
  int alignment;  // 16, 4, or 1

  // k_size elements of row `row`, from `first` on.
  __device__ Source(const Operand& operand, int64_t row, bool in_range, int64_t first, int64_t k)
      : o(operand), k_size(k), bytes(bytes_of(k)), exists(in_range) {
    codes = static_cast<const uint8_t*>(o.codes) + row * row_bytes(o) + bytes_of(first);
    scales = o.scales + (o.block ? row * (o.k_stored / o.block) + first / o.block : 0);
    const auto address = reinterpret_cast<uintptr_t>(codes);
    alignment = address % 16 == 0 ? 16 : address % 4 == 0 ? 4 : 1;
  }
  __device__ int64_t bytes_of(int64_t k) const { return o.elem == Elem::e2m1 ? (k + 1) / 2 : o.elem == Elem::bf16 ? k * 2 : k; }

  __device__ __forceinline__ void load(int64_t k, Raw& raw) const {
    const int count = o.elem == Elem::e2m1 ? 4 : o.elem == Elem::bf16 ? 16 : 8;
    const int64_t byte = k * count / 8;
    const bool whole = exists && byte + 4 * count <= bytes;
    FP4_UNROLL
    for (int w = 0; w < 16; w += 4) {
      if (w >= count) continue;
      uint4 u = make_uint4(0, 0, 0, 0);
      const auto* words = reinterpret_cast<const uint32_t*>(codes + byte) + w;
      if (whole && alignment == 16) {
        u = *reinterpret_cast<const uint4*>(words);
      } else if (whole && alignment == 4) {
        u = make_uint4(words[0], words[1], words[2], words[3]);
      } else if (exists) {
        u = make_uint4(word_within(codes, byte + 4 * w, bytes), word_within(codes, byte + 4 * w + 4, bytes),
                       word_within(codes, byte + 4 * w + 8, bytes), word_within(codes, byte + 4 * w + 12, bytes));
      }
      raw.words[w] = u.x, raw.words[w + 1] = u.y, raw.words[w + 2] = u.z, raw.words[w + 3] = u.w;
    }
    raw.scales = 0;
    if (exists && o.block && k < k_size) raw.scales = scales[k / o.block];
    if (exists && o.block == 16 && k + 16 < k_size) raw.scales |= static_cast<uint32_t>(scales[k / 16 + 1]) << 8;
  }

  // As bf16 into pieces [first, first + 4) of a row of the tile.
  __device__ __forceinline__ void store(const Raw& raw, char* tile, int row, int first) const {
    const uint32_t scale[2] = {scale_pair(o, raw.scales & 0xffu), scale_pair(o, o.block == 16 ? raw.scales >> 8 : raw.scales)};
    FP4_UNROLL
    for (int p = 0; p < 4; ++p) {
      uint32_t out[4];
      FP4_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int pair = 4 * p + i;
        if (o.elem == Elem::e2m1)
          out[i] = e2m1_pair(raw.words[p] >> (8 * i), scale[p / 2]);
        else if (o.elem == Elem::bf16)
          out[i] = raw.words[pair];
        else
          out[i] = fp8_pair(o.elem, raw.words[pair / 2] >> (pair % 2 * 16), scale[p / 2]);
      }
      *reinterpret_cast<uint4*>(piece_of(tile, row, first + p)) = make_uint4(out[0], out[1], out[2], out[3]);
    }
  }
};

__device__ __forceinline__ void multiply_step(char* w_tile, char* x_tile, Sums& acc) {
  const Warp warp;
  FP4_UNROLL
  for (int k = 0; k < kStep / 16; ++k) {
    uint32_t a[2][4], b[8][2];
    FP4_UNROLL
    for (int i = 0; i < 2; ++i) ldmatrix_x4(a[i], piece_of(w_tile, warp.n + i * 16 + warp.lane % 16, 2 * k + warp.lane / 16));
    FP4_UNROLL
    for (int j = 0; j < 8; j += 2) {
      uint32_t r[4];
      ldmatrix_x4(r, piece_of(x_tile, warp.m + j * 8 + warp.lane % 8 + warp.lane / 16 * 8, 2 * k + warp.lane / 8 % 2));
      b[j][0] = r[0], b[j][1] = r[1], b[j + 1][0] = r[2], b[j + 1][1] = r[3];
    }
    FP4_UNROLL
    for (int i = 0; i < 2; ++i) FP4_UNROLL
    for (int j = 0; j < 8; ++j) mma_bf16(acc.v[i][j], a[i], b[j]);
  }
}

__global__ void __launch_bounds__(kGemmThreads) gemm_invariant_kernel(const GemmArgs a) {
  char* memory = shared_memory();
  const int across = static_cast<int>((a.w.rows + kTile - 1) / kTile);
  const Rows rows = rows_of_tile(a, static_cast<int>(blockIdx.x / across), kTile);
  if (rows.begin >= rows.end) return;
  const int64_t n0 = static_cast<int64_t>(blockIdx.x % across) * kTile;
  if (rows.expert == a.experts) return write_zeros(a, rows, n0, kGemmThreads);
  const int row = threadIdx.x / 2, half = threadIdx.x % 2;
  const Span span = span_of(a, rows.expert);
  const Source w(a.w, (a.over_tokens ? 0 : rows.expert * a.w.rows) + n0 + row, n0 + row < a.w.rows, span.w, span.k);
  const Source x(a.x, rows.begin + row, rows.begin + row < rows.end, span.x, span.k);
  const int steps = static_cast<int>((span.k + kStep - 1) / kStep);
  Sums acc, total;
  fill(acc, 0.0f);
  fill(total, steps > 0 ? -0.0f : 0.0f);
  Raw w_raw, x_raw;
  const auto load = [&](int step) {
    w.load(static_cast<int64_t>(step) * kStep + half * 32, w_raw);
    x.load(static_cast<int64_t>(step) * kStep + half * 32, x_raw);
  };
  const auto decode = [&](int step) {
    char* tiles = memory + step % 2 * 2 * kTileBytes;
    w.store(w_raw, tiles, row, half * 4);
    x.store(x_raw, tiles + kTileBytes, row, half * 4);
  };
  if (steps > 0) {
    load(0);
    decode(0);
  }
  __syncthreads();
  for (int step = 0; step < steps; ++step) {
    char* tiles = memory + step % 2 * 2 * kTileBytes;
    if (step + 1 < steps) load(step + 1);
    multiply_step(tiles, tiles + kTileBytes, acc);
    if (step + 1 < steps) decode(step + 1);
    constexpr int kPerChunk = kChunk / kStep;
    if (step % kPerChunk == kPerChunk - 1 || step + 1 == steps) close_chunk(total, acc);
    __syncthreads();
  }
  write(a, rows, n0, total, reinterpret_cast<float*>(memory));
}

}  // namespace

cudaError_t gemm_invariant(const GemmArgs& args, cudaStream_t stream) {
  if (args.x.rows == 0 || args.w.rows == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>((args.w.rows + kTile - 1) / kTile * most_tiles(args, kTile)));
  return launch(gemm_invariant_kernel, grid, kGemmThreads, kShared, stream, args);
}

}  // namespace fp4ext::cuda
