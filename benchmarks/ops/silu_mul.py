"""silu(gate) * up, against two stock operations and the fused ones of Liger and FlashInfer."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

import vexact_ops as vx

from ..checks import reference, row_alone
from ..harness import Case, random
from ..peers import installed
from ..shapes import Shape


def _stock(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _liger():
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return lambda gate_up: LigerSiLUMulFunction.apply(*gate_up.chunk(2, dim=-1))


def _flashinfer():
    from flashinfer.activation import silu_and_mul

    return silu_and_mul


FREE = {"n": "I"}


def cases(shape: Shape, rows: Sequence[int], dtype: torch.dtype, device: str) -> Iterator[Case]:
    others = installed(liger=_liger, flashinfer=_flashinfer) if device == "cuda" else {}
    for count in rows:

        def make(count=count):
            return (random(count, 2 * shape.I, dtype=dtype, device=device),)

        def bits(gate_up):
            return vx.silu_mul(gate_up[-1:]), vx.silu_mul(gate_up)[-1:]

        values = 3 * count * shape.I
        name = f"{shape.name} R={count} {str(dtype)[6:]}"
        providers = {"vexact": vx.silu_mul, "torch": _stock, **others}
        yield Case(
            "silu_mul",
            name,
            make,
            providers,
            bits,
            bytes=values * dtype.itemsize,
            flops=values,
            alone=row_alone(0),
            reference=reference("silu_mul", "silu_mul_ref"),
        )
