#pragma once
#include "io.h"
#include "quantize.h"

// Where a tile's lanes lie: which vectors of the input they are, how their elements are loaded, where their codes go.
namespace fp4ext::cpu::FP4EXT_ISA {

inline constexpr int kMaxVector = 256;  // a 16×16 tile; other vectors have at most 128

// Column-wise a vector is as long as a cache line of codes: shorter, a line of the output would be visited once for each
// of its parts, rows apart in memory, and each visit would miss.
inline constexpr int kColumnDepth = 128;

// The vectors of one tile, one a SIMD lane.
struct Lanes {
  int64_t source[kLanes];      // index of the first element in x
  int64_t row[kLanes];         // output row, counted through the batch; the first one of a 16×16 tile
  int64_t k[kLanes];           // position along the contraction
  int64_t code_byte[kLanes];   // where its codes go
  int64_t scale_byte[kLanes];  // where its block scales go
  int64_t group[kLanes];       // outer group
  int length;                  // elements along the contraction, of every lane
  int count[kLanes];           // those that exist; the rest is zero padding
  int rows[kLanes];            // 16×16: output rows of the tile that exist
  int valid;                   // lanes that are vectors of their own; the others repeat the last one
  bool full;                   // all elements of all lanes exist
};

// How the vectors of one call are numbered. Row-wise, numbers run along the memory that is read, through all rows;
// column-wise, through the columns of a strip `length` high, and kLanes neighbouring columns make a tile, which never
// leaves its strip.
struct Tiling {
  const QuantizeArgs& args;
  int unit;               // elements along the contraction that a rotation mixes, or a block (16 for a 16×16 tile)
  int length;             // elements of a vector: whole units
  int step;               // output rows of a vector: 1, or 16
  int per_byte, block;    // codes a byte, elements a scale
  int64_t k, out_rows;    // of one matrix of the output
  int64_t along, across;  // vectors along the contraction; vectors across it in one matrix
  int64_t row_bytes, row_scales;

  explicit Tiling(const QuantizeArgs& a)
      : args(a),
        unit(a.spec.tile ? 16 : a.vector_length()),
        length(a.colwise && !a.spec.tile ? std::max(unit, kColumnDepth) : unit),
        step(a.spec.tile ? 16 : 1),
        per_byte(a.spec.packed() ? 2 : 1),
        block(a.spec.block()),
        k(a.k()),
        out_rows(a.out_rows()),
        along((k + length - 1) / length),
        across((out_rows + step - 1) / step),
        row_bytes(a.row_bytes()),
        row_scales(a.row_scales()) {}
  int64_t strips() const { return args.colwise ? args.batch * along : 1; }
  int64_t strip_vectors() const { return args.colwise ? across : args.batch * across * along; }
  int64_t tiles_per_strip() const { return (strip_vectors() + kLanes - 1) / kLanes; }
  int64_t num_tiles() const { return strips() * tiles_per_strip(); }

  // The rows of the input in bands of whole tiles: a strip of columns' vectors, or kLanes rows of vectors.
  int64_t num_bands() const { return args.colwise ? strips() : (args.batch * across + kLanes - 1) / kLanes; }
  Band band(int64_t i) const {
    if (args.colwise) {
      const int64_t row = i % along * length;
      return {i / along * args.rows + row, std::min<int64_t>(length, args.rows - row), i * tiles_per_strip(), tiles_per_strip()};
    }
    const int64_t first = i * kLanes, last = std::min<int64_t>(first + kLanes, args.batch * across) - 1;
    const auto row_of = [&](int64_t v) { return v / across * args.rows + v % across * step; };
    const int64_t end = std::min(row_of(last) + step, (last / across + 1) * args.rows);
    return {row_of(first), end - row_of(first), i * along, ((last - first + 1) * along + kLanes - 1) / kLanes};
  }
};

// Walks the vectors in their order, a tile at a time. Divisions happen at the start alone: they would cost more than
// the quantization.
class Cursor {
 public:
  Cursor(const Tiling& tiling, int64_t tile) : t_(tiling), a_(tiling.args) {
    const int64_t strip = tile / t_.tiles_per_strip(), v = tile % t_.tiles_per_strip() * kLanes;
    if (a_.colwise) {
      b_ = strip / t_.along, along_ = strip % t_.along, across_ = v;
    } else {
      b_ = v / (t_.across * t_.along), across_ = v / t_.along % t_.across, along_ = v % t_.along;
    }
  }

  FP4_HD void next(Lanes& lanes) {
    if (step_on(lanes)) return;
    lanes.full = true;
    int l = 0;
    // Runs of vectors that lie at equal steps: along a row, or across a strip. Mostly one run fills the tile.
    while (l < kLanes && !(a_.colwise ? across_ == t_.across : b_ == a_.batch))
      l += a_.colwise ? run_across(lanes, l) : run_along(lanes, l);
    lanes.valid = l;
    for (; l < kLanes; ++l) repeat(lanes, l);
    if (a_.colwise) wrap();
  }

 private:
  struct Steps {
    int64_t source, row, k, code_byte, scale_byte, group;
  };
  // Where the next tile continues the run that filled this one, all its lanes move by the same amount.
  FP4_HD bool step_on(Lanes& lanes) {
    if (!one_run_ || !lanes.full) return false;
    if (a_.colwise ? across_ + kLanes > t_.across || (across_ + kLanes) * t_.step > t_.out_rows
                   : along_ == 0 || (along_ + kLanes) * t_.length > t_.k)
      return false;
    for (int l = 0; l < kLanes; ++l) {
      lanes.source[l] += kLanes * step_.source;
      lanes.row[l] += kLanes * step_.row;
      lanes.k[l] += kLanes * step_.k;
      lanes.code_byte[l] += kLanes * step_.code_byte;
      lanes.scale_byte[l] += kLanes * step_.scale_byte;
      lanes.group[l] += kLanes * step_.group;
    }
    (a_.colwise ? across_ : along_) += kLanes;
    wrap();
    return true;
  }

  FP4_HD void wrap() {
    if (a_.colwise) {
      if (across_ < t_.across) return;
      across_ = 0, one_run_ = false;
      if (++along_ == t_.along) along_ = 0, ++b_;
    } else {
      if (along_ < t_.along) return;
      along_ = 0;
      if (++across_ == t_.across) across_ = 0, ++b_;
    }
  }

  FP4_HD int run_along(Lanes& lanes, int l) {
    const int n = static_cast<int>(std::min<int64_t>(kLanes - l, t_.along - along_));
    const int length = t_.length;
    fill(lanes, l, n, {length, 0, length, length / t_.per_byte, length / t_.block, 0});
    along_ += n;
    wrap();
    return n;
  }
  FP4_HD int run_across(Lanes& lanes, int l) {
    const int n = static_cast<int>(std::min<int64_t>(kLanes - l, t_.across - across_));
    fill(lanes, l, n,
         {t_.step, t_.step, 0, t_.step * t_.row_bytes, t_.step * t_.row_scales, a_.spec.outer == OuterKind::row ? t_.step : 0});
    across_ += n;
    return n;
  }

  FP4_HD void fill(Lanes& lanes, int l, int n, Steps step) {
    one_run_ = n == kLanes;
    step_ = step;
    const int64_t row = across_ * t_.step, k = along_ * t_.length, out_row = b_ * t_.out_rows + row;
    lanes.length = static_cast<int>(std::min<int64_t>(t_.length, (t_.k - k + t_.unit - 1) / t_.unit * t_.unit));
    const int64_t source = (b_ * a_.rows - a_.first_row + (a_.colwise ? k : row)) * a_.cols + (a_.colwise ? row : k);
    const int64_t code_byte = out_row * t_.row_bytes + k / t_.per_byte, scale_byte = out_row * t_.row_scales + k / t_.block;
    const int64_t group = a_.spec.outer == OuterKind::row ? out_row : 0;
    const auto put = [&](int i, int j) {
      lanes.source[i] = source + j * step.source;
      lanes.row[i] = out_row + j * step.row;
      lanes.k[i] = k + j * step.k;
      lanes.code_byte[i] = code_byte + j * step.code_byte;
      lanes.scale_byte[i] = scale_byte + j * step.scale_byte;
      lanes.group[i] = group + j * step.group;
      lanes.count[i] = static_cast<int>(std::min<int64_t>(t_.length, t_.k - (k + j * step.k)));
      lanes.rows[i] = static_cast<int>(std::min<int64_t>(t_.step, t_.out_rows - (row + j * step.row)));
    };
    if (n == kLanes) {
      for (int j = 0; j < kLanes; ++j) put(j, j);
    } else {
      for (int j = 0; j < n; ++j) put(l + j, j);
    }
    const int64_t last_k = k + (n - 1) * step.k, last_row = row + (n - 1) * step.row;
    lanes.full &= last_k + t_.length <= t_.k && last_row + t_.step <= t_.out_rows;
  }
  FP4_HD static void repeat(Lanes& lanes, int l) {
    for (auto* field : {lanes.source, lanes.row, lanes.k, lanes.code_byte, lanes.scale_byte, lanes.group}) field[l] = field[l - 1];
    lanes.count[l] = lanes.count[l - 1], lanes.rows[l] = lanes.rows[l - 1];
  }

  const Tiling& t_;
  const QuantizeArgs& a_;
  int64_t b_, across_, along_;
  Steps step_;
  bool one_run_ = false;  // one run filled the last tile
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

// Where columns are read from: the part of x around them, copied a few whole lines of each row at a time. Read in place,
// the rows of a tall vector may all fall into a few sets of the cache, which would lose the rest of a line before the
// next tile comes to it.
template <class T>
class Panel {
 public:
  static constexpr int kColumns = 256 / sizeof(T);
  FP4_HD const T* find(const QuantizeArgs& a, const Lanes& lanes) {
    const int64_t source = lanes.source[0];
    if (source < source_ || source + lanes.valid > source_ + columns_) {
      source_ = source;
      columns_ = std::min<int64_t>(kColumns, a.cols - lanes.row[0] % a.cols);
      const T* x = static_cast<const T*>(a.x) + source;
      for (int i = 0; i < lanes.count[0]; ++i) std::memcpy(x_ + i * kColumns, x + i * a.cols, columns_ * sizeof(T));
    }
    return x_ + (source - source_);
  }

 private:
  alignas(64) T x_[kColumnDepth * kColumns];
  int64_t source_ = 0, columns_ = 0;
};

// One tile of the input: t[i] holds element i of each lane's vector; a 16×16 tile lies as in x, element 16·r + c.
template <class T>
FP4_HD void load_tile(const Tiling& tiling, const Lanes& lanes, Panel<T>& panel, VF* t) {
  const QuantizeArgs& a = tiling.args;
  const T* x = static_cast<const T*>(a.x);
  const T* p[kLanes];
  if (a.spec.tile) {
    int counts[kLanes];
    for (int r = 0; r < 16; ++r) {
      for (int l = 0; l < kLanes; ++l) {
        // Rows and columns of x, whichever of them is the contraction.
        const int rows = a.colwise ? lanes.count[l] : lanes.rows[l], cols = a.colwise ? lanes.rows[l] : lanes.count[l];
        p[l] = x + lanes.source[l] + (r < rows ? r * a.cols : 0);
        counts[l] = r < rows ? cols : 0;
      }
      if (lanes.full)
        load_along(p, 16, t + 16 * r);
      else
        load_ragged(p, 1, counts, 16, t + 16 * r);
    }
    return;
  }
  if (a.colwise) {
    const T* columns = panel.find(a, lanes);
    if (lanes.valid == kLanes) {
      const int count = lanes.count[0];
      for (int i = 0; i < count; ++i) t[i] = load_lanes(columns + i * panel.kColumns);
      for (int i = count; i < lanes.length; ++i) t[i] = VF(0.0f);
    } else {
      for (int l = 0; l < kLanes; ++l) p[l] = columns + std::min(l, lanes.valid - 1);
      load_ragged(p, panel.kColumns, lanes.count, lanes.length, t);
    }
    return;
  }
  for (int l = 0; l < kLanes; ++l) p[l] = x + lanes.source[l];
  if (!lanes.full)
    load_ragged(p, 1, lanes.count, lanes.length, t);
  else if (lanes.length == 16)
    load_along(p, 16, t);  // a constant length unrolls
  else
    load_along(p, lanes.length, t);
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
          case 16: rht_stage(t + i, 16, signs[s], s == 1); break;
          case 32: rht_stage(t + i, 32, signs[s], s == 1); break;
          case 64: rht_stage(t + i, 64, signs[s], s == 1); break;
          default: rht_stage(t + i, 128, signs[s], s == 1); break;
        }
      }
    for (int i = 0; i < length; i += n) poison(t + i);
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
FP4_HD void drop_rotated_padding(const Lanes& lanes, int n, int length, VF* t) {
  for (int l = 0; l < kLanes; ++l)
    for (int i = (lanes.count[l] + n - 1) / n * n; i < length; ++i) t[i].v[l] = 0.0f;
}

// Visits tiles [begin, end): f(lanes, t), t loaded and rotated.
template <class T, class Fn>
FP4_HD void for_tiles(const Tiling& tiling, const Rotation& rotation, int64_t begin, int64_t end, Fn&& f) {
  alignas(64) VF t[kMaxVector];
  Panel<T> panel;
  Lanes lanes;
  Cursor cursor(tiling, begin);
  for (int64_t i = begin; i < end; ++i) {
    cursor.next(lanes);
    load_tile<T>(tiling, lanes, panel, t);
    if (rotation.n) {
      rotation(t, lanes.length);
      if (rotation.n < tiling.unit) drop_rotated_padding(lanes, rotation.n, lanes.length, t);
    }
    f(lanes, t);
  }
}

}  // namespace fp4ext::cpu::FP4EXT_ISA
