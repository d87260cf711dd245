"""silu(gate) * up, against two stock operations."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

import vexact_ops as vx

from ..harness import Case, random
from ..shapes import Shape


def _stock(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def cases(shape: Shape, rows: Sequence[int], dtype: torch.dtype, device: str) -> Iterator[Case]:
    for count in rows:

        def make(count=count):
            return (random(count, 2 * shape.I, dtype=dtype, device=device),)

        def bits(gate_up):
            return vx.silu_mul(gate_up[-1:]), vx.silu_mul(gate_up)[-1:]

        values = 3 * count * shape.I
        name = f"{shape.name} R={count} {str(dtype)[6:]}"
        providers = {"vexact": vx.silu_mul, "torch": _stock}
        yield Case("silu_mul", name, make, providers, bits, bytes=values * dtype.itemsize, flops=values)
