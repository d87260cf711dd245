"""From a path, a name on the Hub or a loaded model to a model ready to be patched.

Hugging Face builds the module and reads the tensors; here everything it would wave through is refused: a missing or
truncated file, a checkpoint that leaves parameters at random values, an architecture that it does not know.
directory.py decides which files are read, and conversion.py whether they fit, before anything of their size is made.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vexact_ops.patch import WITH_IMAGES, lora, score_head

from .adapter import Adapter, fill_adapters, put_on, read_adapter
from .config import auto_class, explain, quiet, read_config
from .conversion import fit
from .directory import base_of, is_adapter, read_directory, some
from .generation import tell_unread
from .gguf import check_file, check_gguf, read_once
from .hub import snapshot
from .mxfp4 import is_mxfp4
from .processors import NONE, Processors, load_processors
from .tokenizer import load_tokenizer

if TYPE_CHECKING:
    from .partial import Origin

log = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass
class Loaded:
    """A causal language model in eval mode on its device, and what belongs to it.

    tokenizer       None where there is none
    eos_token_ids   the ids that end a text
    name            where it came from, for messages
    origin          where stages of a pipeline take their weights from, each its own: then `model` has none
    device          where those are to be
    processors      of images and of videos: transformers' own of a directory
    path            the directory that the weights were read from; None: there is none
    adapter         LoRA that it is computed with, of files or a configuration; None: there is none, or it came with
                    the model
    nodes           actors of Ray's that begin the stages' processes (parallel/nodes.py), one on each machine; None:
                    where they are is found by EngineConfig.nodes
    """

    model: torch.nn.Module
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    name: str
    origin: "Origin | None" = None
    device: torch.device | None = None
    processors: Processors = NONE
    path: Path | None = None
    nodes: Sequence[Any] | None = None
    adapter: Adapter | None = None


def load(
    source: "str | os.PathLike | torch.nn.Module",
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    tokenizer: Any = None,
    trust_remote_code: bool = False,
    images: bool = True,
    adapter: "str | os.PathLike | Mapping[str, Any] | None" = None,
    adapter_dtype: str | None = None,
    meanwhile: Callable[[torch.nn.Module, torch.device], AbstractContextManager[None]] | None = None,
) -> Loaded:
    """A model to generate with.

    source      a directory with config.json and safetensors (one file, or shards and their index); a GGUF file, or a
                directory that holds one and no config.json; the name of a model on the Hub; a directory of an adapter,
                which names its model; or a loaded Hugging Face causal model, which is taken as it is, with LoRA's
                adapters where PEFT has put them on it
    device      where it is to be; a loaded model must be there already. None: where a loaded model is, else the GPU if
                there is one
    dtype       "bfloat16", "float32" or, on a GPU, "float16"; None: bfloat16, or what a loaded model has
    tokenizer   None: the one beside the weights; a path or a name on the Hub: the one there; False: none, and prompts
                are token ids; or the tokenizer itself
    trust_remote_code  run the Python that a directory brings for its tokenizer. A model's is never run
    images      False: a model that transformers has a class of text alone of (Qwen3.5) is that one
    adapter     LoRA that the model is computed with, as EngineConfig.adapter has it, and adapter_dtype; of a loaded
                model refused
    meanwhile   given the model, still on the host, and where it goes: a block that it goes there in
    raises      FileNotFoundError, or ValueError with the reason: truncated, incomplete or unknown; TypeError on dtype
    """
    device, processors, path = default_device(source) if device is None else device, NONE, None
    if dtype is not None:
        dtype = as_dtype(dtype, device)
    if isinstance(source, torch.nn.Module):
        for field, given in ("adapter", adapter), ("adapter_dtype", adapter_dtype):
            if given is not None:
                raise ValueError(
                    f"EngineConfig: {field}: got one for a loaded {type(source).__name__}, expected None: give the "
                    "model that PEFT has put it on (peft.PeftModel.from_pretrained)"
                )
        name, model, chosen = type(source).__name__, _accept(source, device, dtype), None
    else:
        name = os.fspath(source)
        base, chosen = _with_adapter(name, adapter, adapter_dtype, device)
        path = _found(base)
        kind = dtype or torch.bfloat16
        with read_once() if path.is_file() else nullcontext():
            model = _load_gguf(path, kind) if path.is_file() else _load_directory(path, name, kind, images)
            if chosen is not None:
                put_on(model, chosen)
                fill_adapters(model, chosen, lora.adapters(model), torch.device("cpu"))
            with meanwhile(model, torch.device(device)) if meanwhile else nullcontext():
                model = model.to(device)
                model.requires_grad_(False)
                tokenizer = load_tokenizer(
                    path if base == name else name, tokenizer, trust_remote_code=trust_remote_code
                )
        if model.config.model_type in WITH_IMAGES:
            processors = load_processors(path, name)
    if tokenizer is False or isinstance(tokenizer, str | os.PathLike):
        tokenizer = load_tokenizer("", tokenizer, trust_remote_code=trust_remote_code)
    eos = _eos_token_ids(model, tokenizer, name)
    directory = path if path is not None and path.is_dir() else None
    if directory is not None:
        tell_unread(directory, name)
    return Loaded(model.eval(), tokenizer, eos, name, processors=processors, path=directory, adapter=chosen)


def load_in_stages(
    source: "str | os.PathLike",
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    tokenizer: Any = None,
    trust_remote_code: bool = False,
    images: bool = True,
    adapter: "str | os.PathLike | Mapping[str, Any] | None" = None,
    adapter_dtype: str | None = None,
    asked: str = "pipeline_parallel_size",
) -> Loaded:
    """A model directory, or a name on the Hub, for an engine of several stages or ranks: they read their weights
    themselves.

    adapter  as load has it; each process reads what belongs to its layers, or rows
    asked    the option that wants several, for messages
    raises   as load; ValueError for anything but a directory with safetensors
    """
    from .partial import Origin, settled, skeleton

    device = default_device(source) if device is None else device
    kind = as_dtype(torch.bfloat16 if dtype is None else dtype, device)
    name = "" if isinstance(source, torch.nn.Module) else os.fspath(source)
    base, chosen = _with_adapter(name, adapter, adapter_dtype, device) if name else (name, None)
    path = None if isinstance(source, torch.nn.Module) else _found(base)
    if path is None or path.is_file():
        what = f"a loaded {type(source).__name__}" if path is None else str(path)
        raise ValueError(
            f"weights: {asked}: got {what}, expected a model directory with config.json and safetensors: each process "
            "reads its own layers, or rows, from it"
        )
    found = load_tokenizer(path if base == name else name, tokenizer, trust_remote_code=trust_remote_code)
    with quiet():
        try:
            origin = settled(Origin(str(path), kind, images=images, adapter=chosen))
            model = skeleton(origin)
        except Exception as error:
            said = str(error).startswith(("weights: ", "EngineConfig: "))
            raise error if said else explain(str(path), error) from error
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"weights: {asked}: got {type(model).__name__}, which scores sequences, expected one process for it"
        )
    processors = load_processors(path, name) if model.config.model_type in WITH_IMAGES else NONE
    made = without_weights(model, found, origin, device)
    tell_unread(path, name)
    return replace(made, name=name, processors=processors, adapter=chosen)


def without_weights(model, tokenizer: Any, origin: "Origin", device: str | torch.device) -> Loaded:
    eos = _eos_token_ids(model, tokenizer, origin.source)
    return Loaded(model, tokenizer, eos, origin.source, origin, torch.device(device))


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
    name, model = type(model).__name__, lora.base_of(model, "weights: source")
    if what := _wrapper(model):
        raise TypeError(f"weights: source: got a {name}, expected the model itself: {what}")
    if getattr(model, "config", None) is None or not hasattr(model, "get_output_embeddings"):
        raise TypeError(f"weights: source: got a {name}, expected a path or a Hugging Face causal language model")
    if model.get_output_embeddings() is None and score_head(model) is None:
        raise TypeError(f"weights: source: got a {name}, which has no output layer, expected a causal language model")
    if sharded := [n for n, p in model.named_parameters() if hasattr(p, "full_tensor")]:
        raise TypeError(
            f"weights: source: {some(sharded)}: shards of a parallel {name} (DTensor), expected whole tensors: an "
            "engine owns its weights; give it a model of its own, and these by update_weights (full_tensor())"
        )
    if bare := [n for n, p in model.named_parameters() if p.is_meta]:
        raise ValueError(f"weights: source: {some(bare)}: the given {name} has no weights there yet (device meta)")
    ends = model.get_output_embeddings(), model.get_input_embeddings()
    head, embedding = (getattr(end, "weight", None) for end in ends)
    if head is not None and embedding is not None and len(head) > len(embedding):
        raise ValueError(
            f"weights: source: the output layer of the given {name} has {len(head)} rows, its embedding "
            f"{len(embedding)}: a token that is drawn could not be read: make both alike (resize_token_embeddings)"
        )
    wide = lora.in_fp32(model)
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


def _wrapper(model: torch.nn.Module) -> str:
    """What to give in place of a wrapper; "" for a model."""
    if "_orig_mod" in model._modules:
        return "torch.compile's is model._orig_mod"
    if hasattr(model, "merge_and_unload") and hasattr(model, "peft_config"):
        return "peft's is model.merge_and_unload()"
    if list(model._modules) == ["module"]:
        return f"that of {type(model).__name__} is model.module"
    return ""


def _with_adapter(
    name: str,
    given: "str | os.PathLike | Mapping[str, Any] | None",
    dtype: str | None,
    device: str | torch.device,
) -> tuple[str, Adapter | None]:
    """What a model is loaded from, and what it is computed with: where that is a directory of an adapter, its model."""
    path = Path(name).expanduser()
    if dtype is not None and dtype not in (there := served(device)):
        raise ValueError(f"EngineConfig: adapter_dtype: got {dtype!r}, expected one of {', '.join(there)} on a CPU")
    if name and is_adapter(path):
        if given is not None:
            raise ValueError(
                f"EngineConfig: adapter: got one beside {name}, which is an adapter itself, expected None: one adapter "
                "is computed with"
            )
        name, found = base_of(path), read_adapter(path, "weights")
    else:
        found = None if given is None else read_adapter(given)
    if found is None and dtype is not None:
        raise ValueError(f"EngineConfig: adapter_dtype: got {dtype!r} and no adapter, expected None")
    return name, None if found is None else replace(found, dtype=dtype)


def _found(name: str) -> Path:
    """The directory, or the GGUF file, that a name stands for."""
    path = Path(name).expanduser()
    if name and path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        return ggufs[0] if len(ggufs) == 1 and not (path / "config.json").exists() else path
    if name and path.exists():
        if not path.is_file() or not _is_gguf(path):
            raise ValueError(f"weights: {name}: a file that is not GGUF; expected a GGUF file or a model directory")
        return path
    return snapshot(name, weights=True)


def _load_directory(path: Path, name: str, dtype: torch.dtype, images: bool) -> torch.nn.Module:
    """Hugging Face's loader, once it is known that all fits."""
    from .partial import Origin, empty_model, fill, skeleton

    directory = read_directory(path)
    if is_mxfp4(directory.config):
        log.warning(
            "weights: %s: experts of 4 bits (MXFP4) are computed with as %s, which holds them exactly", name, dtype
        )
        origin = Origin(str(path), dtype)
        model = skeleton(origin)
        fill(model, model.state_dict(), origin, torch.device("cpu"))
        return model
    fit(empty_model(directory, dtype, images), directory)
    return _from_pretrained(str(path), dtype, name, images, use_safetensors=True)


def _from_pretrained(name: str, dtype: torch.dtype, label: str, images: bool, **options) -> torch.nn.Module:
    """Hugging Face's loader, which must find a value for every parameter."""
    config = read_config(name, label, dtype=dtype, **{k: v for k, v in options.items() if k == "gguf_file"})
    with quiet():
        # Mismatched sizes are let through here, only to be named below.
        options |= {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
        try:
            model, info = auto_class(config, images).from_pretrained(
                name, config=config, trust_remote_code=False, **options
            )
        except Exception as error:
            raise explain(label, error) from error
    problems = {key: value for key, value in info.items() if value and key != "unexpected_keys"}
    if problems:
        what = "; ".join(f"{key.replace('_', ' ')}: {some(_words(value))}" for key, value in problems.items())
        raise ValueError(f"weights: {label}: the checkpoint does not fit {type(model).__name__}: {what}")
    return model


def _words(problem) -> list[str]:
    """Names, or (name, size there, size here)."""
    problem = [problem] if isinstance(problem, str) else problem
    return [p if isinstance(p, str) else f"{p[0]} is {tuple(p[1])}, expected {tuple(p[2])}" for p in problem]


def _load_gguf(path: Path, dtype: torch.dtype) -> torch.nn.Module:
    import transformers

    check_file(path)
    options: dict[str, Any] = {"gguf_file": path.name}
    if hasattr(transformers, "GgufConfig"):  # where it exists, blocks might otherwise stay packed
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = _from_pretrained(str(path.parent), dtype, str(path), False, **options)
    ends = check_gguf(path, model)
    if ends and model.generation_config is not None:
        model.generation_config.eos_token_id = ends
    return model


def _is_gguf(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"GGUF"


def _eos_token_ids(model: torch.nn.Module, tokenizer: Any, name: str) -> tuple[int, ...]:
    """The generation config's, as in Hugging Face's generate, else the config's; and the tokenizer's: a model that was
    tuned for chat ends its answers with that one, whatever its base's configuration says."""
    found: set[int] = set()
    for owner in (getattr(model, "generation_config", None), model.config):
        found = found or _ids(owner, name)
    more = _ids(tokenizer, name) - found
    if found and more:
        log.warning(
            "weights: %s: a text ends with %s, as the configuration says, and with %s, the tokenizer's own",
            name, ", ".join(map(str, sorted(found))), ", ".join(map(str, sorted(more))),
        )  # fmt: skip
    count = getattr(model.config.get_text_config(), "vocab_size", None) or 0
    if count and (never := sorted(i for i in found | more if i >= count)):
        log.warning(
            "weights: %s: eos_token_id: %s: no text ends with that: the model has %s tokens, from 0 on",
            name, ", ".join(map(str, never)), count,
        )  # fmt: skip
    return tuple(sorted(found | more))


def _ids(owner: Any, name: str) -> set[int]:
    ids = getattr(owner, "eos_token_id", None)
    every = [] if ids is None else list(ids) if isinstance(ids, list | tuple | set | torch.Tensor) else [ids]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in map(_number, every)):
        raise ValueError(f"weights: {name}: eos_token_id: got {ids!r}, expected a token id or a list of them")
    return {_number(i) for i in every}


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
