#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"

namespace vx {

struct SiluMulFwd {
  Dtype dtype;
  int64_t rows, n;
  const void *gate, *up;  // (rows, n), row strides below
  int64_t gate_stride, up_stride;
  bool gelu;              // the tanh form of gelu in silu's place
  void* y;                // (rows, n) contiguous
};

struct SiluMulBwd {
  Dtype dtype;
  int64_t rows, n;
  const void *dy, *gate, *up;  // (rows, n), row strides below
  int64_t dy_stride, gate_stride, up_stride;
  bool gelu;
  void *dgate, *dup;           // (rows, n), row strides below
  int64_t dgate_stride, dup_stride;
};

struct SigmoidMulFwd {
  Dtype dtype;
  int64_t rows, n;
  bool each;                  // a gate of its own for each element, else one for the row
  const void *x, *gate;       // (rows, n) and (rows, n | 1), row strides below
  int64_t x_stride, gate_stride;
  void* y;                    // (rows, n) contiguous
};

struct SigmoidMulBwd {
  Dtype dtype;
  int64_t rows, n;
  bool each;
  const void *dy, *x, *gate;  // row strides below; dy contiguous
  int64_t x_stride, gate_stride;
  void *dx, *dgate;           // (rows, n), (rows, n | 1) contiguous
};

struct GeluFwd {
  Dtype dtype;
  int64_t rows, n, x_stride;
  const void* x;              // (rows, n)
  bool tanh;                  // its tanh form, else erf's
  void* y;                    // (rows, n) contiguous
};

struct GeluBwd {
  Dtype dtype;
  int64_t rows, n, x_stride;
  const void *dy, *x;         // dy contiguous
  bool tanh;
  void* dx;                   // (rows, n) contiguous
};

}  // namespace vx

VX_DECLARE_KERNEL(void silu_mul_fwd(const SiluMulFwd& a))
VX_DECLARE_KERNEL(void silu_mul_bwd(const SiluMulBwd& a))
VX_DECLARE_KERNEL(void sigmoid_mul_fwd(const SigmoidMulFwd& a))
VX_DECLARE_KERNEL(void sigmoid_mul_bwd(const SigmoidMulBwd& a))
VX_DECLARE_KERNEL(void gelu_fwd(const GeluFwd& a))
VX_DECLARE_KERNEL(void gelu_bwd(const GeluBwd& a))
