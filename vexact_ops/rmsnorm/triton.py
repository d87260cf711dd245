"""The Triton kernels. A program holds whole rows; rows wider than WIDEST are read twice, block by block."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._core.triton import OPTIONS, begin_beside, cdiv, chunk, early, on, sum_rows, tree_sum
from ..silu_mul.triton import gate_slope, sigmoid

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
def _weight(weight, start, GEMMA: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    column = start + tl.arange(0, BLOCK)
    w = tl.load(weight + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    if GEMMA:
        w = 1.0 + w
    return w


@triton.jit(do_not_specialize=["rows"])
def _fwd_kernel(
    x, weight, residual, y, new_residual, rstd, rows, x_stride, residual_stride, eps,
    RESIDUAL: tl.constexpr, GEMMA: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin_beside(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = (row < rows)[:, None]
    lanes = tl.zeros([ROWS, BLOCK], tl.float32)
    w = _weight(weight, 0, GEMMA, N, BLOCK)  # asked for with the row: behind the sum it would be waited for again
    for start in tl.static_range(0, N, BLOCK):
        h = _load(x, row, x_stride, start, live, N, BLOCK)
        if RESIDUAL:
            h += _load(residual, row, residual_stride, start, live, N, BLOCK)
            h = h.to(x.dtype.element_ty).to(tl.float32)
            _store(new_residual, h, row, start, live, N, BLOCK)
        lanes += h * h  # order: blocks of columns are added lane by lane, ascending; the lanes in a tree
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tree_sum(lanes), float(N)) + eps))
    tl.store(rstd + row[:, None], scale, mask=live)
    for start in tl.static_range(0, N, BLOCK):
        if N > BLOCK:
            h = _load(x, row, x_stride, start, live, N, BLOCK)
            if RESIDUAL:
                h += _load(residual, row, residual_stride, start, live, N, BLOCK)
                h = h.to(x.dtype.element_ty).to(tl.float32)
            w = _weight(weight, start, GEMMA, N, BLOCK)
        normed = h * scale
        if not GEMMA:
            normed = normed.to(x.dtype.element_ty).to(tl.float32)
        _store(y, normed * w, row, start, live, N, BLOCK)


@triton.jit(do_not_specialize=["rows"])
def _dx_kernel(
    dy, dnew_residual, x, weight, rstd, dx, rows,
    RESIDUAL: tl.constexpr, GEMMA: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = (row < rows)[:, None]
    scale = tl.load(rstd + row[:, None], mask=live, other=0.0)
    lanes = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.static_range(0, N, BLOCK):
        g = _load(dy, row, N, start, live, N, BLOCK) * _weight(weight, start, GEMMA, N, BLOCK)
        normed = _load(x, row, N, start, live, N, BLOCK) * scale
        lanes = tl.fma(g, normed, lanes)  # order: blocks of columns lane by lane, ascending; the lanes in a tree
    mean = tl.div_rn(tree_sum(lanes), float(N))
    for start in tl.static_range(0, N, BLOCK):
        if N > BLOCK:
            g = _load(dy, row, N, start, live, N, BLOCK) * _weight(weight, start, GEMMA, N, BLOCK)
            normed = _load(x, row, N, start, live, N, BLOCK) * scale
        out = scale * (g - normed * mean)
        if RESIDUAL:
            out += _load(dnew_residual, row, N, start, live, N, BLOCK)
        _store(dx, out, row, start, live, N, BLOCK)


@triton.jit(do_not_specialize=["rows"])
def _dweight_kernel(
    dy, x, rstd, parts, rows, GEMMA: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    part = tl.program_id(0).to(tl.int64)
    row = part * ROWS + tl.arange(0, ROWS)[None, :]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    inside = (row < rows) & (column < N)
    normed = tl.load(x + row * N + column, mask=inside, other=0.0).to(tl.float32)
    normed = normed * tl.load(rstd + row, mask=row < rows, other=0.0)
    if not GEMMA:
        normed = normed.to(x.dtype.element_ty).to(tl.float32)
    g = tl.load(dy + row * N + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(parts + part * N + column, tree_sum(g * normed), mask=column < N)  # order: sum_rows says the rest


def rmsnorm_fwd(x: Tensor, weight: Tensor, residual: Tensor | None, eps: float, gemma: bool):
    rows, n = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    new_residual = torch.empty(x.shape if residual is not None else 0, dtype=x.dtype, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    tile = _tile(n)
    if rows:
        with on(x):
            _fwd_kernel[(cdiv(rows, tile["ROWS"]),)](
                x, weight, x if residual is None else residual, y, new_residual, rstd, rows, x.stride(0),
                0 if residual is None else residual.stride(0), eps,
                RESIDUAL=residual is not None, GEMMA=gemma, N=n, **tile, **early(x),
            )  # fmt: skip
    return y, new_residual, rstd


def rmsnorm_bwd(dy: Tensor, dnew_residual: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor, gemma: bool):
    rows, n = x.shape
    dx = torch.empty_like(x)
    if rows == 0:
        return dx, torch.zeros_like(weight)
    tile = _tile(n)
    parts = torch.empty(cdiv(rows, 64), n, dtype=torch.float32, device=x.device)
    with on(x):
        _dx_kernel[(cdiv(rows, tile["ROWS"]),)](
            dy, dy if dnew_residual is None else dnew_residual, x, weight, rstd, dx, rows,
            RESIDUAL=dnew_residual is not None, GEMMA=gemma, N=n, **tile,
        )  # fmt: skip
        _dweight_kernel[(parts.shape[0], cdiv(n, 64))](
            dy, x, rstd, parts, rows, GEMMA=gemma, N=n, ROWS=64, COLUMNS=64, num_warps=4, **OPTIONS
        )
    return dx, sum_rows(parts, weight.dtype)


@triton.jit
def _silu(g):
    s, _ = sigmoid(g, False)
    return g * s


@triton.jit(do_not_specialize=["rows"])
def _gated_fwd_kernel(
    x, gate, weight, y, rstd, rows, x_stride, gate_stride, eps,
    N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin_beside(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = (row < rows)[:, None]
    lanes = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.static_range(0, N, BLOCK):
        h = _load(x, row, x_stride, start, live, N, BLOCK)
        lanes += h * h  # order: blocks of columns are added lane by lane, ascending; the lanes in a tree
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tree_sum(lanes), float(N)) + eps))
    tl.store(rstd + row[:, None], scale, mask=live)
    for start in tl.static_range(0, N, BLOCK):
        if N > BLOCK:
            h = _load(x, row, x_stride, start, live, N, BLOCK)
        normed = (h * scale).to(x.dtype.element_ty).to(tl.float32) * _weight(weight, start, False, N, BLOCK)
        g = _load(gate, row, gate_stride, start, live, N, BLOCK)
        _store(y, normed.to(x.dtype.element_ty).to(tl.float32) * _silu(g), row, start, live, N, BLOCK)


@triton.jit(do_not_specialize=["rows"])
def _gated_bwd_kernel(
    dy, x, gate, weight, rstd, dx, dgate, rows, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = (row < rows)[:, None]
    scale = tl.load(rstd + row[:, None], mask=live, other=0.0)
    lanes = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.static_range(0, N, BLOCK):
        d = _load(dy, row, N, start, live, N, BLOCK) * _silu(_load(gate, row, N, start, live, N, BLOCK))
        d = d * _weight(weight, start, False, N, BLOCK)
        lanes = tl.fma(d, _load(x, row, N, start, live, N, BLOCK) * scale, lanes)  # order: as in _dx_kernel
    mean = tl.div_rn(tree_sum(lanes), float(N))
    for start in tl.static_range(0, N, BLOCK):
        up, g = _load(dy, row, N, start, live, N, BLOCK), _load(gate, row, N, start, live, N, BLOCK)
        normed, w = _load(x, row, N, start, live, N, BLOCK) * scale, _weight(weight, start, False, N, BLOCK)
        s, rest = sigmoid(g, False)
        weighted = (normed.to(x.dtype.element_ty).to(tl.float32) * w).to(x.dtype.element_ty).to(tl.float32)
        _store(dgate, (up * weighted) * gate_slope(g, s, rest, False), row, start, live, N, BLOCK)
        _store(dx, scale * ((up * (g * s)) * w - normed * mean), row, start, live, N, BLOCK)


@triton.jit(do_not_specialize=["rows"])
def _gated_dweight_kernel(dy, x, gate, rstd, parts, rows, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    part = tl.program_id(0).to(tl.int64)
    row = part * ROWS + tl.arange(0, ROWS)[None, :]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    inside = (row < rows) & (column < N)
    normed = tl.load(x + row * N + column, mask=inside, other=0.0).to(tl.float32)
    normed = normed * tl.load(rstd + row, mask=row < rows, other=0.0)
    normed = normed.to(x.dtype.element_ty).to(tl.float32)
    g = _silu(tl.load(gate + row * N + column, mask=inside, other=0.0).to(tl.float32))
    d = tl.load(dy + row * N + column, mask=inside, other=0.0).to(tl.float32) * g
    tl.store(parts + part * N + column, tree_sum(d * normed), mask=column < N)  # order: sum_rows says the rest


def rmsnorm_gated_fwd(x: Tensor, gate: Tensor, weight: Tensor, eps: float, y: Tensor, rstd: Tensor) -> None:
    rows, n = x.shape
    tile = _tile(n)
    if rows:
        with on(x):
            _gated_fwd_kernel[(cdiv(rows, tile["ROWS"]),)](
                x, gate, weight, y, rstd, rows, x.stride(0), gate.stride(0), eps, N=n, **tile, **early(x)
            )


def rmsnorm_gated_bwd(dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, rstd: Tensor):
    (rows, n), dx, dgate = x.shape, torch.empty_like(x), torch.empty_like(gate)
    if rows == 0:
        return dx, dgate, torch.zeros_like(weight)
    tile = _tile(n)
    parts = torch.empty(cdiv(rows, 64), n, dtype=torch.float32, device=x.device)
    with on(x):
        _gated_bwd_kernel[(cdiv(rows, tile["ROWS"]),)](dy, x, gate, weight, rstd, dx, dgate, rows, N=n, **tile)
        _gated_dweight_kernel[(parts.shape[0], cdiv(n, 64))](
            dy, x, gate, rstd, parts, rows, N=n, ROWS=64, COLUMNS=64, num_warps=4, **OPTIONS
        )
    return dx, dgate, sum_rows(parts, weight.dtype)
