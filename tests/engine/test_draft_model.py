"""A model that drafts: whatever it says, every byte of every completion is the one without it; and it is of use."""

import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_models import build, byte_tokenizer, check_idle, fallback_tokenizer, make_late
from test_speculation import ALWAYS, ROOMY, asked, check, model, near, outcome

from vexact_engine import Engine, EngineConfig, ModelInUse, Replicas, SamplingParams, Speculation, StepFailed
from vexact_engine.core.chains import Chains
from vexact_engine.core.pace import Pace
from vexact_engine.core.pages import PagePool
from vexact_engine.runner import graphs
from vexact_engine.weights.update import Places

sys.path.insert(0, str(Path(__file__).parents[1] / "patch"))
from families import tiny

sys.path.pop(0)
TIGHT = {"num_pages": 60, "max_num_batched_tokens": 7, "max_num_seqs": 3, "enable_prefix_cache": True, "reserve": 0.0}
LONG = SamplingParams(max_new_tokens=41, seed=9, ignore_eos=True, n=2)


def drafting(draft, **changes):
    return replace(ROOMY, speculation=replace(ALWAYS, sources=(), draft_model=draft), **changes)


@pytest.mark.parametrize("kind", ["Llama", "Qwen3Moe", "qwen3_5_text"], ids=["dense", "mixture", "hybrid"])
def test_no_byte_is_another_and_the_model_itself_is_always_right(kind):
    with Engine.from_pretrained(model(kind), config=drafting(near(kind), async_scheduling=True, **TIGHT)) as engine:
        make_late(engine, 0.0005)
        threading.Timer(0.02, engine.abort, ["gone"]).start()
        gone = engine.submit(asked(kind)[0][0], replace(LONG, n=4), request_id="gone", notify=lambda: None)
        check(engine, kind, asked(kind))
        engine.withdraw(gone)
        assert engine.stats.drafted_tokens > engine.stats.accepted_tokens > 10
        check_idle(engine)
    with Engine.from_pretrained(model(kind), config=drafting(model(kind), enable_prefix_cache=True)) as engine:
        done = check(engine, kind, asked(kind))
        assert sum(c.metrics.accepted_tokens for c in done) == engine.stats.accepted_tokens > 150
        count = engine.stats.drafted_tokens, engine.stats.accepted_tokens
        for c in engine.generate([asked(kind)[0][0]], LONG):
            assert (c.metrics.drafted_tokens, c.metrics.accepted_tokens, len(c.token_ids)) == (33, 33, 41)
        assert engine.stats.drafted_tokens - count[0] == engine.stats.accepted_tokens - count[1] == 66
        check_idle(engine)


def test_a_hybrid_drafts_for_a_dense_model_and_texts_come_first():
    draft = tiny("qwen3_5_text", torch.bfloat16)
    target = build("Llama", vocab_size=61)
    prompt = [5, 6, 7, 8]
    with Engine.from_pretrained(target, config=ROOMY) as engine:
        expected = engine.generate([prompt], LONG)
    config = replace(drafting(draft), speculation=replace(ALWAYS, draft_model=draft))
    with Engine.from_pretrained(target, config=config) as engine:
        for draft in ([], [c.token_ids for c in expected]):
            done = engine.generate([prompt], replace(LONG, draft=draft))
            assert [outcome(c) for c in done] == [outcome(c) for c in expected]
        assert all(c.metrics.accepted_tokens == 33 for c in done)


def test_graphs_of_what_drafts(monkeypatch):
    monkeypatch.setattr(graphs, "recorder", lambda *_: graphs.HostRecorder())
    config = drafting(model("Llama"), max_num_seqs=6, max_num_batched_tokens=40)
    with Engine.from_pretrained(model("Llama"), config=config) as engine:
        runner = engine._worker._runner.beside
        assert runner.graphs.captured and not runner.graphs.verify.sizes
        used, fit = [], runner.graphs.decode.fit
        runner.graphs.decode.fit = lambda rows: used.append(rows) or fit(rows)
        check(engine, "Llama", asked("Llama"))
        assert engine.stats.accepted_tokens == 100 and len(used) > 40


def test_what_is_warm_is_warm_for_what_drafts():
    """Pages that are found again hold its keys and values too; and both caches come out of one budget."""
    prompt = list(range(3, 90))
    with Engine.from_pretrained(model("Llama"), config=drafting(model("Llama"), enable_prefix_cache=True)) as engine:
        beside, asked_of = engine._worker._runner.beside, []
        listen(engine, asked_of)
        engine.generate([prompt], replace(LONG, n=1))
        assert asked_of[0] == 88 and set(asked_of[1:]) <= {1, 2}
        asked_of.clear()
        engine.generate([prompt], replace(LONG, n=1))
        assert asked_of[0] == 88 - 84 and engine.stats.accepted_tokens == 66
        assert beside.buffers.caches.keys[0].shape[0] == engine.config.num_pages
    pages = []
    for draft in (None, build("Llama", num_hidden_layers=6)):
        speculation = None if draft is None else replace(ALWAYS, sources=(), draft_model=draft)
        config = replace(ROOMY, num_pages=None, max_model_len=None, speculation=speculation)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("vexact_engine.runner.memory.available_bytes", lambda: 4 << 20)
            with Engine.from_pretrained(model("Llama"), config=config) as engine:
                pages.append(engine.config.num_pages)
    assert pages[1] == pages[0] * 2 // 8


def test_updates_bring_what_drafts_or_leave_it():
    """Names with "draft." before them: all or none. It goes on drafting, and no byte is another."""
    new = build("Llama", seed=1)
    state = {name: value.clone() for name, value in new.state_dict().items()}
    drafts = {f"draft.{name}": value for name, value in state.items()}
    with Engine.from_pretrained(new, config=ROOMY) as engine:
        expected = [outcome(c)[0] for c in engine.generate([[5, 6, 7]], LONG)]

    def accepted(engine):
        before = engine.stats.drafted_tokens, engine.stats.accepted_tokens
        assert [outcome(c)[0] for c in engine.generate([[5, 6, 7]], LONG)] == expected
        return engine.stats.drafted_tokens - before[0], engine.stats.accepted_tokens - before[1]

    with Engine.from_pretrained(model("Llama"), config=drafting(model("Llama"))) as engine:
        numerics = engine.numerics()
        assert engine.manifest().keys() == targets(engine) and "draft.model.norm.weight" in engine.manifest()
        assert engine.update_weights(state, numerics=numerics) == 1
        drafted, right = accepted(engine)
        assert drafted > 10 > right
        with pytest.raises(ValueError, match=r"missing: draft\.lm_head\.weight"):
            engine.update_weights({**state, "draft.model.norm.weight": state["model.norm.weight"]}, numerics=numerics)
        with pytest.raises(ValueError, match="missing"):
            engine.update_weights(drafts, numerics=numerics)
        assert engine.update_weights({**state, **drafts}, numerics=numerics) == 2
        assert accepted(engine) == (66, 66)
        for level in (1, 2):
            engine.sleep(level)
            assert engine.state == "asleep"
            engine.wake_up(["weights"])
            engine.update_weights(state, numerics=numerics, specs={n: (v.shape, v.dtype) for n, v in state.items()})
            engine.wake_up()
            assert accepted(engine) == (66, 66)
        old = {f"draft.{name}": value for name, value in build("Llama").state_dict().items()}
        staged = engine.intake("staged")
        staged.begin(numerics)
        staged.write([*state.items(), *old.items()])
        assert staged.finish() == 5 and accepted(engine)[1] < 10


def listen(engine, counts):
    """Of each step of what drafts how many tokens it computes."""
    asked_of = engine._worker.draft_model
    launch = asked_of._launched
    asked_of._launched = lambda step: counts.append(len(step.token_ids)) or launch(step)


def targets(engine):
    return Places.of(engine.model, engine._draft).targets.keys()


def test_a_step_of_what_drafts_that_fails_ends_requests_and_the_next_are_served():
    with Engine.from_pretrained(model("Llama"), config=drafting(model("Llama"))) as engine:
        asked_of = engine._worker.draft_model
        launch, asked_of._launched = asked_of._launched, lambda step: 1 / 0
        with pytest.raises(StepFailed, match="ZeroDivisionError"):
            engine.generate([[5, 6]], LONG)
        asked_of._launched = launch
        check(engine, "Llama", asked("Llama"))
        check_idle(engine)


def test_what_cannot_draft_is_refused_at_the_start(tmp_path):
    def said(draft, words, kind=ValueError, **load):
        with pytest.raises(kind, match=words):
            Engine.from_pretrained(load.pop("target", None) or model("Llama"), config=drafting(draft), **load)

    said(
        build("Llama", vocab_size=161),
        "Speculation: draft_model: .* has a vocabulary of 161 tokens, expected 160, as Llama",
    )
    said(tmp_path / "none", "none': no such file", FileNotFoundError)
    said(str(tmp_path), "no config.json", FileNotFoundError)
    said(build("Llama", torch.float32), "has torch.float32, expected torch.bfloat16", TypeError)
    own = model("Llama")
    said(own, "got the model that it is to draft for", target=own)
    with Engine.from_pretrained(own, config=ROOMY):
        said(own, "another engine runs this", ModelInUse)
    words = build("Llama", vocab_size=300)
    words.save_pretrained(tmp_path / "words")
    fallback_tokenizer().save_pretrained(tmp_path / "words")
    target = build("Llama", vocab_size=300)
    said(tmp_path / "words", "has another vocabulary than", target=target, tokenizer=byte_tokenizer())
    for tokenizer in (False, fallback_tokenizer()):
        Engine.from_pretrained(target, config=drafting(tmp_path / "words"), tokenizer=tokenizer).close()
    for size in ("pipeline_parallel_size", "tensor_parallel_size"):
        words = f"speculation: draft_model: got a LlamaForCausalLM, expected a path or a name on the Hub with {size} 2"
        with pytest.raises(ValueError, match=words):
            EngineConfig(speculation={"draft_model": own}, **{size: 2})
    with pytest.raises(
        TypeError, match=r"Replicas: config: speculation\.draft_model: got a LlamaForCausalLM, expected a path"
    ):
        Replicas.from_pretrained(tmp_path, replicas=1, device="cpu", config=drafting(own))
    for given, error in ((5, TypeError), ("", ValueError), ([1], TypeError)):
        with pytest.raises(error, match="Speculation: draft_model"):
            Speculation(draft_model=given)
    with pytest.raises(ValueError, match="Speculation: sources"):
        Speculation(sources=())


def chained(chains, chances, sequences):
    return (0, 0) if chains.skips(sequences) else chains._choose(chances, sequences, (0, 0.0), 64)


def test_it_is_asked_where_that_is_faster():
    pace = Pace()
    chains = Chains(None, PagePool(4, 4), pace, 4, False, 64)
    assert chained(chains, [0.9], 1) == (0, 0)  # a step of single tokens first
    for rows in (0, 1, 2, 4):
        for _ in range(2):
            pace.note(1, rows, 1.0)
            pace.note(32, 8 * rows, 1.0 + 0.5 * rows)
    assert chained(chains, [0.9], 1) == (2, 1)  # its own time is not known yet: it is tried
    chains._seconds[1] = 0.2
    assert chained(chains, [0.9], 1) == (4, 1) and chained(chains, [0.3], 1) == (1, 1)
    chains._seconds[1] = 1.0
    assert chained(chains, [0.9], 1) == (0, 0)
    tried = [chained(chains, [0.3] * 32, 32) for _ in range(1280)]
    assert set(tried) == {(0, 0), (2, 8)} and 5 < tried.count((2, 8)) <= 13  # now and then anew, of a few
