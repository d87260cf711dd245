"""New weights for a running model: all of them fit and are copied in place, or nothing changes."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from vexact_ops.testing import same_bits

from .experts import aliases, expert_views
from .load import some


def targets(model: torch.nn.Module) -> dict[str, Tensor]:
    """Every name that an update may give, and the tensor it is copied into. Tied names share theirs."""
    return model.state_dict(keep_vars=True)


def plan_update(
    model: torch.nn.Module, named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
) -> list[tuple[Tensor, Tensor]]:
    """(target, source) for each tensor of the model, once everything has been checked.

    named_tensors   a state dict, or pairs; every tensor under its Hugging Face name, of the model's shape and dtype,
                    on any device. Of tied names one is enough; if several are given they must hold the same bits.
                    Stacked experts may come one by one instead, under the names of old checkpoints (see experts.py)
    raises          ValueError: missing, unknown, repeated or misshapen; TypeError: no tensor, or another dtype
    """
    pairs = list(named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors)
    old = aliases(model)
    pairs = [(old.get(name, name), value) for name, value in pairs]
    wanted, given, views = targets(model), dict(pairs), expert_views(model)
    if len(given) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"update_weights: repeated: {some({n for n in names if names.count(n) > 1})}")
    twice = {name for name in given.keys() & views.keys() if views[name][0] in given}
    if twice:
        raise ValueError(f"update_weights: repeated: {some(twice)}, beside the stacked {views[min(twice)][0]}")
    unknown = given.keys() - wanted.keys() - views.keys()
    covered = {id(wanted[name]) for name in given.keys() & wanted.keys()}
    in_parts = {views[name][0] for name in given.keys() & views.keys()}
    missing = [name for name, target in wanted.items() if id(target) not in covered and name not in in_parts]
    missing += [name for name, (stacked, _) in views.items() if stacked in in_parts and name not in given]
    wrong = [f"unknown: {some(unknown)}"] if unknown else []
    wrong += [f"missing: {some(missing)}"] if missing else []
    if wrong:
        raise ValueError(f"update_weights: {'; '.join(wrong)}")
    wanted |= {name: view for name, (_, view) in views.items()}

    shapes, dtypes = [], []
    for name, source in given.items():
        target = wanted[name]
        if not isinstance(source, Tensor) or source.layout is not torch.strided or source.is_meta:
            dtypes.append(f"{name} is {_kind(source)}, expected a dense tensor")
        elif source.shape != target.shape:
            shapes.append(f"{name} is {tuple(source.shape)}, expected {tuple(target.shape)}")
        elif source.dtype != target.dtype:
            dtypes.append(f"{name} is {source.dtype}, expected {target.dtype}")
    if shapes:
        raise ValueError(f"update_weights: {some(shapes)}")
    if dtypes:
        raise TypeError(f"update_weights: {some(dtypes)}")

    plan: dict[int, tuple[str, Tensor, Tensor]] = {}
    for name, source in given.items():
        first = plan.setdefault(id(wanted[name]), (name, wanted[name], source))
        if not same_bits(first[2], source):
            raise ValueError(f"update_weights: {first[0]} and {name} are tied, but hold different values")
    return [(target, source) for _, target, source in plan.values()]


@torch.no_grad()
def apply_update(plan: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy, in place: whoever holds a view of a parameter sees the new values."""
    for target, source in plan:
        target.copy_(source)


def _kind(value) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return "a meta tensor" if value.is_meta else f"a tensor of layout {value.layout}"
