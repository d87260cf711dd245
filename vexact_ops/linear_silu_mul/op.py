"""The first half of a gated feed-forward block: the product with gates and ups, and the gated activation of it."""

import math

import torch
from torch import Tensor

from .._core import check
from .._core.backend import Room
from .._core.operator import Operator
from ..linear.op import linear
from ..silu_mul.op import ACTIVATIONS, silu_mul

ROOM = Room("linear_silu_mul", cpu=("cpu",), cuda=("cuda", "triton"))


def linear_silu_mul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "silu",
    backend: str | None = None,
) -> Tensor:
    """silu_mul(linear(x, weight, bias), activation=activation), byte for byte.

    x           (..., K) bf16 | fp32, on a GPU also fp16
    weight      (2I, K) in x.dtype: the gate's I rows, then up's
    bias        (2I,) in x.dtype, or None
    activation  as in silu_mul
    returns     (..., I) in x.dtype
    bits        those of the two ops. On SM90 up to 1,024 rows, in 16 bits and without a bias, take one kernel where it
                is proven to have them and is the faster way: the product is not stored
    grad        the two ops', which compute it where one is asked for
    raises      as linear and silu_mul
    example
    >>> x, weight = torch.randn(3, 16), torch.randn(2 * 24, 16)
    >>> vx.same_bits(vx.linear_silu_mul(x, weight), vx.silu_mul(vx.linear(x, weight)))
    True
    """
    op = "linear_silu_mul"
    if not (
        check.alike(x, weight)
        and x.dtype in check.FLOATS
        and weight.dim() == 2
        and x.dim()
        and x.shape[-1] == weight.shape[1]
        and weight.shape[0] % 2 == 0
        and (bias is None or (check.alike(x, bias) and bias.shape == weight.shape[:1]))
    ):
        _check(op, x, weight, bias)
    check.choice(op, "activation", activation, ACTIVATIONS)
    backend = ROOM.resolve(x.device, backend)
    check.served(op, "x", x.dtype, backend)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        h = linear(x, weight, bias, backend=backend)
        return silu_mul(h, activation=activation, backend="cpu" if backend == "cpu" else "triton")
    return _linear_silu_mul(x, weight, bias, activation == "gelu_tanh", backend)


def _check(op: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    check.tensor(op, "x", x, check.FLOATS)
    check.tensor(op, "weight", weight, ndim=2)
    check.same_dtype(op, "weight", weight, "x", x)
    if x.dim() == 0:
        raise ValueError(f"{op}: x: got shape (), expected (..., K)")
    check.shape(op, "weight", weight, ("2I", x.shape[-1]))
    if weight.shape[0] % 2:
        raise ValueError(f"{op}: weight: got shape {tuple(weight.shape)}, expected (2I, {x.shape[-1]})")
    if bias is not None:
        check.tensor(op, "bias", bias)
        check.same_dtype(op, "bias", bias, "x", x)
        check.shape(op, "bias", bias, weight.shape[:1])
    check.same_device(op, x=x, weight=weight, bias=bias)


def _fwd(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool, backend: str) -> Tensor:
    rows = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    bias = None if bias is None else bias.contiguous()
    y = ROOM.module(backend).linear_silu_mul(check.rows(rows), check.rows(weight), bias, gelu)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[1])


_linear_silu_mul = Operator(
    "linear_silu_mul(Tensor x, Tensor weight, Tensor? bias, bool gelu, str backend) -> Tensor",
    _fwd,
    lambda x, weight, bias, gelu, backend: x.new_empty((*x.shape[:-1], weight.shape[0] // 2)),
)
