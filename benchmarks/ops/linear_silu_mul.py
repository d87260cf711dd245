"""The gated half of a feed-forward block in one op, as two, and the stock way."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

import vexact_ops as vx

from ..checks import reference, row_alone
from ..harness import Case, random
from ..shapes import Shape

MOST = 1024  # rows: beyond, the op is two


def _composed(x, weight):
    return vx.silu_mul(vx.linear(x, weight))


def _stock(x, weight):
    gate, up = F.linear(x, weight).chunk(2, dim=-1)
    return F.silu(gate) * up


FREE = {"n": "I", "k": "H"}


def cases(shape: Shape, rows: Sequence[int], dtype: torch.dtype, device: str) -> Iterator[Case]:
    for count in (count for count in rows if count <= MOST):

        def make(count=count):
            x = random(count, shape.H, dtype=dtype, device=device, seed=1)
            return x, random(2 * shape.I, shape.H, dtype=dtype, device=device, seed=2, scale=shape.H**-0.5)

        def bits(x, weight):
            return vx.linear_silu_mul(x, weight)[-1:], _composed(x[-1:], weight)

        yield Case(
            "linear_silu_mul",
            f"{shape.name} R={count} {str(dtype)[6:]}",
            make,
            {"vexact": vx.linear_silu_mul, "torch": _stock, "vexact-composed": _composed},
            bits,
            bytes=(count * (shape.H + shape.I) + 2 * shape.I * shape.H) * dtype.itemsize,
            flops=4 * count * shape.H * shape.I,
            alone=row_alone(0),
            reference=reference("linear_silu_mul", "linear_silu_mul_ref"),
        )
