// Draws from a tile of logits in the registers that it was made in: 64 rows by 128 or 256 tokens a warpgroup.
//
// A thread holds pairs of columns that are eight apart, of two rows; the four lanes of a quad hold a row. It takes a block
// of the log-sum-exp of one row at a time: 32 logits, which it keeps in shared memory of its own, so that loops over them
// are short pieces of code: where so few warps run, code that is run once takes longer to fetch than to execute.
//
// Hardly any token is worth a Gumbel number, which costs two logarithms. With B the best sum z + number that is known of the
// row, a token can only win with a number of at least B - z, and no number is above -log u, u its random word's share of
// 2^32: so with u <= e^(z - B) at most. e^(z - largest of the block) is there, for the block's sum.
#pragma once
#include "linear/sm90_gemm.cuh"
#include "linear_sample/draw.cuh"

namespace vx::sm90 {

// OFFSET: where the dynamic shared memory of the epilogue begins.
template <int OFFSET>
struct ManyEpilogue {
  Draws a;
  static constexpr int kShared = 2 * 128 * 32 * 4;  // bytes of two warpgroups
  struct State {
    double best[2];  // sums that are known of the thread's two rows
    Stream stream[2];
    float temperature[2];
    int row = -1;  // the first of them
  };

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  static constexpr float kNegative = -__builtin_huge_valf();

  template <int N>
  __device__ __forceinline__ void begin(float (&d)[N], int, int) const {
#pragma unroll
    for (int i = 0; i < N; ++i) d[i] = 0.0f;
  }

  // This thread's logits: pair g of columns lies at [g * 128].
  static __device__ __forceinline__ float2* logits() {
    extern __shared__ uint8_t memory[];
    return reinterpret_cast<float2*>(memory + OFFSET) + (threadIdx.x / 128 - 1) * (128 * 16) + threadIdx.x % 128;
  }
  static __device__ __forceinline__ float logit(const float2* x, int i) {
    return reinterpret_cast<const float*>(x + i / 2 * 128)[i % 2];
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

  // Of one row.
  struct Row {
    Stream stream;
    float t, inverse;        // what logits are divided by
    float origin, z_origin;  // what they, and what they are then, are taken relative to
    float reach;             // tokens with u <= reach e^(z - z_origin) are open
    uint32_t counter;        // of the block's first random words
  };

  // Sums of four groups of eight columns, (g, g + 4, g + 8, g + 12), over the quad: one of them for each lane.
  // order: a tree of neighbours
  static __device__ __forceinline__ float quad_sum(const float (&s)[4]) {
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    const float low = (odd ? s[1] : s[0]) + __shfl_xor_sync(~0u, odd ? s[0] : s[1], 1);
    const float up = (odd ? s[3] : s[2]) + __shfl_xor_sync(~0u, odd ? s[2] : s[3], 1);
    return (high ? up : low) + __shfl_xor_sync(~0u, high ? low : up, 2);
  }
  static __device__ __forceinline__ float block_sum(const float (&first)[2], const float (&second)[2]) {
    float s = (first[0] + second[0]) + (first[1] + second[1]);
    s = s + __shfl_xor_sync(~0u, s, 1);
    return s + __shfl_xor_sync(~0u, s, 2);
  }

  // The sums of e^(logit - origin), and of e^(z - z_origin) where z is not the logit itself (DIVIDE), over the block; the
  // open tokens, one bit each. WORDS: random words are made, or else no token is open.
  template <bool NEAR, bool DIVIDE>
  static __device__ __forceinline__ uint32_t sums(const float2* x, const Row& r, bool words_wanted, float& raw, float& scaled) {
    float kept[2] = {}, kept_scaled[2] = {};
    uint32_t open = 0;
#pragma unroll 1
    for (int odd = 0; odd < 2; ++odd) {  // groups with an even number, then the others: random words come for all of them
      uint32_t words[4][4] = {};         // of 64 tokens h, column i of a pair: words[2 h + i]
      if (words_wanted) {
        const uint32_t first = r.counter + odd * 8, counters[4] = {first, first + 1, first + 16, first + 17};
        philox(r.stream, counters, words);
      }
      float part[2], part_scaled[2];
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        float s[4], z_sums[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {  // group 4 n + 2 q + odd
          const float2 pair = x[(4 * n + 2 * q + odd) * 128];
          float e[2], f[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float v = i ? pair.y : pair.x;
            e[i] = f[i] = exp<NEAR>(v - r.origin);
            if constexpr (DIVIDE) f[i] = exp<NEAR>(divided<NEAR>(v, r.t, r.inverse) - r.z_origin);
            const uint32_t word = words[n / 2 * 2 + i][n % 2 * 2 + q];
            const float share = __int_as_float(__funnelshift_r(word, 0x7f, 9));  // 1 + u, cut off
            if (share <= fmaf(f[i], r.reach, 1.0f)) open |= 1u << (2 * (4 * n + 2 * q) + i) << (2 * odd);
          }
          s[n] = e[0] + e[1];
          z_sums[n] = f[0] + f[1];
        }
        part[q] = quad_sum(s);
        if constexpr (DIVIDE) part_scaled[q] = quad_sum(z_sums);
      }
      if (odd) {
        raw = block_sum(kept, part);
        scaled = DIVIDE ? block_sum(kept_scaled, part_scaled) : raw;
      } else {
#pragma unroll
        for (int q = 0; q < 2; ++q) {
          kept[q] = part[q];
          if constexpr (DIVIDE) kept_scaled[q] = part_scaled[q];
        }
      }
    }
    return words_wanted ? open : 0;
  }

  static __device__ __noinline__ int first_with(const float2* x, float value) {
    int found = 32;
#pragma unroll 4
    for (int g = 15; g >= 0; --g) {
      const float2 v = x[g * 128];
      if (v.y == value) found = 2 * g + 1;
      if (v.x == value) found = 2 * g;
    }
    return found;
  }

  // The logits as they are drawn from: capped, -inf behind the vocabulary; their extremes.
  __device__ __noinline__ void adjust(float2* x, int from, float& most, float& least) const {
#pragma unroll 1
    for (int g = 0; g < 16; ++g) {
      float v[2] = {x[g * 128].x, x[g * 128].y};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (a.softcap != 0.0f) v[i] = a.softcap * tanh_in_order(__fdiv_rn(v[i], a.softcap));
        if (from + 8 * g + i >= a.vocabulary) v[i] = kNegative;
        most = g + i == 0 ? v[i] : fmaxf(most, v[i]);
        if (g + i == 0) least = v[i];
        asm("min.NaN.f32 %0, %0, %1;" : "+f"(least) : "f"(v[i]));
      }
      x[g * 128] = make_float2(v[0], v[1]);
    }
  }

  __device__ __forceinline__ void block(int row, int limit, int column, float mine, float least, const Stream& stream,
                                        float temperature, double& known) const {
    float2* const x = logits();
    const int lane = threadIdx.x % 4, from = column + 2 * lane;  // logit i is of column from + i / 2 * 8 + i % 2
    const bool live = row < limit;
    const int64_t at_row = row;
    Row r;
    r.stream = stream;
    if (a.softcap != 0.0f || column + kDrawBlock > a.vocabulary) adjust(x, from, mine, least);
    float most = fmaxf(mine, __shfl_xor_sync(~0u, mine, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2)) + 0.0f;  // -0 is the same number as 0; a NaN is passed over
    const bool greedy = temperature == 0.0f, drawn = live && !greedy;
    r.t = greedy ? 1.0f : temperature;
    r.inverse = __fdiv_rn(1.0f, r.t);
    r.origin = most == kNegative ? 0.0f : most;
    const float z_most = __fdiv_rn(most, r.t) + 0.0f;
    r.z_origin = z_most == kNegative ? 0.0f : z_most;
    r.counter = uint32_t(from >> 6) * 16 + (from & 15);

    Best best;
    best.clear();
    const auto enter = [&](int i) {
      const int token = from + i / 2 * 8 + i % 2;
      const float v = logit(x, i);
      best.enter(__fdiv_rn(v, r.t), v, gumbel(word_of(r.stream, token)), token);
    };
    uint32_t open = 0;
    // too little is known to leave out much: each lane's largest goes first
    if (__any_sync(~0u, drawn && z_most > known)) {
      const int i = first_with(x, mine);
      if (drawn && i < 32 && mine > kNegative) open = 1u << i;
    }
    float raw_sum = 0.0f, z_sum = 0.0f;
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
      if (__any_sync(~0u, open != 0)) {
        do {
          if (open) enter(__ffs(open) - 1);
          open &= open - 1;
        } while (__any_sync(~0u, open != 0));
        best.take_from_lane(1);
        best.take_from_lane(2);
        if (best.sum > known) known = best.sum;
      }
      if (pass) break;
      r.reach = drawn ? exp2f(float(double(z_most) - known) * 1.44269504f + 0.004f) : 0.0f;
      const bool words = __any_sync(~0u, drawn && r.reach > 0x1p-34f);
      const bool divide = __any_sync(~0u, r.t != 1.0f);
      const bool near = __all_sync(~0u, least - r.origin >= -86.0f && __fdiv_rn(least, r.t) - r.z_origin >= -86.0f &&
                                            least > -0x1p100f && r.origin < 0x1p100f && r.t > 0x1p-20f && r.t < 0x1p20f);
      if (near && !divide)
        open = sums<true, false>(x, r, words, raw_sum, z_sum);
      else if (near)
        open = sums<true, true>(x, r, words, raw_sum, z_sum);
      else
        open = sums<false, true>(x, r, words, raw_sum, z_sum);
      if (!drawn) open = 0;
    }
    if (__any_sync(~0u, greedy)) {
      const int i = first_with(x, most);
      if (greedy && i < 32 && most > kNegative) {
        best.logit = logit(x, i), best.sum = best.rest = 0.0, best.number = 0.0f, best.token = from + i / 2 * 8 + i % 2;
      }
      best.take_from_lane(1);
      best.take_from_lane(2);
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

  // Part PART of a tile, a block of a row, to shared memory; its extremes. NaN are passed over in `most`, not in `least`.
  template <int PART, int N>
  static __device__ __forceinline__ void move(const float (&d)[N], float2* x, float& most, float& least) {
    float high[4], low[4];
#pragma unroll
    for (int g = 0; g < 16; ++g) {
      const float v[2] = {d[PART / 2 * 64 + 4 * g + PART % 2 * 2], d[PART / 2 * 64 + 4 * g + PART % 2 * 2 + 1]};
      x[g * 128] = make_float2(v[0], v[1]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int k = g % 2 * 2 + i;
        if (g < 2) {
          high[k] = low[k] = v[i];
        } else {
          high[k] = fmaxf(high[k], v[i]);
          asm("min.NaN.f32 %0, %0, %1;" : "+f"(low[k]) : "f"(v[i]));
        }
      }
    }
    most = fmaxf(fmaxf(high[0], high[1]), fmaxf(high[2], high[3]));
    least = low[0];
#pragma unroll
    for (int k = 1; k < 4; ++k) asm("min.NaN.f32 %0, %0, %1;" : "+f"(least) : "f"(low[k]));
  }

  // Of the rows before `limit`.
  template <int N>
  __device__ __forceinline__ void end(float (&d)[N], int row, int column, int limit, State& state) const {
    if (state.row != row) {
      state.row = row;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const bool live = row + 8 * h < limit;
        const int at = live ? row + 8 * h : 0;
        state.stream[h] = {halves(a.seeds[at]), halves(a.positions[at])};
        state.temperature[h] = live ? a.temperature[at] : 1.0f;
        state.best[h] = __longlong_as_double(0xfff0000000000000ll);
      }
    }
    unsigned long long seen[2] = {0, 0};  // what others know: whatever it is by now, what is drawn is the same
    if (a.known) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (row + 8 * h < limit)
          asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(seen[h]) : "l"(a.known + row + 8 * h));
    }
    const int first = column - threadIdx.x % 4 * 2;
    float2* const x = logits();
#pragma unroll 1
    for (int part = 0; part < N / 32; ++part) {
      const int h = part % 2;
      if (row - int(threadIdx.x % 32 / 4) + 8 * h >= limit) continue;  // of all eight rows of the warp
      float most, least;
      if (part == 0)
        move<0>(d, x, most, least);
      else if (part == 1)
        move<1>(d, x, most, least);
      else if constexpr (N > 64)
        part == 2 ? move<2>(d, x, most, least) : move<3>(d, x, most, least);
      const double before = fmax(h ? state.best[1] : state.best[0], from_order(h ? seen[1] : seen[0]));
      double known = before;
      block(row + 8 * h, limit, first + part / 2 * kDrawBlock, most, least, h ? state.stream[1] : state.stream[0],
            h ? state.temperature[1] : state.temperature[0], known);
      (h ? state.best[1] : state.best[0]) = known;
      if (a.known && known > before && threadIdx.x % 4 == 0) atomicMax(a.known + row + 8 * h, in_order(known));
    }
  }
  template <int N>
  __device__ __forceinline__ void end(float (&d)[N], int row, int column, State& state) const {
    end(d, row, column, a.rows, state);
  }
#endif
};

}  // namespace vx::sm90
