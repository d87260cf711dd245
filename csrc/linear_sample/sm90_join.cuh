// Joins what the blocks of a row's logits left: both log-sum-exps, the token of the best block, its log-probabilities.
//
// 256 threads a row take 2,048 blocks at once, eight each, and keep what they read of the first 2,048 (all, of a vocabulary
// below 262,145). What takes time is to reach memory, so everything is asked for at once.
#pragma once
#include "common/sm90.cuh"
#include "linear_sample/draw.cuh"

namespace vx::sm90 {

constexpr int kJoinThreads = 256, kJoinEach = 8, kJoinChunk = kJoinThreads * kJoinEach, kJoinWarps = kJoinThreads / 32;
constexpr int kJoinTree = 8;  // chunks of a tree: JOINED blocks

struct Drawn {
  int64_t* ids;  // (rows,); -1 of a row without a distribution
  float *logprobs, *raw_logprobs;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// A block's log-sum-exp + its Gumbel number as a real number, which two doubles hold, and its token.
struct Entry {
  double most, rest;
  int token;
};
__device__ __forceinline__ Entry no_entry() {
  const double least = __longlong_as_double(0xfff0000000000000ll);
  return {least, least, kNoToken};
}
__device__ __forceinline__ Entry entry_of(float top, float number, int token) {
  const double z = top, n = number, total = z + n, part = total - z;
  return {total, (z - (total - part)) + (n - part), token};
}
// The larger one, of equal ones the lower token's.
__device__ __forceinline__ Entry better(const Entry& a, const Entry& b) {
  const bool left = b.rest > a.rest || (b.rest == a.rest && b.token < a.token);
  return b.most > a.most || (b.most == a.most && left) ? b : a;
}

// Of eight blocks of a thread: what lies in memory of them.
struct JoinPart {
  float top[2][kJoinEach], sum[2][kJoinEach];  // raw, and at the temperature

  __device__ __forceinline__ void load(const float* parts, int blocks, int first) {
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
      for (int i = 0; i < kJoinEach; ++i) {
        const int at = first + i * kJoinThreads + threadIdx.x;
        top[k][i] = at < blocks ? parts[2 * k * int64_t(blocks) + at] : -__builtin_huge_valf();
        sum[k][i] = at < blocks ? parts[(2 * k + 1) * int64_t(blocks) + at] : 0.0f;
      }
  }
  __device__ __forceinline__ void raise(float (&most)[2]) const {  // a NaN is passed over
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
      for (int i = 0; i < kJoinEach; ++i) most[k] = fmaxf(most[k], top[k][i]);
  }
};

struct JoinShared {
  float sums[2][kJoinChunk];
  float most[2][kJoinWarps], warp_sums[2][kJoinWarps], chunk_sums[2][kJoinTree];
  Entry best[kJoinWarps];
};

// order: a tree of neighbours
__device__ __forceinline__ float tree_of(const float* s) {
  return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}
#endif

__global__ void __launch_bounds__(kJoinThreads) join_kernel(Draws a, Drawn out) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __shared__ __align__(16) JoinShared shared;
  const int64_t row = blockIdx.x;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float* const parts = a.parts + row * 4 * a.blocks;
  const float* const entries = a.entries + row * 2 * a.blocks;
  const int* const tokens = a.tokens + row * a.blocks;
  let_kernel_after_start();
  wait_for_kernel_before();
  const float temperature = a.temperature[row], t = temperature == 0.0f ? 1.0f : temperature;

  JoinPart part;
  int token[kJoinEach];
  float number[kJoinEach];
  const auto load_tokens = [&](int first) {
#pragma unroll
    for (int i = 0; i < kJoinEach; ++i) {
      const int at = first + i * kJoinThreads + threadIdx.x;
      token[i] = at < a.blocks ? tokens[at] : kNoToken;
    }
  };
  const auto load_numbers = [&](int first) {  // of few blocks
#pragma unroll
    for (int i = 0; i < kJoinEach; ++i)
      if (token[i] != kNoToken) number[i] = entries[a.blocks + first + i * kJoinThreads + threadIdx.x];
  };
  load_tokens(0);
  part.load(parts, a.blocks, 0);
  load_numbers(0);

  float most[2] = {-__builtin_huge_valf(), -__builtin_huge_valf()}, origin[2];
  for (int first = kJoinChunk; first < a.blocks; first += kJoinChunk) {
    JoinPart more;
    more.load(parts, a.blocks, first);
    more.raise(most);
  }
  part.raise(most);
#pragma unroll
  for (int k = 0; k < 2; ++k) {
#pragma unroll
    for (int across = 1; across < 32; across *= 2) most[k] = fmaxf(most[k], __shfl_xor_sync(~0u, most[k], across));
    if (lane == 0) shared.most[k][warp] = most[k];
  }
  if (threadIdx.x < 2 * kJoinTree) shared.chunk_sums[threadIdx.x / kJoinTree][threadIdx.x % kJoinTree] = 0.0f;
  __syncthreads();
#pragma unroll
  for (int k = 0; k < 2; ++k) {
#pragma unroll
    for (int w = 0; w < kJoinWarps; ++w) most[k] = fmaxf(most[k], shared.most[k][w]);
    origin[k] = most[k] == -__builtin_huge_valf() ? 0.0f : most[k];
  }

  float total[2];  // of the first thread
  Entry best = no_entry();
  for (int first = 0, chunk = 0; first < a.blocks; first += kJoinChunk, ++chunk) {
    if (first) {
      load_tokens(first);
      part.load(parts, a.blocks, first);
      load_numbers(first);
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float e[kJoinEach];
#pragma unroll
      for (int i = 0; i < kJoinEach; ++i) e[i] = part.top[k][i] - origin[k];
      exp_of_negatives(e);
#pragma unroll
      for (int i = 0; i < kJoinEach; ++i) shared.sums[k][i * kJoinThreads + threadIdx.x] = part.sum[k][i] * e[i];
    }
#pragma unroll
    for (int i = 0; i < kJoinEach; ++i)
      if (token[i] != kNoToken) best = better(best, entry_of(part.top[1][i], number[i], token[i]));
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float s = tree_of(shared.sums[k] + kJoinEach * threadIdx.x);
#pragma unroll
      for (int across = 1; across < 32; across *= 2) s = s + __shfl_xor_sync(~0u, s, across);
      if (lane == 0) shared.warp_sums[k][warp] = s;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      const int place = chunk % kJoinTree;
      const bool last = first + kJoinChunk >= a.blocks;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        shared.chunk_sums[k][place] = tree_of(shared.warp_sums[k]);
        if (place + 1 < kJoinTree && !last) continue;
        const float tree = tree_of(shared.chunk_sums[k]);
        total[k] = chunk < kJoinTree ? tree : total[k] + tree;  // order: the trees' sums ascending
        for (int i = 0; i < kJoinTree; ++i) shared.chunk_sums[k][i] = 0.0f;
      }
    }
  }

  if (__any_sync(~0u, best.token != kNoToken)) {
#pragma unroll
    for (int across = 1; across < 32; across *= 2)
      best = better(best, {__shfl_xor_sync(~0u, best.most, across), __shfl_xor_sync(~0u, best.rest, across),
                           __shfl_xor_sync(~0u, best.token, across)});
  }
  if (lane == 0) shared.best[warp] = best;
  __syncthreads();
  if (threadIdx.x) return;
#pragma unroll
  for (int w = 1; w < kJoinWarps; ++w) best = better(best, shared.best[w]);
  // A sum is at least 1 where its largest logit is finite, or NaN.
  const bool known = fabsf(most[0]) < __builtin_huge_valf() && fabsf(most[1]) < __builtin_huge_valf() &&
                     total[0] < __builtin_huge_valf() && total[1] < __builtin_huge_valf() && best.token < kNoToken;
  const float x = known ? entries[best.token / kDrawBlock] : 0.0f, nothing = __int_as_float(0x7fc00000);
  const float raw = (x - most[0]) - log_of_normal(total[0]), own = (__fdiv_rn(x, t) - most[1]) - log_of_normal(total[1]);
  out.ids[row] = known ? best.token : -1;
  out.logprobs[row] = known ? own : nothing;
  out.raw_logprobs[row] = known ? raw : nothing;
#endif
}

}  // namespace vx::sm90
