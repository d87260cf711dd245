"""A trainer's weights on their way to a rollout, and what is known of the forward that they are of."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import vexact_ops as vx
from vexact_ops.patch.lora import WRAPPED

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

    def refuse_reference(self, other: "About") -> None:
        """raises ValueError where this actor's reference policy would compute otherwise than it does"""
        differ = vx.numerics_difference(self.numerics, other.numerics, forward=True)
        found = [f"{where}: the actor has {a!r}, it {b!r}" for where, (a, b) in differ.items()]
        if self.dtype != other.dtype:
            setting = other.setting.replace("actor.", "ref.", 1)
            found = [f"{setting}: the actor computes in {self.dtype}, it in {other.dtype}"]
        if found:
            raise ValueError(
                f"vexact: the reference policy: {'; '.join(found)}: its log-probabilities would differ from the "
                "actor's before any step. Set both alike"
            )


class Weights:
    """(name, tensor) pairs, for verl to pass on as the iterator that it is.

    items      of the trainer's masters
    computes   of each parameter and buffer the dtype that its forward has it in. They are rounded to that, to nearest
               even, as FSDP2 casts its masters
    of         called once they are through, with the step that they are of; None: that of the last ones: see check.py
    held       the masters by name as they lie on this rank, DTensors and buffers, on all ranks in the same order;
               None where these are not all of them together
    raises     RuntimeError on a name that is neither's
    """

    def __init__(
        self,
        items: Iterator[tuple[str, Tensor]],
        computes: Mapping[str, torch.dtype],
        about: About,
        of: Callable[[int | None], None] = lambda step: None,
        held: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._items, self._computes, self.about, self.of = iter(items), computes, about, of
        self._held = held

    def held_by(self, ranks: Sequence[int]) -> "Held | None":
        """What these ranks, of which this is one, hold of all tensors together, be they all of the trainer's or those
        of one of its copies (HSDP). None where they do not, which is so on all of the trainer's ranks then."""
        if self._held is None:
            return None
        if len(ranks) == dist.get_world_size():
            return Held(None, self._held)
        cut = {name: tensor for name, tensor in self._held.items() if isinstance(tensor, DTensor)}
        meshes = {tensor.device_mesh for tensor in cut.values()}
        copied = all(tensor.placements[0] == Replicate() for tensor in cut.values())
        if len(meshes) != 1 or not copied or (mesh := meshes.pop()).ndim != 2 or mesh.mesh_dim_names is None:
            return None
        copy = mesh[mesh.mesh_dim_names[1]]
        if copy.mesh.tolist() != [*ranks]:
            return None
        of_one = {name: _of_a_copy(tensor, copy) for name, tensor in cut.items()}
        return Held(copy.get_group(), {**self._held, **of_one})

    def adapters(self) -> "Weights":
        """Of LoRA's adapters alone, for rollouts that have the base that they are of."""
        held = {name: tensor for name, tensor in self._held.items() if name.startswith(WRAPPED)}
        return Weights(iter(()), self._computes, self.about, self.of, held)

    def shards(self, held: "Held", device: torch.device | int | str) -> Iterator[tuple[str, Tensor]]:
        """In the place of the iterator, of which no rank takes an item then: (name, tensor) pairs rounded likewise,
        each of which is on the device once it is asked for. Experts are stacked, as the parameters are."""
        return self._each(held.tensors, device)

    def whole(self, device: torch.device | int | str) -> Iterator[tuple[str, Tensor]]:
        """The same as the iterator, of which no rank takes an item then, by fewer bytes and calls: tensors are rounded
        before they are gathered, and experts are stacked. Where they are not held, the iterator itself."""
        if self._held is None:
            yield from self
            return
        for name, tensor in self._each(self._held, device):
            yield name, gathered(tensor, device)

    def _each(self, tensors: Mapping[str, Tensor], device: torch.device | int | str) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors.items():
            there = tensor.to(device, non_blocking=True) if isinstance(tensor, DTensor) else tensor
            yield self._rounded(name, there)

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


def gathered(tensor: Tensor, device: torch.device | int | str) -> Tensor:
    """Whole: of a DTensor by all of its ranks together, on the device."""
    if not isinstance(tensor, DTensor):
        return tensor
    there = tensor.to(device, non_blocking=True)
    return there.to_local() if there.device_mesh.size() == 1 else there.full_tensor()


class Held(NamedTuple):
    """What a rank has of tensors that a group's ranks hold together; without one, all of the trainer's."""

    group: dist.ProcessGroup | None
    tensors: Mapping[str, Tensor]


def taken(weights: Any, device: torch.device | int | str) -> Any:
    """What a rollout of ours takes of an iterator that verl passes on."""
    return weights.whole(device) if isinstance(weights, Weights) else weights


def said(weights: Any, step: int | None) -> None:
    """They are through, and a rollout has them of that step: the actor is told, where they are of ours."""
    if isinstance(weights, Weights):
        weights.of(step)


def _stacked(name: re.Match) -> str:
    """Of one expert's tensor, the parameter that verl has taken apart."""
    return f".experts.{'down_proj' if name[1] == 'down' else 'gate_up_proj'}"


def _of_a_copy(tensor: DTensor, mesh: DeviceMesh) -> DTensor:
    """Without the copies of it that other ranks have."""
    placed = {"shape": tensor.shape, "stride": tensor.stride()}
    return DTensor.from_local(tensor.to_local(), mesh, tensor.placements[1:], run_check=False, **placed)
