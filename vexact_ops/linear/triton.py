"""The Triton kernel: one tile per dtype, k ascending in one fp32 accumulator, for x @ w.T, dy @ w and dy.T @ x."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._core.triton import OPTIONS, cdiv, on, sum_rows

# The tile may not follow the number of rows, unless another one was proven equal for these sizes on this machine.
TILES = {
    2: {"BM": 128, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 4},
    4: {"BM": 64, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 2},
}


@triton.jit
def place(M, N, BM: tl.constexpr, BN: tl.constexpr):
    """The rows and columns of a program's tile: tiles of eight rows of tiles at a time, so that what they share stays
    in the cache."""
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    group = tl.program_id(0) // (8 * tiles_n)
    rows = min(tiles_m - group * 8, 8)
    within = tl.program_id(0) % (8 * tiles_n)
    m = (group * 8 + within % rows) * BM + tl.arange(0, BM)
    return m.to(tl.int64), (within // rows * BN + tl.arange(0, BN)).to(tl.int64)


@triton.jit
def accumulate(
    acc, a, b, m, n, M, N, K, a_row, a_col, b_row, b_col, WIDE: tl.constexpr, EVEN_K: tl.constexpr, BK: tl.constexpr
):
    """acc + a[m, :] @ b[:, n]: the order of linear, for every kernel that makes such products."""
    k = tl.arange(0, BK).to(tl.int64)
    a_at = a + m[:, None] * a_row + k[None, :] * a_col
    b_at = b + k[:, None] * b_row + n[None, :] * b_col
    live_m, live_n = (m < M)[:, None], (n < N)[None, :]
    a_step, b_step = tl.cast(a_col, tl.int64) * BK, tl.cast(b_row, tl.int64) * BK  # may pass 2^31
    for start in range(0, K, BK):
        if EVEN_K:
            x = tl.load(a_at, mask=live_m, other=0.0)
            y = tl.load(b_at, mask=live_n, other=0.0)
        else:
            x = tl.load(a_at, mask=live_m & (k < K - start)[None, :], other=0.0)
            y = tl.load(b_at, mask=(k < K - start)[:, None] & live_n, other=0.0)
        if WIDE:
            x, y = x.to(tl.float32), y.to(tl.float32)
        acc = tl.dot(x, y, acc, input_precision="ieee")  # order: k ascending, one accumulator; a short tail is zeros
        a_at += a_step
        b_at += b_step
    return acc


@triton.jit(do_not_specialize=["M"])
def _matmul_kernel(
    a, b, c, bias, M, N, K, a_row, a_col, b_row, b_col, c_row,
    BIAS: tl.constexpr, CONTINUE: tl.constexpr, WIDE: tl.constexpr, EVEN_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    m, n = place(M, N, BM, BN)
    c_at = c + m[:, None] * c_row + n[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    if CONTINUE:
        acc = tl.load(c_at, mask=inside, other=0.0)
    else:
        acc = tl.zeros([BM, BN], tl.float32)
    acc = accumulate(acc, a, b, m, n, M, N, K, a_row, a_col, b_row, b_col, WIDE, EVEN_K, BK)
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(c_at, acc.to(c.dtype.element_ty), mask=inside)


# Told that K is 1, the compiler makes one fma of the product and the bias, which rounds once instead of twice.
_one_deep_kernel = triton.jit(do_not_specialize=["M", "K"])(_matmul_kernel.fn)


def matmul(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None, *, resume: bool = False, tile=None) -> Tensor:
    """out (M, N) = a (M, K) @ b (K, N) + bias: any strides for a and b, contiguous rows for out.

    resume  start from the fp32 values in out instead of +0: a product cut along K has the bits of the whole one
    tile    another tile shape than the canonical one
    """
    (rows, depth), columns = a.shape, b.shape[1]
    if rows == 0 or columns == 0:
        return out
    tile = tile or TILES[max(a.element_size(), b.element_size())]
    kernel = _one_deep_kernel if depth == 1 else _matmul_kernel
    with on(a):
        kernel[(cdiv(rows, tile["BM"]) * cdiv(columns, tile["BN"]),)](
            a, b, out, a if bias is None else bias, rows, columns, depth, *a.stride(), *b.stride(), out.stride(0),
            BIAS=bias is not None, CONTINUE=resume, WIDE=a.dtype != b.dtype, EVEN_K=depth % tile["BK"] == 0,
            **tile, **OPTIONS,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["M"])
def _bmm_kernel(
    a, b, c, M, N, K, a_batch, a_row, a_col, b_batch, b_row, b_col, c_batch,
    WIDE: tl.constexpr, EVEN_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    m, n = place(M, N, BM, BN)
    a, b = a + batch * a_batch, b + batch * b_batch
    acc = tl.zeros([BM, BN], tl.float32)
    acc = accumulate(acc, a, b, m, n, M, N, K, a_row, a_col, b_row, b_col, WIDE, EVEN_K, BK)
    inside = (m < M)[:, None] & (n < N)[None, :]
    tl.store(c + batch * c_batch + m[:, None] * N + n[None, :], acc.to(c.dtype.element_ty), mask=inside)


def bmm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """(B, M, K) @ (B, K, N), any strides."""
    (batch, rows, depth), columns = a.shape, b.shape[2]
    out = a.new_empty(batch, rows, columns, dtype=out_dtype)
    if out.numel() == 0:
        return out
    tile = TILES[max(a.element_size(), b.element_size())]
    tiles = cdiv(rows, tile["BM"]) * cdiv(columns, tile["BN"])
    with on(a):
        for x, y, z in zip(*(t.split(65535) for t in (a, b, out))):  # what a grid takes in its second dimension
            _bmm_kernel[(tiles, x.shape[0])](
                x, y, z, rows, columns, depth, *x.stride(), *y.stride(), rows * columns,
                WIDE=a.dtype != b.dtype, EVEN_K=depth % tile["BK"] == 0, **tile, **OPTIONS,
            )  # fmt: skip
    return out


def _flat(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.view(math.prod(x.shape[:-1]), x.shape[-1])


def linear_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    x = _flat(x)
    return matmul(x, weight.t(), x.new_empty(x.shape[0], weight.shape[0], dtype=out_dtype), bias)


def linear_dx(dy: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    dy = _flat(dy)
    return matmul(dy, weight, dy.new_empty(dy.shape[0], weight.shape[1], dtype=dtype))


def linear_dweight(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    dy, x = _flat(dy), _flat(x)
    return matmul(dy.t(), x, dy.new_empty(dy.shape[1], x.shape[1], dtype=dtype))


def linear_dbias(dy: Tensor, dtype: torch.dtype) -> Tensor:
    return sum_rows(_flat(dy), dtype)
