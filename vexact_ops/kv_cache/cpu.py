"""The C++ kernel (csrc/kv_cache/cpu_kernels.cpp)."""

from torch import Tensor

from .._core import native


def store(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    bad = native.ops().kv_cache_store(k, v, k_cache, v_cache, slot_mapping)
    if bad >= 0:
        size = k_cache.shape[0] * k_cache.shape[1]
        raise ValueError(
            f"kv_cache_store: slot_mapping[{bad}]: got slot {int(slot_mapping[bad])}, expected -1 (skip) or "
            f"0 to {size - 1}: {k_cache.shape[0]} pages of {k_cache.shape[1]}"
        )
