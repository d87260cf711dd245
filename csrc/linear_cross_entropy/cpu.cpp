#include "common/box.h"
#include "common/values.h"
#include "linear_cross_entropy/kernels.h"

namespace vx {
namespace {

Head head(const Tensor& hidden, const Tensor& weight, const Tensor& target, const Tensor& temperature, double softcap) {
  const int64_t tokens = hidden.size(0), vocabulary = weight.size(0), width = hidden.size(1);
  check_2d(hidden, "hidden", tokens, width);
  const Dtype dtype = dtype_of(hidden, "hidden");
  check_2d(weight, "weight", vocabulary, width, dtype);
  check_1d(target, "target", tokens);
  const bool one = temperature.numel() == 1;
  return {dtype, tokens, vocabulary, width, data(hidden), data(weight), hidden.stride(0), weight.stride(0),
          values<int64_t>(target, "target"), values<float>(temperature, "temperature", one ? 1 : tokens), one,
          float(softcap)};
}

void linear_logprobs_fwd(Tensor hidden, Tensor weight, Tensor target, Tensor temperature, double softcap,
                         Tensor workspace, Tensor logprob, std::optional<Tensor> entropy, Tensor lse) {
  const Head h = head(hidden, weight, target, temperature, softcap);
  const int64_t piece = workspace.size(0);
  STD_TORCH_CHECK(piece > 0, "workspace: expected rows");
  VX_CALL(linear_logprobs_fwd,
          {h, piece, mutable_values<float>(workspace, "workspace", piece * (3 * ((h.vocabulary + 511) / 512) + 1)),
           mutable_values<float>(logprob, "logprob", h.tokens),
           entropy ? mutable_values<float>(*entropy, "entropy", h.tokens) : nullptr,
           mutable_values<float>(lse, "lse", 2 * h.tokens)});
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
    check_contiguous(*dweight, "dweight", h.vocabulary, h.width, h.dtype);
    STD_TORCH_CHECK(sums || h.dtype == Dtype::f32 || h.tokens <= piece_tokens, "sums: missing");
  }
  VX_CALL(linear_logprobs_bwd,
          {h, piece_tokens, piece_vocabulary, values<float>(dlogprob, "dlogprob", h.tokens),
           dentropy ? values<float>(*dentropy, "dentropy", h.tokens) : nullptr,
           dentropy ? values<float>(*entropy, "entropy", h.tokens) : nullptr, values<float>(lse, "lse", 2 * h.tokens),
           mutable_values<float>(workspace, "workspace", piece_tokens * piece_vocabulary),
           dhidden ? mutable_values<float>(*dhidden, "dhidden", h.tokens * h.width) : nullptr, mutable_data(dweight),
           sums ? mutable_values<float>(*sums, "sums", piece_vocabulary * h.width) : nullptr});
}

void softcap_fwd(Tensor x, double cap, Tensor y) {
  const int64_t rows = x.size(0), n = x.size(1);
  check_2d(x, "x", rows, n);
  VX_CALL(softcap, {rows, n, values<float>(x, "x"), nullptr, mutable_values<float>(y, "y", rows * n), x.stride(0), 0,
                    float(cap)});
}

void softcap_bwd(Tensor dy, Tensor x, double cap, Tensor dx) {
  const int64_t rows = x.size(0), n = x.size(1);
  check_2d(x, "x", rows, n);
  check_2d(dy, "dy", rows, n);
  VX_CALL(softcap, {rows, n, values<float>(x, "x"), values<float>(dy, "dy"),
                    mutable_values<float>(dx, "dx", rows * n), x.stride(0), dy.stride(0), float(cap)});
}

void token_sum(Tensor x, Tensor out) {
  const int64_t n = x.numel();
  const float* p = values<float>(x, "x", n);
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += p[i];  // order: tokens ascending
  *mutable_values<double>(out, "out", 1) = sum;
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CPU, m) {
  m.impl("linear_logprobs_fwd", VX_BOX(&vx::linear_logprobs_fwd));
  m.impl("linear_logprobs_bwd", VX_BOX(&vx::linear_logprobs_bwd));
  m.impl("softcap_fwd", VX_BOX(&vx::softcap_fwd));
  m.impl("softcap_bwd", VX_BOX(&vx::softcap_bwd));
  m.impl("token_sum", VX_BOX(&vx::token_sum));
}
