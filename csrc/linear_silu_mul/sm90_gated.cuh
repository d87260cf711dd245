// The gated activation of a tile of products as sm90_skinny.cuh makes it, where it was made.
//
// The weight (2 I, K), gates above ups, is read as (I / 8, 2, 8, K): eight gates, the eight ups that they meet, and so on.
// So a thread ends with a gate and its up, of the same rows of x, in accumulators h = 0 and h = 1. Both are rounded as
// linear rounds its results; then follows silu_mul's arithmetic.
#pragma once
#include "linear/sm90_skinny.cuh"
#include "silu_mul/gate.cuh"

namespace vx::sm90 {

struct PairedRows {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  static __device__ __forceinline__ void copy(uint32_t to, const CUtensorMap* map, uint32_t barrier, int k, int row,
                                              uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %4, %5}], [%2], %6;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(k), "r"(0), "r"(row / 16), "l"(policy)
        : "memory");
  }
  static __device__ __forceinline__ void prefetch(const CUtensorMap* map, int k, int row) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %2, %3}];" ::"l"(map), "r"(k), "r"(0),
                 "r"(row / 16)
                 : "memory");
  }
#endif
};

template <class T>
struct GatedEpilogue {
  bool gelu;
  Sending sending;  // of no ranks: stored

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  static __device__ __forceinline__ float rounded(float v) {
    T result;
    narrow(result, v);
    return widen(result);
  }

  __device__ __forceinline__ uint32_t begin() const { return sending.ranks ? sending.begin() : 0; }

  template <int PARTS, int HALF_TOKENS>
  __device__ __forceinline__ void operator()(const SkinnyArgs& a, float (&d)[PARTS][HALF_TOKENS], int tile, int m0,
                                             uint32_t round) const {
    constexpr int kPairs = HALF_TOKENS / 2;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
      const int row = 64 * p + 16 * warp, n = (tile * a.rows + row) / 2 + lane / 4;
      if (row >= a.rows || 2 * n >= a.n) continue;
      float g[kPairs], u[kPairs], y[kPairs];
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        g[i] = rounded(d[p][i / 2 * 4 + i % 2]);
        u[i] = rounded(d[p][i / 2 * 4 + i % 2 + 2]);
      }
      if (gelu)
        gate_mul_all<true>(g, u, y);
      else
        gate_mul_all<false>(g, u, y);
      if (sending.ranks) {
#pragma unroll
        for (int j = 0; j < kPairs / 2; ++j) {
          if (m0 + 8 * j >= a.m) break;
          T v[2];
          narrow(v[0], y[2 * j]), narrow(v[1], y[2 * j + 1]);
          const uint32_t columns = two_columns(pair_of(v[0], v[1]));
          const uint2 line = four_columns(columns, columns);  // there are eight columns: lanes have the same line by twos
          const int m = m0 + 8 * j + lane % 4 * 2 + lane / 4 % 2, column = n - lane / 4 + (lane >> 4) * 4;
          if (!(lane & 8) && m < a.m) sending.send(round, (int64_t(m) * (a.n / 2) + column) / 4, line.x, line.y);
        }
        continue;
      }
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int m = m0 + i / 2 * 8 + lane % 4 * 2 + i % 2;
        if (m < a.m) narrow(static_cast<T*>(a.out)[m * a.out_ld + n], y[i]);
      }
    }
  }
#endif
};

// (2 width, k) with rows ld apart, gates above ups, as a tile of `rows` of them is read. width is a multiple of 8.
inline bool paired_map(CUtensorMap* map, bool is_bf16, const void* weight, int64_t width, int64_t k, int64_t ld, int rows) {
  const cuuint64_t row = cuuint64_t(ld) * 2;
  return encode_map<4>(map, is_bf16, weight, {cuuint64_t(k), 8, 2, cuuint64_t(width / 8)}, {row, width * row, 8 * row},
                       {kBoxK, 8, 2, cuuint32_t(rows / 16)});
}

}  // namespace vx::sm90
