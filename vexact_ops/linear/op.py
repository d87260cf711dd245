"""Matrix product with a weight, one order of summation for every number of rows."""

import math

import torch
from torch import Tensor

from .._core import check
from .._core.backend import Room
from .._core.operator import Operator

ROOM = Room("linear", cpu=("cpu",), cuda=("cuda", "triton"))
_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """x @ weight.T + bias, accumulated in fp32 and rounded once.

    x          (..., K) bf16 | fp32, on a GPU also fp16
    weight     (N, K) in x.dtype, rows of any stride (a view into a larger weight is read in place)
    bias       (N,) in x.dtype, added in fp32 before the rounding
    out_dtype  x.dtype (default), or torch.float32 for the accumulators themselves
    returns    (..., N) in out_dtype, contiguous
    bits       an output element is one fp32 accumulator, fma(x[k], weight[n, k], acc) for k ascending from +0: it
               depends on its row of x, its row of weight and its bias alone, never on the other rows or columns.
               A GPU's matrix units take 16-bit inputs several k at a time, with their own rounding inside
    grad       dx (sums n ascending) as bits; dweight and dbias sum the rows in ascending order (on a GPU, dbias in a
               tree of pairs), repeatable for one fixed batch; each in fp32, rounded once to its input's dtype
    raises     TypeError on dtype, ValueError on shape or device, BackendUnavailable
    example
    >>> x, weight = torch.randn(5, 64), torch.randn(8, 64)
    >>> y = vx.linear(x, weight)
    >>> y.shape, vx.same_bits(y[2:3], vx.linear(x[2:3], weight))  # a row alone is the row in its batch
    (torch.Size([5, 8]), True)
    """
    if not (
        type(x) in _PLAIN
        and type(weight) in _PLAIN
        and x.dtype is weight.dtype
        and x.dtype in check.FLOATS
        and weight.dim() == 2
        and x.dim()
        and x.shape[-1] == weight.shape[1]
        and x.device == weight.device
        and (
            bias is None
            or (
                type(bias) in _PLAIN
                and bias.dtype is x.dtype
                and bias.shape == weight.shape[:1]
                and bias.device == x.device
            )
        )
    ):  # a decode step makes hundreds of calls: ask each question at length only where something may be wrong
        _check(x, weight, bias)
    if out_dtype is None:
        out_dtype = x.dtype
    elif out_dtype not in (x.dtype, torch.float32):
        raise TypeError(f"linear: out_dtype: got {out_dtype}, expected {x.dtype} or torch.float32")
    backend = ROOM.resolve(x.device, backend)
    check.served("linear", "x", x.dtype, backend)
    return _linear(x, weight, bias, out_dtype, backend)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    check.tensor("linear", "x", x, check.FLOATS)
    check.tensor("linear", "weight", weight, ndim=2)
    check.same_dtype("linear", "weight", weight, "x", x)
    if x.dim() == 0:
        raise ValueError("linear: x: got shape (), expected (..., K)")
    check.shape("linear", "weight", weight, ("N", x.shape[-1]))
    if bias is not None:
        check.tensor("linear", "bias", bias)
        check.same_dtype("linear", "bias", bias, "x", x)
        check.shape("linear", "bias", bias, weight.shape[:1])
    check.same_device("linear", x=x, weight=weight, bias=bias)


def _rows(x: Tensor) -> Tensor:
    """What the kernels read in place: contiguous of any rank, or (R, K) with any row stride."""
    if x.is_contiguous():
        return x
    x = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def _fwd(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype, backend: str) -> Tensor:
    if bias is not None:
        bias = bias.contiguous()
    out = ROOM.module(backend).linear_fwd(_rows(x), _rows(weight), bias, out_dtype)
    return out if out.dim() == x.dim() else out.view(*x.shape[:-1], weight.shape[0])


def _setup(ctx, inputs, output):
    x, weight, bias, _, ctx.backend = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight)


def _backward(ctx, dy):
    x, weight = ctx.saved_tensors
    need_dx, need_dweight, need_dbias = ctx.needs_input_grad[:3]
    dx = _linear_dx(dy, weight, x.dtype, ctx.backend) if need_dx else None
    dweight = _linear_dweight(dy, x, weight.dtype, ctx.backend) if need_dweight else None
    dbias = _linear_dbias(dy, ctx.bias_dtype, ctx.backend) if need_dbias else None
    return dx, dweight, dbias, None, None


def _dx(dy: Tensor, weight: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    dx = ROOM.module(backend).linear_dx(_rows(dy), _rows(weight), dtype)
    return dx if dx.dim() == dy.dim() else dx.view(*dy.shape[:-1], weight.shape[1])


def _dweight(dy: Tensor, x: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    return ROOM.module(backend).linear_dweight(_rows(dy), _rows(x), dtype)


def _dbias(dy: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    return ROOM.module(backend).linear_dbias(_rows(dy), dtype)


_linear_dx = Operator(
    "linear_dx(Tensor dy, Tensor weight, ScalarType dtype, str backend) -> Tensor",
    _dx,
    lambda dy, weight, dtype, backend: dy.new_empty((*dy.shape[:-1], weight.shape[1]), dtype=dtype),
)
_linear_dweight = Operator(
    "linear_dweight(Tensor dy, Tensor x, ScalarType dtype, str backend) -> Tensor",
    _dweight,
    lambda dy, x, dtype, backend: dy.new_empty((dy.shape[-1], x.shape[-1]), dtype=dtype),
)
_linear_dbias = Operator(
    "linear_dbias(Tensor dy, ScalarType dtype, str backend) -> Tensor",
    _dbias,
    lambda dy, dtype, backend: dy.new_empty(dy.shape[-1], dtype=dtype),
)
_linear = Operator(
    "linear(Tensor x, Tensor weight, Tensor? bias, ScalarType out_dtype, str backend) -> Tensor",
    _fwd,
    lambda x, weight, bias, out_dtype, backend: x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype),
    _setup,
    _backward,
)
