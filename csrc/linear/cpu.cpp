#include "common/box.h"
#include "common/tensor.h"
#include "linear/kernels.h"

namespace vx {
namespace {

// x (..., K) as rows: contiguous of any rank, or (R, K) with any row stride.
struct Rows {
  int64_t rows, n, stride;
};

Rows rows_of(const Tensor& t, const char* name) {
  const int64_t d = t.dim();
  STD_TORCH_CHECK(d >= 1, name, ": expected at least one dimension");
  const int64_t n = t.size(d - 1);
  if (d == 2) {
    check_last_dim_contiguous(t, name);
    return {t.size(0), n, t.stride(0)};
  }
  STD_TORCH_CHECK(t.is_contiguous(), name, ": expected contiguous");
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < d; ++i) rows *= t.size(i);
  return {rows, n, n};
}

void linear_fwd(Tensor x, Tensor weight, std::optional<Tensor> bias, Tensor out) {
  const Rows xr = rows_of(x, "x"), yr = rows_of(out, "out");
  check_2d(weight, "weight", yr.n, xr.n);
  STD_TORCH_CHECK(xr.rows == yr.rows, "out: expected ", xr.rows, " rows");
  if (bias) check_1d(*bias, "bias", yr.n);
  VX_CALL(gemm, {xr.rows, yr.n, xr.n,
                 {data(x), dtype_of(x, "x"), xr.stride, 1},
                 {data(weight), dtype_of(weight, "weight"), 1, weight.stride(0)},
                 mutable_data(out), dtype_of(out, "out"), yr.stride,
                 data(bias), bias ? dtype_of(*bias, "bias") : Dtype::f32});
}

void linear_dx(Tensor dy, Tensor weight, Tensor dx) {
  const Rows yr = rows_of(dy, "dy"), xr = rows_of(dx, "dx");
  check_2d(weight, "weight", yr.n, xr.n);
  STD_TORCH_CHECK(xr.rows == yr.rows, "dx: expected ", yr.rows, " rows");
  VX_CALL(gemm, {xr.rows, xr.n, yr.n,
                 {data(dy), dtype_of(dy, "dy"), yr.stride, 1},
                 {data(weight), dtype_of(weight, "weight"), weight.stride(0), 1},
                 mutable_data(dx), dtype_of(dx, "dx"), xr.stride});
}

void linear_dweight(Tensor dy, Tensor x, Tensor dweight) {
  const Rows yr = rows_of(dy, "dy"), xr = rows_of(x, "x");
  check_2d(dweight, "dweight", yr.n, xr.n);
  STD_TORCH_CHECK(xr.rows == yr.rows, "x: expected ", yr.rows, " rows");
  VX_CALL(gemm, {yr.n, xr.n, yr.rows,
                 {data(dy), dtype_of(dy, "dy"), 1, yr.stride},
                 {data(x), dtype_of(x, "x"), xr.stride, 1},
                 mutable_data(dweight), dtype_of(dweight, "dweight"), dweight.stride(0)});
}

// (B, M, K) @ (B, K, N) -> (B, M, N): any strides but for out's last dimension.
void bmm(Tensor a, Tensor b, Tensor out) {
  STD_TORCH_CHECK(a.dim() == 3 && b.dim() == 3 && out.dim() == 3, "bmm: expected three dimensions");
  const int64_t batch = out.size(0), m = out.size(1), n = out.size(2), k = a.size(2);
  STD_TORCH_CHECK(a.size(0) == batch && a.size(1) == m && b.size(0) == batch && b.size(1) == k && b.size(2) == n,
                  "bmm: shapes do not fit");
  STD_TORCH_CHECK(n <= 1 || out.stride(2) == 1, "bmm: out: expected its last dimension contiguous");
  const Gemm first{m, n, k,
                   {data(a), dtype_of(a, "a"), a.stride(1), a.stride(2)},
                   {data(b), dtype_of(b, "b"), b.stride(1), b.stride(2)},
                   mutable_data(out), dtype_of(out, "out"), out.stride(1)};
  VX_CALL(gemm_batch, {first, batch, a.stride(0), b.stride(0), out.stride(0)});
}

void linear_dbias(Tensor dy, Tensor dbias) {
  const Rows yr = rows_of(dy, "dy");
  check_1d(dbias, "dbias", yr.n);
  VX_CALL(column_sums, {yr.rows, yr.n, data(dy), dtype_of(dy, "dy"), yr.stride, mutable_data(dbias),
                        dtype_of(dbias, "dbias")});
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CPU, m) {
  m.impl("linear_fwd", VX_BOX(&vx::linear_fwd));
  m.impl("linear_dx", VX_BOX(&vx::linear_dx));
  m.impl("linear_dweight", VX_BOX(&vx::linear_dweight));
  m.impl("linear_dbias", VX_BOX(&vx::linear_dbias));
  m.impl("bmm", VX_BOX(&vx::bmm));
}
