// What the kernels that go through a sequence's chunks by the warpgroup instruction share: products of 16 rows a warp with
// 32 columns in shared memory, and the way from there to a column a thread; no torch headers.
#pragma once
#include "gated_delta/columns.cuh"
#include "gated_delta/wgmma.cuh"

namespace vx {
namespace delta {

using KeptDims = float[2 * kBlock][kColumns + 8];

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

// Registers that the warpgroup instruction reads or writes, as they are from here on: what makes them stays before its
// products, what reads them behind.
template <int TILES>
__device__ __forceinline__ void settle(float (&d)[TILES][4]) {
#pragma unroll
  for (int n = 0; n < TILES; ++n) asm volatile("" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])::"memory");
}

// Two neighbours of a row and two of the one eight below it, from pairs of 16 bits.
template <class T>
__device__ __forceinline__ void widen_four(float (&to)[4], uint32_t upper, uint32_t lower) {
  const float2 one = widen_two<T>(upper), other = widen_two<T>(lower);
  to[0] = one.x, to[1] = one.y, to[2] = other.x, to[3] = other.y;
}

// A warp's 16 rows of keys or queries, from `row` on, as a left operand; and as they lie in memory.
using WideRows = float[kDepth / 8][4];
using NarrowRows = uint32_t[kDepth / 16][4];
template <class T>
__device__ __forceinline__ void load_rows(NarrowRows& to, const T (*rows)[kDepth + 8], int row) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kDepth / 16; ++n) load_matrix(to[n], &rows[row + lane % 16][16 * n + lane / 16 * 8]);
}
template <class T>
__device__ __forceinline__ void widen_rows(WideRows& to, const NarrowRows& x) {
#pragma unroll
  for (int n = 0; n < kDepth / 8; ++n) widen_four<T>(to[n], x[n / 2][n % 2 * 2], x[n / 2][n % 2 * 2 + 1]);
}
template <class T>
__device__ __forceinline__ void load_rows(WideRows& to, const T (*rows)[kDepth + 8], int row) {
  NarrowRows x;
  load_rows(x, rows, row);
  widen_rows<T>(to, x);
}
// The operand that lies `k` of K behind the first one.
__device__ __forceinline__ uint64_t operand_behind(uint64_t first, int k) {
  const uint32_t low = uint32_t(first) + (k / 32 * int(sizeof(Panel<kColumns>)) + k % 32 * 4) / 16;
  return (first & 0xffffffff00000000) | low;
}
// d + rows s^T, s being the state.
__device__ __forceinline__ void multiply_wide(float (&d)[4][4], WideRows& rows, const Panel<kColumns>* s) {
  const uint64_t from = operand_of<kColumns>(s, 0, 0);
  settle(rows), settle(d);
  sm90::wgmma_begin();
#pragma unroll
  for (int n = 0; n < kDepth / 8; ++n) wide_product(d, rows[n], operand_behind(from, 8 * n));
  sm90::wgmma_commit();
}

// A warp's tiles of 16 rows, as (row, column).
template <int PITCH>
__device__ __forceinline__ void put_rows(float (*to)[PITCH], const float (&from)[4][4]) {
  const int gid = threadIdx.x % 32 / 4, tig = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < 4; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<float2*>(&to[gid + 8 * half][8 * n + 2 * tig]) = float2{from[n][2 * half], from[n][2 * half + 1]};
}
// The same, to a column a thread.
__device__ __forceinline__ void to_columns(float (&to)[kBlock], const float (&from)[4][4], float (*through)[kColumns + 8]) {
  put_rows(through, from);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kBlock; ++i) to[i] = through[i][threadIdx.x % 32];
  __syncwarp();
}

// What a warp has of a state, 16 dims from `first` on and 16 that lie 64 behind, to device memory, 16 bytes a thread and
// whole lines a row, through shared memory: stores of pairs as they lie in registers took 1,800 cycles of a chunk's 6,500.
__device__ __forceinline__ void put_dims(KeptDims& to, const float (&s)[2][4][4]) {
#pragma unroll
  for (int t = 0; t < 2; ++t) put_rows(&to[kBlock * t], s[t]);
}
// Once all of the warp have put theirs.
__device__ __forceinline__ void store_dims(float* to, int stride, int first, const KeptDims& from) {
  const int i = threadIdx.x % 32 / 8, c = threadIdx.x % 8 * 4;
#pragma unroll
  for (int n = 0; n < 2 * kBlock; n += 4)
    *reinterpret_cast<float4*>(to + int64_t(n / kBlock * 64 + first + n % kBlock + i) * stride + c) =
        *reinterpret_cast<const float4*>(&from[n + i][c]);
}

// What a warp brings of a chunk: rows of keys or queries, of some columns of values where these are wanted, and numbers of
// Prepared. The L2 cache is asked for the chunk after the next one, for which there is no room yet.
template <class T>
struct Source {
  const T *rows, *values;  // of the whole call; values: or null
  int64_t step, values_step;

  __device__ __forceinline__ void bring(T (*to)[kDepth + 8], T (*to_values)[kColumns + 8], void* to_numbers, const void* numbers,
                                        int bytes, int row, int last, Passed& there) const {
    bring_some<kDepth>(to, rows + row * step, step, last);
    if (values) bring_some<kColumns>(to_values, values + row * values_step, values_step, last);
    there.arrive_behind(bytes);
    if (bytes && threadIdx.x % 32 == 0) copy_bulk(to_numbers, numbers, bytes, there.address());
    __syncwarp();
  }
  // The same by the copy engine alone, which takes few registers: one arrival, and rows that are not there apart.
  __device__ __forceinline__ void copy(T (*to)[kDepth + 8], T (*to_values)[kColumns + 8], void* to_numbers, const void* numbers,
                                       int bytes, int row, int last, Passed& there) const {
    const int lane = threadIdx.x % 32;
    if (last < kChunk) {
#pragma unroll 1
      for (int i = last; i < kChunk; ++i) {
        *reinterpret_cast<float2*>(&to[i][4 * lane]) = float2{0, 0};
        if (values && lane < kColumns / 4) *reinterpret_cast<float2*>(&to_values[i][4 * lane]) = float2{0, 0};
      }
      __syncwarp();
    }
    if (lane == 0) {
      sm90::barrier_expect(there.address(), bytes + last * int((kDepth + (values ? kColumns : 0)) * sizeof(T)));
      if (bytes) copy_bulk(to_numbers, numbers, bytes, there.address());
    }
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < last; i += 32) {
      copy_bulk(to[i], rows + (row + i) * step, kDepth * sizeof(T), there.address());
      if (values) copy_bulk(to_values[i], values + (row + i) * values_step, kColumns * sizeof(T), there.address());
    }
  }
  __device__ __forceinline__ void ask(const void* numbers, int bytes, int row, int last) const {
    const int lane = threadIdx.x % 32;
    if (lane == 0) bulk_into_l2(numbers, bytes);
#pragma unroll 1
    for (int i = lane / 2; i < last; i += 16) into_l2(rows + (row + i) * step + lane % 2 * (kDepth / 2));
    if (values)
#pragma unroll 1
      for (int i = lane; i < last; i += 32) into_l2(values + (row + i) * values_step);
  }

 private:
  // As bring_rows, in less code.
  template <int WIDTH>
  static __device__ __forceinline__ void bring_some(T (*to)[WIDTH + 8], const T* from, int64_t step, int last) {
    constexpr int kParts = WIDTH / 8, kRows = 32 / kParts;
    const int i = threadIdx.x % 32 / kParts, part = threadIdx.x % kParts * 8;
#pragma unroll 4
    for (int n = i; n < kChunk; n += kRows) copy16(&to[n][part], from + (n < last ? n : 0) * step + part, n < last);
  }
};

#endif

}  // namespace delta
}  // namespace vx
