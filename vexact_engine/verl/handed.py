"""A trainer's weights on their way to a rollout, and what is known of the forward that they are of."""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

_EXPERT = re.compile(r"\.experts\.\d+\.(gate|up|down)_proj\.weight$")


class About(msgspec.Struct, frozen=True):
    """Of a trainer's forward.

    numerics   its patch's, of weights that are handed over rounded
    dtype      what its hidden states are in, as torch names it
    setting    verl's name of what sets that
    """

    numerics: dict[str, Any]
    dtype: str
    setting: str

    def refuse(self, dtype: torch.dtype) -> None:
        """raises ValueError where a rollout of this dtype would compute in another one"""
        if self.dtype != (other := str(dtype).removeprefix("torch.")):
            raise ValueError(
                f"vexact: {self.setting}: the trainer computes in {self.dtype}, but rollout.dtype is {other}: their "
                "log-probabilities would differ. Set both alike"
            )


class Weights:
    """(name, tensor) pairs, for verl to pass on as the iterator that it is.

    items      of the trainer's masters
    computes   of each parameter and buffer the dtype that its forward has it in. They are rounded to that, to nearest
               even, as FSDP2 casts its masters
    of         called once they are through with the step that they are of, where that is known: see check.py
    shards     the same masters without a collective, where that can be: those of several ranks as DTensors, on all of
               these in the same order. None where it cannot
    raises     RuntimeError on a name that is neither's
    """

    def __init__(
        self,
        items: Iterator[tuple[str, Tensor]],
        computes: Mapping[str, torch.dtype],
        about: About,
        of: Callable[[int | None], None] = lambda step: None,
        shards: Callable[[], Iterable[tuple[str, Tensor]]] | None = None,
    ) -> None:
        self._items, self._computes, self.about, self.of = iter(items), computes, about, of
        self._shards = shards

    @property
    def sharded(self) -> bool:
        """Whether there are `shards`: on all of a trainer's ranks or on none."""
        return self._shards is not None

    def shards(self) -> Iterator[tuple[str, Tensor]]:
        """In the place of the iterator, of which no rank takes an item then: (name, tensor) pairs rounded likewise, of
        which each rank has a part. Experts are stacked, as the parameters are."""
        return itertools.starmap(self._rounded, self._shards())

    def __iter__(self) -> "Weights":
        return self

    def __next__(self) -> tuple[str, Tensor]:
        return self._rounded(*next(self._items))

    def _rounded(self, name: str, tensor: Tensor) -> tuple[str, Tensor]:
        kind = self._computes.get(name) or self._computes.get(_EXPERT.sub(_stacked, name))
        if kind is None:
            raise RuntimeError(
                f"vexact: weights: {name}: verl hands it over, but the trainer's model has none so named"
            )
        return name, tensor.to(kind)


def said(weights: Any, step: int | None) -> None:
    """They are through, and a rollout has them of that step: the actor is told, where they are of ours."""
    if isinstance(weights, Weights):
        weights.of(step)


def _stacked(name: re.Match) -> str:
    """Of one expert's tensor, the parameter that verl has taken apart."""
    return f".experts.{'down_proj' if name[1] == 'down' else 'gate_up_proj'}"
