// Whole sequences of a gated delta net, as whole.cuh has them and with their bits, by the warpgroup instruction; no torch
// headers.
//
// A block goes through a sequence's chunks for kColumns columns of a value head, by three warpgroups of which each does
// one thing. One has the state: a quarter of the dims a warp, in registers, and as multiplied, rounded to tf32, in shared
// memory as a right operand. It multiplies keys with it, and adds rows as they are solved. One solves: a block of 16 rows
// a warp, a column a thread. One makes the outputs, a chunk behind. Two more warps bring what all of them read. What the
// backward keeps is stored by those that make it.
//
// The four warps of a warpgroup run the same products in the same place of the code: where those that have solved ran
// ahead to the same ones in another place, bits were others (H200).
#pragma once
#include "gated_delta/warpgroup.cuh"
#include "gated_delta/whole.cuh"

namespace vx {
namespace delta {

constexpr int kWideWholeThreads = 512;  // of whose last four warps two have nothing to do

template <class T>
struct WideShared {
  Panel<kColumns> s[2][kDepth / 32];          // (columns, dims) of a chunk's state and the next one's
  Panel<kColumns> added[kChunk / 32];         // (columns, rows): what is added to the state
  T k[2][kChunk][kDepth + 8], q[2][kChunk][kDepth + 8];
  T v[2][kChunk][kColumns + 8];
  struct {
    Prepared::Own own;
    Prepared::Keys k;
  } of_k[2];
  Prepared::Queries of_q[2];
  float left[4][kBlock][kColumns + 8];        // what the state leaves of a block's rows; then what other blocks take
  float w[2][kChunk][kColumns];               // as it is, and as multiplied
  float rounded_w[2][kChunk][kColumns + 4];
  float turning[4][kBlock][kColumns + 8];     // outputs on their way to a column a thread
  Passed k_there[2], k_free[2], q_there[2], q_free[2], w_there[2][4], w_free[2];
  Passed s_there, s_given[2], s_free[2];      // among those that have it, and for the outputs
  Passed left_there[4], solved[4], placed[4];
  // A warp's dims of the state on their way to device memory, where it is kept: then there are no queries
  __device__ __forceinline__ KeptDims& kept(int part) { return reinterpret_cast<KeptDims*>(&q[0][0][0])[part]; }
};
static_assert(4 * sizeof(KeptDims) <= sizeof(uint16_t[2][kChunk][kDepth + 8]));
template <class T>
constexpr int kWideBytes = sizeof(WideShared<T>) + 1024;  // from a 1,024-byte boundary on
static_assert(kWideBytes<uint16_t> <= 227 << 10);

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A block of A or P as a left operand of 16 rows.
__device__ __forceinline__ void load_block(float (&to)[2][4], const Placed& x) {
  const int gid = threadIdx.x % 32 / 4, tig = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float4 four = *reinterpret_cast<const float4*>(x + in_block(gid, 8 * half + 2 * tig));
    to[half][0] = four.x, to[half][1] = four.z, to[half][2] = four.y, to[half][3] = four.w;
  }
}
// d + x w of 16 rows of w. order: rows ascending in the accumulator, eight at a time
__device__ __forceinline__ void multiply_block(float (&d)[4][4], const float (&x)[2][4], const float (*w)[kColumns + 4]) {
  const int gid = threadIdx.x % 32 / 4, tig = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* const here = &w[8 * half + 2 * tig][gid];
#pragma unroll
    for (int n = 0; n < 4; ++n) product(d[n], x[half], here[8 * n], here[8 * n + kColumns + 4]);
  }
}
// N neighbours of numbers that a chunk's rows have.
template <int N>
__device__ __forceinline__ void take_numbers(float (&to)[N], const float* from) {
#pragma unroll
  for (int i = 0; i < N; i += 4) *reinterpret_cast<float4*>(to + i) = *reinterpret_cast<const float4*>(from + i);
}

#endif

// KEEP: for the backward, states at chunk starts and u in place of outputs. With slots: of the sequences that go on from a
// chunk's start.
template <class T, bool KEEP>
__global__ void __launch_bounds__(kWideWholeThreads, 1) wide_kernel(const GatedDeltaChunks args, const Prepared* prepared) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(16) unsigned char memory[];
  auto& sh = *reinterpret_cast<WideShared<T>*>(memory + (1024 - sm90::shared_address(memory) % 1024) % 1024);
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
  if (!KEEP && args.slots) {
    if (end - begin <= 1) return;  // single rows are decode.cuh's
    slot = args.slots[b] < args.slot_count ? args.slots[b] : -1;
    const int position = slot >= 0 ? max(args.context_lens[b] - (end - begin), 0) : 0;
    if (position % kChunk) return;  // what goes on within a chunk is chunks.cuh's
    goes_on = position > 0;
  }
  const auto row_of = [&](int chunk) { return begin + chunk * kChunk; };
  const auto last_of = [&](int chunk) { return min(kChunk, end - row_of(chunk)); };

  if (threadIdx.x == 0) {
    for (int n = 0; n < 2; ++n) {
      sh.k_there[n].init(kBringing), sh.k_free[n].init(8), sh.q_there[n].init(kBringing), sh.q_free[n].init(4);
      sh.s_given[n].init(4), sh.s_free[n].init(4), sh.w_free[n].init(4);
      for (int m = 0; m < 4; ++m) sh.w_there[n][m].init(1);
    }
    for (int n = 0; n < 4; ++n) sh.left_there[n].init(1), sh.solved[n].init(1), sh.placed[n].init(1);
    sh.s_there.init(4);
    sm90::barrier_init_fence();
  }
  __syncthreads();

  if (warp >= 12) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    const bool of_k = warp == 12;
    if (warp > (KEEP ? 12 : 13)) return;
    const Source<T> from{
        of_k ? static_cast<const T*>(args.k) + hk * args.k_head : static_cast<const T*>(args.q) + hk * args.q_head,
        of_k ? static_cast<const T*>(args.v) + h * args.v_head + c0 : nullptr, of_k ? args.k_row : args.q_row, args.v_row};
    const int bytes = of_k ? sizeof(sh.of_k[0]) : sizeof(sh.of_q[0]);
    const auto numbers_of = [&](int chunk) {
      const Prepared& all = prepared[(number + chunk) * args.hv + h];
      return of_k ? static_cast<const void*>(&all.columns) : &all.q;
    };
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int n = chunk % 2, use = chunk / 2, far = chunk + 2;
      if (use) (of_k ? sh.k_free : sh.q_free)[n].wait(use - 1);
      from.bring(of_k ? sh.k[n] : sh.q[n], sh.v[n], of_k ? static_cast<void*>(&sh.of_k[n]) : &sh.of_q[n], numbers_of(chunk),
                 bytes, row_of(chunk), last_of(chunk), (of_k ? sh.k_there : sh.q_there)[n]);
      if (far < chunks) from.ask(numbers_of(far), bytes, row_of(far), last_of(far));
    }
    return;
  }

  if (warp >= 8) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 136;");
    if constexpr (!KEEP) {
      auto& turning = sh.turning[part];
      for (int chunk = 0; chunk < chunks; ++chunk) {
        const int n = chunk % 2, use = chunk / 2, row = row_of(chunk), last = last_of(chunk);
        const auto& of = sh.of_q[n];
        sh.q_there[n].wait(use);
        WideRows rows;
        load_rows(rows, sh.q[n], first);
        float x[4][4] = {}, y[4][4] = {};
        sh.s_given[n].wait(use);
        multiply_wide(x, rows, sh.s[n]);
        sm90::wgmma_wait<0>();
        settle(x);
        sh.s_free[n].arrive();
        // order: blocks of 16 rows, ascending
#pragma unroll 1
        for (int m = 0; m < part; ++m) {
          float left[2][4];
          load_block(left, of.p[part * (part - 1) / 2 + m]);
          sh.w_there[n][m].wait(use);
          multiply_block(y, left, &sh.rounded_w[n][kBlock * m]);
        }
        const float decay[2] = {of.decay[first + gid], of.decay[first + gid + 8]};
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
          for (int e = 0; e < 4; ++e) x[m][e] = fmaf(decay[e / 2], x[m][e] + 0.0f, y[m][e] + 0.0f);
        put_rows(turning, x);
        sh.w_there[n][part].wait(use);
        float w[kBlock];
#pragma unroll
        for (int j = 0; j < kBlock; ++j) w[j] = sh.w[n][first + j][lane] + 0.0f;
        sh.w_free[n].arrive();
        T* const to = static_cast<T*>(args.out) + int64_t(row + first) * v_step + int64_t(h) * args.dv + c0 + lane;
#pragma unroll 1
        for (int i = 0; i < kBlock / 2; ++i) {
          float low = turning[i][lane], high = turning[i + 8][lane];
          const float* const p = of.own[part] + in_block(i, 0);
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
        sh.q_free[n].arrive();
      }
    }
    return;
  }

  if (warp >= 4) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 144;");
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int n = chunk % 2, use = chunk / 2, last = last_of(chunk);
      const auto& of = sh.of_k[n].k;
      const auto& own = sh.of_k[n].own.of[part];
      auto& left = sh.left[part];
      sh.k_there[n].wait(use);
      float u[kBlock], factors[kBlock], rest[kBlock];
      take_numbers(factors, of.r + first), take_numbers(rest, of.rest + first);
      float early[2][kBlock];  // of the first columns, which are asked for before anybody waits for them
      take_numbers(early[0], own[0]), take_numbers(early[1], own[1]);
      if (!KEEP && use) sh.w_free[n].wait(use - 1);
      sh.left_there[part].wait(chunk);
#pragma unroll
      for (int i = 0; i < kBlock; ++i) u[i] = left[i][lane];
      if (part) {
        float y[4][4] = {};
        // order: blocks of 16 rows, ascending
#pragma unroll 1
        for (int block = 0; block < part; ++block) {
          float a[2][4];
          load_block(a, of.a[part * (part - 1) / 2 + block]);
          sh.solved[block].wait(chunk);
          multiply_block(y, a, &sh.rounded_w[n][kBlock * block]);
        }
        put_rows(left, y);  // all of the warp have waited, so have what was there
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kBlock; ++i) u[i] = u[i] - (left[i][lane] + 0.0f);
      }
      // order: the own block's rows, one fma each
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
        float minus[kBlock];
#pragma unroll
        for (int j = 0; j < kBlock; j += 4)
          if (i > 1 && j + 3 > i) *reinterpret_cast<float4*>(minus + j) = *reinterpret_cast<const float4*>(&own[i][j]);
        const float multiplied = factors[i] * u[i] + 0.0f;
#pragma unroll
        for (int j = i + 1; j < kBlock; ++j) u[j] = fmaf(i > 1 ? minus[j] : early[i][j], multiplied, u[j]);
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
        for (int i = 0; i < kBlock; ++i) sh.rounded_w[n][first + i][lane] = as_operand(w[i]);
        sh.solved[part].arrive();
      }
#pragma unroll
      for (int i = 0; i < kBlock; i += 8) {
        float eight[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) eight[e] = as_operand(rest[i + e] * w[i + e]);
        const int at = first % 32 / 8 + i / 8;
        put_eight(&sh.added[part / 2][0][0], lane * 32 + ((2 * at) ^ (lane % 8)) * 4, eight);
      }
      written_for_products();
      sh.placed[part].arrive();
      sh.k_free[n].arrive();
      if constexpr (KEEP) {
        float* const to = args.us + int64_t(row_of(chunk) + first) * v_step + int64_t(h) * args.dv + c0 + lane;
#pragma unroll
        for (int i = 0; i < kBlock; ++i) sh.w[n][first + i][lane] = u[i];
#pragma unroll 1
        for (int i = 0; i < min(last - first, kBlock); ++i) to[i * v_step] = sh.w[n][first + i][lane];
      } else {
#pragma unroll
        for (int i = 0; i < kBlock; ++i) sh.w[n][first + i][lane] = w[i];
        sh.w_there[n][part].arrive();
        if (slot >= 0 && last < kChunk) {  // it stays open
          float* const to = args.open_w + slot * args.w_slot + int64_t(h) * args.dv + c0 + lane;
#pragma unroll 1
          for (int i = first; i < min(last, first + kBlock); ++i) to[i * v_step] = sh.w[n][i][lane];
        }
      }
    }
    return;
  }

  // Of the state and of what is added to it: dims 64 t + first + gid and the one 8 behind, columns 8 n + 2 tig and the next.
  asm volatile("setmaxnreg.inc.sync.aligned.u32 192;");
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
  const auto write_to = [&](float* to) {
    each_pair([&](float x, float y, int at) { *reinterpret_cast<float2*>(to + at) = float2{x, y}; });
  };
  int places[4];  // in panels of the state, of elements of tile 0
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int c = 2 * tig + e % 2, of_dim = (2 * (part % 2) + e / 2) * 2 + gid % 2;
    places[e] = part / 2 * (kColumns * 32) + c * 32 + (of_dim ^ c) * 4 + gid / 2;
  }
  const auto publish = [&](int chunk) {
    float* const to = &sh.s[chunk % 2][0][0][0];
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) to[2 * t * (kColumns * 32) + 256 * n + places[e]] = as_operand(s[t][n][e]);
    if constexpr (KEEP) put_dims(sh.kept(part), s);
    written_for_products();
    sh.s_there.arrive();
  };
  const uint64_t of_added = operand_of<kColumns>(sh.added, 0, 0);
  NarrowRows next;  // keys: this warp's of the next chunk
  if (chunks) {
    sh.k_there[0].wait(0);
    load_rows(next, sh.k[0], first);
    publish(0);
  }
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int n = chunk % 2;
    const auto& k = sh.k[n];
    const auto& of = sh.of_k[n].k;
    {
      float x[4][4] = {};
      WideRows rows;
      widen_rows<T>(rows, next);
      sh.s_there.wait(chunk);
      multiply_wide(x, rows, sh.s[n]);
      // Behind the barrier that those wait for who read the state: it would wait for stores too
      if constexpr (KEEP)
        store_dims(args.states + ((number + chunk) * args.hv + h) * plane + c0, args.dv, first, sh.kept(part));
      const float beta[2] = {of.beta[first + gid], of.beta[first + gid + 8]};
      const float decay[2] = {of.decay[first + gid], of.decay[first + gid + 8]};
      float v[4][4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const T* const here = &sh.v[n][first + gid][8 * m + 2 * tig];
        widen_four<T>(v[m], *reinterpret_cast<const uint32_t*>(here),
                      *reinterpret_cast<const uint32_t*>(here + 8 * (kColumns + 8)));
      }
      sm90::wgmma_wait<0>();
      settle(x);
#pragma unroll
      for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[m][e] = beta[e / 2] * fmaf(-decay[e / 2], x[m][e], v[m][e]) + 0.0f;
      put_rows(sh.left[part], x);
      sh.left_there[part].arrive();
      if constexpr (!KEEP) sh.s_given[n].arrive();  // the outputs' products come behind those that all wait for
    }
    if (!KEEP && args.slots && last_of(chunk) < kChunk) break;  // the state is that of the last boundary
    float added[2][4][4] = {};
    // order: rows ascending in the accumulator, eight at a time
    const auto add = [&](int block) {
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
    };
#pragma unroll 1
    for (int block = 0; block < 4; ++block) {
      add(block);
      if (block == 2 && chunk + 1 < chunks) {
        sh.k_there[(chunk + 1) % 2].wait((chunk + 1) / 2);
        load_rows(next, sh.k[(chunk + 1) % 2], first);
      }
    }
    const float whole = of.whole[0];
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
      for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[t][m][e] = fmaf(whole, s[t][m][e], added[t][m][e]);
    sh.k_free[n].arrive();
    if (chunk + 1 == chunks) break;
    if (!KEEP && chunk) sh.s_free[(chunk + 1) % 2].wait((chunk + 1) / 2 - 1);
    publish(chunk + 1);
  }
  if (held && end - begin >= kChunk) write_to(held);
  if (args.final_state) write_to(args.final_state + whose);
#endif
}

}  // namespace delta
}  // namespace vx
