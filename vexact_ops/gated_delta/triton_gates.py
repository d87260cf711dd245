"""The Triton kernels of delta_gates: the CPU kernels' arithmetic, operation for operation."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._core.triton import OPTIONS, begin_beside, block, cdiv, early, exp, exp_down, log, on, sum_rows, tree_sum
from ..silu_mul.triton import sigmoid


@triton.jit
def _softplus(x):
    q = exp_down(tl.abs(x) * -1.0)
    u = 1.0 + q
    up = u - 1.0
    low = tl.where(up > 0.0, log(u) * tl.div_rn(q, tl.where(up > 0.0, up, 1.0)), q)
    y = tl.where(x > 0.0, x, 0.0) + low
    return tl.where(x != x, x, tl.where(x > 20.0, x, y))


@triton.jit(do_not_specialize=["rows"])
def _fwd_kernel(
    a, b, a_log, dt_bias, g, beta, rows, a_stride, b_stride,
    H: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin_beside(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    head = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (head < H)
    x = tl.load(a + row * a_stride + head, mask=inside, other=0.0).to(tl.float32)
    x = x + tl.load(dt_bias + head, mask=head < H, other=0.0).to(tl.float32)
    rate = exp(tl.load(a_log + head, mask=head < H, other=0.0).to(tl.float32))
    tl.store(g + row * H + head, (rate * _softplus(x)) * -1.0, mask=inside)
    s, _ = sigmoid(tl.load(b + row * b_stride + head, mask=inside, other=0.0).to(tl.float32), False)
    s = s.to(b.dtype.element_ty)  # as a model rounds it, whatever it is stored as
    tl.store(beta + row * H + head, s.to(beta.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _bwd_kernel(
    dg, dbeta, a, b, a_log, dt_bias, da, db, parts, rows, a_stride, b_stride,
    H: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """parts (blocks of rows, 2, H): of a_log and of dt_bias."""
    part = tl.program_id(0).to(tl.int64)
    row, head = part * ROWS + tl.arange(0, ROWS)[None, :], tl.arange(0, BLOCK)[:, None]
    inside = (row < rows) & (head < H)
    x = tl.load(a + row * a_stride + head, mask=inside, other=0.0).to(tl.float32)
    x = x + tl.load(dt_bias + head, mask=head < H, other=0.0).to(tl.float32)
    rate = exp(tl.load(a_log + head, mask=head < H, other=0.0).to(tl.float32))
    d = tl.load(dg + row * H + head, mask=inside, other=0.0) * rate * -1.0
    slope, _ = sigmoid(x, False)
    of_a = d * tl.where(x > 20.0, 1.0, slope)
    tl.store(da + row * H + head, of_a.to(da.dtype.element_ty), mask=inside)
    s, rest = sigmoid(tl.load(b + row * b_stride + head, mask=inside, other=0.0).to(tl.float32), False)
    up = tl.load(dbeta + row * H + head, mask=inside, other=0.0).to(tl.float32)
    tl.store(db + row * H + head, (up * (s * rest)).to(db.dtype.element_ty), mask=inside)
    out = parts + part * 2 * H + head
    # order: a block's rows in a tree; sum_rows says the rest
    tl.store(out, tree_sum(tl.where(inside, d * _softplus(x), 0.0)), mask=head < H)
    tl.store(out + H, tree_sum(tl.where(inside, of_a, 0.0)), mask=head < H)


def _heads(a: Tensor) -> dict:
    return {"H": a.shape[1], "BLOCK": block(a.shape[1], "delta_gates: Hv", most=1024), "num_warps": 4}


def _rows(rows: int, heads: int) -> int:
    """Of a program, an element depending on its inputs alone: many are worth several to a thread."""
    return 4 if rows < 1024 else max(512 // heads, 1)


def delta_gates_fwd(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, g: Tensor, beta: Tensor) -> None:
    if a.numel():
        heads = _heads(a)
        rows = _rows(a.shape[0], heads["BLOCK"])
        with on(a):
            _fwd_kernel[(cdiv(a.shape[0], rows),)](
                a, b, a_log, dt_bias, g, beta, a.shape[0], a.stride(0), b.stride(0),
                ROWS=rows, **heads, **OPTIONS, **early(a),
            )  # fmt: skip


def delta_gates_bwd(dg: Tensor, dbeta: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor):
    rows, heads = a.shape
    da, db = a.new_empty(a.shape), b.new_empty(b.shape)
    if rows == 0:
        return da, db, torch.zeros_like(a_log), torch.zeros_like(dt_bias)
    parts = torch.empty(cdiv(rows, 64), 2 * heads, dtype=torch.float32, device=a.device)
    with on(a):
        _bwd_kernel[(parts.shape[0],)](
            dg, dbeta, a, b, a_log, dt_bias, da, db, parts, rows, a.stride(0), b.stride(0),
            ROWS=64, **_heads(a), **OPTIONS,
        )  # fmt: skip
    sums = sum_rows(parts, torch.float32)
    return da, db, sums[:heads], sums[heads:]
