#include "common/box.h"
#include "common/tensor.h"
#include "grouped_linear/kernels.h"

namespace vx {
namespace {

const int32_t* offsets_of(const Tensor& offsets, int64_t experts) {
  check_1d(offsets, "offsets", experts + 1);
  STD_TORCH_CHECK(offsets.scalar_type() == ScalarType::Int, "offsets: expected int32");
  return static_cast<const int32_t*>(data(offsets));
}

bool ascend(const int32_t* offsets, int64_t experts, int64_t rows) {
  bool good = offsets[0] == 0 && offsets[experts] <= rows;
  for (int64_t e = 0; e < experts; ++e) good &= offsets[e] <= offsets[e + 1];
  return good;
}

Operand rows_of(const Tensor& t, const char* name) { return {data(t), dtype_of(t, name), t.stride(0), 1}; }

void check_weight(const Tensor& weight, int64_t n, int64_t k) {
  STD_TORCH_CHECK(weight.dim() == 3 && weight.size(1) == n && weight.size(2) == k, "weight: expected (E, ", n, ", ", k,
                  ")");
  check_last_dim_contiguous(weight, "weight");
}

bool grouped_linear_fwd(Tensor x, Tensor weight, Tensor offsets, Tensor out) {
  const int64_t rows = x.size(0), k = x.size(1), n = out.size(1), experts = weight.size(0);
  check_2d(x, "x", rows, k);
  check_2d(out, "out", rows, n);
  check_weight(weight, n, k);
  const int32_t* p = offsets_of(offsets, experts);
  if (!ascend(p, experts, rows)) return false;
  VX_CALL(grouped_gemm, {rows, n, k, experts, p, rows_of(x, "x"),
                         {data(weight), dtype_of(weight, "weight"), 1, weight.stride(1)}, weight.stride(0),
                         mutable_data(out), dtype_of(out, "out"), out.stride(0)});
  return true;
}

bool grouped_linear_dx(Tensor dy, Tensor weight, Tensor offsets, Tensor dx) {
  const int64_t rows = dy.size(0), n = dy.size(1), k = dx.size(1), experts = weight.size(0);
  check_2d(dy, "dy", rows, n);
  check_2d(dx, "dx", rows, k);
  check_weight(weight, n, k);
  const int32_t* p = offsets_of(offsets, experts);
  if (!ascend(p, experts, rows)) return false;
  VX_CALL(grouped_gemm, {rows, k, n, experts, p, rows_of(dy, "dy"),
                         {data(weight), dtype_of(weight, "weight"), weight.stride(1), 1}, weight.stride(0),
                         mutable_data(dx), dtype_of(dx, "dx"), dx.stride(0)});
  return true;
}

bool grouped_linear_dweight(Tensor dy, Tensor x, Tensor offsets, Tensor dweight) {
  const int64_t rows = dy.size(0), n = dy.size(1), k = x.size(1), experts = dweight.size(0);
  check_2d(dy, "dy", rows, n);
  check_2d(x, "x", rows, k);
  check_weight(dweight, n, k);
  STD_TORCH_CHECK(dweight.is_contiguous(), "dweight: expected contiguous");
  const int32_t* p = offsets_of(offsets, experts);
  if (!ascend(p, experts, rows)) return false;
  VX_CALL(grouped_sums, {n, k, experts, p,
                         {data(dy), dtype_of(dy, "dy"), 1, dy.stride(0)}, rows_of(x, "x"),
                         mutable_data(dweight), dtype_of(dweight, "dweight")});
  return true;
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CPU, m) {
  m.impl("grouped_linear_fwd", VX_BOX(&vx::grouped_linear_fwd));
  m.impl("grouped_linear_dx", VX_BOX(&vx::grouped_linear_dx));
  m.impl("grouped_linear_dweight", VX_BOX(&vx::grouped_linear_dweight));
}
