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

struct GemmBatch {  // independent products of one shape: product i lies i strides (in elements) behind the first
  Gemm first;
  int64_t batch, a_stride, b_stride, c_stride;
};

}  // namespace vx

VX_DECLARE_KERNEL(void gemm_batch(const GemmBatch& g))
VX_DECLARE_KERNEL(void column_sums(const ColumnSums& a))
