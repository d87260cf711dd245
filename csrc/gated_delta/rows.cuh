// What the kernels of whole sequences share: arguments, gates, products of 16 rows a warp, sums over columns; no torch
// headers.
#pragma once
#include "gated_delta/mma.cuh"

namespace vx {

constexpr int kBackwardThreads = 256;

struct GatedDeltaBackward {
  const void *q, *k, *v, *dout;  // (tokens, hk, dk) twice, (tokens, hv, dv) twice, dims contiguous
  int64_t q_row, q_head, k_row, k_head, v_row, v_head;
  const float *g, *beta;  // (tokens, hv)
  const float* dfinal;    // (sequences, hv, dk, dv) or null
  float* dinitial;        // likewise
  const float *states, *us;  // as the forward keeps them (chunks.cuh)
  float *dstates, *dus;      // likewise: gradients of the states behind chunks, and of u
  void *dq, *dk, *dv;        // contiguous
  float *dg, *dbeta;
  const int32_t* offsets;
  int sequences, tokens, hk, hv, dv_size;
  float scale;
  bool l2norm;
};

namespace delta {

constexpr int kDepth = 128;  // dims of a key

// A chunk's numbers of one value head.
struct Gates {
  float g[kChunk], decay[kChunk], rest[kChunk], beta[kChunk];  // G, exp(G), exp(G_last - G)
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The sum of 64 columns of each of two rows, of which a quad's threads hold pairs.
// order: the upper half is added to the lower one
__device__ __forceinline__ void fold_rows(float (&d)[8][4], float& low, float& high) {
#pragma unroll
  for (int width = 4; width; width /= 2)
#pragma unroll
    for (int n = 0; n < width; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) d[n][e] = d[n][e] + d[n + width][e];
#pragma unroll
  for (int width = 2; width; width /= 2)
#pragma unroll
    for (int e = 0; e < 4; ++e) d[0][e] = d[0][e] + __shfl_xor_sync(0xffffffffu, d[0][e], width);
  low = d[0][0] + d[0][1], high = d[0][2] + d[0][3];
}

// The running sums of g and what is made of them, of the rows from `row` on, `last` of them; by a warp.
__device__ __forceinline__ void make_gates(Gates& to, const GatedDeltaBackward& args, int row, int last, int h) {
  const int lane = threadIdx.x % 32;
  float x[2], total = 0.0f;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const int i = lane + 32 * m;
    const int64_t at = int64_t(row + i) * args.hv + h;
    to.g[i] = i < last ? args.g[at] : 0.0f;
    to.beta[i] = i < last ? args.beta[at] : 0.0f;
  }
  __syncwarp();
  // order: ascending, from +0; by every lane, for that is faster than to wait for another
#pragma unroll
  for (int i = 0; i < kChunk; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(&to.g[i]);
    const float g[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      total = total + g[n];
      if ((i + n) % 32 == lane) x[(i + n) / 32] = total;
    }
  }
  __syncwarp();
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const int i = lane + 32 * m;
    to.g[i] = i < last ? x[m] : 0.0f;
    to.decay[i] = exp_term(to.g[i]);
    to.rest[i] = i < last ? exp_term(total - x[m]) : 0.0f;
  }
}

// The sequence that chunk `index` belongs to, and which of its chunks it is; negative: none. All threads call it.
struct FoundChunk {
  int sequence, begin, end, chunk;
  __device__ __forceinline__ FoundChunk(const GatedDeltaBackward& args, int index) {
    sequence = -1;  // the last whose first chunk is not behind this one
    for (int from = 0; from < args.sequences; from += kBackwardThreads) {
      const int n = from + threadIdx.x;
      sequence += __syncthreads_count(n < args.sequences && min(max(args.offsets[n], 0), args.tokens) / kChunk + n <= index);
    }
    sequence = max(sequence, 0);
    begin = min(max(args.offsets[sequence], 0), args.tokens);
    end = max(min(args.offsets[sequence + 1], args.tokens), begin);
    chunk = index - begin / kChunk - sequence;
  }
};

// Rows of a chunk's keys and queries on their way; zeros where there are none.
template <class T, class Shared>
__device__ __forceinline__ void load_keys(Shared& sh, const GatedDeltaBackward& args, int row, int last, int hk) {
  for (int n = threadIdx.x; n < kChunk * (kDepth / 8); n += kBackwardThreads) {
    const int i = n / (kDepth / 8), part = n % (kDepth / 8) * 8;
    const int64_t t = row + (i < last ? i : 0);
    copy16(&sh.k[i][part], static_cast<const T*>(args.k) + t * args.k_row + hk * args.k_head + part, i < last);
    copy16(&sh.q[i][part], static_cast<const T*>(args.q) + t * args.q_row + hk * args.q_head + part, i < last);
  }
  copies_end();
}

// Their norms: warps 0 to 3 of keys, the others of queries, of their own 16 rows.
template <class T, class Keys, class Norms>
__device__ __forceinline__ void make_norms(const Keys& keys, Norms& to, bool l2norm) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, i = 16 * (warp % 4) + lane / 2;
  const float r = l2norm ? norm_factor_of<kDepth>((warp < 4 ? keys.k : keys.q)[i], lane & 1) : 1.0f;
  if (!(lane & 1)) (warp < 4 ? to.r_k : to.r_q)[i] = r;
  __syncwarp();
}

// 16 rows of keys, or of queries, times the keys of TILES times 8 rows from `others` on.
template <class T, int TILES>
__device__ __forceinline__ void products_of(float (&d)[TILES][4], const T* rows, const T (*others)[kDepth + 8]) {
  const int lane = threadIdx.x % 32;
  static_assert(TILES % 2 == 0);
#pragma unroll
  for (int x = 0; x < kDepth / 16; ++x) {
    uint32_t left[4];
    load_matrix(left, rows + lane % 16 * (kDepth + 8) + lane / 16 * 8 + 16 * x);
#pragma unroll
    for (int n = 0; n < TILES; n += 2) {
      uint32_t right[4];
      load_matrix(right, &others[8 * n + lane % 8 + lane / 16 * 8][lane / 8 % 2 * 8 + 16 * x]);
      product<T>(d[n], left, right[0], right[1]);
      product<T>(d[n + 1], left, right[2], right[3]);
    }
  }
}

#endif

}  // namespace delta
}  // namespace vx
