// linear for few rows on SM90: out (M, N) = x (M, K) weight (N, K)^T, limited by reading the weight once.
//
// The weight takes wgmma's 64-row side and the rows of x its narrow side ("swap-AB"), so that 8 to 64 rows of x cost
// no padding worth naming. One producer thread keeps a ring of tiles in flight with the bulk tensor copy engine (128-byte
// swizzle, mbarriers); one warpgroup multiplies. A row of x is a column of the product: it meets no other row.
// order: K ascending in steps of 16, one fp32 accumulator per output element, no split of K; the K tail is zeros.
#pragma once
#include "common/sm90.cuh"

namespace vx::sm90 {

struct SkinnyArgs {
  const void* bias;   // (N,) in the input dtype, or null
  void* out;          // (M, N) with rows out_ld apart, input dtype or fp32
  int64_t out_ld;
  int m, n, k, stages;
  bool out_f32;
};

constexpr int kBoxK = 64;       // elements of K in one 128-byte swizzle row
constexpr int kTileN = 64;      // weight rows of a block
constexpr int kThreads = 160;   // one consumer warpgroup, one producer warp

__host__ __device__ constexpr int skinny_x_bytes(int tokens) { return tokens * 128 < 1024 ? 1024 : tokens * 128; }
__host__ __device__ constexpr int skinny_stage_bytes(int tokens, int boxes) {
  return boxes * (kTileN * 128 + skinny_x_bytes(tokens));
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

#define VX_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define VX_D16(i) VX_D4(i), VX_D4(i + 4), VX_D4(i + 8), VX_D4(i + 12)
#define VX_WGMMA(type, n, regs, a, b, ...)                                                                        \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" regs "}, %" #a ", %" #b       \
               ", 1, 1, 1, 0, 0;"                                                                                 \
               : __VA_ARGS__                                                                                      \
               : "l"(weight), "l"(x))
#define VX_R4(a, b, c, e) "%" #a ",%" #b ",%" #c ",%" #e
#define VX_REGS8 VX_R4(0, 1, 2, 3) "," VX_R4(4, 5, 6, 7)
#define VX_REGS16 VX_REGS8 "," VX_R4(8, 9, 10, 11) "," VX_R4(12, 13, 14, 15)
#define VX_REGS32 VX_REGS16 "," VX_R4(16, 17, 18, 19) "," VX_R4(20, 21, 22, 23) "," VX_R4(24, 25, 26, 27) "," VX_R4(28, 29, 30, 31)
#define VX_MULTIPLY(type)                                                                               \
  if constexpr (TOKENS == 8) VX_WGMMA(type, 8, VX_R4(0, 1, 2, 3), 4, 5, VX_D4(0));                      \
  if constexpr (TOKENS == 16) VX_WGMMA(type, 16, VX_REGS8, 8, 9, VX_D4(0), VX_D4(4));                   \
  if constexpr (TOKENS == 32) VX_WGMMA(type, 32, VX_REGS16, 16, 17, VX_D16(0));                         \
  if constexpr (TOKENS == 64) VX_WGMMA(type, 64, VX_REGS32, 32, 33, VX_D16(0), VX_D16(16));

template <class T, int TOKENS>
__device__ __forceinline__ void multiply(float (&d)[TOKENS / 2], uint64_t weight, uint64_t x) {
  if constexpr (sizeof(T) && __is_same(T, __nv_bfloat16)) {
    VX_MULTIPLY("bf16")
  } else {
    VX_MULTIPLY("f16")
  }
}

#endif

// T bf16 | fp16. TOKENS rows of x per block (8, 16, 32, 64); BOXES 64-wide pieces of K per stage.
template <class T, int TOKENS, int BOXES>
__global__ void __launch_bounds__(kThreads)
    skinny_kernel(const __grid_constant__ CUtensorMap weight_map, const __grid_constant__ CUtensorMap x_map,
                  const SkinnyArgs a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kMaxStages = 16;
  constexpr int kWeightBytes = kTileN * 128, kXBytes = TOKENS * 128, kXStride = skinny_x_bytes(TOKENS);
  constexpr int kStage = skinny_stage_bytes(TOKENS, BOXES);
  extern __shared__ uint8_t memory[];
  __shared__ __align__(8) uint64_t barriers[2 * kMaxStages];
  const uint32_t ring = (shared_address(memory) + 1023) & ~1023u;
  const uint32_t full = shared_address(barriers), empty = full + 8 * kMaxStages;
  const int steps = (a.k + kBoxK * BOXES - 1) / (kBoxK * BOXES);
  const int n0 = blockIdx.x * kTileN, m0 = blockIdx.y * TOKENS;
  constexpr int kProducer = 128;

  if (threadIdx.x == kProducer) {
    for (int i = 0; i < a.stages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, 1);
    }
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  __syncthreads();

  if (threadIdx.x >= kProducer) {
    if (threadIdx.x != kProducer) return;
    uint64_t once, keep;  // the weight passes through L2, x is read by every block
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(keep));
    const uint64_t weight_policy = gridDim.y == 1 ? once : keep;
    int slot = 0;
    uint32_t phase = 1;
    for (int step = 0; step < steps; ++step) {
      barrier_wait(empty + 8 * slot, phase);  // passes at once in the first round
      barrier_expect(full + 8 * slot, BOXES * (kWeightBytes + kXBytes));
      const uint32_t stage = ring + slot * kStage;
#pragma unroll
      for (int b = 0; b < BOXES; ++b)
        copy_box(stage + b * kWeightBytes, &weight_map, full + 8 * slot, (step * BOXES + b) * kBoxK, n0, weight_policy);
#pragma unroll
      for (int b = 0; b < BOXES; ++b)
        copy_box(stage + BOXES * kWeightBytes + b * kXStride, &x_map, full + 8 * slot, (step * BOXES + b) * kBoxK, m0, keep);
      if (++slot == a.stages) slot = 0, phase ^= 1;
    }
    return;
  }

  float d[TOKENS / 2];
#pragma unroll
  for (int i = 0; i < TOKENS / 2; ++i) d[i] = 0.0f;
  int slot = 0, before = 0;
  uint32_t phase = 0;
  for (int step = 0; step < steps; ++step) {
    barrier_wait(full + 8 * slot, phase);
    const uint32_t stage = ring + slot * kStage;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int b = 0; b < BOXES; ++b)
#pragma unroll
      for (int k = 0; k < kBoxK / 16; ++k)  // order: K ascending; products of one accumulator run in issue order
        multiply<T, TOKENS>(d, operand(stage + b * kWeightBytes + 32 * k),
                            operand(stage + BOXES * kWeightBytes + b * kXStride + 32 * k));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");  // the stage before this one has been read
    if (step && threadIdx.x == 0) barrier_arrive(empty + 8 * before);
    before = slot;
    if (++slot == a.stages) slot = 0, phase ^= 1;
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < TOKENS / 2; ++i) asm volatile("" : "+f"(d[i])::"memory");

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int n = n0 + 16 * warp + lane / 4 + 8 * h;
    if (n >= a.n) continue;
    const float bias = a.bias ? widen(static_cast<const T*>(a.bias)[n]) : 0.0f;
#pragma unroll
    for (int j = 0; j < TOKENS / 8; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int m = m0 + 8 * j + lane % 4 * 2 + i;
        if (m >= a.m) continue;
        const float v = a.bias ? d[4 * j + 2 * h + i] + bias : d[4 * j + 2 * h + i];
        const int64_t at = m * a.out_ld + n;
        if (a.out_f32)
          static_cast<float*>(a.out)[at] = v;
        else
          narrow(static_cast<T*>(a.out)[at], v);
      }
  }
#endif
}

}  // namespace vx::sm90
