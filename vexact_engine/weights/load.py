"""From a path, a name on the Hub or a loaded model to a model ready to be patched.

Hugging Face builds the module and reads the tensors; here everything it would wave through is refused: a missing or
truncated file, a checkpoint that leaves parameters at random values, an architecture that it does not know.
"""

import contextlib
import io
import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vexact_ops.patch import kept_in_fp32

from .hub import check_name

if TYPE_CHECKING:
    from .partial import Origin

log = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_ONE_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass
class Loaded:
    """A causal language model in eval mode on its device, and what belongs to it.

    tokenizer       None where there is none
    eos_token_ids   the ids that end a text
    name            where it came from, for messages
    origin          where stages of a pipeline take their weights from, each its own: then `model` has none
    device          where those are to be
    """

    model: torch.nn.Module
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    name: str
    origin: "Origin | None" = None
    device: torch.device | None = None


def load(
    source: "str | os.PathLike | torch.nn.Module",
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    tokenizer: Any = None,
) -> Loaded:
    """A model to generate with.

    source      a directory with config.json and safetensors (one file, or shards and their index); a GGUF file, or a
                directory that holds one and no config.json; the name of a model on the Hub; or a loaded Hugging Face
                causal model, which is taken as it is
    device      where it is to be; a loaded model must be there already. None: where a loaded model is, else the GPU if
                there is one
    dtype       "bfloat16", "float32" or, on a GPU, "float16"; None: bfloat16, or what a loaded model has
    tokenizer   to use instead of the one beside the weights
    raises      FileNotFoundError, or ValueError with the reason: truncated, incomplete or unknown; TypeError on dtype
    """
    device = default_device(source) if device is None else device
    if dtype is not None:
        dtype = as_dtype(dtype, device)
    if isinstance(source, torch.nn.Module):
        name, model = type(source).__name__, _accept(source, device, dtype)
    else:
        name = os.fspath(source)
        model, found = _load_path(name, dtype or torch.bfloat16, want_tokenizer=tokenizer is None)
        model = model.to(device)
        model.requires_grad_(False)
        tokenizer = found if tokenizer is None else tokenizer
    return Loaded(model.eval(), tokenizer, _eos_token_ids(model, tokenizer, name), name)


def load_tokenizer(source: "str | os.PathLike") -> Any:
    """What `load` finds beside the weights; None where there is none."""
    name = os.fspath(source)
    path = Path(name).expanduser()
    if path.is_file():
        return _tokenizer(str(path.parent), gguf_file=path.name)
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1 and not (path / "config.json").exists():
            return _tokenizer(str(path), gguf_file=ggufs[0].name)
        return _tokenizer(str(path)) if any((path / file).exists() for file in _TOKENIZER_FILES) else None
    try:
        return _tokenizer(name)
    except (OSError, ValueError):
        return None


def load_in_stages(
    source: "str | os.PathLike", *, device: str | torch.device | None = None, dtype=None, tokenizer: Any = None
) -> Loaded:
    """A model directory for an engine of several stages: they read their weights themselves.

    raises   as load; ValueError for anything but a directory with safetensors
    """
    from .partial import Origin, skeleton

    device = default_device(source) if device is None else device
    kind = as_dtype(torch.bfloat16 if dtype is None else dtype, device)
    path = None if isinstance(source, torch.nn.Module) else Path(os.fspath(source)).expanduser()
    if path is None or not path.is_dir() or not (path / "config.json").exists():
        what = f"a loaded {type(source).__name__}" if path is None else os.fspath(source)
        raise ValueError(
            f"weights: pipeline_parallel_size: got {what}, expected a model directory with config.json and "
            "safetensors: each stage reads its own layers from it"
        )
    if tokenizer is None and any((path / file).exists() for file in _TOKENIZER_FILES):
        tokenizer = _tokenizer(str(path))
    origin = Origin(str(path), kind)
    with _quiet():
        try:
            model = skeleton(origin)
        except (OSError, KeyError) as error:
            raise _explain(str(path), error) from error
    return without_weights(model, tokenizer, origin, device)


def without_weights(model, tokenizer: Any, origin: "Origin", device: str | torch.device) -> Loaded:
    return Loaded(
        model, tokenizer, _eos_token_ids(model, tokenizer, origin.source), origin.source, origin, torch.device(device)
    )


def default_device(source: "str | os.PathLike | torch.nn.Module") -> torch.device:
    """Where a loaded model's first parameter is; for others the GPU if there is one, else the CPU."""
    first = next(source.parameters(), None) if isinstance(source, torch.nn.Module) else None
    return first.device if first is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")


def served(device: str | torch.device) -> dict[str, torch.dtype]:
    """What models may hold there: the CPU kernels know no float16."""
    return {name: d for name, d in DTYPES.items() if d != torch.float16 or torch.device(device).type != "cpu"}


def as_dtype(dtype: str | torch.dtype, device: str | torch.device = "cpu") -> torch.dtype:
    """A dtype that the device serves, by name or as itself. TypeError for anything else."""
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found not in served(device).values():
        names, where = ", ".join(sorted(served(device))), torch.device(device).type.replace("cuda", "GPU").upper()
        raise TypeError(f"weights: dtype: got {dtype!r}, expected one of {names} on a {where}")
    return found


def _accept(model: torch.nn.Module, device: str | torch.device, dtype: torch.dtype | None) -> torch.nn.Module:
    name = type(model).__name__
    if getattr(model, "config", None) is None or not hasattr(model, "get_output_embeddings"):
        raise TypeError(f"weights: source: got a {name}, expected a path or a Hugging Face causal language model")
    wide = kept_in_fp32(model)  # may be fp32 whatever the rest is, as from_pretrained has them
    dtypes = {p.dtype for n, p in model.named_parameters() if n not in wide or p.dtype != torch.float32}
    expected = {dtype} if dtype is not None else set(served(device).values())
    if len(dtypes) != 1 or not dtypes <= expected:
        got, want = (sorted(map(str, kinds)) for kinds in (dtypes, expected))
        got, want = " and ".join(got), " or ".join(want) + (" alone" if len(dtypes) > 1 else "")
        raise TypeError(f"weights: dtype: the given {name} has {got}, expected {want}: convert it first")
    places, device = {p.device.type for p in model.parameters()}, torch.device(device)
    if places != {device.type}:
        raise ValueError(f"weights: device: the given {name} is on {', '.join(sorted(places))}, expected {device}")
    return model


def _load_path(name: str, dtype: torch.dtype, want_tokenizer: bool) -> tuple[torch.nn.Module, Any]:
    path = Path(name).expanduser()
    if name and path.is_file():
        if not _is_gguf(path):
            raise ValueError(f"weights: {name}: a file that is not GGUF; expected a GGUF file or a model directory")
        return _load_gguf(path, dtype, want_tokenizer)
    if name and path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1 and not (path / "config.json").exists():
            return _load_gguf(ggufs[0], dtype, want_tokenizer)
        check_directory(path)
        has_tokenizer = want_tokenizer and any((path / file).exists() for file in _TOKENIZER_FILES)
        return _from_pretrained(str(path), dtype), _tokenizer(str(path)) if has_tokenizer else None
    check_name(name)
    model = _from_pretrained(name, dtype)
    try:
        return model, _tokenizer(name) if want_tokenizer else None
    except (OSError, ValueError) as error:
        log.warning("weights: %s: no tokenizer (%s): only token ids can be given", name, error)
        return model, None


def check_directory(path: Path) -> None:
    """A config, and safetensors that are all there and whole, each expert's too. Reads headers only."""
    if not (path / "config.json").exists():
        raise FileNotFoundError(f"weights: {path}: no config.json, expected a Hugging Face model directory")
    try:
        json.loads((path / "config.json").read_text())
    except ValueError as error:
        raise ValueError(f"weights: {path / 'config.json'} is not JSON: {error}") from error
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if index.exists():
        try:
            places = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"weights: {index} is no index of safetensors files: {error!r}") from error
        names = list(places)
        for file in sorted(set(places.values())):
            absent = {name for name, where in places.items() if where == file} - set(_tensor_names(path / file))
            if absent:
                raise ValueError(f"weights: {path / file} lacks tensors that the index says it has: {some(absent)}")
    elif single.exists():
        names = _tensor_names(single)
    else:
        raise FileNotFoundError(
            f"weights: {path}: no model.safetensors and no model.safetensors.index.json; other formats are not read"
        )
    _check_experts(path, names)


def _check_experts(path: Path, names: Iterable[str]) -> None:
    """Of experts that come one by one, each has what another has: whoever stacks them would take the next one's."""
    held: dict[str, dict[str, set[int]]] = {}
    for name in names:
        if found := _ONE_EXPERT.fullmatch(name):
            held.setdefault(found[1], {}).setdefault(found[3], set()).add(int(found[2]))
    absent = []
    for block, parts in held.items():
        count = 1 + max(max(experts) for experts in parts.values())
        absent += [f"{block}.{e}.{part}" for part, has in parts.items() for e in range(count) if e not in has]
    if absent:
        raise ValueError(f"weights: {path}: experts of a layer that differ in what they have: missing {some(absent)}")


def _tensor_names(file: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    if not file.exists():
        raise FileNotFoundError(f"weights: {file}: the index names this file, and it is not there")
    try:
        with safe_open(file, framework="pt") as opened:  # checks that the tensors cover the file exactly
            return list(opened.keys())
    except SafetensorError as error:
        raise ValueError(f"weights: {file} is truncated or damaged ({file.stat().st_size} bytes): {error}") from error


def _from_pretrained(name: str, dtype: torch.dtype, label: str | None = None, **options) -> torch.nn.Module:
    """Hugging Face's loader, which must find a value for every parameter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    label = label or name
    with _quiet():
        try:
            config_options = {key: value for key, value in options.items() if key == "gguf_file"}
            config = AutoConfig.from_pretrained(name, **config_options)
        except Exception as error:
            raise _explain(label, error) from error
        if type(config) not in AutoModelForCausalLM._model_mapping:
            kind = getattr(config, "model_type", type(config).__name__)
            raise ValueError(f"weights: {label}: model type {kind!r} is no causal language model of transformers")
        # Mismatched sizes are let through here, only to be named below.
        options |= {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
        try:
            model, info = AutoModelForCausalLM.from_pretrained(name, config=config, **options)
        except Exception as error:
            raise _explain(label, error) from error
    problems = {key: value for key, value in info.items() if value and key != "unexpected_keys"}
    if problems:
        what = "; ".join(f"{key.replace('_', ' ')}: {some(_words(value))}" for key, value in problems.items())
        raise ValueError(f"weights: {label}: the checkpoint does not fit {type(model).__name__}: {what}")
    if info["unexpected_keys"]:
        log.warning("weights: %s: not used by %s: %s", label, type(model).__name__, some(info["unexpected_keys"]))
    return model


def _words(problem) -> list[str]:
    """Names, or (name, size there, size here)."""
    problem = [problem] if isinstance(problem, str) else problem
    return [p if isinstance(p, str) else f"{p[0]} is {tuple(p[1])}, expected {tuple(p[2])}" for p in problem]


def _load_gguf(path: Path, dtype: torch.dtype, want_tokenizer: bool) -> tuple[torch.nn.Module, Any]:
    import transformers

    folder, options = str(path.parent), {"gguf_file": path.name}
    quantization = {}
    if hasattr(transformers, "GgufConfig"):  # where it exists, blocks might otherwise stay packed
        quantization["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = _from_pretrained(folder, dtype, str(path), **options, **quantization)
    return model, _tokenizer(folder, **options) if want_tokenizer else None


def _is_gguf(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"GGUF"


def _tokenizer(name: str, **options) -> Any:
    from transformers import AutoTokenizer

    with _quiet():
        try:
            return AutoTokenizer.from_pretrained(name, **options)
        except Exception as error:
            raise _explain(f"{name}: tokenizer", error) from error


def _explain(name: str, error: Exception) -> Exception:
    """The loader's error, in one line that begins with whose it is."""
    kind = FileNotFoundError if isinstance(error, OSError) else ValueError
    what = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if name.endswith(".gguf"):
        what = f"truncated or damaged, or no GGUF that transformers reads: {what}"
    return kind(f"weights: {name}: {what}")


def _eos_token_ids(model: torch.nn.Module, tokenizer: Any, name: str) -> tuple[int, ...]:
    """The generation config's, as in Hugging Face's generate, else the config's; and the tokenizer's own: where a base
    model was trained to chat, one of the two is often left behind."""

    def of(owner: Any) -> set[int]:
        ids = getattr(owner, "eos_token_id", None)
        return set() if ids is None else set(ids) if isinstance(ids, Iterable) else {ids}

    config, own = of(getattr(model, "generation_config", None)) or of(model.config), of(tokenizer)
    if config and own - config:
        log.warning(
            "%s: texts end with the token ids %s by its configuration and %s by its tokenizer: answers stop at either",
            name, sorted(config), sorted(own),
        )  # fmt: skip
    return tuple(sorted(config | own))


def some(names: Iterable, most: int = 6) -> str:
    """A few of many, and how many more."""
    names = sorted(map(str, names))
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hugging Face's bars on a terminal only (some ignore its switch and write to stderr whatever it says), and its
    report on missing weights not at all: they are refused here."""
    from transformers.utils import logging as hf

    verbosity, bars = hf.get_verbosity(), hf.is_progress_bar_enabled()
    hf.set_verbosity_error()
    try:
        if sys.stderr.isatty():
            yield
        else:
            hf.disable_progress_bar()
            with contextlib.redirect_stderr(io.StringIO()):
                yield
    finally:
        hf.set_verbosity(verbosity)
        if bars:
            hf.enable_progress_bar()
