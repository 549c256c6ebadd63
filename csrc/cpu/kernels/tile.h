#pragma once
#include "io.h"

// Where a tile's lanes lie: which vectors of the input they are, how their elements are loaded, where their codes go.
namespace fp4ext::cpu::FP4EXT_ISA {

inline constexpr int kMaxVector = 256;  // a 16×16 tile; an RHT vector has at most 128

// One SIMD lane's vector: `count` elements of it exist in the input (the rest is zero padding).
struct Lane {
  int64_t source;    // index of its first element in x
  int64_t row;       // output row, counted through the batch; of its first element for 16×16
  int64_t k;         // position along the contraction
  int64_t group;     // outer group
  int count;         // elements of a vector (or columns of a 16×16 tile) that exist
  int rows;          // 16×16: rows of the tile that exist
};

// How the vectors of one call are numbered. Numbers run along the memory that is read.
struct Tiling {
  const QuantizeArgs& args;
  int length;            // elements along the contraction (16 for a 16×16 tile)
  int64_t along, across;  // vectors along the contraction; vectors across it in one matrix

  explicit Tiling(const QuantizeArgs& a) : args(a), length(a.spec.tile ? 16 : a.vector_length()) {
    along = (a.k() + length - 1) / length;
    across = a.spec.tile ? (a.out_rows() + 15) / 16 : a.out_rows();
  }
  // kLanes consecutive vectors are worked on at once. Row-wise they follow each other in memory through all rows; column-wise they are
  // neighbouring columns, and a tile never leaves its strip of the matrix.
  int64_t strips() const { return args.colwise ? args.batch * along : 1; }
  int64_t strip_vectors() const { return args.colwise ? across : args.batch * across * along; }
  int64_t tiles_per_strip() const { return (strip_vectors() + kLanes - 1) / kLanes; }
  int64_t num_tiles() const { return strips() * tiles_per_strip(); }

  Lane lane(int64_t strip, int64_t v) const {
    int64_t b, r, t;  // matrix, vector across, vector along
    if (args.colwise) {
      b = strip / along, t = strip % along, r = v;
    } else {
      b = v / (across * along), r = v / along % across, t = v % along;
    }
    const int step = args.spec.tile ? 16 : 1;
    const int64_t row = r * step, k = t * length;
    Lane lane;
    lane.source = (b * args.rows + (args.colwise ? k : row)) * args.cols + (args.colwise ? row : k);
    lane.row = b * args.out_rows() + row;
    lane.k = k;
    lane.group = args.spec.outer == OuterKind::row ? lane.row : args.spec.outer == OuterKind::expert ? b : 0;
    lane.count = static_cast<int>(std::min<int64_t>(length, args.k() - k));
    lane.rows = static_cast<int>(std::min<int64_t>(step, args.out_rows() - row));
    return lane;
  }
};

// Vectors along rows: kLanes pointers, each to `length` consecutive elements; t[i] gets element i of every lane.
template <class T>
FP4_HD void load_along(const T* const* p, int length, VF* t) {
  for (int i = 0; i < length; i += kLanes) {
    VF part[kLanes];
    for (int l = 0; l < kLanes; ++l) part[l] = load_lanes(p[l] + i);
    transpose(part);
    for (int l = 0; l < kLanes; ++l) t[i + l] = part[l];
  }
}

// The same where some elements don't exist: through a zero-padded copy.
template <class T>
FP4_HD void load_ragged(const T* const* p, int64_t stride, const int* counts, int length, VF* t) {
  alignas(64) float padded[kMaxVector * kLanes];
  for (int i = 0; i < length; ++i)
    for (int l = 0; l < kLanes; ++l) padded[i * kLanes + l] = i < counts[l] ? to_float(p[l][i * stride]) : 0.0f;
  for (int i = 0; i < length; ++i) t[i] = load<VF>(padded + i * kLanes);
}

// One tile of the input: t[i] holds element i of each lane's vector; a 16×16 tile lies as in x, element 16·r + c.
template <class T>
FP4_HD void load_tile(const Tiling& tiling, const Lane (&lanes)[kLanes], int valid, VF* t) {
  const QuantizeArgs& a = tiling.args;
  const T* x = static_cast<const T*>(a.x);
  const T* p[kLanes];
  int counts[kLanes];
  if (a.spec.tile) {
    // Rows and columns of x, whichever of them is the contraction.
    for (int r = 0; r < 16; ++r) {
      bool full = true;
      for (int l = 0; l < kLanes; ++l) {
        const int rows = a.colwise ? lanes[l].count : lanes[l].rows, cols = a.colwise ? lanes[l].rows : lanes[l].count;
        p[l] = x + lanes[l].source + (r < rows ? r * a.cols : 0);
        counts[l] = r < rows ? cols : 0;
        full &= counts[l] == 16;
      }
      if (full) load_along(p, 16, t + 16 * r);
      else load_ragged(p, 1, counts, 16, t + 16 * r);
    }
    return;
  }
  bool full = true;
  for (int l = 0; l < kLanes; ++l) {
    p[l] = x + lanes[l].source;
    counts[l] = lanes[l].count;
    full &= counts[l] == tiling.length;
  }
  if (!a.colwise) {
    if (full) load_along(p, tiling.length, t);
    else load_ragged(p, 1, counts, tiling.length, t);
  } else if (valid == kLanes) {
    for (int i = 0; i < tiling.length; ++i) t[i] = i < counts[0] ? load_lanes(p[0] + i * a.cols) : VF();
  } else {
    load_ragged(p, a.cols, counts, tiling.length, t);
  }
}

// The RHT over the n-vectors of a tile of `length` elements.
struct Rotation {
  int n, stages;
  PhiloxWords<uint32_t> signs[2];
  explicit Rotation(const QuantizeArgs& a) : n(a.rht_n()), stages(n ? a.spec.rht_stages : 0) {
    for (int s = 0; s < stages; ++s) signs[s] = rht_signs(a.rng, s);
  }
  FP4_HD void operator()(VF* t, int length) const {
    for (int s = 0; s < stages; ++s)
      for (int i = 0; i < length; i += n) {
        switch (n) {  // a constant length unrolls
          case 16: rht_stage(t + i, 16, signs[s]); break;
          case 32: rht_stage(t + i, 32, signs[s]); break;
          case 64: rht_stage(t + i, 64, signs[s]); break;
          default: rht_stage(t + i, 128, signs[s]); break;
        }
      }
    for (int i = 0; n && i < length; i += n) poison(t + i);
  }
  // A rotation that meets a NaN or overflows leaves no element of its vector meaningful, though some may look finite.
  FP4_HD void poison(VF* t) const {
    VU largest(0u);
    for (int i = 0; i < n; ++i) largest = max_magnitude(bits(abs_of(t[i])), largest);
    const VMask bad = largest >= VU(kInfBits);
    if (!any(bad)) return;
    for (int i = 0; i < n; ++i) t[i] = select(bad, as_float(VU(0x7fc00000u)), t[i]);
  }
};

// Blocks of 32 may hold a 16-vector that is padding alone: it is not rotated, so its zeros keep their sign.
FP4_HD void drop_rotated_padding(const Lane (&lanes)[kLanes], int n, int length, VF* t) {
  for (int l = 0; l < kLanes; ++l)
    for (int i = (lanes[l].count + n - 1) / n * n; i < length; ++i) t[i].v[l] = 0.0f;
}

// Visits tiles [begin, end): f(lanes, valid, t), t loaded and rotated. Lanes past `valid` repeat the last vector.
template <class T, class Fn>
FP4_HD void for_tiles(const Tiling& tiling, const Rotation& rotation, int64_t begin, int64_t end, Fn&& f) {
  const int64_t per_strip = tiling.tiles_per_strip(), vectors = tiling.strip_vectors();
  alignas(64) VF t[kMaxVector];
  Lane lanes[kLanes];
  for (int64_t i = begin; i < end; ++i) {
    const int64_t strip = i / per_strip, first = i % per_strip * kLanes;
    const int valid = static_cast<int>(std::min<int64_t>(kLanes, vectors - first));
    for (int l = 0; l < kLanes; ++l) lanes[l] = tiling.lane(strip, first + std::min(l, valid - 1));
    load_tile<T>(tiling, lanes, valid, t);
    rotation(t, tiling.length);
    if (rotation.n && rotation.n < tiling.length) drop_rotated_padding(lanes, rotation.n, tiling.length, t);
    f(lanes, valid, t);
  }
}

}  // namespace fp4ext::cpu::FP4EXT_ISA
