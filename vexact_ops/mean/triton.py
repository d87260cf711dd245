"""The Triton kernel: blocks of a row are summed in a tree of pairs, and so are their sums, until one is left."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._core.triton import OPTIONS, cdiv, chunk, on, tree_sum

WIDEST = 8192


@triton.jit(do_not_specialize=["rows"])
def _sum_kernel(x, y, rows, n, stride, y_stride, divisor, LAST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    part = tl.program_id(1).to(tl.int64)
    column = part * BLOCK + tl.arange(0, BLOCK)[None, :]
    v = tl.load(x + row * stride + column, mask=(row < rows) & (column < n), other=0.0).to(tl.float32)
    total = tree_sum(v)  # order: neighbours pairwise within a block; then the blocks' sums alike
    if LAST:
        total = tl.div_rn(total, divisor)
    tl.store(y + row * y_stride + part, total.to(y.dtype.element_ty), mask=row < rows)


def mean_fwd(x: Tensor, divisor: float) -> Tensor:
    (rows, n), dtype = x.shape, x.dtype
    if rows == 0 or n == 0:
        return torch.full((rows,), 0.0 / divisor if divisor else float("nan"), dtype=dtype, device=x.device)
    with on(x):
        while True:
            columns = chunk(n, WIDEST)
            parts, height = cdiv(n, columns), max(1, 2048 // columns)
            y = torch.empty(rows, parts, dtype=dtype if parts == 1 else torch.float32, device=x.device)
            _sum_kernel[(cdiv(rows, height), parts)](
                x, y, rows, n, x.stride(0), parts, divisor, LAST=parts == 1, ROWS=height, BLOCK=columns,
                num_warps=4, **OPTIONS,
            )  # fmt: skip
            if parts == 1:
                return y[:, 0]
            x, n = y, parts


def mean_bwd(dy: Tensor, divisor: float) -> Tensor:
    by = torch.full(
        (1,), divisor, dtype=torch.float32, device=dy.device
    )  # a tensor: torch multiplies with 1 / a number
    return (dy.float() / by).to(dy.dtype)
