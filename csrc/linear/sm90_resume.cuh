// The product that goes on from fp32 accumulators, which no library computes with these bits: libraries add what was
// there to the finished sum.
#pragma once
#include "linear/sm90_gemm.cuh"

namespace vx::sm90 {

template <class T>
struct ResumeEpilogue {
  const void* bias;  // (N,) in the input dtype, or null
  float* out;        // rows out_ld apart, on 8-byte boundaries; an even number of columns
  int64_t out_ld;
  int rows, columns;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __device__ __forceinline__ void begin(float (&d)[128], int row, int column) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float* from = out + min(row + 8 * h, rows - 1) * out_ld;  // out of bounds, any value will do
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        const float2 v = *reinterpret_cast<const float2*>(from + min(column + 8 * j, columns - 2));
        d[4 * j + 2 * h] = v.x;
        d[4 * j + 2 * h + 1] = v.y;
      }
    }
  }

  __device__ __forceinline__ void end(float (&d)[128], int row, int column) const {
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const int n = column + 8 * j;
      if (n >= columns) continue;
      float b0 = 0.0f, b1 = 0.0f;
      if (bias) b0 = widen(static_cast<const T*>(bias)[n]), b1 = widen(static_cast<const T*>(bias)[n + 1]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (row + 8 * h >= rows) continue;
        const float v0 = d[4 * j + 2 * h], v1 = d[4 * j + 2 * h + 1];
        *reinterpret_cast<float2*>(out + (row + 8 * h) * out_ld + n) =
            bias ? make_float2(v0 + b0, v1 + b1) : make_float2(v0, v1);
      }
    }
  }
#endif
};

}  // namespace vx::sm90
