#include "kernels/quantize.h"

#include <atomic>
#include <vector>

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

}  // namespace

void amax(const QuantizeArgs& args, float* amax, const Parallel& parallel) {
  const int64_t numel = args.batch * args.rows * args.cols;
  if (numel == 0) return;
  if (args.spec.rht || (args.spec.outer == OuterKind::row && args.colwise)) {
    parallel(num_tiles(args), kGrain / (args.vector_length() * 8) + 1, [&](int64_t b, int64_t e) { amax_tiles(args, amax, b, e); });
    return;
  }
  // The groups are spans of memory.
  const int64_t groups = args.num_groups(), span = numel / groups;
  if (groups > 1) {
    parallel(groups, kGrain / span + 1, [&](int64_t b, int64_t e) {
      for (int64_t g = b; g < e; ++g) amax[g] = amax_span(args.x, args.dtype, g * span, (g + 1) * span);
    });
    return;
  }
  std::atomic_ref<float> all(amax[0]);  // a maximum does not depend on the order
  parallel(span, kGrain, [&](int64_t b, int64_t e) {
    const float part = amax_span(args.x, args.dtype, b, e);
    float seen = all.load();
    while (seen < part && !all.compare_exchange_weak(seen, part)) {
    }
  });
}

void quantize(const QuantizeArgs& args, const Parallel& parallel) {
  if (args.batch * args.rows * args.cols == 0) return;
  const int tile = args.spec.tile ? 256 : args.vector_length();
  parallel(num_tiles(args), kGrain / (tile * 8) + 1, [&](int64_t b, int64_t e) { quantize_tiles(args, b, e); });
}

void dequantize(const DequantizeArgs& args, const Parallel& parallel) {
  if (args.rows * args.k == 0) return;
  parallel(args.rows, kGrain / args.k + 1, [&](int64_t b, int64_t e) { dequantize_rows(args, b, e); });
}

namespace {

// Calls f(args, first tile, end tile) for each band of x̂, which lies dequantized in args.x.
template <class Fn>
void for_bands(const DequantizeArgs& from, const QuantizeArgs& args, const Parallel& parallel, Fn&& f) {
  if (from.rows * from.k == 0) return;
  parallel(num_bands(args), 1, [&](int64_t begin, int64_t end) {
    std::vector<float> x;
    DequantizeArgs source = from;
    QuantizeArgs target = args;
    for (int64_t i = begin; i < end; ++i) {
      const Band b = band(args, i);
      x.resize(b.rows * from.k);
      source.out = x.data(), source.first_row = b.first_row;
      dequantize_rows(source, b.first_row, b.first_row + b.rows);
      target.x = x.data(), target.first_row = b.first_row;
      f(target, b.first_tile, b.first_tile + b.tiles);
    }
  });
}

}  // namespace

void requantize_amax(const DequantizeArgs& from, const QuantizeArgs& args, float* amax, const Parallel& parallel) {
  for_bands(from, args, parallel, [&](const QuantizeArgs& a, int64_t begin, int64_t end) { amax_tiles(a, amax, begin, end); });
}

void requantize(const DequantizeArgs& from, const QuantizeArgs& args, const Parallel& parallel) {
  for_bands(from, args, parallel, [](const QuantizeArgs& a, int64_t begin, int64_t end) { quantize_tiles(a, begin, end); });
}

}  // namespace fp4ext::cpu
