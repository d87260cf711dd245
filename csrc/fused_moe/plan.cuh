// The plan of a mixture on a GPU: a counting sort of slots by expert that keeps their order, with no atomics on what
// decides a place. Reads the ids, writes offsets, order and position; looks at nothing on the host.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "fused_moe/chain.cuh"

namespace vx {

constexpr int kPlanThreads = 1024, kPlanWarps = kPlanThreads / 32;
constexpr int kPlanExperts = 512;  // a warp's counts of all experts lie in shared memory

struct MoePlanCuda {
  int slots, experts, bits;  // bits of the number `experts`, which stands for nobody
  const int32_t* ids;
  int32_t *offsets, *order, *position;
  int32_t* counts;  // (chunks, experts), or null where one block does it all
};

__device__ __forceinline__ int scan_of_warp(int sum) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, sum, d);
    if (int(threadIdx.x & 31) >= d) sum += other;
  }
  return sum;
}

// The sum of `value` over the threads before this one, of a block of at most 32 warps; and over all of them.
__device__ __forceinline__ int scan_of_block(int value, int* warp_sums, int& all) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const int sum = scan_of_warp(value);
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  const int sums = scan_of_warp(lane < warps ? warp_sums[lane] : 0);
  all = __shfl_sync(~0u, sums, 31);
  const int before = __shfl_sync(~0u, sums, warp - 1 & 31);
  return (warp ? before : 0) + sum - value;
}

// A block takes Rounds slots for each of its threads; a warp's slots lie together. The place of a slot among its
// expert's: the slots of warps before, of rounds before, of lanes before. With Whole there is one block, and it finishes;
// otherwise the place within the block is left in `position`, and the block's counts in `counts`.
template <int Rounds, bool Whole>
__global__ void __launch_bounds__(kPlanThreads) moe_plan_rank_kernel(MoePlanCuda a) {
  __shared__ uint16_t held[kPlanWarps * kPlanExperts];
  __shared__ int base[kPlanExperts], warp_sums[kPlanWarps];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, experts = a.experts;
  const int first = (blockIdx.x * blockDim.x + warp * 32) * Rounds + lane;
  uint16_t* const mine = held + warp * experts;
  int id[Rounds], rank[Rounds];
  for (int e = lane; e < experts; e += 32) mine[e] = 0;
  follow_kernel_before();
#pragma unroll
  for (int r = 0; r < Rounds; ++r) {
    const int slot = first + r * 32;
    id[r] = slot < a.slots ? a.ids[slot] : experts;
    if (unsigned(id[r]) >= unsigned(experts)) id[r] = experts;
  }
  unsigned same[Rounds];
#pragma unroll
  for (int r = 0; r < Rounds; ++r) same[r] = ~0u;
  for (int b = 0; b < a.bits; ++b) {
#pragma unroll
    for (int r = 0; r < Rounds; ++r) {
      const bool set = id[r] >> b & 1;
      const unsigned with = __ballot_sync(~0u, set);
      same[r] &= set ? with : ~with;
    }
  }
  __syncwarp();
#pragma unroll
  for (int r = 0; r < Rounds; ++r) {
    const unsigned before = same[r] & ((1u << lane) - 1);
    const int so_far = id[r] < experts ? mine[id[r]] : 0;
    rank[r] = so_far + __popc(before);
    __syncwarp();
    if (id[r] < experts && before == 0) mine[id[r]] = uint16_t(so_far + __popc(same[r]));
    __syncwarp();
  }
  __syncthreads();
  int total = 0;  // of expert threadIdx.x: there are at least as many threads
  if (int(threadIdx.x) < experts) {
    int count[kPlanWarps];
#pragma unroll
    for (int w = 0; w < kPlanWarps; ++w) count[w] = w < warps ? held[w * experts + threadIdx.x] : 0;
#pragma unroll
    for (int w = 0; w < kPlanWarps; ++w) {
      if (w < warps) held[w * experts + threadIdx.x] = uint16_t(total);
      total += count[w];
    }
  }
  if constexpr (Whole) {
    int all;
    const int begin = scan_of_block(total, warp_sums, all);
    if (int(threadIdx.x) < experts) {
      base[threadIdx.x] = begin;
      a.offsets[threadIdx.x] = begin;
    }
    if (threadIdx.x == 0) a.offsets[experts] = all;
    __syncthreads();
#pragma unroll
    for (int r = 0; r < Rounds; ++r) {
      const int slot = first + r * 32;
      if (slot >= a.slots) continue;
      const int at = id[r] < experts ? base[id[r]] + mine[id[r]] + rank[r] : -1;
      a.position[slot] = at;
      if (at >= 0) a.order[at] = slot;
      if (slot >= all) a.order[slot] = 0;
    }
  } else {
    if (int(threadIdx.x) < experts) a.counts[blockIdx.x * experts + threadIdx.x] = total;
    __syncthreads();
#pragma unroll
    for (int r = 0; r < Rounds; ++r) {
      const int slot = first + r * 32;
      if (slot < a.slots && id[r] < experts) a.position[slot] = mine[id[r]] + rank[r];
    }
  }
}

// Adds to the places within the blocks of moe_plan_rank_kernel the slots of blocks before, and of experts before.
template <int Rounds>
__global__ void __launch_bounds__(kPlanThreads) moe_plan_place_kernel(MoePlanCuda a) {
  __shared__ int base[kPlanExperts], totals[kPlanExperts], warp_sums[kPlanWarps];
  const int experts = a.experts, chunks = gridDim.x, chunk = blockIdx.x;
  const int first = chunk * kPlanThreads * Rounds + threadIdx.x;
  int id[Rounds], place[Rounds];
#pragma unroll
  for (int r = 0; r < Rounds; ++r) {  // the kernel before this one has said that nothing before it runs
    const int slot = first + r * kPlanThreads;
    id[r] = slot < a.slots ? a.ids[slot] : -1;
  }
  if (int(threadIdx.x) < experts) base[threadIdx.x] = totals[threadIdx.x] = 0;
  __syncthreads();
  follow_kernel_before();
#pragma unroll
  for (int r = 0; r < Rounds; ++r) {
    const int slot = first + r * kPlanThreads;
    place[r] = slot < a.slots ? a.position[slot] : 0;
  }
  const int wide = (experts + 31) & ~31, parts = kPlanThreads / wide, part = threadIdx.x / wide;
  const int e = threadIdx.x - part * wide;
  if (part < parts && e < experts) {
    int before = 0, total = 0;
#pragma unroll 8
    for (int c = part; c < chunks; c += parts) {
      const int count = a.counts[c * experts + e];
      total += count;
      before += c < chunk ? count : 0;
    }
    atomicAdd(&base[e], before);  // whole numbers, within the block
    atomicAdd(&totals[e], total);
  }
  __syncthreads();
  int all;
  const bool counted = int(threadIdx.x) < experts;
  const int begin = scan_of_block(counted ? totals[threadIdx.x] : 0, warp_sums, all);
  if (counted) {
    base[threadIdx.x] += begin;
    if (chunk == 0) a.offsets[threadIdx.x] = begin;
  }
  if (chunk == 0 && threadIdx.x == 0) a.offsets[experts] = all;
  __syncthreads();
#pragma unroll
  for (int r = 0; r < Rounds; ++r) {
    const int slot = first + r * kPlanThreads;
    if (slot >= a.slots) continue;
    const int at = unsigned(id[r]) < unsigned(experts) ? base[id[r]] + place[r] : -1;
    a.position[slot] = at;
    if (at >= 0) a.order[at] = slot;
    if (slot >= all) a.order[slot] = 0;
  }
}

constexpr int64_t kPlanWhole = 2 * kPlanThreads;  // slots that one block does: beyond, its scattered writes take longer

// How many rounds a chunk has: few chunks, since each reads the counts of all.
inline int moe_plan_rounds(int64_t slots) {
  for (int rounds = 1; rounds < 8; rounds *= 2)
    if (slots <= int64_t(rounds) * kPlanThreads * 128) return rounds;
  return 8;
}

inline int64_t moe_plan_chunks(int64_t slots) {
  const int64_t each = int64_t(moe_plan_rounds(slots)) * kPlanThreads;
  return (slots + each - 1) / each;
}

template <int Rounds>
cudaError_t moe_plan_launch_as(const MoePlanCuda& a, ChainedStream on) {
  if (!a.counts) {
    constexpr int kAtOnce = Rounds < 2 ? Rounds : 2;
    const int each = (a.slots + kAtOnce - 1) / kAtOnce, least = each > a.experts ? each : a.experts;
    return launch_following(moe_plan_rank_kernel<kAtOnce, true>, dim3(1), (least + 31) & ~31, on, a);
  }
  const unsigned chunks = unsigned(moe_plan_chunks(a.slots));
  const cudaError_t error = launch_following(moe_plan_rank_kernel<Rounds, false>, dim3(chunks), kPlanThreads, on, a);
  if (error != cudaSuccess) return error;
  return launch_following(moe_plan_place_kernel<Rounds>, dim3(chunks), kPlanThreads, on, a);
}

inline cudaError_t moe_plan_launch(MoePlanCuda a, ChainedStream on) {
  a.bits = 32 - __builtin_clz(unsigned(a.experts));
  const int rounds = a.counts || a.slots <= kPlanThreads ? moe_plan_rounds(a.slots) : 2;
  switch (rounds) {
    case 1: return moe_plan_launch_as<1>(a, on);
    case 2: return moe_plan_launch_as<2>(a, on);
    case 4: return moe_plan_launch_as<4>(a, on);
    default: return moe_plan_launch_as<8>(a, on);
  }
}

}  // namespace vx
