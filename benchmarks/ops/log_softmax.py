"""log_softmax over a vocabulary of fp32 logits, against the stock op and batch_invariant_ops."""

from collections.abc import Iterator, Sequence

import torch

import vexact_ops as vx

from ..checks import reference, row_alone
from ..harness import Case, random
from ..peers import batch_invariant, installed
from ..shapes import Shape

FREE = {"n": "V"}


def cases(shape: Shape, rows: Sequence[int], dtype: torch.dtype, device: str) -> Iterator[Case]:
    if device == "cuda":
        dtype = torch.float32  # what logits are there
    others = installed(batch_invariant_ops=lambda: batch_invariant("log_softmax")) if device == "cuda" else {}
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
        yield Case(
            "log_softmax",
            name,
            make,
            providers | others,
            bits,
            bytes=values * dtype.itemsize,
            flops=3 * values,
            alone=row_alone(0),
            reference=reference("log_softmax", "log_softmax_ref"),
        )
