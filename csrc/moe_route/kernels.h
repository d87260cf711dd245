#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"

namespace vx {

struct MoeRoute {
  Dtype dtype;
  int64_t rows, experts, top_k;
  const void* logits;  // (rows, experts)
  int64_t logits_stride;
  bool sigmoid, normalize;
  int64_t groups, top_groups;  // 0: no groups
  const float* bias;           // (experts,) or null
  float scale;
};

struct MoeRouteOut {
  float* weights;  // (rows, top_k)
  int32_t* ids;    // (rows, top_k)
};

struct MoeRouteGrad {
  const float *dweights, *weights;  // (rows, top_k)
  const int32_t* ids;
  void* dlogits;                    // (rows, experts) contiguous, in the logits' type
};

}  // namespace vx

VX_DECLARE_KERNEL(void moe_route_fwd(const MoeRoute& a, const MoeRouteOut& out))
VX_DECLARE_KERNEL(void moe_route_bwd(const MoeRoute& a, const MoeRouteGrad& grad))
