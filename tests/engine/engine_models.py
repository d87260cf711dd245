"""Small random models of several families and a byte-level tokenizer. Nothing is fetched."""

import contextlib
import copy
import functools
import threading
import time
from dataclasses import replace
from random import Random

import torch

from vexact_ops.patch import kept_in_fp32

VOCAB = 160


def _config(family: str, **options):
    import transformers

    small = dict(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    experts = {"num_experts_per_tok": 3}
    special = {
        "Llama": {"tie_word_embeddings": True},
        "Qwen2": {},
        "Qwen3": {},
        "Mistral": {"sliding_window": 12},
        "Phi3": {"head_dim": 12},
        "Gemma2": {"sliding_window": 12, "query_pre_attn_scalar": 16, "final_logit_softcapping": 10.0},
        "Qwen3Moe": {**experts, "num_experts": 8, "moe_intermediate_size": 40, "norm_topk_prob": True},
        "Mixtral": {**experts, "num_local_experts": 8, "intermediate_size": 40},
        "Olmoe": {**experts, "num_experts": 8, "intermediate_size": 40, "head_dim": 12},
        "GptOss": {
            **experts,
            "num_local_experts": 8,
            "intermediate_size": 32,
            "hidden_size": 64,  # of MXFP4 as many as a scale has, or more
            "sliding_window": 12,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 8,
            },
        },
        "DeepseekV3": {
            **experts,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "q_lora_rank": 20,
            "kv_lora_rank": 24,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "moe_intermediate_size": 40,
            "n_group": 4,
            "topk_group": 2,
        },
    }
    return getattr(transformers, f"{family}Config")(**{**small, **special[family], **options})


@functools.cache
def _model(family: str, dtype: torch.dtype, seed: int, options: tuple):
    import transformers

    config = _config(family, **dict(options))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        kept = kept_in_fp32(model, dtype)
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Norms stay near one; matrices are large enough that logits are far from uniform.
            parameter.copy_(noise * 0.15 if parameter.dim() > 1 else 1 + noise * 0.1)
            if name not in kept:  # and not model.to(): rotary frequencies stay in fp32, as when loaded
                parameter.data = parameter.data.to(dtype)
    model.generation_config.eos_token_id = config.eos_token_id
    return model


def build(family: str = "Llama", dtype: torch.dtype = torch.bfloat16, seed: int = 0, device: str = "cpu", **options):
    """A model of its own: its weights are a function of the arguments."""
    return copy.deepcopy(_model(family, dtype, seed, tuple(sorted(options.items())))).to(device)


def byte_tokenizer():
    """Ids 3 to 258 are the bytes of UTF-8, so that a character may take four tokens; 0, 1, 2 are special."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {letter: i + 3 for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def fallback_tokenizer():
    """As Llama 2's, Mistral's and Gemma's: a few words, and a token for each byte of what is none of them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    for piece in ("\u2581", "o", "k", "d", "n", "e", "\u2581o", "\u2581ok", "\u2581d", "ne", "\u2581do", "\u2581done"):
        vocabulary[piece] = len(vocabulary)
    merges = [("\u2581", "o"), ("\u2581o", "k"), ("\u2581", "d"), ("n", "e"), ("\u2581d", "o"), ("\u2581do", "ne")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    steps = decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence(list(steps))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def prompts(count: int, longest: int = 40, seed: int = 0, vocabulary: int = VOCAB) -> list[list[int]]:
    """Token ids of mixed lengths, the longest first; every other one begins like the first."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [longest, *torch.randint(1, longest, (count - 1,), generator=generator).tolist()]
    made = [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]
    return [made[0][: len(p) // 2] + p[len(p) // 2 :] if i % 2 else p for i, p in enumerate(made)]


def bits(completion) -> tuple:
    """What must not depend on anything but the request and the weights. Floats from fp32 compare as their bits do."""
    assert completion.error is None, completion.error
    numbers = torch.tensor([completion.logprobs, completion.raw_logprobs], dtype=torch.float32)
    return completion.token_ids, numbers.view(torch.int32).tolist(), completion.finish_reason, completion.text


class Late:
    """A plan in flight whose results are there after some time, whenever that was computed."""

    def __init__(self, pending, seconds):
        self.pending, self.at = pending, time.monotonic() + seconds

    def ready(self):
        return time.monotonic() >= self.at and self.pending.ready()

    def wait(self):
        time.sleep(max(0.0, self.at - time.monotonic()))
        return self.pending.wait()


def make_late(engine, seconds=0.002) -> None:
    """As on a GPU: what a plan has drawn comes some time after its launch, and others are launched before that."""
    assert engine.config.async_scheduling and engine._worker.depth == 2
    launch, random = engine._worker.launch, Random(0)
    engine._worker.launch = lambda plan: Late(launch(plan), random.random() * seconds)


def small_engine(config, overlapped):
    """Its plans are launched one after the other, or ahead, as on a GPU."""
    from vexact_engine import Engine

    engine = Engine.from_pretrained(build("Llama"), config=replace(config, async_scheduling=overlapped))
    if overlapped:
        make_late(engine)
    return engine


def until(condition, seconds=120) -> None:
    """Returns once it holds. The limit is for what never comes: a machine that does other things too may be slow."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not come to that"
        time.sleep(0.001)


@contextlib.contextmanager
def held(engine, step, asked=True):
    """Holds the engine before its n-th step from now until somebody wants something of its thread, or its end (not so
    unless `asked`), or `go` is set: who asks comes in the midst of what runs, however slow. Gives events: reached, go.
    """
    loop, worker, count = engine._loop, engine._worker, iter(range(1, 1 << 30))
    reached, go, launch, own = threading.Event(), threading.Event(), worker.launch, "launch" in vars(worker)

    def gated(plan):
        if next(count) == step:
            reached.set()
            until(lambda: go.is_set() or (asked and (loop._inbox or loop._aborts)) or loop._closing)
        return launch(plan)

    worker.launch = gated
    try:
        yield reached, go
    finally:
        go.set()
        if own:
            worker.launch = launch
        else:
            del worker.launch


def check_idle(engine) -> None:
    """No page is held, lost or in two places, and nobody waits for anything."""
    loop, scheduler = engine._loop, engine._scheduler

    def check():
        scheduler.pool.check()
        assert scheduler.pool.num_available == scheduler.pool.num_pages
        assert len(scheduler._slots) == scheduler._max_running and not loop._pending
        tickets = loop._tickets
        assert not scheduler.has_unfinished and not tickets.running and not tickets.listened
        assert not tickets.named and not tickets.held

    loop.call(check)
