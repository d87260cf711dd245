"""What a GGUF file asks for and transformers, which loads it, passes over: refused by name.

transformers reads the metadata that it has a name for and the tensors that the model has a parameter for, and says
nothing of the rest. So of the Llama 3.1 family's files it leaves out rope_freqs.weight, of others the scaling of the
rotation, and computes another model than the file's.
"""

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .directory import some

# Numbers beyond those of sizes, by what a model of transformers has instead, and what changes nothing.
_NUMBERS: dict[str, tuple[str | None, float]] = {
    "attention.clamp_kqv": (None, 0),
    "attention.max_alibi_bias": (None, 0),
    "attention.scale": ("attention_multiplier", 0),
    "attn_logit_softcapping": ("attn_logit_softcapping", 0),
    "embedding_scale": ("embedding_multiplier", 1),
    "expert_used_count": ("num_experts_per_tok", 0),
    "expert_weights_norm": ("norm_topk_prob", False),
    "expert_weights_scale": ("routed_scaling_factor", 1),
    "final_logit_softcapping": ("final_logit_softcapping", 0),
    "logit_scale": ("logit_scale", 1),
    "residual_scale": ("residual_multiplier", 1),
    "rope.scale_linear": (None, 1),
    "rope.scaling.attn_factor": (None, 1),  # of every kind of scaling, none included
    "use_parallel_residual": ("use_parallel_residual", False),
}
# What the tensors' shapes hold, or no log-probability follows from; and what has a function below.
_HELD = re.compile(
    r"context_length|block_count|embedding_length|vocab_size|(expert_|expert_shared_)?feed_forward_length|expert_count"
    r"|attention\.(head_count|head_count_kv|layer_norm_epsilon|layer_norm_rms_epsilon|causal|sliding_window.*)"
    r"|attention\.(key|value)_length|expert_gating_func|full_attention_interval|nextn_predict_layers|pooling_type"
    r"|rope\.(dimension_count|dimension_sections|freq_base|freq_base_swa)|shortconv\.l_cache|ssm\..*|tensor_data_layout"
    r"|rope\.scaling\.(type|factor|finetuned|original_context_length|yarn_.*)"  # refused by their type
)
_EXPERTS = re.compile(r"(blk\.\d+\.)ffn_(gate|up|down)_exps\.weight")
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon")  # one of these it has
_SIGMOID = "minimax-m2"  # of the architectures with experts the one whose router has another function than softmax
# Gemma's 27B, by its number of layers: llama.cpp takes the scale of its attention from another size than others'.
_BY_WIDTH = {"gemma2": 46, "gemma3": 62}


_ENDS = "eos", "eot", "eom"  # of a text, of a turn, of a message: each ends an answer
# Whose texts GPT-2's own split serves: some cut digits apart beforehand, which vocabularies made so have no pairs of.
_GPT2S = ("command-r", "exaone", "gpt-2", "mpt", "olmo", "phi-2", "refact", "roberta-bpe", "smollm", "starcoder")


_OTHERS = {  # general.type of what is no model, and what to do with it
    "adapter": "merge it into its base model (llama-export-lora, or merge_and_unload() of peft), and load that",
    "mmproj": "images are taken of a directory of safetensors alone: load that, or the text model's file",
}


def check_file(path: Path) -> None:
    """Before transformers reads it: that it is a model, and its header speaks of all that it holds.

    raises   ValueError naming what it is, or how much of it nobody speaks of
    """
    try:
        header = _read(path)
    except (ImportError, struct.error, ValueError, KeyError, IndexError, RecursionError):
        return  # as transformers says, which reads it too
    if (kind := header.values.get("general.type", "model")) != "model":
        what = header.values.get("adapter.type")
        said = f"{kind} ({what})" if what else kind
        raise ValueError(
            f"weights: {path}: got a GGUF file of the type {said}, expected a model: "
            + _OTHERS.get(str(kind), "load the model's own file, or its directory of safetensors")
        )
    if header.unclaimed:
        raise ValueError(
            f"weights: {path}: {header.unclaimed} bytes of it, not zeros, are of none of the {len(header.tensors)} "
            "tensors that its header has: the file is damaged, or written by a program that counts them wrongly: "
            "download or convert it again"
        )


def check_gguf(path: Path, model: torch.nn.Module) -> list[int]:
    """Compare a file with the model that transformers has made of it.

    returns  the ids that end an answer, of which transformers reads the first alone
    raises   ValueError naming metadata or tensors of the file that the model has nothing of
    """
    header = _read(path)
    if (parts := header.values.get("split.count", 1)) > 1:  # without its output.weight it would be a tied model
        raise ValueError(
            f"weights: {path}: one of {parts} files of one model, of which transformers reads this one alone: merge "
            "them (llama-gguf-split --merge), or load its directory of safetensors"
        )
    found = [*_tensors(header, model), *_numbers(header, model)]
    if found:
        raise ValueError(
            f"weights: {path}: transformers, which reads GGUF files here, passes over {'; '.join(found)}: the "
            f"{type(model).__name__} would be another model than the file's: load its directory of safetensors"
        )
    ends = (header.values.get(f"tokenizer.ggml.{name}_token_id") for name in _ENDS)
    return [end for end in ends if isinstance(end, int)]


def tokenized_otherwise(path: Path, tokenizer: Any) -> list[str]:
    """What a file says of its tokenizer and the one that transformers has made of it does not do."""
    from tokenizers.pre_tokenizers import ByteLevel

    values, backend = _read(path).values, getattr(tokenizer, "backend_tokenizer", None)
    kind, pre, found = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre"), []
    if backend is None:
        return found
    if kind == "gpt2" and isinstance(backend.pre_tokenizer, ByteLevel) and pre not in (None, *_GPT2S):
        found.append(f"tokenizer.ggml.pre {pre!r} (texts are split as GPT-2's)")
    if kind == "llama" and values.get("tokenizer.ggml.add_space_prefix") is False:
        alone = tokenizer.encode("a", add_special_tokens=False)
        if tokenizer.convert_ids_to_tokens(alone)[0].startswith("\u2581"):
            found.append("tokenizer.ggml.add_space_prefix False")
    return found


@dataclass(frozen=True)
class _Header:
    """
    values    of the metadata the numbers and texts, and of an architecture's own keys lists of numbers
    tensors   their names
    plain     whether rope_freqs.weight, if there is one, divides all frequencies by 1
    headless  whether output.weight, if there is one, is token_embd.weight again
    unclaimed bytes behind the header that no tensor has, if they are more than fills places up, and not all zeros
    """

    values: dict[str, int | float | bool | str | list]
    tensors: list[str]
    plain: bool
    headless: bool
    unclaimed: int

    @property
    def arch(self) -> str:
        return str(self.values.get("general.architecture"))

    def get(self, key: str) -> Any:
        return self.values.get(f"{self.arch}.{key}")


_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd"))  # struct's, by GGUF's number of a type
_TEXT, _LIST = 8, 9


def _read(path: Path) -> _Header:
    """In a fraction of the time of gguf's reader, which makes arrays of every token of the vocabulary."""
    from gguf import GGML_QUANT_SIZES

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
                kind, size = take("IQ")
                if kind in _SCALARS and not key.startswith(("general.", "tokenizer.")):
                    values[key] = [take(_SCALARS[kind]) for _ in range(size)]
                else:
                    skip(kind, size)
            else:
                values[key] = text() if kind == _TEXT else take(_SCALARS[kind])
        for _ in range(count):
            name, axes = text(), take("I")
            shape = struct.unpack_from(f"{order}{axes}Q", raw, at)
            at += 8 * axes
            tensors[name] = shape, *take("IQ")
        start = -(-at // (align := values.get("general.alignment", 32))) * align
        plain = headless = True
        if "rope_freqs.weight" in tensors:
            (size,), kind, offset = tensors["rope_freqs.weight"]
            plain = kind == 0 and set(struct.unpack_from(f"{order}{size}f", raw, start + offset)) == {1.0}
        if "output.weight" in tensors and "token_embd.weight" in tensors:
            (shape, kind, offset), (*same, other) = tensors["output.weight"], tensors["token_embd.weight"]
            size, block = math.prod(shape), GGML_QUANT_SIZES[kind]
            count = size // block[0] * block[1]
            one, two = (raw[start + first : start + first + count] for first in (offset, other))
            headless = [shape, kind] == same and one == two
        unclaimed, end = 0, start
        for shape, kind, offset in sorted(tensors.values(), key=lambda tensor: tensor[2]):
            block, size = GGML_QUANT_SIZES[kind]
            unclaimed += _written(raw, end, start + offset, align)
            end = max(end, start + offset + math.prod(shape) // block * size)
        unclaimed += _written(raw, end, len(raw), align)
        return _Header(values, list(tensors), plain, headless, unclaimed)


def _written(raw: mmap.mmap, begin: int, end: int, align: int) -> int:
    """How many bytes lie there, unless they are fewer than an alignment takes, or zeros."""
    if end - begin < align:
        return 0
    pieces = range(begin, end, 1 << 20)
    return end - begin if any(raw[at : min(at + (1 << 20), end)].strip(b"\0") for at in pieces) else 0


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
    found = []
    if any(".experts." in name for name in model.state_dict()):  # stacked in another way
        experts = {name: _EXPERTS.fullmatch(name) for name in header.tensors}
        names |= {name for name, match in experts.items() if match}
        # transformers has zeros for the half of gate_up_proj that a file lacks
        halves = {f"{match[1]}ffn_{half}_exps.weight" for match in experts.values() if match for half in ("gate", "up")}
        if lost := sorted(halves - set(header.tensors)):
            found.append(f"the lack of {some(lost)}")
    if any("e_score_correction_bias" in name for name in model.state_dict()):
        names |= {name for name in header.tensors if name.endswith(".exp_probs_b.bias")}
    if model.config.get_text_config().tie_word_embeddings and not header.headless:
        names.discard("output.weight")
    left = [name for name in header.tensors if name not in names]
    return [*found, f"its tensors {some(left)}"] if left else found


def _numbers(header: _Header, model: torch.nn.Module) -> list[str]:
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope if "rope_type" in rope else next((r for r in rope.values() if isinstance(r, dict)), {})
    left = {}
    scaling, factor = header.get("rope.scaling.type"), header.get("rope.scaling.factor")
    scaled = scaling not in (None, "none") and not (scaling == "linear" and factor in (None, 0, 1))
    if scaled and rope.get("rope_type", "default") == "default":
        left["rope.scaling.type"] = scaling
    if scaling is None and factor not in (None, 0, 1):  # then it is linear
        left["rope.scaling.factor"] = factor
    window, longest = header.get("attention.sliding_window"), header.get("context_length")
    if window and window < (longest or window + 1) and window != getattr(config, "sliding_window", None):
        left["attention.sliding_window"] = window
    kinds, pattern = getattr(config, "layer_types", None) or [], header.get("attention.sliding_window_pattern")
    slides = [kind == "sliding_attention" for kind in kinds]
    if pattern and window and window < (longest or window + 1):
        if not isinstance(pattern, list):  # the last of each so many is not
            pattern = [i % pattern < pattern - 1 for i in range(len(slides))]
        if list(map(bool, pattern)) != slides:
            left["attention.sliding_window_pattern"] = header.get("attention.sliding_window_pattern")
    if not window and any(slides) and header.arch != "gemma2":  # where none said is 4096, here and there
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
        if name == "norm_topk_prob" and header.arch == _SIGMOID:  # it always has that
            has = True
        if value is not None and not _near(value, neutral if has is None else has):
            left[key] = value
        if value is None and has and name == "num_experts_per_tok":
            left[key] = None
    rotations = getattr(config, "rope_parameters", None) or {}
    for key, kind in (("rope.freq_base", "full_attention"), ("rope.freq_base_swa", "sliding_attention")):
        base, has = header.get(key), rotations.get(kind, rotations).get("rope_theta")
        if base is None and key == "rope.freq_base" and has is not None and not _near(1e4, has):
            left[key] = None
        if base is not None and not _near(base, has):
            left[key] = base
    epsilons = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
    if any(hasattr(config, name) for name in _EPSILONS) and all(header.get(key) is None for key in epsilons):
        left["attention.layer_norm_rms_epsilon"] = None
    for key in epsilons:
        value = header.get(key)
        if value is not None and not any(_near(value, getattr(config, name, None)) for name in _EPSILONS):
            left[key] = value
    if not hasattr(config, "kv_lora_rank") and header.arch != "gemma4":  # whose layers differ
        for key in ("attention.key_length", "attention.value_length"):
            size = header.get(key)
            if size and size != (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads):
                left[key] = size
    gates = header.get("expert_gating_func")
    if gates and gates != (2 if header.arch == _SIGMOID else 1):
        left["expert_gating_func"] = gates
    for key, value in header.values.items():  # whatever else it says of the model
        mine, key = key.startswith(f"{header.arch}."), key.removeprefix(f"{header.arch}.")
        if mine and key not in _NUMBERS and not _HELD.fullmatch(key) and value not in (0, "", []):
            left[key] = value
    words = (
        f"the lack of {header.arch}.{key}" if v is None else f"{header.arch}.{key} {v!r}" for key, v in left.items()
    )
    return [*words, *_scale(header, config)]


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
