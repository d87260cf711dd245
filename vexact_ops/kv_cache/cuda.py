"""The CUDA kernel (csrc/kv_cache/cuda.cu)."""

from torch import Tensor

from .._core import native


def store(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    native.ops().kv_cache_store(k, v, k_cache, v_cache, slot_mapping)
