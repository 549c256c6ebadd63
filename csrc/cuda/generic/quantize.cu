#include "quantize_blocks.cuh"

// The verb: which kernel a spec takes. And what goes before: the amaxes, and the outer scales that follow from them.
namespace fp4ext::cuda {

cudaError_t quantize(const QuantizeArgs& args, cudaStream_t stream) {
  if (args.in.batch * args.in.rows * args.in.cols == 0) return cudaSuccess;
  if (args.spec.format != FormatId::nvfp4) return quantize_mx(args, stream);
  if (args.spec.tile) return quantize_16x16(args, stream);
  return args.spec.rounding == Rounding::nearest ? quantize_nvfp4(args, stream) : quantize_nvfp4_random(args, stream);
}

namespace {

__device__ __forceinline__ uint32_t max_over_lanes(uint32_t value, int lanes) {
  for (int h = 1; h < lanes; h *= 2) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, value, h);
    value = other > value ? other : value;
  }
  return value;
}

__global__ void __launch_bounds__(kThreads)
    amax_kernel(const __grid_constant__ Input in, const __grid_constant__ Copy copy, bool through_tile, float* amax) {
  const Place place = place_of_block(in, 1);
  if (place.rows == 0) return;
  const char* tile = nullptr;
  if (through_tile) {
    char* memory = shared_memory();
    load_any_tile(in, place, memory);
    __syncthreads();
    tile = memory;
  }
  const View view(in, copy.colwise, place);
  const Stand<16> stand;
  const Rotation<16> rotation(copy, rht_of(in, copy, view), read_rng(copy), stand.chunk);
  auto* groups = reinterpret_cast<uint32_t*>(amax);  // magnitudes are ordered as their bits are
  uint32_t largest = 0;
  FP4_ROLLED
  for (int line = stand.line; line < kTile; line += Stand<16>::kStep) {
    float t[16];
    load_line<16>(in, place, tile, copy.colwise, line, stand.chunk * 16, t);
    rotation(t, 16);
    FP4_UNROLL
    for (int i = 0; i < 16; ++i) {
      const uint32_t u = bits(abs_of(t[i]));
      largest = u > largest && u < kInfBits ? u : largest;
    }
    if (copy.outer == OuterKind::row) {
      largest = max_over_lanes(largest, Stand<16>::kAlong);
      if (stand.chunk == 0 && view.row + line < view.rows) atomicMax(groups + group_of(copy, view, view.row + line), largest);
      largest = 0;
    }
  }
  if (copy.outer == OuterKind::row) return;
  largest = max_over_lanes(largest, 32);
  if (threadIdx.x % 32 == 0 && largest) atomicMax(groups + group_of(copy, view, 0), largest);
}

__global__ void __launch_bounds__(kThreads) outer_scales_kernel(const OuterArgs a) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= a.groups) return;
  const StoredOuter made = outer_scale_of(a.amax[i], a.rule, a.eden, a.pow2);
  a.enc[i] = made.outer.enc;
  a.dec[i] = made.outer.dec;
  a.global[i] = made.global;
}

__global__ void __launch_bounds__(kThreads)
    global_of_rows_kernel(const float* of_group, bool by_row, const int32_t* offsets, int experts, int64_t rows, float* out) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= rows) return;
  int e = 0;
  while (e < experts && row >= offsets[e]) ++e;
  out[row] = e == experts ? 1.0f : of_group[by_row ? row : e];
}

}  // namespace

cudaError_t amax(const Input& in, const Copy& copy, float* amax, int64_t groups, cudaStream_t stream) {
  if (groups == 0) return cudaSuccess;
  const cudaError_t error = cudaMemsetAsync(amax, 0, groups * sizeof(float), stream);
  if (error != cudaSuccess || in.batch * in.rows * in.cols == 0) return error;
  const bool through_tile = copy.colwise || needs_tile(in);
  const size_t shared = through_tile ? tile_bytes(in.dtype) : 0;
  return launch(amax_kernel, dim3(static_cast<unsigned>(num_tiles(in))), kThreads, shared, stream, in, copy, through_tile, amax);
}

cudaError_t global_of_rows(const float* of_group, bool by_row, const int32_t* offsets, int experts, int64_t rows, float* out,
                           cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  return launch(global_of_rows_kernel, dim3(static_cast<unsigned>((rows + kThreads - 1) / kThreads)), kThreads, 0, stream, of_group, by_row,
                offsets, experts, rows, out);
}

cudaError_t outer_scales(const OuterArgs& args, cudaStream_t stream) {
  if (args.groups == 0) return cudaSuccess;
  return launch(outer_scales_kernel, dim3(static_cast<unsigned>((args.groups + kThreads - 1) / kThreads)), kThreads, 0, stream, args);
}

}  // namespace fp4ext::cuda
