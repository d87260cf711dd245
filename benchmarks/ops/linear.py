"""linear on every matrix of a model, against the stock product."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

import vexact_ops as vx
from vexact_ops.testing import cancelling

from ..harness import Case, random
from ..shapes import Shape


def cases(shape: Shape, rows: Sequence[int], dtype: torch.dtype, device: str) -> Iterator[Case]:
    for name, (n, k) in shape.linears().items():
        for count in rows:
            if count * n > 2**28:
                continue  # a head over many rows is linear_cross_entropy's case

            def make(count=count, n=n, k=k):
                return random(count, k, dtype=dtype, device=device, seed=1), random(
                    n, k, dtype=dtype, device=device, seed=2, scale=k**-0.5
                )

            def bits(x, weight, k=k):
                x, weight = cancelling(x.shape[0], k, min(weight.shape[0], 256), 0, dtype, device)
                return vx.linear(x[-1:], weight), vx.linear(x, weight)[-1:]

            yield Case(
                "linear",
                f"{shape.name} {name} M={count} {str(dtype)[6:]}",
                make,
                {"vexact": vx.linear, "torch": F.linear},
                bits,
                bytes=(count * k + n * k + count * n) * dtype.itemsize,
                flops=2 * count * n * k,
            )
