// A large matrix product on SM90: C (M, N) = A (M, K) B (K, N), bf16 or fp16 in, what becomes of the fp32 accumulators in
// registers left to an epilogue of the caller's. A and B may be stored with k or with their rows contiguous.
//
// Persistent blocks of three warpgroups: one thread of the first keeps a ring of tiles in flight with the bulk tensor
// copy engine, the other two multiply, each 64 rows by 256 columns. Two blocks form a cluster, one above the other, and
// load half of their common columns each, for both.
// order: K ascending in steps of 16, one fp32 accumulator per element, no split of K; what is missing is zeros.
#pragma once
#include <algorithm>

#include "common/elect.cuh"
#include "common/sm90_ring.cuh"

namespace vx::sm90 {

constexpr int kGemmRows = 128, kGemmColumns = 256, kGemmDepth = 64;  // of a block's tile, of a step
constexpr int kGemmBox = 64 * 64 * 2;                                // bytes that one copy brings: 64 by 64 elements
constexpr int kGemmStages = 4, kGemmStage = 6 * kGemmBox;
constexpr int kGemmShared = kGemmStages * kGemmStage + 1024;
constexpr int kGemmThreads = 384;

struct GemmArgs {
  int m, n, k;
  int group;    // pairs of tiles of rows that are taken together, for what they share to stay in the L2 cache
  int a_piece;  // A lies in pieces of this many elements along its contiguous dimension; 0: in one
  // Counts that only the device knows, null where there is none. Of C, the rows from *m_live - m_first on may be left as
  // they are; of K, what lies from *k_live on is left out, and is zeros up to the next multiple of kGemmDepth.
  const int64_t* m_live = nullptr;
  int m_first = 0;
  const int64_t* k_live = nullptr;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

#define VX_TEN(t) \
  "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
#define VX_A4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define VX_A16(i) VX_A4(i), VX_A4(i + 4), VX_A4(i + 8), VX_A4(i + 12)
#define VX_WGMMA_256(type)                                                                                          \
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {" VX_TEN() VX_TEN(1) VX_TEN(2)       \
                   VX_TEN(3) VX_TEN(4) VX_TEN(5) VX_TEN(6) VX_TEN(7) VX_TEN(8) VX_TEN(9) VX_TEN(10) VX_TEN(11)      \
               "%120,%121,%122,%123,%124,%125,%126,%127}, %128, %129, 1, 1, 1, %130, %131;"                         \
               : VX_A16(0), VX_A16(16), VX_A16(32), VX_A16(48), VX_A16(64), VX_A16(80), VX_A16(96), VX_A16(112)     \
               : "l"(a), "l"(b), "n"(int(A_ACROSS)), "n"(int(B_ACROSS)))

// d += 64 rows of A by 256 columns of B, 16 of k.
template <class T, bool A_ACROSS, bool B_ACROSS>
__device__ __forceinline__ void multiply_256(float (&d)[128], uint64_t a, uint64_t b) {
  if constexpr (__is_same(T, __nv_bfloat16)) {
    VX_WGMMA_256("bf16");
  } else {
    VX_WGMMA_256("f16");
  }
}

__device__ __forceinline__ int at_most(int size, const int64_t* live, int first) {
  return live ? int(max(int64_t(0), min(int64_t(size), *live - first))) : size;
}

// The pair of tiles of rows, and the tile of columns, of one turn of a cluster.
__device__ __forceinline__ int2 gemm_place(int turn, int pairs, int columns, int group) {
  const int per_group = group * columns, first = turn / per_group * group, within = turn % per_group;
  const int rows = min(pairs - first, group);
  return make_int2(first + within % rows, within / rows);
}

#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define VX_CLUSTER_OF_TWO
#else
#define VX_CLUSTER_OF_TWO __cluster_dims__(2, 1, 1)
#endif

// An Epilogue is handed the accumulators d of 64 rows by 256 columns: a thread's d[4 j + 2 h + i] is the element
// (row + 8 h, column + 8 j + i), `row` and `column` its own. begin() gives them their first values, end() takes them.
// A_ACROSS, B_ACROSS: the operand's rows (of m, of n) are contiguous, not its k.
template <class T, bool A_ACROSS, bool B_ACROSS, class Epilogue>
__global__ void VX_CLUSTER_OF_TWO __launch_bounds__(kGemmThreads, 1)
    gemm_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map, const GemmArgs g,
                const __grid_constant__ Epilogue epilogue) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t memory[];
  __shared__ __align__(8) uint64_t barriers[2 * kGemmStages];
  Ring ring(memory, barriers, kGemmStages, kGemmStage, kGemmStages);
  const int rank = cluster_rank(), clusters = gridDim.x / 2;
  const int rows = at_most(g.m, g.m_live, g.m_first), depth = at_most(g.k, g.k_live, 0);
  const int pairs = (rows + 2 * kGemmRows - 1) / (2 * kGemmRows), columns = (g.n + kGemmColumns - 1) / kGemmColumns;
  const int steps = (depth + kGemmDepth - 1) / kGemmDepth, turns = pairs * columns;

  if (threadIdx.x == 0) {
    ring.init(4);  // both multiplying warpgroups of both blocks
    barrier_init_fence();
  }
  cluster_sync();

  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x < 32 && is_elected()) {
      ring.phase = 1;
      for (int turn = blockIdx.x / 2; turn < turns; turn += clusters) {
        const int2 at = gemm_place(turn, pairs, columns, g.group);
        const int m0 = (2 * at.x + rank) * kGemmRows, n0 = at.y * kGemmColumns;
        int ax = A_ACROSS ? m0 : 0, az = 0;
        if (A_ACROSS && g.a_piece) az = m0 / g.a_piece, ax = m0 % g.a_piece;
        for (int step = 0; step < steps; ++step) {
          const int k = step * kGemmDepth;
          ring.await_free();
          barrier_expect(ring.ready(), kGemmStage);
          const uint32_t a = ring.stage(), b = a + 2 * kGemmBox;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if constexpr (A_ACROSS)
              copy_box(a + i * kGemmBox, &a_map, ring.ready(), ax + 64 * i, k, az);
            else
              copy_box(a + i * kGemmBox, &a_map, ring.ready(), ax, m0 + 64 * i, az);
          }
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int box = 2 * rank + i, n = n0 + 64 * box;
            copy_box_to(3, b + box * kGemmBox, &b_map, ring.ready(), B_ACROSS ? n : k, B_ACROSS ? k : n, 0);
          }
          if constexpr (!A_ACROSS) {
            ax += kGemmDepth;
            if (ax == g.a_piece) ax = 0, ++az;
          }
          ring.advance();
        }
      }
    }
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1, thread = threadIdx.x % 128;
    const int row_in = 64 * group + thread / 32 * 16 + thread % 32 / 4, column_in = thread % 4 * 2;
    float d[128];
    for (int turn = blockIdx.x / 2; turn < turns; turn += clusters) {
      const int2 at = gemm_place(turn, pairs, columns, g.group);
      const int row = (2 * at.x + rank) * kGemmRows + row_in, column = at.y * kGemmColumns + column_in;
      epilogue.begin(d, row, column);
#pragma unroll
      for (int i = 0; i < 128; ++i) asm volatile("" : "+f"(d[i])::"memory");
      int before = -1;
      for (int step = 0; step < steps; ++step) {
        ring.await_ready();
        const uint32_t a = ring.stage() + group * kGemmBox, b = ring.stage() + 2 * kGemmBox;
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < kGemmDepth / 16; ++k)  // order: K ascending; products of one accumulator run in issue order
          multiply_256<T, A_ACROSS, B_ACROSS>(
              d, A_ACROSS ? operand_across(a + 2048 * k, kGemmBox) : operand(a + 32 * k),
              B_ACROSS ? operand_across(b + 2048 * k, kGemmBox) : operand(b + 32 * k));
        wgmma_commit();
        wgmma_wait<1>();  // the stage before this one has been read
        if (before >= 0 && thread < 2) barrier_arrive_at(ring.empty + 8 * before, thread);
        before = ring.slot;
        ring.advance();
      }
      wgmma_wait<0>();
      if (before >= 0 && thread < 2) barrier_arrive_at(ring.empty + 8 * before, thread);
#pragma unroll
      for (int i = 0; i < 128; ++i) asm volatile("" : "+f"(d[i])::"memory");
      epilogue.end(d, row, column);
    }
  }
  cluster_sync();  // no block leaves while the other may still write to it
#endif
}

// (z, y, x) with x contiguous, read in boxes of 64 x by `box_y` y; beyond its edges the copy engine writes zeros.
inline bool gemm_map(CUtensorMap* map, bool is_bf16, const void* data, int64_t x, int64_t y, int64_t y_stride, int64_t z,
                     int64_t z_stride, int box_y = 64) {
  const cuuint64_t row = y > 1 ? y_stride : (x + 7) / 8 * 8, matrix = z > 1 ? z_stride : 8;
  return encode_map<3>(map, is_bf16, data, {cuuint64_t(x), cuuint64_t(y), cuuint64_t(z)}, {row * 2, matrix * 2},
                       {64, cuuint32_t(box_y), 1});
}

template <class T, bool A_ACROSS, bool B_ACROSS, class Epilogue>
cudaError_t gemm(const CUtensorMap& a, const CUtensorMap& b, const GemmArgs& g, const Epilogue& epilogue, int device,
                 cudaStream_t stream) {
  auto kernel = gemm_kernel<T, A_ACROSS, B_ACROSS, Epilogue>;
  int processors = 0;
  cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kGemmShared);
  if (error != cudaSuccess) return error;
  const int turns = (g.m + 2 * kGemmRows - 1) / (2 * kGemmRows) * ((g.n + kGemmColumns - 1) / kGemmColumns);
  if (turns == 0) return cudaSuccess;
  kernel<<<2 * std::min(processors / 2, turns), kGemmThreads, kGemmShared, stream>>>(a, b, g, epilogue);
  return cudaGetLastError();
}

}  // namespace vx::sm90
