// Whole sequences of a gated delta net, as whole.cuh has them and with their bits, by the warpgroup instruction; no torch
// headers.
//
// A block goes through a sequence's chunks for kColumns columns of a value head. Four warps have all that the next chunk
// waits for: each solves a block of 16 rows, a column a thread, and has a quarter of the state's dims in registers; the
// state as multiplied, rounded to tf32, and the rows that are added to it lie in shared memory as right operands. Four more
// make the outputs, a chunk behind; two bring what all of them read, two chunks ahead. What the backward keeps is stored
// by those that make it.
#pragma once
#include "gated_delta/whole.cuh"
#include "gated_delta/wgmma.cuh"

namespace vx {
namespace delta {

constexpr int kWideThreads = 384;  // of whose last four warps two have nothing to do

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
  float w[2][kChunk][kColumns];               // as it is, and as multiplied
  float rounded_w[2][kChunk][kColumns + 4];
  float turning[8][kBlock][kColumns + 8];     // a warp's rows on their way to a column a thread
  Passed k_there[2], k_free[2], q_there[2], q_free[2], s_there[2], s_free[2], w_there[2], w_free[2];
  Passed solved[4], placed[4];
};
template <class T>
constexpr int kWideBytes = sizeof(WideShared<T>) + 1024;  // from a 1,024-byte boundary on
static_assert(kWideBytes<uint16_t> <= 227 << 10);

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// d + a b^T of 64 rows of a and 32 of b, and eight of K; a as a tile of 16 rows a warp.
// order: K ascending in the accumulator, eight at a time
__device__ __forceinline__ void wide_product(float (&d)[4][4], const float (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k8.f32.tf32.tf32 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, 1, 1, 1;"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
        "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]),
        "+f"(d[3][2]), "+f"(d[3][3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[3])),
        "l"(b));
}

// Two neighbours of a row and two of the one eight below it, from pairs of 16 bits.
template <class T>
__device__ __forceinline__ void widen_four(float (&to)[4], uint32_t upper, uint32_t lower) {
  const float2 one = widen_two<T>(upper), other = widen_two<T>(lower);
  to[0] = one.x, to[1] = one.y, to[2] = other.x, to[3] = other.y;
}

// A warp's 16 rows of keys or queries, from `row` on, as a left operand.
using WideRows = float[kDepth / 8][4];
template <class T>
__device__ __forceinline__ void load_rows(WideRows& to, const T (*rows)[kDepth + 8], int row) {
  const int lane = threadIdx.x % 32;
  uint32_t x[kDepth / 16][4];
#pragma unroll
  for (int n = 0; n < kDepth / 16; ++n) load_matrix(x[n], &rows[row + lane % 16][16 * n + lane / 16 * 8]);
#pragma unroll
  for (int n = 0; n < kDepth / 8; ++n) widen_four<T>(to[n], x[n / 2][n % 2 * 2], x[n / 2][n % 2 * 2 + 1]);
}
// The operand that lies `k` of K behind the first one.
__device__ __forceinline__ uint64_t operand_behind(uint64_t first, int k) {
  const uint32_t low = uint32_t(first) + (k / 32 * int(sizeof(Panel<kColumns>)) + k % 32 * 4) / 16;
  return (first & 0xffffffff00000000) | low;
}
// d + rows s^T, s being the state.
__device__ __forceinline__ void multiply_wide(float (&d)[4][4], const WideRows& rows, const Panel<kColumns>* s) {
  const uint64_t from = operand_of<kColumns>(s, 0, 0);
  sm90::wgmma_begin();
#pragma unroll
  for (int n = 0; n < kDepth / 8; ++n) wide_product(d, rows[n], operand_behind(from, 8 * n));
  sm90::wgmma_commit();
}

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

// Of a block's rows those that there are, mostly all.
template <class F>
__device__ __forceinline__ void each_row(int count, F to) {
  if (count >= kBlock) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) to(i);
  } else {
#pragma unroll
    for (int i = 0; i < kBlock; ++i)
      if (i < count) to(i);
  }
}

// A warp's tiles of 16 rows to a column a thread.
__device__ __forceinline__ void to_columns(float (&to)[kBlock], const float (&from)[4][4], float (*through)[kColumns + 8]) {
  const int lane = threadIdx.x % 32, gid = lane / 4, tig = lane % 4;
#pragma unroll
  for (int n = 0; n < 4; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<float2*>(&through[gid + 8 * half][8 * n + 2 * tig]) = float2{from[n][2 * half], from[n][2 * half + 1]};
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kBlock; ++i) to[i] = through[i][lane];
  __syncwarp();
}

#endif

// KEEP: for the backward, states at chunk starts and u in place of outputs.
template <class T, bool KEEP>
__global__ void __launch_bounds__(kWideThreads, 1) wide_kernel(const GatedDeltaChunks args, const Prepared* prepared) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(16) unsigned char memory[];
  auto& sh = *reinterpret_cast<WideShared<T>*>(memory + (1024 - sm90::shared_address(memory) % 1024) % 1024);
  const int splits = args.dv / kColumns, h = blockIdx.x / splits, c0 = blockIdx.x % splits * kColumns, b = blockIdx.y;
  const int hk = h / (args.hv / args.hk);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), part = warp % 4;  // of the rows, or of the dims
  const int lane = threadIdx.x % 32, gid = lane / 4, tig = lane % 4;
  const int begin = min(max(args.offsets[b], 0), args.tokens), end = max(min(args.offsets[b + 1], args.tokens), begin);
  const int chunks = (end - begin + kChunk - 1) / kChunk;
  const int64_t number = begin / kChunk + b;  // of the first chunk
  const int64_t plane = int64_t(kDepth) * args.dv, v_step = int64_t(args.hv) * args.dv;
  const int64_t whose = (int64_t(b) * args.hv + h) * plane + c0;
  const auto row_of = [&](int chunk) { return begin + chunk * kChunk; };
  const auto last_of = [&](int chunk) { return min(kChunk, end - row_of(chunk)); };

  if (threadIdx.x == 0) {
    for (int n = 0; n < 2; ++n) {
      sh.k_there[n].init(kBringing), sh.k_free[n].init(4), sh.q_there[n].init(kBringing), sh.q_free[n].init(4);
      sh.s_there[n].init(4), sh.s_free[n].init(4), sh.w_there[n].init(4), sh.w_free[n].init(4);
    }
    for (int n = 0; n < 4; ++n) sh.solved[n].init(1), sh.placed[n].init(1);
    sm90::barrier_init_fence();
  }
  __syncthreads();

  if (warp >= 8) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    const bool of_k = warp == 8;
    if (warp > (KEEP ? 8 : 9)) return;
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int n = chunk % 2, use = chunk / 2, last = last_of(chunk);
      const int64_t row = row_of(chunk);
      const Prepared& from = prepared[(number + chunk) * args.hv + h];
      Passed& there = (of_k ? sh.k_there : sh.q_there)[n];
      if (use) (of_k ? sh.k_free : sh.q_free)[n].wait(use - 1);
      if (of_k) {
        bring_rows<kDepth>(sh.k[n], static_cast<const T*>(args.k) + row * args.k_row + hk * args.k_head, args.k_row, last);
        bring_rows<kColumns>(sh.v[n], static_cast<const T*>(args.v) + row * args.v_row + h * args.v_head + c0, args.v_row, last);
      } else {
        bring_rows<kDepth>(sh.q[n], static_cast<const T*>(args.q) + row * args.q_row + hk * args.q_head, args.q_row, last);
      }
      there.arrive_behind(of_k ? sizeof(sh.of_k[n]) : sizeof(sh.of_q[n]));
      if (lane == 0) {
        if (of_k)
          copy_bulk(&sh.of_k[n], &from.columns, sizeof(sh.of_k[n]), there.address());
        else
          copy_bulk(&sh.of_q[n], &from.q, sizeof(sh.of_q[n]), there.address());
      }
      __syncwarp();
    }
    return;
  }

  auto& turning = sh.turning[warp];
  const int first = kBlock * part;
  if (warp >= 4) {
    if constexpr (!KEEP) {
      for (int chunk = 0; chunk < chunks; ++chunk) {
        const int n = chunk % 2, use = chunk / 2, row = row_of(chunk), last = last_of(chunk);
        const auto& of = sh.of_q[n];
        sh.q_there[n].wait(use);
        WideRows rows;
        load_rows(rows, sh.q[n], first);
        float x[4][4] = {}, y[4][4] = {};
        sh.s_there[n].wait(use);
        multiply_wide(x, rows, sh.s[n]);
        sm90::wgmma_wait<0>();
        sh.s_free[n].arrive();
        sh.w_there[n].wait(use);
        // order: blocks of 16 rows, ascending
#pragma unroll 1
        for (int m = 0; m < part; ++m) {
          float left[2][4];
          load_block(left, of.p[part * (part - 1) / 2 + m]);
          multiply_block(y, left, &sh.rounded_w[n][kBlock * m]);
        }
        const float decay[2] = {of.decay[first + gid], of.decay[first + gid + 8]};
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
          for (int e = 0; e < 4; ++e) x[m][e] = fmaf(decay[e / 2], x[m][e] + 0.0f, y[m][e] + 0.0f);
        float o[kBlock], w[kBlock];
        to_columns(o, x, turning);
#pragma unroll
        for (int j = 0; j < kBlock; ++j) w[j] = sh.w[n][first + j][lane] + 0.0f;
        sh.w_free[n].arrive();
        // order: the own block's rows, ascending
        const Placed& own = of.own[part];
#pragma unroll
        for (int j = 0; j < kBlock; j += 2)
#pragma unroll
          for (int i = 0; i < kBlock / 2; ++i) {
            if (j > i + 8) continue;
            const float4 p = *reinterpret_cast<const float4*>(own + in_block(i, j));  // of rows i and i + 8
            if (j <= i) o[i] = fmaf(p.x, w[j], o[i]);
            if (j + 1 <= i) o[i] = fmaf(p.y, w[j + 1], o[i]);
            o[i + 8] = fmaf(p.z, w[j], o[i + 8]);
            if (j + 1 <= i + 8) o[i + 8] = fmaf(p.w, w[j + 1], o[i + 8]);
          }
        sh.q_free[n].arrive();
        T* const to = static_cast<T*>(args.out) + int64_t(row + first) * v_step + int64_t(h) * args.dv + c0 + lane;
        each_row(last - first, [&](int i) { narrow(to[i * v_step], args.scale * o[i]); });
      }
    }
    return;
  }

  // Of the state and of what is added to it: dims 64 t + first + gid and the one 8 behind, columns 8 n + 2 tig and the next.
  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  float s[2][4][4];
  {
    const float* const from = args.initial ? args.initial + whose : nullptr;
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float2 two{0, 0};
          if (from) {
            const float* const here = from + (64 * t + first + gid + 8 * half) * args.dv + 8 * n + 2 * tig;
            two = *reinterpret_cast<const float2*>(here);
          }
          s[t][n][2 * half] = two.x, s[t][n][2 * half + 1] = two.y;
        }
  }
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
    written_for_products();
    sh.s_there[chunk % 2].arrive();
  };
  const auto write_states = [&](float* to) {
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          *reinterpret_cast<float2*>(to + (64 * t + first + gid + 8 * half) * args.dv + 8 * n + 2 * tig) =
              float2{s[t][n][2 * half], s[t][n][2 * half + 1]};
  };
  float u[kBlock] = {};  // of this warp's rows, a column a thread
  const auto write_us = [&](int chunk) {
    float* const to = args.us + int64_t(row_of(chunk) + first) * v_step + int64_t(h) * args.dv + c0 + lane;
    each_row(last_of(chunk) - first, [&](int i) { to[i * v_step] = u[i]; });
  };
  const uint64_t of_added = operand_of<kColumns>(sh.added, 0, 0);
  WideRows rows;  // of keys: this warp's of the next chunk
  if (chunks) {
    publish(0);
    sh.k_there[0].wait(0);
    load_rows(rows, sh.k[0], first);
  }
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int n = chunk % 2, use = chunk / 2, last = last_of(chunk);
    const auto& k = sh.k[n];
    const auto& of = sh.of_k[n].k;
    float x[4][4] = {};
    sh.s_there[n].wait(use);
    multiply_wide(x, rows, sh.s[n]);
    if constexpr (KEEP) {  // behind the barrier that those wait for who read the state: it would wait for stores too
      write_states(args.states + ((number + chunk) * args.hv + h) * plane + c0);
      if (chunk) write_us(chunk - 1);
    }
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
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[m][e] = beta[e / 2] * fmaf(-decay[e / 2], x[m][e], v[m][e]) + 0.0f;

    float added[2][4][4] = {}, y[4][4] = {};
    // order: rows ascending in the accumulator, eight at a time; a block behind those that are solved, for no warp is to
    // wait for what is added
    const auto add = [&](int block) {
      uint32_t dims[2][4];  // of this warp's dims keys as a left operand: of each tile two of eight rows
      float left[2][2][4];
      sm90::wgmma_wait<0>();  // what was added before needs its operands no more
#pragma unroll
      for (int t = 0; t < 2; ++t)
        load_transposed(dims[t], &k[kBlock * block + lane % 8 + lane / 16 * 8][64 * t + first + lane / 8 % 2 * 8]);
#pragma unroll
      for (int t = 0; t < 2; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half) widen_four<T>(left[t][half], dims[t][2 * half], dims[t][2 * half + 1]);
      sh.placed[block].wait(chunk);
      sm90::wgmma_begin();
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int t = 0; t < 2; ++t) wide_product(added[t], left[t][half], operand_behind(of_added, kBlock * block + 8 * half));
      sm90::wgmma_commit();
    };
    // order: blocks of 16 rows, ascending
#pragma unroll 1
    for (int block = 0; block < part; ++block) {
      float a[2][4];
      load_block(a, of.a[part * (part - 1) / 2 + block]);
      if (block) add(block - 1);
      sh.solved[block].wait(chunk);
      multiply_block(y, a, &sh.rounded_w[n][kBlock * block]);
    }
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[m][e] = x[m][e] - (y[m][e] + 0.0f);
    float factors[kBlock], w[kBlock];
    to_columns(u, x, turning);
#pragma unroll
    for (int i = 0; i < kBlock; i += 4)
      *reinterpret_cast<float4*>(factors + i) = *reinterpret_cast<const float4*>(of.r + first + i);
    const auto& own = sh.of_k[n].own.of[part];
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
    if (!KEEP && use) sh.w_free[n].wait(use - 1);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      w[i] = factors[i] * u[i];
      sh.rounded_w[n][first + i][lane] = as_operand(w[i]);
    }
    sh.solved[part].arrive();
#pragma unroll
    for (int i = 0; i < kBlock; i += 8) {
      float rest[8], eight[8];
#pragma unroll
      for (int e = 0; e < 8; e += 4)
        *reinterpret_cast<float4*>(rest + e) = *reinterpret_cast<const float4*>(of.rest + first + i + e);
#pragma unroll
      for (int e = 0; e < 8; ++e) eight[e] = first + i + e < last ? as_operand(rest[e] * w[i + e]) : 0.0f;
      const int at = first % 32 / 8 + i / 8;
      put_eight(&sh.added[part / 2][0][0], lane * 32 + ((2 * at) ^ (lane % 8)) * 4, eight);
    }
    written_for_products();
    sh.placed[part].arrive();
    if constexpr (!KEEP) {
#pragma unroll
      for (int i = 0; i < kBlock; ++i) sh.w[n][first + i][lane] = w[i];
      sh.w_there[n].arrive();
    }
#pragma unroll 1
    for (int block = max(part - 1, 0); block < 4; ++block) add(block);
    const float whole = of.whole[0];
    if (chunk + 1 < chunks) {
      sh.k_there[(chunk + 1) % 2].wait((chunk + 1) / 2);
      load_rows(rows, sh.k[(chunk + 1) % 2], first);
    }
    sm90::wgmma_wait<0>();
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
  if constexpr (KEEP)
    if (chunks) write_us(chunks - 1);
  if (args.final_state) write_states(args.final_state + whose);
#endif
}

}  // namespace delta
}  // namespace vx
