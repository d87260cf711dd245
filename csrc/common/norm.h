// What norms share: the row that is normalised, and gradients of what all rows have in common.
#pragma once
#include "common/parallel.h"
#include "common/sums.h"

namespace vx::VEXACT_ISA {
namespace {

// x's row, or x + residual, which becomes new_residual's.
template <class T, class Args>
VX_INLINE const T* norm_row(const Args& a, int64_t row) {
  const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
  if (!a.residual) return x;
  const T* residual = static_cast<const T*>(a.residual) + row * a.residual_stride;
  T* sum = static_cast<T*>(a.new_residual) + row * a.n;
  for_chunks(a.n, [&](int64_t i, int lanes) {
    store_lanes(sum + i, load_lanes(x + i, lanes) + load_lanes(residual + i, lanes), lanes);
  });
  return sum;
}

VX_INLINE float reciprocal_root(float squares, int64_t n, float eps) { return 1.0f / std::sqrt(squares / float(n) + eps); }

// f(first column, lanes) for the 16-wide chunks of n columns. Each sums the rows, whichever thread takes it.
template <class F>
void for_columns(int64_t rows, int64_t n, F f) {
  parallel_for(0, (n + 15) / 16, 1 + 4096 / (rows + 1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * 16; i < end * 16; i += 16) f(i, int(n - i < 16 ? n - i : 16));
  });
}

}  // namespace
}  // namespace vx::VEXACT_ISA
