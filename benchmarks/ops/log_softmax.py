"""log_softmax over a vocabulary of fp32 logits, against the stock op."""

from collections.abc import Iterator, Sequence

import torch

import vexact_ops as vx

from ..harness import Case, random
from ..shapes import Shape


def cases(shape: Shape, rows: Sequence[int], dtype: torch.dtype, device: str) -> Iterator[Case]:
    if device == "cuda":
        dtype = torch.float32  # what logits are there
    for count in rows:
        if count * shape.V > 2**28:
            continue

        def make(count=count):
            return (random(count, shape.V, dtype=dtype, device=device, scale=3.0),)

        def bits(x):
            return vx.log_softmax(x[-1:]), vx.log_softmax(x)[-1:]

        values = 2 * count * shape.V
        providers = {"vexact": vx.log_softmax, "torch": lambda x: torch.log_softmax(x, -1)}
        name = f"{shape.name} R={count} {str(dtype)[6:]}"
        yield Case("log_softmax", name, make, providers, bits, bytes=values * dtype.itemsize, flops=3 * values)
