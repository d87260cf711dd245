// What kernels of others follow blindly, made from what a caller gave: offsets that stay in their tensors and in order.
#pragma once
#include "attention/flash.cuh"

namespace vx::flash {

constexpr int kPlanThreads = 256;

// to[i] = the largest of 0 and from[0..i], none above its limit; by one thread block.
__device__ __forceinline__ void ordered(const int32_t* from, int count, int limit, int32_t* to) {
  __shared__ int tops[kPlanThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int before = 0;
  for (int first = 0; first < count; first += kPlanThreads) {
    const int i = first + threadIdx.x;
    int x = i < count ? min(max(from[i], 0), limit) : 0;
    for (int d = 1; d < 32; d *= 2) {
      const int y = __shfl_up_sync(0xffffffffu, x, d);
      if (lane >= d) x = max(x, y);
    }
    if (lane == 31) tops[warp] = x;
    __syncthreads();
    x = max(x, before);
    for (int w = 0; w < kPlanThreads / 32; ++w) {
      if (w < warp) x = max(x, tops[w]);
      before = max(before, tops[w]);
    }
    if (i < count) to[i] = x;
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kPlanThreads)
    packed_plan_kernel(const int32_t* at, const int32_t* at_k, int count, int tokens, int keys, int32_t* plan) {
  if (threadIdx.x == 0) plan[0] = 0;
  ordered(at, count, tokens, plan + 4);
  if (at_k) ordered(at_k, count, keys, plan + 4 + count);
}

// Where each sequence's queries begin, how many they are (0 where there is one: that is decode's), and its keys.
__global__ void __launch_bounds__(kPlanThreads)
    paged_plan_kernel(const int32_t* q_at, const int32_t* lens, int sequences, int tokens, int keys, int32_t* plan) {
  if (threadIdx.x == 0) plan[0] = 0;
  for (int i = threadIdx.x; i < sequences; i += kPlanThreads) {
    const Extent queries = extent(q_at, i, tokens);
    plan[4 + i] = queries.begin;
    plan[4 + sequences + i] = queries.length == 1 ? 0 : queries.length;
    plan[4 + 2 * sequences + i] = max(min(lens[i], keys), 0);
  }
}

}  // namespace vx::flash
