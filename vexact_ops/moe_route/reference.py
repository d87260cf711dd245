"""The meaning of moe_route in plain PyTorch, in the logits' own precision: call it with float64."""

import torch
from torch import Tensor


def moe_route_ref(
    logits: Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    normalize: bool = True,
    groups: int | None = None,
    top_k_groups: int | None = None,
    bias: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    choice = logits if bias is None and groups is None else choice
    if groups is not None:
        each = choice.unflatten(-1, (groups, -1))
        strength = each.sort(dim=-1, descending=True)[0][..., :2].sum(-1)
        kept = strength.sort(dim=-1, descending=True, stable=True)[1][..., :top_k_groups]
        closed = torch.ones_like(strength, dtype=torch.bool).scatter(-1, kept, False)
        choice = each.masked_fill(closed[..., None], float("-inf")).flatten(-2)
    ids = choice.sort(dim=-1, descending=True, stable=True)[1][..., :top_k]
    weights = scores.gather(-1, ids)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, ids.int()
