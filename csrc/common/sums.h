// The sum of a row's products in the order that the norms share. Included by cpu_kernels.cpp only.
#pragma once
#include "common/vec.h"

namespace vx::VEXACT_ISA {

struct Pair {
  F16 a, b;
};

// order: four accumulators of 16 lanes take the 16-wide chunks in turn; (a0 + a1) + (a2 + a3), then the lane tree.
// f(chunk start, lanes) gives the addends as a product pair; a short last chunk is filled with zeros.
template <class F>
VX_INLINE float sum_products(int64_t n, F f) {
  F16 acc[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 64 <= n; i += 64)
    for (int j = 0; j < 4; ++j) {
      auto [a, b] = f(i + 16 * j, 16);
      acc[j] = fma(a, b, acc[j]);
    }
  for (int j = 0; i < n; i += 16, ++j) {
    auto [a, b] = f(i, int(n - i < 16 ? n - i : 16));
    acc[j] = fma(a, b, acc[j]);
  }
  return sum_lanes((acc[0] + acc[1]) + (acc[2] + acc[3]));
}

}  // namespace vx::VEXACT_ISA
