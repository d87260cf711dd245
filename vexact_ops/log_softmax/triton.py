"""The one order of log-softmax on a GPU: log_softmax, linear_logprobs and sample take it from here.

z = x / temperature, one correctly rounded division. The row is cut into blocks of LSE_BLOCK logits; a block gives its
largest z and the sum of e^(z - largest). The blocks' sums are brought to the row's largest z and added. Both sums are
trees of pairs, so that blocks may be made and joined by any number of programs. The result is kept as two numbers, as
on a CPU: the row's largest z and the log of the sum relative to it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._core.triton import OPTIONS, begin, block, early, exp, exp_down, log, on, tree_sum

LSE_BLOCK = 128
TILE = 32  # blocks that a program takes of a row
COLUMNS = 2048  # that a program writes of a row

_LSE_BLOCK = tl.constexpr(LSE_BLOCK)


@triton.jit
def origin(largest):
    """What z is taken relative to: 0 where every z is -inf, lest -inf - -inf makes a NaN."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def reduce_blocks(z):
    """(B, LSE_BLOCK) of z, -inf where there is none -> (B, 1) largest, (B, 1) sum of e^(z - largest)."""
    largest = tl.max(z, axis=1, keep_dims=True) + 0.0  # -0 is the same number as 0; a NaN is passed over
    return largest, tree_sum(exp_down(z - origin(largest)))  # order: a tree of pairs


@triton.jit
def join_blocks(largest, total):
    """(1, B) of a row's blocks, -inf and 0 where there is none -> (1, 1) largest, (1, 1) sum relative to it."""
    top = tl.max(largest, axis=1, keep_dims=True)
    return top, tree_sum(total * exp_down(largest - origin(top)))  # order: a tree of pairs over the blocks


@triton.jit
def log_prob(z, largest, log_sum):
    return (z - largest) - log_sum


@triton.jit
def _blocks_kernel(x, parts, n, blocks, stride, TILE: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    column = at * _LSE_BLOCK + tl.arange(0, _LSE_BLOCK)[None, :]
    z = tl.load(x + row * stride + column, mask=column < n, other=float("-inf")).to(tl.float32)
    largest, total = reduce_blocks(z)
    parts += row * 2 * blocks
    tl.store(parts + at, largest, mask=at < blocks)
    tl.store(parts + blocks + at, total, mask=at < blocks)


@triton.jit
def _join_kernel(parts, lse, blocks, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCKS)[None, :]
    parts += row * 2 * blocks
    largest = tl.load(parts + at, mask=at < blocks, other=float("-inf"))
    total = tl.load(parts + blocks + at, mask=at < blocks, other=0.0)
    top, total = join_blocks(largest, total)
    one = tl.arange(0, 1)[None, :]
    tl.store(lse + 2 * row + one, top)
    tl.store(lse + 2 * row + 1 + one, log(total))


@triton.jit
def _fwd_kernel(x, lse, y, n, stride, COLUMNS: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    z = tl.load(x + row * stride + column, mask=column < n).to(tl.float32)
    out = log_prob(z, tl.load(lse + 2 * row), tl.load(lse + 2 * row + 1))
    tl.store(y + row * n + column, out.to(y.dtype.element_ty), mask=column < n)


@triton.jit
def _dy_blocks_kernel(dy, parts, n, blocks, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    column = at * _LSE_BLOCK + tl.arange(0, _LSE_BLOCK)[None, :]
    d = tl.load(dy + row * n + column, mask=column < n, other=0.0).to(tl.float32)
    tl.store(parts + row * blocks + at, tree_sum(d), mask=at < blocks)


@triton.jit
def _bwd_kernel(dy, x, lse, parts, dx, n, blocks, stride, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCKS)[None, :]
    total = tree_sum(tl.load(parts + row * blocks + at, mask=at < blocks, other=0.0))  # order: as the blocks'
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    z = tl.load(x + row * stride + column, mask=column < n, other=0.0).to(tl.float32)
    d = tl.load(dy + row * n + column, mask=column < n, other=0.0).to(tl.float32)
    p = exp(log_prob(z, tl.load(lse + 2 * row), tl.load(lse + 2 * row + 1)))
    out = tl.fma(p, tl.broadcast_to(total * -1.0, p.shape), d)
    tl.store(dx + row * n + column, out.to(dx.dtype.element_ty), mask=column < n)


def log_softmax_fwd(x: Tensor, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, n = x.shape
    y = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    lse = torch.empty(rows, 2, dtype=torch.float32, device=x.device)
    blocks = triton.cdiv(n, LSE_BLOCK)
    parts = torch.empty(rows, 2, blocks, dtype=torch.float32, device=x.device)
    options = {**OPTIONS, **early(x)}
    if rows:
        with on(x):
            _blocks_kernel[(rows, triton.cdiv(blocks, TILE))](
                x, parts, n, blocks, x.stride(0), TILE=TILE, num_warps=4, **options
            )
            _join_kernel[(rows,)](parts, lse, blocks, BLOCKS=block(blocks), num_warps=4, **options)
            _fwd_kernel[(rows, triton.cdiv(n, COLUMNS))](
                x, lse, y, n, x.stride(0), COLUMNS=COLUMNS, num_warps=4, **options
            )
    return y, lse


def log_softmax_bwd(dy: Tensor, x: Tensor, lse: Tensor) -> Tensor:
    rows, n = x.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    blocks = triton.cdiv(n, LSE_BLOCK)
    parts = torch.empty(rows, blocks, dtype=torch.float32, device=x.device)
    if rows:
        with on(x):
            _dy_blocks_kernel[(rows, triton.cdiv(blocks, TILE))](
                dy, parts, n, blocks, TILE=TILE, num_warps=4, **OPTIONS
            )
            _bwd_kernel[(rows, triton.cdiv(n, COLUMNS))](
                dy, x, lse, parts, dx, n, blocks, x.stride(0), BLOCKS=block(blocks), COLUMNS=COLUMNS,
                num_warps=4, **OPTIONS,
            )  # fmt: skip
    return dx
