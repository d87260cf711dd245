"""The meaning of layer_norm in plain PyTorch, in x's own precision: call it with float64."""

import torch
from torch import Tensor


def layer_norm_ref(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
):
    h = x if residual is None else x + residual
    off = h - h.mean(-1, keepdim=True)
    y = off * torch.rsqrt(off.pow(2).mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return y if residual is None else (y, h)
