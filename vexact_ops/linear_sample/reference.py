"""The meaning of linear_sample in plain PyTorch: see the references of the rooms it is composed of."""

from torch import Tensor

from ..linear_cross_entropy.reference import linear_logits_ref
from ..sampler.reference import sample_ref


def linear_sample_ref(
    hidden: Tensor, weight: Tensor, seeds: list[int], positions: list[int], *, softcap: float | None = None, **params
) -> tuple[Tensor, Tensor, Tensor]:
    """Call it with float64."""
    return sample_ref(linear_logits_ref(hidden, weight, softcap=softcap), seeds, positions, **params)
