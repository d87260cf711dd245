"""The C++ kernels (csrc/layer_norm/cpu_kernels.cpp)."""

from torch import Tensor

from .._core import native


def layer_norm_fwd(x: Tensor, weight, bias, residual, eps: float, y: Tensor, new_residual, mean: Tensor, rstd: Tensor):
    native.ops().layer_norm_fwd(x, weight, bias, residual, eps, y, new_residual, mean, rstd)


def layer_norm_bwd(dy: Tensor, dnew_residual, x: Tensor, weight, mean: Tensor, rstd: Tensor, dx, dweight, dbias):
    native.ops().layer_norm_bwd(dy, dnew_residual, x, weight, mean, rstd, dx, dweight, dbias)
