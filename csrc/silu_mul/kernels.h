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

}  // namespace vx

VX_DECLARE_KERNEL(void silu_mul_fwd(const SiluMulFwd& a))
VX_DECLARE_KERNEL(void silu_mul_bwd(const SiluMulBwd& a))
