// Products of experts on SM90, bf16: of the rows of every expert with its matrix, tiles found on the device.
//
// The matrix stands where a product has its rows: a block's tile is 128 features (64 for each multiplying warpgroup) by
// up to 256 rows of one expert, in units of 16, so that an expert's rows are shared out to tiles of nearly one size and
// few of the products are of nothing. Two blocks form a cluster, next to each other in the features, and load half of
// their common rows each, for both. Two warpgroups multiply; of a third, one thread loads, and three warps
// take finished tiles from shared memory to where they belong while the next are being made.
// Where ranks have some features each, the gated product of one of them goes to all: the same three warps write each 16
// bytes into every rank's memory, over the links between GPUs, while the next tiles are being multiplied.
// order: K ascending in steps of 16, one fp32 accumulator per element, no split of K; what is missing is zeros.
#pragma once
#include <algorithm>

#include "common/sent.cuh"
#include "grouped_linear/sm90_units.cuh"
#include "silu_mul/gate.cuh"

namespace vx::sm90 {

constexpr int kGroupedFeatures = 128, kGroupedDepth = 64;
constexpr int kGroupedWeight = kGroupedFeatures * kGroupedDepth * 2;  // bytes of the matrix in a step
constexpr int kGroupedBoxRows = 32;  // of what one copy brings, where k is contiguous
constexpr int kGroupedThreads = 384, kStoreThreads = 96;
constexpr int kGroupedExperts = 512;  // the most that a launch takes
constexpr int kGroupedMostStages = 12;
// Bytes of the tiles' numbers and of the barriers.
constexpr int kGroupedSmall = 4 * (kGroupedExperts + 1) + 16 * kGroupedMostStages + 32;

// x W^T; dy W, features contiguous; x W^T whose features alternate, eight of the gate and the eight of up that they
// meet, 64 of each in a tile; dy^T x over the rows of each expert; and gate_up whose results go to all ranks.
enum class Grouped { forward, across, gate_up, sums, gate_up_send };

template <Grouped MODE>
constexpr bool kGated = MODE == Grouped::gate_up || MODE == Grouped::gate_up_send;

struct GroupedArgs {
  const int32_t* offsets;
  __nv_bfloat16* out;   // (rows, features), for sums (experts, depth, features)
  __nv_bfloat16* kept;  // gate_up: (rows, 2 features) before they are gated, where that is wanted
  int experts, rows, features, depth;  // features of gate_up: the pairs; depth of sums: the features of dy
  int units;   // the most of a tile
  int stages;
  int gelu;
  // gate_up_send, in place of `out`: (rows, ranks * features) at each rank, from this rank's first column on
  int ranks;
  __nv_bfloat16* at_rank[kRanks];
};

__host__ __device__ inline int grouped_stage_bytes(int units) {
  return kGroupedWeight + (units + 1) / 2 * 2 * kUnit * kGroupedDepth * 2;
}
inline int grouped_shared_bytes(int units, int stages) {
  return stages * grouped_stage_bytes(units) + units * kUnit * kGroupedFeatures * 2 + kGroupedSmall;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, int k, int row,
                                         int half, int group, int expert) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(k), "r"(row), "r"(half), "r"(group), "r"(expert)
      : "memory");
}

__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// The first row of an expert, and the one after its last: never out of 0 .. rows.
__device__ __forceinline__ int2 rows_of_expert(const GroupedArgs& g, int expert) {
  const int begin = expert > 0 ? max(__ldg(g.offsets + expert), 0) : 0;
  const int end = min(__ldg(g.offsets + expert + 1), g.rows);
  return make_int2(begin, max(end, begin));
}

struct GroupedTile {
  int expert, units, bundle;  // bundle: of tiles of features, one for each block
  int row, end;             // its first row of x, or for sums of the result, and the end of the expert's
  int first, depth;         // where k begins, and how many there are
};

// numbers[e]: of the tiles of rows of the experts before e.
template <Grouped MODE>
__device__ __forceinline__ GroupedTile grouped_tile(const GroupedArgs& g, const int* numbers, int bundles, int turn) {
  if constexpr (MODE == Grouped::sums) {
    const int size = g.units * kUnit, tiles = (g.depth + size - 1) / size;
    const int expert = turn / (tiles * bundles), within = turn % (tiles * bundles);
    const int2 rows = rows_of_expert(g, expert);
    return {expert, g.units, within / tiles, within % tiles * size, g.depth, rows.x, rows.y - rows.x};
  } else {
    int low = 0, high = g.experts;  // the last expert whose first turn is not behind this one
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (numbers[middle] * bundles <= turn) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const int2 rows = rows_of_expert(g, low);
    const int tiles = max(numbers[low + 1] - numbers[low], 1), within = turn - numbers[low] * bundles;
    const int units = (rows.y - rows.x + kUnit - 1) / kUnit, each = units / tiles, more = units % tiles;
    const int tile = within % tiles;
    const int row = rows.x + (tile * each + min(tile, more)) * kUnit;
    return {low, each + (tile < more), within / tiles, row, rows.y, 0, g.depth};
  }
}

// A cluster's tiles, one after the other. To look for one takes as long as to multiply for some steps, so the lanes of a
// warp look for 32 at a time.
template <Grouped MODE>
struct GroupedTiles {
  const GroupedArgs& g;
  const int* numbers;
  int bundles, turns;
  int turn, lane;
  GroupedTile found;

  __device__ __forceinline__ GroupedTiles(const GroupedArgs& g, const int* numbers, int bundles, int turns)
      : g(g), numbers(numbers), bundles(bundles), turns(turns), turn(blockIdx.x / 2), lane(0) {}

  // The next one; false where there is none. All lanes of a warp ask.
  __device__ __forceinline__ bool next(GroupedTile& at) {
    if (turn >= turns) return false;
    const int clusters = gridDim.x / 2;
    if (lane == 0) found = grouped_tile<MODE>(g, numbers, bundles, min(turn + int(threadIdx.x % 32) * clusters, turns - 1));
    const auto from = [this](int v) { return __shfl_sync(~0u, v, lane); };
    at = {from(found.expert), from(found.units), from(found.bundle), from(found.row),
          from(found.end),    from(found.first), from(found.depth)};
    lane = (lane + 1) % 32;
    turn += clusters;
    return true;
  }
};

// Zeros to the rows of k from `from` to the next multiple of 16, which are another expert's, in this warpgroup's box of
// A and in B's. The other warpgroup writes the same to B's: neither waits for the other.
template <int UNITS>
__device__ __forceinline__ void clear_tail(uint32_t stage, int group, int from) {
  const int thread = threadIdx.x % 128, bytes = ((from + 15) / 16 * 16 - from) * 128;
#pragma unroll
  for (int box = 0; box < 1 + UNITS / 4; ++box)
    for (int i = thread * 16; i < bytes; i += 128 * 16) {
      const uint32_t to = stage + (box ? box + 1 : group) * kGemmBox + from * 128 + i;
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
    }
  asm volatile("fence.proxy.async.shared::cta;\nbar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

// What one multiplying warpgroup does for a tile of UNITS, `depth` of k.
template <int UNITS, Grouped MODE>
__device__ __forceinline__ void grouped_multiply(Ring& ring, int depth, int group, uint32_t staged,
                                                 uint32_t staged_full, uint32_t staged_empty, uint32_t staged_phase) {
  constexpr bool A_ACROSS = MODE == Grouped::across || MODE == Grouped::sums, B_ACROSS = MODE == Grouped::sums;
  const int thread = threadIdx.x % 128;
  float d[8 * UNITS];
#pragma unroll
  for (int i = 0; i < 8 * UNITS; ++i) d[i] = 0.0f;
#pragma unroll
  for (int i = 0; i < 8 * UNITS; ++i) asm volatile("" : "+f"(d[i])::"memory");
  int before = -1, left = depth;
  const auto multiply = [&](int k) {  // order: K ascending; products of one accumulator run in issue order
    const uint32_t a = ring.stage() + group * kGemmBox, b = ring.stage() + kGroupedWeight;
    multiply_units<UNITS, A_ACROSS, B_ACROSS>(
        d, A_ACROSS ? operand_across(a + 2048 * k, kGemmBox) : operand(a + 32 * k),
        B_ACROSS ? operand_across(b + 2048 * k, kGemmBox) : operand(b + 32 * k));
  };
  const auto release = [&] {
    if (before >= 0 && thread < 2) barrier_arrive_at(ring.empty + 8 * before, thread);
    before = ring.slot;
  };
  for (; B_ACROSS ? left >= kGroupedDepth : left > 0; left -= kGroupedDepth) {
    ring.await_ready();
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < kGroupedDepth / 16; ++k) multiply(k);
    wgmma_commit();
    wgmma_wait<1>();  // the stage before this one has been read
    release();
    ring.advance();
  }
  if (B_ACROSS && left > 0) {
    ring.await_ready();
    if (left % 16) clear_tail<UNITS>(ring.stage(), group, left);
    for (int k = 0; 16 * k < left; ++k) {
      wgmma_begin();
      multiply(k);
      wgmma_commit();
    }
    wgmma_wait<0>();
    release();
    ring.advance();
  }
  wgmma_wait<0>();
  release();
#pragma unroll
  for (int i = 0; i < 8 * UNITS; ++i) asm volatile("" : "+f"(d[i])::"memory");

  // to shared memory, a row's 64 features side by side: d[4 j + 2 h + i] is (feature lane / 4 + 8 h, row 8 j + 2 q + i)
  barrier_wait(staged_empty, staged_phase);
  const int lane = thread % 32, chunk = thread / 32 * 2 + lane / 8 % 2, row = lane / 16 * 8 + lane % 8;
  const uint32_t to = staged + row * 128 + ((chunk ^ (row % 8)) << 4);
#pragma unroll
  for (int u = 0; u < UNITS; ++u) {
    const float* v = d + 8 * u;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to + u * kUnit * 128),
                 "r"(pack_pair(v[0], v[1])), "r"(pack_pair(v[2], v[3])), "r"(pack_pair(v[4], v[5])),
                 "r"(pack_pair(v[6], v[7]))
                 : "memory");
  }
  barrier_arrive(staged_full);
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}

// What is written leaves the L2 cache first: the operands that other tiles share stay.
__device__ __forceinline__ void store_once(__nv_bfloat16* to, const uint4& v) { __stcs(reinterpret_cast<uint4*>(to), v); }

// The same at each rank, `at` elements behind its first: what lies on another GPU goes there without a wait.
__device__ __forceinline__ void store_at_all(const GroupedArgs& g, int64_t at, const uint4& v) {
#pragma unroll
  for (int rank = 0; rank < kRanks; ++rank)
    if (rank < g.ranks) store_once(g.at_rank[rank] + at, v);
}

// silu(gate) * up, or gelu_tanh's, of eight pairs that are bf16 already: gate.cuh's, one operation of all of them after
// the other, since few warps do this and each has to wait for nothing.
template <bool GELU>
__device__ __forceinline__ uint4 gated(const uint4& gate, const uint4& up) {
  const uint32_t g2[4] = {gate.x, gate.y, gate.z, gate.w}, u2[4] = {up.x, up.y, up.z, up.w};
  float g[8], u[8], y[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    g[i] = __uint_as_float(i % 2 ? g2[i / 2] & 0xffff0000 : g2[i / 2] << 16);
    u[i] = __uint_as_float(i % 2 ? u2[i / 2] & 0xffff0000 : u2[i / 2] << 16);
  }
  gate_mul_all<GELU, 8>(g, u, y);
  return make_uint4(pack_pair(y[0], y[1]), pack_pair(y[2], y[3]), pack_pair(y[4], y[5]), pack_pair(y[6], y[7]));
}

// What three warps do: results from shared memory to where they belong, and zeros to the rows that are nobody's.
template <Grouped MODE>
__device__ __forceinline__ void grouped_store(const GroupedArgs& g, const int* numbers, int bundles, int turns,
                                              int rank, uint32_t staged, int staged_half, uint32_t staged_full,
                                              uint32_t staged_empty) {
  constexpr int kOwn = kGated<MODE> ? kGroupedFeatures / 2 : kGroupedFeatures;
  constexpr bool kSends = MODE == Grouped::gate_up_send;
  const int64_t wide = kSends ? int64_t(g.ranks) * g.features : g.features;
  const int thread = threadIdx.x - (128 - kStoreThreads);
  uint32_t phase = 0;
  GroupedTiles<MODE> tiles(g, numbers, bundles, turns);
  GroupedTile at;
  while (tiles.next(at)) {
    const int first = (2 * at.bundle + rank) * kOwn, rows = min(at.units * kUnit, at.end - at.row);
    barrier_wait(staged_full, phase);
    phase ^= 1;
    if constexpr (kGated<MODE>) {
      const int piece = thread % 8, column = first + piece * 8;  // eight gates and ups of a row for each thread
      const uint32_t from = staged + piece / 4 * staged_half;
      for (int row = thread / 8; row < rows; row += kStoreThreads / 8) {
        const uint4 gate = load_shared(from + row * 128 + ((2 * (piece % 4) ^ (row % 8)) << 4));
        const uint4 up = load_shared(from + row * 128 + (((2 * (piece % 4) + 1) ^ (row % 8)) << 4));
        if (column >= g.features) continue;
        const int64_t at_row = at.row + row;
        if (!kSends && g.kept) {
          store_once(g.kept + at_row * 2 * g.features + column, gate);
          store_once(g.kept + (at_row * 2 + 1) * g.features + column, up);
        }
        const uint4 v = g.gelu ? gated<true>(gate, up) : gated<false>(gate, up);
        if constexpr (kSends)
          store_at_all(g, at_row * wide + column, v);
        else
          store_once(g.out + at_row * g.features + column, v);
      }
    } else {
      const int piece = thread % 16, column = first + piece * 8;
      const uint32_t from = staged + piece / 8 * staged_half;
      const int64_t start = MODE == Grouped::sums ? int64_t(at.expert) * g.depth + at.row : at.row;
      __nv_bfloat16* const to = g.out + start * g.features + column;
#pragma unroll 4
      for (int row = thread / 16; row < rows; row += kStoreThreads / 16) {
        const uint4 v = load_shared(from + row * 128 + (((piece % 8) ^ (row % 8)) << 4));
        if (column < g.features) store_once(to + int64_t(row) * g.features, v);
      }
    }
    barrier_arrive(staged_empty);
  }
  if constexpr (MODE != Grouped::sums) {
    const int64_t last = min(max(__ldg(g.offsets + g.experts), 0), g.rows), more = int64_t(gridDim.x) * kStoreThreads;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    const int64_t own = blockIdx.x * kStoreThreads + thread;
    if constexpr (kSends) {
      const int pieces = g.features / 8;  // of a row
      for (int64_t i = last * pieces + own; i < int64_t(g.rows) * pieces; i += more)
        store_at_all(g, i / pieces * wide + i % pieces * 8, zero);
      // What this thread wrote has come to the others' memory before this kernel ends, and whatever is said to them
      // after it: peers.cu's `meet`.
      __threadfence_system();
    } else {
      for (int64_t i = last * g.features / 8 + own; i < int64_t(g.rows) * g.features / 8; i += more)
        reinterpret_cast<uint4*>(g.out)[i] = zero;
    }
    if (MODE == Grouped::gate_up && g.kept)
      for (int64_t i = last * g.features / 4 + own; i < int64_t(g.rows) * g.features / 4; i += more)
        reinterpret_cast<uint4*>(g.kept)[i] = zero;
  }
}

#endif

// a_map: the matrices, b_map: the rows; for sums x and dy.
template <Grouped MODE>
__global__ void VX_CLUSTER_OF_TWO __launch_bounds__(kGroupedThreads, 1)
    grouped_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                   const GroupedArgs g) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t memory[];
  constexpr int kOwn = kGated<MODE> ? kGroupedFeatures / 2 : kGroupedFeatures;  // of a block's tile
  const int stage_bytes = grouped_stage_bytes(g.units), staged_half = g.units * kUnit * 128;  // a warpgroup's 64 features
  const uint32_t base = shared_address(memory), staged = base + g.stages * stage_bytes, full = staged + 2 * staged_half;
  Ring ring(base, full, full + 8 * kGroupedMostStages, g.stages, stage_bytes);
  const uint32_t staged_full = ring.empty + 8 * kGroupedMostStages, staged_empty = staged_full + 8;
  int* const numbers = reinterpret_cast<int*>(memory + (staged_empty + 8 - base));
  const int rank = cluster_rank();
  const int bundles = (g.features + 2 * kOwn - 1) / (2 * kOwn);

  if (threadIdx.x == 0) {
    ring.init(4);  // both multiplying warpgroups of both blocks
    barrier_init(staged_full, 256);
    barrier_init(staged_empty, kStoreThreads);
    barrier_init_fence();
  }
  if (MODE != Grouped::sums && threadIdx.x >= 128 && threadIdx.x < 160) {
    const int lane = threadIdx.x % 32;
    int total = 0;
    for (int first = 0; first < g.experts; first += 32) {
      int tiles = 0;
      if (first + lane < g.experts) {
        const int2 rows = rows_of_expert(g, first + lane);
        tiles = (rows.y - rows.x + g.units * kUnit - 1) / (g.units * kUnit);
      }
      int sum = tiles;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int below = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += below;
      }
      if (first + lane < g.experts) numbers[first + lane] = total + sum - tiles;
      total += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) numbers[g.experts] = total;
  }
  __syncthreads();
  cluster_sync();
  const int size = g.units * kUnit, tiles = MODE == Grouped::sums ? (g.depth + size - 1) / size : 0;
  const int turns = (MODE == Grouped::sums ? g.experts * tiles : numbers[g.experts]) * bundles;

  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 120;");
    if (threadIdx.x < 32) {
      const bool loads = is_elected();
      ring.phase = 1;
      GroupedTiles<MODE> tiles(g, numbers, bundles, turns);
      GroupedTile at;
      while (tiles.next(at)) {
        const int first = (2 * at.bundle + rank) * kOwn, box_rows = MODE == Grouped::sums ? 64 : kGroupedBoxRows;
        const int box_bytes = box_rows * kGroupedDepth * 2, boxes = (at.units * kUnit + box_rows - 1) / box_rows;
        const uint32_t bytes = kGroupedWeight + boxes * box_bytes;
        for (int k = at.first; k < at.first + at.depth; k += kGroupedDepth) {
          ring.await_free();
          const uint32_t a = ring.stage(), b = a + kGroupedWeight, ready = ring.ready();
          if (loads) {
            barrier_expect(ready, bytes);
            if constexpr (kGated<MODE>) {
              copy_box(a, &a_map, ready, k, 0, 0, first / 8, at.expert);
            } else if constexpr (MODE == Grouped::forward) {
              copy_box(a, &a_map, ready, k, first, at.expert);
            } else {
              const int z = MODE == Grouped::sums ? 0 : at.expert;
              copy_box(a, &a_map, ready, first, k, z);
              copy_box(a + kGemmBox, &a_map, ready, first + 64, k, z);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // of at most eight boxes
              const int box = rank + i * 2, row = at.row + box * box_rows;
              if (box < boxes)
                copy_box_to(3, b + box * box_bytes, &b_map, ready, MODE == Grouped::sums ? row : k,
                            MODE == Grouped::sums ? k : row, 0);
            }
          }
          __syncwarp();
          ring.advance();
        }
      }
    }
    if (threadIdx.x >= 128 - kStoreThreads)
      grouped_store<MODE>(g, numbers, bundles, turns, rank, staged, staged_half, staged_full, staged_empty);
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 192;");
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
    uint32_t staged_phase = 1;
    GroupedTiles<MODE> tiles(g, numbers, bundles, turns);
    GroupedTile at;
    while (tiles.next(at)) {
#define VX_UNITS(u)                                                                                                   \
  case u:                                                                                                             \
    grouped_multiply<u, MODE>(ring, at.depth, group, staged + group * staged_half, staged_full, staged_empty,         \
                              staged_phase);                                                                          \
    break
      if constexpr (MODE == Grouped::sums) {
        switch (at.units) {
          VX_UNITS(8);
          VX_UNITS(12);
          VX_UNITS(16);
        }
      } else {
        switch (at.units) {
          VX_UNITS(1);
          VX_UNITS(2);
          VX_UNITS(3);
          VX_UNITS(4);
          VX_UNITS(5);
          VX_UNITS(6);
          VX_UNITS(7);
          VX_UNITS(8);
          VX_UNITS(9);
          VX_UNITS(10);
          VX_UNITS(11);
          VX_UNITS(12);
          VX_UNITS(13);
          VX_UNITS(14);
          VX_UNITS(15);
          VX_UNITS(16);
        }
      }
#undef VX_UNITS
      staged_phase ^= 1;
    }
  }
  cluster_sync();  // no block leaves while the other may still write to it
#endif
}

// (z, y, x) in bf16 with x contiguous, read in boxes of 64 x by `box_rows` y; beyond its edges the copy engine writes
// zeros.
inline bool grouped_map(CUtensorMap* map, const void* data, int64_t x, int64_t y, int64_t y_stride, int64_t z,
                        int box_rows) {
  const cuuint64_t row = cuuint64_t(y_stride) * 2;
  return encode_map<3>(map, true, data, {cuuint64_t(x), cuuint64_t(y), cuuint64_t(z)}, {row, y * row},
                       {64, cuuint32_t(box_rows), 1});
}

// Matrices (experts, 2 width, depth), gates above ups, as (experts, width / 8, 2, 8, depth): a box takes eight gates,
// the eight ups that they meet, and so on, eight times.
inline bool gate_up_map(CUtensorMap* map, const void* data, int64_t experts, int64_t width, int64_t depth) {
  const cuuint64_t row = cuuint64_t(depth) * 2;
  return encode_map<5>(map, true, data, {cuuint64_t(depth), 8, 2, cuuint64_t(width) / 8, cuuint64_t(experts)},
                       {row, width * row, 8 * row, 2 * width * row}, {64, 8, 2, 8, 1});
}

template <Grouped MODE>
cudaError_t grouped(const CUtensorMap& a, const CUtensorMap& b, const GroupedArgs& g, int device, cudaStream_t stream) {
  auto kernel = grouped_kernel<MODE>;
  const int bytes = grouped_shared_bytes(g.units, g.stages);
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  int processors = 0;
  error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  kernel<<<processors / 2 * 2, kGroupedThreads, bytes, stream>>>(a, b, g);
  return cudaGetLastError();
}

}  // namespace vx::sm90
