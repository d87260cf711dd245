"""The Triton kernels of the permutation, the combination and the gate; the products are grouped_linear's.

The permuted hidden states are never stored: the first product reads its rows through the plan, and so do the
backward's. Nothing waits for the plan's values.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._core.triton import OPTIONS, cdiv, chunk, on, tree_sum
from ..grouped_linear.triton import grouped_linear_dweight, grouped_linear_dx, grouped_linear_fwd
from ..silu_mul.triton import gate_slope, sigmoid, silu_mul_fwd
from . import swiglu


@triton.jit(do_not_specialize=["slots"])
def _plan_kernel(ids, offsets, order, position, slots, E, BLOCK: tl.constexpr):
    """One program per expert, and one for the slots that are nobody's: count the slots of the experts below, then give
    out places in the order of the slots. Whole numbers: no order of addition shows."""
    expert = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    below = tl.zeros([BLOCK], tl.int32)
    for start in range(0, slots, BLOCK):
        e = tl.load(ids + start + i, mask=start + i < slots, other=-1)
        below += ((e >= 0) & (e < expert)).to(tl.int32)
    place = tl.sum(below, axis=0)
    tl.store(offsets + expert, place)
    if expert < E:
        for start in range(0, slots, BLOCK):
            mine = (tl.load(ids + start + i, mask=start + i < slots, other=-1) == expert).to(tl.int32)
            at = place + tl.cumsum(mine, 0) - mine
            tl.store(order + at, start + i, mask=mine != 0)
            tl.store(position + start + i, at, mask=mine != 0)
            place += tl.sum(mine, axis=0)
    else:
        for start in range(0, slots, BLOCK):
            slot = start + i
            e = tl.load(ids + slot, mask=slot < slots, other=0)
            tl.store(position + slot, -1, mask=(slot < slots) & ((e < 0) | (e >= E)))
            tl.store(order + slot, 0, mask=(slot < slots) & (slot >= place))


@triton.jit(do_not_specialize_on_alignment=["weights", "ids"])
def _combine_kernel(
    y, position, weights, bias, ids, out, n,
    TOP_K: tl.constexpr, WEIGHTS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for s in range(TOP_K):  # order: slots ascending, one fp32 accumulator
        at = tl.load(position + token * TOP_K + s).to(tl.int64)
        v = tl.load(y + at * n + column, mask=(column < n) & (at >= 0), other=0.0).to(tl.float32)
        if BIAS:
            e = tl.load(ids + token * TOP_K + s).to(tl.int64)
            v += tl.load(bias + e * n + column, mask=(column < n) & (at >= 0), other=0.0).to(tl.float32)
            v = v.to(out.dtype.element_ty).to(tl.float32)
        if WEIGHTS:
            more = tl.fma(tl.load(weights + token * TOP_K + s) + tl.zeros([BLOCK], tl.float32), v, acc)
        else:
            more = acc + v
        acc = tl.where(at >= 0, more, acc)
    tl.store(out + token * n + column, acc.to(out.dtype.element_ty), mask=column < n)


@triton.jit(do_not_specialize_on_alignment=["weights"])
def _gate_bwd_kernel(
    h, da, order, weights, offsets, dh, scaled, dweights, n, E, GELU: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(offsets + E):
        return
    slot = tl.load(order + row)
    w = tl.load(weights + slot)
    lanes = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < n
        g = tl.load(h + row * 2 * n + column, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(h + row * 2 * n + n + column, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(da + row * n + column, mask=inside, other=0.0).to(tl.float32)
        s, rest = sigmoid(g, GELU)
        value = ((g * s) * u).to(h.dtype.element_ty).to(tl.float32)  # rounded, as the forward had it
        lanes = tl.fma(d, value, lanes)  # order: lanes over chunks ascending, then neighbours pairwise
        dw = w * d
        tl.store(scaled + row * n + column, (w * value).to(h.dtype.element_ty), mask=inside)
        dgate = (dw * u) * gate_slope(g, s, rest, GELU)
        tl.store(dh + row * 2 * n + column, dgate.to(h.dtype.element_ty), mask=inside)
        tl.store(dh + row * 2 * n + n + column, (dw * (g * s)).to(h.dtype.element_ty), mask=inside)
    tl.store(dweights + slot + tl.arange(0, 1), tl.reshape(tree_sum(tl.reshape(lanes, [1, BLOCK])), [1]))


def plan(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    slots = ids.numel()
    offsets, order, position = (ids.new_empty(size) for size in (experts + 1, slots, slots))
    with on(ids):
        _plan_kernel[(experts + 1,)](
            ids, offsets, order, position, slots, experts, BLOCK=1024 if slots > 128 else 128, num_warps=4, **OPTIONS
        )
    return offsets, order, position


def _combine(
    y: Tensor, position: Tensor, weights: Tensor | None, tokens: int, bias: Tensor | None = None,
    ids: Tensor | None = None,
) -> Tensor:  # fmt: skip
    n = y.shape[1]
    out = y.new_empty(tokens, n)
    if out.numel():
        size = chunk(n, 1024)
        with on(y):
            _combine_kernel[(tokens, cdiv(n, size))](
                y, position, y if weights is None else weights, y if bias is None else bias,
                position if ids is None else ids, out, n, TOP_K=position.shape[0] // tokens,
                WEIGHTS=weights is not None, BIAS=bias is not None, BLOCK=size, num_warps=4, **OPTIONS,
            )  # fmt: skip
    return out


def _gate_bwd(
    h: Tensor, da: Tensor, order: Tensor, weights: Tensor, offsets: Tensor, gelu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dh, scaled, dweights = torch.empty_like(h), torch.empty_like(da), torch.zeros_like(weights)
    if da.numel():
        size = chunk(da.shape[1], 1024)
        with on(h):
            _gate_bwd_kernel[(h.shape[0],)](
                h, da, order, weights, offsets, dh, scaled, dweights, da.shape[1], offsets.shape[0] - 1,
                GELU=gelu, BLOCK=size, num_warps=4, **OPTIONS,
            )  # fmt: skip
    return dh, scaled, dweights


def fused_moe_fwd(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, gelu: bool, keep: bool, between=None
):
    offsets, order, position = plan(ids, gate_up.shape[0])
    h = grouped_linear_fwd(x, gate_up, offsets, order, ids.shape[1])
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
    top_k = weights.shape[1]
    da = grouped_linear_dx(dy, down, offsets, order, top_k)
    dh, scaled, dweights = _gate_bwd(h, da, order, weights, offsets, gelu)
    del da
    ddown = grouped_linear_dweight(dy, scaled, offsets, order, top_k, gathered="dy") if need_ddown else None
    dgate_up = grouped_linear_dweight(dh, x, offsets, order, top_k, gathered="x") if need_dgate_up else None
    dx = _combine(grouped_linear_dx(dh, gate_up, offsets), position, None, x.shape[0]) if need_dx else None
    return dx, dgate_up, ddown, dweights


# Of swiglu.py

ALPHA, LIMIT = tl.constexpr(swiglu.ALPHA), tl.constexpr(swiglu.LIMIT)


@triton.jit
def _pair(h, bias, row, expert, start, n, BLOCK: tl.constexpr):
    """Gates and ups of a row from a column on, with their bias, rounded; both as they are."""
    column = 2 * start + tl.arange(0, 2 * BLOCK)
    inside = column < 2 * n
    v = tl.load(h + row * 2 * n + column, mask=inside, other=0.0).to(tl.float32)
    v += tl.load(bias + expert * 2 * n + column, mask=inside, other=0.0).to(tl.float32)
    return tl.split(tl.reshape(v.to(h.dtype.element_ty).to(tl.float32), [BLOCK, 2]))


@triton.jit
def _within(g, u):
    up = tl.where(u > LIMIT, LIMIT, tl.where(u < -LIMIT, -LIMIT, u))
    return tl.where(g > LIMIT, LIMIT, g), up


@triton.jit(do_not_specialize_on_alignment=["ids"])
def _swiglu_fwd_kernel(h, bias, ids, order, offsets, a, n, E, BLOCK: tl.constexpr):
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    if row >= tl.load(offsets + E):
        return
    expert = tl.load(ids + tl.load(order + row)).to(tl.int64)
    g, u = _pair(h, bias, row, expert, start, n, BLOCK)
    g, u = _within(g, u)
    s, _ = sigmoid(g * ALPHA, False)
    column = start + tl.arange(0, BLOCK)
    tl.store(a + row * n + column, ((g * s) * (u + 1.0)).to(a.dtype.element_ty), mask=column < n)


@triton.jit(do_not_specialize_on_alignment=["weights", "ids"])
def _swiglu_bwd_kernel(
    h, bias, da, of_bias, ids, order, weights, offsets, dh, scaled, dweights, n, E, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(offsets + E):
        return
    slot = tl.load(order + row)
    expert = tl.load(ids + slot).to(tl.int64)
    w = tl.load(weights + slot)
    lanes = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        column = start + tl.arange(0, BLOCK)
        gate, up = _pair(h, bias, row, expert, start, n, BLOCK)
        g, u = _within(gate, up)
        s, rest = sigmoid(g * ALPHA, False)
        d = tl.load(da + row * n + column, mask=column < n, other=0.0).to(tl.float32)
        silu, more, dw = g * s, u + 1.0, w * d
        value = (silu * more).to(h.dtype.element_ty).to(tl.float32)  # rounded, as the forward had it
        lanes = tl.fma(d, value, lanes)  # order: lanes over chunks ascending, then neighbours pairwise
        tl.store(scaled + row * n + column, (w * value).to(h.dtype.element_ty), mask=column < n)
        c = tl.where(g > -1e4, g, -1e4)  # there the slope is 0; the bound keeps infinity times zero out of it
        dg = tl.where(gate > LIMIT, 0.0, (dw * more) * tl.fma(s * rest, c * ALPHA, s))
        du = tl.where((up > LIMIT) | (up < -LIMIT), 0.0, dw * silu)
        both = 2 * start + tl.arange(0, 2 * BLOCK)
        pairs = tl.reshape(tl.join(dg, du), [2 * BLOCK]).to(h.dtype.element_ty)
        tl.store(dh + row * 2 * n + both, pairs, mask=both < 2 * n)
    total = tl.reshape(tree_sum(tl.reshape(lanes, [1, BLOCK])), [1])
    one = tl.arange(0, 1)
    tl.store(dweights + slot + one, total + tl.load(of_bias + row + one).to(tl.float32))


def read(x: Tensor, offsets: Tensor, order: Tensor, position: Tensor) -> tuple[Tensor, Tensor, int]:
    """What a product takes to read the rows of x in the plan's order."""
    return x, order, order.shape[0] // x.shape[0] if len(x) else 1


def swiglu_fwd(h: Tensor, bias: Tensor, ids: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
    a = h.new_empty(h.shape[0], h.shape[1] // 2)
    if a.numel():
        size = chunk(a.shape[1], 1024)
        with on(h):
            _swiglu_fwd_kernel[(h.shape[0], cdiv(a.shape[1], size))](
                h, bias, ids, order, offsets, a, a.shape[1], bias.shape[0], BLOCK=size, num_warps=4, **OPTIONS
            )
    return a


def swiglu_bwd(
    h: Tensor, bias: Tensor, da: Tensor, of_bias: Tensor, ids: Tensor, order: Tensor, weights: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dh, weight * a, dweights; of_bias (R, 1): what the second bias adds to these."""
    dh, scaled, dweights = torch.empty_like(h), torch.empty_like(da), torch.zeros_like(weights)
    if da.numel():
        with on(h):
            _swiglu_bwd_kernel[(h.shape[0],)](
                h, bias, da, of_bias, ids, order, weights, offsets, dh, scaled, dweights, da.shape[1], bias.shape[0],
                BLOCK=chunk(da.shape[1], 1024), num_warps=4, **OPTIONS,
            )  # fmt: skip
    return dh, scaled, dweights


def combine_biased(
    y: Tensor, bias: Tensor, position: Tensor, weights: Tensor, ids: Tensor, order: Tensor, offsets: Tensor
) -> Tensor:
    return _combine(y, position, weights, ids.shape[0], bias, ids)
