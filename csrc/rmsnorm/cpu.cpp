#include "common/tensor.h"
#include "rmsnorm/kernels.h"

namespace vx {
namespace {

void rmsnorm_fwd(Tensor x, Tensor weight, std::optional<Tensor> residual, double eps, bool gemma, Tensor y,
                 std::optional<Tensor> new_residual, Tensor rstd) {
  const int64_t rows = x.size(0), n = x.size(1);
  check_2d(x, "x", rows, n);
  check_2d(y, "y", rows, n);
  check_1d(weight, "weight", n);
  check_1d(rstd, "rstd", rows);
  if (residual) {
    check_2d(*residual, "residual", rows, n);
    STD_TORCH_CHECK(new_residual, "residual: new_residual is missing");
    check_2d(*new_residual, "new_residual", rows, n);
  }
  VX_CALL(rmsnorm_fwd, {dtype_of(x, "x"), rows, n, data(x), data(residual), data(weight), mutable_data(y),
                        mutable_data(new_residual), static_cast<float*>(mutable_data(rstd)), x.stride(0),
                        residual ? residual->stride(0) : 0, float(eps), gemma});
}

void rmsnorm_bwd(Tensor dy, std::optional<Tensor> dnew_residual, Tensor x, Tensor weight, Tensor rstd, bool gemma,
                 Tensor dx, Tensor dweight) {
  const int64_t rows = x.size(0), n = x.size(1);
  for (const Tensor& t : {dy, x, dx}) {
    check_2d(t, "dy, x, dx", rows, n);
    STD_TORCH_CHECK(t.is_contiguous(), "dy, x, dx: expected contiguous");
  }
  if (dnew_residual) STD_TORCH_CHECK(dnew_residual->is_contiguous(), "dnew_residual: expected contiguous");
  check_1d(weight, "weight", n);
  check_1d(dweight, "dweight", n);
  check_1d(rstd, "rstd", rows);
  VX_CALL(rmsnorm_bwd, {dtype_of(x, "x"), rows, n, data(dy), data(dnew_residual), data(x), data(weight),
                        static_cast<const float*>(data(rstd)), mutable_data(dx), mutable_data(dweight), gemma});
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CPU, m) {
  m.impl("rmsnorm_fwd", TORCH_BOX(&vx::rmsnorm_fwd));
  m.impl("rmsnorm_bwd", TORCH_BOX(&vx::rmsnorm_bwd));
}
