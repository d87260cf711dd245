// Many numbers by one: quotients rounded to nearest, as a division gives them, for two to four operations each.
#pragma once

namespace vx {

// What numbers are divided by. 1 / t is inverse + low but for 2^-24 of low.
struct Divisor {
  float t, inverse, low;
  int close;  // sums of products are rounded as the quotients are

  // `quotients` then takes numbers of 2^-60 to 2^100 in magnitude. Those of smaller ones, which are not rounded to nearest,
  // count for nothing beside a larger one's.
  __device__ __forceinline__ bool in_range() const { return t > 0x1p-20f && t < 0x1p20f; }
};

// 1 / t in two parts. Where the sum's error, 2^-23 of what is left to 1 of a quotient below 2^24 units, is below half a
// unit over t's whole number, as no quotient is nearer to where rounding turns, the sum rounds as the quotient.
__device__ __forceinline__ Divisor divisor_of(float t) {
  Divisor r;
  r.t = t;
  r.inverse = __fdiv_rn(1.0f, t);
  const float left = fmaf(-r.inverse, t, 1.0f), digits = __int_as_float((__float_as_int(t) & 0x007fffff) | 0x3f800000);
  r.low = __fdiv_rn(left, t);
  r.close = fabsf(left) * digits < 0.99f * 0x1p-25f;
  return r;
}

// x / t of N of them, of which no step leaves the normal range (in_range); one operation of all after the other.
template <int N>
__device__ __forceinline__ void quotients(float (&x)[N], const Divisor& r) {
  float q[N], left[N];
#define VX_ALL(statement) \
  _Pragma("unroll") for (int i = 0; i < N; ++i) statement
  VX_ALL(q[i] = x[i] * r.low);
  VX_ALL(q[i] = fmaf(x[i], r.inverse, q[i]));  // within a unit in the last place
  if (!r.close) {
    VX_ALL(left[i] = fmaf(-q[i], r.t, x[i]));
    VX_ALL(q[i] = fmaf(left[i], r.inverse, q[i]));
  }
  VX_ALL(x[i] = q[i]);
#undef VX_ALL
}

}  // namespace vx
