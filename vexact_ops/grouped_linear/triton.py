"""The Triton kernels: linear's tile and linear's loop over k, a tile of rows for one expert at a time.

Which tile belongs to which expert is found by the tiles themselves, from the offsets, and the grid is the most tiles
that any spread of the rows can need: nothing waits for the offsets' values, and one CUDA graph serves every spread.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .._core.triton import OPTIONS, cdiv, next_power_of_2, on
from ..linear.triton import TILES, accumulate


class Strides(NamedTuple):
    a_row: int
    b_expert: int
    b_row: int
    b_col: int


@triton.jit
def tile_rows(offsets, tile, R, E, BM: tl.constexpr, EP: tl.constexpr):
    """The expert of a tile (E: the rows that are nobody's; above: no tile), the tile's first row and its expert's end.

    Offsets out of range never lead out of 0 .. R."""
    e = tl.arange(0, EP)
    begin = tl.load(offsets + e, mask=(e > 0) & (e <= E), other=0)
    end = tl.load(offsets + e + 1, mask=e < E, other=0)
    begin = tl.minimum(tl.maximum(begin, 0), R)
    end = tl.where(e == E, R, tl.minimum(tl.maximum(end, 0), R))
    tiles = tl.where(e <= E, tl.cdiv(tl.maximum(end - begin, 0), BM), 0)
    last = tl.cumsum(tiles, 0)
    expert = tl.sum((last <= tile).to(tl.int32), 0)
    mine = e == expert
    row = tl.sum(tl.where(mine, begin + (tile - last + tiles) * BM, 0), 0)
    return expert, row, tl.sum(tl.where(mine, end, 0), 0)


@triton.jit(do_not_specialize=["R", "tiles_m"], do_not_specialize_on_alignment=["offsets", "order"])
def _rows_kernel(
    a, b, c, offsets, order, R, N, K, E, top_k, tiles_m, strides,
    GATHER: tl.constexpr, EVEN_K: tl.constexpr, EP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    # eight tiles of rows at a time, so that what they share stays in the cache
    tiles_n = tl.cdiv(N, BN)
    group = tl.program_id(0) // (8 * tiles_n)
    rows = min(tiles_m - group * 8, 8)
    within = tl.program_id(0) % (8 * tiles_n)
    expert, row, end = tile_rows(offsets, group * 8 + within % rows, R, E, BM, EP)
    if expert > E:
        return
    m = (row + tl.arange(0, BM)).to(tl.int64)
    n = (within // rows * BN + tl.arange(0, BN)).to(tl.int64)
    if GATHER:  # what is behind the end must not be loaded: R is a row behind all
        source = tl.where(m < end, tl.load(order + m, mask=m < end, other=0) // top_k, R).to(tl.int64)
        M = R
    else:
        source = m
        M = end
    depth = tl.where(expert < E, K, 0)
    acc = tl.zeros([BM, BN], tl.float32)
    weight = b + tl.minimum(expert, E - 1).to(tl.int64) * strides.b_expert
    acc = accumulate(
        acc, a, weight, source, n, M, N, depth, strides.a_row, 1, strides.b_row, strides.b_col, False, EVEN_K, BK
    )
    inside = (m < end)[:, None] & (n < N)[None, :]
    tl.store(c + m[:, None] * N + n[None, :], acc.to(c.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["R"], do_not_specialize_on_alignment=["offsets"])
def _sums_kernel(
    a, b, c, offsets, order, R, M, N, top_k, a_row, b_row,
    GATHER_A: tl.constexpr, GATHER_B: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(N, BN)
    each = tl.cdiv(M, BM) * tiles_n
    expert = (tl.program_id(0) // each).to(tl.int64)
    tile = tl.program_id(0) % each
    m = (tile // tiles_n * BM + tl.arange(0, BM)).to(tl.int64)
    n = (tile % tiles_n * BN + tl.arange(0, BN)).to(tl.int64)
    # both ways: a loop that begins near 2^31 would look ahead to what wraps around
    begin = tl.minimum(tl.maximum(tl.load(offsets + expert, mask=expert > 0, other=0), 0), R)
    end = tl.minimum(tl.load(offsets + expert + 1), R)
    live_m, live_n = (m < M)[:, None], (n < N)[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(begin, end, BK):
        k = (start + tl.arange(0, BK)).to(tl.int64)
        a_k, b_k = k, k
        if GATHER_A or GATHER_B:
            token = (tl.load(order + k, mask=k < end, other=0) // top_k).to(tl.int64)
            if GATHER_A:
                a_k = token
            if GATHER_B:
                b_k = token
        x = tl.load(a + m[:, None] + a_k[None, :] * a_row, mask=live_m & (k < end)[None, :], other=0.0)
        y = tl.load(b + b_k[:, None] * b_row + n[None, :], mask=(k < end)[:, None] & live_n, other=0.0)
        acc = tl.dot(x, y, acc, input_precision="ieee")  # order: rows ascending, one accumulator; a short tail is zeros
    at = c + expert * M * N + m[:, None] * N + n[None, :]
    tl.store(at, acc.to(c.dtype.element_ty), mask=live_m & live_n)


def _rows(a: Tensor, b: Tensor, offsets: Tensor, order: Tensor | None, top_k: int) -> Tensor:
    """a[row] @ b[e] with b (E, K, N) of any strides; with order, the i-th row is of a[order[i] // top_k]."""
    rows, (experts, depth, columns) = a.shape[0] if order is None else order.shape[0], b.shape
    out = a.new_empty(rows, columns)
    if out.numel() == 0:
        return out
    tile = TILES[a.element_size()]
    tiles = min(rows, rows // tile["BM"] + experts + 1)  # a group has at most one tile that is not full
    with on(a):
        _rows_kernel[(tiles * cdiv(columns, tile["BN"]),)](
            a, b, out, offsets, offsets if order is None else order, rows, columns, depth, experts, top_k, tiles,
            Strides(a.stride(0), *b.stride()), GATHER=order is not None, EVEN_K=depth % tile["BK"] == 0,
            EP=next_power_of_2(experts + 1), **tile, **OPTIONS,
        )  # fmt: skip
    return out


def grouped_linear_fwd(
    x: Tensor, weight: Tensor, offsets: Tensor, order: Tensor | None = None, top_k: int = 1
) -> Tensor:
    return _rows(x, weight.transpose(1, 2), offsets, order, top_k)


def grouped_linear_dx(
    dy: Tensor, weight: Tensor, offsets: Tensor, order: Tensor | None = None, top_k: int = 1
) -> Tensor:
    return _rows(dy, weight, offsets, order, top_k)


def grouped_linear_dweight(
    dy: Tensor, x: Tensor, offsets: Tensor, order: Tensor | None = None, top_k: int = 1, *, gathered: str = ""
) -> Tensor:
    """gathered: "dy" or "x" is read through order, as above."""
    experts, columns = offsets.shape[0] - 1, dy.shape[1]
    dweight = dy.new_empty(experts, columns, x.shape[1])
    if dweight.numel() == 0:
        return dweight
    tile = TILES[dy.element_size()]
    tiles = cdiv(columns, tile["BM"]) * cdiv(x.shape[1], tile["BN"])
    rows = dy.shape[0] if order is None else order.shape[0]
    with on(dy):
        _sums_kernel[(experts * tiles,)](
            dy, x, dweight, offsets, offsets if order is None else order, rows, columns, x.shape[1], top_k,
            dy.stride(0), x.stride(0), GATHER_A=gathered == "dy", GATHER_B=gathered == "x", **tile, **OPTIONS,
        )  # fmt: skip
    return dweight
