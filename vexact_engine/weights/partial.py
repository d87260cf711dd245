"""A model of which only some tensors are there, the rest on the meta device: for who holds a few of its layers."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from vexact_ops.patch import kept_in_fp32

from .experts import aliases, expert_views
from .load import check_directory, some


@dataclass(frozen=True)
class Origin:
    """Where weights come from, for a process that takes some of them.

    source   a directory with config.json and safetensors; or, with a seed, what load_random takes
    seed     of random weights
    layers   of random weights: the first so many alone
    """

    source: str
    dtype: torch.dtype
    seed: int | None = None
    layers: int | None = None


def skeleton(origin: Origin) -> nn.Module:
    """The whole model without its weights. What its rotation turns by is there, for that is in no checkpoint."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    from .random import config_of

    if origin.seed is None:
        check_directory(Path(origin.source))
        config = AutoConfig.from_pretrained(origin.source)
    else:
        config = config_of(origin.source, origin.layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=origin.dtype)
    if origin.seed is None and (Path(origin.source) / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(origin.source)
    if origin.seed is None:  # what from_pretrained keeps wider than the rest
        wide = kept_in_fp32(model, origin.dtype)
        for name, tensor in _tensors(model).items():
            if name in wide:
                tensor.data = tensor.data.float()
    model.requires_grad_(False)
    for name, module in model.named_modules():
        kept = module._non_persistent_buffers_set & {k for k, v in module._buffers.items() if v is not None}
        if not kept:
            continue
        for buffer in kept:  # not finite, should nobody write there
            module._buffers[buffer] = torch.full_like(module._buffers[buffer], float("nan"), device="cpu")
        with torch.no_grad():
            model._init_weights(module)  # as from_pretrained has them made
        if not all(module._buffers[buffer].isfinite().all() for buffer in kept):
            raise ValueError(f"weights: {origin.source}: {name}: transformers does not say how to make {some(kept)}")
    return model.eval()


def fill(model: nn.Module, names: Iterable[str], origin: Origin, device: torch.device) -> None:
    """Give a skeleton the tensors of these names. ValueError where the directory does not have one."""
    names = set(names)
    if origin.seed is None:
        _fill_from_files(model, names, origin.source, device)
        return
    from .random import load_random

    # Their values follow from those drawn before them: all are drawn, these are kept.
    whole = load_random(origin.source, dtype=origin.dtype, device=device, seed=origin.seed, layers=origin.layers).model
    tensors = dict(whole.named_parameters(remove_duplicate=False)) | dict(whole.named_buffers(remove_duplicate=False))
    shared = _shared(model)
    for name in names:
        for alias in shared.get(name, (name,)):
            _put(model, alias, tensors[name])


def _fill_from_files(model: nn.Module, names: set[str], source: str, device: torch.device) -> None:
    from safetensors import safe_open

    path, shared, old = Path(source), _shared(model), aliases(model)
    meta = _tensors(model)
    place: dict[str, Tensor] = {}  # name in the files -> where it goes
    wholes: dict[str, str] = {}  # the same -> a tensor of the model that it is part of, or is
    for name in names:
        if not meta[name].is_meta:
            _put(model, name, meta[name].to(device))
            continue
        made = torch.empty(meta[name].shape, dtype=meta[name].dtype, device=device)
        if isinstance(meta[name], nn.Parameter):
            made = nn.Parameter(made, requires_grad=False)
        for alias in shared.get(name, (name,)):
            _put(model, alias, made)
            place[alias] = made.detach()
            wholes[alias] = name
    for part, (stacked, view) in expert_views(model).items():
        if stacked in place:
            place[part], wholes[part] = view, stacked
    missing = {name: _tensors(model)[name].numel() for name in set(wholes.values())}
    index = path / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.exists():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    seen: set[str] = set()
    for file in files:
        with safe_open(path / file, framework="pt") as opened:
            for given in opened.keys():  # noqa: SIM118 - it is no dictionary
                name = old.get(given, given)
                if name not in place or wholes[name] in seen:
                    continue
                value, target = opened.get_tensor(given), place[name]
                if value.shape != target.shape:
                    raise ValueError(
                        f"weights: {path / file}: {given} is {tuple(value.shape)}, expected {tuple(target.shape)}"
                    )
                target.copy_(value)
                missing[wholes[name]] -= target.numel()
                if not missing[wholes[name]]:
                    seen.add(wholes[name])
    absent = [name for name, count in missing.items() if count]
    if absent:
        raise ValueError(f"weights: {source}: not there, or not under the names of transformers: {some(absent)}")


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def _shared(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """All names of each tensor that has several."""
    found: dict[int, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(tensor), []).append(name)
    return {name: tuple(names) for names in found.values() if len(names) > 1 for name in names}


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    (module._buffers if leaf in module._buffers else module._parameters)[leaf] = tensor
