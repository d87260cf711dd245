// Whole sequences of a gated delta net, in two kernels, with the bits of the Triton kernels; no torch headers.
//
// What does not wait for a state is made of all chunks at once: prepare_kernel writes the products among a chunk's keys
// and what the gates come to. whole_kernel then goes through a sequence's chunks for kColumns columns of a value head.
// Its warps 0 to 3 do nothing but what the next chunk waits for: u, 16 rows each, and the state, 32 rows each in
// registers. Warps 4 to 7 bring the rows, two chunks ahead, and make the outputs, a chunk behind.
#pragma once
#include "gated_delta/chunks.cuh"
#include "gated_delta/rows.cuh"

namespace vx {
namespace delta {

constexpr int kColumns = 32;  // of a value head, in a block of the kernels that go through sequences

// Of a chunk and a value head: blocks of 16 x 16 of A and of P (triton.py), rows that are not there being zeros. Those
// below the diagonal, (m, n) at m (m - 1) / 2 + n, are as multiplied; element (r, c) lies at placed_in_row, so that a
// fragment meets all banks. Those on it have + 0 added: of A the negative, [column][row], of P placed as above.
struct Prepared {
  struct {
    float p[6][16][16], own[4][16][16];
    float decay[kChunk];  // exp(G) r_q
  } q;
  struct {
    float a[6][16][16], own[4][16][16];
    float beta[kChunk], decay[kChunk], r[kChunk], rest[kChunk];  // beta, exp(G) r_k, r_k, exp(G_last - G)
    float back[kChunk], whole[4];                                // (beta exp(G)) r_k, and exp(G_last) at 0
  } k;
};
static_assert(sizeof(Prepared) % 16 == 0 && sizeof(Prepared::q) % 16 == 0);

__device__ __forceinline__ int placed_in_row(int r, int c) { return c ^ ((r / 2 & 3) * 4); }

template <class T>
struct PrepareShared {
  T k[kChunk][kDepth + 8], q[kChunk][kDepth + 8];
  Gates gates[8];  // of so many heads at a time, each by a warp
  float r_k[kChunk], r_q[kChunk];
};

template <class T>
struct WholeShared {
  struct Stage {
    T k[kChunk][kDepth + 8], q[kChunk][kDepth + 8];
    T v[kChunk][kColumns + 8];
    Prepared of;
  } stages[2];
  float s[2][kDepth][kColumns + 8];  // as multiplied: rounded to tf32
  float w[2][kChunk][kColumns + 8];
};

template <class T>
__global__ void __launch_bounds__(kBackwardThreads, 3) prepare_kernel(const GatedDeltaBackward args, Prepared* prepared) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(16) unsigned char memory[];
  auto& sh = *reinterpret_cast<PrepareShared<T>*>(memory);
  const int warp = threadIdx.x / 32, first = 16 * (warp % 4), hk = blockIdx.y, group = args.hv / args.hk;
  const bool of_k = warp < 4;
  const FoundChunk found(args, blockIdx.x);
  const int row = found.begin + found.chunk * kChunk, last = min(kChunk, found.end - row);
  if (found.chunk < 0 || last <= 0) return;
  load_keys<T>(sh, args, row, last, hk);
  if (warp < group) make_gates(sh.gates[warp], args, row, last, hk * group + warp);
  copies_wait<0>();
  __syncthreads();
  make_norms<T>(sh, args.l2norm);
  float gram[8][4] = {};
  products_of<T, 8>(gram, (of_k ? sh.k : sh.q)[first], sh.k);
  __syncthreads();
  for (int one = 0; one < group; ++one) {
    const int h = hk * group + one;
    Prepared& to = prepared[int64_t(blockIdx.x) * args.hv + h];
    if (one && one % 8 == 0) {
      __syncthreads();
      if (one + warp < group) make_gates(sh.gates[warp], args, row, last, h + warp);
      __syncthreads();
    }
    const Gates& gates = sh.gates[one % 8];
    const auto& g = gates.g;
    const int m = first / 16;
    each_pair(gram, [&](int r, int j, float x, float y) {
      const int i = first + r, n = j / 16, seen = i < last ? (of_k ? i : i + 1) : 0;  // of these keys on: none
      if (n > m) return;
      const float f = of_k ? gates.beta[i] * sh.r_k[i] : sh.r_q[i];
      x = j < seen ? f * (exp_term(g[i] - g[j]) * x) : 0.0f, y = j + 1 < seen ? f * (exp_term(g[i] - g[j + 1]) * y) : 0.0f;
      const int c = j % 16, at = placed_in_row(r, c);
      if (n < m) {
        auto& block = of_k ? to.k.a[m * (m - 1) / 2 + n] : to.q.p[m * (m - 1) / 2 + n];
        *reinterpret_cast<float2*>(&block[r][at]) = float2{rounded(x), rounded(y)};
      } else if (of_k) {
        to.k.own[m][c][r] = -(x + 0.0f), to.k.own[m][c + 1][r] = -(y + 0.0f);
      } else {
        *reinterpret_cast<float2*>(&to.q.own[m][r][at]) = float2{x + 0.0f, y + 0.0f};
      }
    });
    const int i = threadIdx.x;
    if (i < kChunk) {
      const float beta = gates.beta[i], decay = gates.decay[i];
      to.q.decay[i] = decay * sh.r_q[i];
      to.k.beta[i] = beta, to.k.decay[i] = decay * sh.r_k[i], to.k.r[i] = sh.r_k[i], to.k.rest[i] = gates.rest[i];
      to.k.back[i] = (beta * decay) * sh.r_k[i];
      if (i < 4) to.k.whole[i] = exp_term(g[last - 1]);
    }
  }
#endif
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// N bytes from contiguous memory, by the THREADS of which this is number `thread`.
template <int N, int THREADS>
__device__ __forceinline__ void copy_all(void* to, const void* from, int thread) {
  for (int n = thread; n < N / 16; n += THREADS) copy16(static_cast<float4*>(to) + n, static_cast<const float4*>(from) + n);
}

// `last` rows of WIDTH values of one head, and zeros up to a chunk's, by 128 threads.
template <int WIDTH, class T>
__device__ __forceinline__ void copy_rows(T (*to)[WIDTH + 8], const void* from, int64_t stride, int last, int thread) {
  constexpr int kParts = WIDTH / 8;
  for (int n = thread; n < kChunk * kParts; n += 128) {
    const int i = n / kParts, part = n % kParts * 8;
    copy16(&to[i][part], static_cast<const T*>(from) + (i < last ? i : 0) * stride + part, i < last);
  }
}

// What the rows of a diagonal block take from each other: own[i][j], for substitute.
__device__ __forceinline__ void load_own(float (&own)[16][16], const float (&from)[16][16]) {
#pragma unroll
  for (int i = 0; i < 15; ++i)
#pragma unroll
    for (int j = (i + 1) / 4 * 4; j < 16; j += 4)
      *reinterpret_cast<float4*>(&own[i][j]) = *reinterpret_cast<const float4*>(&from[i][j]);
}

// The state, or its gradient, of kColumns columns: rows 32 warp + 16 m + r of four warps.
using State = float[2][kColumns / 8][4];

template <class F>
__device__ __forceinline__ void each_of_state(State& s, F f) {
#pragma unroll
  for (int m = 0; m < 2; ++m) each_pair(s[m], [&](int r, int c, float& x, float& y) { f(threadIdx.x / 32 * 32 + 16 * m + r, c, x, y); });
}
__device__ __forceinline__ void load_state(State& s, const float* from, int64_t stride) {
  each_of_state(s, [&](int r, int c, float& x, float& y) {
    const float2 two = from ? *reinterpret_cast<const float2*>(from + r * stride + c) : float2{0, 0};
    x = two.x, y = two.y;
  });
}
__device__ __forceinline__ void store_state(State& s, float* to, int64_t stride) {
  each_of_state(s, [&](int r, int c, float x, float y) { *reinterpret_cast<float2*>(to + r * stride + c) = float2{x, y}; });
}
__device__ __forceinline__ void round_state(State& s, float (&to)[kDepth][kColumns + 8]) {
  each_of_state(s, [&](int r, int c, float x, float y) { *reinterpret_cast<float2*>(&to[r][c]) = float2{rounded(x), rounded(y)}; });
}

#endif

template <class T>
__global__ void __launch_bounds__(kChunkThreads, 1) whole_kernel(const GatedDeltaChunks args, const Prepared* prepared) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kTiles = kColumns / 8;
  enum { kTogether = 1, kRead = 2, kBrought = 3, kSolved = 5 };  // barriers; the latter two are one for each of two chunks
  extern __shared__ __align__(16) unsigned char memory[];
  auto& sh = *reinterpret_cast<WholeShared<T>*>(memory);
  const int splits = args.dv / kColumns, h = blockIdx.x / splits, c0 = blockIdx.x % splits * kColumns, b = blockIdx.y;
  const int hk = h / (args.hv / args.hk);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, gid = lane / 4, tig = lane % 4;
  const int block = warp % 4, first = 16 * block;  // this warp's rows of a chunk
  const int begin = min(max(args.offsets[b], 0), args.tokens), end = max(min(args.offsets[b + 1], args.tokens), begin);
  const int chunks = (end - begin + kChunk - 1) / kChunk;
  const int64_t plane = int64_t(kDepth) * args.dv, whose = (int64_t(b) * args.hv + h) * plane + c0;
  const int64_t v_step = int64_t(args.hv) * args.dv, number = begin / kChunk + b;  // of the first chunk

  if (warp >= 4) {
    const int thread = threadIdx.x - 128;
    const auto bring = [&](int chunk) {
      if (chunk < chunks) {
        auto& to = sh.stages[chunk % 2];
        const int64_t row = begin + chunk * kChunk;
        const int last = min(kChunk, int(end - row));
        copy_rows<kDepth>(to.k, static_cast<const T*>(args.k) + row * args.k_row + hk * args.k_head, args.k_row, last, thread);
        copy_rows<kColumns>(to.v, static_cast<const T*>(args.v) + row * args.v_row + h * args.v_head + c0, args.v_row, last, thread);
        const Prepared& from = prepared[(number + chunk) * args.hv + h];
        copy_all<sizeof(from.k), 128>(&to.of.k, &from.k, thread);
        if (args.out) {
          copy_rows<kDepth>(to.q, static_cast<const T*>(args.q) + row * args.q_row + hk * args.q_head, args.q_row, last, thread);
          copy_all<sizeof(from.q), 128>(&to.of.q, &from.q, thread);
        }
      }
      copies_end();
    };
    bring(0);
    bring(1);
    copies_wait<1>();
    __syncthreads();
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const auto& in = sh.stages[chunk % 2];
      float x[kTiles][4] = {}, y[kTiles][4] = {};
      if (args.out)
        multiply<kDepth>(
            x, [&](int r, int k) { return widen(in.q[first + r][k]); }, [&](int k, int c) { return sh.s[chunk % 2][k][c]; });
      copies_wait<0>();
      if (chunk + 1 < chunks) arrive<kChunkThreads>(kBrought + (chunk + 1) % 2);
      meet<kChunkThreads>(kSolved + chunk % 2);
      if (args.out) {
        const auto& of = in.of.q;
        const auto& w = sh.w[chunk % 2];
        // order: blocks of 16 rows, ascending
#pragma unroll 1
        for (int n = 0; n < block; ++n) {
          const auto& left = of.p[block * (block - 1) / 2 + n];
          multiply<16>(
              y, [&](int r, int k) { return left[r][placed_in_row(r, k)]; },
              [&](int k, int c) { return rounded(w[16 * n + k][c]); });
        }
        const float d0 = of.decay[first + gid], d1 = of.decay[first + gid + 8];
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) x[n][e] = fmaf(e < 2 ? d0 : d1, x[n][e] + 0.0f, y[n][e] + 0.0f);
        // order: the own block's rows, ascending
#pragma unroll 4
        for (int j = 0; j < 16; ++j) {
          const float p0 = of.own[block][gid][placed_in_row(gid, j)], p1 = of.own[block][gid + 8][placed_in_row(gid + 8, j)];
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            const float2 z = *reinterpret_cast<const float2*>(&w[first + j][8 * n + 2 * tig]);
            if (j <= gid) x[n][0] = fmaf(p0, z.x + 0.0f, x[n][0]), x[n][1] = fmaf(p0, z.y + 0.0f, x[n][1]);
            if (j <= gid + 8) x[n][2] = fmaf(p1, z.x + 0.0f, x[n][2]), x[n][3] = fmaf(p1, z.y + 0.0f, x[n][3]);
          }
        }
        const int row = begin + chunk * kChunk, last = end - row;
        T* const out = static_cast<T*>(args.out) + row * v_step + int64_t(h) * args.dv + c0;
        each_pair(x, [&](int r, int c, float low, float high) {
          if (first + r >= last) return;
          T two[2];
          narrow(two[0], args.scale * low);
          narrow(two[1], args.scale * high);
          *reinterpret_cast<uint32_t*>(out + (first + r) * v_step + c) = *reinterpret_cast<uint32_t*>(two);
        });
      }
      if (chunk + 2 < chunks) {
        meet<128>(kRead);  // all have read what is overwritten
        bring(chunk + 2);
      }
    }
    return;
  }

  State s;
  load_state(s, args.initial ? args.initial + whose : nullptr, args.dv);
  round_state(s, sh.s[0]);
  __syncthreads();
  for (int chunk = 0; chunk < chunks; ++chunk) {
    if (chunk) meet<kChunkThreads>(kBrought + chunk % 2);
    const int row = begin + chunk * kChunk, last = min(kChunk, end - row);
    const auto& in = sh.stages[chunk % 2];
    const auto& of = in.of.k;
    const auto& state = sh.s[chunk % 2];
    auto& w = sh.w[chunk % 2];
    if (args.states) store_state(s, args.states + ((number + chunk) * args.hv + h) * plane + c0, args.dv);
    float x[kTiles][4] = {}, y[kTiles][4] = {};
    multiply<kDepth>(x, [&](int r, int k) { return widen(in.k[first + r][k]); }, [&](int k, int c) { return state[k][c]; });
    each_pair(x, [&](int r, int c, float& low, float& high) {
      const float beta = of.beta[first + r], decay = of.decay[first + r];
      low = beta * fmaf(-decay, low, widen(in.v[first + r][c])) + 0.0f;
      high = beta * fmaf(-decay, high, widen(in.v[first + r][c + 1])) + 0.0f;
    });
    float own[16][16];
    load_own(own, of.own[block]);
    // order: blocks of 16 rows, ascending
#pragma unroll 1
    for (int n = 0; n < block; ++n) {
      meet<128>(kTogether);
      const auto& left = of.a[block * (block - 1) / 2 + n];
      multiply<16>(
          y, [&](int r, int k) { return left[r][placed_in_row(r, k)]; },
          [&](int k, int c) { return rounded(w[16 * n + k][c]); });
    }
    // u before its own block's rows, from where the products left it to a column a thread
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[n][e] = x[n][e] - (y[n][e] + 0.0f);
    each_pair(x, [&](int r, int c, float low, float high) { *reinterpret_cast<float2*>(&w[first + r][c]) = float2{low, high}; });
    __syncwarp();
    float u[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) u[i] = w[first + i][lane];
    substitute<false>(u, &of.r[first], [&](int j, int i) { return own[i][j]; });
#pragma unroll
    for (int i = 0; i < 16; ++i) w[first + i][lane] = of.r[first + i] * u[i];
#pragma unroll 1
    for (int n = block; n < 4; ++n) meet<128>(kTogether);
    if (args.us) {
      float* const to = args.us + (row + first) * v_step + int64_t(h) * args.dv + c0 + lane;
#pragma unroll
      for (int i = 0; i < 16; ++i)
        if (first + i < last) to[i * v_step] = u[i];
    }
    if (chunk + 1 < chunks || args.final_state) {
      State added = {};
      multiply<kChunk>(
          added, [&](int r, int j) { return widen(in.k[j][32 * warp + r]); },
          [&](int j, int c) { return j < last ? rounded(of.rest[j] * w[j][c]) : 0.0f; });
      const float whole = of.whole[0];
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) s[m][n][e] = fmaf(whole, s[m][n][e], added[m][n][e]);
      round_state(s, sh.s[(chunk + 1) % 2]);
    }
    meet<128>(kTogether);
    arrive<kChunkThreads>(kSolved + chunk % 2);
  }
  if (args.final_state) store_state(s, args.final_state + whose, args.dv);
#endif
}

}  // namespace delta
}  // namespace vx
