"""Model directories for tests of loaders, the loaders, and what they have read."""

import json

import torch
from engine_models import build
from safetensors.torch import load_file, save_file

from vexact_engine import EngineConfig
from vexact_engine.weights.load import load, load_in_stages
from vexact_engine.weights.partial import fill, skeleton

SMALL = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "head_dim": 8, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 1}
EXPERTS = {"num_experts": 3, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
FAMILIES = {"Llama": {}, "Qwen3Moe": EXPERTS, "Mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2}}
CONFIG = EngineConfig(num_pages=24, page_size=4, show_progress=False)


def whole(path, dtype="bfloat16"):
    return load(path, device="cpu", dtype=dtype).model


def in_stages(path, dtype="bfloat16"):
    """What two stages would have, of which each has read its own names alone; together they are the model."""
    loaded = load_in_stages(path, device="cpu", dtype=dtype)
    names = sorted(dict(tensors(loaded.model)))
    assert all(t.is_meta or "rotary" in n for n, t in tensors(loaded.model))
    model = skeleton(loaded.origin)
    for part in (names[::2], names[1::2]):
        fill(model, part, loaded.origin, torch.device("cpu"))
    return model


def from_transformers(path, dtype="bfloat16"):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))


def tensors(model):
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def contents(model):
    """Dtypes and bytes of all tensors, and which names are one tensor."""
    found = {name: (t.dtype, tuple(t.shape), t.contiguous().view(torch.uint8).tolist()) for name, t in tensors(model)}
    tied = {frozenset(n for n, o in tensors(model) if o is t) for _, t in tensors(model)}
    return found, tied


LOADERS = (whole, in_stages)


def outcome(loader, path, dtype="bfloat16"):
    try:
        return contents(loader(path, dtype))
    except (ValueError, FileNotFoundError) as error:
        assert str(error).startswith("weights: ") and str(path) in str(error), error
        return str(error)


def save(path, family="Llama", seed=0, shards=False, **options):
    model = build(family, seed=seed, **{**SMALL, **FAMILIES[family], **options})
    model.save_pretrained(path, max_shard_size="2KB" if shards else "5GB")
    return model


def edit(path, file="config.json", **changes):
    config = json.loads((path / file).read_text())
    (path / file).write_text(json.dumps({k: v for k, v in {**config, **changes}.items() if v is not None}))


def rewrite(path, change):
    """The single file's tensors, changed."""
    state = load_file(path / "model.safetensors")
    save_file(change(state) or state, path / "model.safetensors", metadata={"format": "pt"})


def other(state, name):
    """Another tensor of that one's shape and dtype."""
    return (torch.arange(state[name].numel(), dtype=torch.float32) * 0.01).view(state[name].shape).to(state[name].dtype)


def adapter(path):
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "x"}))
