#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"

namespace vx {

struct LogSoftmaxFwd {
  Dtype dtype, out_dtype;  // of x, of y
  int64_t rows, n;
  const void* x;           // (rows, n), row stride x_stride elements
  void* y;                 // (rows, n) contiguous
  float* lse;              // (rows, 2): the maximum, and the log of the sum relative to it
  int64_t x_stride;
};

struct LogSoftmaxBwd {
  Dtype dtype, out_dtype;  // of x and dx, of dy
  int64_t rows, n;
  const void* dy;          // (rows, n) contiguous
  const void* x;           // (rows, n), row stride x_stride elements
  const float* lse;
  void* dx;                // (rows, n) contiguous
  int64_t x_stride;
};

}  // namespace vx

VX_DECLARE_KERNEL(void log_softmax_fwd(const LogSoftmaxFwd& a))
VX_DECLARE_KERNEL(void log_softmax_bwd(const LogSoftmaxBwd& a))
