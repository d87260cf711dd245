"""Tiny random models of every family, and the ways in which one model may meet the same sequences."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import vexact_ops as vx
from vexact_ops.patch.description import Pages as Memory
from vexact_ops.testing import assert_bitwise

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"sliding_window": 4}
MIXED = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
HYBRID = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
# What the families with an entry here differ in, set so that it shows.
FAMILIES = {
    "llama": {"tie_word_embeddings": True, "attention_bias": True},  # SmolLM2 ties
    "qwen2": {},
    "qwen3": {},
    "mistral": WINDOW,
    "gemma2": {
        **MIXED,
        "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    # further dense families that are made of the same pieces
    "arcee": {},
    "bitnet": {"head_dim": 8},
    "cwm": MIXED,
    "ernie4_5": {},
    "exaone4": MIXED,
    "gemma": {},
    "gemma3_text": {**MIXED, "query_pre_attn_scalar": 12},
    "glm": {},
    "glm4": {},
    "granite": {
        "logits_scaling": 8.0,
        "residual_multiplier": 0.22,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
    },
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {},
    "hyperclovax": {},
    "ministral": MIXED,
    "olmo2": {},
    "olmo3": MIXED,
    "phi3": {**WINDOW, "partial_rotary_factor": 0.5},
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "vaultgemma": {**MIXED, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    # gated delta nets beside attention
    "qwen3_5_text": HYBRID,
    "qwen3_next": {
        **HYBRID,
        "decoder_sparse_step": 2,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    },
    "qwen3_5_moe_text": {
        **HYBRID,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    },
    "olmo_hybrid": {**HYBRID, "head_dim": 8},
    # mixtures of experts
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 3},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3, "head_dim": 8},
    "gpt_oss": {
        **MIXED,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 8,
        },
    },
    "deepseek_v3": {
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "head_dim": 8,  # of the rotary part: what the configuration calls so
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "q_lora_rank": 20,
        "kv_lora_rank": 24,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_group": 4,
        "topk_group": 2,
    },
}
# Settings of families that no model here has otherwise: (family, changes, whether a description has words for it), in
# transformers of today: older releases have other classes of some.
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 3}
SETTINGS = {
    "shared-experts": ("granitemoeshared", {**EXPERTS, "shared_intermediate_size": 20}, True),
    "shared-experts-gelu": (
        "granitemoe_swa",
        {**EXPERTS, "shared_intermediate_size": 20, "hidden_act": "gelu_pytorch_tanh"},
        True,
    ),
    "norms-of-heads": ("cohere", {"use_qk_norm": True}, False),
    "biases": ("ernie4_5", {"use_bias": True}, True),
    "biases-and-the-heads": (
        "ernie4_5_moe",
        {"use_bias": True, "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24},
        True,
    ),
    "bias-of-the-head-untied": ("phi", {"head_dim": 8, "num_key_value_heads": 4, "qk_layernorm": True}, False),
    "swish-qwen3_5_text": ("qwen3_5_text", {"hidden_act": "swish"}, True),
    "swish-qwen3_next": ("qwen3_next", {"hidden_act": "swish"}, True),
    "swish-olmo_hybrid": ("olmo_hybrid", {"hidden_act": "swish"}, True),
    "fp32-routers": ("hunyuan_v1_moe", {"num_experts": 8, "moe_topk": 3}, True),  # in bf16, as its class makes them
    "gelu-with-a-gate": ("llama", {"hidden_act": "gelu"}, True),
    "gelu-of-a-half": ("glm", {"hidden_act": "gelu"}, True),
    "relu-with-a-gate": ("llama", {"hidden_act": "relu"}, True),
    "relu-without-a-gate": ("arcee", {"hidden_act": "relu"}, True),
    "silu-without-a-gate": ("arcee", {"hidden_act": "silu"}, True),
    "swish-without-a-gate": ("starcoder2", {"hidden_act": "swish"}, True),
    "swish-of-gpt2": ("gpt2", {"activation_function": "swish"}, False),
    "silu-before-a-norm": ("bitnet", {"hidden_act": "silu"}, False),
}
# Covered families that no description has words for, so that an engine runs them patched; of why the telling words:
# blocks side by side, a rotation of a part of a head that the module cuts out itself, learned positions, a weight that
# 1 is added to.
NOT_DESCRIBED = {
    **dict.fromkeys(("cohere", "cohere2", "cohere2_moe"), "the embedding: "),
    **dict.fromkeys(("fuyu", "persimmon", "stablelm"), "its attention: cat(rope(slice("),
    **dict.fromkeys(("gpt2", "gpt-sw3", "gpt_bigcode"), "embedding(transformer.wpe.weight"),
    "biogpt": "embedding(biogpt.embed_positions.weight",
    "ctrl": "index(transformer.pos_encoding",
    "phi": "its mixture: linear(attention_varlen(cat(",
    "gpt_neox": "its feed-forward block: attention_varlen(",
    "nemotron": "add(model.norm.weight, 1)",
}
# Sizes that others need.
SMALL = {name: {"head_dim": 8} for name in ("persimmon", "phi", "stablelm")}
NAMED = ["llama", "qwen2", "qwen3", "mistral", "gemma2"]  # those that the library promises by name
MIXTURES = ["qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss"]
HYBRIDS = ["qwen3_5_text", "qwen3_next", "qwen3_5_moe_text", "olmo_hybrid"]
FURTHER = [name for name in FAMILIES if name not in [*NAMED, *MIXTURES, *HYBRIDS]]


def settings(*keys: str):
    """Parameters of these settings, or of all."""
    older = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24)
    marks = [pytest.mark.skip(reason=f"transformers {transformers.__version__} has other classes")] if older else []
    return [pytest.param(*SETTINGS[key], id=key, marks=marks) for key in keys or SETTINGS]


def family(name: str, *marks):
    known = name in CONFIG_MAPPING
    skip = [] if known else [pytest.mark.skip(reason=f"transformers {transformers.__version__} has no {name}")]
    return pytest.param(name, id=name, marks=[*marks, *skip])


def config_of(name: str, **changes):
    cls = CONFIG_MAPPING[name]
    wanted = copy.deepcopy({**SIZES, **FAMILIES.get(name, SMALL.get(name, {})), **changes})  # configs keep lists
    if "text_config" in cls.sub_configs and f"{name}_text" in CONFIG_MAPPING:  # a model of more than text
        config = cls(text_config=config_of(f"{name}_text", **changes).to_dict())
    else:
        config = cls(**wanted)
    for key, value in vars(config).items():
        if ("dropout" in key or key.endswith("pdrop")) and isinstance(value, float):
            setattr(config, key, 0.0)
    return config


def tiny(name: str, dtype=torch.float32, seed: int = 0, device="cpu", **changes):
    """A random model whose weights are large enough for everything in it to matter."""
    # eager: the stock attention that knows every option (transformers 5.5 ran Gemma-2 on one without softcap)
    with torch.random.fork_rng(devices=[]):  # some biases are drawn from the global generator, and added to below
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config_of(name, **changes), attn_implementation="eager")
    model.config._experts_implementation = "eager"  # likewise: the others have no float64
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = torch.randn(parameter.shape, generator=g)
            if name.endswith(("A_log", "sinks")):  # that transformers draws from the global generator
                parameter.copy_(value)
            elif name.endswith("dt_bias"):  # which OLMo Hybrid draws so too
                parameter.fill_(1.0).add_(value * 0.3)
            elif parameter.dim() > 1:
                parameter.copy_(value * 1.5 / parameter.shape[1] ** 0.5)
            else:
                parameter.add_(value * 0.3)
    kept = vx.patch.kept_in_fp32(model, dtype)
    for path, module in model.named_modules():  # keep the frequencies and some routers in fp32, as from_pretrained does
        for key, value in module._buffers.items():
            if value is not None and "inv_freq" not in key:
                module._buffers[key] = value.to(dtype)
        for key, parameter in module._parameters.items():
            if parameter is not None and f"{path}.{key}" not in kept:
                parameter.data = parameter.data.to(dtype)
    return model.eval().to(device)


def with_fp32_routers(model, seed: int = 5):
    """As transformers 5.24 keeps them: fp32 beside 16 bits, with values that those do not hold."""
    model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), "mlp.gate.weight"}
    g = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            value = torch.randn(parameter.shape, generator=g) * 1.5 / parameter.shape[1] ** 0.5
            parameter.data = value.to(parameter.device)
    return model


@torch.no_grad()
def rounded(model, dtype):
    """With values that fit into this dtype, whatever holds them: what FSDP2's mixed precision computes with."""
    for parameter in model.parameters():
        parameter.copy_(parameter.to(dtype))
    return model


def routers(model) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if name.endswith("mlp.gate.weight")}


def sequences(lengths=(7, 1, 11), seed: int = 1, vocabulary: int = 61, device="cpu") -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocabulary, (n,), generator=g).to(device) for n in lengths]


def pad(seqs, side: str, width: int | None = None):
    """ids and mask (B, S); what stands in the padding is arbitrary."""
    width = width or max(len(s) for s in seqs)
    ids = torch.randint(0, 61, (len(seqs), width), generator=torch.Generator().manual_seed(9))
    mask = torch.zeros(len(seqs), width, dtype=torch.int64)
    for i, s in enumerate(seqs):
        where = slice(0, len(s)) if side == "right" else slice(width - len(s), width)
        ids[i, where], mask[i, where] = s.cpu(), 1
    return ids.to(seqs[0].device), mask.to(seqs[0].device)


def pack(seqs):
    ids = torch.cat(seqs)[None]
    cu = torch.tensor([0, *(len(s) for s in seqs)], device=ids.device).cumsum(0).to(torch.int32)
    positions = torch.cat([torch.arange(len(s), device=ids.device) for s in seqs])[None]
    return ids, cu, positions


def alone(model, seqs):
    return [model(s[None], use_cache=False).logits[0] for s in seqs]


def in_padded_batch(model, seqs, side: str):
    ids, mask = pad(seqs, side, max(len(s) for s in seqs) + 2)
    logits = model(ids, attention_mask=mask, use_cache=False).logits
    return [logits[i][mask[i].bool()] for i in range(len(seqs))]


def packed(model, seqs, by: str):
    ids, cu, positions = pack(seqs)
    how = {"position_ids": positions} if by == "positions" else {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu}
    logits = model(ids, use_cache=False, **how).logits[0]
    return list(logits.split([len(s) for s in seqs]))


def in_chunks(model, seqs, seed: int = 0, most: int = 5):
    """Each sequence alone, in chunks of random sizes through transformers' own cache."""
    g = torch.Generator().manual_seed(seed)
    out = []
    for s in seqs:
        cache, logits, at = None, [], 0
        while at < len(s):
            n = int(torch.randint(1, most + 1, (1,), generator=g))
            step = model(s[None, at : at + n], past_key_values=cache, use_cache=True)
            cache, at = step.past_key_values, at + n
            logits.append(step.logits[0])
        out.append(torch.cat(logits))
    return out


def token_by_token(model, seqs):
    """One left-padded batch as generate() runs it: a prefill, then a token of every sequence at a time."""
    ids, mask = pad(seqs, "left")
    width = ids.shape[1]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache, logits, begin = None, [], width // 2  # the shortest sequences have not begun in the prefill
    for end in range(begin, width + 1):
        new = slice(0 if cache is None else end - 1, end)
        how = {"attention_mask": mask[:, :end], "position_ids": positions[:, new]}
        step = model(ids[:, new], past_key_values=cache, use_cache=True, **how)
        cache = step.past_key_values
        logits.append(step.logits)
    logits = torch.cat(logits, 1)
    return [logits[i][mask[i].bool()] for i in range(len(seqs))]


class Pages:
    """A paged cache for a few sequences, its pages in random order."""

    def __init__(self, model, count: int, page_size: int, dtype, seed: int = 0, per_sequence: int = 16):
        self.device, places = model.device, (count * per_sequence + 3, page_size)
        self.k, self.v, self.states = [], [], []

        def new(*shape, dtype=dtype):
            return torch.full(shape, float("nan"), dtype=dtype, device=self.device)

        for memory in model._vexact.memories():
            pages = isinstance(memory, Memory)
            self.k.append(new(*places, memory.heads, memory.k_dim) if pages else None)
            shared = pages and memory.shared
            v = self.k[-1][..., : memory.v_dim] if shared else pages and new(*places, memory.heads, memory.v_dim)
            self.v.append(v if pages else None)
            kept = () if pages else memory.slot()
            self.states.append([new(count, *k.shape, dtype=k.dtype or dtype) for k in kept] or None)
        order = torch.randperm(places[0], generator=torch.Generator().manual_seed(seed))
        self.table = order[: count * per_sequence].view(count, per_sequence)
        self.page_size, self.length = page_size, [0] * count

    def step(self, model, work, **kwargs):
        """work: (sequence, its next tokens); returns one row of logits for every token."""
        ids = torch.cat([tokens for _, tokens in work])
        positions, slots = [], []
        for index, tokens in work:
            p = torch.arange(self.length[index], self.length[index] + len(tokens))
            positions.append(p)
            slots.append(self.table[index][p // self.page_size] * self.page_size + p % self.page_size)
            self.length[index] += len(tokens)
        sizes = torch.tensor([0, *(len(t) for _, t in work)])
        batch = vx.patch.PagedBatch(
            k_caches=self.k,
            v_caches=self.v,
            slot_mapping=torch.cat(slots).to(self.device),
            block_table=torch.stack([self.table[i] for i, _ in work]).to(self.device, torch.int32),
            context_lens=torch.tensor([self.length[i] for i, _ in work], dtype=torch.int32, device=self.device),
            cu_seqlens_q=sizes.cumsum(0).to(self.device, torch.int32),
            max_seqlen_q=int(sizes.max()),
            states=self.states,
            state_slots=torch.tensor([i for i, _ in work], dtype=torch.int32, device=self.device),
            singles=next((i for i, (_, t) in enumerate(work) if len(t) != 1), len(work)),
        )
        positions = torch.cat(positions)[None].to(self.device)
        out = model(ids[None], position_ids=positions, vexact_paged=batch, use_cache=False, **kwargs)
        return out.logits[0]


def paged(model, seqs, page_size: int = 4, seed: int = 0):
    """As an engine: every step takes a chunk of some sequences and a single token of others."""
    g = torch.Generator().manual_seed(seed)
    pages = Pages(model, len(seqs), page_size, model.dtype, seed)
    out = [[] for _ in seqs]
    with torch.no_grad():
        while any(pages.length[i] < len(s) for i, s in enumerate(seqs)):
            work = []
            for i, s in enumerate(seqs):
                n = int(torch.randint(0, 5, (1,), generator=g))
                tokens = s[pages.length[i] : pages.length[i] + n]
                if len(tokens):
                    work.append((i, tokens))
            if work:
                rows = pages.step(model, work).split([len(t) for _, t in work])
                for (i, _), logits in zip(work, rows):
                    out[i].append(logits)
    return [torch.cat(rows) for rows in out]


FORMS = {
    "left padded": lambda m, s: in_padded_batch(m, s, "left"),
    "right padded": lambda m, s: in_padded_batch(m, s, "right"),
    "packed by lengths": lambda m, s: packed(m, s, "lengths"),
    "packed by positions": lambda m, s: packed(m, s, "positions"),
    "in chunks": in_chunks,
    "token by token": token_by_token,
    "paged": paged,
}


def gradients(model, outputs, dy=None):
    """name -> gradient, of every parameter that wants one; their .grad stay as they are."""
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad))
    return dict(zip(names, torch.autograd.grad(outputs, parameters, dy)))


@contextlib.contextmanager
def world(device, rank=0, size=1, store=None):
    """A process group on this device for the length of the block; yields a mesh of all its ranks."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}[device]  # what is offloaded is summed on the CPU
    dist.init_process_group(backend, store=store or dist.HashStore(), rank=rank, world_size=size)
    try:
        yield init_device_mesh(device, (size,))
    finally:
        dist.destroy_process_group()


def check_forms(model, seqs, forms=FORMS):
    """The logits of every sequence have the same bytes alone and in every form. Raises AssertionError naming one."""
    expected = alone(model, seqs)
    for name, form in forms.items():
        assert_bitwise(form(model, seqs), expected, name)
