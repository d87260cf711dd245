"""One batched draw with its log-probabilities, against softmax and multinomial (which give no log-probabilities)."""

from collections.abc import Iterator, Sequence

import torch

import vexact_ops as vx

from ..harness import Case, random
from ..shapes import Shape


def cases(shape: Shape, rows: Sequence[int], dtype: torch.dtype, device: str) -> Iterator[Case]:
    if dtype != torch.float32:
        return  # logits are fp32 always
    for count in rows:
        if count > 256:
            continue

        def make(count=count):
            seeds = torch.arange(count, device=device)
            return random(count, shape.V, dtype=dtype, device=device, scale=3.0), seeds, seeds + 7

        def stock(logits, seeds, positions, **_):
            return torch.multinomial(torch.softmax(logits / 0.7, -1), 1)

        for label, options in {"": {}, " top_p=0.9 top_k=50": {"top_p": 0.9, "top_k": 50}}.items():

            def ours(logits, seeds, positions, options=options):
                return vx.sample(logits, seeds, positions, temperature=0.7, **options)

            def bits(*args, ours=ours):
                return ours(*(a[-1:] for a in args)), tuple(t[-1:] for t in ours(*args))

            size = count * shape.V * 4
            name = f"{shape.name} R={count} t=0.7{label}"
            yield Case("sampler", name, make, {"vexact": ours, "torch": stock}, bits, bytes=size, flops=size)
