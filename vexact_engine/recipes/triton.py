"""What a GPU does with a trainer's fp32 numbers, in one pass each: torch casts, compares and counts in several, and its
kernels that mix dtypes take two to three times as long as their bytes do. The floats are torch's."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192


# Sizes are specialised: of a multiple of 16 a mask holds for as many numbers at once, which are one load.
@triton.jit
def _round_kernel(masters, rounded, moved, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < size
    before = tl.load(rounded + at, mask=there, other=0.0)
    now = tl.load(masters + at, mask=there, other=0.0).to(rounded.dtype.element_ty)
    tl.store(rounded + at, now, mask=there)
    others = (now.to(tl.float32) != before.to(tl.float32)).to(tl.int32)
    # nobody reads what the block has stored by it: ordered, each would wait until all that has arrived
    tl.atomic_add(moved, tl.sum(others, 0).to(tl.int64), sem="relaxed")


@triton.jit
def _add_kernel(total, x, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < size
    sums = tl.load(total + at, mask=there, other=0.0) + tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    tl.store(total + at, sums, mask=there)


def _grid(size: int) -> tuple[int]:
    return (-(-size // _BLOCK),)


def round_into(rounded: Tensor, masters: Tensor) -> Tensor:
    """rounded (N,) 16-bit = masters (N,) fp32, to nearest even. -> () int64: how many are another number than before"""
    moved = torch.zeros((), dtype=torch.int64, device=masters.device)
    with torch.cuda.device_of(masters):
        _round_kernel[_grid(len(masters))](masters, rounded, moved, len(masters), _BLOCK, num_warps=8)
    return moved


def add_into(total: Tensor, x: Tensor) -> None:
    """total fp32 += x 16-bit, both contiguous."""
    with torch.cuda.device_of(total):
        _add_kernel[_grid(total.numel())](total, x, total.numel(), _BLOCK, num_warps=8)
