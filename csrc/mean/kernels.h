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

struct MeanBwd {
  Dtype dtype;
  int64_t rows;
  const void* dy;  // (rows,)
  void* dx;        // (rows,): of every element of a row
  float divisor;
};

}  // namespace vx

VX_DECLARE_KERNEL(void mean_fwd(const MeanFwd& a))
VX_DECLARE_KERNEL(void mean_bwd(const MeanBwd& a))
