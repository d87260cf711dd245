// Elementary functions with the bits of vec.h and of the Triton kernels, operation for operation, exp_term with those of
// the latter alone. Compiled without contraction: a product and a sum are fused where the source says fmaf and nowhere
// else.
#pragma once
#include <cstdint>

namespace vx {

// e^(c - n ln 2), n the integer next to c / ln 2.
__device__ __forceinline__ float exp_reduced(float c, float n) {
  float r = fmaf(n, -0.693359375f, c);
  r = fmaf(n, 2.12194440e-4f, r);
  float p = fmaf(r, 1.0f / 5040, 1.0f / 720);
  p = fmaf(p, r, 1.0f / 120);
  p = fmaf(p, r, 1.0f / 24);
  p = fmaf(p, r, 1.0f / 6);
  p = fmaf(p, r, 0.5f);
  p = fmaf(p, r, 1.0f);
  return fmaf(p, r, 1.0f);
}

// e^x of an x that is not above 0, or NaN. The power of two is applied in two steps, so that what is below the normal
// numbers is rounded once; 2^(n + 65) comes from the bits of the sum that rounded n.
__device__ __forceinline__ float exp_of_negative(float x) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(x), "f"(-104.0f));
  const float shifted = c * 1.44269504f + 12583104.0f;  // 3 2^22 + 192: even, so ties fall as they do around 3 2^22
  const float n = shifted - 12583104.0f;
  return (exp_reduced(c, n) * __int_as_float(__float_as_int(shifted) << 23)) * 0x1p-65f;
}

// The same of N of them, one operation of all after the other: where few warps run, none waits for its own results.
template <int N>
__device__ __forceinline__ void exp_of_negatives(float (&x)[N]) {
  float shifted[N], n[N], r[N], p[N];
#define VX_ALL(statement) \
  _Pragma("unroll") for (int i = 0; i < N; ++i) statement
  VX_ALL(asm("max.NaN.f32 %0, %1, %2;" : "=f"(x[i]) : "f"(x[i]), "f"(-104.0f)));
  VX_ALL(shifted[i] = x[i] * 1.44269504f + 12583104.0f);
  VX_ALL(n[i] = shifted[i] - 12583104.0f);
  VX_ALL(r[i] = fmaf(n[i], -0.693359375f, x[i]));
  VX_ALL(r[i] = fmaf(n[i], 2.12194440e-4f, r[i]));
  VX_ALL(p[i] = fmaf(r[i], 1.0f / 5040, 1.0f / 720));
  VX_ALL(p[i] = fmaf(p[i], r[i], 1.0f / 120));
  VX_ALL(p[i] = fmaf(p[i], r[i], 1.0f / 24));
  VX_ALL(p[i] = fmaf(p[i], r[i], 1.0f / 6));
  VX_ALL(p[i] = fmaf(p[i], r[i], 0.5f));
  VX_ALL(p[i] = fmaf(p[i], r[i], 1.0f));
  VX_ALL(p[i] = fmaf(p[i], r[i], 1.0f));
  VX_ALL(x[i] = (p[i] * __int_as_float(__float_as_int(shifted[i]) << 23)) * 0x1p-65f);
#undef VX_ALL
}

// A term of a sum of exponentials, e^x of an x that is not above 0, or NaN: what the unit for special functions gives, to
// 2^-22 of it, and 0 below the normal numbers. A polynomial takes five times as many instructions.
__device__ __forceinline__ float exp_term(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
  return y;
}

// e^x of an x that is not below 0, or NaN (which gives something; the caller looks at x).
__device__ __forceinline__ float exp_of_positive(float x) {
  const float c = x < 89.0f ? x : 89.0f;
  const float n = (c * 1.44269504f + 12582912.0f) - 12582912.0f;
  const int i = int(n), half = i >> 1;
  const float y = (exp_reduced(c, n) * __int_as_float((half + 127) << 23)) * __int_as_float((i - half + 127) << 23);
  return x > 88.7228390f ? __int_as_float(0x7f800000) : y;
}

__device__ __forceinline__ float tanh_in_order(float x) {
  const float a = fabsf(x), z = x * x;
  const float up = fmaf(z + 105.0f, z, 945.0f), down = fmaf(fmaf(z, 15.0f, 420.0f), z, 945.0f);
  const float near = x * __fdiv_rn(up, down);
  const float far = 1.0f - __fdiv_rn(2.0f, exp_of_positive(a + a) + 1.0f);
  const float y = a < 0.55f ? near : copysignf(far, x);
  return x != x ? x : y;
}

}  // namespace vx
