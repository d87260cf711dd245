// Products of a warpgroup in tf32, and how their operands lie in shared memory; no torch headers.
#pragma once
#include "gated_delta/mma.cuh"

namespace vx {
namespace delta {

// 32 of K of ROWS rows on a 1,024-byte boundary, the swizzle of 128 bytes. Of eight of K the even ones go first, so that a
// thread's neighbours in what a product leaves are what it takes of another's left operand.
template <int ROWS>
using Panel = float[ROWS][32];

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ float& in_panel(float (*panel)[32], int row, int k) {
  return panel[row][((k / 8 * 2 + k % 2) ^ (row % 8)) * 4 + k % 8 / 2];
}
// Eight neighbours of K from a multiple of eight on, whose even ones lie at `at`.
__device__ __forceinline__ void put_eight(float* panel, int at, const float (&x)[8]) {
  *reinterpret_cast<float4*>(panel + at) = float4{x[0], x[2], x[4], x[6]};
  *reinterpret_cast<float4*>(panel + (at ^ 4)) = float4{x[1], x[3], x[5], x[7]};
}

// What ordinary stores have written to shared memory, to be read by the matrix unit: before a barrier.
__device__ __forceinline__ void written_for_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#define VX_D4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define VX_D32 VX_D4(0), VX_D4(1), VX_D4(2), VX_D4(3), VX_D4(4), VX_D4(5), VX_D4(6), VX_D4(7)
#define VX_NAMES                                                                                              \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
  "%23, %24, %25, %26, %27, %28, %29, %30, %31}"
// d + a b^T of 64 rows of each and eight of K: a tile of 16 rows a warp, as products leave it, or an operand.
// order: K ascending in the accumulator, eight at a time
__device__ __forceinline__ void wide_product(float (&d)[8][4], const float (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 " VX_NAMES ", {%32, %33, %34, %35}, %36, 1, 1, 1;"
               : VX_D32
               : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[1])),
                 "r"(__float_as_uint(a[3])), "l"(b));
}
__device__ __forceinline__ void wide_product(float (&d)[8][4], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 " VX_NAMES ", %32, %33, 1, 1, 1;"
               : VX_D32
               : "l"(a), "l"(b));
}
#undef VX_NAMES
#undef VX_D32
#undef VX_D4

// The operand of eight of K of 64 rows from `row` on.
template <int ROWS>
__device__ __forceinline__ uint64_t operand_of(const Panel<ROWS>* panels, int row, int k) {
  return sm90::operand(sm90::shared_address(&panels[k / 32][row][0]) + k % 32 * 4);
}
// d + a b^T, TILES times eight of K from registers; they are read until all products have ended.
template <int TILES, int ROWS>
__device__ __forceinline__ void wide_products(float (&d)[8][4], const float (&a)[TILES][4], const Panel<ROWS>* b, int row) {
  sm90::wgmma_begin();
#pragma unroll
  for (int n = 0; n < TILES; ++n) wide_product(d, a[n], operand_of<ROWS>(b, row, 8 * n));
  sm90::wgmma_commit();
}

#endif

}  // namespace delta
}  // namespace vx
