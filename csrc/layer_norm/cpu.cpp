#include "common/box.h"
#include "common/values.h"
#include "layer_norm/kernels.h"

namespace vx {
namespace {

void check_parameter(const std::optional<Tensor>& t, const char* name, int64_t n, Dtype dtype) {
  if (t) check_1d(*t, name, n, dtype);
}

void layer_norm_fwd(Tensor x, std::optional<Tensor> weight, std::optional<Tensor> bias, std::optional<Tensor> residual,
                    double eps, Tensor y, std::optional<Tensor> new_residual, Tensor mean, Tensor rstd) {
  STD_TORCH_CHECK(x.dim() == 2, "x: expected (R, N)");
  const int64_t rows = x.size(0), n = x.size(1);
  const Dtype dtype = dtype_of(x, "x");
  check_2d(x, "x", rows, n);
  check_contiguous(y, "y", rows, n, dtype);
  check_parameter(weight, "weight", n, dtype);
  check_parameter(bias, "bias", n, dtype);
  check_1d(mean, "mean", rows, Dtype::f32);
  check_1d(rstd, "rstd", rows, Dtype::f32);
  check_residual(residual, new_residual, rows, n, dtype);
  VX_CALL(layer_norm_fwd,
          {dtype, rows, n, data(x), data(residual), data(weight), data(bias), mutable_data(y),
           mutable_data(new_residual), mutable_values<float>(mean, "mean"), mutable_values<float>(rstd, "rstd"),
           x.stride(0), residual ? residual->stride(0) : 0, float(eps)});
}

void layer_norm_bwd(Tensor dy, std::optional<Tensor> dnew_residual, Tensor x, std::optional<Tensor> weight, Tensor mean,
                    Tensor rstd, Tensor dx, std::optional<Tensor> dweight, std::optional<Tensor> dbias) {
  STD_TORCH_CHECK(x.dim() == 2, "x: expected (R, N)");
  const int64_t rows = x.size(0), n = x.size(1);
  const Dtype dtype = dtype_of(x, "x");
  for (const Tensor* t : {&dy, &x, &dx}) check_contiguous(*t, "dy, x, dx", rows, n, dtype);
  if (dnew_residual) check_contiguous(*dnew_residual, "dnew_residual", rows, n, dtype);
  check_parameter(weight, "weight", n, dtype);
  check_parameter(dweight, "dweight", n, dtype);
  check_parameter(dbias, "dbias", n, dtype);
  check_1d(mean, "mean", rows, Dtype::f32);
  check_1d(rstd, "rstd", rows, Dtype::f32);
  VX_CALL(layer_norm_bwd, {dtype, rows, n, data(dy), data(dnew_residual), data(x), data(weight),
                           values<float>(mean, "mean"), values<float>(rstd, "rstd"), mutable_data(dx),
                           mutable_data(dweight), mutable_data(dbias)});
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CPU, m) {
  m.impl("layer_norm_fwd", VX_BOX(&vx::layer_norm_fwd));
  m.impl("layer_norm_bwd", VX_BOX(&vx::layer_norm_bwd));
}
