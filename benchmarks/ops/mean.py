"""mean over the hidden dimension, against the stock op."""

from collections.abc import Iterator, Sequence

import torch

import vexact_ops as vx

from ..harness import Case, random
from ..shapes import Shape


def cases(shape: Shape, rows: Sequence[int], dtype: torch.dtype, device: str) -> Iterator[Case]:
    for count in rows:

        def make(count=count):
            return (random(count, shape.H, dtype=dtype, device=device),)

        def bits(x):
            return vx.mean(x[-1:], -1), vx.mean(x, -1)[-1:]

        values = count * (shape.H + 1)
        providers = {"vexact": lambda x: vx.mean(x, -1), "torch": lambda x: torch.mean(x, -1)}
        name = f"{shape.name} R={count} {str(dtype)[6:]}"
        yield Case("mean", name, make, providers, bits, bytes=values * dtype.itemsize, flops=values)
