#include "causal_conv/kernels.h"

#include "common/box.h"
#include "common/offsets.h"
#include "common/values.h"

namespace vx {
namespace {

CausalConv conv_args(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const Tensor& offsets,
                     bool silu) {
  STD_TORCH_CHECK(x.dim() == 2 && weight.dim() == 2, "x: expected (T, D); weight: (W, D)");
  const int64_t channels = x.size(1), width = weight.size(0);
  const Dtype dtype = dtype_of(x, "x");
  check_last_dim_contiguous(x, "x");
  STD_TORCH_CHECK(width >= 1 && width <= 8, "weight: expected 1 to 8 taps");
  check_contiguous(weight, "weight", width, channels, Dtype::f32);
  if (bias) check_1d(*bias, "bias", channels);
  return {dtype,
          channels,
          width,
          offsets.numel() - 1,
          data(x),
          x.stride(0),
          values<float>(weight, "weight"),
          values<float>(bias, "bias"),
          values<int32_t>(offsets, "cu_seqlens", 1),
          silu};
}

// Both forwards return false, with nothing written, where offsets, slots or lengths are out of range.
bool causal_conv_fwd(Tensor x, Tensor weight, std::optional<Tensor> bias, Tensor cu_seqlens, bool silu, Tensor y) {
  const CausalConv conv = conv_args(x, weight, bias, cu_seqlens, silu);
  check_contiguous(y, "y", x.size(0), conv.channels, conv.dtype);
  if (!offsets_valid(conv.offsets, conv.sequences + 1, x.size(0))) return false;
  VX_CALL(causal_conv_fwd, {conv, {}, mutable_data(y)});
  return true;
}

bool causal_conv_paged_fwd(Tensor x, Tensor weight, std::optional<Tensor> bias, Tensor taps, Tensor slots,
                           Tensor context_lens, Tensor cu_seqlens_q, bool silu, Tensor y) {
  const CausalConv conv = conv_args(x, weight, bias, cu_seqlens_q, silu);
  check_contiguous(y, "y", x.size(0), conv.channels, conv.dtype);
  STD_TORCH_CHECK(taps.dim() == 3 && taps.size(2) == conv.channels, "taps: expected (slots, ring, D)");
  const int64_t ring = taps.size(1);
  STD_TORCH_CHECK(ring >= conv.width && (ring & (ring - 1)) == 0, "taps: expected a ring of a power of two, >= W");
  STD_TORCH_CHECK(taps.size(0) == 0 || ((taps.stride(2) == 1 || conv.channels == 1) && taps.stride(1) == conv.channels),
                  "taps: expected contiguous slots");
  check_dtype(taps, "taps", conv.dtype);
  const int32_t *at = values<int32_t>(slots, "slots", conv.sequences),
                *lens = values<int32_t>(context_lens, "context_lens", conv.sequences);
  if (!offsets_valid(conv.offsets, conv.sequences + 1, x.size(0)) ||
      !slots_valid(at, lens, conv.offsets, conv.sequences, taps.size(0)))
    return false;
  VX_CALL(causal_conv_fwd, {conv, {mutable_data(taps), ring, taps.stride(0), at, lens}, mutable_data(y)});
  return true;
}

void causal_conv_bwd(Tensor dy, Tensor x, Tensor weight, std::optional<Tensor> bias, Tensor cu_seqlens, bool silu,
                     Tensor dpre, Tensor dx, Tensor dweight, std::optional<Tensor> dbias) {
  const CausalConv conv = conv_args(x, weight, bias, cu_seqlens, silu);
  const int64_t tokens = x.size(0);
  for (const Tensor* t : {&dy, &dx}) check_contiguous(*t, "dy, dx", tokens, conv.channels, conv.dtype);
  check_contiguous(dpre, "dpre", tokens, conv.channels, Dtype::f32);
  check_contiguous(dweight, "dweight", conv.width, conv.channels, Dtype::f32);
  if (dbias) check_1d(*dbias, "dbias", conv.channels);
  STD_TORCH_CHECK(offsets_valid(conv.offsets, conv.sequences + 1, tokens), "cu_seqlens: changed since the forward");
  VX_CALL(causal_conv_bwd, {conv, data(dy), mutable_values<float>(dpre, "dpre"), mutable_data(dx),
                            mutable_values<float>(dweight, "dweight"), mutable_values<float>(dbias, "dbias")});
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CPU, m) {
  m.impl("causal_conv_fwd", VX_BOX(&vx::causal_conv_fwd));
  m.impl("causal_conv_paged_fwd", VX_BOX(&vx::causal_conv_paged_fwd));
  m.impl("causal_conv_bwd", VX_BOX(&vx::causal_conv_bwd));
}
