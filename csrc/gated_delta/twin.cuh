// Whole sequences, and those of a paged call that go on from a chunk's start, as wide.cuh has them and with their bits, for
// more than the GPU runs at once: two blocks on an SM, of which one runs while the other waits; no torch headers.
//
// Of a block's two warpgroups one has the state and makes all products with it, of keys first, of queries while others
// solve. The other solves, a block of 16 rows a warp, makes the outputs of its rows, and asks the copy engine for what the
// next chunk reads. What lies in shared memory is there once, but for keys.
#pragma once
#include "gated_delta/wide.cuh"

namespace vx {
namespace delta {

constexpr int kTwinThreads = 256;

template <class T>
struct TwinShared {
  Panel<kColumns> s[kDepth / 32], added[kChunk / 32];  // as wide.cuh has them
  T k[2][kChunk][kDepth + 8];
  T q[4][kBlock][kDepth + 8];  // a warp's rows; then their products with the state, then outputs on their way to columns
  T v[kChunk][kColumns + 8];
  struct {
    Prepared::Own own;
    Prepared::Keys k;
  } of_k;
  Prepared::Queries of_q;
  float w[kChunk][kColumns + 4];  // what the state leaves of rows; what other blocks take; then as multiplied, rounded
  Passed k_there[2], of_k_there, q_there, s_there, w_free, out_made;
  Passed left_there[4], solved[4], placed[4], of_s_there[4];
  __device__ __forceinline__ float4* of_s(int part) { return reinterpret_cast<float4*>(&q[part][0][0]); }
  __device__ __forceinline__ float (*turning(int part))[kColumns + 8] {
    return reinterpret_cast<float(*)[kColumns + 8]>(&q[part][0][0]);
  }
};
static_assert(sizeof(float[kBlock][kColumns + 8]) <= sizeof(uint16_t[kBlock][kDepth + 8]));
template <class T>
constexpr int kTwinBytes = sizeof(TwinShared<T>) + 1024;  // from a 1,024-byte boundary on
static_assert(2 * (kTwinBytes<uint16_t> + 1024) <= 228 << 10);

template <class T>
__global__ void __launch_bounds__(kTwinThreads, 2) twin_kernel(const GatedDeltaChunks args, const Prepared* prepared) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(16) unsigned char memory[];
  auto& sh = *reinterpret_cast<TwinShared<T>*>(memory + (1024 - sm90::shared_address(memory) % 1024) % 1024);
  const int splits = args.dv / kColumns, h = blockIdx.x / splits, c0 = blockIdx.x % splits * kColumns, b = blockIdx.y;
  const int hk = h / (args.hv / args.hk);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), part = warp % 4;  // of the rows, or of the dims
  const int lane = threadIdx.x % 32, gid = lane / 4, tig = lane % 4, first = kBlock * part;
  const int begin = min(max(args.offsets[b], 0), args.tokens), end = max(min(args.offsets[b + 1], args.tokens), begin);
  const int chunks = (end - begin + kChunk - 1) / kChunk;
  const int64_t number = begin / kChunk + b;  // of the first chunk
  const int64_t plane = int64_t(kDepth) * args.dv, v_step = int64_t(args.hv) * args.dv;
  int slot = -1;
  bool goes_on = false;  // from the slot's state
  if (args.slots) {
    if (end - begin <= 1) return;  // single rows are decode.cuh's
    slot = args.slots[b] < args.slot_count ? args.slots[b] : -1;
    const int position = slot >= 0 ? max(args.context_lens[b] - (end - begin), 0) : 0;
    if (position % kChunk) return;  // what goes on within a chunk is chunks.cuh's
    goes_on = position > 0;
  }
  const auto row_of = [&](int chunk) { return begin + chunk * kChunk; };
  const auto last_of = [&](int chunk) { return min(kChunk, end - row_of(chunk)); };

  if (threadIdx.x == 0) {
    for (int n = 0; n < 2; ++n) sh.k_there[n].init(1);
    sh.of_k_there.init(1), sh.q_there.init(1), sh.s_there.init(4), sh.w_free.init(4), sh.out_made.init(3);
    for (int n = 0; n < 4; ++n) sh.left_there[n].init(1), sh.solved[n].init(1), sh.placed[n].init(1), sh.of_s_there[n].init(1);
    sm90::barrier_init_fence();
  }
  __syncthreads();

  if (warp >= 4) {
    const auto numbers_of = [&](int chunk) -> const Prepared& { return prepared[(number + chunk) * args.hv + h]; };
    // Rows of keys and values, or of queries and what is of them, or what is of keys; by a warp.
    const auto bring = [&](int chunk, bool of_k) {
      const Source<T> from{
          of_k ? static_cast<const T*>(args.k) + hk * args.k_head : static_cast<const T*>(args.q) + hk * args.q_head,
          of_k ? static_cast<const T*>(args.v) + h * args.v_head + c0 : nullptr, of_k ? args.k_row : args.q_row, args.v_row};
      from.copy(of_k ? sh.k[chunk % 2] : sh.q[0], sh.v, of_k ? nullptr : &sh.of_q, &numbers_of(chunk).q,
                 of_k ? 0 : int(sizeof(sh.of_q)), row_of(chunk), last_of(chunk), of_k ? sh.k_there[chunk % 2] : sh.q_there);
      if (!of_k) return;
      // The rest of it is on its way into the L2 cache meanwhile
      if (lane == 0) bulk_into_l2(&numbers_of(chunk), sizeof(Prepared));
#pragma unroll 1
      for (int i = lane / 2; i < last_of(chunk); i += 16)
        into_l2(static_cast<const T*>(args.q) + hk * args.q_head + (row_of(chunk) + i) * args.q_row + lane % 2 * (kDepth / 2));
    };
    const auto bring_numbers = [&](int chunk) {
      if (lane == 0) {
        sm90::barrier_expect(sh.of_k_there.address(), sizeof(sh.of_k));
        copy_bulk(&sh.of_k, &numbers_of(chunk).columns, sizeof(sh.of_k), sh.of_k_there.address());
      }
      __syncwarp();
    };
    for (int chunk = chunks && (part == 0 || part == 3) ? -1 : 0; chunk < chunks; ++chunk) {
      const bool more = chunk + 1 < chunks;
      if (chunk < 0) {  // what others wait for is brought by these two
        if (part == 0)
          bring(0, true);
        else
          bring_numbers(0), bring(0, false);
        continue;
      }
      const int last = last_of(chunk);
      const auto& of = sh.of_k.k;
      const auto& own = sh.of_k.own.of[part];
      auto* const mine = &sh.w[first];
      sh.of_k_there.wait(chunk);
      float u[kBlock], factors[kBlock];
      take_numbers(factors, of.r + first);
      sh.left_there[part].wait(chunk);
#pragma unroll
      for (int i = 0; i < kBlock; ++i) u[i] = mine[i][lane];
      if (part) {
        float y[4][4] = {};
        // order: blocks of 16 rows, ascending
#pragma unroll 1
        for (int block = 0; block < part; ++block) {
          float a[2][4];
          load_block(a, of.a[part * (part - 1) / 2 + block]);
          sh.solved[block].wait(chunk);
          multiply_block(y, a, &sh.w[kBlock * block]);
        }
        __syncwarp();
        put_rows(mine, y);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kBlock; ++i) u[i] = u[i] - (mine[i][lane] + 0.0f);
        __syncwarp();
      }
      // order: the own block's rows, one fma each
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
        float minus[kBlock];
#pragma unroll
        for (int j = 0; j < kBlock; j += 4)
          if (j + 3 > i) *reinterpret_cast<float4*>(minus + j) = *reinterpret_cast<const float4*>(&own[i][j]);
        const float multiplied = factors[i] * u[i] + 0.0f;
#pragma unroll
        for (int j = i + 1; j < kBlock; ++j) u[j] = fmaf(minus[j], multiplied, u[j]);
      }
      float w[kBlock];
#pragma unroll
      for (int i = 0; i < kBlock; ++i) w[i] = factors[i] * u[i];
      if (first + kBlock > last) {  // rows that are not there add nothing, whatever the state is
#pragma unroll
        for (int i = 0; i < kBlock; ++i) w[i] = first + i < last ? w[i] : 0.0f;
      }
      if (part < 3) {  // nobody multiplies the last block's
#pragma unroll
        for (int i = 0; i < kBlock; ++i) mine[i][lane] = as_operand(w[i]);
        sh.solved[part].arrive();
      }
#pragma unroll
      for (int i = 0; i < kBlock; i += 8) {
        float rest[8], eight[8];
        take_numbers(rest, of.rest + first + i);
#pragma unroll
        for (int e = 0; e < 8; ++e) eight[e] = as_operand(rest[e] * w[i + e]);
        const int at = first % 32 / 8 + i / 8;
        put_eight(&sh.added[part / 2][0][0], lane * 32 + ((2 * at) ^ (lane % 8)) * 4, eight);
      }
      written_for_products();
      sh.placed[part].arrive();
      if (slot >= 0 && last < kChunk) {  // it stays open
        float* const to = args.open_w + slot * args.w_slot + int64_t(h) * args.dv + c0 + lane;
#pragma unroll
        for (int i = 0; i < kBlock; ++i)
          if (first + i < last) to[(first + i) * v_step] = w[i];
      }
      // The outputs: what blocks before give, before the next chunk's rows take their place
      sh.q_there.wait(chunk);
      float x[4][4], y[4][4] = {};
      // order: blocks of 16 rows, ascending
#pragma unroll 1
      for (int m = 0; m < part; ++m) {
        float left[2][4];
        load_block(left, sh.of_q.p[part * (part - 1) / 2 + m]);
        multiply_block(y, left, &sh.w[kBlock * m]);
      }
      if (part == 0 && more) {  // all have read the values, and the keys before these
#pragma unroll 1
        for (int m = 1; m < 4; ++m) sh.left_there[m].wait(chunk);
        bring(chunk + 1, true);
      }
      if (part == 3 && more) {  // all are done with what is of these keys
#pragma unroll 1
        for (int m = 0; m < 3; ++m) sh.placed[m].wait(chunk);
        bring_numbers(chunk + 1);
      }
      sh.w_free.arrive();
      sh.of_s_there[part].wait(chunk);
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const float4 four = sh.of_s(part)[32 * m + lane];
        x[m][0] = four.x, x[m][1] = four.y, x[m][2] = four.z, x[m][3] = four.w;
      }
      const float decay[2] = {sh.of_q.decay[first + gid], sh.of_q.decay[first + gid + 8]};
#pragma unroll
      for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[m][e] = fmaf(decay[e / 2], x[m][e] + 0.0f, y[m][e] + 0.0f);
      auto* const turning = sh.turning(part);
      __syncwarp();
      put_rows(turning, x);
      written_for_products();  // or rather for the copy engine, which writes there next
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kBlock; ++i) w[i] = w[i] + 0.0f;
      T* const to = static_cast<T*>(args.out) + int64_t(row_of(chunk) + first) * v_step + int64_t(h) * args.dv + c0 + lane;
#pragma unroll 1
      for (int i = 0; i < kBlock / 2; ++i) {
        float low = turning[i][lane], high = turning[i + 8][lane];
        const float* const p = sh.of_q.own[part] + in_block(i, 0);
        // order: the own block's rows, ascending
#pragma unroll
        for (int j = 0; j < kBlock; j += 2) {
          const float4 four = *reinterpret_cast<const float4*>(p + in_block(0, j));  // of rows i and i + 8
          if (j <= i) low = fmaf(four.x, w[j], low);
          if (j + 1 <= i) low = fmaf(four.y, w[j + 1], low);
          if (j <= i + 8) high = fmaf(four.z, w[j], high);
          if (j + 1 <= i + 8) high = fmaf(four.w, w[j + 1], high);
        }
        if (first + i < last) narrow(to[i * v_step], args.scale * low);
        if (first + i + 8 < last) narrow(to[(i + 8) * v_step], args.scale * high);
      }
      if (part < 3) {
        sh.out_made.arrive();
      } else if (more) {
        __syncwarp();
        sh.out_made.wait(chunk);
        bring(chunk + 1, false);
      }
    }
    return;
  }

  // Of the state and of what is added to it: dims 64 t + first + gid and the one 8 behind, columns 8 n + 2 tig and the next.
  float s[2][4][4];
  const auto each_pair = [&](auto to) {
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          to(s[t][n][2 * half], s[t][n][2 * half + 1], (64 * t + first + gid + 8 * half) * args.dv + 8 * n + 2 * tig);
  };
  const int64_t whose = (int64_t(b) * args.hv + h) * plane + c0;
  float* const held = slot >= 0 ? args.state + slot * args.state_slot + h * plane + c0 : nullptr;
  const float* const initial = goes_on ? held : args.initial ? args.initial + whose : nullptr;
  each_pair([&](float& x, float& y, int at) {
    float2 two{0, 0};
    if (initial) two = *reinterpret_cast<const float2*>(initial + at);
    x = two.x, y = two.y;
  });
  int places[4];  // in panels of the state, of elements of tile 0
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int c = 2 * tig + e % 2, of_dim = (2 * (part % 2) + e / 2) * 2 + gid % 2;
    places[e] = part / 2 * (kColumns * 32) + c * 32 + (of_dim ^ c) * 4 + gid / 2;
  }
  const uint64_t of_added = operand_of<kColumns>(sh.added, 0, 0);
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const auto& k = sh.k[chunk % 2];
    const auto& of = sh.of_k.k;
    if (chunk)  // all have multiplied the state that there was
#pragma unroll 1
      for (int m = 0; m < 4; ++m) sh.of_s_there[m].wait(chunk - 1);
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) (&sh.s[0][0][0])[2 * t * (kColumns * 32) + 256 * n + places[e]] = as_operand(s[t][n][e]);
    written_for_products();
    sh.s_there.arrive();
    float x[4][4] = {};
    const auto times_state = [&](const T (*from)[kDepth + 8], int row) {
      WideRows rows;
      load_rows(rows, from, row);
      multiply_wide(x, rows, sh.s);
      sm90::wgmma_wait<0>();
      settle(x);
    };
    sh.k_there[chunk % 2].wait(chunk / 2);
    sh.s_there.wait(chunk);
    times_state(k, first);
    sh.of_k_there.wait(chunk);
    const float whole = of.whole[0];
    {
      const float beta[2] = {of.beta[first + gid], of.beta[first + gid + 8]};
      const float decay[2] = {of.decay[first + gid], of.decay[first + gid + 8]};
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        float v[4];
        const T* const here = &sh.v[first + gid][8 * m + 2 * tig];
        widen_four<T>(v, *reinterpret_cast<const uint32_t*>(here),
                      *reinterpret_cast<const uint32_t*>(here + 8 * (kColumns + 8)));
#pragma unroll
        for (int e = 0; e < 4; ++e) x[m][e] = beta[e / 2] * fmaf(-decay[e / 2], x[m][e], v[e]) + 0.0f;
      }
    }
    if (chunk) sh.w_free.wait(chunk - 1);
    put_rows(&sh.w[first], x);
    sh.left_there[part].arrive();
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[m][e] = 0.0f;
    sh.q_there.wait(chunk);
    times_state(sh.q[part], 0);
    __syncwarp();
#pragma unroll
    for (int m = 0; m < 4; ++m) sh.of_s(part)[32 * m + lane] = float4{x[m][0], x[m][1], x[m][2], x[m][3]};
    sh.of_s_there[part].arrive();
    if (args.slots && last_of(chunk) < kChunk) break;  // the state is that of the last boundary
    float added[2][4][4] = {};
    // order: rows ascending in the accumulator, eight at a time
#pragma unroll 1
    for (int block = 0; block < 4; ++block) {
      uint32_t dims[2][4];  // of this warp's dims keys as a left operand: of each tile two of eight rows
      float left[2][2][4];
#pragma unroll
      for (int t = 0; t < 2; ++t)
        load_transposed(dims[t], &k[kBlock * block + lane % 8 + lane / 16 * 8][64 * t + first + lane / 8 % 2 * 8]);
#pragma unroll
      for (int t = 0; t < 2; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half) widen_four<T>(left[t][half], dims[t][2 * half], dims[t][2 * half + 1]);
      sh.placed[block].wait(chunk);
      settle(left[0]), settle(left[1]), settle(added[0]), settle(added[1]);
      sm90::wgmma_begin();
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int t = 0; t < 2; ++t) wide_product(added[t], left[t][half], operand_behind(of_added, kBlock * block + 8 * half));
      sm90::wgmma_commit();
      sm90::wgmma_wait<0>();
      settle(added[0]), settle(added[1]);
    }
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
      for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[t][m][e] = fmaf(whole, s[t][m][e], added[t][m][e]);
  }
  const auto write_to = [&](float* to) {
    each_pair([&](float x, float y, int at) { *reinterpret_cast<float2*>(to + at) = float2{x, y}; });
  };
  if (held && end - begin >= kChunk) write_to(held);
  if (args.final_state) write_to(args.final_state + whose);
#endif
}

}  // namespace delta
}  // namespace vx
