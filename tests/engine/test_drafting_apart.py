"""What drafts for a model in stages or ranks, in processes of the last stage: no byte of a completion is another, and
it is of the same use as in one process."""

import os
import signal
import threading
from dataclasses import replace

import pytest
from engine_models import build, check_idle
from test_draft_model import LONG, TIGHT
from test_heads import HEADS, heads_of, saved
from test_heads import asked as asked_of_heads
from test_heads import model as model_with_heads
from test_speculation import ALWAYS, ROOMY, asked, model, near, outcome, without

from vexact_engine import Engine, Speculation, StageDied, WeightsTorn

RANKS, BOTH = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}


@pytest.mark.process
def test_a_model_is_updated_and_sleeps_and_dies(tmp_path):
    """It is like the other one, so that it is often right; then that itself, by an update, which is always right."""
    own = model("Llama")
    own.save_pretrained(tmp_path / "own")
    near("Llama").save_pretrained(tmp_path / "draft")
    state = {name: value.clone() for name, value in own.state_dict().items()}
    drafts = {f"draft.{name}": value for name, value in state.items()}
    speculation = replace(ALWAYS, sources=(), draft_model=tmp_path / "draft")
    config = replace(ROOMY, speculation=speculation, **BOTH, **TIGHT)
    with Engine.from_pretrained(tmp_path / "own", device="cpu", config=config) as engine:
        numerics = engine.numerics()

        def ask():
            before = engine.stats.drafted_tokens, engine.stats.accepted_tokens
            threading.Timer(0.1, engine.abort, ["gone"]).start()
            gone = engine.submit(asked("Llama")[0][0], replace(LONG, n=2), request_id="gone", notify=lambda: None)
            done = engine.generate(*zip(*asked("Llama")))
            engine.withdraw(gone)
            expected = [completion for several in without("Llama") for completion in several]
            assert [outcome(c)[:-1] for c in done] == [outcome(c)[:-1] for c in expected]  # of whatever version
            drafted, accepted = engine.stats.drafted_tokens - before[0], engine.stats.accepted_tokens - before[1]
            assert drafted >= sum(c.metrics.drafted_tokens for c in done) > 10
            check_idle(engine)
            return accepted / drafted

        assert 0.1 < ask() < 0.7
        with pytest.raises(ValueError, match="update_weights: missing: draft"):
            engine.update_weights({**state, "draft.model.norm.weight": state["model.norm.weight"]}, numerics=numerics)
        assert engine.update_weights({**state, **drafts}, numerics=numerics) == 1
        assert ask() > 0.8
        engine.sleep(2)
        engine.wake_up(["weights"])
        engine.update_weights(state, numerics=numerics)
        engine.wake_up()
        assert ask() > 0.8
        os.kill(engine._worker.numbers()[2][0], signal.SIGKILL)  # the one that drafts
        with pytest.raises((StageDied, WeightsTorn)):
            engine.generate([[5, 6]], LONG)
        engine.update_weights({**state, **drafts}, numerics=numerics)
        assert ask() > 0.8


@pytest.mark.process
@pytest.mark.parametrize("kind,cut", [("DeepseekV3", RANKS), ("qwen3_5_text", BOTH)], ids=["latent mixture", "hybrid"])
def test_heads_are_cut_as_the_model_is(kind, cut, tmp_path):
    own = model_with_heads(kind)
    path, counts, said = saved(own, tmp_path, heads_of(own)[0]), [], []
    by_heads = {"speculation": HEADS.speculation, "enable_prefix_cache": True}
    for changes in ({}, by_heads | {"async_scheduling": True}, by_heads | cut):
        with Engine.from_pretrained(path, device="cpu", config=replace(ROOMY, **changes)) as engine:
            prompts, params = asked_of_heads(engine.vocab_size)
            for _ in range(2):
                said.append([outcome(c) for c in engine.generate(prompts, params)])
            counts.append((engine.stats.drafted_tokens, engine.stats.accepted_tokens))
            if changes == by_heads | cut:
                state = {name: value.clone() for name, value in own.state_dict().items()}
                other, manifest = heads_of(own, seed=6)[0], engine.manifest()
                other = {name: value.to(manifest.get(name, ((), value.dtype))[1]) for name, value in other.items()}
                assert engine.update_weights({**state, **other}, numerics=engine.numerics()) == 1
                engine.sleep(1)
                engine.wake_up()
                again = [outcome(c)[:-1] for c in engine.generate(prompts, params)]
                assert again == [one[:-1] for one in said[0]]
                check_idle(engine)
    assert all(one == said[0] for one in said)
    assert counts[0] == (0, 0) and counts[2][0] > 50
    if "pipeline_parallel_size" not in cut:  # where plans are others
        assert counts[2] == counts[1]


def test_what_cannot_draft_is_refused_before_a_process_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr("vexact_engine.parallel.placement.Placement.begin", lambda *_: pytest.fail("it was started"))
    build("Llama").save_pretrained(tmp_path / "own")
    build("Llama", vocab_size=161).save_pretrained(tmp_path / "other")

    def said(words, error=ValueError, **fields):
        config = replace(ROOMY, tensor_parallel_size=2, speculation=Speculation(sources=(), **fields))
        with pytest.raises(error, match=words):
            Engine.from_pretrained(tmp_path / "own", device="cpu", config=config)

    said("other has a vocabulary of 161 tokens, expected 160", draft_model=tmp_path / "other")
    said("none': no such file", FileNotFoundError, draft_model=tmp_path / "none")
    said("own holds no heads: expected mtp.fc.weight", mtp=True)
