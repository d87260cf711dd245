// The one order of log-softmax over a row of V fp32 logits. log_softmax, linear_logprobs, linear_cross_entropy and
// sample include this header and nothing else for it, so a token's log-probability has the same bits in all of them.
//
// z = x / temperature, one correctly rounded division per logit (by 1 it is the identity). The row is cut into blocks
// of kLseBlock logits at absolute multiples of it; blocks are merged ascending. The result is kept as two numbers, the
// row's maximum and the log of the sum relative to it: log p = (z - max) - log_sum loses nothing where p is near 1.
// A logit of -inf has probability 0. A row with NaN or +inf, or of -inf alone, gives NaN everywhere.
#pragma once
#include "common/vec.h"

namespace vx::VEXACT_ISA {

constexpr int64_t kLseBlock = 512;

struct Lse {
  float max, log_sum;
};

// z from x: a functor, so that a temperature of 1 costs no division.
struct AtTemperatureOne {
  VX_INLINE F16 operator()(F16 x) const { return x; }
  VX_INLINE float operator()(float x) const { return x; }
};
struct AtTemperature {
  float t;
  VX_INLINE F16 operator()(F16 x) const { return x / set1(t); }
  VX_INLINE float operator()(float x) const { return x / t; }
};

// The maximum and the sum of e^(z - max) over the blocks seen so far.
struct LseSum {
  float max = -INFINITY, sum = 0.0f;
};

// The largest x of one block; -inf for an empty one, NaN is passed over. No rounding, so no order.
template <class T>
VX_INLINE float block_max(const T* x, int64_t n) {
  F16 m[4] = {set1(-INFINITY), set1(-INFINITY), set1(-INFINITY), set1(-INFINITY)};
  int64_t i = 0;
  for (; i + 64 <= n; i += 64)
    for (int j = 0; j < 4; ++j) m[j] = max(load(x + i + 16 * j), m[j]);
  for (; i < n; i += 16) {
    const int lanes = int(n - i < 16 ? n - i : 16);
    m[0] = max(select(lanes_below(lanes), load_lanes(x + i, lanes), set1(-INFINITY)), m[0]);
  }
  return max_lanes(max(max(m[0], m[1]), max(m[2], m[3])));
}

// Division is monotone, so z's maximum is the maximum x divided; + 0 makes -0 the same number as 0.
template <class Z>
VX_INLINE float z_max(float x_max, Z at) {
  return at(x_max) + 0.0f;
}

// What z is taken relative to: 0 where every z is -inf, lest -inf - -inf makes a NaN.
VX_INLINE float lse_origin(float max) { return max == -INFINITY ? 0.0f : max; }

// order: four accumulators of 16 lanes take a block's 16-wide chunks in turn; (a0 + a1) + (a2 + a3), then the lane tree.
// f(start, lanes) gives the addends.
template <class F>
VX_INLINE float sum_block(int64_t n, F f) {
  F16 acc[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 64 <= n; i += 64)
    for (int j = 0; j < 4; ++j) acc[j] = acc[j] + f(i + 16 * j, 16);
  for (int j = 0; i < n; i += 16, ++j) {
    const int lanes = int(n - i < 16 ? n - i : 16);
    acc[j] = acc[j] + select(lanes_below(lanes), f(i, lanes), zero());
  }
  return sum_lanes((acc[0] + acc[1]) + (acc[2] + acc[3]));
}

template <class T, class Z>
VX_INLINE LseSum lse_block(const T* x, int64_t n, float x_max, Z at) {
  const float m = z_max(x_max, at);
  const F16 origin = set1(lse_origin(m));
  return {m, sum_block(n, [&](int64_t i, int lanes) { return exp(at(load_lanes(x + i, lanes)) - origin); })};
}

// order: blocks are merged ascending, the sum with the smaller maximum scaled to the larger.
VX_INLINE void merge(LseSum& s, LseSum block) {
  if (block.max > s.max)
    s = {block.max, std::fma(s.sum, exp(s.max - block.max), block.sum)};
  else if (block.max > -INFINITY)
    s.sum = std::fma(block.sum, exp(block.max - s.max), s.sum);
  else
    s.sum = s.sum + block.sum;  // 0, or NaN
}

VX_INLINE Lse finish(LseSum s) { return {s.max, log(s.sum)}; }

VX_INLINE F16 log_prob(F16 z, Lse l) { return (z - set1(l.max)) - set1(l.log_sum); }
VX_INLINE float log_prob(float z, Lse l) { return (z - l.max) - l.log_sum; }

template <class T, class Z>
VX_INLINE Lse row_lse(const T* x, int64_t n, Z at) {
  LseSum s;
  for (int64_t b = 0; b < n; b += kLseBlock) {
    const int64_t size = n - b < kLseBlock ? n - b : kLseBlock;
    merge(s, lse_block(x + b, size, block_max(x + b, size), at));
  }
  return finish(s);
}

}  // namespace vx::VEXACT_ISA
