#include "common/box.h"
#include "common/values.h"
#include "rope/kernels.h"

namespace vx {
namespace {

RopeHeads heads_of(const Tensor& in, const Tensor& out, const char* name, int64_t tokens, int64_t dim) {
  STD_TORCH_CHECK(in.dim() == 3 && in.size(0) == tokens && in.size(2) == dim, name, ": expected (tokens, heads, dim)");
  check_last_dim_contiguous(in, name);
  STD_TORCH_CHECK(out.dim() == 3 && out.size(0) == tokens && out.size(1) == in.size(1) && out.size(2) == dim &&
                      out.is_contiguous() && out.scalar_type() == in.scalar_type(),
                  name, ": its output must be contiguous and alike");
  return {in.size(1), data(in), in.stride(0), in.stride(1), mutable_data(out)};
}

void rope(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved, bool transpose, Tensor q_out, Tensor k_out) {
  STD_TORCH_CHECK(q.dim() == 3 && cos.dim() == 2, "q, cos: expected 3 and 2 dimensions");
  const int64_t tokens = q.size(0), dim = q.size(2), rotary = cos.size(1);
  STD_TORCH_CHECK(rotary % 2 == 0 && rotary <= dim, "cos: expected an even last dimension of at most ", dim);
  check_2d(cos, "cos", tokens, rotary);
  check_2d(sin, "sin", tokens, rotary);
  const Dtype dtype = dtype_of(q, "q"), table = dtype_of(cos, "cos");
  STD_TORCH_CHECK(k.scalar_type() == q.scalar_type(), "k: expected q's dtype");
  STD_TORCH_CHECK(sin.scalar_type() == cos.scalar_type() && (table == dtype || table == Dtype::f32),
                  "cos, sin: expected q's dtype or float32");
  VX_CALL(rope, {dtype, table, tokens, dim, rotary, heads_of(q, q_out, "q", tokens, dim),
                 heads_of(k, k_out, "k", tokens, dim), data(cos), data(sin), cos.stride(0), sin.stride(0), interleaved,
                 transpose});
}

// Python has seen that no axis lies beyond those of the positions.
void rope_cos_sin(Tensor positions, std::optional<Tensor> axes, Tensor inv_freq, double scaling, Tensor cos,
                  Tensor sin) {
  STD_TORCH_CHECK(positions.dim() == 2 && positions.is_contiguous(), "positions: expected (axes, tokens), contiguous");
  const int64_t tokens = positions.size(1), frequencies = inv_freq.size(0);
  if (axes) check_1d(*axes, "axes", frequencies);
  check_1d(inv_freq, "inv_freq", frequencies);
  for (const Tensor& t : {cos, sin}) {
    check_2d(t, "cos, sin", tokens, 2 * frequencies);
    STD_TORCH_CHECK(t.is_contiguous() && t.scalar_type() == cos.scalar_type(), "cos, sin: expected contiguous, alike");
  }
  VX_CALL(rope_cos_sin, {dtype_of(cos, "cos"), tokens, frequencies, values<int64_t>(positions, "positions"),
                         axes ? values<int32_t>(*axes, "axes") : nullptr, values<float>(inv_freq, "inv_freq"), float(scaling), mutable_data(cos), mutable_data(sin)});
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CPU, m) {
  m.impl("rope", VX_BOX(&vx::rope));
  m.impl("rope_cos_sin", VX_BOX(&vx::rope_cos_sin));
}
