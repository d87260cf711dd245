"""Small models of a few families, their tokenizers and their prompts, as folders. Nothing is fetched."""

import json
from collections.abc import Callable
from pathlib import Path

import torch

from vexact_engine.weights.random import CONFIGS

FAMILIES = ("qwen3", "qwen3_moe", "deepseek_v3")
HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text")
WITH_VISION = ("qwen3_5", "qwen3_5_moe")  # hybrids as their checkpoints are: a tower beside the text
VOCAB = 288  # 256 bytes, and the special tokens
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
_HYBRID = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
_VISION = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "num_position_embeddings": 16,
}  # fmt: skip
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SPECIAL = {
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": {**_HYBRID, **_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3": {},
    "qwen3_moe": {**_EXPERTS, "norm_topk_prob": True},
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "sliding_window": 8,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 8,
        },
    },
    "deepseek_v3": {  # as Moonlight's: no groups, no low-rank queries
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "head_dim": 16,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
    },
}
SPECIAL |= {family: SPECIAL[f"{family}_text"] for family in WITH_VISION}
# For a GPU: layers of true dimensions, but few of them, with fewer experts and a smaller vocabulary.
_CUT = {"num_hidden_layers": 2, "vocab_size": 32768, "tie_word_embeddings": False, "max_position_embeddings": 256}
TRUE_LAYERS = {
    "qwen3": CONFIGS["qwen3-1.7b"] | _CUT,
    "qwen3_moe": CONFIGS["qwen3-30b-a3b"] | _CUT | {"num_experts": 32},
    "deepseek_v3": CONFIGS["moonlight-16b-a3b"] | _CUT | {"n_routed_experts": 16},
}
# What each family's own tokenizer has, which verl looks for by name: (pad, begin, end of a turn), and all of them.
QWEN = ("<|endoftext|>", None, "<|im_end|>"), ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
DEEPSEEK = (
    ("<｜▁pad▁｜>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    (
        "<｜▁pad▁｜>",
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜tool▁outputs▁end｜>",
    ),
)
TOKENS = {"qwen3": QWEN, "qwen3_moe": QWEN, "deepseek_v3": DEEPSEEK, **dict.fromkeys(HYBRIDS + WITH_VISION, QWEN)}
QWEN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEEPSEEK_TEMPLATE = (
    "<｜begin▁of▁sentence｜>{% for m in messages %}{% if m['role'] == 'assistant' %}<｜Assistant｜>{{ m['content'] }}"
    "<｜end▁of▁sentence｜>{% elif m['role'] == 'user' %}<｜User｜>{{ m['content'] }}{% else %}{{ m['content'] }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)


def tokenizer(family: str, size: int = VOCAB):
    """A token for each byte, the family's special tokens behind them, and words that no text becomes up to `size`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    (pad, begin, end), special = TOKENS[family]
    words = [*alphabet, *special]
    words += [f"<{i}>" for i in range(len(words), size)]  # without merges no text is made of them
    made = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, pad_token=pad, bos_token=begin, eos_token=end)
    wrapped.chat_template = DEEPSEEK_TEMPLATE if family == "deepseek_v3" else QWEN_TEMPLATE
    return wrapped


def config_of(family: str, **sizes):
    """Of `sizes`; those of a text of its own where the family has a tower too."""
    from transformers import AutoConfig

    if family not in WITH_VISION:
        return AutoConfig.for_model(family, **sizes)
    tower = {**_VISION, "out_hidden_size": sizes["hidden_size"]}
    tied = sizes["tie_word_embeddings"]
    return AutoConfig.for_model(family, text_config=sizes, vision_config=tower, tie_word_embeddings=tied)


def build(config):
    """A model that is whole: with its tower."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    whole = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    return whole.from_config(config)


def save(model, folder: Path) -> None:
    """As on a hub: Qwen3.5's experts lie in one tensor there, which transformers would take apart."""
    model.save_pretrained(folder)
    if model.config.model_type == "qwen3_5_moe":
        from safetensors.torch import save_file

        tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def make_model(family: str, folder: Path, seed: int = 0, sizes: dict | None = None, **changes) -> Path:
    """A random model of the family in bf16, tiny unless `sizes` are given, as on a hub. -> folder"""
    sizes = {**SIZES, **SPECIAL[family]} if sizes is None else {**sizes}
    words = tokenizer(family, sizes["vocab_size"])
    ids = {"pad_token_id": words.pad_token_id, "bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id}
    config = config_of(sizes.pop("model_type", family), **{**sizes, **ids, **changes})
    model = build(config)
    generator = torch.Generator().manual_seed(seed)
    scale = 1.2 * config.get_text_config().hidden_size ** -0.5
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            # Norms stay near one; matrices are large enough that everything in the model matters.
            parameter.copy_(noise * scale if parameter.dim() > 1 else 1 + noise * 0.1)
    model.generation_config.eos_token_id = words.eos_token_id
    save(model.to(torch.bfloat16), folder)
    words.save_pretrained(folder)
    return folder


def tiny_models(folder: Path) -> Callable[[str], Path]:
    """model(family) -> its folder, made once."""
    made = {}

    def model(family: str) -> Path:
        if family not in made:
            made[family] = make_model(family, folder / family)
        return made[family]

    return model


def make_prompts(folder: Path, count: int = 32) -> Path:
    """Prompts of mixed lengths and a reward that differs between samples, as verl reads them. -> the parquet file"""
    import pandas

    rows = [
        {
            "data_source": "vexact",
            "prompt": [{"role": "user", "content": f"{i} plus {i * i % 7}" + "?" * (i * 5 % 9)}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i + i * i % 7)},
            "extra_info": {"index": i},
        }
        for i in range(count)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame(rows).to_parquet(folder / "prompts.parquet")
    return folder / "prompts.parquet"


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float:
    """verl's reward function: a random model is never right, but some of its answers are further from it."""
    return sum(map(ord, solution_str)) % 17 / 17


def read_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())
