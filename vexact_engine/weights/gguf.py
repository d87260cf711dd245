"""What a GGUF file asks for and transformers, which loads it, passes over: refused by name.

transformers reads the metadata that it has a name for and the tensors that the model has a parameter for, and says
nothing of the rest. So of the Llama 3.1 family's files it leaves out rope_freqs.weight, of others the scaling of the
rotation, and computes another model than the file's.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

from .directory import some

# Numbers beyond those of sizes, by what a model of transformers has instead, and what changes nothing.
_NUMBERS: dict[str, tuple[str | None, float]] = {
    "attention.clamp_kqv": (None, 0),
    "attention.max_alibi_bias": (None, 0),
    "attention.scale": ("attention_multiplier", 0),
    "attn_logit_softcapping": ("attn_logit_softcapping", 0),
    "embedding_scale": ("embedding_multiplier", 1),
    "expert_weights_scale": ("routed_scaling_factor", 1),
    "final_logit_softcapping": ("final_logit_softcapping", 0),
    "logit_scale": ("logit_scale", 1),
    "residual_scale": ("residual_multiplier", 1),
    "rope.scale_linear": (None, 1),
}
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon")  # one of these it has
# Gemma's 27B, by its number of layers: llama.cpp takes the scale of its attention from another size than others'.
_BY_WIDTH = {"gemma2": 46, "gemma3": 62}


def check_gguf(path: Path, model: torch.nn.Module) -> None:
    """Compare a file with the model that transformers has made of it.

    raises   ValueError naming metadata or tensors of the file that the model has nothing of
    """
    header = _read(path)
    found = [*_tensors(header, model), *_numbers(header, model)]
    if found:
        raise ValueError(
            f"weights: {path}: transformers, which reads GGUF files here, passes over {'; '.join(found)}: the "
            f"{type(model).__name__} would be another model than the file's: load its directory of safetensors"
        )


@dataclass(frozen=True)
class _Header:
    """
    values    of the metadata the numbers and texts, without lists
    tensors   their names
    plain     whether rope_freqs.weight, if there is one, divides all frequencies by 1
    """

    values: dict[str, int | float | bool | str]
    tensors: list[str]
    plain: bool

    @property
    def arch(self) -> str:
        return str(self.values.get("general.architecture"))

    def get(self, key: str) -> int | float | bool | str | None:
        return self.values.get(f"{self.arch}.{key}")


_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd"))  # struct's, by GGUF's number of a type
_TEXT, _LIST = 8, 9


def _read(path: Path) -> _Header:
    """In a fraction of the time of gguf's reader, which makes arrays of every token of the vocabulary."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
        at = 8
        order = "<" if raw[4] else ">"  # the version is a small number

        def take(form: str):
            nonlocal at
            found = struct.unpack_from(order + form, raw, at)
            at += struct.calcsize("<" + form)
            return found if len(found) > 1 else found[0]

        def text() -> str:
            nonlocal at
            size = take("Q")
            at += size
            return raw[at - size : at].decode("utf-8", "replace")

        def skip(kind: int, count: int) -> None:
            nonlocal at
            if kind in _SCALARS:
                at += count * struct.calcsize("<" + _SCALARS[kind])
                return
            for _ in range(count):
                if kind == _TEXT:
                    at += 8 + struct.unpack_from(order + "Q", raw, at)[0]
                else:
                    skip(*take("IQ"))

        count, fields = take("QQ")
        values, tensors = {}, {}
        for _ in range(fields):
            key, kind = text(), take("I")
            if kind == _LIST:
                skip(*take("IQ"))
            else:
                values[key] = text() if kind == _TEXT else take(_SCALARS[kind])
        for _ in range(count):
            name, axes = text(), take("I")
            shape = struct.unpack_from(f"{order}{axes}Q", raw, at)
            at += 8 * axes
            tensors[name] = shape, *take("IQ")
        plain = True
        if "rope_freqs.weight" in tensors:
            (size,), kind, offset = tensors["rope_freqs.weight"]
            at = -(-at // (align := values.get("general.alignment", 32))) * align + offset
            plain = kind == 0 and set(struct.unpack_from(f"{order}{size}f", raw, at)) == {1.0}
        return _Header(values, list(tensors), plain)


def _tensors(header: _Header, model: torch.nn.Module) -> list[str]:
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kind = next((kind for kind, name in MODEL_ARCH_NAMES.items() if name == header.arch), None)
    if kind is None:
        return []
    known, names = get_tensor_name_map(kind, model.config.get_text_config().num_hidden_layers), set()
    for name in model.state_dict():
        stem, _, suffix = name.rpartition(".")
        names.add(f"{known.get_name(stem)}.{suffix}")
    if header.plain:
        names.add("rope_freqs.weight")
    if any(".experts." in name for name in model.state_dict()):  # stacked in another way
        names |= {name for name in header.tensors if "_exps" in name or "exp_probs_b" in name}
    left = [name for name in header.tensors if name not in names]
    return [f"its tensors {some(left)}"] if left else []


def _numbers(header: _Header, model: torch.nn.Module) -> list[str]:
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope if "rope_type" in rope else next((r for r in rope.values() if isinstance(r, dict)), {})
    left = {}
    scaling, factor = header.get("rope.scaling.type"), header.get("rope.scaling.factor")
    scaled = scaling not in (None, "none") and not (scaling == "linear" and factor in (None, 0, 1))
    if scaled and rope.get("rope_type", "default") == "default":
        left["rope.scaling.type"] = scaling
    window, longest = header.get("attention.sliding_window"), header.get("context_length")
    if window and window < (longest or window + 1) and window != getattr(config, "sliding_window", None):
        left["attention.sliding_window"] = window
    if header.get("attention.causal") is False:
        left["attention.causal"] = False
    rotated = header.get("rope.dimension_count")
    if rotated and not hasattr(config, "kv_lora_rank"):  # where it is of a part of each head anyway
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        share = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
        if rotated != int(head * share):
            left["rope.dimension_count"] = rotated
    for key, (name, neutral) in _NUMBERS.items():
        value, has = header.get(key), None if name is None else getattr(config, name, None)
        if value is not None and value != neutral and not _near(value, has):
            left[key] = value
    base, rotations = header.get("rope.freq_base"), getattr(config, "rope_parameters", None) or {}
    bases = [r.get("rope_theta") for r in (rotations, *rotations.values()) if isinstance(r, dict)]
    if base is not None and not any(_near(base, has) for has in bases):
        left["rope.freq_base"] = base
    for key in ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"):
        value = header.get(key)
        if value is not None and not any(_near(value, getattr(config, name, None)) for name in _EPSILONS):
            left[key] = value
    return [f"{header.arch}.{key} {value!r}" for key, value in left.items()] + _scale(header, config)


def _scale(header: _Header, config) -> list[str]:
    """Gemma's scale of attention is in no file: it follows from sizes, and transformers has one default for all."""
    if header.arch not in _BY_WIDTH:
        return []
    wide = config.num_hidden_layers == _BY_WIDTH[header.arch]
    size = config.hidden_size // config.num_attention_heads if wide else config.head_dim
    if _near(size, config.query_pre_attn_scalar):
        return []
    return [f"the scale of attention, 1/sqrt({size}) of a {header.arch} of {config.num_hidden_layers} layers"]


def _near(value, has) -> bool:
    """The file's number, in fp32, is the model's."""
    return has is not None and abs(has - value) <= 1e-6 * abs(value)
