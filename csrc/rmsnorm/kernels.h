#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"

namespace vx {

struct RmsnormFwd {
  Dtype dtype;           // of x, residual, weight, y and new_residual
  int64_t rows, n;
  const void* x;         // (rows, n), row stride x_stride elements
  const void* residual;  // like x with residual_stride, or null
  const void* weight;    // (n,)
  void* y;               // (rows, n) contiguous
  void* new_residual;    // (rows, n) contiguous, or null
  float* rstd;           // (rows,)
  int64_t x_stride, residual_stride;
  float eps;
  bool gemma;            // multiply by 1 + weight in fp32 and round once
};

struct RmsnormBwd {
  Dtype dtype;
  int64_t rows, n;
  const void *dy, *dnew_residual;  // (rows, n) contiguous; the second may be null
  const void *x, *weight;          // x is what was normalised, contiguous
  const float* rstd;
  void* dx;                        // (rows, n)
  void* dweight;                   // (n,) in dtype
  bool gemma;
};

struct RmsnormGatedFwd {
  Dtype dtype;           // of x, gate, weight and y
  int64_t rows, n;
  const void *x, *gate;  // (rows, n), rows x_stride and gate_stride elements apart
  int64_t x_stride, gate_stride;
  const void* weight;    // (n,)
  float eps;
  void* y;               // (rows, n) contiguous
  float* rstd;           // (rows,)
};

struct RmsnormGatedBwd {
  Dtype dtype;
  int64_t rows, n;
  const void *dy, *x, *gate, *weight;  // the first three (rows, n) contiguous
  const float* rstd;
  void *dx, *dgate, *dweight;          // (rows, n) twice, (n,)
};

}  // namespace vx

VX_DECLARE_KERNEL(void rmsnorm_fwd(const RmsnormFwd& a))
VX_DECLARE_KERNEL(void rmsnorm_bwd(const RmsnormBwd& a))
VX_DECLARE_KERNEL(void rmsnorm_gated_fwd(const RmsnormGatedFwd& a))
VX_DECLARE_KERNEL(void rmsnorm_gated_bwd(const RmsnormGatedBwd& a))
