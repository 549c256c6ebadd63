#pragma once
#include "../ptx/launch.h"
#include "../../numerics/layout.h"
#include "number.cuh"

// A block of threads works on a tile of 128×128 elements of the input, in either direction or in both.
//
//   row-wise alone     straight from memory to registers, 16 bytes at a time
//   column-wise, both  the tile is read once into shared memory, and from there along rows and along columns
//
// Eight lanes (four, for blocks of 32) stand side by side along the contraction and hold a block each, so an RHT over
// up to 128 elements is butterflies in registers first, then between lanes: the same additions in the same order as one
// thread would make. The tile covers whole atoms of the swizzled scales, so it also writes their padding.
namespace fp4ext::cuda {

inline constexpr int kTile = 128, kThreads = 256;
inline constexpr unsigned kAllLanes = 0xffffffffu;

struct Place {
  int64_t batch;        // which matrix of the batch, or expert
  int64_t first, rows;  // its rows in the input: where they begin, how many; 0 for a block without a tile
  int64_t row, col;     // of the tile's first element in the matrix
  int64_t tokens;       // along columns, where the expert's tokens begin
};
// block: what an expert's tokens are padded to.
__device__ inline Place place_of_block(const Input& in, int block) {
  const uint32_t across = static_cast<uint32_t>((in.cols + kTile - 1) / kTile), index = blockIdx.x / across;
  const int64_t col = static_cast<int64_t>(blockIdx.x % across) * kTile;
  if (!in.offsets) {
    const uint32_t down = static_cast<uint32_t>((in.rows + kTile - 1) / kTile), batch = index / down;
    return {batch, batch * in.rows, in.rows, static_cast<int64_t>(index % down) * kTile, col, 0};
  }
  int64_t tile = index, begin = 0, tokens = 0;
  for (int e = 0; e < in.experts; ++e) {
    int64_t end = in.offsets[e];
    end = end < begin ? begin : end > in.rows ? in.rows : end;
    const int64_t tiles = (end - begin + kTile - 1) / kTile;
    if (tile < tiles) return {e, begin, end - begin, tile * kTile, col, tokens};
    tile -= tiles, tokens += (end - begin + block - 1) / block * block, begin = end;
  }
  return {};
}
// At least as many as there are, whatever the offsets.
inline int64_t num_tiles(const Input& in) {
  const int64_t down = (in.rows + kTile - 1) / kTile, across = (in.cols + kTile - 1) / kTile;
  return (in.batch * down + (in.offsets ? in.experts : 0)) * across;
}

// The tile as one copy sees it: `row` along the output's rows, k along the contraction.
struct View {
  int64_t batch, rows, k_size;  // of one matrix of the output
  int64_t first;                // rows of the whole output before it
  int64_t tokens;
  int64_t row, k;  // of the tile's first element
  __device__ View(const Input& in, bool colwise, const Place& p)
      : batch(p.batch),
        rows(colwise ? in.cols : p.rows),
        k_size(colwise ? p.rows : in.cols),
        first(colwise ? p.batch * in.cols : p.first),
        tokens(p.tokens),
        row(colwise ? p.col : p.row),
        k(colwise ? p.row : p.col) {}
};

// The tile in shared memory: rows of 16-byte pieces, each at its place XOR a key of the row, so that neither the lanes
// that read along a row, nor those that read down a column, nor 16 rows side by side meet in one bank.
__device__ __forceinline__ int tile_key(int row) { return (row / 16 + row) & 7; }
template <class T>
__device__ __forceinline__ char* tile_piece(char* tile, int row, int piece) {
  return tile + row * kTile * sizeof(T) + ((piece ^ tile_key(row)) << 4);
}
template <class T>
__device__ __forceinline__ T tile_element(const char* tile, int row, int col) {
  const char* piece = tile_piece<T>(const_cast<char*>(tile), row, col / kPerPiece<T>);
  return reinterpret_cast<const T*>(piece)[col % kPerPiece<T>];
}

// Whether rows are whole pieces of 16 bytes, at addresses that are multiples of 16.
__host__ __device__ inline bool rows_are_aligned(const Input& in) {
  const int size = in.dtype == Dtype::fp32 ? 4 : 2;
  return reinterpret_cast<uintptr_t>(in.x) % 16 == 0 && in.cols * size % 16 == 0;
}

// Reads the tile into shared memory, zeros where x has no elements. The caller synchronizes.
template <class T>
__device__ void load_tile(const Input& in, const Place& p, char* tile) {
  constexpr int kPieces = kTile / kPerPiece<T>;
  const bool aligned = rows_are_aligned(in);
  for (int i = threadIdx.x; i < kTile * kPieces; i += kThreads) {
    const int row = i / kPieces, piece = i % kPieces;
    const int64_t col = p.col + piece * kPerPiece<T>, left = p.row + row < p.rows ? in.cols - col : 0;
    const T* x = static_cast<const T*>(in.x) + (p.first + p.row + row) * in.cols + col;
    char* to = tile_piece<T>(tile, row, piece);
    if (aligned) {
      *reinterpret_cast<uint4*>(to) = left > 0 ? *reinterpret_cast<const uint4*>(x) : make_uint4(0, 0, 0, 0);
    } else {
      FP4_ROLLED
      for (int j = 0; j < kPerPiece<T>; ++j) reinterpret_cast<T*>(to)[j] = j < left ? x[j] : T{};
    }
  }
}
__device__ inline void load_stored_tile(const Input& in, const Place& p, char* tile) {
  for (int i = threadIdx.x; i < kTile * kTile / 16; i += kThreads) {
    const int row = i / (kTile / 16), col = i % (kTile / 16) * 16;
    float t[16] = {};
    if (p.row + row < p.rows && p.col + col < in.cols) {
      decode_16(in.stored, p.first + p.row + row, p.col + col, t);
      for (int j = 0; j < 16; ++j)
        if (p.col + col + j >= in.cols) t[j] = 0.0f;
    }
    for (int j = 0; j < 4; ++j)
      *reinterpret_cast<float4*>(tile_piece<float>(tile, row, col / 4 + j)) = float4{t[4 * j], t[4 * j + 1], t[4 * j + 2], t[4 * j + 3]};
  }
}
__device__ inline void load_any_tile(const Input& in, const Place& p, char* tile) {
  if (in.dtype == Dtype::stored) return load_stored_tile(in, p, tile);
  if (in.dtype == Dtype::fp32)
    load_tile<float>(in, p, tile);
  else
    load_tile<uint16_t>(in, p, tile);
}
inline size_t tile_bytes(Dtype dtype) { return kTile * kTile * (dtype == Dtype::bf16 || dtype == Dtype::fp16 ? 2 : 4); }

inline bool needs_tile(const Input& in) { return in.dtype == Dtype::stored || !rows_are_aligned(in); }

// N elements of the tile along the contraction: from k on, of output row `row` (both within the tile). Without a tile in
// shared memory, straight from the input, row-wise, in rows that are aligned.
template <class T, int N>
__device__ __forceinline__ void load_line_of(const Input& in, const Place& p, const char* tile, bool colwise, int row, int k, T (&t)[N]) {
  if (colwise) {
    FP4_UNROLL
    for (int i = 0; i < N; ++i) t[i] = tile_element<T>(tile, k + i, row);
    return;
  }
  FP4_UNROLL
  for (int i = 0; i < N; i += kPerPiece<T>) {
    uint4 u = make_uint4(0, 0, 0, 0);
    if (tile)
      u = *reinterpret_cast<const uint4*>(tile_piece<T>(const_cast<char*>(tile), row, (k + i) / kPerPiece<T>));
    else if (p.row + row < p.rows && p.col + k + i < in.cols)
      u = *reinterpret_cast<const uint4*>(static_cast<const T*>(in.x) + (p.first + p.row + row) * in.cols + p.col + k + i);
    unpack(u, t + i);
  }
}
template <int N>
__device__ __forceinline__ void load_line(const Input& in, const Place& p, const char* tile, bool colwise, int row, int k, float (&t)[N]) {
  if (in.dtype == Dtype::bf16 || in.dtype == Dtype::fp16) {
    uint16_t halves[N];
    load_line_of(in, p, tile, colwise, row, k, halves);
    if (in.dtype == Dtype::bf16) {
      FP4_UNROLL
      for (int i = 0; i < N; ++i) t[i] = bf16_to_float(halves[i]);
    } else {
      FP4_UNROLL
      for (int i = 0; i < N; ++i) t[i] = fp16_to_float(halves[i]);
    }
  } else {
    load_line_of(in, p, tile, colwise, row, k, t);
  }
}

// Where a thread stands: lanes along the contraction, the rest across it; it visits the lines line, line + kStep, …
template <int N>
struct Stand {
  static constexpr int kAlong = kTile / N, kStep = kThreads / kAlong;
  int chunk, line;
  __device__ Stand() : chunk(threadIdx.x % kAlong), line(threadIdx.x / kAlong) {}
};

__device__ inline Rng read_rng(const Copy& c) {
  if (!c.rng) return {};
  const auto seed = static_cast<uint64_t>(c.rng[0]);
  return {{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)},
          static_cast<uint32_t>(c.rng[1]),
          c.sharded ? static_cast<uint32_t>(c.rng[2]) : 0u,
          c.sharded ? static_cast<uint32_t>(c.rng[3]) : 0u};
}

// The outer group of a row (in the tile's matrix).
__device__ inline int64_t group_of(const Copy& c, const View& v, int64_t row) {
  return c.outer == OuterKind::row ? v.first + row : c.outer == OuterKind::expert ? v.batch : 0;
}

// The length of its RHT: an expert's tokens are as many as they are.
__device__ inline int rht_of(const Input& in, const Copy& c, const View& v) {
  return c.rht && in.offsets && c.colwise ? rht_length((v.k_size + 15) / 16 * 16, c.rht) : c.rht;
}

// The RHT of vectors of n elements, N of them in each thread, n/N neighbouring lanes to a vector (or N/n vectors to a
// thread). numerics/hadamard.h defines it; here its butterflies of h >= N are exchanges between lanes.
template <int N>
struct Rotation {
  int n, stages;
  uint32_t first, second;  // the signs of this thread's elements in either stage
  int place;               // of this thread in its vector
  __device__ Rotation(const Copy& c, int length, const Rng& rng, int chunk)
      : n(length), stages(length ? c.stages : 0), first(0), second(0), place(0) {
    if (n > N) place = chunk & (n / N - 1);
    if (stages > 0) first = signs_of(rng, 0);
    if (stages > 1) second = signs_of(rng, 1);
  }
  __device__ int lanes() const { return n > N ? n / N : 1; }

  // exists: how many of t's elements lie before the end of the (padded) contraction; the rest is not rotated.
  __device__ void operator()(float (&t)[N], int64_t exists) const {
    if (n == 0) return;
    FP4_ROLLED
    for (int s = 0; s < stages; ++s) stage(t, s ? second : first, s == 1);
    if (N == 32 && n == 16 && exists <= 16)
      for (int i = 16; i < N; ++i) t[i] = 0.0f;
    poison(t);
  }

 private:
  __device__ uint32_t signs_of(const Rng& rng, uint32_t stage) const {
    const auto words = rht_signs(rng, stage);
    const int at = place * N / 32;
    const uint32_t word = at == 0 ? words.w[0] : at == 1 ? words.w[1] : at == 2 ? words.w[2] : words.w[3];
    return n == 16 ? (word & 0xffffu) * 0x10001u : word >> (place * N % 32);
  }

  __device__ void stage(float (&t)[N], uint32_t sign, bool turned) const {
    FP4_UNROLL
    for (int i = 0; i < N; ++i) t[i] = as_float(bits(t[i]) ^ ((sign >> i & 1u) << 31));
    FP4_UNROLL
    for (int i = 0; i < N; i += 2) {
      const float a = t[i], b = t[i + 1], c = rht_turn(i / 2).c, v = rht_turn(i / 2).s;
      t[i] = turned ? c * a + v * b : a + b;
      t[i + 1] = turned ? v * a - c * b : a - b;
    }
    FP4_UNROLL
    for (int h = 2; h < N; h *= 2) {
      if (h >= n) break;
      FP4_UNROLL
      for (int i = 0; i < N; ++i) {
        if (i & h) continue;
        const float a = t[i], b = t[i + h];
        t[i] = a + b;
        t[i + h] = a - b;
      }
    }
    FP4_ROLLED
    for (int h = N; h < n; h *= 2) {
      const bool upper = (place & (h / N)) != 0;
      FP4_UNROLL
      for (int i = 0; i < N; ++i) {
        const float other = __shfl_xor_sync(kAllLanes, t[i], h / N);
        t[i] = upper ? other - t[i] : t[i] + other;
      }
    }
    const float norm = rht_norm(n);
    FP4_UNROLL
    for (int i = 0; i < N; ++i) t[i] = t[i] * norm;
  }

  // A vector that met a NaN or overflowed is NaN as a whole.
  __device__ void poison(float (&t)[N]) const {
    uint32_t largest[N / 16] = {};
    FP4_UNROLL
    for (int i = 0; i < N; ++i) largest[i / 16] = max_of_bits(largest[i / 16], bits(abs_of(t[i])));
    uint32_t first = largest[0], last = largest[N / 16 - 1];
    if (N == 32 && n > 16) first = last = max_of_bits(first, last);
    for (int h = N; h < n; h *= 2) first = last = max_of_bits(first, __shfl_xor_sync(kAllLanes, first, h / N));
    FP4_UNROLL
    for (int i = 0; i < N; ++i) t[i] = (i < 16 ? first : last) >= kInfBits ? as_float(0x7fc00000u) : t[i];
  }
  __device__ static uint32_t max_of_bits(uint32_t a, uint32_t b) { return a > b ? a : b; }
};

}  // namespace fp4ext::cuda
