#include "tile.cuh"

// x̂ of a stored tensor, and the two layouts of its scales.
namespace fp4ext::cuda {
namespace {

template <class T, class Fn>
__device__ void store_16(const float (&t)[16], T* out, int64_t count, Fn convert) {
  T packed[16];
  FP4_UNROLL
  for (int i = 0; i < 16; ++i) packed[i] = convert(t[i]);
  if (count >= 16 && is_aligned(out, 16)) {
    FP4_UNROLL
    for (int i = 0; i < 16; i += kPerPiece<T>) {
      uint4 u;
      memcpy(&u, packed + i, 16);
      *reinterpret_cast<uint4*>(out + i) = u;
    }
    return;
  }
  FP4_UNROLL
  for (int i = 0; i < 16; ++i)
    if (i < count) out[i] = packed[i];
}

__global__ void __launch_bounds__(kThreads) dequantize_kernel(const Stored from, int64_t rows, int64_t k, Dtype dtype, void* out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, per_row = (k + 15) / 16;
  if (i >= rows * per_row) return;
  const int64_t row = i / per_row, at = i % per_row * 16;
  float t[16];
  decode_16(from, row, at, t);
  auto* halves = static_cast<uint16_t*>(out) + row * k + at;
  if (dtype == Dtype::fp32)
    store_16(t, static_cast<float*>(out) + row * k + at, k - at, [](float x) { return x; });
  else if (dtype == Dtype::bf16)
    store_16(t, halves, k - at, [](float x) { return float_to_bf16(x); });
  else
    store_16(t, halves, k - at, [](float x) { return float_to_fp16(x); });
}

// Which rows of the scales lie in the 128 rows number `slab` of the tensor cores' layout: `count` of them, from `first` on.
struct Slab {
  int64_t first, count;
};
__device__ inline Slab slab_of(const ScaleRows& r, int64_t slab) {
  const auto of = [](int64_t begin, int64_t rows, int64_t slab) {
    const int64_t left = rows - slab * 128;
    return Slab{begin + slab * 128, left < 128 ? left : 128};
  };
  if (!r.offsets) {
    const int64_t each = padded_rows(r.rows) / 128, e = slab / each;
    return of(e * r.rows, r.rows, slab % each);
  }
  int64_t begin = 0;
  for (int e = 0; e < r.experts; ++e) {
    int64_t end = r.offsets[e];
    end = end < begin ? begin : end > r.rows ? r.rows : end;
    const int64_t slabs = (end - begin + 127) / 128;
    if (slab < slabs) return of(begin, end - begin, slab);
    slab -= slabs, begin = end;
  }
  return {0, 0};
}

// A thread writes four neighbouring scales, which stand in one row.
__global__ void __launch_bounds__(kThreads)
    swizzle_kernel(const uint8_t* scales, int64_t words, const ScaleRows rows, int64_t columns, uint32_t* out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, across = padded_columns(columns) / 4;
  if (i >= words) return;
  const int64_t atom = i / 128, row = i % 4 * 32 + i % 128 / 4, column = atom % across * 4;
  const Slab slab = slab_of(rows, atom / across);
  uint32_t word = 0;
  for (int j = 0; j < 4; ++j)
    if (row < slab.count && column + j < columns)
      word |= static_cast<uint32_t>(scales[(slab.first + row) * columns + column + j]) << (8 * j);
  out[i] = word;
}

__global__ void __launch_bounds__(kThreads)
    unswizzle_kernel(const uint8_t* swizzled, int64_t count, int64_t rows, int64_t columns, uint8_t* out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const int64_t e = i / (rows * columns), row = i / columns % rows, column = i % columns;
  out[i] = swizzled[e * padded_rows(rows) * padded_columns(columns) + swizzled_offset(row, column, columns)];
}

dim3 blocks_for(int64_t threads) { return dim3(static_cast<unsigned>((threads + kThreads - 1) / kThreads)); }

}  // namespace

cudaError_t dequantize(const Stored& from, int64_t rows, int64_t k, Dtype dtype, void* out, cudaStream_t stream) {
  const int64_t threads = rows * ((k + 15) / 16);
  return threads == 0 ? cudaSuccess : launch(dequantize_kernel, blocks_for(threads), kThreads, 0, stream, from, rows, k, dtype, out);
}

cudaError_t swizzle(const uint8_t* scales, const ScaleRows& rows, int64_t columns, uint8_t* out, cudaStream_t stream) {
  const int64_t words = rows.padded() * padded_columns(columns) / 4;
  auto* to = reinterpret_cast<uint32_t*>(out);
  return words == 0 ? cudaSuccess : launch(swizzle_kernel, blocks_for(words), kThreads, 0, stream, scales, words, rows, columns, to);
}

cudaError_t unswizzle(const uint8_t* swizzled, int64_t stack, int64_t rows, int64_t columns, uint8_t* out, cudaStream_t stream) {
  const int64_t count = stack * rows * columns;
  return count == 0 ? cudaSuccess : launch(unswizzle_kernel, blocks_for(count), kThreads, 0, stream, swizzled, count, rows, columns, out);
}

}  // namespace fp4ext::cuda
