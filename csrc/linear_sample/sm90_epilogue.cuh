// Draws from a tile of logits in the registers that it was made in: one or two boxes of 64 rows by 128 tokens, which are a
// block of the log-sum-exp, a warpgroup.
//
// A thread holds pairs of columns that are eight apart, of two rows of each box; the four lanes of a quad hold a row. It
// takes one row at a time, a part of the tile: 32 logits, which it keeps in shared memory of its own, so that loops over them
// are short pieces of code: where so few warps run, code that is run once takes longer to fetch than to execute. For the same
// reason one operation of eight logits stands after the other: alone, a chain of them would wait for its own results.
//
// When all parts are summed, each lane of a quad decides about one of them: whether the block is the best so far of its row,
// as hardly one is. Only then its token is looked for.
#pragma once
#include "common/divide.cuh"
#include "linear/sm90_gemm.cuh"
#include "linear_sample/draw.cuh"

namespace vx::sm90 {

// OFFSET: where the dynamic shared memory of the epilogue begins.
template <int OFFSET, int BOXES>
struct DrawEpilogue {
  static constexpr int kParts = 2 * BOXES, kLogits = 32 * kParts;  // of a thread
  Draws a;
  static constexpr int kShared = 2 * 128 * 32 * 4;  // bytes of two warpgroups
  // Of the row whose blocks the thread's lane of a quad decides about.
  struct State {
    double best;  // the sum that is known of it
    Stream stream;
    Divisor divisor;
    float temperature;
    int row = -1;  // the thread's first row
  };

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  static constexpr float kNegative = -__builtin_huge_valf();

  // This thread's logits: pair g of columns lies at [g * 128].
  static __device__ __forceinline__ float2* logits() {
    extern __shared__ uint8_t memory[];
    return reinterpret_cast<float2*>(memory + OFFSET) + (threadIdx.x / 128 - 1) * (128 * 16) + threadIdx.x % 128;
  }
  static __device__ __forceinline__ float logit(const float2* x, int i) {
    return reinterpret_cast<const float*>(x + i / 2 * 128)[i % 2];
  }

#define VX_ALL(statement) \
  _Pragma("unroll") for (int i = 0; i < N; ++i) statement
  // And what they, and what they are then, are taken relative to.
  struct Scale : Divisor {
    float origin, z_origin;
  };

  // That of a row whose divisor lane `lane` of the quad has.
  static __device__ __forceinline__ Divisor of_lane(const Divisor& r, int lane) {
    const auto of = [&](auto v) { return __shfl_sync(~0u, v, lane, 4); };
    return {of(r.t), of(r.inverse), of(r.low), of(r.close)};
  }

  // x / t, rounded to nearest; NEAR: of numbers that no step leaves the normal range with.
  template <bool NEAR, int N>
  static __device__ __forceinline__ void divide(float (&x)[N], const Scale& r) {
    if constexpr (NEAR)
      quotients(x, r);
    else
      VX_ALL(x[i] = __fdiv_rn(x[i], r.t));
  }

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

  // The sums of e^(logit - origin), and of e^(z - z_origin) where z is not the logit itself (DIVIDE), over the block.
  template <bool DIVIDE, bool NEAR>
  static __device__ __forceinline__ void sums(const float2* x, const Scale& r, float& raw, float& scaled) {
    float kept[2] = {}, kept_scaled[2] = {};
#pragma unroll 1
    for (int odd = 0; odd < 2; ++odd) {
      float part[2], part_scaled[2];
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        constexpr int N = 8;
        float e[N], f[N], s[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {  // group 4 n + 2 q + odd
          const float2 pair = x[(4 * n + 2 * q + odd) * 128];
          e[2 * n] = pair.x, e[2 * n + 1] = pair.y;
        }
        if constexpr (DIVIDE) {
          VX_ALL(f[i] = e[i]);
          divide<NEAR>(f, r);
        }
        VX_ALL(e[i] = exp_term(e[i] - r.origin));
#pragma unroll
        for (int n = 0; n < 4; ++n) s[n] = e[2 * n] + e[2 * n + 1];
        part[q] = quad_sum(s);
        if constexpr (DIVIDE) {
          VX_ALL(f[i] = exp_term(f[i] - r.z_origin));
#pragma unroll
          for (int n = 0; n < 4; ++n) s[n] = f[2 * n] + f[2 * n + 1];
          part_scaled[q] = quad_sum(s);
        }
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
  }

  static __device__ __forceinline__ uint64_t over_quad(uint64_t v) {
    v += __shfl_xor_sync(~0u, v, 1);
    return v + __shfl_xor_sync(~0u, v, 2);
  }

  // Which of the thread's logits is drawn of the block; 32: another thread's, or none.
  template <bool DIVIDE, bool NEAR>
  static __device__ __forceinline__ int drawn_of(const float2* x, const Scale& r, const Stream& stream) {
    constexpr int N = 8;
    const auto weights = [&](int group, uint64_t (&w)[N]) {  // of four groups of columns
      float e[N];
      VX_ALL(e[i] = logit(x, 2 * group + i));
      if constexpr (DIVIDE) divide<NEAR>(e, r);
      VX_ALL(e[i] = exp_term(e[i] - r.z_origin));
      VX_ALL(w[i] = weight_of(e[i]));
    };
    uint64_t w[N], total = 0, up_to[4];  // of the quad's
#pragma unroll 1
    for (int q = 0; q < 4; ++q) {
      weights(4 * q, w);
      total += over_quad(((w[0] + w[1]) + (w[2] + w[3])) + ((w[4] + w[5]) + (w[6] + w[7])));
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (i == q) up_to[i] = total;
    }
    const uint64_t share = share_of(stream, total);
    int quarter = 0;
    uint64_t before = 0;
#pragma unroll
    for (int i = 0; i < 3; ++i)
      if (up_to[i] <= share) quarter = i + 1, before = up_to[i];
    weights(4 * quarter, w);
    int found = 32;
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      const uint64_t one = w[2 * g], mine = one + w[2 * g + 1];
      uint64_t end = mine;
#pragma unroll
      for (int across = 1; across < 4; across *= 2) {
        const uint64_t lower = __shfl_up_sync(~0u, end, across, 4);
        if (threadIdx.x % 4 >= across) end += lower;
      }
      const uint64_t from = before + end - mine;
      if (from <= share && share < from + mine) found = 8 * quarter + 2 * g + (share >= from + one);
      before += __shfl_sync(~0u, end, 3, 4);
    }
    return found;
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

  // What is to be known of a part of a tile, a block of a row, to sum it or to draw from it.
  struct Part {
    float2* x;
    Scale r;
    float most, z_most;
    bool divide, near;  // of all eight rows of the warp; near: if they are divided
  };

  __device__ __forceinline__ Part part_of(const float (&d)[kLogits], int part, int column, const Divisor& divisor) const {
    Part p;
    p.x = logits();
    float mine, least;
    if (part == 0)
      move<0>(d, p.x, mine, least);
    else if (part == 1)
      move<1>(d, p.x, mine, least);
    else if constexpr (BOXES == 2)
      part == 2 ? move<2>(d, p.x, mine, least) : move<3>(d, p.x, mine, least);
    if (a.softcap != 0.0f || column + kDrawBlock > a.vocabulary) adjust(p.x, column + threadIdx.x % 4 * 2, mine, least);
    float most = fmaxf(mine, __shfl_xor_sync(~0u, mine, 1));
    p.most = p.z_most = fmaxf(most, __shfl_xor_sync(~0u, most, 2)) + 0.0f;  // -0 is the same number as 0; a NaN is passed over
    Scale& r = p.r;
    static_cast<Divisor&>(r) = divisor;
    p.divide = __any_sync(~0u, r.t != 1.0f);
    r.origin = p.most == kNegative ? 0.0f : p.most;
    p.near = false;
    if (p.divide) {
      r.close = __all_sync(~0u, r.close);
      p.near = __all_sync(~0u, least > -0x1p100f && r.origin < 0x1p100f && (fabsf(r.origin) > 0x1p-60f || r.origin == 0.0f) &&
                                   r.in_range());
      float z[1] = {p.most};
      if (p.near)
        divide<true>(z, r);
      else
        divide<false>(z, r);
      p.z_most = z[0] + 0.0f;
    }
    r.z_origin = p.z_most == kNegative ? 0.0f : p.z_most;
    return p;
  }

  // What the quad's row draws of a block, to memory. best: if the row wants to know.
  __device__ __forceinline__ void choose(const float (&d)[kLogits], int part, int row, int column, bool best, bool greedy,
                                         const Divisor& divisor, const Stream& stream) const {
    const Part p = part_of(d, part, column, divisor);
    const int from = column + threadIdx.x % 4 * 2;  // logit i is of column from + i / 2 * 8 + i % 2
    int i = 32;
    if (__any_sync(~0u, best && !greedy)) {
      int drawn;
      if (!p.divide)
        drawn = drawn_of<false, true>(p.x, p.r, stream);
      else if (p.near)
        drawn = drawn_of<true, true>(p.x, p.r, stream);
      else
        drawn = drawn_of<true, false>(p.x, p.r, stream);
      if (!greedy) i = drawn;
    }
    if (__any_sync(~0u, best && greedy)) {
      const int first = first_with(p.x, p.most), mine = first < 32 ? from + first / 2 * 8 + first % 2 : kNoToken;
      int token = min(mine, __shfl_xor_sync(~0u, mine, 1));
      token = min(token, __shfl_xor_sync(~0u, token, 2));
      if (greedy && mine == token) i = first;
    }
    if (best && i < 32) {
      const int64_t at = row, block = column / kDrawBlock;
      a.entries[at * 2 * a.blocks + block] = logit(p.x, i);
      a.tokens[at * a.blocks + block] = from + i / 2 * 8 + i % 2;
    }
  }

  // Part PART of a tile, a block of a row, to shared memory; its extremes. NaN are passed over in `most`, not in `least`.
  template <int PART>
  static __device__ __forceinline__ void move(const float (&d)[kLogits], float2* x, float& most, float& least) {
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

  // row: the thread's first; of each box of 64 rows the first `boxed` are drawn for, the next box's follow upon them.
  __device__ __forceinline__ void end(const float (&d)[kLogits], int row, int column, int boxed, State& state) const {
    const int in_box = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, lane = threadIdx.x % 4, own = lane % kParts;
    const auto row_of = [&](int part) { return row + part % 2 * 8 + part / 2 * boxed; };
    const auto live = [&](int part) { return in_box + part % 2 * 8 < boxed && row_of(part) < a.rows; };
    const int first = column - 2 * lane, block = first / kDrawBlock, own_row = row_of(own);
    const bool own_live = live(own), there = block < a.blocks;
    if (state.row != row) {
      const int from = own_live ? own_row : 0;
      state.row = row;
      state.stream = {halves(a.seeds[from]), halves(a.positions[from])};
      state.temperature = own_live ? a.temperature[from] : 1.0f;
      state.divisor = divisor_of(state.temperature == 0.0f ? 1.0f : state.temperature);
      state.best = __longlong_as_double(0xfff0000000000000ll);
    }
    unsigned long long seen = 0;  // what others know: whatever it is by now, what is drawn is the same
    if (a.known && own_live) asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(a.known + own_row));

    float top = kNegative, total = 1.0f;
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      if (!__any_sync(~0u, live(part))) continue;
      const Part p = part_of(d, part, first, of_lane(state.divisor, part));
      float raw_sum, z_sum;
      if (!p.divide)
        sums<false, true>(p.x, p.r, raw_sum, z_sum);
      else if (p.near)
        sums<true, true>(p.x, p.r, raw_sum, z_sum);
      else
        sums<true, false>(p.x, p.r, raw_sum, z_sum);
      if (part == own) top = p.z_most, total = z_sum;
      if (live(part) && there) {
        const float values[4] = {p.most, raw_sum, p.z_most, z_sum};
        float value = values[0];
#pragma unroll
        for (int k = 1; k < 4; ++k)
          if (lane == k) value = values[k];
        a.parts[(int64_t(row_of(part)) * 4 + lane) * a.blocks + block] = value;
      }
    }

    const float chance = exponential(word_of(state.stream, block));
    const float number = state.temperature == 0.0f ? 0.0f : number_of(chance, total);
    const double sum = double(top) + double(number);  // no less than what it was rounded from is no less, rounded
    const bool told = own_live && there && lane < kParts;
    const bool best = told && top > kNegative && sum >= fmax(state.best, from_order(seen));
    if (best) {
      state.best = sum;
      if (a.known) atomicMax(a.known + own_row, in_order(sum));
      a.entries[(int64_t(own_row) * 2 + 1) * a.blocks + block] = number;
    } else if (told) {
      a.tokens[int64_t(own_row) * a.blocks + block] = kNoToken;
    }
    if (!__any_sync(~0u, best)) return;
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      if (!__any_sync(~0u, best && lane == part)) continue;
      const auto of = [&](auto v) { return __shfl_sync(~0u, v, part, 4); };
      const Stream stream{{of(state.stream.seed.x), of(state.stream.seed.y)},
                          {of(state.stream.position.x), of(state.stream.position.y)}};
      choose(d, part, row_of(part), first, of(int(best)), of(int(state.temperature == 0.0f)),
             of_lane(state.divisor, part), stream);
    }
  }
#undef VX_ALL
#endif
};

}  // namespace vx::sm90
