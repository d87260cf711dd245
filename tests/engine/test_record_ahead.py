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
    found, record = [], graphs.HostRecorder.record

    def noted(self, run, *given, **how):
        found.append(run.args)
        return record(self, run, *given, **how)

    monkeypatch.setattr(graphs.HostRecorder, "record", noted)
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


def test_kernels_are_met_at_the_start_and_nothing_runs_between_steps(made, monkeypatch):
    """What times kernels gives padding slots and pages of sequences that run, and no kernel is new to a request."""
    expected, met, meet = outcome(CONFIG), [], Graphs._meet
    every = {*made}
    monkeypatch.setattr(Graphs, "_meet", lambda self, *parts: met.append(parts[:2]) or meet(self, *parts))
    with Engine.from_pretrained(build("Qwen3"), config=LATER) as engine:
        assert {*met} == every
        for name in ("_meet", "_pad", "_tune", "_long"):
            monkeypatch.setattr(Graphs, name, lambda *_, name=name: pytest.fail(name))
        assert [bits(one) for one in engine.generate(PROMPTS, PARAMS)] == expected


def test_what_one_layer_of_each_kind_has_not_settled_is_run_before_it_is_recorded(made, monkeypatch):
    """A recorder says so. Padding, which runs then, stores nothing of sequences that run."""
    expected, record = outcome(CONFIG), graphs.HostRecorder.record
    monkeypatch.setattr(graphs.HostRecorder, "record", lambda *a, if_settled=False: None if if_settled else record(*a))
    assert outcome(LATER) == expected


@pytest.mark.parametrize("kinds", [{"body"}, {"draw"}, {"body", "draw"}])
def test_what_cannot_be_recorded_is_computed_call_by_call(kinds, made, monkeypatch, caplog):
    expected, record = outcome(CONFIG), graphs.HostRecorder.record

    def short(self, run, *given, **how):
        if ("draw" if run.args[0] is None else "body") in kinds:
            raise torch.OutOfMemoryError("no memory is left")
        return record(self, run, *given, **how)

    monkeypatch.setattr(graphs.HostRecorder, "record", short)
    with Engine.from_pretrained(build("Qwen3"), config=LATER) as engine:
        assert [bits(one) for one in engine.generate(PROMPTS, PARAMS)] == expected
        assert "no memory is left" in caplog.text and caplog.text.count("no more than there are") == 1, "tried again"
        caplog.clear()
        monkeypatch.setattr(graphs.HostRecorder, "record", record)
        engine.sleep(1)
        engine.wake_up()
        assert [bits(one) for one in engine.generate(PROMPTS, PARAMS)] == expected and not caplog.text


def test_a_graph_that_was_recorded_to_time_kernels_stays(made, monkeypatch):
    """They share memory, which goes with the last of them: one is there before the next is dropped."""
    expected = outcome(CONFIG)
    monkeypatch.setattr(Graphs, "_tune", lambda self, body, head: [lambda: None] if body.tokens == 4 else [])
    made.clear()
    with Engine.from_pretrained(build("Qwen3"), config=LATER) as engine:
        assert [body.tokens for body, _ in made] == [4]
        assert [bits(one) for one in engine.generate(PROMPTS, PARAMS)] == expected


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
