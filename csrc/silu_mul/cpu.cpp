#include "common/box.h"
#include "common/values.h"
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

// gate: (rows, n), or (rows, 1) for one gate a row.
bool check_gate(const Tensor& gate, int64_t rows, int64_t n, Dtype dtype) {
  STD_TORCH_CHECK(gate.dim() == 2 && (gate.size(1) == n || gate.size(1) == 1), "gate: expected (R, N) or (R, 1)");
  check_2d(gate, "gate", rows, gate.size(1), dtype);
  return gate.size(1) == n && n != 1;
}

void sigmoid_mul_fwd(Tensor x, Tensor gate, Tensor y) {
  STD_TORCH_CHECK(x.dim() == 2, "x: expected (R, N)");
  const int64_t rows = x.size(0), n = x.size(1);
  const Dtype dtype = dtype_of(x, "x");
  check_2d(x, "x", rows, n);
  check_contiguous(y, "y", rows, n, dtype);
  const bool each = check_gate(gate, rows, n, dtype);
  VX_CALL(sigmoid_mul_fwd, {dtype, rows, n, each, data(x), data(gate), x.stride(0), gate.stride(0), mutable_data(y)});
}

void sigmoid_mul_bwd(Tensor dy, Tensor x, Tensor gate, Tensor dx, Tensor dgate) {
  STD_TORCH_CHECK(x.dim() == 2, "x: expected (R, N)");
  const int64_t rows = x.size(0), n = x.size(1);
  const Dtype dtype = dtype_of(x, "x");
  check_2d(x, "x", rows, n);
  check_contiguous(dy, "dy", rows, n, dtype);
  check_contiguous(dx, "dx", rows, n, dtype);
  const bool each = check_gate(gate, rows, n, dtype);
  check_contiguous(dgate, "dgate", rows, gate.size(1), dtype);
  VX_CALL(sigmoid_mul_bwd, {dtype, rows, n, each, data(dy), data(x), data(gate), x.stride(0), gate.stride(0),
                            mutable_data(dx), mutable_data(dgate)});
}

void gelu_fwd(Tensor x, bool tanh, Tensor y) {
  STD_TORCH_CHECK(x.dim() == 2, "x: expected (R, N)");
  const int64_t rows = x.size(0), n = x.size(1);
  const Dtype dtype = dtype_of(x, "x");
  check_2d(x, "x", rows, n);
  check_contiguous(y, "y", rows, n, dtype);
  VX_CALL(gelu_fwd, {dtype, rows, n, x.stride(0), data(x), tanh, mutable_data(y)});
}

void gelu_bwd(Tensor dy, Tensor x, bool tanh, Tensor dx) {
  STD_TORCH_CHECK(x.dim() == 2, "x: expected (R, N)");
  const int64_t rows = x.size(0), n = x.size(1);
  const Dtype dtype = dtype_of(x, "x");
  check_2d(x, "x", rows, n);
  check_contiguous(dy, "dy", rows, n, dtype);
  check_contiguous(dx, "dx", rows, n, dtype);
  VX_CALL(gelu_bwd, {dtype, rows, n, x.stride(0), data(dy), data(x), tanh, mutable_data(dx)});
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CPU, m) {
  m.impl("silu_mul_fwd", VX_BOX(&vx::silu_mul_fwd));
  m.impl("silu_mul_bwd", VX_BOX(&vx::silu_mul_bwd));
  m.impl("sigmoid_mul_fwd", VX_BOX(&vx::sigmoid_mul_fwd));
  m.impl("sigmoid_mul_bwd", VX_BOX(&vx::sigmoid_mul_bwd));
  m.impl("gelu_fwd", VX_BOX(&vx::gelu_fwd));
  m.impl("gelu_bwd", VX_BOX(&vx::gelu_bwd));
}
