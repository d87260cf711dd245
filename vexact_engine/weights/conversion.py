"""From the tensors of files to those of a model: names, and what is stacked or cut on the way, as transformers has it.

The table of names and operations is transformers' own, and so are the operations; what is here applies it to headers
first (tensors on the meta device), so that whatever does not fit is known before anything is read or made.
"""

import copy
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .directory import Directory, Header, some
from .mxfp4 import PART, Dequantise, is_mxfp4
from .names import hint

log = logging.getLogger(__name__)

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Tensors that say how to read others: of quantised, pruned and normalised weights, and of adapters.
_MEANS_MORE = re.compile(
    r"(?:^|\.)(?:weight_scale\w*|\w+_scale_inv|input_scale|scales?|zeros?|qweight|qzeros|g_idx|absmax|quant_map"
    r"|quant_state\w*|weight_packed|weight_shape|weight_zero_point|SCB|codebooks?|\w+_proj_(?:scales|blocks)"
    r"|(?:pre_quant|act|smooth)_scales?|weight_(?:g|v|mask|orig)|prompt_embeddings"
    r"|lora_\w+|ia3_l|b?oft_\w+|vera_\w+|lokr_\w+|hada_\w+)(?:\.|$)"
)


@dataclass(frozen=True)
class Step:
    """Tensors of files that become one of a model, or several.

    sources   names in the files, each with the pattern that has found it
    targets   names in the model
    """

    key: str
    sources: tuple[tuple[str, str], ...]
    targets: tuple[str, ...]
    converter: Any = None

    def make(self, model: nn.Module, value: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The model's tensors, of what `value` gives for names in the files."""
        return _convert(model, self.key, self.sources, self.converter, value)


@dataclass(frozen=True)
class Fit:
    """How a directory's tensors fit a model.

    steps        what makes the model's
    doubled      pairs of names that config.json ties and that the files have both: who loads them ties them where
                 they are equal, and leaves them apart where they are not
    """

    steps: tuple[Step, ...]
    doubled: tuple[tuple[str, str], ...]


def fit(model: nn.Module, directory: Directory) -> Fit:
    """For a model on the meta device, in the dtype that it is to have.

    raises   ValueError: missing, misshapen, given twice, quantised or of an adapter; the names, and what to do
    """
    state, label = model.state_dict(), directory.path
    groups, unexpected = _grouped(model, state, directory)
    steps: list[Step] = []
    made: dict[str, Step] = {}
    mismatched: list[str] = []
    for key, group in groups.items():
        step, shapes = _step(model, state, key, group, directory)
        for name, shape in shapes.items():
            if name in made:
                others = ", ".join(n for _, n in (*made[name].sources[:1], *step.sources[:1]))
                raise ValueError(f"weights: {label}: {others}: each of them is {name}: which one counts?")
            made[name] = step
            if name not in state:
                mismatched.append(f"{name}, made of {step.sources[0][1]}, is no tensor of the model")
            elif shape != tuple(state[name].shape):
                mismatched.append(f"{name} is {shape}, expected {tuple(state[name].shape)}")
        steps.append(step)
    tied = {k: v for k, v in getattr(model, "all_tied_weights_keys", {}).items() if k in state and v in state}
    missing = set(state) - set(made)
    for name in sorted(missing):  # one of several that are tied is enough
        source = tied.get(name, name)
        missing -= {name} if any(n in made for n in (source, *(t for t, s in tied.items() if s == source))) else set()
    ignored = [*(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())]
    missing = {name for name in missing if not any(re.search(pattern, name) for pattern in ignored)}
    _check_unexpected(label, unexpected, directory.tensors)
    wrong = [f"missing keys: {some(missing)}"] if missing else []
    wrong += [f"mismatched keys: {some(mismatched)}"] if mismatched else []
    if wrong:
        said = hint(unexpected, set(state)) if missing else ""
        said = said or (f"others: {some(unexpected)}" if missing and unexpected else "")
        what = "; ".join(wrong) + (f"; the files have {said}" if said else "")
        raise ValueError(f"weights: {label}: the checkpoint does not fit {type(model).__name__}: {what}")
    _tell(label, model, unexpected)
    return Fit(tuple(steps), tuple((k, v) for k, v in tied.items() if k in made and v in made and k != v))


def _grouped(model: nn.Module, state: Mapping[str, Tensor], directory: Directory):
    """(pattern or None, name) of all that become one tensor, by what transformers calls that; and what becomes none."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    table = get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    whose = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    groups: dict[str, list[tuple[Any, str | None, str]]] = {}
    unexpected, packed = [], is_mxfp4(directory.config)
    unpack: dict[str, Dequantise] = {}
    for name in sorted(directory.tensors, key=dot_natural_key):
        if packed and (found := PART.fullmatch(name)):
            key, _ = rename_source_key(found[1], renamings, [], prefix, state)
            if key in state:
                converter = unpack.setdefault(key, Dequantise(state[key].dtype))
                groups.setdefault(key, []).append((converter, found[2], name))
                continue
        key, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if key not in state and name in state:
            key, pattern = rename_source_key(name, [], [], prefix, state)
        if key in state:
            groups.setdefault(key, []).append((whose.get(pattern), pattern, name))
        else:
            unexpected.append(name)
    return groups, unexpected


def _step(model: nn.Module, state, key: str, group, directory: Directory) -> tuple[Step, dict[str, tuple[int, ...]]]:
    """How a tensor is made, and what shapes come of that."""
    (converter, _, first), label = group[0], directory.path
    odd = next((name for other, _, name in group if other is not converter), None)
    if odd is None and converter is None and len(group) > 1:
        odd = group[1][2]
    if odd is not None:
        raise ValueError(f"weights: {label}: {first} and {odd} are both {key}: which one counts?")
    for _, _, name in group:
        header = directory.tensors[name]
        if isinstance(converter, Dequantise):
            if header.dtype != "U8":
                raise ValueError(f"weights: {header.file}: {name} is {header.dtype}, expected U8, as MXFP4 has it")
        elif state[key].is_floating_point() and header.dtype not in FLOATS:
            raise ValueError(
                f"weights: {header.file}: {name} is {header.dtype}, expected one of {', '.join(FLOATS)}: quantised "
                "weights are not read"
            )
    sources = tuple((name if pattern is None else pattern, name) for _, pattern, name in group)
    shapes = {name: directory.tensors[name].shape for _, name in sources}
    try:
        made = _convert(
            model, key, sources, converter,
            lambda name: torch.empty(shapes[name], dtype=state[key].dtype, device="meta"),
        )  # fmt: skip
    except Exception as error:  # of any operation of transformers, on shapes that it does not expect
        what = " ".join(str(error).split())
        raise ValueError(
            f"weights: {label}: {some(shapes)} cannot become {key}: they are {some(set(shapes.values()))}: {what}"
        ) from error
    return Step(key, sources, tuple(made), converter), {name: tuple(tensor.shape) for name, tensor in made.items()}


def _convert(model, key: str, sources, converter, value: Callable[[str], Tensor]) -> dict[str, Tensor]:
    if converter is None:
        return {key: value(sources[0][1])}
    own = copy.deepcopy(converter)
    for pattern, name in sources:
        own.add_tensor(key, name, pattern, value(name))
    made = own.convert(key, model=model, config=model.config)
    return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}


def _check_unexpected(label: Path, unexpected: Iterable[str], tensors: Mapping[str, Header]) -> None:
    more = [name for name in unexpected if _MEANS_MORE.search(name) or tensors[name].dtype.startswith("F8")]
    if more:
        raise ValueError(
            f"weights: {label}: {some(more)}: scales or parts of other weights (quantised ones, or an adapter's): they "
            "are not read: save weights that are whole, in bf16, fp16 or fp32"
        )


def _tell(label: Path, model: nn.Module, unexpected: Iterable[str]) -> None:
    patterns = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), r"rotary_emb\.inv_freq"]
    left = [name for name in unexpected if not any(re.search(pattern, name) for pattern in patterns)]
    if left:
        log.warning("weights: %s: not used by %s: %s", label, type(model).__name__, some(left))
