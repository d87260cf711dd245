"""The C++ kernels (csrc/linear/cpu_kernels.cpp)."""

import functools

import torch
from torch import Tensor

from .._core import native


@functools.cache
def _native_fwd():
    return native.ops().linear_fwd.default


def linear_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    n = weight.shape[0]
    if x.dim() == 2:  # a decode step's shape: sizes that are no tuple save a microsecond of a few
        out = torch.empty(x.shape[0], n, dtype=out_dtype)
    else:
        out = torch.empty((*x.shape[:-1], n), dtype=out_dtype)
    _native_fwd()(x, weight, bias, out)
    return out


def linear_dx(dy: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    dx = torch.empty((*dy.shape[:-1], weight.shape[1]), dtype=dtype)
    native.ops().linear_dx(dy, weight, dx)
    return dx


def linear_dweight(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    dweight = torch.empty((dy.shape[-1], x.shape[-1]), dtype=dtype)
    native.ops().linear_dweight(dy, x, dweight)
    return dweight


def bmm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    out = torch.empty(a.shape[0], a.shape[1], b.shape[2], dtype=out_dtype)
    native.ops().bmm(a, b, out)
    return out


def linear_dbias(dy: Tensor, dtype: torch.dtype) -> Tensor:
    dbias = torch.empty(dy.shape[-1], dtype=dtype)
    native.ops().linear_dbias(dy, dbias)
    return dbias
