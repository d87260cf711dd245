// What kernels without a GPU are made of: a thread of the host for each of a block, one block of a process at a time.
#pragma once
#include <barrier>
#include <cstdint>
#include <cstring>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

struct Index {
  unsigned x;
};
inline Index blockIdx, blockDim, gridDim;
inline thread_local Index threadIdx;
inline std::barrier<>* all_threads;
inline void __syncthreads() { all_threads->arrive_and_wait(); }
inline void __syncwarp() { all_threads->arrive_and_wait(); }  // of blocks of one warp
template <class T>
T __ldcg(const T* p) {
  return *p;
}
