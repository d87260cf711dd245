"""LoRA that a model is computed with, unmerged: what PEFT's files or a LoraConfig say, put on a model as PEFT puts it.

The layers, and their dtypes, are those that PEFT makes for a trainer. Their values are read here: every tensor of the
file is used, every one that the model has is there. What has other arithmetic than base + scale * B(A(x)), or changes
the base weights, is refused by the name of its field.
"""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vexact_ops.patch import lora

from ..config import EngineConfig
from ..extras import pip_line
from .conversion import FLOATS
from .cut import Shard
from .directory import ADAPTER, check_kinds, headers, read_object, some
from .hub import adapter_snapshot
from .names import adapter_name

WEIGHTS = "adapter_model.safetensors"
# Of a LoraConfig: what says which layers have which numbers, and what says nothing of a forward.
_USED = (
    "r", "lora_alpha", "target_modules", "exclude_modules", "use_rslora", "rank_pattern", "alpha_pattern",
    "layers_to_transform", "layers_pattern",
)  # fmt: skip
_NO_MATTER = (
    "peft_type", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version",
    "lora_dropout", "init_lora_weights", "megatron_core", "qalora_group_size", "runtime_config", "loftq_config",
    "eva_config", "bias",
)  # fmt: skip
_FROM_ZERO = True, "gaussian", "eva"  # of init_lora_weights: B = 0 at first, and the base weights stay
_BASE_STAYS = (*_FROM_ZERO, False, "orthogonal")
_KINDS = "linear layers are what is covered"


@dataclass(frozen=True)
class Adapter:
    """
    where    what messages begin with
    config   fields of a LoraConfig that say what is computed
    file     with its tensors; "": there is none, they are zeros until an update brings them
    dtype    of its tensors; None: what PEFT gives them
    """

    where: str
    config: Mapping[str, Any]
    file: str = ""
    dtype: str | None = None


def read_adapter(given: "str | os.PathLike | Mapping[str, Any]", asked: str = "EngineConfig: adapter") -> Adapter:
    """What EngineConfig.adapter names: known to be LoRA that is covered, and its file to be whole.

    asked    what names it, for messages
    raises   FileNotFoundError or ValueError that name the file, or the field, what was got and what was expected;
             TypeError for a field of a type that none of PEFT's has; ModuleNotFoundError without PEFT
    """
    _peft()
    if isinstance(given, Mapping):
        return Adapter(asked, _checked(EngineConfig(adapter=given).adapter, asked, _FROM_ZERO))
    name = os.fspath(given)
    path = Path(name).expanduser()
    path = path if path.exists() else adapter_snapshot(name)
    if not path.is_dir():
        raise ValueError(f"{asked}: {name}: a file, expected a directory of PEFT's, with {ADAPTER} and {WEIGHTS}")
    config, file = path / ADAPTER, path / WEIGHTS
    if not config.is_file():
        raise FileNotFoundError(f"{asked}: {path}: no {ADAPTER}, expected a directory of PEFT's, with {WEIGHTS} too")
    try:
        check_kinds(path)
        read = read_object(config)
        if file.is_file():
            headers(file)
    except ValueError as error:  # of a model's directory they say the same
        raise ValueError(f"{asked}: {str(error).removeprefix('weights: ')}") from error
    found = _checked(read, f"{asked}: {config}", _BASE_STAYS)
    if not file.is_file():
        others = sorted(other.name for other in path.glob("adapter_model.*"))
        what = f"; other formats are not read: {some(others)}" if others else ""
        raise FileNotFoundError(f"{asked}: {path}: no {WEIGHTS}{what}")
    return Adapter(f"{asked}: {path}", found, str(file))


def _peft() -> Any:
    try:
        import peft
    except ModuleNotFoundError:
        raise ModuleNotFoundError(f"EngineConfig: adapter: not installed: peft. Run: {pip_line('lora')}") from None
    return peft


def _checked(config: Mapping[str, Any], where: str, starts: tuple) -> dict[str, Any]:
    """What is used of a LoraConfig. ValueError for what it asks for beyond that."""

    def refuse(field: str, expected: str) -> ValueError:
        return ValueError(f"{where}: {field}: got {config.get(field)!r}, expected {expected}")

    if str(config.get("peft_type")).upper() != "LORA":
        raise refuse("peft_type", "'LORA'")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise refuse("task_type", "'CAUSAL_LM' or none")
    if config.get("bias", "none") != "none":
        raise refuse("bias", "'none': biases of the model would be others than its own")
    start = config.get("init_lora_weights", True)
    if not any(start is each or (isinstance(each, str) and start == each) for each in starts):
        expected = f"one of {', '.join(map(repr, starts))}: others change the base weights, or do not begin with B = 0"
        raise refuse("init_lora_weights", expected)
    for field in sorted(set(config) - {*_USED, *_NO_MATTER}):
        if config[field] not in (None, False, [], {}, ""):
            raise refuse(field, "none: plain LoRA of linear layers (rank-stabilised too) is what is covered")
    ranks = config.get("rank_pattern") or {}
    if not isinstance(ranks, Mapping):
        raise refuse("rank_pattern", "ranks by name")
    for field, rank in (("r", config.get("r", 8)), *(("rank_pattern", rank) for rank in ranks.values())):
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise refuse(field, "ranks of 1 or more")
    scales = config.get("alpha_pattern") or {}
    if not isinstance(scales, Mapping):
        raise refuse("alpha_pattern", "numbers by name")
    for field, alpha in (("lora_alpha", config.get("lora_alpha", 8)), *(("alpha_pattern", a) for a in scales.values())):
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise refuse(field, "a number")
    if not isinstance(config.get("use_rslora", False), bool):
        raise refuse("use_rslora", "true or false")
    for field in ("target_modules", "exclude_modules"):
        names = config.get(field)
        several = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if not (names is None or isinstance(names, str) or several):
            raise refuse(field, "names of modules, or an expression")
    return {field: config[field] for field in _USED if config.get(field) is not None}


def put_on(model: nn.Module, adapter: Adapter) -> None:
    """Layers of PEFT's around the model's, as get_peft_model makes them; `fill_adapters` gives them their tensors.

    raises   ValueError where modules that are named are none of the model's, or no linear layers
    """
    peft = _peft()
    asked = adapter.config.get("target_modules")
    if isinstance(asked, list):
        paths = [f".{path}" for path, _ in model.named_modules()]
        if unknown := [name for name in asked if not any(path.endswith(f".{name}") for path in paths)]:
            raise ValueError(
                f"{adapter.where}: target_modules: got {some(unknown)}, expected modules of the {type(model).__name__}"
            )
    try:
        config = peft.LoraConfig(**adapter.config)
        peft.get_peft_model(model, config, low_cpu_mem_usage=True)
    except Exception as error:  # of whatever PEFT finds in names, expressions and patterns
        what = " ".join(str(error).split())
        raise ValueError(f"{adapter.where}: PEFT cannot put it on a {type(model).__name__}: {what}") from error
    for path, module in model.named_modules():
        if lora.is_peft(module) and "base_layer" in module._modules:
            base = module.base_layer
            if type(module) is not peft.tuners.lora.layer.Linear or type(base) is not nn.Linear:
                raise ValueError(f"{adapter.where}: {path}: LoRA on a {type(base).__name__}: {_KINDS}")
    if adapter.dtype is not None:
        for name, values in _tensors(model).items():
            _put(model, name, values, values.to(getattr(torch, adapter.dtype)), values.device)
    model.requires_grad_(False)


def fill_adapters(
    model: nn.Module,
    adapter: Adapter,
    names: Iterable[str],
    device: torch.device,
    shards: Mapping[str, Shard] | None = None,
) -> None:
    """Give a model's adapters of these names their values, or those rows that a rank holds.

    raises   ValueError where the file's tensors are not all that the model has: by name, got and expected
    """
    from safetensors import safe_open

    shards, wanted = shards or {}, _tensors(model)
    if adapter.file:
        where = _fit(adapter, wanted)
        with safe_open(adapter.file, framework="pt") as opened:
            for name in names:
                whole = opened.get_tensor(where[name])
                _put(model, name, shards[name].take(whole).clone() if name in shards else whole, wanted[name], device)
        return
    for name in names:
        shape, kind = tuple(wanted[name].shape), wanted[name].dtype
        made = torch.zeros(shards[name].shape(shape) if name in shards else shape, dtype=kind)
        _put(model, name, made, wanted[name], device)


def _fit(adapter: Adapter, wanted: Mapping[str, Tensor]) -> dict[str, str]:
    """Names in the file, by the model's."""
    path, found = Path(adapter.file), headers(Path(adapter.file))
    where: dict[str, str] = {}
    unknown, wrong = [], []
    for given in found:
        name = adapter_name(given, wanted)
        if name is None:
            unknown.append(given)
        elif name in where:
            both = f"{where[name]} and {given} are both {name}"
            raise ValueError(f"{adapter.where}: {path.name}: {both}: which one counts?")
        else:
            where[name] = given
    for name, given in where.items():
        shape, dtype = found[given].shape, found[given].dtype
        if shape != tuple(wanted[name].shape):
            wrong.append(f"{given} is {shape}, expected {tuple(wanted[name].shape)}")
        elif dtype not in FLOATS:
            wrong.append(f"{given} is {dtype}, expected one of {', '.join(FLOATS)}")
    said = [f"missing: {some(missing)}"] if (missing := wanted.keys() - where.keys()) else []
    said += [f"no adapters of the model: {some(unknown)}"] if unknown else []
    said += [some(wrong)] if wrong else []
    if said:
        raise ValueError(f"{adapter.where}: {path.name} does not fit what {ADAPTER} says: {'; '.join(said)}")
    return where


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: model.get_parameter(name) for name in sorted(lora.adapters(model))}


def _put(model: nn.Module, name: str, values: Tensor, like: Tensor, device: torch.device) -> None:
    owner, _, leaf = name.rpartition(".")
    made = nn.Parameter(values.to(device, like.dtype), requires_grad=False)
    model.get_submodule(owner)._parameters[leaf] = made
