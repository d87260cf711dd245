// The product behind many draws: tiles of up to 64 rows of hidden by 128 tokens, or of two such boxes of rows, which two
// warpgroups of a block take in turns, so that one multiplies while the other draws from what it has multiplied. Shared
// memory is asked for 1.5 times as long as the tensor cores by the small tiles, 1.25 times by the large ones.
//
// One thread keeps a ring of stages in flight with the bulk tensor copy engine, of one tile after the other. A cluster's
// blocks take the same tokens and as many rows each; every block loads its share of the weight for all of them. Of hidden a
// box has only the rows of its tile: wgmma's others are whatever lies there, and nobody looks at what becomes of them.
// order: K ascending in steps of 16, one fp32 accumulator per element, no split of K; what is missing is zeros.
// Launched as by launch_chained: what runs before the kernel before has ended only asks the L2 cache for weights.
#pragma once
#include <atomic>

#include "linear_sample/sm90_epilogue.cuh"

namespace vx::sm90 {

constexpr int kOverlapTokens = kDrawBlock, kOverlapDepth = 64, kOverlapThreads = 384;
constexpr int kTokenBoxes = kOverlapTokens / 64;
constexpr int kOverlapBox = 64 * kOverlapDepth * 2;  // bytes of 64 rows, of hidden or of the weight

// BOXES: of rows, in a tile.
template <int BOXES>
struct OverlapRing {
  static constexpr int kStage = (BOXES + kTokenBoxes) * kOverlapBox, kStages = (192 << 10) / kStage;
  static constexpr int kShared = kStages * kStage + 1024;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// d += 64 rows by 128 tokens, 16 of k.
__device__ __forceinline__ void multiply_128(float (&d)[64], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" VX_TEN() VX_TEN(1) VX_TEN(2) VX_TEN(3)
                   VX_TEN(4) VX_TEN(5) "%60,%61,%62,%63}, %64, %65, 1, 1, 1, 0, 0;"
               : VX_A16(0), VX_A16(16), VX_A16(32), VX_A16(48)
               : "l"(a), "l"(b));
}

// A box on its way into the L2 cache.
__device__ __forceinline__ void prefetch_box(const CUtensorMap* map, int x, int y, int z) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(map), "r"(x), "r"(y), "r"(z)
               : "memory");
}

#endif

template <int CLUSTER, int BOXES, class Epilogue>
__global__ void __launch_bounds__(kOverlapThreads, 1)
    overlapped_kernel(const __grid_constant__ CUtensorMap rows_map, const __grid_constant__ CUtensorMap weight_map, int m,
                      int n, int k, int rows, const __grid_constant__ Epilogue epilogue) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Ring = OverlapRing<BOXES>;
  extern __shared__ uint8_t memory[];
  __shared__ __align__(8) uint64_t barriers[2 * Ring::kStages + 2];
  const int rank = cluster_rank(), clusters = gridDim.x / CLUSTER;
  const int tile = rows * BOXES;  // rows of it
  const int groups = (m + tile * CLUSTER - 1) / (tile * CLUSTER), turns = groups * ((n + kOverlapTokens - 1) / kOverlapTokens);
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
      for (int step = 0; step < min(steps, Ring::kStages); ++step)
#pragma unroll
        for (int i = 0; i < kTokenBoxes / CLUSTER; ++i)
          prefetch_box(&weight_map, step * kOverlapDepth,
                       int(blockIdx.x) / CLUSTER / groups * kOverlapTokens + 64 * (rank * (kTokenBoxes / CLUSTER) + i), 0);
      wait_for_kernel_before();
      for (int turn = blockIdx.x / CLUSTER; turn < turns; turn += clusters) {
        const int m0 = (turn % groups * CLUSTER + rank) * tile, n0 = turn / groups * kOverlapTokens;
        for (int step = 0; step < steps; ++step) {
          barrier_wait(empty + 8 * slot, phase);  // passes at once in the first round
          barrier_expect(full + 8 * slot, Ring::kStage - BOXES * kOverlapBox + tile * 128);
          const uint32_t to = ring + slot * Ring::kStage;
#pragma unroll
          for (int i = 0; i < BOXES; ++i)
            copy_box(to + i * kOverlapBox, &rows_map, full + 8 * slot, step * kOverlapDepth, m0 + i * rows, 0);
#pragma unroll
          for (int i = 0; i < kTokenBoxes / CLUSTER; ++i) {
            const int box = rank * (kTokenBoxes / CLUSTER) + i, at = to + (BOXES + box) * kOverlapBox;
            if constexpr (CLUSTER == 1)
              copy_box(at, &weight_map, full + 8 * slot, step * kOverlapDepth, n0 + 64 * box, 0);
            else
              copy_box_to((1 << CLUSTER) - 1, at, &weight_map, full + 8 * slot, step * kOverlapDepth, n0 + 64 * box, 0);
          }
          if (++slot == Ring::kStages) slot = 0, phase ^= 1;
        }
      }
      let_kernel_after_start();
    }
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int mine = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1, thread = threadIdx.x % 128;
    const int row_in = thread / 32 * 16 + thread % 32 / 4, column_in = thread % 4 * 2;
    constexpr int kBoxLogits = Epilogue::kLogits / BOXES;
    float d[Epilogue::kLogits];
    typename Epilogue::State state;
    wait_for_kernel_before();
    uint32_t taken = mine;  // tiles of this block so far, the other's among them
    for (int turn = blockIdx.x / CLUSTER + mine * clusters; turn < turns; turn += 2 * clusters, taken += 2) {
      const int m0 = (turn % groups * CLUSTER + rank) * tile, column = turn / groups * kOverlapTokens + column_in;
#pragma unroll
      for (int i = 0; i < Epilogue::kLogits; ++i) {
        d[i] = 0.0f;
        asm volatile("" : "+f"(d[i])::"memory");
      }
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
#pragma unroll
          for (int box = 0; box < BOXES; ++box)
            multiply_128(reinterpret_cast<float(&)[kBoxLogits]>(d[box * kBoxLogits]),
                         operand(stage + box * kOverlapBox + 32 * i), operand(stage + BOXES * kOverlapBox + 32 * i));
        wgmma_commit();
        if (step + 1 == steps && thread == 0) barrier_arrive(next + 8 * (1 - mine));
        wgmma_wait<1>();  // the stage before this one has been read
        if (before >= 0 && thread < CLUSTER) barrier_arrive_at(empty + 8 * before, thread);
        before = slot;
      }
      wgmma_wait<0>();
      if (before >= 0 && thread < CLUSTER) barrier_arrive_at(empty + 8 * before, thread);
#pragma unroll
      for (int i = 0; i < Epilogue::kLogits; ++i) asm volatile("" : "+f"(d[i])::"memory");
      epilogue.end(d, m0 + row_in, column, rows, state);
    }
  }
  cluster_sync();  // no block leaves while another may still write to it
#endif
}

template <int CLUSTER, int BOXES>
cudaError_t overlapped(const CUtensorMap& rows, const CUtensorMap& weight, int m, int n, int k, int box_rows,
                       const Draws& draws, int device, cudaStream_t stream) {
  using Ring = OverlapRing<BOXES>;
  using Epilogue = DrawEpilogue<Ring::kShared, BOXES>;
  constexpr int kBytes = Ring::kShared + Epilogue::kShared;
  auto kernel = overlapped_kernel<CLUSTER, BOXES, Epilogue>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2];  // a cluster's, and launch_chained's
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = CLUSTER, attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(CLUSTER), config.blockDim = dim3(kOverlapThreads), config.dynamicSmemBytes = kBytes;
  config.stream = stream, config.attrs = attributes, config.numAttrs = 1;
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
  const int together = box_rows * BOXES * CLUSTER;
  const int turns = (m + together - 1) / together * ((n + kOverlapTokens - 1) / kOverlapTokens);
  config.gridDim = dim3(std::min(clusters, turns) * CLUSTER), config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, rows, weight, m, n, k, box_rows, Epilogue{draws});
}

}  // namespace vx::sm90
