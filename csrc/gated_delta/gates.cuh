// What a gated delta net's decay and write strength are made of, and a short convolution's newest row, on the way to the
// kernel of single rows: the bits of the Triton kernels (triton_gates.py; causal_conv's triton.py), operation for operation.
#pragma once
#include "gated_delta/mma.cuh"
#include "silu_mul/gate.cuh"

namespace vx {
namespace delta {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// e^x of any x.
__device__ __forceinline__ float exp_of(float x) {
  const float y = x > 0.0f ? exp_of_positive(x) : exp_of_negative(x);
  return x != x ? x : y;
}

// ln x of an x from 1 to 2, or NaN.
__device__ __forceinline__ float log_of_one_to_two(float x) {
  const int shifted = __float_as_int(x) - 0x3F3504F3;
  const float e = float(shifted >> 23), f = __int_as_float((shifted & 0x007FFFFF) + 0x3F3504F3) - 1.0f;
  const float s = __fdiv_rn(f, f + 2.0f), z = s * s;
  float p = fmaf(z, 2.0f / 11, 2.0f / 9);
  p = fmaf(p, z, 2.0f / 7);
  p = fmaf(p, z, 2.0f / 5);
  p = fmaf(p, z, 2.0f / 3);
  const float h = f * f * 0.5f;
  const float low = fmaf(s, fmaf(z, p, h), e * -2.12194440e-4f);
  const float y = fmaf(e, 0.693359375f, f - (h - low));
  return x != x ? x : y;
}

__device__ __forceinline__ float softplus(float x) {
  const float q = exp_of_negative(-fabsf(x)), u = 1.0f + q, up = u - 1.0f;
  const float low = up > 0.0f ? log_of_one_to_two(u) * __fdiv_rn(q, up) : q;
  const float y = (x > 0.0f ? x : 0.0f) + low;
  return x != x ? x : x > 20.0f ? x : y;
}

// g = -exp(a_log) softplus(a + dt_bias)
__device__ __forceinline__ float decay_of(float a, float a_log, float dt_bias) {
  return (exp_of(a_log) * softplus(a + dt_bias)) * -1.0f;
}

#endif

}  // namespace delta
}  // namespace vx
