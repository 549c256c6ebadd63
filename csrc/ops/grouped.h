#pragma once
#include "checks.h"

// Experts' rows one after the other: rows [bounds[e], bounds[e+1]) belong to expert e, those past the last bound to
// none.
namespace fp4ext {

using Bounds = std::vector<int64_t>;

// What offsets are, on every device: int32 [E], the ends of the experts' rows.
inline void check_ends(const Tensor& offsets) {
  check_dtype("offsets", offsets, ScalarType::Int);
  STD_TORCH_CHECK(offsets.dim() == 1 && offsets.numel() > 0, "offsets has shape ", describe(sizes_of(offsets)),
                  "; accepted: [E], the ends of the rows of at least 1 expert");
}

// Their values too, which are read on the host.
inline Bounds check_offsets(const Tensor& offsets, int64_t rows, const char* of) {
  check_ends(offsets);
  const Tensor dense = torch::stable::contiguous(offsets);
  const auto* end = static_cast<const int32_t*>(dense.data_ptr());
  Bounds bounds{0};
  for (int64_t e = 0; e < dense.numel(); ++e) {
    STD_TORCH_CHECK(end[e] >= bounds.back(), "offsets[", e, "] is ", end[e], " after ", bounds.back(),
                    "; accepted: ends that never decrease, from 0 on");
    STD_TORCH_CHECK(end[e] <= rows, "offsets[", e, "] is ", end[e], "; accepted: at most ", rows, ", the ", of);
    bounds.push_back(end[e]);
  }
  return bounds;
}

// Where the experts' tokens begin along a contraction: each expert's are padded to whole blocks on their own.
inline Bounds padded_bounds(const Bounds& bounds, int64_t block) {
  Bounds padded{0};
  for (size_t e = 0; e + 1 < bounds.size(); ++e) padded.push_back(padded.back() + (bounds[e + 1] - bounds[e] + block - 1) / block * block);
  return padded;
}
// As many tokens as that can take, whatever the bounds.
inline int64_t padded_capacity(int64_t rows, int64_t experts, int64_t block) { return (rows + experts * (block - 1)) / block * block; }

}  // namespace fp4ext
