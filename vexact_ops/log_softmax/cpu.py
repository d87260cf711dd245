"""The C++ kernels (csrc/log_softmax/cpu_kernels.cpp)."""

import torch
from torch import Tensor

from .._core import native


def log_softmax_fwd(x: Tensor, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    y, lse = torch.empty(x.shape, dtype=out_dtype), torch.empty(x.shape[0], 2, dtype=torch.float32)
    native.ops().log_softmax_fwd(x, y, lse)
    return y, lse


def log_softmax_bwd(dy: Tensor, x: Tensor, lse: Tensor) -> Tensor:
    dx = torch.empty(x.shape, dtype=x.dtype)
    native.ops().log_softmax_bwd(dy, x, lse, dx)
    return dx
