"""The numbers that a patched model computes with, for a fingerprint: what its configuration fixes (epsilons, windows,
scalings, top_k, ...), the dtypes that it computes in, and the buffers that no checkpoint holds.

Read off a description, or where there is none off the trace itself, as the model computes: without adapters, and with
weights in the dtype that FSDP2's mixed precision casts them to. Names of weights, and which of them are tied, are no
numbers: other classes of the same decoder have the same facts.
"""

import contextlib
import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from . import lora
from .describe import read
from .description import NAMES, Decoder, Experts, Factor, Layer, Linear, Mixture, Norm, NotDescribed, Rotary, Router
from .images import encode
from .trace import Value, hidden_states, recorded, values_of

if TYPE_CHECKING:
    from .state import Patch

_OF_FORM = ("rows",)  # in which tensor a weight lies: no number
_ROLES = {Linear: "linear", Norm: "norm", Router: "router", Experts: "experts"}


def facts(patch: "Patch", rounded: bool = False) -> dict[str, Any]:
    """A JSON-serialisable dictionary; equal ones compute the same with equal weights.

    rounded  of weights that are handed over in the dtypes of the forward: where a router computes in fp32 of a weight
             that the forward has in a narrower dtype, whoever takes it may hold it in either
    """
    adapters = lora.scales(patch.model)
    return _facts(patch, rounded) | ({"adapters": adapters} if adapters else {})


def _facts(patch: "Patch", rounded: bool) -> dict[str, Any]:
    dtypes = compute_dtypes(patch.model, patch.wrapper)
    key = patch.builds, tuple(dtypes.items())
    if patch.facts is None or patch.facts[0] != key:
        patch.facts = key, _found(patch, dtypes), _tower(patch, dtypes)
    _, found, tower = patch.facts
    buffers = dict(patch.model.named_buffers(remove_duplicate=False))
    images = {} if tower is None else {"images": {**_traced(tower, dtypes, buffers, patch.model), **_counts(patch)}}
    if isinstance(found, Decoder):
        return _described(found, dtypes, buffers, rounded) | images
    head = {} if patch.head is None else {"head": {"scale": patch.scale, "softcap": patch.softcap}}
    return _traced(found, dtypes, buffers, patch.model) | head | images


def _found(patch: "Patch", dtypes: dict[str, torch.dtype]) -> Decoder | list:
    own = {name: p.dtype for name, p in patch.model.named_parameters(remove_duplicate=False)}
    try:
        if dtypes == own and not any(map(lora.is_peft, patch.model.modules())):
            return patch.describe()
    except NotDescribed:
        pass
    with without_adapters(patch.model):
        hidden = hidden_states(patch.model, patch.base, dtypes)
    try:
        return read(hidden, patch.described_head(), patch.options["kv_segment"])
    except NotDescribed:
        return _operations([hidden])


def _tower(patch: "Patch", dtypes: dict[str, torch.dtype]) -> list | None:
    """What an image encoder computes of one image, if there is one."""
    vision, base = patch.vision, patch.base
    if vision is None:
        return None
    side = 2 * vision.merge

    def call(ids: Tensor) -> list[Tensor]:
        pixels = torch.zeros(side * side, vision.width, dtype=torch.float32, device=ids.device)
        made = encode(vision, base, pixels, ((1, side, side),))
        return [made.rows, *made.deepstack]

    with without_adapters(patch.model):
        return _operations(recorded(patch.model, call, dtypes))


def _counts(patch: "Patch") -> dict[str, Any]:
    names = "token", "merge", "deepstack", "width", "video", "frames_apart", "per_second"
    return {name: getattr(patch.vision, name) for name in names}


def compute_dtypes(model: nn.Module, wrapper: nn.Module | None = None) -> dict[str, torch.dtype]:
    """Of every parameter, by name: its own, or what FSDP2's mixed precision casts it to, that of a wrapper too."""
    cast: dict[tuple[int, str], torch.dtype] = {}
    for group in _groups(model if wrapper is None else wrapper):
        for sharded in group.fsdp_params:
            info, dtype = sharded._module_info, sharded.sharded_param.dtype
            dtype = group.mp_policy.param_dtype or dtype if dtype.is_floating_point else dtype
            places = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names)]
            cast |= {(id(module), name): dtype for module, name in places}
    return {
        f"{path}.{name}" if path else name: cast.get((id(module), name), parameter.dtype)
        for path, module in model.named_modules(remove_duplicate=False)
        for name, parameter in module._parameters.items()
        if parameter is not None
    }


def _groups(model: nn.Module) -> Iterable[Any]:
    """FSDP2's groups of parameters: those of what wraps the model too, once it has run."""
    states = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            states |= {id(s): s for s in (state, *getattr(state._state_ctx, "all_states", ()))}
    for state in states.values():
        groups = getattr(state, "_fsdp_param_groups", None)
        yield from groups if groups is not None else filter(None, [state._fsdp_param_group])


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """What an engine computes with once they are merged. A layer whose adapter is merged computes so anyway."""
    layers = [m for m in model.modules() if lora.is_peft(m) and "base_layer" in m._modules and not m.merged]
    before = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, flag in zip(layers, before):
            layer._disable_adapters = flag


# From a description


def _described(
    found: Decoder, dtypes: dict[str, torch.dtype], buffers: dict[str, Tensor], rounded: bool
) -> dict[str, Any]:
    layers = [dict(_fields(layer, buffers)) for layer in found.layers]
    names = dict.fromkeys(name for layer in layers for name in layer)
    whole = {
        "embedding": dict(_fields(found.embedding, buffers)),
        "rotary": {str(i): _tables(tables, buffers) for i, tables in enumerate(found.rotary)},
        "layers": {"count": len(layers), **{name: _series([layer.get(name) for layer in layers]) for name in names}},
        "norm": dict(_fields(found.norm, buffers)),
    }
    if found.head is not None:
        whole["head"] = dict(_fields(found.head, buffers))
    used: dict[str, dict[str, None]] = {}
    for role, name in _weights((found.embedding, found.layers, found.norm, found.head), "linear"):
        if name in dtypes:
            used.setdefault(role, {})[_text(dtypes[name])] = None
    said: dict[str, str | list[str]] = {role: ", ".join(sorted(texts)) for role, texts in used.items()}
    casts = all(router.cast for router in _routers(found.layers))
    if rounded and casts and said.get("router") in ("bfloat16", "float16"):
        said["router"] = [said["router"], "float32"]
    return {"dtype": said, **whole}


def _fields(part: Any, buffers: dict[str, Tensor], before: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(part, Linear):
        return  # its sizes are its weight's
    if isinstance(part, Factor):
        yield before, _factor(part, buffers)
    elif dataclasses.is_dataclass(part):
        dot = f"{before}." if before else ""
        if before.endswith("part"):
            yield f"{dot}kind", type(part).__name__
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            named = field.name in NAMES and (value is None or isinstance(value, str))
            if not named and field.name not in _OF_FORM:
                yield from _fields(value, buffers, f"{dot}{field.name}")
    elif isinstance(part, tuple | list):
        for i, item in enumerate(part):
            yield from _fields(item, buffers, f"{before}.{i}")
    else:
        yield before, _text(part)


def _weights(part: Any, role: str) -> Iterator[tuple[str, str]]:
    if dataclasses.is_dataclass(part):
        role = "router" if role == "router" else _ROLES.get(type(part), type(part).__name__.lower())
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if isinstance(value, str) and field.name in ("weight", "gate_up", "down"):
                yield role, value
            elif not isinstance(value, str):
                yield from _weights(value, role)
    elif isinstance(part, tuple | list):
        for item in part:
            yield from _weights(item, role)


def _routers(layers: tuple[Layer, ...]) -> Iterator[Router]:
    for layer in layers:
        yield from (block.part.router for block in layer.blocks if isinstance(block.part, Mixture))


def _factor(factor: Factor, buffers: dict[str, Tensor]) -> float | None:
    """As it is used."""
    if factor.buffer is None:
        return factor.value
    value = buffers.get(factor.buffer)
    if value is None or value.is_meta:
        return None
    return float(value.detach().cpu().to(factor.dtype or value.dtype))


def _tables(tables: Rotary, buffers: dict[str, Tensor]) -> dict[str, Any]:
    axes = {} if tables.axes is None else {"axes": "".join(map(str, tables.axes))}
    numbers = {"scaling": tables.scaling, "dtype": _text(tables.dtype)}
    return {"inv_freq": _digest(buffers[tables.inv_freq]), **numbers, **axes}


def _digest(buffer: Tensor) -> str | None:
    if buffer.is_meta:
        return None
    values = buffer.detach().to("cpu", torch.float32).contiguous().flatten()
    # of a copy: the memory of a tensor that NumPy has seen can never be given back
    text = f"{values.numel()} numbers, sha256 {hashlib.sha256(values.clone().numpy().tobytes()).hexdigest()[:16]}"
    return f"{values[0]:.6g} to {values[-1]:.6g}, {text}" if values.numel() else text


def _text(value: Any) -> Any:
    """As JSON has it."""
    return str(value).removeprefix("torch.") if not isinstance(value, bool | int | float | str | None) else value


def _series(values: list) -> Any:
    """One value where all are alike, else all of them in order."""
    if all(type(value) is type(values[0]) and value == values[0] for value in values):
        return values[0]
    runs = [(value, len(list(run))) for value, run in itertools.groupby(values)]
    return ", ".join(f"{value}" + (f" x{count}" if count > 1 else "") for value, count in runs)


# From a trace


def _operations(results: list[Value]) -> list[tuple[str, tuple]]:
    """What was computed, in order: each operation once, with those of its arguments that are no tensors; and the names
    of the parameters and buffers that it read."""
    calls: dict[int, tuple[str, tuple]] = {}
    for value in values_of(*results):
        calls[value.call] = value.op, tuple(a for a in value.args if not isinstance(a, Value | tuple))
    return [calls[call] for call in sorted(calls)]


def _traced(
    found: list[tuple[str, tuple]], dtypes: dict[str, torch.dtype], buffers: dict[str, Tensor], model: nn.Module
) -> dict[str, Any]:
    unsaved = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    read = [numbers[0] for op, numbers in found if op == "parameter"]
    numbers: dict[str, list[str]] = {}
    for op, given in found:
        if op not in ("parameter", "given"):
            numbers.setdefault(op, []).append(str(tuple(map(_text, given))))
    return {
        "dtype": ", ".join(sorted({_text(dtypes[name]) for name in read if name in dtypes})),
        "buffers": {str(i): _digest(buffers[name]) for i, name in enumerate(n for n in read if n in unsaved)},
        "operations": {op: _series(texts) for op, texts in numbers.items()},
    }
