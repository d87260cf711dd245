// linear for few rows on SM90: out (M, N) = x (M, K) weight (N, K)^T, limited by reading the weight once.
//
// The weight takes wgmma's 64-row side and the rows of x its narrow side ("swap-AB"), so that 8 to 64 rows of x cost
// no padding worth naming. One producer thread keeps a ring of tiles in flight with the bulk tensor copy engine (128-byte
// swizzle, mbarriers) across the tiles of a persistent block; one warpgroup multiplies. A row of x is a column of the
// product: it meets no other row.
// A tile has any number of weight rows that is a multiple of 8, so that the tiles fill the multiprocessors evenly: wgmma
// then reads rows of other tiles, or of none, into accumulators that nobody looks at. So it does with x: the copy engine
// takes as long for rows that are not there as for others, so only as many as there are, in eights, are asked for.
// Launched by launch_chained: what runs before the kernel before has ended only asks the L2 cache for weights.
// order: K ascending in steps of 16, one fp32 accumulator per output element, no split of K; the K tail is zeros.
#pragma once
#include <type_traits>
#include <utility>

#include "common/elect.cuh"
#include "common/sent.cuh"
#include "common/sm90.cuh"

namespace vx::sm90 {

struct SkinnyArgs {
  const void* bias;   // (N,) in the input dtype, or null
  void* out;          // (M, N) with rows out_ld apart, input dtype or fp32
  int64_t out_ld;
  int m, n, k;
  int rows;           // of the weight in a tile: a multiple of 8 up to 64 * PARTS
  int x_rows;         // of x in a copy: a multiple of 8 up to TOKENS
  int stages;         // of the ring
  int ahead;          // stages that are prefetched into L2 before the kernel before has ended
  int lead;           // stages that are left to load when the kernel after may start
  bool out_f32;
};

constexpr int kBoxK = 64;             // elements of K in one 128-byte swizzle row
constexpr int kSkinnyThreads = 160;   // one consumer warpgroup, one producer warp
constexpr int kSkinnyStages = 32;     // at most

// Whether there is a kernel of so many rows of x and 64-wide pieces of K.
constexpr bool skinny_exists(int tokens, int boxes) {
  if (tokens <= 16) return (tokens == 8 || tokens == 16) && (boxes == 2 || boxes == 4 || boxes == 8);
  if (tokens <= 48) return tokens % 8 == 0 && (boxes == 2 || boxes == 4);
  return tokens == 64 && boxes == 2;
}

__host__ __device__ constexpr int skinny_x_bytes(int tokens) { return tokens * 128 < 1024 ? 1024 : tokens * 128; }
__host__ __device__ constexpr int skinny_stage_bytes(int rows, int tokens, int boxes) {
  return boxes * (rows * 128 + skinny_x_bytes(tokens));
}
// A ring from a 1,024-byte boundary, and what wgmma reads beyond its last tile.
constexpr int skinny_shared_bytes(int rows, int tokens, int boxes, int stages) {
  const int beyond = (rows + 63) / 64 * 64 - rows;
  return skinny_stage_bytes(rows, tokens, boxes) * stages + beyond * 128 + 1024;
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
#define VX_REGS12 VX_REGS8 "," VX_R4(8, 9, 10, 11)
#define VX_REGS16 VX_REGS12 "," VX_R4(12, 13, 14, 15)
#define VX_REGS20 VX_REGS16 "," VX_R4(16, 17, 18, 19)
#define VX_REGS24 VX_REGS20 "," VX_R4(20, 21, 22, 23)
#define VX_REGS32 VX_REGS24 "," VX_R4(24, 25, 26, 27) "," VX_R4(28, 29, 30, 31)
#define VX_MULTIPLY(type)                                                                               \
  if constexpr (TOKENS == 8) VX_WGMMA(type, 8, VX_R4(0, 1, 2, 3), 4, 5, VX_D4(0));                      \
  if constexpr (TOKENS == 16) VX_WGMMA(type, 16, VX_REGS8, 8, 9, VX_D4(0), VX_D4(4));                   \
  if constexpr (TOKENS == 24) VX_WGMMA(type, 24, VX_REGS12, 12, 13, VX_D4(0), VX_D4(4), VX_D4(8));      \
  if constexpr (TOKENS == 32) VX_WGMMA(type, 32, VX_REGS16, 16, 17, VX_D16(0));                         \
  if constexpr (TOKENS == 40) VX_WGMMA(type, 40, VX_REGS20, 20, 21, VX_D16(0), VX_D4(16));              \
  if constexpr (TOKENS == 48) VX_WGMMA(type, 48, VX_REGS24, 24, 25, VX_D16(0), VX_D4(16), VX_D4(20));   \
  if constexpr (TOKENS == 64) VX_WGMMA(type, 64, VX_REGS32, 32, 33, VX_D16(0), VX_D16(16));

template <class T, int TOKENS>
__device__ __forceinline__ void multiply(float (&d)[TOKENS / 2], uint64_t weight, uint64_t x) {
  if constexpr (sizeof(T) && __is_same(T, __nv_bfloat16)) {
    VX_MULTIPLY("bf16")
  } else {
    VX_MULTIPLY("f16")
  }
}

template <class T>
__device__ __forceinline__ uint32_t pair_of(T low, T high) {
  uint16_t a, b;
  static_assert(sizeof(T) == 2);
  memcpy(&a, &low, 2), memcpy(&b, &high, 2);
  return a | uint32_t(b) << 16;
}

#endif

// What becomes of a tile: d[p][4 j + 2 h + i] is row 64 p + 16 warp + lane / 4 + 8 h of the weight's tile with row
// m0 + 8 j + lane % 4 * 2 + i of x. Here it is stored, or sent to every rank: an even number of pairs of columns, no fp32.
// `round`: what begin() gave, once the kernel before had ended.
template <class T>
struct SkinnyStore {
  Sending sending;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __device__ __forceinline__ uint32_t begin() const { return sending.ranks ? sending.begin() : 0; }

  template <int PARTS, int HALF_TOKENS>
  __device__ __forceinline__ void send(const SkinnyArgs& a, float (&d)[PARTS][HALF_TOKENS], int tile, int m0,
                                       uint32_t round) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
      const int first = 64 * p + 16 * warp;
      if (first >= a.rows) continue;
      float bias[2] = {};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first + lane / 4 + 8 * h, n = tile * a.rows + row;
        if (a.bias && row < a.rows && n < a.n) bias[h] = widen(static_cast<const T*>(a.bias)[n]);
      }
      const int row = first + (lane & 8) + (lane >> 4) * 4, n = tile * a.rows + row;
#pragma unroll
      for (int j = 0; j < HALF_TOKENS / 4; ++j) {
        if (m0 + 8 * j >= a.m) break;
        uint32_t columns[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          T v[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) narrow(v[i], a.bias ? d[p][4 * j + 2 * h + i] + bias[h] : d[p][4 * j + 2 * h + i]);
          columns[h] = two_columns(pair_of(v[0], v[1]));
        }
        const uint2 line = four_columns(columns[0], columns[1]);
        const int m = m0 + 8 * j + lane % 4 * 2 + lane / 4 % 2;
        if (row < a.rows && n < a.n && m < a.m) sending.send(round, (int64_t(m) * a.n + n) / 4, line.x, line.y);
      }
    }
  }

  template <int PARTS, int HALF_TOKENS>
  __device__ __forceinline__ void operator()(const SkinnyArgs& a, float (&d)[PARTS][HALF_TOKENS], int tile, int m0,
                                             uint32_t round) const {
    if (sending.ranks) return send(a, d, tile, m0, round);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int p = 0; p < PARTS; ++p)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = 64 * p + 16 * warp + lane / 4 + 8 * h, n = tile * a.rows + row;
        if (row >= a.rows || n >= a.n) continue;
        const float bias = a.bias ? widen(static_cast<const T*>(a.bias)[n]) : 0.0f;
#pragma unroll
        for (int j = 0; j < HALF_TOKENS / 4; ++j)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int m = m0 + 8 * j + lane % 4 * 2 + i;
            if (m >= a.m) continue;
            const float v = a.bias ? d[p][4 * j + 2 * h + i] + bias : d[p][4 * j + 2 * h + i];
            const int64_t at = m * a.out_ld + n;
            if (a.out_f32)
              static_cast<float*>(a.out)[at] = v;
            else
              narrow(static_cast<T*>(a.out)[at], v);
          }
      }
  }
#endif
};

// How a tile of the weight is read: its rows as they lie.
struct SkinnyRows {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  static __device__ __forceinline__ void copy(uint32_t to, const CUtensorMap* map, uint32_t barrier, int k, int row,
                                              uint64_t policy) {
    copy_box(to, map, barrier, k, row, policy);
  }
  static __device__ __forceinline__ void prefetch(const CUtensorMap* map, int k, int row) { prefetch_box(map, k, row); }
#endif
};

// T bf16 | fp16. TOKENS rows of x per block; BOXES 64-wide pieces of K per stage (skinny_exists); PARTS of 64 weight rows
// that a tile touches.
template <class T, int TOKENS, int BOXES, int PARTS, class Epilogue = SkinnyStore<T>, class Weight = SkinnyRows>
__global__ void __launch_bounds__(kSkinnyThreads)
    skinny_kernel(const __grid_constant__ CUtensorMap weight_map, const __grid_constant__ CUtensorMap x_map,
                  const SkinnyArgs a, const __grid_constant__ Epilogue epilogue) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kXStride = skinny_x_bytes(TOKENS), kProducer = 128;
  const int weight_bytes = a.rows * 128, x_bytes = a.x_rows * 128, stage_bytes = skinny_stage_bytes(a.rows, TOKENS, BOXES);
  extern __shared__ uint8_t memory[];
  __shared__ __align__(8) uint64_t barriers[2 * kSkinnyStages];
  const uint32_t ring = (shared_address(memory) + 1023) & ~1023u;
  const uint32_t full = shared_address(barriers), empty = full + 8 * kSkinnyStages;
  const int steps = (a.k + kBoxK * BOXES - 1) / (kBoxK * BOXES), tiles = (a.n + a.rows - 1) / a.rows;
  const int m0 = blockIdx.y * TOKENS;

  if (threadIdx.x == kProducer) {
    prefetch_map(&weight_map);
    prefetch_map(&x_map);
    for (int i = 0; i < a.stages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, 1);
    }
    barrier_init_fence();
  }
  __syncthreads();

  if (threadIdx.x >= kProducer) {
    if (!is_elected()) return;
    uint64_t once, keep;  // the weight passes through L2, x is read by every block
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(keep));
    const uint64_t weight_policy = gridDim.y == 1 ? once : keep;
    const int total = steps * ((tiles - blockIdx.x + gridDim.x - 1) / gridDim.x);
    int tile = blockIdx.x, step = 0;
    for (int i = min(a.ahead, total); i > 0; --i) {
#pragma unroll
      for (int b = 0; b < BOXES; ++b) Weight::prefetch(&weight_map, (step * BOXES + b) * kBoxK, tile * a.rows);
      if (++step == steps) step = 0, tile += gridDim.x;
    }
    wait_for_kernel_before();
    const int start_next = max(0, total - a.lead);
    int slot = 0;
    uint32_t phase = 1;
    tile = blockIdx.x, step = 0;
    for (int i = 0; i < total; ++i) {
      if (i == start_next) let_kernel_after_start();
      barrier_wait(empty + 8 * slot, phase);  // passes at once in the first round
      barrier_expect(full + 8 * slot, BOXES * (weight_bytes + x_bytes));
      uint32_t to = ring + slot * stage_bytes;
#pragma unroll
      for (int b = 0; b < BOXES; ++b, to += weight_bytes)
        Weight::copy(to, &weight_map, full + 8 * slot, (step * BOXES + b) * kBoxK, tile * a.rows, weight_policy);
#pragma unroll
      for (int b = 0; b < BOXES; ++b, to += kXStride)
        copy_box(to, &x_map, full + 8 * slot, (step * BOXES + b) * kBoxK, m0, keep);
      if (++slot == a.stages) slot = 0, phase ^= 1;
      if (++step == steps) step = 0, tile += gridDim.x;
    }
    return;
  }

  wait_for_kernel_before();
  const uint32_t round = epilogue.begin();
  int slot = 0;
  uint32_t phase = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float d[PARTS][TOKENS / 2];
#pragma unroll
    for (int p = 0; p < PARTS; ++p)
#pragma unroll
      for (int i = 0; i < TOKENS / 2; ++i) d[p][i] = 0.0f;
    int before = 0;
    for (int step = 0; step < steps; ++step) {
      barrier_wait(full + 8 * slot, phase);
      // What all lanes know to be one value stays in uniform registers, which is where wgmma takes it from: computed per
      // lane, the descriptors alone would take longer than the products.
      const uint32_t stage = __shfl_sync(~0u, ring + slot * stage_bytes, 0);
      uint64_t weight = operand(stage), x = operand(stage + BOXES * weight_bytes);
      wgmma_begin();
#pragma unroll
      for (int b = 0; b < BOXES; ++b, weight += weight_bytes >> 4, x += kXStride >> 4) {
#pragma unroll
        for (int k = 0; k < kBoxK / 16; ++k)  // order: K ascending; products of one accumulator run in issue order
#pragma unroll
          for (int p = 0; p < PARTS; ++p) multiply<T, TOKENS>(d[p], weight + (p * 64 * 128 + 32 * k) / 16, x + 32 * k / 16);
      }
      wgmma_commit();
      wgmma_wait<1>();  // the stage before this one has been read
      if (step && threadIdx.x == 0) barrier_arrive(empty + 8 * before);
      before = slot;
      if (++slot == a.stages) slot = 0, phase ^= 1;
    }
    wgmma_wait<0>();
#pragma unroll
    for (int p = 0; p < PARTS; ++p)
#pragma unroll
      for (int i = 0; i < TOKENS / 2; ++i) asm volatile("" : "+f"(d[p][i])::"memory");
    if (threadIdx.x == 0) barrier_arrive(empty + 8 * before);

    epilogue(a, d, tile, m0, round);
  }
#endif
}

// (rows, columns) of 16-bit values with contiguous rows, read in boxes; beyond its edges the copy engine writes zeros.
inline bool box_map(CUtensorMap* map, bool is_bf16, const void* data, int64_t rows, int64_t columns, int64_t ld,
                    int box_rows, int box_columns) {
  return encode_map<2>(map, is_bf16, data, {cuuint64_t(columns), cuuint64_t(rows)}, {cuuint64_t(ld) * 2},
                       {cuuint32_t(box_columns), cuuint32_t(box_rows)});
}

template <int TOKENS, int BOXES, class F>
bool if_skinny(int tokens, int boxes, F f) {
  if constexpr (skinny_exists(TOKENS, BOXES)) {
    if (tokens == TOKENS && boxes == BOXES) return f(std::integral_constant<int, TOKENS>{}, std::integral_constant<int, BOXES>{}), true;
  }
  return false;
}
// f of both as types; false where there is no such kernel.
template <class F, int... I>
bool for_skinny(int tokens, int boxes, F f, std::integer_sequence<int, I...>) {
  return (if_skinny<8 + I / 3 * 8, 2 << I % 3>(tokens, boxes, f) || ...);
}
template <class F>
bool for_skinny(int tokens, int boxes, F f) {
  return for_skinny(tokens, boxes, f, std::make_integer_sequence<int, 24>());
}

}  // namespace vx::sm90
