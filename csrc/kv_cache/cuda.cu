#include "common/cuda.h"
#include "kv_cache/binding.h"
#include "kv_cache/store.cuh"

namespace vx {
namespace {

// Slots live on the device and are not looked at here: the kernel skips those outside the cache. Always -1.
int64_t kv_cache_store_cuda(Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor slots) {
  const KvCacheStore a = kv_cache_args(k, v, k_cache, v_cache, slots);
  const DeviceGuard guard = on_device_of(k);
  VX_CUDA_CHECK(kv_cache_store_launch(a, current_stream(k)));
  return -1;
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CUDA, m) { m.impl("kv_cache_store", TORCH_BOX(&vx::kv_cache_store_cuda)); }
