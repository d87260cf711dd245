"""The Triton kernels of the rooms it is composed of: logits, and the sampler's draws from them."""

import torch
from torch import Tensor

from ..linear.triton import linear_fwd
from ..linear_cross_entropy.triton import softcap_fwd
from ..sampler.triton import sample


def linear_sample(
    hidden: Tensor,
    weight: Tensor,
    softcap: float,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    *cuts: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """cuts: top_k, top_p and min_p, or none of them."""
    logits = linear_fwd(hidden, weight, None, torch.float32)
    return sampled(logits, softcap, seeds, positions, temperature, *cuts)


def sampled(
    logits: Tensor, softcap: float, seeds: Tensor, positions: Tensor, temperature: Tensor, *cuts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The draws from uncapped logits."""
    logits = softcap_fwd(logits, softcap) if softcap else logits
    if not cuts:
        cuts = torch.zeros_like(seeds), torch.ones_like(temperature), torch.zeros_like(temperature)
    return sample(logits, seeds, positions, temperature, *cuts)
