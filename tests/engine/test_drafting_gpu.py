"""Drafts by a model, by heads and of answers on a GPU, with graphs: no byte of a completion is another without them."""

from dataclasses import replace

import pytest
import torch
from engine_models import build, check_idle, prompts
from test_heads import heads_of, model, saved
from test_speculation import outcome

from vexact_engine import Engine, EngineConfig, SamplingParams, Speculation

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible to torch")
CONFIG = EngineConfig(num_pages=400, max_num_batched_tokens=64, max_num_seqs=8, show_progress=False)
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


def outcomes(engine):
    params = [SamplingParams(max_new_tokens=40, seed=i, ignore_eos=True, n=1 + i % 2, top_k=5 * i) for i in range(4)]
    return [outcome(c)[:-1] for c in engine.generate(prompts(4, longest=60, vocabulary=engine.vocab_size), params)]


def check(engine, expected, least):
    beside, numerics = engine._worker._runner.beside, engine.numerics()
    assert beside.graphs.captured and engine._worker._runner.graphs.captured
    state = {name: value.clone() for name, value in engine.model.state_dict().items()}
    for turn in range(3):
        before = engine.stats.accepted_tokens
        for _ in range(2):  # the second from warm pages
            assert outcomes(engine) == expected
        assert engine.stats.accepted_tokens - before >= least
        check_idle(engine)
        if turn < 2:
            engine.sleep(1 + turn)
            engine.wake_up(["weights"])
            engine.update_weights(state, numerics=numerics)
            engine.wake_up()
            assert beside.graphs.captured


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "call by call"])
@pytest.mark.parametrize("most", [1, 6])
@pytest.mark.parametrize("kind", ["Llama", "Qwen3Moe"])
def test_answers(kind, most, eager):
    """Steps behind drafts are launched while these are verified: for few rows, which are taken one by one, and many."""
    target, config = build(kind, device="cuda", **SIZES), replace(CONFIG, max_num_seqs=20, enforce_eager=eager)
    params = [
        SamplingParams(max_new_tokens=90, seed=i, top_k=5 * (i % 3), stop_token_ids=[i] * (i % 2)) for i in range(20)
    ]
    with Engine.from_pretrained(target, config=config) as engine:
        asked = prompts(20, longest=60, vocabulary=engine.vocab_size)
        answers = engine.generate(asked, params)
    drafts = [[t ^ (at % 4 == i % 5) for at, t in enumerate(one.token_ids)] for i, one in enumerate(answers)]
    params = [replace(own, draft=[draft]) for own, draft in zip(params, drafts)]
    speculation = Speculation(max_draft_tokens=most, always=True, sources=("given",))
    with Engine.from_pretrained(target, config=replace(config, speculation=speculation)) as engine:
        buffers, moved = engine._worker._runner.buffers, []
        settle = buffers._settle
        buffers._settle = lambda *a: (moved.append(a), settle(*a))
        for count in (20, 3, 1):
            done = engine.generate(asked[:count], params[:count])
            assert [outcome(one)[:-1] for one in done] == [outcome(one)[:-1] for one in answers[:count]]
        assert len(moved) > 30
        check_idle(engine)


@pytest.mark.parametrize("always", [True, False])
def test_a_model(always):
    target = build("Llama", device="cuda", **SIZES)
    with Engine.from_pretrained(target, config=CONFIG) as engine:
        expected = outcomes(engine)
    for draft, least in ((build("Llama", device="cuda", **SIZES), 150), (build("Qwen3", seed=1, device="cuda"), 0)):
        speculation = Speculation(max_draft_tokens=5, always=always, sources=(), draft_model=draft)
        with Engine.from_pretrained(target, config=replace(CONFIG, speculation=speculation)) as engine:
            check(engine, expected, least if always else 0)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "glm4_moe"])
def test_heads(kind, tmp_path):
    own = model(kind)
    path = saved(own, tmp_path, heads_of(own)[0])
    with Engine.from_pretrained(path, device="cuda", config=CONFIG) as engine:
        expected = outcomes(engine)
    speculation = Speculation(max_draft_tokens=4, always=True, sources=(), mtp=True)
    with Engine.from_pretrained(path, device="cuda", config=replace(CONFIG, speculation=speculation)) as engine:
        check(engine, expected, 0)
        assert engine.stats.drafted_tokens > 100


@pytest.mark.process
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_heads_with_ranks_and_stages(size, tmp_path):
    own = model("qwen3_5_text")
    path = saved(own, tmp_path, heads_of(own)[0])
    with Engine.from_pretrained(path, device="cuda", config=CONFIG) as engine:
        expected = outcomes(engine)
    speculation = Speculation(max_draft_tokens=4, always=True, sources=(), mtp=True)
    config = replace(CONFIG, speculation=speculation, **{size: 2})
    with Engine.from_pretrained(path, device="cuda", config=config) as engine:
        for _ in range(2):
            assert outcomes(engine) == expected
        assert engine.stats.drafted_tokens > 50
        check_idle(engine)
