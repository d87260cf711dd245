#pragma once
#include "linear/gemm.h"

namespace vx {

struct ColumnSums {  // out[j] = sum of x[i, j] over i, ascending, in fp32
  int64_t rows, n;
  const void* x;     // (rows, n), columns contiguous
  Dtype dtype;
  int64_t x_stride;
  void* out;         // (n,)
  Dtype out_dtype;
};

}  // namespace vx

VX_DECLARE_KERNEL(void column_sums(const ColumnSums& a))
