"""CUDA graphs of whole steps: the bits of call by call, whatever the sizes; made, given back and made again."""

from dataclasses import replace

import pytest
import torch
from engine_models import bits, build, check_idle, prompts

from vexact_engine import Engine, EngineConfig, SamplingParams
from vexact_engine.runner import graphs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CONFIG = EngineConfig(
    num_pages=128, page_size=16, max_num_seqs=11, max_num_batched_tokens=70, show_progress=False, reserve=0.0
)
PROMPTS = prompts(17, longest=60)
PARAMS = [
    SamplingParams(
        max_new_tokens=5 + 3 * (i % 5),
        temperature=(0.0, 0.7, 1.0, 1.3)[i % 4],
        top_k=(0, 0, 7)[i % 3],
        top_p=(1.0, 0.9)[i % 2],
        min_p=(0.0, 0.0, 0.02)[i % 3],
        seed=i,
        ignore_eos=True,
    )
    for i in range(len(PROMPTS))
]


def launch(config=CONFIG, family="Qwen3", **options):
    return Engine.from_pretrained(build(family, device="cuda", **options), device="cuda", config=config)


def outcomes(engine, params=PARAMS):
    plain = [replace(p, top_k=0, top_p=1.0, min_p=0.0) for p in params]
    done = [bits(c) for each in (params, plain) for c in engine.generate(PROMPTS, each)]
    check_idle(engine)
    return done


def sizes(engine):
    runner = engine._worker._runner
    made = runner.graphs
    ladders = made.decode, made.decode_cut, made.mixed, made.heads, made.heads_cut
    return [ladder.sizes for ladder in (*ladders, *(few for _, few in made.mixed_few))]


@pytest.mark.parametrize(
    "family,options",
    [
        ("Llama", {}),
        ("Qwen3", {"kv_segment": 128}),
        ("Gemma2", {}),
        ("Phi3", {}),
        ("Qwen3Moe", {}),
        ("DeepseekV3", {}),
        ("DeepseekV3", {"latent_attention": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "plain",
)
def test_graphs_have_the_bits_of_call_by_call(family, options, monkeypatch):
    config = replace(CONFIG, **options)
    with launch(replace(config, enforce_eager=True), family) as engine:
        assert engine._worker._runner.graphs.eager == "enforce_eager" and not any(sizes(engine))
        expected = outcomes(engine)
    for name in ("_PADDING", "_PADDING_OF_CHUNKS"):
        monkeypatch.setattr(f"vexact_engine.runner.record.{name}", -1.0)  # every size is split
    with launch(config, family) as engine:
        runner = engine._worker._runner
        assert runner.graphs.eager == "" and all(len(found) > 3 for found in sizes(engine))
        replays = 0
        fit = graphs.Ladder.fit

        def counting(self, rows):
            nonlocal replays
            found = fit(self, rows)
            replays += found is not None
            return found

        monkeypatch.setattr(graphs.Ladder, "fit", counting)
        assert outcomes(engine) == expected
        assert replays > 20
        assert outcomes(engine) == expected  # from a warm prefix cache, other sizes
        with_top = [replace(p, num_top_logprobs=i % 3) for i, p in enumerate(PARAMS)]
        assert outcomes(engine, with_top) == expected
        runner.graphs.release()
        assert not any(sizes(engine))
        assert outcomes(engine) == expected
    tight = replace(config, max_num_seqs=5, max_num_batched_tokens=23, page_size=32, num_pages=9)
    with launch(tight, family) as engine:
        assert outcomes(engine) == expected  # preempted, in other sizes


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe"])
def test_graphs_that_steps_want_are_recorded_between_them(family, monkeypatch, tmp_path):
    monkeypatch.setenv("VEXACT_CACHE", str(tmp_path))
    for name in ("_PADDING", "_PADDING_OF_CHUNKS"):
        monkeypatch.setattr(f"vexact_engine.runner.record.{name}", -1.0)
    recorded, record = [], graphs.CudaRecorder.record
    monkeypatch.setattr(graphs.CudaRecorder, "record", lambda *a, **how: recorded.append(a) or record(*a, **how))
    with launch(family=family) as engine:  # its sizes are remembered
        expected = outcomes(engine)
    later = replace(CONFIG, record_ahead=False)
    for _ in range(2):
        with launch(later, family) as engine:
            begun, ladders = len(recorded), sizes(engine)
            assert outcomes(engine) == expected and 3 < len(recorded) - begun < sum(map(len, ladders))
            engine.sleep(1)
            engine.wake_up()
            begun = len(recorded)
            assert outcomes(engine) == expected and engine._worker._runner.graphs._later
            assert sizes(engine) == ladders
            if engine.sleep_backend != "memory_saver":
                assert len(recorded) > begun


def test_graphs_are_given_back_and_made_again():
    with launch() as engine:
        expected, runner = outcomes(engine), engine._worker._runner
        with torch.cuda.stream(engine._worker.stream):
            engine._loop.call(runner.graphs.release)
            held = torch.cuda.memory_reserved()
            assert outcomes(engine) == expected
            engine._loop.call(runner.graphs.capture)
        assert all(sizes(engine)) and torch.cuda.memory_reserved() >= held
        assert outcomes(engine) == expected


def test_replaced_weights_are_captured_anew():
    other = build("Qwen3", seed=1, device="cuda")
    with Engine.from_pretrained(other, device="cuda", config=CONFIG) as engine:
        expected = outcomes(engine)
        new = {name: value.clone() for name, value in engine.model.state_dict().items()}
    with launch() as engine:
        assert outcomes(engine) != expected
        engine.model.load_state_dict(new, assign=True)
        assert outcomes(engine) == expected
        assert all(sizes(engine))


def test_rows_that_are_no_numbers_index_nothing():
    """Their next token is none, and is computed with all the same while the host does not know yet."""
    with launch() as engine:
        good = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
        expected = outcomes(engine)
        nan = {"model.norm.weight": torch.full_like(good["model.norm.weight"], torch.nan)}
        engine.update_weights(good | nan, numerics=engine.numerics())
        done = engine.generate(PROMPTS, PARAMS)
        assert all("not finite numbers" in c.error for c in done)
        torch.cuda.synchronize()
        engine.update_weights(good, numerics=engine.numerics())
        assert outcomes(engine) == expected


def test_a_forward_that_cannot_be_recorded_is_computed_call_by_call(monkeypatch, caplog):
    from vexact_engine.runner.runner import Runner

    with launch(replace(CONFIG, enforce_eager=True)) as engine:
        expected = outcomes(engine)
    compute = Runner.compute

    def waiting(self, body, **options):
        compute(self, body, **options)
        self.hidden.sum().item()

    monkeypatch.setattr(Runner, "compute", waiting)
    with launch() as engine:
        assert "the forward cannot be recorded" in engine._worker._runner.graphs.eager
        assert "CUDA graphs: none" in caplog.text and not any(sizes(engine))
        assert outcomes(engine) == expected
