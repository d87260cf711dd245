// linear for up to kReceivedRows rows on SM90 of columns that ranks have one beside the other, received as they come
// (common/receive.cuh): sm90_skinny.cuh's product, but for where a stage's rows of x come from. Sixteen warps wait for lines
// and put them where the copy engine would have; the weight's first stages are on their way meanwhile.
// Results may be sent: they are of the next round, and whoever receives them counts both. Whoever has sent one has received
// all lines of this one, for it takes all of a row of x; so those who have received them all know that this round's lines
// are free.
#pragma once
#include "common/receive.cuh"
#include "linear/sm90_skinny.cuh"

namespace vx::sm90 {

constexpr int kReceivedRows = 4;  // more are received by fewer than multiply them
constexpr int kReceiveWarps = 16, kReceivedThreads = 160 + 32 * kReceiveWarps;

struct Received {
  Receiving receiving;
  Sending sending;   // of x, where it is given
  const uint2* x;    // this rank's columns, (m, lines) units, to be sent here; null where they were
  int lines;         // of a row of a rank
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A warp's of `total` stages. There are no more warps than stages of the ring: one that is ahead by more would take a stage
// that is not free for one that is, which a barrier's parity does not tell apart.
template <int BOXES>
__device__ __forceinline__ void receive_stages(const Received& x, const SkinnyArgs& a, uint32_t round, uint32_t ring,
                                               uint32_t full, uint32_t empty, int first, int total, int steps) {
  constexpr int kEach = BOXES / 2;  // lines of a row in a stage that a lane takes
  const int lane = threadIdx.x % 32, weight_bytes = a.rows * 128, stage_bytes = skinny_stage_bytes(a.rows, 8, BOXES);
  const int warps = min(kReceiveWarps, a.stages);
  for (int i = first; first < warps && i < total; i += warps) {
    const int slot = i % a.stages, step = i % steps;
    const uint32_t base = ring + slot * stage_bytes + BOXES * weight_bytes;
    bool is_free = false;
    for (int row = 0; row < a.m; row += 2) {
      int rank[2 * kEach];
      int64_t at[2 * kEach];
      bool live[2 * kEach];
      uint2 found[2 * kEach];
#pragma unroll
      for (int j = 0; j < 2 * kEach; ++j) {
        const int r = row + j / kEach, line = step * BOXES * (kBoxK / 4) + j % kEach * 32 + lane;
        live[j] = r < a.m && 4 * line < a.k;
        rank[j] = line / x.lines;
        at[j] = int64_t(r) * x.lines + (line - rank[j] * x.lines);
        found[j] = make_uint2(0, 0);  // beyond the last column
      }
      receive(x.receiving, round, rank, at, live, found);
      if (!is_free) barrier_wait(empty + 8 * slot, (i / a.stages & 1) ^ 1);
      is_free = true;
#pragma unroll
      for (int j = 0; j < 2 * kEach; ++j) {
        const int r = row + j / kEach, line = j % kEach * 32 + lane;  // of the stage
        if (r >= a.m) continue;
        const int chunk = line % 16 / 2;  // of 16 bytes in a row of a box
        const uint32_t to = base + line / 16 * 1024 + r * 128 + (chunk ^ r) * 16 + line % 2 * 8;
        asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(found[j].x), "r"(found[j].y) : "memory");
      }
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    barrier_arrive(full + 8 * slot);
  }
}

#endif

// T bf16 | fp16; BOXES and PARTS as in skinny_kernel, whose 8 rows of x there are.
template <class T, int BOXES, int PARTS>
__global__ void __launch_bounds__(kReceivedThreads)
    received_kernel(const __grid_constant__ CUtensorMap weight_map, const SkinnyArgs a,
                    const __grid_constant__ SkinnyStore<T> epilogue, const __grid_constant__ Received x) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kTokens = 8, kXStride = skinny_x_bytes(kTokens), kProducer = 128, kReceiver = 160;
  const int weight_bytes = a.rows * 128, stage_bytes = skinny_stage_bytes(a.rows, kTokens, BOXES);
  extern __shared__ uint8_t memory[];
  __shared__ __align__(8) uint64_t barriers[2 * kSkinnyStages];
  __shared__ uint32_t shared_last;  // round that was counted
  const uint32_t ring = (shared_address(memory) + 1023) & ~1023u;
  const uint32_t full = shared_address(barriers), empty = full + 8 * kSkinnyStages;
  const int steps = (a.k + kBoxK * BOXES - 1) / (kBoxK * BOXES), tiles = (a.n + a.rows - 1) / a.rows;
  const int total = steps * ((tiles - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x));

  if (threadIdx.x == kProducer) {
    prefetch_map(&weight_map);
    for (int i = 0; i < a.stages; ++i) {
      barrier_init(full + 8 * i, 1 + 32);
      barrier_init(empty + 8 * i, 1);
    }
    barrier_init_fence();
  }
  __syncthreads();

  if (threadIdx.x >= kProducer && threadIdx.x < kReceiver) {
    if (!is_elected()) return;
    uint64_t once;  // the weight passes through L2
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    int tile = blockIdx.x, step = 0;
    for (int i = min(a.ahead, total); i > 0; --i) {
#pragma unroll
      for (int b = 0; b < BOXES; ++b) SkinnyRows::prefetch(&weight_map, (step * BOXES + b) * kBoxK, tile * a.rows);
      if (++step == steps) step = 0, tile += gridDim.x;
    }
    const bool early = !x.x;  // nobody writes weights between who sends and who receives
    if (!early) wait_for_kernel_before();
    const int start_next = max(max(0, total - a.lead), early ? min(total, a.stages) - 1 : 0);
    int slot = 0;
    uint32_t phase = 1;
    tile = blockIdx.x, step = 0;
    for (int i = 0; i < total; ++i) {
      if (i == start_next) {  // whoever comes after may take it that what this one waits for has ended
        wait_for_kernel_before();
        let_kernel_after_start();
      }
      barrier_wait(empty + 8 * slot, phase);  // passes at once in the first round
      barrier_expect(full + 8 * slot, BOXES * weight_bytes);
      uint32_t to = ring + slot * stage_bytes;
#pragma unroll
      for (int b = 0; b < BOXES; ++b, to += weight_bytes)
        SkinnyRows::copy(to, &weight_map, full + 8 * slot, (step * BOXES + b) * kBoxK, tile * a.rows, once);
      if (++slot == a.stages) slot = 0, phase ^= 1;
      if (++step == steps) step = 0, tile += gridDim.x;
    }
    return;
  }

  wait_for_kernel_before();
  if (threadIdx.x == kReceiver) shared_last = __ldcg(x.receiving.numbers);
  asm volatile("bar.sync 2, %0;" ::"n"(kReceivedThreads - 32) : "memory");
  const uint32_t last = shared_last, round = round_after(last, x.receiving.since);

  if (threadIdx.x >= kReceiver) {
    const int thread = threadIdx.x - kReceiver;
    if (x.x)
      for (int i = blockIdx.x * 32 * kReceiveWarps + thread; i < a.m * x.lines; i += gridDim.x * 32 * kReceiveWarps)
        send_in_turn(x.sending, round, i, x.x[i]);
    receive_stages<BOXES>(x, a, round, ring, full, empty, thread / 32, total, steps);
    return;
  }

  int slot = 0;
  uint32_t phase = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float d[PARTS][kTokens / 2];
#pragma unroll
    for (int p = 0; p < PARTS; ++p)
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) d[p][i] = 0.0f;
    int before = 0;
    for (int step = 0; step < steps; ++step) {
      barrier_wait(full + 8 * slot, phase);
      const uint32_t stage = __shfl_sync(~0u, ring + slot * stage_bytes, 0);
      uint64_t weight = operand(stage), rows = operand(stage + BOXES * weight_bytes);
      wgmma_begin();
#pragma unroll
      for (int b = 0; b < BOXES; ++b, weight += weight_bytes >> 4, rows += kXStride >> 4) {
#pragma unroll
        for (int k = 0; k < kBoxK / 16; ++k)  // order: K ascending; products of one accumulator run in issue order
#pragma unroll
          for (int p = 0; p < PARTS; ++p)
            multiply<T, kTokens>(d[p], weight + (p * 64 * 128 + 32 * k) / 16, rows + 32 * k / 16);
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
      for (int i = 0; i < kTokens / 2; ++i) asm volatile("" : "+f"(d[p][i])::"memory");
    if (threadIdx.x == 0) barrier_arrive(empty + 8 * before);

    epilogue(a, d, tile, 0, round_after(last, x.receiving.since + 1));
  }
#endif
}

}  // namespace vx::sm90
