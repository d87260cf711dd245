// The gated half of a feed-forward for more rows than sm90_skinny.cuh takes: a tile is 64 GROUPS PARTS rows of x by WIDTH
// rows of the weight, gates and ups in turns of eight (sm90_gated.cuh), so that a thread ends with both of an element.
//
// x takes wgmma's 64-row side. A producer thread keeps a ring of stages in flight with the bulk tensor copy engine, GROUPS
// warpgroups multiply PARTS times 64 rows each; what they make of it leaves through shared memory. The blocks of a cluster
// are a rectangle: those beside each other have the rows of x in common, those above each other the weight's, and each
// loads its share for all of them. A wide tile is what a wave of one tile a multiprocessor wants: 256 rows by 24,576 of the
// weight are 128 tiles of 256 by 192.
// Launched by launch_chained's attribute: what runs before the kernel before has ended only asks the L2 cache for weights.
// order: K ascending in steps of 16, one fp32 accumulator per element, no split of K; the K tail is zeros.
#pragma once
#include "linear/sm90_tiled.cuh"
#include "linear_silu_mul/sm90_gated.cuh"

namespace vx::sm90 {

struct WideArgs {
  int k;
  int token_tiles;    // tiles of rows of x, a multiple of `down`
  int across, down;   // blocks of a cluster that share rows of x; that share rows of the weight
  int stages;         // of the ring
  bool gelu;
};

constexpr int kWideColumns = 32;  // of the result in a box that leaves

__host__ __device__ constexpr bool wide_moves_registers(int parts) { return parts > 1; }
constexpr int wide_threads(int groups, int parts) { return 128 * groups + (wide_moves_registers(parts) ? 128 : 32); }
constexpr int wide_shared_bytes(int tokens, int width, int stages) { return stages * (tokens + width) * 128 + 1024; }

template <class T, int GROUPS, int PARTS, int WIDTH>
__global__ void __launch_bounds__(wide_threads(GROUPS, PARTS), 1)
    wide_kernel(const __grid_constant__ CUtensorMap weight_map, const __grid_constant__ CUtensorMap x_map,
                const __grid_constant__ CUtensorMap out_map, const WideArgs a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kTokens = 64 * GROUPS * PARTS, kXBytes = kTokens * 128, kStageBytes = kXBytes + WIDTH * 128;
  extern __shared__ uint8_t memory[];
  __shared__ __align__(8) uint64_t barriers[2 * kTiledStages];
  const uint32_t ring = (shared_address(memory) + 1023) & ~1023u;
  const uint32_t full = shared_address(barriers), empty = full + 8 * kTiledStages;
  const int steps = (a.k + kTiledDepth - 1) / kTiledDepth, cluster = a.across * a.down;
  const int rank = blockIdx.x % cluster, column = rank % a.across, row = rank / a.across;
  const int turn = blockIdx.x / cluster, turns = a.token_tiles / a.down;
  const int m0 = (turn % turns * a.down + row) * kTokens, n0 = (turn / turns * a.across + column) * WIDTH;

  if (threadIdx.x == 128 * GROUPS) {
    prefetch_map(&weight_map);
    prefetch_map(&x_map);
    prefetch_map(&out_map);
    for (int i = 0; i < a.stages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, GROUPS * (a.across + a.down - 1));
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (cluster > 1) cluster_sync();

  if (threadIdx.x >= 128 * GROUPS) {
    if constexpr (wide_moves_registers(PARTS)) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x < 128 * GROUPS + 32 && is_elected()) {
      uint64_t once, keep;  // the weight passes through L2 where each of its tiles is asked for once
      asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
      asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(keep));
      const uint64_t weight_policy = turns == 1 ? once : keep;
      const int x_share = kTokens / a.across, weight_share = WIDTH / a.down, n = n0 + row * weight_share;
      const uint16_t beside = ((1 << a.across) - 1) << (row * a.across);
      uint16_t above = 0;
      for (int i = 0; i < a.down; ++i) above |= 1 << (i * a.across + column);
      for (int i = 0; i < min(a.stages, steps); ++i) PairedRows::prefetch(&weight_map, i * kTiledDepth, n);
      wait_for_kernel_before();
      const int start_next = max(0, steps - a.stages);
      int slot = 0;
      uint32_t phase = 1;
      for (int step = 0; step < steps; ++step) {
        if (step == start_next) let_kernel_after_start();
        barrier_wait(empty + 8 * slot, phase);  // passes at once in the first round
        barrier_expect(full + 8 * slot, kStageBytes);
        const uint32_t x_to = ring + slot * kStageBytes + column * x_share * 128;
        const uint32_t weight_to = ring + slot * kStageBytes + kXBytes + row * weight_share * 128;
        const int k = step * kTiledDepth;
        if (a.down > 1)
          PairedRows::copy_to(above, weight_to, &weight_map, full + 8 * slot, k, n, weight_policy);
        else
          PairedRows::copy(weight_to, &weight_map, full + 8 * slot, k, n, weight_policy);
        if (a.across > 1)
          copy_box_to(beside, x_to, &x_map, full + 8 * slot, k, m0 + column * x_share, keep);
        else
          copy_box(x_to, &x_map, full + 8 * slot, k, m0, keep);
        if (++slot == a.stages) slot = 0, phase ^= 1;
      }
    }
    __syncwarp();
  } else {
    if constexpr (wide_moves_registers(PARTS)) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), thread = threadIdx.x % 128;
    const int warp = thread / 32, lane = thread % 32;
    const bool frees = thread < cluster && (thread % a.across == column || thread / a.across == row);
    float d[PARTS][WIDTH / 2];
#pragma unroll
    for (int p = 0; p < PARTS; ++p)
#pragma unroll
      for (int i = 0; i < WIDTH / 2; ++i) {
        d[p][i] = 0.0f;
        asm volatile("" : "+f"(d[p][i])::"memory");
      }
    wait_for_kernel_before();
    int slot = 0, before = 0;
    uint32_t phase = 0;
    for (int step = 0; step < steps; ++step) {
      barrier_wait(full + 8 * slot, phase);
      const uint32_t stage = __shfl_sync(~0u, ring + slot * kStageBytes, 0);
      const uint64_t x = operand(stage + group * PARTS * 64 * 128), weight = operand(stage + kXBytes);
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < kTiledDepth / 16; ++k)  // order: K ascending; products of one accumulator run in issue order
#pragma unroll
        for (int p = 0; p < PARTS; ++p) multiply_tile<T, WIDTH>(d[p], x + (p * 64 * 128 + 32 * k) / 16, weight + 2 * k);
      wgmma_commit();
      wgmma_wait<1>();  // the stage before this one has been read
      if (step && frees) barrier_arrive_at(empty + 8 * before, thread);
      before = slot;
      if (++slot == a.stages) slot = 0, phase ^= 1;
    }
    wgmma_wait<0>();
#pragma unroll
    for (int p = 0; p < PARTS; ++p)
#pragma unroll
      for (int i = 0; i < WIDTH / 2; ++i) asm volatile("" : "+f"(d[p][i])::"memory");
    // d[p][8 j + 4 u + 2 h + i]: row 64 p + 16 warp + lane / 4 + 8 h of the group, element 8 j + lane % 4 * 2 + i, its gate
    // (u 0) and its up. Boxes of 64 rows by 32 elements, their 16-byte pieces swizzled as the copy engine has them. The
    // ring has been read by all, and nothing more comes into it.
    asm volatile("bar.sync 1, %0;" ::"n"(128 * GROUPS) : "memory");
    constexpr int kBoxes = WIDTH / 2 / kWideColumns, kBoxBytes = 64 * kWideColumns * 2;
    const uint32_t own = ring + group * PARTS * kBoxes * kBoxBytes;
    const int to_row = 16 * warp + lane % 16, swizzle = to_row / 2 % 4;
#pragma unroll
    for (int p = 0; p < PARTS; ++p)
#pragma unroll
      for (int j = 0; j < WIDTH / 16; j += 2) {
        float g[8], u[8], y[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int at = 8 * (j + i / 4) + i % 4;
          g[i] = GatedEpilogue<T>::rounded(d[p][at]);
          u[i] = GatedEpilogue<T>::rounded(d[p][at + 4]);
        }
        if (a.gelu)
          gate_mul_all<true>(g, u, y);
        else
          gate_mul_all<false>(g, u, y);
        uint32_t v[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) v[q] = narrow_pair(T(), y[2 * q], y[2 * q + 1]);
        const uint32_t to =
            own + (p * kBoxes + j / 4) * kBoxBytes + to_row * 2 * kWideColumns + (((j % 4 + lane / 16) ^ swizzle) << 4);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v[0]), "r"(v[1]),
                     "r"(v[2]), "r"(v[3])
                     : "memory");
      }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory");
    if (thread == 0) {
#pragma unroll
      for (int p = 0; p < PARTS; ++p)
#pragma unroll
        for (int b = 0; b < kBoxes; ++b)
          store_box(&out_map, own + (p * kBoxes + b) * kBoxBytes, n0 / 2 + b * kWideColumns, m0 + (group * PARTS + p) * 64);
      asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
    }
  }
  if (cluster > 1) cluster_sync();  // no block leaves while another may still write to it
#endif
}

// (rows, columns) as results leave for it.
inline bool wide_out_map(CUtensorMap* map, bool is_bf16, void* out, int64_t rows, int64_t columns, int64_t ld) {
  const EncodeTiled encode = encode_tiled();
  const cuuint64_t sizes[2] = {cuuint64_t(columns), cuuint64_t(rows)}, strides[1] = {cuuint64_t(ld) * 2};
  const cuuint32_t box[2] = {kWideColumns, 64}, steps[2] = {1, 1};
  return encode && encode(map, is_bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, out, sizes,
                          strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_64B,
                          CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace vx::sm90
