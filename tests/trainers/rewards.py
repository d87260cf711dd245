"""A tiny model that scores sequences, as verl's users name one for rewards, and what its scores are."""

from pathlib import Path

import torch

from .models import SIZES, config_of, tokenizer

MODULE = "pkg://vexact_engine.verl.reward"
OURS = (
    "reward.reward_manager.source=importlib",
    "reward.reward_manager.name=ModelReward",
    f"reward.reward_manager.module.path={MODULE}",
    f"reward.custom_reward_function.path={MODULE}",
)


def make_model(folder: Path) -> Path:
    """A Qwen3ForSequenceClassification in bf16 with its tokenizer, whatever family its conversations are of. The same
    in every run, whatever the threads of others draw meanwhile."""
    from transformers import AutoModelForSequenceClassification

    words = tokenizer("qwen3", SIZES["vocab_size"])
    ids = {"pad_token_id": words.pad_token_id, "eos_token_id": words.eos_token_id}
    model = AutoModelForSequenceClassification.from_config(config_of("qwen3", **{**SIZES, **ids}, num_labels=1))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.to(torch.bfloat16).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def options(model: Path | str, apart: bool = False) -> tuple[str, ...]:
    """What a run is told. apart: on a GPU of its own, where answers are scored as they come."""
    told = {"enable": True, "model_path": model, "rollout.name": "vexact", "rollout.tensor_model_parallel_size": 1}
    if apart:
        told |= {"enable_resource_pool": True, "nnodes": 1, "n_gpus_per_node": 1}
    return (*(f"reward.reward_model.{name}={value}" for name, value in told.items()), *OURS)


def scores(model: Path | str, chats: list[list[dict]]) -> list[float]:
    """The patched model's own, one conversation at a time."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    import vexact_ops as vx

    words = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.bfloat16)
    with vx.patch.hf(loaded), torch.no_grad():
        rows = [words.apply_chat_template(chat, tokenize=True, return_dict=False) for chat in chats]
        return [loaded(input_ids=torch.tensor([row])).logits.item() for row in rows]
