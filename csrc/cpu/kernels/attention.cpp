#include "attention.h"

#include <algorithm>
#include <limits>

#include "../../numerics/exp2.h"
#include "../bytes.h"
#include "io.h"

namespace fp4ext::cpu::FP4EXT_ISA {
namespace {

constexpr int kTile = 2 * kLanes;  // keys a tile of scores
constexpr int kRows = 4;           // rows the micro-kernels hold in registers
static_assert(kTile <= kAttentionPad && kAttentionPad % kTile == 0 && kAttentionChunk % kTile == 0);

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// n numbers of a dtype at p + offset, to fp32 and back; out is padded with zeros up to a multiple of 2·kLanes.
void widen(Dtype dtype, const void* p, int64_t offset, int64_t n, float* out) {
  with_dtype(dtype, [&](auto* type) {
    const auto* in = static_cast<decltype(type)>(const_cast<void*>(p)) + offset;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(out + i, load_lanes(in + i));
    for (; i < n; ++i) out[i] = to_float(in[i]);
  });
  for (int64_t i = n; i < round_up(n, kTile); ++i) out[i] = 0.0f;
}
void narrow(Dtype dtype, const float* in, int64_t offset, int64_t n, void* p) {
  with_dtype(dtype, [&](auto* type) {
    auto* out = static_cast<decltype(type)>(p) + offset;
    for (int64_t i = 0; i < n; ++i) from_float(select(in[i] != in[i], as_float(0x7fc00000u), in[i]), out[i]);
  });
}

// One block of rows that share their keys and values.
struct Block {
  const AttentionArgs& args;
  const AttentionScratch& scratch;
  int64_t batch, kv_head, row, rows, d_padded;

  // The query and the head of row r of the block, and how many keys it reads.
  int64_t query_of(int64_t r) const { return (row + r) / args.group(); }
  int64_t head_of(int64_t r) const { return kv_head * args.group() + (row + r) % args.group(); }
  int64_t keys_of(int64_t r) const { return args.start[batch] + query_of(r) + 1; }

  void load_query(int64_t r) const {
    const int64_t* s = args.q_strides;
    widen(args.q_dtype, args.q, batch * s[0] + head_of(r) * s[1] + query_of(r) * s[2], args.d, scratch.q + r * d_padded);
  }
  void load_key_or_value(const void* p, const int64_t* s, int64_t j, float* out) const {
    widen(args.kv_dtype, p, batch * s[0] + kv_head * s[1] + j * s[2], args.d, out);
  }

  // Keys [j, j + kTile) with a key in each lane, [d][kTile]; those from `end` on are 0. The rows pass through `values`.
  void pack_keys(int64_t j, int64_t end) const {
    float* in = scratch.values;
    for (int64_t i = 0; i < kTile; ++i) {
      if (j + i < end)
        load_key_or_value(args.k, args.k_strides, j + i, in + i * d_padded);
      else
        std::fill_n(in + i * d_padded, d_padded, 0.0f);
    }
    for (int half = 0; half < kTile; half += kLanes) {
      for (int64_t k = 0; k < args.d; k += kLanes) {
        VF t[kLanes];
        for (int l = 0; l < kLanes; ++l) t[l] = load<VF>(in + (half + l) * d_padded + k);
        transpose(t);
        for (int l = 0; l < kLanes; ++l) store(scratch.keys + (k + l) * kTile + half, t[l]);
      }
    }
  }

  // Scores of rows [r, r + n) with the packed tile, whose first key is j.
  template <int n>
  void score(int64_t r, int64_t j) const {
    VF acc[n][2];
    for (int i = 0; i < n; ++i) acc[i][0] = acc[i][1] = VF(0.0f);
    const float* q = scratch.q + r * d_padded;
    for (int64_t k = 0; k < args.d; ++k) {
      const VF low = load<VF>(scratch.keys + k * kTile), high = load<VF>(scratch.keys + k * kTile + kLanes);
      FP4_UNROLL
      for (int i = 0; i < n; ++i) {
        const VF x = splat(q + i * d_padded + k);
        acc[i][0] = fma(x, low, acc[i][0]);
        acc[i][1] = fma(x, high, acc[i][1]);
      }
    }
    for (int i = 0; i < n; ++i) {
      float* out = scratch.scores + (r + i) * scratch.stride + j;
      store(out, acc[i][0] * VF(args.scale));
      store(out + kLanes, acc[i][1] * VF(args.scale));
    }
  }

  // The scores of a row to weights, in place; those past its keys, up to a multiple of 16, are 0 and add nothing to a sum of weights.
  void weigh(int64_t r) const {
    float* s = scratch.scores + r * scratch.stride;
    const int64_t n = keys_of(r), padded = round_up(n, std::max(kLanes, 16));
    for (int64_t j = n; j < padded; ++j) s[j] = -std::numeric_limits<float>::infinity();
    VF most(-std::numeric_limits<float>::infinity());
    for (int64_t j = 0; j < padded; j += kLanes) most = max_of(load<VF>(s + j), most);
    float largest = most.v[0];
    for (int l = 1; l < kLanes; ++l) largest = most.v[l] > largest ? most.v[l] : largest;
    for (int64_t j = 0; j < padded; j += kLanes) store(s + j, exp2_of(load<VF>(s + j) - VF(largest)));
    for (int64_t j = n; j < padded; ++j) s[j] = 0.0f;
  }

  // Σ of the weights of a row over keys [begin, end) of one chunk: 16 lanes, then halved.
  float weight_sum(int64_t r, int64_t begin, int64_t end) const {
    const float* p = scratch.scores + r * scratch.stride;
    float lanes[16];
    for (int l = 0; l < 16; l += kLanes) {
      VF sum(0.0f);
      for (int64_t j = begin; j < end; j += 16) sum = sum + load<VF>(p + j + l);
      store(lanes + l, sum);
    }
    for (int h = 8; h; h /= 2)
      for (int l = 0; l < h; ++l) lanes[l] = lanes[l] + lanes[l + h];
    return lanes[0];
  }

  // part[r + i] += Σ_j p·v over keys [from, to) of the chunk that begins at `begin`, for rows [r, r + n).
  template <int n>
  void add_values(int64_t r, int64_t begin, int64_t from, int64_t to) const {
    for (int64_t k = 0; k < args.d; k += 2 * kLanes) {
      VF acc[n][2];
      for (int i = 0; i < n; ++i)
        for (int half = 0; half < 2; ++half) acc[i][half] = load<VF>(scratch.part + (r + i) * d_padded + k + half * kLanes);
      for (int64_t j = from; j < to; ++j) {
        const float* v = scratch.values + (j - begin) * d_padded + k;
        const VF low = load<VF>(v), high = load<VF>(v + kLanes);
        FP4_UNROLL
        for (int i = 0; i < n; ++i) {
          const VF p = splat(scratch.scores + (r + i) * scratch.stride + j);
          acc[i][0] = fma(p, low, acc[i][0]);
          acc[i][1] = fma(p, high, acc[i][1]);
        }
      }
      for (int i = 0; i < n; ++i)
        for (int half = 0; half < 2; ++half) store(scratch.part + (r + i) * d_padded + k + half * kLanes, acc[i][half]);
    }
  }

  void run() const {
    for (int64_t r = 0; r < rows; ++r) load_query(r);
    const int64_t keys = keys_of(rows - 1);
    for (int64_t j = 0, first = 0; j < keys; j += kTile) {
      pack_keys(j, keys);
      while (keys_of(first) <= j) ++first;  // rows rise in position: those before need no later key
      int64_t r = first;
      for (; r + kRows <= rows; r += kRows) score<kRows>(r, j);
      for (; r < rows; ++r) score<1>(r, j);
    }
    for (int64_t r = 0; r < rows; ++r) weigh(r);

    float weight[kAttentionRows];
    for (int64_t begin = 0, first = 0; begin < keys; begin += kAttentionChunk) {
      const int64_t end = std::min(keys, begin + kAttentionChunk);
      for (int64_t j = begin; j < end; ++j) load_key_or_value(args.v, args.v_strides, j, scratch.values + (j - begin) * d_padded);
      while (keys_of(first) <= begin) ++first;
      std::fill(scratch.part + first * d_padded, scratch.part + rows * d_padded, 0.0f);
      for (int64_t r = first; r < rows;) {
        const int64_t n = r + kRows <= rows ? kRows : 1, shared = std::min(end, keys_of(r));
        if (n == kRows)
          add_values<kRows>(r, begin, begin, shared);
        else
          add_values<1>(r, begin, begin, shared);
        for (int64_t i = r; i < r + n; ++i) add_values<1>(i, begin, shared, std::min(end, keys_of(i)));
        r += n;
      }
      for (int64_t r = first; r < rows; ++r) {
        const float sum = weight_sum(r, begin, std::min(end, keys_of(r)));
        weight[r] = begin ? weight[r] + sum : sum;
        float* total = scratch.total + r * d_padded;
        const float* part = scratch.part + r * d_padded;
        for (int64_t k = 0; k < args.d; k += kLanes)
          store(total + k, begin ? load<VF>(total + k) + load<VF>(part + k) : load<VF>(part + k));
      }
    }

    for (int64_t r = 0; r < rows; ++r) {
      float* y = scratch.total + r * d_padded;
      for (int64_t k = 0; k < args.d; k += kLanes) store(y + k, load<VF>(y + k) / VF(weight[r]));
      narrow(args.q_dtype, y, ((batch * args.heads + head_of(r)) * args.m + query_of(r)) * args.d, args.d, args.y);
    }
  }
};

}  // namespace

void attention_block(const AttentionArgs& args, int64_t batch, int64_t kv_head, int64_t row, int64_t rows,
                     const AttentionScratch& scratch) {
  Block{args, scratch, batch, kv_head, row, rows, round_up(args.d, kAttentionPad)}.run();
}

}  // namespace fp4ext::cpu::FP4EXT_ISA
