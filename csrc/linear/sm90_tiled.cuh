// linear for more rows than sm90_skinny.cuh takes on SM90, where one tile for each multiprocessor is all there is to do:
// out (M, N) = x (M, K) weight (N, K)^T in tiles of 64 GROUPS rows of the weight by TOKENS rows of x.
//
// The weight takes wgmma's 64-row side and the rows of x its other one ("swap-AB"), which comes in any multiple of 16: so
// M rows are cut into equal tiles with hardly any padding. A producer thread keeps a ring of stages in flight with the bulk
// tensor copy engine, GROUPS warpgroups multiply 64 rows each and leave through shared memory. Blocks of a cluster have one
// tile of the weight in common: each loads its share, for all of them.
// Launched by launch_chained: what runs before the kernel before has ended only asks the L2 cache for weights.
// order: K ascending in steps of 16, one fp32 accumulator per output element, no split of K; the K tail is zeros.
#pragma once
#include "common/elect.cuh"
#include "common/sm90_ring.cuh"

namespace vx::sm90 {

struct TiledArgs {
  const void* bias;   // (N,) in the input dtype, or null
  int n, k;
  int token_tiles;    // tiles of rows of x, rounded up to what a cluster takes
  int cluster;        // blocks that share a tile of the weight
  int stages;         // of the ring
};

constexpr int kTiledStages = 16, kTiledDepth = 64;

constexpr int tiled_shared_bytes(int groups, int tokens, int stages) { return stages * (64 * groups + tokens) * 128 + 1024; }
constexpr int tiled_threads(int groups) { return 128 * groups + 32; }
// Accumulators have to fit into the registers that so many threads have.
constexpr bool tiled_exists(int groups, int tokens) {
  return tokens >= 64 && tokens % 16 == 0 && (groups == 1 ? tokens <= 256 : groups == 3 && tokens <= 192);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

#define VX_N8(a, b, c, e, f, g, h, i) "%" #a ",%" #b ",%" #c ",%" #e ",%" #f ",%" #g ",%" #h ",%" #i
#define VX_N32 VX_N8(0, 1, 2, 3, 4, 5, 6, 7) "," VX_N8(8, 9, 10, 11, 12, 13, 14, 15) "," \
               VX_N8(16, 17, 18, 19, 20, 21, 22, 23) "," VX_N8(24, 25, 26, 27, 28, 29, 30, 31)
#define VX_N40 VX_N32 "," VX_N8(32, 33, 34, 35, 36, 37, 38, 39)
#define VX_N48 VX_N40 "," VX_N8(40, 41, 42, 43, 44, 45, 46, 47)
#define VX_N56 VX_N48 "," VX_N8(48, 49, 50, 51, 52, 53, 54, 55)
#define VX_N64 VX_N56 "," VX_N8(56, 57, 58, 59, 60, 61, 62, 63)
#define VX_N72 VX_N64 "," VX_N8(64, 65, 66, 67, 68, 69, 70, 71)
#define VX_N80 VX_N72 "," VX_N8(72, 73, 74, 75, 76, 77, 78, 79)
#define VX_N88 VX_N80 "," VX_N8(80, 81, 82, 83, 84, 85, 86, 87)
#define VX_N96 VX_N88 "," VX_N8(88, 89, 90, 91, 92, 93, 94, 95)
#define VX_N104 VX_N96 "," VX_N8(96, 97, 98, 99, 100, 101, 102, 103)
#define VX_N112 VX_N104 "," VX_N8(104, 105, 106, 107, 108, 109, 110, 111)
#define VX_N120 VX_N112 "," VX_N8(112, 113, 114, 115, 116, 117, 118, 119)
#define VX_N128 VX_N120 "," VX_N8(120, 121, 122, 123, 124, 125, 126, 127)
#define VX_F8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
                 "+f"(d[i + 6]), "+f"(d[i + 7])
#define VX_F32 VX_F8(0), VX_F8(8), VX_F8(16), VX_F8(24)
#define VX_F40 VX_F32, VX_F8(32)
#define VX_F48 VX_F40, VX_F8(40)
#define VX_F56 VX_F48, VX_F8(48)
#define VX_F64 VX_F56, VX_F8(56)
#define VX_F72 VX_F64, VX_F8(64)
#define VX_F80 VX_F72, VX_F8(72)
#define VX_F88 VX_F80, VX_F8(80)
#define VX_F96 VX_F88, VX_F8(88)
#define VX_F104 VX_F96, VX_F8(96)
#define VX_F112 VX_F104, VX_F8(104)
#define VX_F120 VX_F112, VX_F8(112)
#define VX_F128 VX_F120, VX_F8(120)
#define VX_WGMMA_OF(type, tokens, values, a, b)                                                                      \
  if constexpr (TOKENS == tokens)                                                                                    \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #tokens "k16.f32." type "." type " {" VX_N##values "}, %" #a     \
                 ", %" #b ", 1, 1, 1, 0, 0;"                                                                         \
                 : VX_F##values                                                                                      \
                 : "l"(weight), "l"(x))
#define VX_MULTIPLY_TILE(type)                                                                                \
  VX_WGMMA_OF(type, 64, 32, 32, 33);                                                                          \
  VX_WGMMA_OF(type, 80, 40, 40, 41);                                                                          \
  VX_WGMMA_OF(type, 96, 48, 48, 49);                                                                          \
  VX_WGMMA_OF(type, 112, 56, 56, 57);                                                                         \
  VX_WGMMA_OF(type, 128, 64, 64, 65);                                                                         \
  VX_WGMMA_OF(type, 144, 72, 72, 73);                                                                         \
  VX_WGMMA_OF(type, 160, 80, 80, 81);                                                                         \
  VX_WGMMA_OF(type, 176, 88, 88, 89);                                                                         \
  VX_WGMMA_OF(type, 192, 96, 96, 97);                                                                         \
  VX_WGMMA_OF(type, 208, 104, 104, 105);                                                                      \
  VX_WGMMA_OF(type, 224, 112, 112, 113);                                                                      \
  VX_WGMMA_OF(type, 240, 120, 120, 121);                                                                      \
  VX_WGMMA_OF(type, 256, 128, 128, 129)

template <class T, int TOKENS>
__device__ __forceinline__ void multiply_tile(float (&d)[TOKENS / 2], uint64_t weight, uint64_t x) {
  if constexpr (__is_same(T, __nv_bfloat16)) {
    VX_MULTIPLY_TILE("bf16");
  } else {
    VX_MULTIPLY_TILE("f16");
  }
}

__device__ __forceinline__ uint32_t narrow_pair(__nv_bfloat16, float low, float high) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ __forceinline__ uint32_t narrow_pair(__half, float low, float high) {
  uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// To the same place, and the same barrier, of every block of the cluster in `blocks`.
__device__ __forceinline__ void copy_box_to(uint16_t blocks, uint32_t to, const CUtensorMap* map, uint32_t barrier, int k,
                                            int row, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
      " [%0], [%1, {%3, %4}], [%2], %5, %6;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(k), "r"(row), "h"(blocks), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void store_box(const CUtensorMap* map, uint32_t from, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from), "r"(column),
               "r"(row)
               : "memory");
}

#endif

template <class T, int GROUPS, int TOKENS>
__global__ void __launch_bounds__(tiled_threads(GROUPS), GROUPS == 1 ? 2 : 1)
    tiled_kernel(const __grid_constant__ CUtensorMap weight_map, const __grid_constant__ CUtensorMap x_map,
                 const __grid_constant__ CUtensorMap out_map, const TiledArgs a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kRows = 64 * GROUPS, kWeightBytes = kRows * 128, kStageBytes = kWeightBytes + TOKENS * 128;
  extern __shared__ uint8_t memory[];
  __shared__ __align__(8) uint64_t barriers[2 * kTiledStages];
  Ring ring(memory, barriers, a.stages, kStageBytes, kTiledStages);
  const int steps = (a.k + kTiledDepth - 1) / kTiledDepth;
  const int rank = blockIdx.x % a.cluster;  // the blocks of a cluster lie side by side along the rows of x
  const int n0 = blockIdx.x / a.token_tiles * kRows, m0 = blockIdx.x % a.token_tiles * TOKENS;

  if (threadIdx.x == 128 * GROUPS) {
    prefetch_map(&weight_map);
    prefetch_map(&x_map);
    ring.init(GROUPS * a.cluster);
    barrier_init_fence();
  }
  __syncthreads();
  if (a.cluster > 1) cluster_sync();

  if (threadIdx.x >= 128 * GROUPS) {
    if (is_elected()) {
      uint64_t once, keep;  // the weight passes through L2 where each of its tiles is asked for once
      asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
      asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(keep));
      const uint64_t weight_policy = a.token_tiles == a.cluster ? once : keep;
      const int share = kRows / a.cluster, n = n0 + rank * share;
      const uint16_t all = (1 << a.cluster) - 1;
      for (int i = 0; i < min(a.stages / 2, steps); ++i) prefetch_box(&weight_map, i * kTiledDepth, n);
      wait_for_kernel_before();
      const int start_next = max(0, steps - a.stages);
      ring.phase = 1;
      for (int step = 0; step < steps; ++step) {
        if (step == start_next) let_kernel_after_start();
        ring.await_free();
        barrier_expect(ring.ready(), kStageBytes);
        const uint32_t to = ring.stage();
        const int k = step * kTiledDepth;
        if (a.cluster > 1)
          copy_box_to(all, to + rank * share * 128, &weight_map, ring.ready(), k, n, weight_policy);
        else
          copy_box(to, &weight_map, ring.ready(), k, n, weight_policy);
        copy_box(to + kWeightBytes, &x_map, ring.ready(), k, m0, keep);
        ring.advance();
      }
    }
    __syncwarp();
  } else {
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), thread = threadIdx.x % 128, warp = thread / 32;
    const int lane = thread % 32;
    float d[TOKENS / 2];
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) d[i] = 0.0f;
    wait_for_kernel_before();
    int before = 0;
    for (int step = 0; step < steps; ++step) {
      ring.await_ready();
      const uint32_t stage = __shfl_sync(~0u, ring.stage(), 0);
      const uint64_t weight = operand(stage + group * 64 * 128), x = operand(stage + kWeightBytes);
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < kTiledDepth / 16; ++k)  // order: K ascending; products of one accumulator run in issue order
        multiply_tile<T, TOKENS>(d, weight + 2 * k, x + 2 * k);
      wgmma_commit();
      wgmma_wait<1>();  // the stage before this one has been read
      if (step && thread < a.cluster) barrier_arrive_at(ring.empty + 8 * before, thread);
      before = ring.slot;
      ring.advance();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) asm volatile("" : "+f"(d[i])::"memory");
    if (a.bias) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int n = n0 + 64 * group + 16 * warp + lane / 4 + 8 * h;
        const float bias = n < a.n ? widen(static_cast<const T*>(a.bias)[n]) : 0.0f;
#pragma unroll
        for (int j = 0; j < TOKENS / 8; ++j) d[4 * j + 2 * h] += bias, d[4 * j + 2 * h + 1] += bias;
      }
    }
    // d[4 j + 2 h + i] is row 16 warp + lane / 4 + 8 h of this group with row 8 j + lane % 4 * 2 + i of x. Transposed on
    // its way to shared memory: 128 bytes for a row of x, their 16-byte pieces swizzled as the copy engine has them. The
    // ring has been read by all, and nothing more comes into it.
    asm volatile("bar.sync 1, %0;" ::"n"(128 * GROUPS) : "memory");
    const uint32_t tile = ring.base + group * TOKENS * 128;
    const uint32_t at = tile + (lane / 16 * 8 + lane % 8) * 128 + (((2 * warp + lane / 8 % 2) ^ (lane % 8)) << 4);
#pragma unroll
    for (int j = 0; j < TOKENS / 8; j += 2) {
      uint32_t v[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) v[q] = narrow_pair(T(), d[4 * j + 2 * q], d[4 * j + 2 * q + 1]);
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at + j * 1024), "r"(v[0]),
                   "r"(v[1]), "r"(v[2]), "r"(v[3])
                   : "memory");
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory");
    if (thread == 0) {
      store_box(&out_map, tile, n0 + 64 * group, m0);
      asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
    }
  }
  if (a.cluster > 1) cluster_sync();  // no block leaves while another may still write to it
#endif
}

}  // namespace vx::sm90
