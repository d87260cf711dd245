"""A router's weights on their way to the experts.

Experts that are an FSDP2 unit of their own get their inputs cast to the dtype of parameters (cast_forward_inputs),
which would round the fp32 weights of a router on their way. The ids go by untouched, and the weights with them.
"""

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

_KEY = "_vexact_weights"


def give(ids: Tensor, weights: Tensor) -> None:
    if not torch.compiler.is_compiling():
        setattr(ids, _KEY, weights)


def give_again(weights: Tensor, ids: Tensor) -> None:
    """Where a router has given weights with its ids: these, which have a gradient."""
    if _KEY in ids.__dict__:
        give(ids, weights)


def uncast(experts: nn.Module, ids: Tensor, weights: Tensor) -> Tensor:
    """The weights as the router made them."""
    if torch.compiler.is_compiling():
        return weights
    given = ids.__dict__.pop(_KEY, None)
    if isinstance(weights, FakeTensor) and given is not None and given is not weights:
        experts._vexact.between.add(id(experts))
    if given is None or given.dtype == weights.dtype:
        return weights
    if id(experts) in experts._vexact.between:
        raise RuntimeError(
            f"experts: weights: got {weights.dtype}, expected the router's {given.dtype}: FSDP2 casts what they are "
            "called with, and their block changes it before: shard them with their layer, not on their own"
        )
    return given
