"""A norm's backward in one pass: of each row dx, and of a block of rows its share of dweight, from one reading of x and
dy. Candidates for the two kernels of triton.py, with their sums in their order; used where they are admitted.

dweight adds a row's product to its neighbour's first. Such rows lie in one thread, in registers side by side: a product
that lies in another thread costs a shuffle or a way through shared memory, and a kernel that pays it for all of them
took four times as long as its reading. What is left for the threads to add among themselves is one value of several.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._core.triton import OPTIONS, cdiv, chunk, on, tree_sum

WIDEST = 4096  # a program holds whole rows, a few at a time
BLOCK_OF_ROWS = 64  # that triton.py sums in one tree, and sum_rows as many such blocks in the next
VECTOR = 8  # elements side by side that a thread reads at once
STEPS = 16  # the most that the kernel has places for


class Tile(NamedTuple):
    """A program takes STEPS times HIGH * APART rows: its threads hold HIGH neighbours each, and APART such groups lie
    beside each other."""

    BLOCK: int
    HIGH: int
    APART: int
    STEPS: int
    num_warps: int

    @property
    def rows(self) -> int:
        return self.HIGH * self.APART * self.STEPS


def tile_of(n: int, rows: int) -> Tile:
    """Of so many rows, a power of two of 64 at most; of fewer where that would be too many steps."""
    columns = chunk(n, WIDEST)
    high = 2 if columns > 2048 else 4
    warps = 8 if columns <= 128 else min(max(columns // 256, 4), 16)
    apart = min(max(32 * warps * VECTOR // columns, 1), rows // high)
    return Tile(columns, high, apart, min(rows // (high * apart), STEPS), warps)


@triton.jit
def _pairs_of_rows(x):
    """(R, N) fp32 -> (1, N), R a power of two."""
    # order: neighbours are added pairwise, log2(R) times
    for _ in tl.static_range(10):
        if x.shape[0] > 1:
            x = tl.sum(tl.reshape(x, [x.shape[0] // 2, 2, x.shape[1]]), axis=1)
    return x


@triton.jit(do_not_specialize=["rows"])
def _bwd_kernel(
    dy, dnew_residual, x, weight, rstd, dx, parts, rows, RESIDUAL: tl.constexpr, GEMMA: tl.constexpr,
    N: tl.constexpr, BLOCK: tl.constexpr, HIGH: tl.constexpr, APART: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    column, i = tl.arange(0, BLOCK), tl.arange(0, HIGH * APART)
    exists = (column < N)[None, :]
    w = tl.load(weight + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    if GEMMA:
        w = 1.0 + w
    row = (part * (HIGH * APART * STEPS) + i % APART * (HIGH * STEPS) + i // APART)[:, None]
    total = tl.zeros([1, APART * BLOCK], tl.float32)
    one, two, four, eight = total, total, total, total
    for step in range(STEPS):
        at, inside = row * N + column[None, :], (row < rows) & exists
        up = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        h = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row, mask=row < rows, other=0.0)
        g = up * w
        normed = h * scale
        mean = tl.div_rn(tree_sum(tl.fma(g, normed, tl.zeros([HIGH * APART, BLOCK], tl.float32))), float(N))
        out = scale * (g - normed * mean)
        if RESIDUAL:
            out += tl.load(dnew_residual + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at, out.to(dx.dtype.element_ty), mask=inside)
        if not GEMMA:
            normed = normed.to(x.dtype.element_ty).to(tl.float32)
        total = _pairs_of_rows(tl.reshape(up * normed, [HIGH, APART * BLOCK]))
        row += HIGH
        # order: neighbours of steps are added pairwise too. One that has no second yet waits in `one`, a pair of them
        # in `two`, and so on; in the last step each finds its own
        if STEPS > 1:
            before = one
            one = tl.where(step & 1 == 0, total, one)
            total = before + total
        if STEPS > 2:
            before = two
            two = tl.where(step & 3 == 1, total, two)
            total = before + total
        if STEPS > 4:
            before = four
            four = tl.where(step & 7 == 3, total, four)
            total = before + total
        if STEPS > 8:
            before = eight
            eight = tl.where(step & 15 == 7, total, eight)
            total = before + total
    total = tl.reshape(_pairs_of_rows(tl.reshape(total, [APART, BLOCK])), [BLOCK])
    tl.store(parts + part * N + column, total, mask=column < N)


@triton.jit(do_not_specialize=["count"])
def _join_kernel(parts, y, count, N: tl.constexpr, COLUMNS: tl.constexpr, HIGH: tl.constexpr, APART: tl.constexpr):
    group = tl.program_id(0).to(tl.int64)
    column, i = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, HIGH * APART)
    row = (group * (HIGH * APART) + i % APART * HIGH + i // APART)[:, None]
    inside = (row < count) & (column < N)[None, :]
    v = tl.load(parts + row * N + column[None, :], mask=inside, other=0.0)
    total = _pairs_of_rows(tl.reshape(v, [HIGH, APART * COLUMNS]))
    total = tl.reshape(_pairs_of_rows(tl.reshape(total, [APART, COLUMNS])), [COLUMNS])
    tl.store(y + group * N + column, total.to(y.dtype.element_ty), mask=column < N)


def _join(parts: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """The sum of parts of so many rows each, with the bits that sum_rows has of parts of BLOCK_OF_ROWS."""
    together, n = BLOCK_OF_ROWS * BLOCK_OF_ROWS // rows, parts.shape[1]
    while True:
        groups = cdiv(parts.shape[0], together)
        y = torch.empty(groups, n, dtype=torch.float32 if groups > 1 else dtype, device=parts.device)
        _join_kernel[(groups, cdiv(n, 32))](
            parts, y, parts.shape[0], N=n, COLUMNS=32, HIGH=together // 16, APART=16, num_warps=4, **OPTIONS
        )
        if groups == 1:
            return y[0]
        parts, together = y, BLOCK_OF_ROWS


def rmsnorm_bwd(
    dy: Tensor, dnew_residual: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor, gemma: bool, tile: Tile
) -> tuple[Tensor, Tensor]:
    """dx and dweight of one row or more, all contiguous."""
    (count, n), dx = x.shape, torch.empty_like(x)
    parts = torch.empty(cdiv(count, tile.rows), n, dtype=torch.float32, device=x.device)
    with on(x):
        _bwd_kernel[(parts.shape[0],)](
            dy, dy if dnew_residual is None else dnew_residual, x, weight, rstd, dx, parts, count,
            RESIDUAL=dnew_residual is not None, GEMMA=gemma, N=n, **tile._asdict(), **OPTIONS,
        )  # fmt: skip
        return dx, _join(parts, tile.rows, weight.dtype)
