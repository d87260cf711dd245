"""The C++ kernels of the rooms it is composed of: logits in a CPU's memory cost next to nothing beside the product."""

import torch
from torch import Tensor

from ..linear.cpu import linear_fwd
from ..linear_cross_entropy.cpu import softcap_fwd
from ..sampler.cpu import sample


def linear_sample(
    hidden: Tensor,
    weight: Tensor,
    softcap: float,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    logits = linear_fwd(hidden, weight, None, torch.float32)
    logits = softcap_fwd(logits, softcap) if softcap else logits
    if top_k is None or top_p is None or min_p is None:
        top_k = torch.zeros_like(seeds)
        top_p, min_p = torch.ones_like(temperature), torch.zeros_like(temperature)
    return sample(logits, seeds, positions, temperature, top_k, top_p, min_p)
