#include <cmath>

#include "quantize_plan.h"
#include "stored.h"

// quantize, quantize_rowcol, requantize, grouped_quantize, grouped_requantize and amax on the CPU: measure the amaxes, make
// the outer scales, allocate, run.
namespace fp4ext {
namespace {

using std::optional;
using std::string;

// A checked random state, on the host. Random bits are drawn for blocks and for vectors of the RHT, so that a shard has to
// begin where one of them does: its k is a multiple of `unit`.
Rng read_rng(const optional<Tensor>& rng, int64_t unit) {
  if (!rng) return {};
  const Tensor dense = torch::stable::contiguous(*rng);
  const auto* p = static_cast<const int64_t*>(dense.data_ptr());
  const bool shard = rng->size(0) == 4;
  for (int64_t i = 2; i < rng->size(0); ++i)
    STD_TORCH_CHECK(p[i] >= 0 && p[i] < int64_t{1} << 32, "rng has ", i == 2 ? "row " : "k ", p[i], "; accepted: from 0 to 2^32 - 1");
  STD_TORCH_CHECK(!shard || p[3] % unit == 0, "rng has k ", shard ? p[3] : 0, "; accepted: a multiple of ", unit,
                  ", the length of a block or of the RHT");
  return {{static_cast<uint32_t>(p[0]), static_cast<uint32_t>(static_cast<uint64_t>(p[0]) >> 32)},
          static_cast<uint32_t>(p[1]),
          shard ? static_cast<uint32_t>(p[2]) : 0,
          shard ? static_cast<uint32_t>(p[3]) : 0};
}

// One direction of one quantization, as one piece of work: the input as one tensor, or each expert's rows as one.
struct Job {
  QuantizePlan plan;
  Tensor x;                                     // contiguous; of a stored input, its codes
  const cpu::DequantizeArgs* stored = nullptr;  // the input, where it is quantized already
  Bounds bounds;                                // of experts: their rows of x
  std::vector<cpu::QuantizeArgs> tensors;
  std::vector<float> enc, dec;  // what the outer scales of `tensors` point to

  Job(const Tensor& input, const string& key, int64_t axis, const optional<Tensor>& rng, int64_t role, const optional<Experts>& of = {})
      : Job(torch::stable::contiguous(input), check_float("x", input), sizes_of(input), key, axis, rng, role, of) {
    tensors_of(x.data_ptr());
  }
  Job(const Stored& input, const string& key, int64_t axis, const optional<Tensor>& rng, int64_t role, const optional<Experts>& of = {})
      : Job(input.codes, cpu::Dtype::fp32, input.sizes, key, axis, rng, role, of) {
    stored = &input.args;
    tensors_of(nullptr);
  }

  void measure(float* amax) const {
    std::fill(amax, amax + plan.num_groups(), 0.0f);
    if (stored)
      cpu::requantize_amax(requantized(), amax, torch_threads());
    else
      cpu::amax(tensors, amax, torch_threads());
  }

  // amax: of each group, if it is known.
  std::tuple<Tensor, Tensor, Tensor> run(const optional<Tensor>& amax = {}) {
    Tensor global = plan.new_groups(x);
    if (plan.spec.outer != OuterKind::none) {
      auto* g = static_cast<float*>(global.data_ptr());
      if (amax)
        std::copy_n(static_cast<const float*>(amax->data_ptr()), plan.num_groups(), g);
      else
        measure(g);
      set_outer(g);
      if (plan.along_rows()) global = spread(g);
    }
    const Tensor codes = plan.new_codes(x), scales = plan.new_scales(x);
    set_results(static_cast<uint8_t*>(codes.data_ptr()), static_cast<uint8_t*>(scales.data_ptr()));
    if (plan.k() == 0) return {codes, scales, global};
    if (stored)
      cpu::requantize(requantized(), torch_threads());
    else
      cpu::quantize(tensors, torch_threads());
    return {codes, scales, global};
  }

 private:
  Job(const Tensor& dense, cpu::Dtype dtype, Sizes sizes, const string& key, int64_t axis, const optional<Tensor>& rng, int64_t role,
      const optional<Experts>& of)
      : plan(dense, std::move(sizes), key, axis, rng, role, of), x(dense) {
    if (plan.experts)
      bounds = check_offsets(*of->offsets, plan.rows, "rows of x");
    else if (plan.spec.outer == OuterKind::expert)
      for (int64_t e = 0; e <= plan.batch; ++e) bounds.push_back(e * plan.rows);
    common_.dtype = dtype;
    common_.batch = plan.batch, common_.rows = plan.rows, common_.cols = plan.cols;
    common_.spec = plan.spec;
    common_.colwise = plan.colwise;
    common_.role = plan.role;
    // Along tokens the length of the RHT differs from expert to expert.
    common_.rng = read_rng(rng, plan.along_tokens() ? plan.spec.block() : common_.vector_length());
  }

  // Random bits belong to the row in x, or, column-wise, to the row of a stack of the experts' results.
  void tensors_of(const void* data) {
    common_.x = data;
    if (bounds.empty()) {
      tensors = {common_};
      return;
    }
    if (plan.along_tokens()) common_.pitch = plan.padded_k();
    for (size_t e = 0; e + 1 < bounds.size(); ++e) {
      cpu::QuantizeArgs a = common_;
      if (a.spec.outer == OuterKind::expert) a.spec.outer = OuterKind::tensor;
      a.batch = 1;
      a.rows = bounds[e + 1] - bounds[e];
      if (data) a.x = static_cast<const uint8_t*>(data) + bounds[e] * a.cols * (a.dtype == cpu::Dtype::fp32 ? 4 : 2);
      a.rng.row += static_cast<uint32_t>(out_row(e));
      tensors.push_back(a);
    }
  }

  // Where the results of tensor i begin.
  int64_t out_row(size_t i) const { return bounds.empty() ? 0 : plan.colwise ? static_cast<int64_t>(i) * plan.cols : bounds[i]; }

  std::vector<cpu::RequantizeArgs> requantized() const {
    std::vector<cpu::RequantizeArgs> r;
    for (size_t i = 0; i < tensors.size(); ++i) r.push_back({stored, bounds.empty() ? 0 : bounds[i], tensors[i]});
    return r;
  }

  // From the amaxes in `global`, which become what is stored.
  void set_outer(float* global) {
    const QuantizeSpec& spec = plan.spec;
    const int64_t n = plan.num_groups();
    enc.resize(n), dec.resize(n);
    for (int64_t i = 0; i < n; ++i) {
      const StoredOuter made = outer_scale_of(global[i], spec.scale, is_eden(spec.rounding), spec.pow2);
      enc[i] = made.outer.enc, dec[i] = made.outer.dec, global[i] = made.global;
    }
    int64_t first = 0;
    for (auto& a : tensors) {
      a.outer_enc = enc.data() + first, a.outer_dec = dec.data() + first;
      first += a.num_groups();
    }
  }

  // A row of x has its expert's global scale, a row of no expert 1.
  Tensor spread(const float* of_group) const {
    const Tensor of_rows = torch::stable::new_empty(x, {plan.rows, 1}, ScalarType::Float);
    auto* g = static_cast<float*>(of_rows.data_ptr());
    for (int64_t e = 0; e < plan.experts; ++e)
      for (int64_t row = bounds[e]; row < bounds[e + 1]; ++row) g[row] = of_group[plan.spec.outer == OuterKind::row ? row : e];
    std::fill(g + bounds.back(), g + plan.rows, 1.0f);
    return of_rows;
  }

  void set_results(uint8_t* codes, uint8_t* scales) {
    const QuantizeSpec& spec = plan.spec;
    const Bounds starts = plan.along_tokens() ? padded_bounds(bounds, spec.block()) : Bounds{};
    for (size_t i = 0; i < tensors.size(); ++i) {
      const int64_t at = plan.along_tokens() ? starts[i] : out_row(i) * plan.padded_k();  // in elements
      tensors[i].codes = codes + at / (spec.packed() ? 2 : 1);
      tensors[i].scales = scales + at / spec.block();
    }
  }

  cpu::QuantizeArgs common_{};
};

std::tuple<Tensor, Tensor, Tensor> quantize(const Tensor& x, Text spec, int64_t axis, optional<Tensor> rng, int64_t role,
                                            optional<Tensor> amax) {
  Job job(x, spec, axis, rng, role);
  if (amax) {
    job.plan.check_amax(*amax, x);
    amax = torch::stable::contiguous(*amax);
    const auto* a = static_cast<const float*>(amax->data_ptr());
    for (int64_t i = 0; i < amax->numel(); ++i)
      STD_TORCH_CHECK(a[i] >= 0 && std::isfinite(a[i]), "amax holds ", a[i], "; accepted: finite numbers from 0 on");
  }
  return job.run(amax);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> quantize_rowcol(const Tensor& x, Text row_spec, Text col_spec,
                                                                           optional<Tensor> row_rng, optional<Tensor> col_rng,
                                                                           int64_t role) {
  Job row(x, row_spec, -1, row_rng, role), col(x, col_spec, -2, col_rng, role);
  optional<Tensor> amax;
  if (row.plan.same_amax(col.plan)) {
    amax = row.plan.new_groups(x);
    row.measure(static_cast<float*>(amax->data_ptr()));
  }
  return std::tuple_cat(row.run(amax), col.run(amax));
}

std::tuple<Tensor, Tensor, Tensor> requantize(const Tensor& codes, const Tensor& scales, const Tensor& global_scale, Text format, int64_t k,
                                              Text spec, int64_t axis, optional<Tensor> rng, int64_t role) {
  const Stored input(codes, scales, global_scale, format, k);
  return Job(input, spec, axis, rng, role).run();
}

std::tuple<Tensor, Tensor, Tensor> grouped_quantize(const Tensor& x, optional<Tensor> offsets, Text spec, int64_t axis,
                                                    optional<Tensor> rng, int64_t role) {
  return Job(x, spec, axis, rng, role, Experts{offsets}).run();
}

std::tuple<Tensor, Tensor, Tensor> grouped_requantize(const Tensor& codes, const Tensor& scales, const Tensor& global_scale, Text format,
                                                      int64_t k, optional<Tensor> offsets, Text spec, int64_t axis, optional<Tensor> rng,
                                                      int64_t role) {
  const Stored input(codes, scales, global_scale, format, k);
  return Job(input, spec, axis, rng, role, Experts{offsets}).run();
}

Tensor amax(const Tensor& x, Text spec, int64_t axis, optional<Tensor> rng) {
  const Job job(x, spec, axis, rng, 0);
  STD_TORCH_CHECK(job.plan.spec.outer != OuterKind::none, "amax: this format has no outer scale");
  Tensor out = job.plan.new_groups(x);
  job.measure(static_cast<float*>(out.data_ptr()));
  return out;
}

}  // namespace
}  // namespace fp4ext

STABLE_TORCH_LIBRARY_IMPL(fp4ext, CPU, m) {
  m.impl("quantize", FP4EXT_BOX(&fp4ext::quantize));
  m.impl("quantize_rowcol", FP4EXT_BOX(&fp4ext::quantize_rowcol));
  m.impl("requantize", FP4EXT_BOX(&fp4ext::requantize));
  m.impl("grouped_quantize", FP4EXT_BOX(&fp4ext::grouped_quantize));
  m.impl("grouped_requantize", FP4EXT_BOX(&fp4ext::grouped_requantize));
  m.impl("amax", FP4EXT_BOX(&fp4ext::amax));
}
