#include "kernels/quantize.h"

#include <atomic>
#include <vector>

#include "parallel.h"

namespace fp4ext::cpu {
namespace {

int64_t num_tiles(const QuantizeArgs& args) { FP4EXT_DISPATCH(num_tiles(args)); }
int64_t num_bands(const QuantizeArgs& args) { FP4EXT_DISPATCH(num_bands(args)); }
Band band(const QuantizeArgs& args, int64_t i) { FP4EXT_DISPATCH(band(args, i)); }
void quantize_tiles(const QuantizeArgs& args, int64_t b, int64_t e) { FP4EXT_DISPATCH(quantize_tiles(args, b, e)); }
void amax_tiles(const QuantizeArgs& args, float* amax, int64_t b, int64_t e) { FP4EXT_DISPATCH(amax_tiles(args, amax, b, e)); }
float amax_span(const void* x, Dtype dtype, int64_t b, int64_t e) { FP4EXT_DISPATCH(amax_span(x, dtype, b, e)); }
void dequantize_rows(const DequantizeArgs& args, int64_t b, int64_t e) { FP4EXT_DISPATCH(dequantize_rows(args, b, e)); }

constexpr int64_t kGrain = 1 << 15;  // elements worth a thread

int64_t numel(const QuantizeArgs& args) { return args.batch * args.rows * args.cols; }
int64_t tiles_of(const QuantizeArgs& args) { return numel(args) ? num_tiles(args) : 0; }
int64_t tile_cost(const QuantizeArgs& args) { return (args.spec.tile ? 256 : args.vector_length()) * 8; }

// Where the amaxes of each tensor begin.
template <class Tensors, class Args>
std::vector<float*> amaxes_of(Tensors tensors, float* amax, Args&& args_of) {
  std::vector<float*> first;
  for (const auto& t : tensors) first.push_back(amax), amax += args_of(t).num_groups();
  return first;
}

}  // namespace

void amax(std::span<const QuantizeArgs> tensors, float* amax, const Parallel& parallel) {
  if (tensors.empty()) return;
  const auto amaxes = amaxes_of(tensors, amax, [](const auto& t) { return t; });
  const bool by_row = tensors[0].spec.outer == OuterKind::row;
  if (tensors[0].spec.rht || (by_row && tensors[0].colwise)) {
    share(
        tensors.size(), kGrain, parallel, [&](int64_t i) { return tiles_of(tensors[i]); }, [&](int64_t i) { return tile_cost(tensors[i]); },
        [&](int64_t i, int64_t begin, int64_t end) { amax_tiles(tensors[i], amaxes[i], begin, end); });
    return;
  }
  // The groups are spans of memory; a single one is shared out by its elements.
  const auto span = [&](int64_t i) { return by_row ? numel(tensors[i]) / tensors[i].num_groups() : 1; };
  share(
      tensors.size(), kGrain, parallel,
      [&](int64_t i) { return numel(tensors[i]) == 0 ? 0
                              : by_row               ? tensors[i].num_groups()
                                                     : numel(tensors[i]); },
      [&](int64_t i) { return numel(tensors[i]) == 0 ? 1 : span(i); },
      [&](int64_t i, int64_t begin, int64_t end) {
        const QuantizeArgs& t = tensors[i];
        if (by_row) {
          for (int64_t g = begin; g < end; ++g) amaxes[i][g] = amax_span(t.x, t.dtype, g * span(i), (g + 1) * span(i));
          return;
        }
        std::atomic_ref<float> all(*amaxes[i]);  // a maximum does not depend on the order
        const float part = amax_span(t.x, t.dtype, begin, end);
        float seen = all.load();
        while (seen < part && !all.compare_exchange_weak(seen, part)) {
        }
      });
}

void quantize(std::span<const QuantizeArgs> tensors, const Parallel& parallel) {
  share(
      tensors.size(), kGrain, parallel, [&](int64_t i) { return tiles_of(tensors[i]); }, [&](int64_t i) { return tile_cost(tensors[i]); },
      [&](int64_t i, int64_t begin, int64_t end) { quantize_tiles(tensors[i], begin, end); });
}

void dequantize(const DequantizeArgs& args, const Parallel& parallel) {
  if (args.rows * args.k == 0) return;
  parallel(args.rows, kGrain / args.k + 1, [&](int64_t b, int64_t e) { dequantize_rows(args, b, e); });
}

namespace {

// Calls f(i, args, first tile, end tile) for each band of each x̂, which lies dequantized in args.x.
template <class Fn>
void for_bands(std::span<const RequantizeArgs> tensors, const Parallel& parallel, Fn&& f) {
  share(
      tensors.size(), 1, parallel, [&](int64_t i) { return numel(tensors[i].to) ? num_bands(tensors[i].to) : 0; },
      [](int64_t) { return 1; },
      [&](int64_t i, int64_t begin, int64_t end) {
        std::vector<float> x;
        DequantizeArgs source = *tensors[i].from;
        QuantizeArgs target = tensors[i].to;
        for (int64_t j = begin; j < end; ++j) {
          const Band b = band(target, j);
          const int64_t row = tensors[i].first_row + b.first_row;
          x.resize(b.rows * source.k);
          source.out = x.data(), source.first_row = row;
          dequantize_rows(source, row, row + b.rows);
          target.x = x.data(), target.first_row = b.first_row;
          f(i, target, b.first_tile, b.first_tile + b.tiles);
        }
      });
}

}  // namespace

void requantize_amax(std::span<const RequantizeArgs> tensors, float* amax, const Parallel& parallel) {
  const auto amaxes = amaxes_of(tensors, amax, [](const auto& t) { return t.to; });
  for_bands(tensors, parallel, [&](int64_t i, const QuantizeArgs& a, int64_t b, int64_t e) { amax_tiles(a, amaxes[i], b, e); });
}

void requantize(std::span<const RequantizeArgs> tensors, const Parallel& parallel) {
  for_bands(tensors, parallel, [](int64_t, const QuantizeArgs& a, int64_t b, int64_t e) { quantize_tiles(a, b, e); });
}

}  // namespace fp4ext::cpu
