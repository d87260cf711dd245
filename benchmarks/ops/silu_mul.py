"""silu(gate) * up, against two stock operations and Liger's fused one."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

import vexact_ops as vx

from ..harness import Case, peers, random
from ..shapes import Shape


def _stock(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _liger():
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return lambda gate_up: LigerSiLUMulFunction.apply(*gate_up.chunk(2, dim=-1))


def cases(shape: Shape, rows: Sequence[int], dtype: torch.dtype, device: str) -> Iterator[Case]:
    others = peers(liger=_liger) if device == "cuda" else {}
    for count in rows:

        def make(count=count):
            return (random(count, 2 * shape.I, dtype=dtype, device=device),)

        def bits(gate_up):
            return vx.silu_mul(gate_up[-1:]), vx.silu_mul(gate_up)[-1:]

        values = 3 * count * shape.I
        name = f"{shape.name} R={count} {str(dtype)[6:]}"
        providers = {"vexact": vx.silu_mul, "torch": _stock, **others}
        yield Case("silu_mul", name, make, providers, bits, bytes=values * dtype.itemsize, flops=values)
