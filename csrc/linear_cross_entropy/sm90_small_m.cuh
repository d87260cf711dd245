// The products of a few tokens with a large weight, limited by reading it once: sm90_gemm.cuh's tiles have 256 rows for
// a cluster, and one row of tiles along a vocabulary of K leaves most multiprocessors without work.
// order: K ascending in steps of 16, one fp32 accumulator per element, no split of K; what is missing is zeros.
#pragma once
#include "linear/sm90_gemm.cuh"
#include "linear/sm90_skinny.cuh"
#include "linear/sm90_tiled.cuh"

namespace vx::sm90 {

// C (M, N) = A (M, K) B (N, K)^T for M <= ROWS, k contiguous in both: a tile is all rows by 256 columns. The two blocks of
// a cluster take neighbouring tiles and load A by turns, for both. With 64 rows the multiplying warpgroups take tiles by
// turns, so that one's epilogue lies under the other's product; with 128 each has half of the rows.
__host__ __device__ constexpr int small_m_stage_bytes(int rows) { return (rows / 64 + 4) * kGemmBox; }
__host__ __device__ constexpr int small_m_stages(int rows) { return rows == 64 ? 5 : 4; }
__host__ __device__ constexpr int small_m_shared_bytes(int rows) { return small_m_stages(rows) * small_m_stage_bytes(rows) + 1024; }

template <class T, int ROWS, class Epilogue>
__global__ void VX_CLUSTER_OF_TWO __launch_bounds__(kGemmThreads, 1)
    small_m_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map, const GemmArgs g,
                   const __grid_constant__ Epilogue epilogue) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kStages = small_m_stages(ROWS), kStage = small_m_stage_bytes(ROWS), kA = ROWS / 64;
  extern __shared__ uint8_t memory[];
  __shared__ __align__(8) uint64_t barriers[2 * kStages];
  Ring ring(memory, barriers, kStages, kStage, kStages);
  const int rank = cluster_rank(), clusters = gridDim.x / 2;
  const int steps = (g.k + kGemmDepth - 1) / kGemmDepth;
  const int turns = at_most(g.m, g.m_live, g.m_first) > 0 ? (g.n + 2 * kGemmColumns - 1) / (2 * kGemmColumns) : 0;

  if (threadIdx.x == 0) {
    ring.init(2 * kA);  // the multiplying warpgroups of both blocks that read a stage
    barrier_init_fence();
  }
  cluster_sync();

  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x < 32 && is_elected()) {
      ring.phase = 1;
      for (int turn = blockIdx.x / 2; turn < turns; turn += clusters) {
        const int n0 = (2 * turn + rank) * kGemmColumns;
        for (int step = 0; step < steps; ++step) {
          const int k = step * kGemmDepth;
          ring.await_free();
          barrier_expect(ring.ready(), kStage);
          const uint32_t a = ring.stage(), b = a + kA * kGemmBox;
          if constexpr (kA == 2)
            copy_box_to(3, a + rank * kGemmBox, &a_map, ring.ready(), k, 64 * rank, 0);
          else if (step % 2 == rank)
            copy_box_to(3, a, &a_map, ring.ready(), k, 0, 0);
#pragma unroll
          for (int i = 0; i < 4; ++i) copy_box(b + i * kGemmBox, &b_map, ring.ready(), k, n0 + 64 * i, 0);
          ring.advance();
        }
      }
    }
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1, thread = threadIdx.x % 128;
    const int row = (kA == 2 ? 64 * group : 0) + thread / 32 * 16 + thread % 32 / 4, column_in = thread % 4 * 2;
    float d[128];
    int number = 0;  // of the block's tile
    for (int turn = blockIdx.x / 2; turn < turns; turn += clusters, ++number) {
      if (kA == 1 && number % 2 != group) continue;
      const int n0 = (2 * turn + rank) * kGemmColumns;
      epilogue.begin(d, row, n0 + column_in);
#pragma unroll
      for (int i = 0; i < 128; ++i) asm volatile("" : "+f"(d[i])::"memory");
      // A barrier tells apart one phase from the next alone: the other group must have seen all before this tile's.
      if (kA == 1 && number > 0) asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory");
      int before = -1;
      ring.slot = number * steps % kStages, ring.phase = number * steps / kStages & 1;
      for (int step = 0; step < steps; ++step) {
        ring.await_ready();
        const uint32_t a = ring.stage() + (kA == 2 ? group * kGemmBox : 0), b = ring.stage() + kA * kGemmBox;
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < kGemmDepth / 16; ++k)  // order: K ascending; products of one accumulator run in issue order
          multiply_256<T, false, false>(d, operand(a + 32 * k), operand(b + 32 * k));
        wgmma_commit();
        wgmma_wait<1>();  // the stage before this one has been read
        if (before >= 0 && thread < 2) barrier_arrive_at(ring.empty + 8 * before, thread);
        before = ring.slot;
        ring.advance();
      }
      if (kA == 1 && turn + clusters < turns) asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory");
      wgmma_wait<0>();
      if (before >= 0 && thread < 2) barrier_arrive_at(ring.empty + 8 * before, thread);
#pragma unroll
      for (int i = 0; i < 128; ++i) asm volatile("" : "+f"(d[i])::"memory");
      if (n0 < g.n) epilogue.end(d, row, n0 + column_in);  // where the tiles are odd in number the last one is nobody's
    }
  }
  cluster_sync();  // no block leaves while the other may still write to it
#endif
}

// For g.m <= 128. A and B as sm90::gemm takes them, k contiguous.
template <class T, class Epilogue>
cudaError_t small_m(const CUtensorMap& a, const CUtensorMap& b, const GemmArgs& g, const Epilogue& epilogue, int device,
                    cudaStream_t stream) {
  const bool half = g.m <= 64;
  auto kernel = half ? small_m_kernel<T, 64, Epilogue> : small_m_kernel<T, 128, Epilogue>;
  const int bytes = small_m_shared_bytes(half ? 64 : 128);
  int processors = 0;
  cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  const int turns = (g.n + 2 * kGemmColumns - 1) / (2 * kGemmColumns);
  if (turns == 0) return cudaSuccess;
  kernel<<<2 * std::min(processors / 2, turns), kGemmThreads, bytes, stream>>>(a, b, g, epilogue);
  return cudaGetLastError();
}

// out (tokens, width) = start + d (tokens, K) weight (K, width), times *scale: the gradient of hidden. K is a vocabulary and
// cannot be split, so there are as many tiles as outputs give: 64 GROUPS columns, which take wgmma's 64-row side
// ("swap-AB"), by TOKENS tokens. The two blocks of a cluster have tokens next to each other and load the weight by turns,
// for both.
struct DhiddenArgs {
  const float *start, *scale;  // or null
  const int64_t* live;         // or null: the tokens from *live on may be left as they are
  int tokens, width, k;
  int chunk;                   // d lies in chunks of this many elements along k: a multiple of kGemmDepth
  int pairs;                   // of tiles of tokens
};

__host__ __device__ constexpr int dhidden_threads(int groups) { return 128 * groups + 32; }
__host__ __device__ constexpr int dhidden_stage_bytes(int groups, int tokens) { return groups * kGemmBox + tokens * 128; }
__host__ __device__ constexpr int dhidden_stages(int groups, int tokens) {
  const int fit = 220 * 1024 / dhidden_stage_bytes(groups, tokens);
  return fit < 16 ? fit : 16;
}
__host__ __device__ constexpr int dhidden_shared_bytes(int groups, int tokens) {
  return dhidden_stages(groups, tokens) * dhidden_stage_bytes(groups, tokens) + 1024;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

#define VX_WGMMA_COLUMNS(tokens, regs, a, b, ...)                                                                   \
  if constexpr (TOKENS == tokens)                                                                                   \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #tokens "k16.f32.bf16.bf16 {" regs "}, %" #a ", %" #b           \
                 ", 1, 1, 1, 1, 0;"                                                                                  \
                 : __VA_ARGS__                                                                                       \
                 : "l"(weight), "l"(x))

// d += 64 columns of the weight, in which they are contiguous, by TOKENS rows of x, 16 of k.
template <int TOKENS>
__device__ __forceinline__ void multiply_columns(float (&d)[TOKENS / 2], uint64_t weight, uint64_t x) {
  VX_WGMMA_COLUMNS(8, VX_R4(0, 1, 2, 3), 4, 5, VX_D4(0));
  VX_WGMMA_COLUMNS(16, VX_REGS8, 8, 9, VX_D4(0), VX_D4(4));
  VX_WGMMA_COLUMNS(32, VX_REGS16, 16, 17, VX_D16(0));
  VX_WGMMA_COLUMNS(64, VX_N32, 32, 33, VX_F32);
  VX_WGMMA_COLUMNS(128, VX_N64, 64, 65, VX_F64);
}

#endif

template <int GROUPS, int TOKENS, class Out>
__global__ void VX_CLUSTER_OF_TWO __launch_bounds__(dhidden_threads(GROUPS), 1)
    small_m_dhidden_kernel(const __grid_constant__ CUtensorMap d_map, const __grid_constant__ CUtensorMap weight_map,
                           const DhiddenArgs a, Out* out) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kStages = dhidden_stages(GROUPS, TOKENS), kStage = dhidden_stage_bytes(GROUPS, TOKENS);
  extern __shared__ uint8_t memory[];
  __shared__ __align__(8) uint64_t barriers[2 * kStages];
  Ring ring(memory, barriers, kStages, kStage, kStages);
  const int rank = cluster_rank(), cluster = blockIdx.x / 2, pair = cluster % a.pairs;
  const int n0 = cluster / a.pairs * 64 * GROUPS, m0 = (2 * pair + rank) * TOKENS;
  const int tokens = at_most(a.tokens, a.live, 0), steps = (a.k + kGemmDepth - 1) / kGemmDepth;
  if (2 * pair * TOKENS >= tokens) return;  // both blocks of the cluster

  if (threadIdx.x == 0) {
    ring.init(2 * GROUPS);
    barrier_init_fence();
  }
  cluster_sync();

  if (threadIdx.x >= 128 * GROUPS) {
    if (is_elected()) {
      ring.phase = 1;
      int x = 0, z = 0;
      for (int step = 0; step < steps; ++step) {
        const int k = step * kGemmDepth;
        ring.await_free();
        barrier_expect(ring.ready(), kStage);
        const uint32_t weight = ring.stage();
        if constexpr (GROUPS == 2)
          copy_box_to(3, weight + rank * kGemmBox, &weight_map, ring.ready(), n0 + 64 * rank, k, 0);
        else if (step % 2 == rank)
          copy_box_to(3, weight, &weight_map, ring.ready(), n0, k, 0);
        copy_box(weight + GROUPS * kGemmBox, &d_map, ring.ready(), x, m0, z);
        x += kGemmDepth;
        if (x == a.chunk) x = 0, ++z;
        ring.advance();
      }
    }
    __syncwarp();
  } else {
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), thread = threadIdx.x % 128;
    const int column = n0 + 64 * group + thread / 32 * 16 + thread % 32 / 4, row = m0 + thread % 4 * 2;
    float d[TOKENS / 2];  // d[4 j + 2 h + i]: column + 8 h, row + 8 j + i
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) {
      const int m = row + i / 4 * 8 + i % 2, n = column + i % 4 / 2 * 8;
      const float first = a.start && m < a.tokens && n < a.width ? a.start[int64_t(m) * a.width + n] : 0.0f;
      asm volatile("mov.b32 %0, %1;" : "=f"(d[i]) : "f"(first) : "memory");  // not later: products would not overlap
    }
    int before = -1;
    for (int step = 0; step < steps; ++step) {
      ring.await_ready();
      const uint32_t stage = __shfl_sync(~0u, ring.stage(), 0);
      const uint32_t weight = stage + group * kGemmBox, x = stage + GROUPS * kGemmBox;
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < kGemmDepth / 16; ++k)  // order: K ascending; products of one accumulator run in issue order
        multiply_columns<TOKENS>(d, operand_across(weight + 2048 * k, kGemmBox), operand(x + 32 * k));
      wgmma_commit();
      wgmma_wait<1>();  // the stage before this one has been read
      if (before >= 0 && thread < 2) barrier_arrive_at(ring.empty + 8 * before, thread);
      before = ring.slot;
      ring.advance();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) asm volatile("" : "+f"(d[i])::"memory");
    const float by = a.scale ? *a.scale : 1.0f;
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) {
      const int m = row + i / 4 * 8 + i % 2, n = column + i % 4 / 2 * 8;
      if (m >= a.tokens || n >= a.width) continue;
      const float v = a.scale ? d[i] * by : d[i];
      if constexpr (sizeof(Out) == 4)
        out[int64_t(m) * a.width + n] = v;
      else
        narrow(out[int64_t(m) * a.width + n], v);
    }
  }
  cluster_sync();  // no block leaves while the other may still write to it
#endif
}

// For how many tokens a tile is chosen: pairs of tiles cover them up to 256, beyond there are several pairs.
template <class Out>
cudaError_t small_m_dhidden(const CUtensorMap& d, const CUtensorMap& weight, const DhiddenArgs& a, int groups, int tile,
                            Out* out, cudaStream_t stream) {
  const auto launch = [&]<int GROUPS, int TOKENS>() {
    auto kernel = small_m_dhidden_kernel<GROUPS, TOKENS, Out>;
    const int bytes = dhidden_shared_bytes(GROUPS, TOKENS);
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    const int blocks = 2 * a.pairs * ((a.width + 64 * GROUPS - 1) / (64 * GROUPS));
    kernel<<<blocks, dhidden_threads(GROUPS), bytes, stream>>>(d, weight, a, out);
    return cudaGetLastError();
  };
  if (groups == 2) return launch.template operator()<2, 128>();
  if (tile == 8) return launch.template operator()<1, 8>();
  if (tile == 16) return launch.template operator()<1, 16>();
  if (tile == 32) return launch.template operator()<1, 32>();
  if (tile == 64) return launch.template operator()<1, 64>();
  return launch.template operator()<1, 128>();
}

}  // namespace vx::sm90
