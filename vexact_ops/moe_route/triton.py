"""The Triton kernels: the CPU kernels' arithmetic, operation for operation, so that both classes have the same bits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._core.triton import OPTIONS, begin, early, exp, next_power_of_2, on, tree_sum

LOWEST = tl.constexpr(-(2**31))  # below the key of every number
NOBODY = tl.constexpr(2**31 - 1)
_ROUNDED = {torch.float32: None, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
TINY = tl.constexpr(1e-20)  # keeps a sum of scores that have all vanished from dividing by zero


@triton.jit
def _key(x):
    """Larger numbers have larger keys, -0.0 that of 0.0, a NaN the largest of all."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x != x, 2147483647, bits ^ ((bits >> 31) & 2147483647))


@triton.jit
def _number(key):
    return (key ^ ((key >> 31) & 2147483647)).to(tl.float32, bitcast=True)


@triton.jit
def _sum_of_row(logits, e, E):
    """The row's largest logit, and the sum of e^(l - largest)."""
    l = tl.load(logits + e, mask=e < E, other=float("-inf")).to(tl.float32)  # noqa: E741
    top = tl.max(l, axis=0)
    terms = tl.where(e < E, exp(l - top), 0.0)
    # order: neighbours are added pairwise, over a power of two
    return top, tl.sum(tl.reshape(tree_sum(tl.reshape(terms, [1, terms.shape[0]])), [1]), axis=0)


@triton.jit
def _score(l, top, total, SIGMOID: tl.constexpr):  # noqa: E741
    if SIGMOID:
        q = exp(tl.abs(l) * -1.0)
        large = tl.div_rn(1.0, 1.0 + q)
        return tl.where(l > 0.0, large, q * large)
    else:
        return tl.div_rn(exp(l - top), total)


@triton.jit
def _fwd_kernel(
    logits, bias, weights, ids, scale, logits_stride, E, groups, size, top_groups,
    TOP_K: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, BIAS: tl.constexpr, GROUPS: tl.constexpr,
    P: tl.constexpr, GP: tl.constexpr, SP: tl.constexpr, KP: tl.constexpr,
    ROUNDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    top, total = 0.0, 1.0
    if not SIGMOID:
        top, total = _sum_of_row(logits, tl.arange(0, P), E)
    g, s = tl.arange(0, GP), tl.arange(0, SP)
    inside = (g < groups)[:, None] & (s < size)[None, :]
    index = tl.where(inside, g[:, None] * size + s[None, :], NOBODY)
    l = tl.load(logits + index, mask=inside, other=0.0).to(tl.float32)  # noqa: E741
    score = _score(l, top, total, SIGMOID)
    choice = score
    if BIAS:
        choice = score + tl.load(bias + index, mask=inside, other=0.0)
    elif not GROUPS:
        choice = l  # the same order, without the rounding of the scores
    key = tl.where(inside, _key(choice), LOWEST)
    if GROUPS:
        first = tl.max(key, axis=1)
        at = tl.min(tl.where(key == first[:, None], index, NOBODY), axis=1)
        second = tl.max(tl.where(index == at[:, None], LOWEST, key), axis=1)
        strength = tl.where(g < groups, _key(_number(first) + _number(second)), LOWEST)
        opened = g < 0
        for _ in range(top_groups):
            best = tl.min(tl.where(strength == tl.max(strength, axis=0), g, NOBODY), axis=0)
            opened = opened | (g == best)
            strength = tl.where(g == best, LOWEST, strength)
        key = tl.where(opened[:, None], key, LOWEST)
    slot = tl.arange(0, KP)
    chosen, chosen_ids, sum_of_chosen = tl.zeros([KP], tl.float32), tl.zeros([KP], tl.int32), 0.0
    for k in range(TOP_K):
        most = tl.max(tl.max(key, axis=1), axis=0)
        best = tl.min(tl.min(tl.where(key == most, index, NOBODY), axis=1), axis=0)
        value = tl.sum(tl.sum(tl.where(index == best, score, 0.0), axis=1), axis=0)  # of one value and zeros
        chosen, chosen_ids = tl.where(slot == k, value, chosen), tl.where(slot == k, best, chosen_ids)
        sum_of_chosen += value  # order: slots ascending, from +0
        key = tl.where(index == best, LOWEST, key)
    if NORMALIZE:
        chosen = tl.div_rn(chosen, sum_of_chosen + TINY)
    at = row * TOP_K + slot
    chosen *= scale
    if ROUNDED is not None:
        chosen = chosen.to(ROUNDED).to(tl.float32)
    tl.store(weights + at, chosen, mask=slot < TOP_K)
    tl.store(ids + at, chosen_ids, mask=slot < TOP_K)


@triton.jit
def _bwd_kernel(
    dweights, logits, weights, ids, dlogits, scale, logits_stride, E,
    TOP_K: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    e = tl.arange(0, P)
    top, total = 0.0, 1.0
    if not SIGMOID:
        top, total = _sum_of_row(logits, e, E)
    score = _score(tl.load(logits + e, mask=e < E, other=0.0).to(tl.float32), top, total, SIGMOID)
    c, sum_of_chosen = 0.0, 0.0
    for k in range(TOP_K):  # order: slots ascending
        at = row * TOP_K + k
        c = tl.fma(tl.load(dweights + at), tl.load(weights + at), c)
        sum_of_chosen += tl.sum(tl.where(e == tl.load(ids + at), score, 0.0), axis=0)
    d = tl.zeros([P], tl.float32)
    if not SIGMOID and not NORMALIZE:  # every score moves every weight
        d = score * (0.0 - c)
    for k in range(TOP_K):
        at = row * TOP_K + k
        dw = tl.load(dweights + at)
        wide = scale * dw
        if SIGMOID:
            dp = wide
            if NORMALIZE:
                dp = tl.div_rn(wide - c, sum_of_chosen + TINY)
            mine = dp * (score * (1.0 - score))
        elif NORMALIZE:
            mine = tl.load(weights + at) * (dw - tl.div_rn(c, scale))
        else:
            mine = score * (wide - c)
        d = tl.where(e == tl.load(ids + at), mine, d)
    tl.store(dlogits + row * E + e, d.to(dlogits.dtype.element_ty), mask=e < E)


def moe_route_fwd(
    logits: Tensor, top_k: int, sigmoid: bool, normalize: bool, groups: int, top_groups: int, bias: Tensor | None,
    scale: float, rounded: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, experts = logits.shape
    weights = logits.new_empty(rows, top_k, dtype=torch.float32)
    ids = logits.new_empty(rows, top_k, dtype=torch.int32)
    count = groups or 1
    if rows:
        with on(logits):
            _fwd_kernel[(rows,)](
                logits, logits if bias is None else bias, weights, ids, scale, logits.stride(0), experts, count,
                experts // count, top_groups, TOP_K=top_k, SIGMOID=sigmoid, NORMALIZE=normalize, BIAS=bias is not None,
                GROUPS=groups > 0, P=next_power_of_2(experts), GP=next_power_of_2(count),
                SP=next_power_of_2(experts // count), KP=next_power_of_2(top_k),
                ROUNDED=_ROUNDED[rounded], num_warps=1 if experts <= 256 else 4, **OPTIONS, **early(logits),
            )  # fmt: skip
    return weights, ids


def moe_route_bwd(
    dweights: Tensor, logits: Tensor, weights: Tensor, ids: Tensor, sigmoid: bool, normalize: bool, scale: float
) -> Tensor:
    rows, experts = logits.shape
    dlogits = logits.new_empty(rows, experts)
    if rows:
        with on(logits):
            _bwd_kernel[(rows,)](
                dweights, logits, weights, ids, dlogits, scale, logits.stride(0), experts, TOP_K=ids.shape[1],
                SIGMOID=sigmoid, NORMALIZE=normalize, P=next_power_of_2(experts),
                num_warps=1 if experts <= 256 else 4, **OPTIONS,
            )  # fmt: skip
    return dlogits
