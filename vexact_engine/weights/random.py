"""Models of true dimensions with random weights, made on their device: nothing is fetched."""

import contextlib
import copy
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from .config import auto_class, plain
from .host import available_bytes
from .hub import check_name
from .load import Loaded, as_dtype, load, without_weights
from .partial import Origin, skeleton
from .tokenizer import load_tokenizer

_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "rms_norm_eps": 1e-6,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> dict:
    return _QWEN3 | {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
    }


def _hybrid(kind: str, hidden: int, layers: int, kv_heads: int, **options) -> dict:
    """Three gated delta nets, then full attention with heads of 256 of which a quarter is rotated."""
    delta = {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
    delta |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_key_value_heads": kv_heads}
    sizes |= {"num_attention_heads": 16, "head_dim": 256, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6}
    text = {"vocab_size": 248320, "eos_token_id": 248044, "tie_word_embeddings": False}
    return {"model_type": kind, **delta, **sizes, **text, "rope_parameters": rope, **options}


def _gpt_oss(layers: int, experts: int) -> dict:
    return {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "max_position_embeddings": 131072,  # by YaRN, from 4,096, as the class has it
        "bos_token_id": 199998,
        "eos_token_id": 200002,
        "pad_token_id": 199999,
    }


def _experts(count: int, top_k: int) -> dict:
    sizes = {"num_experts": count, "num_experts_per_tok": top_k, "norm_topk_prob": True}
    return sizes | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}


# What config.json of each says of sizes and options.
CONFIGS = {
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, False),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, False),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, False),
    "llama3-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "qwen3-30b-a3b": _QWEN3
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
    "qwen3.5-9b": _hybrid("qwen3_5_text", 4096, 32, 4, intermediate_size=12288),
    "qwen3.5-35b-a3b": _hybrid("qwen3_5_moe_text", 2048, 40, 2, **_experts(256, 8)),
    "qwen3-next-80b-a3b": _hybrid(
        "qwen3_next", 2048, 48, 2, vocab_size=151936, bos_token_id=151643, eos_token_id=151645, **_experts(512, 10)
    ),
    "moonlight-16b-a3b": {
        "model_type": "deepseek_v3",
        "vocab_size": 163840,
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.446,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 163584,
        "eos_token_id": 163585,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 4096,  # before YaRN stretches it
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "olmoe-1b-7b": {
        "model_type": "olmoe",
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 50279,
        "eos_token_id": 50279,
    },
}


def load_random(
    source: str,
    *,
    dtype: str = "bfloat16",
    device: torch.device | str = "cpu",
    seed: int = 0,
    layers: int | None = None,
    whole: bool = True,
    tokenizer: Any = None,
    trust_remote_code: bool = False,
) -> Loaded:
    """A model of a config's true dimensions with random weights: for configs without weights.

    source   a name of CONFIGS; a directory with config.json (its tokenizer is used where it has one); or a name on the
             Hub
    seed     the weights are a function of it, of the device's kind and of torch's version
    layers   the first so many alone, each of its true size; None: all
    whole    False: for an engine of several stages, which make their own weights: the model has none
    tokenizer, trust_remote_code  as load has them
    raises   FileNotFoundError, or ValueError for a config that transformers does not know, that has fewer layers, or
             whose weights the host's memory has no room for; TypeError on dtype
    """
    kind = as_dtype(dtype, device)
    if source not in CONFIGS:
        check_name(source)
    origin = Origin(source, kind, seed, layers)
    try:
        config = config_of(source, layers)
        if whole and torch.device(device).type == "cpu":
            _check_room(source, config, kind)
        model = _made(config, kind, device, seed) if whole else skeleton(origin)
    except OSError as error:
        raise FileNotFoundError(f"{source}: {' '.join(str(error).split())}") from None
    if tokenizer is not None or os.path.isdir(source):
        tokenizer = load_tokenizer(source, tokenizer, trust_remote_code=trust_remote_code)
    if whole:
        loaded = load(model, device=device, dtype=dtype, tokenizer=tokenizer)
    else:
        loaded = without_weights(model, tokenizer, origin, device)
    cut = "" if layers is None else f" {layers} layer{'s' * (layers != 1)}"
    return replace(loaded, name=f"{source}{cut} (random weights)")


def unfilled(config, dtype: str, device: torch.device | str = "cpu", generation_config=None) -> torch.nn.Module | None:
    """A model of a config for an engine whose weights an update will bring: what stands there until then means nothing.
    None where it has buffers that are part of a checkpoint: those are read from it.
    """

    def made() -> torch.nn.Module:
        own = copy.deepcopy(config)
        return auto_class(own).from_config(
            own, dtype=as_dtype(dtype, device), attn_implementation="eager", trust_remote_code=False
        )

    with torch.device("meta"):
        names = made()
    if names.state_dict().keys() - dict(names.named_parameters(remove_duplicate=False)).keys():
        return None
    with own_generators(device), torch.device(device):
        model = made()
    model.generation_config = generation_config or model.generation_config
    return model


@contextlib.contextmanager
def own_generators(device: torch.device | str, seed: int | None = None) -> Iterator[None]:
    """What is drawn on the host and on this device is nobody else's, and of this seed. Other devices are not touched:
    torch would make a context of its own on each that the process sees."""
    device = torch.device(device)
    cuda = device if device.type == "cuda" else None
    with contextlib.nullcontext() if cuda is None else torch.cuda.device(cuda):
        devices = [] if cuda is None else [torch.cuda.current_device()]
        with torch.random.fork_rng(devices):
            if seed is not None:
                torch.default_generator.manual_seed(seed)
                if cuda is not None:
                    torch.cuda.manual_seed(seed)
            yield


def config_of(source: str, layers: int | None = None):
    """The config of `load_random`."""
    from transformers import AutoConfig

    if source in CONFIGS:
        config = AutoConfig.for_model(**CONFIGS[source])
    else:
        config = plain(AutoConfig.from_pretrained(source, trust_remote_code=False))
    if layers is not None:
        _cut(config, source, layers)
    return config


def _check_room(source: str, config, dtype: torch.dtype) -> None:
    """Too much for the host's memory would end the process without a word, minutes later."""
    from transformers import AutoModelForCausalLM

    with own_generators("cpu"), torch.device("meta"):
        sizes = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, trust_remote_code=False)
    needed, free = sum(p.nbytes for p in sizes.parameters()), available_bytes()
    if needed > free:
        text = f"its weights take {needed / 2**30:.1f} GiB, {free / 2**30:.1f} are free here"
        raise ValueError(f"{source}: layers: {text}: fewer layers fit, or a GPU has room")


def _made(config, dtype: torch.dtype, device: torch.device | str, seed: int) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    with own_generators(device, seed), torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        for name, parameter in model.named_parameters():
            # norms begin at 1 and biases at 0, where a mistake with either cannot show
            if parameter.dim() == 1 or name.endswith("_bias"):
                parameter.data += 0.1 * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # of a router: likewise
                buffer += 0.1 * torch.randn_like(buffer)
    return model


def _cut(config, source: str, layers: int) -> None:
    if not 1 <= layers <= config.num_hidden_layers:
        raise ValueError(f"{source}: layers: got {layers}, expected 1 to {config.num_hidden_layers}")
    for name in ("layer_types", "mlp_layer_types"):  # one entry a layer
        if getattr(config, name, None):
            setattr(config, name, getattr(config, name)[:layers])
    config.num_hidden_layers = layers
