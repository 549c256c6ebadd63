#pragma once
#include "encode.cuh"

// quantize for blocks along the contraction, 1×16 and 1×32.
namespace fp4ext::cuda {

template <class Encoder>
__device__ void quantize_copy(const QuantizeArgs& a, const Copy& copy, const Place& place, const char* tile) {
  constexpr int N = Encoder::kBlock;
  const View view(a.in, copy.colwise, place);
  const Output out(copy, view, N);
  const Stand<N> stand;
  Site site{read_rng(copy), a.role, copy.colwise, 0, view.k + stand.chunk * N};
  const Rotation<N> rotation(copy, rht_of(a.in, copy, view), site.rng, stand.chunk);
  const int64_t column = site.k / N, padded = (view.k_size + 15) / 16 * 16;
  FP4_ROLLED
  for (int line = stand.line; line < kTile; line += Stand<N>::kStep) {
    if (view.row + line - stand.line >= view.rows && !copy.swizzled) break;  // for all lanes of all warps alike
    const int64_t row = view.row + line;
    float t[N];
    load_line<N>(a.in, place, tile, copy.colwise, line, stand.chunk * N, t);
    rotation(t, padded - site.k);
    const bool exists = out.holds(view, row, column);
    Outer<float> outer{};
    if (Encoder::kOuter) outer = outer_of(copy, view, exists ? row : 0);
    site.row = view.first + row;
    uint32_t words[Encoder::kWords];
    const uint32_t scale = Encoder::encode(t, outer, a.spec, site, rotation, words);
    if (exists) out.store_codes(copy, row, column, words);
    out.store_scale(copy, view, row, column, scale);
  }
}

template <class Encoder>
__global__ void __launch_bounds__(kThreads, Encoder::kBlocksAtOnce)
    quantize_blocks_kernel(const __grid_constant__ QuantizeArgs a, bool through_tile) {
  const Place place = place_of_block(a.in, Encoder::kBlock);
  if (place.rows == 0) return;
  const char* tile = nullptr;
  if (through_tile) {
    char* memory = shared_memory();
    load_any_tile(a.in, place, memory);
    __syncthreads();
    tile = memory;
  }
  FP4_ROLLED
  for (const Copy& copy : a.copies)
    if (copy.codes) quantize_copy<Encoder>(a, copy, place, tile);
}

template <class Encoder>
cudaError_t quantize_blocks(const QuantizeArgs& a, cudaStream_t stream) {
  const bool through_tile = a.copies[1].codes || needs_tile(a.in);
  const size_t shared = through_tile ? tile_bytes(a.in.dtype) : 0;
  return launch(quantize_blocks_kernel<Encoder>, dim3(static_cast<unsigned>(num_tiles(a.in))), kThreads, shared, stream, a, through_tile);
}

// By format; quantize.cu chooses.
cudaError_t quantize_nvfp4(const QuantizeArgs& args, cudaStream_t stream);
cudaError_t quantize_nvfp4_random(const QuantizeArgs& args, cudaStream_t stream);
cudaError_t quantize_mx(const QuantizeArgs& args, cudaStream_t stream);
cudaError_t quantize_16x16(const QuantizeArgs& args, cudaStream_t stream);

}  // namespace fp4ext::cuda
