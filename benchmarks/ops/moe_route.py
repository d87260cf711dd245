"""moe_route of a mixture's layer, against the stock composition of softmax, topk and division."""

from collections.abc import Iterator, Sequence

import torch

import vexact_ops as vx

from ..harness import Case, random
from ..shapes import Shape


def cases(shape: Shape, rows: Sequence[int], dtype: torch.dtype, device: str) -> Iterator[Case]:
    def stock(logits):
        weights, ids = logits.softmax(-1, dtype=torch.float32).topk(shape.top_k, dim=-1)
        return weights / weights.sum(-1, keepdim=True), ids

    def ours(logits):
        return vx.moe_route(logits, shape.top_k)

    for count in rows if shape.E else ():
        yield Case(
            "moe_route",
            f"{shape.name} T={count} {str(dtype)[6:]}",
            lambda count=count: (random(count, shape.E, dtype=dtype, device=device, seed=1),),
            {"vexact": ours, "torch": stock},
            lambda logits: (ours(logits[-1:]), tuple(t[-1:] for t in ours(logits))),
            bytes=count * (shape.E * dtype.itemsize + 8 * shape.top_k),
        )
