"""What flash-attn-4's backward is given beside its tensors, made in one pass: candidates for flash-attn-4's own kernel
(its backward preprocess), whose sums these are, in its order; used where they are admitted.

Heads of a block of tokens follow each other in the grid, for their rows lie side by side in memory: flash-attn-4 takes
block after block of a sequence's one head, 256 bytes out of each few thousand.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .._core.triton import OPTIONS, begin, early, on, tree_sum

WIDTHS = (64, 128)  # of values: flash-attn-4 has a thread sum eight of a row, and others in other pieces
SEARCH = 64  # sequences that are looked at together, where a block's own is searched for
_LOG2_E = tl.constexpr(1.4426950408889634)


class Strides(NamedTuple):
    out_token: int
    out_head: int
    dout_token: int
    dout_head: int


@triton.jit
def _eight(x, ROWS: tl.constexpr, D: tl.constexpr):
    """(ROWS, D) -> of each piece of eight elements the first, the second, and so on: (ROWS, D / 8) each."""
    even, odd = tl.split(tl.reshape(x, [ROWS, D // 8, 2, 2, 2]))
    e0, e2 = tl.split(even)
    e1, e3 = tl.split(odd)
    x0, x4 = tl.split(e0)
    x2, x6 = tl.split(e2)
    x1, x5 = tl.split(e1)
    x3, x7 = tl.split(e3)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _add(total, a, b, FUSED: tl.constexpr):
    if FUSED:
        total = tl.fma(a, b, total)
    else:
        total = total + a * b
    return total


@triton.jit(do_not_specialize=["sequences", "padded", "heads"])
def _prepare_kernel(
    out, dout, lse, offsets, lse_2, dpsum, sums, strides, tokens, sequences, padded, heads,
    ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, FUSED: tl.constexpr, SEARCH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    block, head = tl.program_id(0) // heads, (tl.program_id(0) % heads).to(tl.int64)
    # Sequence b has its blocks of rows from offsets[b] // ROWS + b on.
    sequence = -1
    for start in range(0, sequences, SEARCH):
        b = start + tl.arange(0, SEARCH)
        first = tl.load(offsets + b, mask=b < sequences, other=0) // ROWS + b
        sequence += tl.sum(((b < sequences) & (first <= block)).to(tl.int32), axis=0)
    low = tl.load(offsets + sequence)
    row = (block - (low // ROWS + sequence)) * ROWS + tl.arange(0, ROWS)
    length = tl.load(offsets + sequence + 1) - low
    if (block - (low // ROWS + sequence)) * ROWS < length:
        live, token = row < length, (low + row).to(tl.int64)
        column = tl.arange(0, D)[None, :]
        a = tl.load(
            out + token[:, None] * strides.out_token + head * strides.out_head + column, mask=live[:, None], other=0.0
        )
        b = tl.load(
            dout + token[:, None] * strides.dout_token + head * strides.dout_head + column,
            mask=live[:, None],
            other=0.0,
        )
        natural = tl.load(lse + head * tokens + token, mask=live, other=float("inf"))
        a0, a1, a2, a3, a4, a5, a6, a7 = _eight(a.to(tl.float32), ROWS, D)
        b0, b1, b2, b3, b4, b5, b6, b7 = _eight(b.to(tl.float32), ROWS, D)
        # order: of each piece of eight columns ascending, from +0; then neighbours pairwise
        total = _add(tl.zeros([ROWS, D // 8], tl.float32), a0, b0, FUSED)
        total = _add(total, a1, b1, FUSED)
        total = _add(total, a2, b2, FUSED)
        total = _add(total, a3, b3, FUSED)
        total = _add(total, a4, b4, FUSED)
        total = _add(total, a5, b5, FUSED)
        total = _add(total, a6, b6, FUSED)
        total = tl.reshape(tree_sum(_add(total, a7, b7, FUSED)), [ROWS])
        at = head * padded + block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        tl.store(dpsum + at, total)
        tl.store(lse_2 + at, tl.where(natural == float("-inf"), 0.0, natural * _LOG2_E))
        at = (head * padded + block.to(tl.int64) * ROWS) * WIDTH
        for part in tl.static_range(0, WIDTH, 32):
            place = tl.arange(0, ROWS * 32)
            tl.store(sums + at + part * ROWS + place, tl.zeros([ROWS * 32], tl.float32))


def prepare(
    out: Tensor, dout: Tensor, lse: Tensor, cu_seqlens: Tensor, lse_2: Tensor, dpsum: Tensor, sums: Tensor, rows: int,
    fused: bool,
) -> None:  # fmt: skip
    """Writes, of each block of `rows` rows that a sequence has a row in (each sequence begins with a block of its own,
    where flash-attn-4 has it); other blocks stay as they are:

    dpsum     (Hq, P) fp32: the sum of out * dout over each row; 0 where a block is longer than its sequence
    lse_2     (Hq, P) fp32: lse in binary logarithms; 0 for -inf, and inf behind a sequence
    sums      (Hq, P * width) fp32: 0

    out, dout  (T, Hq, Dv), Dv of WIDTHS, contiguous but for tokens and heads; lse (Hq, T) fp32
    rows       a power of two
    fused      products and sums are fused, as a compiler may have done there
    """
    (tokens, heads, width), padded = out.shape, lse_2.shape[1]
    strides = Strides(*out.stride()[:2], *dout.stride()[:2])
    with on(out):
        _prepare_kernel[(padded // rows * heads,)](
            out, dout, lse, cu_seqlens, lse_2, dpsum, sums, strides, tokens, len(cu_seqlens) - 1, padded, heads,
            ROWS=rows, D=width, WIDTH=sums.shape[1] // padded, FUSED=fused, SEARCH=SEARCH, num_warps=4, **OPTIONS,
            **early(out),
        )  # fmt: skip
