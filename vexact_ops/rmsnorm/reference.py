"""The meaning of rmsnorm in plain PyTorch, in x's own precision: call it with float64."""

import torch
from torch import Tensor


def rmsnorm_ref(x: Tensor, weight: Tensor, eps: float = 1e-6, residual: Tensor | None = None, *, style: str = "llama"):
    h = x if residual is None else x + residual
    normed = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    y = normed * (weight if style == "llama" else 1 + weight)
    return y if residual is None else (y, h)


def rmsnorm_gated_ref(x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return rmsnorm_ref(x, weight, eps) * gate * torch.sigmoid(gate)
