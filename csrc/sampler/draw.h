// The random numbers of a draw: functions of (seed, position, block or row) and of nothing else.
#pragma once
#include "common/vec.h"

namespace vx::VEXACT_ISA {

constexpr int64_t kDrawBlock = 128;  // tokens, at absolute multiples of it, that share one Gumbel number

VX_INLINE void store(uint32_t* p, I16 a) { std::memcpy(p, &a, sizeof a); }

// Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3): four words of the counter (position, c2,
// c3) under the key seed, by lane.
VX_INLINE void philox(uint64_t seed, uint64_t position, I16 c2, I16 c3, I16 out[4]) {
  const I16 m0 = iset1(int32_t(0xd2511f53u)), m1 = iset1(int32_t(0xcd9e8d57u));
  I16 c0 = iset1(int32_t(position)), c1 = iset1(int32_t(position >> 32));
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

// The words of blocks 64 group to 64 group + 63: word j, lane l is that of block 64 group + 16 j + l.
VX_INLINE void block_words(uint64_t seed, uint64_t position, int64_t group, I16 out[4]) {
  philox(seed, position, iset1(int32_t(group * 16)) + lane_numbers(), iset1(0), out);
}

// The 64 random bits that say which token of the row's winning block is drawn.
VX_INLINE uint64_t row_bits(uint64_t seed, uint64_t position) {
  I16 words[4];
  philox(seed, position, iset1(0), iset1(1), words);
  uint32_t high[16], low[16];
  store(high, words[0]);
  store(low, words[1]);
  return uint64_t(high[0]) << 32 | low[0];
}

// (word + 1/2) / 2^32 rounded once to fp32, from 2^-33 to 1 - 2^-24: fine where it is small.
VX_INLINE F16 uniform(I16 word) {
  const F16 high = to_float(shift_right_logical(word, 16)), low = to_float(word & iset1(0xffff));
  const F16 whole = fma(high, set1(65536.0f), low);
  return min(fma(whole, set1(0x1p-32f), set1(0x1p-33f)), set1(1.0f - 0x1p-24f));
}

// -log(1 - u): a small u is a large Gumbel number -log(-log(1 - u)), so the tail that decides keeps its resolution.
VX_INLINE F16 exponential(F16 u) {
  const F16 s = u / (set1(2.0f) - u), q = s * s;  // 2 atanh(s); to s^9 for u <= 1/4
  F16 series = set1(1.0f / 9);
  series = fma(series, q, set1(1.0f / 7));
  series = fma(series, q, set1(1.0f / 5));
  series = fma(series, q, set1(1.0f / 3));
  const F16 twice = s + s;
  const F16 near = fma(twice * q, series, twice), far = neg(log(set1(1.0f) - u));
  return select(u > set1(0.25f), far, near);
}

// order: the 128 of w[0] to w[7] are added pairwise, neighbours first, seven times; w[8] to w[15] are 0.
VX_INLINE float tree_sum(F16 (&w)[16]) {
  transpose(w);
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; ++i) w[i] = w[2 * i] + w[2 * i + 1];
  float chunk[16];
  store(chunk, w[0]);
  return ((chunk[0] + chunk[1]) + (chunk[2] + chunk[3])) + ((chunk[4] + chunk[5]) + (chunk[6] + chunk[7]));
}

}  // namespace vx::VEXACT_ISA
