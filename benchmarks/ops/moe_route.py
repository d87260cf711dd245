"""moe_route of a mixture's layer, against the stock compositions of softmax or sigmoid, topk and division."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

import vexact_ops as vx

from ..checks import row_alone
from ..harness import Case, random
from ..shapes import Shape

# What the models' configurations say beside the numbers of experts; what is not here is softmax, normalised.
SIGMOID = {
    "moonlight-16b-a3b": {"groups": 1, "top_k_groups": 1, "scale": 2.446},
    "deepseek-v3": {"groups": 8, "top_k_groups": 4, "scale": 2.5},
}


def _softmax(shape: Shape):
    def stock(logits):
        weights, ids = logits.softmax(-1, dtype=torch.float32).topk(shape.top_k, dim=-1)
        return weights / weights.sum(-1, keepdim=True), ids

    return lambda logits: vx.moe_route(logits, shape.top_k), stock


def _sigmoid(shape: Shape, bias: torch.Tensor, groups: int, top_k_groups: int, scale: float):
    """As DeepSeek's router in transformers: the bias chooses, and does not weigh."""

    def stock(logits):
        scores = logits.sigmoid()
        choice = scores + bias
        strength = choice.view(-1, groups, shape.E // groups).topk(2, dim=-1)[0].sum(-1)
        opened = torch.zeros_like(strength).scatter_(1, strength.topk(top_k_groups, dim=-1, sorted=False)[1], 1)
        opened = opened[:, :, None].expand(-1, -1, shape.E // groups).reshape(-1, shape.E)
        ids = choice.masked_fill(opened == 0, float("-inf")).topk(shape.top_k, dim=-1, sorted=False)[1]
        weights = scores.gather(1, ids)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale, ids

    options = {"score": "sigmoid", "groups": groups, "top_k_groups": top_k_groups, "bias": bias, "scale": scale}
    return lambda logits: vx.moe_route(logits, shape.top_k, **options), stock


FREE = {"experts": "E", "top_k": "top_k"}


def cases(shape: Shape, rows: Sequence[int], dtype: torch.dtype, device: str) -> Iterator[Case]:
    routers = [shape] if shape.E else []
    if shape.name == "moonlight-16b-a3b":  # whose configuration is DeepSeek-V3's with one group: the large one too
        routers.append(replace(shape, name="deepseek-v3", E=256, top_k=8))
    for router in routers:
        if router.name in SIGMOID:
            bias = random(router.E, dtype=torch.float32, device=device, seed=2, scale=0.1)
            ours, stock = _sigmoid(router, bias, **SIGMOID[router.name])
        else:
            ours, stock = _softmax(router)
        for count in rows:

            def bits(logits, ours=ours):
                weights, ids = ours(logits)
                return ours(logits[-1:]), (weights[-1:], ids[-1:])

            def make(count=count, router=router):
                return (random(count, router.E, dtype=dtype, device=device, seed=1),)

            yield Case(
                "moe_route",
                f"{router.name} T={count} {str(dtype)[6:]}",
                make,
                {"vexact": ours, "torch": stock},
                bits,
                bytes=count * (router.E * dtype.itemsize + 8 * router.top_k),
                alone=row_alone(0),
            )
