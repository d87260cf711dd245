"""The Triton kernels: the CPU kernels' arithmetic, operation for operation. A row finds the start of its sequence by
looking through the offsets, so that no host needs to know them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._core.triton import OPTIONS, on, sum_rows, tree_sum
from ..silu_mul.triton import gate_slope, sigmoid

SEQUENCES = 128  # looked through at a time; no bit depends on it
PER_CALL = ["tokens", "sequences", "slot_count"]


def _tile(tokens: int, channels: int) -> dict:
    """An element depends on its own inputs in one order, so the tile may look at the rows."""
    columns = 128 if channels >= 128 else triton.next_power_of_2(max(channels, 16))
    return {"ROWS": 16 if tokens >= 256 else 1, "BLOCK": columns, "num_warps": 4 if tokens >= 256 else 1}


@triton.jit
def _begin_of(row, offsets, sequences, SEQUENCES: tl.constexpr):
    """Of (R,) rows: where the sequence of each begins, where it ends, and its number."""
    begin = tl.zeros_like(row)
    end = tl.full(row.shape, 2147483647, tl.int32)
    number = tl.zeros_like(row)
    for start in range(0, sequences, SEQUENCES):
        b = start + 1 + tl.arange(0, SEQUENCES)
        here = tl.load(offsets + b, mask=b <= sequences, other=2147483647)
        before = here[None, :] <= row[:, None]
        begin = tl.maximum(begin, tl.max(tl.where(before, here[None, :], 0), axis=1))
        end = tl.minimum(end, tl.min(tl.where(before, 2147483647, here[None, :]), axis=1))
        number += tl.sum(before.to(tl.int32), axis=1)
    return tl.maximum(begin, 0), end, number


@triton.jit
def _input(x, row, begin, column, there, back, live, x_stride):
    """Of columns as they follow each other, or loads would be of one element each."""
    at = row - back
    inside = (live & (at >= begin))[:, None] & there[None, :]
    return tl.load(x + at.to(tl.int64)[:, None] * x_stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def _remembered(
    taps, slot, first, row, begin, column, there, back, live, slot_stride, RING: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """The input `back` rows before a row where that is one of an earlier call."""
    at = row - back
    position = first + (at - begin)
    inside = live & (at < begin) & (position >= 0) & (slot >= 0)
    where = tl.maximum(slot, 0).to(tl.int64) * slot_stride + (position & (RING - 1)).to(tl.int64) * D
    return tl.load(taps + where[:, None] + column[None, :], mask=inside[:, None] & there[None, :], other=0.0)


@triton.jit(do_not_specialize=PER_CALL)
def _fwd_kernel(
    x, weight, bias, y, dy, offsets, taps, slots, lens, tokens, sequences, slot_count, x_stride, slot_stride,
    D: tl.constexpr, W: tl.constexpr, RING: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, GRAD: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """With GRAD, y is the gradient of what the activation is of."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < D
    begin, end, number = _begin_of(row, offsets, sequences, SEQUENCES)
    live = row < tokens
    if RING:
        known = live & (number < sequences)
        slot = tl.load(slots + number, mask=known, other=-1)
        slot = tl.where(slot < slot_count, slot, -1)
        length = tl.load(lens + number, mask=known, other=0)
        first = length - (tl.minimum(end, tokens) - begin)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    inside = live[:, None] & there[None, :]
    for w in tl.static_range(W):  # order: taps from the oldest to the newest, one accumulator
        tap = tl.load(weight + column * W + w, mask=there, other=0.0).to(tl.float32)
        value = _input(x, row, begin, column, there, W - 1 - w, live, x_stride).to(tl.float32)
        if RING:
            old = _remembered(
                taps, slot, first, row, begin, column, there, W - 1 - w, live, slot_stride, RING, D
            )  # fmt: skip
            value = tl.where((row - (W - 1 - w) < begin)[:, None], old.to(tl.float32), value)
        acc = tl.fma(tl.broadcast_to(tap[None, :], [ROWS, BLOCK]), value, acc)
    if BIAS:
        acc += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)[None, :]
    at = row.to(tl.int64)[:, None] * D + column[None, :]
    if GRAD:
        d = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        if SILU:
            s, rest = sigmoid(acc, False)
            d = d * gate_slope(acc, s, rest, False)
        tl.store(y + at, d, mask=inside)
    else:
        if SILU:
            s, _ = sigmoid(acc, False)
            acc = acc * s
        tl.store(y + at, acc.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=PER_CALL)
def _store_kernel(
    x, offsets, taps, slots, lens, tokens, sequences, slot_count, x_stride, slot_stride,
    D: tl.constexpr, RING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A sequence's last inputs into its ring. A launch of its own: the one before reads what this overwrites."""
    sequence = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.maximum(tl.load(offsets + sequence), 0)
    end = tl.minimum(tl.load(offsets + sequence + 1), tokens)
    slot, length = tl.load(slots + sequence), tl.load(lens + sequence)
    known = (slot >= 0) & (slot < slot_count)
    for back in tl.static_range(RING):
        row = end - 1 - back
        keep = known & (row >= begin) & (column < D)
        value = tl.load(x + row.to(tl.int64) * x_stride + column, mask=keep, other=0.0)
        place = (length - 1 - back) & (RING - 1)
        tl.store(taps + slot.to(tl.int64) * slot_stride + place * D + column, value, mask=keep)


@triton.jit(do_not_specialize=PER_CALL)
def _dx_kernel(
    dpre, weight, dx, offsets, tokens, sequences,
    D: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < D
    _, end, _ = _begin_of(row, offsets, sequences, SEQUENCES)
    end = tl.minimum(end, tokens)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for later in tl.static_range(W):  # order: the rows that an input reached, ascending
        at = row + later
        inside = (at < end)[:, None] & there[None, :]
        tap = tl.load(weight + column * W + (W - 1 - later), mask=there, other=0.0).to(tl.float32)
        d = tl.load(dpre + at.to(tl.int64)[:, None] * D + column[None, :], mask=inside, other=0.0)
        # behind the sequence's end nothing is added, not even zero times a tap that is not finite
        acc = tl.where(inside, tl.fma(tl.broadcast_to(tap[None, :], [ROWS, BLOCK]), d, acc), acc)
    at = row.to(tl.int64)[:, None] * D + column[None, :]
    tl.store(dx + at, acc.to(dx.dtype.element_ty), mask=(row < tokens)[:, None] & there[None, :])


@triton.jit(do_not_specialize=PER_CALL)
def _dweight_kernel(
    dpre, x, parts, offsets, tokens, sequences, x_stride,
    D: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """parts (blocks of rows, W + 1, D): the last of the W + 1 is the bias's."""
    part = tl.program_id(0)
    row = part * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < D
    begin, _, _ = _begin_of(row, offsets, sequences, SEQUENCES)
    live = row < tokens
    at = row.to(tl.int64)[None, :] * D + column[:, None]
    d = tl.load(dpre + at, mask=live[None, :] & there[:, None], other=0.0)
    out = parts + part.to(tl.int64) * (W + 1) * D + column[:, None]
    for w in tl.static_range(W):
        source = row - (W - 1 - w)
        inside = (live & (source >= begin))[None, :] & there[:, None]
        value = tl.load(x + source.to(tl.int64)[None, :] * x_stride + column[:, None], mask=inside, other=0.0)
        # order: a block's rows in a tree; sum_rows says the rest
        tl.store(out + w * D, tree_sum(tl.where(inside, d * value.to(tl.float32), 0.0)), mask=there[:, None])
    tl.store(out + W * D, tree_sum(d), mask=there[:, None])


def _launch(x, weight, bias, out, dy, offsets, taps, slots, lens, silu) -> None:
    tokens, channels = x.shape
    if x.numel() == 0:
        return
    tile, ring = _tile(tokens, channels), 0 if taps is None else taps.shape[1]
    grid = triton.cdiv(tokens, tile["ROWS"]), triton.cdiv(channels, tile["BLOCK"])
    _fwd_kernel[grid](
        x, weight, weight if bias is None else bias, out, out if dy is None else dy, offsets,
        x if taps is None else taps, offsets if slots is None else slots, offsets if lens is None else lens,
        tokens, offsets.shape[0] - 1, 0 if taps is None else taps.shape[0], x.stride(0),
        0 if taps is None else taps.stride(0),
        D=channels, W=weight.shape[1], RING=ring, BIAS=bias is not None, SILU=silu, GRAD=dy is not None,
        SEQUENCES=SEQUENCES, **tile, **OPTIONS,
    )  # fmt: skip


def varlen_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, silu: bool) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    with on(x):
        _launch(x, weight.contiguous(), _flat(bias), y, None, cu_seqlens, None, None, None, silu)
    return y


def _flat(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


def paged_fwd(x, weight, bias, taps, slots, context_lens, cu_seqlens_q, silu) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens, channels = x.shape
    if x.numel() == 0 or slots.numel() == 0:
        return y
    with on(x):
        _launch(x, weight.contiguous(), _flat(bias), y, None, cu_seqlens_q, taps, slots, context_lens, silu)
        block = 512 if channels >= 512 else triton.next_power_of_2(max(channels, 16))
        _store_kernel[slots.shape[0], triton.cdiv(channels, block)](
            x, cu_seqlens_q, taps, slots, context_lens, tokens, slots.shape[0], taps.shape[0], x.stride(0),
            taps.stride(0), D=channels, RING=taps.shape[1], BLOCK=block, num_warps=4, **OPTIONS,
        )  # fmt: skip
    return y


def varlen_bwd(dy, x, weight, bias, cu_seqlens, silu):
    (tokens, channels), width = x.shape, weight.shape[1]
    weight = weight.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return dx, torch.zeros_like(weight), None if bias is None else torch.zeros_like(bias)
    dpre = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    parts = torch.empty(triton.cdiv(tokens, 64), (width + 1) * channels, dtype=torch.float32, device=x.device)
    sequences = cu_seqlens.shape[0] - 1
    with on(x):
        _launch(x, weight, _flat(bias), dpre, dy, cu_seqlens, None, None, None, silu)
        tile = _tile(tokens, channels)
        _dx_kernel[triton.cdiv(tokens, tile["ROWS"]), triton.cdiv(channels, tile["BLOCK"])](
            dpre, weight, dx, cu_seqlens, tokens, sequences, D=channels, W=width, SEQUENCES=SEQUENCES, **tile, **OPTIONS
        )
        _dweight_kernel[parts.shape[0], triton.cdiv(channels, 64)](
            dpre, x, parts, cu_seqlens, tokens, sequences, x.stride(0),
            D=channels, W=width, ROWS=64, COLUMNS=64, SEQUENCES=SEQUENCES, num_warps=4, **OPTIONS,
        )  # fmt: skip
        sums = sum_rows(parts, torch.float32).view(width + 1, channels)
    return dx, sums[:width].t().to(weight.dtype).contiguous(), None if bias is None else sums[width].to(bias.dtype)
