#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"

namespace vx {

struct MeanFwd {
  Dtype dtype;
  int64_t rows, n;
  const void* x;  // (rows, n), row stride x_stride elements
  void* y;        // (rows,)
  int64_t x_stride;
  float divisor;  // of the sum: n for a mean, 1 for a sum
};

}  // namespace vx

VX_DECLARE_KERNEL(void mean_fwd(const MeanFwd& a))
