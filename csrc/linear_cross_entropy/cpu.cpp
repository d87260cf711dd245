#include "common/tensor.h"
#include "linear_cross_entropy/kernels.h"

namespace vx {
namespace {

const float* floats(const Tensor& t, const char* name, int64_t size) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.is_contiguous() && t.numel() >= size, name,
                  ": expected at least ", size, " contiguous float32 values");
  return static_cast<const float*>(data(t));
}
float* mutable_floats(const Tensor& t, const char* name, int64_t size) {
  floats(t, name, size);
  return static_cast<float*>(mutable_data(t));
}

Head head(const Tensor& hidden, const Tensor& weight, const Tensor& target, const Tensor& temperature, double softcap) {
  const int64_t tokens = hidden.size(0), vocabulary = weight.size(0), width = hidden.size(1);
  check_2d(hidden, "hidden", tokens, width);
  check_2d(weight, "weight", vocabulary, width);
  check_1d(target, "target", tokens);
  const Dtype dtype = dtype_of(hidden, "hidden");
  STD_TORCH_CHECK(dtype_of(weight, "weight") == dtype, "weight: expected hidden's dtype");
  STD_TORCH_CHECK(target.scalar_type() == ScalarType::Long, "target: expected int64");
  const bool one = temperature.numel() == 1;
  return {dtype, tokens, vocabulary, width, data(hidden), data(weight), hidden.stride(0), weight.stride(0),
          static_cast<const int64_t*>(data(target)), floats(temperature, "temperature", one ? 1 : tokens), one,
          float(softcap)};
}

void linear_logprobs_fwd(Tensor hidden, Tensor weight, Tensor target, Tensor temperature, double softcap,
                         Tensor workspace, Tensor logprob, std::optional<Tensor> entropy, Tensor lse) {
  const Head h = head(hidden, weight, target, temperature, softcap);
  const int64_t piece = workspace.size(0);
  STD_TORCH_CHECK(piece > 0, "workspace: expected rows");
  VX_CALL(linear_logprobs_fwd,
          {h, piece, mutable_floats(workspace, "workspace", piece * (3 * ((h.vocabulary + 511) / 512) + 1)),
           mutable_floats(logprob, "logprob", h.tokens),
           entropy ? mutable_floats(*entropy, "entropy", h.tokens) : nullptr,
           mutable_floats(lse, "lse", 2 * h.tokens)});
}

void linear_logprobs_bwd(Tensor dlogprob, std::optional<Tensor> dentropy, Tensor hidden, Tensor weight, Tensor target,
                         Tensor temperature, double softcap, std::optional<Tensor> entropy, Tensor lse,
                         Tensor workspace, std::optional<Tensor> sums, std::optional<Tensor> dhidden,
                         std::optional<Tensor> dweight) {
  const Head h = head(hidden, weight, target, temperature, softcap);
  const int64_t piece_tokens = workspace.size(0), piece_vocabulary = workspace.size(1);
  STD_TORCH_CHECK(piece_tokens > 0 && piece_vocabulary > 0, "workspace: expected rows and columns");
  STD_TORCH_CHECK(!dentropy || entropy, "entropy: missing");
  if (dweight) {
    check_2d(*dweight, "dweight", h.vocabulary, h.width);
    STD_TORCH_CHECK(dweight->is_contiguous() && dtype_of(*dweight, "dweight") == h.dtype, "dweight: unexpected layout");
    STD_TORCH_CHECK(sums || h.dtype == Dtype::f32 || h.tokens <= piece_tokens, "sums: missing");
  }
  VX_CALL(linear_logprobs_bwd,
          {h, piece_tokens, piece_vocabulary, floats(dlogprob, "dlogprob", h.tokens),
           dentropy ? floats(*dentropy, "dentropy", h.tokens) : nullptr,
           dentropy ? floats(*entropy, "entropy", h.tokens) : nullptr, floats(lse, "lse", 2 * h.tokens),
           mutable_floats(workspace, "workspace", piece_tokens * piece_vocabulary),
           dhidden ? mutable_floats(*dhidden, "dhidden", h.tokens * h.width) : nullptr, mutable_data(dweight),
           sums ? mutable_floats(*sums, "sums", piece_vocabulary * h.width) : nullptr});
}

void softcap_fwd(Tensor x, double cap, Tensor y) {
  const int64_t rows = x.size(0), n = x.size(1);
  check_2d(x, "x", rows, n);
  VX_CALL(softcap, {rows, n, static_cast<const float*>(data(x)), nullptr, mutable_floats(y, "y", rows * n), x.stride(0),
                    0, float(cap)});
}

void softcap_bwd(Tensor dy, Tensor x, double cap, Tensor dx) {
  const int64_t rows = x.size(0), n = x.size(1);
  check_2d(x, "x", rows, n);
  check_2d(dy, "dy", rows, n);
  VX_CALL(softcap, {rows, n, static_cast<const float*>(data(x)), static_cast<const float*>(data(dy)),
                    mutable_floats(dx, "dx", rows * n), x.stride(0), dy.stride(0), float(cap)});
}

void token_sum(Tensor x, Tensor out) {
  const int64_t n = x.numel();
  const float* values = floats(x, "x", n);
  STD_TORCH_CHECK(out.scalar_type() == ScalarType::Double && out.numel() == 1, "out: expected one float64");
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += values[i];  // order: tokens ascending
  *static_cast<double*>(mutable_data(out)) = sum;
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CPU, m) {
  m.impl("linear_logprobs_fwd", TORCH_BOX(&vx::linear_logprobs_fwd));
  m.impl("linear_logprobs_bwd", TORCH_BOX(&vx::linear_logprobs_bwd));
  m.impl("softcap_fwd", TORCH_BOX(&vx::softcap_fwd));
  m.impl("softcap_bwd", TORCH_BOX(&vx::softcap_bwd));
  m.impl("token_sum", TORCH_BOX(&vx::token_sum));
}
