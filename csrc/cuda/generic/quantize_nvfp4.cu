#include "quantize_blocks.cuh"

namespace fp4ext::cuda {

cudaError_t quantize_nvfp4(const QuantizeArgs& args, cudaStream_t stream) {
  using enum ScaleRule;
  constexpr Rounding kNearest = Rounding::nearest;
  switch (args.spec.scale) {
    case four_over_six: return quantize_blocks<Nvfp4<four_over_six, kNearest>>(args, stream);
    case four_over_six_mae: return quantize_blocks<Nvfp4<four_over_six_mae, kNearest>>(args, stream);
    case four_over_six_absmax: return quantize_blocks<Nvfp4<four_over_six_absmax, kNearest>>(args, stream);
    case sweep: return quantize_blocks<Nvfp4<sweep, kNearest>>(args, stream);
    case minvar: return quantize_blocks<Nvfp4<minvar, kNearest>>(args, stream);
    default: return quantize_blocks<Nvfp4<amax, kNearest>>(args, stream);
  }
}

}  // namespace fp4ext::cuda
