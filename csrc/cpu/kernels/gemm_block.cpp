#include "../bytes.h"
#include "gemm.h"

// Block order: both operands are E2M1, and a block is a dot product of small integers.
//
// With a = 2·element of x (-12..12, signed) and u = 2·element of w + 12 (0..24, unsigned), which is what the byte dot
// products of x86 want,
//   Σ u·a = 4·I + 12·Σa,   so   I·s_x = fma(Σ u·a, s_x/4, -12·Σa·s_x/4)
// is one fma, exact for E4M3 scales: 13 bits · 4 bits. Then acc = fma(I·s_x, s_w, acc) rounds once, as the contract's fma(I,
// s_x·s_w, acc) does. E8M0 scales may overflow or vanish on the way (2^127·2^-127), so with one of them I = fma(Σ u·a,
// 1/4, -3·Σa) and s_x·s_w are apart.
//
// Panels. x: a block of `rows` rows is [4][rows] groups of four bytes, then [rows] pairs (multiplier, correction). w: a
// block of `vectors` vectors of columns is [4][vectors] vectors of bytes, four consecutive k a column, then [vectors]
// vectors of scales.
namespace fp4ext::cpu::FP4EXT_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kRows = 4, kVectors = 3;
#elif defined(__AVX2__)
constexpr int kRows = 2, kVectors = 3;
#else
constexpr int kRows = 2, kVectors = 2;
#endif
constexpr int64_t kStep = 512;
constexpr int kXBytes = 16 + 8, kWBytes = 16 + 4;

// ---- x ----

// kLanes / 2 blocks of one row at a time: part p of a vector holds blocks 2p and 2p+1.
template <bool kFold>
void pack_x(const Operand& x, int64_t row, int rows, int64_t k, uint8_t* out) {
  constexpr int kBlocks = kLanes / 2;
  const int64_t blocks = (k + 15) / 16, record = rows * kXBytes;
  const VB signed_table = repeat16(kTwiceE2M1), unsigned_table = repeat16(kTwiceE2M1Plus12);
  const float* values = scale_table(x.scale).value;
  const int32_t ones = 0x01010101;
  for (int r = 0; r < rows; ++r) {
    const uint8_t* codes = x.row(row + r);
    const uint8_t* scales = x.row_scales(row + r);
    for (int64_t b = 0; b < blocks; b += kBlocks) {
      const int n = static_cast<int>(blocks - b < kBlocks ? blocks - b : kBlocks);
      VB packed{};
      std::memcpy(&packed, codes + b * 8, n * 8);
      const VB even = low_nibbles(packed), odd = high_nibbles(packed);
      const VB a_even = lookup16(signed_table, even), a_odd = lookup16(signed_table, odd);
      const VB u_even = lookup16(unsigned_table, even), u_odd = lookup16(unsigned_table, odd);
      uint32_t groups[2][kLanes];  // four bytes of 2·element, of the even and of the odd blocks
      float sums[2][kLanes];       // Σ (2·element + 12) over them
      const VB a[2] = {low8(a_even, a_odd), high8(a_even, a_odd)}, u[2] = {low8(u_even, u_odd), high8(u_even, u_odd)};
      for (int h = 0; h < 2; ++h) {
        store(groups[h], a[h]);
        store(sums[h], to_float(dot4(DotSums{}, true, u[h], &ones)));
      }
      for (int i = 0; i < n; ++i) {
        uint8_t* to = out + (b + i) * record;
        const int h = i % 2, at = i / 2 * 4;
        for (int g = 0; g < 4; ++g) std::memcpy(to + (g * rows + r) * 4, &groups[h][at + g], 4);
        const float sum = sums[h][at] + sums[h][at + 1] + sums[h][at + 2] + sums[h][at + 3] - 192.0f;
        const float s = values[scales[(b + i) * 16 >> x.block_shift()]];
        const float pair[2] = {kFold ? 0.25f * s : s, -3.0f * sum * (kFold ? s : 1.0f)};
        std::memcpy(to + (4 * rows + 2 * r) * 4, pair, 8);
      }
    }
  }
}

// ---- w ----

// Two blocks of kLanes columns: vector g of `out` has bytes 4g..4g+3 of column l in lane l.
FP4_HD void unpack_columns(const uint8_t* const* columns, int64_t offset, VB table, VB (&out)[8]) {
  VB low[4], high[4];  // part p of [i]: 16 bytes, in the order of k, of column 4p+i
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const VB packed = gather16(columns + i, offset);
    const VB even = lookup16(table, low_nibbles(packed)), odd = lookup16(table, high_nibbles(packed));
    low[i] = low8(even, odd);
    high[i] = high8(even, odd);
  }
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    const VB(&t)[4] = h ? high : low;
    const VB a = low32(t[0], t[1]), b = low32(t[2], t[3]), c = high32(t[0], t[1]), d = high32(t[2], t[3]);
    out[4 * h] = low64(a, b);
    out[4 * h + 1] = high64(a, b);
    out[4 * h + 2] = low64(c, d);
    out[4 * h + 3] = high64(c, d);
  }
}

void pack_w(const Operand& w, int64_t column, int columns, int64_t k0, int64_t k1, uint8_t* out) {
  const int vectors = (columns + kLanes - 1) / kLanes;
  const int64_t blocks = (k1 - k0 + 15) / 16, record = static_cast<int64_t>(vectors) * kLanes * kWBytes;
  const VB table = repeat16(kTwiceE2M1Plus12);
  const float* values = scale_table(w.scale).value;
  for (int v = 0; v < vectors; ++v) {
    const uint8_t *codes[kLanes], *scales[kLanes], *ahead[kLanes];
    for (int l = 0; l < kLanes; ++l) {
      const int64_t c = column + (v * kLanes + l < columns ? v * kLanes + l : columns - 1);
      codes[l] = w.row(c) + k0 / 2;
      scales[l] = w.row_scales(c);
      // What this thread reads next: the rest of the row, or the same lane of the next strip. A few lines of many rows
      // are no pattern that the hardware sees.
      ahead[l] = k1 < w.k_stored ? w.row(c) + k1 / 2 : w.row(c + kVectors * kLanes < w.rows ? c + kVectors * kLanes : c);
    }
    VB t[8];
    int64_t b = 0;
    for (; b + 1 < blocks; b += 2) {
      if (b % 8 == 0)
        for (int l = 0; l < kLanes; ++l) __builtin_prefetch(ahead[l] + b * 8);
      unpack_columns(codes, b * 8, table, t);
      uint8_t* to = out + b * record + v * sizeof(VB);
#pragma GCC unroll 8
      for (int g = 0; g < 8; ++g) store(to + g / 4 * record + g % 4 * vectors * sizeof(VB), t[g]);
    }
    if (b < blocks) {  // the last 8 bytes of a row, perhaps of the tensor
      uint8_t tail[kLanes][16] = {};
      const uint8_t* rows[kLanes];
      for (int l = 0; l < kLanes; ++l) {
        std::memcpy(tail[l], codes[l] + b * 8, 8);
        rows[l] = tail[l];
      }
      unpack_columns(rows, 0, table, t);
      for (int g = 0; g < 4; ++g) store(out + b * record + (g * vectors + v) * sizeof(VB), t[g]);
    }
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t at = (k0 + b * 16) >> w.block_shift();
      float s[kLanes];
      for (int l = 0; l < kLanes; ++l) s[l] = values[scales[l][at]];
      std::memcpy(out + b * record + (4 * vectors + v) * sizeof(VB), s, sizeof(s));
    }
  }
}

// ---- the micro-kernel ----

template <int R, int V, bool kFold>
void multiply_tile(const GemmTile& tile) {
  constexpr int kColumns = kVectors * kLanes;
  VF acc[R][V];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[r][v] = tile.opens ? VF(0.0f) : load<VF>(tile.part + r * kColumns + v * kLanes);
  const uint8_t *x = tile.x, *w = tile.w;
  for (int64_t b = 0; b < tile.blocks; ++b, x += R * kXBytes, w += V * kLanes * kWBytes) {
    const auto* groups = reinterpret_cast<const int32_t*>(x);
    const auto* pairs = reinterpret_cast<const float*>(x + R * 16);
    DotSums sums[R][V];
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        const VB bytes = load_bytes(w + (g * V + v) * sizeof(VB));
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sums[r][v] = dot4(sums[r][v], g == 0, bytes, groups + g * R + r);
      }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const VF multiplier = splat(pairs + 2 * r), correction = splat(pairs + 2 * r + 1);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        const VF scale = load<VF>(reinterpret_cast<const float*>(w + (4 * V + v) * sizeof(VB)));
        const VF sum = to_float(sums[r][v]);
        if constexpr (kFold)
          acc[r][v] = fma(fma(sum, multiplier, correction), scale, acc[r][v]);
        else
          acc[r][v] = fma(fma(sum, VF(0.25f), correction), multiplier * scale, acc[r][v]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const int at = r * kColumns + v * kLanes;
      if (!tile.closes)
        store(tile.part + at, acc[r][v]);
      else
        store(tile.total + at, tile.first ? acc[r][v] : load<VF>(tile.total + at) + acc[r][v]);
    }
}

template <bool kFold, int R = kRows, int V = kVectors>
void multiply(const GemmTile& tile) {
  if (tile.rows == R && tile.vectors == V) return multiply_tile<R, V, kFold>(tile);
  if constexpr (R > 1)
    if (tile.rows < R) return multiply<kFold, R - 1, V>(tile);
  if constexpr (V > 1) return multiply<kFold, R, V - 1>(tile);
}

}  // namespace

const GemmKernel& gemm_block_kernel(bool both_e4m3) {
  static constexpr GemmKernel kE4M3 = {kRows, kLanes, kVectors, kStep, kXBytes, kWBytes, pack_x<true>, pack_w, multiply<true>};
  static constexpr GemmKernel kAny = {kRows, kLanes, kVectors, kStep, kXBytes, kWBytes, pack_x<false>, pack_w, multiply<false>};
  return both_e4m3 ? kE4M3 : kAny;
}

}  // namespace fp4ext::cpu::FP4EXT_ISA
