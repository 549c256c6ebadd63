#include "quantize_blocks.cuh"

namespace fp4ext::cuda {
namespace {

template <class Element>
cudaError_t of_element(const QuantizeArgs& args, cudaStream_t stream) {
  return args.spec.rounding == Rounding::stochastic ? quantize_blocks<Mx<Element, true>>(args, stream)
                                                    : quantize_blocks<Mx<Element, false>>(args, stream);
}

}  // namespace

cudaError_t quantize_mx(const QuantizeArgs& args, cudaStream_t stream) {
  switch (args.spec.format) {
    case FormatId::mxfp8: return of_element<E4M3>(args, stream);
    case FormatId::mxfp8_e5m2: return of_element<E5M2>(args, stream);
    default: return of_element<E2M1>(args, stream);
  }
}

}  // namespace fp4ext::cuda
