// The gated activation's arithmetic, shared with the rooms that compute it on the way. Included by cpu_kernels.cpp only.
#pragma once
#include "common/vec.h"

namespace vx::VEXACT_ISA {

constexpr float kGeluSlope = 1.5957691216f;  // 2 sqrt(2 / pi): tanh(u / 2) = 2 sigmoid(u) - 1
constexpr float kGeluCubic = 0.044715f;

struct Gate {
  F16 s, rest;  // sigmoid(z) and 1 - sigmoid(z), neither by cancellation
};

// order: elementwise; the sums of two terms below are fused where they say fma.
// Both activations are g * sigmoid(z): silu with z = g, gelu_tanh with z = kGeluSlope * (g + kGeluCubic * g^3).
VX_INLINE F16 gate_argument(F16 g, bool gelu) {
  if (!gelu) return g;
  return (g * set1(kGeluSlope)) * fma(g * g, set1(kGeluCubic), set1(1.0f));
}

VX_INLINE Gate gate_of(F16 z) {
  const F16 q = exp(neg(abs(z))), large = set1(1.0f) / (set1(1.0f) + q), small = q * large;
  const Mask positive = z > zero();
  return {select(positive, large, small), select(positive, small, large)};
}

// d(g sigmoid(z)) / dg. Beyond 1e4 the slope is exactly 0 or 1; the bound keeps infinity times zero out of it.
VX_INLINE F16 gate_slope(F16 g, Gate at, bool gelu) {
  const F16 c = max(min(g, set1(1e4f)), set1(-1e4f));
  F16 dz = c;  // c * dz/dg
  if (gelu) dz = (c * set1(kGeluSlope)) * fma(c * c, set1(3 * kGeluCubic), set1(1.0f));
  return fma(at.s * at.rest, dz, at.s);
}

}  // namespace vx::VEXACT_ISA
