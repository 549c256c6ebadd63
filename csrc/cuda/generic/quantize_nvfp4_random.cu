#include "quantize_blocks.cuh"

namespace fp4ext::cuda {

cudaError_t quantize_nvfp4_random(const QuantizeArgs& args, cudaStream_t stream) {
  using enum ScaleRule;
  if (args.spec.rounding == Rounding::eden_block) return quantize_blocks<Nvfp4<amax, Rounding::eden_block>>(args, stream);
  if (args.spec.rounding == Rounding::eden)
    return args.spec.scale == sweep ? quantize_blocks<Nvfp4<sweep, Rounding::eden>>(args, stream)
                                    : quantize_blocks<Nvfp4<amax, Rounding::eden>>(args, stream);
  return args.spec.scale == minvar ? quantize_blocks<Nvfp4<minvar, Rounding::stochastic>>(args, stream)
                                   : quantize_blocks<Nvfp4<amax, Rounding::stochastic>>(args, stream);
}

}  // namespace fp4ext::cuda
