#include "common/box.h"
#include "kv_cache/binding.h"
#include "kv_cache/kernels.h"

namespace vx {
namespace {

// The index of the first token whose slot lies outside the cache, with nothing written; -1 where all was stored.
int64_t kv_cache_store(Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor slots) {
  const KvCacheStore a = kv_cache_args(k, v, k_cache, v_cache, slots);
  const int64_t size = a.pages * a.page_size;
  for (int64_t t = 0; t < a.tokens; ++t)
    if (a.slots[t] < -1 || a.slots[t] >= size) return t;
  VX_CALL(kv_cache_store, a);
  return -1;
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CPU, m) { m.impl("kv_cache_store", VX_BOX(&vx::kv_cache_store)); }
