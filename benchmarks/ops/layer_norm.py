"""layer_norm with the residual addition, against torch's fused op ("torch", which Hugging Face models run)."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

import vexact_ops as vx

from ..checks import reference, row_alone
from ..harness import Case, random
from ..shapes import Shape


def _stock(x, weight, bias, residual):
    h = x + residual
    return F.layer_norm(h, (h.shape[-1],), weight, bias, 1e-5), h


FREE = {"n": "H"}


def cases(shape: Shape, rows: Sequence[int], dtype: torch.dtype, device: str) -> Iterator[Case]:
    size = dtype.itemsize
    for count in rows:

        def make(count=count):
            x, residual = (random(count, shape.H, dtype=dtype, device=device, seed=s) for s in (1, 2))
            weight, bias = (random(shape.H, dtype=dtype, device=device, seed=s) for s in (3, 4))
            return x, weight, bias, residual

        def ours(x, weight, bias, residual):
            return vx.layer_norm(x, weight, bias, 1e-5, residual)

        def bits(x, weight, bias, residual):
            one, all_rows = ours(x[-1:], weight, bias, residual[-1:]), ours(x, weight, bias, residual)
            return one, tuple(t[-1:] for t in all_rows)

        yield Case(
            "layer_norm",
            f"{shape.name} +residual R={count} {str(dtype)[6:]}",
            make,
            {"vexact": ours, "torch": _stock},
            bits,
            bytes=(4 * count + 2) * shape.H * size,
            flops=8 * count * shape.H,
            alone=row_alone(0, 3),
            reference=lambda x, w, b, r: reference("layer_norm", "layer_norm_ref")(x, w, b, 1e-5, r),
        )
