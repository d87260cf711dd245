"""The C++ kernels (csrc/fused_moe/cpu_kernels.cpp), and those of the rooms it is composed of."""

import torch
from torch import Tensor

from .._core import native
from ..grouped_linear.cpu import grouped_linear_dweight, grouped_linear_dx, grouped_linear_fwd
from ..silu_mul.cpu import silu_mul_fwd


def plan(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    offsets = torch.empty(experts + 1, dtype=torch.int32)
    order, position = (torch.empty(ids.numel(), dtype=torch.int32) for _ in range(2))
    native.ops().moe_plan(ids, offsets, order, position, None)
    return offsets, order, position


def _gather(x: Tensor, order: Tensor) -> Tensor:
    rows = x.new_empty(order.shape[0], x.shape[1])
    native.ops().moe_gather(x, order, rows)
    return rows


def _combine(y: Tensor, position: Tensor, weights: Tensor | None, tokens: int) -> Tensor:
    out = y.new_empty(tokens, y.shape[1])
    native.ops().moe_combine(y, position, weights, out)
    return out


def fused_moe_fwd(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, gelu: bool, keep: bool, between=None
):
    offsets, order, position = plan(ids, gate_up.shape[0])
    h = grouped_linear_fwd(_gather(x, order), gate_up, offsets)
    a = h.new_empty(h.shape[0], h.shape[1] // 2)
    silu_mul_fwd(*h.chunk(2, 1), gelu, a)
    h = h if keep else None
    a = a if between is None else between(a)
    y = grouped_linear_fwd(a, down, offsets)
    return _combine(y, position, weights, x.shape[0]), h, offsets, order, position


def fused_moe_bwd(
    dy: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, h: Tensor, offsets: Tensor, order: Tensor,
    position: Tensor, gelu: bool, need_dx: bool, need_dgate_up: bool, need_ddown: bool,
):  # fmt: skip
    dy = _gather(dy, order)
    da = grouped_linear_dx(dy, down, offsets)
    dh, scaled, dweights = torch.empty_like(h), torch.empty_like(da), torch.zeros_like(weights)
    native.ops().moe_gate_bwd(h, da, order, weights, offsets, gelu, dh, scaled, dweights)
    ddown = grouped_linear_dweight(dy, scaled, offsets) if need_ddown else None
    dgate_up = grouped_linear_dweight(dh, _gather(x, order), offsets) if need_dgate_up else None
    dx = _combine(grouped_linear_dx(dh, gate_up, offsets), position, None, x.shape[0]) if need_dx else None
    return dx, dgate_up, ddown, dweights


# Of swiglu.py


def read(x: Tensor, offsets: Tensor, order: Tensor, position: Tensor) -> tuple[Tensor]:
    """What a product takes to read the rows of x in the plan's order: here they lie so."""
    return (_gather(x, order),)


def swiglu_fwd(h: Tensor, bias: Tensor, ids: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
    a = h.new_empty(h.shape[0], h.shape[1] // 2)
    native.ops().moe_swiglu_fwd(h, bias, ids, order, offsets, a)
    return a


def swiglu_bwd(
    h: Tensor, bias: Tensor, da: Tensor, of_bias: Tensor, ids: Tensor, order: Tensor, weights: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dh, weight * a, dweights; of_bias (R, 1): what the second bias adds to these."""
    dh, scaled, dweights = torch.empty_like(h), torch.empty_like(da), torch.zeros_like(weights)
    native.ops().moe_swiglu_bwd(h, bias, da, of_bias, ids, order, weights, offsets, dh, scaled, dweights)
    return dh, scaled, dweights


def combine_biased(
    y: Tensor, bias: Tensor, position: Tensor, weights: Tensor, ids: Tensor, order: Tensor, offsets: Tensor
) -> Tensor:
    """y is no more."""
    native.ops().moe_add_bias(y, bias, ids, order, offsets)
    return _combine(y, position, weights, ids.shape[0])
