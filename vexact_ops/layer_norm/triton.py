"""The Triton kernels. A program holds whole rows; rows wider than WIDEST are read three times, block by block."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._core.triton import OPTIONS, begin_beside, cdiv, chunk, early, on, sum_rows, tree_sum

WIDEST = 16384


@functools.cache
def _tile(n: int) -> dict:
    """Rows and columns of a program, from n alone."""
    columns = chunk(n, WIDEST)
    return {"ROWS": max(1, 2048 // columns), "BLOCK": columns, "num_warps": min(max(columns // 512, 4), 16), **OPTIONS}


@triton.jit
def _load(x, row, stride, start, live, N: tl.constexpr, BLOCK: tl.constexpr):
    column = start + tl.arange(0, BLOCK)[None, :]
    return tl.load(x + row[:, None] * stride + column, mask=live & (column < N), other=0.0).to(tl.float32)


@triton.jit
def _store(y, value, row, start, live, N: tl.constexpr, BLOCK: tl.constexpr):
    column = start + tl.arange(0, BLOCK)[None, :]
    tl.store(y + row[:, None] * N + column, value.to(y.dtype.element_ty), mask=live & (column < N))


@triton.jit
def _parameter(p, start, N: tl.constexpr, BLOCK: tl.constexpr):
    column = start + tl.arange(0, BLOCK)
    return tl.load(p + column, mask=column < N, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _summed(
    x, residual, row, x_stride, residual_stride, start, live,
    RESIDUAL: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    h = _load(x, row, x_stride, start, live, N, BLOCK)
    if RESIDUAL:
        h += _load(residual, row, residual_stride, start, live, N, BLOCK)
        h = h.to(x.dtype.element_ty).to(tl.float32)
    return h


@triton.jit(do_not_specialize=["rows"])
def _fwd_kernel(
    x, weight, bias, residual, y, new_residual, mean, rstd, rows, x_stride, residual_stride, eps,
    RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin_beside(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = (row < rows)[:, None]
    lanes = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.static_range(0, N, BLOCK):
        h = _summed(x, residual, row, x_stride, residual_stride, start, live, RESIDUAL, N, BLOCK)
        if RESIDUAL:
            _store(new_residual, h, row, start, live, N, BLOCK)
        lanes += h  # order: blocks of columns are added lane by lane, ascending; the lanes in a tree
    middle = tl.div_rn(tree_sum(lanes), float(N))
    lanes = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.static_range(0, N, BLOCK):
        if N > BLOCK:
            h = _summed(x, residual, row, x_stride, residual_stride, start, live, RESIDUAL, N, BLOCK)
        column = start + tl.arange(0, BLOCK)[None, :]
        off = tl.where(column < N, h - middle, 0.0)
        lanes += off * off  # order: as above
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tree_sum(lanes), float(N)) + eps))
    tl.store(mean + row[:, None], middle, mask=live)
    tl.store(rstd + row[:, None], scale, mask=live)
    for start in tl.static_range(0, N, BLOCK):
        if N > BLOCK:
            h = _summed(x, residual, row, x_stride, residual_stride, start, live, RESIDUAL, N, BLOCK)
        out = (h - middle) * scale
        if WEIGHT:
            out = out * _parameter(weight, start, N, BLOCK)
        if BIAS:
            out = out + _parameter(bias, start, N, BLOCK)
        _store(y, out, row, start, live, N, BLOCK)


@triton.jit
def _to_normed(dy, weight, row, start, live, WEIGHT: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    g = _load(dy, row, N, start, live, N, BLOCK)
    if WEIGHT:
        g = g * _parameter(weight, start, N, BLOCK)
    return g


@triton.jit(do_not_specialize=["rows"])
def _dx_kernel(
    dy, dnew_residual, x, weight, mean, rstd, dx, rows,
    RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = (row < rows)[:, None]
    middle = tl.load(mean + row[:, None], mask=live, other=0.0)
    scale = tl.load(rstd + row[:, None], mask=live, other=0.0)
    plain, products = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.static_range(0, N, BLOCK):
        g = _to_normed(dy, weight, row, start, live, WEIGHT, N, BLOCK)
        normed = (_load(x, row, N, start, live, N, BLOCK) - middle) * scale
        plain += g  # order: blocks of columns lane by lane, ascending; the lanes in a tree; so the products
        products = tl.fma(g, normed, products)
    even = tl.div_rn(tree_sum(plain), float(N))
    along = tl.div_rn(tree_sum(products), float(N))
    for start in tl.static_range(0, N, BLOCK):
        if N > BLOCK:
            g = _to_normed(dy, weight, row, start, live, WEIGHT, N, BLOCK)
            normed = (_load(x, row, N, start, live, N, BLOCK) - middle) * scale
        out = scale * ((g - even) - normed * along)
        if RESIDUAL:
            out += _load(dnew_residual, row, N, start, live, N, BLOCK)
        _store(dx, out, row, start, live, N, BLOCK)


@triton.jit(do_not_specialize=["rows"])
def _dweight_kernel(dy, x, mean, rstd, parts, rows, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    part = tl.program_id(0).to(tl.int64)
    row = part * ROWS + tl.arange(0, ROWS)[None, :]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    inside = (row < rows) & (column < N)
    off = tl.load(x + row * N + column, mask=inside, other=0.0).to(tl.float32)
    off = off - tl.load(mean + row, mask=row < rows, other=0.0)
    normed = off * tl.load(rstd + row, mask=row < rows, other=0.0)
    g = tl.load(dy + row * N + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(parts + part * N + column, tree_sum(g * normed), mask=column < N)  # order: sum_rows says the rest


def layer_norm_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    y: Tensor,
    new_residual: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
) -> None:
    rows, n = x.shape
    tile = _tile(n)
    if rows:
        with on(x):
            _fwd_kernel[(cdiv(rows, tile["ROWS"]),)](
                x, *(x if t is None else t for t in (weight, bias, residual)), y,
                y if new_residual is None else new_residual, mean, rstd, rows, x.stride(0),
                0 if residual is None else residual.stride(0), eps,
                RESIDUAL=residual is not None, WEIGHT=weight is not None, BIAS=bias is not None, N=n, **tile,
                **early(x),
            )  # fmt: skip


def layer_norm_bwd(
    dy: Tensor,
    dnew_residual: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dx: Tensor,
    dweight: Tensor | None,
    dbias: Tensor | None,
) -> None:
    rows, n = x.shape
    if rows == 0:
        for grad in (dweight, dbias):
            if grad is not None:
                grad.zero_()
        return
    tile = _tile(n)
    with on(x):
        _dx_kernel[(cdiv(rows, tile["ROWS"]),)](
            dy, dy if dnew_residual is None else dnew_residual, x, x if weight is None else weight, mean, rstd, dx,
            rows, RESIDUAL=dnew_residual is not None, WEIGHT=weight is not None, N=n, **tile,
        )  # fmt: skip
        if dweight is not None:
            parts = torch.empty(cdiv(rows, 64), n, dtype=torch.float32, device=x.device)
            _dweight_kernel[(parts.shape[0], cdiv(n, 64))](
                dy, x, mean, rstd, parts, rows, N=n, ROWS=64, COLUMNS=64, num_warps=4, **OPTIONS
            )
            dweight.copy_(sum_rows(parts, dweight.dtype))
    if dbias is not None:
        dbias.copy_(sum_rows(dy, dbias.dtype))
