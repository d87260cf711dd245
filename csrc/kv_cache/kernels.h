#pragma once
#include <cstdint>

#include "common/isa.h"

namespace vx {

// One of k and v with its cache; sizes and strides in bytes, so that the kernel knows no dtype.
struct KvHalf {
  const void* from;                 // (T, Hk, D)
  void* cache;                      // (pages, page_size, Hk, D)
  int64_t row;                      // bytes of one head
  int64_t stride, head_stride;
  int64_t page_stride, slot_stride, cache_head_stride;
};

struct KvCacheStore {
  KvHalf k, v;
  const int64_t* slots;             // (T,): page * page_size + offset; negative: skip
  int64_t tokens, heads, pages, page_size;
};

}  // namespace vx

VX_DECLARE_KERNEL(void kv_cache_store(const KvCacheStore& a))
