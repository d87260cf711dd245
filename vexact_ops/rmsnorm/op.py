"""Root-mean-square normalisation, with the residual addition fused where asked."""

from typing import overload

import torch
from torch import Tensor

from .._core import check
from .._core.backend import Room
from .._core.operator import Operator

ROOM = Room("rmsnorm", cpu=("cpu",), cuda=("triton",))
STYLES = ("llama", "gemma")


@overload
def rmsnorm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    residual: None = None,
    *,
    style: str = "llama",
    backend: str | None = None,
) -> Tensor: ...
@overload
def rmsnorm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, residual: Tensor, style: str = "llama", backend: str | None = None
) -> tuple[Tensor, Tensor]: ...
@overload
def rmsnorm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor, *, style: str = "llama", backend: str | None = None
) -> tuple[Tensor, Tensor]: ...
def rmsnorm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    *,
    style: str = "llama",
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """x / rms(x) * weight, fp32 inside.

    x         (..., N) bf16 | fp32, on a GPU also fp16
    weight    (N,) in x.dtype
    eps       added to the mean square
    residual  like x: normalise x + residual (rounded to x.dtype) instead
    style     "llama": round to x.dtype, then multiply by weight, as Hugging Face's LlamaRMSNorm does;
              "gemma": multiply by 1 + weight in fp32 and round once, as its Gemma2RMSNorm does
    returns   (..., N) in x.dtype; with residual, the pair (normed, x + residual)
    bits      a row depends on that row, weight and eps alone: the squares are summed in an order chosen from N (CPU:
              four 16-lane accumulators, GPU: a tree of pairs), whatever the row count, strides or threads
    grad      dx as bits; dweight sums rows in a fixed order (on a CPU ascending), repeatable for one fixed batch
    raises    TypeError on dtype, ValueError on shape or device, BackendUnavailable
    source    Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv 1910.07467
    example
    >>> x, residual, weight = torch.randn(4, 32), torch.randn(4, 32), torch.ones(32)
    >>> y, added = vx.rmsnorm(x, weight, 1e-6, residual)
    >>> vx.same_bits(added, x + residual), vx.same_bits(y, vx.rmsnorm(added, weight))
    (True, True)
    """
    if not (
        check.alike(x, weight)
        and x.dtype in check.FLOATS
        and weight.dim() == 1
        and x.dim()
        and x.shape[-1] == weight.shape[0] > 0
        and (residual is None or (check.alike(x, residual) and residual.shape == x.shape))
    ):
        _check(x, weight, residual)
    check.number("rmsnorm", "eps", eps, at_least=0.0)
    check.choice("rmsnorm", "style", style, STYLES)
    backend = ROOM.resolve(x.device, backend)
    check.served("rmsnorm", "x", x.dtype, backend)
    flat_residual = None if residual is None else check.rows(residual)
    y, new_residual, _ = _rmsnorm(check.rows(x), weight, flat_residual, eps, style == "gemma", backend)
    return check.shaped(y, x) if residual is None else (check.shaped(y, x), check.shaped(new_residual, x))


def _check(x: Tensor, weight: Tensor, residual: Tensor | None) -> None:
    check.tensor("rmsnorm", "x", x, check.FLOATS)
    check.tensor("rmsnorm", "weight", weight, ndim=1)
    check.same_dtype("rmsnorm", "weight", weight, "x", x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"rmsnorm: x: got shape {tuple(x.shape)}, expected (..., N) with N of at least 1")
    check.shape("rmsnorm", "weight", weight, x.shape[-1:])
    check.same_device("rmsnorm", x=x, weight=weight, residual=residual)
    if residual is not None:
        check.tensor("rmsnorm", "residual", residual)
        check.same_dtype("rmsnorm", "residual", residual, "x", x)
        check.shape("rmsnorm", "residual", residual, x.shape)


def _fwd(x: Tensor, weight: Tensor, residual: Tensor | None, eps: float, gemma: bool, backend: str):
    return ROOM.module(backend).rmsnorm_fwd(x, weight.contiguous(), residual, eps, gemma)


def _fwd_fake(x, weight, residual, eps, gemma, backend):
    y = x.new_empty(x.shape)
    return y, x.new_empty(x.shape if residual is not None else (0,)), x.new_empty(x.shape[0], dtype=torch.float32)


def _setup(ctx, inputs, output):
    x, weight, residual, _, ctx.gemma, ctx.backend = inputs
    _, new_residual, rstd = output
    ctx.has_residual = residual is not None
    ctx.mark_non_differentiable(rstd)
    ctx.save_for_backward(new_residual if ctx.has_residual else x, weight, rstd)


def _backward(ctx, dy, dnew_residual, _):
    x, weight, rstd = ctx.saved_tensors
    dx, dweight = _rmsnorm_bwd(dy, dnew_residual if ctx.has_residual else None, x, weight, rstd, ctx.gemma, ctx.backend)
    return dx, dweight, dx if ctx.has_residual else None, None, None, None


def _bwd(dy: Tensor, dnew_residual: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor, gemma: bool, backend: str):
    dnew_residual = None if dnew_residual is None else dnew_residual.contiguous()
    args = dy.contiguous(), dnew_residual, x.contiguous(), weight.contiguous(), rstd
    return ROOM.module(backend).rmsnorm_bwd(*args, gemma)


_rmsnorm_bwd = Operator(
    "rmsnorm_bwd(Tensor dy, Tensor? dnew_residual, Tensor x, Tensor weight, Tensor rstd, bool gemma, str backend)"
    " -> (Tensor, Tensor)",
    _bwd,
    lambda dy, dnew_residual, x, weight, rstd, gemma, backend: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
)
_rmsnorm = Operator(
    "rmsnorm(Tensor x, Tensor weight, Tensor? residual, float eps, bool gemma, str backend)"
    " -> (Tensor, Tensor, Tensor)",
    _fwd,
    _fwd_fake,
    _setup,
    _backward,
)
