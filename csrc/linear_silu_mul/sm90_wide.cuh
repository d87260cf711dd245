// The gated half of a feed-forward for more rows than sm90_skinny.cuh takes: a tile is 64 GROUPS rows of the weight, gates
// and ups in turns of eight (sm90_gated.cuh), by TOKENS rows of x. 256 rows by 24,576 of the weight are one wave of 128 tiles.
//
// The weight takes wgmma's 64-row side. Shared memory serves wgmma and the copy engine at 128 bytes a clock together, and in
// this way it is asked for least where TOKENS is large: the weight is read once, x once a group. GROUPS warpgroups multiply
// 64 rows of the weight each, their accumulators most of the registers; so no warp is there for the copies alone: the first
// one keeps the ring of stages full on the way. Near the end the groups take turns, and the activation of one runs beside
// the products of the next. There are no clusters: they tie blocks to each other (2 to 3 us slower, of 40 as of 130).
// Launched by launch_chained: what runs before the kernel before has ended only asks the L2 cache for weights.
// order: K ascending in steps of 16, one fp32 accumulator per element, no split of K; the K tail is zeros.
#pragma once
#include "linear/sm90_tiled.cuh"
#include "linear_silu_mul/sm90_gated.cuh"

namespace vx::sm90 {

struct WideArgs {
  int k;
  int token_tiles;  // tiles of rows of x
  int x_rows;       // of x in a copy: where one tile has all, only those that are there, for others take longer
  int stages;       // of the ring
  bool gelu;
};

constexpr int kWideColumns = 32;  // of the result in a box that leaves: what a group makes

constexpr int wide_threads(int groups) { return 128 * groups; }
constexpr int wide_shared_bytes(int tokens, int width, int stages) { return stages * (tokens + width) * 128 + 1024; }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ float2 widen_pair(__nv_bfloat16, uint32_t both) {
  return {__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u)};
}
__device__ __forceinline__ float2 widen_pair(__half, uint32_t both) {
  return __half22float2(reinterpret_cast<const __half2&>(both));
}

// d[4 j + 2 u + i]: element lane / 4 of the warp's eight, its gate (u 0) and its up, of row 8 j + lane % 4 * 2 + i of x. They
// leave in boxes of 64 rows of x by 32 elements, transposed on the way, 16-byte pieces swizzled as the copy engine has them.
// A loop, because short code stays in the instruction cache: a group alone takes 3,100 clocks, and 5,200 in one piece.
template <class T, bool GELU, int TOKENS>
__device__ __forceinline__ void wide_epilogue(float (&d)[TOKENS / 2], uint32_t own, int next_two, int barrier,
                                              const CUtensorMap* map, int column, int row) {
  constexpr int kPairs = 64 / 4;  // of rows that a thread has of a box: gates, ups, gates, ...
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  uint32_t pairs[TOKENS / 4];
#pragma unroll
  for (int i = 0; i < TOKENS / 4; ++i) {
    pairs[i] = narrow_pair(T(), d[2 * i], d[2 * i + 1]);
    asm volatile("" : "+r"(pairs[i])::"memory");
  }
  asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");  // all four warps' products have been made
#pragma unroll 1
  for (int box = 0; box < TOKENS / 64; ++box) {
    const uint32_t from = own + box / 2 * next_two + box % 2 * 4096;
    const uint32_t to = from + lane * 64 + ((warp ^ (lane / 2 % 4)) << 4);
    float g[kPairs], u[kPairs], y[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; i += 2) {
      const float2 gates = widen_pair(T(), pairs[i]), ups = widen_pair(T(), pairs[i + 1]);
      g[i] = gates.x, g[i + 1] = gates.y, u[i] = ups.x, u[i + 1] = ups.y;
    }
    gate_mul_all<GELU>(g, u, y);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t v[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) v[q] = narrow_pair(T(), y[8 * half + 2 * q], y[8 * half + 2 * q + 1]);
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to + half * 2048), "r"(v[0]),
                   "r"(v[1]), "r"(v[2]), "r"(v[3])
                   : "memory");
    }
#pragma unroll
    for (int i = 0; i + kPairs < TOKENS / 4; ++i) pairs[i] = pairs[i + kPairs];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
    if (thread == 0) {
      store_box(map, from, column, row + 64 * box);
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
  }
  if (thread == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

#endif

template <class T, int GROUPS, int TOKENS>
__global__ void __launch_bounds__(wide_threads(GROUPS), 1)
    wide_kernel(const __grid_constant__ CUtensorMap weight_map, const __grid_constant__ CUtensorMap x_map,
                const __grid_constant__ CUtensorMap out_map, const WideArgs a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kWidth = 64 * GROUPS, kXBytes = TOKENS * 128, kStageBytes = kXBytes + kWidth * 128;
  extern __shared__ uint8_t memory[];
  __shared__ __align__(8) uint64_t barriers[2 * kTiledStages];
  Ring ring(memory, barriers, a.stages, kStageBytes, kTiledStages);
  const int steps = (a.k + kTiledDepth - 1) / kTiledDepth;
  const int m0 = blockIdx.x % a.token_tiles * TOKENS, n0 = blockIdx.x / a.token_tiles * kWidth;

  if (threadIdx.x == 0) {
    prefetch_map(&weight_map);
    prefetch_map(&x_map);
    prefetch_map(&out_map);
    ring.init(GROUPS);
    barrier_init_fence();
  }
  __syncthreads();

  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), thread = threadIdx.x % 128;
  const bool loads = __shfl_sync(~0u, threadIdx.x / 32, 0) == 0;
  uint64_t once, keep;  // the weight passes through L2 where each of its tiles is asked for once
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(keep));
  const uint64_t weight_policy = a.token_tiles == 1 ? once : keep;
  const auto load_weight = [&](int step, int slot) {
    barrier_expect(ring.full + 8 * slot, kStageBytes - kXBytes + a.x_rows * 128);
    PairedRows::copy(ring.base + slot * kStageBytes + kXBytes, &weight_map, ring.full + 8 * slot, step * kTiledDepth, n0, weight_policy);
  };
  const auto load_x = [&](int step, int slot) {
    copy_box(ring.base + slot * kStageBytes, &x_map, ring.full + 8 * slot, step * kTiledDepth, m0, keep);
  };
  if (loads && is_elected()) {
    const int first = min(a.stages, steps);
    for (int i = 0; i < first; ++i) PairedRows::prefetch(&weight_map, i * kTiledDepth, n0);
    wait_for_kernel_before();
    for (int i = 0; i < first; ++i) load_weight(i, i), load_x(i, i);
  }
  __syncwarp();
  float d[TOKENS / 2];
#pragma unroll
  for (int i = 0; i < TOKENS / 2; ++i) {
    d[i] = 0.0f;
    asm volatile("" : "+f"(d[i])::"memory");
  }
  wait_for_kernel_before();
  // From step `last` on nothing is loaded any more, and each group in its turn takes all that is left.
  const int last = max(0, steps - a.stages + 1), start_next = max(1, steps - 2 * a.stages);
  int before = 0;
  uint32_t phase_before = 0;
  for (int step = 0; step < steps; ++step) {
    if (step == last && group) asm volatile("bar.sync %0, 256;" ::"r"(group) : "memory");
    ring.await_ready();
    const uint32_t stage = __shfl_sync(~0u, ring.stage(), 0);
    const uint64_t x = operand(stage), weight = operand(stage + kXBytes + group * 64 * 128);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < kTiledDepth / 16; ++k)  // order: K ascending; products of one accumulator run in issue order
      multiply_tile<T, TOKENS>(d, weight + 2 * k, x + 2 * k);
    wgmma_commit();
    wgmma_wait<1>();  // the stage before this one has been read
    if (step) {
      if (thread == 0) barrier_arrive(ring.empty + 8 * before);
      const int next = step - 1 + a.stages;
      if (loads && next < steps) {
        if (step == start_next) let_kernel_after_start();
        if (is_elected()) {
          barrier_wait(ring.empty + 8 * before, phase_before);
          load_weight(next, before);
          load_x(next, before);
        }
        __syncwarp();
      }
    }
    before = ring.slot, phase_before = ring.phase;
    ring.advance();
  }
  if (group + 1 < GROUPS) asm volatile("bar.arrive %0, 256;" ::"r"(group + 1) : "memory");
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < TOKENS / 2; ++i) asm volatile("" : "+f"(d[i])::"memory");
  // Results leave through the group's own rows of the weight in the first slots: no other group reads them, and nothing
  // more comes into them.
  const uint32_t own = ring.base + kXBytes + group * 64 * 128;
  if (a.gelu)
    wide_epilogue<T, true, TOKENS>(d, own, kStageBytes, GROUPS + group, &out_map, n0 / 2 + group * 32, m0);
  else
    wide_epilogue<T, false, TOKENS>(d, own, kStageBytes, GROUPS + group, &out_map, n0 / 2 + group * 32, m0);
#endif
}

// (rows, columns) as results leave for it.
inline bool wide_out_map(CUtensorMap* map, bool is_bf16, void* out, int64_t rows, int64_t columns, int64_t ld) {
  return encode_map<2>(map, is_bf16, out, {cuuint64_t(columns), cuuint64_t(rows)}, {cuuint64_t(ld) * 2}, {kWideColumns, 64},
                       CU_TENSOR_MAP_SWIZZLE_64B);
}

}  // namespace vx::sm90
