"""One matrix product per expert over rows that are sorted by expert: the experts of a mixture, in one call."""

import torch
from torch import Tensor

from .._core import check
from .._core.backend import Room
from .._core.operator import Operator

ROOM = Room("grouped_linear", cpu=("cpu",), cuda=("cuda", "triton"))


def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor, *, backend: str | None = None) -> Tensor:
    """x[i] @ weight[e].T for the rows offsets[e] <= i < offsets[e + 1], accumulated in fp32 and rounded once.

    x        (R, K) bf16 | fp32, on a GPU also fp16; rows of any stride, those of one expert side by side
    weight   (E, N, K) in x.dtype, matrices and rows of any stride
    offsets  (E + 1,) int32, ascending from 0 to at most R; experts may have no rows. Stays on the device: nothing waits
             for its values, so the call fits a CUDA graph, and only a CPU checks them
    returns  (R, N) in x.dtype, contiguous; rows behind offsets[E] are 0
    bits     a row has the bits of linear(x[i], weight[e]), however the rows are spread over experts
    grad     dx has the bits of linear's; dweight[e] sums its expert's rows in ascending order, repeatable for one fixed
             batch, and is 0 where there are none
    raises   TypeError on dtype, ValueError on shape or device, on a CPU on offsets' values; BackendUnavailable
    example
    >>> x, weight = torch.randn(6, 16), torch.randn(3, 8, 16)  # three experts
    >>> offsets = torch.tensor([0, 4, 4, 6], dtype=torch.int32)  # four rows, none, two
    >>> y = vx.grouped_linear(x, weight, offsets)
    >>> vx.same_bits(y[4:], vx.linear(x[4:], weight[2]))
    True
    """
    check.tensor("grouped_linear", "x", x, check.FLOATS, ndim=2)
    check.tensor("grouped_linear", "weight", weight, ndim=3)
    check.same_dtype("grouped_linear", "weight", weight, "x", x)
    check.shape("grouped_linear", "weight", weight, ("E", "N", x.shape[1]))
    check.tensor("grouped_linear", "offsets", offsets, (torch.int32,))
    check.shape("grouped_linear", "offsets", offsets, (weight.shape[0] + 1,))
    check.same_device("grouped_linear", x=x, weight=weight, offsets=offsets)
    backend = ROOM.resolve(x.device, backend)
    check.served("grouped_linear", "x", x.dtype, backend)
    return _grouped_linear(x, weight, offsets, backend)


def _fwd(x: Tensor, weight: Tensor, offsets: Tensor, backend: str) -> Tensor:
    return ROOM.module(backend).grouped_linear_fwd(check.rows(x), check.matrices(weight), offsets.contiguous())


def _setup(ctx, inputs, output):
    x, weight, offsets, ctx.backend = inputs
    ctx.save_for_backward(x, weight, offsets)


def _backward(ctx, dy):
    x, weight, offsets = ctx.saved_tensors
    dx = _grouped_linear_dx(dy, weight, offsets, ctx.backend) if ctx.needs_input_grad[0] else None
    dweight = _grouped_linear_dweight(dy, x, offsets, ctx.backend) if ctx.needs_input_grad[1] else None
    return dx, dweight, None, None


def _dx(dy: Tensor, weight: Tensor, offsets: Tensor, backend: str) -> Tensor:
    return ROOM.module(backend).grouped_linear_dx(check.rows(dy), check.matrices(weight), offsets.contiguous())


def _dweight(dy: Tensor, x: Tensor, offsets: Tensor, backend: str) -> Tensor:
    return ROOM.module(backend).grouped_linear_dweight(check.rows(dy), check.rows(x), offsets.contiguous())


_grouped_linear_dx = Operator(
    "grouped_linear_dx(Tensor dy, Tensor weight, Tensor offsets, str backend) -> Tensor",
    _dx,
    lambda dy, weight, offsets, backend: dy.new_empty(dy.shape[0], weight.shape[2]),
)
_grouped_linear_dweight = Operator(
    "grouped_linear_dweight(Tensor dy, Tensor x, Tensor offsets, str backend) -> Tensor",
    _dweight,
    lambda dy, x, offsets, backend: dy.new_empty(offsets.shape[0] - 1, dy.shape[1], x.shape[1]),
)
_grouped_linear = Operator(
    "grouped_linear(Tensor x, Tensor weight, Tensor offsets, str backend) -> Tensor",
    _fwd,
    lambda x, weight, offsets, backend: x.new_empty(x.shape[0], weight.shape[1]),
    _setup,
    _backward,
)
