// Whole sequences of a gated delta net, in two kernels, with the bits of the Triton kernels; no torch headers.
//
// What does not wait for a state is made of all chunks at once: prepare_kernel writes the products among a chunk's keys
// and what the gates come to. whole_kernel then goes through a sequence's chunks for COLUMNS columns of a value head,
// as chunks.cuh does, but all that it reads is copied, with STAGES 2 while the chunk before is computed with.
#pragma once
#include "gated_delta/chunks.cuh"
#include "gated_delta/rows.cuh"

namespace vx {
namespace delta {

// Of a chunk and a value head: blocks (m, n) of 16 x 16, n <= m, at m (m + 1) / 2 + n, of A and of P (triton.py), those
// below the diagonal as multiplied; element (r, c) lies at c ^ (r / 2 % 4 * 4) of its row, so that a fragment meets all
// banks.
struct Prepared {
  float a[10][16][16], p[10][16][16];
  float beta[kChunk], d_k[kChunk], d_q[kChunk], r_k[kChunk];  // beta, exp(G) r_k, exp(G) r_q, r_k
  float rest[kChunk], whole[kChunk];                          // exp(G_last - G), and exp(G_last) at 0
};
static_assert(sizeof(Prepared) % 16 == 0);

__device__ __forceinline__ int placed_in_row(int r, int c) { return c ^ ((r / 2 & 3) * 4); }

template <class T>
struct PrepareShared {
  T k[kChunk][kDepth + 8], q[kChunk][kDepth + 8];
  Gates gates;
  float r_k[kChunk], r_q[kChunk];
};

template <class T, int COLUMNS, int STAGES>
struct WholeShared {
  struct Stage {
    T k[kChunk][kDepth + 8], q[kChunk][kDepth + 8];
    T v[kChunk][COLUMNS + 8];
    Prepared of;
  } stages[STAGES];
  float s[kDepth][COLUMNS + 8];  // as multiplied: rounded to tf32
  float w[kChunk][COLUMNS + 8];
};

template <class T>
__global__ void __launch_bounds__(kBackwardThreads, 2) prepare_kernel(const GatedDeltaBackward args, Prepared* prepared) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(16) unsigned char memory[];
  auto& sh = *reinterpret_cast<PrepareShared<T>*>(memory);
  const int warp = threadIdx.x / 32, first = 16 * (warp % 4), hk = blockIdx.y, group = args.hv / args.hk;
  const bool of_k = warp < 4;
  const FoundChunk found(args, blockIdx.x);
  const int row = found.begin + found.chunk * kChunk, last = min(kChunk, found.end - row);
  if (found.chunk < 0 || last <= 0) return;
  load_keys<T>(sh, args, row, last, hk);
  copies_wait<0>();
  __syncthreads();
  make_norms<T>(sh, args.l2norm);
  float gram[8][4] = {};
  products_of<T, 8>(gram, (of_k ? sh.k : sh.q)[first], sh.k);
  for (int one = 0; one < group; ++one) {
    const int h = hk * group + one;
    Prepared& to = prepared[int64_t(blockIdx.x) * args.hv + h];
    __syncthreads();
    if (warp == 0) make_gates(sh.gates, args, row, last, h);
    __syncthreads();
    const auto& g = sh.gates.g;
    each_pair(gram, [&](int r, int j, float x, float y) {
      const int i = first + r, m = first / 16, n = j / 16;
      if (n > m) return;
      const float f = of_k ? sh.gates.beta[i] * sh.r_k[i] : sh.r_q[i];
      x = f * (exp_term(g[i] - g[j]) * x), y = f * (exp_term(g[i] - g[j + 1]) * y);
      if (n < m) x = rounded(x), y = rounded(y);
      *reinterpret_cast<float2*>(&(of_k ? to.a : to.p)[m * (m + 1) / 2 + n][r][placed_in_row(r, j % 16)]) = float2{x, y};
    });
    const int i = threadIdx.x;
    if (i < kChunk) {
      to.beta[i] = sh.gates.beta[i], to.r_k[i] = sh.r_k[i], to.rest[i] = sh.gates.rest[i];
      to.d_k[i] = sh.gates.decay[i] * sh.r_k[i], to.d_q[i] = sh.gates.decay[i] * sh.r_q[i];
      to.whole[i] = exp_term(g[last - 1]);
    }
  }
#endif
}

template <class T, int COLUMNS, int STAGES>
__global__ void __launch_bounds__(kChunkThreads, STAGES == 1 ? 2 : 1)
    whole_kernel(const GatedDeltaChunks args, const Prepared* prepared) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kTiles = COLUMNS / 8, kOwn = COLUMNS / 32;
  extern __shared__ __align__(16) unsigned char memory[];
  auto& sh = *reinterpret_cast<WholeShared<T, COLUMNS, STAGES>*>(memory);
  const int splits = args.dv / COLUMNS, h = blockIdx.x / splits, c0 = blockIdx.x % splits * COLUMNS, b = blockIdx.y;
  const int hk = h / (args.hv / args.hk);
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, gid = lane / 4, tig = lane % 4;
  const bool of_u = warp < 4;  // this warp's half of the work, and its rows of a chunk
  const int block = warp % 4, first = 16 * block;
  const int begin = min(max(args.offsets[b], 0), args.tokens), end = max(min(args.offsets[b + 1], args.tokens), begin);
  const int chunks = (end - begin + kChunk - 1) / kChunk;
  const int64_t plane = int64_t(kDepth) * args.dv, whose = (int64_t(b) * args.hv + h) * plane + c0;

  float s[kTiles][4];  // the state: rows 16 warp + gid and + 8
  each_pair(s, [&](int r, int c, float& x, float& y) {
    float2 two{0, 0};
    if (args.initial) two = *reinterpret_cast<const float2*>(args.initial + whose + int64_t(16 * warp + r) * args.dv + c);
    x = two.x, y = two.y;
  });
  const auto put = [&](float* to) {
    each_pair(s, [&](int r, int c, float x, float y) {
      *reinterpret_cast<float2*>(to + int64_t(16 * warp + r) * args.dv + c) = float2{x, y};
    });
  };
  const auto round_state = [&] {
    each_pair(s, [&](int r, int c, float x, float y) {
      *reinterpret_cast<float2*>(&sh.s[16 * warp + r][c]) = float2{rounded(x), rounded(y)};
    });
  };
  const auto bring = [&](int chunk) {
    auto& to = sh.stages[chunk % STAGES];
    const int row = begin + chunk * kChunk, last = min(kChunk, end - row);
    for (int n = tid; n < kChunk * (kDepth / 8); n += kChunkThreads) {
      const int i = n / (kDepth / 8), part = n % (kDepth / 8) * 8;
      const int64_t t = row + (i < last ? i : 0);
      copy16(&to.k[i][part], static_cast<const T*>(args.k) + t * args.k_row + hk * args.k_head + part, i < last);
      if (args.out) copy16(&to.q[i][part], static_cast<const T*>(args.q) + t * args.q_row + hk * args.q_head + part, i < last);
    }
    for (int n = tid; n < kChunk * (COLUMNS / 8); n += kChunkThreads) {
      const int i = n / (COLUMNS / 8), part = n % (COLUMNS / 8) * 8;
      const int64_t t = row + (i < last ? i : 0);
      copy16(&to.v[i][part], static_cast<const T*>(args.v) + t * args.v_row + h * args.v_head + c0 + part, i < last);
    }
    const float4* const from = reinterpret_cast<const float4*>(prepared + (int64_t(begin / kChunk + b + chunk) * args.hv + h));
    for (int n = tid; n < int(sizeof(Prepared) / 16); n += kChunkThreads)
      copy16(reinterpret_cast<float4*>(&to.of) + n, from + n);
    copies_end();
  };
  if (chunks > 0) bring(0);
  round_state();

  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int row = begin + chunk * kChunk, last = min(kChunk, end - row);
    if (STAGES == 2 && chunk + 1 < chunks) {
      bring(chunk + 1);
      copies_wait<1>();
    } else {
      copies_wait<0>();
    }
    __syncthreads();
    const auto& in = sh.stages[chunk % STAGES];
    const auto& of = in.of;
    if (args.states) put(args.states + (int64_t(begin / kChunk + b + chunk) * args.hv + h) * plane + c0);
    float x[kTiles][4] = {};
    if (of_u || args.out) {
      const auto& rows = of_u ? in.k : in.q;
      multiply<kDepth>(x, [&](int r, int k) { return widen(rows[first + r][k]); }, [&](int k, int c) { return sh.s[k][c]; });
    }
    if (of_u)
      each_pair(x, [&](int r, int c, float& low, float& high) {
        const int i = first + r;
        low = of.beta[i] * fmaf(-of.d_k[i], low, widen(in.v[i][c])) + 0.0f;
        high = of.beta[i] * fmaf(-of.d_k[i], high, widen(in.v[i][c + 1])) + 0.0f;
      });
    float y[kTiles][4] = {};  // what the rows of earlier blocks give
    const auto& factors = of_u ? of.a : of.p;

    // order: blocks of 16 rows, ascending
#pragma unroll 1
    for (int turn = 0; turn < kChunk / 16; ++turn) {
      if (of_u && block == turn) {
        // u before its own block's rows, from where the products left it to a column a thread
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) x[n][e] = x[n][e] - (y[n][e] + 0.0f);
        each_pair(x, [&](int r, int c, float low, float high) {
          *reinterpret_cast<float2*>(&sh.w[first + r][c]) = float2{low, high};
        });
        __syncwarp();
        const auto& own = of.a[block * (block + 1) / 2 + block];
#pragma unroll
        for (int part = 0; part < kOwn; ++part) {
          const int c = lane + 32 * part;
          float u[16];
#pragma unroll
          for (int i = 0; i < 16; ++i) u[i] = sh.w[first + i][c];
          float* const to = args.us ? args.us + (int64_t(row + first) * args.hv + h) * args.dv + c0 + c : nullptr;
          // order: the own block's rows, ascending
#pragma unroll
          for (int i = 0; i < 16; ++i) {
            if (to && first + i < last) to[int64_t(i) * args.hv * args.dv] = u[i];
            const float w = of.r_k[first + i] * u[i], z = w + 0.0f;
            sh.w[first + i][c] = w;
#pragma unroll
            for (int j = i + 1; j < 16; ++j) u[j] = fmaf(-(own[j][placed_in_row(j, i)] + 0.0f), z, u[j]);
          }
        }
      }
      __syncthreads();
      if (block > turn && (of_u || args.out)) {
        const auto& left = factors[block * (block + 1) / 2 + turn];
        multiply<16>(
            y, [&](int r, int k) { return left[r][placed_in_row(r, k)]; },
            [&](int k, int c) { return rounded(sh.w[16 * turn + k][c]); });
      }
    }
    if (!of_u && args.out) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[n][e] = fmaf(of.d_q[first + gid + 8 * (e / 2)], x[n][e] + 0.0f, y[n][e] + 0.0f);
      const auto& own = of.p[block * (block + 1) / 2 + block];
      // order: the own block's rows, ascending
#pragma unroll 4
      for (int j = 0; j < 16; ++j) {
        const float p0 = own[gid][placed_in_row(gid, j)] + 0.0f, p1 = own[gid + 8][placed_in_row(gid + 8, j)] + 0.0f;
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const float2 w = *reinterpret_cast<const float2*>(&sh.w[first + j][8 * n + 2 * tig]);
          if (j <= gid) x[n][0] = fmaf(p0, w.x + 0.0f, x[n][0]), x[n][1] = fmaf(p0, w.y + 0.0f, x[n][1]);
          if (j <= gid + 8) x[n][2] = fmaf(p1, w.x + 0.0f, x[n][2]), x[n][3] = fmaf(p1, w.y + 0.0f, x[n][3]);
        }
      }
      T* const out = static_cast<T*>(args.out) + (int64_t(row) * args.hv + h) * args.dv + c0;
      each_pair(x, [&](int r, int c, float low, float high) {
        if (first + r >= last) return;
        T two[2];
        narrow(two[0], args.scale * low);
        narrow(two[1], args.scale * high);
        *reinterpret_cast<uint32_t*>(out + int64_t(first + r) * args.hv * args.dv + c) = *reinterpret_cast<uint32_t*>(two);
      });
    }
    if (chunk + 1 < chunks || args.final_state) {
      float d[kTiles][4] = {};
      multiply<kChunk>(
          d, [&](int r, int j) { return widen(in.k[j][16 * warp + r]); },
          [&](int j, int c) { return j < last ? rounded(of.rest[j] * sh.w[j][c]) : 0.0f; });
      const float whole = of.whole[0];
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] = fmaf(whole, s[n][e], d[n][e]);
      round_state();
    }
    __syncthreads();
    if (STAGES == 1 && chunk + 1 < chunks) bring(chunk + 1);
  }
  if (args.final_state) put(args.final_state + whose);
#endif
}

}  // namespace delta
}  // namespace vx
