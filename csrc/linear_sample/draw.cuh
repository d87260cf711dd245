// The random numbers of a draw, with the bits of csrc/sampler/draw.h and of the Triton kernels. Blocks of tokens race, each
// with its log-sum-exp + a Gumbel number; of the winner the token is drawn that the row's share of its mass falls to.
#pragma once
#include "common/math.cuh"
#include "linear_sample/kernels.h"

namespace vx {

// Of a row: what makes its random numbers.
struct Stream {
  uint2 seed, position;
};

__device__ __forceinline__ uint2 halves(int64_t v) { return make_uint2(uint32_t(v), uint32_t(uint64_t(v) >> 32)); }

// Philox4x32-10 of the counter (position, counter, last) under the key seed.
__device__ __forceinline__ uint4 philox(const Stream& s, uint32_t counter, uint32_t last) {
  uint32_t k0 = s.seed.x, k1 = s.seed.y;
  uint32_t c[4] = {s.position.x, s.position.y, counter, last};
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t a_high = __umulhi(c[0], 0xd2511f53u), a_low = c[0] * 0xd2511f53u;
    const uint32_t b_high = __umulhi(c[2], 0xcd9e8d57u), b_low = c[2] * 0xcd9e8d57u;
    c[0] = b_high ^ c[1] ^ k0;
    c[1] = b_low;
    c[2] = a_high ^ c[3] ^ k1;
    c[3] = a_low;
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return make_uint4(c[0], c[1], c[2], c[3]);
}

// The random word of a block.
__device__ __forceinline__ uint32_t word_of(const Stream& s, int block) {
  const uint4 words = philox(s, uint32_t(block >> 6) * 16 + (block & 15), 0);
  const int j = block >> 4 & 3;
  return j < 2 ? (j == 0 ? words.x : words.y) : (j == 2 ? words.z : words.w);
}

// A whole number from 0 to total - 1, total below 2^48: the row's 64 random bits, as a share of it.
__device__ __forceinline__ uint64_t share_of(const Stream& s, uint64_t total) {
  const uint4 words = philox(s, 0, 1);
  return __umul64hi(uint64_t(words.x) << 32 | words.y, total);
}

// w in whole units of 2^-40, truncated; 0 of what is not from 0 to 1.
__device__ __forceinline__ uint64_t weight_of(float w) {
  const uint32_t bits = __float_as_uint(w);
  if (bits > 0x3f800000u) return 0;
  return uint64_t((bits & 0x007fffffu) | 0x00800000u) << 17 >> min(127u - (bits >> 23), 63u);
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

// -log(1 - u) for u = (word + 1/2) / 2^32: exponentially distributed.
__device__ __forceinline__ float exponential(uint32_t word) {
  const float whole = fmaf(float(word >> 16), 65536.0f, float(word & 0xffff));
  float u = fmaf(whole, 0x1p-32f, 0x1p-33f);
  u = u < 1.0f - 0x1p-24f ? u : 1.0f - 0x1p-24f;
  const float s = __fdiv_rn(u, 2.0f - u), q = s * s;
  float series = fmaf(q, 1.0f / 9, 1.0f / 7);
  series = fmaf(series, q, 1.0f / 5);
  series = fmaf(series, q, 1.0f / 3);
  const float twice = s + s;
  const float near = fmaf(twice * q, series, twice), far = -log_of_normal(1.0f - u);
  return u > 0.25f ? far : near;
}

// log(total) + a Gumbel number: what a block whose e^(z - largest z) add up to total has beside its largest z.
__device__ __forceinline__ float number_of(float exponential, float total) {
  return -log_of_normal(__fdiv_rn(exponential, total));
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

}  // namespace vx
