#include "common/tensor.h"
#include "log_softmax/kernels.h"

namespace vx {
namespace {

void log_softmax_fwd(Tensor x, Tensor y, Tensor lse) {
  const int64_t rows = x.size(0), n = x.size(1);
  check_2d(x, "x", rows, n);
  check_2d(y, "y", rows, n);
  check_2d(lse, "lse", rows, 2);
  STD_TORCH_CHECK(n > 0 && y.is_contiguous() && lse.is_contiguous(), "y, lse: expected contiguous");
  VX_CALL(log_softmax_fwd, {dtype_of(x, "x"), dtype_of(y, "y"), rows, n, data(x), mutable_data(y),
                            static_cast<float*>(mutable_data(lse)), x.stride(0)});
}

void log_softmax_bwd(Tensor dy, Tensor x, Tensor lse, Tensor dx) {
  const int64_t rows = x.size(0), n = x.size(1);
  for (const Tensor& t : {dy, x, dx}) check_2d(t, "dy, x, dx", rows, n);
  check_2d(lse, "lse", rows, 2);
  STD_TORCH_CHECK(n > 0 && dy.is_contiguous() && dx.is_contiguous() && lse.is_contiguous(),
                  "dy, dx, lse: expected contiguous");
  VX_CALL(log_softmax_bwd, {dtype_of(x, "x"), dtype_of(dy, "dy"), rows, n, data(dy), data(x),
                            static_cast<const float*>(data(lse)), mutable_data(dx), x.stride(0)});
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CPU, m) {
  m.impl("log_softmax_fwd", TORCH_BOX(&vx::log_softmax_fwd));
  m.impl("log_softmax_bwd", TORCH_BOX(&vx::log_softmax_bwd));
}
