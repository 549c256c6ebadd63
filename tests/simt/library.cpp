#include <torch/csrc/stable/library.h>

#include "../../csrc/ops/cuda.h"

// The library fp4ext_simt: the CUDA ops of csrc/ops, whose kernels run on the SIMT machine, on CPU tensors; the knobs of
// the machine; and kernels that no op offers yet.
namespace fp4ext {
namespace {

void configure(int64_t seed, std::string async, bool truncate) {
  static constexpr Choice<simt::Async> kAsync[] = {
      {"early", simt::Async::early}, {"late", simt::Async::late}, {"random", simt::Async::random}};
  simt::options() = {static_cast<uint64_t>(seed), choose("async", async, kAsync), truncate};
}

// quantize with the scales of both directions in the tensor cores' layout, outer scales given.
std::tuple<Tensor, Tensor, Tensor, Tensor> quantize_swizzled(const Tensor& x, std::string key, const Tensor& rng, const Tensor& enc,
                                                             const Tensor& dec) {
  const QuantizeSpec spec = parse_spec(key);
  const int64_t batch = x.size(0), rows = x.size(1), cols = x.size(2);
  kernels::QuantizeArgs args{{x.data_ptr(), cuda_dtype("x", x), batch, rows, cols, {}}, spec, 0, {}, {}};
  std::vector<Tensor> out;
  for (bool colwise : {false, true}) {
    kernels::Copy& c = colwise ? args.col : args.row;
    const int64_t k = colwise ? rows : cols, out_rows = colwise ? cols : rows, blocks = (k + spec.block() - 1) / spec.block();
    out.push_back(torch::stable::new_empty(x, {batch, out_rows, blocks * spec.block() / (spec.packed() ? 2 : 1)}, ScalarType::Byte));
    out.push_back(torch::stable::new_empty(x, {batch, padded_rows(out_rows) * padded_columns(blocks)}, ScalarType::Byte));
    c = {colwise,
         spec.outer,
         kernels::rht_n(spec, k),
         spec.rht_stages,
         static_cast<const int64_t*>(rng.data_ptr()),
         false,
         true,
         static_cast<const float*>(enc.data_ptr()),
         static_cast<const float*>(dec.data_ptr()),
         static_cast<uint8_t*>(out[out.size() - 2].data_ptr()),
         static_cast<uint8_t*>(out.back().data_ptr())};
  }
  check_launch("quantize", kernels::quantize(args, nullptr));
  return {out[0], out[1], out[2], out[3]};
}

}  // namespace
}  // namespace fp4ext

STABLE_TORCH_LIBRARY(fp4ext_simt, m) {
#include "schemas.inc"
  m.def("configure(int seed, str async, bool truncate) -> ()");
  m.def("quantize_swizzled(Tensor x, str spec, Tensor rng, Tensor enc, Tensor dec) -> (Tensor, Tensor, Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(fp4ext_simt, CompositeExplicitAutograd, m) { m.impl("configure", TORCH_BOX(&fp4ext::configure)); }
STABLE_TORCH_LIBRARY_IMPL(fp4ext_simt, CPU, m) { m.impl("quantize_swizzled", TORCH_BOX(&fp4ext::quantize_swizzled)); }
