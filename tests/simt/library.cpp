#include <torch/csrc/stable/library.h>

#include "../../csrc/cuda/attention.h"
#include "../../csrc/cuda/gemm.h"
#include "../../csrc/cuda/ptx/tensor_core5.h"
#include "../../csrc/ops/cuda.h"
#include "../../csrc/ops/dispatch_cuda.h"
#include "../../csrc/ops/stored_cuda.h"

// The library fp4ext_simt: the CUDA ops of csrc/ops, whose kernels run on the SIMT machine, on CPU tensors; the knobs of
// the machine; and kernels with choices that no op offers: which GEMM, swizzled scales, a small workspace.
namespace fp4ext {
namespace {

void configure(int64_t seed, std::string async, std::string arithmetic, bool races) {
  static constexpr Choice<simt::Async> kAsync[] = {
      {"early", simt::Async::early}, {"late", simt::Async::late}, {"random", simt::Async::random}};
  static constexpr Choice<simt::Arithmetic> kArithmetic[] = {
      {"hardware", simt::Arithmetic::hardware}, {"nearest", simt::Arithmetic::nearest}, {"toward_zero", simt::Arithmetic::toward_zero}};
  auto& o = simt::options();
  o.seed = static_cast<uint64_t>(seed), o.async = choose("async", async, kAsync), o.races = races;
  o.arithmetic = choose("arithmetic", arithmetic, kArithmetic);
}

// All tensors are on device i, which is an sm_<sm>.
void set_device(int64_t i, int64_t sm) {
  simt::options().device = static_cast<int>(i);
  simt::options().devices.at(i) = static_cast<int>(sm);
}

// What a tensor core makes of one sum: Σ a·b + c of an instruction's K, rows of codes with their scales, or of bf16.
double dot(std::string kind, const Tensor& a, const Tensor& b, const Tensor& a_scales, const Tensor& b_scales, double c) {
  const auto line = [&](auto line, const Tensor& codes, const Tensor& scales) {
    uint32_t bytes = 0;
    std::memcpy(&bytes, scales.data_ptr(), scales.numel());
    line.decode(static_cast<const uint8_t*>(codes.data_ptr()), bytes);
    return line;
  };
  const auto pairs = [](const Tensor& values) {
    uint32_t words[8];
    std::memcpy(words, values.data_ptr(), sizeof(words));
    simt::Bf16Line line;
    line.decode(words);
    return line;
  };
  const auto sum = static_cast<float>(c);
  if (kind == "bf16") return simt::dot(pairs(a), pairs(b), sum);
  if (kind == "mxfp8") return simt::dot(line(simt::Fp8Line{}, a, a_scales), line(simt::Fp8Line{}, b, b_scales), sum);
  return simt::dot(line(simt::Fp4Line{}, a, a_scales), line(simt::Fp4Line{}, b, b_scales), sum);
}

// What a kernel tells tcgen05 of an operand at an address in shared memory, and of a product of m × n.
int64_t descriptor(std::string of, int64_t address) {
  const auto at = static_cast<uint32_t>(address);
  return static_cast<int64_t>(of == "scales" ? cuda::scales_descriptor(at) : cuda::operand_descriptor(at));
}
int64_t instruction(std::string format, int64_t m, int64_t n, int64_t scale) {
  const int rows = static_cast<int>(m), columns = static_cast<int>(n);
  return format == "nvfp4" ? cuda::nvfp4_instruction(rows, columns) : cuda::mxfp8_instruction(rows, columns, static_cast<uint32_t>(scale));
}

cuda::Gemm native_kernel(const std::string& name) {
  static constexpr Choice<cuda::Gemm> kKernels[] = {
      {"sm120", cuda::gemm_sm120}, {"sm100", cuda::gemm_sm100}, {"sm100_pairs", cuda::gemm_sm100_pairs}};
  return choose("kernel", name, kKernels);
}
std::string self_test(std::string kernel) { return cuda::self_test(native_kernel(kernel)); }
std::string same_bits(std::string kernel, std::string other) { return cuda::same_bits(native_kernel(kernel), native_kernel(other)); }
// Which kernel a product of so many rows takes, NVFP4 and small.
std::string route(int64_t rows, int64_t experts) {
  static constexpr int32_t kOffsets[1] = {};
  const cuda::Operand x{nullptr, nullptr, nullptr, 0, 0, cuda::Elem::e2m1, 16, rows, 128},
      w{nullptr, nullptr, nullptr, 0, 0, cuda::Elem::e2m1, 16, 8, 128};
  const cuda::GemmArgs args{x, w, nullptr, nullptr, false, experts > 1 ? kOffsets : nullptr, static_cast<int>(experts)};
  return choose_gemm(args, true, "auto", simt::options().device).name;
}
std::string status(int64_t device) { return emulated_status(static_cast<int>(device)) + "\n" + native_status(static_cast<int>(device)); }

// quantize with the scales of both directions in the tensor cores' layout, outer scales given.
std::tuple<Tensor, Tensor, Tensor, Tensor> quantize_swizzled(const Tensor& x, std::string key, const Tensor& rng, const Tensor& enc,
                                                             const Tensor& dec) {
  const QuantizeSpec spec = parse_spec(key);
  const int64_t batch = x.size(0), rows = x.size(1), cols = x.size(2);
  cuda::QuantizeArgs args{{x.data_ptr(), cuda_dtype("x", x), batch, rows, cols, {}}, spec, 0, {}};
  std::vector<Tensor> out;
  for (bool colwise : {false, true}) {
    cuda::Copy& c = args.copies[colwise];
    const int64_t k = colwise ? rows : cols, out_rows = colwise ? cols : rows, blocks = (k + spec.block() - 1) / spec.block();
    out.push_back(torch::stable::new_empty(x, {batch, out_rows, blocks * spec.block() / (spec.packed() ? 2 : 1)}, ScalarType::Byte));
    out.push_back(torch::stable::new_empty(x, {batch, padded_rows(out_rows) * padded_columns(blocks)}, ScalarType::Byte));
    c = {colwise,
         spec.outer,
         cuda::rht_n(spec, k),
         spec.rht_stages,
         static_cast<const int64_t*>(rng.data_ptr()),
         false,
         true,
         static_cast<const float*>(enc.data_ptr()),
         static_cast<const float*>(dec.data_ptr()),
         static_cast<uint8_t*>(out[out.size() - 2].data_ptr()),
         static_cast<uint8_t*>(out.back().data_ptr())};
  }
  check_launch("quantize", cuda::quantize(args, nullptr));
  return {out[0], out[1], out[2], out[3]};
}

cuda::Operand operand(const Tensor& codes, const std::optional<Tensor>& scales, const std::optional<Tensor>& global,
                      const std::string& format, int64_t experts, int64_t token_experts = 0) {
  using enum cuda::Elem;
  static constexpr Choice<cuda::Elem> kElems[] = {{"nvfp4", e2m1}, {"mxfp4", e2m1}, {"mxfp8", e4m3}, {"mxfp8_e5m2", e5m2},
                                                  {"bf16", bf16},  {"fp16", fp16},  {"fp32", fp32}};
  const auto elem = choose("format", format, kElems);
  const int64_t rows = product(sizes_of(codes), 0, codes.dim() - 1), globals = global ? global->numel() : 0;
  return {codes.data_ptr(),
          scales ? static_cast<const uint8_t*>(scales->data_ptr()) : nullptr,
          globals ? static_cast<const float*>(global->data_ptr()) : nullptr,
          token_experts     ? (globals > 1 ? globals / token_experts : 0)
          : globals == rows ? rows / experts
                            : globals == experts,
          token_experts ? globals == token_experts * rows && rows > 1 : globals == rows && globals > 1,
          elem,
          format == "nvfp4" ? 16
          : scales          ? 32
                            : 0,
          rows / experts,
          codes.size(codes.dim() - 1) * (elem == e2m1 ? 2 : 1)};
}

// A GEMM by the kernel of that name. offsets: grouped; over_tokens: contracted over them. onto: what the product is added to.
Tensor run_gemm(std::string kernel, const Tensor& x, std::optional<Tensor> x_scales, std::optional<Tensor> x_global, std::string x_format,
                const Tensor& w, std::optional<Tensor> w_scales, std::optional<Tensor> w_global, std::string w_format,
                std::optional<Tensor> bias, std::optional<Tensor> offsets, std::string out_dtype, bool over_tokens,
                std::optional<Tensor> onto) {
  const int64_t experts = offsets ? offsets->numel() : 1;
  cuda::GemmArgs args{operand(x, x_scales, x_global, x_format, 1, over_tokens ? experts : 0),
                      operand(w, w_scales, w_global, w_format, over_tokens ? 1 : experts, over_tokens ? experts : 0)};
  const ScalarType dtype = parse_dtype("out_dtype", out_dtype);
  Tensor y = onto          ? torch::stable::clone(*onto)
             : over_tokens ? torch::stable::new_empty(x, {experts, args.x.rows, args.w.rows}, dtype)
                           : torch::stable::new_empty(x, {args.x.rows, args.w.rows}, dtype);
  args.over_tokens = over_tokens, args.add = onto.has_value();
  args.bias = bias ? static_cast<const float*>(bias->data_ptr()) : nullptr;
  args.y = y.data_ptr();
  args.y_bf16 = dtype == ScalarType::BFloat16;
  args.offsets = offsets ? static_cast<const int32_t*>(offsets->data_ptr()) : nullptr;
  args.experts = static_cast<int>(experts);
  using Gemm = cudaError_t (*)(const cuda::GemmArgs&, cudaStream_t);
  static constexpr Choice<Gemm> kKernels[] = {{"invariant", cuda::gemm_invariant}, {"lanes", cuda::gemm_lanes},
                                              {"decode", cuda::gemm_decode},       {"sm120", cuda::gemm_sm120},
                                              {"sm100", cuda::gemm_sm100},         {"sm100_pairs", cuda::gemm_sm100_pairs}};
  const Gemm gemm = choose("kernel", kernel, kKernels);
  STD_TORCH_CHECK(kernel == "invariant" || kernel == "lanes" || (kernel == "decode" ? cuda::decode_takes(args) : cuda::native_takes(args)),
                  kernel, " does not take these");
  check_launch("gemm", gemm(args, nullptr));
  return y;
}

// scale: of the products, as the op has it. start: int64 [batch], or none. budget: bytes of workspace, 0 for the usual ones.
Tensor run_attention(const Tensor& q, const Tensor& k, const Tensor& v, std::optional<Tensor> start, double scale, int64_t budget) {
  cuda::AttentionArgs a{q.data_ptr(), k.data_ptr(), v.data_ptr()};
  Tensor y = torch::stable::new_empty(q, sizes_of(q));
  a.y = y.data_ptr();
  a.q_dtype = cuda_dtype("q", q), a.kv_dtype = cuda_dtype("k", k);
  a.batch = q.size(0), a.heads = q.size(1), a.kv_heads = k.size(1), a.m = q.size(2), a.t = k.size(2), a.d = q.size(3);
  for (int i = 0; i < 3; ++i) a.q_strides[i] = q.stride(i), a.k_strides[i] = k.stride(i), a.v_strides[i] = v.stride(i);
  a.start = start ? static_cast<const int64_t*>(start->data_ptr()) : nullptr;
  a.scale = static_cast<float>(scale * 1.4426950408889634);
  if (budget) a.budget = budget;
  Tensor workspace = torch::stable::new_empty(q, {cuda::attention_workspace(a)}, ScalarType::Byte);
  check_launch("attention", cuda::attention(a, workspace.data_ptr(), nullptr));
  return y;
}

}  // namespace
}  // namespace fp4ext

STABLE_TORCH_LIBRARY(fp4ext_simt, m) {
#include "schemas.inc"
  m.def("configure(int seed, str async, str arithmetic, bool races) -> ()");
  m.def("dot(str kind, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, float c) -> float");
  m.def("descriptor(str of, int address) -> int");
  m.def("instruction(str format, int m, int n, int scale) -> int");
  m.def("set_device(int i, int sm) -> ()");
  m.def("self_test(str kernel) -> str");
  m.def("same_bits(str kernel, str other) -> str");
  m.def("route(int rows, int experts) -> str");
  m.def("status(int device) -> str");
  m.def(
      "run_gemm(str kernel, Tensor x, Tensor? x_scales, Tensor? x_global, str x_format, Tensor w, Tensor? w_scales, Tensor? w_global,"
      " str w_format, Tensor? bias, Tensor? offsets, str out_dtype, bool over_tokens=False, Tensor? onto=None) -> Tensor");
  m.def("run_attention(Tensor q, Tensor k, Tensor v, Tensor? start, float scale, int budget=0) -> Tensor");
  m.def("quantize_swizzled(Tensor x, str spec, Tensor rng, Tensor enc, Tensor dec) -> (Tensor, Tensor, Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(fp4ext_simt, CompositeExplicitAutograd, m) {
  m.impl("descriptor", TORCH_BOX(&fp4ext::descriptor));
  m.impl("instruction", TORCH_BOX(&fp4ext::instruction));
  m.impl("configure", TORCH_BOX(&fp4ext::configure));
  m.impl("set_device", TORCH_BOX(&fp4ext::set_device));
  m.impl("self_test", TORCH_BOX(&fp4ext::self_test));
  m.impl("same_bits", TORCH_BOX(&fp4ext::same_bits));
  m.impl("route", TORCH_BOX(&fp4ext::route));
  m.impl("status", TORCH_BOX(&fp4ext::status));
}
STABLE_TORCH_LIBRARY_IMPL(fp4ext_simt, CPU, m) {
  m.impl("dot", TORCH_BOX(&fp4ext::dot));
  m.impl("run_gemm", TORCH_BOX(&fp4ext::run_gemm));
  m.impl("run_attention", TORCH_BOX(&fp4ext::run_attention));
  m.impl("quantize_swizzled", TORCH_BOX(&fp4ext::quantize_swizzled));
}
