"""The C++ kernels (csrc/rmsnorm/cpu_kernels.cpp)."""

import torch
from torch import Tensor

from .._core import native


def rmsnorm_fwd(x: Tensor, weight: Tensor, residual: Tensor | None, eps: float, gemma: bool):
    y = torch.empty(x.shape, dtype=x.dtype)
    new_residual = None if residual is None else torch.empty(x.shape, dtype=x.dtype)
    rstd = torch.empty(x.shape[0], dtype=torch.float32)
    native.ops().rmsnorm_fwd(x, weight, residual, eps, gemma, y, new_residual, rstd)
    return y, x.new_empty(0) if new_residual is None else new_residual, rstd


def rmsnorm_bwd(dy: Tensor, dnew_residual: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor, gemma: bool):
    dx, dweight = torch.empty_like(x), torch.empty_like(weight)
    native.ops().rmsnorm_bwd(dy, dnew_residual, x, weight, rstd, gemma, dx, dweight)
    return dx, dweight


def rmsnorm_gated_fwd(x: Tensor, gate: Tensor, weight: Tensor, eps: float, y: Tensor, rstd: Tensor) -> None:
    native.ops().rmsnorm_gated_fwd(x, gate.reshape(x.shape), weight, eps, y, rstd)


def rmsnorm_gated_bwd(dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, rstd: Tensor):
    grads = torch.empty_like(x), torch.empty_like(gate), torch.empty_like(weight)
    native.ops().rmsnorm_gated_bwd(dy, x, gate, weight, rstd, *grads)
    return grads
