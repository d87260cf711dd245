"""The meaning of kv_cache_store in plain PyTorch; it returns new caches and leaves the given ones alone."""

from torch import Tensor


def kv_cache_store_ref(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor):
    kept = (slot_mapping >= 0).nonzero()[:, 0]
    caches = []
    for x, cache in ((k, k_cache), (v, v_cache)):
        flat = cache.reshape(-1, *cache.shape[2:]).clone()
        flat[slot_mapping[kept]] = x[kept]
        caches.append(flat.view(cache.shape))
    return tuple(caches)
