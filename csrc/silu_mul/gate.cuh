// The gated activation's arithmetic on a GPU, shared with the rooms that compute it on the way: the bits of gate.h and
// of the Triton kernels, operation for operation.
#pragma once
#include "common/math.cuh"

namespace vx {

// 1 / x, rounded correctly, of an x from 1 to 2, or NaN: all 2^23 values were compared with division.
__device__ __forceinline__ float reciprocal_of_one_to_two(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return fmaf(y, fmaf(-x, y, 1.0f), y);
}

struct DeviceGate {
  float s, rest;  // sigmoid(z) and 1 - sigmoid(z), neither by cancellation
};

// Both activations are g * sigmoid(z): silu with z = g, gelu_tanh with z = 2 sqrt(2 / pi) (g + 0.044715 g^3).
template <bool Gelu>
__device__ __forceinline__ DeviceGate gate_of(float g) {
  const float z = Gelu ? (g * 1.5957691216f) * fmaf(g * g, 0.044715f, 1.0f) : g;
  const float q = exp_of_negative(-fabsf(z)), large = reciprocal_of_one_to_two(1.0f + q), small = q * large;
  return z > 0.0f ? DeviceGate{large, small} : DeviceGate{small, large};
}

// The activation's value, not yet rounded: (g sigmoid(z)) u.
template <bool Gelu>
__device__ __forceinline__ float gate_mul(float g, float u) {
  return (g * gate_of<Gelu>(g).s) * u;
}

// The same of N pairs, one operation of all of them after the other.
template <bool Gelu, int N>
__device__ __forceinline__ void gate_mul_all(const float (&g)[N], const float (&u)[N], float (&y)[N]) {
  float z[N], q[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    z[i] = Gelu ? (g[i] * 1.5957691216f) * fmaf(g[i] * g[i], 0.044715f, 1.0f) : g[i];
    q[i] = -fabsf(z[i]);
  }
  exp_of_negatives(q);
  float large[N];
#pragma unroll
  for (int i = 0; i < N; ++i) large[i] = reciprocal_of_one_to_two(1.0f + q[i]);
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] = (g[i] * (z[i] > 0.0f ? large[i] : q[i] * large[i])) * u[i];
}

// d(g sigmoid(z)) / dg. Beyond 1e4 the slope is exactly 0 or 1; the bound keeps infinity times zero out of it.
template <bool Gelu>
__device__ __forceinline__ float gate_slope(float g, DeviceGate at) {
  float c = g < 1e4f ? g : 1e4f;
  c = c > -1e4f ? c : -1e4f;
  const float dz = Gelu ? (c * 1.5957691216f) * fmaf(c * c, 3 * 0.044715f, 1.0f) : c;
  return fmaf(at.s * at.rest, dz, at.s);
}

}  // namespace vx
