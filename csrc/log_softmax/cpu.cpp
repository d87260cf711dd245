#include "common/box.h"
#include "common/values.h"
#include "log_softmax/kernels.h"

namespace vx {
namespace {

void log_softmax_fwd(Tensor x, Tensor y, Tensor lse) {
  const int64_t rows = x.size(0), n = x.size(1);
  STD_TORCH_CHECK(n > 0, "x: expected columns");
  check_2d(x, "x", rows, n);
  check_contiguous(y, "y", rows, n, dtype_of(y, "y"));
  check_contiguous(lse, "lse", rows, 2, Dtype::f32);
  VX_CALL(log_softmax_fwd, {dtype_of(x, "x"), dtype_of(y, "y"), rows, n, data(x), mutable_data(y),
                            mutable_values<float>(lse, "lse"), x.stride(0)});
}

void log_softmax_bwd(Tensor dy, Tensor x, Tensor lse, Tensor dx) {
  const int64_t rows = x.size(0), n = x.size(1);
  const Dtype dtype = dtype_of(x, "x"), dy_dtype = dtype_of(dy, "dy");
  STD_TORCH_CHECK(n > 0, "x: expected columns");
  check_2d(x, "x", rows, n);
  check_contiguous(dy, "dy", rows, n, dy_dtype);
  check_contiguous(dx, "dx", rows, n, dtype);
  check_contiguous(lse, "lse", rows, 2, Dtype::f32);
  VX_CALL(log_softmax_bwd, {dtype, dy_dtype, rows, n, data(dy), data(x), values<float>(lse, "lse"), mutable_data(dx),
                            x.stride(0)});
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CPU, m) {
  m.impl("log_softmax_fwd", VX_BOX(&vx::log_softmax_fwd));
  m.impl("log_softmax_bwd", VX_BOX(&vx::log_softmax_bwd));
}
