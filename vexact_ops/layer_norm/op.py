"""Layer normalisation, with the residual addition fused where asked."""

from typing import overload

import torch
from torch import Tensor

from .._core import check
from .._core.backend import Room
from .._core.operator import Operator

ROOM = Room("layer_norm", cpu=("cpu",), cuda=("triton",))


@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: None = None,
    *,
    backend: str | None = None,
) -> Tensor: ...
@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor, *, backend: str | None = None
) -> tuple[Tensor, Tensor]: ...
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    *,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias, fp32 inside, rounded once.

    x         (..., N) bf16 | fp32, on a GPU also fp16
    weight    (N,) in x.dtype, or None: no product
    bias      (N,) in x.dtype, or None: no sum
    eps       added to the variance, which is the mean squared difference from the mean
    residual  like x: normalise x + residual (rounded to x.dtype) instead
    returns   (..., N) in x.dtype; with residual, the pair (normed, x + residual)
    bits      a row depends on that row, weight, bias and eps alone: the elements and then their squared differences are
              summed in an order chosen from N (CPU: four 16-lane accumulators, GPU: a tree of pairs), whatever the row
              count, strides or threads
    grad      dx as bits; dweight and dbias sum rows in a fixed order (on a CPU ascending), repeatable for one fixed
              batch
    raises    TypeError on dtype, ValueError on shape or device, BackendUnavailable
    source    Ba, Kiros and Hinton, Layer Normalization, arXiv 1607.06450
    example
    >>> x, residual, weight = torch.randn(4, 32), torch.randn(4, 32), torch.ones(32)
    >>> y, added = vx.layer_norm(x, weight, None, 1e-5, residual)
    >>> vx.same_bits(added, x + residual), vx.same_bits(y, vx.layer_norm(added))
    (True, True)
    """
    op = "layer_norm"
    check.tensor(op, "x", x, check.FLOATS)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x: got shape {tuple(x.shape)}, expected (..., N) with N of at least 1")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            check.tensor(op, name, parameter, ndim=1)
            check.same_dtype(op, name, parameter, "x", x)
            check.shape(op, name, parameter, x.shape[-1:])
    check.same_device(op, x=x, weight=weight, bias=bias, residual=residual)
    if residual is not None:
        check.tensor(op, "residual", residual)
        check.same_dtype(op, "residual", residual, "x", x)
        check.shape(op, "residual", residual, x.shape)
    check.number(op, "eps", eps, at_least=0.0)
    backend = ROOM.resolve(x.device, backend)
    check.served(op, "x", x.dtype, backend)
    flat_residual = None if residual is None else check.rows(residual)
    y, new_residual, *_ = _layer_norm(check.rows(x), weight, bias, flat_residual, eps, backend)
    return y.view(x.shape) if residual is None else (y.view(x.shape), new_residual.view(x.shape))


def _outputs(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mean, rstd = (x.new_empty(x.shape[0], dtype=torch.float32) for _ in range(2))
    return x.new_empty(x.shape), x.new_empty(x.shape if residual is not None else (0,)), mean, rstd


def _fwd(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float, backend: str
) -> tuple[Tensor, ...]:
    outputs = y, new_residual, mean, rstd = _outputs(x, residual)
    weight, bias = (t if t is None else t.contiguous() for t in (weight, bias))
    written = new_residual if residual is not None else None
    ROOM.module(backend).layer_norm_fwd(x, weight, bias, residual, eps, y, written, mean, rstd)
    return outputs


def _setup(ctx, inputs, output):
    x, weight, bias, residual, _, ctx.backend = inputs
    _, new_residual, mean, rstd = output
    ctx.has_residual, ctx.has_bias = residual is not None, bias is not None
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(new_residual if ctx.has_residual else x, weight, mean, rstd)


def _backward(ctx, dy, dnew_residual, *_):
    x, weight, mean, rstd = ctx.saved_tensors
    dnew_residual = dnew_residual if ctx.has_residual else None
    dx, dweight, dbias = _layer_norm_bwd(dy, dnew_residual, x, weight, mean, rstd, ctx.has_bias, ctx.backend)
    dweight, dbias = None if weight is None else dweight, dbias if ctx.has_bias else None
    return dx, dweight, dbias, dx if ctx.has_residual else None, None, None


def _gradients(x: Tensor, weight: Tensor | None, has_bias: bool) -> tuple[Tensor, Tensor, Tensor]:
    n = x.shape[1]
    return x.new_empty(x.shape), x.new_empty(0 if weight is None else n), x.new_empty(n if has_bias else 0)


def _bwd(
    dy: Tensor,
    dnew_residual: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    has_bias: bool,
    backend: str,
) -> tuple[Tensor, ...]:
    grads = dx, dweight, dbias = _gradients(x, weight, has_bias)
    dnew_residual, weight = (t if t is None else t.contiguous() for t in (dnew_residual, weight))
    args = dy.contiguous(), dnew_residual, x.contiguous(), weight, mean, rstd
    wanted = dweight if weight is not None else None, dbias if has_bias else None
    ROOM.module(backend).layer_norm_bwd(*args, dx, *wanted)
    return grads


_layer_norm_bwd = Operator(
    "layer_norm_bwd(Tensor dy, Tensor? dnew_residual, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, bool"
    " has_bias, str backend) -> (Tensor, Tensor, Tensor)",
    _bwd,
    lambda dy, dnew_residual, x, weight, mean, rstd, has_bias, backend: _gradients(x, weight, has_bias),
)
_layer_norm = Operator(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, float eps, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _fwd,
    lambda x, weight, bias, residual, eps, backend: _outputs(x, residual),
    _setup,
    _backward,
)
