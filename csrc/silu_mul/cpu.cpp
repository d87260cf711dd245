#include "common/box.h"
#include "common/tensor.h"
#include "silu_mul/kernels.h"

namespace vx {
namespace {

void silu_mul_fwd(Tensor gate, Tensor up, bool gelu, Tensor y) {
  const int64_t rows = gate.size(0), n = gate.size(1);
  check_2d(gate, "gate", rows, n);
  check_2d(up, "up", rows, n);
  check_2d(y, "y", rows, n);
  STD_TORCH_CHECK(y.is_contiguous(), "y: expected contiguous");
  const Dtype dtype = dtype_of(gate, "gate");
  STD_TORCH_CHECK(dtype_of(up, "up") == dtype && dtype_of(y, "y") == dtype, "up, y: expected gate's dtype");
  VX_CALL(silu_mul_fwd, {dtype, rows, n, data(gate), data(up), gate.stride(0), up.stride(0), gelu, mutable_data(y)});
}

void silu_mul_bwd(Tensor dy, Tensor gate, Tensor up, bool gelu, Tensor dgate, Tensor dup) {
  const int64_t rows = gate.size(0), n = gate.size(1);
  const Dtype dtype = dtype_of(gate, "gate");
  for (const Tensor& t : {dy, gate, up, dgate, dup}) {
    check_2d(t, "dy, gate, up, dgate, dup", rows, n);
    STD_TORCH_CHECK(dtype_of(t, "dy, up, dgate, dup") == dtype, "dy, up, dgate, dup: expected gate's dtype");
  }
  VX_CALL(silu_mul_bwd, {dtype, rows, n, data(dy), data(gate), data(up), dy.stride(0), gate.stride(0), up.stride(0), gelu,
                         mutable_data(dgate), mutable_data(dup), dgate.stride(0), dup.stride(0)});
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CPU, m) {
  m.impl("silu_mul_fwd", VX_BOX(&vx::silu_mul_fwd));
  m.impl("silu_mul_bwd", VX_BOX(&vx::silu_mul_bwd));
}
