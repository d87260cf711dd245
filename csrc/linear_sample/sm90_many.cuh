// Draws from a tile of logits in the registers that it was made in: 64 rows by 256 tokens a warpgroup, sm90_gemm.cuh's.
//
// A thread holds pairs of columns that are eight apart, of two rows; the four lanes of a quad hold a row. It takes a block
// of the log-sum-exp of one row at a time: 32 logits.
//
// Hardly any token is worth a Gumbel number, which costs two logarithms. With B the best sum z + number that is known of the
// row, a token can only win with a number of at least B - z, and no number is above -log u + 0.001, u its random word's
// share of 2^32: so with u <= e^(z - B + 0.001) at most. e^(z - largest of the block) is there, for the block's sum.
#pragma once
#include "linear/sm90_gemm.cuh"
#include "linear_sample/draw.cuh"

namespace vx::sm90 {

struct ManyEpilogue {
  Draws a;
  struct State {
    double best[2];  // sums that are known of the thread's two rows
    int row = -1;    // the first of them
  };

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  static constexpr float kNegative = -__builtin_huge_valf();

  __device__ __forceinline__ void begin(float (&d)[128], int, int) const {
#pragma unroll
    for (int i = 0; i < 128; ++i) d[i] = 0.0f;
  }

  // e^x, the bits of exp_of_negative; NEAR: of an x from -86 to 0.
  template <bool NEAR>
  static __device__ __forceinline__ float exp(float x) {
    if constexpr (!NEAR) return exp_of_negative(x);
    const float shifted = x * 1.44269504f + 12582912.0f;
    const float p = exp_reduced(x, shifted - 12582912.0f);
    return __int_as_float(__float_as_int(p) + (__float_as_int(shifted) << 23));
  }

  // x / t, given 1 / t, both rounded to nearest; NEAR: of numbers that no step leaves the normal range with.
  template <bool NEAR>
  static __device__ __forceinline__ float divided(float x, float t, float inverse) {
    if constexpr (!NEAR) return __fdiv_rn(x, t);
    float q = x * inverse;
    q = fmaf(fmaf(-q, t, x), inverse, q);  // within a unit in the last place
    return fmaf(fmaf(-q, t, x), inverse, q);
  }

  // A tree of neighbours over the 128 columns of a block: pair(g) is the sum of this thread's pair of group g of eight. A
  // lane sums four of the groups of its quad.
  template <class Pair>
  static __device__ __forceinline__ float block_sum(Pair pair) {
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    float r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int g = i / 2 + i % 2 * 2;  // 0, 2, 1, 3: what shares random words comes together
      const float a = pair(g), b = pair(g + 4), c = pair(g + 8), e = pair(g + 12);
      const float low = (odd ? b : a) + __shfl_xor_sync(~0u, odd ? a : b, 1);  // order: a tree of neighbours
      const float up = (odd ? e : c) + __shfl_xor_sync(~0u, odd ? c : e, 1);
      r[g] = (high ? up : low) + __shfl_xor_sync(~0u, high ? low : up, 2);
    }
    float s = (r[0] + r[1]) + (r[2] + r[3]);
    s = s + __shfl_xor_sync(~0u, s, 1);
    return s + __shfl_xor_sync(~0u, s, 2);
  }

  template <bool NEAR>
  static __device__ __forceinline__ float plain_sum(const float (&x)[32], float origin) {
    return block_sum([&](int g) { return exp<NEAR>(x[2 * g] - origin) + exp<NEAR>(x[2 * g + 1] - origin); });
  }

  // The sum of e^(z - origin), z = x / t where DIVIDE. open: the tokens with u <= reach e^(z - origin).
  template <bool NEAR, bool DIVIDE>
  static __device__ __forceinline__ float open_sum(const float (&x)[32], float t, float inverse, float origin,
                                                   const Stream& stream, uint32_t counter, float reach, uint32_t& open) {
    uint32_t words[4][4];  // of 64 tokens h, column i of a pair: words[2 h + i]
    uint32_t found = 0;
    const float sum = block_sum([&](int g) {
      if (g < 2) {
        const uint32_t first = counter + g * 8, counters[4] = {first, first + 1, first + 16, first + 17};
        philox(stream, counters, words);
      }
      const int h = g / 8, j = g % 8 / 2;
      float e[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t word = words[2 * h + i][j];
        const float z = DIVIDE ? divided<NEAR>(x[2 * g + i], t, inverse) : x[2 * g + i];
        e[i] = exp<NEAR>(z - origin);
        const float share = __int_as_float(__funnelshift_r(word, 0x7f, 9));  // 1 + u, cut off
        if (share <= fmaf(e[i], reach, 1.0f)) found |= 1u << (2 * g + i);
      }
      return e[0] + e[1];
    });
    open = found;
    return sum;
  }

  static __device__ __forceinline__ float at(const float (&x)[32], int i) {
    float y[16];
#pragma unroll
    for (int k = 0; k < 16; ++k) y[k] = i & 16 ? x[k + 16] : x[k];
#pragma unroll
    for (int k = 0; k < 8; ++k) y[k] = i & 8 ? y[k + 8] : y[k];
#pragma unroll
    for (int k = 0; k < 4; ++k) y[k] = i & 4 ? y[k + 4] : y[k];
    const float low = i & 2 ? y[2] : y[0], high = i & 2 ? y[3] : y[1];
    return i & 1 ? high : low;
  }

  static __device__ __forceinline__ int first_with(const float (&x)[32], float value) {
    int found = 32;
#pragma unroll
    for (int i = 31; i >= 0; --i)
      if (x[i] == value) found = i;
    return found;
  }

  __device__ __forceinline__ void block(float (&x)[32], int row, int column, double& known) const {
    const int lane = threadIdx.x % 4, from = column + 2 * lane;  // x[i] is column from + i / 2 * 8 + i % 2
    const bool live = row < a.rows;
    const int64_t at_row = live ? row : 0;
    const float temperature = live ? a.temperature[at_row] : 1.0f;
    const Stream stream = {halves(a.seeds[at_row]), halves(a.positions[at_row])};
    if (a.softcap != 0.0f) {
#pragma unroll
      for (int i = 0; i < 32; ++i) x[i] = a.softcap * tanh_in_order(__fdiv_rn(x[i], a.softcap));
    }
    if (column + kDrawBlock > a.vocabulary) {
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (from + i / 2 * 8 + i % 2 >= a.vocabulary) x[i] = kNegative;
    }
    float high[4], low[4];  // NaN are passed over in `high`, and not in `low`
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if (i < 4) {
        high[i] = low[i] = x[i];
      } else {
        high[i % 4] = fmaxf(high[i % 4], x[i]);
        asm("min.NaN.f32 %0, %0, %1;" : "+f"(low[i % 4]) : "f"(x[i]));
      }
    }
    const float mine = fmaxf(fmaxf(high[0], high[1]), fmaxf(high[2], high[3]));
    float least = low[0];
#pragma unroll
    for (int i = 1; i < 4; ++i) asm("min.NaN.f32 %0, %0, %1;" : "+f"(least) : "f"(low[i]));
    float most = fmaxf(mine, __shfl_xor_sync(~0u, mine, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2)) + 0.0f;  // -0 is the same number as 0; a NaN is passed over
    const float origin = most == kNegative ? 0.0f : most;
    const bool greedy = temperature == 0.0f, drawn = live && !greedy;
    const float t = greedy ? 1.0f : temperature, inverse = __fdiv_rn(1.0f, t);
    const bool scaled = __any_sync(~0u, t != 1.0f);
    const float z_most = __fdiv_rn(most, t) + 0.0f, z_origin = z_most == kNegative ? 0.0f : z_most;

    Best best;
    best.clear();
    const auto enter = [&](int i) {
      const int token = from + i / 2 * 8 + i % 2;
      const float logit = at(x, i);
      best.enter(__fdiv_rn(logit, t), logit, gumbel(word_of(stream, token)), token);
    };
    const auto share_best = [&] {
      best.take_from_lane(1);
      best.take_from_lane(2);
      if (best.sum > known) known = best.sum;
    };
    if (__any_sync(~0u, drawn && z_most > known)) {  // too little is known to leave out much
      const int i = first_with(x, mine);
      if (drawn && i < 32 && mine > kNegative) enter(i);
      share_best();
    }
    const float reach = drawn ? exp2f(float(double(z_most) - known) * 1.44269504f + 0.004f) : 0.0f;
    const bool possible = __any_sync(~0u, drawn && reach > 0x1p-34f);
    const bool raw_near = __all_sync(~0u, least - origin >= -86.0f && origin < 0x1p100f);
    float raw_sum, z_sum;
    uint32_t open = 0;
    if (scaled || !possible) {
      raw_sum = raw_near ? plain_sum<true>(x, origin) : plain_sum<false>(x, origin);
      z_sum = raw_sum;
    }
    if (scaled) {
      const bool near = __all_sync(~0u, __fdiv_rn(least, t) - z_origin >= -86.0f && least > -0x1p100f && origin < 0x1p100f &&
                                            t > 0x1p-20f && t < 0x1p20f);
      z_sum = near ? open_sum<true, true>(x, t, inverse, z_origin, stream, counter_of(from), reach, open)
                   : open_sum<false, true>(x, t, inverse, z_origin, stream, counter_of(from), reach, open);
    } else if (possible) {
      raw_sum = raw_near ? open_sum<true, false>(x, t, inverse, origin, stream, counter_of(from), reach, open)
                         : open_sum<false, false>(x, t, inverse, origin, stream, counter_of(from), reach, open);
      z_sum = raw_sum;
    }
    if (!drawn) open = 0;
    if (__any_sync(~0u, open != 0)) {
      while (__any_sync(~0u, open != 0)) {
        if (open) enter(__ffs(open) - 1);
        open &= open - 1;
      }
      share_best();
    }
    if (__any_sync(~0u, greedy)) {
      const int i = first_with(x, most);
      if (greedy && i < 32 && most > kNegative) {
        best.logit = at(x, i), best.sum = best.rest = 0.0, best.number = 0.0f, best.token = from + i / 2 * 8 + i % 2;
      }
      if (__any_sync(~0u, greedy)) {
        best.take_from_lane(1);
        best.take_from_lane(2);
      }
    }
    const int number = column / kDrawBlock;
    if (live && number < a.blocks) {
      float* const to = a.parts + at_row * 4 * a.blocks + number;
      if (lane == 0) to[0] = most, a.tokens[at_row * a.blocks + number] = best.token;
      if (lane == 1) to[a.blocks] = raw_sum, a.entries[at_row * 2 * a.blocks + number] = best.logit;
      if (lane == 2) to[2 * int64_t(a.blocks)] = z_most, a.entries[(at_row * 2 + 1) * a.blocks + number] = best.number;
      if (lane == 3) to[3 * int64_t(a.blocks)] = z_sum;
    }
  }

  static __device__ __forceinline__ uint32_t counter_of(int token) { return uint32_t(token >> 6) * 16 + (token & 15); }

  __device__ __forceinline__ void end(float (&d)[128], int row, int column, State& state) const {
    if (state.row != row) {
      state.best[0] = state.best[1] = __longlong_as_double(0xfff0000000000000ll);
      state.row = row;
    }
    const int first = column - threadIdx.x % 4 * 2;
#pragma unroll 1
    for (int part = 0; part < 4; ++part) {
      float x[32];
#define VX_PART(p)                                                                       \
  if (part == p) {                                                                       \
    _Pragma("unroll") for (int i = 0; i < 32; ++i) x[i] = d[p / 2 * 64 + i / 2 * 4 + p % 2 * 2 + i % 2]; \
  }
      VX_PART(0) VX_PART(1) VX_PART(2) VX_PART(3)
#undef VX_PART
      double known = part % 2 ? state.best[1] : state.best[0];
      block(x, row + part % 2 * 8, first + part / 2 * kDrawBlock, known);
      (part % 2 ? state.best[1] : state.best[0]) = known;
    }
  }
#endif
};

}  // namespace vx::sm90
