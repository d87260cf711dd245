"""The head and a draw in one, against the stock way; `vexact-product` is the head alone, whose logits are stored."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

import vexact_ops as vx

from ..harness import Case, random
from ..shapes import Shape

TEMPERATURES = {"t=1": 1.0, "t=0.7": 0.7}


def _product(hidden, weight, *_):
    return vx.linear_logits(hidden, weight)


def _stock(hidden, weight, temperature):
    logits = F.linear(hidden, weight).float() / temperature
    ids = torch.multinomial(torch.softmax(logits, -1), 1)
    return ids, torch.log_softmax(logits, -1).gather(1, ids)


FREE = {"n": "V", "k": "H"}


def cases(shape: Shape, rows: Sequence[int], dtype: torch.dtype, device: str) -> Iterator[Case]:
    for count in rows:
        if count > 256:
            continue

        def make(count=count):
            hidden = random(count, shape.H, dtype=dtype, device=device, seed=1)
            weight = random(shape.V, shape.H, dtype=dtype, device=device, seed=2, scale=shape.H**-0.5)
            seeds = torch.arange(count, device=device)
            return hidden, weight, seeds, seeds + 7

        for label, temperature in TEMPERATURES.items():

            def ours(*inputs, temperature=temperature):
                return vx.linear_sample(*inputs, temperature=temperature)

            def composed(hidden, weight, seeds, positions, temperature=temperature):
                return vx.sample(vx.linear_logits(hidden, weight), seeds, positions, temperature=temperature)

            def stock(hidden, weight, seeds, positions, temperature=temperature):
                return _stock(hidden, weight, temperature)

            def bits(hidden, weight, seeds, positions, ours=ours, composed=composed):
                one = ours(hidden[-1:], weight, seeds[-1:], positions[-1:])
                return one, tuple(t[-1:] for t in composed(hidden, weight, seeds, positions))

            yield Case(
                "linear_sample",
                f"{shape.name} R={count} {label} {str(dtype)[6:]}",
                make,
                {"vexact": ours, "torch": stock, "vexact-composed": composed, "vexact-product": _product},
                bits,
                bytes=(count * shape.H + shape.V * shape.H) * dtype.itemsize,
                flops=2 * count * shape.H * shape.V,
            )
