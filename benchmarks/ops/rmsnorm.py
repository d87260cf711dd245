"""rmsnorm with the residual addition, against the stock modules' arithmetic."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

import vexact_ops as vx

from ..harness import Case, random
from ..shapes import Shape


def cases(shape: Shape, rows: Sequence[int], dtype: torch.dtype, device: str) -> Iterator[Case]:
    size = dtype.itemsize
    for count in rows:

        def make(count=count):
            x, residual = (random(count, shape.H, dtype=dtype, device=device, seed=s) for s in (1, 2))
            return x, random(shape.H, dtype=dtype, device=device, seed=3), residual

        def stock(x, weight, residual):
            h = x + residual
            return F.rms_norm(h, (h.shape[-1],), weight, 1e-6), h

        def bits(x, weight, residual):
            return vx.rmsnorm(x[-1:], weight, 1e-6, residual[-1:])[0], vx.rmsnorm(x, weight, 1e-6, residual)[0][-1:]

        yield Case(
            "rmsnorm",
            f"{shape.name} +residual R={count} {str(dtype)[6:]}",
            make,
            {"vexact": lambda x, w, r: vx.rmsnorm(x, w, 1e-6, r), "torch": stock},
            bits,
            bytes=(4 * count + 1) * shape.H * size,
            flops=5 * count * shape.H,
        )
