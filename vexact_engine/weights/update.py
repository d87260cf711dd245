"""New weights for a running model, in place: checked before anything is written.

Either all at once (`plan_update`, `apply_update`): all of them fit and are copied, or nothing changes. Or piece by
piece (`Update`): names, shapes and dtypes come first and are checked; then buckets of tensors are written as they come,
so that the new weights never lie in memory as a whole beside the old ones.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from vexact_ops.testing import same_bits

from .experts import aliases, expert_views
from .load import some

log = logging.getLogger(__name__)


class Spec(NamedTuple):
    """What a tensor will be."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def targets(model: torch.nn.Module) -> dict[str, Tensor]:
    """Every name that an update may give, and the tensor it is copied into. Tied names share theirs."""
    return model.state_dict(keep_vars=True)


def plan_update(
    model: torch.nn.Module, named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
) -> list[tuple[Tensor, Tensor]]:
    """(target, source) for each tensor of the model, once everything has been checked.

    named_tensors   a state dict, or pairs; every parameter under its Hugging Face name, of the model's shape and dtype,
                    on any device. Of tied names one is enough; if several are given they must hold the same bits.
                    Stacked experts may come one by one instead, under the names of old checkpoints (see experts.py).
                    Buffers (DeepSeek's e_score_correction_bias) may be left out, as named_parameters() does: then
                    they stay what they are, and a warning in the log names them. Sources may be the model's own
                    tensors, under other names too
    raises          ValueError: missing, unknown, repeated or misshapen; TypeError: no tensor, or another dtype
    """
    pairs = list(named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors)
    given = _unrepeated(model, pairs)
    wanted = _targets_of(model, given)
    plan: dict[int, tuple[str, Tensor, Tensor]] = {}
    for name, source in given.items():
        first = plan.setdefault(id(wanted[name]), (name, wanted[name], source))
        if first[2] is not source and not same_bits(first[2].detach(), source.detach()):
            raise ValueError(f"update_weights: {first[0]} and {name} are tied, but hold different values")
    own = _storages(model)
    return [(target, _apart(target, source, own)) for _, target, source in plan.values()]


@torch.no_grad()
def apply_update(plan: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy, in place: whoever holds a view of a parameter sees the new values."""
    for target, source in plan:
        if source is not target:
            target.copy_(source)


class Update:
    """All weights of a model, bucket by bucket.

    specs    name -> Spec (or anything with shape and dtype) of all that will come, names as for plan_update
    raises   as plan_update
    """

    def __init__(self, model: torch.nn.Module, specs: Mapping[str, Spec]):
        self._old_names, self._own = aliases(model), _storages(model)
        given = _unrepeated(model, [(name, _spec(name, spec)) for name, spec in specs.items()])
        self._targets, self._left = _targets_of(model, given), dict.fromkeys(given)
        self._written: dict[int, str] = {}

    @property
    def begun(self) -> bool:
        """Whether anything has been written."""
        return bool(self._written)

    @torch.no_grad()
    def write(self, bucket: Iterable[tuple[str, Tensor]]) -> None:
        """Raises ValueError or TypeError for a tensor that was not announced so, or is memory of the model itself."""
        for given, source in bucket:
            name = self._old_names.get(given, given)
            if name not in self._left:
                raise ValueError(f"update_weights: {given} was not announced, or came before")
            target = self._targets[name]
            _check(name, source, target)
            if _memory(source) in self._own and not _is(source, target):
                raise ValueError(f"update_weights: {given} is memory of the model that is updated: give a copy")
            del self._left[name]
            first = self._written.setdefault(id(target), name)
            if first == name:
                target.copy_(source)
            elif not same_bits(target.detach(), source.detach()):
                raise ValueError(f"update_weights: {first} and {name} are tied, but hold different values")

    def finish(self) -> None:
        if self._left:
            raise ValueError(f"update_weights: announced, but did not come: {some(self._left)}")


def _unrepeated(model: torch.nn.Module, pairs: list[tuple[str, object]]) -> dict[str, object]:
    """By today's names, each once."""
    old = aliases(model)
    pairs = [(old.get(name, name), value) for name, value in pairs]
    given = dict(pairs)
    if len(given) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"update_weights: repeated: {some({n for n in names if names.count(n) > 1})}")
    return given


def _targets_of(model: torch.nn.Module, given: Mapping[str, object]) -> dict[str, Tensor]:
    """What each of the names is copied into, once names, shapes and dtypes are known to fit."""
    wanted, views = targets(model), expert_views(model)
    twice = {name for name in given.keys() & views.keys() if views[name][0] in given}
    if twice:
        raise ValueError(f"update_weights: repeated: {some(twice)}, beside the stacked {views[min(twice)][0]}")
    unknown = given.keys() - wanted.keys() - views.keys()
    covered = {id(wanted[name]) for name in given.keys() & wanted.keys()}
    in_parts = {views[name][0] for name in given.keys() & views.keys()}
    missing = [name for name, target in wanted.items() if id(target) not in covered and name not in in_parts]
    missing += [name for name, (stacked, _) in views.items() if stacked in in_parts and name not in given]
    buffers = [name for name in missing if not isinstance(wanted.get(name), torch.nn.Parameter) and name not in views]
    missing = [name for name in missing if name not in buffers]
    wrong = [f"unknown: {some(unknown)}"] if unknown else []
    wrong += [f"missing: {some(missing)}"] if missing else []
    if wrong:
        raise ValueError(f"update_weights: {'; '.join(wrong)}")
    if buffers:
        log.warning("update_weights: buffers that were not given stay as they are: %s", some(buffers))
    wanted |= {name: view for name, (_, view) in views.items()}
    shapes, dtypes = [], []
    for name, value in given.items():
        try:
            _check(name, value, wanted[name])
        except ValueError as error:
            shapes.append(str(error))
        except TypeError as error:
            dtypes.append(str(error))
    if shapes:
        raise ValueError(f"update_weights: {some(shapes)}")
    if dtypes:
        raise TypeError(f"update_weights: {some(dtypes)}")
    return {name: wanted[name] for name in given}


def _check(name: str, given, target: Tensor) -> None:
    """ValueError or TypeError unless a tensor, or what is said of one, fits."""
    is_tensor = isinstance(given, Tensor) and given.layout is torch.strided and not given.is_meta
    if not is_tensor and not isinstance(given, Spec):
        raise TypeError(f"{name} is {_kind(given)}, expected a dense tensor")
    if tuple(given.shape) != tuple(target.shape):
        raise ValueError(f"{name} is {tuple(given.shape)}, expected {tuple(target.shape)}")
    if given.dtype != target.dtype:
        raise TypeError(f"{name} is {given.dtype}, expected {target.dtype}")


def _spec(name: str, given) -> Spec:
    if isinstance(given, tuple) and len(given) == 2:
        shape, dtype = given
    elif hasattr(given, "shape") and hasattr(given, "dtype"):
        shape, dtype = given.shape, given.dtype
    else:
        raise TypeError(f"update_weights: specs: {name} is {_kind(given)}, expected (shape, dtype)")
    return Spec(tuple(shape), dtype)


def _memory(tensor: Tensor) -> tuple:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _storages(model: torch.nn.Module) -> set[tuple]:
    return {_memory(tensor) for tensor in targets(model).values()}


def _is(source: Tensor, target: Tensor) -> bool:
    """Whether copying one into the other does nothing."""
    return source.data_ptr() == target.data_ptr() and source.stride() == target.stride()


def _apart(target: Tensor, source: Tensor, own: set[tuple]) -> Tensor:
    """The source, or a copy where it is memory that this update may write into before it is read."""
    if _memory(source) not in own:
        return source
    return target if _is(source, target) else source.detach().clone()


def _kind(value) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return "a meta tensor" if value.is_meta else f"a tensor of layout {value.layout}"
