// One row of a gated delta net, as decode.cuh has it and with its bits, for more sequences than an SM has blocks; no torch
// headers.
//
// A block stays and takes 64 columns of a value head of one sequence after another. A warp has the copy engine bring what
// the next ones read, keys, state and w each as soon as its place is free, so that bytes are on their way while four warps
// multiply. What the engine brings is swizzled by 128 bytes; of eight of K the even ones go first, so that a warp's
// loads meet all banks (no bit depends on that order, as admission shows).
#pragma once
#include "gated_delta/decode.cuh"
#include "gated_delta/rows.cuh"

namespace vx {

constexpr int kStreamThreads = kDecodeThreads + 32, kStreamBlocks = 3;  // of an SM
constexpr int kStreamBox = 8;                                           // open rows that are copied at once

// Boxes of 128 bytes: of `state` 32 columns of all of a head's rows, of `k` and `w` a head's part of kStreamBox open rows.
struct GatedDeltaMaps {
  CUtensorMap state, k, w;
};

namespace delta {

template <class T>
struct StreamShared {
  float s[2][kDepth][32];
  float w[2][kChunk][32];
  T k[kDepth / 64][kChunk][64];
  // Of one row and the one behind it in turn: its key and query, and as they came; G of its chunk.
  float own[2][2][kDepth];
  T narrow[2][2][kDepth];
  float g[2][kChunk], r[2][2];
  float a[kChunk], p[kChunk];
  uint64_t k_there, s_there, w_there, k_free, s_free, w_free;
};
template <class T>
constexpr int kStreamBytes = sizeof(StreamShared<T>) + 1024;  // from a 1,024-byte boundary on

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Where a value lies in rows of 128 bytes: its 16 bytes are exchanged within eight rows.
__device__ __forceinline__ int swizzled(int row, int column) { return row * 32 + (((column / 4) ^ (row % 8)) * 4) + column % 4; }
template <class T>
__device__ __forceinline__ T* swizzled(T (*rows)[64], int row, int column) {
  return &rows[row][(((column / 8) ^ (row % 8)) * 8) + column % 8];
}

__device__ __forceinline__ void copy_box_once(const void* to, const CUtensorMap* map, int x, int y, int z, int slot,
                                              uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(sm90::shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(slot), "r"(barrier), "l"(policy)
      : "memory");
}

// The warps that multiply meet.
__device__ __forceinline__ void meet_decoding() { asm volatile("bar.sync 1, %0;" ::"n"(kDecodeThreads) : "memory"); }

// What says where 64 columns of a head of a sequence lie, of `n` in all; as it was read.
struct Place {
  int n, begin, end, length, slot;
  __device__ __forceinline__ Place(const GatedDeltaDecode& args, int n, int heads, int count)
      : n(n), begin(0), end(0), length(0), slot(0) {
    if (n >= count) return;
    const int b = n / heads;
    begin = args.offsets[b], end = args.offsets[b + 1], length = args.context_lens[b], slot = args.slots[b];
  }
  __device__ __forceinline__ bool there(const GatedDeltaDecode& args) const {
    return end - begin == 1 && begin >= 0 && begin < args.tokens && length >= 1 && slot < args.slot_count;
  }
  __device__ __forceinline__ bool kept() const { return slot >= 0; }  // otherwise nobody goes on with the row's sequence
  __device__ __forceinline__ int row() const { return kept() ? (length - 1) % kChunk : 0; }
  __device__ __forceinline__ bool fresh() const { return !kept() || length <= kChunk; }
};

// What a thread reads of a row, ahead of its turn.
template <class T>
struct DecodeRow {
  T held[kDepth / 32];  // of the key by warp 0, of the query by warp 1
  T v[2];
  float beta, step, g[2];  // the gate and the sums before it by warp 2
  __device__ __forceinline__ void read(const GatedDeltaDecode& args, const Place& at, int h, int hk, int column) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, i = at.row();
    const int64_t t = at.begin, gate = t * args.beta_row + h;
    beta = args.wide_beta ? static_cast<const float*>(args.beta)[gate] : widen(static_cast<const T*>(args.beta)[gate]);
    const T* const from = static_cast<const T*>(args.v) + t * args.v_row + h * args.v_head + column;
    v[0] = from[0], v[1] = from[8];
    if (warp < 2) {
      const T* const row = warp ? static_cast<const T*>(args.q) + t * args.q_row + hk * args.q_head
                                : static_cast<const T*>(args.k) + t * args.k_row + hk * args.k_head;
#pragma unroll
      for (int m = 0; m < kDepth / 32; ++m) held[m] = row[lane + 32 * m];
    } else if (warp == 2) {
      const float* const open_g = args.open_g + at.slot * args.g_slot + h;
#pragma unroll
      for (int m = 0; m < 2; ++m) g[m] = lane + 32 * m < i ? open_g[int64_t(lane + 32 * m) * args.hv] : 0.0f;
      step = args.g[t * args.g_row + h];
    }
  }
};

#endif

template <class T>
__global__ void __launch_bounds__(kStreamThreads, kStreamBlocks)
    stream_kernel(const GatedDeltaDecode args, const __grid_constant__ GatedDeltaMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(16) unsigned char memory[];
  auto& sh = *reinterpret_cast<StreamShared<T>*>(memory + (1024 - sm90::shared_address(memory) % 1024) % 1024);
  constexpr int kColumns = kDecodeColumns;
  const int splits = args.dv / kColumns, heads = args.hv * splits, count = args.sequences * heads, group = args.hv / args.hk;
  const int tid = threadIdx.x, warp = __shfl_sync(0xffffffffu, tid / 32, 0), lane = tid % 32, gid = lane / 4, tig = lane % 4;
  const uint32_t k_there = sm90::shared_address(&sh.k_there), k_free = sm90::shared_address(&sh.k_free);
  const uint32_t s_there = sm90::shared_address(&sh.s_there), s_free = sm90::shared_address(&sh.s_free);
  const uint32_t w_there = sm90::shared_address(&sh.w_there), w_free = sm90::shared_address(&sh.w_free);
  if (tid == 0) {
    sm90::barrier_init(k_there, 1), sm90::barrier_init(s_there, 1), sm90::barrier_init(w_there, 1);
    sm90::barrier_init(k_free, 4), sm90::barrier_init(s_free, 4), sm90::barrier_init(w_free, 4);
    sm90::barrier_init_fence();
  }
  __syncthreads();
  sm90::wait_for_kernel_before();
  sm90::let_kernel_after_start();

  if (warp == kDecodeThreads / 32) {
    if (lane == 0) sm90::prefetch_map(&maps.state), sm90::prefetch_map(&maps.k), sm90::prefetch_map(&maps.w);
    uint64_t once, again;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(again));
    int turn = 0;
    Place next(args, blockIdx.x, heads, count);
    while (next.n < count) {
      const Place at = next;
      next = Place(args, at.n + gridDim.x, heads, count);
      if (!at.there(args)) continue;
      const int h = at.n % heads / splits, c0 = at.n % splits * kColumns, boxes = (at.row() + kStreamBox - 1) / kStreamBox;
      // The first time there is nothing to wait for: the use before is a barrier's parity before any.
      sm90::barrier_wait(k_free, (turn & 1) ^ 1);
      if (lane == 0) sm90::barrier_expect(k_there, boxes * kStreamBox * kDepth * sizeof(T));
      __syncwarp();
      if (lane < boxes * (kDepth / 64)) {
        const int part = lane % (kDepth / 64), j = lane / (kDepth / 64) * kStreamBox;
        copy_box_once(&sh.k[part][j], &maps.k, 64 * part, h / group, j, at.slot, k_there, again);
      }
      __syncwarp();
      sm90::barrier_wait(s_free, (turn & 1) ^ 1);
      if (lane == 0) sm90::barrier_expect(s_there, at.fresh() ? 0 : sizeof(sh.s));
      __syncwarp();
      if (lane < 2 && !at.fresh()) copy_box_once(sh.s[lane], &maps.state, c0 + 32 * lane, 0, h, at.slot, s_there, once);
      __syncwarp();
      sm90::barrier_wait(w_free, (turn & 1) ^ 1);
      if (lane == 0) sm90::barrier_expect(w_there, boxes * kStreamBox * kColumns * sizeof(float));
      __syncwarp();
      if (lane < 2 * boxes) {
        const int part = lane % 2, j = lane / 2 * kStreamBox;
        copy_box_once(&sh.w[part][j], &maps.w, c0 + 32 * part, h, j, at.slot, w_there, once);
      }
      __syncwarp();
      ++turn;
    }
    return;
  }

  const int c = 16 * warp + gid;  // this thread's columns: c and c + 8
  const float* const s_here = &sh.s[warp / 2][0][0];  // of which this warp's lie from 16 (warp % 2) on
  const float* const w_here = &sh.w[warp / 2][0][0];
  const int inside = 16 * (warp % 2) + gid;
  const auto free = [&](uint32_t barrier) {
    __syncwarp();
    if (lane == 0) sm90::barrier_arrive(barrier);
  };
  int turn = 0;
  Place next(args, blockIdx.x, heads, count);
  DecodeRow<T> row;
  const auto read_row = [&](const Place& at) {
    const int h = at.n % heads / splits;
    if (at.n < count && at.there(args)) row.read(args, at, h, h / group, at.n % splits * kColumns + c);
  };
  read_row(next);
  while (next.n < count) {
    const Place at = next;
    next = Place(args, at.n + gridDim.x, heads, count);
    if (!at.there(args)) {
      read_row(next);
      continue;
    }
    const int h = at.n % heads / splits, c0 = at.n % splits * kColumns, hk = h / group;
    const int t = at.begin, i = at.row(), block = i / 16 * 16, use = turn & 1;
    const bool kept = at.kept(), fresh = at.fresh(), ends = kept && i == kChunk - 1, appends = kept && !ends;
    const int64_t k_step = int64_t(args.hk) * kDepth, w_step = int64_t(args.hv) * args.dv;
    T* const open_k = static_cast<T*>(args.open_k) + at.slot * args.k_slot + hk * kDepth;
    float* const open_w = args.open_w + at.slot * args.w_slot + int64_t(h) * args.dv + c0;
    auto& own = sh.own[use];
    auto& g = sh.g[use];
    const float beta = row.beta, v[2] = {widen(row.v[0]), widen(row.v[1])};
    if (warp < 2) {
      float x[kDepth / 32];
#pragma unroll
      for (int m = 0; m < kDepth / 32; ++m) x[m] = widen(row.held[m]);
      const float r = args.l2norm ? norm_factor(x) : 1.0f;
      if (lane == 0) sh.r[use][warp] = r;
#pragma unroll
      for (int m = 0; m < kDepth / 32; ++m) {
        const int n = lane + 32 * m;
        own[warp][n] = x[m];
        sh.narrow[use][warp][n] = row.held[m];
        if (warp == 0 && appends && c0 == 0 && h % group == 0) open_k[i * k_step + n] = row.held[m];
      }
    } else if (warp == 2) {
#pragma unroll
      for (int m = 0; m < 2; ++m)
        if (lane + 32 * m < i) g[lane + 32 * m] = row.g[m];
      __syncwarp();
      if (lane == 0) {
        const float sum = (i ? g[i - 1] : 0.0f) + row.step;  // order: a chunk's rows ascending, from +0
        g[i] = sum;
        if (appends && c0 == 0) (args.open_g + at.slot * args.g_slot + h)[int64_t(i) * args.hv] = sum;
      }
    }
    sm90::barrier_wait(k_there, use);
    if (warp == 0) {  // the row's own key behind those that were brought
#pragma unroll
      for (int m = 0; m < kDepth / 32; ++m) *swizzled(sh.k[m / 2], i, lane + m % 2 * 32) = row.held[m];
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    meet_decoding();

    const float here = g[i], decay = exp_term(here), r_k = sh.r[use][0], r_q = sh.r[use][1];
    if (16 * warp <= i) {
      // 16 open rows a warp, times this row's key and query: columns 0 and 1, which the others repeat unread.
      const T* const other = sh.narrow[use][gid & 1] + 2 * tig;
      float d[4] = {0, 0, 0, 0};
#pragma unroll
      for (int s = 0; s < kDepth; s += 16) {
        uint32_t x[4];
        load_matrix(x, swizzled(sh.k[s / 64], 16 * warp + lane % 16, s % 64 + lane / 16 * 8));
        product<T>(d, x, *reinterpret_cast<const uint32_t*>(other + s), *reinterpret_cast<const uint32_t*>(other + s + 8));
      }
      if (tig == 0)
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const int j = 16 * warp + gid + 8 * m;
          if (j > i) continue;
          const float e = exp_term(here - g[j]);
          sh.a[j] = (beta * r_k) * (e * d[2 * m]);
          sh.p[j] = r_q * (e * d[2 * m + 1]);
        }
    }
    free(k_free);
    read_row(next);
    meet_decoding();

    // As in decode.cuh: what multiplies a key comes out in d[0] and d[2], what multiplies a query in d[1] and d[3].
    float from_state[4] = {0, 0, 0, 0}, from_rows[4] = {0, 0, 0, 0};
    sm90::barrier_wait(s_there, use);
    {
      const float* const other = own[gid & 1] + 2 * tig;
      const auto multiply = [&](auto state_of) {
#pragma unroll
        for (int s = 0; s < kDepth; s += 8) {
          const int r = s + 2 * tig;
          const float x[4] = {state_of(r, inside), state_of(r, inside + 8), state_of(r + 1, inside), state_of(r + 1, inside + 8)};
          const float2 y = *reinterpret_cast<const float2*>(other + s);
          product(from_state, x, y.x, y.y);
        }
      };
      if (fresh)
        multiply([](int, int) { return 0.0f; });
      else
        multiply([&](int r, int column) { return as_operand(s_here[swizzled(r, column)]); });
    }
    if (!ends) free(s_free);
    sm90::barrier_wait(w_there, use);
    {
      const float* const factors = (gid & 1 ? sh.p : sh.a) + 2 * tig;
      for (int s = 0; s < block; s += 8) {
        const int j = s + 2 * tig;
        const float x[4] = {as_operand(w_here[swizzled(j, inside)]), as_operand(w_here[swizzled(j, inside + 8)]),
                            as_operand(w_here[swizzled(j + 1, inside)]), as_operand(w_here[swizzled(j + 1, inside + 8)])};
        const float2 y = *reinterpret_cast<const float2*>(factors + s);
        product(from_rows, x, as_operand(y.x), as_operand(y.y));
      }
    }
    if (tig == 0) {
      T* const out = static_cast<T*>(args.out) + (int64_t(t) * args.hv + h) * args.dv + c0 + c;
      float u[2], o[2];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        // + 0: -0 becomes +0, as where a tile's rows are fetched by sums over selections
        u[m] = (beta * fmaf(-(decay * r_k), from_state[2 * m], v[m]) + 0.0f) - (from_rows[2 * m] + 0.0f);
        o[m] = fmaf(decay * r_q, from_state[2 * m + 1] + 0.0f, from_rows[2 * m + 1] + 0.0f);
      }
      // order: the rows of the own block of 16, ascending
#pragma unroll 4
      for (int j = block; j < i; ++j) {
        const float x = -(sh.a[j] + 0.0f), p = sh.p[j] + 0.0f;
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const float w = w_here[swizzled(j, inside + 8 * m)] + 0.0f;
          u[m] = fmaf(x, w, u[m]);
          o[m] = fmaf(p, w, o[m]);
        }
      }
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const float w = r_k * u[m];
        narrow(out[8 * m], args.scale * fmaf(sh.p[i] + 0.0f, w + 0.0f, o[m]));
        if (appends) open_w[i * w_step + c + 8 * m] = w;
        if (ends) (&sh.w[warp / 2][0][0])[swizzled(i, inside + 8 * m)] = w;
      }
    }
    if (ends) {  // the state at the chunk's end, whose keys are read again
      meet_decoding();
      const T* const k = static_cast<const T*>(args.k) + t * args.k_row + hk * args.k_head;
      float* const state = args.state + at.slot * args.state_slot + int64_t(h) * kDepth * args.dv + c0;
#pragma unroll 1
      for (int m0 = 16 * warp; m0 < kDepth; m0 += kDecodeThreads / 2) {
        float d[kColumns / 8][4] = {};
#pragma unroll 1
        for (int j0 = tig; j0 < kChunk; j0 += 8) {
          float keys[4], e[2];
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            const int j = j0 + 4 * (m / 2);
            keys[m] = widen((j == i ? k : open_k + j * k_step)[m0 + gid + 8 * (m % 2)]);
          }
#pragma unroll
          for (int m = 0; m < 2; ++m) e[m] = exp_term(here - g[j0 + 4 * m]);
#pragma unroll
          for (int n = 0; n < kColumns / 8; ++n) {
            const auto w_of = [&](int m) {
              return as_operand(e[m] * (&sh.w[n / 4][0][0])[swizzled(j0 + 4 * m, n % 4 * 8 + gid)]);
            };
            product(d[n], keys, w_of(0), w_of(1));
          }
        }
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            const int r = m0 + gid + 8 * m, column = n % 4 * 8 + 2 * tig;
            float old[2] = {0.0f, 0.0f};
            if (!fresh)
              *reinterpret_cast<float2*>(old) = *reinterpret_cast<const float2*>(&sh.s[n / 4][0][0] + swizzled(r, column));
            *reinterpret_cast<float2*>(state + int64_t(r) * args.dv + 32 * (n / 4) + column) =
                float2{fmaf(decay, old[0], d[n][2 * m]), fmaf(decay, old[1], d[n][2 * m + 1])};
          }
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      free(s_free);
    }
    free(w_free);
    ++turn;
  }
#endif
}

}  // namespace delta
}  // namespace vx
