// grouped_linear for few rows per expert on SM90: out rows of expert e = x rows weight[e]^T, limited by reading the
// weights of the experts that have rows once.
//
// As in linear's kernel for few rows the weight takes wgmma's 64-row side ("swap-AB") and the rows of x its narrow side.
// The weights of all experts that have rows are one list of pieces; a block finds its equal share of it from the offsets,
// on the device, and then takes what is left piece by piece. One thread keeps a ring of weight tiles in flight with the
// bulk tensor copy engine, over the borders of tiles and experts; two warps copy the rows of x beside them, through
// `order` where there is one; GROUPS warpgroups multiply, 64 rows of the weight each.
//
// Paired, a unit is 16 rows of the gate and the 16 of the other half that belong to them, eight and eight in turn: the
// tensor map has five dimensions for it. A thread then holds both factors of an output, and stores their gated product.
// order: K ascending in steps of 16, one fp32 accumulator per output element, no split of K; the K tail is zeros.
#pragma once
#include "common/sm90.cuh"
#include "linear/sm90_skinny.cuh"
#include "silu_mul/gate.cuh"

namespace vx::sm90 {

struct SmallMArgs {
  const void* x;       // rows x_ld apart, on 16-byte boundaries
  int64_t x_ld;
  int sources;         // rows of x
  const int* order;    // (rows,) row i is row order[i] / top_k of x; null: row i of x
  int top_k;
  const int* offsets;  // (experts + 1,)
  void* out;           // (rows, n) contiguous
  int rows, n, k, experts;
  int ring;            // bytes
  bool gelu;           // of the paired kernel
  int* counter;        // 0, and 0 again afterwards: of the pieces that blocks take as they come; null: equal shares alone
  int percent, piece;  // of the pieces that are in equal shares; units in a piece
};

constexpr int kSmallMUnit = 32;       // rows of the weight that one copy brings
constexpr int kSmallMRows = 64;       // rows of x that are multiplied at a time
constexpr int kSmallMLoaders = 64;    // threads that copy x
constexpr int kSmallMMaxStages = 16;
constexpr int kSmallMMail = 4;

__host__ __device__ constexpr int small_m_threads(int groups) { return 128 * groups + 32 + kSmallMLoaders; }
__host__ __device__ constexpr int small_m_stage(int groups, int boxes) { return boxes * (groups * 8192 + kSmallMRows * 128); }
__host__ __device__ constexpr int small_m_table(int experts) { return (3 * (experts + 1) * 4 + 1023) / 1024 * 1024; }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// What a block does at a time: units of one expert's weight by up to kSmallMRows rows of x, so many boxes of k to a stage.
// No units: there is no more to do.
struct SmallMTurn {
  int expert, row, rows, unit, units, boxes;
};

// Bytes of a box of x.
__device__ __forceinline__ int small_m_x_box(int rows) { return (rows <= 8 ? 8 : rows <= 16 ? 16 : rows <= 32 ? 32 : 64) * 128; }

// The turns of a stretch of pieces, the pieces of all experts' tiles of rows counted through.
struct SmallMWalk {
  const int *tiles, *first, *count;  // of the experts: tiles of rows before it, its first row, its rows
  int experts, units_each, pieces_each, piece, most;  // units and pieces of a matrix, units of a piece, pieces of a turn
  int64_t at, end;

  __device__ __forceinline__ bool next(SmallMTurn& turn) {
    if (at >= end) return false;
    const int group = int(at / pieces_each), first_piece = int(at - int64_t(group) * pieces_each);
    int low = 0, high = experts;  // tiles[low] <= group < tiles[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (tiles[middle] <= group ? low : high) = middle;
    }
    const int tile = (group - tiles[low]) * kSmallMRows;
    turn.expert = low;
    turn.row = first[low] + tile;
    turn.rows = min(count[low] - tile, kSmallMRows);
    const int pieces = int(min(int64_t(min(most, pieces_each - first_piece)), end - at));
    turn.unit = first_piece * piece;
    turn.units = min(pieces * piece, units_each - turn.unit);
    at += pieces;
    return true;
  }
};

// Turns on their way from the thread that finds them to the others.
struct SmallMMail {
  SmallMTurn* turns;
  uint32_t full, empty;
  int slot = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void post(const SmallMTurn& turn) {
    barrier_wait(empty + 8 * slot, phase ^ 1);
    turns[slot] = turn;
    barrier_arrive(full + 8 * slot);
    step();
  }
  __device__ __forceinline__ bool get(SmallMTurn& turn) {
    barrier_wait(full + 8 * slot, phase);
    turn = turns[slot];
    turn.rows = __reduce_max_sync(~0u, turn.rows), turn.units = __reduce_max_sync(~0u, turn.units);
    turn.boxes = __reduce_max_sync(~0u, turn.boxes);
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * slot);
    step();
    return turn.units > 0;
  }
  __device__ __forceinline__ void step() {
    if (++slot == kSmallMMail) slot = 0, phase ^= 1;
  }
};

template <bool PAIRED>
__device__ __forceinline__ void small_m_copy(uint32_t to, const CUtensorMap* map, uint32_t barrier, int k, int unit, int expert,
                                         uint64_t policy) {
  if constexpr (PAIRED)
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %4, %5, %6}], [%2], %7;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(k), "r"(0), "r"(2 * unit), "r"(expert), "l"(policy)
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(k), "r"(kSmallMUnit * unit), "r"(expert), "l"(policy)
        : "memory");
}

struct SmallMRing {
  uint32_t base, full, empty, stage, x_at;  // bytes of a stage, where x lies in it
  int stages;
};

// One turn of a warpgroup, up to TOKENS rows of x.
template <class T, bool PAIRED, int GROUPS, int BOXES, int TOKENS>
__device__ __forceinline__ void small_m_turn(const SmallMArgs& a, const SmallMRing& r, const SmallMTurn& turn, int group, int boxes,
                                         int& slot, uint32_t& phase) {
  const bool live = 2 * group < turn.units;
  const int thread = threadIdx.x % 128;
  constexpr uint64_t kHigh = 0x40000040ull << 32;
  float d[TOKENS / 2];
#pragma unroll
  for (int i = 0; i < TOKENS / 2; ++i) d[i] = 0.0f;
#pragma unroll
  for (int i = 0; i < TOKENS / 2; ++i) asm volatile("" : "+f"(d[i])::"memory");
  if (!live) {
    for (int box = 0; box < boxes; box += turn.boxes) {
      barrier_wait(r.full + 8 * slot, phase);
      if (thread == 0) barrier_arrive(r.empty + 8 * slot);
      if (++slot == r.stages) slot = 0, phase ^= 1;
    }
    return;
  }
  int before = -1, left = 0;
  uint32_t at = 0;
#pragma unroll 1
  for (int box = 0; box < boxes; ++box) {
    const bool fresh = left == 0;
    if (fresh) {
      barrier_wait(r.full + 8 * slot, phase);
      at = 0, left = turn.boxes;
    }
    // operand() of both, spelled out on 32 bits in what the compiler knows to be the warp's, not a thread's
    const uint32_t stage = r.base + slot * r.stage;
    const uint32_t weight = __reduce_max_sync(~0u, (stage + group * 8192 + at * turn.units * 4096) >> 4 | 1u << 16);
    const uint32_t x = __reduce_max_sync(~0u, (stage + r.x_at + at * (TOKENS * 128)) >> 4 | 1u << 16);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < kBoxK / 16; ++k)  // order: K ascending; products of one accumulator run in issue order
      multiply<T, TOKENS>(d, weight + 2 * k | kHigh, x + 2 * k | kHigh);
    wgmma_commit();
    wgmma_wait<1>();  // the box before this one has been read
    if (fresh && before >= 0 && thread == 0) barrier_arrive(r.empty + 8 * before);
    before = slot, ++at;
    if (--left == 0 && ++slot == r.stages) slot = 0, phase ^= 1;
  }
  if (left && ++slot == r.stages) slot = 0, phase ^= 1;  // the last stage was not full
  wgmma_wait<0>();
  if (thread == 0) barrier_arrive(r.empty + 8 * before);
#pragma unroll
  for (int i = 0; i < TOKENS / 2; ++i) asm volatile("" : "+f"(d[i])::"memory");

  const int lane = thread % 32, slab = 4 * group + thread / 32;
  if (2 * turn.units <= slab) return;
  T* const out = static_cast<T*>(a.out) + int64_t(turn.row) * a.n;
#pragma unroll
  for (int h = 0; h < (PAIRED ? 1 : 2); ++h) {
    const int n = turn.unit * (PAIRED ? kSmallMUnit / 2 : kSmallMUnit) + slab * (PAIRED ? 8 : 16) + lane / 4 + 8 * h;
    if (n >= a.n) continue;
#pragma unroll
    for (int j = 0; j < TOKENS / 8; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int m = 8 * j + lane % 4 * 2 + i;
        if (m >= turn.rows) continue;
        T& to = out[int64_t(m) * a.n + n];
        if constexpr (PAIRED) {
          T gate, up;
          narrow(gate, d[4 * j + i]);
          narrow(up, d[4 * j + 2 + i]);
          narrow(to, a.gelu ? gate_mul<true>(widen(gate), widen(up)) : gate_mul<false>(widen(gate), widen(up)));
        } else {
          narrow(to, d[4 * j + 2 * h + i]);
        }
      }
  }
}

#endif

// T bf16 | fp16. GROUPS warpgroups; BOXES 64-wide pieces of K per stage.
template <class T, bool PAIRED, int GROUPS, int BOXES>
__global__ void __launch_bounds__(small_m_threads(GROUPS))
    small_m_kernel(const __grid_constant__ CUtensorMap weight_map, const SmallMArgs a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t memory[];
  __shared__ __align__(8) uint64_t barriers[2 * kSmallMMaxStages + 2 * kSmallMMail];
  __shared__ SmallMTurn turns[kSmallMMail];
  __shared__ int most_rows, behind, sums[32];
  int* const tiles = reinterpret_cast<int*>(memory);
  int *const first = tiles + a.experts + 1, *const count = first + a.experts + 1;
  constexpr int kThreadsHere = small_m_threads(GROUPS), kConsumers = 128 * GROUPS, kWarps = kThreadsHere / 32;

  SmallMRing r;
  r.base = (shared_address(memory) + small_m_table(a.experts) + 1023) & ~1023u;
  r.full = shared_address(barriers), r.empty = r.full + 8 * kSmallMMaxStages;
  SmallMMail mail{turns, r.empty + 8 * kSmallMMaxStages, r.empty + 8 * kSmallMMaxStages + 8 * kSmallMMail};
  if (threadIdx.x == kConsumers) {
    for (int i = 0; i < kSmallMMaxStages; ++i) {
      barrier_init(r.full + 8 * i, 1 + kSmallMLoaders);
      barrier_init(r.empty + 8 * i, GROUPS);
    }
    for (int i = 0; i < kSmallMMail; ++i) {
      barrier_init(mail.full + 8 * i, 1);
      barrier_init(mail.empty + 8 * i, (kConsumers + kSmallMLoaders) / 32);
    }
    barrier_init_fence();
    prefetch_map(&weight_map);
    most_rows = 0;
  }
  wait_for_kernel_before();
  let_kernel_after_start();
  int before = 0;
  for (int base = 0; base < a.experts; base += kThreadsHere) {  // offsets out of range never lead out of the rows
    const int e = base + threadIdx.x, lane = threadIdx.x % 32;
    int begin = 0, rows = 0;
    if (e < a.experts) {
      const int end = min(a.offsets[e + 1], a.rows);
      if (e) begin = min(max(a.offsets[e], 0), a.rows);
      rows = max(end - begin, 0);
      first[e] = begin, count[e] = rows;
      if (e == a.experts - 1) behind = max(end, 0);
    }
    const int mine = (rows + kSmallMRows - 1) / kSmallMRows;
    int sum = mine;
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
      const int other = __shfl_up_sync(~0u, sum, i);
      if (lane >= i) sum += other;
    }
    if (lane == 31) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    const int most = __reduce_max_sync(~0u, rows);
    if (lane == 0 && most) atomicMax(&most_rows, most);
    int all = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      if (i == threadIdx.x / 32) sum += all;
      all += sums[i];
    }
    if (e < a.experts) tiles[e] = before + sum - mine;
    before += all;
    __syncthreads();
  }

  // Fewer units leave room for more of k in a stage: what is in flight decides what bandwidth a block gets.
  constexpr int kMostBoxes = 2 * GROUPS * BOXES;
  const int most = __reduce_max_sync(~0u, small_m_x_box(most_rows));  // the same in all threads, for the compiler to see
  const int x_area = min(kMostBoxes * most, max(BOXES * most, 8192));
  r.x_at = BOXES * GROUPS * 8192;
  r.stage = r.x_at + x_area;
  r.stages = min(kSmallMMaxStages, int(a.ring / r.stage));
  const int boxes = (a.k + kBoxK - 1) / kBoxK;
  SmallMTurn turn;
  int slot = 0;

  if (threadIdx.x >= kConsumers + 32) {
    const int thread = threadIdx.x - kConsumers - 32, chunk = thread % 8, row0 = thread / 8;
    const uint32_t to0 = row0 * 128 + ((chunk ^ row0) * 16);
    const int lag = min(r.stages - 2, 3);  // a stage is given back when the one after it is multiplied
    int posted = 0, done = 0;
    uint32_t phase = 1;
    while (mail.get(turn)) {
      const char* from[kSmallMRows / 8];
#pragma unroll
      for (int i = 0; i < kSmallMRows / 8; ++i) {
        const int row = row0 + 8 * i;
        int source = 0;
        if (row < turn.rows) {
          source = turn.row + row;
          if (a.order) source = min(max(a.order[source] / a.top_k, 0), a.sources - 1);
        }
        from[i] = static_cast<const char*>(a.x) + int64_t(source) * a.x_ld * 2 + chunk * 16;
      }
      const int x_box = small_m_x_box(turn.rows);
      for (int box = 0; box < boxes; box += turn.boxes) {
        barrier_wait(r.empty + 8 * slot, phase);
        uint32_t to = r.base + slot * r.stage + r.x_at + to0;
#pragma unroll 1
        for (int b = box; b < min(box + turn.boxes, boxes); ++b, to += x_box) {
          const int k = b * kBoxK, bytes = min(max(2 * (a.k - k) - 16 * chunk, 0), 16);
#pragma unroll
          for (int i = 0; i < kSmallMRows / 8; ++i)
            if (row0 + 8 * i < turn.rows)
              asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + i * 1024),
                           "l"(from[i] + (bytes ? k * 2 : 0)), "r"(bytes)
                           : "memory");
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        if (posted < lag) {
          ++posted;
        } else {  // what was copied `lag` steps ago is there
          if (lag == 3)
            asm volatile("cp.async.wait_group 3;" ::: "memory");
          else if (lag == 2)
            asm volatile("cp.async.wait_group 2;" ::: "memory");
          else if (lag == 1)
            asm volatile("cp.async.wait_group 1;" ::: "memory");
          else
            asm volatile("cp.async.wait_group 0;" ::: "memory");
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the multipliers read it by another way
          barrier_arrive(r.full + 8 * done);
          if (++done == r.stages) done = 0;
        }
        if (++slot == r.stages) slot = 0, phase ^= 1;
      }
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    for (; posted > 0; --posted) {
      barrier_arrive(r.full + 8 * done);
      if (++done == r.stages) done = 0;
    }
  } else if (threadIdx.x >= kConsumers) {
    if (threadIdx.x == kConsumers) {
      uint64_t once, keep;  // a weight that one tile of rows needs passes through the L2 cache
      asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
      asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(keep));
      const int units_each = (a.n * (PAIRED ? 2 : 1) + kSmallMUnit - 1) / kSmallMUnit;
      const int pieces_each = (units_each + a.piece - 1) / a.piece;
      const int whole = 2 * GROUPS / a.piece;  // pieces that fill the tile
      SmallMWalk walk{tiles, first, count, a.experts, units_each, pieces_each, a.piece, whole, 0, 0};
      const int64_t total = int64_t(before) * pieces_each;
      // What is not shared out beforehand goes to those who are done first, for not all get the same bandwidth: whole
      // tiles, and single pieces at the end.
      const int64_t shared = a.counter ? total * a.percent / 100 / whole * whole : total;
      const int64_t tiles_left = (total - shared - min(total - shared, int64_t(2 * gridDim.x))) / whole;
      const int64_t single = shared + tiles_left * whole, turns_left = tiles_left + total - single;
      int64_t taken = -1;
      const int cut = a.counter ? whole : 1;
      walk.at = shared / cut * blockIdx.x / gridDim.x * cut;
      walk.end = shared / cut * (blockIdx.x + 1) / gridDim.x * cut;
      uint32_t phase = 1;
      for (;;) {
        if (!walk.next(turn)) {
          if (!a.counter) break;
          if (taken < 0) taken = atomicAdd(a.counter, 1);
          if (taken >= turns_left) {
            if (taken == turns_left + gridDim.x - 1) *a.counter = 0;  // every block has had its last
            break;
          }
          walk.at = taken < tiles_left ? shared + taken * whole : single + taken - tiles_left;
          walk.end = walk.at + (taken < tiles_left ? whole : 1);
          taken = atomicAdd(a.counter, 1);
          continue;
        }
        turn.boxes = min(kMostBoxes / turn.units, x_area / small_m_x_box(turn.rows));
        mail.post(turn);
        const uint64_t policy = count[turn.expert] <= kSmallMRows ? once : keep;
        for (int box = 0; box < boxes; box += turn.boxes) {
          barrier_wait(r.empty + 8 * slot, phase);  // passes at once in the first round
          const int last = min(box + turn.boxes, boxes);
          barrier_expect(r.full + 8 * slot, (last - box) * turn.units * 4096);
          uint32_t to = r.base + slot * r.stage;
          for (int b = box; b < last; ++b)
            for (int u = 0; u < turn.units; ++u, to += 4096)
              small_m_copy<PAIRED>(to, &weight_map, r.full + 8 * slot, b * kBoxK, turn.unit + u, turn.expert, policy);
          if (++slot == r.stages) slot = 0, phase ^= 1;
        }
      }
      turn.units = 0;
      mail.post(turn);
    }
  } else {
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    uint32_t phase = 0;
    while (mail.get(turn)) {
      if (turn.rows <= 8)
        small_m_turn<T, PAIRED, GROUPS, BOXES, 8>(a, r, turn, group, boxes, slot, phase);
      else if (turn.rows <= 16)
        small_m_turn<T, PAIRED, GROUPS, BOXES, 16>(a, r, turn, group, boxes, slot, phase);
      else if (turn.rows <= 32)
        small_m_turn<T, PAIRED, GROUPS, BOXES, 32>(a, r, turn, group, boxes, slot, phase);
      else
        small_m_turn<T, PAIRED, GROUPS, BOXES, 64>(a, r, turn, group, boxes, slot, phase);
    }
    const int64_t end = int64_t(a.rows) * a.n;  // rows behind the last expert
    int64_t i = int64_t(behind) * a.n + blockIdx.x * kConsumers + threadIdx.x;
    for (; i < end; i += int64_t(gridDim.x) * kConsumers) narrow(static_cast<T*>(a.out)[i], 0.0f);
  }
#endif
}

// (E, rows, k) with k contiguous. Paired, rows is twice a multiple of eight.
inline bool small_m_map(CUtensorMap* map, bool is_bf16, bool paired, const void* weight, int64_t experts, int64_t rows,
                    int64_t k, int64_t expert_ld, int64_t ld) {
  const cuuint64_t row = cuuint64_t(ld) * 2, expert = cuuint64_t(expert_ld) * 2, count = experts;
  if (paired)
    return encode_map<5>(map, is_bf16, weight, {cuuint64_t(k), 8, 2, cuuint64_t(rows / 16), count},
                         {row, rows / 2 * row, 8 * row, expert}, {kBoxK, 8, 2, kSmallMUnit / 16, 1});
  return encode_map<3>(map, is_bf16, weight, {cuuint64_t(k), cuuint64_t(rows), count}, {row, expert},
                       {kBoxK, kSmallMUnit, 1});
}

}  // namespace vx::sm90
