// What the kernels of gated_delta on SM90 share: products of the matrix unit, copies, the norm; no torch headers.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "common/math.cuh"
#include "common/sm90.cuh"

namespace vx {

constexpr int kChunk = 64;  // rows, from the start of a sequence

namespace delta {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

using sm90::narrow;
using sm90::widen;

// To tf32 as the matrix unit reads it, to the nearest, ties away from zero.
__device__ __forceinline__ float rounded(float x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return __uint_as_float(y);
}
// To tf32, for an operand alone: the bits that the matrix unit does not read are left as they are.
__device__ __forceinline__ float as_operand(float x) {
  return fabsf(x) < INFINITY ? __int_as_float(__float_as_int(x) + 0x1000) : x;
}
// The same without a predicate: those of a long chain would wait for each other's.
__device__ __forceinline__ float rounded_operand(float x) {
  const uint32_t y = __float_as_uint(x);
  return __uint_as_float(__viaddmin_u32(y & 0x7fffffff, 0x1000, 0x7fffffff) | (y & 0x80000000));
}

// order: K ascending in the accumulator, eight at a time
__device__ __forceinline__ void product(float (&d)[4], const float (&a)[4], float b0, float b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}
// order: the same, sixteen at a time
template <class T>
__device__ __forceinline__ void product(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#define VX_PRODUCT(TYPE)                                                                                             \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                                                \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    VX_PRODUCT("bf16");
  else
    VX_PRODUCT("f16");
#undef VX_PRODUCT
}
__device__ __forceinline__ void load_matrix(uint32_t (&a)[4], const void* from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(sm90::shared_address(from)));
}
__device__ __forceinline__ void load_transposed(uint32_t (&a)[4], const void* from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(sm90::shared_address(from)));
}
__device__ __forceinline__ void store_transposed(void* to, const uint32_t (&a)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(sm90::shared_address(to)),
               "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
               : "memory");
}
template <class T>
__device__ __forceinline__ float2 widen_two(uint32_t two) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return {__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000)};
  T x[2];
  *reinterpret_cast<uint32_t*>(x) = two;
  return {widen(x[0]), widen(x[1])};
}
__device__ __forceinline__ void copy4(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(sm90::shared_address(to)), "l"(from) : "memory");
}
// 16 bytes, or as many zeros, for which nothing is read.
__device__ __forceinline__ void copy16(void* to, const void* from, bool there = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(sm90::shared_address(to)), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
}
// What is read once does not stay in the L2 cache in place of keys, which four blocks read.
__device__ __forceinline__ void copy16_once(void* to, const void* from) {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(sm90::shared_address(to)), "l"(from),
               "l"(policy)
               : "memory");
}
__device__ __forceinline__ void into_l2(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
// By the copy engine: a multiple of 16 bytes from a boundary of as many.
__device__ __forceinline__ void bulk_into_l2(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// A value that another kernel may be writing: what it is decides nothing but what is fetched early.
__device__ __forceinline__ int32_t hint(const int32_t* from) {
  int32_t x;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from));
  return x;
}
// Loads that stay in the order that they are written in, at addresses that are computed once.
__device__ __forceinline__ float2 load_two(const float* from) {
  float2 x;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(from));
  return x;
}
__device__ __forceinline__ uint2 load_four(const void* from) {
  uint2 x;
  asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(from));
  return x;
}
__device__ __forceinline__ float load_one(const float* from) {
  float x;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(from));
  return x;
}
template <class P>
__device__ __forceinline__ P* as_it_is(P* p) {
  asm volatile("" : "+l"(p));
  return p;
}

// A barrier of a block, of so many threads: those that wait for the others, and those that others wait for.
__device__ __forceinline__ void wait_at(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive_at(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// 1 / sqrt(sum of squares + 1e-6) of a row, lane l holding x[l + 32 m].
template <int N>
__device__ __forceinline__ float norm_factor(const float (&x)[N]) {
  float s[N];
#pragma unroll
  for (int m = 0; m < N; ++m) s[m] = x[m] * x[m];
  // order: the upper half is added to the lower one, log2(dk) times
#pragma unroll
  for (int width = N / 2; width; width /= 2)
#pragma unroll
    for (int m = 0; m < width; ++m) s[m] = s[m] + s[m + width];
  float sum = s[0];
#pragma unroll
  for (int width = 16; width; width /= 2) sum = sum + __shfl_xor_sync(0xffffffffu, sum, width);
  return __fdiv_rn(1.0f, __fsqrt_rn(sum + 1e-6f));
}

// The upper half is added to the lower one until one is left.
template <int N>
__device__ __forceinline__ void fold(float* s) {
  if constexpr (N > 1) {
#pragma unroll
    for (int n = 0; n < N / 2; ++n) s[n] = s[n] + s[n + N / 2];
    fold<N / 2>(s);
  }
}

// norm_factor of a row in shared memory by two neighbouring threads, of which each takes every second pair of columns.
template <int DK, class T>
__device__ __forceinline__ float norm_factor_of(const T* row, int half) {
  float s[2][DK / 4];  // of columns 4 n + 2 half and the next
#pragma unroll
  for (int n = 0; n < DK / 4; ++n) {
    const uint32_t two = *reinterpret_cast<const uint32_t*>(row + 4 * n + 2 * half);
    T x[2];
    *reinterpret_cast<uint32_t*>(x) = two;
    s[0][n] = widen(x[0]) * widen(x[0]);
    s[1][n] = widen(x[1]) * widen(x[1]);
  }
  // order: that of norm_factor
  fold<DK / 4>(s[0]);
  fold<DK / 4>(s[1]);
  const float x = s[0][0] + __shfl_xor_sync(0xffffffffu, s[0][0], 1);
  const float y = s[1][0] + __shfl_xor_sync(0xffffffffu, s[1][0], 1);
  return __fdiv_rn(1.0f, __fsqrt_rn((x + y) + 1e-6f));
}

#endif

}  // namespace delta
}  // namespace vx
