#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"

namespace vx {

struct LayerNormFwd {
  Dtype dtype;                  // of x, residual, weight, bias, y and new_residual
  int64_t rows, n;
  const void* x;                // (rows, n), row stride x_stride elements
  const void* residual;         // like x with residual_stride, or null
  const void *weight, *bias;    // (n,), either may be null
  void* y;                      // (rows, n) contiguous
  void* new_residual;           // (rows, n) contiguous, or null
  float *mean, *rstd;           // (rows,)
  int64_t x_stride, residual_stride;
  float eps;
};

struct LayerNormBwd {
  Dtype dtype;
  int64_t rows, n;
  const void *dy, *dnew_residual;  // (rows, n) contiguous; the second may be null
  const void *x, *weight;          // x is what was normalised, contiguous; weight may be null
  const float *mean, *rstd;
  void* dx;                        // (rows, n)
  void *dweight, *dbias;           // (n,) in dtype, either may be null
};

}  // namespace vx

VX_DECLARE_KERNEL(void layer_norm_fwd(const LayerNormFwd& a))
VX_DECLARE_KERNEL(void layer_norm_bwd(const LayerNormBwd& a))
