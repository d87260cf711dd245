"""mean over the hidden dimension, against the stock op and batch_invariant_ops."""

from collections.abc import Iterator, Sequence

import torch

import vexact_ops as vx

from ..checks import reference, row_alone
from ..harness import Case, random
from ..peers import batch_invariant, installed
from ..shapes import Shape

FREE = {"n": "H"}


def _batch_invariant():
    mean_dim = batch_invariant("mean_dim")
    return lambda x: mean_dim(x, -1)


def cases(shape: Shape, rows: Sequence[int], dtype: torch.dtype, device: str) -> Iterator[Case]:
    others = installed(batch_invariant_ops=_batch_invariant) if device == "cuda" else {}
    for count in rows:

        def make(count=count):
            return (random(count, shape.H, dtype=dtype, device=device),)

        def bits(x):
            return vx.mean(x[-1:], -1), vx.mean(x, -1)[-1:]

        values = count * (shape.H + 1)
        providers = {"vexact": lambda x: vx.mean(x, -1), "torch": lambda x: torch.mean(x, -1)}
        name = f"{shape.name} R={count} {str(dtype)[6:]}"
        yield Case(
            "mean",
            name,
            make,
            providers | others,
            bits,
            bytes=values * dtype.itemsize,
            flops=values,
            alone=row_alone(0),
            reference=reference("mean", "mean_ref"),
        )
