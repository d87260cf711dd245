// The random numbers of a draw: a function of (seed, position, token id) and of nothing else.
#pragma once
#include "common/vec.h"

namespace vx::VEXACT_ISA {

// Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3): four words from one counter, by lane.
// Token id v takes word (v >> 4) & 3 of the counter (position, (v >> 6) * 16 + (v & 15), 0) under the key seed, so that
// one call serves the 64 ids from 64 g on: word j, lane l is id 64 g + 16 j + l.
VX_INLINE void philox(uint64_t seed, uint64_t position, int32_t group, I16 out[4]) {
  const I16 m0 = iset1(int32_t(0xd2511f53u)), m1 = iset1(int32_t(0xcd9e8d57u));
  I16 c0 = iset1(int32_t(position)), c1 = iset1(int32_t(position >> 32));
  I16 c2 = iset1(group * 16) + lane_numbers(), c3 = iset1(0);
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const I16 high0 = mul_high(m0, c0), low0 = mul_low(m0, c0), high1 = mul_high(m1, c2), low1 = mul_low(m1, c2);
    c0 = high1 ^ c1 ^ iset1(int32_t(k0));
    c1 = low1;
    c2 = high0 ^ c3 ^ iset1(int32_t(k1));
    c3 = low0;
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

// (word + 1/2) / 2^32 rounded once to fp32, from 2^-33 to 1 - 2^-24: fine where it is small.
VX_INLINE F16 uniform(I16 word) {
  const F16 high = to_float(shift_right_logical(word, 16)), low = to_float(word & iset1(0xffff));
  const F16 whole = fma(high, set1(65536.0f), low);
  return min(fma(whole, set1(0x1p-32f), set1(0x1p-33f)), set1(1.0f - 0x1p-24f));
}

// -log(-log(1 - u)): a small u is a large Gumbel, so the tail that decides a draw keeps its resolution.
VX_INLINE F16 gumbel(F16 u) {
  const F16 s = u / (set1(2.0f) - u), q = s * s;  // -log(1 - u) = 2 atanh(s); to s^9 for u <= 1/4
  F16 series = set1(1.0f / 9);
  series = fma(series, q, set1(1.0f / 7));
  series = fma(series, q, set1(1.0f / 5));
  series = fma(series, q, set1(1.0f / 3));
  const F16 twice = s + s;
  const F16 near = fma(twice * q, series, twice), far = neg(log(set1(1.0f) - u));
  return neg(log(select(u > set1(0.25f), far, near)));
}

// No less than gumbel(u), without a logarithm: gumbel(u) <= -log(u) <= -log(2^e) for u = 1.m * 2^e. The margin is
// above the rounding of either side: over all 2^32 words the bound stays 0.0009 above, and gumbel at most 22.8739.
VX_INLINE F16 gumbel_bound(F16 u) {
  const F16 minus_e = to_float(iset1(127) - shift_right_logical(bits(u), 23));
  return fma(minus_e, set1(0.693147182f), set1(0.001f));
}
constexpr float kGumbelMax = 22.9f;  // above gumbel(2^-33), the largest

}  // namespace vx::VEXACT_ISA
