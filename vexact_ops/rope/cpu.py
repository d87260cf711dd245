"""The C++ kernels (csrc/rope/cpu_kernels.cpp)."""

import torch
from torch import Tensor

from .._core import native
from ..kv_cache.op import kv_cache_store
from ..rmsnorm.op import STYLES, rmsnorm


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, transpose: bool):
    q_out, k_out = torch.empty(q.shape, dtype=q.dtype), torch.empty(k.shape, dtype=k.dtype)
    native.ops().rope(q, k, cos, sin, interleaved, transpose, q_out, k_out)
    return q_out, k_out


def rope_kv_store(
    q, k, v, cos, sin, k_cache, v_cache, slots, interleaved: bool, q_weight, k_weight, eps: float, gemma: bool
) -> Tensor:
    if q_weight is not None:
        q, k = (rmsnorm(x, w, eps, style=STYLES[gemma], backend="cpu") for x, w in ((q, q_weight), (k, k_weight)))
    q, k = rope(q, k, cos, sin, interleaved, False)
    kv_cache_store(k, v, k_cache, v_cache, slots, backend="cpu")
    return q


def rope_cos_sin(positions: Tensor, axes: tuple[int, ...] | None, inv_freq: Tensor, scaling: float, dtype: torch.dtype):
    for arg, value, bound, text in (("positions", positions, 2**24 - 1, "2^24 - 1"), ("inv_freq", inv_freq, 64, "64")):
        if value.numel():
            low, high = (v.item() for v in torch.aminmax(value))
            if not (-bound <= low and high <= bound):
                raise ValueError(f"rope_cos_sin: {arg}: got {low} to {high}, expected at most {text} in magnitude")
    cos = torch.empty(positions.shape[-1], 2 * inv_freq.shape[0], dtype=dtype)
    sin = torch.empty_like(cos)
    of = None if axes is None else torch.tensor(axes, dtype=torch.int32)
    rows = positions.long().contiguous()
    rows = rows[None] if axes is None else rows
    native.ops().rope_cos_sin(rows, of, inv_freq.contiguous(), scaling, cos, sin)
    return cos, sin
