"""A kernel for test_silu_mul.py: what silu_mul divides with, alone."""

import triton
import triton.language as tl

from vexact_ops.silu_mul.triton import reciprocal


@triton.jit
def reciprocals(d, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(y + at, reciprocal(tl.load(d + at, mask=inside, other=1.0)), mask=inside)
