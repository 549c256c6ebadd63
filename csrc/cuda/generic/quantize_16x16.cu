#include "quantize_blocks.cuh"

// quantize for blocks of 16×16. Sixteen lanes hold a block, a row of x each, and choose its scale together: sums run over
// the block in row-major order of x, whichever axis is contracted, so both copies share the scale.
namespace fp4ext::cuda {
namespace {

// The sums of a block in index order: the lanes take turns, each adding its row.
struct Turns {
  int row;
  template <int N, int C, class Term>
  __device__ __forceinline__ void operator()(float* sums, Term term) const {
    FP4_ROLLED
    for (int turn = 0; turn < 16; ++turn) {
      if (turn == row) {
        FP4_UNROLL
        for (int i = 0; i < N; ++i)
          for (int c = 0; c < C; ++c) sums[c] = term(sums[c], i, c);
      }
      for (int c = 0; c < C; ++c) sums[c] = __shfl_sync(kAllLanes, sums[c], (threadIdx.x & 16) + turn);
    }
  }
};

template <bool kStochastic>
__device__ void store_row(const QuantizeArgs& a, const Copy& copy, const Place& place, const float (&t)[16], int row, int k, float enc,
                          bool poisoned, uint32_t scale) {
  const View view(a.in, copy.colwise, place);
  const Output out(copy, view, 16);
  const int64_t at = view.row + row, column = (view.k + k) / 16;
  const Site site{read_rng(copy), a.role, copy.colwise, view.first + at, view.k + k};
  uint32_t words[2];
  encode_elements<E2M1, kStochastic>(t, enc, poisoned, site, words);
  if (out.holds(view, at, column)) out.store_codes(copy, at, column, words);
  out.store_scale(copy, view, at, column, scale);
}

// As many blocks a multiprocessor as there are registers for without spills.
template <ScaleRule rule>
inline constexpr int kBlocksAtOnce = rule == ScaleRule::sweep || rule == ScaleRule::four_over_six ? 1 : 2;

template <ScaleRule rule, bool kStochastic>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce<rule>) quantize_16x16_kernel(const __grid_constant__ QuantizeArgs a) {
  const Place place = place_of_block(a.in, 16);
  if (place.rows == 0) return;
  char* tile = shared_memory();
  load_any_tile(a.in, place, tile);
  __syncthreads();
  const Copy &row_copy = a.copies[0], &col_copy = a.copies[1], &any = row_copy.codes ? row_copy : col_copy;
  const Outer<float> outer = outer_of(any, View(a.in, any.colwise, place), 0);
  const int lane = threadIdx.x % 16;
  FP4_ROLLED
  for (int block = threadIdx.x / 16; block < 64; block += kThreads / 16) {
    const int row = block / 8 * 16, col = block % 8 * 16;  // of the block in the tile
    float t[16], m[16];
    load_line<16>(a.in, place, tile, false, row + lane, col, t);
    uint32_t largest = magnitudes(t, m);
    for (int h = 8; h > 0; h /= 2) {
      const uint32_t other = __shfl_xor_sync(kAllLanes, largest, h);
      largest = other > largest ? other : largest;
    }
    uint32_t scale = choose_scale<rule, kStochastic, 16>(m, as_float(largest), outer, Turns{lane});
    scale = largest == 0 ? 0u : scale;
    const bool poisoned = largest >= kInfBits;
    const float enc = encode_multiplier(decode_multiplier(E4M3::decode(scale), outer.dec));
    const uint32_t byte = poisoned ? kE4M3NaN : scale;
    if (row_copy.codes) store_row<kStochastic>(a, row_copy, place, t, row + lane, col, enc, poisoned, byte);
    if (col_copy.codes) {
      load_line<16>(a.in, place, tile, true, col + lane, row, t);
      store_row<kStochastic>(a, col_copy, place, t, col + lane, row, enc, poisoned, byte);
    }
  }
}

template <ScaleRule rule, bool kStochastic>
cudaError_t run(const QuantizeArgs& a, cudaStream_t stream) {
  return launch(quantize_16x16_kernel<rule, kStochastic>, dim3(static_cast<unsigned>(num_tiles(a.in))), kThreads, tile_bytes(a.in.dtype),
                stream, a);
}

}  // namespace

cudaError_t quantize_16x16(const QuantizeArgs& args, cudaStream_t stream) {
  using enum ScaleRule;
  if (args.spec.rounding == Rounding::stochastic)
    return args.spec.scale == minvar ? run<minvar, true>(args, stream) : run<amax, true>(args, stream);
  switch (args.spec.scale) {
    case four_over_six: return run<four_over_six, false>(args, stream);
    case four_over_six_mae: return run<four_over_six_mae, false>(args, stream);
    case four_over_six_absmax: return run<four_over_six_absmax, false>(args, stream);
    case sweep: return run<sweep, false>(args, stream);
    case minvar: return run<minvar, false>(args, stream);
    default: return run<amax, false>(args, stream);
  }
}

}  // namespace fp4ext::cuda
