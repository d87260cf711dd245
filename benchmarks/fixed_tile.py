"""The peers that batch-invariant libraries ship: persistent Triton products, one tile, 128x128x64, for all sizes."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["M"])
def _product_kernel(
    x, w, y, M, N, K, x_row, w_row, y_row,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    k = tl.arange(0, BK)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, BLOCKS, flatten=True):
        group = tile // (GROUP * tiles_n)
        rows = min(tiles_m - group * GROUP, GROUP)
        within = tile % (GROUP * tiles_n)
        m = (group * GROUP + within % rows) * BM + tl.arange(0, BM)
        n = (within // rows) * BN + tl.arange(0, BN)
        x_at = x + (m % M).to(tl.int64)[:, None] * x_row
        w_at = w + (n % N).to(tl.int64)[None, :] * w_row
        acc = tl.zeros([BM, BN], tl.float32)
        for start in range(0, K, BK):
            left = K - start
            a = tl.load(x_at + (start + k)[None, :], mask=(k < left)[None, :], other=0.0)
            b = tl.load(w_at + (start + k)[:, None], mask=(k < left)[:, None], other=0.0)
            acc = tl.dot(a, b, acc)
        y_at = y + m.to(tl.int64)[:, None] * y_row + n[None, :]
        tl.store(y_at, acc.to(y.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (M, K) @ weight (N, K).T in x's dtype."""
    (m, k), n = x.shape, weight.shape[0]
    y = x.new_empty(m, n)
    blocks = torch.cuda.get_device_properties(x.device).multi_processor_count
    grid = (min(blocks, triton.cdiv(m, 128) * triton.cdiv(n, 128)),)
    _product_kernel[grid](
        x, weight, y, m, n, k, x.stride(0), weight.stride(0), y.stride(0),
        BM=128, BN=128, BK=64, GROUP=8, BLOCKS=grid[0], num_warps=8, num_stages=3,
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["R"])
def _grouped_kernel(
    x, w, y, offsets, R, N, K, E, x_row, w_expert, w_row, w_col,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(N, BN)
    k = tl.arange(0, BK)
    tile = tl.program_id(0)
    first = 0
    for expert in range(E):
        begin = tl.load(offsets + expert)
        end = tl.load(offsets + expert + 1)
        here = tl.cdiv(end - begin, BM) * tiles_n
        while tile < first + here:
            m = begin + (tile - first) // tiles_n * BM + tl.arange(0, BM)
            n = (tile - first) % tiles_n * BN + tl.arange(0, BN)
            x_at = x + (m % R).to(tl.int64)[:, None] * x_row
            w_at = w + expert.to(tl.int64) * w_expert + (n % N).to(tl.int64)[None, :] * w_row
            acc = tl.zeros([BM, BN], tl.float32)
            for start in range(0, K, BK):
                left = K - start
                a = tl.load(x_at + (start + k)[None, :], mask=(k < left)[None, :], other=0.0)
                b = tl.load(w_at + (start + k)[:, None] * w_col, mask=(k < left)[:, None], other=0.0)
                acc = tl.dot(a, b, acc)
            y_at = y + m.to(tl.int64)[:, None] * N + n[None, :]
            tl.store(y_at, acc.to(y.dtype.element_ty), mask=(m < end)[:, None] & (n < N)[None, :])
            tile += BLOCKS
        first += here


def grouped(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Rows of expert e of x (R, K) @ weight[e] (N, K).T; offsets (E + 1,) ascend to R."""
    (rows, k), (experts, n, _) = x.shape, weight.shape
    y = x.new_empty(rows, n)
    blocks = torch.cuda.get_device_properties(x.device).multi_processor_count
    _grouped_kernel[(blocks,)](
        x, weight, y, offsets, rows, n, k, experts, x.stride(0), *weight.stride(),
        BM=128, BN=128, BK=64, BLOCKS=blocks, num_warps=8, num_stages=3,
    )  # fmt: skip
    return y
