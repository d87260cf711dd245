"""Graphs that are recorded once a step wants them: the same outcomes, and no more graphs than steps have wanted."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from engine_models import bits, build, prompts

import vexact_ops as vx
from vexact_engine import Engine, EngineConfig, SamplingParams
from vexact_engine.config import Speculation
from vexact_engine.runner import graphs
from vexact_engine.runner.record import Graphs

PROMPTS = prompts(12)
CONFIG = EngineConfig(page_size=4, num_pages=160, max_num_seqs=7, max_num_batched_tokens=23, reserve=0.0)
PARAMS = [
    SamplingParams(
        max_new_tokens=3 + 4 * (i % 4),
        temperature=(0.0, 0.7, 1.0)[i % 3],
        top_k=(0, 0, 7)[i % 3],
        seed=i,
        ignore_eos=True,
    )
    for i in range(len(PROMPTS))
]
LATER = replace(CONFIG, record_ahead=False)


@pytest.fixture
def made(monkeypatch, tmp_path):
    """Sizes are remembered, by an engine that has chosen them; yields what is recorded from then on."""
    monkeypatch.setattr(graphs, "recorder", lambda *_: graphs.HostRecorder())
    monkeypatch.setattr(graphs.HostRecorder, "lasting", True)
    monkeypatch.setattr("vexact_engine.runner.record._PADDING", -2.0)
    monkeypatch.setattr("vexact_engine.runner.record._PADDING_OF_CHUNKS", -2.0)
    monkeypatch.setattr("vexact_engine.runner.record._HIDDEN", 1e9)
    known = {}
    monkeypatch.setattr(vx, "recall", lambda kind, about, device: known.get(about))
    monkeypatch.setattr(vx, "remember", lambda kind, about, device, value: known.update({about: value}))
    found, recorded = [], Graphs._recorded

    def noted(self, body, head, *given, **how):
        found.append((body, head))
        return recorded(self, body, head, *given, **how)

    monkeypatch.setattr(Graphs, "_recorded", noted)
    with Engine.from_pretrained(build("Qwen3"), config=CONFIG):
        assert len(found) > 20
    found.clear()
    return found


def outcome(config, prompts=PROMPTS, params=PARAMS):
    with Engine.from_pretrained(build("Qwen3"), config=config) as engine:
        return [bits(one) for one in engine.generate(prompts, params)]


def test_no_graph_is_recorded_before_a_step_wants_it(made):
    expected = outcome(CONFIG)
    every = len(made)
    made.clear()
    with Engine.from_pretrained(build("Qwen3"), config=LATER) as engine:
        assert made == [], "at the start"
        assert [bits(one) for one in engine.generate(PROMPTS, PARAMS)] == expected
        assert 3 < len(made) == len({*made}) < every
        for _ in range(2):  # a prefix that is known by now makes other steps
            before = len(made)
            assert [bits(one) for one in engine.generate(PROMPTS, PARAMS)] == expected
        assert len(made) == before == len({*made}), "recorded once"


def test_cuts_are_recorded_where_a_request_asks_for_them(made):
    plain = SamplingParams(max_new_tokens=4, temperature=1.0, seed=1, ignore_eos=True)
    with Engine.from_pretrained(build("Qwen3"), config=LATER) as engine:
        engine.generate(PROMPTS[:2], plain)
        assert made and all(head is None or head.plain for _, head in made)
        engine.generate(PROMPTS[:2], replace(plain, top_k=3))
        assert any(head and not head.plain for _, head in made)


def test_padding_between_steps_times_nothing_and_moves_nobody_s_pages(made, monkeypatch):
    """What times kernels gives padding slots and pages of sequences that run."""
    expected = outcome(CONFIG)
    with Engine.from_pretrained(build("Qwen3"), config=LATER) as engine:
        monkeypatch.setattr(Graphs, "_long", lambda *_: pytest.fail("padding has keys"))
        monkeypatch.setattr(Graphs, "_tune", lambda *_: pytest.fail("kernels are timed"))
        assert [bits(one) for one in engine.generate(PROMPTS, PARAMS)] == expected


@pytest.mark.parametrize("kinds", [{"body"}, {"draw"}, {"body", "draw"}])
def test_what_cannot_be_recorded_is_computed_call_by_call(kinds, made, monkeypatch, caplog):
    expected, recorded = outcome(CONFIG), Graphs._recorded

    def short(self, body, head, *given, **how):
        if ("draw" if body is None else "body") in kinds:
            raise torch.OutOfMemoryError("no memory is left")
        return recorded(self, body, head, *given, **how)

    monkeypatch.setattr(Graphs, "_recorded", short)
    with Engine.from_pretrained(build("Qwen3"), config=LATER) as engine:
        assert [bits(one) for one in engine.generate(PROMPTS, PARAMS)] == expected
    assert "no memory is left" in caplog.text


def test_a_draw_may_be_the_first_that_is_wanted(made, monkeypatch):
    expected = outcome(CONFIG)
    with Engine.from_pretrained(build("Qwen3"), config=LATER) as engine:
        made.clear()
        runner = engine._worker._runner
        runner.graphs.mixed, runner.graphs.mixed_few, runner.hidden = graphs.Ladder(), [], None
        assert [bits(one) for one in engine.generate(PROMPTS, PARAMS)] == expected
        assert made[0][0] is None


def test_where_sizes_are_not_known_all_are_recorded_at_the_start(made, monkeypatch):
    monkeypatch.setattr(vx, "recall", lambda *_: None)
    with Engine.from_pretrained(build("Qwen3"), config=LATER) as engine:
        before = len(made)
        assert before > 20
        engine.generate(PROMPTS, PARAMS)
        assert len(made) == before


def test_steps_that_verify_drafts_have_all_graphs_at_the_start(made):
    drafting = replace(LATER, speculation=Speculation(max_draft_tokens=2))
    for _ in range(2):
        made.clear()
        with Engine.from_pretrained(build("Qwen3"), config=drafting) as engine:
            before = len(made)
            assert before > 20
            engine.generate(PROMPTS, PARAMS)
            assert len(made) == before


def test_graphs_are_wanted_anew_after_a_sleep(made):
    with Engine.from_pretrained(build("Qwen3"), config=LATER) as engine:
        expected = [bits(one) for one in engine.generate(PROMPTS, PARAMS)]
        engine.sleep(1)
        made.clear()
        engine.wake_up()
        assert made == []
        assert [bits(one) for one in engine.generate(PROMPTS, PARAMS)] == expected and made


def test_graphs_that_nobody_has_wanted_hold_no_runner(made):
    engine = Engine.from_pretrained(build("Qwen3"), config=LATER)
    gone = weakref.ref(engine._worker._runner.graphs)
    gc.collect()
    gc.disable()
    try:
        engine.close()
        del engine
        assert gone() is None
    finally:
        gc.enable()


def test_a_recipe_records_what_its_steps_want():
    from vexact_engine.recipes.options import Options

    assert not Options().engine_config().record_ahead
