// What kernels share that norm rows which come from other ranks: rmsnorm with a residual, with the bits of
// rmsnorm/triton.py. COLUMNS of a row a thread, in units of 8 bytes; what is not there is zeros.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>

#include "common/sent.cuh"

namespace vx {

__device__ __forceinline__ float widened(float v) { return v; }
__device__ __forceinline__ float widened(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float widened(__half v) { return __half2float(v); }
template <class T>
__device__ __forceinline__ T narrowed(float v) {
  if constexpr (sizeof(T) == 4) return v;
  else if constexpr (__is_same(T, __nv_bfloat16)) return __float2bfloat16_rn(v);
  else return __float2half_rn(v);
}

// given becomes found + given; h is that in fp32. Its sum of squares, of this thread.
template <class T, int COLUMNS, int UNITS>
__device__ __forceinline__ float add_residual(const uint2 (&found)[UNITS], uint2 (&given)[UNITS], float (&h)[COLUMNS]) {
  constexpr int kEach = kSentUnit / sizeof(T);
  static_assert(kEach * UNITS == COLUMNS);
  float sums[COLUMNS];
#pragma unroll
  for (int u = 0; u < UNITS; ++u) {
    T x[kEach], more[kEach];
    memcpy(x, &found[u], kSentUnit), memcpy(more, &given[u], kSentUnit);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      x[i] = narrowed<T>(widened(x[i]) + widened(more[i]));
      h[u * kEach + i] = widened(x[i]);
    }
    memcpy(&given[u], x, kSentUnit);
  }
  // order: neighbours are added pairwise, within a thread, a warp and a block; what is not there is +0
#pragma unroll
  for (int i = 0; i < COLUMNS; ++i) sums[i] = h[i] * h[i];
#pragma unroll
  for (int count = COLUMNS / 2; count > 0; count /= 2)
#pragma unroll
    for (int i = 0; i < count; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
  return sums[0];
}

// Of all threads, each of which has it; parts: a place for each of 32 warps, which nobody reads or writes since the last
// barrier of the block.
__device__ __forceinline__ float sum_of_block(float sum, float* parts) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane == 0) parts[warp] = sum;
  __syncthreads();
  sum = lane < blockDim.x / 32 ? parts[lane] : 0.0f;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
  return sum;
}

__device__ __forceinline__ float scale_of(float squares, int columns, float eps) {
  return __fdiv_rn(1.0f, __fsqrt_rn(__fdiv_rn(squares, float(columns)) + eps));
}

template <class T>
__device__ __forceinline__ uint2 normed(const float* h, float scale, uint2 weight, bool gemma) {
  constexpr int kEach = kSentUnit / sizeof(T);
  T w[kEach], y[kEach];
  memcpy(w, &weight, kSentUnit);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    float value = h[i] * scale;
    if (!gemma) value = widened(narrowed<T>(value));
    y[i] = narrowed<T>(value * (gemma ? 1.0f + widened(w[i]) : widened(w[i])));
  }
  uint2 both;
  memcpy(&both, y, kSentUnit);
  return both;
}

}  // namespace vx
