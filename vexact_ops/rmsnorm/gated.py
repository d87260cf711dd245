"""Root-mean-square normalisation, weighted, then gated by silu of another tensor: the norm behind a gated delta net."""

import torch
from torch import Tensor

from .._core import check
from .._core.operator import Operator
from .op import ROOM


def rmsnorm_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-6, *, backend: str | None = None) -> Tensor:
    """x / rms(x) * weight * silu(gate), rounded where Hugging Face's Qwen3_5RMSNormGated rounds.

    x, gate   (..., N) bf16 | fp32, on a GPU also fp16; the last dimension contiguous. A gate (T, H, N) may be a part of
              wider rows
    weight    (N,) in x.dtype
    eps       added to the mean square
    returns   (..., N) in x.dtype: normalised in fp32 and rounded; times weight, rounded; times silu(gate) in fp32,
              rounded
    bits      a row depends on that row of x and of gate, weight and eps alone; the squares are summed as in rmsnorm
    grad      dx and dgate as bits; dweight sums rows in a fixed order (on a CPU ascending), repeatable for one fixed
              batch
    raises    TypeError on dtype, ValueError on shape or device, BackendUnavailable
    source    Yang, Kautz and Hatamizadeh, Gated Delta Networks, arXiv 2412.06464
    example
    >>> x, gate, weight = torch.randn(4, 32), torch.randn(4, 32), torch.ones(32)
    >>> y = vx.rmsnorm_gated(x, gate, weight)
    >>> vx.same_bits(y, vx.silu_mul(gate, vx.rmsnorm(x, weight)))  # in fp32 nothing is rounded on the way
    True
    """
    op = "rmsnorm_gated"
    if not (
        check.alike(x, gate, weight)
        and x.dtype in check.FLOATS
        and weight.dim() == 1
        and x.dim()
        and x.shape[-1] == weight.shape[0] > 0
        and gate.shape == x.shape
    ):
        _check(op, x, gate, weight)
    check.number(op, "eps", eps, at_least=0.0)
    backend = ROOM.resolve(x.device, backend)
    check.served(op, "x", x.dtype, backend)
    return check.shaped(_rmsnorm_gated(check.rows(x), _rows(gate), weight, eps, backend)[0], x)


def _check(op: str, x: Tensor, gate: Tensor, weight: Tensor) -> None:
    check.tensor(op, "x", x, check.FLOATS)
    check.tensor(op, "gate", gate)
    check.tensor(op, "weight", weight, ndim=1)
    for arg, other in (("gate", gate), ("weight", weight)):
        check.same_dtype(op, arg, other, "x", x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x: got shape {tuple(x.shape)}, expected (..., N) with N of at least 1")
    check.shape(op, "gate", gate, x.shape)
    check.shape(op, "weight", weight, x.shape[-1:])
    check.same_device(op, x=x, gate=gate, weight=weight)


def _rows(gate: Tensor) -> Tensor:
    """As check.rows; heads that lie side by side in strided rows stay there: (T, H * N)."""
    if gate.dim() == 3 and gate.stride(2) == 1 and gate.stride(1) == gate.shape[2] and not gate.is_contiguous():
        return gate.flatten(1)
    return check.rows(gate)


def _fwd(x: Tensor, gate: Tensor, weight: Tensor, eps: float, backend: str):
    y, rstd = x.new_empty(*x.shape), x.new_empty(x.shape[0], dtype=torch.float32)
    ROOM.module(backend).rmsnorm_gated_fwd(x, gate, weight.contiguous(), eps, y, rstd)
    return y, rstd


def _fwd_fake(x, gate, weight, eps, backend):
    return x.new_empty(x.shape), x.new_empty(x.shape[0], dtype=torch.float32)


def _setup(ctx, inputs, output):
    x, gate, weight, _, ctx.backend = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, gate, weight, output[1])


def _backward(ctx, dy, _):
    dx, dgate, dweight = _rmsnorm_gated_bwd(dy, *ctx.saved_tensors, ctx.backend)
    return dx, dgate, dweight, None, None


def _bwd(dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, rstd: Tensor, backend: str):
    tensors = *(t.contiguous() for t in (dy, x, gate.reshape(x.shape), weight)), rstd
    dx, dgate, dweight = ROOM.module(backend).rmsnorm_gated_bwd(*tensors)
    return dx, dgate.view(gate.shape), dweight


_rmsnorm_gated_bwd = Operator(
    "rmsnorm_gated_bwd(Tensor dy, Tensor x, Tensor gate, Tensor weight, Tensor rstd, str backend)"
    " -> (Tensor, Tensor, Tensor)",
    _bwd,
    lambda dy, x, gate, weight, rstd, backend: tuple(t.new_empty(t.shape) for t in (x, gate, weight)),
)
_rmsnorm_gated = Operator(
    "rmsnorm_gated(Tensor x, Tensor gate, Tensor weight, float eps, str backend) -> (Tensor, Tensor)",
    _fwd,
    _fwd_fake,
    _setup,
    _backward,
)
