"""The Triton kernels: the CPU kernels' arithmetic, operation for operation. A row finds the start of its sequence by
looking through the offsets, so that no host needs to know them."""

# ruff: noqa: RUF005 (Triton knows no starred tuple)

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._core.triton import OPTIONS, begin_beside, cdiv, early, next_power_of_2, on, sum_rows
from ..silu_mul.triton import gate_slope, sigmoid, silu

SEQUENCES = 128  # looked through at a time; no bit depends on it
PER_CALL = ["tokens", "sequences", "slot_count", "first_row", "first_sequence", "singles"]


def _tile(tokens: int, channels: int) -> dict:
    """An element depends on its own inputs in one order, so the tile may look at the rows. Eight columns a thread
    where there are enough for that: 90 us of 8,192 rows and channels on an H200, 100 with four."""
    many = tokens * channels >= 1 << 24
    rows, widest, own = (32, 256, 256) if many else (8, 512, 128) if tokens >= 256 else (1, 128, 128)
    block = min(widest, next_power_of_2(max(channels, 16)))
    return {"ROWS": rows, "AHEAD": min(rows, 4), "BLOCK": block, "num_warps": max(block // own, 1)}


@triton.jit
def _sequence_of(row, offsets, sequences, SEQUENCES: tl.constexpr):
    """The number of a row's sequence: of how many the end is no later. Behind the last one, how many there are."""
    ended = tl.zeros([SEQUENCES], tl.int32)
    for start in range(0, sequences, SEQUENCES):
        b = start + 1 + tl.arange(0, SEQUENCES)
        ended += (tl.load(offsets + b, mask=b <= sequences, other=2147483647) <= row).to(tl.int32)
    return tl.sum(ended, axis=0)


@triton.jit
def _bounds(number, offsets, sequences):
    begin = tl.maximum(tl.load(offsets + number), 0)
    return begin, tl.load(offsets + number + 1, mask=number < sequences, other=2147483647)


@triton.jit
def _memory(number, begin, end, slots, lens, tokens, sequences, slot_count):
    """A sequence's slot, -1 for none, and the position of its first row."""
    known = number < sequences
    slot = tl.load(slots + number, mask=known, other=-1)
    length = tl.load(lens + number, mask=known, other=0)
    return tl.where(slot < slot_count, slot, -1), length - (tl.minimum(end, tokens) - begin)


@triton.jit
def _held(taps, slot, position, column, there, slot_stride, D: tl.constexpr, RING: tl.constexpr):
    """The input of a position that is one of an earlier call, fp32; zeros where there is none."""
    held = there & (slot >= 0) & (position >= 0)
    where = tl.cast(tl.maximum(slot, 0), tl.int64) * slot_stride + (position & (RING - 1)) * D
    return tl.load(taps + where + column, mask=held, other=0.0).to(tl.float32)


@triton.jit
def _taps(weight, column, there, W: tl.constexpr, PACKED: tl.constexpr):
    """These columns' taps, fp32, from the oldest to the newest. PACKED: see _tap."""
    taps = ()
    for w in tl.static_range(W):
        taps = taps + (_tap(weight, column, there, w, W, PACKED),)
    return taps


@triton.jit
def _rows(x, row, column, there, limit, stride, COUNT: tl.constexpr):
    """x's rows from this one on that come before `limit`, as they are in memory: half the registers. x: at that row."""
    rows = ()
    for i in tl.static_range(COUNT):
        inside = there & (row + i >= 0) & (row + i < limit)
        rows = rows + (tl.load(x + i * tl.cast(stride, tl.int64) + column, mask=inside, other=0.0),)
    return rows


@triton.jit(do_not_specialize=PER_CALL)
def _fwd_kernel(
    x, weight, bias, y, offsets, taps, slots, lens, tokens, sequences, slot_count, first_row, x_stride, slot_stride,
    D: tl.constexpr, W: tl.constexpr, RING: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr,
    ROWS: tl.constexpr, AHEAD: tl.constexpr, BLOCK: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """A block of rows, one after another: each is read once, by AHEAD of them at a time and as many before they are
    needed, and the W - 1 before a row stay in registers. Where a sequence begins, they are what its slot remembers.
    Rows before first_row, with which a sequence begins, are another kernel's."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there, start = column < D, first_row + tl.program_id(0) * ROWS
    limit = tl.minimum(start + ROWS, tokens)
    x += tl.cast(start - (W - 1), tl.int64) * x_stride
    before = _rows(x, start - (W - 1), column, there, limit, x_stride, W - 1)
    x += tl.cast(W - 1, tl.int64) * x_stride
    rows = _rows(x, start, column, there, limit, x_stride, AHEAD)
    weights = _taps(weight, column, there, W, PACKED)
    shift = tl.zeros([BLOCK], tl.float32)
    if BIAS:
        shift = tl.load(bias + column, mask=there, other=0.0).to(tl.float32)
    number = _sequence_of(start, offsets, sequences, SEQUENCES)
    begin, end = _bounds(number, offsets, sequences)
    if RING:
        slot, first = _memory(number, begin, end, slots, lens, tokens, sequences, slot_count)
    inputs = ()
    for w in tl.static_range(W - 1):
        at = start - (W - 1) + w
        old = tl.zeros([BLOCK], tl.float32)
        if RING:
            position = tl.where(at < begin, first + (at - begin), -1)
            old = _held(taps, slot, position, column, there, slot_stride, D, RING)
        inputs = inputs + (tl.where(at >= begin, before[w].to(tl.float32), old),)
    for block in range(0, ROWS, AHEAD):
        x += tl.cast(AHEAD, tl.int64) * x_stride
        next_rows = _rows(x, start + block + AHEAD, column, there, limit, x_stride, AHEAD)
        for i in tl.static_range(AHEAD):
            row = start + block + i
            if (row >= end) & (number < sequences):
                while (row >= end) & (number < sequences):
                    number += 1
                    begin, end = _bounds(number, offsets, sequences)
                if RING:
                    slot, first = _memory(number, begin, end, slots, lens, tokens, sequences, slot_count)
                inputs = ()
                for w in tl.static_range(W - 1):
                    old = tl.zeros([BLOCK], tl.float32)
                    if RING:
                        old = _held(taps, slot, first - (W - 1) + w, column, there, slot_stride, D, RING)
                    inputs = inputs + (old,)
            window = inputs + (rows[i].to(tl.float32),)
            acc = tl.zeros([BLOCK], tl.float32)
            for w in tl.static_range(W):  # order: taps from the oldest to the newest, one accumulator
                acc = tl.fma(weights[w], window[w], acc)
            if BIAS:
                acc += shift
            if SILU:
                acc = silu(acc)
            out = y + tl.cast(row, tl.int64) * D + column
            tl.store(out, acc.to(y.dtype.element_ty), mask=there & (row < limit))
            inputs = ()
            for w in tl.static_range(W - 1):
                inputs = inputs + (window[w + 1],)
        rows = next_rows


@triton.jit
def _tap(weight, column, there, w, W: tl.constexpr, PACKED: tl.constexpr):
    """Tap w of these columns, fp32. PACKED: a column's four lie in eight bytes, which are loaded as one, for columns
    that follow each other; one at a time each would be a request of its own."""
    if PACKED:
        four = tl.load(weight.to(tl.pointer_type(tl.int64)) + column, mask=there, other=0)
        return (four >> (16 * w)).to(tl.int16).to(weight.dtype.element_ty, bitcast=True).to(tl.float32)
    else:
        return tl.load(weight + column * W + w, mask=there, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=PER_CALL)
def _step_kernel(
    x, weight, bias, y, offsets, taps, slots, lens, tokens, slot_count, first_sequence, singles, x_stride, slot_stride,
    D: tl.constexpr, W: tl.constexpr, RING: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    PACKED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first so many sequences, of about a row each: a program has all rows of one, so that it reads of the ring
    what it then overwrites, and no row looks for its sequence. Of the others, which _fwd_kernel computes, the last
    inputs into their rings: that one is launched before, for it reads what is overwritten here. Sequences before
    first_sequence are another kernel's."""
    begin_beside(PDL)
    sequence = first_sequence + tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < D
    begin = tl.maximum(tl.load(offsets + sequence), 0)
    end = tl.minimum(tl.load(offsets + sequence + 1), tokens)
    slot, length = tl.load(slots + sequence), tl.load(lens + sequence)
    known = (slot >= 0) & (slot < slot_count)
    ring = taps + tl.where(known, slot, 0).to(tl.int64) * slot_stride + column
    first = length - (end - begin)
    for row in range(tl.where(sequence < singles, begin, end), end):
        acc = tl.zeros([BLOCK], tl.float32)
        for w in tl.static_range(W):  # order: taps from the oldest to the newest, one accumulator
            at = row - (W - 1 - w)
            own, position = at >= begin, first + (at - begin)
            new = tl.load(x + tl.cast(at, tl.int64) * x_stride + column, mask=there & own, other=0.0)
            held = known & (at < begin) & (position >= 0)
            old = tl.load(ring + (position & (RING - 1)) * D, mask=there & held, other=0.0)
            acc = tl.fma(_tap(weight, column, there, w, W, PACKED), tl.where(own, new, old).to(tl.float32), acc)
        if BIAS:
            acc += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)
        if SILU:
            s, _ = sigmoid(acc, False)
            acc = acc * s
        tl.store(y + tl.cast(row, tl.int64) * D + column, acc.to(y.dtype.element_ty), mask=there)
    tl.debug_barrier()  # what other threads have read of the ring is overwritten
    for row in range(tl.maximum(begin, end - RING), end):
        value = tl.load(x + tl.cast(row, tl.int64) * x_stride + column, mask=there & known, other=0.0)
        tl.store(ring + ((length - (end - row)) & (RING - 1)) * D, value, mask=there & known)


@triton.jit
def _row(x, row, column, there, tokens, stride):
    """One row's columns, fp32; zeros behind the last one."""
    inside = there & (row >= 0) & (row < tokens)
    return tl.load(x + tl.cast(row, tl.int64) * stride + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=PER_CALL)
def _bwd_kernel(
    dy, x, weight, bias, dx, parts, offsets, tokens, sequences, x_stride,
    D: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SEQUENCES: tl.constexpr,
):  # fmt: skip
    """A block of rows and the W - 1 behind it, one after another: each is read once, and what goes from row to row
    stays in registers. parts (blocks of rows, W + 1, D): the last of the W + 1 is the bias's."""
    part = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there, start = column < D, part * ROWS
    number = _sequence_of(start, offsets, sequences, SEQUENCES)
    begin, end = _bounds(number, offsets, sequences)
    zeros = tl.zeros([BLOCK], tl.float32)
    shift = zeros
    if BIAS:
        shift = tl.load(bias + column, mask=there, other=0.0).to(tl.float32)
    taps, inputs, behind, sums = (), (), (), (zeros,)  # behind: dx of the rows before, as far as it is known
    for w in tl.static_range(W):
        taps = taps + (tl.load(weight + column * W + w, mask=there, other=0.0).to(tl.float32),)
        sums = sums + (zeros,)
    for w in tl.static_range(W - 1):
        inputs = inputs + (_row(x, start - (W - 1) + w, column, there, tokens, x_stride),)
        behind = behind + (zeros,)
    next_input, next_d = _row(x, start, column, there, tokens, x_stride), _row(dy, start, column, there, tokens, D)
    for i in range(ROWS + W - 1):
        row = start + i
        while (row >= end) & (number < sequences):
            number += 1
            begin, end = _bounds(number, offsets, sequences)
        window, d = inputs + (next_input,), next_d
        next_input = _row(x, row + 1, column, there, tokens, x_stride)
        next_d = _row(dy, row + 1, column, there, tokens, D)
        if SILU:
            acc = zeros
            for w in tl.static_range(W):  # order: that of the forward
                acc = tl.fma(taps[w], tl.where(row - (W - 1 - w) >= begin, window[w], 0.0), acc)
            if BIAS:
                acc += shift
            s, rest = sigmoid(acc, False)
            d = d * gate_slope(acc, s, rest, False)
        inputs, known, added = (), (), ()
        own = (i < ROWS) & (row < tokens)
        for w in tl.static_range(W):
            of_same = row - (W - 1 - w) >= begin
            # order: a block's rows ascending, one fma each; sum_rows says the rest
            added = added + (tl.where(own & of_same, tl.fma(d, window[w], sums[w]), sums[w]),)
            if w < W - 1:
                # order: the rows that an input reached, ascending; behind its sequence's end nothing is added
                reached = of_same & (row < tokens)
                known = known + (tl.where(reached, tl.fma(taps[w], d, behind[w]), behind[w]),)
            if w > 0:
                inputs = inputs + (window[w],)
        sums = added + (tl.where(own, sums[W] + d, sums[W]),)
        known = known + (tl.fma(taps[W - 1], d, zeros),)
        done = row - (W - 1)
        at = dx + tl.cast(done, tl.int64) * D + column
        tl.store(at, known[0].to(dx.dtype.element_ty), mask=there & (i >= W - 1) & (done < tokens))
        behind = ()
        for w in tl.static_range(W - 1):
            behind = behind + (known[w + 1],)
    for w in tl.static_range(W + 1):
        tl.store(parts + (tl.cast(part, tl.int64) * (W + 1) + w) * D + column, sums[w], mask=there)


def _packed(weight: Tensor) -> bool:
    return (weight.shape[1], weight.element_size()) == (4, 2) and weight.data_ptr() % 8 == 0


def _launch(x, weight, bias, out, offsets, taps, slots, lens, silu, first_row: int = 0) -> None:
    """first_row: that of a sequence; rows before it are not computed."""
    tokens, channels = x.shape
    if tokens <= first_row or channels == 0:
        return
    tile, ring = _tile(tokens - first_row, channels), 0 if taps is None else taps.shape[1]
    grid = cdiv(tokens - first_row, tile["ROWS"]), cdiv(channels, tile["BLOCK"])
    _fwd_kernel[grid](
        x, weight, weight if bias is None else bias, out, offsets,
        x if taps is None else taps, offsets if slots is None else slots, offsets if lens is None else lens,
        tokens, offsets.shape[0] - 1, 0 if taps is None else taps.shape[0], first_row, x.stride(0),
        0 if taps is None else taps.stride(0),
        D=channels, W=weight.shape[1], RING=ring, BIAS=bias is not None, SILU=silu, PACKED=_packed(weight),
        SEQUENCES=SEQUENCES, **tile, **OPTIONS,
    )  # fmt: skip


def varlen_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, silu: bool) -> Tensor:
    y = x.new_empty(*x.shape)
    with on(x):
        _launch(x, weight.contiguous(), _flat(bias), y, cu_seqlens, None, None, None, silu)
    return y


def _flat(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


def paged_fwd(x, weight, bias, taps, slots, context_lens, cu_seqlens_q, singles, silu) -> Tensor:
    y = x.new_empty(*x.shape)
    if x.numel() == 0 or slots.numel() == 0:
        return y
    weight, bias, sequences = weight.contiguous(), _flat(bias), slots.shape[0]
    if x.shape[0] == sequences:  # a row each, as a rule, and right if not
        singles = sequences
    _paged(x, weight, bias, y, taps, slots, context_lens, cu_seqlens_q, singles, silu)
    return y


def behind(x, weight, bias, taps, slots, context_lens, cu_seqlens_q, singles, silu, y) -> None:
    """Of a paged call the sequences behind the first `singles`, which have a row each: y's rows from there on, and
    their rings. The first ones' are left to another kernel. weight and bias contiguous."""
    _paged(x, weight, bias, y, taps, slots, context_lens, cu_seqlens_q, singles, silu, first_sequence=singles)


def _paged(x, weight, bias, y, taps, slots, lens, offsets, singles, silu, first_sequence: int = 0) -> None:
    (tokens, channels), sequences = x.shape, slots.shape[0]
    count = sequences - first_sequence
    block = min(1024 if count >= 64 else 256, next_power_of_2(max(channels, 16)))
    with on(x):
        if singles < sequences:
            _launch(x, weight, bias, y, offsets, taps, slots, lens, silu, first_row=singles)
        _step_kernel[count, cdiv(channels, block)](
            x, weight, weight if bias is None else bias, y, offsets, taps, slots, lens, tokens, taps.shape[0],
            first_sequence, singles, x.stride(0), taps.stride(0), D=channels, W=weight.shape[1], RING=taps.shape[1],
            BIAS=bias is not None, SILU=silu, PACKED=_packed(weight), BLOCK=block, num_warps=4 if block > 256 else 1,
            **OPTIONS, **early(x),
        )  # fmt: skip


def varlen_bwd(dy, x, weight, bias, cu_seqlens, silu):
    (tokens, channels), width = x.shape, weight.shape[1]
    weight = weight.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return dx, torch.zeros_like(weight), None if bias is None else torch.zeros_like(bias)
    parts = torch.empty(cdiv(tokens, 64), (width + 1) * channels, dtype=torch.float32, device=x.device)
    block = min(next_power_of_2(max(channels, 16)), 512)
    with on(x):
        _bwd_kernel[parts.shape[0], cdiv(channels, block)](
            dy, x, weight, weight if bias is None else bias.contiguous(), dx, parts, cu_seqlens, tokens,
            cu_seqlens.shape[0] - 1, x.stride(0), D=channels, W=width, BIAS=bias is not None, SILU=silu, ROWS=64,
            BLOCK=block, SEQUENCES=SEQUENCES, num_warps=4, **OPTIONS,
        )  # fmt: skip
        sums = sum_rows(parts, torch.float32).view(width + 1, channels)
    return dx, sums[:width].t().to(weight.dtype).contiguous(), None if bias is None else sums[width].to(bias.dtype)
