#include "common/box.h"
#include "common/values.h"
#include "mean/kernels.h"

namespace vx {
namespace {

void mean_fwd(Tensor x, double divisor, Tensor y) {
  const int64_t rows = x.size(0), n = x.size(1);
  const Dtype dtype = dtype_of(x, "x");
  check_2d(x, "x", rows, n);
  check_1d(y, "y", rows, dtype);
  VX_CALL(mean_fwd, {dtype, rows, n, data(x), mutable_data(y), x.stride(0), float(divisor)});
}

void mean_bwd(Tensor dy, double divisor, Tensor dx) {
  const int64_t rows = dy.numel();
  const Dtype dtype = dtype_of(dy, "dy");
  check_1d(dy, "dy", rows);
  check_1d(dx, "dx", rows, dtype);
  VX_CALL(mean_bwd, {dtype, rows, data(dy), mutable_data(dx), float(divisor)});
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CPU, m) {
  m.impl("mean_fwd", VX_BOX(&vx::mean_fwd));
  m.impl("mean_bwd", VX_BOX(&vx::mean_bwd));
}
