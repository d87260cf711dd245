"""The promise, end to end: how a request is scheduled changes no bit of it, and the trainer computes the same ones."""

import functools
from dataclasses import replace

import pytest
import torch
from conftest import devices
from engine_models import VOCAB, bits, build, check_idle, prompts
from hypothesis import given
from hypothesis import strategies as st

import vexact_ops as vx
from vexact_engine import Engine, EngineConfig, SamplingParams
from vexact_engine.core.scheduler import Scheduler
from vexact_engine.runner import forward
from vexact_engine.runner.runner import Runner
from vexact_ops.testing import with_threads

GPU = torch.cuda.is_available()
MODELS = [
    ("cpu", "Llama", torch.bfloat16),
    ("cpu", "Qwen3", torch.float32),
    ("cpu", "Gemma2", torch.bfloat16),
    ("cuda", "Llama", torch.bfloat16),
    ("cuda", "Qwen3", torch.float16),
    ("cuda", "Gemma2", torch.bfloat16),
]
each_model = pytest.mark.parametrize(
    "device, family, dtype",
    [
        pytest.param(
            *model,
            id="-".join(map(str, model)).replace("torch.", ""),
            marks=pytest.mark.skipif(model[0] == "cuda" and not GPU, reason="no CUDA device is visible to torch"),
        )
        for model in MODELS
    ],
)
each_device = pytest.mark.parametrize("device,dtype", devices(torch.bfloat16))

PROMPTS = prompts(6)
PARAMS = [
    SamplingParams(max_new_tokens=9, temperature=1.0, seed=11, ignore_eos=True),
    SamplingParams(max_new_tokens=14, temperature=0.7, seed=12, ignore_eos=True),
    SamplingParams(max_new_tokens=5, temperature=0.7, top_k=20, seed=13, ignore_eos=True),
    SamplingParams(max_new_tokens=12, temperature=1.3, top_p=0.8, seed=14, ignore_eos=True),
    SamplingParams(max_new_tokens=7, temperature=0.0, seed=15, ignore_eos=True),
    SamplingParams(max_new_tokens=10, temperature=1.0, min_p=0.05, seed=16, ignore_eos=True),
]
ROOMY = EngineConfig(num_pages=64, page_size=16, enable_prefix_cache=False, reserve=0.0, show_progress=False)


def launch(device, family="Llama", dtype=torch.bfloat16, model=None, **options):
    model = build(family, dtype, device=device) if model is None else model
    return Engine.from_pretrained(model, device=device, config=replace(ROOMY, **options))


@functools.cache
def alone(device, family, dtype, kv_segment=None):
    """Every request by itself, its prompt in one piece, nothing reused: what all other ways are compared with."""
    with launch(device, family, dtype, kv_segment=kv_segment) as engine:
        done = [engine.generate([prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS)]
        assert engine.stats.preemptions == engine.stats.prefix_tokens == 0
        assert engine.stats.steps == sum(p.max_new_tokens for p in PARAMS)
        return [bits(completion) for completion in done]


def check_together(device, family, dtype, *, rounds=1, **options):
    """All requests at once in an engine with these options give the bits that each gives alone. Returns its counts."""
    expected = alone(device, family, dtype, options.get("kv_segment"))
    with launch(device, family, dtype, **options) as engine:
        for _ in range(rounds):
            assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == expected
        check_idle(engine)
        return engine.stats


@each_model
def test_chunks_and_batches(device, family, dtype):
    with with_threads(2):
        stats = check_together(device, family, dtype, max_num_batched_tokens=7)
    assert stats.chunks > stats.steps  # several sequences in a step, and prompts in pieces


@each_model
def test_a_warm_prefix_cache(device, family, dtype):
    stats = check_together(device, family, dtype, rounds=2, enable_prefix_cache=True, page_size=3)
    assert stats.prefix_tokens > sum(map(len, PROMPTS)) // 2


@each_model
def test_preemption(device, family, dtype):
    stats = check_together(device, family, dtype, num_pages=22, page_size=3)
    assert stats.preemptions > 0


@each_model
def test_decodes_in_another_order_than_they_came(device, family, dtype, monkeypatch):
    """The longest first, as on a GPU."""
    changed, schedule = [], Scheduler.schedule

    def noted(scheduler, **options):
        plan = schedule(scheduler, **options)
        places = [scheduler.running.index(chunk.sequence) for chunk in plan.chunks] if plan else []
        changed.append(places != sorted(places))
        return plan

    monkeypatch.setattr(Runner, "longest_first", lambda runner: True)
    monkeypatch.setattr(Scheduler, "schedule", noted)
    check_together(device, family, dtype)
    assert any(changed)


@each_device
def test_key_segments(device, dtype):
    segment = 64 if device == "cpu" else 128  # attention's own blocks of keys
    check_together(device, "Llama", dtype, kv_segment=segment, max_num_batched_tokens=9, page_size=5)


@given(
    model=st.sampled_from([model for model in MODELS if GPU or model[0] == "cpu"]),
    page_size=st.sampled_from([1, 2, 5, 16, 33]),
    spare=st.integers(0, 30),
    budget=st.integers(1, 80),
    seqs=st.integers(1, 8),
    cache=st.booleans(),
)
def test_any_schedule(model, page_size, spare, budget, seqs, cache):
    needed = max(-(-(len(p) + q.max_new_tokens) // page_size) for p, q in zip(PROMPTS, PARAMS))
    check_together(
        *model,
        page_size=page_size,
        num_pages=needed + spare,
        max_num_batched_tokens=budget,
        max_num_seqs=seqs,
        enable_prefix_cache=cache,
    )


@each_device
def test_the_check_can_fail(device, dtype, monkeypatch):
    """An engine whose linear layers sum otherwise when there are several rows is caught."""
    dtype = torch.float32 if device == "cpu" else torch.float16  # in bf16 few of these sums survive the rounding
    expected = alone(device, "Qwen3", dtype)
    aligned = vx.linear

    def split_k(x, weight, bias=None, **options):
        if x.shape[0] == 1:
            return aligned(x, weight, bias, **options)
        halves = zip(x.chunk(2, 1), weight.chunk(2, 1))
        return sum(aligned(a.contiguous(), b.contiguous(), **options) for a, b in halves)

    with launch(device, "Qwen3", dtype, enforce_eager=True) as engine:  # graphs keep what they recorded
        assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == expected
        monkeypatch.setattr(vx, "linear", split_k)
        assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] != expected


# Samples and seeds


@each_device
def test_samples_of_one_prompt(device, dtype):
    with launch(device, enable_prefix_cache=True, page_size=4) as engine:
        params = SamplingParams(max_new_tokens=8, n=3, seed=5, ignore_eos=True)
        done = engine.generate(PROMPTS[:2], params)
        assert [(c.prompt_ids, c.index) for c in done] == [(p, i) for p in PROMPTS[:2] for i in range(3)]
        assert len({tuple(c.token_ids) for c in done}) == 6
        assert engine.stats.prefix_tokens >= 2 * (len(PROMPTS[0]) - 4)  # the prompt was computed once
        one = engine.generate([PROMPTS[1]], replace(params, n=1))[0]
        assert bits(one) == bits(done[3])  # the first sample does not depend on how many there are
        assert bits(engine.generate([PROMPTS[0]] * 4, params)[-1]) == bits(done[2])
        check_idle(engine)


def test_a_seed_that_was_drawn_gives_the_tokens_again():
    with Engine.from_pretrained(build("Llama"), config=ROOMY) as engine:
        params = SamplingParams(max_new_tokens=8, ignore_eos=True)
        first, other = engine.generate([PROMPTS[0]] * 2, params)
        assert first.seed != other.seed and first.token_ids != other.token_ids
        again = engine.generate([PROMPTS[0]], replace(params, seed=first.seed))[0]
        assert bits(again) == bits(first)


# The trainer


@each_model
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_trainer_computes_the_same_logprobs(device, family, dtype, temperature):
    params = [replace(p, temperature=temperature) for p in PARAMS]
    tight = {"max_num_batched_tokens": 11, "page_size": 3, "num_pages": 22, "enable_prefix_cache": True}
    with launch(device, family, dtype, **tight) as engine:
        done = engine.generate(PROMPTS, params)
        assert engine.stats.preemptions > 0
    model = build(family, dtype, device=device).train()
    rows = [c.prompt_ids + c.token_ids for c in reversed(done)]
    starts = torch.tensor([0, *map(len, rows)], device=device).cumsum(0).to(torch.int32)
    packed = torch.tensor([token for row in rows for token in row], device=device)
    with vx.patch.hf(model) as handle:
        scaled = handle.logprobs(packed, cu_seqlens=starts, temperature=temperature)
        raw = handle.logprobs(packed, cu_seqlens=starts)
    assert scaled.requires_grad
    scaled.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    for completion, start, end in zip(reversed(done), starts.tolist(), starts.tolist()[1:]):
        first = start + len(completion.prompt_ids) - 1
        for ours, theirs in ((completion.logprobs, scaled), (completion.raw_logprobs, raw)):
            vx.testing.assert_bitwise(torch.tensor(ours), theirs.detach()[first : end - 1].cpu())


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=["bf16", "fp64"])
def test_torch_s_default_dtype_has_no_say(default):
    """It is the process's: a model that is loaded in another thread changes it for a while."""

    def trained():
        with vx.patch.hf(model) as handle:
            values = handle.logprobs(torch.tensor(PROMPTS[0]))
            model.zero_grad()
            values.sum().backward()
        return [values.detach(), *(p.grad for p in model.parameters())]

    model = build("Gemma2")
    expected, before = trained(), torch.get_default_dtype()
    with Engine.from_pretrained(build("Gemma2"), config=ROOMY) as engine:
        try:
            torch.set_default_dtype(default)
            done = engine.generate(PROMPTS, PARAMS)
            vx.testing.assert_bitwise(trained(), expected)
        finally:
            torch.set_default_dtype(before)
    assert [bits(c) for c in done] == alone("cpu", "Gemma2", torch.bfloat16)


@each_device
def test_of_equally_likely_tokens_the_lower_ids_are_told_whatever_others_want(device, dtype):
    model = build("Qwen3", dtype, device=device)
    with torch.no_grad():
        model.lm_head.weight[40:] = model.lm_head.weight[7].clone()  # as rows that nobody has trained
    params = [SamplingParams(max_new_tokens=4, seed=1, num_top_logprobs=count) for count in (30, 100, 3)]
    with launch(device, model=model) as engine:
        (own,) = engine.generate(PROMPTS[:1], params[0])
        both = [engine.generate(PROMPTS[:2], [params[0], other])[0] for other in params[1:]]
        (every,) = engine.generate(PROMPTS[:1], replace(params[0], num_top_logprobs=VOCAB))
    assert [c.top_logprobs for c in both] == [own.top_logprobs] * 2
    for few, top in zip(own.top_logprobs, every.top_logprobs):
        assert list(top) == sorted(range(VOCAB), key=lambda token: (-top[token], token)) and list(few) == list(top)[:30]


@each_device
def test_top_logprobs_are_those_of_the_sampled_tokens(device, dtype):
    with launch(device) as engine:
        params = [replace(p, num_top_logprobs=count) for p, count in zip(PARAMS, (0, 3, 160, 1, 2, 0))]
        done = engine.generate(PROMPTS, params)
        assert [bits(c) for c in done] == alone(device, "Llama", dtype)
    for completion, wanted in zip(done, params):
        if not wanted.num_top_logprobs:
            assert completion.top_logprobs is None
            continue
        assert len(completion.top_logprobs) == len(completion.token_ids)
        for top, token, raw in zip(completion.top_logprobs, completion.token_ids, completion.raw_logprobs):
            values = list(top.values())
            assert len(top) == wanted.num_top_logprobs and values == sorted(values, reverse=True)
            assert top.get(token, raw) == raw <= values[0]
            assert token in top or raw <= values[-1]
    greedy = done[4]
    assert [max(top, key=top.get) for top in greedy.top_logprobs] == greedy.token_ids


# The fused forward


@pytest.mark.parametrize("device,dtype", devices())
@pytest.mark.parametrize(
    "family",
    [
        *("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2", "Phi3", "Qwen3Moe", "Mixtral", "Olmoe"),
        "DeepseekV3",
        "DeepseekV3 latent",
    ],
)
def test_fused_equals_patched(family, device, dtype, monkeypatch):
    options = {"attention_bias": True, "mlp_bias": True} if family == "Llama" else {}
    family, _, latent = family.partition(" ")
    done = {}
    for path in ("fused", "patched: for this test"):
        model = build(family, dtype, device=device, **options)
        if path != "fused":
            monkeypatch.setattr("vexact_engine.runner.forward.fuse", lambda *args: (None, "for this test"))
        settings = {"max_num_batched_tokens": 13, "page_size": 3, "latent_attention": bool(latent)}
        with launch(device, model=model, **settings) as engine:
            assert engine.path == path
            done[path] = [bits(c) for c in engine.generate(PROMPTS, PARAMS)]
    assert len(set(map(str, done.values()))) == 1


@each_device
def test_joined_weights_take_no_second_copy(device, dtype):
    model = build("Qwen3", device=device)
    with launch(device, model=model):
        layer = model.model.layers[0]
        projections = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
        assert len({p.weight.untyped_storage().data_ptr() for p in projections}) == 1
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
        assert sum(storages.values()) == sum(p.nbytes for p in model.parameters())


def misread(monkeypatch, change):
    """The fused forward is made of this instead of what patching found."""
    whole = forward.Decoder

    def made(weights, described, layers):
        changed = tuple(change(layer) for layer in described.layers)
        return whole(weights, replace(described, layers=changed), layers)

    monkeypatch.setattr(forward, "Decoder", made)


def with_part(layer, at, **changes):
    """The layer with another part in its block at this place."""
    blocks = list(layer.blocks)
    blocks[at] = replace(blocks[at], part=replace(blocks[at].part, **changes))
    return replace(layer, blocks=tuple(blocks))


@each_device
def test_a_fused_forward_with_other_bits_is_not_used(device, dtype, monkeypatch, caplog):
    misread(monkeypatch, lambda layer: with_part(layer, 1, activation="silu"))
    with launch(device, "Gemma2") as engine:
        assert engine.path == "patched: its bits are not those of the patched Gemma2ForCausalLM"
        assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == alone(device, "Gemma2", dtype)
    assert "fused forward: not used" in caplog.text


@each_device
def test_a_wrong_window_is_noticed(device, dtype, monkeypatch):
    """The comparison looks behind the window, not at a short prompt alone."""
    misread(monkeypatch, lambda layer: with_part(layer, 0, window=13))
    with launch(device, "Mistral") as engine:
        assert engine.path.startswith("patched: its bits")


@each_device
def test_what_has_no_words_runs_patched(device, dtype):
    model = build("Phi3", device=device)
    kind = type(model.model.layers[0])

    def doubled(self, hidden_states, *args, **kwargs):
        return kind.forward(self, hidden_states, *args, **kwargs) * 2

    for layer in model.model.layers:
        layer.__class__ = type("Doubled", (kind,), {"forward": doubled, "__module__": kind.__module__})
    with launch(device, model=model) as engine:
        assert engine.path.startswith("patched: the embedding: ") and "has no words" in engine.path
        together = engine.generate(PROMPTS, PARAMS)
        assert [bits(c) for c in together] == [
            bits(engine.generate([prompt], params)[0]) for prompt, params in zip(PROMPTS, PARAMS)
        ]


# Log-probabilities of prompts


@each_device
@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
@pytest.mark.parametrize("config", [ROOMY, replace(ROOMY, num_pages=14, page_size=4, max_num_batched_tokens=11)])
def test_prompt_logprobs_are_the_trainers(device, dtype, family, config):
    """In chunks, preempted, of requests that share a beginning, beside others; from a warm cache, too."""
    with launch(device, family) as engine:
        expected = [bits(c) for c in engine.generate(PROMPTS, PARAMS)]
    trainer, rows = build(family, dtype, device=device), []
    with vx.patch.hf(trainer) as handle, torch.no_grad():
        for prompt in PROMPTS:
            values = handle.logprobs(torch.tensor([prompt], device=device))[0, :-1].cpu()
            rows.append(values.view(torch.int32).tolist())
    params = [replace(p, prompt_logprobs=i != 1, n=1 + i % 2) for i, p in enumerate(PARAMS)]
    with Engine.from_pretrained(build(family, dtype, device=device), device=device, config=config) as engine:
        for _ in range(2):
            done = engine.generate(PROMPTS, params)
            check_idle(engine)
            assert [bits(c) for c in done if not c.index] == expected
            for completion in done:
                i = PROMPTS.index(completion.prompt_ids)
                if not params[i].prompt_logprobs:
                    assert completion.prompt_logprobs is None
                    continue
                first, *others = completion.prompt_logprobs
                assert first is None
                assert torch.tensor(others, dtype=torch.float32).view(torch.int32).tolist() == rows[i]


@each_device
@pytest.mark.parametrize("config", [ROOMY, replace(ROOMY, num_pages=14, page_size=4, max_num_batched_tokens=11)])
def test_the_likeliest_tokens_of_a_prompt_are_those_of_its_beginnings(device, dtype, config):
    """Asked for at once they are what a draw behind each beginning comes with; beside others that want fewer."""
    alone = SamplingParams(max_new_tokens=1, num_top_logprobs=5)
    counts = [(i + 2) % 4 for i in range(len(PROMPTS))]
    each = [{"prompt_logprobs": i > 0, "num_prompt_top_logprobs": n * (i > 0)} for i, n in enumerate(counts)]
    counts[0], params = 0, [replace(p, **asked) for p, asked in zip(PARAMS, each)]
    with Engine.from_pretrained(build("Llama", dtype, device=device), device=device, config=config) as engine:
        done = [c for c in engine.generate(PROMPTS, params) if not c.index]
        check_idle(engine)
        for completion, count in zip(done, counts):
            ids = completion.prompt_ids
            if not count:
                assert completion.prompt_top_logprobs is None
                continue
            behind = engine.generate([ids[:end] for end in range(1, len(ids))], alone)
            expected = [dict(list(one.top_logprobs[0].items())[:count]) for one in behind]
            assert completion.prompt_top_logprobs == [None, *expected]
            for token, value, top in zip(ids[1:], completion.prompt_logprobs[1:], completion.prompt_top_logprobs[1:]):
                assert top.get(token, value) == value
    for wrong in ({"num_prompt_top_logprobs": 2}, {"num_prompt_top_logprobs": -1, "prompt_logprobs": True}):
        with pytest.raises(ValueError, match="num_prompt_top_logprobs is"):
            SamplingParams(**wrong)


def test_likeliest_tokens_beyond_the_vocabulary_are_refused():
    with Engine.from_pretrained(build("Llama"), config=ROOMY) as engine:
        params = SamplingParams(max_new_tokens=1, prompt_logprobs=True, num_prompt_top_logprobs=VOCAB + 1)
        (refused,) = engine.generate([[3, 4]], params)
        assert f"num_prompt_top_logprobs is {VOCAB + 1}, expected at most {VOCAB}" in refused.error
        (whole,) = engine.generate([[3, 4]], replace(params, num_prompt_top_logprobs=VOCAB))
        assert len(whole.prompt_top_logprobs[1]) == VOCAB


def test_prompt_logprobs_of_one_that_does_not_begin():
    with Engine.from_pretrained(build("Llama"), config=ROOMY) as engine:
        (refused,) = engine.generate([[VOCAB]], SamplingParams(prompt_logprobs=True))
        assert refused.error and refused.prompt_logprobs == [None]
    with pytest.raises(TypeError, match="prompt_logprobs is 1"):
        SamplingParams(prompt_logprobs=1)
