#pragma once
#include <algorithm>
#include <vector>

#include "isa.h"

namespace fp4ext::cpu {

// Several groups of equal units shared out as one piece of work, by cost: f(group, first unit, end unit). A unit belongs
// to the share that holds its first cost. grain: the cost worth a thread.
template <class Units, class Cost, class Fn>
void share(int64_t groups, int64_t grain, const Parallel& parallel, Units&& units, Cost&& cost, Fn&& f) {
  std::vector<int64_t> starts{0};
  for (int64_t g = 0; g < groups; ++g) starts.push_back(starts.back() + units(g) * cost(g));
  if (starts.back() == 0) return;
  parallel(starts.back(), grain, [&](int64_t begin, int64_t end) {
    for (int64_t g = std::upper_bound(starts.begin(), starts.end(), begin) - starts.begin() - 1; g < groups && starts[g] < end; ++g) {
      const int64_t each = cost(g), from = std::max<int64_t>(begin - starts[g], 0), to = std::min(end, starts[g + 1]) - starts[g];
      const int64_t first = (from + each - 1) / each, last = (to + each - 1) / each;
      if (first < last) f(g, first, last);
    }
  });
}

}  // namespace fp4ext::cpu
