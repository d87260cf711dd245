// What does not wait for a state, of all chunks of whole sequences at once; no torch headers.
#pragma once
#include "gated_delta/rows.cuh"

namespace vx {
namespace delta {

constexpr int kBlock = 16;  // rows of a chunk that are solved one by one

// 16 x 16 of the products among a chunk's rows, as the matrix unit takes them: element (i, j) at `in_block`.
using Placed = float[kBlock * kBlock];

// Neighbours in j, and i and i + 8, lie side by side: what a thread multiplies by x^T, of eight j. The slots of four are
// swapped so that the other way round, of eight i, two threads meet in a bank and not four.
__host__ __device__ constexpr int in_block(int i, int j) {
  return j / 8 * 128 + 4 * ((i % 8 * 4 + j % 8 / 2) ^ (i / 2 % 2 * 4)) + i / 8 * 2 + j % 2;
}

// Of a chunk and a value head: blocks of A and of P (triton.py), rows that are not there being zeros. Those below the
// diagonal, (m, n) at m (m - 1) / 2 + n, are as multiplied, rounded to tf32. Those on it have + 0 added: of P as they
// are, of A the negative, [column][row] for the forward and [row][column] for the backward.
struct Prepared {
  struct Queries {
    Placed p[6], own[4];
    float decay[kChunk];  // exp(G) r_q
  } q;
  struct Own {
    float of[4][kBlock][kBlock];
  } columns;
  struct Keys {
    Placed a[6];
    float beta[kChunk], decay[kChunk], r[kChunk], rest[kChunk];  // beta, exp(G) r_k, r_k, exp(G_last - G)
    float back[kChunk], whole[4];                                // (beta exp(G)) r_k, and exp(G_last) at 0
  } k;
  Own rows;
};
static_assert(sizeof(Prepared) % 16 == 0 && sizeof(Prepared::q) % 16 == 0 && sizeof(Prepared::k) % 16 == 0);

template <class T>
struct PrepareShared {
  T k[kChunk][kDepth + 8], q[kChunk][kDepth + 8];
  Gates gates[8];  // of so many heads at a time, each by a warp
  float r_k[kChunk], r_q[kChunk];
};

template <class T>
__global__ void __launch_bounds__(kBackwardThreads, 4) prepare_kernel(const GatedDeltaBackward args, Prepared* prepared) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(16) unsigned char memory[];
  auto& sh = *reinterpret_cast<PrepareShared<T>*>(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, gid = lane / 4, tig = lane % 4;
  const int m = warp % 4, first = kBlock * m, hk = blockIdx.y, group = args.hv / args.hk;
  const bool of_k = warp < 4;
  const FoundChunk found(args, blockIdx.x);
  const int row = found.begin + found.chunk * kChunk, last = min(kChunk, found.end - row);
  if (found.chunk < 0 || last <= 0) return;
  load_keys<T>(sh, args, row, last, hk);
  // Loops, and the products anew for every eight heads: what runs is to have room in the cache of instructions
#pragma unroll 1
  for (int from = 0; from < group; from += 8) {
    const int heads = min(group - from, 8);
    if (from) __syncthreads();
    if (warp < heads) make_gates(sh.gates[warp], args, row, last, hk * group + from + warp);
    if (from == 0) {
      copies_wait<0>();
      __syncthreads();
      make_norms<T>(sh, sh, args.l2norm);
    }
    __syncthreads();
#pragma unroll 1
    for (int n = 0; n <= m; ++n) {
      float gram[2][4] = {};
      products_of<T, 2>(gram, (of_k ? sh.k : sh.q)[first], sh.k + kBlock * n);
#pragma unroll 1
      for (int one = 0; one < heads; ++one) {
        Prepared& to = prepared[int64_t(blockIdx.x) * args.hv + hk * group + from + one];
        const Gates& gates = sh.gates[one];
        const auto& g = gates.g;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float x[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int i = first + gid + e / 2 * 8, j = kBlock * n + 8 * half + 2 * tig + e % 2;
            const int seen = i < last ? (of_k ? i : i + 1) : 0;  // of these keys on: none
            const float f = of_k ? gates.beta[i] * sh.r_k[i] : sh.r_q[i];
            x[e] = j < seen ? f * (exp_term(g[i] - g[j]) * gram[half][e]) : 0.0f;
          }
          const int at = in_block(gid, 8 * half + 2 * tig);
          if (n < m) {
            auto& block = (of_k ? to.k.a : to.q.p)[m * (m - 1) / 2 + n];
            *reinterpret_cast<float4*>(block + at) = float4{rounded(x[0]), rounded(x[1]), rounded(x[2]), rounded(x[3])};
          } else if (!of_k) {
            *reinterpret_cast<float4*>(to.q.own[m] + at) = float4{x[0] + 0.0f, x[1] + 0.0f, x[2] + 0.0f, x[3] + 0.0f};
          } else {
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
              const int r = gid + e / 2 * 8, c = 8 * half + 2 * tig;
              const float low = -(x[e] + 0.0f), high = -(x[e + 1] + 0.0f);
              *reinterpret_cast<float2*>(&to.rows.of[m][r][c]) = float2{low, high};
              to.columns.of[m][c][r] = low, to.columns.of[m][c + 1][r] = high;
            }
          }
        }
      }
    }
#pragma unroll 1
    for (int n = threadIdx.x; n < heads * kChunk; n += kBackwardThreads) {
      const int i = n % kChunk, one = n / kChunk;
      Prepared& to = prepared[int64_t(blockIdx.x) * args.hv + hk * group + from + one];
      const Gates& gates = sh.gates[one];
      const float beta = gates.beta[i], decay = gates.decay[i];
      to.q.decay[i] = decay * sh.r_q[i];
      to.k.beta[i] = beta, to.k.decay[i] = decay * sh.r_k[i], to.k.r[i] = sh.r_k[i], to.k.rest[i] = gates.rest[i];
      to.k.back[i] = (beta * decay) * sh.r_k[i];
      if (i < 4) to.k.whole[i] = exp_term(gates.g[last - 1]);
    }
  }
#endif
}

}  // namespace delta
}  // namespace vx
