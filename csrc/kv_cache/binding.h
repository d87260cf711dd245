// What both bindings check and hand to their kernels.
#pragma once
#include "common/values.h"
#include "kv_cache/kernels.h"

namespace vx {

inline KvHalf kv_half(const Tensor& x, const Tensor& cache, const char* name, int64_t tokens, int64_t heads,
                      int64_t pages, int64_t page_size) {
  STD_TORCH_CHECK(x.dim() == 3 && x.size(0) == tokens && x.size(1) == heads && cache.dim() == 4 &&
                      cache.size(0) == pages && cache.size(1) == page_size && cache.size(2) == heads &&
                      cache.size(3) == x.size(2) && x.scalar_type() == cache.scalar_type(),
                  name, " and its cache do not fit");
  check_last_dim_contiguous(x, name);
  check_last_dim_contiguous(cache, name);
  const int64_t size = x.element_size();
  return {data(x),           mutable_data(cache),  x.size(2) * size,         x.stride(0) * size,
          x.stride(1) * size, cache.stride(0) * size, cache.stride(1) * size, cache.stride(2) * size};
}

inline KvCacheStore kv_cache_args(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache,
                                  const Tensor& slots) {
  STD_TORCH_CHECK(k.dim() == 3 && k_cache.dim() == 4, "k: expected (T, Hk, D); k_cache: (pages, page_size, Hk, D)");
  const int64_t tokens = k.size(0), heads = k.size(1), pages = k_cache.size(0), page_size = k_cache.size(1);
  check_1d(slots, "slot_mapping", tokens);
  return {kv_half(k, k_cache, "k", tokens, heads, pages, page_size),
          kv_half(v, v_cache, "v", tokens, heads, pages, page_size),
          values<int64_t>(slots, "slot_mapping"),
          tokens,
          heads,
          pages,
          page_size};
}

}  // namespace vx
