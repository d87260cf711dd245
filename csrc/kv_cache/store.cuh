// The CUDA kernel of kv_cache_store and its launch; no torch headers.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "kv_cache/kernels.h"

namespace vx {

constexpr int kStoreThreads = 256;

// A row of threads copies Each tokens at a time, Unit by Unit, all read before any is written; blockIdx.y says whether
// of k or of v. Reads nothing but the slots and writes nothing but valid slots, so it may be captured in a graph and
// replayed with other slots.
template <class Unit, int Each>
__global__ void __launch_bounds__(kStoreThreads) kv_cache_store_kernel(KvCacheStore a) {
  const int64_t first = (int64_t(blockIdx.x) * blockDim.y + threadIdx.y) * Each;
  const KvHalf& half = blockIdx.y ? a.v : a.k;
  const char* from[Each];
  char* to[Each];
#pragma unroll
  for (int e = 0; e < Each; ++e) {
    const int64_t token = first + e, slot = token < a.tokens ? a.slots[token] : -1;
    const int64_t page = slot / a.page_size, offset = slot - page * a.page_size;
    from[e] = static_cast<const char*>(half.from) + token * half.stride;
    to[e] = slot < 0 || slot >= a.pages * a.page_size
                ? nullptr
                : static_cast<char*>(half.cache) + page * half.page_stride + offset * half.slot_stride;
  }
  const int per_head = int(half.row / int64_t(sizeof(Unit))), units = int(a.heads) * per_head;
  for (int i = threadIdx.x; i < units; i += blockDim.x) {
    const int head = i / per_head, unit = i - head * per_head;
    Unit held[Each];
#pragma unroll
    for (int e = 0; e < Each; ++e)
      if (to[e]) held[e] = reinterpret_cast<const Unit*>(from[e] + head * half.head_stride)[unit];
#pragma unroll
    for (int e = 0; e < Each; ++e)
      if (to[e]) reinterpret_cast<Unit*>(to[e] + head * half.cache_head_stride)[unit] = held[e];
  }
}

// The widest unit, of 16 bytes and less, that every address of this half is a multiple of.
inline int64_t kv_store_unit(const KvHalf& half) {
  const uint64_t all = uint64_t(reinterpret_cast<uintptr_t>(half.from)) | reinterpret_cast<uintptr_t>(half.cache) |
                       half.row | half.stride | half.head_stride | half.page_stride | half.slot_stride |
                       half.cache_head_stride;
  int64_t unit = 16;
  while (all % unit) unit /= 2;
  return unit;
}

template <class Unit, int Each>
cudaError_t kv_cache_store_launch_as(const KvCacheStore& a, cudaStream_t stream) {
  const int64_t row = a.k.row > a.v.row ? a.k.row : a.v.row, units = a.heads * row / int64_t(sizeof(Unit));
  int across = 32;  // threads for one token: a power of two, so that they and the tokens fill the block
  while (across < units && across < kStoreThreads) across *= 2;
  const int tokens = kStoreThreads / across * Each;
  const dim3 grid(unsigned((a.tokens + tokens - 1) / tokens), 2);
  kv_cache_store_kernel<Unit, Each><<<grid, dim3(across, tokens / Each), 0, stream>>>(a);
  return cudaGetLastError();
}

template <class Unit>
cudaError_t kv_cache_store_launch_as(const KvCacheStore& a, cudaStream_t stream) {
  // few tokens: as many blocks as there are; many: several reads in flight for each thread
  return a.tokens < 1024 ? kv_cache_store_launch_as<Unit, 1>(a, stream) : kv_cache_store_launch_as<Unit, 4>(a, stream);
}

inline cudaError_t kv_cache_store_launch(const KvCacheStore& a, cudaStream_t stream) {
  if (a.tokens == 0 || a.heads == 0 || a.pages == 0) return cudaSuccess;
  const int64_t k = kv_store_unit(a.k), v = kv_store_unit(a.v);
  switch (k < v ? k : v) {
    case 16: return kv_cache_store_launch_as<uint4>(a, stream);
    case 8: return kv_cache_store_launch_as<uint2>(a, stream);
    case 4: return kv_cache_store_launch_as<uint32_t>(a, stream);
    case 2: return kv_cache_store_launch_as<uint16_t>(a, stream);
    default: return kv_cache_store_launch_as<uint8_t>(a, stream);
  }
}

}  // namespace vx
