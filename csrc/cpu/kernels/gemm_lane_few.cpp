#include <memory>

#include "row_reader.h"

// Lane order for a few rows: here SIMD lanes are the contract's lanes, sixteen neighbours along k, and w is read as it lies.
//
// Packed x: [k / 16][rows][16] elements times their scale, in fp32.
namespace fp4ext::cpu::FP4EXT_ISA {
#if !defined(__AVX2__)
const GemmFew& gemm_lane_few() {  // panels for any number of rows
  static constexpr GemmFew kNone = {};
  return kNone;
}
#else
namespace {

constexpr int kFewRows = 4;
constexpr int kParts16 = kWidth / kLanes;  // vectors of sixteen lanes

template <Elem E>
void pack_x(const Operand& x, int64_t row, int rows, int64_t k, uint8_t* out) {
  for (int r = 0; r < rows; ++r) {
    const RowReader<E> reader(x, row + r);
    auto* to = reinterpret_cast<float*>(out) + r * kWidth;
    for (int64_t k0 = 0; k0 < k; k0 += kWidth, to += rows * kWidth) {
      VF v[kParts16];
      reader.read(k0, k, v);
      for (int i = 0; i < kParts16; ++i) store(to + i * kLanes, v[i]);
    }
  }
}

// The tree over sixteen lanes.
FP4_HD float sum_of_lanes(const VF (&acc)[kParts16]) {
  float l[kWidth];
  for (int i = 0; i < kParts16; ++i) store(l + i * kLanes, acc[i]);
  for (int h = kWidth / 2; h > 0; h /= 2)
    for (int i = 0; i < h; ++i) l[i] = l[i] + l[i + h];
  return l[0];
}

// R rows times C columns: R·C·16 sums side by side.
template <Elem E, int R, int C>
void multiply_columns(const float* x, int64_t x_step, const Operand& w, int64_t column, int64_t k, float* total, int64_t stride) {
  RowReader<E> readers[C];
  for (int c = 0; c < C; ++c) readers[c] = RowReader<E>(w, column + c);
  for (int64_t chunk = 0; chunk < k; chunk += kGemmChunk) {
    const int64_t end = k - chunk < kGemmChunk ? k : chunk + kGemmChunk;
    VF acc[R][C][kParts16];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c)
        for (int i = 0; i < kParts16; ++i) acc[r][c][i] = VF(0.0f);
    for (int64_t k0 = chunk; k0 < end; k0 += kWidth, x += x_step) {
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        VF v[kParts16];
        readers[c].read(k0, k, v);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
          for (int i = 0; i < kParts16; ++i) acc[r][c][i] = fma(load<VF>(x + r * kWidth + i * kLanes), v[i], acc[r][c][i]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) {
        float& t = total[r * stride + c];
        const float part = sum_of_lanes(acc[r][c]);
        t = chunk ? t + part : part;
      }
  }
}

#if !defined(__AVX512F__)
// E2M1 weights with AVX2, which has no table of sixteen floats: an element times its scale is exact in BF16 (2 bits ·
// 4 bits, or a power of two), so a scale byte chooses a table of sixteen of them, its high and its low bytes apart.
struct ScaledTables {
  uint8_t high[256][16], low[256][16];
  explicit ScaledTables(ScaleElem kind) {
    for (int byte = 0; byte < 256; ++byte)
      for (uint32_t code = 0; code < 16; ++code) {
        const uint32_t word = bits(E2M1::signed_value(code) * scale_table(kind).value[byte]) >> 16;
        high[byte][code] = word >> 8, low[byte][code] = word & 255;
      }
  }
};
const ScaledTables& scaled_tables(ScaleElem kind) {
  static const auto e4m3 = std::make_unique<ScaledTables>(ScaleElem::e4m3), e8m0 = std::make_unique<ScaledTables>(ScaleElem::e8m0);
  return kind == ScaleElem::e4m3 ? *e4m3 : *e8m0;
}

// Two columns side by side, one in each half of a vector: sums[q] has lanes 4q .. 4q+3 of the numerics contract.
template <int R>
void multiply_e2m1(const float* x, int64_t x_step, const Operand& w, int64_t column, int64_t k, float* total, int64_t stride) {
  const ScaledTables& tables = scaled_tables(w.scale);
  const uint8_t* codes[2] = {w.row(column), w.row(column + 1)};
  const uint8_t* scales[2] = {w.row_scales(column), w.row_scales(column + 1)};
  const int shift = w.block_shift();
  const int64_t ahead = column + 4 <= w.rows ? 2 * w.bytes(w.pitch) : 0;
  for (int64_t chunk = 0; chunk < k; chunk += kGemmChunk) {
    const int64_t end = k - chunk < kGemmChunk ? k : chunk + kGemmChunk;
    __m256 sums[R][4];
    for (int r = 0; r < R; ++r)
      for (int q = 0; q < 4; ++q) sums[r][q] = _mm256_setzero_ps();
    for (int64_t k0 = chunk; k0 < end; k0 += kWidth, x += x_step) {
      const uint8_t* from[2] = {codes[0] + k0 / 2, codes[1] + k0 / 2};
      uint8_t padded[2][8];
      if (k0 + kWidth > k)
        for (int c = 0; c < 2; ++c) {
          std::memset(padded[c], 0, 8);
          std::memcpy(padded[c], from[c], (k - k0 + 1) / 2);
          if (k % 2) padded[c][(k - k0) / 2] &= 15;
          from[c] = padded[c];
        }
      if (k0 % 128 == 0)
        for (int c = 0; c < 2; ++c) __builtin_prefetch(from[c] + ahead, 0, 2);
      const __m128i both = _mm_unpacklo_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from[0])),
                                              _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from[1])));
      const __m256i wide = _mm256_cvtepu8_epi16(both);
      const __m256i index = _mm256_and_si256(_mm256_or_si256(wide, _mm256_slli_epi16(wide, 4)), _mm256_set1_epi8(15));
      const int s0 = scales[0][k0 >> shift], s1 = scales[1][k0 >> shift];
      const auto table = [&](const uint8_t (&t)[256][16]) {
        return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(t[s0]))),
                                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(t[s1])), 1);
      };
      const __m256i high = _mm256_shuffle_epi8(table(tables.high), index), low = _mm256_shuffle_epi8(table(tables.low), index);
      const __m256i words[2] = {_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)}, zero = _mm256_setzero_si256();
      const __m256 v[4] = {
          _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, words[0])), _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, words[0])),
          _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, words[1])), _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, words[1]))};
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int q = 0; q < 4; ++q)
          sums[r][q] = _mm256_fmadd_ps(_mm256_broadcast_ps(reinterpret_cast<const __m128*>(x + r * kWidth + 4 * q)), v[q], sums[r][q]);
    }
    for (int r = 0; r < R; ++r) {
      float l[8];
      _mm256_storeu_ps(l, _mm256_add_ps(_mm256_add_ps(sums[r][0], sums[r][2]), _mm256_add_ps(sums[r][1], sums[r][3])));
      for (int c = 0; c < 2; ++c) {
        const float part = (l[4 * c] + l[4 * c + 2]) + (l[4 * c + 1] + l[4 * c + 3]);
        float& t = total[r * stride + c];
        t = chunk ? t + part : part;
      }
    }
  }
}

// All rows of x, two at a time, for two columns at a time.
void multiply_e2m1_rows(const uint8_t* x, int rows, const Operand& w, int64_t column, int columns, int64_t k, float* total,
                        int64_t stride) {
  for (int c = 0; c < columns; c += 2)
    for (int r = 0; r < rows; r += 2) {
      const float* from = reinterpret_cast<const float*>(x) + r * kWidth;
      (rows - r > 1 ? multiply_e2m1<2> : multiply_e2m1<1>)(from, rows * kWidth, w, column + c, k, total + r * stride + c, stride);
    }
}
#endif

// R rows of x, x_step floats from sixteen elements to the next.
template <Elem E, int R>
void multiply_rows(const float* x, int64_t x_step, const Operand& w, int64_t column, int columns, int64_t k, float* total, int64_t stride) {
  constexpr int C = 4 / R;
  int c = 0;
  for (; c + C <= columns; c += C) multiply_columns<E, R, C>(x, x_step, w, column + c, k, total + c, stride);
  for (; c < columns; ++c) multiply_columns<E, R, 1>(x, x_step, w, column + c, k, total + c, stride);
}

// Two rows at a time; the second time the columns come from the cache.
template <Elem E>
void multiply_all(const uint8_t* x, int rows, const Operand& w, int64_t column, int columns, int64_t k, float* total, int64_t stride) {
  for (int r = 0; r < rows; r += 2) {
    const float* from = reinterpret_cast<const float*>(x) + r * kWidth;
    (rows - r > 1 ? multiply_rows<E, 2> : multiply_rows<E, 1>)(from, rows * kWidth, w, column, columns, k, total + r * stride, stride);
  }
}

void pack_x_any(const Operand& x, int64_t row, int rows, int64_t k, uint8_t* out) {
  with_elem(x.elem, [&]<Elem E>() { pack_x<E>(x, row, rows, k, out); });
}
void multiply(const uint8_t* x, int rows, const Operand& w, int64_t column, int columns, int64_t k, float* total, int64_t stride) {
#if !defined(__AVX512F__)
  if (w.elem == Elem::e2m1) {
    const int even = columns / 2 * 2;
    multiply_e2m1_rows(x, rows, w, column, even, k, total, stride);
    if (even < columns) multiply_all<Elem::e2m1>(x, rows, w, column + even, 1, k, total + even, stride);
    return;
  }
#endif
  with_elem(w.elem, [&]<Elem E>() { multiply_all<E>(x, rows, w, column, columns, k, total, stride); });
}

}  // namespace

const GemmFew& gemm_lane_few() {
  static constexpr GemmFew kFew = {kFewRows, kWidth * 4, pack_x_any, multiply};
  return kFew;
}
#endif

}  // namespace fp4ext::cpu::FP4EXT_ISA
