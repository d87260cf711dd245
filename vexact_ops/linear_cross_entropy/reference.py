"""The meaning of this room in plain PyTorch, in the inputs' own precision: call it with float64."""

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_logits_ref(hidden: Tensor, weight: Tensor, *, softcap: float | None = None) -> Tensor:
    logits = hidden @ weight.t()
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def linear_logprobs_ref(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies."""
    t = temperature[:, None].to(hidden.dtype) if isinstance(temperature, Tensor) else temperature
    logp = torch.log_softmax(linear_logits_ref(hidden, weight, softcap=softcap) / t, -1)
    return logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def linear_cross_entropy_ref(
    hidden: Tensor, weight: Tensor, target: Tensor, *, reduction="mean", ignore_index=-100, softcap=None
) -> Tensor:
    logits = linear_logits_ref(hidden, weight, softcap=softcap)
    return F.cross_entropy(logits, target, reduction=reduction, ignore_index=ignore_index)
