#include "common/box.h"
#include "common/values.h"
#include "moe_route/kernels.h"

namespace vx {
namespace {

MoeRoute route_of(const Tensor& logits, int64_t top_k, bool sigmoid, bool normalize, int64_t groups, int64_t top_groups,
                  const std::optional<Tensor>& bias, double scale) {
  const int64_t rows = logits.size(0), experts = logits.size(1);
  check_2d(logits, "logits", rows, experts);
  STD_TORCH_CHECK(top_k >= 1 && top_k <= experts, "top_k: expected 1 to ", experts);
  STD_TORCH_CHECK(!groups || (experts % groups == 0 && experts / groups >= 2 && top_groups >= 1 &&
                              top_groups <= groups && top_groups * (experts / groups) >= top_k),
                  "groups: expected ", experts, " experts in even groups, enough of them chosen");
  if (bias) check_1d(*bias, "bias", experts);
  return {dtype_of(logits, "logits"), rows, experts, top_k, data(logits), logits.stride(0), sigmoid, normalize, groups,
          top_groups, values<float>(bias, "bias"), float(scale)};
}

void check_slots(const Tensor& t, const char* name, const MoeRoute& a) {
  check_2d(t, name, a.rows, a.top_k);
  STD_TORCH_CHECK(t.is_contiguous(), name, ": expected contiguous");
}

void moe_route_fwd(Tensor logits, int64_t top_k, bool sigmoid, bool normalize, int64_t groups, int64_t top_groups,
                   std::optional<Tensor> bias, double scale, Tensor weights, Tensor ids) {
  const MoeRoute a = route_of(logits, top_k, sigmoid, normalize, groups, top_groups, bias, scale);
  check_slots(weights, "weights", a);
  check_slots(ids, "ids", a);
  VX_CALL(moe_route_fwd, a, {mutable_values<float>(weights, "weights"), mutable_values<int32_t>(ids, "ids")});
}

void moe_route_bwd(Tensor dweights, Tensor logits, Tensor weights, Tensor ids, bool sigmoid, bool normalize, double scale,
                   Tensor dlogits) {
  const MoeRoute a = route_of(logits, ids.size(1), sigmoid, normalize, 0, 0, std::nullopt, scale);
  check_slots(dweights, "dweights", a);
  check_slots(weights, "weights", a);
  check_slots(ids, "ids", a);
  check_contiguous(dlogits, "dlogits", a.rows, a.experts, a.dtype);
  const int32_t* p = values<int32_t>(ids, "ids");
  for (int64_t i = 0; i < a.rows * a.top_k; ++i)
    STD_TORCH_CHECK(p[i] >= 0 && p[i] < a.experts, "ids: expected 0 to ", a.experts - 1);
  VX_CALL(moe_route_bwd, a, {values<float>(dweights, "dweights"), values<float>(weights, "weights"), p,
                             mutable_data(dlogits)});
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CPU, m) {
  m.impl("moe_route_fwd", VX_BOX(&vx::moe_route_fwd));
  m.impl("moe_route_bwd", VX_BOX(&vx::moe_route_bwd));
}
