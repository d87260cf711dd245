"""A model of which only some tensors are there, the rest on the meta device: for who holds a few of its layers."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vexact_ops.patch import kept_in_fp32, lora

from .adapter import Adapter, fill_adapters, put_on
from .config import auto_class, explain, quiet, read_config
from .conversion import Fit, fit
from .cut import Shard
from .directory import Directory, read_directory, some
from .names import BASE


@dataclass(frozen=True)
class Origin:
    """Where weights come from, for a process that takes some of them.

    source   a directory with config.json and safetensors; or, with a seed, what load_random takes
    seed     of random weights
    layers   of random weights: the first so many alone
    untied   names that config.json ties to others, while the files have other values for them; None: not known yet
    images   as load has it
    adapter  that the model is computed with (or its fields)
    """

    source: str
    dtype: torch.dtype
    seed: int | None = None
    layers: int | None = None
    untied: tuple[str, ...] | None = None
    images: bool = True
    adapter: Adapter | None = None

    def __post_init__(self):
        if isinstance(self.adapter, Mapping):
            object.__setattr__(self, "adapter", Adapter(**self.adapter))


def settled(origin: Origin) -> Origin:
    """With what has to be read to be known, once for all who take their weights from there."""
    if origin.seed is not None or origin.untied is not None:
        return origin
    directory = read_directory(origin.source)
    model = empty_model(directory, origin.dtype, origin.images)
    found = fit(model, directory)
    with Files(directory) as files:
        apart = (a for a, b in found.doubled if not torch.equal(*(_whole(model, found, n, files) for n in (a, b))))
        return replace(origin, untied=tuple(sorted(apart)))


def empty_model(directory: Directory, dtype: torch.dtype, images: bool = True) -> nn.Module:
    """The model of a directory, on the meta device, with the dtypes that from_pretrained gives it. FileNotFoundError or
    ValueError for a configuration that transformers cannot make one of."""
    config = read_config(str(directory.path), dtype=dtype)
    with torch.device("meta"), quiet():
        try:
            model = auto_class(config, images).from_config(config, dtype=dtype, trust_remote_code=False)
        except Exception as error:  # of numbers that are none, negative or too large, whatever says so
            raise explain(str(directory.path), error, config) from error
    wide = kept_in_fp32(model, dtype)  # what from_pretrained keeps wider than the rest
    for name, tensor in _tensors(model).items():
        if name in wide:
            tensor.data = tensor.data.float()
    return model


def skeleton(origin: Origin) -> nn.Module:
    """The whole model without its weights. What its rotation turns by is there, for that is in no checkpoint."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    from .random import config_of

    if origin.seed is None:
        directory = read_directory(origin.source)
        model = empty_model(directory, origin.dtype, origin.images)
        for name in settled(origin).untied or ():
            _put(model, name, nn.Parameter(torch.empty_like(_tensors(model)[name]), requires_grad=False))
            model.all_tied_weights_keys.pop(name, None)
        if (directory.path / "generation_config.json").exists():
            model.generation_config = GenerationConfig.from_pretrained(origin.source)
    else:
        config = config_of(origin.source, origin.layers)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=origin.dtype, trust_remote_code=False)
    if origin.adapter is not None:
        put_on(model, origin.adapter)
    model.requires_grad_(False)
    for name, module in model.named_modules():
        kept = module._non_persistent_buffers_set & {k for k, v in module._buffers.items() if v is not None}
        if not kept:
            continue
        unlikely = {}
        for buffer in kept:  # what stays, should nobody write there
            dtype = module._buffers[buffer].dtype
            unlikely[buffer] = (
                float("nan") if dtype.is_floating_point else dtype != torch.bool and torch.iinfo(dtype).min
            )
            module._buffers[buffer] = torch.full_like(module._buffers[buffer], unlikely[buffer], device="cpu")
        with torch.no_grad():
            model._init_weights(module)  # as from_pretrained has them made
        if any(_still(module._buffers[buffer], value) for buffer, value in unlikely.items()):
            raise ValueError(f"weights: {origin.source}: {name}: transformers does not say how to make {some(kept)}")
    return model.eval()


def fill(
    model: nn.Module,
    names: Iterable[str],
    origin: Origin,
    device: torch.device,
    shards: Mapping[str, Shard] | None = None,
) -> None:
    """Give a skeleton the tensors of these names, or those of their rows that a rank holds. ValueError where the
    directory does not have one."""
    names, shards = set(names), shards or {}
    if adapters := names & lora.adapters(model):
        fill_adapters(model, origin.adapter, adapters, device, shards)
        names -= adapters
    if origin.seed is None:
        _fill_from_files(model, names, origin, device, shards)
        return
    from .random import load_random

    # Their values follow from those drawn before them: all are drawn, these are kept.
    whole = load_random(origin.source, dtype=origin.dtype, device=device, seed=origin.seed, layers=origin.layers).model
    tensors = dict(whole.named_parameters(remove_duplicate=False)) | dict(whole.named_buffers(remove_duplicate=False))
    shared = _shared(model)
    for name in names:
        made = tensors[_bare(name)]
        if name in shards:
            made = nn.Parameter(shards[name].take(made.detach()).clone(), requires_grad=False)
        for alias in shared.get(name, (name,)):
            _put(model, alias, made)


def _fill_from_files(
    model: nn.Module,
    names: set[str],
    origin: Origin,
    device: torch.device,
    shards: Mapping[str, Shard],
) -> None:
    directory, shared, meta = read_directory(origin.source), _shared(model), _tensors(model)
    whole = empty_model(directory, origin.dtype, origin.images)
    place: dict[str, Tensor] = {}
    rows: dict[str, Shard] = {}
    for name in names:
        if not meta[name].is_meta:
            _put(model, name, meta[name].to(device))
            continue
        shape = shards[name].shape(meta[name].shape) if name in shards else meta[name].shape
        made = torch.empty(shape, dtype=meta[name].dtype, device=device)
        if isinstance(meta[name], nn.Parameter):
            made = nn.Parameter(made, requires_grad=False)
        for alias in shared.get(name, (name,)):
            _put(model, alias, made)
            place[_bare(alias)] = made.detach()
            if name in shards:
                rows[_bare(alias)] = shards[name]
    found, state = fit(whole, directory), whole.state_dict()
    with Files(directory) as files:
        for step in found.steps:
            if any(target in place for target in step.targets):
                made = step.make(whole, lambda name, kind=state[step.key].dtype: files.read(name, kind))
                for target in step.targets:
                    if target in place:
                        own = _as_it_is_made(whole, target, made[target]) if target in rows else made[target]
                        place[target].copy_(rows[target].take(own) if target in rows else own)
    _initialize(model, [name for name in _tensors(model) if _bare(name) in place.keys() - rows.keys()])


def _bare(name: str) -> str:
    """What a tensor is called where its model has no adapters."""
    return name.replace(f"{BASE}.", ".")


def _as_it_is_made(model: nn.Module, name: str, loaded: Tensor) -> Tensor:
    """A whole tensor, of which rows are to be taken, as from_pretrained leaves it: see `_initialize`."""
    _put(model, name, nn.Parameter(loaded, requires_grad=False))
    _initialize(model, [name])
    made = _tensors(model)[name].detach()
    _put(model, name, nn.Parameter(made.to("meta"), requires_grad=False))
    return made


@torch.no_grad()
def _initialize(model: nn.Module, names: Iterable[str]) -> None:
    """What from_pretrained does to modules once their tensors are there: nothing to a tensor that was loaded, but
    youtu's embedding has its row of padding set to 0."""
    tensors = _tensors(model)
    for name in names:
        tensors[name]._is_hf_initialized = True
    for path in {name.rpartition(".")[0] for name in names}:
        model._initialize_weights(model.get_submodule(path))


def _still(tensor: Tensor, value: float) -> bool:
    """Whether any element is what a buffer was filled with."""
    return bool((tensor.isnan() if tensor.is_floating_point() else tensor == value).any())


def _whole(model: nn.Module, found: Fit, name: str, files: "Files") -> Tensor:
    step = next(step for step in found.steps if name in step.targets)
    return step.make(model, lambda n: files.read(n, model.state_dict()[step.key].dtype))[name]


class Files:
    """A directory's files, each opened when something is read from it."""

    def __init__(self, directory: Directory) -> None:
        self._directory, self._stack, self._opened = directory, ExitStack(), {}

    def __enter__(self) -> "Files":
        return self

    def __exit__(self, *exception) -> None:
        self._stack.close()

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """In this dtype, unless it holds numbers of another kind (packed ones)."""
        from safetensors import safe_open

        file = self._directory.tensors[name].file
        if file not in self._opened:
            self._opened[file] = self._stack.enter_context(safe_open(file, framework="pt"))
        found = self._opened[file].get_tensor(name)
        return found.to(dtype) if found.is_floating_point() == dtype.is_floating_point else found


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
