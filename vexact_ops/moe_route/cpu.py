"""The C++ kernels (csrc/moe_route/cpu_kernels.cpp)."""

import functools

import torch
from torch import Tensor

from .._core import native


@functools.cache
def _native_fwd():
    return native.ops().moe_route_fwd.default


def moe_route_fwd(
    logits: Tensor, top_k: int, sigmoid: bool, normalize: bool, groups: int, top_groups: int, bias: Tensor | None,
    scale: float, rounded: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    weights = torch.empty(logits.shape[0], top_k, dtype=torch.float32)
    ids = torch.empty(logits.shape[0], top_k, dtype=torch.int32)
    _native_fwd()(logits, top_k, sigmoid, normalize, groups, top_groups, bias, scale, weights, ids)
    if rounded != torch.float32:
        weights = weights.to(rounded).float()
    return weights, ids


def moe_route_bwd(
    dweights: Tensor, logits: Tensor, weights: Tensor, ids: Tensor, sigmoid: bool, normalize: bool, scale: float
) -> Tensor:
    dlogits = logits.new_empty(logits.shape)
    native.ops().moe_route_bwd(dweights, logits, weights, ids, sigmoid, normalize, scale, dlogits)
    return dlogits
