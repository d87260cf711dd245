#include "common/box.h"
#include "common/values.h"
#include "rmsnorm/kernels.h"

namespace vx {
namespace {

void rmsnorm_fwd(Tensor x, Tensor weight, std::optional<Tensor> residual, double eps, bool gemma, Tensor y,
                 std::optional<Tensor> new_residual, Tensor rstd) {
  const int64_t rows = x.size(0), n = x.size(1);
  const Dtype dtype = dtype_of(x, "x");
  check_2d(x, "x", rows, n);
  check_contiguous(y, "y", rows, n, dtype);
  check_1d(weight, "weight", n, dtype);
  check_1d(rstd, "rstd", rows, Dtype::f32);
  check_residual(residual, new_residual, rows, n, dtype);
  VX_CALL(rmsnorm_fwd, {dtype, rows, n, data(x), data(residual), data(weight), mutable_data(y),
                        mutable_data(new_residual), mutable_values<float>(rstd, "rstd"), x.stride(0),
                        residual ? residual->stride(0) : 0, float(eps), gemma});
}

void rmsnorm_bwd(Tensor dy, std::optional<Tensor> dnew_residual, Tensor x, Tensor weight, Tensor rstd, bool gemma,
                 Tensor dx, Tensor dweight) {
  const int64_t rows = x.size(0), n = x.size(1);
  const Dtype dtype = dtype_of(x, "x");
  for (const Tensor& t : {dy, x, dx}) check_contiguous(t, "dy, x, dx", rows, n, dtype);
  if (dnew_residual) check_contiguous(*dnew_residual, "dnew_residual", rows, n, dtype);
  check_1d(weight, "weight", n, dtype);
  check_1d(dweight, "dweight", n, dtype);
  check_1d(rstd, "rstd", rows, Dtype::f32);
  VX_CALL(rmsnorm_bwd, {dtype, rows, n, data(dy), data(dnew_residual), data(x), data(weight),
                        values<float>(rstd, "rstd"), mutable_data(dx), mutable_data(dweight), gemma});
}

void rmsnorm_gated_fwd(Tensor x, Tensor gate, Tensor weight, double eps, Tensor y, Tensor rstd) {
  STD_TORCH_CHECK(x.dim() == 2, "x: expected (R, N)");
  const int64_t rows = x.size(0), n = x.size(1);
  const Dtype dtype = dtype_of(x, "x");
  check_2d(x, "x", rows, n);
  check_2d(gate, "gate", rows, n, dtype);
  check_contiguous(y, "y", rows, n, dtype);
  check_1d(weight, "weight", n, dtype);
  check_1d(rstd, "rstd", rows, Dtype::f32);
  VX_CALL(rmsnorm_gated_fwd, {dtype, rows, n, data(x), data(gate), x.stride(0), gate.stride(0), data(weight),
                              float(eps), mutable_data(y), mutable_values<float>(rstd, "rstd")});
}

void rmsnorm_gated_bwd(Tensor dy, Tensor x, Tensor gate, Tensor weight, Tensor rstd, Tensor dx, Tensor dgate,
                       Tensor dweight) {
  STD_TORCH_CHECK(x.dim() == 2, "x: expected (R, N)");
  const int64_t rows = x.size(0), n = x.size(1);
  const Dtype dtype = dtype_of(x, "x");
  for (const Tensor* t : {&dy, &x, &gate, &dx, &dgate})
    check_contiguous(*t, "dy, x, gate, dx, dgate", rows, n, dtype);
  check_1d(weight, "weight", n, dtype);
  check_1d(dweight, "dweight", n, dtype);
  check_1d(rstd, "rstd", rows, Dtype::f32);
  VX_CALL(rmsnorm_gated_bwd, {dtype, rows, n, data(dy), data(x), data(gate), data(weight),
                              values<float>(rstd, "rstd"), mutable_data(dx), mutable_data(dgate),
                              mutable_data(dweight)});
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CPU, m) {
  m.impl("rmsnorm_fwd", VX_BOX(&vx::rmsnorm_fwd));
  m.impl("rmsnorm_bwd", VX_BOX(&vx::rmsnorm_bwd));
  m.impl("rmsnorm_gated_fwd", VX_BOX(&vx::rmsnorm_gated_fwd));
  m.impl("rmsnorm_gated_bwd", VX_BOX(&vx::rmsnorm_gated_bwd));
}
