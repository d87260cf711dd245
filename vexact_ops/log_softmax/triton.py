"""The one order of log-softmax on a GPU: log_softmax, linear_logprobs and sample take it from here.

z = x / temperature, one correctly rounded division. The row is cut into blocks of LSE_BLOCK logits; a block gives its
largest z and the sum of e^(z - largest). The blocks' sums are brought to the row's largest z and added. Both sums are
trees of pairs, so that blocks may be made and joined by any number of programs; of more than JOINED blocks (rows of
more than two million columns) so many make a tree each, and the trees' sums are added ascending. The result is kept as
two numbers, as on a CPU: the row's largest z and the log of the sum relative to it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._core.triton import OPTIONS, begin, cdiv, chunk, early, exp, exp_down, exp_term, log, on, tree_sum

LSE_BLOCK = 128
TILE = 32  # blocks that a program takes of a row
COLUMNS = 2048  # that a program writes of a row
JOINED = 1 << 14  # blocks whose sums make one tree

_LSE_BLOCK = tl.constexpr(LSE_BLOCK)


@triton.jit
def origin(largest):
    """What z is taken relative to: 0 where every z is -inf, lest -inf - -inf makes a NaN."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def reduce_blocks(z):
    """(B, LSE_BLOCK) of z, -inf where there is none -> (B, 1) largest, (B, 1) sum of e^(z - largest)."""
    largest = tl.max(z, axis=1, keep_dims=True) + 0.0  # -0 is the same number as 0; a NaN is passed over
    return largest, tree_sum(exp_term(z - origin(largest)))  # order: a tree of pairs


def joined(blocks: int) -> dict:
    """Launch options of a kernel that joins so many blocks."""
    return {"BLOCKS": chunk(blocks, JOINED), "MANY": blocks > JOINED}


@triton.jit
def load_blocks(at, start, blocks, BLOCKS: tl.constexpr, other: tl.constexpr):
    """(1, BLOCKS) of a row's numbers for its blocks, from `start` on; `other` where there is none."""
    number = start + tl.arange(0, BLOCKS)[None, :]
    return tl.load(at + number, mask=number < blocks, other=other)


@triton.jit
def largest_of(largest, blocks, BLOCKS: tl.constexpr, MANY: tl.constexpr):
    """The largest of a row's numbers (1, 1)."""
    top = tl.max(load_blocks(largest, 0, blocks, BLOCKS, float("-inf")), axis=1, keep_dims=True)
    if MANY:
        for start in range(BLOCKS, blocks, BLOCKS):
            part = tl.max(load_blocks(largest, start, blocks, BLOCKS, float("-inf")), axis=1, keep_dims=True)
            top = tl.maximum(top, part)  # a NaN is passed over
    return top


@triton.jit
def _relative(largest, total, top, start, blocks, BLOCKS: tl.constexpr):
    z = load_blocks(largest, start, blocks, BLOCKS, float("-inf"))
    return load_blocks(total, start, blocks, BLOCKS, 0.0) * exp_down(z - origin(top))


@triton.jit
def join_blocks(largest, total, blocks, BLOCKS: tl.constexpr, MANY: tl.constexpr):
    """Where a row's blocks have their numbers -> (1, 1) largest, (1, 1) sum relative to it."""
    top = largest_of(largest, blocks, BLOCKS, MANY)
    joined = tree_sum(_relative(largest, total, top, 0, blocks, BLOCKS))  # order: a tree of pairs over JOINED blocks
    if MANY:
        for start in range(BLOCKS, blocks, BLOCKS):  # order: the trees' sums ascending
            joined += tree_sum(_relative(largest, total, top, start, blocks, BLOCKS))
    return top, joined


@triton.jit
def sum_blocks(total, blocks, BLOCKS: tl.constexpr, MANY: tl.constexpr):
    """The sum (1, 1) of a row's numbers, in the order of join_blocks."""
    joined = tree_sum(load_blocks(total, 0, blocks, BLOCKS, 0.0))  # order: as join_blocks
    if MANY:
        for start in range(BLOCKS, blocks, BLOCKS):
            joined += tree_sum(load_blocks(total, start, blocks, BLOCKS, 0.0))
    return joined


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
def _join_kernel(parts, lse, blocks, BLOCKS: tl.constexpr, MANY: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    parts += row * 2 * blocks
    top, total = join_blocks(parts, parts + blocks, blocks, BLOCKS, MANY)
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
def _bwd_kernel(
    dy, x, lse, parts, dx, n, blocks, stride, BLOCKS: tl.constexpr, MANY: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    total = sum_blocks(parts + row * blocks, blocks, BLOCKS, MANY)
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
    blocks = cdiv(n, LSE_BLOCK)
    parts = torch.empty(rows, 2, blocks, dtype=torch.float32, device=x.device)
    options = {**OPTIONS, **early(x)}
    if rows:
        with on(x):
            _blocks_kernel[(rows, cdiv(blocks, TILE))](
                x, parts, n, blocks, x.stride(0), TILE=TILE, num_warps=4, **options
            )
            _join_kernel[(rows,)](parts, lse, blocks, **joined(blocks), num_warps=4, **options)
            _fwd_kernel[(rows, cdiv(n, COLUMNS))](x, lse, y, n, x.stride(0), COLUMNS=COLUMNS, num_warps=4, **options)
    return y, lse


def log_softmax_bwd(dy: Tensor, x: Tensor, lse: Tensor) -> Tensor:
    rows, n = x.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    blocks = cdiv(n, LSE_BLOCK)
    parts = torch.empty(rows, blocks, dtype=torch.float32, device=x.device)
    if rows:
        with on(x):
            _dy_blocks_kernel[(rows, cdiv(blocks, TILE))](dy, parts, n, blocks, TILE=TILE, num_warps=4, **OPTIONS)
            _bwd_kernel[(rows, cdiv(n, COLUMNS))](
                dy, x, lse, parts, dx, n, blocks, x.stride(0), COLUMNS=COLUMNS, **joined(blocks), num_warps=4, **OPTIONS
            )
    return dx
