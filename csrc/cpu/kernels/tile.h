#pragma once
#include "io.h"

// Where a tile's lanes lie: which vectors of the input they are, how their elements are loaded, where their codes go.
namespace fp4ext::cpu::FP4EXT_ISA {

inline constexpr int kMaxVector = 256;  // a 16×16 tile; an RHT vector has at most 128

// One SIMD lane's vector: `count` elements of it exist in the input (the rest is zero padding).
struct Lane {
  int64_t source;      // index of its first element in x
  int64_t row;         // output row, counted through the batch; the first one of a 16×16 tile
  int64_t k;           // position along the contraction
  int64_t code_byte;   // where its codes go
  int64_t scale_byte;  // where its block scales go
  int64_t group;       // outer group
  int count;           // elements of the vector (for a 16×16 tile, along the contraction) that exist
  int rows;            // 16×16: output rows of the tile that exist
};

// How the vectors of one call are numbered. Row-wise, numbers run along the memory that is read, through all rows; column-wise, through the columns of a
// strip `length` high, and kLanes neighbouring columns make a tile, which never leaves its strip.
struct Tiling {
  const QuantizeArgs& args;
  int length;             // elements along the contraction (16 for a 16×16 tile)
  int step;               // output rows of a vector: 1, or 16
  int64_t along, across;  // vectors along the contraction; vectors across it in one matrix
  int64_t row_bytes, row_scales;

  explicit Tiling(const QuantizeArgs& a)
      : args(a), length(a.spec.tile ? 16 : a.vector_length()), step(a.spec.tile ? 16 : 1), row_bytes(a.row_bytes()), row_scales(a.row_scales()) {
    along = (a.k() + length - 1) / length;
    across = (a.out_rows() + step - 1) / step;
  }
  int64_t strips() const { return args.colwise ? args.batch * along : 1; }
  int64_t strip_vectors() const { return args.colwise ? across : args.batch * across * along; }
  int64_t tiles_per_strip() const { return (strip_vectors() + kLanes - 1) / kLanes; }
  int64_t num_tiles() const { return strips() * tiles_per_strip(); }
};

// Walks the vectors in their order. Divisions happen at the start alone: they would cost more than the quantization.
class Cursor {
 public:
  Cursor(const Tiling& tiling, int64_t tile) : t_(tiling) {
    const int64_t strip = tile / t_.tiles_per_strip(), v = tile % t_.tiles_per_strip() * kLanes;
    if (t_.args.colwise) {
      b_ = strip / t_.along, along_ = strip % t_.along, across_ = v;
    } else {
      b_ = v / (t_.across * t_.along), across_ = v / t_.along % t_.across, along_ = v % t_.along;
    }
    place();
  }
  // The next tile; returns how many of its lanes are vectors of their own. The others repeat the last one.
  FP4_HD int tile(Lane (&lanes)[kLanes]) {
    int valid = 0;
    for (int l = 0; l < kLanes; ++l) {
      if (valid == l && !at_end_of_strip()) {
        lanes[l] = lane_;
        advance();
        ++valid;
      } else {
        lanes[l] = lanes[l - 1];
      }
    }
    if (t_.args.colwise && at_end_of_strip()) {
      across_ = 0;
      if (++along_ == t_.along) along_ = 0, ++b_;
      place();
    }
    return valid;
  }

 private:
  bool at_end_of_strip() const { return t_.args.colwise ? across_ == t_.across : b_ == t_.args.batch; }

  // To the next vector of the strip: a short step where it lies beside this one, else anew.
  FP4_HD void advance() {
    const int per_byte = t_.args.spec.packed() ? 2 : 1;
    if (t_.args.colwise) {
      ++across_;
      lane_.source += t_.step;
      lane_.row += t_.step;
      lane_.code_byte += t_.step * t_.row_bytes;
      lane_.scale_byte += t_.step * t_.row_scales;
      if (t_.args.spec.outer == OuterKind::row) ++lane_.group;
      lane_.rows = static_cast<int>(std::min<int64_t>(t_.step, t_.args.out_rows() - across_ * t_.step));
      return;
    }
    if (++along_ == t_.along) {
      along_ = 0;
      if (++across_ == t_.across) across_ = 0, ++b_;
      if (b_ < t_.args.batch) place();
      return;
    }
    lane_.source += t_.length;
    lane_.k += t_.length;
    lane_.code_byte += t_.length / per_byte;
    lane_.scale_byte += t_.length / t_.args.spec.block();
    lane_.count = static_cast<int>(std::min<int64_t>(t_.length, t_.args.k() - lane_.k));
  }
  void place() {
    const QuantizeArgs& a = t_.args;
    const int64_t row = across_ * t_.step, k = along_ * t_.length;
    lane_.source = (b_ * a.rows + (a.colwise ? k : row)) * a.cols + (a.colwise ? row : k);
    lane_.row = b_ * a.out_rows() + row;
    lane_.k = k;
    lane_.code_byte = lane_.row * t_.row_bytes + k / (a.spec.packed() ? 2 : 1);
    lane_.scale_byte = lane_.row * t_.row_scales + k / a.spec.block();
    lane_.group = a.spec.outer == OuterKind::row ? lane_.row : a.spec.outer == OuterKind::expert ? b_ : 0;
    lane_.count = static_cast<int>(std::min<int64_t>(t_.length, a.k() - k));
    lane_.rows = static_cast<int>(std::min<int64_t>(t_.step, a.out_rows() - row));
  }

  const Tiling& t_;
  int64_t b_, across_, along_;
  Lane lane_;
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

// Visits tiles [begin, end): f(lanes, valid, t), t loaded and rotated.
template <class T, class Fn>
FP4_HD void for_tiles(const Tiling& tiling, const Rotation& rotation, int64_t begin, int64_t end, Fn&& f) {
  alignas(64) VF t[kMaxVector];
  Lane lanes[kLanes];
  Cursor cursor(tiling, begin);
  for (int64_t i = begin; i < end; ++i) {
    const int valid = cursor.tile(lanes);
    load_tile<T>(tiling, lanes, valid, t);
    rotation(t, tiling.length);
    if (rotation.n && rotation.n < tiling.length) drop_rotated_padding(lanes, rotation.n, tiling.length, t);
    f(lanes, valid, t);
  }
}

}  // namespace fp4ext::cpu::FP4EXT_ISA
