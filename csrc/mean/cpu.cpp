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

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CPU, m) { m.impl("mean_fwd", TORCH_BOX(&vx::mean_fwd)); }
