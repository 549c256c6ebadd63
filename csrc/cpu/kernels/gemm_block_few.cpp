#include "../../numerics/e8m0.h"
#include "../bytes.h"
#include "gemm.h"

// Block order for a few rows: w is read as it lies, sixteen bytes (two blocks) of a column at a time.
//
// A part of a vector holds one column's bytes. The products of the even and of the odd nibbles with those of x are
// added in groups of four bytes, which leaves two sums a block; gathering kLanes columns' sums in one vector, a column
// a lane, ends the integer part. From there on everything is as in gemm_block.cpp, the same trick of unsigned weights
// included.
//
// Packed x, for each pair of blocks and each row: 16 bytes of 2·element of the even elements, 16 of the odd ones, then
// (multiplier, correction) of both blocks.
namespace fp4ext::cpu::FP4EXT_ISA {
#if !defined(__AVX2__)
const GemmFew& gemm_block_few(bool) {  // panels for any number of rows
  static constexpr GemmFew kNone = {};
  return kNone;
}
#else
namespace {

constexpr int kFewRows = 4;
constexpr int64_t kPair = 48;  // bytes of packed x, a row and two blocks

template <bool kFold>
void pack_x(const Operand& x, int64_t row, int rows, int64_t k, uint8_t* out) {
  const int64_t blocks = (k + 15) / 16;
  const float* values = scale_table(x.scale).value;
  std::memset(out, 0, (blocks + 1) / 2 * rows * kPair);
  for (int r = 0; r < rows; ++r) {
    const uint8_t *codes = x.row(row + r), *scales = x.row_scales(row + r);
    for (int64_t b = 0; b < blocks; ++b) {
      uint8_t* to = out + (b / 2 * rows + r) * kPair + b % 2 * 8;
      int sum = 0;
      for (int i = 0; i < 8; ++i) {
        to[i] = kTwiceE2M1[codes[b * 8 + i] & 15];
        to[16 + i] = kTwiceE2M1[codes[b * 8 + i] >> 4];
        sum += static_cast<int8_t>(to[i]) + static_cast<int8_t>(to[16 + i]);
      }
      const float s = values[scales[b * 16 >> x.block_shift()]];
      const float pair[2] = {kFold ? 0.25f * s : s, -3.0f * static_cast<float>(sum) * (kFold ? s : 1.0f)};
      std::memcpy(to - b % 2 * 8 + 32 + b % 2 * 8, pair, 8);
    }
  }
}

// Sixteen scale bytes of each of kLanes columns, transposed: word j of part p of words[q] has block scale 4q+j of
// columns 4p .. 4p+3.
struct Scales {
  VB words[4];
  FP4_HD void load(const uint8_t* const* columns, int64_t offset, int64_t available) {
    uint8_t padded[kLanes][16];
    const uint8_t* rows[kLanes];
    if (available < 16) {
      std::memset(padded, 0, sizeof(padded));
      for (int l = 0; l < kLanes; ++l) {
        std::memcpy(padded[l], columns[l] + offset, available);
        rows[l] = padded[l];
      }
      columns = rows, offset = 0;
    }
    const VB s0 = gather16(columns, offset), s1 = gather16(columns + 1, offset), s2 = gather16(columns + 2, offset),
             s3 = gather16(columns + 3, offset);
    const VB a = low8(s0, s2), b = low8(s1, s3), c = high8(s0, s2), d = high8(s1, s3);
    words[0] = low8(a, b), words[1] = high8(a, b), words[2] = low8(c, d), words[3] = high8(c, d);
  }
};

// How a scale byte is decoded. E4M3 has a short way for bytes that quantize writes, which are neither negative nor NaN:
// below 0x7f.
enum class Decode { e4m3_short, e4m3, e8m0 };

// The value of a byte that stands in bits 16 .. 23.
template <Decode decode>
FP4_HD VF scale_value(VU shifted) {
  if constexpr (decode == Decode::e4m3) return decode_e4m3_scale(shifted >> 16);
  if constexpr (decode == Decode::e8m0) return decode_e8m0(shifted >> 16);
  const VU b = shifted << 4;  // exponent and mantissa where fp32 has them, the exponent biased by 7 instead of 127
  const VF subnormal = as_float(b + VU(121u << 23)) - VF(0x1p-6f);
  return select(VU(8u << 20) > b, subnormal, as_float(b + VU(120u << 23)));
}

// Two blocks of kLanes columns, or the first of them.
template <int R, bool kFold>
FP4_HD void add_pair(const uint8_t* const* columns, int64_t offset, VB table, const uint8_t* x, const VF (&scale)[2], bool both,
                     VF (&acc)[R]) {
  VB sums[R][4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const VB packed = gather16(columns + i, offset);
    const VB even = lookup16(table, low_nibbles(packed)), odd = lookup16(table, high_nibbles(packed));
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sums[r][i] = dot_words(even, broadcast16(x + r * kPair), odd, broadcast16(x + r * kPair + 16));
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const auto* pairs = reinterpret_cast<const float*>(x + r * kPair + 32);
    const auto add = [](VB a, VB b) { return VB{RawB(RawU(even32(a, b).v) + RawU(odd32(a, b).v))}; };
    const VB low = add(sums[r][0], sums[r][1]), high = add(sums[r][2], sums[r][3]);  // (first, second block) of two columns
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      if (h == 1 && !both) break;
      const VF sum = to_float(h ? odd32(low, high) : even32(low, high));
      const VF multiplier = splat(pairs + 2 * h), correction = splat(pairs + 2 * h + 1);
      if constexpr (kFold)
        acc[r] = fma(fma(sum, multiplier, correction), scale[h], acc[r]);
      else
        acc[r] = fma(fma(sum, VF(0.25f), correction), multiplier * scale[h], acc[r]);
    }
  }
}

// Columns [column, column + columns), at most kLanes. False if the short way to decode scales met a byte it cannot.
template <int R, bool kFold, Decode decode>
bool multiply_vector(const uint8_t* x, int64_t x_step, const Operand& w, int64_t column, int columns, int64_t k, float* total,
                     int64_t stride) {
  constexpr int kShift = decode == Decode::e8m0 ? 5 : 4;
  const uint8_t *codes[kLanes], *scales[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    const int64_t c = column + (l < columns ? l : columns - 1);
    codes[l] = w.row(c), scales[l] = w.row_scales(c);
  }
  // What this thread reads next, line after line: a few lines of many rows are no pattern that the hardware sees.
  const bool more = column + 2 * kLanes <= w.rows;
  const uint8_t* next = codes[0] + (more ? kLanes * w.bytes(w.pitch) : 0);
  const int64_t ahead_scales = more ? kLanes * (w.pitch / w.block) : 0;
  const VB table = repeat16(kTwiceE2M1Plus12);
  const int64_t blocks = (k + 15) / 16;
  constexpr int64_t kStep = 16 << (kShift - 4), kChunkBlocks = kGemmChunk / 16;  // blocks of 16 scales
  VF acc[R], sum[R];
  for (int r = 0; r < R; ++r) acc[r] = VF(0.0f);
  VB largest = VB{};
  for (int64_t b0 = 0; b0 < blocks; b0 += kStep) {
    const int64_t first_scale = b0 * 16 >> kShift;
    if (b0 % (4 * kStep) == 0)
      for (int l = 0; l < kLanes; ++l) __builtin_prefetch(scales[l] + first_scale + ahead_scales);
    Scales s;
    s.load(scales, first_scale, ((blocks * 16 + (1 << kShift) - 1) >> kShift) - first_scale);
    const auto quarter = [&](int q) {  // four scales
      const VB word = s.words[q];
      if constexpr (decode == Decode::e4m3_short) largest = max8(largest, word);
      const VF value[4] = {scale_value<decode>(widen_word<0>(word)), scale_value<decode>(widen_word<1>(word)),
                           scale_value<decode>(widen_word<2>(word)), scale_value<decode>(widen_word<3>(word))};
#pragma GCC unroll 4
      for (int i = 0; i < kStep / 8; ++i) {
        const int64_t b = b0 + q * (kStep / 4) + 2 * i;
        if (b >= blocks) return;
        const VF scale[2] = {value[2 * i * 16 >> kShift], value[(2 * i + 1) * 16 >> kShift]};
        const bool both = b + 1 < blocks;
        for (int line = 0; line < 16 * kLanes; line += 64) __builtin_prefetch(next + b * 8 * kLanes + line);
        uint8_t tail[kLanes][16];
        const uint8_t* tails[kLanes];
        if (!both)  // the last 8 bytes of a row, perhaps of the tensor
          for (int l = 0; l < kLanes; ++l) {
            std::memset(tail[l], 0, 16);
            std::memcpy(tail[l], codes[l] + b * 8, 8);
            tails[l] = tail[l];
          }
        add_pair<R, kFold>(both ? codes : tails, both ? b * 8 : 0, table, x + b / 2 * x_step, scale, both, acc);
      }
    };
    for (int q = 0; q < 4; ++q) quarter(q);
    const int64_t end = b0 + kStep;
    if (end % kChunkBlocks == 0 || end >= blocks)
      for (int r = 0; r < R; ++r) {
        sum[r] = end <= kChunkBlocks ? acc[r] : sum[r] + acc[r];
        acc[r] = VF(0.0f);
      }
  }
  for (int r = 0; r < R; ++r) {
    float lanes[kLanes];
    store(lanes, sum[r]);
    std::memcpy(total + r * stride, lanes, columns * sizeof(float));
  }
  return decode != Decode::e4m3_short || largest_byte(largest) < kE4M3NaN;
}

// x: R rows of it, x_step bytes from one pair of blocks to the next.
template <bool kFold, int R>
void multiply_rows(const uint8_t* x, int64_t x_step, const Operand& w, int64_t column, int columns, int64_t k, float* total,
                   int64_t stride) {
  const auto with = [&]<Decode decode>() { return multiply_vector<R, kFold, decode>(x, x_step, w, column, columns, k, total, stride); };
  if constexpr (kFold) {
    if (with.template operator()<Decode::e4m3_short>()) return;
  } else if (w.scale == ScaleElem::e8m0) {
    with.template operator()<Decode::e8m0>();
    return;
  }
  with.template operator()<Decode::e4m3>();
}

// Two rows at a time; the second time the columns come from the cache.
template <bool kFold>
void multiply(const uint8_t* x, int rows, const Operand& w, int64_t column, int columns, int64_t k, float* total, int64_t stride) {
  for (int c = 0; c < columns; c += kLanes)
    for (int r = 0; r < rows; r += 2) {
      const int n = columns - c < kLanes ? columns - c : kLanes;
      (rows - r > 1 ? multiply_rows<kFold, 2> : multiply_rows<kFold, 1>)(x + r * kPair, rows * kPair, w, column + c, n, k,
                                                                         total + r * stride + c, stride);
    }
}

}  // namespace

const GemmFew& gemm_block_few(bool both_e4m3) {
  static constexpr GemmFew kE4M3 = {kFewRows, kPair / 2, pack_x<true>, multiply<true>};
  static constexpr GemmFew kAny = {kFewRows, kPair / 2, pack_x<false>, multiply<false>};
  return both_e4m3 ? kE4M3 : kAny;
}
#endif

}  // namespace fp4ext::cpu::FP4EXT_ISA
