"""Which files of a model directory are its weights, and what they say they hold: decided once, for every loader.

The order is that of transformers' from_pretrained, so that a trainer and all loaders here read the same tensors: the
file that config.json names as transformers_weights, else model.safetensors, else the shards of
model.safetensors.index.json. What else may take part in what a model computes (an adapter, scales of quantised weights,
another format) is refused by name. Only headers are read, and nothing of the size that config.json asks for is made.
"""

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

from .config import own_default
from .mxfp4 import is_mxfp4

log = logging.getLogger(__name__)

ADAPTER = "adapter_config.json"  # PEFT's
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_ONE_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
_DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_READ_BY_TRANSFORMERS = (".json", ".safetensors", ".jinja", ".model", ".txt", ".py", ".tiktoken")
_LARGEST_JSON = 256 << 20  # bytes: the index of the largest models has 20 MB


@dataclass(frozen=True)
class Header:
    """What a file says of one of its tensors. dtype: as safetensors calls it, "BF16"."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Directory:
    """
    config    config.json as it stands there
    files     of the weights, in the order that they are read in
    tensors   all that they hold, by name
    """

    path: Path
    config: Mapping
    files: tuple[Path, ...]
    tensors: Mapping[str, Header]


def read_directory(path: "str | os.PathLike") -> Directory:
    """A directory's config and the headers of its weights: all there and whole, each expert's too.

    raises   FileNotFoundError or ValueError that name the file and what is wrong with it
    """
    path = Path(path)
    check_kinds(path)
    adapter, config_file = path / ADAPTER, path / "config.json"
    if adapter.exists() and config_file.is_file():
        raise ValueError(
            f"weights: {adapter}: an adapter beside the weights: does it count? Put its files into a directory of its "
            "own, and give that as EngineConfig.adapter, or take them out"
        )
    if not config_file.is_file():
        raise FileNotFoundError(f"weights: {path}: no config.json, expected a Hugging Face model directory")
    config = read_object(config_file)
    if (generation := path / "generation_config.json").is_file():
        read_object(generation)  # transformers would pass over one that it cannot read
    _check_config(config_file, config)
    files, places = _files(path, config)
    held = {file: headers(file) for file in files}
    for file, inside in held.items():
        if absent := {name for name, where in places.items() if where == file} - inside.keys():
            raise ValueError(f"weights: {file} lacks tensors that the index says it has: {some(absent)}")
    tensors: dict[str, Header] = {}
    for file, inside in held.items():
        if twice := inside.keys() & tensors.keys():
            name = min(twice)
            raise ValueError(f"weights: {file}: {name} is in {tensors[name].file.name} too: which one counts?")
        tensors |= inside
    _check_experts(path, tensors)
    _check_layers(config_file, config, len(tensors))
    return Directory(path, config, files, tensors)


def is_adapter(path: Path) -> bool:
    """Whether a directory is an adapter's, and no model's."""
    return (path / ADAPTER).is_file() and not (path / "config.json").exists()


def base_of(path: Path) -> str:
    """The model that an adapter's directory is for. ValueError where it names none."""
    file = path / ADAPTER
    config = read_object(file)
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"weights: {file}: base_model_name_or_path: got {name!r}, expected the model that it is for: give that, "
            "and this directory as EngineConfig.adapter"
        )
    if revision not in (None, "main"):
        raise ValueError(
            f"weights: {file}: revision: got {revision!r}, expected none: give the model at that revision, and this "
            "directory as EngineConfig.adapter"
        )
    return name


def check_kinds(path: Path) -> None:
    """Nothing that transformers might open is a pipe, a socket or a device: reading one may never end."""
    for entry in os.scandir(path):
        ordinary = os.path.isfile(entry.path) or os.path.isdir(entry.path) or not os.path.exists(entry.path)
        if entry.name.endswith(_READ_BY_TRANSFORMERS) and not ordinary:
            raise ValueError(f"weights: {entry.path} is a pipe, a socket or a device, expected a file")


def read_object(file: Path) -> dict:
    """Of a file of JSON. ValueError where it holds none."""
    found = _json(file)
    if not isinstance(found, dict):
        raise ValueError(f"weights: {file}: got a {type(found).__name__}, expected an object")
    return found


def _json(file: Path):
    size = file.stat().st_size
    if size > _LARGEST_JSON:
        raise ValueError(f"weights: {file} has {size} bytes, expected at most {_LARGEST_JSON}")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"weights: {file} is not JSON: {error}") from error


def _check_config(file: Path, config: Mapping) -> None:
    """What else transformers would do with the weights because config.json says so."""
    if (config.get("quantization_config") is not None and not is_mxfp4(config)) or config.get("compression_config"):
        raise ValueError(
            f"weights: {file}: quantization_config: the weights are quantised, which is not read but for MXFP4: save "
            "them in bf16, fp16 or fp32, without it"
        )
    for name, part in config.items():  # of its own parts; for the whole the caller says one
        inner = name.endswith("_config") and isinstance(part, Mapping)
        kind = (part.get("dtype") or part.get("torch_dtype")) if inner else None
        if isinstance(kind, str) and not isinstance(getattr(torch, kind, None), torch.dtype):
            raise ValueError(f"weights: {file}: {name}: dtype: got {kind!r}, expected a dtype of torch's, or none")
    if config.get("fusion_config"):
        raise ValueError(f"weights: {file}: fusion_config: fused modules are not read: take it out")
    check_once(f"weights: {file}", config)


def check_once(where: str, config: Mapping) -> None:
    """raises ValueError where a configuration, or a part of it, says twice what transformers reads once"""
    for name, part in {"": config, **{name: part for name, part in config.items() if name.endswith("_config")}}.items():
        if isinstance(part, Mapping):
            _check_rope(f"{where}: {name}: " if name else f"{where}: ", part)
            _check_windows(f"{where}: {name}: " if name else f"{where}: ", part)


def _check_rope(where: str, config: Mapping) -> None:
    """A rotation is said once. Where rope_parameters is there, as transformers 5 writes it, a rope_theta beside it is
    not read; and a rope_scaling is read in its place, with the family's own rope_theta where it names none. What a
    class of transformers writes beside it by itself nobody has said."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping) or not rope:
        return
    kinds = [part for part in rope.values() if isinstance(part, Mapping)] or [rope]  # one for each type of layer
    for key in ("rope_theta", "partial_rotary_factor"):
        given, counts = config.get(key), [part[key] for part in kinds if part.get(key) is not None]
        if given is not None and counts and given not in counts and given != own_default(config, key):
            raise ValueError(
                f"{where}{key}: got {given!r} beside rope_parameters, where it is {counts[0]!r} and which "
                "alone is read: take one of them out"
            )
    scaling = config.get("rope_scaling")
    if not isinstance(scaling, Mapping) or not scaling or kinds[0] is not rope:
        return
    read = {
        "rope_theta": config.get("rope_theta"),
        **scaling,
        "rope_type": scaling.get("rope_type", scaling.get("type")),
    }
    others = {key for key in {*rope, *read} - {"type"} if key in rope and rope[key] != read.get(key)}
    if others:
        raise ValueError(
            f"{where}rope_scaling: got one beside rope_parameters, in whose place it would be read, with "
            f"another {', '.join(sorted(others))}: write what it says into rope_parameters"
        )


def _check_windows(where: str, config: Mapping) -> None:
    """Of Qwen's switch: where layer_types is there, as transformers 5 writes it, that alone is read."""
    kinds, full = config.get("layer_types"), config.get("max_window_layers")
    if not isinstance(kinds, list) or not isinstance(full, int) or not config.get("sliding_window"):
        return
    if config.get("use_sliding_window") is True and full < len(kinds) and "sliding_attention" not in kinds:
        raise ValueError(
            f"{where}use_sliding_window: got True beside layer_types, which alone is read and has no "
            "'sliding_attention': write the layers with a window into it, or take one of them out"
        )


def _files(path: Path, config: Mapping) -> tuple[tuple[Path, ...], dict[str, Path]]:
    """The files, and of an index where it says that each tensor is."""
    there = sorted(entry.name for entry in os.scandir(path) if os.path.isfile(entry.path))
    if any(_DISTRIBUTED.fullmatch(name) for name in there):
        name = next(name for name in there if _DISTRIBUTED.fullmatch(name))
        raise ValueError(f"weights: {path / name}: a distributed checkpoint is not read: save it with save_pretrained")
    chosen = config.get("transformers_weights")
    if chosen is not None:
        name = _inside(path / "config.json", chosen, "transformers_weights")
        if not name.endswith((".safetensors", ".safetensors.index.json")) or not (path / name).is_file():
            what = f"{path / 'config.json'}: transformers_weights: got {chosen!r}"
            raise FileNotFoundError(f"weights: {what}, expected a file of safetensors, or their index, that is there")
    else:
        chosen = next((name for name in (SINGLE, INDEX) if name in there), None)
    if chosen is None:
        raise _no_weights(path, there)
    if not chosen.endswith(".index.json"):
        others = [name for name in there if re.search(r"-\d{5}-of-\d{5}\.safetensors$", name)]
        if others and chosen == SINGLE:
            log.warning("weights: %s: %s is read, as transformers does; not read: %s", path, SINGLE, some(others))
        return (path / chosen,), {}
    return _shards(path / chosen)


def _shards(index: Path) -> tuple[tuple[Path, ...], dict[str, Path]]:
    found = _json(index)
    places = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(places, dict) or not places or not isinstance(found.get("metadata"), dict):
        what = "expected weight_map, names of tensors and of their files, and metadata"
        raise ValueError(f"weights: {index} is no index of safetensors files: {what}")
    where = {name: index.parent / _inside(index, file, f"weight_map: {name}") for name, file in places.items()}
    for file in dict.fromkeys(where.values()):
        if not file.name.endswith(".safetensors"):
            raise ValueError(f"weights: {index}: it names {file.name}, expected files of safetensors")
        if not file.is_file():
            raise FileNotFoundError(f"weights: {file}: the index names this file, and it is not there")
    return tuple(sorted(set(where.values()), key=lambda file: str(file.relative_to(index.parent)))), where


def _inside(file: Path, name: object, what: str) -> str:
    """A file's name that stays in the directory."""
    if not isinstance(name, str) or not name or "\0" in name:
        raise ValueError(f"weights: {file}: {what}: got {name!r}, expected the name of a file")
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise ValueError(f"weights: {file}: {what}: got {name!r}, expected a file of this directory")
    return name


def _no_weights(path: Path, there: list[str]) -> Exception:
    dangling = [n for n in (SINGLE, INDEX) if os.path.lexists(path / n)]
    if dangling:
        return FileNotFoundError(f"weights: {path / dangling[0]}: a link to a file that is not there")
    stray = [name for name in there if name.endswith(".safetensors")]
    pickles = [name for name in there if name.endswith((".bin", ".pt", ".pth"))]
    expected = f"no {SINGLE} and no {INDEX}"
    if stray:
        what = f"found {some(stray)}: a variant has to be renamed, and shards need their index"
    elif pickles:
        what = f"found {some(pickles)}: other formats are not read; transformers' save_pretrained writes safetensors"
    else:
        what = "other formats are not read"
    return FileNotFoundError(f"weights: {path}: {expected}; {what}")


def headers(file: Path) -> dict[str, Header]:
    """Of a file of safetensors, which is known to be whole then."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:  # checks that the tensors cover the file exactly
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - it is no dictionary
            return {n: Header(file, tuple(part.get_shape()), part.get_dtype()) for n, part in slices.items()}
    except (SafetensorError, OSError) as error:
        with open(file, "rb") as raw:
            pointer = raw.read(40).startswith(b"version https://git-lfs")
        what = "a pointer of Git LFS: git lfs pull fetches what it stands for" if pointer else str(error)
        raise ValueError(f"weights: {file} is truncated or damaged ({file.stat().st_size} bytes): {what}") from error


def _check_experts(path: Path, names: Iterable[str]) -> None:
    """Of experts that come one by one, each has what another has: whoever stacks them would take the next one's."""
    held: dict[str, dict[str, set[int]]] = {}
    for name in names:
        if found := _ONE_EXPERT.fullmatch(name):
            held.setdefault(found[1], {}).setdefault(found[3], set()).add(int(found[2]))
    absent: list[str] = []
    for block, parts in held.items():
        every = set().union(*parts.values())
        if max(every) >= len(every):  # a number far away is no reason to count up to it
            absent.append(f"{block}.{next(e for e in range(len(every)) if e not in every)}")
        absent += [f"{block}.{e}.{part}" for part, has in parts.items() for e in sorted(every - has)]
    if absent:
        raise ValueError(f"weights: {path}: experts of a layer that differ in what they have: missing {some(absent)}")


def _check_layers(file: Path, config: Mapping, most: int) -> None:
    """Before transformers makes so many: a layer has a tensor at least."""
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in _LAYERS:
            count = part.get(key)
            if isinstance(count, int) and count > most:
                raise ValueError(f"weights: {file}: {key}: got {count}, but the files hold {most} tensors in all")


def some(names: Iterable, most: int = 6) -> str:
    """A few of many, and how many more."""
    names = sorted(map(str, names))
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
