// The random numbers of a draw and the best token so far, with the bits of csrc/sampler/gumbel.h and of the Triton kernels.
#pragma once
#include "common/math.cuh"
#include "linear_sample/kernels.h"

namespace vx {

// Of a row: what makes its random numbers.
struct Stream {
  uint2 seed, position;
};

__device__ __forceinline__ uint2 halves(int64_t v) { return make_uint2(uint32_t(v), uint32_t(uint64_t(v) >> 32)); }

// Philox4x32-10 of N counters at once, round by round, so that none waits for its own results. Token v takes word
// (v >> 4) & 3 of the counter (v >> 6) * 16 + (v & 15).
template <int N>
__device__ __forceinline__ void philox(const Stream& s, const uint32_t (&counters)[N], uint32_t (&words)[N][4]) {
  uint32_t k0 = s.seed.x, k1 = s.seed.y;
  asm("" : "+r"(k0), "+r"(k1));  // lest the keys of all rounds are kept in registers from call to call
#pragma unroll
  for (int n = 0; n < N; ++n) words[n][0] = s.position.x, words[n][1] = s.position.y, words[n][2] = counters[n], words[n][3] = 0;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      uint32_t(&c)[4] = words[n];
      uint32_t a_low, a_high, b_low, b_high;
      asm("{\n.reg .b64 wide;\nmul.wide.u32 wide, %2, %3;\nmov.b64 {%0, %1}, wide;\n}" : "=r"(a_low), "=r"(a_high) : "r"(c[0]), "n"(0xd2511f53u));
      asm("{\n.reg .b64 wide;\nmul.wide.u32 wide, %2, %3;\nmov.b64 {%0, %1}, wide;\n}" : "=r"(b_low), "=r"(b_high) : "r"(c[2]), "n"(0xcd9e8d57u));
      c[0] = b_high ^ c[1] ^ k0;
      c[1] = b_low;
      c[2] = a_high ^ c[3] ^ k1;
      c[3] = a_low;
    }
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
}

__device__ __forceinline__ uint32_t word_of(const Stream& s, int token) {
  const uint32_t counter[1] = {uint32_t(token >> 6) * 16 + (token & 15)};
  uint32_t words[1][4];
  philox(s, counter, words);
  const int j = token >> 4 & 3;
  return j < 2 ? (j == 0 ? words[0][0] : words[0][1]) : (j == 2 ? words[0][2] : words[0][3]);
}

// ln x of a normal number above 0.
__device__ __forceinline__ float log_of_normal(float x) {
  const int shifted = __float_as_int(x) - 0x3f3504f3;
  const float e = float(shifted >> 23);
  const float f = __int_as_float((shifted & 0x007fffff) + 0x3f3504f3) - 1.0f;
  const float s = __fdiv_rn(f, f + 2.0f), z = s * s;
  float p = fmaf(z, 2.0f / 11, 2.0f / 9);
  p = fmaf(p, z, 2.0f / 7);
  p = fmaf(p, z, 2.0f / 5);
  p = fmaf(p, z, 2.0f / 3);
  const float h = f * f * 0.5f;
  const float low = fmaf(s, fmaf(z, p, h), e * -2.12194440e-4f);
  return fmaf(e, 0.693359375f, f - (h - low));
}

// -log(-log(1 - u)) for u = (word + 1/2) / 2^32.
__device__ __forceinline__ float gumbel(uint32_t word) {
  const float whole = fmaf(float(word >> 16), 65536.0f, float(word & 0xffff));
  float u = fmaf(whole, 0x1p-32f, 0x1p-33f);
  u = u < 1.0f - 0x1p-24f ? u : 1.0f - 0x1p-24f;
  const float s = __fdiv_rn(u, 2.0f - u), q = s * s;
  float series = fmaf(q, 1.0f / 9, 1.0f / 7);
  series = fmaf(series, q, 1.0f / 5);
  series = fmaf(series, q, 1.0f / 3);
  const float twice = s + s;
  const float near = fmaf(twice * q, series, twice), far = -log_of_normal(1.0f - u);
  return -log_of_normal(u > 0.25f ? far : near);
}

// Numbers in the order of doubles, NaN aside: 0 is below all.
__device__ __forceinline__ unsigned long long in_order(double v) {
  const unsigned long long bits = __double_as_longlong(v);
  return bits >> 63 ? ~bits : bits | 1ull << 63;
}
__device__ __forceinline__ double from_order(unsigned long long key) {
  if (!key) return __longlong_as_double(0xfff0000000000000ll);
  return __longlong_as_double(key >> 63 ? key & ~(1ull << 63) : ~key);
}

// The best token so far. Of two, the one whose z + Gumbel number is larger as a real number is better, the lower id of
// equal ones: sum + rest is that number, exactly.
struct Best {
  double sum, rest;
  float logit, number;
  int token;

  __device__ __forceinline__ void clear() {
    sum = __longlong_as_double(0xfff0000000000000ll), rest = 0.0, logit = number = 0.0f, token = kNoToken;
  }
  __device__ __forceinline__ void take(const Best& o) {
    if (o.sum > sum || (o.sum == sum && (o.rest > rest || (o.rest == rest && o.token < token)))) *this = o;
  }
  __device__ __forceinline__ void enter(float z, float logit, float number, int token) {
    const double a = z, b = number, s = a + b, part = s - a;
    take(Best{s, (a - (s - part)) + (b - part), logit, number, token});
  }
  __device__ __forceinline__ void take_from_lane(int across) {
    Best o;
    o.sum = __shfl_xor_sync(~0u, sum, across);
    o.rest = __shfl_xor_sync(~0u, rest, across);
    o.logit = __shfl_xor_sync(~0u, logit, across);
    o.number = __shfl_xor_sync(~0u, number, across);
    o.token = __shfl_xor_sync(~0u, token, across);
    take(o);
  }
};

}  // namespace vx
