// The product behind many draws: tiles of up to 64 rows of hidden by 128 or 256 tokens, which two warpgroups of a block take
// in turns, so that one multiplies while the other draws from what it has multiplied. Shared memory is asked for 1.5 times as
// long as the tensor cores by the narrow tiles, 1.25 times by the wide ones.
//
// One thread keeps a ring of stages in flight with the bulk tensor copy engine, of one tile after the other. A cluster's
// blocks take the same tokens and as many rows each; every block loads its share of the weight for all of them. Of hidden a
// box has only the rows of its tile: wgmma's others are whatever lies there, and nobody looks at what becomes of them.
// order: K ascending in steps of 16, one fp32 accumulator per element, no split of K; what is missing is zeros.
#pragma once
#include <atomic>

#include "linear_sample/sm90_many.cuh"

namespace vx::sm90 {

constexpr int kOverlapDepth = 64, kOverlapThreads = 384;
constexpr int kOverlapBox = 64 * kOverlapDepth * 2;  // bytes of 64 rows, of hidden or of the weight

template <int TOKENS>
struct OverlapRing {
  static constexpr int kStages = TOKENS == 128 ? 8 : 4, kBoxes = TOKENS / 64, kStage = (1 + kBoxes) * kOverlapBox;
  static constexpr int kShared = kStages * kStage + 1024;
  static_assert((kStages & (kStages - 1)) == 0);
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// d += 64 rows by 128 tokens, 16 of k.
__device__ __forceinline__ void multiply_128(float (&d)[64], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" VX_TEN() VX_TEN(1) VX_TEN(2) VX_TEN(3)
                   VX_TEN(4) VX_TEN(5) "%60,%61,%62,%63}, %64, %65, 1, 1, 1, 0, 0;"
               : VX_A16(0), VX_A16(16), VX_A16(32), VX_A16(48)
               : "l"(a), "l"(b));
}

#endif

template <int CLUSTER, int TOKENS, class Epilogue>
__global__ void __launch_bounds__(kOverlapThreads, 1)
    overlapped_kernel(const __grid_constant__ CUtensorMap rows_map, const __grid_constant__ CUtensorMap weight_map, int m,
                      int n, int k, int rows, const __grid_constant__ Epilogue epilogue) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Ring = OverlapRing<TOKENS>;
  extern __shared__ uint8_t memory[];
  __shared__ __align__(8) uint64_t barriers[2 * Ring::kStages + 2];
  const int rank = cluster_rank(), clusters = gridDim.x / CLUSTER;
  const int groups = (m + rows * CLUSTER - 1) / (rows * CLUSTER), turns = groups * ((n + TOKENS - 1) / TOKENS);
  const int steps = (k + kOverlapDepth - 1) / kOverlapDepth;
  const uint32_t ring = (shared_address(memory) + 1023) & ~1023u;
  const uint32_t full = shared_address(barriers), empty = full + 8 * Ring::kStages, next = empty + 8 * Ring::kStages;

  if (threadIdx.x == 0) {
    for (int i = 0; i < Ring::kStages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, CLUSTER);  // a multiplying warpgroup of every block
    }
    barrier_init(next, 1);
    barrier_init(next + 8, 1);
    barrier_init_fence();
  }
  cluster_sync();

  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x < 32 && is_elected()) {
      int slot = 0;
      uint32_t phase = 1;
      for (int turn = blockIdx.x / CLUSTER; turn < turns; turn += clusters) {
        const int m0 = (turn % groups * CLUSTER + rank) * rows, n0 = turn / groups * TOKENS;
        for (int step = 0; step < steps; ++step) {
          barrier_wait(empty + 8 * slot, phase);  // passes at once in the first round
          barrier_expect(full + 8 * slot, Ring::kStage - kOverlapBox + rows * 128);
          const uint32_t to = ring + slot * Ring::kStage;
          copy_box(to, &rows_map, full + 8 * slot, step * kOverlapDepth, m0, 0);
#pragma unroll
          for (int i = 0; i < Ring::kBoxes / CLUSTER; ++i) {
            const int box = rank * (Ring::kBoxes / CLUSTER) + i;
            if constexpr (CLUSTER == 1)
              copy_box(to + (1 + box) * kOverlapBox, &weight_map, full + 8 * slot, step * kOverlapDepth, n0 + 64 * box, 0);
            else
              copy_box_to((1 << CLUSTER) - 1, to + (1 + box) * kOverlapBox, &weight_map, full + 8 * slot,
                          step * kOverlapDepth, n0 + 64 * box, 0);
          }
          if (++slot == Ring::kStages) slot = 0, phase ^= 1;
        }
      }
    }
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int mine = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1, thread = threadIdx.x % 128;
    const int row_in = thread / 32 * 16 + thread % 32 / 4, column_in = thread % 4 * 2;
    float d[TOKENS / 2];
    typename Epilogue::State state;
    uint32_t taken = mine;  // tiles of this block so far, the other's among them
    for (int turn = blockIdx.x / CLUSTER + mine * clusters; turn < turns; turn += 2 * clusters, taken += 2) {
      const int m0 = (turn % groups * CLUSTER + rank) * rows, column = turn / groups * TOKENS + column_in;
      epilogue.begin(d, m0 + row_in, column);
#pragma unroll
      for (int i = 0; i < TOKENS / 2; ++i) asm volatile("" : "+f"(d[i])::"memory");
      // All stages of the tile before have come: only then does a parity tell a stage's round from the one before.
      if (taken) barrier_wait(next + 8 * mine, (taken - 1) / 2 & 1);
      const uint32_t first = taken * uint32_t(steps);
      int before = -1;
      for (int step = 0; step < steps; ++step) {
        const int slot = (first + step) % Ring::kStages;
        barrier_wait(full + 8 * slot, (first + step) / Ring::kStages & 1);
        const uint32_t stage = __shfl_sync(~0u, ring + slot * Ring::kStage, 0);
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < kOverlapDepth / 16; ++i)  // order: K ascending; products of one accumulator run in issue order
          if constexpr (TOKENS == 128)
            multiply_128(d, operand(stage + 32 * i), operand(stage + kOverlapBox + 32 * i));
          else
            multiply_256<__nv_bfloat16, false, false>(d, operand(stage + 32 * i), operand(stage + kOverlapBox + 32 * i));
        wgmma_commit();
        if (step + 1 == steps && thread == 0) barrier_arrive(next + 8 * (1 - mine));
        wgmma_wait<1>();  // the stage before this one has been read
        if (before >= 0 && thread < CLUSTER) barrier_arrive_at(empty + 8 * before, thread);
        before = slot;
      }
      wgmma_wait<0>();
      if (before >= 0 && thread < CLUSTER) barrier_arrive_at(empty + 8 * before, thread);
#pragma unroll
      for (int i = 0; i < TOKENS / 2; ++i) asm volatile("" : "+f"(d[i])::"memory");
      epilogue.end(d, m0 + row_in, column, min(m, m0 + rows), state);
    }
  }
  cluster_sync();  // no block leaves while another may still write to it
#endif
}

template <int CLUSTER, int TOKENS>
cudaError_t overlapped(const CUtensorMap& rows, const CUtensorMap& weight, int m, int n, int k, int box_rows,
                       const Draws& draws, int device, cudaStream_t stream) {
  using Epilogue = ManyEpilogue<OverlapRing<TOKENS>::kShared>;
  constexpr int kBytes = OverlapRing<TOKENS>::kShared + Epilogue::kShared;
  auto kernel = overlapped_kernel<CLUSTER, TOKENS, Epilogue>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = CLUSTER, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(CLUSTER), config.blockDim = dim3(kOverlapThreads), config.dynamicSmemBytes = kBytes;
  config.stream = stream, config.attrs = &cluster, config.numAttrs = 1;
  // As many as run at once: the rest would wait for all of them. The same number on every device of a kind.
  static std::atomic<int> known[64];
  int clusters = known[device & 63].load(std::memory_order_relaxed);
  if (!clusters) {
    int processors = 0;
    if ((error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device)) != cudaSuccess) return error;
    config.gridDim = dim3(processors / CLUSTER * CLUSTER);
    if ((error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config)) != cudaSuccess) return error;
    if (clusters < 1) return cudaErrorInvalidConfiguration;
    known[device & 63].store(clusters);
  }
  const int turns = (m + box_rows * CLUSTER - 1) / (box_rows * CLUSTER) * ((n + TOKENS - 1) / TOKENS);
  config.gridDim = dim3(std::min(clusters, turns) * CLUSTER);
  return cudaLaunchKernelEx(&config, kernel, rows, weight, m, n, k, box_rows, Epilogue{draws});
}

}  // namespace vx::sm90
